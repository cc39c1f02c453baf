"""What the tests of decode and prefill share: paged requests in a cache that is poisoned wherever no token is."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minserve_kernels import reference
from minserve_kernels.kv import PagedKV
from minserve_kernels.memtrace import Access
from tests.kernels.helpers import poisoned_cache

LENGTHS = (1, 7, 16, 17, 33, 50)
FORMATS = [
    ("fp32", torch.float32),
    ("fp32", torch.bfloat16),
    ("bf16", torch.bfloat16),
    ("bf16", torch.float32),
    ("fp16", torch.float16),
    ("fp8", torch.bfloat16),
    ("int8", torch.float32),
    ("int8", torch.bfloat16),
    ("int8", torch.float16),
    ("int4", torch.float32),
    ("int4", torch.bfloat16),
    ("int4", torch.float16),
]


class Paged(NamedTuple):
    """Requests in a cache. Whatever belongs to no token is NaN: the rest of a last block, blocks without an owner."""

    cache: PagedKV
    tables: Tensor  # [B, M], filled up with a block that does not exist
    lengths: Tensor  # [B]

    def slots(self, request: int, first: int = 0) -> Tensor:
        """Slot ids of a request's tokens, from `first` on."""
        size = self.cache.codes.shape[3]
        tokens = torch.arange(first, int(self.lengths[request]))
        return self.tables[request][tokens // size].long() * size + tokens % size


def bound(dtype: torch.dtype, format: str) -> float:
    """The error that is allowed: of rounding the weights and the answer to the queries' type, as a part of the norm."""
    if dtype == torch.float16 and format in ("int8", "int4"):
        dtype = torch.bfloat16  # that the weights are in, since it holds small scales
    return {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}[dtype]


def paged(format: str, head_dim: int, num_kv_heads: int, lengths: Sequence[int] = LENGTHS, num_slots: int = 16) -> Paged:
    """Random keys and values, in blocks that lie anywhere."""
    torch.manual_seed(0)
    num_used = sum(-(-length // num_slots) for length in lengths)
    cache = poisoned_cache(format, head_dim, num_kv_heads, num_blocks=num_used + 2, num_slots=num_slots)
    free = torch.randperm(num_used + 2).tolist()
    tables = torch.full((len(lengths), max(-(-length // num_slots) for length in lengths) + 1), 2**30, dtype=torch.int32)
    for table, length in zip(tables, lengths, strict=True):
        for i in range(-(-length // num_slots)):
            table[i] = free.pop()
    requests = Paged(cache, tables, torch.tensor(lengths, dtype=torch.int32))
    for request, length in enumerate(lengths):
        reference.write_kv(torch.randn(length, 2, num_kv_heads, head_dim), requests.slots(request), cache)
    return requests


def error(got: Tensor, wanted: Tensor) -> float:
    """Distance as a part of the norm."""
    return ((got.double() - wanted).norm() / wanted.norm()).item()


def slots_read(accesses: Sequence[Access], cache: PagedKV, tensor: str) -> set[int]:
    """Slot ids whose codes or scales were read, of keys and values and of any head."""
    shape = (cache.codes if tensor == "codes" else cache.scales).shape  # pyright: ignore
    elements = np.concatenate([access.elements for access in accesses if access.tensor == tensor])
    block, _, _, slot, _ = np.unravel_index(elements, shape)
    return set((block * shape[3] + slot).tolist())
