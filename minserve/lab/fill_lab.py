"""The fill-ratio lab: what the share of memory that an engine may use buys, and which way of running out of memory it risks.

Why: "how full may the card be?" has no answer in per cent. More fill is more keys and values, so more requests at once and a higher rate;
what it risks depends on the largest step, on who else uses the card, and on how long the answers become. Here all of these are sliders.

The starts are those of `minserve.sim.virtual_device`, the rates those of `minserve.sim.pace`: a batch that stays full, by the cost model.

The engine here keeps 2 GB for activations, whatever its largest step needs, as one does who doesn't try that step at the start.

Invariant: a trouble is named only if the virtual device refuses, if a full step would not fit, or if many more can begin than can end.

Taught in notebook 11.
"""

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minserve.lab.explorer import Explorer, amount, choice, places, size
from minserve.lab.style import GREY, HALO, INK, PALETTE, SMALL_PT, add_boxes, deep, dress, fix_margins, new_figure, pale
from minserve.sim.cost_model import CostModel
from minserve.sim.devices import DEVICES
from minserve.sim.pace import pace
from minserve.sim.planner import RUNTIME_BYTES, activation_bytes
from minserve.sim.shapes import SHAPES
from minserve.sim.virtual_device import MemoryRunner, Neighbour, OutOfDeviceMemory, start_engine

MODELS = ("llama-2-13b", "llama-3.1-8b")
FORMATS = ("bf16", "int8", "int4")
FILLS = tuple(percent / 100 for percent in range(30, 100, 2))
BUDGETS = (512, 2048, 8192, 16_384, 32_768)
ANSWERS = (64, 211, 512, 1024, 2048)
PROMPT_TOKENS = 1155  # the mean of the public chat trace
RESERVE_BYTES = 2e9  # for activations, beside the runtime: what is kept whatever the largest step needs
MAX_RUNNING = 256
BLOCK_SIZE = 16
START, STEP, PREEMPTIONS, NONE = "out of memory at the start", "out of memory in a step", "preemptions", "no trouble"


class FillLab(Explorer):
    """Model, KV format, fill, largest step, neighbour and answers -> the card's memory, the rate, and what threatens.

    `trouble` is one of START, STEP, PREEMPTIONS, NONE, and `cure` says what to move, and which way. `curve` has the output tokens/s of each
    fill of FILLS that leaves room for one request.
    """

    def __init__(self, model: str = MODELS[0], *, fill: float = 0.9):
        self.model = choice("model", MODELS, model)
        self.kv = choice("KV cache", FORMATS, "bf16")
        self.fill = amount("fill", 0.3, 1.0, 0.01, fill)
        self.budget = places("token budget", BUDGETS, 2048)
        self.neighbour = amount("neighbour, GB", 0.0, 60.0, 1.0, 0.0, ".0f")
        self.answer = places("answer, tokens", ANSWERS, 211)
        super().__init__([self.model, self.kv, self.fill, self.budget, self.neighbour, self.answer])

    # --- numbers ----------------------------------------------------------------------------------

    def compute(self) -> None:
        self.cost = CostModel(SHAPES[self.model.value], DEVICES["a100-80gb"], kv=self.kv.value)
        self.curve = {fill: rate for fill in FILLS if (rate := self._rate(self._pool_tokens(fill)))}
        self.step_bytes = activation_bytes(self.cost, self.budget.value, MAX_RUNNING)
        self.refusal, self.held = self._start()
        pool_tokens = self.num_blocks * BLOCK_SIZE
        self.num_fit = pool_tokens // (PROMPT_TOKENS + self.answer.value)
        self.num_let_in = min(MAX_RUNNING, pool_tokens // PROMPT_TOKENS)
        self.tokens_per_s = self._rate(pool_tokens)
        self.trouble, self.cure = self._judge()

    def _start(self) -> tuple[str, Mapping[str, float]]:
        """Start an engine: why it refused (empty: it did not), and who then holds how much."""
        neighbours = [Neighbour("neighbour", 1e9 * self.neighbour.value)] if self.neighbour.value else []
        self.num_blocks = 0
        try:
            engine = start_engine(
                self.cost,
                memory_fraction=self.fill.value,
                reserve_bytes=RESERVE_BYTES,
                neighbours=neighbours,
                token_budget=self.budget.value,
                block_size=BLOCK_SIZE,
            )
        except OutOfDeviceMemory as error:
            weights = {"weights": self.cost.stored_weight_bytes, "runtime": RUNTIME_BYTES}
            return str(error), {neighbour.name: neighbour.num_bytes for neighbour in neighbours} | weights
        assert isinstance(engine.runner, MemoryRunner)
        self.num_blocks = engine.scheduler.blocks.num_blocks
        return "", dict(engine.runner.device.held)

    def _pool_tokens(self, fill: float) -> int:
        return max(0, int(self.cost.kv_bytes_left(fill, RESERVE_BYTES + RUNTIME_BYTES) // self.cost.kv_bytes_per_token))

    def _rate(self, pool_tokens: int) -> float:
        """Output tokens/s of as many requests as the pool holds at their full length; 0 if it holds none."""
        batch = min(MAX_RUNNING, pool_tokens // (PROMPT_TOKENS + self.answer.value))
        return pace(self.cost, batch, PROMPT_TOKENS, self.answer.value).output_tokens_per_s if batch else 0.0

    @property
    def wanted_bytes(self) -> float:
        """Of the KV pool that the engine was refused; 0 where it has one, or could not even ask."""
        refused = self.refusal.startswith("KV pool")
        return self.cost.kv_bytes_left(self.fill.value, RESERVE_BYTES + RUNTIME_BYTES) if refused else 0.0

    @property
    def free_bytes(self) -> float:
        """What nobody holds while no step runs."""
        return self.cost.device.memory_bytes - sum(self.held.values())

    def _judge(self) -> tuple[str, str]:
        if self.refusal and self.refusal.startswith("KV pool"):
            return START, "lower the fill: it is a share of all memory, and the neighbour holds some of that"
        if self.refusal or not self.num_fit:
            return START, "raise the fill, or take fewer bits: beside the weights nothing is left for KV"
        if self.step_bytes > self.free_bytes:
            return STEP, "lower the fill or the token budget: the pool has taken what the largest step needs"
        if self.num_let_in > 1.5 * self.num_fit:
            return PREEMPTIONS, "let fewer in, or reserve whole answers: more begin than can end, and the last are computed again"
        return NONE, "nothing to move"

    # --- words and picture ------------------------------------------------------------------------

    def words(self) -> tuple[str, str]:
        percent = f"{self.fill.value:.0%} of 80 GB"
        if self.trouble == START:
            finding = f"{percent}: {self.trouble}."
        else:
            finding = f"{percent}: {self.num_fit} requests fit, about {self.tokens_per_s:,.0f} output tokens/s; {self.trouble}."
        reason = f" {self.refusal[0].upper()}{self.refusal[1:]}." if self.refusal else ""
        return finding, (
            f"Cure: {self.cure}.{reason} The largest step, of {self.budget.value:,} tokens, needs {size(self.step_bytes)} for activations, "
            f"and {size(max(self.free_bytes, 0.0))} is free. Requests have {PROMPT_TOKENS:,} prompt tokens and {self.answer.value:,} "
            f"of answer: {self.num_let_in} can begin at once."
        )

    def draw(self) -> Figure:
        figure = new_figure(3.2)
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.6))
        self._draw_memory(left)
        self._draw_curve(right)
        fix_margins(figure, left_in=0.55, right_in=0.15, top_in=0.35, bottom_in=0.5)
        figure.subplots_adjust(wspace=0.25)
        return figure

    def _draw_memory(self, ax: Axes) -> None:
        """The card as one column; what the largest step needs stands beside it, above what is held."""
        dress(ax, "Who holds the card", "", "GB")
        total_gb, level = self.cost.device.memory_bytes / 1e9, 0.0
        colours = {"neighbour": GREY, "weights": PALETTE[0], "runtime": PALETTE[4], "KV pool": PALETTE[2]}
        for name, num_bytes in self.held.items():
            height = num_bytes / 1e9
            add_boxes(ax, [(0.0, level, 1.0, height)], pale(colours[name], 0.6), edge="white")
            _name_part(ax, f"{name} {height:.1f}", level, height)
            level += height
        _name_part(ax, f"free {total_gb - level:.1f}", level, total_gb - level)
        if self.wanted_bytes > 0:  # and did not get
            add_boxes(ax, [(0.0, level, 1.0, self.wanted_bytes / 1e9)], pale(PALETTE[3], 0.6), hatch="///", edge="white")
            _name_part(ax, f"KV pool {self.wanted_bytes / 1e9:.1f} wanted", total_gb, self.wanted_bytes / 1e9 + level - total_gb)
        step_gb = self.step_bytes / 1e9
        add_boxes(ax, [(1.1, level, 0.9, step_gb)], PALETTE[3] if level + step_gb > total_gb else PALETTE[1])
        ax.text(1.55, level - 1, f"largest step\n{step_gb:.1f}", fontsize=SMALL_PT, ha="center", va="top", color=INK, path_effects=HALO)
        ax.axhline(total_gb, color=INK, linewidth=1)
        ax.text(2.05, total_gb, "all of it", fontsize=SMALL_PT, ha="right", va="bottom", color=INK)
        ax.set(xlim=(-0.05, 2.1), ylim=(0, 1.2 * max(total_gb, level + self.wanted_bytes / 1e9)), xticks=[])

    def _draw_curve(self, ax: Axes) -> None:
        dress(ax, f"What fill buys ({self.model.value}, KV in {self.kv.value})", "fill, % of memory", "output tokens/s")
        ax.plot([100 * fill for fill in self.curve], list(self.curve.values()), color=PALETTE[2], marker="o", markersize=3)
        top = 1.25 * max(self.curve.values(), default=1.0)
        colour = PALETTE[2] if self.trouble == NONE else PALETTE[3]
        ax.axvline(100 * self.fill.value, color=colour, linewidth=1.2, linestyle="--")
        rate = self.tokens_per_s if self.trouble != START else 0.0
        ax.plot([100 * self.fill.value], [rate], marker="o", markersize=9, markerfacecolor="none", color=INK)
        side = "right" if self.fill.value > 0.75 else "left"
        words = f" {self.trouble} "
        ax.text(100 * self.fill.value, 0.97 * top, words, fontsize=SMALL_PT, ha=side, va="top", color=deep(colour), path_effects=HALO)
        ax.set(xlim=(28, 101), ylim=(0, top))


def _name_part(ax: Axes, words: str, level: float, height: float) -> None:
    """Words in the middle of a part of the column, where it is high enough for them."""
    if height > 5:
        ax.text(0.5, level + height / 2, words, fontsize=SMALL_PT, ha="center", va="center", color=INK, path_effects=HALO)
