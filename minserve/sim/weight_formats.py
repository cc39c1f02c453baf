"""Names of weight formats, and the bytes that they take.

Why: the engine, the simulator and the tables speak of the same formats, and a format decides bytes before any weight is seen. A name says
who chose the codes, how many bits they have, which weights share a scale, and whether zero lies in the middle of the grid:

    int8                       a scale an output, 8 bits, symmetric
    int4                       groups of 64 inputs, 4 bits, each group with its own zero; the same as rtn-int4-g64-asym
    gptq-int4-g128-sym         by GPTQ, groups of 128 inputs, zero in the middle
    awq-int4-channel           by AWQ, one group an output

Invariant: `parse_weights(f.name) == f` for every format.

Taught in notebook 09.
"""

import re
from dataclasses import dataclass

METHODS = ("rtn", "gptq", "awq")  # round to nearest is what a name without a method means
GROUP_SIZES = (32, 64, 128)
DEFAULT_GROUP_SIZE = 64
PLAIN_WEIGHTS = ("fp32", "bf16", "fp16")
UNSCALED_BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8}  # what is not quantized; fp8, which some engines serve, has few scales
_NAME = re.compile(r"(?:(rtn|gptq|awq)-)?int([48])(?:-(?:g(\d+)|(channel)))?(?:-(sym|asym))?")


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Codes of so many bits. `group_size`: inputs that share a scale; None: all inputs of an output do."""

    bits: int
    group_size: int | None = None
    symmetric: bool = True
    method: str = "rtn"

    @property
    def name(self) -> str:
        """The shortest name that means this format.

        >>> WeightFormat(4, 64, False, "gptq").name, WeightFormat(4, 128, True).name
        ('gptq-int4', 'int4-g128-sym')
        """
        default = _default(self.bits)
        parts = [] if self.method == "rtn" else [self.method]
        parts.append(f"int{self.bits}")
        if self.group_size != default.group_size:
            parts.append("channel" if self.group_size is None else f"g{self.group_size}")
        if self.symmetric != default.symmetric:
            parts.append("sym" if self.symmetric else "asym")
        return "-".join(parts)

    def num_groups(self, num_inputs: int) -> int:
        """Groups in a row; the last one is short where the size does not divide it."""
        return 1 if self.group_size is None else -(-num_inputs // self.group_size)

    def num_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Bytes of a matrix: codes, a scale of 2 bytes for each group, and beside it a zero of 2 bytes, in symmetric int8 left out.

        >>> WeightFormat(8).num_bytes(4096, 4096), WeightFormat(4, 128, False).num_bytes(4096, 4096)  # of 33,554,432 in bf16
        (16785408, 8912896)
        """
        numbers = 1 if self.bits == 8 and self.symmetric else 2  # in 4 bits one kernel serves both kinds
        return num_outputs * (-(-num_inputs * self.bits // 8) + 2 * numbers * self.num_groups(num_inputs))


def _default(bits: int) -> WeightFormat:
    return WeightFormat(8) if bits == 8 else WeightFormat(4, DEFAULT_GROUP_SIZE, False)


def parse_weights(name: str) -> WeightFormat:
    """The quantized format of that name. Raises ValueError for others, plain ones among them.

    >>> parse_weights("int4")
    WeightFormat(bits=4, group_size=64, symmetric=False, method='rtn')
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"weight format {name!r} is not known; examples: int8, int4, int4-g128-sym, gptq-int4, awq-int4-channel")
    method, bits, group, channel, middle = found.groups()
    default = _default(int(bits))
    group_size = None if channel else int(group) if group else default.group_size
    if group_size is not None and group_size not in GROUP_SIZES:
        raise ValueError(f"{name}: groups have {', '.join(map(str, GROUP_SIZES))} inputs, or are channels, got {group_size}")
    if method == "awq" and bits == "8":
        raise ValueError(f"{name}: AWQ is for 4 bits; at 8 rounding to the nearest leaves nothing to search for")
    return WeightFormat(int(bits), group_size, default.symmetric if middle is None else middle == "sym", method or "rtn")


def quantized_format(name: str) -> WeightFormat | None:
    """The quantized format of that name, None for a plain one or fp8. Raises ValueError for a name that is neither."""
    if name in UNSCALED_BITS:
        return None
    try:
        return parse_weights(name)
    except ValueError as error:
        raise ValueError(f"{error}; not quantized are {', '.join(UNSCALED_BITS)}") from None


def bits_of_weights(name: str) -> int:
    """Bits of a weight, scales and zeros left out.

    >>> bits_of_weights("bf16"), bits_of_weights("gptq-int4-g128")
    (16, 4)
    """
    format = quantized_format(name)
    return UNSCALED_BITS[name] if format is None else format.bits
