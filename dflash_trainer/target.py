"""The trainer's target: config, tokenizer and weights of any causal LM that transformers reads.

    drafter_config  sizes of a drafter for it, its taps and its mask token, from its config alone
    load_model      safetensors files -> one device, no second copy in host memory; or random weights in place
    check_weights   a missing, misshapen or unknown weight of the language model is an error with its name
    prove           hooks and head against the model's own outputs, labels against its argmax
    call_tokens     what a call costs beside its tokens
    fast_path       says whether linear-attention layers run on the kernels made for them

A target is a hub id, a directory, or random:DIR: the config in DIR, weights made on the device from a seed.
"""
import importlib.util
import inspect
import json
import logging
import re
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import safetensors
import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import cached_file

from dflash_trainer import fp8
from dflash_trainer.errors import first_line, require, user_error_on
from dflash_trainer.features import Taps
from dflash_trainer.token_cache import render
from model_drafter import DrafterConfig, Head

# parts of a checkpoint that are not the language model: vision and audio towers, layers for drafting
OTHER_PART = re.compile(r"(^|\.)(visual|(?:embed_)?(?:vision|audio)\w*|multi_modal_projector|mtp)\.")
KERNELS = (  # package, module, function, and what its absence costs
    ("flash-linear-attention", "fla", "chunk_gated_delta_rule", "the target runs about 1.6 times slower (760 "
     "against 464 ms per 4,096 tokens at Qwen3.6-27B size on an H200)"),
    ("causal-conv1d", "causal_conv1d", "causal_conv1d_fn", "its convolutions run in plain PyTorch"))
OTHER_FORMATS = {  # of quantised checkpoints -> packages that transformers reads them with
    "gptq": "accelerate and gptqmodel",
    "awq": "accelerate and gptqmodel",
    "bitsandbytes": "accelerate and bitsandbytes",
    "compressed-tensors": "accelerate and compressed-tensors",
    "modelopt": "a loader that transformers lacks (NVFP4 and the like, of NVIDIA's modelopt)"}
KNOWN_MASK_IDS = dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), 248070)


def model_path(target):
    return target.removeprefix("random:")


def load_config(target):
    require(Path(model_path(target)).is_dir() or not Path(model_path(target)).is_absolute(),
         f"TARGET = {target}: no such directory")
    what = "not a model that transformers can read" if Path(model_path(target)).is_dir() else (
        "not a directory here, and can't be downloaded (is this machine offline? is HF_HUB_OFFLINE set? "
        "a gated model needs its licence accepted on its page, then `hf auth login`)")
    with user_error_on(f"TARGET = {target}: {what}", OSError, ValueError):
        return AutoConfig.from_pretrained(model_path(target))


def load_tokenizer(target):
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path(target))
        if tokenizer.vocab_size > 1:  # transformers 5 makes an empty one where there is no file
            return tokenizer
        raise OSError("its vocabulary is empty")
    except (OSError, ValueError, KeyError) as e:
        print(f"TARGET = {target} has no tokenizer ({first_line(e)}): only rows of input_ids are read")
        return None


def taps_of(wanted, n_layers):
    """TARGET_LAYER_IDS, or the published spread: 5 layers from the second to the fourth-last."""
    if wanted is None:
        ids = tuple(round(1 + i * (n_layers - 4) / 4) for i in range(5))
        text = f"the default taps {list(ids)} don't fit a target of {n_layers} layers: set TARGET_LAYER_IDS"
    else:  # the last layer's output is read after the final norm when served
        ids = tuple(wanted)
        text = f"TARGET_LAYER_IDS = {list(ids)}: must rise within 0..{n_layers - 2}, of {n_layers} layers"
    require(ids and sorted(set(ids)) == list(ids) and ids[0] >= 0 and ids[-1] <= n_layers - 2, text)
    return ids


def mask_token(wanted, target, config, tokenizer):
    """MASK_TOKEN_ID, the family's known one, or a special token that neither the template nor a role uses."""
    text = config.get_text_config()
    vocab = text.vocab_size
    eos = text.eos_token_id if isinstance(text.eos_token_id, (list, tuple)) else [text.eos_token_id]
    taken = {*eos, text.bos_token_id, getattr(tokenizer, "eos_token_id", None)} - {None}
    if wanted is not None:
        require(0 <= wanted < vocab, f"MASK_TOKEN_ID = {wanted}: outside the vocabulary of {vocab}")
        require(wanted not in taken, f"MASK_TOKEN_ID = {wanted}: is the target's bos or eos, of {sorted(taken)}")
        return wanted
    if KNOWN_MASK_IDS.get(config.model_type, vocab) < vocab:
        return KNOWN_MASK_IDS[config.model_type]
    free = []
    if tokenizer is not None:
        template = str(tokenizer.chat_template or "")
        taken.add(text.pad_token_id)
        free = [i for i, t in sorted(tokenizer.added_tokens_decoder.items())
                if t.special and i not in taken and t.content not in template and i < vocab]
        free += range(max(len(tokenizer), 1), vocab)  # rows of the embedding that no token has
    require(free, f"MASK_TOKEN_ID = None: {target} has no unused token; name an id below {vocab}")
    return free[0]


def rope_theta_of(text):
    """Base frequency alone: partial rotary factors and mrope sections of the target are not the drafter's."""
    rope = getattr(text, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    return float(rope.get("rope_theta") or getattr(text, "rope_theta", None) or 10000.0)


def drafter_config(target, config, tokenizer, block_size, n_draft_layers, layer_types, sliding_window,
                   target_layer_ids, mask_token_id, init_std):
    """Sizes for this target, before its weights are read: its own, or the published ones for Qwen3.6-27B.
    What the trainer's settings leave open is None."""
    text = config.get_text_config()
    n_layers, heads = text.num_hidden_layers, text.num_attention_heads
    hybrid = text.model_type.startswith("qwen3_5")
    sizes = (heads, getattr(text, "num_key_value_heads", None) or heads,
             getattr(text, "head_dim", None) or text.hidden_size // heads)
    if hybrid and text.hidden_size == 5120:
        sizes = 32, 8, 128
    first = "sliding_attention" if hybrid else "full_attention"
    types_ = layer_types or [first] * (n_draft_layers - 1) + ["full_attention"]
    return DrafterConfig(
        text.hidden_size, text.intermediate_size, n_draft_layers, *sizes, text.vocab_size, block_size,
        mask_token(mask_token_id, target, config, tokenizer), taps_of(target_layer_ids, n_layers), n_layers,
        tuple(types_), sliding_window if "sliding_attention" in types_ else None, rope_theta_of(text),
        getattr(text, "rms_norm_eps", 1e-6), init_std, text.max_position_embeddings, text.bos_token_id,
        text.eos_token_id, text.pad_token_id,
        final_logit_softcapping=getattr(text, "final_logit_softcapping", None))


def embedding_scale(embedding):
    """What the embedding module multiplies its table by (Gemma), rounded in its dtype as the client does."""
    scale = getattr(embedding, "embed_scale", None)
    return 1.0 if scale is None else float(torch.as_tensor(scale).to(embedding.weight.dtype))


def load_model(target, device, dtype, seed, tick=lambda: None, precision="bf16"):
    """The whole frozen target on `device`. In the main thread, before any other exists: concurrent
    from_pretrained calls leave meta tensors and a wrong default dtype behind in silence.

    precision "fp8": its layers' linear weights are quantised as they arrive, embedding and head stay `dtype`.
    """
    arrival = Arrival(torch.device(device), precision)
    config = load_config(target)
    if model_path(target) != target:
        torch.manual_seed(seed)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
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

    def __init__(self, device, precision):
        self.setting = f"TARGET_PRECISION = {precision}"
        self.form = fp8.find_form(device, self.setting) if precision == "fp8" else None
        self.scales = None
        self.quantised = self.scaled = 0

    def layer(self, layer, i):
        if self.scales:
            self.scaled += self.scales.scale(layer, f"layers.{i}")
        if self.form:
            self.quantised += fp8.quantize_layers(layer, self.form, self.setting, f"layers.{i}")


def quantisation_of(config):
    """-> (method, the checkpoint's description of it) or (None, {})."""
    for part in (config, config.get_text_config()):
        if given := getattr(part, "quantization_config", None):
            given = given if isinstance(given, dict) else given.to_dict()
            return str(given["quant_method"]), given
    return None, {}


def from_files(target, config, device, dtype, tick, arrival):
    """transformers maps the files into memory, and a weight is read when its layer moves: the host holds no
    copy, unless the files' dtype is another. FP8 checkpoints with a scale per block are read as if they
    weren't quantised, and scaled layer by layer. transformers' device_map needs accelerate: only weights in
    another format, whose loaders ask for that anyhow and which can't be moved afterwards, go that way."""
    what, options = f"TARGET = {target}", {}
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
    with user_error_on(trouble, OSError, ValueError, ImportError, RuntimeError, KeyError,
                       safetensors.SafetensorError):
        with scales_are_no_surprise(arrival.scales):
            model, info = AutoModelForCausalLM.from_pretrained(
                target, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **options)
        if arrival.scales:
            unknown = [key for key in info["unexpected_keys"] if not key.endswith(fp8.SCALE_NAME)]
            info = {**info, "unexpected_keys": unknown}
        check_weights(what, model, info, files or checkpoint_names(target))
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


def stored_tensors(target):
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


def block_scales(what, files, description):
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
def scales_are_no_surprise(scales):
    """transformers warns about each tensor it doesn't know; the scales are read afterwards."""
    loader = logging.getLogger("transformers.modeling_utils")
    level = loader.level
    if scales:
        loader.setLevel(logging.ERROR)
    try:
        yield
    finally:
        loader.setLevel(level)


def check_weights(what, model, info, names):
    """Every weight of the language model comes from the files, and none of theirs is left over."""
    for kind, fault in (("missing_keys", "missing"), ("mismatched_keys", "of another shape"),
                        ("unexpected_keys", "not known to this model")):
        wrong = sorted(str(k) for k in info.get(kind, ()) if not OTHER_PART.search(str(k)))
        require(not wrong, f"{what}: weights that are {fault}: {len(wrong)}: {', '.join(wrong[:5])}")
    odd = {type(p).__name__ for p in model.parameters()} - {"Parameter"}
    require(not odd, f"{what}: weights of class {', '.join(odd)} can't be copied to other devices")
    others = Counter(m[2] for m in map(OTHER_PART.search, names) if m)
    if others:
        parts = ", ".join(f"{part}.* ({n} weights)" for part, n in others.items())
        print(f"{what}: only the language model is trained on, not {parts}")


def checkpoint_names(target):
    """Names of the weights in the safetensors files."""
    for name in ("model.safetensors.index.json", "model.safetensors"):
        path = cached_file(target, name, _raise_exceptions_for_missing_entries=False)
        if path and name.endswith("json"):
            return list(json.loads(Path(path).read_text())["weight_map"])
        if path:
            with safetensors.safe_open(path, "pt") as file:
                return list(file.keys())
    return []


def head_of(model):
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return Head(model.get_output_embeddings(), softcap)


@torch.no_grad()
def verify_target(target, model, config, conversations, tokenizer):
    """Start-up proof on a few real conversations, with the whole first replica: taps, head, labels."""
    decoder, device, agree, labels = model.get_decoder(), model.device, 0, 0
    ids_of_taps = list(config.target_layer_ids)
    taps, head = Taps(decoder.layers, config.target_layer_ids), head_of(model)
    for c in (conversations[i] for i in range(min(8, len(conversations)))):
        ids = torch.from_numpy(c.ids.astype(np.int64))[None].to(device)
        out = model(ids, output_hidden_states=True, use_cache=False)
        require(torch.equal(taps.collect(), torch.cat([out.hidden_states[i + 1] for i in ids_of_taps], -1)),
             f"TARGET = {target}: hooks on layers {ids_of_taps} don't give output_hidden_states[i + 1]")
        logits = out.logits.float()
        off = (head(out.hidden_states[-1]).float() - logits).abs().max().item()
        require(not off > 0.05 * logits.abs().max().item(),
             f"TARGET = {target}: it scales its logits, the head alone is off by {off:.3g}")
        supervised = torch.from_numpy(c.turn[1:] > 0).to(device)
        agree += int(((out.logits[0, :-1].argmax(-1) == ids[0, 1:]) & supervised).sum())
        labels += int(supervised.sum())
    taps.remove()
    share = agree / max(1, labels)
    print(f"proof: taps {ids_of_taps} equal output_hidden_states; the head reproduces the logits; "
          f"{share:.3f} of {labels} labels equal the target's argmax")
    if share < 0.8:
        print(f"WARNING: only {share:.2f} of the labels are what the target would say (own answers: 0.8 or "
              f"more): such a drafter is accepted less. tools/regenerate.py makes the target's own answers")
    if tokenizer is not None:
        text = render(conversations[0], tokenizer)[:800]
        print(f"first conversation, supervised tokens between ⟦ ⟧:\n{text}")


def report_kernels(decoder):
    """One line for targets with linear-attention layers: transformers binds what it could import to functions
    of the modeling file, in a closure (5.17, 5.24) or as they are (before)."""
    layer = next((m for m in decoder.modules() if type(m).__name__.endswith("GatedDeltaNet")), None)
    if layer is None:
        return
    code, words = sys.modules[type(layer).__module__], []
    for name, package, function, cost in KERNELS:
        bound = [getattr(code, f, None) for f in (f"torch_{function}", function)]
        bound += [inspect.getclosurevars(f).nonlocals.get("implementation") for f in bound
                  if inspect.isfunction(f)]
        if any((getattr(f, "__module__", None) or "").split(".")[0] == package for f in bound):
            words.append(f"{name} is used")
        else:
            absent = "installed but not used" if importlib.util.find_spec(package) else "not installed"
            words.append(f"{name} is {absent}: {cost}")
    print(f"linear-attention layers: {'; '.join(words)}")


def call_tokens(decoder):
    """What a call of it costs by itself, in tokens computed: the time of a layer's kernels however small
    (0.1 ms in a CUDA graph on an H200), in which the device could do so many FLOP (a guess)."""
    weights = sum(p.numel() for p in decoder.layers.parameters())
    flops = 1e14 if next(decoder.parameters()).is_cuda else 1e11
    return len(decoder.layers) * 1e-4 * flops / (2 * weights)
