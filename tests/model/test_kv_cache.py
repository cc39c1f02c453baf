from collections.abc import Sequence

import pytest
import torch

from minserve.model.kv_cache import KVCache, bytes_per_token
from tests.model.tiny_net import tiny_config

S, K, D = 4, 2, 32


def filled(kv_cache_dtype: str = "fp32", num_blocks: int = 6) -> KVCache:
    """Every number of block b, kind c, head h, slot s is 1000 b + 100 c + 10 h + s, in both layers."""
    cache = KVCache(tiny_config(), num_blocks, S, kv_cache_dtype)
    digits = [torch.arange(n).float() for n in (num_blocks, 2, K, S)]
    codes = 1000 * digits[0][:, None, None, None] + 100 * digits[1][:, None, None] + 10 * digits[2][:, None] + digits[3]
    cache.blocks[:, :num_blocks] = codes[..., None].to(cache.blocks.dtype)
    return cache


def gathered(cache: KVCache, tables: list[list[int]], unused: Sequence[int] = ()) -> torch.Tensor:
    """The first number of every slot: [2, requests, K, tokens]"""
    reading = cache.reading(tables, torch.tensor(list(unused), dtype=torch.long))
    kinds = [cache.gather(1, kind, reading, torch.float32).view(len(tables), K, len(tables[0]) * S, D) for kind in (0, 1)]
    return torch.stack(kinds)[..., 0]


def test_bytes():
    cache = KVCache(tiny_config(), 6, S, "bf16")
    assert cache.bytes_per_token == bytes_per_token(tiny_config(), "bf16") == 2 * 2 * 2 * 32 * 2
    assert cache.bytes_per_block == 4 * 512
    assert cache.num_bytes == 7 * cache.bytes_per_block  # the null block comes on top
    assert bytes_per_token(tiny_config(), "fp32") == 1024


def test_an_unknown_format_is_refused_by_name():
    with pytest.raises(ValueError, match="'fp12' is not known; known: auto, fp32, bf16, fp16, fp8, int8, int4"):
        KVCache(tiny_config(), 6, S, "fp12")


def test_gather_puts_a_requests_tokens_of_each_head_side_by_side():
    k, v = gathered(filled(), [[5, 0], [2, 4]])
    assert k[0, 0].tolist() == [5000, 5001, 5002, 5003, 0, 1, 2, 3]
    assert k[1, 1].tolist() == [2010, 2011, 2012, 2013, 4010, 4011, 4012, 4013]
    assert v[0, 1].tolist() == [5110, 5111, 5112, 5113, 110, 111, 112, 113]


def test_the_null_block_reads_as_zeros():
    cache = filled()
    assert gathered(cache, [[3, cache.null_block]])[0, 0, 0].tolist() == [3000, 3001, 3002, 3003, 0, 0, 0, 0]


def test_unused_slots_read_as_zeros_whatever_they_hold():
    cache = filled()
    cache.blocks[:, 3, :, :, 2:] = torch.nan
    unused = [head * 4 + slot for head in (0, 1) for slot in (2, 3)]
    assert gathered(cache, [[3]], unused).tolist() == [
        [[[3000, 3001, 0, 0], [3010, 3011, 0, 0]]],
        [[[3100, 3101, 0, 0], [3110, 3111, 0, 0]]],
    ]


def test_a_written_token_is_gathered_from_its_slot_and_no_other_changes():
    cache = filled()
    before = cache.blocks.clone()
    kv = torch.randn(3, 2, K, D)
    slots = torch.tensor([5 * S + 1, 0, 2 * S + 3])
    cache.write(1, kv, cache.place(slots))
    for token, (block, offset) in enumerate([(5, 1), (0, 0), (2, 3)]):
        assert torch.equal(cache.blocks[1, block, :, :, offset], kv[token])
        before[1, block, :, :, offset] = kv[token]
    assert torch.equal(cache.blocks, before)


def test_the_format_may_differ_from_the_compute_type():
    cache = KVCache(tiny_config(), 2, S, "bf16")
    kv = torch.randn(1, 2, K, D)
    cache.write(1, kv, cache.place(torch.tensor([0])))
    reading = cache.reading([[0]])
    for kind in (0, 1):
        got = cache.gather(1, kind, reading, torch.float32)
        assert got.dtype == torch.float32
        assert torch.equal(got[:, 0], kv[0, kind].bfloat16().float())


def test_copies_read_all_sources_before_any_target_is_written():
    cache = filled()
    cache.copy_blocks([(1, 2), (2, 3)])
    assert cache.blocks[:, 2, 0, 0, 0, 0].tolist() == [1000, 1000]
    assert cache.blocks[:, 3, 0, 0, 0, 0].tolist() == [2000, 2000]
    cache.copy_blocks([])
    assert cache.blocks[0, 1, 0, 0, 0, 0] == 1000


def test_scratch_is_kept_and_grows():
    cache = filled()
    gathered(cache, [[0, 1, 2]])
    first = cache._scratch["own keys"]
    gathered(cache, [[0, 1]])
    assert cache._scratch["own keys"] is first and first.shape == (3 * K, S * D)
    gathered(cache, [[0, 1, 2, 3], [0, 1, 2, 3]])
    assert cache._scratch["own keys"].shape == (8 * K, S * D)


def test_a_shared_prefix_and_own_blocks_are_gathered_side_by_side():
    cache = filled()
    shared = cache.gather(0, 0, cache.reading([[1, 2]], is_shared=True), torch.float32)
    own = cache.gather(0, 0, cache.reading([[3, 4], [5, 0]]), torch.float32)
    assert shared[:, ::S, 0].tolist() == [[1000, 2000], [1010, 2010]]
    assert own[::K, ::S, 0].tolist() == [[3000, 4000], [5000, 0]]
