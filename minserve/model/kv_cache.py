"""The memory of all requests: keys and values of every layer, in blocks of S slots that any request may hold.

Why: a request grows by a token at a time to a length nobody knows. Blocks let it do so without a reserved maximum, and let
requests with the same prefix hold the same block. Layout and bytes are this file's business and no one else's; what a number
is stored as, `kv_formats` says.

A layer is one tensor [N + 1, 2, K, S, C]: block, key or value, KV head, slot, the C stored numbers of a head of size D, and in int8
and int4 a second one of scales [N + 1, 2, K, S, G]. A block's slots of one head lie side by side, so that gathering blocks by
(request, head) gives [requests x heads, tokens, D], which a batched matrix product reads as it stands. Block N, the null block, is
all zeros and is never written: it fills up short block tables.

Measured on one Zen 4 core, bf16, attention of one layer of SmolLM2-135M, 32 requests of 512 tokens, as a multiple of the time with bf16
blocks. Codes become numbers in the gathered scratch: int8 1.35, int4 2.0. Codes are multiplied as they are, and scores and weights
by the scales: int8 0.96, int4 2.5. So int8 does the one and int4 the other. A whole decode step of 16 requests of 512 tokens takes
1.03 times as long with int8, 1.6 with int4 and with fp8, which torch can only look up.

Invariant: slots that no token was written to may hold anything (NaN, another request's past); readers mask them. Nothing but
what a gather fetches is ever held at full precision.

Taught in notebook 04, its formats in notebook 08.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minserve.model.config import ModelConfig
from minserve.model.kv_formats import MIXED, decode_into, mixing_matrix, require_format
from minserve_kernels.kv import CODES, NUM_SCALES, PLAIN, PagedKV, bytes_per_head, encode, num_codes


def bytes_per_token(config: ModelConfig, kv_cache_dtype: str) -> int:
    """Bytes that one token's keys and values take, over all layers: 2 x L x K heads of D numbers, with their scales.

    >>> from minserve.model.config import ModelConfig
    >>> smollm2 = ModelConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
    ...     num_kv_heads=3, head_dim=64, max_positions=8192)
    >>> [bytes_per_token(smollm2, name) for name in ("bf16", "int8", "int4")]
    [23040, 11880, 6480]
    """
    return 2 * config.num_layers * config.num_kv_heads * bytes_per_head(config.head_dim, kv_cache_dtype)


@dataclass(frozen=True, slots=True)
class Reading:
    """Which blocks a gather fetches, and the scratch it fetches them into. Made once a step, for all layers."""

    index: Tensor  # [B * K * blocks] rows of a layer
    unused: Tensor | None  # [U] slots of the gathered [B * K * num_keys] without a token: zeros, since 0 x NaN is NaN
    num_keys: int  # tokens of each block table, padding included
    codes: tuple[Tensor, ...]  # keys' and values': [B * K * blocks, S * C]
    scales: Tensor | None  # [B * K * blocks, S * G]
    factors: tuple[Tensor, ...] | None  # keys' and values' [B * K, num_keys]: scales that `fetch` leaves to its caller
    slots: tuple[Tensor, ...]  # the numbers that codes stand for, in the compute type: [B * K * num_keys, D]
    keys: tuple[Tensor, ...]  # the same as [B * K, num_keys, D]


class _Store:
    """Codes or scales of all layers, [L, N+1, 2, K, S, X], and the same memory as a layer writes and reads it."""

    def __init__(self, tensor: Tensor):
        num_layers, _, _, num_kv_heads, *row = tensor.shape
        self.tensor, self.row_size = tensor, math.prod(row)
        self.written = list(tensor.permute(0, 1, 4, 2, 3, 5))  # L of [N+1, S, 2, K, X]: by block and slot
        rows = tensor.view(num_layers, -1, self.row_size)  # a row is a block of one head
        self.read = [(layer, layer[num_kv_heads:]) for layer in rows]  # values: K rows behind keys


class KVCache:
    """N blocks of S slots for L layers. `num_blocks` counts the usable ones; the null block comes on top."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        kv_cache_dtype: str,
        device: torch.device | str = "cpu",
    ):
        require_format(kv_cache_dtype, config.head_dim, torch.device(device))
        self.num_blocks, self.block_size, self.kv_cache_dtype = num_blocks, block_size, kv_cache_dtype
        self.num_kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        self.bytes_per_token = bytes_per_token(config, kv_cache_dtype)
        self.bytes_per_block = self.bytes_per_token * block_size
        shape = (config.num_layers, num_blocks + 1, 2, config.num_kv_heads, block_size)
        size, num_scales = num_codes(self.head_dim, kv_cache_dtype), NUM_SCALES.get(kv_cache_dtype)
        # Not zeroed: the operating system hands out the memory when a block is first written.
        self.blocks = torch.empty(*shape, size, dtype=CODES[kv_cache_dtype], device=device)
        self.scales = None
        if num_scales:
            self.scales = torch.empty(*shape, num_scales, dtype=torch.float16, device=device)
        self._stores = [_Store(tensor) for tensor in (self.blocks, self.scales) if tensor is not None]
        for store in self._stores:
            store.tensor[:, self.null_block] = 0
        self._mixing = mixing_matrix(self.head_dim).to(device) if kv_cache_dtype in MIXED else None
        self._scratch: dict[str, Tensor] = {}

    @property
    def null_block(self) -> int:
        return self.num_blocks

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    @property
    def num_bytes(self) -> int:
        return sum(store.tensor.nbytes for store in self._stores)

    def paged(self, layer: int) -> PagedKV:
        """A layer's blocks as the kernels take them."""
        scales = None if self.scales is None else self.scales[layer]
        return PagedKV(self.blocks[layer], scales, self.head_dim, self.kv_cache_dtype)

    # --- writing ----------------------------------------------------------------------------------

    def mix(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, keys and values as they are stored: turned by an orthogonal matrix, if the format has one."""
        if self._mixing is None:
            return q, kv
        mixing = self._mixing.to(q.dtype)
        return q @ mixing, kv @ mixing

    def unmix(self, attended: Tensor) -> Tensor:
        """Answers of attention over values as they are stored become those over the values. [T, H * D]"""
        if self._mixing is None:
            return attended
        heads = attended.unflatten(-1, (-1, self.head_dim))  # [T, H, D]
        return (heads @ self._mixing.T.to(attended.dtype)).flatten(-2)

    def place(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Block and offset of each slot id, made once a step. slots: [T], slot id = block x S + offset"""
        return slots // self.block_size, slots % self.block_size

    def write(self, layer: int, kv: Tensor, place: tuple[Tensor, Tensor]) -> None:
        """Store the keys and values of a step's tokens. kv: [T, 2, K, D], keys first; place: from `place`"""
        codes, scales = encode(kv, self.kv_cache_dtype)
        self._stores[0].written[layer].index_put_(place, codes)
        if scales is not None:
            self._stores[1].written[layer].index_put_(place, scales)

    @torch.inference_mode()
    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target) in all layers; all sources are read before a target is written."""
        if copies:
            sources, targets = torch.tensor(copies, device=self.device).unbind(1)
            for store in self._stores:
                store.tensor[:, targets] = store.tensor[:, sources]

    # --- reading ----------------------------------------------------------------------------------

    def reading(
        self,
        tables: Sequence[Sequence[int]],
        unused: Tensor | None = None,
        is_shared: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Reading:
        """Prepare, once a step, to fetch block tables of equal length. tables: B of n blocks

        unused: see `Reading`. dtype: the compute type. None: as numbers are stored, and float32 for fp8, int8 and int4.
        """
        ids = torch.tensor(tables, device=self.device)  # [B, n]
        heads = torch.arange(self.num_kv_heads, device=ids.device)[:, None]
        index = (ids[:, None] * (2 * self.num_kv_heads) + heads).flatten()
        stored, num_rows, num_keys = self.blocks.dtype, len(index), ids.shape[1] * self.block_size
        dtype = dtype or (stored if self.kv_cache_dtype in PLAIN else torch.float32)
        names = [f"{'shared' if is_shared else 'own'} {kind}" for kind in ("keys", "values")]
        numbers = [self._scratch_of(name, num_rows, self.block_size * self.head_dim, dtype) for name in names]
        codes, scales, factors = numbers, None, None
        if dtype != stored:
            codes = [self._scratch_of("codes", num_rows, self._stores[0].row_size, stored)] * 2
        if self.scales is not None:
            scales = self._scratch_of("scales", num_rows, self._stores[1].row_size, torch.float16)
        if self.kv_cache_dtype == "int8" and dtype != torch.float16:  # too small a range for products with codes
            kept = [self._scratch_of(f"factors of {name}", num_rows, self.block_size, dtype) for name in names]
            factors = tuple(kind.view(-1, num_keys) for kind in kept)
        return Reading(
            index=index,
            unused=unused,
            num_keys=num_keys,
            codes=tuple(codes),
            scales=scales,
            factors=factors,
            slots=tuple(kind.view(-1, self.head_dim) for kind in numbers),
            keys=tuple(kind.view(-1, num_keys, self.head_dim) for kind in numbers),
        )

    def _scratch_of(self, name: str, num_rows: int, row_size: int, dtype: torch.dtype) -> Tensor:
        """Room for gathered rows, the same for all layers and steps: fresh memory costs a page fault per 4 KiB."""
        kept = self._scratch.get(name)
        if kept is None or len(kept) < num_rows or kept.dtype != dtype:
            kept = self._scratch[name] = torch.empty(num_rows, row_size, dtype=dtype, device=self.device)
        return kept[:num_rows]

    def gather(self, layer: int, kind: int, reading: Reading, dtype: torch.dtype) -> Tensor:
        """Fetch the keys (kind 0) or values (kind 1) of whole block tables -> [B * K, num_keys, D]

        Valid until the next gather of that kind. A shared prefix has room of its own.
        """
        numbers, factors = self.fetch(layer, kind, reading)
        if factors is not None:
            numbers.mul_(factors.unsqueeze(-1))
        return numbers if numbers.dtype == dtype else numbers.to(dtype)

    def fetch(self, layer: int, kind: int, reading: Reading) -> tuple[Tensor, Tensor | None]:
        """`gather` for a caller who applies int8's scales himself: numbers, and factors [B * K, num_keys] or None

        A factor for a score, and one for a weight, are less work than D for the D numbers of a key or value.
        """
        codes, slots, scales = reading.codes[kind], reading.slots[kind], reading.scales
        torch.index_select(self._stores[0].read[layer][kind], 0, reading.index, out=codes)
        if scales is not None:
            torch.index_select(self._stores[1].read[layer][kind], 0, reading.index, out=scales)
        if scales is not None and reading.factors is not None:
            slots.copy_(codes.view(slots.shape))
            factors = reading.factors[kind]
            factors.view(-1).copy_(scales.view(-1))
            if reading.unused is not None:
                factors.view(-1).index_fill_(0, reading.unused, 0)
            return reading.keys[kind], factors
        if codes.data_ptr() != slots.data_ptr():
            scales = None if scales is None else scales.view(len(slots), -1)
            decode_into(slots, codes.view(len(slots), -1), scales, self.kv_cache_dtype)
        if reading.unused is not None:
            slots.index_fill_(0, reading.unused, 0)
        return reading.keys[kind], None
