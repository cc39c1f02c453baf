"""Who owns which block of the KV pool: the memory manager of the engine.

Why: keys and values live in fixed-size blocks, so a request takes memory as it grows and leaves no hole when
it ends. A request's block table lists its blocks in the order of its tokens; slot i of the request is
slot i % block_size of block table[i // block_size].

For a request with `computed` tokens that is about to compute up to `end`, the intervals of its slots are
    [0, shared)       filled by somebody else (a prefix hit or a fork), reference taken, never written here
    [shared, computed) filled by this request
    [computed, end)   to be written in this step, in blocks that only this request owns
    [end, ...)        free room in the last block, never read

Invariant, tested by check(): every block is in exactly one of free (clean), owned (referenced) and idle
(cached, no owner), and a block's reference count is the number of block tables that list it.

Taught in notebook 04.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from minserve.core.prefix_cache import CachedBlock, PrefixCache, hash_block
from minserve.core.request import Request


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are free: whoever asks should have looked first."""


@dataclass(slots=True)
class BlockTable:
    """One request's blocks, and how many of them are known to the prefix cache (as a chain)."""

    block_ids: list[int] = field(default_factory=list)
    chain: list[CachedBlock] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Share:
    """Blocks a request can start from without computing them: `num_tokens` tokens' worth."""

    block_ids: tuple[int, ...] = ()
    chain: tuple[CachedBlock, ...] = ()
    num_tokens: int = 0


class BlockManager:
    """Blocks 0 ... num_blocks - 1, their reference counts, the block tables and the prefix cache.

    >>> blocks = BlockManager(num_blocks=6, block_size=4)
    >>> blocks.num_blocks_for(9), blocks.num_free_blocks
    (3, 6)
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        namespace: str = "",
        hash_block: Callable[[Hashable, Sequence[int]], Hashable] = hash_block,
    ):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a pool needs at least 1 block of 1 slot, got {num_blocks} blocks of {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.cache = PrefixCache(block_size, namespace, hash_block)
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: low ids first, recently used ones again
        self._ref_counts = [0] * num_blocks
        self._tables: dict[str, BlockTable] = {}

    # --- looking ---------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken now: clean ones, and cached ones that nobody owns."""
        return len(self._free) + len(self.cache.idle)

    @property
    def free_ids(self) -> tuple[int, ...]:
        """The clean blocks, the next to be taken first."""
        return tuple(reversed(self._free))

    @property
    def num_idle_blocks(self) -> int:
        return len(self.cache.idle)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def table(self, request: Request) -> tuple[int, ...]:
        held = self._tables.get(request.request_id)
        return tuple(held.block_ids) if held else ()

    def num_held_blocks(self, request: Request) -> int:
        held = self._tables.get(request.request_id)
        return len(held.block_ids) if held else 0

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def num_new_blocks(self, request: Request, end: int) -> int:
        """Blocks that `grow(request, end)` would take, the copy of a shared last block included."""
        held = self._tables[request.request_id].block_ids
        return max(0, self.num_blocks_for(end) - len(held)) + (self._shared_write(request, held) is not None)

    def _shared_write(self, request: Request, held: list[int]) -> int | None:
        """Index of the block that the next token is written to, if somebody else owns that block too."""
        index = request.num_computed_tokens // self.block_size
        return index if index < len(held) and self._ref_counts[held[index]] > 1 else None

    # --- starting: what need not be computed -----------------------------------------------------

    def find_prefix(self, request: Request) -> Share:
        """Cached blocks that begin the request's tokens. A last token is left to compute: it gives logits."""
        if not self.prefix_caching:
            return Share()
        max_blocks = (request.num_tokens - 1) // self.block_size
        chain = self.cache.match(request.token_ids, request.salt, max_blocks)
        return Share(tuple(b.block_id for b in chain), tuple(chain), len(chain) * self.block_size)

    def find_fork(self, parent: Request, num_tokens: int) -> Share:
        """The blocks of a running request that hold its first tokens, the last one perhaps in part."""
        held = self._tables[parent.request_id]
        chain = held.chain[: num_tokens // self.block_size]
        return Share(tuple(held.block_ids[: self.num_blocks_for(num_tokens)]), tuple(chain), num_tokens)

    def num_idle_of(self, share: Share) -> int:
        """Blocks of the share that count as free now and will not once the share is taken."""
        return sum(block_id in self.cache.idle for block_id in share.block_ids)

    def start(self, request: Request, share: Share) -> None:
        """Give the request a block table that begins with the shared blocks, and a reference on each."""
        assert request.request_id not in self._tables, f"{request.request_id} already holds blocks"
        for block_id in share.block_ids:
            self.cache.idle.pop(block_id, None)
            self._ref_counts[block_id] += 1
        self._tables[request.request_id] = BlockTable(list(share.block_ids), list(share.chain))
        request.num_computed_tokens = share.num_tokens

    # --- growing ---------------------------------------------------------------------------------

    def grow(self, request: Request, end: int) -> tuple[int, int] | None:
        """Own every block that the slots [num_computed_tokens, end) fall into.

        Returns (source, target) where the first of them was shared and has to be copied before it is written.
        Raises OutOfBlocks, with nothing changed, when too few blocks are free.
        """
        num_new = self.num_new_blocks(request, end)
        if num_new > self.num_free_blocks:
            raise OutOfBlocks(
                f"{request.request_id} needs {num_new} blocks, "
                f"{self.num_free_blocks} of {self.num_blocks} are free"
            )
        held = self._tables[request.request_id].block_ids
        copy = None
        shared = self._shared_write(request, held)
        if shared is not None:
            copy = (held[shared], self._take())
            self._ref_counts[held[shared]] -= 1
            held[shared] = copy[1]
        while len(held) < self.num_blocks_for(end):
            held.append(self._take())
        return copy

    def commit(self, request: Request, end: int) -> None:
        """Make the full blocks up to `end` findable: nothing can take the request out of its step now."""
        if not self.prefix_caching:
            return
        held = self._tables[request.request_id]
        for index in range(len(held.chain), end // self.block_size):
            tokens = request.token_ids[index * self.block_size : (index + 1) * self.block_size]
            parent = held.chain[-1] if held.chain else self.cache.root(request.salt)
            held.chain.append(self.cache.register(held.block_ids[index], tokens, parent))

    def _take(self) -> int:
        """A block for one owner: a clean one while there is any, else the least recently used idle one."""
        block_id = self._free.pop() if self._free else self.cache.pop_idle()
        self._ref_counts[block_id] = 1
        return block_id

    # --- ending ----------------------------------------------------------------------------------

    def release(self, request: Request) -> None:
        """Drop the request's references, last block first. One that holds nothing is left as it is."""
        held = self._tables.pop(request.request_id, None)
        if held is None:
            return
        # Given up in the middle of a step: what the step was to fill has a name, and may never be filled.
        for block_id in held.block_ids[request.num_computed_tokens // self.block_size :]:
            self.cache.forget(block_id)
        for block_id in reversed(held.block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._park(block_id)

    def _park(self, block_id: int) -> None:
        if self.cache.holds(block_id):
            self.cache.idle[block_id] = None
        else:
            self._free.append(block_id)

    def distrust(self, request: Request) -> None:
        """The request's blocks may hold wrong values (its step failed, or gave NaN): nobody may find them."""
        for block_id in self.table(request):
            self.cache.forget(block_id)

    def flush_cache(self) -> int:
        """Forget everything cached, as after new weights. Returns how many blocks were forgotten.

        Raises RuntimeError, with nothing changed, while requests hold blocks: theirs were computed with the
        old weights too.
        """
        if self.num_used_blocks:
            held = f"{self.num_used_blocks} of {self.num_blocks} blocks are held by requests"
            raise RuntimeError(f"the cache cannot be flushed while {held}")
        num_forgotten = len(self.cache)
        for block_id in self.cache.idle:
            self.cache.forget(block_id)
        self._free.extend(self.cache.idle)
        self.cache.idle.clear()
        return num_forgotten

    # --- the conservation laws -------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError, with the numbers, if a block is lost, owned twice or counted wrongly."""
        owners = Counter(block_id for held in self._tables.values() for block_id in held.block_ids)
        free, idle = Counter(self._free), self.cache.idle
        twice = [block_id for block_id, count in free.items() if count > 1]
        assert not twice, f"free twice: {twice}"
        assert not free.keys() & idle.keys(), f"free and idle: {sorted(free.keys() & idle.keys())}"
        assert not owners.keys() & (free.keys() | idle.keys()), (
            f"owned, yet free or idle: {sorted(owners.keys() & (free.keys() | idle.keys()))}"
        )
        total = len(free) + len(idle) + len(owners)
        assert total == self.num_blocks, (
            f"{len(free)} free + {len(idle)} idle + {len(owners)} owned = {total}, "
            f"the pool has {self.num_blocks}"
        )
        for block_id in range(self.num_blocks):
            count = self._ref_counts[block_id]
            listed, is_known = owners[block_id], self.cache.holds(block_id)
            assert count == listed, f"block {block_id}: counted {count} owners, listed by {listed}"
            assert not (block_id in free and is_known), f"clean block {block_id} is in the cache"
            assert block_id not in idle or is_known, f"idle block {block_id} is not in the cache"
