"""Chained hashes of full blocks. Most of what the cache must do is in test_cases_prefix.py, through the engine."""

from collections.abc import Hashable, Sequence

from minserve.core.prefix_cache import CachedBlock, PrefixCache, hash_block


def fill(cache: PrefixCache, tokens: Sequence[int], block_ids: Sequence[int], salt: str = "") -> list[CachedBlock]:
    """Register `tokens` as a chain in the given blocks."""
    chain: list[CachedBlock] = []
    for index, block_id in enumerate(block_ids):
        own = tokens[index * cache.block_size : (index + 1) * cache.block_size]
        chain.append(cache.register(block_id, own, chain[-1] if chain else cache.root(salt)))
    return chain


def ids(chain: Sequence[CachedBlock]) -> list[int]:
    return [block.block_id for block in chain]


def test_the_longest_chain_is_found_and_no_more_than_asked_for():
    cache = PrefixCache(2)
    fill(cache, [1, 2, 3, 4, 5, 6], [7, 8, 9])
    assert ids(cache.match([1, 2, 3, 4, 5, 6, 0], "", 3)) == [7, 8, 9]
    assert ids(cache.match([1, 2, 3, 4, 5, 6, 0], "", 2)) == [7, 8]
    assert ids(cache.match([1, 2, 3, 0], "", 2)) == [7]
    assert ids(cache.match([3, 4, 5, 6], "", 2)) == []  # the same tokens, but not at the beginning
    assert ids(cache.match([1, 2, 3, 4], "other", 2)) == []
    assert len(cache) == 3


def test_the_hash_covers_the_predecessor_and_every_token():
    hashes = [hash_block(parent, tokens) for parent in ("a", "b", b"a", b"b") for tokens in ([1, 2], [2, 1], [1], [258])]
    assert len(set(hashes)) == len(hashes)
    assert hash_block("a", [1, 2]) == hash_block("a", (1, 2))
    first = hash_block("a", [1, 2])
    assert isinstance(first, bytes) and len(first) == 16
    assert hash_block(first, [3]) != hash_block("a", [3])


def test_the_same_content_keeps_its_first_block():
    cache = PrefixCache(2)
    first = fill(cache, [1, 2, 3, 4], [0, 1])
    second = fill(cache, [1, 2, 3, 4], [5, 6])
    assert second == first and len(cache) == 2
    assert cache.holds(0) and not cache.holds(5)


def test_a_collision_leaves_the_newcomer_without_a_name():
    def hash_all(parent_key: Hashable, tokens: Sequence[int]) -> Hashable:
        return 0

    cache = PrefixCache(2, hash_block=hash_all)
    [first] = fill(cache, [1, 2], [0])
    [second] = fill(cache, [3, 4], [1])
    assert second is not first and second.tokens == (3, 4)
    assert cache.holds(0) and not cache.holds(1) and len(cache) == 1
    assert ids(cache.match([3, 4, 0], "", 1)) == []
    cache.forget(1)  # has no name: nothing happens
    assert cache.holds(0)


def test_a_forgotten_block_is_not_found_and_breaks_the_chain_behind_it():
    cache = PrefixCache(2)
    tokens = [1, 2, 3, 4, 5, 6]
    fill(cache, tokens, [0, 1, 2])
    cache.forget(1)
    cache.forget(1)
    assert ids(cache.match(tokens, "", 3)) == [0]
    # Somebody computes that block anew, elsewhere: the one behind it still holds what it held, and is found by its content.
    cache.register(7, [3, 4], cache.match(tokens, "", 3)[0])
    assert ids(cache.match(tokens, "", 3)) == [0, 7, 2]


def test_a_chain_is_compared_to_its_root():
    cache = PrefixCache(1)
    [a, *_] = fill(cache, [1, 2], [0, 1])
    other = PrefixCache(1)
    [b, *_] = fill(other, [1, 2], [0, 1], salt="x")
    block = CachedBlock(2, "key", (2,), a)
    assert block.continues(a, (2,)) and not block.continues(a, (3,)) and not block.continues(b, (2,))
    assert not block.continues(cache.root(""), (2,))  # a chain of another length
    copy = CachedBlock(9, "key", (1,), cache.root(""))
    assert block.continues(copy, (2,))  # another object, the same content


def test_the_least_recently_used_idle_block_goes_first_and_loses_its_name():
    cache = PrefixCache(1)
    fill(cache, [1, 2, 3], [4, 5, 6])
    for block_id in (6, 5, 4):
        cache.idle[block_id] = None
    assert cache.pop_idle() == 6
    assert not cache.holds(6) and list(cache.idle) == [5, 4] and len(cache) == 2


def test_root_names_the_namespace_and_the_salt():
    assert len({PrefixCache(1, namespace).root(salt) for namespace in ("", "fp32") for salt in ("", "a")}) == 4
