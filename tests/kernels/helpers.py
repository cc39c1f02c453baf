"""What the kernels' tests share: small caches of one layer, empty or full of NaN, and what "equal" means."""

import torch
from torch import Tensor

from minserve_kernels.kv import CODES, NUM_SCALES, PagedKV, num_codes

NAN_BYTE = 0x7F  # of e4m3


def empty_cache(format: str, head_dim: int, num_kv_heads: int, num_blocks: int = 4, num_slots: int = 16) -> PagedKV:
    """All zeros, in the layout that the engine has."""
    shape = (num_blocks, 2, num_kv_heads, num_slots)
    codes = torch.zeros(*shape, num_codes(head_dim, format), dtype=CODES[format])
    scales = torch.zeros(*shape, NUM_SCALES[format], dtype=torch.float16) if format in NUM_SCALES else None
    return PagedKV(codes, scales, head_dim, format)


def poisoned_cache(format: str, head_dim: int, num_kv_heads: int, num_blocks: int = 4, num_slots: int = 16) -> PagedKV:
    """Whoever reads a slot that was not written gets NaN: integer codes can't be NaN, but their scales can."""
    cache = empty_cache(format, head_dim, num_kv_heads, num_blocks, num_slots)
    if cache.scales is not None:
        cache.scales.fill_(torch.nan)
    elif format == "fp8":
        cache.codes.view(torch.uint8).fill_(NAN_BYTE)
    else:
        cache.codes.fill_(torch.nan)
    return cache


def assert_one_rounding_apart(got: Tensor, wanted: Tensor) -> None:
    """Equal but for the last place: float32 sums may be added in another order, and then round to a neighbour."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    places = 2e-6 if got.dtype == torch.float32 else torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), wanted.double(), rtol=places, atol=1e-6)
