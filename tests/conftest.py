"""The tests run from any folder; one thread each, for tiny tensors are slower on more. Examples are the same
in every run, and how long one takes decides nothing."""

import signal
import sys
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
torch.set_num_threads(1)
# as at a terminal: under nohup or behind a shell's & these are ignored, which runs and children would inherit
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")
