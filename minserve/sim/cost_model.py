"""FLOPs, bytes and seconds of a step: the only place where they are counted.

Why: the simulator, the planner, every roofline and every "% of the limit" divide by the same numbers. A step is summed up as
`Work` (how many tokens, how much context they read), which any batch of the scheduler, real or simulated, has.

    weights  every step reads all weights once (of experts, those that its tokens visit), but looks the embedding up; 2 FLOPs per
             weight and token, in the compute type also where weights are quantized: see products.py
    KV       a row reads the keys and values of its context once, and writes those of its own tokens
    scores   each pair of a query and a key it may see costs 4 x H x D FLOPs in every layer
    link     with tensor parallelism, two sums over all devices in every layer

A product takes the longer of its bytes and its FLOPs; products follow each other. Two shares of an A100's peaks were fitted to two of
the rates that TensorRT-LLM 0.6.1 published (LLaMA-7B, fp16, one A100-80GB); the other anchors are predictions:

    batch 60, 128 in, 2,048 out         63.7 s     model 65.2 s     fits the 0.78 of the bandwidth
    first token of 2,048, alone         133 ms     model 133 ms     fits the 0.67 of the FLOPs at many rows
    batch 384, 128 in, 128 out          8.80 s     model 9.49 s     predicted, +8 %
    batch 52, 2,048 in, 128 out         11.26 s    model 12.62 s    predicted, +12 %
    LLaMA-70B on four, first of 2,048   377 ms     model 379 ms     predicted, 0 %
    Llama-2-7B / 13B, batch 1 (AWQ)     10.8 / 19.1 ms   model 8.8 / 16.7 ms   predicted, -18 and -13 %: another engine's host time

The 0.60 at few rows and half a millisecond of host time a step are assumptions; the anchors hardly depend on them.

Invariant: all numbers are per device and step; seconds are what the host waits for, overhead included.

Taught in notebook 01.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from os.path import commonprefix

from minserve.core.batch import ScheduledRequest
from minserve.sim.devices import DeviceSpec
from minserve.sim.products import StoredWeights
from minserve.sim.shapes import ModelShape

RESERVE_BYTES = 3e9  # kept for activations and the runtime; see planner.py


@dataclass(frozen=True, slots=True)
class Work:
    """What a step asks for, in tokens. Works add up: the sum is a step that does both."""

    num_tokens: int = 0  # computed
    num_requests: int = 0  # rows of the step
    num_samples: int = 0  # rows that yield a token
    num_context_tokens: int = 0  # whose keys and values are read, over all rows
    num_pairs: int = 0  # query and key, over all rows
    num_window_tokens: int = 0  # the same two in layers that see a window only
    num_window_pairs: int = 0
    num_chunks: int = 0  # rows of more than one token: prompts, or parts of them
    num_shared_pairs: int = 0  # of the pairs, those with keys that are read once for several requests

    def __add__(self, other: "Work") -> "Work":
        return Work(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def __rmul__(self, count: int) -> "Work":
        return Work(*(count * getattr(self, name) for name in self.__slots__))


def row_work(start: int, num_tokens: int, samples: bool = True, window: int | None = None) -> Work:
    """The work of one request's tokens [start, start + num_tokens).

    A token sees those before it and itself: a chunk of 3 after 10 has 11 + 12 + 13 pairs.

    >>> row_work(10, 3).num_pairs, row_work(10, 3).num_context_tokens
    (36, 13)
    """
    end = start + num_tokens
    pairs = num_tokens * (start + end + 1) // 2
    is_chunk = int(num_tokens > 1)
    if window is None or end <= window:
        return Work(num_tokens, 1, int(samples), end, pairs, end, pairs, is_chunk)
    num_before = max(0, window - start)  # tokens that do not see a full window yet
    seen = num_before * (start + 1 + start + num_before) // 2 + (num_tokens - num_before) * window
    return Work(num_tokens, 1, int(samples), end, pairs, min(end, window + num_tokens - 1), seen, is_chunk)


def decode_work(num_requests: int, context_tokens: int, window: int | None = None) -> Work:
    """One token for each of so many requests, each with so many tokens in its context (the new one included)."""
    total = num_requests * context_tokens
    seen = num_requests * min(context_tokens, window or context_tokens)  # in layers that see a window only
    return Work(num_requests, num_requests, num_requests, total, total, seen, seen)


@dataclass(frozen=True, slots=True)
class Cost:
    """One step on one device: FLOPs, bytes by what they are, and seconds by what they are spent on."""

    linear_flops: float
    attention_flops: float
    shared_flops: float  # of attention_flops, those in one product for several requests
    weight_bytes: float
    kv_read_bytes: float
    kv_written_bytes: float
    activation_bytes: float
    link_bytes: float
    linear_s: float
    attention_s: float
    activation_s: float
    link_s: float
    overhead_s: float
    weights_are_slower: bool  # reading the weights takes longer than multiplying by them

    @property
    def flops(self) -> float:
        return self.linear_flops + self.attention_flops

    @property
    def num_bytes(self) -> float:
        """Bytes that must move between memory and the cores: weights, KV read and written."""
        return self.weight_bytes + self.kv_read_bytes + self.kv_written_bytes

    @property
    def seconds(self) -> float:
        return self.linear_s + self.attention_s + self.activation_s + self.link_s + self.overhead_s

    @property
    def spent_s(self) -> dict[str, float]:
        """The seconds by what they go to. Products by weights are counted as weights or as FLOPs, whichever takes longer."""
        return {
            "weights": self.linear_s if self.weights_are_slower else 0.0,
            "FLOPs": 0.0 if self.weights_are_slower else self.linear_s,
            "KV": self.attention_s,
            "activations": self.activation_s,
            "link": self.link_s,
            "host": self.overhead_s,
        }

    @property
    def limit(self) -> str:
        """What most of the time goes to: weights, KV, FLOPs, activations, link or host."""
        spent_s = self.spent_s
        return max(spent_s, key=lambda name: spent_s[name])


class CostModel:
    """A model in its formats on a device, or on several that share it (tensor parallelism).

    `weights` is the name of a format (see weight_formats.py); where that is quantized, the output layer has `head_bits`, 8 as our engine
    keeps it or 16 as most others do, and the embedding stays in bf16.

    >>> from minserve.sim.devices import DEVICES
    >>> from minserve.sim.shapes import SHAPES
    >>> cost = CostModel(SHAPES["llama-2-13b"], DEVICES["a100-80gb"])
    >>> f"{1e3 * cost.of(decode_work(1, 1)).seconds:.1f} ms"
    '16.7 ms'
    """

    def __init__(
        self,
        shape: ModelShape,
        device: DeviceSpec,
        *,
        weights: str = "bf16",
        kv: str = "bf16",
        num_devices: int = 1,
        head_bits: int = 8,
    ):
        if head_bits not in (8, 16):
            raise ValueError(f"an output layer has 8 or 16 bits, got {head_bits}")
        if num_devices < 1 or shape.num_heads % num_devices:
            raise ValueError(f"{shape.num_heads} query heads cannot be shared evenly by {num_devices} devices")
        if shape.num_kv_heads % num_devices and num_devices % shape.num_kv_heads and not shape.latent_size:
            raise ValueError(f"{shape.num_kv_heads} KV heads can neither be split nor copied evenly over {num_devices} devices")
        self.shape, self.device, self.weights, self.kv, self.num_devices = shape, device, weights, kv, num_devices
        self.head_bits = head_bits
        self.stored = StoredWeights(shape, device, weights, head_bits, num_devices)
        # A KV head that cannot be split is kept by every device.
        self.kv_split = min(num_devices, shape.num_kv_heads) if not shape.latent_size else 1
        self.weight_bytes = self.stored.num_bytes
        self.kv_bytes_per_token = shape.kv_bytes_per_token(kv) / self.kv_split
        self._layer_kv_bytes = shape.kv_bytes_per_token_layer(kv) / self.kv_split
        self._num_full_layers = shape.num_kv_layers - shape.num_window_layers

    # --- a step -----------------------------------------------------------------------------------

    def work(self, rows: Iterable[ScheduledRequest]) -> Work:
        """Sum up the rows of a step."""
        rows = tuple(rows)
        window = self.shape.window
        num_tokens = num_samples = num_chunks = context = pairs = window_context = window_pairs = 0
        for row in rows:
            start, count = row.start, row.num_tokens
            num_tokens += count
            num_samples += row.samples
            num_chunks += count > 1
            context += start + count
            pairs += count * (2 * start + count + 1) // 2
            if window is not None:
                one = row_work(start, count, window=window)
                window_context += one.num_window_tokens
                window_pairs += one.num_window_pairs
        # A window ends inside a prefix, in another place for each request: then nothing is shared (as in model/attention.py).
        saved, shared_pairs = _shared_prefixes(rows) if self.device.shares_prefix_reads and window is None else (0, 0)
        context -= saved
        if window is None:
            window_context, window_pairs = context, pairs
        return Work(num_tokens, len(rows), num_samples, context, pairs, window_context, window_pairs, num_chunks, shared_pairs)

    def of(self, work: Work) -> Cost:
        """FLOPs, bytes and seconds of a step. A step without tokens costs its overhead only."""
        shape = self.shape
        products = self.stored.products(work.num_tokens, work.num_samples)  # at the shares of real kernels
        attention_flops, shared_flops = self._attention_flops(work)
        reads = self._num_full_layers * work.num_context_tokens
        reads += shape.num_window_layers * work.num_window_tokens
        kv_read_bytes = self._layer_kv_bytes * reads
        kv_written_bytes = self.kv_bytes_per_token * work.num_tokens
        activation_bytes = self._activation_bytes(work.num_tokens)
        link_bytes, link_s = self._link(work.num_tokens)
        return Cost(
            linear_flops=self.stored.flops(work.num_tokens, work.num_samples),
            attention_flops=attention_flops,
            shared_flops=shared_flops,
            weight_bytes=products.num_bytes,
            kv_read_bytes=kv_read_bytes,
            kv_written_bytes=kv_written_bytes,
            activation_bytes=activation_bytes,
            link_bytes=link_bytes,
            linear_s=max(products.by_bytes_s, products.by_flops_s),
            attention_s=self._attention_s(kv_read_bytes + kv_written_bytes, attention_flops, shared_flops),
            activation_s=self._activation_s(activation_bytes),
            link_s=link_s,
            overhead_s=self._overhead_s(work),
            weights_are_slower=products.by_bytes_s >= products.by_flops_s,
        )

    def _overhead_s(self, work: Work) -> float:
        device = self.device
        prompts_s = device.prompt_overhead_s if work.num_chunks else 0.0
        return device.step_overhead_s + prompts_s + work.num_requests * device.request_overhead_s

    def weight_bytes_read(self, num_tokens: int, num_samples: int = 1) -> float:
        """Bytes of stored weights that a step of so many tokens meets on one device."""
        return self.stored.read_bytes(num_tokens, num_samples)

    def _attention_flops(self, work: Work) -> tuple[float, float]:
        """Scores and weighted sums of all pairs of tokens; of these, the part with prefixes that requests share."""
        shape = self.shape
        per_pair = 2 * shape.num_heads * (shape.query_head_dim + shape.head_dim) / self.num_devices
        num_pairs = self._num_full_layers * work.num_pairs + shape.num_window_layers * work.num_window_pairs
        return per_pair * num_pairs, per_pair * self._num_full_layers * work.num_shared_pairs

    def _attention_s(self, kv_bytes: float, attention_flops: float, shared_flops: float) -> float:
        """The queries of all who share a prefix are rows of one large product with its keys, which runs at the full rate."""
        device = self.device
        by_bytes_s = kv_bytes / (device.bytes_per_s * device.kv_read_share)
        by_flops_s = ((attention_flops - shared_flops) / device.attention_share + shared_flops) / device.flops_per_s
        return by_bytes_s + by_flops_s if device.gathers_kv else max(by_bytes_s, by_flops_s)

    def _activation_bytes(self, num_tokens: int) -> float:
        """What passes between the products of a layer, read and written once each, 2 bytes a number."""
        shape = self.shape
        heads = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        inside = (shape.num_active_experts or 1) * (shape.expert_size or shape.intermediate_size) * shape.num_mlp_matrices
        return 2 * 2 * num_tokens * shape.num_layers * (6 * shape.hidden_size + (heads + inside) / self.num_devices)

    def _activation_s(self, activation_bytes: float) -> float:
        share = self.device.activation_share
        return activation_bytes / (self.device.bytes_per_s * share) if share else 0.0

    def _link(self, num_tokens: int) -> tuple[float, float]:
        """Bytes over one device's link and their seconds: two sums a layer, each of which sends 2 (n - 1) / n of the hidden states."""
        n = self.num_devices
        if n == 1 or num_tokens == 0:
            return 0.0, 0.0
        num_sums = 2 * self.shape.num_layers
        num_bytes = num_sums * 2 * (n - 1) / n * num_tokens * self.shape.hidden_size * 2
        return num_bytes, num_bytes / self.device.link_bytes_per_s + num_sums * 2 * (n - 1) * self.device.link_latency_s

    # --- memory -----------------------------------------------------------------------------------

    @property
    def stored_weight_bytes(self) -> float:
        """Weights that each device holds, with what it keeps of them in another layout or type."""
        return self.stored.held_bytes

    def kv_bytes_left(self, memory_fraction: float = 0.9, reserve_bytes: float = RESERVE_BYTES) -> float:
        """Bytes for keys and values on each device; below zero if not even the weights fit."""
        return self.device.memory_bytes * memory_fraction - self.stored_weight_bytes - reserve_bytes

    def pool_blocks(self, block_size: int, memory_fraction: float = 0.9, reserve_bytes: float = RESERVE_BYTES) -> int:
        """KV blocks that fit beside weights and a reserve for activations, on every device alike. Raises ValueError if none does."""
        left = self.kv_bytes_left(memory_fraction, reserve_bytes)
        num_blocks = int(left // (self.kv_bytes_per_token * block_size))
        if num_blocks < 1:
            raise ValueError(
                f"{self.shape.name} does not fit: {memory_fraction:.0%} of {self.num_devices} x {self.device.memory_bytes / 1e9:.0f} GB, "
                f"less {self.stored_weight_bytes / 1e9:.1f} GB of {self.weights} weights and {reserve_bytes / 1e9:.1f} GB in reserve, "
                f"leaves {left / 1e9:.1f} GB for KV"
            )
        return num_blocks


def _shared_prefixes(rows: tuple[ScheduledRequest, ...]) -> tuple[int, int]:
    """Where rows begin with the same blocks: context tokens that need not be read again, and pairs of a query and a shared key.

    Blocks that a row writes in this step are its own. How long a block is, a batch does not say; the fullest of the rows' last blocks does.
    """
    block_size = max((-(-row.end // len(row.block_table)) for row in rows if row.block_table), default=0)
    families: dict[int, list[ScheduledRequest]] = {}
    for row in rows:
        if row.block_table and row.start >= block_size:
            families.setdefault(row.block_table[0], []).append(row)
    num_saved = num_pairs = 0
    for family in families.values():
        if len(family) > 1:
            num_shared = len(commonprefix([row.block_table[: row.start // block_size] for row in family])) * block_size
            num_saved += (len(family) - 1) * num_shared
            num_pairs += num_shared * sum(row.num_tokens for row in family)
    return num_saved, num_pairs
