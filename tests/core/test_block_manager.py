"""Ownership of blocks. What happens to them in a running engine is in test_cases_blocks.py and test_cases_prefix.py."""

import pytest

from minserve.core.block_manager import BlockManager, OutOfBlocks, Share
from minserve.core.request import Request, SamplingParams


def make_request(num_tokens: int, request_id: str = "R", first: int = 0, salt: str = "") -> Request:
    return Request(request_id, tuple(range(first, first + num_tokens)), SamplingParams(), max_total_tokens=1_000, salt=salt)


def start(blocks: BlockManager, request: Request) -> Share:
    """Give the request blocks for all its tokens, as if they had been computed."""
    share = blocks.find_prefix(request)
    blocks.start(request, share)
    blocks.grow(request, request.num_tokens)
    blocks.commit(request, request.num_tokens)
    request.num_computed_tokens = request.num_tokens
    blocks.check()
    return share


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 4)])
def test_a_pool_needs_a_slot(num_blocks: int, block_size: int):
    with pytest.raises(ValueError, match=f"at least 1 block of 1 slot, got {num_blocks} blocks of {block_size}"):
        BlockManager(num_blocks, block_size)


def test_the_numbers_of_an_empty_pool():
    blocks = BlockManager(6, 4)
    assert (blocks.num_free_blocks, blocks.num_used_blocks, blocks.num_idle_blocks, blocks.num_slots) == (6, 0, 0, 24)
    assert [blocks.num_blocks_for(n) for n in (0, 1, 4, 5, 24)] == [0, 1, 1, 2, 6]
    request = make_request(5)
    assert blocks.table(request) == () and blocks.num_held_blocks(request) == 0


def test_too_few_blocks_change_nothing():
    blocks = BlockManager(3, 4)
    request = make_request(16)
    blocks.start(request, Share())
    blocks.grow(request, 5)
    table = blocks.table(request)
    with pytest.raises(OutOfBlocks, match="R needs 2 blocks, 1 of 3 are free"):
        blocks.grow(request, 16)
    assert blocks.table(request) == table and blocks.num_free_blocks == 1
    blocks.check()


def test_starting_twice_is_our_own_mistake():
    blocks = BlockManager(3, 4)
    request = make_request(4)
    blocks.start(request, Share())
    with pytest.raises(AssertionError, match="R already holds blocks"):
        blocks.start(request, Share())


def test_low_blocks_go_first_and_the_last_used_ones_come_again():
    blocks = BlockManager(6, 4, prefix_caching=False)
    a, b = make_request(8, "a"), make_request(8, "b")
    start(blocks, a)
    start(blocks, b)
    assert (blocks.table(a), blocks.table(b)) == ((0, 1), (2, 3))
    blocks.release(a)
    start(blocks, a)
    assert blocks.table(a) == (0, 1)


def test_a_prefix_leaves_a_token_to_compute():
    blocks = BlockManager(8, 4)
    first = make_request(8, "first")
    start(blocks, first)
    assert blocks.find_prefix(make_request(8)).num_tokens == 4
    assert blocks.find_prefix(make_request(9)).num_tokens == 8
    assert blocks.find_prefix(make_request(9, salt="x")).num_tokens == 0
    blocks.prefix_caching = False
    assert blocks.find_prefix(make_request(9)) == Share()


def test_a_share_of_idle_blocks_is_taken_out_of_the_free_ones():
    blocks = BlockManager(4, 4)
    first = make_request(8, "first")
    start(blocks, first)
    request = make_request(9)
    assert blocks.num_idle_of(blocks.find_prefix(request)) == 0  # owned: they cost nothing
    blocks.release(first)
    share = blocks.find_prefix(request)
    assert (blocks.num_free_blocks, blocks.num_idle_of(share)) == (4, 2)
    blocks.start(request, share)
    assert blocks.num_free_blocks == 2 and request.num_computed_tokens == 8
    assert [blocks.ref_count(b) for b in share.block_ids] == [1, 1]
    blocks.check()


def test_a_shared_last_block_is_copied_before_it_is_written():
    blocks = BlockManager(8, 4)
    parent, child = make_request(6, "parent"), make_request(6, "child")
    start(blocks, parent)
    share = blocks.find_fork(parent, 5)
    assert (share.block_ids, share.num_tokens) == (blocks.table(parent), 5)
    blocks.start(child, share)
    assert [blocks.ref_count(b) for b in blocks.table(parent)] == [2, 2]
    assert blocks.num_new_blocks(child, 6) == 1  # the copy
    source = blocks.table(parent)[1]
    copy = blocks.grow(child, 6)
    target = blocks.table(child)[1]
    assert copy == (source, target) and source != target
    assert [blocks.ref_count(b) for b in blocks.table(child)] == [2, 1] and blocks.ref_count(source) == 1
    assert blocks.table(child)[0] == blocks.table(parent)[0]
    blocks.check()
    blocks.release(parent)
    assert [blocks.ref_count(b) for b in blocks.table(child)] == [1, 1]
    blocks.check()


def test_a_fork_at_a_block_boundary_copies_nothing():
    blocks = BlockManager(8, 4)
    parent, child = make_request(6, "parent"), make_request(5, "child")
    start(blocks, parent)
    blocks.start(child, blocks.find_fork(parent, 4))
    assert blocks.grow(child, 5) is None
    assert blocks.table(child)[0] == blocks.table(parent)[0] and blocks.table(child)[1] not in blocks.table(parent)
    blocks.check()


def test_a_copy_that_finds_no_room_changes_nothing():
    blocks = BlockManager(2, 4)
    parent, child = make_request(6, "parent"), make_request(6, "child")
    start(blocks, parent)
    blocks.start(child, blocks.find_fork(parent, 5))
    with pytest.raises(OutOfBlocks, match="child needs 1 blocks, 0 of 2 are free"):
        blocks.grow(child, 6)
    assert blocks.table(child) == blocks.table(parent)
    blocks.check()


def test_commit_names_full_blocks_only_and_each_once():
    blocks = BlockManager(8, 4)
    request = make_request(11)
    blocks.start(request, Share())
    blocks.grow(request, 11)
    blocks.commit(request, 7)
    assert [blocks.cache.holds(b) for b in blocks.table(request)] == [True, False, False]
    blocks.commit(request, 11)
    blocks.commit(request, 11)
    assert [blocks.cache.holds(b) for b in blocks.table(request)] == [True, True, False]
    request.num_computed_tokens = 11
    blocks.release(request)
    assert (blocks.num_idle_blocks, blocks.num_free_blocks) == (2, 8)
    blocks.check()


def test_a_cache_that_is_off_names_nothing():
    blocks = BlockManager(8, 4, prefix_caching=False)
    start(blocks, make_request(8))
    assert len(blocks.cache) == 0


def test_a_release_before_the_step_was_computed_takes_the_new_names_back():
    blocks = BlockManager(8, 4)
    request = make_request(12)
    blocks.start(request, Share())
    blocks.grow(request, 12)
    blocks.commit(request, 12)
    request.num_computed_tokens = 4  # of the three blocks with a name only the first is known to be filled
    blocks.release(request)
    blocks.check()
    assert blocks.num_idle_blocks == 1
    assert blocks.find_prefix(make_request(12, "again")).num_tokens == 4


def test_distrusted_blocks_come_back_clean():
    blocks = BlockManager(8, 4)
    a, b = make_request(9, "a"), make_request(9, "b")
    start(blocks, a)
    share = start(blocks, b)
    assert share.num_tokens == 8
    blocks.distrust(a)
    blocks.check()
    assert blocks.find_prefix(make_request(9)).num_tokens == 0
    blocks.release(a)
    blocks.release(b)
    blocks.check()
    assert (blocks.num_idle_blocks, blocks.num_free_blocks) == (0, 8)


# --- check() itself: each law is broken once --------------------------------------------------------


def used_pool() -> tuple[BlockManager, Request]:
    """Blocks 0 and 1 are owned, 2 is idle, 3 is clean."""
    blocks = BlockManager(4, 4)
    request, done = make_request(8), make_request(4, "done", first=50)
    start(blocks, request)
    start(blocks, done)
    blocks.release(done)
    blocks.check()
    assert (blocks.table(request), list(blocks.cache.idle), blocks._free) == ((0, 1), [2], [3])
    return blocks, request


def test_check_sees_a_block_that_is_free_twice():
    blocks, _ = used_pool()
    blocks._free.append(3)
    with pytest.raises(AssertionError, match=r"free twice: \[3\]"):
        blocks.check()


def test_check_sees_a_block_that_is_free_and_idle():
    blocks, _ = used_pool()
    blocks._free.append(2)
    with pytest.raises(AssertionError, match=r"free and idle: \[2\]"):
        blocks.check()


@pytest.mark.parametrize("where", ["free", "idle"])
def test_check_sees_an_owned_block_that_is_to_be_had(where: str):
    blocks, _ = used_pool()
    if where == "free":
        blocks._free.append(1)
    else:
        blocks.cache.idle[1] = None
    with pytest.raises(AssertionError, match=r"owned, yet free or idle: \[1\]"):
        blocks.check()


def test_check_sees_a_lost_block():
    blocks, _ = used_pool()
    blocks._free.remove(3)
    with pytest.raises(AssertionError, match=r"0 free \+ 1 idle \+ 2 owned = 3, the pool has 4"):
        blocks.check()


def test_check_sees_a_wrong_count():
    blocks, _ = used_pool()
    blocks._ref_counts[1] = 2
    with pytest.raises(AssertionError, match="block 1: counted 2 owners, listed by 1"):
        blocks.check()


def test_check_sees_a_clean_block_with_a_name():
    blocks, _ = used_pool()
    blocks.cache.register(3, [1, 2, 3, 4], blocks.cache.root(""))
    with pytest.raises(AssertionError, match="clean block 3 is in the cache"):
        blocks.check()


def test_check_sees_an_idle_block_without_a_name():
    blocks, _ = used_pool()
    blocks.cache.forget(2)
    with pytest.raises(AssertionError, match="idle block 2 is not in the cache"):
        blocks.check()
