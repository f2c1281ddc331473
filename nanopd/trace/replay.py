"""Replays a trace: at each step the state that the engine had, rebuilt from what it had told.

The books are kept by the engine's own classes, a KVCacheManager and Requests; but nothing is decided here. So a trace
that leaves something out, or an engine that breaks a rule, is found out: blocks that are not next in the free queue, a
transition that is not legal. The HTML viewer does the same in JavaScript; tests hold the two and the engine together.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby

from nanopd.config import SamplingParams, UserError
from nanopd.core.kv_cache import KVCacheManager
from nanopd.request import Request, RequestStatus
from nanopd.trace import events as ev
from nanopd.trace.file import Header, Line


class State:
    """One engine at one moment. Queues hold request ids; `requests` holds those that have ended too."""

    def __init__(self, header: Header) -> None:
        self.kv = KVCacheManager(header.num_blocks, header.config.block_size)
        self.requests: dict[str, Request] = {}
        self.waiting, self.skipped_waiting, self.running, self.idle, self.finished = (list[str]() for _ in range(5))

    def apply(self, event: ev.Event) -> None:
        """What the event did. Raises UserError if it cannot have happened here."""
        pool, tables = self.kv.pool, self.kv.tables
        match event:
            case ev.Arrived(i, token_ids, max_tokens, place):
                request, session = Request(i, token_ids, SamplingParams(max_tokens=max_tokens)), self.requests.get(i)
                if session and not session.status.is_finished:
                    session.streaming_queue.append(request)
                else:
                    self.requests[i] = request
                    self.waiting.insert(place, i)
            case ev.Dropped(i, at):
                del self.requests[i].streaming_queue[at]
            case ev.Moved():
                self._move(event, RequestStatus(event.status))
            case ev.Allocated(i, ids, num_hits):
                hits = [pool.blocks[b] for b in ids[:num_hits]]
                pool.touch(hits)
                got = [*hits, *pool.get_new_blocks(len(ids) - num_hits)]
                if [block.block_id for block in got] != ids:
                    raise UserError(f"The trace is not complete: blocks {ids} were not next in the free queue.")
                tables.setdefault(i, []).extend(got)
            case ev.Cached(i, start, hashes):
                for block, block_hash in zip(tables[i][start:], hashes):
                    pool.cache(block, block_hash)
            case ev.Uncached(i, start):
                for block in tables[i][start:]:
                    pool.evict(block)
            case ev.Freed(i):
                self.kv.free(i)
            case ev.Quarantined(i):
                self.kv.quarantine(i)
            case ev.Skipped(ids):
                self.waiting = [i for i in self.waiting if i not in ids]
                self.skipped_waiting = ids + [i for i in self.skipped_waiting if i not in ids]
            case ev.Planned(scheduled):
                for i, start, num_new in scheduled:
                    self.requests[i].num_computed_tokens = start + num_new  # S8
            case ev.Sampled(token_ids):
                for i in token_ids.keys() & set(self.running):
                    request = self.requests[i]
                    request.token_ids.extend(token_ids[i])
                    request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)

    def _move(self, event: ev.Moved, status: RequestStatus) -> None:
        i, request = event.request_id, self.requests[event.request_id]
        request.num_computed_tokens, request.num_external_tokens = event.num_computed, event.num_external
        if status is request.status:
            return
        resumed = request.status is RequestStatus.WAITING_FOR_STREAMING_REQ and not status.is_finished
        if status is RequestStatus.WAITING_FOR_STREAMING_REQ and not request.num_output_tokens:
            request.give_back()
        if resumed:
            request.resume()
        else:
            request.status = status
        goes_to = {RequestStatus.RUNNING: self.running, RequestStatus.WAITING_FOR_STREAMING_REQ: self.idle}
        if resumed or status in goes_to or status is RequestStatus.PREEMPTED or status.is_finished:
            for queue in (self.waiting, self.skipped_waiting, self.running, self.idle):
                queue[:] = [other for other in queue if other != i]
            if resumed or status is RequestStatus.PREEMPTED:
                self.waiting.insert(event.place, i)
            else:
                goes_to.get(status, self.finished).append(i)


def replay(header: Header, lines: Iterable[Line]) -> Iterator[tuple[int, list[Line], State]]:
    """For each step its number, its events, and the state after it: one object, which changes with the next step."""
    state = State(header)
    for step, group in groupby(lines, key=lambda line: line.step):
        happened = list(group)
        for line in happened:
            state.apply(line.event)
        yield step, happened, state
