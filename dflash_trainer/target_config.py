"""What a target's config and tokenizer say, before its weights are read.

    load_config, load_tokenizer   of a hub id, a directory, or random:DIR
    read_sizes                    the sizes that a drafter takes over, from any family's config
    drafter_config                sizes, taps and mask token of a drafter for this target

A target is a hub id, a directory, or random:DIR: the config in DIR, weights made on the device from a seed.
"""
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import cached_file

from dflash_trainer.errors import first_line, require, user_error_on
from model_drafter import DrafterConfig

KNOWN_MASK_IDS = dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), 248070)
DEFAULT_POSITIONS = 32768
MAY_LACK = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}

# --------------------------------------------------------------------------------- config and tokenizer


def model_path(target: str) -> str:
    return target.removeprefix("random:")


def load_config(target: str) -> PretrainedConfig:
    """UserError where transformers can't read it."""
    path = Path(model_path(target))
    require(path.is_dir() or not path.is_absolute(), f"TARGET = {target}: no such directory")
    what = "not a model that transformers can read"
    if not path.is_dir():
        what = ("not a directory here, and can't be downloaded (is this machine offline? is HF_HUB_OFFLINE "
                "set? a gated model needs its licence accepted on its page, then `hf auth login`)")
    # Exception: a config class may raise anything, and a config that can't be read is the user's to mend
    with user_error_on(f"TARGET = {target}: {what}", Exception):
        config = AutoConfig.from_pretrained(model_path(target))
    for part in (config, config.get_text_config()):
        given = getattr(part, "quantization_config", None)
        if given is not None and target == model_path(target):
            method = given.get("quant_method") if isinstance(given, dict) else given.quant_method
            keys = list(given) if isinstance(given, dict) else []
            require(method, f"TARGET = {target}: its quantization_config names no quant_method (it has "
                            f"{', '.join(keys)}): transformers can't read such weights; take the bf16 or FP8 "
                            "checkpoint")
    return config


def load_tokenizer(target: str) -> PreTrainedTokenizerBase | None:
    """None where the target has none; said in one line."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path(target))
        if tokenizer.vocab_size > 1:  # transformers 5 makes an empty one where there is no file
            return tokenizer
        reason = "its vocabulary is empty"
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as e:
        reason = first_line(e)
    print(f"TARGET = {target} has no tokenizer ({reason}): only rows of input_ids are read")
    return None


def end_tokens(target: str, tokenizer: PreTrainedTokenizerBase | None) -> tuple[str, ...]:
    """The tokens at which the target stops, by config.json and generation_config.json: its turns' ends."""
    if tokenizer is None:
        return ()
    ids = set()
    for name in ("config.json", "generation_config.json"):
        values = {}
        with suppress(OSError, ValueError):  # most targets lack one of them
            path = (cached_file(model_path(target), name, local_files_only=True, **MAY_LACK)
                    or cached_file(model_path(target), name, **MAY_LACK))
            values = json.loads(Path(path).read_text()) if path else {}
        for part in (values, values.get("text_config") or {}):
            eos = part.get("eos_token_id")
            ids |= set(eos if isinstance(eos, list) else [eos]) - {None}
    return tuple(token for token in tokenizer.convert_ids_to_tokens(sorted(ids)) if token)


# ------------------------------------------------------------------------------------------------ sizes


class TargetSizes(NamedTuple):
    """What a drafter takes over from its target."""
    hidden_size: int
    intermediate_size: int   # of a dense MLP
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float


# names that families give to one size; transformers' attribute maps resolve most others
NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels"),
    "dense_width": ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "inner_dim"),
    "expert_width": ("moe_intermediate_size", "expert_ffn_hidden_size", "expert_dim"),
    "experts_per_token": ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k",
                          "num_experts_per_token"),
    "shared_width": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "n_shared": ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    "positions": ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length",
                  "seq_length"),
    "norm_eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "layernorm_epsilon"),
}


def raw_value(config: PretrainedConfig, name: str, layer: int) -> Any:
    """An attribute of a config, None where there is none; of one layer, where layers differ in it."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # transformers refuses to read from the whole what its layers differ in
        value = getattr(config.per_layer_config[layer], name, None)
    if isinstance(value, (list, tuple)):  # one entry a layer
        value = value[layer] if layer < len(value) else None
    return value


def sliding_layer(config: PretrainedConfig) -> int:
    """The layer whose sizes count where layers differ: the first with a sliding window, as most of the
    drafter's layers are, else the first."""
    kinds = getattr(config, "layer_types", None) or []
    return kinds.index("sliding_attention") if "sliding_attention" in kinds else 0


def read_sizes(target: str, config: PretrainedConfig, log: Callable[[str], object] = print) -> TargetSizes:
    """Sizes of the language model in any family's config. What is missing is derived and logged in a line;
    UserError where nothing sensible can be."""
    text = config.get_text_config()
    layer = sliding_layer(text)

    def read(what):
        """The first of its names that the config knows with a number."""
        for name in NAMES[what]:
            value = raw_value(text, name, layer)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
                return value
        return None

    def required(what):
        value = read(what)
        require(value, f"TARGET = {target}: its config ({text.model_type}) says no {NAMES[what][0]}: not a "
                       "transformer that a drafter can be sized after")
        return int(value)

    def derived(what, value, why):
        log(f"TARGET = {target}: its config says no {what}: {value}, {why}")
        return int(value)

    hidden_size = required("hidden_size")
    num_layers = required("num_layers")
    num_heads = required("num_heads")
    num_kv_heads = int(read("num_kv_heads") or derived("num_key_value_heads", num_heads, "one for each head"))
    if num_heads % num_kv_heads:
        num_kv_heads = derived("num_key_value_heads that divides its heads", num_heads, "one for each head")
    head_dim = read("head_dim") or derived("head_dim", hidden_size // num_heads, "hidden_size / heads")
    if head_dim % 2:
        head_dim = derived("even head_dim", head_dim + 1, "rotary positions turn pairs")
    vocab_size = raw_value(text, "vocab_size", layer)
    require(vocab_size, f"TARGET = {target}: its config ({text.model_type}) says no vocab_size")
    positions = read("positions") or derived("max_position_embeddings", DEFAULT_POSITIONS, "a guess")
    width = read("dense_width") or derived("intermediate_size", *dense_width(read, hidden_size))
    return TargetSizes(hidden_size, int(width), num_layers, num_heads, num_kv_heads, int(head_dim),
                       int(vocab_size), int(positions), rope_theta(text), float(read("norm_eps") or 1e-6))


def dense_width(read: Callable[[str], float | None], hidden_size: int) -> tuple[int, str]:
    """-> (width of the drafter's MLP, why) for a target without a dense one: as wide as what is active for a
    token in a mixture of experts."""
    expert = read("expert_width")
    if expert is None:
        return 4 * hidden_size, "4 x hidden_size"
    chosen = read("experts_per_token") or 1
    shared = read("shared_width") or expert * (read("n_shared") or 0)
    why = f"the active width: {chosen} experts of {expert}"
    if shared:
        why += f" and a shared one of {shared}"
    return chosen * expert + shared, why


def rope_theta(text: PretrainedConfig) -> float:
    """Base frequency alone: partial rotary factors and mrope sections of the target are not the drafter's."""
    rope = getattr(text, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # where layer types have tables of their own
    theta = rope.get("rope_theta") or getattr(text, "rope_theta", None)
    return float(theta or 10000.0)


# ------------------------------------------------------------------------------- a drafter for this target


def target_layer_ids(wanted: Sequence[int] | None, n_layers: int) -> tuple[int, ...]:
    """TARGET_LAYER_IDS, or the published spread: 5 layers from the second to the fourth-last."""
    if wanted is None:
        ids = tuple(round(1 + i * (n_layers - 4) / 4) for i in range(5))
        text = f"the default taps {list(ids)} don't fit a target of {n_layers} layers: set TARGET_LAYER_IDS"
    else:  # the last layer's output is read after the final norm when served
        ids = tuple(wanted)
        text = f"TARGET_LAYER_IDS = {list(ids)}: must rise within 0..{n_layers - 2}, of {n_layers} layers"
    rises = ids and sorted(set(ids)) == list(ids)
    require(rises and ids[0] >= 0 and ids[-1] <= n_layers - 2, text)
    return ids


def special_ids(config: PretrainedConfig, name: str) -> list[int]:
    """Token ids under a name such as eos_token_id, of the language model or of what it is wrapped in."""
    value = getattr(config.get_text_config(), name, None)
    if value is None:
        value = getattr(config, name, None)
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def mask_token(wanted: int | None, target: str, config: PretrainedConfig,
               tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> int:
    """MASK_TOKEN_ID, the family's known one, or a special token that neither the template nor a role uses."""
    taken = {*special_ids(config, "eos_token_id"), *special_ids(config, "bos_token_id"),
             getattr(tokenizer, "eos_token_id", None)} - {None}
    if wanted is not None:
        require(0 <= wanted < vocab_size, f"MASK_TOKEN_ID = {wanted}: outside the vocabulary of {vocab_size}")
        require(wanted not in taken,
                f"MASK_TOKEN_ID = {wanted}: is the target's bos or eos, of {sorted(taken)}")
        return wanted
    known = KNOWN_MASK_IDS.get(config.model_type, vocab_size)
    if known < vocab_size:
        return known
    unused = []
    if tokenizer is not None:
        taken.update(special_ids(config, "pad_token_id"))
        template = str(tokenizer.chat_template or "")
        for i, token in sorted(tokenizer.added_tokens_decoder.items()):
            if token.special and i not in taken and i < vocab_size and token.content not in template:
                unused.append(i)
        unused += range(max(len(tokenizer), 1), vocab_size)  # rows of the embedding that no token has
    require(unused, f"MASK_TOKEN_ID = None: {target} has no unused token; name an id below {vocab_size}")
    return unused[0]


def drafter_config(target: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None,
                   block_size: int, n_draft_layers: int, layer_types: Sequence[str] | None,
                   sliding_window: int, wanted_layer_ids: Sequence[int] | None, mask_token_id: int | None,
                   init_std: float) -> DrafterConfig:
    """Sizes of a drafter for this target: its own, or the published ones for Qwen3.6-27B. What the trainer's
    settings leave open is None."""
    text = config.get_text_config()
    sizes = read_sizes(target, config)
    heads = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    is_hybrid = text.model_type.startswith("qwen3_5")
    if is_hybrid and sizes.hidden_size == 5120:
        heads = 32, 8, 128
    if layer_types is None:
        first = "sliding_attention" if is_hybrid else "full_attention"
        layer_types = [first] * (n_draft_layers - 1) + ["full_attention"]
    num_heads, num_kv_heads, head_dim = heads
    return DrafterConfig(
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_layers=n_draft_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=sizes.vocab_size,
        block_size=block_size,
        mask_token_id=mask_token(mask_token_id, target, config, tokenizer, sizes.vocab_size),
        target_layer_ids=target_layer_ids(wanted_layer_ids, sizes.num_layers),
        num_target_layers=sizes.num_layers,
        layer_types=tuple(layer_types),
        sliding_window=sliding_window if "sliding_attention" in layer_types else None,
        rope_theta=sizes.rope_theta,
        rms_norm_eps=sizes.rms_norm_eps,
        initializer_range=init_std,
        max_position_embeddings=sizes.max_position_embeddings,
        bos_token_id=one_id(special_ids(config, "bos_token_id")),
        eos_token_id=one_id(special_ids(config, "eos_token_id")),
        pad_token_id=one_id(special_ids(config, "pad_token_id")),
        final_logit_softcapping=getattr(text, "final_logit_softcapping", None))


def one_id(ids: list[int]) -> int | list[int] | None:
    """As configs write token ids: a number where there is one."""
    if len(ids) <= 1:
        return ids[0] if ids else None
    return ids
