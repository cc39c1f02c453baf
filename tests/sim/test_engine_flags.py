"""Five engines' flags: whatever an engine's fraction is a share of, it comes to the same KV pool, and nothing is left out silently."""

from typing import Any

import pytest

from minserve.sim.devices import DEVICES
from minserve.sim.engine_flags import TGI_KV_SHARE, engine_settings, flags, memory_fractions
from minserve.sim.planner import Plan, plan
from minserve.sim.shapes import BITS, SHAPES
from minserve.sim.weight_formats import UNSCALED_BITS

ENGINES = ["vllm", "sglang", "tgi", "trtllm", "llamacpp"]


def planned(model: str = "llama-2-13b", device: str = "a100-80gb", **settings: Any) -> Plan:
    return plan(SHAPES[model], DEVICES[device], context_tokens=2048, **settings)


def pools(made: Plan) -> dict[str, float]:
    """The pool that each engine makes of its fraction, by the arithmetic that it does at start."""
    b, fraction = made.budget, memory_fractions(made)
    peak = b.weight_bytes + b.activation_bytes + b.runtime_bytes  # measured by a trial step
    trial = made.token_budget * made.cost.kv_bytes_per_token  # TGI's trial prompt has its keys and values in memory
    return {
        "vllm": fraction["vllm"] * b.total_bytes - peak,
        "sglang": (b.total_bytes - b.weight_bytes) - b.total_bytes * (1 - fraction["sglang"]),
        "trtllm": fraction["trtllm"] * (b.total_bytes - peak),
        "tgi": TGI_KV_SHARE * (fraction["tgi"] * b.total_bytes - peak - trial) + trial,
    }


@pytest.mark.parametrize(
    "made",
    [
        planned(),
        planned("llama-3.1-70b", num_devices=4, memory_fraction=0.8),
        planned("mixtral-8x7b", "h200", weights="int4", kv="int8", token_budget=8192),
    ],
    ids=["13b", "70b on four", "experts"],
)
def test_the_same_pool_in_every_engine(made: Plan) -> None:
    for name, pool_bytes in pools(made).items():
        assert pool_bytes == pytest.approx(made.budget.kv_bytes, rel=1e-9), name


def test_the_numbers_of_a_13b() -> None:
    made = planned()
    fractions = {name: round(fraction, 3) for name, fraction in memory_fractions(made).items()}
    assert fractions == {"vllm": 0.900, "sglang": 0.862, "trtllm": 0.843, "tgi": 0.957}
    given = flags(made)
    assert list(given) == ENGINES
    assert given["vllm"] == [
        "--gpu-memory-utilization 0.900",
        "--max-model-len 2048",
        "--max-num-seqs 25",
        "--max-num-batched-tokens 2048",
        "--block-size 16",
        "--tensor-parallel-size 1",
        "--dtype bfloat16",
    ]
    for flag, engine in (
        ("--max-total-tokens 52448", "sglang"),
        ("--page-size 16", "sglang"),
        ("--max-batch-total-tokens 52448", "tgi"),
        ("--max-input-tokens 1792", "tgi"),
        ("--max_batch_size 25", "trtllm"),
        ("--ctx-size 52448", "llamacpp"),
        ("--parallel 25", "llamacpp"),
    ):
        assert flag in given[engine]
    assert "maintenance mode" in engine_settings(made)["tgi"].title


def test_tgi_cannot_give_everything() -> None:
    settings = engine_settings(planned(memory_fraction=0.97))["tgi"]
    assert "--cuda-memory-fraction 1.000" in settings.flags
    assert any("TGI_WIGGLE_ROOM" in note and "1.0" in note for note in settings.notes)


QUANTIZED = ["int8", "int4", "int4-g32-sym", "gptq-int4", "gptq-int8-g128", "gptq-int4-channel-sym", "awq-int4", "awq-int4-g128"]


@pytest.mark.parametrize("kv", BITS)
@pytest.mark.parametrize("weights", [*UNSCALED_BITS, *QUANTIZED])
def test_every_format_has_a_flag_or_words(weights: str, kv: str) -> None:
    device = "h200"
    for name, settings in engine_settings(planned("llama-3.1-8b", device, weights=weights, kv=kv)).items():
        said = " ".join([settings.command, *settings.flags, *settings.notes])
        if weights not in ("fp32", "bf16", "fp16"):
            assert weights in said or "--quantiz" in said or "bits a weight" in said, name
        plain_kv = kv in ("fp32", "bf16", "fp16")
        has_flag = any("cache-dtype" in f or "cache_dtype" in f or "cache-type" in f for f in settings.flags)
        assert has_flag or f"{kv} keys and values" in said or (plain_kv and name != "llamacpp"), name


def test_what_has_no_flag_is_said() -> None:
    settings = engine_settings(planned("llama-3.1-8b", "h200", weights="int4", kv="int8"))
    assert "--kv-cache-dtype int8_per_token_head" in settings["vllm"].flags
    layout = "MODEL must be a checkpoint in the layout of GPTQ (int4), as minserve quantize writes it"
    assert f"{layout}, without a flag" in settings["vllm"].notes and layout in settings["tgi"].notes
    assert any("no flag turns weights into int4" in note for note in settings["trtllm"].notes)
    assert "int8 keys and values do not exist here; fp8 takes as many bytes" in settings["sglang"].notes
    assert "--quantize gptq" in settings["tgi"].flags
    assert "--cache-type-k q8_0" in settings["llamacpp"].flags and settings["llamacpp"].command.endswith("Q4_K_M.gguf")


def quantized(weights: str, **settings: Any) -> dict[str, str]:
    """What each engine is told of weights in that format, in one string."""
    found = engine_settings(planned("llama-3.1-8b", weights=weights, **settings))
    return {name: " ".join([s.command, *s.flags, *s.notes]) for name, s in found.items()}


def test_the_checkpoints_layout_is_that_of_the_method() -> None:
    for name, layout in (("awq-int4", "AWQ"), ("gptq-int4-sym", "GPTQ"), ("int4-g32", "GPTQ"), ("int8-g128", "GPTQ")):
        said = quantized(name)
        assert all(f"a checkpoint in the layout of {layout} ({name})" in said[engine] for engine in ("vllm", "sglang", "tgi"))
        assert f"--quantize {layout.lower()}" in said["tgi"] and "--quantization" not in said["vllm"] + said["sglang"]


def test_int8_is_rounded_at_loading_where_an_engine_can() -> None:
    said = quantized("rtn-int8-channel")
    assert "--quantize eetq" in said["tgi"] and "MODEL must be" not in said["tgi"]
    assert "Q8_0.gguf" in said["llamacpp"] and "Q4_K_M.gguf" in quantized("awq-int4")["llamacpp"]


def test_fast_kernels_for_gptq_want_zero_in_the_middle() -> None:
    words = "(Marlin) read GPTQ only with zero in the middle"
    warned = {
        name: words in quantized(name)["vllm"] for name in ("int4", "gptq-int4", "gptq-int4-sym", "int8", "gptq-int8-asym", "awq-int4")
    }
    assert warned == {"int4": True, "gptq-int4": True, "gptq-int4-sym": False, "int8": False, "gptq-int8-asym": True, "awq-int4": False}
    assert words not in quantized("int4")["tgi"]


def test_what_an_output_layer_in_16_bits_costs_is_said() -> None:
    """128,256 x 4,096 numbers: one byte each more, less a scale a row; of a tied one, that int8 copy less."""
    said = quantized("int4")
    assert all("stays in 16 bits: 0.53 GB more than planned" in said[name] for name in ("vllm", "sglang", "tgi", "trtllm"))
    assert "16 bits" not in said["llamacpp"]
    assert "than planned" not in quantized("int4", head_bits=16)["vllm"] + quantized("bf16")["vllm"]
    tied = engine_settings(planned("qwen3-0.6b", weights="int4"))["vllm"].notes
    assert any("stays in 16 bits: 0.16 GB less than planned" in note for note in tied)


def test_llamacpps_scales_are_counted_beside_the_plans() -> None:
    """Heads of 128: q8_0 takes 136 bytes where the plan has 130, q4_0 takes 72 where it has 68."""
    for kv, words in (("int8", "q8_0 keeps a scale for every 32 numbers: the pool is larger than planned by 5 %"), ("int4", "by 6 %")):
        settings = engine_settings(planned("llama-3.1-8b", "h200", kv=kv))["llamacpp"]
        assert any(words in note for note in settings.notes)


def test_several_devices() -> None:
    given = flags(planned("llama-3.1-70b", num_devices=4))
    for flag, engine in (
        ("--tensor-parallel-size 4", "vllm"),
        ("--tp-size 4", "sglang"),
        ("--num-shard 4", "tgi"),
        ("--tp_size 4", "trtllm"),
        ("--split-mode tensor --tensor-split 1,1,1,1", "llamacpp"),
    ):
        assert flag in given[engine]
