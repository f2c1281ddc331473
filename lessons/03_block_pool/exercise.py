"""Exercise 03: the block pool.

Write the four methods. The engine will use your class instead of its own: `nanopd grade 03 exercise.py`.
You get the blocks and the free queue ready-made; read FreeBlockQueue first: popleft, remove, append.

Rules: K4 (touch), K5 (pop and evict), K6 (order), K7 (twins); see lessons/rules.md.
"""

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
        raise NotImplementedError("touch")

    def get_new_blocks(self, n: int) -> list[KVCacheBlock]:
        """`n` blocks from the head of the free queue, each held by one table from now on.

        What was cached in them must not be found any more.
        """
        raise NotImplementedError("get_new_blocks")

    def free(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One table less holds each of these blocks.

        Those that nobody holds any more go to the end of the free queue, in the order given. They can still be found.
        """
        raise NotImplementedError("free")

    def cache(self, block: KVCacheBlock, block_hash: bytes) -> None:
        """From now on this block can be found by its contents.

        Nothing happens if it can be found already, or if another block with these contents can.
        """
        raise NotImplementedError("cache")
