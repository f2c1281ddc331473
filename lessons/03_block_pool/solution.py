"""The solution of exercise 03."""

from collections.abc import Iterable

from nanopd.core.block_pool import FreeBlockQueue, KVCacheBlock


class BlockPool:
    """All blocks of one engine. A block is in the free queue exactly when its reference count is 0."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.free_queue = FreeBlockQueue(self.blocks)
        self.cached_block_hash_to_block: dict[bytes, KVCacheBlock] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.free_queue.num_free

    def get_cached_block(self, block_hash: bytes) -> KVCacheBlock | None:
        """The block with these contents, free or in use."""
        return self.cached_block_hash_to_block.get(block_hash)

    def evict(self, block: KVCacheBlock) -> None:
        """The contents of this block can no longer be found."""
        if block.block_hash is not None:
            del self.cached_block_hash_to_block[block.block_hash]
            block.block_hash = None

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more table holds each of these blocks. One that was free leaves the free queue."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def get_new_blocks(self, n: int) -> list[KVCacheBlock]:
        """`n` blocks from the head of the free queue, each held by one table from now on.

        What was cached in them must not be found any more.
        """
        popped = self.free_queue.popleft(n)
        for block in popped:
            self.evict(block)
            block.ref_cnt = 1
        return popped

    def free(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One table less holds each of these blocks.

        Those that nobody holds any more go to the end of the free queue, in the order given. They can still be found.
        """
        freed = []
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                freed.append(block)
        self.free_queue.append(freed)

    def cache(self, block: KVCacheBlock, block_hash: bytes) -> None:
        """From now on this block can be found by its contents.

        Nothing happens if it can be found already, or if another block with these contents can.
        """
        if block.block_hash is None and block_hash not in self.cached_block_hash_to_block:
            self.cached_block_hash_to_block[block_hash] = block
            block.block_hash = block_hash
