"""The scheduler: which request computes how many tokens in the next step.

There is no prefill phase and no decode phase (rule S1). Each request has `num_computed_tokens` and wants to catch up
with `num_tokens_with_spec`; every step hands out a budget of tokens, to the running requests first and then to the
waiting ones. A chunk of a long prompt, a decode (one token) and a prefix hit are the same case with different numbers.

    add_request -> waiting -----------.             .--> running --> finished
                   skipped_waiting ---+-> schedule -+
                     ^                              '--> step_skipped_waiting --.
                     '----------------- end of the step -----------------------'

A session's answer ends, and the request stays: `idle`, until its next input brings it back to `waiting` (S13).

It knows nothing about tensors, text or sockets. Rules S1-S13; lessons 04, 05 and 06.
"""

import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Container, Iterable
from itertools import chain
from typing import TYPE_CHECKING

from nanopd.config import EngineConfig, require
from nanopd.core.block_pool import KVCacheBlock
from nanopd.core.debug import check_queues, describe
from nanopd.core.kv_cache import KVCacheManager, reclaimed
from nanopd.core.ngram import propose
from nanopd.core.output import (
    CachedRequestData,
    EngineCoreOutput,
    KVConnectorOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    SchedulerStats,
)
from nanopd.core.sessions import Sessions
from nanopd.request import BLOCKED, TRANSITIONS, Request, RequestStatus, check_length
from nanopd.trace.events import Arrived, Moved, Planned, Sampled, Skipped, Stepped, ignore

if TYPE_CHECKING:
    from nanopd.connector.base import KVConnectorScheduler
    from nanopd.engine.structured_output import StructuredOutputManager


class Scheduler:
    """Owns all unfinished requests of an engine.

    Args:
        config: budget, chunk threshold, most running requests, and what to do when a KV load failed (rule S10).
        kv: block tables and prefix cache.
        max_model_len: longest prompt + output; lowered to what the pool can hold, so that one request alone can
            always finish (rule S9).
        connector: asked for tokens that were computed elsewhere; None: nothing comes from elsewhere.
        structured_outputs: compiles grammars and says which tokens they allow; None: no request may have one.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KVCacheManager,
        max_model_len: int,
        connector: "KVConnectorScheduler | None" = None,
        structured_outputs: "StructuredOutputManager | None" = None,
    ) -> None:
        self.config = config
        self.kv, self.trace = kv, kv.trace
        self.max_model_len = min(max_model_len, len(kv.pool.blocks) * kv.block_size)
        self.connector, self.structured_outputs = connector, structured_outputs

        self.requests: dict[str, Request] = {}  # all that are unfinished
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.skipped_waiting: deque[Request] = deque()  # asked before and not ready then: asked first in the next step
        self.sessions = Sessions(self)  # holds those that are idle (S13)
        self.loading: set[str] = set()  # ids in WAITING_FOR_REMOTE_KVS whose data may still be on its way
        self.finished_recving_kv_req_ids: set[str] = set()  # their data is there; they can be promoted
        self.compiling: set[str] = set()  # ids whose grammar is not ready (rule S12)
        self.reclaiming: set[str] = set()  # ended or given up, but a peer may still touch their blocks (rule P4)
        self._finished_req_ids: set[str] = set()  # ended since the last step, for the worker
        self.lost_req_ids: set[str] = set()  # alive, but the worker must forget them: of a lost step, or idle
        self._num_preemptions = self._num_queried = self._num_hit = self._num_scheduled = 0
        self._num_drafts = self._num_accepted = self._num_blocks_saved = 0

    # ---------------------------------------------------------------- requests come and go

    def add_request(self, request: Request) -> None:
        """Puts a request into `waiting`, behind all that go first; further input of a session into its `streaming_queue`.

        Raises UserError if it could never be served (S9), or if its session has ended.
        """
        request_id, session = request.request_id, self.requests.get(request.request_id)
        require(session is not None or not request.turn, f"Session {request_id!r} has ended; begin another one.")
        in_use = not request.turn and (session is not None or request_id in self.reclaiming)
        require(not in_use, f"Request id {request_id!r} is already in use; ids of unfinished requests must differ.")
        if session is None or request_id in self.sessions.idle:  # else when it is taken up
            check_length(request.num_tokens, session.num_tokens if session else 0, self.max_model_len)
        if self.trace is not ignore:
            most, place = request.sampling_params.max_tokens, 0 if session else self._place(request)
            self.trace(Arrived(request_id, request.token_ids.tolist(), most, place))
        if session:
            self.sessions.add(session, request)
        else:
            self.requests[request_id] = request
            self.queue(request)

    def queue(self, request: Request) -> None:
        """Into `waiting`. With a grammar it also has to wait for that."""
        self.kv.update_block_hashes(request)
        place = self._place(request)
        self.waiting.insert(place, request)
        if request.turn:
            self.trace_move(request, "S13", place=place)
        if request.sampling_params.structured_outputs:
            assert self.structured_outputs, "nobody compiles grammars here"
            self.structured_outputs.start(request)
            self.compiling.add(request.request_id)
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            self.trace_move(request, "S12")

    def _place(self, request: Request) -> int:
        """In `waiting`: behind all that go first."""
        return bisect_right(self.waiting, self._rank(request), key=self._rank)

    def _rank(self, request: Request) -> float:
        """Who ranks lowest goes first, and is preempted last. FCFS: all rank the same, and queues keep their order.

        With priorities a request ranks as if it had arrived `priority * priority_seconds` later. So waiting raises
        everybody alike, the order of two requests never changes, and nobody starves: a request gives way to those of a
        priority lower by n only if they arrive less than `n * priority_seconds` after it.
        """
        if self.config.scheduling_policy == "fcfs":
            return 0.0
        return request.metrics.arrival_time + request.priority * self.config.priority_seconds

    def finish_requests(
        self, request_ids: Iterable[str], status: RequestStatus = RequestStatus.FINISHED_ABORTED
    ) -> None:
        """Ends requests in whatever state they are, at any moment between two steps. Unknown ids are ignored."""
        ended = {i: self.requests[i] for i in request_ids if i in self.requests}
        if not ended:
            return
        for request in ended.values():
            request.status = status
            self._release(request)
        self.leave_queues(ended)

    def leave_queues(self, request_ids: Container[str]) -> None:
        """These stand in none of the queues any more."""
        self.running = [r for r in self.running if r.request_id not in request_ids]
        self.waiting = deque(r for r in self.waiting if r.request_id not in request_ids)
        self.skipped_waiting = deque(r for r in self.skipped_waiting if r.request_id not in request_ids)

    def has_unfinished_requests(self) -> bool:
        return bool(self.num_active or self.reclaiming or (self.connector and self.connector.has_news()))

    @property
    def num_active(self) -> int:
        """Unfinished requests that want something: all but idle sessions."""
        return len(self.requests) - len(self.sessions.idle)

    # ---------------------------------------------------------------- one step

    def schedule(self) -> SchedulerOutput:
        """Decides one step. Raises RuntimeError if the engine could never go on (rule S11: that would be a bug)."""
        output = SchedulerOutput(finished_req_ids=self._finished_req_ids, lost_req_ids=self.lost_req_ids)
        self._finished_req_ids, self.lost_req_ids = set(), set()
        try:
            self._schedule_running(output)
            # After a preemption nobody is admitted: whoever was thrown out must not come back past those who stayed.
            lookups_pending = not output.preempted_req_ids and self._schedule_waiting(output)
            if self.num_active and not output.num_scheduled_tokens:
                self._ensure_progress(lookups_pending, bool(output.preempted_req_ids))
            output.num_common_prefix_blocks = self.kv.get_num_common_prefix_blocks(self.running)
            if self.connector:
                output.kv_connector_metadata = self.connector.build_connector_meta(output)
            for request_id, num_new in output.num_scheduled_tokens.items():
                request = self.requests[request_id]
                request.num_computed_tokens += num_new  # S8: as if the step had already run
                if request.spec_token_ids:
                    num_drafts = max(0, request.num_computed_tokens - request.num_tokens)
                    del request.spec_token_ids[num_drafts:]  # S2 has cut these
                    output.scheduled_spec_decode_tokens[request_id] = request.spec_token_ids
                if self.structured_outputs and request.num_computed_tokens >= request.num_tokens:
                    output.grammar_bitmask |= self.structured_outputs.bitmask(request)
            if self.trace is not ignore:
                planned = output.num_scheduled_tokens.items()
                plan = [(i, self.requests[i].num_computed_tokens - n, n) for i, n in planned]
                self.trace(Planned(plan, output.scheduled_spec_decode_tokens))
        except BaseException:
            self.take_back(output)
            raise
        self._num_scheduled += output.total_num_scheduled_tokens
        return output

    def take_back(self, output: SchedulerOutput) -> None:
        """A planned step was not carried out: what it was to compute is not there, and must not be found by a lookup.

        Everyone in it is preempted: the worker may have got half-way with them, and forgets them this way too. The ids
        it was to hear of are told again.
        """
        known = {r.request_id: r.num_computed_tokens for r in output.scheduled_cached_reqs}
        computed = known | {r.request_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        for request in reversed([r for r in self.running if r.request_id in computed]):
            good = computed[request.request_id]
            if request.request_id not in known:  # what a connector was to bring with the step may not be there either
                good -= request.num_external_tokens
            self.kv.uncache_blocks(request, good)
            self._preempt(request, "S8")
        self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]
        self._finished_req_ids |= output.finished_req_ids
        self.lost_req_ids |= output.lost_req_ids | output.preempted_req_ids | computed.keys()
        if self.connector and output.kv_connector_metadata is not None:
            self.connector.step_failed(output.kv_connector_metadata)
        self.trace(Stepped(taken_back=True))

    def _schedule_running(self, output: SchedulerOutput) -> None:
        """S2, S3. `running` may get shorter while we walk it (FCFS: at its end): that is preemption."""
        i = 0
        while (
            i < len(self.running)
            and (budget := self.config.max_num_batched_tokens - output.total_num_scheduled_tokens) > 0
        ):
            request = self.running[i]
            i += 1
            num_new = self._num_new_tokens(request, request.num_computed_tokens, budget)
            if num_new == 0:
                continue
            while (new_blocks := self.kv.allocate_slots(request, request.num_computed_tokens, num_new)) is None:
                idle = self.sessions.idle.values()
                if self.sessions.take_blocks(chain(idle, reversed(self.waiting), reversed(self.skipped_waiting))):
                    continue
                victim = max(reversed(self.running), key=self._rank)  # FCFS: the last
                at = self.running.index(victim)
                del self.running[at]
                i -= at < i
                case = "S3 case B" if victim is request else "S3 case A"
                if given_back := output.num_scheduled_tokens.pop(victim.request_id, 0):  # with priorities only
                    case = "S3 case C"
                    output.total_num_scheduled_tokens -= given_back
                    cached = output.scheduled_cached_reqs
                    output.scheduled_cached_reqs = [r for r in cached if r.request_id != victim.request_id]
                    self.kv.uncache_blocks(victim, victim.num_computed_tokens)  # what this step was to compute
                self._preempt(victim, case, request.request_id)
                output.preempted_req_ids.add(victim.request_id)
                if victim is request:  # case B: even without those who go after it there is not enough
                    break
                # cases A and C: somebody gave blocks; try again
            if new_blocks is None:
                continue
            block_ids = [block.block_id for block in new_blocks]
            delta = CachedRequestData(request.request_id, block_ids, request.num_computed_tokens)
            output.scheduled_cached_reqs.append(delta)
            output.num_scheduled_tokens[request.request_id] = num_new
            output.total_num_scheduled_tokens += num_new

    def _schedule_waiting(self, output: SchedulerOutput) -> bool:
        """S4, S5, S6. Returns whether a connector still owes an answer about somebody."""
        lookups_pending = False
        step_skipped_waiting: list[Request] = []
        try:
            while (self.skipped_waiting or self.waiting) and len(self.running) < self.config.max_num_seqs:
                budget = self.config.max_num_batched_tokens - output.total_num_scheduled_tokens
                if budget == 0:
                    break
                queues = [queue for queue in (self.skipped_waiting, self.waiting) if queue]
                queue = min(queues, key=lambda queue: self._rank(queue[0]))  # FCFS: skipped_waiting, if there is any
                request = queue[0]
                if request.status in BLOCKED and not self._try_promote(request):
                    step_skipped_waiting.append(queue.popleft())
                    continue

                hits: list[KVCacheBlock] = []
                num_computed, num_external, load_async = request.num_computed_tokens, 0, False
                holds_blocks = request.request_id in self.kv.tables  # its remote load has ended, or it is a session
                if not holds_blocks:  # what is computed already, here or elsewhere?
                    hits = self.kv.get_computed_blocks(request)
                    num_computed = len(hits) * self.kv.block_size
                    if self.connector and request.ask_connector:
                        matched, load_async = self.connector.get_num_new_matched_tokens(request, num_computed)
                        if matched is None:
                            lookups_pending = True
                            step_skipped_waiting.append(queue.popleft())
                            continue
                        load_async = load_async and matched > 0
                        num_external = min(matched, request.num_tokens - num_computed - (0 if load_async else 1))
                        num_computed += num_external
                num_new = 0 if load_async else self._num_new_tokens(request, num_computed, budget)
                if self.kv.allocate_slots(request, num_computed, num_new, hits, delay_caching=load_async) is None:
                    if self.sessions.take_blocks(self.sessions.idle.values()):
                        continue
                    break  # nobody overtakes the head of the queue

                block_ids = self.kv.get_block_ids(request.request_id)
                if request.metrics.first_scheduled_time is None:
                    request.metrics.first_scheduled_time = time.monotonic()
                    request.metrics.num_cached_tokens = num_computed
                if not holds_blocks:
                    num_local = len(hits) * self.kv.block_size
                    self._num_queried += request.num_tokens
                    self._num_hit += num_local
                    request.num_computed_tokens, request.num_external_tokens = num_computed, num_external
                    if self.connector and request.ask_connector:
                        try:
                            self.connector.update_state_after_alloc(request, block_ids, num_external)
                        except BaseException:
                            self.kv.uncache_blocks(request, num_local)
                            self.forget_external_tokens(request)
                            raise
                queue.popleft()
                if load_async:  # S5: it has its blocks, and waits for what belongs in them
                    request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
                    self.loading.add(request.request_id)
                    self.trace_move(request, "S5")
                    step_skipped_waiting.append(request)
                    continue
                request.status = RequestStatus.RUNNING
                self.running.append(request)
                self.trace_move(request, "S4")
                output.scheduled_new_reqs.append(NewRequestData.of(request, block_ids))
                output.num_scheduled_tokens[request.request_id] = num_new
                output.total_num_scheduled_tokens += num_new
        finally:
            self.skipped_waiting.extendleft(reversed(step_skipped_waiting))
            if step_skipped_waiting:
                self.trace(Skipped([r.request_id for r in step_skipped_waiting]))
        return lookups_pending

    def _num_new_tokens(self, request: Request, num_computed: int, budget: int) -> int:
        """S2: what is missing, cut to the chunk threshold, to the budget and to the longest sequence allowed."""
        missing = request.num_tokens_with_spec - num_computed
        missing = min(missing, self.config.long_prefill_token_threshold or missing)
        return max(0, min(missing, budget, self.max_model_len - 1 - num_computed))

    def _preempt(self, request: Request, rule: str = "", by: str = "") -> None:
        """S3: takes a running request's blocks away. It starts again from token 0, or from what the cache still has."""
        request.num_computed_tokens, request.spec_token_ids = 0, []
        request.status = RequestStatus.PREEMPTED
        place = bisect_left(self.waiting, self._rank(request), key=self._rank)  # FCFS: the front
        self.trace_move(request, rule, by, place)
        self.kv.free(request.request_id)
        request.metrics.num_preemptions += 1
        self._num_preemptions += 1
        self.waiting.insert(place, request)

    def _try_promote(self, request: Request) -> bool:
        """Is what it waits for here? Its grammar (S12), or its data: then it is WAITING, with its blocks and computed
        tokens (S5)."""
        if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            if request.request_id in self.compiling:
                return False
            request.status = RequestStatus.WAITING
            self.trace_move(request, "S12")
            return True
        if request.request_id not in self.finished_recving_kv_req_ids:
            return False
        self.finished_recving_kv_req_ids.remove(request.request_id)
        num_local = (request.num_computed_tokens - request.num_external_tokens) // self.kv.block_size
        if any(block.block_hash is None for block in self.kv.tables[request.request_id][:num_local]):
            self.forget_external_tokens(request)  # what it found here was of a step that was taken back
            return True
        self.kv.cache_blocks(request, request.num_computed_tokens)  # K8: the delayed registration
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1  # all is there, but to sample we need the last token's logits
        request.status = RequestStatus.WAITING
        self.trace_move(request, "S5")
        return True

    def forget_external_tokens(self, request: Request, rule: str = "S10") -> None:
        """Gives a waiting request's blocks back; it will be computed here like any other."""
        self.kv.free(request.request_id)
        request.metrics.num_cached_tokens -= request.num_external_tokens
        request.num_computed_tokens = request.num_external_tokens = 0
        request.ask_connector = False
        self.finished_recving_kv_req_ids.discard(request.request_id)
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            request.status = RequestStatus.WAITING
        self.trace_move(request, rule)

    def _ensure_progress(self, lookups_pending: bool, preempted: bool) -> None:
        """S10 and S11: nothing was scheduled. Is something on its way, or must somebody give way?

        Loaded requests hold blocks without running. If they keep the head of the queue from getting its own, the last
        of them gives its blocks back and will recompute; at the latest when only the head is left, it fits (S9). With
        priorities also if everybody was preempted: they may come back ahead of a loaded request, again and again.
        """
        if preempted and self.config.scheduling_policy == "fcfs":
            return  # loaded requests are in `skipped_waiting`: they go next
        if self.reclaiming and self.connector:
            self.connector.make_room()
        if self.loading or self.reclaiming or self.compiling or lookups_pending:
            return
        for request in reversed([*self.skipped_waiting, *self.waiting]):
            if request.request_id in self.kv.tables:
                self.forget_external_tokens(request)
                return
        if not preempted:
            raise RuntimeError(f"nothing can be scheduled, nothing is in flight and no block can be freed: {self!r}")

    # ---------------------------------------------------------------- after the step

    def update_from_output(
        self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Takes in what the worker computed: new tokens, ended requests, finished transfers. Returns the news."""
        news: list[EngineCoreOutput] = []
        stopped: dict[str, Request] = {}
        now = time.monotonic()
        if self.structured_outputs:
            for request_id, error in self.structured_outputs.get_finished().items():
                self.compiling.discard(request_id)
                news += self._fail(request_id, error) if error else []
        known = {r.request_id for r in self.running}
        sampled = {i: ids for i, ids in output.sampled_token_ids.items() if i in known}  # not ended since
        ends = {i: self._append_tokens(self.requests[i], sampled) for i in sampled}
        self.trace(Sampled(sampled, output.num_common_prefix_blocks))
        self._num_blocks_saved += output.num_common_prefix_blocks * (len(scheduler_output.num_scheduled_tokens) - 1)
        for request_id, status in ends.items():
            request, metrics = self.requests[request_id], self.requests[request_id].metrics
            metrics.first_token_time, metrics.last_token_time = metrics.first_token_time or now, now
            if drafts := scheduler_output.scheduled_spec_decode_tokens.get(request_id):
                num_accepted = len(output.sampled_token_ids[request_id]) - 1
                metrics.num_draft_tokens += len(drafts)
                metrics.num_accepted_tokens += num_accepted
                self._num_drafts += len(drafts)
                self._num_accepted += num_accepted
            token_ids = sampled[request_id]
            logprobs = output.logprobs.get(request_id, [])[: len(token_ids)] or None
            item = EngineCoreOutput(request_id, token_ids, metrics, logprobs, turn=request.turn)
            if status is not None:
                stopped[request_id] = request
                item.finish_reason, item.stop_reason = status.value, request.stop_reason
                if request.turn is None:
                    request.status = status
                    item.kv_transfer_params = self._release(request)
            news.append(item)
        if stopped:
            self.running = [r for r in self.running if r.request_id not in stopped]
        for session in [r for r in stopped.values() if r.turn is not None]:
            self.sessions.end_turn(session)
        if output.kv_connector_output is not None:
            news += self._update_from_connector(output.kv_connector_output)
        self.trace(Stepped())
        return news + self.sessions.take_news()

    def _append_tokens(self, request: Request, sampled: dict[str, list[int]]) -> RequestStatus | None:
        """Takes in what was sampled for a request, token by token. Returns how it ended, if it did: what comes after its
        end leaves `sampled`. Then guesses what may come next.

        Nothing is computed of the last token now. What was computed for drafts that were wrong does not count: the next
        step starts before it, and writes over it.
        """
        status, token_ids = None, sampled[request.request_id]
        for count, token_id in enumerate(token_ids, 1):
            request.token_ids.append(token_id)
            if (status := request.check_stop(self.max_model_len)) is not None:
                sampled[request.request_id] = token_ids[:count]
                break
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        self.kv.update_block_hashes(request)
        if self.config.speculative_ngram and status is None:
            left = request.sampling_params.max_tokens - request.num_output_tokens
            left = min(left, self.max_model_len - request.num_tokens) - 1  # if all are right there is one token more
            request.spec_token_ids = propose(request.token_ids, min(left, self.config.speculative_ngram))
        return status

    def _update_from_connector(self, output: KVConnectorOutput) -> list[EngineCoreOutput]:
        """Transfers that ended: who can be promoted, who computes itself (or fails, S10), whose blocks are free now."""
        news = []
        for request_id in output.given_up & self.loading:
            self.kv.quarantine(request_id)
            self.reclaiming.add(request_id)
        for request_id in output.finished_sending | output.finished_recving | output.failed_recving | output.given_up:
            if request_id in self.loading:
                request = self.requests[request_id]
                self.loading.remove(request_id)
                if request_id in output.finished_recving:
                    self.finished_recving_kv_req_ids.add(request_id)
                    request.metrics.transfer = output.transfers.get(request_id)
                elif self.config.kv_load_failure_policy == "recompute" or request.turn is not None:
                    self.forget_external_tokens(request)
                else:
                    news += self._fail(request_id, "its KV cache could not be loaded from the remote engine")
            elif request_id in self.reclaiming and request_id not in output.given_up:
                self.reclaiming.remove(request_id)
                self.kv.free(reclaimed(request_id))
        return news

    def _fail(self, request_id: str, why: str) -> list[EngineCoreOutput]:
        """Ends one request with an error that its client sees."""
        request, status = self.requests[request_id], RequestStatus.FINISHED_ERROR
        if request.turn is not None:
            # A session that cannot become idle now fails again when it runs.
            if RequestStatus.WAITING_FOR_STREAMING_REQ in TRANSITIONS[request.status]:
                self.sessions.refuse(request, why)
                self.sessions.end_turn(request)
            return []
        request.stop_reason = why
        self.finish_requests([request_id], status)
        return [EngineCoreOutput(request_id, [], request.metrics, None, status.value, why)]

    def _release(self, request: Request) -> dict[str, object] | None:
        """Forgets an ended request and frees its blocks, unless a peer may still touch them (rule P4)."""
        request_id = request.request_id
        del self.requests[request_id]
        self._finished_req_ids.add(request_id)
        self.trace_move(request)
        still_loading = request_id in self.loading
        delay_free, kv_transfer_params = False, None
        if self.connector:
            delay_free, kv_transfer_params = self.connector.request_finished(request, self.kv.get_block_ids(request_id))
            delay_free = delay_free and request_id in self.kv.tables
        self.loading.discard(request_id)
        self.finished_recving_kv_req_ids.discard(request_id)
        self.compiling.discard(request_id)
        self.sessions.idle.pop(request_id, None)
        if self.structured_outputs:
            self.structured_outputs.forget(request_id)
        if delay_free or still_loading:
            self.kv.quarantine(request_id)
            self.reclaiming.add(request_id)
        else:
            self.kv.free(request_id)
        return kv_transfer_params

    # ---------------------------------------------------------------- what others may look at

    def trace_move(self, request: Request, rule: str = "", by: str = "", place: int = 0) -> None:
        computed = request.num_computed_tokens, request.num_external_tokens
        self.trace(Moved(request.request_id, request.status.value, *computed, rule, by, place))

    def stats(self) -> SchedulerStats:
        num_waiting = len(self.waiting) + len(self.skipped_waiting)
        in_flight = len(self.loading), len(self.compiling), len(self.reclaiming), len(self.sessions.idle)
        counts = self._num_preemptions, self._num_queried, self._num_hit, self._num_scheduled
        num_early = sum(len(request.streaming_queue) for request in self.requests.values())
        more = self._num_drafts, self._num_accepted, self._num_blocks_saved * self.kv.block_size, num_early
        return SchedulerStats(len(self.running), num_waiting, *in_flight, self.kv.usage, *counts, *more)

    def check_invariants(self) -> None:
        """See debug.py. Raises AssertionError."""
        check_queues(self)

    def __repr__(self) -> str:
        return f"Scheduler({describe(self)})"
