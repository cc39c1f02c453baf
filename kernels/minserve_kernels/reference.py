"""What each kernel means: one short torch function of the same name and arguments.

Why: a kernel is a page of pointer arithmetic; its meaning is five lines. These five lines are the
specification that the tests hold the kernels against, the path of machines without a GPU, and the place to
read first.

Invariant: everything is computed in float32, or in float64 where the input is, and rounded once at the end to
the input's type. So the exact answer to a question in bf16 is the reference of the same numbers in float64.

Taught in notebook 05.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from minserve_kernels.kv import PagedKV, decode, encode
from minserve_kernels.weights import unpack_int4


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Add the residual, divide each row by its root mean square, and weigh. -> y, x + residual

    x, residual: [T, E], weight: [E]

    >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)[0]
    tensor([[0.8485, 2.2627]])
    """
    total = x if residual is None else x + residual  # rounded to the type it is kept in, before it is normed
    wide = _wide(total)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
    return y.to(x.dtype), total


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """Turn the pairs (i, i + D/2) of every head by its token's angles. -> q, k; `in_place`: the same tensors

    q: [T, H, D], k: [T, K, D], cos, sin: [T, D/2] float32

    >>> quarter = torch.tensor([[0.0]]), torch.tensor([[1.0]])
    >>> rope(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0, 4.0]]]), *quarter)
    (tensor([[[-2.,  1.]]]), tensor([[[-4.,  3.]]]))
    """
    new_q, new_k = _turned(q, cos, sin), _turned(k, cos, sin)
    return (q.copy_(new_q), k.copy_(new_k)) if in_place else (new_q, new_k)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = _wide(x).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]  # the same for all heads
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up: [T, 2 F], gates first -> [T, F]"""
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def write_kv(kv: Tensor, slots: Tensor, cache: PagedKV) -> None:
    """Store a step's keys and values in the cache's format. A negative slot is padding: nothing is written.

    kv: [T, 2, K, D], keys first; slots: [T] ids, each block x S + offset, no two alike
    """
    kv, slots = kv[slots >= 0], slots[slots >= 0].long()
    codes, scales = encode(kv, cache.format)
    place = slots // cache.codes.shape[3], slots % cache.codes.shape[3]
    cache.codes.permute(0, 3, 1, 2, 4)[place] = codes  # seen as [N, S, 2, K, C]
    if cache.scales is not None and scales is not None:
        cache.scales.permute(0, 3, 1, 2, 4)[place] = scales


def decode_attention(
    q: Tensor, cache: PagedKV, tables: Tensor, lengths: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """One query per request, its last token's, over all its tokens. -> [B, H, D]

    q: [B, H, D]; tables: [B, M] block ids; lengths: [B]; window: how many tokens a query sees, with its own.
    A request of length 0 is padding: its answer is 0.
    """
    starts = torch.arange(len(q) + 1)
    return prefill_attention(q, cache, tables, starts, lengths, scale, window)


def prefill_attention(
    q: Tensor,
    cache: PagedKV,
    tables: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Chunks of queries over all tokens of their request, up to themselves. -> [T, H, D]

    Request b has the queries query_starts[b] to query_starts[b + 1] - 1. They are the last of its lengths[b]
    tokens, whose keys and values are in the blocks tables[b].
    q: [T, H, D]; query_starts: [B + 1]; lengths: [B]; tables: [B, M]; window: as in `decode_attention`
    """
    out = torch.zeros_like(q)
    starts = query_starts.tolist()
    for b, length in enumerate(lengths.tolist()):
        begin, end = starts[b], starts[b + 1]
        if length > 0 and end > begin:
            keys, values = gather(cache, tables[b], length, _wide(q).dtype)
            out[begin:end] = _attend(q[begin:end], keys, values, scale, window)
    return out


def gather(cache: PagedKV, table: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A request's keys and values. table: [M] block ids -> [K, length, D] each"""
    num_slots = cache.codes.shape[3]
    blocks = table[: -(-length // num_slots)].long()
    codes = cache.codes[blocks]  # [blocks, 2, K, S, C]
    scales = None if cache.scales is None else cache.scales[blocks]
    numbers = decode(codes, scales, cache.format, dtype).permute(1, 2, 0, 3, 4)  # [2, K, blocks, S, D]
    keys, values = numbers.flatten(2, 3)[:, :, :length].unbind()
    return keys, values


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
    """q: [n, H, D], the last n of the tokens; keys, values: [K, length, D] -> [n, H, D]"""
    num_queries, num_heads, _ = q.shape
    num_kv_heads, length, _ = keys.shape
    distance = torch.arange(length - num_queries, length, device=q.device)[:, None] - torch.arange(
        length, device=q.device
    )
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)  # [n, length]
    group = num_heads // num_kv_heads  # query heads that share a KV head
    rows = _wide(q).transpose(0, 1).unflatten(0, (num_kv_heads, group))  # [K, H/K, n, D]
    scores = (rows @ keys[:, None].mT * scale).masked_fill(hidden, -torch.inf)  # [K, H/K, n, length]
    answer = scores.softmax(-1) @ values[:, None]
    return answer.flatten(0, 1).transpose(0, 1).to(q.dtype)


def int8_linear(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """x W^T with W = codes * scales, a scale for each output. -> [T, O]

    x: [T, I], codes: [O, I] int8, scales: [O]
    """
    wide = _wide(x)
    weight = codes.to(wide.dtype) * scales[:, None].to(wide.dtype)
    return (wide @ weight.T).to(x.dtype)


def int4_linear(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, group_size: int) -> Tensor:
    """x W^T with W = (nibble - zero) * scale, both shared by `group_size` inputs of an output. -> [T, O]

    x: [T, I], codes: [O, I / 2] uint8 as `weights.pack_int4` packs them, scales, zeros: [O, I / group_size]
    """
    wide = _wide(x)
    grouped = unpack_int4(codes, group_size).to(wide.dtype).unflatten(1, (-1, group_size))  # [O, I / g, g]
    weight = ((grouped - zeros[..., None].to(wide.dtype)) * scales[..., None].to(wide.dtype)).flatten(1)
    return (wide @ weight.T).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    """The type to compute in: float32 at least."""
    return x if x.dtype == torch.float64 else x.float()
