"""The explorers by their values: what a slider does to the numbers, the sentence and the picture, without a browser."""

import base64
import html
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import ipywidgets as widgets
import pytest
from matplotlib.figure import Figure

from minserve.core.policies import FirstComeFirstServed, StaticBatches, TimeoutBatches
from minserve.lab import figures
from minserve.lab.explorer import Explorer, duration
from minserve.lab.stepper import SteppingExplorer
from minserve.lab.widgets import BatchingExplorer, BudgetExplorer, RooflineExplorer, VramCalculator
from minserve.sim import planner
from minserve.sim.cost_model import CostModel, decode_work, row_work
from minserve.sim.devices import DEVICES
from minserve.sim.shapes import SHAPES
from minserve.sim.simulator import make_engine, simulate

SMALL = {"num_requests": 12, "num_prompt_tokens": 16, "mean_output_tokens": 12}


MAKERS: dict[str, Callable[[], Explorer]] = {
    "vram": VramCalculator,
    "batching": lambda: BatchingExplorer(**SMALL),
    "roofline": RooflineExplorer,
    "budget": lambda: BudgetExplorer(token_budget=512),
    "stepper": lambda: SteppingExplorer(position=8),
}


@pytest.fixture(params=MAKERS.values(), ids=list(MAKERS))
def explorer(request: pytest.FixtureRequest) -> Explorer:
    return request.param()


@pytest.fixture
def unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn but not painted, which takes most of the time, for tests that don't look at them."""
    monkeypatch.setattr(figures, "png_bytes", lambda figure: b"")


@pytest.fixture
def vram(unpainted: None) -> VramCalculator:
    return VramCalculator()


@pytest.fixture
def batching(unpainted: None) -> BatchingExplorer:
    return BatchingExplorer(**SMALL)


@pytest.fixture
def roofline(unpainted: None) -> RooflineExplorer:
    return RooflineExplorer()


def controls_of(explorer: Explorer) -> dict[str, Any]:
    names = vars(explorer).items()
    return {name: widget for name, widget in names if isinstance(widget, widgets.ValueWidget) and name not in ("caption", "image")}


def values_of(control: Any) -> list[Any]:
    """All choices of a list, both ends of a slider."""
    options = getattr(control, "_options_values", None)
    return list(options) if options is not None else [control.min, control.max]


def numbers_of(explorer: Explorer) -> dict[str, Any]:
    """The plain attributes."""
    hidden = (widgets.Widget, Figure)
    return {name: value for name, value in vars(explorer).items() if name[0] != "_" and not isinstance(value, hidden)}


# --- what all of them do --------------------------------------------------------------------------


def test_every_control_changes_numbers_sentence_and_picture(explorer: Explorer) -> None:
    for name, control in controls_of(explorer).items():
        if name in ("wait", "gqa"):  # only with the policy that waits, and with a model that has fewer KV heads: see below
            continue
        first, before = control.value, (numbers_of(explorer), explorer.caption.value, explorer.image.value)
        control.value = next(value for value in reversed(values_of(control)) if value != first)
        after = (numbers_of(explorer), explorer.caption.value, explorer.image.value)
        if name == "step":  # the trace stays, the moment is another
            before, after = before[1:], after[1:]
        assert explorer.error is None
        assert all(old != new for old, new in zip(before, after, strict=True)), name
        control.value = first


def test_ends_of_every_slider_can_be_shown_in_one_size(explorer: Explorer) -> None:
    sliders = [control for control in controls_of(explorer).values() if not isinstance(control, widgets.Dropdown)]
    sizes = set()
    alone = [[-1 if other is slider else 0 for other in sliders] for slider in sliders]
    for ends in ([0] * len(sliders), *alone, [-1] * len(sliders)):
        for slider, end in zip(sliders, ends, strict=True):
            slider.value = values_of(slider)[end]
        assert explorer.error is None
        sizes.add(png_size(explorer.image.value))
    assert len(sizes) == 1, "the page jumps"


def test_every_choice_can_be_shown(explorer: Explorer, unpainted: None) -> None:
    for control in controls_of(explorer).values():
        if isinstance(control, widgets.Dropdown):
            first = control.value
            for value in values_of(control):
                control.value = value
                assert explorer.error is None, (control.description, value)
            control.value = first


def png_size(value: bytes | memoryview) -> tuple[int, int]:
    png = bytes(value)
    assert png.startswith(b"\x89PNG")
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def test_the_bundle_has_the_widget_its_still_and_the_sentence(explorer: Explorer) -> None:
    bundle = explorer._repr_mimebundle_()
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == explorer.view.model_id
    still = base64.b64decode(bundle["image/png"])
    assert png_size(still) == png_size(explorer.image.value) and len(still) < 0.5 * len(explorer.image.value)
    assert bundle["text/plain"] == explorer.text
    shown = html.unescape(re.sub("<[^>]+>", " ", explorer.caption.value))
    assert shown.split() == explorer.text.split()  # sentence and caption say the same


def test_no_explorer_loads_pyplot() -> None:
    code = (
        "import sys\n"
        "from minserve.lab.widgets import BatchingExplorer, RooflineExplorer, VramCalculator\n"
        "for explorer in (VramCalculator(), BatchingExplorer(num_requests=4), RooflineExplorer()):\n"
        "    explorer._repr_mimebundle_()\n"
        "assert 'matplotlib.figure' in sys.modules and 'matplotlib.pyplot' not in sys.modules\n"
        "assert 'torch' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8")
    assert result.returncode == 0, result.stderr


def test_callbacks_of_two_threads_and_a_drawing_cell_don_t_disturb_each_other() -> None:
    explorer, other = VramCalculator(), VramCalculator()
    alone = {context: picture_at(other, context) for context in (512, 2048, 4096)}
    seen: list[bool] = []

    def drag(contexts: tuple[int, ...]) -> None:
        for context in contexts:
            explorer.context.value = context

    def draw() -> None:
        seen.extend(picture_at(other, context) == alone[context] for context in (512, 2048, 4096))

    threads = [threading.Thread(target=drag, args=([512, 4096],)), threading.Thread(target=drag, args=([2048, 512],))]
    threads.append(threading.Thread(target=draw))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 3 and explorer.error is None
    assert explorer.image.value == alone[explorer.context.value]
    assert f" {explorer.num_requests} requests of {explorer.context.value:,} tokens fit" in " " + explorer.text


def picture_at(explorer: VramCalculator, context: int) -> bytes:
    explorer.context.value = context
    return bytes(explorer.image.value)


# --- memory ---------------------------------------------------------------------------------------


def test_vram_by_hand(vram: VramCalculator) -> None:
    vram.context.value = 4096
    vram.kv.value = "int8"
    kv_bytes_per_token = 2 * 40 * 40 * (128 + 2)  # keys and values, layers, heads, head size; one byte a number, and a scale
    weight_bytes = 2 * (40 * (4 * 5120 * 5120 + 3 * 5120 * 13_824) + 2 * 32_000 * 5120)
    assert (vram.kv_bytes_per_token, vram.weight_bytes) == (kv_bytes_per_token, weight_bytes)
    assert vram.num_requests == (0.9 * 80e9 - weight_bytes - 3e9) // (4096 * kv_bytes_per_token) == 25
    assert 0 <= vram.headroom_bytes < vram.kv_bytes_per_request
    assert vram.text.startswith("25 requests of 4,096 tokens fit on 1 x a100-80gb.") and "416,000 bytes" in vram.text


@pytest.mark.parametrize(
    ("name", "value"),
    [("model", "qwen3-8b"), ("device", "h200"), ("weights", "int4-channel"), ("kv", "int8"), ("context", 12_288), ("num_devices", 2)],
)
def test_vram_is_the_planner_s_answer(vram: VramCalculator, name: str, value: Any) -> None:
    controls_of(vram)[name].value = value
    shape, device = SHAPES[vram.model.value], DEVICES[vram.device.value]
    cost = CostModel(shape, device, weights=vram.weights.value, kv=vram.kv.value, num_devices=vram.num_devices.value)
    assert vram.num_requests == planner.requests_that_fit(cost, vram.context.value) > 0
    assert vram.weight_bytes == cost.weight_bytes and vram.kv_bytes_per_token == cost.kv_bytes_per_token
    assert f"{vram.num_requests} requests of {vram.context.value:,} tokens" in vram.text


def test_vram_counts_on_the_memory_fraction(vram: VramCalculator) -> None:
    cost = CostModel(SHAPES["llama-2-13b"], DEVICES["a100-80gb"])
    for fraction in (0.5, 0.72, 0.98):
        vram.fraction.value = fraction
        assert vram.num_requests == planner.requests_that_fit(cost, 2048, memory_fraction=fraction)
        assert vram.untouched_bytes == pytest.approx((1 - fraction) * 80e9)


def test_vram_without_grouped_queries_keeps_a_pair_for_every_query_head(vram: VramCalculator) -> None:
    text = vram.text
    vram.gqa.value = False
    assert vram.text == text  # this model has no groups
    vram.model.value, vram.num_devices.value = "llama-2-70b", 4
    single = vram.kv_bytes_per_token
    vram.gqa.value = True
    assert vram.kv_bytes_per_token == single / 8 and "8 KV heads for 64 query heads" in vram.text
    assert vram.kv_bytes_per_token == 2 * 80 * 8 * 128 * 2 / 4


def test_vram_says_what_is_too_much(vram: VramCalculator) -> None:
    vram.model.value = "llama-2-70b"
    assert vram.num_requests == 0 and vram.kv_bytes == 0
    assert -vram.headroom_bytes == pytest.approx(vram.weight_bytes + 3e9 - 72e9)
    assert (
        vram.text.startswith("No requests of 2,048 tokens fit on 1 x a100-80gb.")
        and "With one request that is 69.6 GB too much." in vram.text
    )


def test_vram_says_how_much_a_long_request_lacks(vram: VramCalculator) -> None:
    vram.context.value = 65_536
    assert vram.num_requests == 0 and 0 < vram.headroom_bytes < vram.kv_bytes_per_request == 65_536 * 819_200
    too_much = (vram.kv_bytes_per_request - vram.headroom_bytes) / 1e9
    assert f"a request 53.7 GB. With one request that is {too_much:.1f} GB too much." in vram.text


def test_vram_shows_that_heads_cannot_be_shared(vram: VramCalculator) -> None:
    vram.model.value, vram.num_devices.value = "smollm2-135m", 2
    assert isinstance(vram.error, ValueError) and "9 query heads cannot be shared evenly by 2 devices" in vram.caption.value


# --- batching -------------------------------------------------------------------------------------


def test_batching_is_the_scheduler_s_answer(batching: BatchingExplorer) -> None:
    cost = CostModel(SHAPES["llama-2-13b"], DEVICES["a100-80gb"])
    batching.slots.value, batching.rate.value, batching.wait.value = 4, 8.0, 0.5
    policies = {"continuous": FirstComeFirstServed(), "static": StaticBatches(4), "timeout": TimeoutBatches(4, 0.5)}
    engines = {name: make_engine(cost, policy=policy, max_running=4, prefix_caching=False) for name, policy in policies.items()}
    traces = {name: simulate(engine, batching.workload()) for name, engine in engines.items()}
    for name, trace in traces.items():
        batching.policy.value = name
        summary = trace.summary()
        assert (batching.summary, list(batching.trace.steps)) == (summary, list(trace.steps))
        assert f"{summary.output_tokens_per_s:,.0f} output tokens/s" in batching.text and duration(summary.ttft_p50_s) in batching.text
    assert batching.gain == traces["continuous"].summary().output_tokens_per_s / traces["static"].summary().output_tokens_per_s
    assert f"{batching.gain:.2f} times" in batching.text


def test_batching_gains_nothing_from_equal_lengths_and_more_with_their_spread(unpainted: None) -> None:
    explorer = BatchingExplorer()
    gains = []
    for spread in (0.0, 0.3, 0.6, 1.0):
        explorer.spread.value = spread
        gains.append(explorer.gain)
    assert gains[0] == 1.0 and gains == sorted(gains) and gains[-1] > 1.8


def test_batching_draws_its_requests_as_the_sliders_say(batching: BatchingExplorer) -> None:
    batching.spread.value = 0.0
    arrivals = batching.workload().arrivals()
    assert [(time_s, len(call["prompt_ids"]), call["params"].max_tokens) for time_s, call in arrivals] == [(0.0, 16, 12)] * 12
    batching.rate.value, batching.spread.value = 5.0, 1.0
    times_s, calls = zip(*batching.workload().arrivals(), strict=True)
    assert 12 / times_s[-1] == pytest.approx(5.0, rel=0.5) and len({call["params"].max_tokens for call in calls}) > 5


def test_batching_waits_only_with_the_policy_that_waits(batching: BatchingExplorer) -> None:
    batching.rate.value = 4.0
    text, trace = batching.text, batching.trace
    batching.wait.value = 3.0
    assert batching.wait.disabled and batching.text == text and batching.trace is trace
    batching.policy.value = "timeout"
    patient = batching.summary.ttft_p50_s
    batching.wait.value = 0.0
    assert not batching.wait.disabled and patient is not None
    assert batching.summary.ttft_p50_s is not None and batching.summary.ttft_p50_s < patient


def test_batching_steps_and_rewinds_through_one_and_the_same_run() -> None:
    batching = BatchingExplorer(**SMALL)
    trace, whole_picture = batching.trace, batching.image.value
    start, back, forward, end = [child for child in batching.view.children[1].children if isinstance(child, widgets.Button)]
    last = len(trace.steps) - 1
    assert batching.step.value == batching.step.max == last
    pictures = []
    for button, step in ((start, 0), (back, 0), (forward, 1), (forward, 2), (back, 1), (end, last), (forward, last)):
        button.click()
        now = trace.steps[step]
        assert (batching.step.value, batching.now, batching.trace) == (step, now, trace)
        assert f"After step {step} of {last}" in batching.text and f"{now.num_running} run and {now.num_waiting} wait" in batching.text
        pictures.append(batching.image.value)
    assert pictures[0] == pictures[1] and pictures[2] == pictures[4] and pictures[5] == whole_picture
    assert len(set(pictures)) == 4
    start.click()
    batching.slots.value = 4  # another run is shown to its end
    assert batching.step.value == batching.step.max == len(batching.trace.steps) - 1


def test_batching_counts_the_busy_slots(batching: BatchingExplorer) -> None:
    batching.slots.value = 1
    assert batching.busy_share == pytest.approx(1.0)
    batching.slots.value, batching.spread.value = 12, 0.0
    assert batching.busy_share == pytest.approx(1.0) and "100% of them busy" in batching.text
    batching.spread.value = 2.0
    assert batching.busy_share < 0.7


# --- the roofline ---------------------------------------------------------------------------------


def test_roofline_is_the_cost_model_s_answer(roofline: RooflineExplorer) -> None:
    roofline.model.value, roofline.device.value, roofline.weights.value, roofline.kv.value = "llama-3.1-8b", "h100", "fp8", "int8"
    roofline.batch.value, roofline.context.value, roofline.chunk.value = 48, 3072, 256
    cost = CostModel(SHAPES["llama-3.1-8b"], DEVICES["h100"], weights="fp8", kv="int8")
    decode, prefill = cost.of(decode_work(48, 3072)), cost.of(row_work(0, 256))
    assert (roofline.decode, roofline.prefill) == (decode, prefill)
    assert roofline.decode_flops_per_byte == decode.flops / decode.num_bytes
    assert roofline.ridge_flops_per_byte == 989e12 / 3350e9
    assert roofline.decode_tokens_per_s == 48 / decode.seconds
    for words in (
        duration(decode.seconds),
        duration(prefill.seconds),
        f"{roofline.decode_tokens_per_s:,.0f} tokens/s",
        "295 FLOPs per byte",
    ):
        assert words in roofline.text


@pytest.mark.parametrize(
    ("batch", "context", "chunk", "decode", "prefill"),
    [(1, 128, 16, "weights", "weights"), (64, 8192, 512, "KV", "FLOPs"), (1024, 128, 8192, "FLOPs", "FLOPs")],
)
def test_roofline_says_what_limits(roofline: RooflineExplorer, batch: int, context: int, chunk: int, decode: str, prefill: str) -> None:
    roofline.batch.value, roofline.context.value, roofline.chunk.value = batch, context, chunk
    assert (roofline.decode.limit, roofline.prefill.limit) == (decode, prefill)
    assert roofline.text.startswith(f"A decode step is limited by {decode}, the prompt chunk by {prefill}.")


def test_roofline_splits_the_whole_time(roofline: RooflineExplorer) -> None:
    assert sum(roofline.decode.spent_s.values()) == pytest.approx(roofline.decode.seconds)
    assert roofline.decode.spent_s["weights"] == roofline.decode.linear_s and roofline.decode.spent_s["FLOPs"] == 0
    assert "20.9 ms = weights 16.2 ms + KV 4.2 ms + host 0.5 ms" in roofline.text


def test_roofline_says_if_the_device_is_too_small(roofline: RooflineExplorer) -> None:
    assert "could not run" not in roofline.text
    roofline.batch.value, roofline.context.value = 64, 8192
    needed = 64 * 8192 * 819_200 + roofline.cost.weight_bytes
    assert f"weights and KV take {needed / 1e9:.1f} GB, the device has 80.0 GB" in roofline.text
