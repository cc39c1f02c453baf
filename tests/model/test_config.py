import json

import pytest

from minserve.model.config import ModelConfig, UnsupportedModel, rope_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


def config(**changes) -> ModelConfig:
    return ModelConfig.from_dict({**LLAMA, **changes})


def test_llama_and_its_defaults(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    c = ModelConfig.from_directory(tmp_path)
    assert (c.num_heads, c.num_kv_heads, c.head_dim, c.num_layers) == (4, 2, 16, 2)
    assert (c.norm_eps, c.rope.theta, c.rope.kind, c.tied_embeddings) == (1e-5, 10_000.0, "default", False)
    assert (c.qkv_bias, c.output_bias, c.mlp_bias, c.qk_norm) == (False, False, False, False)
    assert c.windows == (None, None)


def test_num_parameters_counts_every_weight():
    c = config(tie_word_embeddings=True)
    layer = (4 + 2 + 2) * 16 * 64 + 64 * 64 + 3 * 64 * 96 + 2 * 64
    assert c.num_parameters == 320 * 64 + 2 * layer + 64
    assert config().num_parameters == c.num_parameters + 320 * 64


def test_no_kv_heads_means_one_per_query_head():
    assert config(num_key_value_heads=None).num_kv_heads == 4


def test_biases_by_family():
    llama = config(attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)
    qwen2 = config(architectures=["Qwen2ForCausalLM"])
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = config(architectures=["Qwen3ForCausalLM"])
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 128)


def test_mistral_window_holds_for_all_layers():
    assert config(architectures=["MistralForCausalLM"], sliding_window=7).windows == (7, 7)
    assert config(architectures=["MistralForCausalLM"], sliding_window=None).windows == (None, None)
    assert config(architectures=["MistralForCausalLM"]).windows == (4096, 4096)


def test_qwen_window_holds_for_the_layers_named():
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 7}
    assert config(**qwen, use_sliding_window=False, max_window_layers=0).windows == (None, None)
    assert config(**qwen, use_sliding_window=True, max_window_layers=1).windows == (None, 7)
    kinds = ["sliding_attention", "full_attention"]
    assert config(**qwen, use_sliding_window=True, layer_types=kinds).windows == (7, None)


def test_case_70_query_heads_that_kv_heads_cannot_share_are_refused():
    with pytest.raises(UnsupportedModel, match="6 query heads cannot share 4 KV heads"):
        config(num_attention_heads=6, num_key_value_heads=4, head_dim=16)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": []}, r"\(none named\)"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs a factor"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(changes, name):
    with pytest.raises(UnsupportedModel, match=name):
        config(**changes)


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "foo"])
@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_case_76_unknown_rope_types_are_refused_by_name(kind, spelling):
    with pytest.raises(UnsupportedModel, match=kind):
        rope_config({"rope_scaling": {spelling: kind, "factor": 4.0}})


def test_case_76_default_null_and_missing_mean_unscaled():
    for values in ({}, {"rope_scaling": None}, {"rope_scaling": {"rope_type": "default"}}, {"rope_parameters": {"rope_type": "default"}}):
        assert (rope_config(values).kind, rope_config(values).factor) == ("default", 1.0)


def test_case_74_both_spellings_are_read():
    numbers = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    old = rope_config({"rope_theta": 500_000.0, "rope_scaling": {"type": "llama3", **numbers}})
    new = rope_config({"rope_parameters": {"rope_type": "llama3", "rope_theta": 500_000.0, **numbers}})
    assert old == new
    assert (old.kind, old.theta, old.factor, old.original_max_positions) == ("llama3", 500_000.0, 32.0, 8192)


def test_yarn_factor_follows_from_the_lengths_where_it_is_missing():
    rope = rope_config({"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 1024}})
    assert rope.factor == 4.0
