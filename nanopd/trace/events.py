"""What can be told about an engine: typed events, complete enough that replaying them gives its state (replay.py).

Whoever decides something calls its tracer with an event; that is `ignore` unless somebody wants to know. An event holds
what was decided and nothing that follows from it: that a popped block leaves the hash table, or that planned tokens
count as computed, a replay knows as well as the engine does.

    between two steps    Arrived, Dropped; Moved to an end, Freed (aborted)
    schedule             Refused, Freed, Moved (preempted, promoted); Allocated, Cached, Moved (admitted); Skipped; Planned
    the step has run     Transfer; Sampled; Moved to an end, Freed; Stepped

The names in comments (S3, K5 ...) are rules, see lessons/rules.md.
"""

from collections.abc import Callable

import msgspec


class Event(msgspec.Struct, tag_field="type", tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """Something that happened."""


Tracer = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The null tracer."""


class RequestEvent(Event):
    """Something that happened to one request."""

    request_id: str


class Arrived(RequestEvent):
    """A new request, at this place of `waiting`: its end, or with priorities somewhere else. With the id of a session that
    is there: further input, for its `streaming_queue` (S13)."""

    token_ids: list[int]
    max_tokens: int
    place: int = 0


class Dropped(RequestEvent):
    """Input number `at` of a session's `streaming_queue` leaves it: too long by now, or nobody waits for an answer (S13)."""

    at: int = 0


class Moved(RequestEvent):
    """A request came into another status, and so into another queue:

    running                   from its queue to the end of `running` (S4)
    preempted                 to the front of `waiting`, or to `place`: S3 case A, B or C; S8 when a step was taken back
    waiting for remote KVs    its blocks are reserved, and a connector fills them (S5)
    waiting for grammar       at its arrival: its grammar is being compiled (S12)
    waiting for input         a session whose answer has ended, to the end of `idle` (S13), or its input is refused, which
                              then leaves it: there is no token of an answer. Without computed tokens: it gives up its blocks
    waiting                   promoted: the data (S5) or the grammar (S12) is there; or nothing will come, it is computed
                              here (S10); a session, to `place`: with the first input of its `streaming_queue` (S13)
    stop, length, abort, error
    """

    status: str  # a value of RequestStatus
    num_computed: int = 0
    num_external: int = 0  # of those, how many a connector brings or brought
    rule: str = ""
    by: str = ""  # whose want of blocks it was
    place: int = 0


class Allocated(RequestEvent):
    """Its table got longer: by blocks found in the prefix cache (K4), then by blocks popped from the free queue (K5)."""

    block_ids: list[int]
    num_hits: int = 0


class Refused(RequestEvent):
    """There were too few free blocks for it: a preemption follows (S3), or nobody else is admitted (S4)."""

    wanted: int
    free: int  # without those among them that are its own hits


class Cached(RequestEvent):
    """Its blocks from number `start` of its table on were offered to the hash table. A block that has a hash, or whose
    hash is there, stays out (K7)."""

    start: int
    hashes: list[bytes]  # base64 in JSON


class Uncached(RequestEvent):
    """Its blocks from number `start` of its table on left the hash table: they were never computed (S8)."""

    start: int


class Freed(RequestEvent):
    """Its blocks, if it had any, went back, last one first (K6). `id (reclaiming)`: those that were quarantined."""


class Quarantined(RequestEvent):
    """It is without blocks from now on, but a peer may still touch those it had: they stay out of use (P4)."""


class Skipped(Event):
    """To the front of `skipped_waiting` (S6): their data is on its way (S5), their grammar is being compiled (S12), or the
    connector does not know yet (S4)."""

    request_ids: list[str]


class Planned(Event):
    """The plan of the step: id, first token and number of tokens of each request in it; and which of these are drafts."""

    scheduled: list[tuple[str, int, int]]
    drafts: dict[str, list[int]] = {}


class Sampled(Event):
    """Request id -> tokens: one, and one more for each draft that was right. The last is not computed, and what was computed
    behind it, of drafts that were wrong, does not count."""

    token_ids: dict[str, list[int]]
    num_common_prefix_blocks: int = 0  # at the start of all tables in the plan, read once for all (cascade attention)


class Stepped(Event):
    """The step has ended, or was taken back before it had run (S8)."""

    taken_back: bool = False


class Transfer(RequestEvent):
    """P's ("send") or D's ("recv") side of a transfer of KV blocks came to a state, see connector/protocol.py."""

    transfer_id: str
    side: str
    state: str
    about: str = ""  # the peer, how much, or what went wrong


Quiet = Refused | Skipped | Planned | Sampled | Stepped
"""The same ones again, and nothing else, change nothing."""

AnyEvent = Arrived | Dropped | Moved | Allocated | Cached | Uncached | Freed | Quarantined | Transfer | Quiet
