"""minserve: a compact but complete LLM serving engine that people learn serving from.

    from minserve import LLM
    with LLM() as llm:
        print(llm.generate("The sea is"))

Invariant: importing the package costs nothing. The three names below are looked up at first use, so that `minserve.core`
(standard library only) never pays for torch.

Taught in notebook 00.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minserve.core.request import SamplingParams
    from minserve.interface import EngineConfig
    from minserve.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "SamplingParams", "__version__"]

_HOME = {"LLM": "minserve.llm", "EngineConfig": "minserve.interface", "SamplingParams": "minserve.core.request"}


def __getattr__(name: str) -> object:
    """Import a public name from its home at first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'minserve' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
