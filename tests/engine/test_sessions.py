"""A session's answers (rule S13) are those of requests that bring the whole conversation as their prompt."""

import random
from pathlib import Path
from typing import Any

import pytest

from nanopd import LLM, SamplingParams, UserError
from nanopd.engine.llm import RequestOutput
from tests.engine.conftest import VOCAB_SIZE

Talk = list[list[int]]


def talks(n: int = 5, turns: int = 4) -> list[Talk]:
    """What is said in n sessions, turn by turn."""
    rng = random.Random(5)
    return [[[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 17))] for _ in range(turns)] for _ in range(n)]


def params(turn: int, **options: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 5 + turn, "temperature": 0, "ignore_eos": True, "seed": turn} | options))


def whole_prompts(llm: LLM, talk: Talk, **options: Any) -> list[list[int]]:
    """The answers without a session."""
    so_far: list[int] = []
    answers = []
    for turn, said in enumerate(talk):
        so_far += said
        answers.append(llm.generate([so_far], params(turn, **options))[0].outputs[0].token_ids)
        so_far += answers[-1]
    return answers


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), dtype="float32", num_blocks=200)


def make(model: Path, **options: Any) -> LLM:
    defaults: dict[str, Any] = {"num_blocks": 200, "block_size": 8, "max_model_len": 150}
    return LLM(str(model), dtype="float32", check_invariants=True, **defaults | options)


CUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "chunks": {"long_prefill_token_threshold": 3, "max_num_batched_tokens": 16},
    "too small": {"num_blocks": 20, "enable_prefix_caching": False},
    "too small, with a cache": {"num_blocks": 20, "max_num_seqs": 4, "long_prefill_token_threshold": 5},
    "drafts": {"speculative_ngram": 3},
    "one seat": {"max_num_seqs": 1},
}


@pytest.mark.parametrize("wish", [{}, {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5}])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("early", [False, True])
def test_the_same_tokens_as_with_the_whole_conversation(
    tiny_model: Path, plain: LLM, wish: dict[str, Any], cut: str, early: bool
):
    """`early`: all input is there before the first answer has ended."""
    llm = make(tiny_model, **CUTS[cut])
    said = talks()
    expected = [whole_prompts(plain, talk, **wish) for talk in said]
    sessions = [llm.open_session() for _ in said]
    outputs: dict[str, list[RequestOutput]] = {session: [] for session in sessions}
    for turn in range(len(said[0])):
        for session, talk in zip(sessions, said):
            outputs[session].append(llm.add_request(talk[turn], params(turn, **wish), session=session))
        while llm.has_unfinished_requests() and not early:
            llm.step()
    while llm.has_unfinished_requests():
        llm.step()
    assert [[o.outputs[0].token_ids for o in outputs[session]] for session in sessions] == expected
    assert all(o.finished and o.outputs[0].finish_reason == "length" for many in outputs.values() for o in many)
    if cut == "too small":
        lost = [o for many in outputs.values() for o in many[1:] if o.metrics.num_cached_tokens == 0]
        assert lost, "no session had to give up its blocks"
    llm.abort_requests(sessions)
    llm.generate([[1]], params(0))
    assert llm.core.scheduler.kv.usage == 0 and not llm.sessions


def test_kv_is_kept_without_a_prefix_cache(tiny_model: Path):
    llm = make(tiny_model, enable_prefix_caching=False)
    session = llm.open_session("talk")
    first = llm.generate([[1] * 20], params(0), session=session)[0]
    second = llm.generate([[2] * 9], params(1), session=session)[0]
    assert (first.metrics.num_cached_tokens, second.metrics.num_cached_tokens) == (0, 20 + 5 - 1)
    assert second.prompt_token_ids == [2] * 9 and second.request_id == "talk"
    assert llm.stats().num_idle == 1 and llm.stats().num_running == llm.stats().num_waiting == 0


def test_mistakes_cost_a_session_nothing(tiny_model: Path):
    llm = make(tiny_model)
    session = llm.open_session("talk")
    with pytest.raises(UserError, match="in use"):
        llm.open_session("talk")
    with pytest.raises(UserError, match="in use"):
        llm.add_request([1], params(0), "talk")
    for wrong in (5, ["talk"], "", None):
        with pytest.raises(UserError):
            llm.open_session(wrong) if wrong is not None else llm.add_request([1], params(0), session=["talk"])  # type: ignore[arg-type]
    several = llm.add_request([1], params(0, n=2), "several")
    with pytest.raises(UserError, match="in use"):
        llm.open_session("several#0")
    llm.abort_requests("several")
    assert several.finished
    first = llm.generate([{"prompt_token_ids": [1, 2], "cache_salt": "us"}], params(0), session=session)[0]
    for wrong in ({"n": 2}, {"stop": ["x"]}):
        with pytest.raises(UserError, match="takes no n, stop"):
            llm.generate([[3]], params(1, **wrong), session=session)
    with pytest.raises(UserError, match="cache_salt"):
        llm.generate([{"prompt_token_ids": [3], "cache_salt": "them"}], params(1), session=session)
    with pytest.raises(UserError, match=r"has 143 tokens; .* at most 142 tokens: .*, after 7 tokens in this session"):
        llm.generate([[3] * 143], params(1), session=session)
    with pytest.raises(UserError, match="no session 'other'"):
        llm.generate([[3]], params(1), session="other")
    again = llm.generate([[3] * 142], params(1, max_tokens=50), session=session)[0]
    assert first.outputs[0].finish_reason == again.outputs[0].finish_reason == "length"
    assert len(again.outputs[0].token_ids) == 1, "max_model_len"
    with pytest.raises(UserError, match=r"session is full, with 150 of 150. Open another one"):
        llm.generate([[3]], params(1), session=session)


@pytest.mark.parametrize("known", [False, True])
def test_early_input_that_is_too_long_is_refused_alone(tiny_model: Path, known: bool):
    """It has become that, or (`known`) it is that when it comes: the answer that still runs is long enough."""
    llm = make(tiny_model)
    session = llm.open_session()
    first = llm.add_request([0] * 60, params(0, max_tokens=50), session=session)
    for _ in range(40 * known):
        llm.step()
    long, last = (llm.add_request([i] * n, params(0, max_tokens=50), session=session) for i, n in ((1, 60), (2, 3)))
    while llm.has_unfinished_requests():
        llm.step()
    assert [output.outputs[0].finish_reason for output in (first, long, last)] == ["length", "error", "length"]
    assert "at most 39 tokens: max_model_len is 150, with the output, after 110" in str(long.outputs[0].stop_reason)
    assert llm.sessions[session].num_tokens == llm.core.scheduler.requests[session].num_tokens, (
        "what was refused is not there"
    )
    whole = [0] * 60 + first.outputs[0].token_ids + [2] * 3
    assert last.outputs[0].token_ids == llm.generate([whole], params(0, max_tokens=50))[0].outputs[0].token_ids[:37]


def test_who_stops_an_answer_keeps_the_session(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    """As Ctrl-C in `generate` does: what was said and answered so far is part of the conversation."""
    llm = make(tiny_model)
    session = llm.open_session()
    steps = llm.core.step

    def interrupted() -> Any:
        news = steps()
        if len(llm.core.scheduler.requests[session].token_ids) == 8:
            raise KeyboardInterrupt
        return news

    monkeypatch.setattr(llm.core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([1, 2, 3], params(0, max_tokens=50), session=session)
    monkeypatch.undo()
    after = llm.generate([[9]], params(1), session=session)[0]
    talk = llm.core.scheduler.requests[session].token_ids.tolist()
    said = talk.index(9, 8)
    assert said == 9, "5 tokens of the answer, and one with which it ended"
    assert after.outputs[0].token_ids == llm.generate([talk[: said + 1]], params(1))[0].outputs[0].token_ids
    with pytest.raises(UserError, match="one prompt"):
        llm.generate([[5], [5] * 500], params(2), session=session)
    assert session in llm.sessions and llm.core.scheduler.requests[session].num_tokens == len(talk), "nothing has run"


def test_what_a_front_end_counts_is_never_too_much(tiny_model: Path):
    """Two inputs under way, and their client leaves. Then two that will be refused, with a third behind them."""
    llm = make(tiny_model)
    session = llm.open_session()
    outputs = [llm.add_request([1] * 10, params(0), session=session)]
    for _ in range(2):
        llm.step()
    outputs.append(llm.add_request([2] * 30, params(0), session=session))
    llm.abort_outputs(outputs)
    while llm.core.has_unfinished_requests():
        llm.step()
    in_core = llm.core.scheduler.requests[session].num_tokens
    assert in_core == 10 + 3 and 10 < llm.sessions[session].num_tokens <= in_core
    bad = params(0, structured_outputs={"regex": "("})
    wishes = ([3] * 100, bad), ([3] * 137, params(0)), ([3] * (150 - 1 - in_core), params(0))
    outputs = [llm.add_request(prompt, wish, session=session) for prompt, wish in wishes]
    while llm.core.has_unfinished_requests():
        llm.step()
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "error", "length"]


def test_the_beginning_of_a_text_is_only_at_the_beginning(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    llm = make(tiny_model)
    encode = llm.tokenizer.encode

    def with_bos(text: str, add_special_tokens: bool = True) -> list[int]:
        return [7] * add_special_tokens + encode(text)

    monkeypatch.setattr(llm.tokenizer, "encode", with_bos)
    session = llm.open_session()
    bad = {"structured_outputs": {"regex": "("}}
    wishes = ("a", bad), ("b", {}), ("c", bad), ("d", {})
    first = [llm.generate(s, params(0, **wish), session=session)[0].prompt_token_ids[0] for s, wish in wishes]
    assert first == [7, 7, encode("c")[0], encode("d")[0]], "what was refused is not the beginning"
    assert llm.generate(["b"], params(0))[0].prompt_token_ids[0] == 7


def test_idle_sessions_end_after_a_while(tiny_model: Path):
    llm = make(tiny_model)
    used, busy = llm.open_session(), llm.open_session()
    llm.generate([[1]], params(0), session=used)
    llm.add_request([1], params(0), session=busy)
    llm.end_idle_sessions(60.0)
    assert llm.sessions.keys() == {used, busy}
    llm.end_idle_sessions(0.0)
    assert llm.sessions.keys() == {busy}
    llm.abort_requests([busy])
    assert not llm.core.scheduler.requests


def test_an_answer_in_a_form(tiny_model: Path):
    """Each turn has a grammar, or none."""
    llm = make(tiny_model)
    session = llm.open_session()
    wishes: tuple[dict[str, Any], ...] = ({"regex": "[ab]{3}"}, {}, {"choice": ["yes", "no"]})
    texts = []
    for wish in wishes:
        form = {"structured_outputs": wish} if wish else {}
        texts.append(llm.generate(["ab"], params(0, **form), session=session)[0].outputs[0].text)
    before = llm.core.scheduler.requests[session].token_ids.tolist()
    bad = llm.generate(["ab"], params(0, structured_outputs={"regex": "("}), session=session)[0].outputs[0]
    assert bad.finish_reason == "error" and "unclosed" in str(bad.stop_reason)
    assert llm.core.scheduler.requests[session].token_ids.tolist() == before, "it is no part of what was said"
    assert llm.sessions[session].num_tokens == len(before)
    assert llm.generate(["ab"], params(1), session=session)[0].metrics.num_cached_tokens > 15, "it goes on"
    assert set(texts[0]) <= {"a", "b"} and len(texts[0]) == 3 and texts[2] in ("yes", "no")
