"""Prompts from nothing: a target continues the bare start of a user's turn, at a temperature of 1.

    python tools/draw_prompts.py TARGET=dir N=50000 OUT=prompts.jsonl DEVICE=cuda:0 BATCH=256

Then: python tools/regenerate.py PROMPTS=prompts.jsonl TARGET=dir. All prompts differ; one that was cut, or
that holds a special token, is not kept. A killed run is resumed by the same command.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tqdm import tqdm

from dflash_trainer import settings
from dflash_trainer.errors import require
from dflash_trainer.line_files import append_line, open_lines

TARGET: str = ""                 # directory or name
N: int = 1000                    # prompts
OUT: str = "prompts.jsonl"       # {"prompt": "..."}
DEVICE: str = "cuda:0"
BATCH: int = 64                  # generated together
SEED: int = 0
MAX_NEW_TOKENS: int = 64         # longer prompts are not kept
TOP_P: float = 0.95
CHAT_TEMPLATE_KWARGS: dict = {}

MOST_BARREN = 20                 # batches in a row without a new prompt
STAND_IN = "STARTSHERE"


def draw():
    require(TARGET, "TARGET is empty: name the model that writes the prompts")
    settings.require_positive(sys.modules[__name__], "N", "BATCH", "MAX_NEW_TOKENS")
    require(0 < TOP_P <= 1, f"TOP_P = {TOP_P}: must be in (0, 1]")
    file, lines = open_lines(OUT, "OUT")
    with file:
        draw_into(file, lines)


def draw_into(file, lines):
    import torch

    from dflash_trainer.answer_mask import ChatTemplate
    from dflash_trainer.generating import generate, load_generator
    model, tokenizer = load_generator(TARGET, DEVICE, SEED)
    template = ChatTemplate(tokenizer, CHAT_TEMPLATE_KWARGS)
    text = template.render([{"role": "user", "content": STAND_IN}], None)
    prefix = tokenizer(text.partition(STAND_IN)[0], add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids)
    seen = {line["prompt"] for line in lines}
    batches = len(lines)  # a resumed run draws other numbers than the killed one began with
    barren = 0
    with tqdm(total=N, initial=len(seen), unit="prompt", disable=None) as bar:
        while len(seen) < N:
            torch.manual_seed(SEED * 1_000_003 + batches)
            batches += 1
            before = len(seen)
            for ids, ended in generate(model, [prefix] * BATCH, MAX_NEW_TOKENS, 1.0, TOP_P):
                said = ids[:-1]
                prompt = tokenizer.decode(said, clean_up_tokenization_spaces=False).strip()
                # one that was cut is half a sentence
                is_usable = ended and prompt and not special.intersection(said) and prompt not in seen
                if is_usable and len(seen) < N:
                    seen.add(prompt)
                    append_line(file, {"prompt": prompt})
            bar.update(len(seen) - before)
            barren = 0 if len(seen) > before else barren + 1
            require(barren < MOST_BARREN,
                    f"N = {N}: {MOST_BARREN} batches in a row without a new prompt, {len(seen)} so far")
    print(f"{OUT}: {len(seen)} prompts")


def main(argv):
    return settings.run_program(sys.modules[__name__], draw, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
