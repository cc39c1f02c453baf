"""The command `minserve`. Each of its commands is a few lines over the package; errors are one line, not a traceback."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from minserve import __version__
from minserve.arena_command import add_arena
from minserve.core.policy_names import POLICY_NAMES
from minserve.core.request import InvalidRequest, SamplingParams
from minserve.quality_command import add_quality
from minserve.quantize_command import add_quantize

ENGINE_OPTIONS: tuple[tuple[str, type, str], ...] = (
    ("dtype", str, "compute type: auto (timed at start), fp32, bf16, fp16"),
    ("weights", str, "auto (as the checkpoint has them), int8, int4, gptq-int4, awq-int4, int4-g128-sym ..."),
    ("device", str, "auto, cpu, cuda"),
    ("num_threads", int, "CPU threads of torch"),
    ("attention_backend", str, "auto (Triton's kernels on a CUDA or HIP device, torch elsewhere), torch, triton"),
    ("kv_cache_dtype", str, "format of keys and values: auto (the compute type), fp32, bf16, fp16, fp8, int8, int4"),
    ("block_size", int, "tokens a KV block"),
    ("num_blocks", int, "KV pool in blocks"),
    ("kv_cache_bytes", int, "KV pool in bytes"),
    ("kv_memory_fraction", float, "KV pool as a share of the memory free at start"),
    ("max_model_len", int, "most tokens of prompt and output together"),
    ("token_budget", int, "most tokens a step computes"),
    ("max_running", int, "most requests computed together"),
    ("max_chunk_tokens", int, "most tokens of one request in a step"),
)
SAMPLING_OPTIONS: tuple[tuple[str, type], ...] = (
    ("max_tokens", int),
    ("min_tokens", int),
    ("temperature", float),
    ("top_k", int),
    ("top_p", float),
    ("min_p", float),
    ("repetition_penalty", float),
    ("presence_penalty", float),
    ("frequency_penalty", float),
    ("seed", int),
    ("n", int),
)


_POLICY_HELP = f"a name, or name:key=value,key=value: {', '.join(POLICY_NAMES)} (default: continuous)"
_WEIGHTS_HELP = "format of the weights: bf16 (default), fp16, fp32, fp8, int8, int4, gptq-int4, awq-int4-g128, int4-channel-sym ..."
_HEAD_BITS_HELP = "of the output layer beside quantized weights: 8 (default), as minserve keeps it, or 16, as most engines do"
SIMULATE_OPTIONS: tuple[tuple[str, type, str], ...] = (
    ("model", str, "a name (llama-2-13b ...), a config.json, or a directory with one (default: llama-2-13b)"),
    ("device", str, "a name (a100-80gb, h100 ...), or a file that minserve calibrate wrote (default: a100-80gb)"),
    ("weights", str, _WEIGHTS_HELP),
    ("kv", str, "format of keys and values: bf16 (default), fp16, fp32, fp8, int8, int4"),
    ("head_bits", int, _HEAD_BITS_HELP),
    ("tensor_parallel", int, "devices that share the model"),
    ("policy", str, f"{_POLICY_HELP}; or padded: static batches that compute rectangles"),
    ("batch_size", int, "most requests at once; what a static batch holds; with --pool slots, the slots"),
    ("wait_ms", float, "how long a timeout batch waits for more"),
    ("pool", str, "paged (default), or slots: each request reserves --slot-tokens"),
    ("slot_tokens", int, "tokens of a slot (default: the model's longest)"),
    ("token_budget", int, "most tokens a step computes"),
    ("block_size", int, "tokens a KV block"),
    ("memory_fraction", float, "share of the device's memory that may be used (default: 0.9)"),
    ("disaggregate", str, "devices for prompts : devices for answers, as in 1:1; compared with as many that do both"),
    ("link_gb_s", float, "bandwidth of the link between them"),
    ("num_requests", int, "how many (default: 200)"),
    ("lengths", str, "of prompts and answers: azure-chat (default), azure-code, mooncake"),
    ("prompt", str, "other prompts: 512, uniform:100:300, exponential:128:1536, lognormal:700:1:8:4000"),
    ("output", str, "other answers, in the same words"),
    ("arrivals", str, "all-at-once (default), poisson (default with a rate), gamma, closed"),
    ("rate", float, "requests per second"),
    ("cv", float, "unevenness of gamma arrivals: 1 is Poisson, more comes in bursts (default: 3)"),
    ("clients", int, "of closed arrivals: each sends a request when its last has ended"),
    ("turns", int, "questions of a chat; each repeats all that was said before"),
    ("user", str, "tokens that a user adds in a later turn, in the words of --prompt"),
    ("think_s", float, "mean seconds between an answer and the next question"),
    ("shared_tokens", int, "tokens with which all prompts begin"),
    ("trace", str, "a JSONL file of requests in place of all this"),
    ("seed", int, "another seed, another load of the same kind"),
    ("slo_ttft_ms", float, "longest time to the first token: how many requests meet it?"),
    ("slo_tpot_ms", float, "longest time between tokens"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except (ValueError, OSError, RuntimeError) as error:  # what a user can mend; our own bugs keep their traceback
        if type(error).__module__ == "builtins" and isinstance(error, RuntimeError):
            raise
        print(f"minserve: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidRequest) else 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="minserve", description="A compact LLM inference engine to learn serving from.")
    parser.add_argument("--version", action="version", version=f"minserve {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="serve two dozen requests at once and show what happened")
    demo.add_argument("--model", help=_MODEL_HELP)
    demo.add_argument("--figure", default="figures/demo_timeline.png", help="where to write the timeline (default: %(default)s)")
    demo.set_defaults(run=_demo)
    _add_generate(commands)
    _add_bench(commands)
    _add_calibrate(commands)
    _add_plan(commands)
    _add_simulate(commands)
    add_arena(commands)
    add_quantize(commands)
    add_quality(commands)
    _add_model(commands)
    return parser


_MODEL_HELP = "a directory, a hub id, or nothing for SmolLM2-135M-Instruct"


def _add_generate(commands: Any) -> None:
    generate = commands.add_parser("generate", help="answer prompts, as they come or together")
    generate.add_argument("prompts", nargs="+", metavar="PROMPT")
    generate.add_argument("--model", help=_MODEL_HELP)
    generate.add_argument("--chat", action="store_true", help="put each prompt through the model's chat template")
    generate.add_argument("--stop", action="append", default=[], help="end the text before this string (may be repeated)")
    for name, kind in SAMPLING_OPTIONS:
        generate.add_argument(f"--{name.replace('_', '-')}", type=kind)
    _add_engine_options(generate)
    generate.set_defaults(run=_generate)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure a fixed workload: all requests at once, greedy, exact output counts")
    bench.add_argument("--model", help=_MODEL_HELP)
    bench.add_argument("--workload", help="JSON file of request sets (default: the one that comes with minserve)")
    bench.add_argument("--sets", default="mixed,shared", help="which of its sets, separated by commas (default: %(default)s)")
    bench.add_argument("--limit", type=int, help="only the first N requests of each set")
    bench.add_argument("--policy", help=_POLICY_HELP)
    bench.add_argument("--calibration", help="for a policy that predicts steps: a file of `minserve calibrate`, or a device (h100 ...)")
    bench.add_argument("--primed", action="store_true", help="run each set a second time, with its prefixes cached")
    bench.add_argument("--gpu", action="store_true", help="measure kernels and engine on the graphics card that is here, in 12 minutes")
    bench.add_argument(
        "--decode", action="store_true", help="measure decode steps of the formats in --weights, side by side (default: bf16,int8,int4)"
    )
    bench.add_argument("--host", action="store_true", help="measure where the time of a step goes, and what allocation costs, in 2 minutes")
    bench.add_argument("--json", help="write the results here")
    _add_engine_options(bench)
    bench.set_defaults(run=_bench)


def _add_calibrate(commands: Any) -> None:
    calibrate = commands.add_parser("calibrate", help="measure this machine as a device of the simulator")
    calibrate.add_argument("--model", help=_MODEL_HELP)
    calibrate.add_argument("--out", default="this-machine.json", help="where to write the device (default: %(default)s)")
    calibrate.add_argument("--rounds", type=int, default=1, help="repeat the measured workload (default: %(default)s)")
    calibrate.add_argument(
        "--check", action="store_true", help="also serve the workload of `bench` in every round, and compare with the simulator"
    )
    calibrate.add_argument("--json", help="write the device and the check here")
    _add_engine_options(calibrate)
    calibrate.set_defaults(run=_calibrate)


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser("plan", help="what fits on a device, how fast it will be, and the flags that say so in other engines")
    plan.add_argument("--model", required=True, help="a name (llama-2-13b, qwen3-30b-a3b ...), a config.json, or a directory with one")
    plan.add_argument("--device", required=True, help="a name (a100-80gb, h100 ...), or a file that minserve calibrate wrote")
    plan.add_argument("--context", type=int, default=2048, help="tokens of a request, prompt and output together (default: %(default)s)")
    plan.add_argument("--output-tokens", type=int, help="how many of them are output (default: 256, or half of a short context)")
    plan.add_argument("--weights", help=_WEIGHTS_HELP)
    plan.add_argument("--kv", help="format of keys and values: bf16 (default), fp16, fp32, fp8, int8, int4")
    plan.add_argument("--head-bits", type=int, help=_HEAD_BITS_HELP)
    plan.add_argument("--tensor-parallel", type=int, dest="num_devices", help="devices that share the model")
    plan.add_argument("--memory-fraction", type=float, help="share of a device's memory that may be used (default: 0.9)")
    plan.add_argument("--reserve-gb", type=float, help="for activations and runtime (default: 3, or more where a step needs it)")
    plan.add_argument("--block-size", type=int, help="tokens a KV block")
    plan.add_argument("--token-budget", type=int, help="most tokens a step computes")
    plan.add_argument("--slo-ttft", type=float, metavar="MS", help="longest time to the first token")
    plan.add_argument("--slo-tpot", type=float, metavar="MS", help="longest time between tokens")
    plan.add_argument("--price-per-hour", type=float, help="of one device: gives the cost of a million output tokens")
    plan.add_argument("--explain", choices=("vllm", "sglang", "tgi", "trtllm", "llamacpp", "all"), help="the same settings as flags")
    plan.add_argument("--json", help="write the plan here")
    plan.add_argument("--figure", help="draw the memory of a device here (.png, .svg)")
    plan.set_defaults(run=_plan)


def _add_simulate(commands: Any) -> None:
    simulate = commands.add_parser("simulate", help="serve a load with the real scheduler on a device that is not here")
    for name, kind, help_text in SIMULATE_OPTIONS:
        flags = [f"--{name.replace('_', '-')}", *(["--slots"] if name == "batch_size" else [])]
        simulate.add_argument(*flags, dest=name, type=kind, help=help_text)
    simulate.add_argument("--no-prefix-caching", dest="prefix_caching", action="store_false", default=None)
    simulate.add_argument("--reserve-whole-answers", action="store_true", default=None, help="nobody is preempted, more wait")
    simulate.add_argument("--json", help="write settings, summary and every request's times here")
    simulate.add_argument("--figure", help="draw the timeline here (.png, .svg)")
    simulate.set_defaults(run=_simulate)


def _add_model(commands: Any) -> None:
    model = commands.add_parser("model", help="list or fetch models").add_subparsers(required=True, metavar="ACTION")
    model.add_parser("list", help="what is here and what can be fetched by name").set_defaults(run=_list_models)
    fetch = model.add_parser("fetch", help="get a model once and print its directory")
    fetch.add_argument("name", nargs="?", help=_MODEL_HELP)
    fetch.set_defaults(run=_fetch_model)


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    for name, kind, help_text in ENGINE_OPTIONS:
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, help=help_text)
    group.add_argument("--no-prefix-caching", dest="prefix_caching", action="store_false", default=None)


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """The options the user gave; the others keep the defaults of the package, which stand in one place only."""
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name, None) is not None}


def _engine_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    return _given(arguments, [name for name, _, _ in ENGINE_OPTIONS] + ["prefix_caching"])


# The imports below are inside the commands so that `minserve --help` answers at once: torch takes seconds.


def _demo(arguments: argparse.Namespace) -> None:
    from minserve import demo

    demo.main(arguments.model, arguments.figure)


def _generate(arguments: argparse.Namespace) -> None:
    params = SamplingParams.from_dict({"max_tokens": 256, **_given(arguments, [f.name for f in fields(SamplingParams)])})
    from minserve.llm import LLM

    with LLM(arguments.model, **_engine_fields(arguments)) as llm:
        prompts = [llm.tokenizer.chat([{"role": "user", "content": text}]) if arguments.chat else text for text in arguments.prompts]
        if len(prompts) == 1 and params.n == 1:
            for piece in llm.stream(prompts[0], params):
                print(piece, end="", flush=True)
            print()
            return
        for text, output in zip(arguments.prompts, llm.generate(prompts, params), strict=True):
            for answer in output.outputs:
                print(f"--- {text} [{answer.index}, {answer.finish_reason}]\n{answer.text.strip()}")


def _bench(arguments: argparse.Namespace) -> None:
    policy_fields = _given(arguments, ("policy", "calibration"))
    if policy_fields and (arguments.gpu or arguments.decode or arguments.host):
        raise ValueError(f"--gpu, --decode and --host measure steps, which no policy changes; leave out {', '.join(policy_fields)}")
    if arguments.gpu:
        if refused := _engine_fields(arguments):
            raise ValueError(f"bench --gpu runs every backend with its own settings and takes none, got {', '.join(refused)}")
        from minserve import bench_gpu

        bench_gpu.main(arguments.model, arguments.json)
        return
    if arguments.decode:
        from minserve import bench_decode

        engine_fields = _engine_fields(arguments)
        bench_decode.main(arguments.model, engine_fields.pop("weights", None), arguments.json, **engine_fields)
        return
    if arguments.host:
        from minserve import bench_host

        bench_host.main(arguments.model, arguments.json, **_engine_fields(arguments))
        return
    from minserve import bench

    bench.main(
        arguments.model,
        arguments.workload,
        arguments.sets.split(","),
        arguments.json,
        limit=arguments.limit,
        primed=arguments.primed,
        **policy_fields,
        **_engine_fields(arguments),
    )


def _calibrate(arguments: argparse.Namespace) -> None:
    from minserve import calibrate

    calibrate.main(
        arguments.model,
        arguments.out,
        num_rounds=arguments.rounds,
        check=arguments.check,
        json_path=arguments.json,
        **_engine_fields(arguments),
    )


def _plan(arguments: argparse.Namespace) -> None:
    from minserve import plan

    scaled = {"slo_ttft": ("slo_ttft_s", 1e-3), "slo_tpot": ("slo_tpot_s", 1e-3), "reserve_gb": ("reserve_bytes", 1e9)}
    names = ("output_tokens", "weights", "kv", "head_bits", "num_devices", "memory_fraction", "block_size", "token_budget")
    settings = _given(arguments, names)
    settings |= {name: factor * getattr(arguments, flag) for flag, (name, factor) in scaled.items() if getattr(arguments, flag) is not None}
    plan.main(
        arguments.model,
        arguments.device,
        price_per_hour=arguments.price_per_hour,
        json_path=arguments.json,
        figure=arguments.figure,
        explain=arguments.explain,
        context_tokens=arguments.context,
        **settings,
    )


def _simulate(arguments: argparse.Namespace) -> None:
    from minserve import simulate

    fields_given = _given(arguments, [name for name, _, _ in SIMULATE_OPTIONS] + ["prefix_caching", "reserve_whole_answers"])
    simulate.main(json_path=arguments.json, figure=arguments.figure, **fields_given)


def _list_models(arguments: argparse.Namespace) -> None:
    from minserve.model import zoo

    for entry in zoo.list_models():
        place = str(entry.path) if entry.path else "not here yet: minserve model fetch"
        print(f"{entry.name}  {entry.num_bytes / 1e6:,.0f} MB  {entry.about}\n    {place}")


def _fetch_model(arguments: argparse.Namespace) -> None:
    from minserve.model import zoo

    print(zoo.resolve(arguments.name))


if __name__ == "__main__":
    sys.exit(main())
