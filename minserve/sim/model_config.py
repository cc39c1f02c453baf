"""The sizes of a transformer out of a Hugging Face config.json of whatever family.

Why: families name the same sizes differently and leave out what their code has as a default. The names are gathered here, so that
nothing else needs to know them; also of models that our decoder cannot run: experts (MoE), one latent per token (MLA), windows.

Invariant: what is returned are fields of `shapes.ModelShape`, and a size that is nowhere to be found is an error that names it.

Taught in notebook 01.
"""

from collections.abc import Mapping
from typing import Any

# Families whose MLP is up and down without a gate.
TWO_MATRIX_FAMILIES = {"gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "mpt", "phi", "starcoder2", "gpt_bigcode"}


# What configs of a family leave out, since it is the same for all its members or the default of their code.
LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "sliding_window_pattern": 6,
    },
    "gemma2": {"sliding_window_pattern": 2},
    "llama4_text": {"n_shared_experts": 1, "sliding_window_pattern": 4},
}


def fields_from_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ModelShape, its name left out. A model with several parts (vision and text) is read by its text part.

    Raises ValueError for a size that is missing.
    """
    for part in ("text_config", "llm_config", "language_config"):
        if isinstance(values.get(part), Mapping):
            return fields_from_config({**values[part], "tie_word_embeddings": _tied(values[part], values)})
    values = {**LEFT_OUT.get(str(values.get("model_type")), {}), **values}
    hidden, heads = _size(values, "hidden_size", "n_embd", "n_embed", "d_model"), _size(values, "num_attention_heads", "n_head", "n_heads")
    layers = _size(values, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    return dict(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_num_kv_heads(values, heads),
        intermediate_size=int(
            _first(values, "intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size") or 4 * hidden
        ),
        vocab_size=_size(values, "vocab_size", "padded_vocab_size"),
        max_positions=int(_first(values, "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len") or 4096),
        tied_embeddings=_tied(values),
        num_mlp_matrices=2 if values.get("model_type") in TWO_MATRIX_FAMILIES else 3,
        **{"head_dim": int(values.get("head_dim") or hidden // heads), **_latent(values)},
        **_experts(values, layers),
        **_attention_kinds(values, layers),
    )


def _first(values: Mapping[str, Any], *names: str) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)


def _size(values: Mapping[str, Any], *names: str) -> int:
    found = _first(values, *names)
    if found is None:
        raise ValueError(f"the config has no {names[0]} (nor {', '.join(names[1:]) or 'another name for it'})")
    return int(found)


def _num_kv_heads(values: Mapping[str, Any], num_heads: int) -> int:
    if values.get("multi_query") and not values.get("new_decoder_architecture"):  # falcon-7b, starcoder
        return 1
    return int(_first(values, "num_key_value_heads", "num_kv_heads", "multi_query_group_num") or num_heads)


def _tied(*configs: Mapping[str, Any]) -> bool:
    """The families that leave the word out tie by default only where they are old (GPT-2, OPT, Falcon) or of Gemma's line."""
    for values in configs:
        if "tie_word_embeddings" in values:
            return bool(values["tie_word_embeddings"])
    kind = str(configs[0].get("model_type", ""))
    return kind in {"gpt2", "opt", "bloom", "falcon", "mpt", "starcoder2", "gpt_bigcode"} or kind.startswith("gemma")


def _latent(values: Mapping[str, Any]) -> dict[str, int]:
    """MLA: a token keeps one latent and one rotated key for all heads."""
    if not values.get("kv_lora_rank"):
        return {}
    rotary = _size(values, "qk_rope_head_dim")
    return {
        "head_dim": _size(values, "v_head_dim"),
        "key_size": _size(values, "qk_nope_head_dim") + rotary,
        "latent_size": _size(values, "kv_lora_rank") + rotary,
        "rotary_size": rotary,
        "query_rank": int(values.get("q_lora_rank") or 0),
    }


def _experts(values: Mapping[str, Any], num_layers: int) -> dict[str, int]:
    num_experts = int(_first(values, "num_local_experts", "num_experts", "n_routed_experts") or 0)
    if num_experts <= 1:
        return {}
    sparse_every = int(_first(values, "decoder_sparse_step", "interleave_moe_layer_step") or 1)
    num_dense = int(values.get("first_k_dense_replace") or 0) or len(values.get("mlp_only_layers") or ())
    if sparse_every > 1:
        num_dense = num_layers - num_layers // sparse_every
    expert_size = int(_first(values, "moe_intermediate_size", "intermediate_size"))
    shared_size = int(values.get("shared_expert_intermediate_size") or 0)
    return {
        "num_experts": num_experts,
        "num_active_experts": int(_first(values, "num_experts_per_tok", "num_experts_per_token", "top_k") or 1),
        "num_shared_experts": int(values.get("n_shared_experts") or 0) or -(-shared_size // expert_size),
        "expert_size": expert_size,
        "num_dense_layers": num_dense,
    }


def _attention_kinds(values: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """How many layers see a window only, and how many keep no KV (linear attention, state space)."""
    window = _first(values, "sliding_window", "attention_chunk_size")
    kinds = values.get("layer_types")
    if kinds:
        stateless = sum(kind not in ("full_attention", "sliding_attention", "chunked_attention") for kind in kinds)
        windowed = sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
    else:
        every = int(values.get("full_attention_interval") or 1)
        stateless = num_layers - num_layers // every if every > 1 else 0
        pattern = int(values.get("sliding_window_pattern") or 0)
        windowed = num_layers - num_layers // pattern if pattern else num_layers if values.get("model_type") == "mistral" and window else 0
        if values.get("use_sliding_window"):
            windowed = num_layers - int(values.get("max_window_layers") or 0)
    if not window or not windowed:
        return {"num_stateless_layers": stateless}
    return {"window": int(window), "num_window_layers": windowed, "num_stateless_layers": stateless}
