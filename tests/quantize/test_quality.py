"""The four instruments on a small net: closed forms, what must be zero, and what must not."""

import math

import pytest
import torch
import torch.nn.functional as F

from minserve.quantize.quality import Quality, Sample, Subject, measure, measure_all, measure_each, table
from minserve.quantize.subjects import OpenModel, Scheme
from minserve.quantize.weight_subjects import WeightScheme, parse_weight_subject
from tests.model.tiny_net import full_logits
from tests.quantize.small import SAMPLE, TEXTS, small_model
from tests.tiny_model import save_tiny_model

NAN = Scheme("nan", lambda kv: kv * math.nan)


@pytest.fixture(scope="module")
def qualities() -> dict[str, Quality]:
    names = ["fp32", "bf16", "int8", "int4"]
    return dict(zip(names, measure_all(small_model(), names, reference="fp32", sample=SAMPLE), strict=True))


def test_measured_against_itself_nothing_is_lost(qualities: dict[str, Quality]) -> None:
    same = qualities["fp32"]
    for interval, expected in ((same.kl, 0), (same.perplexity_ratio, 1), (same.same_best, 1), (same.agreement, 1), (same.task_change, 0)):
        assert (interval.value, interval.low, interval.high) == (expected, expected, expected)
    assert same.num_tokens == sum(len(text) - 1 for text in TEXTS) == 267
    assert same.num_documents == 3


def test_perplexity_is_the_exp_of_the_mean_surprise(qualities: dict[str, Quality]) -> None:
    decoder = small_model().decoder(torch.float32)
    losses = [F.cross_entropy(full_logits(decoder, text)[:-1].double(), torch.tensor(text[1:]), reduction="sum") for text in TEXTS]
    assert qualities["fp32"].perplexity.value == pytest.approx(math.exp(sum(losses) / 267), rel=1e-5)
    assert qualities["int4"].perplexity_ratio.value == pytest.approx(
        qualities["int4"].perplexity.value / qualities["fp32"].perplexity.value
    )


def test_fewer_bits_cost_more(qualities: dict[str, Quality]) -> None:
    assert 0 < 10 * qualities["int8"].kl.value < qualities["int4"].kl.value < 1
    assert qualities["int4"].same_best.value < qualities["int8"].same_best.value < 1
    assert qualities["int4"].agreement.value < 1
    assert [qualities[name].bytes_per_token for name in ("fp32", "int8", "int4")] == [1024, 272, 160]


def test_every_interval_holds_its_value(qualities: dict[str, Quality]) -> None:
    for quality in qualities.values():
        for interval in (quality.perplexity, quality.perplexity_ratio, quality.kl, quality.agreement, quality.task_score):
            assert interval.value in interval


def test_the_same_measurement_gives_the_same_numbers(qualities: dict[str, Quality]) -> None:
    assert measure(small_model(), "int4", reference="fp32", sample=SAMPLE) == qualities["int4"]


def test_another_compute_type_is_measured_against_the_same_reference() -> None:
    found = measure(small_model(), "bf16", reference="fp32", compute="bf16", sample=SAMPLE)
    assert (found.compute, found.reference) == ("bf16", "fp32")
    assert found.kl.value > measure(small_model(), "bf16", reference="fp32", sample=SAMPLE).kl.value > 0


def test_logits_that_are_not_numbers_are_infinitely_wrong() -> None:
    found = measure(small_model(), NAN, reference="fp32", sample=SAMPLE)
    assert found.perplexity.value == found.kl.value == found.perplexity_ratio.value == math.inf
    assert found.same_best.value == found.agreement.value == found.task_score.value == 0


def test_tasks_are_counted_by_kind_and_paired(qualities: dict[str, Quality]) -> None:
    for quality in qualities.values():
        assert quality.scores == {"echo": quality.task_score.value}
        assert quality.task_change.value == pytest.approx(quality.task_score.value - qualities["fp32"].task_score.value)


def test_the_table_has_a_line_for_each(qualities: dict[str, Quality]) -> None:
    lines = table(list(qualities.values())).splitlines()
    assert [line.split()[0] for line in lines] == ["KV", "fp32", "bf16", "int8", "int4"]
    assert "1.0000 (1.0000 to 1.0000)" in lines[1] and "1,024" in lines[1]


FORMATS = ("int8", "int8-tensor", "int4", "int4-channel", "gptq-int4:documents=4,tokens=64", "awq-int4:documents=4,tokens=64")


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> OpenModel:
    """Weights with names: seeded ones come in the order in which they are asked for."""
    return OpenModel.from_name(save_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def of_weights(saved_model: OpenModel) -> list[Quality]:
    subjects = [Subject(weights=parse_weight_subject(words)) for words in FORMATS]
    return measure_all(saved_model, subjects, reference="fp32", sample=Sample.draw(saved_model, 3, 90, 1))


def test_weights_with_fewer_bits_cost_more_and_calibration_helps(of_weights: list[Quality]) -> None:
    """On text like that of the calibration. On random tokens GPTQ, which fits what it has read, is worse than rounding here."""
    int8, tensor, int4, channel, gptq, awq = [quality.kl.value for quality in of_weights]
    assert 0 < 10 * int8 < int4 < channel < 2
    assert int8 < tensor < int4
    assert int8 < gptq < awq < int4


def test_a_line_says_what_the_weights_are(of_weights: list[Quality]) -> None:
    assert [quality.weights for quality in of_weights] == list(FORMATS)
    assert {(quality.kv_cache_dtype, quality.compute) for quality in of_weights} == {("fp32", "fp32")}
    assert [quality.method for quality in of_weights] == ["rtn", None, "rtn", "rtn", "gptq", "awq"]
    assert [quality.group for quality in of_weights[:4]] == ["channel sym", "", "64 asym", "channel asym"]
    num_weights, num_outputs = 256 * 64 + 64 * 128 + 192 * 64 + 64 * 96, 256 + 64 + 192 + 64
    assert of_weights[0].bytes_per_weight == pytest.approx(1 + 2 * num_outputs / num_weights)
    assert of_weights[3].bytes_per_weight == pytest.approx(0.5 + 4 * num_outputs / num_weights)


def test_the_table_of_weights_has_their_columns(of_weights: list[Quality]) -> None:
    head, *lines = table(of_weights).splitlines()
    assert head.split()[:4] == ["weights", "method", "group", "bytes/weight"]
    assert lines[2].split()[:5] == ["int4", "rtn", "64", "asym", "0.565"]


def test_weights_and_cache_are_measured_together_and_alone() -> None:
    subjects = [Subject("int4"), Subject("int4", "int4"), Subject(None, "int4")]
    weights, both, cache = measure_all(small_model(), subjects, reference="fp32", sample=SAMPLE, fast=True)
    assert (both.weights, both.kv_cache_dtype) == ("int4", "int4")
    assert both.kl.value > max(weights.kl.value, cache.kl.value)
    assert cache == measure(small_model(), "int4", reference="fp32", sample=SAMPLE, fast=True)


def test_a_scheme_on_trial_that_changes_nothing_leaves_the_head_alone_in_codes() -> None:
    same = measure(small_model(), WeightScheme("same", lambda weight: weight), reference="fp32", sample=SAMPLE, fast=True)
    assert 0 < same.kl.value < measure(small_model(), Subject("int8"), reference="fp32", sample=SAMPLE, fast=True).kl.value


def test_fast_leaves_out_what_is_written() -> None:
    [quality] = measure_each(small_model(), ["int8"], reference="fp32", sample=SAMPLE, fast=True)
    assert math.isnan(quality.agreement.value) and math.isnan(quality.task_score.value) and quality.scores == {}
    assert "nan" not in table([quality])


def test_unknown_types_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="compute type 'int8' is not known; known: fp32, bf16, fp16"):
        measure(small_model(), "int8", reference="int8", sample=SAMPLE)
    with pytest.raises(ValueError, match="int5"):
        measure(small_model(), "int5", reference="fp32", sample=SAMPLE)
