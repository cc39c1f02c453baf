"""A run in words: the table that demo, simulator and comparisons print.

Why: the same lines in the same order wherever a run is shown, so that two runs can be read against each
other.

Invariant: every number is a field of a Summary; nothing is computed here.

Taught in notebooks 00 and 03.
"""

from collections.abc import Mapping, Sequence

from minserve.core.metrics import Summary


def table(summary: Summary, num_blocks: int) -> str:
    """One run: counts, rates, latencies, memory."""
    return box(_rows(summary, num_blocks))


def compare(runs: Mapping[str, tuple[Summary, int]]) -> str:
    """Several runs side by side: name -> (summary, blocks of each engine's pool)."""
    columns = [_rows(summary, num_blocks) for summary, num_blocks in runs.values()]
    words = [row[0] for row in columns[0]]
    return box(
        [("", *runs), *((name, *(column[i][1] for column in columns)) for i, name in enumerate(words))]
    )


def box(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equally many cells, framed and aligned.

    >>> print(box([("a", "1"), ("bc", "23")]))
    +----+----+
    | a  | 1  |
    | bc | 23 |
    +----+----+
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    rule = f"+{'+'.join('-' * (width + 2) for width in widths)}+"
    lines = [
        f"| {' | '.join(f'{cell:<{width}}' for cell, width in zip(row, widths, strict=True))} |"
        for row in rows
    ]
    return "\n".join([rule, *lines, rule])


def _rows(summary: Summary, num_blocks: int) -> list[tuple[str, str]]:
    return [
        ("requests", _requests(summary)),
        ("prompt tokens", f"{summary.num_prompt_tokens:,}"),
        ("output tokens", f"{summary.num_output_tokens:,}"),
        (
            "tokens/s",
            f"{summary.output_tokens_per_s:,.0f} output, {summary.total_tokens_per_s:,.0f} with prompts",
        ),
        ("TTFT p50 / p99", f"{_ms(summary.ttft_p50_s)} / {_ms(summary.ttft_p99_s)}"),
        ("TPOT p50 / p99", f"{_ms(summary.tpot_p50_s)} / {_ms(summary.tpot_p99_s)}"),
        ("ITL p50 / p99", f"{_ms(summary.itl_p50_s)} / {_ms(summary.itl_p99_s)}"),
        ("KV blocks at peak", f"{summary.peak_used_blocks:,} of {num_blocks:,}"),
        ("prefix hits", f"{summary.num_hit_tokens:,} prompt tokens not computed again"),
        ("preemptions", f"{summary.num_preemptions}"),
    ]


def _requests(summary: Summary) -> str:
    num_served = summary.num_finished - summary.num_shed
    away = f", {summary.num_shed:,} sent away" if summary.num_shed else ""
    return f"{num_served:,} of {summary.num_requests:,} finished{away}, in {summary.num_steps:,} steps"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.0f} ms"
