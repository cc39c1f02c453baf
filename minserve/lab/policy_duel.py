"""Two policies side by side on one clock: the same requests come, and one sees what becomes of them.

Why: a scorecard says who has won, not how. Here both runs are shown up to one and the same moment of the clock: who waits, who is
served, whose limits are kept, how full the memory is. Playing, stepping and rewinding only choose the moment; the runs are those of the
arena, served once to their end by the engine's own scheduler.

Invariant: what is shown of a moment is what had happened by then: of a run's future nothing but the scales of the axes is there before.

Taught in notebook 10.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import ipywidgets as widgets
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from minserve.core.metrics import goodput
from minserve.core.records import RequestRecord
from minserve.core.request import FinishReason
from minserve.core.trace import Trace
from minserve.lab.arena import BASELINES, SEEDS, TRACES, Maker, serve
from minserve.lab.arena_traces import ArenaTrace
from minserve.lab.explorer import Explorer, choice, step_buttons, whole
from minserve.lab.figures import WAIT, spans
from minserve.lab.style import INK, PALETTE, SMALL_PT, TITLE_PT, Box, add_boxes, dress, fix_margins, new_figure, pale

NUM_MOMENTS = 120  # places of the slider, from second 0 to the end of the slower run
PLAY_MS = 400  # between two pictures: the kernel needs half of it for drawing
PROMPT, DECODE, WITHIN, MISSED = PALETTE[0], pale(PALETTE[0]), pale(PALETTE[2], 0.6), PALETTE[3]


@dataclass(frozen=True, slots=True)
class Side:
    """One policy's run up to a moment. Running and waiting are those after the latest step that was done by then."""

    policy: str
    now_s: float
    num_arrived: int
    num_running: int
    num_waiting: int
    num_answered: int
    num_within: int  # of the answered, those within the trace's limits
    num_shed: int
    num_output_tokens: int
    num_preemptions: int
    used_share: float  # of the pool


class Course:
    """A run that has been served, to be looked at from any moment of it."""

    def __init__(self, policy: str, maker: Maker, trace: ArenaTrace, seed: int):
        self.policy, self.arena_trace = policy, trace
        self.trace: Trace = serve(maker, trace, seed).trace
        self.records: list[RequestRecord] = sorted(self.trace.requests.values(), key=lambda record: record.arrival_s)
        self.steps = list(self.trace.steps)
        self.ends_s = [step.end_s for step in self.steps]
        self.num_tokens = list(accumulate(step.num_new_tokens for step in self.steps))
        self.num_preempted = list(accumulate(len(step.preempted) for step in self.steps))
        self.spans = spans(self.records, self.steps)
        self.end_s = self.ends_s[-1]
        self.most = max(max(step.num_running, step.num_waiting) for step in self.steps)  # scale of the picture, as end_s is
        self.is_within = [self._is_within(record) for record in self.records]

    def _is_within(self, record: RequestRecord) -> bool:
        slo = self.arena_trace.slo
        return goodput([record], 1.0, ttft_s=slo.ttft_s, tpot_s=slo.tpot_s, latency_s=slo.latency_s) > 0

    def side(self, now_s: float) -> Side:
        """What had happened by this moment."""
        last = bisect_right(self.ends_s, now_s) - 1  # the latest step that is done; -1: none
        step = self.steps[last] if last >= 0 else None
        arrived = [record for record in self.records if record.arrival_s <= now_s]
        ended = [i for i, record in enumerate(self.records) if record.finished_s is not None and record.finished_s <= now_s]
        num_shed = sum(self.records[i].finish_reason == FinishReason.SHED for i in ended)
        num_running = step.num_running if step else 0
        return Side(
            policy=self.policy,
            now_s=now_s,
            num_arrived=len(arrived),
            num_running=num_running,
            num_waiting=len(arrived) - len(ended) - num_running,
            num_answered=len(ended) - num_shed,
            num_within=sum(self.is_within[i] for i in ended),
            num_shed=num_shed,
            num_output_tokens=self.num_tokens[last] if step else 0,
            num_preemptions=self.num_preempted[last] if step else 0,
            used_share=step.num_used_blocks / self.arena_trace.num_blocks if step else 0.0,
        )


class PolicyDuel(Explorer):
    """Two policies, a trace, and a moment of the clock that both share.

    `left` and `right` are the two sides at this moment, `courses` the runs. `mine` adds a policy of one's own to the baselines.
    """

    def __init__(
        self,
        left: str = "continuous",
        right: str = "static:size=16",
        trace: str = "chat",
        *,
        mine: Mapping[str, Maker] | None = None,
        traces: Mapping[str, ArenaTrace] = TRACES,
        seed: int = SEEDS[0],
        moment: int = NUM_MOMENTS,
    ):
        self.makers, self.traces, self.seed = {**(mine or {}), **BASELINES}, traces, seed
        self.first = choice("left", self.makers, left)
        self.second = choice("right", self.makers, right)
        self.trace = choice("trace", traces, trace)
        self.moment = whole("moment", 0, NUM_MOMENTS, moment)
        self.play = widgets.Play(min=0, max=NUM_MOMENTS, step=1, interval=PLAY_MS, value=moment)
        self._link = widgets.jslink((self.play, "value"), (self.moment, "value"))  # in the page: the kernel hears of a moment once
        self._courses: dict[tuple[str, str], Course] = {}
        super().__init__([self.first, self.second, self.trace], [self.moment, widgets.Box([self.play]), *step_buttons(self.moment)])

    # --- numbers ----------------------------------------------------------------------------------

    def compute(self) -> None:
        self.courses = tuple(self._course(name) for name in (self.first.value, self.second.value))
        self.end_s = max(course.end_s for course in self.courses)
        self.now_s = self.end_s * self.moment.value / NUM_MOMENTS
        self.left, self.right = (course.side(self.now_s) for course in self.courses)

    def _course(self, policy: str) -> Course:
        """Each policy is run once on a trace, however often it is chosen."""
        key = (policy, self.trace.value)
        if key not in self._courses:
            self._courses[key] = Course(policy, self.makers[policy], self.traces[self.trace.value], self.seed)
        return self._courses[key]

    # --- words and picture ------------------------------------------------------------------------

    def words(self) -> tuple[str, str]:
        left, right = self.left, self.right
        trace = self.traces[self.trace.value]
        if left.num_within == right.num_within:
            finding = f"both have {left.num_within} requests within the limits."
        else:
            ahead, behind = sorted((left, right), key=lambda side: -side.num_within)
            finding = f"{ahead.policy} has {ahead.num_within} requests within the limits, {behind.policy} {behind.num_within}."
        limits = f"Of {len(self.courses[0].records)} requests, {left.num_arrived} have come; limits: {trace.slo}."
        return f"At {self.now_s:.1f} s, {finding}", " ".join((limits, _side_words(left), _side_words(right)))

    def draw(self) -> Figure:
        figure = new_figure(4.9)
        axes = figure.subplots(3, 2, sharex=True, sharey="row", height_ratios=(3.2, 1.1, 0.8))
        for (rows, queues, pool), course, side in zip(axes.T, self.courses, (self.left, self.right), strict=True):
            dress(rows, y_label="request")
            rows.set_title(_title(side), fontsize=TITLE_PT, loc="left", color=INK)  # `dress` would make one line of the two
            dress(queues, y_label="requests")
            dress(pool, x_label="seconds", y_label="KV used")
            _draw_requests(rows, course, self.now_s)
            _draw_queues(queues, course, side)
            _draw_pool(pool, course, side)
            for ax in (rows, queues, pool):
                ax.axvline(self.now_s, color=INK, linewidth=0.8)
        axes[0, 0].set(xlim=(0.0, self.end_s), ylim=(max(len(course.records) for course in self.courses), -1))
        axes[1, 0].set_ylim(0, 1.1 * max(course.most for course in self.courses))
        axes[2, 0].set(ylim=(0.0, 1.05), yticks=(0.0, 1.0), yticklabels=("0", "1"))
        for ax in axes[:, 1]:
            ax.set_ylabel("")
        for ax in (*axes[0], *axes[1]):
            ax.tick_params(axis="x", length=0)
        figure.legend(handles=_legend(), fontsize=SMALL_PT, loc="lower center", ncols=8, frameon=False, columnspacing=1.2, handlelength=1.2)
        fix_margins(figure, left_in=0.5, right_in=0.12, top_in=0.45, bottom_in=0.62)
        figure.subplots_adjust(wspace=0.08)
        return figure


def _title(side: Side) -> str:
    return f"{side.policy}\n{side.num_within} within the limits, {side.num_output_tokens:,} tokens"


def _side_words(side: Side) -> str:
    shed = f", {side.num_shed} sent away" if side.num_shed else ""
    times = "once" if side.num_preemptions == 1 else f"{side.num_preemptions} times"
    return (
        f"{side.policy}: {side.num_running} run, {side.num_waiting} wait, {side.num_answered} answered ({side.num_within} within){shed}; "
        f"{side.num_output_tokens:,} tokens; {side.used_share:.0%} of the KV pool in use; preempted {times}."
    )


def _draw_requests(ax: Axes, course: Course, now_s: float) -> None:
    """A line a request: thin while it waits, thick while it is computed; its colour is the verdict once it has ended."""
    waits: list[Box] = []
    crosses: list[tuple[float, int]] = []
    verdicts: dict[int, str] = {}
    for row, record in enumerate(course.records):
        ended_s = record.finished_s if record.finished_s is not None and record.finished_s <= now_s else None
        if record.arrival_s < now_s:
            waits.append((record.arrival_s, row - 0.15, min(now_s, ended_s or now_s) - record.arrival_s, 0.3))
        if ended_s is not None:
            verdicts[row] = WITHIN if course.is_within[row] else MISSED
            if record.finish_reason == FinishReason.SHED:
                crosses.append((ended_s, row))
    boxes, colours = [], []
    for row, is_decode, start_s, end_s in course.spans:
        if start_s < now_s:
            boxes.append((start_s, row - 0.5, min(end_s, now_s) - start_s, 1.0))
            colours.append(verdicts.get(row, DECODE) if is_decode else PROMPT)
    add_boxes(ax, waits, WAIT)
    add_boxes(ax, boxes, colours)
    if crosses:
        ax.plot(*zip(*crosses, strict=True), linestyle="none", marker="x", color=INK, markersize=3)


def _draw_queues(ax: Axes, course: Course, side: Side) -> None:
    """Running and waiting after each step that was done by now."""
    done = bisect_right(course.ends_s, side.now_s)
    times_s = course.ends_s[:done]
    ax.plot(times_s, [step.num_running for step in course.steps[:done]], color=PALETTE[0], linewidth=1, drawstyle="steps-post")
    waiting = [step.num_waiting for step in course.steps[:done]]
    ax.plot(times_s, waiting, color=PALETTE[3], linewidth=1, linestyle="--", drawstyle="steps-post")


def _draw_pool(ax: Axes, course: Course, side: Side) -> None:
    done, num_blocks = bisect_right(course.ends_s, side.now_s), course.arena_trace.num_blocks
    used = [step.num_used_blocks / num_blocks for step in course.steps[:done]]
    ax.fill_between([step.start_s for step in course.steps[:done]], used, step="post", color=pale(PALETTE[0]), linewidth=0)


def _legend() -> list[Patch | Line2D]:
    return [
        Patch(color=WAIT, label="waits (thin)"),
        Patch(color=PROMPT, label="prompt"),
        Patch(color=DECODE, label="answer"),
        Patch(color=WITHIN, label="... within"),
        Patch(color=MISSED, label="... missed"),
        Line2D([], [], color=INK, marker="x", markersize=4, linestyle="none", label="sent away"),
        Line2D([], [], color=PALETTE[0], label="run"),
        Line2D([], [], color=PALETTE[3], linestyle="--", label="wait"),
    ]
