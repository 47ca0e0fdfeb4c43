"""Real decoding, batch 1: plain greedy beside speculative with a drafter, both through transformers in eager.

    python dev/decode_speed.py CKPT=<checkpoint> [TARGET=... EVAL_DATA=... TARGET_DEVICES=cuda:0] [N=20]

The first prompt is run once before, unmeasured. NAME=VALUE: constants of train_dflash.py.
"""
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dflash_trainer import errors  # noqa: E402
from dflash_trainer import settings  # noqa: E402
import train_dflash as td  # noqa: E402


def prompts(path, n):
    """First user turns of the first n lines of a JSONL file with `messages`."""
    lines = Path(path).read_text().splitlines()[:n]
    return [next(m["content"] for m in json.loads(line)["messages"] if m["role"] == "user") for line in lines]


def main(words):
    n = next((int(w[2:]) for w in words if w.startswith("N=")), 20)
    settings.override(td, [w for w in words if not w.startswith("N=")])
    model, tokenizer, w = td.open_checkpoint()
    stop = td.decoding.prepare_decoding(model, tokenizer)
    seconds, tokens, passes, equal, texts = [0.0, 0.0], [0, 0], 0, 0, prompts(td.EVAL_DATA, n)
    for i, text in enumerate([texts[0], *texts]):
        ids = td.decoding.prompt_ids(
            td.TARGET, tokenizer, text, model.device, td.CHAT_TEMPLATE_KWARGS)
        plain, answer, produced, took = td.decoding.decode_both_ways(
            model, w, ids, stop, td.MAX_NEW_TOKENS, td.TEMPERATURE, td.SEED)
        if i == 0:
            continue
        for which, ids in enumerate((plain, answer)):
            seconds[which] += took[which]
            tokens[which] += len(ids)
        equal, passes = equal + torch.equal(plain, answer), passes + len(produced)
    rates = [k / s for k, s in zip(tokens, seconds)]
    card = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "CPU"
    print(f"{card}, torch {torch.__version__}, {model.dtype}: {n} prompts, plain greedy {rates[0]:.1f} "
          f"tokens/s, speculative {rates[1]:.1f} tokens/s, {rates[1] / rates[0]:.2f} x; "
          f"{(tokens[1] - n) / passes:.3f} tokens a pass; {equal} answers equal")
    return 0


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.exit(print(__doc__))
    try:
        sys.exit(main(sys.argv[1:]))
    except errors.UserError as e:
        sys.exit(f"error: {e}")
