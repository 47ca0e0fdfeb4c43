"""A target without weights, for benchmarks: the config of Qwen3.6-27B, whole or cut, and token ids for it.

    python tools/random_target.py DIR                        all 64 layers
    python tools/random_target.py DIR layers=16              its first 16
    python tools/random_target.py DIR small [NAME=VALUE ...] a tiny one with the same kinds of layers
    python train_dflash.py TARGET=random:DIR DATA=DIR/data.jsonl EVAL_EVERY=0 ...   (small: MASK_TOKEN_ID=0)

TARGET=random:DIR makes the weights on the target's device from SEED: no file, no copy in host memory.
NAME=VALUE sets an entry of the config, or one of DATA below. The head of the published initializer_range 0.02
starts the loss at ln(vocabulary) + 0.0002 * hidden_size: 13.4 at this size; with 0.005 it is 12.5.
"""
import ast
import json
import random
import sys
from pathlib import Path

CONFIG = dict(  # text_config of Qwen/Qwen3.6-27B: three linear-attention layers, then one of full attention
    model_type="qwen3_5_text", architectures=["Qwen3_5ForCausalLM"], dtype="bfloat16", num_hidden_layers=64,
    hidden_size=5120, intermediate_size=17408, vocab_size=248320, hidden_act="silu", rms_norm_eps=1e-6,
    num_attention_heads=24, num_key_value_heads=4, head_dim=256, attention_bias=False, attention_dropout=0.0,
    linear_num_key_heads=16, linear_num_value_heads=48, linear_key_head_dim=128, linear_value_head_dim=128,
    linear_conv_kernel_dim=4, full_attention_interval=4, max_position_embeddings=262144,
    initializer_range=0.02, tie_word_embeddings=False, use_cache=True, eos_token_id=248044,
    rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25,
                         mrope_interleaved=True, mrope_section=[11, 11, 10]))
SMALL = dict(  # the default taps need 8 layers
    num_hidden_layers=8, hidden_size=64, intermediate_size=128, vocab_size=512, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=16, linear_value_head_dim=16, max_position_embeddings=8192, eos_token_id=1,
    rope_parameters=dict(CONFIG["rope_parameters"], mrope_section=[1, 1, 0]))
DATA = dict(conversations=256, shortest=256, longest=4096, words=1000, seed=0)  # tokens; 0: no data file


def conversations(n, shortest, longest, words, seed):
    """JSONL lines of token ids: lengths log-uniform, a quarter is the prompt, ids go up by one in a cycle."""
    rng = random.Random(seed)
    for _ in range(n):
        length, first = round(shortest * (longest / shortest) ** rng.random()), rng.randrange(words)
        ids = [2 + (first + i) % words for i in range(length)]  # 0 and 1 may be special
        yield json.dumps({"input_ids": ids, "loss_mask": [int(i >= length // 4) for i in range(length)]})


def value_of(text):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def main(arguments):
    words = [word for word in arguments if "=" not in word]
    given = {k: value_of(v) for k, v in (word.split("=", 1) for word in arguments if "=" in word)}
    if len(words) not in (1, 2) or words[1:] not in ([], ["small"]):
        raise SystemExit(__doc__)
    small, folder = len(words) == 2, Path(words[0])
    config, data = {**CONFIG, **(SMALL if small else {})}, {**DATA, **(dict(words=200) if small else {})}
    if "layers" in given:
        given["num_hidden_layers"] = given.pop("layers")
    if unknown := sorted(given.keys() - {*config, *data, "layer_types"}):
        raise SystemExit(f"random_target: unknown {', '.join(unknown)}: not in the config, "
                         f"nor one of {', '.join(DATA)}")
    data.update((k, v) for k, v in given.items() if k in data)
    config.update((k, v) for k, v in given.items() if k not in data)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    lines = list(conversations(*data.values()))
    if lines:
        (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    print(f"{folder / 'config.json'}: {config['num_hidden_layers']} layers; {len(lines)} conversations of "
          f"{data['shortest']} to {data['longest']} tokens in {folder / 'data.jsonl'}")


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.exit(print(__doc__))
    main(sys.argv[1:])
