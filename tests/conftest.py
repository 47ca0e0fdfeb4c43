"""The tests run from any folder; one thread each, for tiny tensors are slower on more."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
torch.set_num_threads(1)
