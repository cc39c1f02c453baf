"""The table of `minserve bench --gpu`: which works are set against which limit, and from where on that is good.

Why: "fast" means nothing without a limit. A kernel that moves bytes is held against a copy that was measured in the same run, on the
same card; attention also against torch's own on keys that lie together, and against gathering them first. Two bars stand beside
every row: below `passes`, something is wrong; `goal` is what careful kernels of others reach.

Bars were estimated from published figures for an H200 (4.3 TB/s copied, 790 TFLOP/s in bf16). On other cards shares and ratios mean
the same; the rows in microseconds and TFLOP/s are the H200's.

Invariant: a row is arithmetic over times, bytes and FLOPs; nothing in here touches a device.

Taught in notebook 05.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Measured(NamedTuple):
    """A work's seconds, beside the bytes and FLOPs that it needs."""

    seconds: float
    num_bytes: int
    num_flops: int


@dataclass(frozen=True, slots=True)
class Measure:
    """How a row's number comes about, and in which direction it is better."""

    unit: str
    higher_is_better: bool
    value: Callable[..., float]  # (copy_bytes_per_s, one or two works) -> the number


SHARE = Measure("% of copy", True, lambda copy_bytes_per_s, a: 100 * a.num_bytes / a.seconds / copy_bytes_per_s)
MICROSECONDS = Measure("us", False, lambda _, a: 1e6 * a.seconds)
TFLOPS = Measure("TFLOP/s", True, lambda _, a: a.num_flops / a.seconds / 1e12)
TIME_RATIO = Measure("x its time", False, lambda _, a, b: a.seconds / b.seconds)
SPEED_RATIO = Measure("x as fast", True, lambda _, a, b: b.seconds / a.seconds)


@dataclass(frozen=True, slots=True)
class Row:
    """What is measured, over which works (by the names they have in bench_gpu), and the two bars."""

    name: str
    measure: Measure
    works: tuple[str, ...]
    passes: float
    goal: float


# Works are named kernel, format, requests x tokens; "smol" has the heads of SmolLM2 (9/3, D 64), the others 32/8 heads of 128.
TABLE: tuple[Row, ...] = (
    Row("decode bf16, 32/8 heads, D 128, 64 x 4k", SHARE, ("decode bf16 64 x 4k",), 60, 80),
    Row("decode bf16, 32/8 heads, D 128, 16 x 16k", SHARE, ("decode bf16 16 x 16k",), 60, 80),
    Row("the same, 8 x 4k, split", SHARE, ("decode bf16 8 x 4k",), 40, 60),
    Row("the same, 1 x 4k, both kernels", MICROSECONDS, ("decode bf16 1 x 4k",), 20, 12),
    Row("decode bf16, 9/3 heads, D 64, 256 x 2k", SHARE, ("decode bf16 smol 256 x 2k",), 45, 65),
    Row("int8 KV, 64 x 4k, against bf16", TIME_RATIO, ("decode int8 64 x 4k", "decode bf16 64 x 4k"), 0.70, 0.58),
    Row("fp8 KV, 64 x 4k, against bf16", TIME_RATIO, ("decode fp8 64 x 4k", "decode bf16 64 x 4k"), 0.70, 0.58),
    Row("int4 KV, 64 x 4k, against bf16", TIME_RATIO, ("decode int4 64 x 4k", "decode bf16 64 x 4k"), 0.60, 0.40),
    Row("decode, against SDPA on contiguous KV", TIME_RATIO, ("decode bf16 64 x 4k", "contiguous 64 x 4k"), 1.3, 1.1),
    Row("decode, against gather + SDPA", SPEED_RATIO, ("decode bf16 64 x 4k", "gathered 64 x 4k"), 2.0, 2.7),
    Row("prefill, causal, D 128, 8k, paged", TFLOPS, ("prefill 8k",), 200, 350),
    Row("prefill, against SDPA flash", SPEED_RATIO, ("prefill 8k", "contiguous prefill 8k"), 0.5, 0.7),
    Row("RMSNorm with residual", SHARE, ("norm",), 75, 88),
    Row("SwiGLU", SHARE, ("swiglu",), 75, 88),
    Row("RoPE", SHARE, ("rope",), 75, 88),
    Row("KV write, bf16", SHARE, ("write bf16",), 75, 88),
    Row("int4 weights, 1 row, 4096 x 14336", SHARE, ("int4 1 row",), 45, 65),
    Row("int4 weights, 16 rows, 4096 x 14336", SHARE, ("int4 16 rows",), 45, 65),
    Row("int4 weights, 16 rows, against cuBLAS bf16", SPEED_RATIO, ("int4 16 rows", "cublas 16 rows"), 1.8, 2.8),
)


@dataclass(frozen=True, slots=True)
class Result:
    """A row with its number, or with the reason why it has none."""

    row: Row
    value: float | None
    error: str | None = None

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "failed"
        return judge(self.value, self.row)

    def to_json(self) -> dict[str, object]:
        """A row of the file; times stand there on their own."""
        row = self.row
        found = {"name": row.name, "unit": row.measure.unit, "value": self.value, "pass": row.passes, "goal": row.goal}
        return {**found, "verdict": self.verdict, "works": list(row.works), "error": self.error}


def judge(value: float, row: Row) -> str:
    """goal, pass, or MISSED; a number that is none has missed.

    >>> judge(79.9, TABLE[0]), judge(80.0, TABLE[0]), judge(20.1, TABLE[3])
    ('pass', 'goal', 'MISSED')
    """
    sign = 1 if row.measure.higher_is_better else -1
    if math.isnan(value) or sign * value < sign * row.passes:
        return "MISSED"
    return "goal" if sign * value >= sign * row.goal else "pass"


def result_of(row: Row, measured: Mapping[str, Measured | str], copy_bytes_per_s: float) -> Result:
    """A row's number. measured: by name, a work or the reason why it was not measured."""
    works = [measured.get(name, "not measured") for name in row.works]
    reasons = [f"{name}: {work}" for name, work in zip(row.works, works, strict=True) if isinstance(work, str)]
    if row.measure is SHARE and not copy_bytes_per_s > 0:
        reasons.append("the copy was not measured")
    if reasons:
        return Result(row, None, "; ".join(reasons))
    return Result(row, row.measure.value(copy_bytes_per_s, *works))


HEADER = f"{'':<46} {'measured':>10} {'':<11} {'pass':>8} {'goal':>8}  verdict"


def line(result: Result) -> str:
    """A row as text."""
    row, sign = result.row, ">=" if result.row.measure.higher_is_better else "<="
    value = "-" if result.value is None else f"{result.value:.2f}"
    bars = f"{f'{sign} {row.passes:g}':>8} {f'{sign} {row.goal:g}':>8}"
    reason = f" ({result.error})" if result.error else ""
    return f"{row.name:<46} {value:>10} {row.measure.unit:<11} {bars}  {result.verdict}{reason}"
