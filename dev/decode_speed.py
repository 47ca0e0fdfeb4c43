"""Real decoding, batch 1: plain greedy beside speculative with a drafter, both through transformers in eager.

    python dev/decode_speed.py CKPT=<checkpoint> [TARGET=... EVAL_DATA=... TARGET_DEVICES=cuda:0] [N=20]

The first prompt is run once before, unmeasured. Every NAME=VALUE but N is a constant of train_dflash.py.
"""
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch

import train_dflash as td
from dflash_trainer import decoding, settings

N: int = 20    # prompts: the first user turns of EVAL_DATA's first lines


def read_prompts():
    prompts = []
    for line in Path(td.EVAL_DATA).read_text().splitlines()[:N]:
        messages = json.loads(line)["messages"]
        prompts.append(next(m["content"] for m in messages if m["role"] == "user"))
    return prompts


def measure():
    settings.require_positive(sys.modules[__name__], "N")
    model, tokenizer, replica = td.open_checkpoint()
    stop = decoding.prepare_decoding(model, tokenizer)
    prompts = read_prompts()
    seconds = [0.0, 0.0]  # plain, speculative
    tokens = [0, 0]
    passes = 0
    equal = 0
    for i, prompt in enumerate([prompts[0], *prompts]):
        ids = decoding.prompt_ids(td.TARGET, tokenizer, prompt, model.device, td.CHAT_TEMPLATE_KWARGS)
        plain, speculative, produced, took = decoding.decode_both_ways(
            model, replica, ids, stop, td.MAX_NEW_TOKENS, td.TEMPERATURE, td.SEED)
        if i == 0:
            continue
        for way, answer in enumerate((plain, speculative)):
            seconds[way] += took[way]
            tokens[way] += len(answer)
        equal += torch.equal(plain, speculative)
        passes += len(produced)
    plain_rate = tokens[0] / seconds[0]
    rate = tokens[1] / seconds[1]
    card = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "CPU"
    print(f"{card}, torch {torch.__version__}, {model.dtype}: {len(prompts)} prompts, plain greedy "
          f"{plain_rate:.1f} tokens/s, speculative {rate:.1f} tokens/s, {rate / plain_rate:.2f} x; "
          f"{(tokens[1] - len(prompts)) / passes:.3f} tokens per pass; {equal} answers equal")


def main(argv):
    own, for_trainer = settings.split_words(sys.modules[__name__], argv)

    def work():
        with settings.changed(td):
            settings.override(td, for_trainer)
            measure()
    return settings.run_program(sys.modules[__name__], work, own)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
