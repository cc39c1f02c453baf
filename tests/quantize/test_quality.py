"""The four instruments on a small net: closed forms, what must be zero, and what must not."""

import math

import pytest
import torch
import torch.nn.functional as F

from minserve.quantize.quality import (
    COUNT,
    KL,
    NLL,
    REFERENCE_NLL,
    SAME_BEST,
    Quality,
    chunks,
    compare,
    measure,
    measure_all,
    num_agreeing,
    table,
)
from minserve.quantize.subjects import Scheme
from tests.model.tiny_net import full_logits
from tests.quantize.small import SAMPLE, TEXTS, small_model, sums_of

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


def test_kl_is_that_of_the_books() -> None:
    generator = torch.Generator().manual_seed(0)
    expected, logits = torch.randn(2, 50, 30, generator=generator).unbind()
    targets = torch.randint(30, (50,), generator=generator)
    p, q = expected.double().log_softmax(-1), logits.double().log_softmax(-1)
    found = compare(expected, logits, targets)
    assert found[KL].item() == pytest.approx(F.kl_div(q, p, reduction="sum", log_target=True).item(), rel=1e-5)
    assert found[NLL].item() == pytest.approx(F.cross_entropy(logits, targets, reduction="sum").item(), rel=1e-5)
    assert found[REFERENCE_NLL].item() == pytest.approx(F.cross_entropy(expected, targets, reduction="sum").item(), rel=1e-5)
    assert found[SAME_BEST] == (expected.argmax(-1) == logits.argmax(-1)).sum()
    assert found[COUNT] == 50
    assert compare(expected, expected, targets)[KL] == 0
    assert all(compare(expected[i : i + 1], logits[i : i + 1], targets[i : i + 1])[KL] > 0 for i in range(50))


def test_documents_are_fed_in_chunks_that_cover_them() -> None:
    batches = list(chunks(TEXTS * 4, chunk_tokens=32))
    assert [len(batch.rows) for batch in batches] == [8, 8, 8, 4, 4, 4]
    fed = [(int(row.request.request_id), token) for batch in batches for row in batch.rows for token in row.token_ids]
    assert [[token for number, token in fed if number == i] for i in range(12)] == TEXTS * 4
    for batch in batches:
        tables = [block for row in batch.rows for block in row.block_table]
        assert len(set(tables)) == len(tables)
        assert all(len(row.block_table) == -(-row.end // 16) for row in batch.rows)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_size_of_the_chunks_changes_nothing(name: str) -> None:
    """Inside one chunk, too, scores are made with keys and values as they are stored."""
    whole, cut = sums_of(small_model(), name, chunk_tokens=96), sums_of(small_model(), name, chunk_tokens=16)
    assert whole[:, KL].min() > 0
    assert torch.allclose(whole, cut, rtol=2e-2)


def test_logits_that_are_not_numbers_are_infinitely_wrong() -> None:
    found = measure(small_model(), NAN, reference="fp32", sample=SAMPLE)
    assert found.perplexity.value == found.kl.value == found.perplexity_ratio.value == math.inf
    assert found.same_best.value == found.agreement.value == found.task_score.value == 0


def test_texts_agree_up_to_the_first_difference() -> None:
    assert num_agreeing([1, 2, 3], [1, 2, 3]) == 3
    assert num_agreeing([1, 2, 3], [1, 2]) == 2
    assert num_agreeing([1, 2, 3], [9, 2, 3]) == 0


def test_tasks_are_counted_by_kind_and_paired(qualities: dict[str, Quality]) -> None:
    for quality in qualities.values():
        assert quality.scores == {"echo": quality.task_score.value}
        assert quality.task_change.value == pytest.approx(quality.task_score.value - qualities["fp32"].task_score.value)


def test_the_table_has_a_line_for_each(qualities: dict[str, Quality]) -> None:
    lines = table(list(qualities.values())).splitlines()
    assert [line.split()[0] for line in lines] == ["KV", "fp32", "bf16", "int8", "int4"]
    assert "1.0000 (1.0000 to 1.0000)" in lines[1] and "1,024" in lines[1]


def test_unknown_types_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="compute type 'int8' is not known; known: fp32, bf16, fp16"):
        measure(small_model(), "int8", reference="int8", sample=SAMPLE)
    with pytest.raises(ValueError, match="int5"):
        measure(small_model(), "int5", reference="fp32", sample=SAMPLE)
