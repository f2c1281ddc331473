"""The blocks of the KV cache: who holds them, in which order they are reused, and what their contents are known to be.

A block is only a number here (where its bytes lie is the worker's business), with a reference count and, once it is
full, the hash of its contents. Three structures share the same KVCacheBlock objects:

    blocks                          all of them, by id
    free_queue                      those with reference count 0, next to be reused first
    cached_block_hash_to_block      those whose contents can be found again, free or not

A free block keeps its contents and its hash until somebody pops it: that is all a prefix cache is.
Rules K4-K7; lesson 03.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """One block. `prev_free` and `next_free` are its neighbours in the free queue, None while it is in use."""

    block_id: int
    ref_cnt: int = 0
    block_hash: bytes | None = None
    prev_free: "KVCacheBlock | None" = field(default=None, repr=False)
    next_free: "KVCacheBlock | None" = field(default=None, repr=False)


class FreeBlockQueue:
    """The free blocks, least recently used first.

    Why not a deque: a prefix hit takes a block out of the *middle*, which costs a deque O(n). The links live in the
    blocks themselves, so nothing is allocated when a block moves. Two sentinels stand at the ends, so no operation has
    to ask whether it is at an end.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.num_free = 0
        self._head, self._tail = KVCacheBlock(-1), KVCacheBlock(-1)
        self._head.next_free, self._tail.prev_free = self._tail, self._head
        self.append(blocks)

    def popleft(self, n: int) -> list[KVCacheBlock]:
        """The first `n` blocks. The caller has checked that there are as many."""
        assert n <= self.num_free, f"{n} blocks wanted, {self.num_free} free"
        popped, block = [], self._head.next_free
        for _ in range(n):
            assert block is not None
            popped.append(block)
            following = block.next_free
            block.prev_free = block.next_free = None
            block = following
        assert block is not None
        self._head.next_free, block.prev_free = block, self._head
        self.num_free -= n
        return popped

    def remove(self, block: KVCacheBlock) -> None:
        """Takes a block out, wherever it stands. O(1)."""
        before, after = block.prev_free, block.next_free
        assert before is not None and after is not None, f"block {block.block_id} is not free"
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None
        self.num_free -= 1

    def append(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Puts blocks at the end: they will be reused last, in this order."""
        last = self._tail.prev_free
        assert last is not None
        for block in blocks:
            last.next_free, block.prev_free = block, last
            last = block
            self.num_free += 1
        last.next_free, self._tail.prev_free = self._tail, last

    def in_order(self) -> list[KVCacheBlock]:
        """All free blocks, next to be reused first. O(n): for checks and pictures."""
        found, block = [], self._head.next_free
        while block is not None and block is not self._tail:
            found.append(block)
            block = block.next_free
        return found


class BlockPool:
    """All blocks of one engine.

    Reference counts say how many block tables hold a block. A block is in the free queue exactly when the count is 0.
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.free_queue = FreeBlockQueue(self.blocks)
        self.cached_block_hash_to_block: dict[bytes, KVCacheBlock] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.free_queue.num_free

    def get_cached_block(self, block_hash: bytes) -> KVCacheBlock | None:
        """The block with these contents, free or in use. It may be gone after the next `get_new_blocks` (rule K4)."""
        return self.cached_block_hash_to_block.get(block_hash)

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more table holds each of these: they leave the free queue if they were in it."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def get_new_blocks(self, n: int) -> list[KVCacheBlock]:
        """`n` blocks from the head of the free queue. What was cached in them is forgotten (rule K5)."""
        popped = self.free_queue.popleft(n)
        for block in popped:
            self.evict(block)
            block.ref_cnt = 1
        return popped

    def evict(self, block: KVCacheBlock) -> None:
        """The contents of this block can no longer be found."""
        if block.block_hash is not None:
            del self.cached_block_hash_to_block[block.block_hash]
            block.block_hash = None

    def free(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One table less holds each of these. Those that nobody holds go to the end of the free queue, in this order.

        A table gives its blocks back last block first (rule K6): the end of a sequence, which only the same sequence
        could ever reuse, is then reused before its beginning, which others may share.
        """
        freed = []
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                freed.append(block)
        self.free_queue.append(freed)

    def cache(self, block: KVCacheBlock, block_hash: bytes) -> None:
        """From now on this block can be found by its contents. A twin of one already in the table stays out (K7)."""
        if block.block_hash is None and block_hash not in self.cached_block_hash_to_block:
            self.cached_block_hash_to_block[block_hash] = block
            block.block_hash = block_hash
