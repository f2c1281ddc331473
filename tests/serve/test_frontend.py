"""The front end over an engine core that is elsewhere, and the messages between the two."""

import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from nanopd.config import EngineConfig, KVTransferConfig, SamplingParams, StructuredOutputsParams, UserError
from nanopd.connector.protocol import KVTransferParams
from nanopd.core.output import EngineCoreOutput, SchedulerStats, TokenLogprobs, TransferStats
from nanopd.engine.llm import EngineInfo, Frontend
from nanopd.engine.process import Abort, AbortTurn, Add, Inspect, Outputs, State, Stop
from nanopd.request import Request, RequestMetrics


class Elsewhere:
    """Writes down what it is asked."""

    def __init__(self) -> None:
        self.added: list[Request] = []
        self.aborted: list[str] = []
        self.turns: list[tuple[str, int]] = []  # that were aborted

    def add_request(self, request: Request) -> None:
        self.added.append(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self.aborted += request_ids

    def abort_turn(self, request_id: str, turn: int) -> None:
        self.turns.append((request_id, turn))


@pytest.fixture
def core() -> Elsewhere:
    return Elsewhere()


@pytest.fixture
def frontend(core: Elsewhere, tiny_model: Path) -> Frontend:
    return Frontend(core, EngineInfo(str(tiny_model), 32, 300, (256,), None), 0)  # type: ignore[arg-type]


def token(request_id: str, token_id: int, reason: str | None = None) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, [token_id], RequestMetrics(), finish_reason=reason)


def test_the_first_of_n_transfers_the_prompt(core: Elsewhere, frontend: Frontend):
    transfer = KVTransferParams(do_remote_decode=True, transfer_id="t")
    frontend.add_request("x", SamplingParams(n=3), "id", transfer)
    assert [request.request_id for request in core.added] == ["id#0", "id#1", "id#2"]
    assert [request.kv_transfer_params for request in core.added] == [transfer, None, None]


def test_what_can_never_be_served_is_not_sent(core: Elsewhere, frontend: Frontend):
    for prompt in ("", "x" * 32, [300], [-1]):
        with pytest.raises(UserError):
            frontend.add_request(prompt, SamplingParams())
    frontend.add_request("x" * 31, SamplingParams())
    assert len(core.added) == 1


def test_news_of_what_has_ended_are_ignored(core: Elsewhere, frontend: Frontend):
    output = frontend.add_request("x", SamplingParams(stop="b"), "id")
    assert frontend.process_outputs([token("id", frontend.tokenizer.encode("a")[0])]) == [output]
    frontend.process_outputs([token("id", frontend.tokenizer.encode("b")[0])])
    assert (output.outputs[0].text, output.outputs[0].finish_reason, output.finished) == ("a", "stop", True)
    assert core.aborted == ["id"], "the core can't know that the text has ended it"
    assert frontend.process_outputs([token("id", 70), token("unknown", 71)]) == []
    assert not frontend.has_unfinished_requests()
    assert frontend.add_request("x", SamplingParams(), "id") is not output, "the id is free again"


def test_the_answer_for_the_other_side_and_an_error(core: Elsewhere, frontend: Frontend):
    output = frontend.add_request("x", SamplingParams(), "id")
    last = token("id", 70, "length")
    last.kv_transfer_params = {"remote_host": "h"}
    frontend.process_outputs([last])
    assert output.kv_transfer_params == {"remote_host": "h"}
    assert output.metrics is last.metrics
    lost = [frontend.add_request("x", SamplingParams(n=2), i) for i in ("a", "b")]
    frontend.abort_requests(["a", "b"], "error", "died")
    assert {(c.finish_reason, c.stop_reason) for o in lost for c in o.outputs} == {("error", "died")}
    assert all(o.finished for o in lost)


def test_messages_survive_the_way_and_are_decoded_strictly():
    transfer = KVTransferParams(do_remote_prefill=True, remote_host="h", remote_port=1)
    wish = StructuredOutputsParams(json={"type": "object"})
    params = SamplingParams(stop=["x"], stop_token_ids=[3], seed=-5, logprobs=2, structured_outputs=wish)
    metrics = RequestMetrics(history=[(1.5, "waiting")], transfer={"num_bytes": 3.0})
    item = EngineCoreOutput("id", [5], metrics, [TokenLogprobs(-1.0, 2, [(5, -1.0)])], "error", "why", {"a": None})
    stats = SchedulerStats(1, 2, 3, 4, 5, 6, 0.5, 7, 8, 9, 10, 11, 12, 13, 14)
    for message in (
        Add("id", [1, 2], params, [256], None, transfer, -3, 1, metrics),
        Abort(["a"]),
        AbortTurn("a", 1),
        Inspect(),
        Stop(),
        Outputs([item], stats, TransferStats(sent=3)),
        State({"running": ["a"]}),
        EngineInfo("/model", 512, 300, (1, 2), 5),
    ):
        kind = type(message)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind) == message
        raw = msgspec.to_builtins(message)
        for wrong in (raw | {"more": 1}, raw | {"type": "Other"}, {"type": raw["type"], "request_id": 5}, [raw]):
            with pytest.raises(msgspec.ValidationError):
                msgspec.msgpack.decode(msgspec.msgpack.encode(wrong), type=kind)
    configs = EngineConfig(model="m", num_blocks=5), KVTransferConfig(role="both", kv_load_timeout=3)
    assert msgspec.json.decode(msgspec.json.encode(configs), type=tuple[EngineConfig, KVTransferConfig]) == configs


def test_the_core_measures_from_when_the_server_got_it(core: Elsewhere, frontend: Frontend):
    before = time.monotonic()
    frontend.add_request("x", SamplingParams())
    assert before <= core.added[0].metrics.arrival_time <= time.monotonic()


def test_turns_of_a_session_go_by_its_id_one_after_the_other(core: Elsewhere, frontend: Frontend):
    session = frontend.open_session("talk")
    first, second, third = (frontend.add_request(text, SamplingParams(), session=session) for text in "abc")
    assert [(r.request_id, r.turn) for r in core.added] == [("talk", 0), ("talk", 1), ("talk", 2)]
    seeds = {r.sampling_params.seed for r in core.added}
    assert len(seeds) == 3, "each turn draws its own"

    def news(turn: int, token_id: int, reason: str | None = None) -> EngineCoreOutput:
        item = token("talk", token_id, reason)
        item.turn = turn
        return item

    assert frontend.process_outputs([news(0, 70, "length"), news(1, 71)]) == [first, second]  # two that came together
    assert (first.finished, second.finished, second.outputs[0].token_ids) == (True, False, [71])
    frontend.abort_outputs([first, second, third])
    assert core.turns == [("talk", 1), ("talk", 2)] and second.finished and third.finished
    last = frontend.add_request("d", SamplingParams(), session=session)
    assert frontend.process_outputs([news(1, 72), news(2, 73), news(3, 74)]) == [last], "those of others were under way"
    assert last.outputs[0].token_ids == [74]
    frontend.abort_requests(["talk"], "error", "why")
    assert core.aborted == ["talk"] and not frontend.sessions and not frontend.has_unfinished_requests()
    assert (last.outputs[0].stop_reason, last.finished) == ("why", True)
