"""A target without weights, for benchmarks: a Qwen's config, whole or cut, and token ids for it.

    python tools/random_target.py DIR                         Qwen3.6-27B's, all 64 layers
    python tools/random_target.py DIR LAYERS=16               its first 16
    python tools/random_target.py DIR moe LAYERS=20           Qwen3.5-35B-A3B's, a mixture of experts
    python tools/random_target.py DIR small [NAME=VALUE ...]  a tiny one with the first one's kinds of layers
    python train_dflash.py TARGET=random:DIR DATA=DIR/data.jsonl EVAL_EVERY=0 ...   (small: MASK_TOKEN_ID=0)

TARGET=random:DIR makes the weights on the target's device from SEED: no file, no copy in host memory.
The head of the published initializer_range, 0.02, starts the loss at ln(vocabulary) + 0.0002 * hidden_size:
13.4 at this size; with 0.005 it is 12.5.
"""
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dflash_trainer import settings
from dflash_trainer.errors import require

LAYERS: int | None = None       # of the config; None: all of them
CONFIG: dict = {}               # other entries of the config, e.g. {'initializer_range': 0.005}
CONVERSATIONS: int = 256        # in DIR/data.jsonl; 0: no such file
SHORTEST: int = 256             # tokens of a conversation
LONGEST: int = 4096
WORDS: int | None = None        # different token ids; None: 1000, 200 for `small`
SEED: int = 0                   # of the conversations

QWEN_27B = dict(  # text_config of Qwen/Qwen3.6-27B: three linear-attention layers, then one of full attention
    model_type="qwen3_5_text", architectures=["Qwen3_5ForCausalLM"], dtype="bfloat16", num_hidden_layers=64,
    hidden_size=5120, intermediate_size=17408, vocab_size=248320, hidden_act="silu", rms_norm_eps=1e-6,
    num_attention_heads=24, num_key_value_heads=4, head_dim=256, attention_bias=False, attention_dropout=0.0,
    linear_num_key_heads=16, linear_num_value_heads=48, linear_key_head_dim=128, linear_value_head_dim=128,
    linear_conv_kernel_dim=4, full_attention_interval=4, max_position_embeddings=262144,
    initializer_range=0.02, tie_word_embeddings=False, use_cache=True, eos_token_id=248044,
    rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25,
                         mrope_interleaved=True, mrope_section=[11, 11, 10]))
QWEN_35B_A3B = dict(  # text_config of Qwen/Qwen3.5-35B-A3B: 8 of 256 experts and a shared one
    {name: value for name, value in QWEN_27B.items() if name != "intermediate_size"},
    model_type="qwen3_5_moe_text", architectures=["Qwen3_5MoeForCausalLM"], num_hidden_layers=40,
    hidden_size=2048, num_attention_heads=16, num_key_value_heads=2, linear_num_value_heads=32,
    num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512)
SMALL = dict(  # the default taps need 8 layers
    num_hidden_layers=8, hidden_size=64, intermediate_size=128, vocab_size=512, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=16, linear_value_head_dim=16, max_position_embeddings=8192, eos_token_id=1,
    rope_parameters=dict(QWEN_27B["rope_parameters"], mrope_section=[1, 1, 0]))


def conversations(n, shortest, longest, words, seed):
    """JSONL lines of token ids: lengths log-uniform, a quarter is the prompt, ids go up by one in a cycle."""
    rng = random.Random(seed)
    for _ in range(n):
        length = round(shortest * (longest / shortest) ** rng.random())
        first = rng.randrange(words)
        ids = [2 + (first + i) % words for i in range(length)]  # 0 and 1 may be special
        mask = [int(i >= length // 4) for i in range(length)]
        yield json.dumps({"input_ids": ids, "loss_mask": mask})


def make_target(folder="", size=""):
    require(folder, "expected DIR [moe | small] [NAME=VALUE ...]")
    require(size in ("", "moe", "small"), f"{size}: the size is `moe`, `small` or left out")
    settings.require_positive(sys.modules[__name__], "LAYERS", "SHORTEST", "LONGEST", "WORDS")
    config = {"": QWEN_27B, "moe": QWEN_35B_A3B, "small": {**QWEN_27B, **SMALL}}[size].copy()
    unknown = sorted(CONFIG.keys() - {*config, "layer_types"})
    require(not unknown, f"CONFIG has {', '.join(unknown)}: not in the config")
    config.update(CONFIG)
    if LAYERS is not None:
        config["num_hidden_layers"] = LAYERS
    words = WORDS or (200 if size == "small" else 1000)

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    print(f"{folder / 'config.json'}: {config['num_hidden_layers']} layers")
    if CONVERSATIONS:
        lines = conversations(CONVERSATIONS, SHORTEST, LONGEST, words, SEED)
        (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{folder / 'data.jsonl'}: {CONVERSATIONS} conversations of {SHORTEST} to {LONGEST} tokens")


def main(argv):
    return settings.run_program(sys.modules[__name__], make_target, argv, positional=2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
