"""The state of an engine and the state that replaying its trace gives, as plain data that can be compared."""

from typing import Any

from nanopd.core.kv_cache import KVCacheManager
from nanopd.core.scheduler import Scheduler
from nanopd.request import Request
from nanopd.trace.replay import State


def _describe(kv: KVCacheManager, requests: dict[str, Request], queues: dict[str, list[str]]) -> dict[str, Any]:
    pool = kv.pool
    return {
        "queues": queues,
        "requests": {i: [r.status.value, r.num_computed_tokens, r.token_ids.tolist()] for i, r in requests.items()},
        "further_input": {i: [t.token_ids.tolist() for t in r.streaming_queue] for i, r in requests.items()},
        "tables": {i: [block.block_id for block in table] for i, table in kv.tables.items()},
        "ref_cnt": [block.ref_cnt for block in pool.blocks],
        "free_queue": [block.block_id for block in pool.free_queue.in_order()],
        "hash_table": {h.hex(): block.block_id for h, block in pool.cached_block_hash_to_block.items()},
        "hashes": [block.block_hash.hex() if block.block_hash else None for block in pool.blocks],
    }


def of_engine(scheduler: Scheduler) -> dict[str, Any]:
    names = ("waiting", "skipped_waiting", "running")
    queues = {name: [r.request_id for r in getattr(scheduler, name)] for name in names} | {
        "idle": [*scheduler.sessions.idle]
    }
    return _describe(scheduler.kv, scheduler.requests, queues)


def of_replay(state: State) -> dict[str, Any]:
    queues = {name: list(getattr(state, name)) for name in ("waiting", "skipped_waiting", "running", "idle")}
    unfinished = {i: r for i, r in state.requests.items() if not r.status.is_finished}
    return _describe(state.kv, unfinished, queues)
