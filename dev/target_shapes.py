"""The batch shapes that a target is given, beside a fixed ladder: tokens computed and calls made for a row.

    python dev/target_shapes.py                          lengths drawn from a lognormal distribution
    python dev/target_shapes.py LENGTHS=lengths.txt      of a file, one number of tokens a line, as well

The ladder is S, S/2, S/4, ... with S // length conversations each; choose_target_batches chooses the others.
Both are split by the same recurrence. Its log is results/target_shapes.txt.
"""
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dflash_trainer import settings
from dflash_trainer.features import TargetBatches, choose_target_batches
from dflash_trainer.rows import pack

LENGTHS: str | None = None                     # file of lengths
SEQ_LENS: list[int] = [4096, 16384]            # S
OVERHEADS: list[float] = [18.0, 300.0, 1500.0] # tokens: of a 27B, a 0.6B and a 135M target on a GPU, about
N_ROWS: int = 400


def ladder(seq_len: int, overhead: float, n_shapes: int = 6) -> TargetBatches:
    lengths = [seq_len >> i for i in reversed(range(n_shapes))]
    return TargetBatches([(seq_len // length, length) for length in lengths], overhead)


def report(name: str, lengths: np.ndarray, seq_len: int, overhead: float) -> None:
    lengths = np.minimum(lengths, seq_len)
    rows = [lengths[members].tolist() for members in pack(lengths, 1, 0, seq_len)[:N_ROWS]]
    n_tokens = sum(map(sum, rows))
    ways = {"chosen": choose_target_batches(lengths, int(lengths.max()), seq_len, overhead),
            "ladder": ladder(seq_len, overhead)}
    for way, batches in ways.items():
        computed = 0
        n_calls = 0
        for row in rows:
            for batch, length, _ in batches.split(row):
                computed += batch * length
                n_calls += 1
        cost = computed + overhead * n_calls
        shapes = " ".join(f"{batch}x{length}" for batch, length in batches.shapes)
        print(f"{name:16} S {seq_len:5} overhead {overhead:6.0f} {way}: "
              f"{computed / n_tokens:.2f} tokens computed for each real one, "
              f"{n_calls / len(rows):5.2f} calls a row, cost {cost / n_tokens:.2f} a token; {shapes}")


def main() -> None:
    rng = np.random.default_rng(0)
    data = {"lognormal 665": np.clip(rng.lognormal(6.5, 0.9, 20_000).astype(int), 8, 100_000),
            "lognormal 148": np.clip(rng.lognormal(5.0, 0.8, 20_000).astype(int), 8, 100_000)}
    if LENGTHS:
        data[Path(LENGTHS).stem] = np.loadtxt(LENGTHS, int)
    for seq_len in SEQ_LENS:
        for name, lengths in data.items():
            for overhead in OVERHEADS:
                report(name, lengths, seq_len, overhead)


if __name__ == "__main__":
    sys.exit(settings.run_program(sys.modules[__name__], main, sys.argv[1:]))
