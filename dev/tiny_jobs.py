"""A random target, data files and settings for training jobs that take seconds on a CPU.

`yardstick.py` and `code_measures.py` share it. It imports nothing of the project, so that both can be pointed
at any other checkout. All that it makes depends on fixed seeds alone.
"""
import json
import random
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

transformers.utils.logging.disable_progress_bar()

VOCAB = 64
PAD, BOS, EOS, UNUSED, TURN_START, USER, ASSISTANT, SYSTEM, FIRST_WORD = range(9)  # token ids; words follow
WORDS = 40                     # words in use: FIRST_WORD .. FIRST_WORD + WORDS - 1
BAD_TOKEN = VOCAB - 2          # used by one conversation of `bad_token_file` alone
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}")
SETTINGS = dict(
    TARGET_DEVICES="cpu", DRAFTER_DEVICES="cpu", SEQ_LEN=64, NUM_ANCHORS=8, BLOCK_SIZE=4, DRAFT_LAYERS=2,
    TARGET_LAYER_IDS="0,2", ROWS_PER_STEP=2, STEPS=6, LR=0.003, LOSS_CHUNK=128, EVAL_EVERY=0, SAVE_EVERY=1000,
    LOG_EVERY=1, STALL_S=90)


def make_target(folder: Path, bad_token: int | None = None) -> Path:
    """Write a random four-layer Llama with its tokenizer. The embedding of `bad_token` is NaN."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=BOS, eos_token_id=EOS,
        pad_token_id=PAD)
    model = LlamaForCausalLM(config).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():  # by hand: transformers' own way of filling them changes
        if weight.dim() > 1:
            weight.normal_(0.0, 0.1, generator=generator)
    if bad_token is not None:
        model.get_input_embeddings().weight[bad_token] = float("nan")
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words split at spaces, a ChatML-like template; token 3 is special and unused: a mask token."""
    words = ["<pad>", "<bos>", "<|im_end|>", "<|unused|>", "<|im_start|>", "user", "assistant", "system"]
    words += [f"w{i}" for i in range(FIRST_WORD, VOCAB - 1)]
    words.append("<unk>")
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", bos_token="<bos>",
        eos_token="<|im_end|>", additional_special_tokens=["<|unused|>", "<|im_start|>"])
    fast.chat_template = TEMPLATE
    return fast


def write_lines(path: Path, lines: list) -> Path:
    """Write JSON values, one a line; a str is written as it is."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def counting(first: int, length: int) -> list[int]:
    """Numbers of words that go up by one and start again after the last."""
    return [FIRST_WORD + (first + i) % WORDS for i in range(length)]


def id_lines(n: int, seed: int) -> list[dict]:
    """n conversations of token ids, each supervised after its first four tokens."""
    rng = random.Random(seed)
    lines = []
    for _ in range(n):
        length = rng.randint(10, 50)
        ids = counting(rng.randrange(WORDS), length)
        lines.append({"input_ids": ids, "loss_mask": [0] * 4 + [1] * (length - 4)})
    return lines


def chat_lines(n: int, seed: int) -> list:
    """n chats of one answer or two, some with a system message, from two sources; some answers were cut off.

    Two lines more cannot be used: a malformed one, and one whose answer is too short to train on.
    """
    rng = random.Random(seed)
    lines = []
    for i in range(n):
        word = rng.randrange(WORDS)
        messages = []
        if i % 4 == 0:
            messages.append({"role": "system", "content": "w8 w9"})
        for _ in range(1 + i % 2):
            for role, length in (("user", rng.randint(2, 4)), ("assistant", rng.randint(4, 9))):
                text = " ".join(f"w{number}" for number in counting(word, length))
                messages.append({"role": role, "content": text})
                word += length
        line = {"messages": messages, "source": "first" if i % 3 else "second"}
        if i % 5 == 0:
            line["finish_reason"] = "length"
        lines.append(line)
    lines.append("{this is not JSON")
    lines.append({"input_ids": counting(0, 6), "loss_mask": [0] * 5 + [1]})
    return lines


def id_file(folder: Path, name: str = "ids.jsonl", n: int = 40, seed: int = 0) -> Path:
    return write_lines(folder / name, id_lines(n, seed))


def chat_file(folder: Path, name: str = "chats.jsonl", n: int = 60, seed: int = 0) -> Path:
    return write_lines(folder / name, chat_lines(n, seed))


def bad_token_file(folder: Path) -> Path:
    """As id_file, but the prompt of one conversation holds BAD_TOKEN. It stands behind those that the trainer
    checks the target with at its start."""
    lines = id_lines(40, seed=0)
    lines[20]["input_ids"][1] = BAD_TOKEN
    return write_lines(folder / "bad_token.jsonl", lines)


def arguments(settings: dict) -> list[str]:
    """Settings -> NAME=VALUE, as the trainer's command line takes them."""
    return [f"{name}={value}" for name, value in settings.items()]
