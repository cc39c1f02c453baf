"""What a decoder computes between its matrix products, behind one object that is chosen once: torch's operations or Triton's kernels.

Why: on a GPU most of a decoder's small operations wait for memory, and kernels that fuse them and read the cache through the block
tables wait less; on a CPU torch is faster. The decoder should know neither, so both stand behind the same six names.

Invariant: both give the same numbers up to rounding. Who lays out a step is who attends to it.

Taught in notebook 05.
"""

from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from minserve.core.batch import ScheduledBatch
from minserve.model.attention import AttentionMetadata, paged_attention
from minserve.model.attention_triton import TritonOperations, launches_are_diverted, load_kernels
from minserve.model.config import ModelConfig
from minserve.model.kv_cache import KVCache
from minserve.model.linear import AnyLinear
from minserve.model.rope import Rotation, rotate_

BACKENDS = ("auto", "torch", "triton")
SMALLEST_BLOCK = 16  # slots: what a tensor core multiplies at once
LARGEST_HEAD = 128
TRITON_CAPABILITY = (8, 0)  # the oldest of NVIDIA's cards (Ampere) that Triton supports
FP8_CAPABILITY = (8, 9)  # older ones have no e4m3, and Triton refuses to compile it for them


class BackendUnavailable(ValueError):
    """The backend that was asked for cannot serve here; says why, and what would help."""


class Operations(Protocol):
    """What differs between backends. E = hidden size, I = intermediate size."""

    @property
    def name(self) -> str: ...

    def lay_out(self, batch: ScheduledBatch, cache: KVCache, config: ModelConfig, dtype: torch.dtype) -> Any:
        """The step as tensors, once for all layers. Has `rows`, in the order of their tokens, `token_ids` [T] and `positions` [T]."""
        ...

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dimension."""
        ...

    def add_norm(self, linear: AnyLinear, y: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The residual stream after a sublayer, x + linear(y), behind its norm. x: [T, E] -> normed, sum. May overwrite x."""
        ...

    def rotate_(self, heads: Tensor, num_heads: int, turn: Rotation) -> None:
        """RoPE in place on queries and keys. heads: [T, H + K, D], the H = `num_heads` query heads first"""
        ...

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up. gate_up: [T, 2 I] -> [T, I]"""
        ...

    def attend(self, q: Tensor, kv: Tensor, cache: KVCache, layer: int, step: Any, scale: float, window: int | None) -> Tensor:
        """Write the step's keys and values, then attend. q: [T, H, D], kv: [T, 2, K, D] -> [T, H * D]"""
        ...


class TorchOperations:
    """Torch's own operations: what runs on a CPU, and what the kernels are held against."""

    name = "torch"

    def lay_out(self, batch: ScheduledBatch, cache: KVCache, config: ModelConfig, dtype: torch.dtype) -> AttentionMetadata:
        return AttentionMetadata.build(batch, cache, config.windows, dtype)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.rms_norm(x, weight.shape, weight, eps)

    def add_norm(self, linear: AnyLinear, y: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = linear(y, add=x)
        return self.norm(x, weight, eps), x

    def rotate_(self, heads: Tensor, num_heads: int, turn: Rotation) -> None:
        rotate_(heads, turn)  # q and k in one go

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def attend(
        self, q: Tensor, kv: Tensor, cache: KVCache, layer: int, step: AttentionMetadata, scale: float, window: int | None
    ) -> Tensor:
        cache.write(layer, kv, step.place)
        return paged_attention(q, cache, layer, step, scale, window)


# --- the choice -----------------------------------------------------------------------------------


def choose_operations(backend: str, cache: KVCache) -> tuple[Operations, str]:
    """The operations for a cache where it lies, and why these. auto: the kernels on a CUDA or HIP device, torch elsewhere.

    Raises ValueError for an unknown backend, BackendUnavailable for kernels that cannot serve here.
    """
    if backend not in BACKENDS:
        raise ValueError(f"attention backend {backend!r} is not known; known: {', '.join(BACKENDS)}")
    if backend == "torch":
        return TorchOperations(), "as asked for"
    if backend == "auto" and not _is_gpu(cache):
        return TorchOperations(), f"since {cache.device} is no CUDA or HIP device"
    obstacle = why_no_triton(cache)
    if obstacle is None:
        return TritonOperations(load_kernels()), f"on {cache.device}"
    if backend == "auto":
        return TorchOperations(), f"since {obstacle}"
    raise BackendUnavailable(f"attention_backend='triton': {obstacle}")


def why_no_triton(cache: KVCache) -> str | None:
    """What keeps the kernels from serving this cache, in words that help; None if nothing does."""
    if find_spec("triton") is None or find_spec("minserve_kernels") is None:
        return "Triton is not installed; on Linux: pip install 'minserve[triton]'"
    if not _is_gpu(cache) and not launches_are_diverted():
        return (
            f"kernels run on CUDA and HIP devices, this is {cache.device}; "
            "to try them here, one program at a time: `with minserve_kernels.interpret.interpreted(): ...`"
        )
    if cache.block_size < SMALLEST_BLOCK or cache.block_size & (cache.block_size - 1):
        return f"kernels take blocks of a power of two from {SMALLEST_BLOCK} slots, not of {cache.block_size}"
    if cache.head_dim > LARGEST_HEAD:
        return f"kernels take heads of up to {LARGEST_HEAD} numbers, the model's have {cache.head_dim}"
    return _too_old(cache.device, cache.kv_cache_dtype) if _is_gpu(cache) and torch.version.hip is None else None


def _too_old(device: torch.device, kv_cache_dtype: str) -> str | None:
    """What an NVIDIA card lacks."""
    capability = torch.cuda.get_device_capability(device)
    words = f"{device} has compute capability {capability[0]}.{capability[1]}"
    if capability < TRITON_CAPABILITY:
        return f"{words}, Triton needs 8.0"
    if kv_cache_dtype == "fp8" and capability < FP8_CAPABILITY:
        return f"{words}, kernels need 8.9 for fp8; int8 takes about as few bytes"
    return None


def _is_gpu(cache: KVCache) -> bool:
    return cache.device.type == "cuda"  # torch calls HIP devices so, too
