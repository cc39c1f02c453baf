"""What a weight format gives and costs: bytes, the error of a real layer, and the speed by batch size, predicted and as it was measured.

Why: fewer bits always take fewer bytes. Whether that is less time depends on how many requests share a reading of the weights, and what it
costs on who chose the codes. So the explorer has the batch as a slider beside bits, groups and method, and shows all methods side by side.

Invariant: codes are those of `minserve.quantize`, bytes and predicted seconds those of the cost model, measured speeds those of a file;
nothing is counted here.

Taught in notebook 09.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from minserve.lab.explorer import Explorer, choice, duration, places, size
from minserve.lab.style import fix_margins, new_figure, number_text
from minserve.lab.weight_charts import draw_bars, draw_speeds
from minserve.quantize.awq import search_clip, search_scale
from minserve.quantize.gptq import Gram, gptq
from minserve.quantize.rtn import output_error, round_to_nearest
from minserve.sim.cost_model import CostModel, decode_work
from minserve.sim.devices import DEVICES, DeviceSpec
from minserve.sim.shapes import SHAPES
from minserve.sim.weight_formats import METHODS, WeightFormat, parse_weights

BITS = (8, 4)
GROUPS = {"channel": None, "128": 128, "64": 64, "32": 32}  # inputs that share a scale
ZEROS = ("in the middle", "where the group needs it")
MODELS = ("llama-2-13b", "llama-3.1-8b", "llama-2-7b", "llama-2-70b", "qwen3-8b", "smollm2-1.7b", "smollm2-135m")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (32, 64, 128, 512, 2048)  # tokens of each request in a step


# --- a layer --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class LayerSample:
    """A matrix and what it is multiplied by: the inputs to choose codes by, and others to judge them by."""

    name: str
    weight: Tensor  # [O, I]
    chosen_by: Gram
    judged_by: Gram

    @classmethod
    def of(cls, name: str, weight: Tensor, x: Tensor) -> "LayerSample":
        """The first three quarters of the inputs choose, the last quarter judges. weight: [O, I], x: [T, I]"""
        grams, cut = (Gram(weight.shape[1]), Gram(weight.shape[1])), len(x) * 3 // 4
        for gram, some in zip(grams, (x[:cut], x[cut:]), strict=True):
            gram.add(some)
        return cls(name, weight.float(), *grams)

    def error(self, values: Tensor) -> float:
        """Size of the outputs' error, as a share of the outputs' own size, over the inputs that judge. values: [O, I]"""
        gram = self.judged_by.matrix
        return (output_error(self.weight, values, gram) / output_error(torch.zeros_like(values), self.weight, gram)) ** 0.5


def made_up_layer(num_outputs: int = 128, num_inputs: int = 256, seed: int = 0) -> LayerSample:
    """Normal weights; inputs of which neighbours go together, and every fiftieth is 20 times as loud."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2048, num_inputs, generator=generator)
    x[:, 1:] += x[:, :-1]
    x[:, ::50] *= 20
    return LayerSample.of("a made-up layer", torch.randn(num_outputs, num_inputs, generator=generator), x)


def weights_left(layer: LayerSample, format: WeightFormat) -> Tensor:
    """What is left of the layer's weights in a format, by its own method. AWQ scales and clips. -> [O, I]"""
    gram = layer.chosen_by.matrix
    if format.method == "gptq":
        return gptq(layer.weight, gram, format).dequantize()
    if format.method == "rtn":
        return round_to_nearest(layer.weight, format).dequantize()
    scale = search_scale([layer.weight], gram, layer.chosen_by.magnitude, format)
    shrink = search_clip(layer.weight * scale, gram / torch.outer(scale, scale), format)
    return round_to_nearest(layer.weight * scale, format, shrink).dequantize() / scale


# --- recorded speeds ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeasuredSpeeds:
    """Decode speeds as `minserve bench --decode` wrote them: format -> requests in a step -> output tokens/s, and the ratio to bf16's.

    A ratio is of runs side by side, so it need not be that of the two medians.
    """

    where: str
    device: DeviceSpec | None  # the machine as `minserve calibrate` knows it
    tokens_per_s: Mapping[str, Mapping[int, float]]
    ratios: Mapping[str, Mapping[int, float]]
    model: str = "smollm2-135m"

    @classmethod
    def read(cls, recorded: Mapping[str, Any], device: DeviceSpec | None = None) -> "MeasuredSpeeds":
        """From the JSON of the command."""
        tokens_per_s: dict[str, dict[int, float]] = {}
        ratios: dict[str, dict[int, float]] = {}
        for pace in recorded["paces"]:
            tokens_per_s.setdefault(pace["weights"], {})[pace["batch_size"]] = pace["tokens_per_s"]
            ratios.setdefault(pace["weights"], {})[pace["batch_size"]] = pace["ratio"]
        return cls(f"{recorded['date']}, {recorded['machine']}", device, tokens_per_s, ratios)

    def times_bf16(self, name: str) -> list[tuple[float, float]]:
        """(batch, speed in units of that in bf16); none for a format that was not measured."""
        return sorted(self.ratios.get(name, {}).items())


# --- the explorer ---------------------------------------------------------------------------------


class WeightFormatExplorer(Explorer):
    """Bits, group, zero, method, model, device, batch, context -> bytes, the error of a layer, decode speed.

    `layer`: a real one; None: made up. `measured`: shown beside what is predicted for its model and device; its formats are the engine's
    names without the method, which changes codes and not bytes.
    """

    def __init__(self, layer: LayerSample | None = None, measured: MeasuredSpeeds | None = None, *, bits: int = 4, batch: int = 1):
        self.layer, self.measured = layer or made_up_layer(), measured
        self.devices = {**DEVICES, **({measured.device.name: measured.device} if measured and measured.device else {})}
        self.bits = choice("bits", BITS, bits)
        self.group = choice("a scale is shared by", GROUPS, "channel" if bits == 8 else "64")
        self.zero = choice("zero lies", ZEROS, ZEROS[bits == 4])
        self.method = choice("method", METHODS, "rtn")
        self.model = choice("model", MODELS, MODELS[0])
        self.device = choice("device", self.devices, "a100-80gb")
        self.batch = places("requests in a step", BATCHES, batch)
        self.context = places("context, tokens", CONTEXTS, 512)
        self._kept: dict[str, float] = {}  # format -> error of the layer; coming back to one costs nothing
        super().__init__([self.bits, self.group, self.zero, self.method, self.model, self.device, self.batch, self.context])

    # --- numbers ----------------------------------------------------------------------------------

    def compute(self) -> None:
        given = WeightFormat(self.bits.value, GROUPS[self.group.value], self.zero.value == ZEROS[0], self.method.value)
        self.format = parse_weights(given.name)  # which refuses AWQ at 8 bits
        formats = {method: replace(given, method=method) for method in METHODS if (method, given.bits) != ("awq", 8)}
        self.errors = {method: self._error(format) for method, format in formats.items()}
        num_outputs, num_inputs = self.layer.weight.shape
        self.bits_per_weight = 8 * given.num_bytes(num_outputs, num_inputs) / (num_outputs * num_inputs)
        shape, device = SHAPES[self.model.value], self.devices[self.device.value]
        plain, own = (CostModel(shape, device, weights=name) for name in ("bf16", self.format.name))
        self.weight_bytes = {"bf16": plain.weight_bytes, self.format.name: own.weight_bytes}
        steps = [(batch, decode_work(batch, self.context.value, shape.window)) for batch in BATCHES]
        self.speeds = [(float(batch), plain.of(work).seconds / own.of(work).seconds) for batch, work in steps]
        self.step_s = own.of(dict(steps)[self.batch.value]).seconds

    def _error(self, format: WeightFormat) -> float:
        if format.name not in self._kept:
            self._kept[format.name] = self.layer.error(weights_left(self.layer, format))
        return self._kept[format.name]

    @property
    def predicted_tokens_per_s(self) -> float:
        return self.batch.value / self.step_s

    @property
    def speed(self) -> float:
        """Predicted, in units of that in bf16."""
        return dict(self.speeds)[float(self.batch.value)]

    def measured_speeds(self) -> list[tuple[float, float]]:
        """As recorded, in units of bf16's, if they are of this model on this device."""
        measured = self.measured
        if measured is None or measured.device is None or (self.model.value, self.device.value) != (measured.model, measured.device.name):
            return []
        return measured.times_bf16(replace(self.format, method="rtn").name)

    # --- words and picture ------------------------------------------------------------------------

    def words(self) -> tuple[str, str]:
        name, own = self.format.name, self.weight_bytes[self.format.name]
        finding = (
            f"{name}: {own / self.weight_bytes['bf16']:.3f} of bf16's bytes, {self.speed:.2f} times its speed "
            f"with {self.batch.value:,} in a step (predicted), and the layer's outputs are {self.errors[self.format.method]:.2%} off."
        )
        others = ", ".join(f"{method} {error:.2%}" for method, error in self.errors.items() if method != self.format.method)
        return finding, (
            f"{self.model.value} on {self.device.value}: {size(own)} of weights where bf16 has {size(self.weight_bytes['bf16'])}; "
            f"a step with {self.context.value:,} tokens of context each takes {duration(self.step_s)}, "
            f"{number_text(self.predicted_tokens_per_s)} tokens/s. {self._measured_words()}"
            f"The errors are those of {self.layer.name}, at {self.bits_per_weight:.2f} bits a weight with scales and zeros; "
            f"by other methods: {others}."
        )

    def _measured_words(self) -> str:
        points = self.measured_speeds()
        if self.measured is None or not points:
            return ""
        tokens_per_s = self.measured.tokens_per_s[replace(self.format, method="rtn").name]
        said = ", ".join(f"{tokens_per_s[int(batch)]:.0f} ({ratio:.2f} times bf16) with {batch:g}" for batch, ratio in points)
        return f"Measured ({self.measured.where}), tokens/s: {said}. "

    def draw(self) -> Figure:
        figure = new_figure(3.1)
        left, right = figure.subplots(1, 2, width_ratios=[1.0, 1.25])
        shares = {method: 100 * error for method, error in self.errors.items()}
        draw_bars(left, shares, "Error of the layer's outputs", "share of their size, %", self.format.method)
        lines = {"predicted": self.speeds} | ({"measured": points} if (points := self.measured_speeds()) else {})
        draw_speeds(right, lines, "requests in a step", "Decode speed", top=4.4, mark=self.batch.value)
        fix_margins(figure, left_in=0.55, right_in=0.1, top_in=0.35, bottom_in=0.5)
        figure.subplots_adjust(wspace=0.25)
        return figure
