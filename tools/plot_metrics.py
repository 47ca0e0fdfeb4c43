"""tau by step and acceptance by slot of a run, as a picture. Needs matplotlib.

    python tools/plot_metrics.py OUT/metrics.jsonl picture.png
"""
import json
import sys
from pathlib import Path


def main(argv):
    if len(argv) != 2:
        print(f"error: expected METRICS.jsonl PICTURE.png, got {argv}", file=sys.stderr)
        return 2
    if not Path(argv[0]).is_file():
        print(f"error: {argv[0]}: no such file", file=sys.stderr)
        return 2
    try:
        import matplotlib
    except ImportError:
        print("error: the package matplotlib is not installed: pip install matplotlib", file=sys.stderr)
        return 2
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    try:
        lines = [json.loads(line) for line in Path(argv[0]).read_text().splitlines()]
    except ValueError as e:
        print(f"error: {argv[0]} is not a metrics.jsonl: {e}", file=sys.stderr)
        return 2
    evals, steps = [x for x in lines if "tau" in x], [x for x in lines if "accept_len" in x]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    left.plot([x["step"] for x in evals], [x["tau"] for x in evals], "o-", label="tau, held-out")
    left.plot([x["step"] for x in steps], [x["accept_len"] for x in steps], alpha=0.5, label="accept_len")
    left.set(xlabel="step", ylabel="tokens a pass")
    left.legend()
    for x in evals[1:]:
        right.plot(range(1, len(x["acc_k"]) + 1), x["acc_k"], label=f"step {x['step']}")
    right.set(xlabel="slot", ylabel="share of slots right (acc_k)", ylim=(0, 1))
    right.xaxis.get_major_locator().set_params(integer=True)
    right.legend(fontsize=7)
    figure.savefig(argv[1], dpi=110)
    return 0


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.exit(print(__doc__))
    sys.exit(main(sys.argv[1:]))
