"""Where Triton keeps what it compiles in these tests: in the checkout, where git ignores it and `make clean` finds it."""

import os
from pathlib import Path

os.environ.setdefault("TRITON_CACHE_DIR", str(Path(__file__).parents[2] / "build" / "triton-cache"))  # before triton is imported
