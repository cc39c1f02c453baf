"""The explorer of KV formats: the planner's requests, the package's quantizers, and what loud channels do to each scheme."""

from typing import Any

import ipywidgets as widgets
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor

from minserve.lab import figures
from minserve.lab.kv_formats import (
    BY_CHANNEL,
    BY_TOKEN,
    FORMATS,
    LOUDNESS,
    MIXED,
    MODELS,
    SCHEMES,
    KvFormatExplorer,
    channel_errors,
    made_up_keys,
    stored,
    with_loud_channels,
)
from minserve.sim import planner
from minserve.sim.cost_model import CostModel
from minserve.sim.devices import DEVICES
from minserve.sim.shapes import SHAPES
from minserve_kernels import kv
from tests.lab.boxes import boxes, words


@pytest.fixture
def explorer(monkeypatch: pytest.MonkeyPatch) -> KvFormatExplorer:
    """Pictures are drawn but not painted."""
    monkeypatch.setattr(figures, "png_bytes", lambda figure: b"")
    return KvFormatExplorer()


# --- the schemes ----------------------------------------------------------------------------------


def loud_keys(factor: float, head_dim: int = 64) -> tuple[Tensor, Tensor]:
    return with_loud_channels(made_up_keys(head_dim), factor)


def test_along_a_token_is_what_the_cache_does() -> None:
    keys, _ = loud_keys(4)
    for name in FORMATS:
        assert torch.equal(stored(keys, name), kv.decode(*kv.encode(keys, name), name, torch.float32))


def test_along_a_channel_a_scale_is_shared_by_as_many_numbers() -> None:
    keys, loud = loud_keys(8)
    back, channel = stored(keys, "int8", BY_CHANNEL), int(loud[0])
    for first in range(0, 512, 64):
        column = keys[first : first + 64, channel]
        step = (column.abs().max() / 127).half().float()
        assert torch.equal(back[first : first + 64, channel], (column / step).round() * step)


def test_mixing_is_undone() -> None:
    for head_dim in (64, 96, 128):
        keys, _ = loud_keys(8, head_dim)
        assert torch.allclose(stored(keys, "fp32", MIXED), keys, atol=1e-4)


def test_loud_channels_are_the_loudest_ones_and_only_these() -> None:
    base = made_up_keys(64) * torch.linspace(1, 2, 64)
    keys, loud = with_loud_channels(base, 16)
    assert len(loud) == 2 and set((keys / base).abs().amax(0).topk(2).indices.tolist()) == set(loud.tolist())
    quiet = [channel for channel in range(64) if channel not in loud]
    assert torch.equal(keys[:, quiet], base[:, quiet]) and torch.equal(keys[:, loud], 16 * base[:, loud])


def test_an_error_is_a_share_of_the_channel_s_own_size() -> None:
    x = torch.tensor([[1.0, 100.0], [-1.0, -100.0]])
    assert channel_errors(x, x + torch.tensor([0.5, 1.0])).tolist() == [0.5, pytest.approx(0.01)]


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_louder_channels_cost_the_quiet_ones_unless_mixed_or_by_channel(name: str) -> None:
    errors = {
        scheme: [float(channel_errors(keys, stored(keys, name, scheme)).median()) for keys, _ in map(loud_keys, LOUDNESS)]
        for scheme in SCHEMES
    }
    along_token, mixed, by_channel = (errors[scheme] for scheme in SCHEMES)
    assert along_token == sorted(along_token) and along_token[-1] > 8 * along_token[0]
    assert mixed[3] < 0.6 * along_token[3]  # 8 times as loud; mixed helps, by channel more
    assert max(by_channel) == pytest.approx(min(by_channel), rel=0.02) and by_channel[-1] < 0.5 * mixed[-1]


def test_fp8_does_not_care_who_is_loud() -> None:
    errors = [float(channel_errors(keys, stored(keys, "fp8")).median()) for keys, _ in map(loud_keys, LOUDNESS)]
    assert max(errors) == pytest.approx(min(errors), rel=1e-3) and 0.025 < errors[0] < 0.028


# --- the explorer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", FORMATS)
def test_bytes_and_requests_are_the_planner_s(explorer: KvFormatExplorer, model: str, name: str) -> None:
    explorer.model.value, explorer.format.value, explorer.context.value = model, name, 2048
    shape = SHAPES[model]
    cost = CostModel(shape, DEVICES["a100-80gb"], kv=name)
    assert explorer.num_requests[name] == planner.requests_that_fit(cost, 2048) > 0
    assert explorer.bytes_per_token[name] == 2 * shape.num_layers * shape.num_kv_heads * kv.bytes_per_head(shape.head_dim, name)
    assert f"{explorer.num_requests[name]:,} requests of 2,048 tokens" in explorer.text
    assert f"a token takes {explorer.bytes_per_token[name]:,.0f} bytes" in explorer.text


def test_the_sentence_has_the_errors(explorer: KvFormatExplorer) -> None:
    keys, loud = with_loud_channels(made_up_keys(128), 8)
    errors = channel_errors(keys, stored(keys, "int4"))
    assert explorer.errors_by_channel == errors.tolist() and explorer.loud == sorted(loud.tolist())
    assert explorer.errors["int4"] == float(errors.mean())
    assert f"a channel comes back {float(errors.mean()):.2%} off (mean)." in explorer.text
    assert f"come back {float(errors[loud].max()):.2%} off" in explorer.text


def test_capacity_is_counted_against_bf16(explorer: KvFormatExplorer) -> None:
    assert explorer.capacity == explorer.num_requests["int4"] / explorer.num_requests["bf16"] > 3.7
    explorer.format.value = "bf16"
    assert explorer.capacity == 1


def test_keys_of_a_real_model_keep_their_size_whatever_the_model(explorer: KvFormatExplorer) -> None:
    given = KvFormatExplorer(keys=made_up_keys(64, seed=3), loudness=1)
    assert given.head_dim == 64 and given.errors["int4"] == pytest.approx(
        float(channel_errors(made_up_keys(64, 3), stored(made_up_keys(64, 3), "int4")).mean())
    )
    errors = dict(given.errors)
    given.model.value = "qwen3-0.6b"
    assert given.errors == errors and "the keys that were given with 64 channels" in given.text
    explorer.model.value = "smollm2-135m"
    assert explorer.head_dim == 64


def test_every_control_changes_numbers_and_sentence(explorer: KvFormatExplorer) -> None:
    controls = {"format": "int8", "scheme": MIXED, "loudness": 64, "model": "llama-3.1-8b", "device": "h100", "context": 4096}
    for name, value in controls.items():
        control: Any = getattr(explorer, name)
        first, before = control.value, (numbers_of(explorer), explorer.caption.value)
        control.value = value
        assert explorer.error is None
        assert numbers_of(explorer) != before[0] and explorer.caption.value != before[1], name
        control.value = first
        assert (numbers_of(explorer), explorer.caption.value) == before


def numbers_of(explorer: KvFormatExplorer) -> dict[str, Any]:
    hidden = (widgets.Widget, Figure)
    return {name: value for name, value in vars(explorer).items() if name[0] != "_" and not isinstance(value, hidden)}


def test_every_choice_and_both_ends_can_be_shown(explorer: KvFormatExplorer) -> None:
    for name in ("format", "scheme", "loudness", "model", "device", "context"):
        control: Any = getattr(explorer, name)
        first, values = control.value, control._options_values
        for value in (values[0], values[-1]) if name in ("loudness", "context") else values:
            control.value = value
            assert explorer.error is None, (name, value)
        control.value = first


def test_what_does_not_fit_is_said(explorer: KvFormatExplorer) -> None:
    explorer.device.value = "t4"
    assert explorer.num_requests == dict.fromkeys(FORMATS, 0) and explorer.capacity is None
    assert explorer.text.startswith("int4: no request fits, and a channel")


def test_the_picture_shows_each_channel_and_each_format() -> None:
    explorer = KvFormatExplorer(model="smollm2-135m", loudness=16)
    left, right = explorer.draw().axes
    quiet, loud = (np.asarray(line.get_xydata()) for line in left.lines[:2])
    assert loud[:, 0].tolist() == explorer.loud and len(quiet) == 62
    assert loud[:, 1].tolist() == [100 * explorer.errors_by_channel[channel] for channel in explorer.loud]
    assert [round(box.width) for box in sorted(boxes(right), key=lambda box: box.bottom)] == list(explorer.num_requests.values())
    assert words(right)[3] == f"{explorer.num_requests['int4']:,} · 6.5 kB"
    limits = left.get_ylim()
    explorer.format.value, explorer.scheme.value = "bf16", BY_TOKEN
    assert explorer.draw().axes[0].get_ylim() == limits
    bundle = explorer._repr_mimebundle_()
    assert bundle["text/plain"] == explorer.text and bundle["image/png"]
