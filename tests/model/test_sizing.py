import warnings

import pytest
import torch

from minserve.model import sizing
from minserve.model.sizing import (
    PoolTooSmall,
    blocks_for,
    choose_device,
    choose_dtype,
    dtype_for_capability,
    free_bytes,
    plan_pool,
    pool_bytes_left,
    wants_weight_copy,
)
from tests.model.tiny_net import tiny_config

CPU = torch.device("cpu")
GIB = 2**30


def plan(**changes):
    """A model of 28 layers, 8 KV heads of 128, two bytes, 40,960 positions: 112 KiB a token."""
    config = tiny_config(num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128, max_positions=40_960)
    return plan_pool(config, **{"block_size": 16, "dtype": torch.bfloat16, "device": CPU, **changes})


def test_case_184_what_was_missing_at_the_start_is_not_ours():
    assert pool_bytes_left(int(22.5 * GIB), 1.0, 10 * GIB) == int(12.5 * GIB)
    assert pool_bytes_left(int(22.5 * GIB), 0.4, 10 * GIB) == 0


def test_case_184_a_fraction_is_taken_of_free_memory(monkeypatch):
    monkeypatch.setattr(sizing, "free_bytes", lambda device: 20 * GIB)
    assert plan(memory_fraction=0.5).num_blocks == 10 * GIB // (16 * 112 * 1024)


def test_a_fraction_takes_no_more_than_the_running_requests_can_use(monkeypatch):
    monkeypatch.setattr(sizing, "free_bytes", lambda device: 4096 * GIB)
    assert plan(memory_fraction=0.5, max_model_len=1000, max_running=4).num_blocks == 4 * 63


def test_case_185_a_length_that_was_asked_for_and_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(PoolTooSmall, match=r"298 blocks of 16 hold 4768 tokens.* max_model_len 40960 needs 2560 blocks") as error:
        plan(kv_cache_bytes=int(0.51 * GIB), max_model_len=40_960)
    assert (error.value.num_blocks, error.value.max_tokens) == (298, 4768)


def test_case_185_a_length_that_was_not_asked_for_is_lowered_with_a_warning():
    with pytest.warns(UserWarning, match="max_model_len is lowered to 4768"):
        got = plan(kv_cache_bytes=int(0.51 * GIB))
    assert (got.num_blocks, got.max_model_len, got.num_full_requests) == (298, 4768, 1)


def test_case_185_blocks_of_two_plans():
    assert blocks_for(32_768, 16) * 1 == blocks_for(8192, 16) * 4 == 2048


def test_a_pool_without_a_single_block_is_refused():
    with pytest.raises(PoolTooSmall, match="0 blocks of 16"):
        plan(kv_cache_bytes=1000)


def test_the_line_says_what_was_decided():
    got = plan(num_blocks=1024, max_model_len=4096)
    words = "KV pool: 1,024 blocks of 16 = 16,384 tokens in bf16 (1,792 MiB), holds 4 requests of max_model_len 4,096"
    assert got.describe() == words
    assert (got.num_tokens, got.num_bytes) == (16_384, 1792 * 2**20)


def test_a_plan_that_fits_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan(num_blocks=2560).max_model_len == 40_960
        assert plan(num_blocks=2560, kv_cache_dtype="fp32").bytes_per_token == 2 * 112 * 1024


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_blocks": 5, "kv_cache_bytes": 5}, "not both"),
        ({"num_blocks": 0}, "num_blocks must be an integer >= 1, got 0"),
        ({"kv_cache_bytes": -1}, "kv_cache_bytes must be an integer >= 1, got -1"),
        ({"block_size": 2.5}, "block_size must be an integer >= 1, got 2.5"),
        ({"max_model_len": 0, "num_blocks": 5}, "max_model_len must be an integer >= 1, got 0"),
        ({"memory_fraction": 1.5}, "at most 1, got 1.5"),
        ({"memory_fraction": float("nan")}, "got nan"),
        ({"num_blocks": 5, "kv_cache_dtype": "int3"}, "'int3' is not known"),
        ({"num_blocks": 5, "max_model_len": 50_000}, "50000 is beyond the model's 40960 positions"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=words):
        plan(**changes)


def test_free_memory_is_a_number_of_bytes():
    assert 2**20 < free_bytes(CPU) < 2**60


def test_a_control_group_limits_what_is_free(monkeypatch, tmp_path):
    values = {"memory.max": 3 * GIB, "memory.current": 1 * GIB}
    monkeypatch.setattr(sizing, "_read_int", lambda path: values[path.name])
    monkeypatch.setattr(sizing, "_free_system_bytes", lambda: 20 * GIB)
    assert free_bytes(CPU) == 2 * GIB
    values["memory.max"] = 100 * GIB
    assert free_bytes(CPU) == 20 * GIB


def test_files_without_a_number_are_no_limit(tmp_path):
    (tmp_path / "memory.max").write_text("max\n", encoding="utf-8")
    assert sizing._read_int(tmp_path / "memory.max") is None
    assert sizing._read_int(tmp_path / "missing") is None


def test_compute_types_by_name():
    assert [choose_dtype(n, CPU) for n in ("fp32", "bf16", "fp16")] == [torch.float32, torch.bfloat16, torch.float16]
    with pytest.raises(ValueError, match="'fp8' is not known; known: auto, fp32, bf16, fp16"):
        choose_dtype("fp8", CPU)


@pytest.mark.parametrize(("bf16_s", "want"), [(0.1, torch.bfloat16), (0.3, torch.float32)])
def test_auto_takes_the_faster_type(monkeypatch, bf16_s, want):
    monkeypatch.setattr(sizing, "trial_s", lambda dtype: bf16_s if dtype == torch.bfloat16 else 0.2)
    assert choose_dtype("auto", CPU) == want


def test_the_trial_is_short():
    assert 0 < sizing.trial_s(torch.float32) < 0.3


def test_case_193_cards_that_only_emulate_bf16_get_fp16():
    assert dtype_for_capability((7, 5)) == torch.float16
    assert dtype_for_capability((8, 0)) == torch.bfloat16
    assert dtype_for_capability((9, 0)) == torch.bfloat16


def test_device_by_name():
    assert choose_device("cpu") == CPU
    assert choose_device("auto").type in ("cpu", "cuda")


def test_a_copy_of_weights_is_kept_where_it_takes_a_tenth_of_the_free_memory(monkeypatch):
    config = tiny_config()
    needed = config.num_parameters * 2
    for free, expected in ((10 * needed, True), (10 * needed - 10, False)):
        monkeypatch.setattr(sizing, "free_bytes", lambda _, free=free: free)
        assert wants_weight_copy("auto", config, torch.bfloat16, CPU) == expected
        assert wants_weight_copy(True, config, torch.bfloat16, CPU) is True
        assert wants_weight_copy(False, config, torch.bfloat16, CPU) is False
    card = torch.device("cuda", 0)
    assert wants_weight_copy("auto", config, torch.bfloat16, card) is False
    with pytest.raises(ValueError, match="weight_copy=True is for CPUs, this is cuda:0"):
        wants_weight_copy(True, config, torch.bfloat16, card)
    with pytest.raises(ValueError, match="weight_copy must be True, False or 'auto', got 'yes'"):
        wants_weight_copy("yes", config, torch.bfloat16, CPU)
