"""Documents through the engine's path, and two runners' distributions beside each other."""

import pytest
import torch
import torch.nn.functional as F

from minserve.quantize.reading import COUNT, KL, NLL, REFERENCE_NLL, SAME_BEST, Expected, chunks, compare, compare_distributions
from minserve.quantize.subjects import make_runner
from tests.quantize.small import TEXTS, small_model, sums_of


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


@pytest.mark.parametrize(("most_bytes", "num_kept"), [(3 * 90 * 320 * 4, 2), (3 * 90 * 320 * 4 - 1, 0)])
def test_what_the_reference_says_is_kept_where_it_fits(most_bytes: int, num_kept: int) -> None:
    model = small_model()
    decoder = model.decoder(torch.float32)
    base, measured = (make_runner(model, decoder, "fp32", name, 64) for name in ("fp32", "int8"))
    expected = Expected(base, TEXTS, most_bytes=most_bytes)
    first, second = (compare_distributions(expected, [measured], TEXTS) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first, compare_distributions(base, [measured], TEXTS))
    assert len(expected._kept) == num_kept  # two steps of 64 and 26 tokens of the three texts
