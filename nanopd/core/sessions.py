"""Sessions: requests that stay open after an answer, and get further input under the same id (rule S13).

    add_request: an id that is known -> streaming_queue --.
                                                          v
    waiting -> running -> the answer ends -> idle -> next input -> waiting

An idle session keeps its blocks and takes no seat. Input that is refused is no part of it. Else what was said stays said: an
answer that fails half-way, or that nobody wants any more, leaves its input and as much of itself as there was. Only
`finish_requests` ends a session. Lesson 06.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from nanopd.config import UserError
from nanopd.core.output import EngineCoreOutput
from nanopd.request import Request, RequestStatus, check_length
from nanopd.trace.events import Dropped

if TYPE_CHECKING:
    from nanopd.core.scheduler import Scheduler


class Sessions:
    """The sessions of one scheduler: what becomes of their input, and who has to give way to others."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        self.idle: dict[str, Request] = {}  # those that wait for input, who has waited longest first
        self._news: list[EngineCoreOutput] = []  # about input that gets no answer

    def add(self, session: Request, turn: Request) -> None:
        """Further input. It is taken up at once if the session is idle."""
        session.streaming_queue.append(turn)
        if session.request_id in self.idle:
            self._next_turn(session)

    def end_turn(self, session: Request) -> None:
        """The answer has ended: the session is idle, or goes on with its next input. The worker will be told anew of it."""
        s, request_id = self._scheduler, session.request_id
        if not session.num_output_tokens:  # its input is refused, and leaves it
            if session.num_computed_tokens > session.num_tokens - session.num_input_tokens:  # some of that, too
                s.forget_external_tokens(session, "S13")
            session.give_back()
            del session.block_hashes[session.num_tokens // s.kv.block_size :]
        session.status = RequestStatus.WAITING_FOR_STREAMING_REQ
        session.spec_token_ids, session.num_external_tokens = [], 0
        self.idle[request_id] = session
        s.leave_queues({request_id})
        s.lost_req_ids.add(request_id)
        if s.structured_outputs:
            s.structured_outputs.forget(request_id)
        s.trace_move(session, "S13")
        self._next_turn(session)

    def _next_turn(self, session: Request) -> None:
        """Takes up the next input. One that is too long by now is refused."""
        while session.streaming_queue and session.request_id in self.idle:
            turn = session.streaming_queue[0]
            try:
                check_length(turn.num_tokens, session.num_tokens, self._scheduler.max_model_len)
            except UserError as error:
                self._drop(session, turn)
                self.refuse(turn, str(error))
            else:
                del self.idle[session.request_id]
                session.resume()
                self._scheduler.queue(session)

    def abort_turn(self, request_id: str, turn: int) -> None:
        """Nobody waits for this answer any more. Input that has not been taken up is forgotten; an answer that has begun
        ends with its next token."""
        if (session := self._scheduler.requests.get(request_id)) is None:
            return
        for waiting in [t for t in session.streaming_queue if t.turn == turn]:
            self._drop(session, waiting)
        if session.turn == turn:
            most = session.num_output_tokens + 1
            session.sampling_params = replace(session.sampling_params, max_tokens=most, min_tokens=0)

    def _drop(self, session: Request, turn: Request) -> None:
        self._scheduler.trace(Dropped(session.request_id, session.streaming_queue.index(turn)))
        session.streaming_queue.remove(turn)

    def refuse(self, turn: Request, why: str) -> None:
        """One input gets no answer; its client hears why. It may be the one that the session has taken up."""
        self._news.append(EngineCoreOutput(turn.request_id, [], turn.metrics, None, "error", why, turn=turn.turn))

    def take_news(self) -> list[EngineCoreOutput]:
        """For those whose input gets no answer."""
        news, self._news = self._news, []
        return news

    def take_blocks(self, requests: Iterable[Request]) -> bool:
        """The first session among these that holds blocks, and does not run, gives them up; they stay in the prefix cache.
        Returns whether there was one."""
        holders = (r for r in requests if r.turn is not None and r.request_id in self._scheduler.kv.tables)
        session = next((r for r in holders if r.status is not RequestStatus.WAITING_FOR_REMOTE_KVS), None)
        if session:
            self._scheduler.forget_external_tokens(session, "S13")
        return session is not None
