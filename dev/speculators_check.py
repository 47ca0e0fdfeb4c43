"""Does DSpark's loss, with its gradients and metrics, equal that of speculators 0.9 on the same tensors?

    python dev/speculators_check.py [NAME=VALUE ...]     in a venv with speculators 0.9 (transformers <= 5.19)

Random hidden states of blocks, a random target, and this project's markov_loss() in both of its forms beside
speculators' models.dspark.metrics.compute_metrics() with its eager losses. Exit code 1 beyond TOLERANCE.

Where the two differ on purpose, the data leave no difference: labels are the target's argmax (speculators
takes these, this project the data's token), and D-PACE runs with cross-entropy alone (speculators weighs each
term by its own exp(-term), and confidence always by decay; this project has one weight a slot).
"""
import importlib.metadata
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch

import model_drafter as md
from dflash_trainer import settings

SEEDS: int = 5
TOLERANCE: float = 2e-5      # of a relative difference, in fp32
OUT: str = ""                # file for the log as well

N_BLOCKS, BLOCK_SIZE, VOCAB, HIDDEN, RANK = 24, 7, 97, 32, 8
GAMMA = 4.0
CONFIG = md.DrafterConfig(
    hidden_size=HIDDEN, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
    vocab_size=VOCAB, block_size=BLOCK_SIZE, mask_token_id=0, target_layer_ids=(0,), num_target_layers=2,
    layer_types=("full_attention",), head="dspark", markov_rank=RANK, confidence=True)


class Case:
    """Random blocks with a prefix of counting slots each, and the modules of a head."""

    def __init__(self, seed: int):
        torch.manual_seed(seed)
        self.counted = torch.randint(0, BLOCK_SIZE + 1, (N_BLOCKS,))
        self.target_last = torch.randn(N_BLOCKS * BLOCK_SIZE, HIDDEN)
        noise = torch.randn(N_BLOCKS * BLOCK_SIZE, HIDDEN)
        self.hidden = (self.target_last + 0.5 * noise).requires_grad_()  # a drafter that is often right
        self.predecessors = torch.randint(0, VOCAB, (N_BLOCKS * BLOCK_SIZE,))
        self.head = md.Head(torch.nn.Linear(HIDDEN, VOCAB, bias=False)).requires_grad_(False)
        self.head.linear.weight.mul_(4)  # distributions that are not flat
        markov = md.MarkovHead(CONFIG)
        self.drafter = SimpleNamespace(markov_head=markov, confidence_head=md.ConfidenceHead(CONFIG))
        slot = torch.arange(BLOCK_SIZE)
        self.counts = slot < self.counted[:, None]  # (N, K)
        self.targets = self.head(self.target_last).detach()
        self.labels = self.targets.argmax(-1)

    def params(self) -> list[torch.Tensor]:
        modules = self.drafter.markov_head, self.drafter.confidence_head
        return [self.hidden, *(param for module in modules for param in module.parameters())]

    def take_grads(self) -> list[torch.Tensor]:
        grads = []
        for param in self.params():
            grads.append(torch.zeros_like(param) if param.grad is None else param.grad.clone())
            param.grad = None
        return grads

    def ours(self, kind: str, form: str, terms: md.LossTerms, confidence: float):
        """-> (mean loss, {metric: value}, gradients) of markov_loss()."""
        counting = self.counts.flatten().nonzero()[:, 0]
        spec = md.LossSpec(kind, GAMMA, form, chunk=len(counting), terms=terms, confidence=confidence)
        blocks = md.Blocks(counting, self.counted, CONFIG, spec)
        inputs = md.SlotInputs(self.hidden[counting], self.labels[counting], self.predecessors[counting],
                               self.target_last[counting])
        result = md.markov_loss(self.drafter, self.head, inputs, blocks, spec, None)
        loss = result.loss / len(counting)
        loss.backward()
        valid = self.counted > 0
        found = {
            "accepted length": (1 + result.matches[valid]).sum(),
            "expected length": result.expected_len[valid].sum(),
            "total variation": result.tv / len(counting),
        }
        for slot in range(BLOCK_SIZE):
            found[f"right in slot {slot}"] = result.correct[:, slot].sum()
        if confidence:
            found["confidence error"] = result.confidence_error.sum()
        return loss.detach(), found, self.take_grads()

    def theirs(self, kind: str, terms: md.LossTerms, confidence: float):
        """The same of compute_metrics(), on the logits of all slots."""
        from speculators.losses import eager
        from speculators.models.dspark.metrics import compute_metrics
        embedded = self.drafter.markov_head.markov_w1(self.predecessors)
        logits = self.head(self.hidden) + self.drafter.markov_head.markov_w2(embedded)
        confidence_logits = None
        if confidence:
            confidence_logits = self.drafter.confidence_head(self.hidden, embedded)[None]
        functions = {"ce": eager.ce_loss, "tv": eager.tv_loss}
        config = {name: (function, getattr(terms, name)) for name, function in functions.items()
                  if getattr(terms, name)}
        loss, metrics = compute_metrics(
            logits[None], self.targets[None], confidence_logits, self.counts.view(1, -1).float(), BLOCK_SIZE,
            config, tv_loss_fn=eager.tv_loss, gamma=GAMMA, confidence_head_alpha=confidence,
            per_position_loss_weight="dpace" if kind == "dpace" else "fixed-exp-decay")
        loss.backward()
        found = {"accepted length": metrics["eal_sum"], "expected length": metrics["accept_len_sum"]}
        if "tv_loss_sum" in metrics:
            found["total variation"] = metrics["tv_loss_sum"]
        for slot in range(BLOCK_SIZE):
            found[f"right in slot {slot}"] = metrics[f"position_{slot}_acc_sum"]
        if confidence:
            found["confidence error"] = metrics["confidence_abs_error_sum"]
        return loss.detach(), found, self.take_grads()


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    size = wanted.double().norm().clamp(min=1e-12)
    return ((found.double() - wanted.double()).norm() / size).item()


def check() -> int:
    cases = [  # kind, terms, coefficient of the confidence
        ("decay", md.LossTerms(ce=0.1, tv=1.8), 1.0),
        ("decay", md.LossTerms(ce=1.0), 0.0),
        ("dpace", md.LossTerms(ce=1.0), 0.0),
    ]
    version = importlib.metadata.version("speculators")
    lines = [f"speculators {version}, torch {torch.__version__}: {SEEDS} seeds of {N_BLOCKS} blocks of "
             f"{BLOCK_SIZE} slots; largest relative difference"]
    worst_of_all = 0.0
    lengths = []
    for kind, terms, confidence in cases:
        for form in ("checkpoint", "fused"):
            worst = {}
            for seed in range(SEEDS):
                case = Case(seed)
                loss, found, grads = case.ours(kind, form, terms, confidence)
                their_loss, wanted, their_grads = case.theirs(kind, terms, confidence)
                lengths.append((found["accepted length"] / (case.counted > 0).sum()).item())
                differences = {"loss": relative(loss, their_loss)}
                for name in wanted:
                    short = "right by slot" if name.startswith("right") else name
                    off = relative(found[name].float(), wanted[name].float())
                    differences[short] = max(off, differences.get(short, 0.0))
                for grad, their_grad in zip(grads, their_grads, strict=True):
                    off = relative(grad, their_grad)
                    differences["gradients"] = max(off, differences.get("gradients", 0.0))
                for name, off in differences.items():
                    worst[name] = max(off, worst.get(name, 0.0))
            worst_of_all = max(worst_of_all, *worst.values())
            what = ", ".join(f"{name} {off:.1e}" for name, off in worst.items())
            settings_of_case = f"{kind}, ce {terms.ce:g}, tv {terms.tv:g}, confidence {confidence:g}, {form}"
            lines.append(f"{settings_of_case}: {what}")
    equal = worst_of_all <= TOLERANCE
    verdict = "EQUAL" if equal else "DIFFERENT"
    lines.append(f"verdict: {verdict}, up to {worst_of_all:.1e} (TOLERANCE {TOLERANCE:g}); accepted lengths "
                 f"are {min(lengths):.2f} to {max(lengths):.2f} tokens")
    print("\n".join(lines))
    if OUT:
        Path(OUT).write_text("\n".join(lines) + "\n")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(settings.run_program(sys.modules[__name__], check, sys.argv[1:]))
