"""The planner's form: a case by sliders, the recommendation with its reasons, the flags of an engine, and the memory in a picture.

Why: the question that brings people to a planner is their own. So the form asks what they know (model, card, lengths, load, limits,
price) and answers with what they have to decide, each choice with the number behind it; where nothing fits, with the number in the way.
A simulation of the case is run on request only: it takes longer than a finger moves.

Invariant: `made` is what `choices.recommend` says of `case`, or None, and then `misfit` says why not.

Taught in notebook 14.
"""

from collections.abc import Sequence

from matplotlib.figure import Figure

from minserve.lab import charts
from minserve.lab.choices import Checked, NothingFits, Recommendation, check, recommend
from minserve.lab.explorer import Explorer, amount, choice, duration, places, size, steps
from minserve.lab.options import HEAD_BITS, Case, ladder
from minserve.sim.cost_model import CostModel
from minserve.sim.devices import DEVICES
from minserve.sim.engine_flags import engine_settings
from minserve.sim.planner import Budget, share_out
from minserve.sim.shapes import SHAPES

ENGINES = ("vllm", "sglang", "trtllm", "tgi", "llamacpp")
TTFT_MS = (100, 200, 300, 450, 500, 750, 1000, 1500, 2000, 3000, 5000, 10_000)
TPOT_MS = (10, 15, 20, 30, 40, 50, 75, 100, 150, 200)
RATES_PER_S = (0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0, 128.0)
ANY = "as it takes"


class PlannerForm(Explorer):
    """Model, card, lengths, load, limits and price -> what to run, why, and the command that says so.

    `case` is what was asked; `made` the recommendation, or None where nothing fits: then `misfit` has the reason. `checked` is the
    simulation's word, if it was asked for.
    """

    def __init__(self, model: str = "llama-3.1-8b", device: str = "a100-80gb", *, context_tokens: int = 2048, output_tokens: int = 256):
        self.model = choice("model", SHAPES, model)
        self.device = choice("card", DEVICES, device)
        self.context = steps("a request, tokens", 256, 131_072, context_tokens)
        self.output = steps("of it answer", 16, 4096, output_tokens)
        self.rate = choice("requests/s", RATES_PER_S, 4.0)
        self.ttft = places("TTFT, ms", TTFT_MS, 1000)
        self.tpot = places("TPOT, ms", TPOT_MS, 50)
        self.cards = choice("cards there are", (ANY, 1, 2, 4, 8, 16, 32), ANY)
        self.price = amount("price an hour", 0.0, 10.0, 0.25, 2.0)
        self.engine = choice("flags of", ENGINES, "vllm")
        self.simulated = choice("simulate it", (("no", False), ("yes", True)), False)
        self._case: Case | None = None
        controls = [self.model, self.device, self.context, self.output, self.rate, self.cards, self.ttft, self.tpot, self.price]
        super().__init__([*controls, self.engine], [self.simulated])

    # --- numbers ----------------------------------------------------------------------------------

    def compute(self) -> None:
        case = Case(
            shape=SHAPES[self.model.value],
            device=DEVICES[self.device.value],
            context_tokens=self.context.value,
            output_tokens=min(self.output.value, self.context.value // 2),
            rate_per_s=self.rate.value,
            slo_ttft_s=self.ttft.value / 1e3,
            slo_tpot_s=self.tpot.value / 1e3,
            price_per_hour=self.price.value or None,
            num_cards=None if self.cards.value == ANY else self.cards.value,
        )
        if case != self._case:  # else only the engine has changed, or the wish for a simulation
            self.made: Recommendation | None = None
            self.misfit: NothingFits | None = None
            self.checked: Checked | None = None
            try:
                self.made = recommend(case)
            except NothingFits as misfit:
                self.misfit = misfit
            self.case = self._case = case
        if self.simulated.value and self.made is not None and self.checked is None:
            self.checked = check(self.made)
        self.command = self._command()

    def _command(self) -> str:
        if self.made is None:
            return ""
        settings = engine_settings(self.made.plan)[self.engine.value]
        return " ".join([settings.command, *settings.flags])

    # --- words and picture ------------------------------------------------------------------------

    def words(self) -> tuple[str, str]:
        case, made = self.case, self.made
        asked = f"{case.rate_per_s:g} requests/s of {case.prompt_tokens:,} + {case.output_tokens:,} tokens"
        if made is None:
            assert self.misfit is not None, "either a recommendation or a reason"
            reason = self.misfit.reason
            return f"Nothing fits: {case.shape.name} on {case.device.name}, {asked}.", f"{reason[0].upper()}{reason[1:]}."
        cost, copies = made.plan.cost, made.option.num_replicas
        each = f" of {cost.num_devices} cards" if cost.num_devices > 1 else ""
        finding = f"{copies:,} cop{'y' if copies == 1 else 'ies'}{each}: {case.shape.name} in {cost.weights}, KV in {cost.kv}, "
        finding += f"on {made.option.num_cards:,} x {case.device.name}."
        price = made.price_per_million_tokens
        cost_words = "" if price is None else f" A million output tokens cost {price:.2f}."
        return finding, (
            f"For {asked}: TTFT {duration(made.expected.ttft_s)} on average, TPOT {duration(made.expected.tpot_s)}, "
            f"copies {made.expected.use:.0%} busy.{cost_words}{self._simulation()}"
        )

    def _simulation(self) -> str:
        if self.checked is None:
            return ""
        s = self.checked.summary
        return (
            f" Simulated, one copy's share: {self.checked.share_within:.0%} of {s.num_requests} requests within both limits, "
            f"TTFT {duration(s.ttft_p50_s)} (median) and {duration(s.ttft_p99_s)} (99th percentile), TPOT {duration(s.tpot_p50_s)}."
        )

    def details(self) -> Sequence[str]:
        if self.made is None:
            return [f"It would help: {change}." for change in (self.misfit.changes if self.misfit else ())]
        return [
            self.command,
            *(f"{reason.choice}: {reason.value}. {reason.why[0].upper()}{reason.why[1:]}" for reason in self.made.reasons),
        ]

    def draw(self) -> Figure:
        """The memory of one card: of the recommendation, or where there is none, of the plainest attempt."""
        case, budget = self.case, self.made.plan.budget if self.made else self._attempt()
        one = -(-case.context_tokens // 16) * budget.block_bytes
        untouched_bytes = 0.1 * budget.total_bytes
        parts = {
            "weights": budget.weight_bytes,
            "activations, runtime": budget.activation_bytes + budget.runtime_bytes,
            "KV of one request": one,
            "KV of the others": max(0.0, budget.kv_bytes - one),
            "not to be touched": untouched_bytes,
        }
        title = f"The memory of one {case.device.name}: a request of {case.context_tokens:,} tokens keeps {size(one)} on it"
        return charts.vram_waterfall(parts, budget.total_bytes, title)

    def _attempt(self) -> Budget:
        weights, kv = ladder(self.case.device)[0]
        cost = CostModel(self.case.shape, self.case.device, weights=weights, kv=kv, head_bits=HEAD_BITS)
        return share_out(cost, self.case.context_tokens)
