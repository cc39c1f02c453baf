"""The memory of all requests: keys and values of every layer, in blocks of S slots that any request may hold.

Why: a request grows by a token at a time to a length nobody knows. Blocks let it do so without a reserved maximum, and let
requests with the same prefix hold the same block. Formats, layout and bytes are this file's business and no one else's.

A layer is one tensor [N + 1, 2, K, S, D]: block, key or value, KV head, slot, head size. A block's slots of one head lie
side by side, so that gathering blocks by (request, head) gives [requests x heads, tokens, D], which a batched matrix
product reads as it stands. Block N, the null block, is all zeros and is never written: it fills up short block tables.

Invariant: slots that no token was written to may hold anything (NaN, another request's past); readers mask them.

Taught in notebook 04.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minserve.model.config import ModelConfig

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def bytes_per_token(config: ModelConfig, kv_format: str) -> int:
    """Bytes that one token's keys and values take, over all layers: 2 x L x K x D numbers.

    >>> from minserve.model.config import ModelConfig
    >>> smollm2 = ModelConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
    ...     num_kv_heads=3, head_dim=64, max_positions=8192)
    >>> bytes_per_token(smollm2, "bf16")
    23040
    """
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * FORMATS[kv_format].itemsize


@dataclass(frozen=True, slots=True)
class Reading:
    """Which blocks a gather fetches. Slots in `unused` hold no token and are read as zeros, since 0 x NaN is NaN."""

    index: Tensor  # [B * K * blocks] rows of a layer
    unused: Tensor | None  # [U] slots of the gathered [B * K * num_keys]
    num_keys: int  # tokens of each block table, padding included
    # The scratch that is gathered into, for keys and for values, in three views made once a step:
    rows: tuple[Tensor, ...]  # [B * K * blocks, S * D]
    slots: tuple[Tensor, ...]  # [B * K * num_keys, D]
    keys: tuple[Tensor, ...]  # [B * K, num_keys, D]


class KVCache:
    """N blocks of S slots for L layers. `num_blocks` counts the usable ones; the null block comes on top."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        kv_format: str,
        device: torch.device | str = "cpu",
    ):
        if kv_format not in FORMATS:
            raise ValueError(f"KV format {kv_format!r} is not known; known: {', '.join(FORMATS)}")
        self.num_blocks, self.block_size, self.kv_format = num_blocks, block_size, kv_format
        self.num_kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        self.bytes_per_token = bytes_per_token(config, kv_format)
        self.bytes_per_block = self.bytes_per_token * block_size
        shape = (config.num_layers, num_blocks + 1, 2, config.num_kv_heads, block_size, config.head_dim)
        # Not zeroed: the operating system hands out the memory when a block is first written.
        self.blocks = torch.empty(shape, dtype=FORMATS[kv_format], device=device)  # [L, N+1, 2, K, S, D]
        self.blocks[:, self.null_block] = 0
        # The same memory as a layer writes it, by block and slot; as it reads it, a row is a block of one head.
        self._written = list(self.blocks.permute(0, 1, 4, 2, 3, 5))  # L of [N+1, S, 2, K, D]
        rows = self.blocks.view(config.num_layers, -1, block_size * config.head_dim)  # [L, (N+1) * 2 * K, S * D]
        self._read = [(layer, layer[config.num_kv_heads :]) for layer in rows]  # values: K rows behind keys
        self._scratch: dict[bool, Tensor] = {}  # for own blocks and for a shared prefix: [2, rows, S * D]

    @property
    def null_block(self) -> int:
        return self.num_blocks

    @property
    def num_bytes(self) -> int:
        return self.blocks.numel() * self.blocks.itemsize

    def place(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Block and offset of each slot id, made once a step. slots: [T], slot id = block x S + offset"""
        return slots // self.block_size, slots % self.block_size

    def write(self, layer: int, kv: Tensor, place: tuple[Tensor, Tensor]) -> None:
        """Store the keys and values of a step's tokens. kv: [T, 2, K, D], keys first; place: from `place(slots)`"""
        self._written[layer].index_put_(place, kv.to(self.blocks.dtype))

    def reading(self, tables: Sequence[Sequence[int]], unused: Tensor | None = None, is_shared: bool = False) -> "Reading":
        """Prepare, once a step, to fetch block tables of equal length. tables: B of n blocks; unused: see `Reading`"""
        ids = torch.tensor(tables, device=self.blocks.device)  # [B, n]
        heads = torch.arange(self.num_kv_heads, device=ids.device)[:, None]
        index = (ids[:, None] * (2 * self.num_kv_heads) + heads).flatten()
        scratch = self._scratch_of(len(index), is_shared)
        num_keys = ids.shape[1] * self.block_size
        slots = tuple(kind.view(-1, self.head_dim) for kind in scratch)
        return Reading(index, unused, num_keys, scratch, slots, tuple(kind.view(-1, num_keys, self.head_dim) for kind in scratch))

    def _scratch_of(self, num_rows: int, is_shared: bool) -> tuple[Tensor, ...]:
        """Room for gathered keys and values, [num_rows, S * D] each.

        One for all layers and steps: fresh memory each time would cost a page fault per 4 KiB.
        """
        if is_shared not in self._scratch or self._scratch[is_shared].shape[1] < num_rows:
            self._scratch[is_shared] = self.blocks.new_empty(2, num_rows, self.block_size * self.head_dim)
        return self._scratch[is_shared][:, :num_rows].unbind()

    def gather(self, layer: int, kind: int, reading: "Reading", dtype: torch.dtype) -> Tensor:
        """Fetch the keys (kind 0) or values (kind 1) of whole block tables -> [B * K, num_keys, D]

        Valid until the next gather of that kind, where a shared prefix and the requests' own blocks do not disturb each other.
        """
        torch.index_select(self._read[layer][kind], 0, reading.index, out=reading.rows[kind])
        if reading.unused is not None:
            reading.slots[kind].index_fill_(0, reading.unused, 0)
        gathered = reading.keys[kind]
        return gathered if gathered.dtype == dtype else gathered.to(dtype)

    @torch.inference_mode()
    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target), in all layers, reading every source before any target is written."""
        if copies:
            sources, targets = torch.tensor(copies, device=self.blocks.device).unbind(1)
            self.blocks[:, targets] = self.blocks[:, sources]
