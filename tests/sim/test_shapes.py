"""Parameter counts and KV sizes, held against what is published, from the zoo and from configs of many families."""

import json
from pathlib import Path
from typing import Any

import pytest

from minserve.sim.shapes import SHAPES, ModelShape, UnknownModel, bits_of, load_shape, shape_from_config
from minserve.sim.weight_formats import parse_weights

PUBLISHED = {  # parameters, in 1e9
    "llama-2-7b": 6.738,
    "llama-2-13b": 13.016,
    "llama-2-70b": 68.98,
    "llama-3.1-8b": 8.030,
    "llama-3.1-70b": 70.55,
    "llama-3.1-405b": 405.85,
    "qwen2.5-7b": 7.616,
    "mixtral-8x7b": 46.70,
    "opt-13b": 12.85,
    "smollm2-135m": 0.1345,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_the_zoo_are_the_published_ones(name: str):
    assert SHAPES[name].num_parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=1e-3)


def test_of_experts_all_are_stored_and_few_are_met():
    mixtral = SHAPES["mixtral-8x7b"]
    assert mixtral.num_active_parameters / 1e9 == pytest.approx(12.88, rel=1e-3)
    assert SHAPES["qwen3-30b-a3b"].num_active_parameters / 1e9 == pytest.approx(3.35, rel=0.01)


def test_a_token_meets_all_weights_of_a_dense_model():
    shape = SHAPES["llama-2-13b"]
    assert shape.num_active_parameters == shape.num_parameters
    assert shape.num_layer_parameters + 2 * shape.num_output_parameters == shape.num_parameters


def test_a_tied_output_layer_is_stored_once_and_multiplied_all_the_same():
    shape = SHAPES["smollm2-135m"]
    assert shape.num_layer_parameters + shape.num_output_parameters == shape.num_parameters


# --- what a token keeps ------------------------------------------------------------------------------


def test_kv_bytes_of_a_13b():
    shape = SHAPES["llama-2-13b"]
    assert [shape.kv_bytes_per_token(kv) for kv in ("fp32", "bf16", "int8", "int4")] == [1_638_400, 819_200, 416_000, 217_600]
    assert shape.kv_bytes(2048) == 2048 * 819_200  # 1.68 GB


def test_grouped_heads_keep_less_by_their_ratio():
    for name, ratio in (("llama-3.1-8b", 4), ("llama-2-70b", 8), ("qwen2.5-7b", 7)):
        shape = SHAPES[name]
        all_heads = 2 * shape.num_layers * shape.num_heads * shape.head_dim * 2
        assert all_heads == ratio * shape.kv_bytes_per_token()


def test_layers_with_a_window_stop_growing_at_it():
    shape = shape_from_config({**GEMMA_2, "layer_types": ["sliding_attention", "full_attention"] * 21})
    per_layer = shape.kv_bytes_per_token() // 42
    assert shape.kv_bytes(1000) == 42 * 1000 * per_layer
    assert shape.kv_bytes(10_000) == 21 * (10_000 + 4096) * per_layer


# --- bytes of weights -----------------------------------------------------------------------------

FORMATS = [
    "-".join(part for part in (method, f"int{bits}", group, middle) if part)
    for method in ("", "rtn", "gptq", "awq")
    for bits in (8, 4)
    for group in ("", "g32", "g64", "g128", "channel")
    for middle in ("", "sym", "asym")
    if (method, bits) != ("awq", 8)
]


def test_plain_weights_are_parameters_times_bytes():
    for shape in SHAPES.values():
        assert [shape.weight_bytes(name) for name in ("fp32", "bf16", "fp16")] == [n * shape.num_parameters for n in (4, 2, 2)]
    shape, plain = SHAPES["llama-2-7b"], 2 * 32_000 * 4096
    assert shape.weight_bytes("fp8") == 2 * plain + shape.num_parameters - plain  # other engines: tables as they are


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_weights_count_the_scales_and_zeros_of_every_matrix(name: str):
    """The default model matrix by matrix, by the formula of the format; 576 inputs are 4.5 groups of 128."""
    shape, format = SHAPES["smollm2-135m"], parse_weights(name)
    layer = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)]
    matrices = 30 * sum(format.num_bytes(*matrix) for matrix in layer)
    table = 49_152 * 576
    assert shape.layer_bytes(name) == matrices
    assert shape.weight_bytes(name) == matrices + 2 * table + (table + 2 * 49_152)  # bf16 to look up, int8 to multiply with
    assert shape.weight_bytes(name, head_bits=16) == matrices + 2 * table  # other engines: the tied table is both


def test_an_untied_output_layer_is_quantized_to_8_bits_and_elsewhere_left_in_16():
    shape, table = SHAPES["llama-2-7b"], 32_000 * 4096
    assert shape.weight_bytes("int4") == shape.layer_bytes("int4") + 2 * table + table + 2 * 32_000
    assert shape.weight_bytes("int4", head_bits=16) == shape.layer_bytes("int4") + 4 * table
    assert shape.weight_bytes("bf16", head_bits=16) == shape.weight_bytes("bf16")  # nothing to choose


def test_codes_and_the_scales_beside_them_on_paper():
    """Of 4096 inputs: int8 has one scale of 2 bytes, int4 64 groups of 4 bytes."""
    shape = SHAPES["llama-2-7b"]
    outputs = 4 * 4096 + 2 * 11_008  # with 4096 inputs; `down` has 11,008 inputs for 4096 outputs, in 172 groups
    codes = shape.num_parameters - 2 * 32_000 * 4096
    assert shape.layer_bytes("int8") == codes + 32 * 2 * (outputs + 4096)
    assert shape.layer_bytes("int4") == codes // 2 + 32 * 4 * (64 * outputs + 172 * 4096)


def test_experts_and_latents_count_by_their_own_matrices():
    format = parse_weights("int4-g128")
    moe = shape_from_config(QWEN3_MOE)
    expert = 2 * format.num_bytes(768, 2048) + format.num_bytes(2048, 768)
    assert moe.expert_bytes("int4-g128") == expert
    attention = format.num_bytes(4096, 2048) + 2 * format.num_bytes(512, 2048) + format.num_bytes(2048, 4096)
    assert moe.layer_bytes("int4-g128") == 48 * (attention + 128 * expert)
    mla = shape_from_config(DEEPSEEK_V3)
    sizes = [(1536, 7168), (24_576, 1536), (576, 7168), (32_768, 512), (7168, 16_384)]
    assert sorted(mla.attention_matrices) == sorted(sizes)
    dense, routed = [(18_432, 7168)] * 2 + [(7168, 18_432)], [(2048, 7168)] * 2 + [(7168, 2048)]
    counts = ((61, sizes), (3, dense), (58 * 257, routed))
    assert mla.layer_bytes("int4") == sum(count * parse_weights("int4").num_bytes(*m) for count, matrices in counts for m in matrices)


def test_an_unknown_weight_format_lists_what_there_is():
    with pytest.raises(ValueError, match="weight format 'int3' is not known; examples: int8, int4, .*; not quantized are fp32, bf16"):
        SHAPES["llama-2-7b"].weight_bytes("int3")


def test_an_unknown_number_format_lists_the_known_ones():
    with pytest.raises(ValueError, match="'int3' is not known; known: fp32, bf16"):
        bits_of("int3")


# --- configs -----------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50_257, "n_positions": 1024}
OPT = {
    "model_type": "opt",
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "ffn_dim": 20_480,
    "vocab_size": 50_272,
}
FALCON_7B = {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "vocab_size": 65_024}
FALCON_7B |= {"multi_query": True, "new_decoder_architecture": False}
FALCON_40B = {"model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128, "vocab_size": 65_024}
FALCON_40B |= {"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 8}
GEMMA_2 = {
    "model_type": "gemma2",
    "hidden_size": 3584,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "intermediate_size": 14_336,
    "vocab_size": 256_000,
    "sliding_window": 4096,
}
GEMMA_3 = {  # its text part leaves the heads and the vocabulary out
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "intermediate_size": 10_240,
        "sliding_window": 1024,
    },
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "vocab_size": 32_000, "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151_936,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 48,
    "tie_word_embeddings": False,
}
LLAMA_4_TEXT = {
    "model_type": "llama4_text",
    "hidden_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "attention_chunk_size": 8192,
    "vocab_size": 202_048,
}
SCOUT = {"model_type": "llama4", "text_config": LLAMA_4_TEXT, "vision_config": {"hidden_size": 1408}, "tie_word_embeddings": False}
MAVERICK = {**SCOUT, "text_config": {**LLAMA_4_TEXT, "num_local_experts": 128, "interleave_moe_layer_step": 2}}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "vocab_size": 129_280,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, tuple[dict[str, Any], float, float]] = {  # config, all and active parameters in 1e9, as their makers count them
    "llama-3.1-8b": (LLAMA, 8.03, 8.03),
    "gpt2": (GPT2, 0.1244, 0.1244),
    "opt-13b": (OPT, 12.85, 12.85),
    "falcon-7b": (FALCON_7B, 6.922, 6.922),
    "falcon-40b": (FALCON_40B, 41.3, 41.3),
    "gemma-2-9b": (GEMMA_2, 9.24, 9.24),
    "gemma-3-4b": (GEMMA_3, 3.88, 3.88),
    "mixtral-8x7b": (MIXTRAL, 46.70, 12.88),
    "qwen3-30b-a3b": (QWEN3_MOE, 30.5, 3.35),
    "llama-4-scout": (SCOUT, 107.8, 17.2),
    "llama-4-maverick": (MAVERICK, 400.7, 17.2),
    "deepseek-v3": (DEEPSEEK_V3, 671.0, 37.6),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_from_configs_of_all_kinds(name: str):
    config, total, active = CONFIGS[name]
    shape = shape_from_config(config, name)
    assert shape.name == name
    assert shape.num_parameters / 1e9 == pytest.approx(total, rel=0.01)
    assert shape.num_active_parameters / 1e9 == pytest.approx(active, rel=0.01)


def test_a_latent_is_all_that_a_token_keeps():
    shape = shape_from_config(DEEPSEEK_V3)
    assert (shape.latent_size, shape.query_head_dim, shape.head_dim) == (576, 192, 128)
    assert shape.kv_bytes_per_token() == 61 * 576 * 2
    # the matrices of one layer's attention, one by one: queries down and up, latent down and up, output
    matrices = 7168 * 1536, 1536 * 128 * 192, 7168 * 576, 512 * 128 * (128 + 128), 128 * 128 * 7168
    without = ModelShape(**{**_fields(shape), "num_layers": 60, "num_dense_layers": 2})
    dense_mlp = 3 * 7168 * 18_432
    assert shape.num_parameters - without.num_parameters == sum(matrices) + dense_mlp


def test_queries_without_a_rank_are_made_directly():
    shape = shape_from_config({**DEEPSEEK_V3, "q_lora_rank": None})
    ranked = shape_from_config(DEEPSEEK_V3)
    assert shape.num_parameters - ranked.num_parameters == 61 * (7168 * 128 * 192 - 1536 * (7168 + 128 * 192))


def test_heads_of_many_configs():
    kv_heads = {name: shape_from_config(config).num_kv_heads for name, (config, _, _) in CONFIGS.items()}
    assert (kv_heads["gpt2"], kv_heads["falcon-7b"], kv_heads["falcon-40b"], kv_heads["gemma-3-4b"]) == (12, 1, 8, 4)
    assert shape_from_config(QWEN3_MOE).head_dim == 128  # which is not hidden_size / heads


@pytest.mark.parametrize(
    ("config", "window", "num_window_layers"),
    [
        (GEMMA_2, 4096, 21),
        (GEMMA_3, 1024, 29),
        ({**LLAMA, "model_type": "mistral", "sliding_window": 4096}, 4096, 32),
        ({**LLAMA, "model_type": "qwen2", "sliding_window": 32_768, "use_sliding_window": False, "max_window_layers": 28}, None, 0),
        ({**LLAMA, "model_type": "qwen2", "sliding_window": 32_768, "use_sliding_window": True, "max_window_layers": 28}, 32_768, 4),
        ({**LLAMA, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 16}, 128, 16),
        (SCOUT, 8192, 36),
        (MIXTRAL, None, 0),
    ],
)
def test_layers_that_see_a_window(config: dict[str, Any], window: int | None, num_window_layers: int):
    shape = shape_from_config(config)
    assert (shape.window, shape.num_window_layers) == (window, num_window_layers)


@pytest.mark.parametrize("more", [{"full_attention_interval": 4}, {"layer_types": [*["linear_attention"] * 3, "full_attention"] * 8}])
def test_layers_with_linear_attention_keep_no_kv(more: dict[str, Any]):
    shape = shape_from_config({**LLAMA, **more})
    assert (shape.num_stateless_layers, shape.num_kv_layers) == (24, 8)
    assert shape.kv_bytes_per_token() == 8 * 2 * 8 * 128 * 2


def test_tied_embeddings_by_word_or_by_family():
    tied = {name: shape_from_config(config).tied_embeddings for name, (config, _, _) in CONFIGS.items()}
    assert {name for name, is_tied in tied.items() if is_tied} == {
        *("gpt2", "opt-13b", "falcon-7b", "falcon-40b", "gemma-2-9b", "gemma-3-4b")
    }
    assert shape_from_config({**LLAMA, "tie_word_embeddings": True}).tied_embeddings


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_missing_size_is_named(missing: str):
    with pytest.raises(ValueError, match=f"the config has no {missing} "):
        shape_from_config({name: value for name, value in LLAMA.items() if name != missing})


# --- finding a shape ---------------------------------------------------------------------------------


def test_a_shape_by_name_file_or_folder(tmp_path: Path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    assert load_shape("Llama-2-13B") is SHAPES["llama-2-13b"]
    for place in (folder, folder / "config.json"):
        shape = load_shape(place)
        assert shape.name == "my-model" and {**_fields(shape), "name": "llama-3.1-8b"} == _fields(SHAPES["llama-3.1-8b"])


def test_an_unknown_model_lists_the_known_ones():
    with pytest.raises(UnknownModel, match="no model 'llama-9'.* or one of smollm2-135m, .*llama-2-13b"):
        load_shape("llama-9")


@pytest.mark.parametrize(("text", "words"), [("{", "Expecting property name"), ("{}", "the config has no hidden_size"), ("[]", "")])
def test_a_broken_config_names_the_file(tmp_path: Path, text: str, words: str):
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"config.json: .*{words}"):
        load_shape(tmp_path)


def _fields(shape: ModelShape) -> dict[str, Any]:
    return {name: getattr(shape, name) for name in ModelShape.__slots__}
