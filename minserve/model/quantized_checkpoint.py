"""Checkpoints whose weights are in codes: the layouts of GPTQ and AWQ files, read and written.

Why: quantized models are passed around in two layouts, and both put several codes into one int32. Read in the wrong order, or with zeros
that are one off, a model loads and talks garbage. So what a file says of itself is checked (`config.quantization_config`), and every
matrix by its shapes. O outputs, I inputs, G groups, n = 32 / bits codes a word:

              GPTQ                                       AWQ
    qweight   [I / n, O]: a word has n inputs            [I, O / n]: a word has n outputs
    qzeros    [G, O / n]                                 [G, O / n]
    scales    [G, O] fp16                                [G, O] fp16
    g_idx     [I], the group of each input; or absent    absent: groups of neighbours, all of one size
    order     0 1 2 3 4 5 6 7, the first in the lowest   0 2 4 6 1 3 5 7: an AWQ kernel unpacks pairs, even ones first
              bits
    zeros     minus one in "gptq", as they are in        as they are
              "gptq_v2"

Invariant: what `write_quantized` has written is read back code by code, and scale by scale.

Taught in notebook 09.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from minserve.model.config import QuantizationConfig
from minserve.model.quantized_weight import QuantizedWeight, groups_in_order
from minserve.model.weights import INDEX_FILE, SINGLE_FILE, BrokenCheckpoint, Checkpoint
from minserve.sim.weight_formats import WeightFormat

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of a word's codes, from its lowest bits on
PLAIN_FILES = ("*.json", "*.txt", "*.model", "*.jinja")  # what belongs to a model besides its weights

# --- words ----------------------------------------------------------------------------------------


def pack_words(codes: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """32 / bits codes a word, along the last dimension. codes: [..., N] -> [..., N * bits / 32] int32

    order: which code of a word lies in the lowest bits, which in the next; None: one after the other.

    >>> eight = torch.arange(8)
    >>> hex(pack_words(eight, 4)[0]), hex(pack_words(eight, 4, AWQ_ORDER)[0])
    ('0x76543210', '0x75316420')
    """
    num_codes = 32 // bits
    words = codes.to(torch.int64).unflatten(-1, (-1, num_codes))
    words = words if order is None else words[..., list(order)]
    return (words << (bits * torch.arange(num_codes))).sum(-1).to(torch.uint32).view(torch.int32)


def unpack_words(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """The codes of words. words: [..., N] int32 -> [..., N * 32 / bits] uint8"""
    shifts = bits * torch.arange(32 // bits, dtype=torch.int32)
    codes = (words[..., None] >> shifts) & (2**bits - 1)  # the sign's copies that a shift brings in are masked away
    codes = codes if order is None else codes[..., torch.tensor(order).argsort()]
    return codes.flatten(-2).to(torch.uint8)


# --- reading --------------------------------------------------------------------------------------


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """The weights of a model directory, in codes or in floats. Raises UnsupportedModel, BrokenCheckpoint."""
    config = QuantizationConfig.from_directory(directory)
    return Checkpoint(directory) if config is None else QuantizedCheckpoint(directory, config)


class QuantizedCheckpoint(Checkpoint):
    """A model directory in which some matrices are in codes. Which ones, the tensors in its files say."""

    def __init__(self, directory: str | Path, config: QuantizationConfig):
        super().__init__(directory)
        self.config = config
        if twice := [name for name in self.names if self._in_codes(name)]:
            raise BrokenCheckpoint(f"{self.directory} holds {twice[0]} in floats and in codes")

    def __contains__(self, name: str) -> bool:
        return self._in_codes(name) or super().__contains__(name)

    def _in_codes(self, name: str) -> bool:
        return name.endswith(".weight") and super().__contains__(f"{name.removesuffix('.weight')}.qweight")

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """One tensor in floats, also where it is stored in codes."""
        held = self.quantized(name, shape)
        return super().take(name, shape) if held is None else held.dequantize()

    def quantized(self, name: str, shape: Sequence[int]) -> QuantizedWeight | None:
        """One matrix in codes, or None if it is in floats. Raises BrokenCheckpoint by its name if what is stored does not fit."""
        if not self._in_codes(name):
            return None
        stem, (num_outputs, num_inputs) = name.removesuffix(".weight"), shape
        read = self._read_awq if self.config.method == "awq" else self._read_gptq
        return read(stem, num_outputs, num_inputs)

    def _read_awq(self, stem: str, num_outputs: int, num_inputs: int) -> QuantizedWeight:
        size, num_words = self.config.group_size or num_inputs, _num_words(stem, num_outputs, "outputs", 4)
        if num_inputs % size:
            raise BrokenCheckpoint(f"{stem}: {num_inputs} inputs do not fall into groups of {size}")
        num_groups = num_inputs // size
        codes = super().take(f"{stem}.qweight", (num_inputs, num_words))
        zeros = super().take(f"{stem}.qzeros", (num_groups, num_words))
        scales = super().take(f"{stem}.scales", (num_groups, num_outputs))
        codes, zeros = (unpack_words(words, 4, AWQ_ORDER).T.contiguous() for words in (codes, zeros))
        return QuantizedWeight(4, codes, scales.T.float(), zeros.float(), groups_in_order(num_inputs, size))

    def _read_gptq(self, stem: str, num_outputs: int, num_inputs: int) -> QuantizedWeight:
        bits, group_of = self.config.bits, groups_in_order(num_inputs, self.config.group_size)
        num_groups = int(group_of.max()) + 1
        if super().__contains__(f"{stem}.g_idx"):
            group_of = super().take(f"{stem}.g_idx", (num_inputs,)).long()
            if not 0 <= int(group_of.min()) <= int(group_of.max()) < num_groups:
                raise BrokenCheckpoint(f"{stem}.g_idx names groups {group_of.min()} to {group_of.max()}, there are {num_groups}")
        codes = super().take(f"{stem}.qweight", (_num_words(stem, num_inputs, "inputs", bits), num_outputs))
        zeros = super().take(f"{stem}.qzeros", (num_groups, _num_words(stem, num_outputs, "outputs", bits)))
        scales = super().take(f"{stem}.scales", (num_groups, num_outputs))
        codes = unpack_words(codes.T.contiguous(), bits)  # [O, I]
        zeros = self._true_zeros(unpack_words(zeros, bits).T)
        return QuantizedWeight(bits, codes, scales.T.float(), zeros.float(), group_of)

    def _true_zeros(self, stored: Tensor) -> Tensor:
        """Some files say "gptq" and hold zeros as they are. Where the grid is symmetric that shows: its zero is the middle code."""
        middle, top = 2 ** (self.config.bits - 1), 2**self.config.bits - 1
        if not self.config.zeros_less_one or (self.config.symmetric and bool((stored == middle).all())):
            return stored
        return (stored + 1) & top  # 0 less one had become the top code


def _num_words(stem: str, size: int, what: str, bits: int) -> int:
    if size * bits % 32:
        raise BrokenCheckpoint(f"{stem}: {size} {what} of {bits} bits do not fill words of 32 bits")
    return size * bits // 32


# --- writing --------------------------------------------------------------------------------------


def write_quantized(
    directory: Path,
    source: Path,
    quantized: Mapping[str, QuantizedWeight],
    fmt: WeightFormat,
    replaced: Mapping[str, Tensor] | None = None,
    head_bits: int = 16,
) -> None:
    """Save the model of `source` with the matrices `quantized` in codes and the tensors `replaced` in place of its own.

    By the layout that the format's method is known for; AWQ's has no place for a short last group, then it is GPTQ's.
    """
    replaced = replaced or {}
    as_awq = fmt.method == "awq" and all(_fits_awq(weight, fmt.group_size) for weight in quantized.values())
    tensors: dict[str, Tensor] = {}
    for name, weight in quantized.items():
        parts = _awq_tensors(weight) if as_awq else _gptq_tensors(weight, fmt.symmetric)
        tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    checkpoint = Checkpoint(source)
    for name in checkpoint.names:
        if name not in quantized:
            tensors[name] = (replaced[name] if name in replaced else checkpoint.get(name)).contiguous()
    values = json.loads((source / "config.json").read_text(encoding="utf-8"))
    ours = {"format": fmt.name, "head_bits": head_bits}
    values["quantization_config"] = {**_standard_keys(fmt, as_awq, quantized), "minserve": ours}
    directory.mkdir(parents=True, exist_ok=True)
    for path in (path for pattern in PLAIN_FILES for path in source.glob(pattern) if path.name not in ("config.json", INDEX_FILE)):
        shutil.copyfile(path, directory / path.name)
    save_file(tensors, directory / SINGLE_FILE, metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(values, indent=2), encoding="utf-8")


def _standard_keys(fmt: WeightFormat, as_awq: bool, quantized: Mapping[str, QuantizedWeight]) -> dict[str, object]:
    """What other engines read of the layout."""
    size = -1 if fmt.group_size is None else fmt.group_size
    if as_awq:
        return {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    order = "gptq" if fmt.symmetric else "gptq_v2"  # the older one, which more engines know, cannot hold every zero
    out_of_order = any(bool((weight.group_of.diff() < 0).any()) for weight in quantized.values())
    keys = {"bits": fmt.bits, "group_size": size, "sym": fmt.symmetric, "desc_act": out_of_order, "lm_head": False}
    return {"quant_method": "gptq", "checkpoint_format": order, **keys}


def _fits_awq(weight: QuantizedWeight, group_size: int | None) -> bool:
    (num_outputs, num_inputs), size = weight.shape, group_size or weight.shape[1]
    return num_outputs % 8 == 0 and num_inputs % size == 0 and torch.equal(weight.group_of, groups_in_order(num_inputs, size))


def _awq_tensors(weight: QuantizedWeight) -> dict[str, Tensor]:
    codes, zeros = (pack_words(numbers.T, 4, AWQ_ORDER) for numbers in (weight.codes, weight.zeros))
    return {"qweight": codes, "qzeros": zeros, "scales": weight.scales.T.half()}


def _gptq_tensors(weight: QuantizedWeight, less_one: bool) -> dict[str, Tensor]:
    zeros = weight.zeros.T - (1 if less_one else 0)
    words = {"qweight": pack_words(weight.codes, weight.bits).T, "qzeros": pack_words(zeros, weight.bits)}
    return {**words, "scales": weight.scales.T.half(), "g_idx": weight.group_of.int()}
