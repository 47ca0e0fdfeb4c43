"""tau by step and acceptance by slot of a run, as a picture. Needs matplotlib.

    python tools/plot_metrics.py OUT/metrics.jsonl picture.png
"""
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dflash_trainer import settings
from dflash_trainer.errors import require, user_error_on


def read_metrics(path):
    """The lines of a metrics.jsonl -> (those of evaluations, those of training steps)."""
    with user_error_on(f"{path}: not a metrics.jsonl", OSError, ValueError):
        lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    evaluations = [line for line in lines if "tau" in line]
    steps = [line for line in lines if "accept_len" in line]
    return evaluations, steps


def plot(metrics="", picture=""):
    require(metrics and picture, "expected METRICS.jsonl PICTURE.png")
    with user_error_on("the package matplotlib is not installed: pip install matplotlib", ImportError):
        import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    evaluations, steps = read_metrics(metrics)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")

    eval_steps = [line["step"] for line in evaluations]
    tau = [line["tau"] for line in evaluations]
    left.plot(eval_steps, tau, "o-", label="tau, held-out")
    train_steps = [line["step"] for line in steps]
    accept_len = [line["accept_len"] for line in steps]
    left.plot(train_steps, accept_len, alpha=0.5, label="accept_len")
    left.set(xlabel="step", ylabel="tokens per pass")
    left.legend()

    for line in evaluations[1:]:
        slots = range(1, len(line["acc_k"]) + 1)
        right.plot(slots, line["acc_k"], label=f"step {line['step']}")
    right.set(xlabel="slot", ylabel="share of slots right (acc_k)", ylim=(0, 1))
    right.xaxis.get_major_locator().set_params(integer=True)
    right.legend(fontsize=7)
    with user_error_on(f"{picture}: can't be written", OSError, ValueError):
        figure.savefig(picture, dpi=110)


def main(argv):
    return settings.run_program(sys.modules[__name__], plot, argv, positional=2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
