"""Which full blocks already hold the keys and values of a given beginning of tokens.

Why: requests that start alike (a system prompt, an earlier turn) need not compute the same keys and values
twice. A full block is named by a chained hash: the hash of the block before it and its own tokens; the first
block's predecessor is the root, which names everything else that shapes the values (model, KV format, salt).

Invariant: a hit is never taken on the hash alone. The tokens of the block and of every block before it are
compared, so a collision costs a miss, not a wrong answer. Cached blocks without an owner are idle; the least
recently used idle block is given up first, and since owners release their last block first, the tail of a
chain goes before its head.

Taught in notebook 07.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True, eq=False)
class CachedBlock:
    """A full block whose content is known: its tokens, and the chain before it (a root is a plain string)."""

    block_id: int
    key: Hashable
    tokens: tuple[int, ...]
    parent: "CachedBlock | str"

    def continues(self, parent: "CachedBlock | str", tokens: tuple[int, ...]) -> bool:
        """True if this block really holds `tokens` behind `parent`, by value and not by hash."""
        return self.tokens == tokens and _same_chain(self.parent, parent)


def _same_chain(a: CachedBlock | str, b: CachedBlock | str) -> bool:
    while isinstance(a, CachedBlock) and isinstance(b, CachedBlock):
        if a is b:
            return True
        if a.tokens != b.tokens:
            return False
        a, b = a.parent, b.parent
    return a == b


def hash_block(parent_key: Hashable, tokens: Sequence[int]) -> Hashable:
    """128 bits over the predecessor's key and the tokens: an accident in a billion blocks is below 1e-20."""
    head = parent_key if isinstance(parent_key, bytes) else repr(parent_key).encode()
    return blake2b(head + array("q", tokens).tobytes(), digest_size=16).digest()


class PrefixCache:
    """Chained block hashes -> block id, and the idle blocks in the order in which they will be given up."""

    def __init__(
        self,
        block_size: int,
        namespace: str = "",
        hash_block: Callable[[Hashable, Sequence[int]], Hashable] = hash_block,
    ):
        self.block_size = block_size
        self.namespace = namespace  # model and KV format: whatever else shapes keys and values
        self.idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._hash_block = hash_block
        self._by_key: dict[Hashable, CachedBlock] = {}
        self._by_id: dict[int, CachedBlock] = {}

    def root(self, salt: str) -> str:
        return f"{self.namespace}\x00{salt}"

    def match(self, tokens: Sequence[int], salt: str, max_blocks: int) -> list[CachedBlock]:
        """The longest cached chain of full blocks that begins `tokens`, at most `max_blocks` of them."""
        chain: list[CachedBlock] = []
        parent: CachedBlock | str = self.root(salt)
        for start in range(0, max_blocks * self.block_size, self.block_size):
            own = tuple(tokens[start : start + self.block_size])
            found = self._by_key.get(self._hash_block(_key(parent), own))
            if found is None or not found.continues(parent, own):
                break
            chain.append(found)
            parent = found
        return chain

    def register(self, block_id: int, tokens: Sequence[int], parent: CachedBlock | str) -> CachedBlock:
        """Make a full block findable. Returns the block under which this content is known from now on.

        When another block already holds the same content, that one stays the known one: two requests that
        computed the same tokens at the same time keep a copy each, and only the first copy is found later.
        """
        own = tuple(tokens)
        key = self._hash_block(_key(parent), own)
        known = self._by_key.get(key)
        if known is not None and known.continues(parent, own):
            return known
        block = CachedBlock(block_id, key, own, parent)
        if known is None:  # a collision leaves the newcomer without a name: slower, never wrong
            self._by_key[key] = self._by_id[block_id] = block
        return block

    def forget(self, block_id: int) -> None:
        """The block's content is gone or not to be trusted: no later request may find it."""
        block = self._by_id.pop(block_id, None)
        if block is not None:
            del self._by_key[block.key]

    def holds(self, block_id: int) -> bool:
        return block_id in self._by_id

    def pop_idle(self) -> int:
        """Give up the least recently used block that nobody owns."""
        block_id, _ = self.idle.popitem(last=False)
        self.forget(block_id)
        return block_id

    def __len__(self) -> int:
        return len(self._by_id)


def _key(parent: CachedBlock | str) -> Hashable:
    return parent.key if isinstance(parent, CachedBlock) else parent
