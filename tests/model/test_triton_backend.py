"""The whole engine on Triton's kernels, in the interpreter, against the same engine on torch: the same steps, the same tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minserve.core.batch import ScheduledBatch
from minserve.core.engine import Engine
from minserve.core.request import SamplingParams
from minserve.model import attention_triton
from minserve.model.attention_triton import TritonOperations
from minserve.model.decoder import Decoder
from minserve.model.operations import choose_operations
from minserve.model.runner import ModelRunner
from minserve_kernels import reference
from minserve_kernels.aot import SM90, Launch, capture, report
from minserve_kernels.interpret import Interpreted, interpreted, patched
from minserve_kernels.memtrace import OutOfBounds, trace
from tests.model.tiny_net import batch_of, make_engine, make_runner, request, runner_of, tiny_decoder, tokens_for

KERNELS = {"_rms_norm", "_rope", "_swiglu", "_write_kv", "decode_split", "prefill"}
FORMATS = ("fp32", "bf16", "fp16", "fp8", "int8", "int4")


def make(decoder: Decoder, backend: str, poisoned: bool = False, **settings: Any) -> tuple[Engine, list[ScheduledBatch]]:
    """An engine on a backend ("reference": what the kernels mean, in torch), and the batches that it will have run."""
    engine = make_engine(decoder, **{"num_blocks": 7, "token_budget": 24, "prefix_caching": True, **settings})
    runner, batches = runner_of(engine), []
    if backend == "reference":
        runner.operations = TritonOperations(reference, needs_device=False)
    else:
        runner.operations, _ = choose_operations(backend, runner.cache)
    if poisoned:
        poison(runner.cache)
    execute = runner.execute
    runner.execute = lambda batch: batches.append(batch) or execute(batch)
    return engine, batches


def poison(cache: Any) -> None:
    """NaN in all blocks but the null block: in scales, or in the numbers themselves where there are none."""
    target = cache.blocks if cache.scales is None else cache.scales
    target[:, : cache.null_block] = torch.nan


def serve(engine: Engine) -> list[list[int]]:
    """Long and short prompts, one that begins like another, one with two answers, in a pool that is too small for all of them."""
    shared = tokens_for(1, 32)
    added = engine.add([*shared, *tokens_for(2, 9)], SamplingParams(max_tokens=6))
    added += engine.add(tokens_for(3, 14), SamplingParams(max_tokens=6, n=2, temperature=1.0, seed=5))
    for _ in range(4):
        engine.step()
    added += engine.add([*shared, *tokens_for(4, 3)], SamplingParams(max_tokens=6))
    added += engine.add(tokens_for(5, 14), SamplingParams(max_tokens=5))
    while engine.has_work:
        engine.step()
    engine.scheduler.blocks.check()
    assert not any(request.error for request in added)
    return [request.output_ids for request in added]


def assert_all_happened(batches: list[ScheduledBatch]) -> None:
    """The workload holds what it is there for."""
    sizes = [{row.num_tokens == 1 for row in batch.rows} for batch in batches]
    assert {True} in sizes and {True, False} in sizes, "no step of decodes, or none with chunks too"
    assert any(row.start and row.num_tokens > 1 for batch in batches for row in batch.rows), "no prompt in chunks"
    assert any(batch.copies for batch in batches), "no block was copied on write"
    assert any(batch.preempted_ids for batch in batches), "nobody was preempted"
    assert any(batch.num_hit_tokens for batch in batches), "no prefix was found"


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_what_the_kernels_mean_gives_torchs_tokens(kv_cache_dtype):
    decoder = tiny_decoder()
    torchs, batches = make(decoder, "torch", kv_cache_dtype=kv_cache_dtype)
    want = serve(torchs)
    assert_all_happened(batches)
    engine, own_batches = make(decoder, "reference", poisoned=True, kv_cache_dtype=kv_cache_dtype)
    assert serve(engine) == want
    assert [batch.plain() for batch in own_batches] == [batch.plain() for batch in batches]


def test_the_kernels_give_torchs_tokens():
    decoder = tiny_decoder(num_layers=1)
    torchs, batches = make(decoder, "torch")
    want = serve(torchs)
    with interpreted():
        engine, own_batches = make(decoder, "triton", poisoned=True)
        assert runner_of(engine).operations.name == "triton"
        assert serve(engine) == want
    assert [batch.plain() for batch in own_batches] == [batch.plain() for batch in batches]


# --- every format, on less work: the interpreter takes milliseconds a program -------------------------


def serve_few(engine: Engine) -> list[list[int]]:
    """A prompt in chunks, and one with two answers whose block is copied when they part."""
    added = engine.add(tokens_for(1, 18), SamplingParams(max_tokens=3))
    added += engine.add(tokens_for(3, 9), SamplingParams(max_tokens=3, n=2, temperature=1.0, seed=5))
    while engine.has_work:
        engine.step()
    assert not any(request.error for request in added)
    return [request.output_ids for request in added]


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_each_format(kv_cache_dtype):
    settings = {"kv_cache_dtype": kv_cache_dtype, "token_budget": 14}
    decoder = tiny_decoder(num_layers=1)
    torchs, batches = make(decoder, "torch", **settings)
    want = serve_few(torchs)
    assert any(batch.copies for batch in batches)
    with interpreted():
        assert serve_few(make(decoder, "triton", poisoned=True, **settings)[0]) == want


@pytest.mark.parametrize(
    "net",
    [{"qk_norm": True, "qkv_bias": True}, {"windows": (5, None), "num_layers": 2}, {"num_heads": 3, "num_kv_heads": 1, "head_dim": 80}],
    ids=["qwen", "window", "mqa"],
)
def test_each_family(net):
    decoder = tiny_decoder(**{"num_layers": 1, **net})
    want = serve_few(make(decoder, "torch")[0])
    with interpreted():
        assert serve_few(make(decoder, "triton", poisoned=True)[0]) == want


def test_bf16_is_as_near_to_fp32_as_torch_is():
    """Hidden states, since in bf16 two tokens are often as likely as each other."""
    exact, rounded = tiny_decoder(num_layers=1), tiny_decoder(torch.bfloat16, num_layers=1)
    batch = batch_of((request("A", tokens_for(1, 18)), 0, 18, [0, 1]), (request("B", tokens_for(2, 1)), 0, 1, [2]))
    want, rows = runner_of(make(exact, "reference")[0]).hidden(batch)
    by_torch, torch_rows = runner_of(make(rounded, "torch", kv_cache_dtype="bf16")[0]).hidden(batch)
    with interpreted():
        by_kernels, kernel_rows = runner_of(make(rounded, "triton", kv_cache_dtype="bf16")[0]).hidden(batch)
    assert rows == torch_rows == kernel_rows and by_kernels.dtype == torch.bfloat16
    assert (by_kernels - want).norm() < 1.1 * (by_torch - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_what_int4_mixes_is_mixed_back(backend):
    """A backend that forgot it would agree with another that forgot it, so this is held against the numbers of fp32."""
    decoder = tiny_decoder(num_layers=1)
    batch = batch_of((request("A", tokens_for(1, 18)), 0, 18, [0, 1]))
    want, _ = runner_of(make(decoder, "torch")[0]).hidden(batch)
    got, _ = runner_of(make(decoder, backend, kv_cache_dtype="int4")[0]).hidden(batch)
    assert (got - want).norm() < 0.3 * want.norm()  # 0.16; 1.5 without


# --- what the kernels touch -----------------------------------------------------------------------


@contextmanager
def watched_launches() -> Iterator[set[str]]:
    """In here, a launch that touches anything but its arguments raises, and so does one that loads a NaN. Yields the kernels' names."""
    plain, seen = Interpreted.__getitem__, set()

    def getitem(kernel: Interpreted, grid: Any) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            tensors = arguments(args)
            with trace(**tensors) as accesses:
                plain(kernel, grid)(*args, **constants)
            seen.add(kernel.function.__name__)
            for access in accesses:
                loaded = tensors[access.tensor].flatten()[torch.from_numpy(access.elements)]
                assert access.kind == "store" or not loaded.isnan().any(), f"{access.kernel} loads NaN, line {access.line}"

        return launch

    with patched(Interpreted, __getitem__=getitem):
        yield seen


def arguments(args: tuple[Any, ...]) -> dict[str, Tensor]:
    """The tensors of a launch by number. Those that overlap, as queries and keys in one product do, become one."""
    flat = [t.as_strided((extent(t),), (1,)) for t in args if isinstance(t, Tensor) and t.numel()]
    flat.sort(key=lambda t: t.data_ptr())
    merged: list[Tensor] = []
    for tensor in flat:
        last = merged[-1] if merged else None
        if last is not None and tensor.data_ptr() < last.data_ptr() + last.nbytes:
            begin = (tensor.data_ptr() - last.data_ptr()) // last.itemsize
            merged[-1] = last.as_strided((max(len(last), begin + len(tensor)),), (1,))
        else:
            merged.append(tensor)
    return {f"argument_{i}": tensor for i, tensor in enumerate(merged)}


def extent(tensor: Tensor) -> int:
    """Numbers from a tensor's first to its last, in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@pytest.mark.parametrize("kv_cache_dtype", ["fp32", "int4"])
def test_kernels_touch_their_arguments_only_and_no_slot_without_a_token(kv_cache_dtype):
    decoder = tiny_decoder(num_layers=1)
    want = serve_few(make(decoder, "torch", kv_cache_dtype=kv_cache_dtype, token_budget=14)[0])
    with interpreted(), watched_launches() as seen:
        engine, _ = make(decoder, "triton", poisoned=True, kv_cache_dtype=kv_cache_dtype, token_budget=14)
        assert serve_few(engine) == want
    assert seen == KERNELS


def test_the_watch_sees_a_wrong_block_table(monkeypatch):
    monkeypatch.setattr(attention_triton, "_fill_tables", lambda tables, rows, null_block: tables.fill_(null_block + 1))
    with interpreted(), watched_launches(), pytest.raises(OutOfBounds):
        serve_few(make(tiny_decoder(num_layers=1), "triton")[0])


def test_a_launch_outside_of_the_interpreter_says_what_is_missing():
    with interpreted():
        engine, _ = make(tiny_decoder(num_layers=1), "triton")
    with pytest.raises(RuntimeError, match=r"run on CPU only within `minserve_kernels.interpret.interpreted\(\)`"):
        serve_few(engine)


# --- as a card would get it -----------------------------------------------------------------------


def compiled(runner: ModelRunner, *rows: tuple[int, int]) -> list[Launch]:
    """What a step of rows (start, end) launches on an H100."""
    batch = batch_of(*[(request(f"R{i}", tokens_for(1, end)), start, end, range(5)) for i, (start, end) in enumerate(rows)])
    with capture(SM90) as launches:
        runner.operations, _ = choose_operations("triton", runner.cache)
        runner.hidden(batch)
    return launches


def test_the_engines_own_launches(monkeypatch):
    """Heads as in SmolLM2. Loads are wide only where the engine's tensors begin at multiples of 16 bytes, views included."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(Path(__file__).parents[2] / "build" / "triton-cache"))
    decoder = tiny_decoder(torch.bfloat16, num_layers=1, hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64)
    runner = make_runner(decoder, kv_cache_dtype="bf16")
    first = compiled(runner, (16, 17), (39, 40), (0, 33))
    assert {launch.name for launch in first} == KERNELS
    for name, kernel in {launch.kernel.hash: launch for launch in first}.values():
        found = report(kernel)
        assert found.num_wide_loads > 0 and found.num_spills == 0, (name, found)
        assert (found.num_mma + found.num_wgmma > 0) == (name in {"decode_split", "prefill"}), (name, found)
    # Steps of other sizes run what is there: compiling takes a second or two, in the middle of serving.
    for rows in ([(16, 17)], [(1, 2), (2, 3), (3, 4), (0, 5), (3, 70)], [(5, 9), (0, 64)]):
        assert {launch.kernel.hash for launch in compiled(runner, *rows)} <= {launch.kernel.hash for launch in first}
