"""One plan in the flags of five engines that serve models in production.

Why: all of them have the same few knobs under other names, and one trap: a "memory fraction" of 0.9 is a share of something else in
each. What gives the same KV pool in every engine is worked out here from the same budget:

    vLLM          share of the device's memory that weights, activations, runtime and KV take together
    SGLang        share of the memory free at start that weights and KV take together
    TensorRT-LLM  share of what weights, activations and runtime leave that KV takes
    TGI           share of the device's memory that it may use at all; of what it finds free then, KV gets 90 %
    llama.cpp     none: the pool is given in tokens

Names are those of vLLM 0.33, SGLang 0.5.23, TGI's last commit (January 2026), TensorRT-LLM 1.4 (trtllm-serve) and llama.cpp's
server of 2026; they were read in documentation and sources, not run here.

Quantized weights are a checkpoint's own business: `minserve quantize` writes the layouts of GPTQ and AWQ, of which vLLM and SGLang read
the format without a flag. An output layer in 8 bits is not among them: it stays in 16 there, and the note says what that costs.

Invariant: what an engine has no flag for is said in words, never left out silently.

Taught in notebook 14.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from minserve.sim.planner import Plan
from minserve.sim.shapes import bits_of
from minserve.sim.weight_formats import WeightFormat, quantized_format

TGI_KV_SHARE = 0.9  # TGI_WIGGLE_ROOM: of the memory that is free after the trial prompt
TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

# Quantized KV formats in each engine's words. Plain formats are not listed: KV is kept in the compute type ("auto"), but for llama.cpp.
KV_NAMES: Mapping[str, Mapping[str, str]] = {
    "vllm": {"fp8": "fp8", "int8": "int8_per_token_head", "int4": "int4_per_token_head"},
    "sglang": {"fp8": "fp8_e4m3"},
    "tgi": {"fp8": "fp8_e4m3fn"},
    "trtllm": {"fp8": "fp8"},
    "llamacpp": {"fp32": "f32", "bf16": "bf16", "fp16": "f16", "int8": "q8_0", "int4": "q4_0"},
}
# Flags that quantize weights as they are loaded.
LOADING_FLAGS: Mapping[tuple[str, str], str] = {
    ("vllm", "fp8"): "--quantization fp8",
    ("sglang", "fp8"): "--quantization fp8",
    ("tgi", "fp8"): "--quantize fp8",
    ("tgi", "int8"): "--quantize eetq",
}
NO_DTYPE = {("tgi", "fp32"), ("trtllm", "fp32"), ("trtllm", "bf16"), ("trtllm", "fp16")}  # engines without a flag for it
GGUF_NAMES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16", "fp8": "Q8_0"}
QUANTIZED_GGUF_NAMES = {8: "Q8_0", 4: "Q4_K_M"}
GGUF_BITS = {"Q8_0": ", 8.5 bits a weight", "Q4_K_M": ", about 4.8 bits a weight"}
BLOCK_SCALES = {"q8_0": 2 / 32, "q4_0": 2 / 32}  # bytes of scales a number: llama.cpp keeps 16 bits for every 32 numbers


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The command, its flags, and in words what flags cannot say."""

    title: str
    command: str
    flags: tuple[str, ...]
    notes: tuple[str, ...]


def flags(plan: Plan) -> dict[str, list[str]]:
    """The flags alone, by engine."""
    return {name: list(settings.flags) for name, settings in engine_settings(plan).items()}


def engine_settings(plan: Plan) -> dict[str, EngineSettings]:
    """The plan in the flags of every engine."""
    return {"vllm": _vllm(plan), "sglang": _sglang(plan), "tgi": _tgi(plan), "trtllm": _trtllm(plan), "llamacpp": _llamacpp(plan)}


def memory_fractions(plan: Plan) -> dict[str, float]:
    """The number that each engine must be given for the same pool. Above 1, it cannot be had there.

    TGI's trial prompt holds keys and values of its own while it measures; they go to the pool afterwards.
    """
    b = plan.budget
    used = b.weight_bytes + b.activation_bytes + b.runtime_bytes
    trial_bytes = min(b.kv_bytes, plan.token_budget * b.block_bytes / plan.block_size)
    return {
        "vllm": (used + b.kv_bytes) / b.total_bytes,
        "sglang": (b.weight_bytes + b.kv_bytes) / b.total_bytes,
        "trtllm": b.kv_bytes / (b.total_bytes - used),
        "tgi": (used + trial_bytes + (b.kv_bytes - trial_bytes) / TGI_KV_SHARE) / b.total_bytes,
    }


def _vllm(plan: Plan) -> EngineSettings:
    return EngineSettings(
        title="vLLM",
        command="vllm serve MODEL",
        flags=(
            f"--gpu-memory-utilization {memory_fractions(plan)['vllm']:.3f}",
            f"--max-model-len {plan.context_tokens}",
            f"--max-num-seqs {_batch(plan)}",
            f"--max-num-batched-tokens {plan.token_budget}",
            f"--block-size {plan.block_size}",
            f"--tensor-parallel-size {plan.cost.num_devices}",
            *_format_flags(plan, "vllm", "--dtype", "--kv-cache-dtype"),
        ),
        notes=(
            f"the fraction is of all memory; it measures its own activations. Exactly this pool: --num-gpu-blocks-override "
            f"{plan.budget.num_blocks}, or --kv-cache-memory-bytes {plan.budget.kv_bytes:.0f} (then the fraction is ignored)",
            *_format_notes(plan, "vllm"),
        ),
    )


def _sglang(plan: Plan) -> EngineSettings:
    return EngineSettings(
        title="SGLang",
        command="python -m sglang.launch_server --model-path MODEL",
        flags=(
            f"--mem-fraction-static {memory_fractions(plan)['sglang']:.3f}",
            f"--max-total-tokens {plan.num_kv_tokens}",
            f"--context-length {plan.context_tokens}",
            f"--max-running-requests {_batch(plan)}",
            f"--chunked-prefill-size {plan.token_budget}",
            "--enable-mixed-chunk",
            f"--page-size {plan.block_size}",
            f"--tp-size {plan.cost.num_devices}",
            *_format_flags(plan, "sglang", "--dtype", "--kv-cache-dtype"),
        ),
        notes=(
            "the fraction is of the memory free at start, for weights and KV; activations and graphs must fit into the rest",
            "without --enable-mixed-chunk prompts and decodes take turns; decodes come on top of the chunk's tokens",
            *_format_notes(plan, "sglang"),
        ),
    )


def _tgi(plan: Plan) -> EngineSettings:
    fraction = memory_fractions(plan)["tgi"]
    too_much = (
        (f"this pool asks for {fraction:.3f} of the memory: raise TGI_WIGGLE_ROOM (0.9), or it will be smaller",) if fraction > 1 else ()
    )
    return EngineSettings(
        title="TGI (in maintenance mode since December 2025: for a new service choose another)",
        command="text-generation-launcher --model-id MODEL",
        flags=(
            f"--cuda-memory-fraction {min(1.0, fraction):.3f}",
            f"--max-batch-total-tokens {plan.num_kv_tokens}",
            f"--max-total-tokens {plan.context_tokens}",
            f"--max-input-tokens {plan.prompt_tokens}",
            f"--max-batch-size {_batch(plan)}",
            f"--max-batch-prefill-tokens {max(plan.token_budget, plan.prompt_tokens)}",
            f"--num-shard {plan.cost.num_devices}",
            *_format_flags(plan, "tgi", "--dtype", "--kv-cache-dtype"),
        ),
        notes=(
            "the fraction caps the process; KV gets 90 % of what is free under the cap after a trial prompt (environment: TGI_WIGGLE_ROOM)",
            "no flag for the block size nor for chunked prefill; prefix caching by the environment (PREFIX_CACHING)",
            *too_much,
            *_format_notes(plan, "tgi"),
        ),
    )


def _trtllm(plan: Plan) -> EngineSettings:
    return EngineSettings(
        title="TensorRT-LLM",
        command="trtllm-serve MODEL",
        flags=(
            f"--free_gpu_memory_fraction {memory_fractions(plan)['trtllm']:.3f}",
            f"--max_seq_len {plan.context_tokens}",
            f"--max_batch_size {_batch(plan)}",
            f"--max_num_tokens {plan.token_budget}",
            "--enable_chunked_prefill",
            f"--tp_size {plan.cost.num_devices}",
            *_format_flags(plan, "trtllm", None, "--kv_cache_dtype"),
        ),
        notes=(
            "the fraction is of what is free once weights are loaded and activations measured",
            f"in a YAML file for --config: kv_cache_config: {{tokens_per_block: {plan.block_size}, max_tokens: {plan.num_kv_tokens}}}",
            *_format_notes(plan, "trtllm"),
        ),
    )


def _llamacpp(plan: Plan) -> EngineSettings:
    kv, n, format = KV_NAMES["llamacpp"].get(plan.cost.kv), plan.cost.num_devices, quantized_format(plan.cost.weights)
    gguf = GGUF_NAMES[plan.cost.weights] if format is None else QUANTIZED_GGUF_NAMES[format.bits]
    return EngineSettings(
        title="llama.cpp server",
        command=f"llama-server -m MODEL-{gguf}.gguf",
        flags=(
            f"--ctx-size {plan.num_kv_tokens}",
            "--kv-unified",
            f"--parallel {_batch(plan)}",
            f"--batch-size {plan.token_budget}",
            f"--ubatch-size {plan.token_budget}",
            "--n-gpu-layers all",
            *((f"--cache-type-k {kv}", f"--cache-type-v {kv}", "--flash-attn on") if kv else ()),
            *((f"--split-mode tensor --tensor-split {','.join('1' * n)}",) if n > 1 else ()),
        ),
        notes=(
            "no memory fraction and no blocks: the pool is --ctx-size tokens, which --kv-unified lets all slots share",
            f"no flag limits one request to {plan.context_tokens} tokens; who is too much waits for a slot",
            f"the weights' format is the GGUF file's: {gguf}{GGUF_BITS.get(gguf, '')}",
            *(
                (f"{kv} keeps a scale for every 32 numbers: the pool is larger than planned by {100 * _llamacpp_excess(plan):.0f} %",)
                if kv in BLOCK_SCALES
                else ()
            ),
            *((f"{plan.cost.kv} keys and values do not exist here: the nearest is q8_0",) if kv is None else ()),
            *(("--split-mode tensor is experimental; row keeps all KV on one device",) if n > 1 else ()),
        ),
    )


def _llamacpp_excess(plan: Plan) -> float:
    """By what share llama.cpp's scales make keys and values larger than the plan's, which has fewer scales."""
    shape, kv = plan.cost.shape, plan.cost.kv
    own_bytes = shape.kv_numbers_per_token_layer * (bits_of(kv) / 8 + BLOCK_SCALES[KV_NAMES["llamacpp"][kv]])
    return own_bytes / shape.kv_bytes_per_token_layer(kv) - 1


def _batch(plan: Plan) -> int:
    """How many may run: the plan's batch, or one where not even that meets the targets."""
    return max(1, plan.batch)


def _compute_type(plan: Plan) -> str:
    """What the products run in: the weights' own type, or for quantized ones KV's, or bf16."""
    return next((name for name in (plan.cost.weights, plan.cost.kv) if name in TORCH_DTYPES), "bf16")


def _format_flags(plan: Plan, engine: str, dtype_flag: str | None, kv_flag: str) -> tuple[str, ...]:
    dtype, weights, kv = _compute_type(plan), _weight_flag(engine, plan.cost.weights), KV_NAMES[engine].get(plan.cost.kv)
    has_dtype = dtype_flag is not None and (engine, dtype) not in NO_DTYPE
    return (
        *((f"{dtype_flag} {TORCH_DTYPES[dtype]}",) if has_dtype else ()),
        *((weights,) if weights else ()),
        *((f"{kv_flag} {kv}",) if kv else ()),
    )


def _weight_flag(engine: str, weights: str) -> str | None:
    """The flag that quantizes weights at loading or, where an engine asks for it, names the checkpoint's layout."""
    format = quantized_format(weights)
    if format is None or (engine, format.name) in LOADING_FLAGS:
        return LOADING_FLAGS.get((engine, weights if format is None else format.name))
    return f"--quantize {_layout(format).lower()}" if engine == "tgi" else None


def _layout(format: WeightFormat) -> str:
    """The public layout in which `minserve quantize` saves a format."""
    return "AWQ" if format.method == "awq" else "GPTQ"


def _weight_notes(plan: Plan, engine: str) -> list[str]:
    """What quantized weights ask of the checkpoint, and where the engine's own bytes differ from the plan's."""
    cost, format = plan.cost, quantized_format(plan.cost.weights)
    if format is None:
        has_none = engine == "trtllm" and cost.weights == "fp8"
        return [f"no flag turns weights into {cost.weights}: MODEL must be a checkpoint in that format"] if has_none else []
    notes, layout = [], _layout(format)
    if engine == "trtllm":
        notes.append(f"no flag turns weights into {cost.weights}: MODEL must be a checkpoint that NVIDIA's Model Optimizer wrote")
    elif (engine, format.name) not in LOADING_FLAGS:
        flag = ", without a flag" if engine in ("vllm", "sglang") else ""
        notes.append(f"MODEL must be a checkpoint in the layout of {layout} ({cost.weights}), as minserve quantize writes it{flag}")
    if engine in ("vllm", "sglang") and layout == "GPTQ" and not format.symmetric:
        notes.append("its fast kernels (Marlin) read GPTQ only with zero in the middle: choose -sym, or AWQ, which has zeros of its own")
    more_bytes = (cost.shape.weight_bytes(cost.weights, 16) - cost.shape.weight_bytes(cost.weights, cost.head_bits)) / cost.num_devices
    if more_bytes:
        how = "more" if more_bytes > 0 else "less"
        notes.append(f"the output layer stays in 16 bits: {abs(more_bytes) / 1e9:.2f} GB {how} than planned; --head-bits 16 plans for it")
    return notes


def _format_notes(plan: Plan, engine: str) -> tuple[str, ...]:
    """What has no flag: formats that must come with the checkpoint, and those that an engine does not have."""
    kv, dtype, notes = plan.cost.kv, _compute_type(plan), []
    if (engine, dtype) in NO_DTYPE:
        notes.append(
            f"no flag for {dtype} as the compute type: it is the checkpoint's own" if engine == "trtllm" else f"{dtype} is not served here"
        )
    notes += _weight_notes(plan, engine)
    if kv in TORCH_DTYPES and kv != dtype:
        notes.append(f"{kv} keys and values beside {dtype} products: no flag here, KV is kept in the compute type")
    elif kv not in TORCH_DTYPES and kv not in KV_NAMES[engine]:
        notes.append(f"{kv} keys and values do not exist here{'; fp8 takes as many bytes' if kv == 'int8' else ''}")
    elif engine == "vllm" and kv in ("int8", "int4"):
        notes.append("it keeps a scale for each token and KV head as well, of another size: the pool may differ by a few per cent")
    return tuple(notes)
