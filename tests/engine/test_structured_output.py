"""Structured output (rule S12): what comes out fits its grammar, whatever happens to the request on the way; a grammar that
cannot be used ends its request alone."""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from nanopd.config import MAX_GRAMMAR, SamplingParams, StructuredOutputsParams, UserError
from nanopd.connector.protocol import KVTransferParams
from nanopd.engine.llm import LLM, CompletionOutput
from nanopd.engine.structured_output import StructuredOutputManager
from nanopd.request import Request
from nanopd_lessons import drive

EOS = 256
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "people": {"type": "integer", "maximum": 99}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    llm = LLM(str(tiny_model), max_model_len=400, num_blocks=200, check_invariants=True)
    yield llm
    llm.core.close()


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 300} | options)


def answer(llm: LLM, **options: Any) -> CompletionOutput:
    return llm.generate("Once upon a time", params(**options))[0].outputs[0]


# ---------------------------------------------------------------- what a user may write


@pytest.mark.parametrize("written", [StructuredOutputsParams(regex="a+"), {"regex": "a+"}, '{"regex": "a+"}'])
def test_the_forms_of_structured_outputs(written: Any):
    kept = SamplingParams(structured_outputs=written)
    assert kept.structured_outputs == StructuredOutputsParams(regex="a+")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(kept), type=SamplingParams) == kept


STRANGE: list[Any] = [{}, {"regex": ""}, {"regex": 5}, {"choice": []}, {"choice": "ab"}, {"choice": [1]}, {"json": 5}]
STRANGE += [{"grammar": "x"}, 5, {"regex": "a", "json_object": True}, {"json_object": False}, "{", '"x"', "regex"]
STRANGE += [StructuredOutputsParams(), StructuredOutputsParams(regex=5), {"regex": "a" * MAX_GRAMMAR}, "[" * 100_000]  # type: ignore[arg-type]


@pytest.mark.parametrize("written", STRANGE, ids=lambda written: repr(written)[:40])
def test_what_cannot_be_meant_is_refused_with_a_sentence(written: Any):
    with pytest.raises(UserError, match=r"^structured_outputs"):
        SamplingParams(structured_outputs=written)


# ---------------------------------------------------------------- what comes out


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_a_random_model_writes_what_fits(llm: LLM, temperature: float):
    for seed in range(3):
        made = answer(llm, temperature=temperature, seed=seed, structured_outputs={"json": CITY})
        assert made.finish_reason == "stop" and set(json.loads(made.text)) == {"city", "people"}
    assert re.fullmatch("[0-9]{3}-[a-f]+x", answer(llm, structured_outputs={"regex": "[0-9]{3}-[a-f]+x"}).text)
    choice = ["yes", 'a "quoted"\nline', "déjà 😀"]
    assert answer(llm, structured_outputs={"choice": choice}).text in choice
    made = answer(llm, structured_outputs={"json_object": True})
    assert made.finish_reason == "length" or isinstance(json.loads(made.text), dict)


def test_batch_mates_get_the_tokens_they_would_have_got(llm: LLM):
    """And logprobs are those of the raw logits, before the mask."""
    plain = SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True)
    (alone,) = llm.generate("hello", plain)
    mate, fitting = llm.generate(
        ["hello", "hello"], [plain, params(logprobs=1, structured_outputs={"regex": "[ab]{9}"})]
    )
    assert mate.outputs[0].token_ids == alone.outputs[0].token_ids
    (free,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=1, logprobs=1))
    (masked, raw) = fitting.outputs[0].logprobs[0], free.outputs[0].logprobs[0]
    (best,) = raw
    assert masked[best].logprob == pytest.approx(raw[best].logprob, abs=1e-4), (
        "the best token, though it is not allowed"
    )


def test_a_grammar_ends_the_output_whatever_min_tokens_and_ignore_eos_say(llm: LLM):
    made = answer(llm, min_tokens=20, ignore_eos=True, structured_outputs={"choice": ["yes", "no"]})
    assert made.text in ("yes", "no") and made.finish_reason == "stop" and made.stop_reason is None
    longer = answer(llm, min_tokens=20, structured_outputs={"regex": "[ab]*"})
    assert len(longer.token_ids) >= 20, "where the grammar leaves a choice, min_tokens holds"


def test_preemptions_in_the_middle_change_nothing(tiny_model: Path):
    options = [params(seed=i, structured_outputs={"json": CITY}) for i in range(6)]
    prompts = [f"{i} " * 10 for i in range(6)]
    roomy = LLM(str(tiny_model), num_blocks=200, max_model_len=100, dtype="float32")
    tight = LLM(str(tiny_model), num_blocks=12, max_model_len=100, block_size=8, dtype="float32", check_invariants=True)
    expected, found = (engine.generate(prompts, options) for engine in (roomy, tight))
    assert sum(output.metrics.num_preemptions for output in found) > 0
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    for output in found:
        json.loads(output.outputs[0].text)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_no_token(tiny_model: Path, temperature: float):
    """Each draft's position has the mask of the output up to there; drafts that the grammar forbids are not accepted."""
    lists = {"type": "array", "items": {"enum": ["abc", "abcabc", "xy"]}, "minItems": 12, "maxItems": 14}
    wishes = [{"json": lists}, {"json": CITY}, {"regex": "(ab|abc){20,30}"}, {"choice": ["papaya papaya papaya"]}, None]
    options = [params(temperature=temperature, seed=i, structured_outputs=wish) for i, wish in enumerate(wishes)]
    engines = [LLM(str(tiny_model), num_blocks=200, dtype="float32", speculative_ngram=n) for n in (0, 4)]
    alone, drafted = (engine.generate(["abcabcabcabc"] * len(wishes), options) for engine in engines)
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in alone]
    assert min(o.metrics.num_accepted_tokens for o in (drafted[0], drafted[2])) > 0
    assert any(o.metrics.num_accepted_tokens < o.metrics.num_draft_tokens for o in drafted)


def test_a_step_that_fails_leaves_the_matcher_where_the_output_is(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    expected = answer(llm, seed=5, structured_outputs={"json": CITY}).token_ids
    output = llm.add_request("Once upon a time", params(seed=5, structured_outputs={"json": CITY}))
    execute, calls = llm.core.runner.execute_model, iter(range(1000))

    def failing(plan: Any) -> Any:
        result = execute(plan)
        if next(calls) % 4 == 3:
            raise MemoryError
        return result

    monkeypatch.setattr(llm.core.runner, "execute_model", failing)
    while not output.finished:
        try:
            llm.step()
        except MemoryError:
            continue
    assert output.outputs[0].token_ids == expected


# ---------------------------------------------------------------- what cannot be used


BAD: list[tuple[dict[str, Any], str]] = [
    ({"regex": "("}, "unclosed group"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"json": {"type": "strin"}}, "Invalid type"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "greater than maximum"),
    ({"json": {"$ref": "#/nope"}}, "does not exist"),
    ({"json": {"not": {}}}, "Unimplemented"),
    ({"json": {"$ref": "#"}}, "no text can match it"),
    (
        {
            "json": {
                "allOf": [
                    {"anyOf": [{"properties": {f"a{i}{j}": {"type": "null"}}} for j in range(9)]} for i in range(9)
                ]
            }
        },
        "too large",
    ),
]


def test_a_grammar_that_cannot_be_used_ends_its_request_alone(llm: LLM):
    good = params(structured_outputs={"choice": ["yes"]})
    wishes = [params(structured_outputs=wish) for wish, _ in BAD]
    *failed, made = llm.generate(["x"] * (len(BAD) + 1), [*wishes, good])
    assert made.outputs[0].text == "yes"
    for output, (wish, says) in zip(failed, BAD):
        (completion,) = output.outputs
        assert (completion.finish_reason, completion.token_ids) == ("error", []), wish
        assert completion.stop_reason.startswith("structured_outputs: ") and says in completion.stop_reason, wish
        assert "%llguidance" not in completion.stop_reason, "the grammar that we made of it is not theirs"


NESTED = "(" * 6 + "a{1,30}" + "){1,30}" * 6


def test_a_grammar_that_grows_too_large_while_it_matches_ends_its_request(llm: LLM):
    made = answer(llm, min_tokens=300, structured_outputs={"regex": NESTED})
    assert made.finish_reason == "error" and "too many" in str(made.stop_reason)
    assert llm.core.structured_outputs._matchers == {}


def test_abort_while_it_compiles(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    manager, go_on = llm.core.structured_outputs, threading.Event()
    compiled = manager._compile
    monkeypatch.setattr(manager, "_compile", lambda wish: (go_on.wait(10), compiled(wish))[1])
    first, second = (llm.add_request("x", params(structured_outputs={"regex": "[ab]+"}), i) for i in "ab")
    other = llm.add_request("y", SamplingParams(max_tokens=3, ignore_eos=True))
    while not other.finished:
        llm.step()
    assert llm.stats().num_compiling == 2
    llm.abort_requests(["a", "b"])
    assert llm.stats().num_compiling == 0 and not manager._futures
    go_on.set()
    assert answer(llm, structured_outputs={"choice": ["yes"]}).text == "yes"
    assert not llm.core.has_unfinished_requests() and not manager._matchers
    assert [o.outputs[0].finish_reason for o in (first, second)] == ["abort", "abort"]


def test_the_matcher_is_told_what_the_output_has_and_nothing_twice(tiny_model: Path):
    manager = StructuredOutputManager(tiny_model, 300, [EOS])
    request = Request("r", [65, 66], params(structured_outputs={"regex": "ab(c|d)"}), [EOS])
    assert manager.bitmask(request) == {}, "not compiled yet"
    manager.start(request)
    while not (news := manager.get_finished()):
        pass
    assert news == {"r": None} and manager.get_finished() == {}

    def allowed() -> list[int]:
        (bitmask,) = manager.bitmask(request)["r"]
        return np.flatnonzero(np.unpackbits(np.frombuffer(bitmask, np.uint8), bitorder="little")).tolist()

    tokens = dict(zip("abcd", load(tiny_model, "abcd")))
    assert allowed() == allowed() == [tokens["a"]]
    request.token_ids.extend([tokens["a"], tokens["b"]])
    assert allowed() == sorted([tokens["c"], tokens["d"]])
    request.token_ids.append(tokens["d"])
    assert allowed() == [EOS]
    request.token_ids.append(tokens["d"])
    assert manager.bitmask(request) == {} and "r" in manager.get_finished(), "a token that was never allowed"
    manager.close()


def load(model: Path, text: str) -> list[int]:
    from nanopd.models.tokenizer import load_tokenizer

    return load_tokenizer(model).encode(text)


def test_p_and_d_give_the_tokens_of_one_engine(tmp_path: Path):
    """D compiles, then loads, then samples the first token itself: its matcher begins where the output does."""
    model = drive.byte_tokenizer(drive.tiny_model(tmp_path / "model"))
    wish, prompt = {"regex": "([a-f]{3}-){2}[0-9]{9}"}, list(b"Once upon a time, there was")
    with drive.in_memory():
        p, d, alone = (drive.Node(model, role) for role in ("prefill", "decode", None))
        p.prefill("r", prompt)
        where = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": p.core.connector.port}
        requests = []
        for node, transfer in ((d, KVTransferParams(**where, transfer_id="r")), (alone, None)):
            sampling = params(temperature=0, seed=0, structured_outputs=wish)
            requests.append(Request("r", prompt, sampling, [299], kv_transfer_params=transfer))
            node.core.add_request(requests[-1])
            node.tokens["r"] = []
        drive.run_nodes(p, d, alone)
        states = [status for _, status in requests[0].metrics.history]
        assert states == [
            "waiting",
            "waiting for grammar",
            "waiting",
            "waiting for remote KVs",
            "waiting",
            "running",
            "stop",
        ]
        assert d.tokens["r"] == alone.tokens["r"] and re.fullmatch(wish["regex"], bytes(d.tokens["r"][:-1]).decode())
        for node in (p, d, alone):
            node.core.close()


SPECIAL = ["end <|im_end|> x", "<|im_start|>", "<|endoftext|>"]


@pytest.mark.parametrize(
    "wish", [{"choice": [SPECIAL[0]]}, {"regex": r"<\|endoftext\|>"}, {"json": {"enum": SPECIAL[1:2]}}]
)
def test_s12_text_that_looks_like_a_special_token_is_text(wish: dict[str, Any]):
    llm = LLM(dtype="float32", num_blocks=20, max_model_len=200)
    params = SamplingParams(temperature=0, max_tokens=30, structured_outputs=wish, skip_special_tokens=False)
    [completion] = llm.generate(["hello"], params)[0].outputs
    expected = {SPECIAL[0], SPECIAL[2], f'"{SPECIAL[1]}"'}
    assert completion.text.removesuffix("<|im_end|>") in expected
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize("text", ["no JSON", "[" * 5000, "[1]", ""])
def test_a_schema_as_text_must_be_json_of_an_object(text: str):
    with pytest.raises(UserError, match="structured_outputs"):
        SamplingParams(structured_outputs={"json": text})
