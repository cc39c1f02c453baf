"""A step as the arrays that kernels read."""

import pytest
import torch

from minserve.model.attention_triton import NO_SLOT, Shape, TritonStep, in_order, pack, shape_of
from minserve.model.kv_cache import KVCache
from tests.model.tiny_net import batch_of, request, tiny_config

CACHE = KVCache(tiny_config(), num_blocks=40, block_size=16, kv_cache_dtype="fp32")


def step_of(*rows: tuple[int, int, list[int]], shape: Shape | None = None) -> TritonStep:
    """Rows of (start, end, block table); token i of row r is 100 r + i."""
    batch = batch_of(*[(request(f"R{r}", range(100 * r, 100 * r + end)), start, end, table) for r, (start, end, table) in enumerate(rows)])
    ordered = in_order(batch.rows)
    shape = shape or shape_of(ordered)
    return TritonStep.of(ordered, shape, pack(ordered, shape, CACHE))


def test_decodes_stand_before_chunks_and_keep_their_order():
    step = step_of((3, 5, [7]), (16, 17, [2, 9]), (14, 18, [4, 1]), (0, 1, [6]))
    assert [row.request.request_id for row in step.rows] == ["R1", "R3", "R0", "R2"]
    assert step.shape == Shape(num_tokens=8, num_decodes=2, num_chunks=2, num_blocks=16)
    assert step.token_ids.tolist() == [116, 300, 3, 4, 214, 215, 216, 217]
    assert step.positions.tolist() == [16, 0, 3, 4, 14, 15, 16, 17]
    assert step.slots.tolist() == [9 * 16, 6 * 16, 7 * 16 + 3, 7 * 16 + 4, 4 * 16 + 14, 4 * 16 + 15, 16, 17]
    assert step.decode_lengths.tolist() == [17, 1]
    assert step.chunk_lengths.tolist() == [5, 18]
    assert step.query_starts.tolist() == [0, 2, 6]


def test_tables_are_filled_up_with_the_null_block():
    step = step_of((16, 17, [2, 9]), (14, 18, [4, 1]), (0, 1, [6]))
    null = CACHE.null_block
    assert step.decode_tables.tolist() == [[2, 9, *[null] * 14], [6, *[null] * 15]]
    assert step.chunk_tables.tolist() == [[4, 1, *[null] * 14]]
    wide = step_of((270, 271, list(range(17))))
    assert wide.decode_tables.tolist() == [[*range(17), *[null] * 15]] and wide.chunk_tables.shape == (0, 32)


def test_all_arrays_are_aligned_views_of_one():
    step = step_of((3, 5, [7]), (16, 17, [2, 9]), (0, 1, [6]))
    arrays = [getattr(step, name) for name in ("token_ids", "positions", "slots", "decode_lengths", "decode_tables", "query_starts")]
    arrays += [step.chunk_lengths, step.chunk_tables]
    assert len({array.untyped_storage().data_ptr() for array in arrays}) == 1
    assert all(array.dtype == torch.int32 and array.storage_offset() * 4 % 16 == 0 for array in arrays)
    ends = sorted((array.storage_offset(), array.storage_offset() + array.numel()) for array in arrays)
    assert all(end <= begin for (_, end), (begin, _) in zip(ends, ends[1:], strict=False))  # none reaches into the next


def test_what_a_shape_has_beyond_its_rows_is_neither_read_nor_written():
    step = step_of((16, 17, [2, 9]), shape=Shape(num_tokens=3, num_decodes=3, num_chunks=0, num_blocks=16))
    assert step.slots.tolist() == [9 * 16, NO_SLOT, NO_SLOT] and NO_SLOT < 0
    assert step.decode_lengths.tolist() == [17, 0, 0]
    assert step.token_ids.tolist() == [16, 0, 0] and step.positions.tolist() == [16, 0, 0]
    assert (step.decode_tables[1:] == CACHE.null_block).all()


def test_a_step_that_does_not_fit_its_shape_is_our_bug():
    with pytest.raises(ValueError):
        step_of((16, 17, [2, 9]), (16, 17, [3, 8]), shape=Shape(num_tokens=1, num_decodes=1, num_chunks=0, num_blocks=16))
