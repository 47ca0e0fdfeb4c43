"""Does z-lab's client accept as many tokens as the trainer's own count says?

    python tools/compare_client.py CKPT=<checkpoint> TARGET=<dir> DATA=<answers.jsonl> [N=100] [OUT=file]

Decodes with the package `dflash` (0.1.0) and compares, per prompt, the client's ids with plain greedy
decoding in fp32 on the CPU; over all answers that ended by themselves, the client's mean acceptance length
with the tau that `train_dflash.py eval` computes for the same ids. Exit code 1 where either differs.
For drafters of HEAD=dflash and dflash2: the client has no class for DSpark.
"""
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_trainer import settings
from dflash_trainer.errors import require, user_error_on

CKPT: str = ""      # drafter checkpoint
TARGET: str = ""    # its target's directory
DATA: str = ""      # JSONL with `messages`; the first user turn is the prompt
N: int = 100        # prompts
OUT: str = ""       # file for the last line, besides stdout

CLASSES = "DFlashDraftModel", "DFlash2DraftModel"  # of the client, under the names that config.json gives


class Decoded:
    """What the client did with all prompts."""

    def __init__(self):
        self.prompts = 0
        self.unequal = 0     # answers that differ from plain greedy decoding
        self.rows = []       # ids of the answers that ended by themselves, as the trainer reads them
        self.lengths = []    # their acceptance lengths, one per pass


def answers_to_compare():
    """The first N lines of DATA whose answer was not cut at a limit."""
    lines = [json.loads(line) for line in Path(DATA).read_text().splitlines()]
    complete = [line for line in lines if line.get("finish_reason") != "length"]
    return complete[:N]


def client_class():
    """Name of the client's class for CKPT. UserError where CKPT is none that it has."""
    with user_error_on(f"CKPT = {CKPT}: not a drafter checkpoint", OSError, ValueError):
        config = json.loads((Path(CKPT) / "config.json").read_text())
    (name, *_) = config.get("architectures") or ["none"]
    require(name in CLASSES, f"CKPT = {CKPT}: its architecture is {name}, and z-lab's client has "
                             f"{' and '.join(CLASSES)} alone")
    return name


def decode_all():
    how = "pip install --no-deps dflash==0.1.0"
    with user_error_on(f"the package dflash is not installed: {how}", ImportError):
        import dflash.model as client
    client._cuda_time = time.perf_counter  # its own clock needs a GPU
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    drafter = getattr(client, client_class()).from_pretrained(CKPT, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    stop = target.generation_config.eos_token_id
    stop = stop if isinstance(stop, list) else [stop]

    result = Decoded()
    for line in answers_to_compare():
        user, assistant = line["messages"][:2]
        rendered = tokenizer.apply_chat_template(
            [user], add_generation_prompt=True, return_tensors="pt", return_dict=True)
        prompt = rendered["input_ids"]
        n_prompt = prompt.shape[1]
        limit = len(tokenizer(assistant["content"])["input_ids"]) + 1 + drafter.block_size
        with torch.no_grad():
            plain = target.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=limit)
        drafted = client.dflash_generate(drafter, target, prompt, limit, stop, return_stats=True)
        ids = drafted.output_ids[0].tolist()
        result.prompts += 1
        result.unequal += ids != plain[0].tolist()
        if ids[-1] in stop:
            mask = [0] * n_prompt + [1] * (len(ids) - n_prompt)
            result.rows.append({"input_ids": ids, "loss_mask": mask})
            result.lengths.extend(drafted.acceptance_lengths)
        passes = len(drafted.acceptance_lengths)
        print(f"{result.prompts}: {len(plain[0]) - n_prompt} tokens, {passes} passes", flush=True)
    return result


def trainer_tau(rows):
    """tau of CKPT on these rows, by `train_dflash.py eval`."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        command = [
            sys.executable, str(ROOT / "train_dflash.py"), "eval", f"CKPT={CKPT}", f"TARGET={TARGET}",
            f"EVAL_DATA={file.name}", "TARGET_DEVICES=cpu", "SEQ_LEN=512", "NUM_ANCHORS=256"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(printed.splitlines()[-1])["tau"]


def compare():
    for name in ("CKPT", "TARGET", "DATA"):
        require(globals()[name], f"{name} is empty")
    require(Path(DATA).is_file(), f"DATA = {DATA}: no such file")
    settings.require_positive(sys.modules[__name__], "N")
    result = decode_all()
    require(result.lengths, f"DATA = {DATA}: no answer ended by itself, nothing to compare")
    ours = trainer_tau(result.rows)
    theirs = sum(result.lengths) / len(result.lengths)
    text = (f"{result.prompts} prompts, {result.unequal} answers differ from plain greedy; "
            f"{len(result.rows)} ended by themselves: client {theirs:.6f} tokens per pass over "
            f"{len(result.lengths)} passes, the trainer's count on the same ids {ours:.6f}")
    print(text)
    if OUT:
        Path(OUT).write_text(text + "\n")
    return 0 if result.unequal == 0 and abs(ours - theirs) < 1e-6 else 1


def main(argv):
    return settings.run_program(sys.modules[__name__], compare, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
