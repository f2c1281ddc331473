"""What a KV connector is: two halves that talk through the scheduler's output and the worker's answer.

    scheduler process                               worker process
    KVConnectorScheduler   --- build_connector_meta --->   KVConnectorWorker.start_load_kv
                           <-- KVConnectorOutput ------    KVConnectorWorker.get_finished

The scheduler half decides which blocks are loaded and sent, and touches no memory; the worker half moves bytes, and
decides nothing. Rules S5, S10, K8, P3-P5; lesson 06. Names follow vLLM's KVConnectorBase_V1.
"""

from typing import Any, Protocol

from nanopd.core.output import KVConnectorOutput, SchedulerOutput, TransferStats
from nanopd.request import Request


class KVConnectorScheduler(Protocol):
    """The half that the scheduler asks. A connector that does not need one of the methods with a body leaves it as it is."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond `num_computed_tokens` (found here) can be had elsewhere, and whether they load
        asynchronously. None: not known yet, ask again in the next step. May be asked several times for one request."""

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """The request got its blocks (`block_ids`: its whole table); `num_external_tokens` of them are to be loaded."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """The plan of this step for the worker half. Called once a step, at its end."""

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended, whether or not it holds blocks (P5).

        Returns:
            Whether a peer may still read or write its blocks: then they stay held until the worker half reports the
            request in one of the sets of KVConnectorOutput (rule P4). And parameters for the client's answer.
        """
        return False, None

    def make_room(self) -> None:
        """Nothing can be scheduled for want of blocks: those held for peers that have not asked should be given up."""
        return

    def has_news(self) -> bool:
        """Is there anything that the worker half has to be told, even if no request is left to compute?"""
        return False

    def step_failed(self, metadata: Any) -> None:
        """The step with this plan failed, and the worker half may or may not have seen it: the plan has to be part of
        the next one again, and the worker half has to ignore what it has begun already."""
        return


class KVConnectorWorker(Protocol):
    """The half that moves bytes, in the process that owns the KV memory."""

    def start_load_kv(self, metadata: Any) -> None:
        """Starts what the scheduler half planned. Called at the start of each step; must not block."""

    def get_finished(self) -> KVConnectorOutput:
        """What has ended since the last call. Called at the end of each step, when all it computed is in the cache."""

    def stats(self) -> TransferStats:
        """What has been moved since the start."""

    def close(self) -> None:
        """Stops all transfers, threads and sockets."""
