"""Random lives of a scheduler: arrivals, aborts, ends, remote loads that come, fail, are slow or given up, sends that end
late, grammars that become ready, can't be compiled or fail in the middle, pools that are too small, drafts of which some
tokens are right, priorities, sessions with further input. Peers write garbage wherever they may, at each step.

After every step the invariants K10 hold, progress (S11) is checked by the scheduler itself, and at the end everything
that arrived has ended and every block is free.
"""

import contextlib
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nanopd.config import UserError
from nanopd.core.output import KVConnectorOutput
from tests.core.drive import Driver, FakeConnector, FakeGrammars, make_request, make_scheduler

VOCABULARY = 3  # few different tokens, so that prefixes meet
EOS = 2
PROMPTS = st.lists(st.integers(0, VOCABULARY - 1), max_size=30)


class SchedulerMachine(RuleBasedStateMachine):
    """What can happen to a scheduler, in any order."""

    steps = given_up = 0  # of all machines together

    @initialize(
        num_blocks=st.integers(2, 24),
        block_size=st.sampled_from([1, 2, 4]),
        prefix_caching=st.booleans(),
        max_num_batched_tokens=st.integers(1, 24),
        long_prefill_token_threshold=st.sampled_from([0, 1, 3, 7]),
        max_num_seqs=st.integers(1, 6),
        policy=st.sampled_from(["recompute", "fail"]),
        load_async=st.sampled_from([True, True, False]),
        drafts=st.sampled_from([0, 1, 2, 5]),
        scheduling_policy=st.sampled_from(["fcfs", "priority"]),
        priority_seconds=st.sampled_from([0.5, 1e6]),
    )
    def begin(self, load_async, drafts, num_blocks, block_size, prefix_caching, policy, **options):
        self.connector = FakeConnector(block_size)
        self.connector.load_async = load_async
        self.grammars = FakeGrammars()
        self.scheduler = make_scheduler(
            num_blocks,
            block_size,
            prefix_caching,
            connector=self.connector,
            grammars=self.grammars,
            kv_load_failure_policy=policy,
            speculative_ngram=drafts,
            **options,
        )
        self.driver = Driver(self.scheduler)
        self.count = 0
        self.arrived: set[str] = set()
        self.aborted: set[str] = set()
        self.turns: dict[str, int] = {}  # of sessions: how many inputs they have had
        self.left: dict[str, set[int]] = {}  # of sessions: whose clients have gone away

    @rule(
        prompt=st.one_of(PROMPTS, st.lists(st.integers(0, VOCABULARY - 1), min_size=8, max_size=30)),
        max_tokens=st.integers(1, 12),
        remote=st.sampled_from([30, 30, 9, 1, 0, None]),  # most have something elsewhere, and many all of it
        send=st.booleans(),
        salt=st.sampled_from([None, None, "tenant"]),
        grammar=st.sampled_from([None, None, {"regex": "x"}]),
        priority=st.integers(-2, 2),
        session=st.booleans(),
    )
    def arrive(self, prompt, max_tokens, remote, send, salt, grammar, priority, session):
        request = make_request(f"r{self.count}", prompt, max_tokens, salt, structured_outputs=grammar)
        request.turn = 0 if session else None
        # One arrives a second: who goes first must not hang on how fast this test runs.
        request.priority, request.metrics.arrival_time = priority, float(self.count)
        self.count += 1
        self.connector.remote[request.request_id] = None if remote is None else min(remote, len(prompt))
        if send:
            self.connector.delay_free.add(request.request_id)
        try:
            self.scheduler.add_request(request)
            self.arrived.add(request.request_id)
            if session:
                self.turns[request.request_id] = 1
        except UserError:
            assert not 0 < len(prompt) < self.scheduler.max_model_len

    @rule(
        prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9),
        max_tokens=st.integers(1, 12),
        grammar=st.sampled_from([None, None, {"regex": "x"}]),
        priority=st.integers(-2, 2),
        data=st.data(),
    )
    @precondition(lambda self: self.turns)
    def say_more(self, prompt, max_tokens, grammar, priority, data):
        """Further input of a session, whatever that does just now: also if it has ended."""
        request_id = data.draw(st.sampled_from(sorted(self.turns)))
        session = self.scheduler.requests.get(request_id)
        request = make_request(request_id, prompt, max_tokens, structured_outputs=grammar)
        request.turn, request.priority, request.metrics.arrival_time = (
            self.turns[request_id],
            priority,
            float(self.count),
        )
        self.count += 1
        try:
            self.scheduler.add_request(request)
            assert session and (session.streaming_queue or request.metrics is session.metrics)
            self.turns[request_id] += 1
        except UserError:
            assert not session or len(prompt) + session.num_tokens >= self.scheduler.max_model_len

    @rule(data=st.data())
    @precondition(lambda self: self.turns)
    def client_of_a_turn_leaves(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.turns)))
        turn = data.draw(st.integers(0, self.turns[request_id]))
        self.left.setdefault(request_id, set()).add(turn)
        self.scheduler.sessions.abort_turn(request_id, turn)

    @rule(n=st.integers(1, 5), seed=st.integers(0, 2**16))
    def step(self, n, seed):
        rng = random.Random(seed)
        for _ in range(n):
            SchedulerMachine.steps += 1
            room_wanted = self.connector.room_wanted
            held = bool(self.scheduler.num_active and self.scheduler.reclaiming)
            tokens = {request_id: rng.choice((0, 1, 0, 1, 0, 1, EOS)) for request_id in self.scheduler.requests}
            self.driver.right = rng.randrange(7)
            output = self.driver.step(tokens)
            if held and not output.num_scheduled_tokens and not output.preempted_req_ids:
                assert self.connector.room_wanted > room_wanted, (
                    "stuck for want of blocks, and nobody was asked for some"
                )

    @rule(while_planning=st.booleans())
    def a_step_fails(self, while_planning):
        if while_planning and (self.scheduler.waiting or self.scheduler.skipped_waiting):
            self.connector.raises = RuntimeError
            with contextlib.suppress(RuntimeError):
                self.scheduler.take_back(self.driver.schedule())  # planned without asking the connector: fails later
            self.connector.raises = None
        else:
            self.driver.fail_step()

    @rule(data=st.data())
    @precondition(lambda self: self.scheduler.requests)
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
        self.scheduler.finish_requests([request_id])
        self.aborted.add(request_id)

    @rule()
    @precondition(lambda self: any(known is None for known in self.connector.remote.values()))
    def answer_lookups(self):
        for request_id, known in self.connector.remote.items():
            if known is None:
                self.connector.remote[request_id] = 0

    @rule(fail=st.sampled_from([None, None, "too large"]), data=st.data())
    @precondition(lambda self: self.grammars.alive)
    def grammar_ends(self, fail, data):
        """It is ready, or cannot be used; or later its matcher fails."""
        chosen = data.draw(st.sampled_from(sorted(self.grammars.alive)))
        if fail or chosen in self.scheduler.compiling:
            self.grammars.news[chosen] = fail
            self.step(1, 0)
            assert chosen not in self.scheduler.compiling or chosen in self.turns, "S12"  # or it is the next turn's

    @rule(fail=st.booleans(), data=st.data())
    @precondition(lambda self: self.scheduler.loading or self.scheduler.reclaiming)
    def transfer_ends(self, fail, data):
        in_flight = sorted(self.scheduler.loading | self.scheduler.reclaiming)
        self.report(set(data.draw(st.lists(st.sampled_from(in_flight), min_size=1, unique=True))), fail)

    def report(self, ended, fail):
        sending = ended & self.connector.readable.keys()
        loads = ended - sending
        self.driver.transfers = KVConnectorOutput(sending, set() if fail else loads, loads if fail else set())
        self.step(1, 0)

    @rule(data=st.data())
    @precondition(lambda self: self.connector.writable)
    def load_is_given_up(self, data):
        """By the worker half, which may not know yet that somebody has ended; reported again later, by `transfer_ends`."""
        given_up = set(data.draw(st.lists(st.sampled_from(sorted(self.connector.writable)), min_size=1, unique=True)))
        self.connector.delay_free -= given_up  # as in P/D: what was loaded is not sent
        self.driver.transfers = KVConnectorOutput(given_up=given_up)
        SchedulerMachine.given_up += len(given_up)
        self.step(1, 0)
        assert given_up <= self.scheduler.reclaiming

    @rule()
    @precondition(lambda self: self.connector.room_wanted and self.connector.readable)
    def room_is_made(self):
        self.connector.room_wanted = 0
        self.report({next(iter(self.connector.readable))}, False)

    @invariant()
    def books_balance(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_invariants()
            ranks = [*map(self.scheduler._rank, self.scheduler.waiting)]
            assert ranks == sorted(ranks)

    def teardown(self):
        """Nothing more arrives, everything in flight ends: then all requests end and all blocks come back."""
        if not hasattr(self, "scheduler"):
            return
        self.answer_lookups_for_good()
        for _ in range(5000):
            if not self.scheduler.has_unfinished_requests():
                break
            self.grammars.news = dict.fromkeys(self.scheduler.compiling)  # a session's next input may bring another
            self.report(self.scheduler.loading | self.scheduler.reclaiming, False)
            self.answer_lookups_for_good()
        assert not self.scheduler.has_unfinished_requests(), self.scheduler
        for request_id in self.scheduler.sessions.idle:
            ended = {turn for i, turn, _ in self.driver.ends if i == request_id}
            assert ended | self.left.get(request_id, set()) >= {*range(self.turns[request_id])}, (
                "a session owes an answer"
            )
        self.scheduler.finish_requests([*self.scheduler.sessions.idle])
        self.report(self.scheduler.reclaiming, False)  # a session's blocks may have been sent, too
        assert self.scheduler.kv.pool.num_free_blocks == len(self.scheduler.kv.pool.blocks)
        assert not self.grammars.alive, "a grammar outlives its request"
        assert self.driver.reasons.keys() | self.aborted == self.arrived, "a request vanished without a word"

    def answer_lookups_for_good(self):
        for request_id in self.connector.remote:
            self.connector.remote[request_id] = 0


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        ),
    )


def test_random_lives():
    run(examples=150, steps=40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_lives_for_100_000_steps():
    before = SchedulerMachine.steps
    run(examples=2500, steps=100)
    print("steps of the scheduler:", SchedulerMachine.steps - before)
    assert SchedulerMachine.steps - before >= 100_000
