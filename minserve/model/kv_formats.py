"""What a KV format asks of the engine: whether it can be had here, its numbers read fast on a CPU, and the mixing before int4.

Why: the formats themselves are defined once, in `minserve_kernels.kv`. Two things come on top. Codes that were gathered have to become
numbers in few passes over memory. And int4 has 15 steps from one end of half a head to the other, so one loud channel (keys have such)
leaves all others a step or two. An orthogonal matrix spreads every channel over all of them: q . k = (q M) . (k M), and the sum of
values by weight is mixed as they are, so the answer is mixed back once. Nothing is learned or kept, and the bytes are the same.

Measured on SmolLM2-135M over 4,096 tokens of the course's own text, as a KL divergence from fp32 KV in nats a token: int4 as it is 0.122
(perplexity +13 %), keys mixed 0.058 (+4.2 %), values too 0.050 (+4.4 %; all perplexities +-1.1). Random signs before the matrix: no
difference. The best of five scales for each half instead of the one that clips nothing: a tenth less. int8 without mixing: 0.0007 (+0.1 %).

Invariant: M is orthogonal, so mixing changes no score and no answer but by rounding.

Taught in notebook 08.
"""

import math

import torch
from torch import Tensor

from minserve_kernels import kv

AUTO = "auto"  # the compute type
MIXED = frozenset({"int4"})  # formats whose keys and values are stored mixed
# On a CPU torch turns an e4m3 number into another type in 20 ns; looking up its byte takes a tenth of that.
_BYTES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
_FP8_NUMBERS = {dtype: kv.decode(_BYTES, None, "fp8", dtype) for dtype in kv.PLAIN.values()}


def require_format(name: str, head_dim: int, device: torch.device) -> None:
    """Raise ValueError for a format that is unknown, or that these heads or this device cannot have."""
    if name == AUTO:
        return
    if name not in kv.CODES:
        raise ValueError(f"kv_cache_dtype {name!r} is not known; known: {AUTO}, {', '.join(kv.CODES)}")
    kv.num_codes(head_dim, name)
    if name == "fp8" and not _has_fp8(device):
        raise ValueError(f"kv_cache_dtype 'fp8': torch {torch.__version__} cannot keep e4m3 on {device}; int8 takes nearly as few bytes")


def _has_fp8(device: torch.device) -> bool:
    try:
        torch.zeros(1, device=device).to(kv.CODES["fp8"])
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True


def decode_into(out: Tensor, codes: Tensor, scales: Tensor | None, name: str) -> None:
    """`kv.decode` without memory of its own. Scales are rounded to the compute type (in bf16 by 0.2 %).

    codes: [R, C], scales: [R, G] -> out: [R, D]
    """
    if name == "int4":
        assert scales is not None
        halves = out.unflatten(-1, (2, -1))  # [R, 2, D / 2]
        halves[:, 0].copy_(codes & 15)
        halves[:, 1].copy_(codes >> 4)
        halves.sub_(7.5).mul_(scales.to(out.dtype).unsqueeze(-1))
    elif name == "int8":
        assert scales is not None
        out.copy_(codes).mul_(scales.to(out.dtype))
    elif name == "fp8" and out.device.type == "cpu":
        torch.index_select(_FP8_NUMBERS[out.dtype], 0, codes.view(torch.uint8).flatten().int(), out=out.view(-1))
    else:
        out.copy_(codes)


def mixing_matrix(head_dim: int) -> Tensor:
    """An orthogonal matrix [D, D] that spreads every number over all D: Hadamard's, where D is a power of two.

    Otherwise D = m 2^n, and it is the Kronecker product of an m x m cosine transform with the Hadamard matrix of 2^n.

    >>> (mixing_matrix(4) * 2).tolist()
    [[1.0, 1.0, 1.0, 1.0], [1.0, -1.0, 1.0, -1.0], [1.0, 1.0, -1.0, -1.0], [1.0, -1.0, -1.0, 1.0]]
    """
    odd = head_dim
    while odd % 2 == 0:
        odd //= 2
    rows, columns = torch.arange(odd)[:, None], torch.arange(odd)
    matrix = torch.cos(math.pi / odd * rows * (columns + 0.5)).double() * (2 / odd) ** 0.5
    matrix[0] = odd**-0.5
    while len(matrix) < head_dim:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix) * 0.5**0.5
    return matrix.float()
