"""What this machine can carry: the device, the compute type, and how many blocks the KV pool gets.

Why: all three have good answers that depend on the machine, and wrong ones that show late: bf16 is four times faster than fp32
on one CPU and slower on the next; a pool that cannot hold one full request serves short ones well until a long one hangs.

Invariant: a plan holds at least one request of `max_model_len` tokens, and check and allocation use the same bytes per block.

Taught in notebook 04.
"""

import os
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from minserve.model.config import ModelConfig
from minserve.model.kv_cache import bytes_per_token
from minserve.model.kv_formats import AUTO, require_format
from minserve_kernels.kv import PLAIN

DTYPES = PLAIN  # compute types go by the names of KV formats that are stored as they are
TRIAL_SHAPES = ((16, 1024, 1024), (256, 512, 512))  # rows, in, out: a decode step and a piece of a prompt
WEIGHT_COPY_SHARE = 0.1
ASSUMED_FREE_BYTES = 2 << 30  # where the system does not say


class PoolTooSmall(ValueError):
    """The memory given cannot hold what was asked for; the message and the fields carry the numbers."""

    def __init__(self, message: str, num_blocks: int, max_tokens: int):
        super().__init__(message)
        self.num_blocks, self.max_tokens = num_blocks, max_tokens


# --- device and compute type ----------------------------------------------------------------------


def choose_device(name: str = "auto") -> torch.device:
    """A torch device by name; auto takes CUDA where there is one."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The compute type: by name (fp32, bf16, fp16), or for auto by a trial of about 0.1 s on a CPU, by capability on a GPU.

    Raises ValueError for an unknown name.
    """
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise ValueError(f"compute type {name!r} is not known; known: auto, {', '.join(DTYPES)}")
    if device.type == "cuda":  # tensor cores multiply bf16 from 8.0 on; before, software would do it
        return dtype_for_capability(torch.cuda.get_device_capability(device))
    if device.type != "cpu":
        return torch.float16
    return torch.bfloat16 if trial_s(torch.bfloat16) < trial_s(torch.float32) else torch.float32


def dtype_for_capability(capability: tuple[int, int]) -> torch.dtype:
    """bf16 from compute capability 8.0 (A100) on, else fp16."""
    return torch.bfloat16 if capability >= (8, 0) else torch.float16


@torch.inference_mode()
def trial_s(dtype: torch.dtype) -> float:
    """Seconds that the products of a small step take in this type; the best of a few, so that a busy machine does not decide."""
    total_s = 0.0
    for rows, size_in, size_out in TRIAL_SHAPES:
        x, weight = torch.ones(rows, size_in, dtype=dtype), torch.ones(size_out, size_in, dtype=dtype)
        times_s = []
        for _ in range(6):
            start_s = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            times_s.append(time.perf_counter() - start_s)
        total_s += min(times_s)
    return total_s


# --- memory ---------------------------------------------------------------------------------------


def free_bytes(device: torch.device) -> int:
    """Memory that is free now, other programs' share subtracted; on Linux within the limit of our control group too."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    group = Path("/sys/fs/cgroup")
    limit, used = _read_int(group / "memory.max"), _read_int(group / "memory.current")
    free = _free_system_bytes()
    return min(free, max(0, limit - used)) if limit is not None and used is not None else free


def _free_system_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if not hasattr(os, "sysconf"):  # Windows
        return ASSUMED_FREE_BYTES
    # macOS names no free pages: half of all memory is a guess on the safe side.
    pages = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else os.sysconf("SC_PHYS_PAGES") // 2
    return pages * os.sysconf("SC_PAGE_SIZE")


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def pool_bytes_left(free_at_start_bytes: int, share: float, own_peak_bytes: int) -> int:
    """What the pool may take: a share of what was free when we started, less what our weights and activations need.

    Memory that others held at the start was never ours to share out, so the total of the device does not come in.

    >>> pool_bytes_left(int(22.5 * 2**30), 1.0, 10 * 2**30) / 2**30
    12.5
    """
    return max(0, int(free_at_start_bytes * share) - own_peak_bytes)


def wants_weight_copy(setting: bool | str, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """What the setting weight_copy means here: whether numbers are kept beside weights in codes.

    auto: on a CPU, if they take at most a tenth of the memory that is free now. Raises ValueError where no copy is ever used.
    """
    if setting not in (True, False, "auto"):
        raise ValueError(f"weight_copy must be True, False or 'auto', got {setting!r}")
    if setting is True and device.type != "cpu":
        raise ValueError(f"weight_copy=True is for CPUs, this is {device}: there codes serve any number of rows")
    if setting != "auto" or device.type != "cpu":
        return setting is True
    return config.num_parameters * dtype.itemsize <= WEIGHT_COPY_SHARE * free_bytes(device)


# --- the plan -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """How many blocks of S slots in which format, and the longest request (prompt + output) that will be accepted."""

    num_blocks: int
    block_size: int
    kv_cache_dtype: str
    bytes_per_token: int
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.bytes_per_token

    @property
    def num_full_requests(self) -> int:
        """How many requests of the greatest length the pool holds at once."""
        return self.num_blocks // blocks_for(self.max_model_len, self.block_size)

    def describe(self) -> str:
        """One line: what was decided and what it holds."""
        return (
            f"KV pool: {self.num_blocks:,} blocks of {self.block_size} = {self.num_tokens:,} tokens in {self.kv_cache_dtype} "
            f"({self.num_bytes / 2**20:,.0f} MiB), holds {self.num_full_requests:,} requests of max_model_len {self.max_model_len:,}"
        )


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that a request of so many tokens holds. 17 tokens in blocks of 16: 2"""
    return -(-num_tokens // block_size)


def plan_pool(
    config: ModelConfig,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_cache_dtype: str = AUTO,
    num_blocks: int | None = None,
    kv_cache_bytes: int | None = None,
    memory_fraction: float = 0.3,
    max_model_len: int | None = None,
    max_running: int = 64,
) -> PoolPlan:
    """Size the pool from `num_blocks`, else `kv_cache_bytes`, else a fraction of the memory that is free now.

    A fraction takes no more than `max_running` full requests can use. A `max_model_len` that was asked for and does not fit
    raises PoolTooSmall with the longest length that does; one that was not is lowered, with a warning.
    """
    if num_blocks is not None and kv_cache_bytes is not None:
        raise ValueError(f"give num_blocks ({num_blocks}) or kv_cache_bytes ({kv_cache_bytes}), not both")
    _check_settings(block_size, num_blocks, kv_cache_bytes, memory_fraction, max_model_len)
    kv_cache_dtype = _format_name(dtype) if kv_cache_dtype == AUTO else kv_cache_dtype
    require_format(kv_cache_dtype, config.head_dim, device)
    if max_model_len is not None and max_model_len > config.max_positions:
        raise ValueError(f"max_model_len {max_model_len} is beyond the model's {config.max_positions} positions")
    length = max_model_len or config.max_positions
    block_bytes = bytes_per_token(config, kv_cache_dtype) * block_size
    if num_blocks is None:
        given = kv_cache_bytes if kv_cache_bytes is not None else int(memory_fraction * free_bytes(device))
        num_blocks = given // block_bytes
        if kv_cache_bytes is None:
            num_blocks = min(num_blocks, max_running * blocks_for(length, block_size))
    plan = PoolPlan(num_blocks, block_size, kv_cache_dtype, block_bytes // block_size, length)
    return _fit_length(plan, is_explicit=max_model_len is not None)


def _check_settings(
    block_size: int, num_blocks: int | None, kv_cache_bytes: int | None, memory_fraction: float, max_model_len: int | None
) -> None:
    numbers = {"block_size": block_size, "num_blocks": num_blocks, "kv_cache_bytes": kv_cache_bytes, "max_model_len": max_model_len}
    for name, value in numbers.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    if not 0 < memory_fraction <= 1:
        raise ValueError(f"the fraction of free memory must be above 0 and at most 1, got {memory_fraction!r}")


def _format_name(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)


def _fit_length(plan: PoolPlan, is_explicit: bool) -> PoolPlan:
    """The plan itself, or with max_model_len lowered to what the pool holds."""
    if plan.num_tokens >= plan.max_model_len:
        return plan
    numbers = (
        f"{plan.num_blocks} blocks of {plan.block_size} hold {plan.num_tokens} tokens, "
        f"a request of max_model_len {plan.max_model_len} needs {blocks_for(plan.max_model_len, plan.block_size)} blocks"
    )
    if is_explicit or plan.num_blocks < 1:
        raise PoolTooSmall(f"{numbers}; the longest request that fits has {plan.num_tokens} tokens", plan.num_blocks, plan.num_tokens)
    warnings.warn(f"{numbers}: max_model_len is lowered to {plan.num_tokens}", stacklevel=3)
    return replace(plan, max_model_len=plan.num_tokens)
