"""Errors that a user can act on: one line, no traceback.
"""
import os
import re
import resource
import sys
from contextlib import contextmanager


class UserError(Exception):
    """A setting or file that can't work: printed as one line, no traceback."""


def require(ok, text):
    if not ok:
        raise UserError(text)


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def user_error_on(text, *kinds):
    """Exceptions of these kinds become a UserError. One that is a UserError already stays as it is."""
    try:
        yield
    except UserError:
        raise
    except kinds as e:
        if out_of_memory(e):  # some are RuntimeErrors
            raise
        raise UserError(f"{text}: {first_line(e)}") from None


def out_of_memory(error):
    """One line with the device, its budget and what to lower; None for any other error."""
    torch = sys.modules.get("torch")  # programs that do without it report errors as well
    text = (str(error).strip() or "MemoryError").splitlines()[0]
    on_host = isinstance(error, MemoryError) or "can't allocate memory" in text  # torch raises RuntimeError
    on_device = torch is not None and isinstance(error, torch.OutOfMemoryError)
    if on_device and torch.cuda.is_available():
        named = re.search(r"GPU (\d+)", text)  # the main thread's current device need not be the full one
        i = int(named[1]) if named else torch.cuda.current_device()
        device, total = f"cuda:{i}", torch.cuda.get_device_properties(i).total_memory
        peak = torch.cuda.max_memory_allocated(i)
    elif on_host or on_device:
        device, total = "host", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
    else:
        return None
    return (f"out of memory on {device}: peak {peak / 2**30:.2f} of {total / 2**30:.2f} GiB. Lower SEQ_LEN, "
            "NUM_ANCHORS, LOSS_CHUNK or QUEUE_DEPTH, or give this role a device of its own (TARGET_DEVICES, "
            f"DRAFTER_DEVICES). {text}")
