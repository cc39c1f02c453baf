"""The explorers: memory, batching, the token budget and the roofline, each a function of its sliders.

Why: the questions of serving are "what if" questions. The answers here come from the planner, the cost model and the real scheduler on a
virtual clock, never from a formula that only the picture knows.

Invariant: each has its numbers as plain attributes, so a notebook sets a control's value and asserts on them.

Taught in notebooks 01, 02, 03 and 06.
"""

import math
from dataclasses import replace

from matplotlib.figure import Figure

from minserve.core.metrics import Summary
from minserve.core.policies import FirstComeFirstServed, Policy, StaticBatches, TimeoutBatches
from minserve.core.records import StepRecord
from minserve.core.trace import Trace
from minserve.lab import charts, figures
from minserve.lab.budget import BudgetExplorer as BudgetExplorer  # whoever wants an explorer finds it here
from minserve.lab.explorer import Explorer, amount, choice, duration, size, step_buttons, steps, whole
from minserve.sim import planner
from minserve.sim.cost_model import Cost, CostModel, decode_work, row_work
from minserve.sim.devices import DEVICES
from minserve.sim.shapes import SHAPES
from minserve.sim.simulator import make_engine, simulate
from minserve.sim.workload import Lengths, Workload, all_at_once, make_workload, poisson

CONTINUOUS, STATIC, TIMEOUT = "continuous", "static", "timeout"
FORMATS = ("bf16", "fp8", "int8", "int4")  # of keys and values
WEIGHT_FORMATS = (*FORMATS, "int4-g32", "int4-g128", "int4-channel")  # who chose the codes makes no difference in bytes
LONGEST_CONTEXT = 131_072
BLOCK_SIZE = 16


class VramCalculator(Explorer):
    """Model, device, formats and context -> where the memory of a device goes, and how many requests fit."""

    def __init__(self, model: str = "llama-2-13b", device: str = "a100-80gb", context_tokens: int = 2048):
        self.model = choice("model", SHAPES, model)
        self.device = choice("device", DEVICES, device)
        self.weights = choice("weights", WEIGHT_FORMATS, "bf16")
        self.kv = choice("KV cache", FORMATS, "bf16")
        self.num_devices = choice("devices", (1, 2, 4, 8), 1)
        self.gqa = choice("KV heads", (("as the model has them", True), ("one per query head", False)), True)
        self.context = steps("context, tokens", 128, LONGEST_CONTEXT, context_tokens)
        self.fraction = amount("memory fraction", 0.5, 0.98, 0.01, 0.9)
        super().__init__([self.model, self.device, self.weights, self.kv, self.gqa, self.num_devices, self.context, self.fraction])

    def compute(self) -> None:
        shape, device = SHAPES[self.model.value], DEVICES[self.device.value]
        if not self.gqa.value:
            shape = replace(shape, num_kv_heads=shape.num_heads)
        self.cost = CostModel(shape, device, weights=self.weights.value, kv=self.kv.value, num_devices=self.num_devices.value)
        self.budget = planner.share_out(self.cost, self.context.value, self.fraction.value, block_size=BLOCK_SIZE)
        blocks_per_request = -(-self.context.value // BLOCK_SIZE)
        self.num_requests = self.budget.num_blocks // blocks_per_request
        self.weight_bytes = self.budget.weight_bytes
        self.reserve_bytes = self.budget.activation_bytes + self.budget.runtime_bytes
        self.kv_bytes_per_token = self.cost.kv_bytes_per_token
        self.kv_bytes_per_request = blocks_per_request * self.budget.block_bytes
        self.kv_bytes = self.num_requests * self.kv_bytes_per_request
        self.untouched_bytes = device.memory_bytes * (1 - self.fraction.value)
        self.headroom_bytes = device.memory_bytes - self.weight_bytes - self.reserve_bytes - self.kv_bytes - self.untouched_bytes

    def words(self) -> tuple[str, str]:
        shape, device, count = self.cost.shape, self.cost.device, self.num_requests
        place = f"on {self.cost.num_devices} x {device.name}"
        requests = f"{f'{count:,}' if count else 'no'} request{'s'[: count != 1]} of {self.context.value:,} tokens"
        finding = f"{requests[0].upper()}{requests[1:]} fit{'s'[: count == 1]} {place}."
        each = f"On each of {self.cost.num_devices} devices" if self.cost.num_devices > 1 else "Of the device's memory"
        return finding, (
            f"{each}: weights {size(self.weight_bytes)}, activations and runtime {size(self.reserve_bytes)}. "
            f"A token keeps {self.kv_bytes_per_token:,.0f} bytes ({shape.num_kv_heads} KV heads for {shape.num_heads} query heads), "
            f"a request {size(self.kv_bytes_per_request)}. {self._rest()}"
        )

    def _rest(self) -> str:
        if not self.num_requests:
            return f"With one request that is {size(self.kv_bytes_per_request - self.headroom_bytes)} too much."
        step = self.cost.of(decode_work(self.num_requests, self.context.value, self.cost.shape.window))
        held, left = size(self.kv_bytes), size(self.headroom_bytes)
        return f"They hold {held} and decode in steps of {duration(step.seconds)}, limited by {step.limit}; {left} is left."

    def draw(self) -> Figure:
        parts = {
            "weights": self.weight_bytes,
            "activations, runtime": self.reserve_bytes,
            "KV of one request": self.kv_bytes_per_request,
            "KV of the others": max(self.num_requests - 1, 0) * self.kv_bytes_per_request,
            "not to be touched": self.untouched_bytes,
        }
        return charts.vram_waterfall(parts, self.cost.device.memory_bytes, self.words()[0])


class BatchingExplorer(Explorer):
    """Policy, slots, spread of the answers' lengths and rate of arrival -> who runs when, throughput, time to the first token.

    The real scheduler serves made-up requests to Llama-2-13B on one A100-80GB. `step` looks back: the picture stops after that step.
    """

    def __init__(self, num_requests: int = 40, num_prompt_tokens: int = 128, mean_output_tokens: int = 48, seed: int = 0):
        self.num_requests, self.num_prompt_tokens, self.seed = num_requests, num_prompt_tokens, seed
        self.mean_output_tokens = mean_output_tokens
        self.cost = CostModel(SHAPES["llama-2-13b"], DEVICES["a100-80gb"])
        self.policy = choice("policy", (CONTINUOUS, STATIC, TIMEOUT), CONTINUOUS)
        self.slots = steps("slots", 1, 32, 8)
        self.spread = amount("length spread, CV", 0.0, 2.0, 0.1, 1.0, ".1f")
        self.rate = amount("requests/s (0: all)", 0.0, 20.0, 0.5, 0.0, ".1f")
        self.wait = amount("wait at most, s", 0.0, 4.0, 0.25, 1.0)
        self.step = whole("up to step", 0, 0, 0)
        self._settings: tuple[object, ...] = ()
        super().__init__([self.policy, self.slots, self.spread, self.rate, self.wait], [self.step, *step_buttons(self.step)])

    # --- numbers ----------------------------------------------------------------------------------

    def compute(self) -> None:
        is_timeout = self.policy.value == TIMEOUT
        settings = (self.policy.value, self.slots.value, self.spread.value, self.rate.value, self.wait.value if is_timeout else None)
        if settings == self._settings:
            return  # only the step has moved
        served = {name: self.serve(name) for name in {CONTINUOUS, STATIC, self.policy.value}}
        self.trace: Trace = served[self.policy.value]
        self.summary: Summary = self.trace.summary()
        self.throughput_tokens_per_s = self.summary.output_tokens_per_s
        self.gain = served[CONTINUOUS].summary().output_tokens_per_s / served[STATIC].summary().output_tokens_per_s
        elapsed_s = sum(step.elapsed_s for step in self.trace.steps)
        self.busy_share = sum(step.elapsed_s * len(step.tokens) for step in self.trace.steps) / (self.slots.value * elapsed_s)
        self._settings = settings
        with self._adjusting():
            self.step.max = len(self.trace.steps) - 1
            self.step.value = self.step.max
            self.wait.disabled = not is_timeout

    def workload(self) -> Workload:
        """The requests that every policy is given. Moving a slider stretches the same ones: they are drawn from one seed."""
        mean, cv = self.mean_output_tokens, self.spread.value
        mean_over_median = math.sqrt(1 + cv * cv)  # of a lognormal distribution
        sigma = math.sqrt(2 * math.log(mean_over_median))
        output = Lengths.lognormal(mean / mean_over_median, sigma, 1, 6 * mean) if cv else Lengths.constant(mean)
        arrivals = poisson(self.rate.value) if self.rate.value else all_at_once()
        return make_workload(self.num_requests, Lengths.constant(self.num_prompt_tokens), output, arrivals, self.seed)

    def serve(self, name: str) -> Trace:
        """The workload under one of the three policies."""
        slots = self.slots.value
        policies: dict[str, Policy] = {
            CONTINUOUS: FirstComeFirstServed(),
            STATIC: StaticBatches(slots),
            TIMEOUT: TimeoutBatches(slots, self.wait.value),
        }
        return simulate(make_engine(self.cost, policy=policies[name], max_running=slots, prefix_caching=False), self.workload())

    @property
    def now(self) -> StepRecord:
        """The step after which the picture stops."""
        return self.trace.steps[self.step.value]

    @property
    def now_s(self) -> float:
        """When that step ends, from the first arrival on."""
        return self.now.end_s - min(record.arrival_s for record in self.trace.requests.values())

    # --- words and picture ------------------------------------------------------------------------

    def words(self) -> tuple[str, str]:
        s, now = self.summary, self.now
        lengths = [record.num_output_tokens for record in self.trace.requests.values()]
        finding = f"Continuous batching gives {self.gain:.2f} times the throughput of static batches on these requests."
        return finding, (
            f"Shown: {self.policy.value}, {self.slots.value} slots, {self.busy_share:.0%} of them busy: "
            f"{s.output_tokens_per_s:,.0f} output tokens/s, first token after {duration(s.ttft_p50_s)} (median) or "
            f"{duration(s.ttft_p99_s)} (99th percentile). "
            f"{s.num_requests} answers of {min(lengths)} to {max(lengths)} tokens, {sum(lengths) / len(lengths):.0f} on average. "
            f"After step {now.step} of {self.step.max}, at {duration(self.now_s)}, {now.num_running} run and {now.num_waiting} wait."
        )

    def draw(self) -> Figure:
        title = f"{self.policy.value}, {self.slots.value} slots: {self.throughput_tokens_per_s:,.0f} output tokens/s"
        step = None if self.step.value == self.step.max else self.now.step
        return figures.timeline(self.trace, title, max_requests=self.num_requests, step=step, height_in=5.0)


class RooflineExplorer(Explorer):
    """Model, device, batch and context -> what a decode step and a chunk of prompt take, and which roof holds them down."""

    def __init__(self, model: str = "llama-2-13b", device: str = "a100-80gb"):
        self.model = choice("model", SHAPES, model)
        self.device = choice("device", DEVICES, device)
        self.weights = choice("weights", WEIGHT_FORMATS, "bf16")
        self.kv = choice("KV cache", FORMATS, "bf16")
        self.batch = steps("requests decoding", 1, 1024, 8)
        self.context = steps("context, tokens", 128, LONGEST_CONTEXT, 1024)
        self.chunk = steps("prompt chunk", 16, 8192, 512)
        super().__init__([self.model, self.device, self.weights, self.kv, self.batch, self.context, self.chunk])

    def compute(self) -> None:
        shape, device = SHAPES[self.model.value], DEVICES[self.device.value]
        self.cost = CostModel(shape, device, weights=self.weights.value, kv=self.kv.value)
        self.decode = self.cost.of(decode_work(self.batch.value, self.context.value, shape.window))
        self.prefill = self.cost.of(row_work(0, self.chunk.value, window=shape.window))
        self.decode_flops_per_byte = self.decode.flops / self.decode.num_bytes
        self.prefill_flops_per_byte = self.prefill.flops / self.prefill.num_bytes
        self.ridge_flops_per_byte = device.ridge_flops_per_byte
        self.decode_tokens_per_s = self.batch.value / self.decode.seconds

    def words(self) -> tuple[str, str]:
        finding = f"A decode step is limited by {self.decode.limit}, the prompt chunk by {self.prefill.limit}."
        return finding, (
            f"Decode of {self.batch.value:,} at {self.context.value:,} tokens: {_split(self.decode)}; "
            f"{self.decode_flops_per_byte:,.1f} FLOPs per byte, {self.decode_tokens_per_s:,.0f} tokens/s. "
            f"Prompt chunk of {self.chunk.value:,}: {_split(self.prefill)}; "
            f"{self.prefill_flops_per_byte:,.1f} FLOPs per byte. The roofs of the {self.device.value} meet at "
            f"{self.ridge_flops_per_byte:,.0f} FLOPs per byte.{self._misfit()}"
        )

    def _misfit(self) -> str:
        needed = self.cost.weight_bytes + self.batch.value * self.context.value * self.cost.kv_bytes_per_token
        if needed <= self.cost.device.memory_bytes:
            return ""
        return f" It could not run so: weights and KV take {size(needed)}, the device has {size(self.cost.device.memory_bytes)}."

    def draw(self) -> Figure:
        points = [
            (f"decode, {self.batch.value:,} requests", self.decode.flops, self.decode.num_bytes, self.decode.seconds),
            (f"prompt chunk, {self.chunk.value:,} tokens", self.prefill.flops, self.prefill.num_bytes, self.prefill.seconds),
        ]
        spent_s = {"decode": self.decode.spent_s, "chunk": self.prefill.spent_s}
        return charts.roofline(self.cost.device, points, self.words()[0], spent_s)


def _split(cost: Cost) -> str:
    """A step's seconds by what they go to."""
    parts = " + ".join(f"{name} {duration(seconds)}" for name, seconds in cost.spent_s.items() if seconds >= 5e-5)
    return f"{duration(cost.seconds)} = {parts}"
