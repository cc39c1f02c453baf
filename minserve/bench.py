"""`minserve bench`: a fixed workload, measured the way its peers are measured.

All requests of a set arrive at once, greedy, end-of-sequence ignored, so that every engine makes exactly the same number of tokens.
The JSON has the fields of the runners that measure the peers, so results can stand in one table.

Invariant: a run that did not produce exactly the demanded number of tokens is an error, not a result. Timings are noisy: compare
ratios of runs made side by side, never a time against a number from elsewhere.

Taught in notebook 00.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from minserve.core.policies import FirstComeFirstServed
from minserve.core.request import FinishReason, InvalidRequest, SamplingParams
from minserve.llm import LLM

Workload = Mapping[str, Sequence[Mapping[str, Any]]]


def load_workload(path: str | Path | None = None) -> Workload:
    """Request sets by name, each request with id, prompt_ids and max_tokens. None: the workload that comes with minserve.

    Raises ValueError if the file does not have that form.
    """
    text = Path(path).read_text(encoding="utf-8") if path else (resources.files("minserve") / "workload.json").read_text(encoding="utf-8")
    try:
        sets = json.loads(text)["sets"]
        for requests in sets.values():
            for request in requests:
                missing = {"id", "prompt_ids", "max_tokens"} - request.keys()
                if missing:
                    raise KeyError(*missing)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'{path}: not a workload ({{"sets": {{name: [{{id, prompt_ids, max_tokens}}]}}}}): {error!r}') from error
    return sets


def run_set(llm: LLM, requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Serve one set and report it. Wall time runs from the first arrival to the last token."""
    llm.reset_trace()
    params = [SamplingParams(max_tokens=request["max_tokens"], ignore_eos=True) for request in requests]
    cpu_start_s, start_s = time.process_time(), time.perf_counter()
    outputs = llm.generate([request["prompt_ids"] for request in requests], params, progress=False)
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_start_s
    if shed := [output for output in outputs if output.finish_reason == FinishReason.SHED]:
        raise InvalidRequest(
            f"the policy sent {len(shed)} of {len(requests)} requests away, and a bench measures how long all of them take: "
            f"choose a policy that serves everybody (slo with shed=no). {shed[0].request_id}: {shed[0].outputs[0].error}"
        )
    for request, output in zip(requests, outputs, strict=True):
        if len(output.token_ids) != request["max_tokens"]:
            raise InvalidRequest(
                f"{request['id']}: {len(output.token_ids)} tokens instead of {request['max_tokens']} ({output.finish_reason})"
            )
    s = llm.trace.summary()
    return {
        "wall_s": round(wall_s, 3),
        "cpu_s": round(cpu_s, 2),
        "out_tok_s": round(s.num_output_tokens / wall_s, 2),
        "all_tok_s": round((s.num_prompt_tokens + s.num_output_tokens) / wall_s, 2),
        "ttft_p50_s": _rounded(s.ttft_p50_s, 3),
        "ttft_p99_s": _rounded(s.ttft_p99_s, 3),
        "itl_p50_ms": _rounded(s.itl_p50_s, 2, 1e3),
        "itl_p99_ms": _rounded(s.itl_p99_s, 2, 1e3),
        "tpot_p50_ms": _rounded(s.tpot_p50_s, 2, 1e3),
        "steps": s.num_steps,
        "hit_tokens": s.num_hit_tokens,
        "preemptions": s.num_preemptions,
        "peak_blocks": s.peak_used_blocks,
        "tokens": {request["id"]: output.token_ids for request, output in zip(requests, outputs, strict=True)},
    }


def _rounded(value: float | None, digits: int, scale: float = 1.0) -> float | None:
    return None if value is None else round(value * scale, digits)


def outside_torch_share(llm: LLM, requests: Sequence[Mapping[str, Any]], batch_size: int = 16, num_steps: int = 20) -> dict[str, float]:
    """Share of a decode step that is spent outside torch's operators, over `num_steps` steps of `batch_size` requests.

    Time inside is the sum of the outermost operators that torch's profiler sees; all else, Python and the profiler's own cost
    included, counts as outside, so the share is an upper bound.
    """
    engine = llm.engine
    policy, engine.scheduler.policy = engine.scheduler.policy, FirstComeFirstServed()  # a batch, not when it would start
    longest = llm.pool.max_model_len - num_steps - 8
    chosen = [request["prompt_ids"][:longest] for request in requests][:batch_size]
    params = SamplingParams(max_tokens=num_steps + 8, ignore_eos=True)
    added = [request for prompt_ids in chosen for request in engine.add(prompt_ids, params)]
    while any(request.num_output_tokens < 2 for request in added):
        engine.step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        start_s = time.perf_counter()
        for _ in range(num_steps):
            engine.step()
        wall_s = time.perf_counter() - start_s
    inside_s = sum(event.cpu_time_total for event in profiler.events() or () if event.cpu_parent is None) / 1e6
    for request in added:
        engine.abort(request.request_id)
    engine.scheduler.policy = policy
    return {"batch": len(added), "step_ms": round(1e3 * wall_s / num_steps, 2), "outside_torch_share": round(1 - inside_s / wall_s, 4)}


def peak_memory_mib() -> int:
    """Peak resident memory of this process. Linux counts in KiB, macOS in bytes; 0 where it is not known."""
    if sys.platform == "win32":
        return 0  # Windows keeps no such account for the standard library
    import resource  # not there on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // (1 << 20) if sys.platform == "darwin" else peak // 1024


def main(
    model: str | None,
    workload: str | None,
    set_names: Sequence[str],
    json_path: str | None,
    limit: int | None = None,
    primed: bool = False,
    policy: str | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Measure the named sets, print a line for each, write the JSON. `primed` runs every set twice and reports the second as well."""
    sets = load_workload(workload)
    missing = [name for name in set_names if name not in sets]
    if missing:
        raise ValueError(f"no request set {missing[0]!r} in the workload; it has {', '.join(sets)}")
    start_s = time.perf_counter()
    with LLM(model, policy=policy, **fields) as llm:
        load_s = time.perf_counter() - start_s
        chosen = {name: list(sets[name])[:limit] for name in set_names}
        result: dict[str, Any] = {"peer": "minserve", "dtype": str(llm.dtype).removeprefix("torch."), "threads": torch.get_num_threads()}
        result |= {
            "load_s": round(load_s, 2),
            "kv_cache_dtype": llm.pool.kv_cache_dtype,
            "num_blocks": llm.num_blocks,
            "policy": policy or "continuous",
        }
        result["sets"] = {}
        run_set(llm, list(sets.get("warmup") or chosen[set_names[0]])[:4])
        for name, requests in chosen.items():
            llm.engine.scheduler.blocks.flush_cache()  # every set starts cold
            result["sets"][name] = run_set(llm, requests)
            _print_line(name, result["sets"][name])
            if primed:
                result["sets"][f"{name}_primed"] = run_set(llm, requests)
                _print_line(f"{name} primed", result["sets"][f"{name}_primed"])
        result["decode_step"] = outside_torch_share(llm, chosen[set_names[0]])
        result["self_peak_rss_mib"] = peak_memory_mib()
    step = result["decode_step"]
    print(f"decode step at batch {step['batch']}: {step['step_ms']} ms, {100 * step['outside_torch_share']:.1f} % of it outside torch")
    print(f"peak memory {result['self_peak_rss_mib']:,} MiB")
    if json_path:
        Path(json_path).write_text(json.dumps(result), encoding="utf-8")
    return result


def _print_line(name: str, r: Mapping[str, Any]) -> None:
    print(
        f"{name}: {r['wall_s']} s, {r['out_tok_s']} output tokens/s, TTFT p50/p99 {r['ttft_p50_s']}/{r['ttft_p99_s']} s, "
        f"ITL p50/p99 {r['itl_p50_ms']}/{r['itl_p99_ms']} ms, {r['hit_tokens']} tokens from the prefix cache, "
        f"{r['preemptions']} preemptions"
    )
