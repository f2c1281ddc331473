"""Exercise 06: the scheduler half of a connector to a store of KV blocks. The reference solution."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from nanopd.connector.base import KVConnectorScheduler
from nanopd.core.output import SchedulerOutput
from nanopd.request import Request, RequestStatus

REGULAR_ENDS = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH


class Index(Protocol):
    """Which blocks the store has."""

    def lookup(self, block_hash: bytes) -> bool | None:
        """Is the block with this hash in the store? None: the store has not answered yet; ask again in a later step."""
        ...


@dataclass
class StoreMeta:
    """What the worker half does in this step. By request id: pairs of a block hash and a block id, in order."""

    load: dict[str, list[tuple[bytes, int]]] = field(default_factory=dict)
    save: dict[str, list[tuple[bytes, int]]] = field(default_factory=dict)


class StoreScheduler(KVConnectorScheduler):
    def __init__(self, index: Index, block_size: int) -> None:
        self.index = index
        self.block_size = block_size
        self.next = StoreMeta()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        matched = 0
        for block_hash in request.block_hashes[num_computed_tokens // self.block_size :]:
            there = self.index.lookup(block_hash)
            if there is None:
                return None, False
            if not there:
                break
            matched += self.block_size
        return matched, True

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        if num_external_tokens == 0:
            return
        start = (request.num_computed_tokens - num_external_tokens) // self.block_size
        end = request.num_computed_tokens // self.block_size
        self.next.load[request.request_id] = list(zip(request.block_hashes[start:end], block_ids[start:end]))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StoreMeta:
        meta, self.next = self.next, StoreMeta()
        return meta

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if request.status not in REGULAR_ENDS:
            return False, None
        num_full = request.num_computed_tokens // self.block_size
        pairs = zip(request.block_hashes[:num_full], block_ids)
        missing = [(block_hash, i) for block_hash, i in pairs if self.index.lookup(block_hash) is False]
        if missing:
            self.next.save[request.request_id] = missing
        return bool(missing), None
