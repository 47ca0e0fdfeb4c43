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
import train_dflash as td  # noqa: E402
from dflash_trainer import features
from dflash_trainer import rows as rows_module  # noqa: E402
from dflash_trainer.target import load_tokenizer  # noqa: E402

VOCABULARY = ("the of and a to in is you that it he was for on are as with his they I at be this have from or "
              "one had by word but not what all were we when your can said there use an each which she do").split()


def write_rows(path, n, words):
    rng = random.Random(0)
    with open(path, "w") as f:
        for _ in range(n):
            asked = " ".join(rng.choices(VOCABULARY, k=max(4, words // 8)))
            said = " ".join(rng.choices(VOCABULARY, k=rng.randint(words // 2, words * 3 // 2)))
            f.write(json.dumps({"prompt": asked, "response": said}) + "\n")


def timed(name, work):
    began = time.perf_counter()
    result = work()
    print(f"{name}: {time.perf_counter() - began:.2f} s", flush=True)
    return result


def main(argv):
    settings = {"TARGET": "", "N": "1000000", "WORDS": "20", **dict(a.split("=", 1) for a in argv)}
    tokenizer, n = load_tokenizer(settings["TARGET"]), int(settings["N"])
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        path = Path(folder, "rows.jsonl")
        write_rows(path, n, int(settings["WORDS"]))
        size, load = path.stat().st_size / 1e6, os.getloadavg()[0]
        print(f"{n} rows, {size:.0f} MB, {os.cpu_count()} cores, load {load:.1f}", flush=True)
        for name in ("first start (tokenises)", "second start"):
            data = timed(name, lambda: td.read_conversations(str(path), tokenizer, "DATA", len(tokenizer)))
        rows = timed("pack one epoch", lambda: rows_module.pack(data.lengths, 0, 0, td.SEQ_LEN))
        timed("target shapes", lambda: features.target_calls(data.lengths, int(data.lengths.max()), td.SEQ_LEN, 300))
    tokens = data.stats["tokens"]
    print(f"mean {tokens / len(data):.1f} tokens a row; {1 - tokens / (len(rows) * td.SEQ_LEN):.4f} of "
          f"{len(rows)} packed rows is padding")
    return 0


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.exit(print(__doc__))
    sys.exit(main(sys.argv[1:]))
