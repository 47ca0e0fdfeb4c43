"""A target that answers many prompts at once, with the generate() of transformers."""
from collections.abc import Sequence

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from dflash_trainer.devices import compute_dtype
from dflash_trainer.errors import UserError, first_line, require
from dflash_trainer.target import load_model
from dflash_trainer.target_config import load_tokenizer


def load_generator(target: str, device: str, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A target in bf16 on a GPU, in fp32 on a CPU, and its tokenizer. UserError."""
    try:
        place = torch.zeros(1, device=device).device
    except (RuntimeError, AssertionError) as e:
        raise UserError(f"DEVICE = {device}: {first_line(e)} (DEVICE=cpu runs anywhere)") from None
    tokenizer = load_tokenizer(target)
    require(tokenizer is not None and tokenizer.chat_template, f"TARGET = {target}: has no chat template")
    model = load_model(target, device, compute_dtype(place), seed)
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN makes a new plan for every length of an answer
    ends = model.generation_config.eos_token_id
    if not isinstance(ends, list):
        ends = [tokenizer.eos_token_id if ends is None else ends]
    pad = ends[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    # a new one: a target's own may carry penalties or a top-k, which were not asked for
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=pad)
    return model, tokenizer


def generate(model: PreTrainedModel, prompts: Sequence[list[int]], max_new_tokens: int, temperature: float,
             top_p: float) -> list[tuple[list[int], bool]]:
    """Prompts -> (new ids and end of turn, whether it ended by itself) each, in one left-padded batch."""
    config = model.generation_config
    width = max(map(len, prompts))
    padding = [width - len(prompt) for prompt in prompts]
    ids = [[config.pad_token_id] * n + prompt for n, prompt in zip(padding, prompts)]
    mask = [[0] * n + [1] * (width - n) for n in padding]
    sampling = {}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    with torch.no_grad():
        new = model.generate(
            input_ids=torch.tensor(ids, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            max_new_tokens=max_new_tokens, **sampling)
    results = []
    for row in new[:, width:].tolist():
        end = next((i for i, token in enumerate(row) if token in config.eos_token_id), None)
        results.append((row, False) if end is None else (row[:end + 1], True))
    return results
