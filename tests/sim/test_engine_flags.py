"""Five engines' flags: whatever an engine's fraction is a share of, it comes to the same KV pool, and nothing is left out silently."""

from typing import Any

import pytest

from minserve.sim.devices import DEVICES
from minserve.sim.engine_flags import TGI_KV_SHARE, engine_settings, flags, memory_fractions
from minserve.sim.planner import Plan, plan
from minserve.sim.shapes import BITS, SHAPES

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


@pytest.mark.parametrize("kv", BITS)
@pytest.mark.parametrize("weights", BITS)
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
    assert "no flag turns weights into int4: MODEL must be a checkpoint in that format" in settings["vllm"].notes
    assert "int8 keys and values do not exist here; fp8 takes as many bytes" in settings["sglang"].notes
    assert "--quantize awq" in settings["tgi"].flags
    assert "--cache-type-k q8_0" in settings["llamacpp"].flags and settings["llamacpp"].command.endswith("Q4_K_M.gguf")


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
