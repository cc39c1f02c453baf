"""What the token budget of a step is for: gaps between tokens on one side, the wait for the first token on the other.

Why: a step takes as long as the tokens in it, and everybody who is talking waits for it. A small budget cuts the prompts of newcomers
into small chunks: nobody who talks is held up for long, and newcomers wait. A large one does the opposite. The explorer serves the
same requests with every budget, on the real scheduler and the cost model's clock, so the whole trade-off is seen around the one chosen.

Invariant: the picture's curve and the chosen point come from runs of one and the same workload; only the budget differs.

Taught in notebook 06.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from minserve.core.metrics import Summary
from minserve.lab.explorer import Explorer, amount, choice, duration, places
from minserve.lab.style import HALO, INK, PALETTE, SMALL_PT, add_boxes, deep, dress, fix_margins, new_figure, tick_text
from minserve.sim.cost_model import CostModel
from minserve.sim.devices import DEVICES
from minserve.sim.shapes import SHAPES
from minserve.sim.simulator import make_engine, simulate
from minserve.sim.workload import Lengths, Workload, exact, make_workload, poisson

BUDGETS = (64, 128, 256, 512, 1024, 2048, 4096)
PROMPTS = (250, 500, 1000, 1500, 2000)  # none as long as a budget: it would miss a step by the few tokens of those who decode
MODELS = ("llama-2-13b", "llama-3.1-8b")
WATCHED = "watched"
LOAD_S, NUM_OUTPUT_TOKENS, NUM_WATCHED_TOKENS = 8.0, 48, 256


class Served(NamedTuple):
    """What is kept of a run with one budget."""

    summary: Summary
    worst_gap_s: float  # the longest that anybody waited between two tokens
    watched_times_s: list[float]  # of the watched answer's tokens


class BudgetExplorer(Explorer):
    """Token budget, load and length of the prompts -> gaps between tokens, and the time to the first one.

    The real scheduler serves newcomers with long prompts to a model on one A100-80GB. One answer, the `watched` one, goes on all the
    while: every prompt that is computed beside it is a gap in it. `curve` has a run for each of BUDGETS.
    """

    def __init__(self, model: str = MODELS[0], *, token_budget: int = 2048, rate_per_s: float = 2.0, num_prompt_tokens: int = 1500):
        self.model = choice("model", MODELS, model)
        self.budget = places("token budget", sorted({*BUDGETS, token_budget}), token_budget)
        self.rate = amount("newcomers/s", 1.0, 3.0, 0.5, rate_per_s, ".1f")
        self.prompt = places("prompt, tokens", sorted({*PROMPTS, num_prompt_tokens}), num_prompt_tokens)
        self._kept: dict[tuple[object, ...], dict[int, Served]] = {}  # settings -> budget -> what came of it
        super().__init__([self.model, self.budget, self.rate, self.prompt])

    # --- numbers ----------------------------------------------------------------------------------

    def compute(self) -> None:
        settings, budgets = (self.model.value, self.rate.value, self.prompt.value), sorted({*BUDGETS, self.budget.value})
        kept = self._kept.setdefault(settings, {})  # coming back to what was served costs nothing
        missing = [budget for budget in budgets if budget not in kept]
        workload = self.workload() if missing else None
        kept.update((budget, self.serve(workload, budget)) for budget in missing if workload)
        self.curve = {budget: kept[budget] for budget in budgets}
        self.summary, self.worst_gap_s, times_s = self.curve[self.budget.value]
        self.gaps_s = [later - earlier for earlier, later in pairwise(times_s)]

    def workload(self) -> Workload:
        """The same newcomers for every budget, for some seconds, and the answer that is watched."""
        lengths = Lengths.constant(self.prompt.value), Lengths.constant(NUM_OUTPUT_TOKENS)
        newcomers = make_workload(round(LOAD_S * self.rate.value), *lengths, poisson(self.rate.value)).arrivals()
        watched = {"request_id": WATCHED, "prompt_ids": list(range(64)), "params": exact(NUM_WATCHED_TOKENS)}
        return Workload([(0.0, watched), *newcomers])

    def serve(self, workload: Workload, token_budget: int) -> Served:
        """What comes of the workload with this budget."""
        cost = CostModel(SHAPES[self.model.value], DEVICES["a100-80gb"])
        trace = simulate(make_engine(cost, token_budget=token_budget, prefix_caching=False), workload)
        worst_gap_s = max(gap_s for record in trace.requests.values() for gap_s in record.itl_s)
        return Served(trace.summary(), worst_gap_s, trace.requests[WATCHED].token_times_s)

    # --- words and picture ------------------------------------------------------------------------

    def words(self) -> tuple[str, str]:
        s, ends = self.summary, (min(self.curve), max(self.curve))
        finding = (
            f"With a budget of {self.budget.value:,} tokens the first token comes after {duration(s.ttft_p50_s)} (median), "
            f"and the longest gap between two tokens is {duration(self.worst_gap_s)}."
        )
        others = (f"{duration(self.curve[n].summary.ttft_p50_s)} and {duration(self.curve[n].worst_gap_s)} with {n:,}" for n in ends)
        return finding, (
            f"First token {duration(s.ttft_p99_s)} (99th percentile), gaps {duration(s.itl_p99_s)} (99th percentile), "
            f"TPOT {duration(s.tpot_p50_s)} (median), {s.output_tokens_per_s:,.0f} output tokens/s. "
            f"{s.num_requests - 1} newcomers with prompts of {self.prompt.value:,} tokens, {self.rate.value:g} a second, "
            f"beside one long answer. First token and longest gap: {'; '.join(others)}."
        )

    def draw(self) -> Figure:
        figure = new_figure(3.4)
        left, right = figure.subplots(1, 2)
        _draw_trade_off(left, self.curve, self.budget.value)
        top_s = max(served.worst_gap_s for served in self.curve.values())
        _draw_gaps(right, self.curve[self.budget.value].watched_times_s, 1.15 * top_s)
        fix_margins(figure, left_in=0.62, right_in=0.15, top_in=0.35, bottom_in=0.5)
        figure.subplots_adjust(wspace=0.25)
        return figure


def _draw_trade_off(ax: Axes, curve: Mapping[int, Served], chosen: int) -> None:
    """TPOT and the longest gap against TTFT, a point for each budget; both axes logarithmic."""
    dress(ax, "The longest gap and TPOT, by token budget", "time to the first token, median, s", "ms")
    ttft_s = [served.summary.ttft_p50_s or 0.0 for served in curve.values()]
    gaps_ms = [1e3 * served.worst_gap_s for served in curve.values()]
    tpot_ms = [1e3 * (served.summary.tpot_p50_s or 0.0) for served in curve.values()]
    place = list(curve).index(chosen)
    for values_ms, colour, marker in ((gaps_ms, PALETTE[3], "o"), (tpot_ms, PALETTE[0], "s")):
        ax.plot(ttft_s, values_ms, color=colour, marker=marker, markersize=4, linewidth=1.2)
        ax.plot(ttft_s[place], values_ms[place], marker=marker, markersize=9, markerfacecolor="none", color=INK, markeredgewidth=1.6)
    _name_budgets(ax, list(zip(curve, ttft_s, gaps_ms, strict=True)))
    _log_scales(ax, ttft_s, [*gaps_ms, *tpot_ms])
    for name, colour, up in (("longest gap, with its budget", PALETTE[3], 0.95), ("TPOT, median", PALETTE[0], 0.88)):
        ax.text(0.98, up, name, transform=ax.transAxes, fontsize=SMALL_PT, color=deep(colour), ha="right", path_effects=HALO)


def _name_budgets(ax: Axes, points: Sequence[tuple[int, float, float]]) -> None:
    """A point's budget beside it; budgets that come to the same point share their words."""
    crowds: list[list[tuple[int, float, float]]] = []
    for budget, x, y in points:
        last = crowds[-1][-1] if crowds else (0, 1e-9, 1e-9)
        if max(abs(math.log(x / last[1])), abs(math.log(y / last[2]))) > 0.06:
            crowds.append([])
        crowds[-1].append((budget, x, y))
    for crowd in crowds:
        words, (_, x, y) = ", ".join(f"{budget:,}" for budget, _, _ in crowd), crowd[-1]
        ax.annotate(words, (x, y), (6, 4), textcoords="offset points", fontsize=SMALL_PT, color=INK, path_effects=HALO)


def _log_scales(ax: Axes, xs: Sequence[float], ys: Sequence[float]) -> None:
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(0.75 * min(xs), 1.6 * max(xs))
    ax.set_ylim(0.6 * min(ys), 2.5 * max(ys))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(tick_text))
        axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
        axis.set_minor_locator(NullLocator())


def _draw_gaps(ax: Axes, times_s: Sequence[float], top_s: float) -> None:
    """The watched answer: each gap as a block as wide and as high as it is long, so stalls stand out."""
    dress(ax, "The gaps in one long answer beside it all", "seconds since its first token", "gap before the token, ms")
    boxes = [(a - times_s[0], 0.0, b - a, 1e3 * (b - a)) for a, b in pairwise(times_s)]
    add_boxes(ax, boxes, PALETTE[3])
    ax.set_xlim(0, times_s[-1] - times_s[0])
    ax.set_ylim(0, 1e3 * top_s)
    ax.xaxis.set_major_locator(MaxNLocator(6))
