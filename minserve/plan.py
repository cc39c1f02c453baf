"""`minserve plan`: a deployment on paper. What fits, how many requests to run at once, how fast, and the flags that say so elsewhere.

It prints what `sim/planner.py` works out and adds no numbers of its own; no model is loaded and no device is needed.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minserve.sim.devices import load_device
from minserve.sim.engine_flags import EngineSettings, engine_settings, memory_fractions
from minserve.sim.pace import largest_decode_batch
from minserve.sim.planner import CONTEXTS, Plan, plan, tokens_where_kv_equals_weights
from minserve.sim.shapes import load_shape

ENGINES = ("vllm", "sglang", "tgi", "trtllm", "llamacpp")


def main(
    model: str,
    device: str,
    *,
    price_per_hour: float | None = None,
    json_path: str | None = None,
    figure: str | None = None,
    explain: str | None = None,
    **settings: Any,
) -> None:
    """Plan, print, and write what was asked for. `settings` are those of `sim.planner.plan`."""
    made = plan(load_shape(model), load_device(device), **settings)
    print(report(made, settings.get("slo_ttft_s"), settings.get("slo_tpot_s"), price_per_hour))
    names = ENGINES if explain == "all" else (explain,) if explain else ()
    for name, engine in engine_settings(made).items():
        if name in names:
            print(f"\n{describe_engine(engine)}")
    if json_path is not None:
        Path(json_path).write_text(json.dumps(as_dict(made, price_per_hour), indent=1), encoding="utf-8")
        print(f"\nresults: {json_path}")
    if figure is not None:
        _draw(made, figure)


# --- words ----------------------------------------------------------------------------------------


def report(made: Plan, slo_ttft_s: float | None = None, slo_tpot_s: float | None = None, price_per_hour: float | None = None) -> str:
    """The plan as a page of text."""
    parts = [_heading(made), _budget_table(made), _capacity(made), _speed(made, slo_ttft_s, slo_tpot_s, price_per_hour), *_remarks(made)]
    return "\n\n".join(parts)


def _heading(made: Plan) -> str:
    cost = made.cost
    return (
        f"{cost.shape.name} in {cost.weights}, KV in {cost.kv}, on {cost.num_devices} x {cost.device.name}\n"
        f"requests of {made.context_tokens:,} tokens: {made.prompt_tokens:,} prompt + {made.output_tokens:,} output"
    )


def _budget_table(made: Plan) -> str:
    """Where the memory of a device goes, one line each."""
    cost, shape, budget = made.cost, made.cost.shape, made.budget
    active = f" ({shape.num_active_parameters / 1e9:.1f} for a token)" if shape.num_experts else ""
    shared = f", 1/{cost.num_devices} here" if cost.num_devices > 1 else ""
    words = {
        "weights": f"{shape.num_parameters / 1e9:.1f} billion parameters{active}{shared}",
        "activations": f"of a step of {made.token_budget:,} tokens",
        "runtime": "context, graphs, slack (assumed)",
        "KV": f"{budget.num_blocks:,} blocks of {made.block_size} = {made.num_kv_tokens:,} tokens",
        "headroom": f"{1 - made.memory_fraction:.0%} held back, and the rest of a block",
    }
    rows = [(name, num_bytes, words[name]) for name, num_bytes in budget.parts().items()]
    rows.append(("total", budget.total_bytes, "of each device" if cost.num_devices > 1 else ""))
    lines = [f"  {n:<12}{b / 1e9:>8.2f} GB {b / budget.total_bytes:>6.1%}  {w}".rstrip() for n, b, w in rows]
    return "\n".join(["memory", *lines])


def _capacity(made: Plan) -> str:
    """How many requests fit: of this length, and of every other."""
    crossover = tokens_where_kv_equals_weights(made.cost)
    fits = [made.requests_of(context) for context in CONTEXTS]
    widths = [max(5, len(f"{count:,}") + 1) for count in fits]
    return "\n".join(
        [
            f"requests that fit: {made.num_requests:,} of {made.context_tokens:,} tokens ({made.request_bytes / 1e9:.2f} GB each)",
            "  of length   " + "".join(f"{f'{context // 1024}k':>{w}}" for context, w in zip(CONTEXTS, widths, strict=True)),
            "  fit         " + "".join(f"{count:>{w},}" for count, w in zip(fits, widths, strict=True)),
            f"  KV weighs as much as the weights from {crossover:,.0f} tokens on, over all requests",
        ]
    )


def _speed(made: Plan, slo_ttft_s: float | None, slo_tpot_s: float | None, price_per_hour: float | None) -> str:
    targets = [f"{name} {1e3 * s:g} ms" for name, s in (("TTFT", slo_ttft_s), ("TPOT", slo_tpot_s)) if s is not None]
    head = f"batch for {' and '.join(targets)}" if targets else "batch"
    if made.full is None:
        alone = f"TTFT {_ms(made.alone.ttft_s)}, TPOT {_ms(made.alone.tpot_s)}"
        return f"{head}: none. A single request by itself has {alone}: {made.limited_by} cannot be met here"
    lines = [f"{head}: {made.batch:,}, limited by {_limit_words(made)}", *_pace_lines(made)]
    if slo_tpot_s is not None:
        lines.append(_bare_decode_line(made, slo_tpot_s))
    if price_per_hour is not None:
        price, hourly = made.price_per_million_tokens(price_per_hour), price_per_hour * made.cost.num_devices
        lines.append(f"  cost        {price:.2f} per million output tokens at {hourly:g} an hour, if the batch is always full")
    return "\n".join(lines)


def _limit_words(made: Plan) -> str:
    words = {"memory": "memory", "step": "the tokens of a step (prompts and decodes share them)", "TPOT": "TPOT", "TTFT": "TTFT"}
    others = [f"{name} allows {count:,}" for name, count in made.limits.items() if name != made.limited_by]
    return f"{words[made.limited_by]} ({', '.join(others)})"


def _pace_lines(made: Plan) -> list[str]:
    full = made.full
    assert full is not None
    return [
        f"  TPOT        {_ms(full.tpot_s)} with the prompts of newcomers in between; {_ms(full.decode_s)} a bare decode step",
        f"  TTFT        {_ms(full.ttft_s)} from admission ({_ms(made.alone.ttft_s)} on an idle engine); queueing comes on top",
        f"  throughput  {full.output_tokens_per_s:,.0f} output tokens/s, {full.output_tokens_per_s / made.output_tokens:.2f} requests/s",
        f"  limit       {full.limit}: a decode step reaches {full.roofline_share:.0%} of the data sheet's roofline",
    ]


def _bare_decode_line(made: Plan, slo_tpot_s: float) -> str:
    context = made.prompt_tokens + (made.output_tokens + 1) // 2
    batch = largest_decode_batch(made.cost, context, slo_tpot_s)
    return f"  if prompts were computed elsewhere, TPOT alone would allow {batch:,}"


def _remarks(made: Plan) -> list[str]:
    shape, remarks = made.cost.shape, []
    if made.context_tokens > shape.max_positions:
        remarks.append(f"note: {made.context_tokens:,} tokens are beyond the model's {shape.max_positions:,} positions")
    if shape.window and shape.num_window_layers and made.context_tokens > shape.window:
        remarks.append(
            f"note: {shape.num_window_layers} of {shape.num_layers} layers see the last {shape.window:,} tokens only; the plan keeps all, "
            "as minserve does, and an engine that drops the rest fits more"
        )
    if shape.num_stateless_layers:
        remarks.append(f"note: the fixed state of {shape.num_stateless_layers} layers without KV is not counted")
    return remarks


def _ms(seconds: float) -> str:
    digits = 1 if seconds < 0.1 else 0
    return f"{1e3 * seconds:,.{digits}f} ms"


def describe_engine(engine: EngineSettings) -> str:
    """A command that can be copied, and remarks below it."""
    command = " \\\n    ".join([engine.command, *engine.flags])
    return "\n".join([f"# {engine.title}", command, *(f"#   {note}" for note in engine.notes)])


# --- files ----------------------------------------------------------------------------------------


def as_dict(made: Plan, price_per_hour: float | None = None) -> dict[str, Any]:
    """The plan as plain data for JSON."""
    cost = made.cost
    price = made.price_per_million_tokens(price_per_hour) if price_per_hour is not None and made.full is not None else None
    return {
        "model": asdict(cost.shape),
        "device": asdict(cost.device),
        "num_devices": cost.num_devices,
        "weights": cost.weights,
        "kv": cost.kv,
        "head_bits": cost.head_bits,
        "memory_fraction": made.memory_fraction,
        "context_tokens": made.context_tokens,
        "output_tokens": made.output_tokens,
        "token_budget": made.token_budget,
        "block_size": made.block_size,
        "num_blocks": made.budget.num_blocks,
        "num_kv_tokens": made.num_kv_tokens,
        "kv_bytes_per_token": cost.kv_bytes_per_token,
        "bytes": {**made.budget.parts(), "total": made.budget.total_bytes},
        "num_requests": made.num_requests,
        "requests_by_context": {str(context): made.requests_of(context) for context in CONTEXTS},
        "batch": made.batch,
        "limited_by": made.limited_by,
        "limits": dict(made.limits),
        "alone": asdict(made.alone),
        "full": asdict(made.full) if made.full else None,
        "price_per_million_tokens": price,
        "memory_fractions": memory_fractions(made),
        "flags": {name: list(engine.flags) for name, engine in engine_settings(made).items()},
    }


def _draw(made: Plan, path: str) -> None:
    try:
        from minserve.lab import charts, style  # matplotlib comes with the extra `lab`; planning does not need it
    except ImportError:
        print("\nno picture: pip install 'minserve[lab]' brings matplotlib")
        return
    title = f"{made.cost.shape.name} on {made.cost.num_devices} x {made.cost.device.name}: {made.num_requests:,} requests of "
    title += f"{made.context_tokens:,} tokens fit"
    used = {name: num_bytes for name, num_bytes in made.budget.parts().items() if name != "headroom"}  # the picture shows what is left
    print(f"\npicture: {style.save(charts.vram_waterfall(used, made.budget.total_bytes, title), Path(path))}")
