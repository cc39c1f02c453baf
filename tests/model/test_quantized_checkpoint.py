"""Layouts of GPTQ and AWQ files: written here word by word from their descriptions, and read; written by us, and read back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from minserve.model.config import ModelConfig, QuantizationConfig, UnsupportedModel
from minserve.model.decoder import Decoder
from minserve.model.quantized_checkpoint import AWQ_ORDER, QuantizedCheckpoint, open_checkpoint, pack_words, unpack_words, write_quantized
from minserve.model.quantized_linear import QuantizedLinear
from minserve.model.quantized_weight import QuantizedWeight
from minserve.model.weights import BrokenCheckpoint, Checkpoint
from minserve.sim.weight_formats import WeightFormat, parse_weights
from tests.model.made_weights import made_weight
from tests.model.tiny_net import full_logits, tokens_for
from tests.tiny_model import save_tiny_model

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False, "checkpoint_format": "gptq"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
NAME = "model.layers.0.mlp.down_proj.weight"
STEM = NAME.removesuffix(".weight")


# --- words ----------------------------------------------------------------------------------------


def test_case_103_each_order_is_read_by_its_own_reader_only() -> None:
    eight = torch.arange(8, dtype=torch.uint8)
    plain, awq = pack_words(eight, 4), pack_words(eight, 4, AWQ_ORDER)
    assert (int(plain), int(awq)) == (0x76543210, 0x75316420)
    assert torch.equal(unpack_words(plain, 4), eight) and torch.equal(unpack_words(awq, 4, AWQ_ORDER), eight)
    assert not torch.equal(unpack_words(awq, 4), eight) and not torch.equal(unpack_words(plain, 4, AWQ_ORDER), eight)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("order", [None, AWQ_ORDER])
def test_case_101_all_bytes_and_random_words_come_back(bits: int, order: tuple[int, ...] | None) -> None:
    if bits == 8 and order:
        order = (0, 2, 1, 3)
    words = torch.randint(-(2**31), 2**31, (1000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    every_byte = (torch.arange(256) * 0x01010101).to(torch.uint32).view(torch.int32)
    for given in (words, every_byte, torch.tensor([-1, -(2**31), 2**31 - 1, 0], dtype=torch.int32)):
        codes = unpack_words(given, bits, order)
        assert len(codes) == len(given) * 32 // bits and int(codes.max()) < 2**bits
        assert torch.equal(pack_words(codes, bits, order), given)
    signed = torch.tensor([-6, 2, 3, -2, -6, 2, 3, -2])
    assert torch.equal(unpack_words(pack_words(signed + 8, 4), 4).int() - 8, signed.int())


# --- files made by hand ---------------------------------------------------------------------------


def word_of(codes: list[int], bits: int) -> int:
    """A word with the first code in its lowest bits, as a signed number of 32 bits."""
    word = sum(code << (bits * place) for place, code in enumerate(codes))
    return word - 2**32 if word >= 2**31 else word


def gptq_tensors(weight: QuantizedWeight, stored_zeros: Tensor, with_groups: bool = True) -> dict[str, Tensor]:
    """One word after the other: a word of qweight has inputs, a word of qzeros outputs."""
    bits, n, (num_outputs, num_inputs) = weight.bits, 32 // weight.bits, weight.shape
    codes, zeros = weight.codes.tolist(), stored_zeros.int().tolist()
    qweight = [[word_of([codes[o][n * i + k] for k in range(n)], bits) for o in range(num_outputs)] for i in range(num_inputs // n)]
    num_groups = weight.scales.shape[1]
    qzeros = [[word_of([zeros[n * o + k][g] for k in range(n)], bits) for o in range(num_outputs // n)] for g in range(num_groups)]
    tensors = {
        "qweight": torch.tensor(qweight, dtype=torch.int32),
        "qzeros": torch.tensor(qzeros, dtype=torch.int32),
        "scales": weight.scales.T.half().contiguous(),
    }
    return {**tensors, "g_idx": weight.group_of.int()} if with_groups else tensors


def awq_tensors(weight: QuantizedWeight) -> dict[str, Tensor]:
    """A word has eight outputs: 0, 2, 4, 6 in its lower half, 1, 3, 5, 7 in its upper."""

    def words(numbers: list[list[int]]) -> Tensor:  # [outputs][columns] -> [columns, outputs / 8]
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        rows = [[word_of([numbers[8 * o + k][c] for k in order], 4) for o in range(len(numbers) // 8)] for c in range(len(numbers[0]))]
        return torch.tensor(rows, dtype=torch.int32)

    scales = weight.scales.T.half().contiguous()
    return {"qweight": words(weight.codes.tolist()), "qzeros": words(weight.zeros.int().tolist()), "scales": scales}


def save(directory: Path, tensors: dict[str, Tensor], settings: dict[str, Any], **more: Tensor) -> QuantizedCheckpoint:
    save_file({**{f"{STEM}.{part}": tensor for part, tensor in tensors.items()}, **more}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": settings}), encoding="utf-8")
    checkpoint = open_checkpoint(directory)
    assert isinstance(checkpoint, QuantizedCheckpoint)
    return checkpoint


def same(found: QuantizedWeight | None, expected: QuantizedWeight) -> bool:
    assert found is not None
    fields = ("codes", "scales", "zeros", "group_of")
    return found.bits == expected.bits and all(torch.equal(getattr(found, name), getattr(expected, name)) for name in fields)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("order", "less"), [("gptq", 1), ("gptq_v2", 0)])
@pytest.mark.parametrize("mixed", [False, True])
def test_gptq_files(tmp_path: Path, bits: int, order: str, less: int, mixed: bool) -> None:
    weight = made_weight(bits, 16, 96, 32, mixed=mixed)
    stored = (weight.zeros - less) % 2**bits  # a zero of 0 becomes the top code
    assert weight.zeros.min() == 0 or bits == 8
    settings = {**GPTQ, "bits": bits, "checkpoint_format": order, "desc_act": mixed}
    checkpoint = save(tmp_path, gptq_tensors(weight, stored), settings)
    assert same(checkpoint.quantized(NAME, (16, 96)), weight)
    assert torch.equal(checkpoint.take(NAME, (16, 96)), weight.dequantize())
    assert checkpoint.unused() == [] and NAME in checkpoint


def test_gptq_files_without_groups_have_neighbours_together(tmp_path: Path) -> None:
    weight = made_weight(4, 16, 96, 32)
    assert same(save(tmp_path, gptq_tensors(weight, (weight.zeros - 1) % 16, False), GPTQ).quantized(NAME, (16, 96)), weight)


def test_symmetric_files_that_say_gptq_and_hold_zeros_as_they_are(tmp_path: Path) -> None:
    """vLLM's pull request 38966: some tools write 8, not 7, for the middle code and still name the older layout."""
    weight = made_weight(4, 16, 96, 32, symmetric=True)
    for less in (0, 1):
        checkpoint = save(tmp_path, gptq_tensors(weight, weight.zeros - less), {**GPTQ, "sym": True})
        assert same(checkpoint.quantized(NAME, (16, 96)), weight)


def test_awq_files(tmp_path: Path) -> None:
    weight = made_weight(4, 24, 96, 32)
    checkpoint = save(tmp_path, awq_tensors(weight), AWQ)
    assert same(checkpoint.quantized(NAME, (24, 96)), weight)
    assert checkpoint.quantized("model.norm.weight", (5,)) is None and checkpoint.unused() == []


def test_scales_of_others_are_kept_as_fp16_has_them(tmp_path: Path) -> None:
    weight = made_weight(4, 24, 96, 32)
    weight.scales.copy_((weight.scales * 1.0007).half())
    assert not torch.equal(weight.scales, weight.scales.bfloat16().float())
    assert same(save(tmp_path, awq_tensors(weight), AWQ).quantized(NAME, (24, 96)), weight)


@pytest.mark.parametrize(
    ("num_inputs", "size", "complaint"),
    [(96, 64, "down_proj: 96 inputs do not fall into groups of 64"), (64, 128, "down_proj: 64 inputs do not fall into groups of 128")],
)
def test_case_107_awq_files_have_no_short_groups(tmp_path: Path, num_inputs: int, size: int, complaint: str) -> None:
    checkpoint = save(tmp_path, awq_tensors(made_weight(4, 24, num_inputs, 32)), {**AWQ, "group_size": size})
    with pytest.raises(BrokenCheckpoint, match=complaint):
        checkpoint.quantized(NAME, (24, num_inputs))


@pytest.mark.parametrize("size", [64, 128])
def test_case_107_gptq_files_may_have_a_short_last_group(tmp_path: Path, size: int) -> None:
    weight = made_weight(4, 16, 96, size)
    assert weight.scales.shape[1] == (2 if size == 64 else 1)
    checkpoint = save(tmp_path, gptq_tensors(weight, (weight.zeros - 1) % 16), {**GPTQ, "group_size": size})
    assert same(checkpoint.quantized(NAME, (16, 96)), weight)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_case_110_special_group_sizes(tmp_path: Path, method: str) -> None:
    settings, read = (GPTQ, gptq_tensors) if method == "gptq" else (AWQ, lambda weight, _: awq_tensors(weight))
    for size, group_size in ((-1, None), (64, 64), (1, 1)):
        weight = made_weight(4, 16, 64, group_size)
        checkpoint = save(tmp_path, read(weight, (weight.zeros - 1) % 16), {**settings, "group_size": size})
        found = checkpoint.quantized(NAME, (16, 64))
        assert same(found, weight)
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(QuantizedLinear(weight)(x), x @ weight.dequantize().T, atol=1e-5, rtol=1e-4)
    with pytest.raises(UnsupportedModel, match="group_size must be -1 or at least 1, got 0"):
        save(tmp_path, read(weight, weight.zeros), {**settings, "group_size": 0})


# --- files that do not fit ------------------------------------------------------------------------


def test_what_is_stored_is_checked_by_its_name(tmp_path: Path) -> None:
    weight = made_weight(4, 16, 96, 32)
    good = gptq_tensors(weight, weight.zeros)

    def refused(changes: dict[str, Tensor], complaint: str, shape: tuple[int, int] = (16, 96), left_out: str = "") -> None:
        tensors = {name: tensor for name, tensor in {**good, **changes}.items() if name != left_out}
        with pytest.raises(BrokenCheckpoint, match=complaint):
            save(tmp_path, tensors, GPTQ).quantized(NAME, shape)

    refused({"qweight": good["qweight"][1:]}, r"down_proj.qweight has shape \(11, 16\), the config says \(12, 16\)")
    refused({"scales": good["scales"].T.contiguous()}, r"down_proj.scales has shape \(16, 3\)")
    refused({"g_idx": torch.full((96,), 3, dtype=torch.int32)}, "g_idx names groups 3 to 3, there are 3")
    refused({}, "qzeros is missing", left_out="qzeros")
    refused({"qweight": torch.zeros(12, 19, dtype=torch.int32)}, "19 outputs of 4 bits do not fill words", (19, 96))
    with pytest.raises(BrokenCheckpoint, match="in floats and in codes"):
        save(tmp_path, good, GPTQ, **{NAME: torch.zeros(16, 96)})


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"quant_method": "fp8"}, r"quantized \(fp8\); only gptq, awq or floats"),
        ({}, r"quantized \(unnamed\)"),
        ({**GPTQ, "bits": 3}, "gptq weights of 3 bits are not supported, only of 4 or 8"),
        ({**AWQ, "bits": 8}, "awq weights of 8 bits are not supported, only of 4"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "gptq weights with checkpoint_format 'marlin'"),
        ({**AWQ, "version": "gemv"}, "awq weights with version 'gemv' are not supported, only 'gemm'"),
        ({**GPTQ, "dynamic": {"-:lm_head": {}}}, "'dynamic'"),
    ],
)
def test_case_103_unknown_methods_and_orders_are_refused_by_name(tmp_path: Path, settings: dict[str, Any], complaint: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"minserve": {}, **settings}}), encoding="utf-8")
    with pytest.raises(UnsupportedModel, match=complaint):
        QuantizationConfig.from_directory(tmp_path)


# --- files that we write --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("source"), tie_word_embeddings=True)


def shapes_of(source: Path) -> dict[str, tuple[int, int]]:
    with safe_open(source / "model.safetensors", framework="pt") as file:
        names = [name for name in file.keys() if name.endswith("_proj.weight")]  # noqa: SIM118
        return {name: tuple(file.get_slice(name).get_shape()) for name in names}


def made_model(source: Path, fmt: WeightFormat, mixed: bool = False) -> dict[str, QuantizedWeight]:
    made: dict[str, QuantizedWeight] = {}
    for name, shape in shapes_of(source).items():
        made[name] = made_weight(fmt.bits, *shape, fmt.group_size, symmetric=fmt.symmetric, mixed=mixed)  # the same order for q, k and v
    return made


@pytest.mark.parametrize(
    ("name", "mixed", "method", "key"),
    [
        ("gptq-int4-g32", False, "gptq", "gptq_v2"),
        ("gptq-int4-g32-sym", True, "gptq", "gptq"),
        ("int8", False, "gptq", "gptq"),
        ("int4-channel", False, "gptq", "gptq_v2"),
        ("awq-int4-g32", False, "awq", None),
        ("awq-int4-g64", False, "gptq", "gptq_v2"),  # 96 inputs of down_proj
    ],
)
def test_what_is_written_is_read_back(source: Path, tmp_path: Path, name: str, mixed: bool, method: str, key: str | None) -> None:
    fmt, replaced = parse_weights(name), {"model.norm.weight": torch.full((64,), 1.5)}
    made = made_model(source, fmt, mixed)
    write_quantized(tmp_path, source, made, fmt, replaced, head_bits=8)
    settings = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert (settings["quant_method"], settings.get("checkpoint_format"), settings.get("desc_act", False)) == (method, key, mixed)
    assert settings["minserve"] == {"format": fmt.name, "head_bits": 8}
    checkpoint = open_checkpoint(tmp_path)
    assert isinstance(checkpoint, QuantizedCheckpoint) and (checkpoint.config.name, checkpoint.config.head_bits) == (fmt.name, 8)
    for matrix, weight in made.items():
        assert same(checkpoint.quantized(matrix, weight.shape), weight), matrix
    assert torch.equal(checkpoint.take("model.norm.weight", (64,)), replaced["model.norm.weight"])
    kept = "model.layers.1.input_layernorm.weight"
    assert torch.equal(checkpoint.take(kept, (64,)), Checkpoint(source).take(kept, (64,)))
    assert (tmp_path / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_a_written_model_runs_and_equals_the_one_in_memory(source: Path, tmp_path: Path) -> None:
    fmt = parse_weights("gptq-int4-g32")
    made = made_model(source, fmt)
    write_quantized(tmp_path, source, made, fmt)
    decoder, config = Decoder.from_directory(tmp_path), ModelConfig.from_directory(tmp_path)
    assert all(isinstance(layer.down, QuantizedLinear) for layer in decoder.layers)

    class Numbers(Checkpoint):
        def take(self, name, shape):
            return made[name].dequantize() if name in made else super().take(name, shape)

    text = tokens_for(0, 30)
    expected = full_logits(Decoder(config, Numbers(source)), text)
    torch.testing.assert_close(full_logits(decoder, text), expected, atol=1e-4, rtol=1e-4)


def test_files_take_the_bytes_of_the_formula(source: Path, tmp_path: Path) -> None:
    fmt = parse_weights("gptq-int4-g32")
    write_quantized(tmp_path, source, made_model(source, fmt), fmt)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, (num_outputs, num_inputs) in shapes_of(source).items():
        stem = name.removesuffix(".weight")
        num_bytes = sum(tensors[f"{stem}.{part}"].nbytes for part in ("qweight", "scales", "qzeros"))
        saved_by_packed_zeros = num_outputs * num_inputs // 32 * 3 // 2  # half a byte in the file, two where it is served
        assert num_bytes == fmt.num_bytes(num_outputs, num_inputs) - saved_by_packed_zeros
