"""The formats of the KV cache as the engine uses them. Numbers behind `case` are those of the collected bug reports, kind G."""

from typing import cast

import pytest
import torch
from torch import Tensor

from minserve.model import kv_formats
from minserve.model.kv_cache import KVCache, bytes_per_token
from minserve.model.kv_formats import decode_into, mixing_matrix, require_format
from minserve.model.runner import ModelRunner
from minserve.sim.shapes import BITS, SHAPES, ModelShape
from minserve_kernels import kv
from tests.model.tiny_net import full_logits, generate, make_engine, make_runner, tiny_config, tiny_decoder, tokens_for

FORMATS = tuple(kv.CODES)
QUANTIZED = ("fp8", "int8", "int4")
CPU = torch.device("cpu")


def round_trip(x: Tensor, name: str) -> Tensor:
    return kv.decode(*kv.encode(x, name), name, torch.float32)


def mixed_round_trip(x: Tensor, name: str) -> Tensor:
    """As the cache keeps it: turned, stored, read, turned back."""
    mixing = mixing_matrix(x.shape[-1])
    return round_trip(x @ mixing, name) @ mixing.T


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- what a format is -----------------------------------------------------------------------------------


def test_every_format_comes_back_within_half_a_step():
    """A step: up to 2^-7 of a number in bf16, 2^-3 in fp8; of the largest of a head 1/127 in int8, of half a head 1/8 in int4."""
    x = normal(500, 64)
    steps = {"fp32": (0.0, 0.0), "bf16": (2**-7, 0.0), "fp16": (2**-10, 2**-24), "fp8": (2**-3, 2**-9)}  # of a number; the least
    for name, (share, least) in steps.items():
        assert bool(((round_trip(x, name) - x).abs() <= (share * x.abs()).clamp(min=least) / 2).all()), name
    error = (round_trip(x, "int8") - x).abs()
    assert bool((error <= x.abs().amax(-1, keepdim=True) / 127 * 0.505).all())
    halves, error = x.unflatten(-1, (2, 32)), (round_trip(x, "int4") - x).abs().unflatten(-1, (2, 32))
    assert bool((error <= halves.abs().amax(-1, keepdim=True) / 8 * 0.505).all())


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_case_91_a_group_of_zeros(name: str, size: int):
    for x in (torch.zeros(3, size), -torch.zeros(3, size), torch.zeros(3, size).index_fill(1, torch.tensor([5]), 1e-30)):
        codes, scales = kv.encode(x, name)
        assert scales is not None and bool(scales.isfinite().all())
        assert bool((kv.decode(codes, scales, name, torch.float32).abs() < 1e-6).all())
    assert bool((round_trip(torch.zeros(3, size), name) == 0).all())


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_case_92_constant_channels_and_tiny_ranges_fit_the_stored_scale(name: str):
    """All 100, all 0.01, and a range of exactly 0.001: int8 within 0.5 %; int4's outermost code is 1/16 inside the largest number."""
    share = {"int8": 0.005, "int4": 1 / 16 + 0.001}[name]
    for x in (torch.full((16,), 100.0), torch.full((16,), 0.01), torch.linspace(0.01, 0.011, 16)):
        codes, scales = kv.encode(x, name)
        back = kv.decode(codes, scales, name, torch.float32)
        assert scales is not None and bool(scales.isfinite().all()) and bool((scales > 0).all())
        assert bool(((back - x).abs() <= share * x.max()).all())


def test_case_97_as_many_codes_as_the_name_says():
    x = normal(157, 64)  # 10,048 numbers
    errors, widths = {}, {"int4": 4, "int8": 8}
    for name, bits in widths.items():
        codes, scales = kv.encode(x, name)
        assert scales is not None
        seen = torch.cat((codes & 15, codes >> 4)) if name == "int4" else codes
        assert len(seen.unique()) >= 2**bits - 1 - 2 * (name == "int8")  # of -127 ... 127, the outermost but one are rare
        assert codes.nbytes == x.numel() * bits / 8 and scales.nbytes == 157 * {"int8": 2, "int4": 4}[name]
        errors[name] = float((kv.decode(codes, scales, name, torch.float32) - x).square().mean())
    assert errors["int4"] > 2**4 * errors["int8"]  # more than 2x for each of the 4 bits


def test_case_100_no_scale_is_fixed_by_the_first_token_of_a_block():
    """One channel gets 1, 2, 1, 50 in four steps, then the other way round, in blocks of 4 slots."""
    for name in ("int8", "int4"):
        for values in ([1.0, 2.0, 1.0, 50.0], [50.0, 1.0, 2.0, 1.0]):
            cache = KVCache(tiny_config(), 1, 4, name)
            for slot, value in enumerate(values):
                token = torch.full((1, 2, 2, 32), 0.01)
                token[..., 7] = value
                cache.write(0, token, cache.place(torch.tensor([slot])))
            back = cache.gather(0, 0, cache.reading([[0]], dtype=torch.float32), torch.float32)[0, :, 7]
            want = torch.tensor(values)
            assert bool(((back - want).abs() <= {"int8": 0.01, "int4": 1 / 16 + 0.001}[name] * want).all()), (name, back)


# --- mixing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [1, 2, 3, 32, 64, 80, 96, 128, 256])
def test_mixing_is_orthogonal_and_spreads_every_number_evenly(head_dim: int):
    mixing = mixing_matrix(head_dim)
    torch.testing.assert_close(mixing @ mixing.T, torch.eye(head_dim), atol=1e-6, rtol=0)
    loudest = {80: 2**0.5, 96: 2**0.5, 3: 2**0.5}.get(head_dim, 1.0) * head_dim**-0.5  # a cosine transform's largest entry
    assert float(mixing.abs().max()) <= loudest * 1.00001


def test_case_95_one_huge_key_channel():
    """Shared scales along a token: the small channels are lost. By channel they are not, nor with all channels mixed.

    The docs' warning is in `kv_formats`: one loud channel leaves all others a step or two.
    """
    key = torch.tensor([100, 0.5, -0.3, 0.2, -0.5, 0.1, 0.4, -0.2])
    step = (key.max() - key.min()) / 15  # asymmetric int4 with one scale for the token, as in the report
    assert float(step) == pytest.approx(6.7)
    assert (((key - key.min()) / step).round() * step + key.min())[1:].tolist() == pytest.approx([-0.5] * 7)  # all the same: nothing left
    keys = normal(64, 64)
    keys[:, 0] += 100
    as_it_is, mixed = round_trip(keys, "int4") - keys, mixed_round_trip(keys, "int4") - keys
    in_its_half = slice(1, 32)
    assert float(as_it_is[:, in_its_half].square().mean().sqrt()) > 5  # numbers of size 1 come back as +-6.25
    assert float(mixed[:, in_its_half].square().mean().sqrt()) < 0.75
    by_channel = keys.T  # a row is a channel over 64 tokens
    steps = by_channel.unflatten(-1, (2, 32)).abs().amax(-1, keepdim=True) / 8
    assert bool(((round_trip(by_channel, "int4") - by_channel).abs().unflatten(-1, (2, 32)) <= 0.505 * steps).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixing_changes_no_score(dtype: torch.dtype):
    cache, q, k = KVCache(tiny_config(head_dim=64), 2, 16, "int4"), normal(9, 4, 64).to(dtype), normal(9, 2, 2, 64, seed=1).to(dtype)
    mixed_q, mixed_k = cache.mix(q, k)
    got = mixed_q[:, :2].double() @ mixed_k[:, 0].double().transpose(1, 2)
    want = q[:, :2].double() @ k[:, 0].double().transpose(1, 2)
    assert float((got - want).abs().max()) < {torch.float32: 1e-4, torch.bfloat16: 0.3}[dtype]
    back = cache.unmix(mixed_q.flatten(1)).view(q.shape)
    assert float((back - q).abs().max()) < {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp8", "int8"])
def test_only_int4_is_mixed(name: str):
    cache, q, k = KVCache(tiny_config(), 2, 16, name), normal(3, 4, 32), normal(3, 2, 2, 32)
    assert cache.mix(q, k) == (q, k) and cache.unmix(q) is q


# --- reading fast ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("head_dim", [32, 80, 96, 128])
def test_decode_into_is_decode(name: str, head_dim: int):
    codes, scales = kv.encode(3 * normal(50, head_dim), name)
    for dtype, share in ((torch.float32, 0.0), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)):
        out = torch.empty(50, head_dim, dtype=dtype)
        decode_into(out, codes, scales, name)
        torch.testing.assert_close(out, kv.decode(codes, scales, name, dtype), rtol=share, atol=0)


@pytest.mark.parametrize("name", QUANTIZED)
def test_what_is_not_finite_stays_so(name: str):
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = normal(2, 64)
        x[0, 3] = bad
        codes, scales = kv.encode(x, name)
        out = torch.empty(2, 64)
        decode_into(out, codes, scales, name)
        assert not bool(out[0].isfinite().all()) and bool(out[1].isfinite().all())


def test_every_byte_of_fp8_is_looked_up_right():
    codes, out = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.empty(1, 256)
    decode_into(out, codes.view(1, 256), None, "fp8")
    torch.testing.assert_close(out[0], codes.float(), rtol=0, atol=0, equal_nan=True)
    assert out[0].isnan().nonzero().flatten().tolist() == [127, 255]


# --- what cannot be had ---------------------------------------------------------------------------------


def test_formats_that_cannot_be_had_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    for name in ("auto", *FORMATS):
        require_format(name, 64, CPU)
    with pytest.raises(ValueError, match="kv_cache_dtype 'int3' is not known; known: auto, fp32, bf16, fp16, fp8, int8, int4"):
        require_format("int3", 64, CPU)
    with pytest.raises(ValueError, match="int4 .* needs an even head size, got 33"):
        require_format("int4", 33, CPU)
    require_format("int8", 33, CPU)
    monkeypatch.setattr(kv_formats, "_has_fp8", lambda device: False)
    with pytest.raises(ValueError, match=r"kv_cache_dtype 'fp8': torch .* cannot keep e4m3 on cpu; int8 takes nearly as few bytes"):
        require_format("fp8", 64, CPU)


# --- bytes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128])
def test_cache_planner_and_formula_count_the_same_bytes(name: str, head_dim: int):
    per_head = {"fp32": 4 * head_dim, "bf16": 2 * head_dim, "fp16": 2 * head_dim, "fp8": head_dim}
    per_head |= {"int8": head_dim + 2, "int4": head_dim // 2 + 4}
    config = tiny_config(head_dim=head_dim)
    cache = KVCache(config, 5, 16, name)
    shape = ModelShape(
        **{
            n: getattr(config, n)
            for n in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size")
        },
        name="tiny",
    )
    want = 2 * 2 * 2 * per_head[name]  # keys and values, layers, KV heads
    assert bytes_per_token(config, name) == cache.bytes_per_token == shape.kv_bytes_per_token(name) == want
    assert shape.kv_bytes(100, name) == 100 * want
    assert cache.num_bytes == 6 * 16 * want  # the null block comes on top
    assert set(FORMATS) == set(BITS)


def test_the_same_bytes_hold_more_tokens():
    """Of bf16, with heads of 64: int8 1.94 times, int4 3.56; with heads of 128: 1.97 and 3.76."""
    for head_dim, int8, int4 in ((64, 1.939, 3.555), (128, 1.969, 3.764)):
        config = tiny_config(head_dim=head_dim)
        per_token = {name: bytes_per_token(config, name) for name in FORMATS}
        assert per_token["bf16"] / per_token["int8"] == pytest.approx(int8, abs=1e-3) and int8 > 1.9
        assert per_token["bf16"] / per_token["int4"] == pytest.approx(int4, abs=1e-3) and int4 > 3.5
    shape = SHAPES["llama-2-13b"]
    assert shape.kv_bytes_per_token("bf16") / shape.kv_bytes_per_token("int4") == pytest.approx(3.765, abs=1e-3)


def test_case_94_the_setting_reaches_the_cache_and_the_scales_are_written():
    """Bytes fall by the formula; a token's logits move, at most by 2 % of their spread in int8 (on average), and further in int4."""
    decoder, prompt = tiny_decoder(), tokens_for(1, 100)
    exact = full_logits(decoder, prompt)
    spread = exact.amax(-1) - exact.amin(-1)
    off = {name: full_logits(decoder, prompt, kv_cache_dtype=name) - exact for name in QUANTIZED}
    moved = {name: float((difference.abs().amax(-1) / spread).mean()) for name, difference in off.items()}
    assert 0 < moved["int8"] < 0.02 and moved["int8"] < moved["fp8"] < moved["int4"]
    per_token = {name: make_runner(decoder, kv_cache_dtype=name).cache.bytes_per_token for name in ("fp32", "int8", "int4")}
    assert per_token == {"fp32": 4 * 2 * (4 * 32), "int8": 4 * 2 * (32 + 2), "int4": 4 * 2 * (16 + 4)}


@pytest.mark.parametrize("name", FORMATS)
def test_case_98_nan_of_one_request_stays_with_it(name: str, monkeypatch: pytest.MonkeyPatch):
    """NaN in the keys that A writes in its third step: A ends with an error, B beside it has the tokens it has beside a healthy A, and
    A's prefix, part of which had been written before, is computed again for the next who asks."""
    decoder, prompts = tiny_decoder(), [tokens_for(1, 33), tokens_for(2, 20)]
    healthy = generate(make_engine(decoder, prefix_caching=True, kv_cache_dtype=name), prompts, 8)

    engine = make_engine(decoder, prefix_caching=True, kv_cache_dtype=name)
    cache = cast(ModelRunner, engine.runner).cache
    write = cache.write

    def poison(layer: int, kv: Tensor, place: tuple[Tensor, Tensor]) -> None:
        if len(engine.trace.steps) == 2:
            in_a = torch.isin(place[0], torch.tensor(engine.scheduler.blocks.table(engine.scheduler.running[0])))
            kv = kv.masked_fill(in_a[:, None, None, None], torch.nan)
        write(layer, kv, place)

    monkeypatch.setattr(cache, "write", poison)
    sick, well = generate(engine, prompts, 8)
    assert sick.error is not None and "NaN" in sick.error and sick.num_output_tokens == 2
    assert well.output_ids == healthy[1].output_ids
    monkeypatch.undo()
    again = generate(engine, prompts[:1], 8)[0]
    assert again.num_cached_tokens == 0 and again.output_ids == healthy[0].output_ids
