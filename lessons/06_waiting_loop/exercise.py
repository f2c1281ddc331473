"""Exercise 06: the scheduler half of a connector to a store of KV blocks.

The store lies outside the engine (in CPU memory, say, or on another machine) and keeps blocks by their hash. When a request
ends, its blocks are saved there; when a request with the same prefix comes, in this engine or in another, they are loaded.

You write the half that the scheduler asks; it touches no memory. The worker half, which copies the bytes, is there
already. `nanopd grade 06 exercise.py` puts your half into the real scheduler, and at the end into the real engine.

Rules: S4, S5, K8, and P4 (blocks somebody still reads are not given away); see lessons/rules.md, and the docstrings of
nanopd/connector/base.py.
"""

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
    """What you need of a request:

    `block_hashes`          one for each full block, in order
    `num_computed_tokens`   after an allocation: local hit + external tokens; at the end: tokens that have K and V
    `status`                at the end: one of REGULAR_ENDS, or it was cut short
    """

    def __init__(self, index: Index, block_size: int) -> None:
        self.index = index
        self.block_size = block_size
        self.next = StoreMeta()  # what the worker half has to be told at the end of this step

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens the store has *beyond* `num_computed_tokens` (whole blocks, found here), without a hole.

        Returns (tokens, True): the store always loads asynchronously. (None, False) as soon as it depends on a block of
        which the store does not know yet. Takes no notes: it may be asked several times, or for nothing.
        """
        raise NotImplementedError("get_num_new_matched_tokens")

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """Notes which blocks are to be loaded, and into which of `block_ids` (the whole table, local hits first).

        Called for every request that was asked about and got its blocks, also with 0 external tokens.
        """
        raise NotImplementedError("update_state_after_alloc")

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StoreMeta:
        """All that was noted since the last call. Each load and each save is told once."""
        raise NotImplementedError("build_connector_meta")

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Notes what is to be saved: the full blocks that are computed and that the store says it lacks.

        A request that was cut short is not saved: what its blocks hold may not be there yet.

        Returns:
            Whether the blocks must stay held until the worker half reports that it has read them. It reports only what
            it was told to save: blocks that are held for nothing stay held for ever. And None, for the client.
        """
        raise NotImplementedError("request_finished")
