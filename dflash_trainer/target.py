"""The trainer's target: weights of any causal LM that transformers reads, and proofs on them.

    load_model          safetensors files -> one device, no second copy in host memory; or random weights
    check_weights       a missing, misshapen or unknown weight of the language model is an error with its name
    make_head           the output layer as the drafter uses it, with the target's scale and soft cap
    verify_target       hooks and head against the model's own outputs, labels against its argmax
    overhead_in_tokens  fixed cost of one call, in tokens
    report_kernels      which kernels linear-attention layers can use

What is known before the weights are read is in target_config.py.
"""
from __future__ import annotations

import importlib.util
import json
import logging
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import safetensors
import torch
from tqdm import tqdm
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import ModelOutput, cached_file

from dflash_trainer import fp8
from dflash_trainer.errors import require, user_error_on
from dflash_trainer.features import Taps
from dflash_trainer.target_config import load_config, model_path
from dflash_trainer.token_cache import Conversations, render
from model_drafter import DrafterConfig, Head

if TYPE_CHECKING:  # imported for real where a model is loaded: with it comes all that loads models, 1.5 s
    from transformers import PreTrainedModel

# parts of a checkpoint that are not the language model: vision and audio towers, layers for drafting
OTHER_PART = re.compile(r"(^|\.)(visual|(?:embed_)?(?:vision|audio)\w*|multi_modal_projector|mtp)\.")
KERNELS = (  # package, module, and what its absence costs
    ("flash-linear-attention", "fla",
     "the target runs about 1.6 times slower (760 against 464 ms per 4,096 tokens at Qwen3.6-27B size on an "
     "H200)"),
    ("causal-conv1d", "causal_conv1d", "its convolutions run in plain PyTorch"))
OTHER_FORMATS = {  # of quantised checkpoints -> packages that transformers reads them with
    "gptq": "accelerate and gptqmodel",
    "awq": "accelerate and gptqmodel",
    "bitsandbytes": "accelerate and bitsandbytes",
    "compressed-tensors": "accelerate and compressed-tensors",
    "modelopt": "a loader that transformers lacks (NVFP4 and the like, of NVIDIA's modelopt)"}


# -------------------------------------------------------------------------------------------- the weights

def embedding_scale(embedding: torch.nn.Module) -> float:
    """What the embedding module multiplies its table by (Gemma), rounded in its dtype as the client does."""
    scale = getattr(embedding, "embed_scale", None)
    return 1.0 if scale is None else float(torch.as_tensor(scale).to(embedding.weight.dtype))


def load_model(target: str, device: torch.device | str, dtype: torch.dtype, seed: int,
               tick: Callable[[], object] = lambda: None, precision: str = "bf16") -> PreTrainedModel:
    """The whole frozen target on `device`. In the main thread, before any other exists: concurrent
    from_pretrained calls leave meta tensors and a wrong default dtype behind in silence.

    precision "fp8": its layers' linear weights are quantised as they arrive, embedding and head stay `dtype`.
    """
    arrival = Arrival(torch.device(device), precision)
    config = load_config(target)
    if model_path(target) != target:
        torch.manual_seed(seed)
        # Exception: a model class may raise anything on sizes that don't fit each other
        with user_error_on(f"TARGET = {target}: no model can be made of its config", Exception), \
                torch.device(device):
            model = auto_class(target, config).from_config(config, dtype=dtype)
        drop_other_parts(f"TARGET = {target}", model, [name for name, _ in model.named_parameters()])
        require_causal_lm(target, model)
        for i, layer in enumerate(model.get_decoder().layers):
            arrival.layer(layer, i)
    else:
        model = from_files(target, config, device, dtype, tick, arrival)
    if arrival.form:
        layers = model.get_decoder().layers
        size = sum(p.nbytes for p in layers.parameters()) / 2**30
        print(f"TARGET_PRECISION = fp8: {arrival.quantised} linear layers in fp8, products {arrival.form}; "
              f"the target's layers take {size:.2f} GiB; embedding and head are in {dtype}")
    return model.eval().requires_grad_(False)


class Arrival:
    """What happens to a layer's weights when they are on their device: block scales of the file are applied,
    then they are quantised where the target runs in fp8."""

    def __init__(self, device: torch.device, precision: str):
        self.setting = f"TARGET_PRECISION = {precision}"
        self.form = fp8.find_form(device, self.setting) if precision == "fp8" else None
        self.scales = None
        self.quantised = 0
        self.scaled = 0

    def layer(self, layer: torch.nn.Module, i: int) -> None:
        if self.scales:
            self.scaled += self.scales.scale(layer, f"layers.{i}")
        if self.form:
            self.quantised += fp8.quantize_layers(layer, self.form, self.setting, f"layers.{i}")


def quantisation_of(config: PretrainedConfig) -> tuple[str | None, dict]:
    """-> (method, the checkpoint's description of it) or (None, {})."""
    for part in (config, config.get_text_config()):
        if given := getattr(part, "quantization_config", None):
            given = given if isinstance(given, dict) else given.to_dict()
            return str(given["quant_method"]), given
    return None, {}


def from_files(target: str, config: PretrainedConfig, device: torch.device | str, dtype: torch.dtype,
               tick: Callable[[], object], arrival: Arrival) -> PreTrainedModel:
    """transformers maps the files into memory, and a weight is read when its layer moves: the host holds no
    copy, unless the files' dtype is another. FP8 checkpoints with a scale per block are read as if they
    weren't quantised, and scaled layer by layer. transformers' device_map needs accelerate: only weights in
    another format, whose loaders ask for that anyhow and which can't be moved afterwards, go that way."""
    what = f"TARGET = {target}"
    options = {}
    method, description = quantisation_of(config)
    trouble = f"{what}: weights can't be loaded"
    files = stored_tensors(target) if method == "fp8" else {}
    if method:
        what = f"{what} (quantised: {method})"
        needs = OTHER_FORMATS.get(method, "accelerate and the package of that format")
        trouble = (f"{what}: weights can't be loaded: they need {needs}; a bf16 or FP8 checkpoint needs no "
                   "package")
        require(not arrival.form or method == "fp8",
                f"{arrival.setting}: {what}; take its bf16 or FP8 checkpoint")
        options = {"device_map": {"": device}}
    if method == "fp8":
        trouble = f"{what}: weights can't be loaded"
        arrival.scales = block_scales(what, files, description)
        for part in {id(c): c for c in (config, config.get_text_config())}.values():
            if hasattr(part, "quantization_config"):
                del part.quantization_config
        options = {"config": config}
    # Exception: the loaders of some families and formats may raise anything
    with user_error_on(trouble, Exception):
        with scales_are_no_surprise(arrival.scales):
            model, info = auto_class(target, config).from_pretrained(
                target, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **options)
        if arrival.scales:
            unknown = [key for key in info["unexpected_keys"] if not key.endswith(fp8.SCALE_NAME)]
            info = {**info, "unexpected_keys": unknown}
        check_weights(what, model, info)
        drop_other_parts(what, model, files or checkpoint_names(target))
        require_causal_lm(target, model)
        hidden = not sys.stderr.isatty()
        moves = [] if method and not arrival.scales else list(enumerate(model.get_decoder().layers))
        for i, layer in tqdm(moves, f"target to {device}", unit="layer", disable=hidden):
            layer.to(device)
            arrival.layer(layer, i)
            tick()
        if moves:
            model.to(device)
    if arrival.scales:
        arrival.scaled += arrival.scales.scale(model, "")
        arrival.scales.require_all_used(what)
        print(f"{what}: {arrival.scaled} weights multiplied by the scales of their blocks"
              + ("" if arrival.form else f", in {dtype} from here on; TARGET_PRECISION = fp8 keeps fp8"))
    return model


def stored_tensors(target: str) -> dict[str, tuple[str, str]]:
    """{name: (safetensors file, dtype as the file names it)} of a checkpoint."""
    index = cached_file(target, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    names = ["model.safetensors"]
    if index:
        names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
    found = {}
    with user_error_on(f"TARGET = {target}: weights can't be loaded", OSError, safetensors.SafetensorError):
        for name in names:
            path = cached_file(target, name)
            with safetensors.safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118
                    found[key] = (path, file.get_slice(key).get_dtype())
    return found


def block_scales(what: str, files: dict[str, tuple[str, str]], description: dict) -> fp8.BlockScales:
    """The scales of an FP8 checkpoint. UserError where a weight in fp8 has none."""
    ours = {name: entry for name, entry in files.items() if not OTHER_PART.search(name)}
    in_fp8 = [name for name, (_, dtype) in ours.items() if dtype == "F8_E4M3"]
    bare = sorted(name for name in in_fp8 if name + fp8.SCALE_NAME not in ours)
    require(not bare, f"{what}: {len(bare)} weights in fp8 have no scale beside them (NAME{fp8.SCALE_NAME}): "
                      f"{', '.join(bare[:5])}")
    paths = {name: path for name, (path, _) in ours.items()}
    scales = fp8.BlockScales(paths, description.get("weight_block_size"))
    require(scales.where, f"{what}: no weight has a scale beside it (NAME{fp8.SCALE_NAME})")
    return scales


@contextmanager
def scales_are_no_surprise(scales: fp8.BlockScales | None) -> Iterator[None]:
    """transformers warns about each tensor it doesn't know; the scales are read afterwards."""
    loader = logging.getLogger("transformers.modeling_utils")
    level = loader.level
    if scales:
        loader.setLevel(logging.ERROR)
    try:
        yield
    finally:
        loader.setLevel(level)


def auto_class(target: str, config: PretrainedConfig) -> type:
    """transformers' class for a causal LM, or for one that reads images as well."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    require(type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
            f"TARGET = {target}: transformers has no causal language model of model_type "
            f"{config.model_type!r}")
    return AutoModelForImageTextToText


def require_causal_lm(target: str, model: PreTrainedModel) -> None:
    """A decoder with a list of layers, an embedding and an output layer: what the trainer takes hold of."""
    decoder = model.get_decoder()
    name = type(model).__name__
    layers = getattr(decoder, "layers", None)
    require(isinstance(layers, torch.nn.ModuleList),
            f"TARGET = {target}: the decoder of {name} ({type(decoder).__name__}) has no list `layers`: this "
            "family is not supported")
    n = model.config.get_text_config().num_hidden_layers
    require(len(layers) == n, f"TARGET = {target}: {name} has {len(layers)} layers, its config says {n}")
    require(model.get_input_embeddings() is not None and model.get_output_embeddings() is not None,
            f"TARGET = {target}: {name} has no embedding or no output layer")


def drop_other_parts(what: str, model: PreTrainedModel, names: list[str]) -> None:
    """Vision and audio towers go: they feed nothing, and would take memory. names: of the stored weights."""
    for module in (model, model.base_model):
        for name, _ in list(module.named_children()):
            if OTHER_PART.search(f"{name}."):
                setattr(module, name, None)
    others = Counter(found[2] for found in map(OTHER_PART.search, names) if found)
    if others:
        parts = ", ".join(f"{part}.* ({n} weights)" for part, n in others.items())
        print(f"{what}: only the language model is trained on, not {parts}")


def check_weights(what: str, model: PreTrainedModel, info: dict) -> None:
    """Every weight of the language model comes from the files, and none of theirs is left over."""
    faults = {"missing_keys": "missing", "mismatched_keys": "of another shape",
              "unexpected_keys": "not known to this model"}
    for kind, fault in faults.items():
        wrong = sorted(str(key) for key in info.get(kind, ()) if not OTHER_PART.search(str(key)))
        require(not wrong, f"{what}: weights that are {fault}: {len(wrong)}: {', '.join(wrong[:5])}")
    odd = {type(p).__name__ for p in model.parameters()} - {"Parameter"}
    require(not odd, f"{what}: weights of class {', '.join(odd)} can't be copied to other devices")


def checkpoint_names(target: str) -> list[str]:
    """Names of the weights in the safetensors files."""
    for name in ("model.safetensors.index.json", "model.safetensors"):
        path = cached_file(target, name, _raise_exceptions_for_missing_entries=False)
        if path and name.endswith("json"):
            return list(json.loads(Path(path).read_text())["weight_map"])
        if path:
            with safetensors.safe_open(path, "pt") as file:
                return list(file.keys())
    return []


# --------------------------------------------------------------------------------------------- the head


def forward_whole(model: PreTrainedModel, ids: torch.Tensor) -> ModelOutput:
    """ids (1, T) -> logits and hidden states of every layer."""
    name = model.config.name_or_path or type(model).__name__
    # Exception: a family whose forward wants more than token ids may fail in any way
    with user_error_on(f"TARGET = {name}: its forward fails on token ids alone", Exception):
        return model(ids, output_hidden_states=True, use_cache=False)


def make_head(model: PreTrainedModel) -> Head:
    """The target's output layer with its soft cap and the factor on its logits, if it has these."""
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    linear = model.get_output_embeddings()
    return Head(linear, softcap, logit_scale(model, linear, softcap))


@torch.no_grad()
def logit_scale(model: PreTrainedModel, linear: torch.nn.Module, softcap: float | None) -> float:
    """The factor that some families put on their logits (Granite divides by it, Cohere multiplies, others
    call it yet otherwise): measured, then taken exactly from the config's numbers where one is meant."""
    n = min(8, model.config.get_text_config().vocab_size)
    out = forward_whole(model, torch.arange(n, device=model.device)[None])
    plain = linear(out.hidden_states[-1]).double()
    logits = out.logits.double()
    if plain.shape != logits.shape:
        return 1.0  # several streams of hidden states: verify_target says so
    usable = plain.isfinite() & logits.isfinite()
    if softcap is not None:
        usable &= logits.abs() < 0.9 * softcap
        logits = softcap * torch.atanh((logits / softcap).clamp(-0.99, 0.99))
    plain = plain[usable]
    measured = float((plain * logits[usable]).sum() / plain.square().sum().clamp(min=1e-30))
    candidates = [1.0]
    for value in model.config.get_text_config().to_dict().values():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            candidates += [value, 1 / value]
    for candidate in candidates:
        if abs(measured / candidate - 1) < 0.01:  # far from bf16's rounding, which averages out
            return float(candidate)
    return 1.0  # whatever it is, it is no factor that the config names; verify_target compares the logits


# ------------------------------------------------------------------------------------------- the proof

N_PROVED = 8         # conversations
PROVED_TOKENS = 4096  # of each, from its beginning: of 32,768 the 27B's hidden states and logits take 38 GiB
LOGITS_COMPARED = 512  # tokens at a time, in fp32
ENOUGH_LABELS = 400  # for a CPU, which needs a second for every 300 of a small target


@torch.no_grad()
def verify_target(target: str, model: PreTrainedModel, config: DrafterConfig, conversations: Conversations,
                  tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Start-up proof on a few real conversations, with the whole first replica: hidden states are finite,
    hooks give what transformers says, the head gives the model's logits, labels are what the model would say.

    UserError where one of the first three doesn't hold.
    """
    tap_ids = list(config.target_layer_ids)
    taps = Taps(model.get_decoder().layers, tap_ids)
    head = make_head(model)
    n = min(N_PROVED, len(conversations))
    not_finite = {}  # number of a conversation -> where it begins
    agreeing = 0
    n_labels = 0
    for number in range(n):
        conversation = conversations[number]
        ids = torch.from_numpy(conversation.ids[:PROVED_TOKENS].astype(np.int64))[None].to(model.device)
        turn = conversation.turn[:PROVED_TOKENS]
        out = forward_whole(model, ids)
        tapped = taps.collect()
        where = first_not_finite(out)
        if where:
            not_finite[number] = where
            continue
        require_same_taps(target, tapped, out.hidden_states, tap_ids)
        require_same_logits(target, head, out)
        supervised = torch.from_numpy(turn[1:] > 0).to(model.device)
        is_argmax = out.logits[0, :-1].argmax(-1) == ids[0, 1:]
        agreeing += int((is_argmax & supervised).sum())
        n_labels += int(supervised.sum())
        if model.device.type == "cpu" and n_labels >= ENOUGH_LABELS:
            n = number + 1
            break
    taps.remove()

    require(len(not_finite) < n, f"TARGET = {target}: its hidden states are not finite (NaN or inf) from "
                                 f"{not_finite.get(0)} on, in each of the {n} conversations looked at")
    for number, where in not_finite.items():
        print(f"WARNING: TARGET = {target}: hidden states of conversation {number} are not finite (NaN or "
              f"inf) from {where} on; steps with it will be skipped")
    share = agreeing / n_labels if n_labels else 1.0
    labels = (f"{share:.3f} of {n_labels} labels equal the target's argmax" if n_labels else
              f"no label stands in the first {PROVED_TOKENS} tokens of the {n} conversations looked at")
    print(f"proof: taps {tap_ids} equal output_hidden_states; the head reproduces the logits;")
    print(f"       {labels}")
    if share < 0.8:
        print(f"WARNING: only {100 * share:.0f} % of the labels match the target's own choice (80 % or more "
              "when the answers are its own): expect a lower acceptance. tools/regenerate.py makes the "
              "target's own answers")
    if tokenizer is not None:
        text = render(conversations[0], tokenizer)
        print("first conversation, supervised tokens between ⟦ ⟧:")
        print(for_screen(text))


def for_screen(text: str, n_lines: int = 8, width: int = 90) -> str:
    """The beginning of a text, wrapped; `inspect` shows whole ones."""
    lines = []
    for paragraph in text.splitlines():
        lines += textwrap.wrap(paragraph, width) or [""]
    more = ["..."] if len(lines) > n_lines else []
    return "\n".join(f"  {line}" for line in lines[:n_lines] + more)


def first_not_finite(out: ModelOutput) -> str | None:
    """Where NaN or inf first stands in a forward's outputs, in words."""
    last = len(out.hidden_states) - 1  # its entry is after the final norm
    for i, hidden in enumerate(out.hidden_states):
        if not hidden.isfinite().all():
            if i == 0:
                return "the embeddings"
            return f"layer {i - 1}" if i < last else f"layer {i - 1} (or the final norm behind it)"
    return None if out.logits.isfinite().all() else "the logits"


def require_same_taps(target: str, tapped: torch.Tensor, hidden_states: tuple, tap_ids: list[int]) -> None:
    expected = [hidden_states[i + 1] for i in tap_ids]
    shape = tuple(hidden_states[0].shape)
    for hidden in expected:
        require(hidden.dim() == 3 and tuple(hidden.shape) == shape,
                f"TARGET = {target}: its layers give hidden states of shape {tuple(hidden.shape)}, not one "
                "stream (1, T, D): a drafter can't be trained on these")
    require(torch.equal(tapped, torch.cat(expected, -1)),
            f"TARGET = {target}: hooks on layers {tap_ids} don't give output_hidden_states[i + 1]")


def require_same_logits(target: str, head: Head, out: ModelOutput) -> None:
    off = 0.0
    largest = 0.0
    last_hidden = out.hidden_states[-1]
    chunks = zip(last_hidden.split(LOGITS_COMPARED, 1), out.logits.split(LOGITS_COMPARED, 1), strict=True)
    for hidden, logits in chunks:
        theirs = logits.float()
        off = max(off, (head(hidden).float() - theirs).abs().max().item())
        largest = max(largest, theirs.abs().max().item())
    require(off <= 0.05 * largest,
            f"TARGET = {target}: its logits are not its head times the last hidden states: off by {off:.3g}, "
            f"the largest is {largest:.3g}")


# ------------------------------------------------------------------------------------------------ speed


def report_kernels(decoder: torch.nn.Module) -> None:
    """One line for targets with linear-attention layers."""
    if "linear_attention" not in (getattr(decoder.config, "layer_types", None) or ()):
        return
    words = []
    for name, module, cost in KERNELS:
        installed = importlib.util.find_spec(module) is not None
        words.append(f"{name} is installed" if installed else f"{name} is not installed: {cost}")
    print(f"linear-attention layers: {'; '.join(words)}")


def overhead_in_tokens(decoder: torch.nn.Module) -> float:
    """Fixed cost of one call, expressed as the number of tokens that take as long: 0.1 ms a layer, in which
    its kernels do next to nothing (measured in a CUDA graph on an H200), at a guess of the device's speed."""
    n_weights = sum(p.numel() for p in decoder.layers.parameters())
    flop_per_s = 1e14 if next(decoder.parameters()).is_cuda else 1e11
    flop_per_token = 2 * n_weights
    return len(decoder.layers) * 1e-4 * flop_per_s / flop_per_token
