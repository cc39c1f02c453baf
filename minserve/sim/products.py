"""The products of a step with the weights: how many bytes they read and how long they take, in any format.

Why: fewer bits are fewer bytes, and whether that is less time depends on where the codes become numbers again.

    in registers     a GPU's kernel reads codes at any number of rows and multiplies in the compute type: fewer bytes, the same FLOPs
    row by row       a CPU's kernel for few rows unpacks the codes for each of them: fewer bytes, but its own, low rate
    beforehand       a CPU's products of many rows read a copy in the compute type that lies beside the codes: nothing is gained
    in every step    where there is no room for the copy: codes are read, weights written and read again: five bytes where bf16 has two

A product takes the longer of its bytes and its FLOPs. The row-by-row kernel goes through so many bytes of codes times rows in a second,
whatever their bits (measured on two Zen 4 cores, layers of a 135M, ms at 1 / 4 / 16 rows: int4 4.4 / 7.4 / 25, int8 7.8 / 15 / 50).

Invariant: plain weights are read as they are stored, on every device.

Taught in notebook 09.
"""

from dataclasses import dataclass
from typing import NamedTuple

from minserve.sim.devices import DeviceSpec
from minserve.sim.shapes import ModelShape
from minserve.sim.weight_formats import quantized_format

COPY_BYTES = 2  # a number of the compute type


@dataclass(frozen=True, slots=True)
class Products:
    """What the products with some weights cost: bytes that are moved for them, and the seconds of these and of the arithmetic.

    The longer of the two is what they take.
    """

    num_bytes: float
    by_bytes_s: float
    by_flops_s: float

    def __add__(self, other: "Products") -> "Products":
        return Products(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


class _Part(NamedTuple):
    """Weights that the same rows are multiplied with: the layers', or the output layer's."""

    num_rows: int
    flops: float
    num_bytes: float  # stored, of the weights that some row meets
    num_weights: float  # the same as a count
    row_bytes: float  # of those that one row meets
    is_quantized: bool


class StoredWeights:
    """The weights of a model in a format, on one of `num_devices` devices that share them."""

    def __init__(self, shape: ModelShape, device: DeviceSpec, weights: str, head_bits: int, num_devices: int):
        self.shape, self.device, self.num_devices = shape, device, num_devices
        self.is_quantized = quantized_format(weights) is not None
        self.is_head_quantized = self.is_quantized and head_bits != 16
        self.num_bytes = shape.weight_bytes(weights, head_bits) / num_devices
        self._head_bytes = shape.head_bytes(weights, head_bits) / num_devices
        self._layer_bytes = shape.layer_bytes(weights) / num_devices
        self._expert_bytes = shape.num_expert_layers * shape.num_experts * shape.expert_bytes(weights) / num_devices
        self._table_bytes = shape.embedding_bytes(weights) / num_devices
        self._shares_table = not shape.has_own_head(weights, head_bits)

    @property
    def held_bytes(self) -> float:
        """All that a device holds: the weights, and what it keeps in another layout or type beside them.

        An output layer that shares the embedding's table is a copy where it is laid out anew; quantized weights have one where products
        of many rows read it.
        """
        device, shape = self.device, self.shape
        table = self._table_bytes if device.packs_weights and self._shares_table else 0.0
        if not (self.is_quantized and device.max_code_rows is not None and device.keeps_weight_copy):
            return self.num_bytes + table
        num_tables = 2 - shape.tied_embeddings
        num_copied = shape.num_parameters - num_tables * shape.num_embedding_parameters
        num_copied += shape.num_output_parameters if self.is_head_quantized else 0
        return self.num_bytes + table + COPY_BYTES * num_copied / self.num_devices

    def left_out(self, num_tokens: int) -> float:
        """The share of the experts that no token visits. Each token is taken to choose k of the E independently: (1 - k/E)^tokens."""
        shape = self.shape
        return (1 - shape.num_active_experts / shape.num_experts) ** num_tokens if shape.num_experts else 0.0

    def read_bytes(self, num_tokens: int, num_samples: int) -> float:
        """Bytes of stored weights that a step of so many tokens meets.

        The embedding is looked up, not read through; the output layer is met if any row yields a token; of experts, those visited.
        """
        layers = self._layer_bytes - self.left_out(num_tokens) * self._expert_bytes
        return layers + (self._head_bytes if num_samples else 0.0)

    def flops(self, num_tokens: int, num_samples: int) -> float:
        """Two for each weight that a row is multiplied with."""
        in_layers, in_output = num_tokens * self.shape.num_layer_parameters, num_samples * self.shape.num_output_parameters
        return 2 * (in_layers + in_output) / self.num_devices

    def products(self, num_tokens: int, num_samples: int) -> Products:
        """Layers and output layer together where both read what is stored; each by its own rows where codes are for few rows only."""
        if self.is_quantized and self.device.max_code_rows is not None:
            parts = self._layers(num_tokens), self._head(num_samples)
            return self._part_products(parts[0]) + self._part_products(parts[1])
        num_bytes = self.read_bytes(num_tokens, num_samples) if num_tokens else 0.0
        return self._streamed(num_bytes, self.flops(num_tokens, num_samples), num_tokens)

    def _layers(self, num_tokens: int) -> _Part:
        shape, n = self.shape, self.num_devices
        num_experts = shape.num_expert_layers * shape.num_experts
        num_idle = num_experts - shape.num_expert_layers * shape.num_active_experts
        num_weights = shape.num_layer_parameters + (num_idle - self.left_out(num_tokens) * num_experts) * shape.expert_parameters
        row_bytes = self._layer_bytes - (num_idle / num_experts * self._expert_bytes if num_experts else 0.0)
        return _Part(num_tokens, self.flops(num_tokens, 0), self.read_bytes(num_tokens, 0), num_weights / n, row_bytes, True)

    def _head(self, num_samples: int) -> _Part:
        num_weights = self.shape.num_output_parameters / self.num_devices
        flops, num_bytes = self.flops(0, num_samples), self._head_bytes
        return _Part(num_samples, flops, num_bytes, num_weights, num_bytes, self.is_head_quantized)

    def _part_products(self, part: _Part) -> Products:
        device = self.device
        assert device.max_code_rows is not None
        if not part.num_rows:
            return Products(0.0, 0.0, 0.0)
        if not part.is_quantized:
            return self._streamed(part.num_bytes, part.flops, part.num_rows)
        if part.num_rows > device.max_code_rows:
            moved = COPY_BYTES * part.num_weights
            moved = moved if device.keeps_weight_copy else part.num_bytes + 2 * moved  # written, and read again
            return self._streamed(moved, part.flops, part.num_rows)
        by_bytes_s = part.num_bytes / (device.bytes_per_s * (device.code_read_share or device.weight_read_share))
        by_rows_s = part.row_bytes * part.num_rows / device.code_row_bytes_per_s if device.code_row_bytes_per_s else 0.0
        return Products(part.num_bytes, by_bytes_s, by_rows_s)

    def _streamed(self, num_bytes: float, flops: float, num_rows: int) -> Products:
        """Weights stream in while the compute type's units multiply."""
        device = self.device
        by_bytes_s = num_bytes / (device.bytes_per_s * device.weight_read_share)
        by_flops_s = flops / (device.flops_per_s * device.matmul_share(max(1, num_rows)))
        return Products(num_bytes, by_bytes_s, by_flops_s)
