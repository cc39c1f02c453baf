"""What a format of the KV cache gives and costs: bytes and requests that fit on one side, errors channel by channel on the other.

Why: half the bytes are certain, what they cost is not. It depends on whether a few channels of the keys are much louder than the rest, and
on whom they share a scale with. So the explorer has a slider for how loud they are, and the three answers to it: share along a token (what
the cache does by itself), rotate first, or share along a channel.

Invariant: codes and scales are those of `minserve_kernels.kv`, requests and bytes those of the planner; nothing is counted here.

Taught in notebook 08.
"""

from collections.abc import Mapping, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from torch import Tensor

from minserve.lab.explorer import Explorer, choice, places, steps
from minserve.lab.style import HALO, INK, PALETTE, SMALL_PT, add_boxes, deep, dress, fix_margins, new_figure, pale, tick_text
from minserve.model.kv_formats import mixing_matrix
from minserve.sim import planner
from minserve.sim.cost_model import CostModel
from minserve.sim.devices import DEVICES
from minserve.sim.shapes import SHAPES
from minserve_kernels import kv

FORMATS = ("bf16", "fp8", "int8", "int4")
BY_TOKEN, MIXED, BY_CHANNEL = SCHEMES = ("along a token", "along a token, mixed", "along a channel")
LOUDNESS = (1, 2, 4, 8, 16, 32, 64)
MODELS = ("llama-2-13b", "llama-3.1-8b", "llama-2-7b", "qwen3-8b", "qwen3-0.6b", "smollm2-1.7b", "smollm2-135m")
NUM_TOKENS, NUM_LOUD = 512, 2  # keys to try a format on, and channels of them that are loud


# --- keys and their errors ------------------------------------------------------------------------


def stored(x: Tensor, format: str, scheme: str = BY_TOKEN) -> Tensor:
    """What comes back of keys (or values) that were kept in a format. x: [T, D], for `BY_CHANNEL` T a multiple of D -> [T, D]

    Along a channel, D tokens of it share what D channels of a token share otherwise, so the bytes are the same.
    """
    if scheme == MIXED:
        mixing = mixing_matrix(x.shape[-1])
        return _round_trip(x @ mixing, format) @ mixing.T
    if scheme == BY_CHANNEL:
        return _round_trip(x.T.unflatten(-1, (-1, x.shape[-1])), format).flatten(-2).T  # [D, T / D, D]
    return _round_trip(x, format)


def _round_trip(x: Tensor, format: str) -> Tensor:
    return kv.decode(*kv.encode(x, format), format, torch.float32)


def channel_errors(x: Tensor, back: Tensor) -> Tensor:
    """How large each channel's error is, as a share of the channel's own size. [T, D], [T, D] -> [D]"""
    return (back - x).pow(2).mean(0).sqrt() / x.pow(2).mean(0).sqrt()


def made_up_keys(head_dim: int, seed: int = 0) -> Tensor:
    """Keys in which all channels are alike: [512, D] normal numbers."""
    return torch.randn(NUM_TOKENS, head_dim, generator=torch.Generator().manual_seed(seed))


def with_loud_channels(x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """The same keys, their loudest channels louder by a factor; and which these are. [T, D] -> [T, D], [2]"""
    loud = x.pow(2).mean(0).topk(NUM_LOUD).indices
    gains = torch.ones(x.shape[-1]).index_fill(0, loud, factor)
    return x * gains, loud


# --- the explorer ---------------------------------------------------------------------------------


class KvFormatExplorer(Explorer):
    """Format, who shares a scale, loudness of two channels, model, device, context -> bytes, errors, requests that fit.

    The keys are made up, or `keys` [T, D] of a real model, T a multiple of D. Errors are theirs; bytes and requests are the chosen model's.
    """

    def __init__(self, format: str = "int4", *, keys: Tensor | None = None, loudness: int = 8, model: str = MODELS[0]):
        self._keys = keys
        self.format = choice("KV format", FORMATS, format)
        self.scheme = choice("a scale is shared", SCHEMES, BY_TOKEN)
        self.loudness = places("loud channels, times", LOUDNESS, loudness)
        self.model = choice("model", MODELS, model)
        self.device = choice("device", DEVICES, "a100-80gb")
        self.context = steps("context, tokens", 256, 32_768, 1024)
        super().__init__([self.format, self.scheme, self.loudness, self.model, self.device, self.context])

    # --- numbers ----------------------------------------------------------------------------------

    def compute(self) -> None:
        shape, device = SHAPES[self.model.value], DEVICES[self.device.value]
        costs = {name: CostModel(shape, device, kv=name) for name in FORMATS}
        self.num_requests = {name: planner.requests_that_fit(cost, self.context.value) for name, cost in costs.items()}
        self.bytes_per_token = {name: cost.kv_bytes_per_token for name, cost in costs.items()}
        base = made_up_keys(shape.head_dim) if self._keys is None else self._keys
        keys, loud = with_loud_channels(base, self.loudness.value)
        self.head_dim, self.loud = keys.shape[-1], sorted(loud.tolist())
        errors = {name: channel_errors(keys, stored(keys, name, self.scheme.value)) for name in FORMATS}
        self.errors = {name: float(error.mean()) for name, error in errors.items()}
        self.errors_by_channel = errors[self.format.value].tolist()

    @property
    def capacity(self) -> float | None:
        """Requests that fit, in units of those in bf16; none where no request fits in bf16."""
        plain = self.num_requests["bf16"]
        return self.num_requests[self.format.value] / plain if plain else None

    # --- words and picture ------------------------------------------------------------------------

    def words(self) -> tuple[str, str]:
        name, count = self.format.value, self.num_requests[self.format.value]
        times = "" if self.capacity is None else f" ({self.capacity:.2f} times bf16)"
        requests = f"{count:,} request{'s'[: count != 1]} of {self.context.value:,} tokens" if count else "no request"
        finding = f"{name}: {requests} fit{'s'[: count < 2]}{times}, and a channel comes back {self.errors[name]:.2%} off (mean)."
        loud = [self.errors_by_channel[channel] for channel in self.loud]
        whose = "made-up keys" if self._keys is None else "the keys that were given"
        return finding, (
            f"{self.model.value} on {self.device.value}: a token takes {self.bytes_per_token[name]:,.0f} bytes, "
            f"{self.bytes_per_token[name] / self.bytes_per_token['bf16']:.3f} of bf16's. "
            f"Errors are those of {whose} with {self.head_dim} channels, a scale shared {self.scheme.value}; "
            f"{NUM_LOUD} channels are {self.loudness.value} times as loud, and come back {max(loud):.2%} off. "
            f"The mean in other formats: {self._others()}."
        )

    def _others(self) -> str:
        return ", ".join(f"{name} {error:.2%}" for name, error in self.errors.items() if name != self.format.value)

    def draw(self) -> Figure:
        figure = new_figure(3.2)
        left, right = figure.subplots(1, 2, width_ratios=[1.15, 1.0])
        _draw_errors(left, self.errors_by_channel, self.loud)
        _draw_requests(right, self.num_requests, self.bytes_per_token, self.format.value, f"requests of {self.context.value:,} tokens")
        fix_margins(figure, left_in=0.62, right_in=0.1, top_in=0.35, bottom_in=0.5)
        figure.subplots_adjust(wspace=0.28)
        return figure


def _draw_errors(ax: Axes, errors: Sequence[float], loud: Sequence[int]) -> None:
    """A dot a channel, the loud ones as squares, on a logarithmic axis that never moves."""
    dress(ax, "Error of each channel", "channel", "share of its own size, %")
    quiet = [channel for channel in range(len(errors)) if channel not in loud]
    for channels, colour, marker, size in ((quiet, PALETTE[0], "o", 2.5), (loud, PALETTE[3], "s", 5.5)):
        values = [100 * max(errors[channel], 1e-4) for channel in channels]
        ax.plot(channels, values, linestyle="none", marker=marker, markersize=size, color=colour)
    ax.set_yscale("log")
    ax.set_ylim(0.05, 4000)
    ax.axhline(100, color=INK, linewidth=0.8, linestyle=":")
    ax.text(
        0.99, 112, "nothing left of it", transform=ax.get_yaxis_transform(), fontsize=SMALL_PT, color=INK, ha="right", path_effects=HALO
    )
    ax.text(0.99, 0.96, "squares: the loud ones", transform=ax.transAxes, fontsize=SMALL_PT, color=deep(PALETTE[3]), ha="right", va="top")
    ax.yaxis.set_major_locator(LogLocator(numticks=8))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(tick_text))


def _draw_requests(ax: Axes, requests: Mapping[str, int], num_bytes: Mapping[str, float], chosen: str, x_label: str) -> None:
    dress(ax, "Requests that fit, and bytes of a token", x_label)
    colours = [PALETTE[0] if name == chosen else pale(PALETTE[0]) for name in requests]
    add_boxes(ax, [(0.0, row - 0.36, count, 0.72) for row, count in enumerate(requests.values())], colours)
    top = max(1, *requests.values())
    for row, (name, count) in enumerate(requests.items()):
        words = f"{count:,} · {num_bytes[name] / 1000:,.1f} kB"
        ax.text(count + 0.02 * top, row, words, fontsize=SMALL_PT, va="center", color=INK, path_effects=HALO)
    ax.set_yticks(range(len(requests)), list(requests))
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(requests) - 0.5, -0.5)
    ax.set_xlim(0, 1.45 * top)
    ax.xaxis.set_major_formatter(FuncFormatter(tick_text))
