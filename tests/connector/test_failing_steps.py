"""Steps that fail in the middle of transfers, and prompts that are thrown out while they are sent: nothing is lost,
nothing leaks, the tokens are right (rules S8, P8)."""

import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.connector.pair import Node, alone, run
from tests.connector.wire import Gate

RNG = random.Random(5)
PROMPTS = {f"r{i}": [RNG.randrange(256) for _ in range(RNG.choice([17, 40, 100]))] for i in range(6)}
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[str, list[int]]:
    return alone(tiny_model, PROMPTS.items(), MAX_TOKENS)


class Fails:
    """An engine's steps, some of which fail: before the connector has heard of them, after it has, or when all is done
    and only the scheduler does not know yet."""

    def __init__(self, node: Node, moment: str, error: type[BaseException], every: int) -> None:
        self.node, self.moment, self.error, self.every, self.steps, self.failed = node, moment, error, every, 0, 0
        runner, connector = node.core.runner, node.core.connector
        self.execute, self.start, self.get = runner.execute_model, connector.start_load_kv, connector.get_finished
        runner.execute_model = self.execute_model  # type: ignore[method-assign]
        connector.start_load_kv = self.start_load_kv  # type: ignore[method-assign]
        connector.get_finished = self.get_finished  # type: ignore[method-assign]

    def stumble(self, moment: str) -> None:
        if moment == self.moment and self.steps % self.every == 0:
            self.failed += 1
            raise self.error("this step fails")

    def execute_model(self, plan: Any) -> Any:
        self.steps += 1
        self.stumble("before the step")
        output = self.execute(plan)
        self.stumble("after the step")
        return output

    def start_load_kv(self, metadata: Any) -> None:
        self.start(metadata)
        self.stumble("after start_load_kv")

    def get_finished(self) -> Any:
        self.stumble("before get_finished")
        return self.get()

    def step(self) -> None:
        try:
            self.node.step()
        except self.error:
            self.node.core.scheduler.check_invariants()


MOMENTS = ["before the step", "after start_load_kv", "before get_finished", "after the step"]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("push", ["whole", "per_chunk"])
def test_steps_that_fail(tiny_model: Path, expected: dict[str, list[int]], push: str, moment: str, made: list[Node]):
    """On both sides, at each moment, every second step and then every third one."""
    p = Node(tiny_model, "prefill", {"kv_push": push, "kv_hold_timeout": 5}, long_prefill_token_threshold=24)
    d = Node(tiny_model, "decode", {"kv_load_timeout": 5}, long_prefill_token_threshold=24)
    made += [p, d]
    fails = [Fails(p, moment, RuntimeError, 2), Fails(d, moment, KeyboardInterrupt, 3)]
    deadline = time.monotonic() + 15
    waiting = list(PROMPTS.items())
    while p.core.has_unfinished_requests() or d.core.has_unfinished_requests() or waiting:
        if waiting:
            request_id, prompt = waiting.pop()
            p.prefill(request_id, prompt)
            d.decode(request_id, prompt, p, max_tokens=MAX_TOKENS)
        for node in fails:
            node.step()
        assert time.monotonic() < deadline, [p.core.scheduler, p.core.scheduler.reclaiming, d.core.scheduler]
    assert all(node.failed for node in fails)
    assert d.tokens == expected
    assert d.core.connector.stats().receive_failures == 0
    for node in p, d:
        node.core.scheduler.check_invariants()
        assert node.num_free == 200


@pytest.mark.parametrize("written", ["at once", "late"])
def test_a_prompt_thrown_out_between_its_chunks(tiny_model: Path, written: str, made: list[Node]):
    """kv_push per_chunk: what was read from its blocks after they were taken away is sent again."""
    prompts = {f"r{i}": [RNG.randrange(256) for _ in range(120)] for i in range(3)}
    want = alone(tiny_model, prompts.items())
    p = Node(tiny_model, "prefill", {"kv_push": "per_chunk"}, num_blocks=34, long_prefill_token_threshold=16)
    d = Node(tiny_model, "decode")
    made += [p, d]
    gate = Gate.before(p)
    if written == "at once":
        gate.may_write.set()
    for request_id, prompt in prompts.items():
        d.decode(request_id, prompt, p)
    d.step()
    for request_id, prompt in prompts.items():
        p.prefill(request_id, prompt)
    # The write that has begun reads blocks that meanwhile belong to somebody else.
    run(p, d, until=lambda: p.core.scheduler.stats().num_preemptions > 0)
    for _ in range(10):
        p.step()
    gate.may_write.set()
    run(p, d)
    assert d.tokens == want and d.core.connector.stats().receive_failures == 0
    assert p.num_free == 34 and d.num_free == 200


def test_a_prompt_thrown_out_by_a_failed_step_while_it_is_sent(tiny_model: Path, made: list[Node]):
    """The same with a step that is taken back. The write that was under way reads the old blocks when all is computed
    again, and they hold other positions by then."""
    prompt = [RNG.randrange(256) for _ in range(120)]
    options: dict[str, Any] = {"num_blocks": 31, "long_prefill_token_threshold": 16, "enable_prefix_caching": False}
    p, d = Node(tiny_model, "prefill", {"kv_push": "per_chunk"}, **options), Node(tiny_model, "decode")
    made += [p, d]
    gate = Gate.before(p)
    d.decode("r", prompt, p)
    d.step()
    p.prefill("r", prompt)
    gate.wait(p, d)
    before = p.core.scheduler.kv.get_block_ids("r")
    fails = Fails(p, "before get_finished", RuntimeError, 1)
    fails.step()
    assert fails.failed == 1 and p.core.scheduler.stats().num_preemptions == 1
    fails.every = 10**9
    after: list[int] = []
    while "r" not in p.ended:
        after = p.core.scheduler.kv.get_block_ids("r") or after
        p.step()
    p.step()
    assert set(before) & set(after) and before[0] != after[0]
    gate.may_write.set()
    run(p, d)
    assert d.tokens["r"] == alone(tiny_model, [("r", prompt)])["r"]
    assert d.core.connector.stats().received == 1 and gate.written == 2
