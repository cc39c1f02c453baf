"""The formats of the KV cache: what is stored, what it costs, and how far off it is at most."""

import pytest
import torch

from minserve_kernels.kv import CODES, INT4_MOST, NUM_SCALES, bytes_per_head, decode, encode, num_codes


def random_heads(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(0)
    return (torch.randn(50, 96) * torch.logspace(-2, 2, 50)[:, None]).to(dtype)


@pytest.mark.parametrize("format", CODES)
def test_shapes_types_and_bytes(format: str) -> None:
    codes, scales = encode(torch.randn(5, 3, 80), format)
    assert codes.shape == (5, 3, num_codes(80, format)) and codes.dtype == CODES[format]
    num_bytes = codes[0, 0].nbytes
    if format in NUM_SCALES:
        assert scales is not None and scales.dtype == torch.float16 and scales.shape == (5, 3, NUM_SCALES[format])
        num_bytes += scales[0, 0].nbytes
    else:
        assert scales is None
    assert num_bytes == bytes_per_head(80, format)
    assert decode(codes, scales, format, torch.bfloat16).shape == (5, 3, 80)


def test_bytes_of_a_head_of_128() -> None:
    assert {format: bytes_per_head(128, format) for format in CODES} == {
        "fp32": 512,
        "bf16": 256,
        "fp16": 256,
        "fp8": 128,
        "int8": 130,
        "int4": 68,
    }


@pytest.mark.parametrize(("format", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_plain_formats_keep_their_own_numbers(format: str, dtype: torch.dtype) -> None:
    x = random_heads(dtype)
    assert torch.equal(decode(*encode(x, format), format, dtype), x)


def test_int8_is_off_by_half_a_step_at_most() -> None:
    x = random_heads()
    codes, scales = encode(x, "int8")
    assert scales is not None
    torch.testing.assert_close(scales[:, 0].float(), x.abs().amax(-1) / 127, rtol=2**-11, atol=0)
    step = scales.float()
    assert ((decode(codes, scales, "int8", torch.float32) - x).abs() <= step * (0.5 + 127 * 2**-11)).all()


def test_int4_is_off_by_half_a_step_at_most_and_halves_do_not_know_of_each_other() -> None:
    x = random_heads()
    x[:, 48:] *= 1000
    (codes, scales), (_, alone) = encode(x, "int4"), encode(x[:, :48].repeat(1, 2), "int4")
    assert scales is not None and alone is not None
    error = (decode(codes, scales, "int4", torch.float32) - x).abs().unflatten(-1, (2, 48))
    assert (error <= scales.float().unsqueeze(-1) * (0.5 + INT4_MOST * 2**-11)).all()
    assert torch.equal(scales[:, 0], alone[:, 0])


def test_int4_packs_the_halves_of_a_head() -> None:
    numbers = torch.tensor([-7.5, -0.5, 0.5, 7.5, 6.5, 5.5, -6.5, -7.5])
    scales = torch.ones(2, dtype=torch.float16)
    codes = torch.tensor([0 | 14 << 4, 7 | 13 << 4, 8 | 1 << 4, 15 | 0 << 4], dtype=torch.uint8)
    assert torch.equal(decode(codes, scales, "int4", torch.float32), numbers)
    assert torch.equal(encode(numbers * INT4_MOST / 7.5, "int4")[0], codes)


def test_fp8_rounds_as_torch_does_and_saturates() -> None:
    x = random_heads()
    assert torch.equal(decode(*encode(x, "fp8"), "fp8", torch.float32), x.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    far = decode(*encode(torch.tensor([449.0, -1e9, 1e38]), "fp8"), "fp8", torch.float32)
    assert far.tolist() == [448.0, -448.0, 448.0]


@pytest.mark.parametrize("format", CODES)
def test_zeros_are_exactly_zero(format: str) -> None:
    x = torch.zeros(2, 64)
    x[1, 40:] = 3.0  # int4: the other half only
    back = decode(*encode(x, format), format, torch.float32)
    assert back[0].tolist() == [0.0] * 64
    if format != "int8":
        assert back[1, :32].tolist() == [0.0] * 32


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("format", CODES)
def test_what_is_not_finite_stays_so(format: str, bad: float) -> None:
    x = torch.ones(3, 64)
    x[1, 7] = bad
    back = decode(*encode(x, format), format, torch.bfloat16)
    assert not back[1, 7].isfinite() and back[[0, 2]].isfinite().all()
    if bad != bad:
        assert back[1, 7].isnan()


def test_numbers_too_large_for_a_scale_are_not_finite_rather_than_wrong() -> None:
    for format in NUM_SCALES:
        assert not decode(*encode(torch.full((64,), 1e8), format), format, torch.float32).isfinite().any()


def test_what_is_not_there_is_said() -> None:
    with pytest.raises(ValueError, match="'int3' is not known; known: fp32, bf16, fp16, fp8, int8, int4"):
        num_codes(64, "int3")
    with pytest.raises(ValueError, match="even head size, got 65"):
        bytes_per_head(65, "int4")
