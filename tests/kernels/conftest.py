"""For all tests of kernels: the same random numbers every time, and a place for what Triton compiles.

That place is in the checkout, where git ignores it, so that only the first run pays for compiling.
"""

import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("TRITON_CACHE_DIR", str(Path(__file__).parents[2] / "build" / "triton-cache"))  # before triton is imported


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
