"""Block tables, block hashes, and the prefix cache: which blocks a request holds, and which it can share.

    tokens   | t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9            block_size = 4
    hashes   | h0=H(seed,·)| h1=H(h0,·)  | -                only full blocks have one (rule K2)
    table    | B3          | B7          | B8               B3, B7 may be shared; B8 is this request's own

A hash covers its block *and everything before it*, so equal hashes mean equal prefixes, and a hit is always a prefix of
the chain: no hole is possible. Rules K1-K10; lessons 02 and 03.

This module decides; it moves no bytes. What it says is cached may still have to be computed in the step it was planned
for: that is safe, because in each layer a step writes all its K and V before any attention reads them. If the step does
not finish, `uncache_blocks` takes the promise back.
"""

import hashlib
from collections.abc import Iterable, Sequence

from nanopd.core.block_pool import BlockPool, KVCacheBlock
from nanopd.request import Request
from nanopd.trace.events import Allocated, Cached, Freed, Quarantined, Refused, Tracer, Uncached, ignore

HASH_SEED = hashlib.sha256(b"nanopd block hash").digest()
"""The parent of every first block, h_-1. The same in all processes, so that two engines agree on hashes."""


def hash_block(parent: bytes, token_ids: bytes, extra_keys: Sequence[str] = ()) -> bytes:
    """h_i = SHA-256(h_{i-1}, tokens, extra keys): 32 bytes (rule K2).

    A cryptographic hash, because a hit hands over another request's K and V without comparing any token: whoever could
    make two prompts collide could read one tenant's context from another.

    Args:
        parent: 32 bytes, `HASH_SEED` for the first block of a sequence.
        token_ids: the block's token ids, 8 bytes each.
        extra_keys: what must differ for equal tokens not to be shared, such as a cache salt.
    """
    h = hashlib.sha256(parent)
    h.update(token_ids)
    for key in extra_keys:
        encoded = key.encode()
        h.update(b"extra key of %d bytes:" % len(encoded) + encoded)
    return h.digest()


def reclaimed(request_id: str) -> str:
    """The name under which the blocks are kept that a request has given up and a peer may still touch."""
    return f"{request_id} (reclaiming)"


class KVCacheManager:
    """Allocates, shares and frees the blocks of requests.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens a block holds.
        prefix_caching: False: no hash is computed and nothing is ever found.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.trace: Tracer = ignore  # is told what happens; a scheduler tells the same one
        self.pool = BlockPool(num_blocks)
        self.tables: dict[str, list[KVCacheBlock]] = {}  # request id -> its blocks, in order of position
        self._num_offered: dict[str, int] = {}  # request id -> how many blocks of its table were offered to the cache

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return 1 - self.pool.num_free_blocks / len(self.pool.blocks)

    def get_block_ids(self, request_id: str) -> list[int]:
        return [block.block_id for block in self.tables.get(request_id, ())]

    def update_block_hashes(self, request: Request) -> None:
        """Hashes the blocks that have become full since the last call, each once (rule K3)."""
        size, hashes = self.block_size, request.block_hashes
        if not self.prefix_caching or (len(hashes) + 1) * size > request.num_tokens:
            return
        for start in range(len(hashes) * size, request.num_tokens - size + 1, size):
            extra = [request.cache_salt] if start == 0 and request.cache_salt else []
            tokens = request.token_ids[start : start + size].tobytes()
            hashes.append(hash_block(hashes[-1] if hashes else HASH_SEED, tokens, extra))

    def get_computed_blocks(self, request: Request) -> list[KVCacheBlock]:
        """The longest run of cached blocks at the start of the request, at most all tokens but one.

        One token is always left to compute: without it there would be no logits to sample from. Nothing is held yet:
        the answer is good until the next allocation, so hand it straight to `allocate_slots` (rule K4).
        """
        hits: list[KVCacheBlock] = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self.block_size]:
            block = self.pool.get_cached_block(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def allocate_slots(
        self,
        request: Request,
        num_computed_tokens: int,
        num_new_tokens: int,
        hits: Sequence[KVCacheBlock] = (),
        delay_caching: bool = False,
    ) -> list[KVCacheBlock] | None:
        """Makes the request's table long enough for what it is about to hold.

            | hits      | brought by a connector | num_new_tokens |   first allocation
            | in the table already               | num_new_tokens |   later ones
            |<------ num_computed_tokens ------->|

        Args:
            num_computed_tokens: tokens that are, or will be, there without computing them in this step.
            num_new_tokens: tokens to compute in this step, drafts included.
            hits: what `get_computed_blocks` found; only for a request that holds nothing yet.
            delay_caching: True while remote data has still to arrive (rule K8): nothing enters the hash table.

        Returns:
            The blocks that are new to the table, hits included, or None if the pool has too few: then nothing changed.
        """
        table = self.tables.get(request.request_id, [])
        num_tokens = num_computed_tokens + num_new_tokens
        num_new_blocks = -(-num_tokens // self.block_size) - len(table) - len(hits)
        new: list[KVCacheBlock] = []
        if num_new_blocks > 0 or hits:
            free_hits = sum(block.ref_cnt == 0 for block in hits)  # touching these takes them out of the free queue too
            if num_new_blocks > self.pool.num_free_blocks - free_hits:
                self.trace(Refused(request.request_id, num_new_blocks, self.pool.num_free_blocks - free_hits))
                return None
            self.pool.touch(hits)  # before popping, so that no new block is one of the hits (rule K4)
            new = [*hits, *self.pool.get_new_blocks(max(num_new_blocks, 0))]
            if not table:
                self.tables[request.request_id] = table
                self._num_offered[request.request_id] = len(hits)
            table.extend(new)
            self.trace(Allocated(request.request_id, [block.block_id for block in new], len(hits)))
        if not delay_caching:
            self.cache_blocks(request, min(num_tokens, request.num_tokens))  # without drafts (rule K9)
        return new

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Enters the full blocks among the first `num_tokens` tokens into the hash table."""
        if not self.prefix_caching:
            return
        num_full = num_tokens // self.block_size
        start = self._num_offered[request.request_id]
        if num_full > start:
            table = self.tables[request.request_id]
            for i in range(start, num_full):
                self.pool.cache(table[i], request.block_hashes[i])
            self.trace(Cached(request.request_id, start, request.block_hashes[start:num_full]))
            self._num_offered[request.request_id] = num_full

    def uncache_blocks(self, request: Request, num_tokens: int) -> None:
        """Takes the blocks beyond the first `num_tokens` tokens out of the hash table: they were never computed."""
        self.trace(Uncached(request.request_id, num_tokens // self.block_size))
        for block in self.tables[request.request_id][num_tokens // self.block_size :]:
            self.pool.evict(block)

    def free(self, request_id: str) -> None:
        """Gives back all blocks of the request, last block first (rule K6). Without blocks, does nothing."""
        self.trace(Freed(request_id))
        self.pool.free(reversed(self.tables.pop(request_id, ())))
        self._num_offered.pop(request_id, None)

    def quarantine(self, request_id: str) -> None:
        """Takes the blocks away from the request without freeing them: a peer may still touch them (rule P4).
        `free(reclaimed(request_id))` does it later."""
        self.trace(Quarantined(request_id))
        self.tables[reclaimed(request_id)] = self.tables.pop(request_id)
        self._num_offered.pop(request_id, None)

    def get_num_common_prefix_blocks(self, running: Sequence[Request]) -> int:
        """How many blocks at the start of their tables all running requests share (for cascade attention).

        A block that every table holds has as many references as there are tables. Requests that hold blocks without
        running make the answer smaller, never wrong.
        """
        count = 0
        for block in self.tables.get(running[0].request_id, ()) if len(running) > 1 else ():
            if block.ref_cnt < len(self.tables):
                break
            count += 1
        return count

    def check_invariants(self, unfinished: Iterable[str] | None = None) -> None:
        """Raises AssertionError if the books do not balance (rule K10).

        Args:
            unfinished: ids of the requests that may hold blocks; with None that part is not checked.
        """
        pool = self.pool
        held = [0] * len(pool.blocks)
        for request_id, table in self.tables.items():
            assert len({block.block_id for block in table}) == len(table), f"{request_id} holds a block twice: {table}"
            for block in table:
                held[block.block_id] += 1
        for block in pool.blocks:
            assert block.ref_cnt == held[block.block_id], f"{block}: {held[block.block_id]} tables hold it"
        free = [block.block_id for block in pool.free_queue.in_order()]
        assert len(free) == len(set(free)) == pool.num_free_blocks, f"free queue: a block twice, or miscounted: {free}"
        unheld = {i for i, count in enumerate(held) if count == 0}
        assert set(free) == unheld, "the free queue is not the set of unheld blocks"
        for block_hash, block in pool.cached_block_hash_to_block.items():
            assert block.block_hash == block_hash, f"the hash table says {block_hash.hex()[:8]}, {block} does not"
        hashed = sum(block.block_hash is not None for block in pool.blocks)
        assert hashed == len(pool.cached_block_hash_to_block), "a block has a hash that the table does not know"
        if unfinished is not None:
            leaked = self.tables.keys() - set(unfinished)
            assert not leaked, f"requests that hold blocks but are not there any more: {sorted(leaked)}"
