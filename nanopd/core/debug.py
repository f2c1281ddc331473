"""A scheduler from outside: what it holds, and what is true of its queues after every step."""

from typing import TYPE_CHECKING, Any

from nanopd.core.kv_cache import reclaimed
from nanopd.request import BLOCKED, RequestStatus

if TYPE_CHECKING:
    from nanopd.core.scheduler import Scheduler


def describe(s: "Scheduler") -> dict[str, Any]:
    """Who is in which queue, how far each request is, and how many blocks are free."""
    pool, fields = s.kv.pool, ("num_computed_tokens", "num_tokens")
    queues = {name: [r.request_id for r in getattr(s, name)] for name in ("waiting", "skipped_waiting", "running")}
    queues |= {"idle": [*s.sessions.idle], "reclaiming": sorted(s.reclaiming)}
    queues["streaming_queue"] = [turn.request_id for r in s.requests.values() for turn in r.streaming_queue]
    details = {i: {"status": r.status.value} | {f: getattr(r, f) for f in fields} for i, r in s.requests.items()}
    return queues | {"requests": details, "free_blocks": pool.num_free_blocks, "num_blocks": len(pool.blocks)}


def check_queues(s: "Scheduler") -> None:
    """Each unfinished request stands in exactly one queue, where its status belongs; and the books of the blocks balance
    (rule K10). Raises AssertionError."""
    s.kv.check_invariants([*s.requests, *map(reclaimed, s.reclaiming)])
    waiting = [*s.waiting, *s.skipped_waiting]
    queued = [r.request_id for r in (*s.running, *waiting, *s.sessions.idle.values())]
    assert sorted(queued) == sorted(s.requests), f"queues hold {queued}, requests are {list(s.requests)}"
    assert all(r.status is RequestStatus.RUNNING for r in s.running), f"{s.running}"
    assert all(r.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED, *BLOCKED) for r in waiting), f"{waiting}"
    idle = [r for r in s.sessions.idle.values() if r.status is RequestStatus.WAITING_FOR_STREAMING_REQ]
    assert len(idle) == len(s.sessions.idle) and not any(r.streaming_queue for r in idle), f"{s.sessions.idle}"
    remote = {r.request_id for r in waiting if r.status is RequestStatus.WAITING_FOR_REMOTE_KVS}
    assert remote == s.loading | s.finished_recving_kv_req_ids
    blocked = {r.request_id for r in waiting if r.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR}
    assert s.compiling <= blocked, f"compiling {s.compiling}, blocked {blocked}"
    held = len(s.kv.pool.blocks) - s.kv.pool.num_free_blocks
    assert s.requests or s.reclaiming or not held, f"nothing is unfinished, yet {held} blocks are held"
