"""What fits on a device, and how many requests it may serve at once within a latency target: arithmetic, no run needed.

Why: a deployment is settled by one subtraction (what weights and a step's working space leave is for keys and values), one division
(by what a request keeps), and two questions to the cost model (how long is a step, how long is a prompt). All are pure functions
that take microseconds to a few milliseconds, so a slider can call them as it moves.

    weights      all parameters in their format, shared by the devices; of quantized ones scales, zeros and the embedding in bf16 count,
                 and the output layer in 8 bits, as this engine has it, or in 16 (`head_bits`), as others have it
    activations  what one step has in flight at most: see `activation_bytes`
    runtime      device context, captured graphs, slack of the allocator: an assumption, the rest of the reserve
    KV           whole blocks, as many as the rest holds
    headroom     what the engine is not to touch

The reserve (activations and runtime together) is 3 GB unless the formula asks for more. For a 13B and steps of 2,048 tokens the formula
gives 0.2 GB and 1 GB of runtime on top, so 3 GB looks generous; it is what steps of 16,384 tokens come to (1.7 + 1), a usual setting.

Invariant: the lines of a budget add up to the memory of a device; a plan's requests run on its blocks together, and one more does not.

Taught in notebook 02.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minserve.sim.cost_model import RESERVE_BYTES, CostModel
from minserve.sim.devices import DeviceSpec
from minserve.sim.pace import Pace, largest, most_fed, pace
from minserve.sim.shapes import ModelShape, bits_of
from minserve.sim.weight_formats import bits_of_weights

RUNTIME_BYTES = 1e9  # the least that is kept for the runtime
BYTES_PER_LOGIT = 10  # a row of logits in the compute type, in fp32, and sorted for top-p
CONTEXTS = tuple(1024 * 2**i for i in range(8))  # 1k ... 128k


class DoesNotFit(ValueError):
    """The device cannot hold the model and one request; the message has the numbers and what would help."""


# --- memory ---------------------------------------------------------------------------------------


def activation_bytes(cost: CostModel, token_budget: int, num_rows: int) -> float:
    """The most that one step has in flight on a device: T tokens in the widest spot of a layer, then logits of the sampled rows.

    In a layer: the residual stream and its normed copy, and either queries, keys, values and attention's output, or the MLP's inner
    vectors (gate, up, and their product); with experts, those of every visited expert and its result.
    """
    shape, n = cost.shape, cost.num_devices
    attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim / n
    mlp = shape.num_mlp_matrices * shape.intermediate_size / n
    if shape.num_experts:
        visited = shape.num_active_experts + shape.num_shared_experts
        mlp = max(mlp if shape.num_dense_layers else 0, visited * (shape.num_mlp_matrices * shape.expert_size / n + shape.hidden_size))
    number_bytes = 4 if cost.weights == "fp32" else 2
    return number_bytes * token_budget * (2 * shape.hidden_size + max(attention, mlp)) + BYTES_PER_LOGIT * num_rows * shape.vocab_size


def kv_tokens_that_fit(cost: CostModel, memory_fraction: float = 0.9, reserve_bytes: float = RESERVE_BYTES) -> int:
    """Tokens whose keys and values fit, over all requests; 0 if the weights do not.

    >>> from minserve.sim.devices import DEVICES
    >>> from minserve.sim.shapes import SHAPES
    >>> kv_tokens_that_fit(CostModel(SHAPES["llama-2-13b"], DEVICES["a100-80gb"]))
    52452
    """
    return max(0, int(cost.kv_bytes_left(memory_fraction, reserve_bytes) // cost.kv_bytes_per_token))


def blocks_that_fit(cost: CostModel, block_size: int = 16, memory_fraction: float = 0.9, reserve_bytes: float = RESERVE_BYTES) -> int:
    left = cost.kv_bytes_left(memory_fraction, reserve_bytes)
    return max(0, int(left // (cost.kv_bytes_per_token * block_size)))


def requests_that_fit(
    cost: CostModel,
    context_tokens: int,
    *,
    memory_fraction: float = 0.9,
    reserve_bytes: float = RESERVE_BYTES,
    block_size: int = 16,
) -> int:
    """Requests of so many tokens (prompt and output) that fit at once, in whole blocks each."""
    num_blocks = blocks_that_fit(cost, block_size, memory_fraction, reserve_bytes)
    return num_blocks // -(-context_tokens // block_size)


def tokens_where_kv_equals_weights(cost: CostModel) -> float:
    """From so many tokens on, over all requests, keys and values take more memory than the weights."""
    return cost.weight_bytes / cost.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory of one device, in bytes. All devices of a plan are alike."""

    total_bytes: float
    weight_bytes: float
    activation_bytes: float
    runtime_bytes: float
    block_bytes: float
    num_blocks: int

    @property
    def kv_bytes(self) -> float:
        return self.num_blocks * self.block_bytes

    @property
    def headroom_bytes(self) -> float:
        return self.total_bytes - self.weight_bytes - self.activation_bytes - self.runtime_bytes - self.kv_bytes

    def parts(self) -> Mapping[str, float]:
        """The lines, in the order of a picture; they add up to the total."""
        return {
            "weights": self.weight_bytes,
            "activations": self.activation_bytes,
            "runtime": self.runtime_bytes,
            "KV": self.kv_bytes,
            "headroom": self.headroom_bytes,
        }


def share_out(
    cost: CostModel,
    context_tokens: int,
    memory_fraction: float = 0.9,
    reserve_bytes: float | None = None,
    block_size: int = 16,
    token_budget: int = 2048,
) -> Budget:
    """Share out the memory of a device, whether or not a request of so many tokens fits: it may be left with no block.

    More rows are sampled at once where more requests fit, up to one for each token of a step.
    """
    num_rows = min(token_budget, requests_that_fit(cost, context_tokens, memory_fraction=memory_fraction, block_size=block_size))
    activations = activation_bytes(cost, token_budget, num_rows)
    reserve = max(RESERVE_BYTES, activations + RUNTIME_BYTES) if reserve_bytes is None else reserve_bytes
    if reserve < activations:
        raise ValueError(f"a reserve of {reserve / 1e9:.2f} GB is too small: the activations alone take {activations / 1e9:.2f} GB")
    return Budget(
        total_bytes=cost.device.memory_bytes,
        weight_bytes=cost.stored_weight_bytes,
        activation_bytes=activations,
        runtime_bytes=reserve - activations,
        block_bytes=cost.kv_bytes_per_token * block_size,
        num_blocks=blocks_that_fit(cost, block_size, memory_fraction, reserve),
    )


# --- the plan -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """A deployment: its budget, how many requests fit, and the batch to run. `limits` holds the largest batch that each limit allows."""

    cost: CostModel
    memory_fraction: float
    block_size: int
    token_budget: int
    context_tokens: int
    output_tokens: int
    budget: Budget
    num_requests: int  # that fit at full length
    limits: Mapping[str, int]  # memory, step, and TPOT and TTFT where asked for
    alone: Pace  # one request by itself: nothing is faster
    full: Pace | None  # the batch; None if not even one request meets the targets

    @property
    def prompt_tokens(self) -> int:
        return self.context_tokens - self.output_tokens

    @property
    def batch(self) -> int:
        return min(self.limits.values())

    @property
    def limited_by(self) -> str:
        return min(self.limits, key=lambda name: self.limits[name])

    @property
    def num_kv_tokens(self) -> int:
        return self.budget.num_blocks * self.block_size

    @property
    def request_bytes(self) -> float:
        """KV of one request at full length, on each device."""
        return -(-self.context_tokens // self.block_size) * self.budget.block_bytes

    def requests_of(self, context_tokens: int) -> int:
        """How many requests of another length the same pool holds."""
        return self.budget.num_blocks // -(-context_tokens // self.block_size)

    def price_per_million_tokens(self, price_per_hour: float) -> float:
        """What a million output tokens cost at the full batch, at a price per device and hour."""
        assert self.full is not None, "a plan without a batch has no price"
        return price_per_hour * self.cost.num_devices / 3600 / self.full.output_tokens_per_s * 1e6


def plan(
    shape: ModelShape,
    device: DeviceSpec,
    *,
    context_tokens: int,
    output_tokens: int | None = None,
    weights: str = "bf16",
    kv: str = "bf16",
    num_devices: int = 1,
    head_bits: int = 8,
    memory_fraction: float = 0.9,
    reserve_bytes: float | None = None,
    block_size: int = 16,
    token_budget: int = 2048,
    slo_ttft_s: float | None = None,
    slo_tpot_s: float | None = None,
) -> Plan:
    """Plan for requests of `context_tokens`, of which `output_tokens` are answer (unless given: 256, or half of a short context).

    Raises DoesNotFit with the numbers and what would help, ValueError for settings that make no sense.
    """
    output_tokens = output_tokens if output_tokens is not None else min(256, context_tokens // 2)
    _check(context_tokens, output_tokens, memory_fraction, block_size, token_budget)
    cost = CostModel(shape, device, weights=weights, kv=kv, num_devices=num_devices, head_bits=head_bits)
    budget = share_out(cost, context_tokens, memory_fraction, reserve_bytes, block_size, token_budget)
    num_requests = budget.num_blocks // -(-context_tokens // block_size)
    if num_requests < 1:
        raise DoesNotFit(_describe_misfit(cost, context_tokens, memory_fraction, budget, block_size))

    def pace_of(batch: int) -> Pace:
        return pace(cost, batch, context_tokens - output_tokens, output_tokens, token_budget)

    limits = {"memory": num_requests, "step": most_fed(context_tokens - output_tokens, output_tokens, token_budget)}
    most = limits["step"]
    if slo_tpot_s is not None:
        limits["TPOT"] = largest(most, lambda batch: pace_of(batch).tpot_s <= slo_tpot_s)
    if slo_ttft_s is not None:
        limits["TTFT"] = largest(most, lambda batch: pace_of(batch).ttft_s <= slo_ttft_s)
    batch = min(limits.values())
    return Plan(
        cost=cost,
        memory_fraction=memory_fraction,
        block_size=block_size,
        token_budget=token_budget,
        context_tokens=context_tokens,
        output_tokens=output_tokens,
        budget=budget,
        num_requests=num_requests,
        limits=limits,
        alone=pace_of(1),
        full=pace_of(batch) if batch else None,
    )


def _check(context_tokens: int, output_tokens: int, memory_fraction: float, block_size: int, token_budget: int) -> None:
    if not 1 <= output_tokens < context_tokens:
        raise ValueError(f"of {context_tokens} tokens, between 1 and {context_tokens - 1} can be output, got {output_tokens}")
    if not 0 < memory_fraction <= 1:
        raise ValueError(f"the memory fraction must be above 0 and at most 1, got {memory_fraction}")
    if block_size < 1 or token_budget < 1:
        raise ValueError(f"a block and a step hold at least 1 token, got block_size {block_size}, token_budget {token_budget}")


def _describe_misfit(cost: CostModel, context_tokens: int, memory_fraction: float, budget: Budget, block_size: int) -> str:
    reserve = budget.activation_bytes + budget.runtime_bytes
    lent = budget.total_bytes * memory_fraction
    left, needed = lent - budget.weight_bytes - reserve, -(-context_tokens // block_size) * budget.block_bytes
    helps = _what_would_fit(cost, context_tokens, memory_fraction, reserve, block_size)
    return (
        f"{cost.shape.name} with a request of {context_tokens:,} tokens does not fit on {cost.num_devices} x {cost.device.name}: "
        f"{memory_fraction:.0%} of {budget.total_bytes / 1e9:.0f} GB is {lent / 1e9:.1f} GB, less {budget.weight_bytes / 1e9:.1f} GB of "
        f"{cost.weights} weights and {reserve / 1e9:.1f} GB for activations and runtime leaves {left / 1e9:.1f} GB on each device, "
        f"the request's KV needs {needed / 1e9:.2f} GB. {helps}"
    )


def _what_would_fit(cost: CostModel, context_tokens: int, memory_fraction: float, reserve: float, block_size: int) -> str:
    """The single changes that are enough, each with the requests that then fit; else a shorter context, else both at once."""
    counts = [n for n in (2, 4, 8, 16, 32) if n > cost.num_devices and cost.shape.num_heads % n == 0]
    smaller = [name for name in ("int8", "int4") if bits_of_weights(name) < bits_of_weights(cost.weights)]
    changes = [(f"--weights {name}", {"weights": name}) for name in smaller]
    changes += [(f"--kv {name}", {"kv": name}) for name in ("int8", "int4") if bits_of(name) < bits_of(cost.kv)]
    changes += [(f"--tensor-parallel {n}", {"num_devices": n}) for n in counts]
    both = [(f"--weights {name} --tensor-parallel {n}", {"weights": name, "num_devices": n}) for n in counts for name in smaller]

    def fitting(options: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        found: dict[str, str] = {}  # of each kind of change, the smallest that is enough
        for words, change in options:
            settings = {"weights": cost.weights, "kv": cost.kv, "num_devices": cost.num_devices, "head_bits": cost.head_bits, **change}
            other = CostModel(cost.shape, cost.device, **settings)
            fits = requests_that_fit(other, context_tokens, memory_fraction=memory_fraction, reserve_bytes=reserve, block_size=block_size)
            if fits:
                found.setdefault(words.rpartition(" ")[0], f"{words} ({fits:,} request{'s'[: fits > 1]})")
        return list(found.values())

    ways = fitting(changes)
    longest = blocks_that_fit(cost, block_size, memory_fraction, reserve) * block_size
    ways += [f"--context {longest}"] if longest else []
    ways = ways or fitting(both)[:1]
    return f"It would fit with {', or '.join(ways)}." if ways else "No smaller format and no number of such devices up to 32 is enough."
