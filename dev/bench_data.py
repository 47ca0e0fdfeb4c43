"""How long does a run wait for its data? Tokenises N synthetic conversations, then opens the cache again.

    python dev/bench_data.py TARGET=<dir with a tokenizer> [N=1000000] [WORDS=20]

Words are drawn from a fixed list with a fixed seed; the cache is a temporary one, removed at the end.
"""
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_dflash as td
from dflash_trainer import features, settings
from dflash_trainer import rows as rows_module
from dflash_trainer.errors import require
from dflash_trainer.target_config import load_tokenizer
from dflash_trainer.token_cache import Settings, build_conversations

TARGET: str = ""       # directory with a tokenizer
N: int = 1_000_000     # conversations
WORDS: int = 20        # of an answer, on average

WORD_LIST = ("the of and a to in is you that it he was for on are as with his they I at be this have from or "
             "one had by word but not what all were we when your can said there use an each which she do")
VOCABULARY = WORD_LIST.split()
CALL_TOKENS = 300      # fixed cost of a target call, in tokens, for the choice of shapes


def write_conversations(path):
    rng = random.Random(0)
    with open(path, "w") as file:
        for _ in range(N):
            question = " ".join(rng.choices(VOCABULARY, k=max(4, WORDS // 8)))
            answer = " ".join(rng.choices(VOCABULARY, k=rng.randint(WORDS // 2, WORDS * 3 // 2)))
            file.write(json.dumps({"prompt": question, "response": answer}) + "\n")


def timed(name, work):
    """Seconds on the wall, and of all threads together: other programs lengthen the first alone."""
    began = time.perf_counter()
    used = time.process_time()
    result = work()
    print(
        f"{name}: {time.perf_counter() - began:.2f} s, {time.process_time() - used:.2f} s of processor time",
        flush=True,
    )
    return result


def measure():
    require(TARGET, "TARGET is empty: name a directory with a tokenizer")
    settings.require_positive(sys.modules[__name__], "N", "WORDS")
    tokenizer = load_tokenizer(TARGET)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        path = Path(folder, "rows.jsonl")
        write_conversations(path)
        print(f"{N} conversations, {path.stat().st_size / 1e6:.0f} MB, {os.cpu_count()} cores, "
              f"load {os.getloadavg()[0]:.1f}", flush=True)

        def read():
            reader = Settings(tokenizer, td.SEQ_LEN, {}, len(tokenizer))
            return build_conversations(str(path), reader, td.MAX_BAD_SHARE)
        timed("first start (tokenises)", read)
        data = timed("second start", read)
        longest = int(data.lengths.max())
        rows = timed("pack one epoch", lambda: rows_module.pack(data.lengths, 0, 0, td.SEQ_LEN))
        timed("target shapes", lambda: features.choose_target_batches(
            data.lengths, longest, td.SEQ_LEN, CALL_TOKENS))
    tokens = data.stats["tokens"]
    padding = 1 - tokens / (len(rows) * td.SEQ_LEN)
    print(f"mean {tokens / len(data):.1f} tokens per conversation; {padding:.4f} of "
          f"{len(rows)} packed rows is padding")


def main(argv):
    return settings.run_program(sys.modules[__name__], measure, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
