"""Does a drafter still learn? Judged from what the log holds anyway.

    why_not_learning    the reason for a warning, or None
"""
from collections.abc import Sequence

ZERO_STEPS = 20    # gradients of 0 in a row that can't be chance
FLAT_STEPS = 200   # a drafter that learns at all is well below its first loss after so many
EDGE_STEPS = 20    # means over so many: a step's loss jumps about by a few per cent
FLAT_SHARE = 0.98  # of the first losses' mean
ACCEPTED = 1.02    # accept_len of a drafter that has learned something


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def why_not_learning(losses: Sequence[float], grad_norms: Sequence[float],
                     accept_len: float) -> str | None:
    """What is wrong and where to look, or None.

    losses, grad_norms: of every finite step since this process started, in order; accept_len: tokens a pass
    by the last log line.

    A drafter that starts trained (INIT_FROM, a resume) may rest at its first loss: it is accepted.
    """
    latest_norms = grad_norms[-ZERO_STEPS:]
    if len(latest_norms) == ZERO_STEPS and not any(latest_norms):
        return (f"the gradient is 0 in each of the last {ZERO_STEPS} steps: the drafter has stopped learning "
                "(weights that overflowed or vanished; LR or INIT_STD too large?)")
    if len(losses) < FLAT_STEPS or accept_len > ACCEPTED:
        return None
    first = mean(losses[:EDGE_STEPS])
    latest = mean(losses[-EDGE_STEPS:])
    if latest > FLAT_SHARE * first:
        return (f"the loss is {latest:.4g} after {len(losses)} steps and was {first:.4g} in the first "
                f"{EDGE_STEPS}: the drafter does not learn (LR too small or too large? are the answers the "
                "target's own?)")
    return None
