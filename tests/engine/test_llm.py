"""The offline interface: order, metrics, log-probabilities, stops, seeds, aborts, errors."""

from pathlib import Path

import pytest
import torch

from nanopd import LLM, SamplingParams, UserError
from nanopd.batch import add
from nanopd.engine import core as engine_core
from nanopd.engine.core import PACK_AFTER
from nanopd.models.decoder import Linear
from nanopd.serve.api import parse
from tests.engine.conftest import check_greedy, reference


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), dtype="float32", num_blocks=200, check_invariants=True)


def forget_cached(llm: LLM) -> None:
    for block in llm.core.scheduler.kv.pool.blocks:
        llm.core.scheduler.kv.pool.evict(block)


def greedy(**options: object) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 8, "ignore_eos": True} | options))  # type: ignore[arg-type]


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM):
    prompts = ["a", "bb", "ccc"]
    outputs = llm.generate(prompts, [greedy(max_tokens=n) for n in (9, 1, 4)])
    assert [o.prompt for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == [9, 1, 4]
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)


def test_forms_of_a_prompt(llm: LLM):
    ids = llm.tokenizer.encode("hello")
    for prompt in ("hello", ids, {"prompt": "hello"}, {"prompt_token_ids": ids}, ["hello"], [ids]):
        (output,) = llm.generate(prompt, greedy())
        assert output.prompt_token_ids == ids
    assert llm.generate([], greedy()) == []


def test_chat_applies_the_template(llm: LLM):
    (output,) = llm.chat([{"role": "user", "content": "hi"}], greedy())
    assert output.prompt_token_ids == llm.tokenizer.encode("user: hi\nassistant:")
    assert len(llm.chat([[{"role": "user", "content": "hi"}]] * 2, greedy())) == 2


def test_metrics(llm: LLM):
    forget_cached(llm)
    prompt = list(range(50, 100))
    for cached in (0, 48):
        (output,) = llm.generate([prompt], greedy())
        metrics = output.metrics.as_dict(8)
        assert metrics["num_cached_tokens"] == cached
        assert 0 <= metrics["queue_time"] <= metrics["time_to_first_token"] <= metrics["e2e_latency"]  # type: ignore[operator]
        assert metrics["inter_token_latency"] > 0  # type: ignore[operator]


@torch.inference_mode()
def test_logprobs_are_those_of_transformers(llm: LLM, tiny_model: Path):
    prompt = list(range(30))
    (output,) = llm.generate([prompt], greedy(logprobs=4))
    (completion,) = output.outputs
    logits = reference(tiny_model)(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    assert completion.logprobs is not None
    for token, entry, row in zip(completion.token_ids, completion.logprobs, expected):
        assert list(entry) == row.topk(4).indices.tolist(), "best first; the sampled token is among them"
        assert entry[token].rank == 1
        for i, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(row[i]), abs=1e-3)
    assert completion.cumulative_logprob == pytest.approx(float(expected.max(-1).values.sum()), abs=1e-2)


def test_logprobs_of_a_sampled_token_outside_the_best(llm: LLM):
    (output,) = llm.generate(["x"], SamplingParams(temperature=50.0, seed=1, max_tokens=5, logprobs=1, ignore_eos=True))
    entries = output.outputs[0].logprobs
    assert entries is not None
    assert any(len(entry) == 2 for entry in entries)


def test_a_seed_gives_the_same_tokens_whatever_the_batch(tiny_model: Path, llm: LLM):
    params = SamplingParams(temperature=1.0, seed=42, max_tokens=12, top_p=0.95, ignore_eos=True)
    alone = llm.generate(["seeded"], params)[0].outputs[0].token_ids
    others = [SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)] * 5
    crowd = llm.generate(["a", "b", "c", "d", "e", "seeded"], [*others, params])
    assert crowd[-1].outputs[0].token_ids == alone
    # a pool so tight that the seeded request is preempted on the way
    tight = LLM(str(tiny_model), dtype="float32", num_blocks=12, block_size=4, check_invariants=True)
    outputs = tight.generate(["a", "b", "c", "seeded"], [*[greedy(max_tokens=20)] * 3, params])
    assert outputs[-1].metrics.num_preemptions > 0
    assert outputs[-1].outputs[0].token_ids == alone


def test_without_a_seed_the_engine_seed_decides(tiny_model: Path):
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    runs = [
        [o.outputs[0].token_ids for o in LLM(str(tiny_model), num_blocks=50, seed=s).generate(["x", "x"], params)]
        for s in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1], "two requests draw different seeds"


def test_n_completions(llm: LLM):
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=6, ignore_eos=True)
    (output,) = llm.generate(["x"], params)
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3
    assert (
        output.outputs[0].token_ids
        == llm.generate(["x"], SamplingParams(temperature=1.0, seed=7, max_tokens=6, ignore_eos=True))[0]
        .outputs[0]
        .token_ids
    )


def test_stop_strings_and_stop_tokens(llm: LLM):
    (plain,) = llm.generate(["stop test"], greedy(max_tokens=12))
    text, ids = plain.outputs[0].text, plain.outputs[0].token_ids
    stop = text[3:5]
    (output,) = llm.generate(["stop test"], greedy(max_tokens=12, stop=stop))
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert output.outputs[0].text == text[: text.index(stop)]
    assert not llm.core.scheduler.requests, "the engine core let go of it too"
    (output,) = llm.generate(["stop test"], greedy(max_tokens=12, stop_token_ids=[ids[4]]))
    end = ids.index(ids[4])
    assert output.outputs[0].token_ids == ids[: end + 1]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", ids[4])
    assert output.outputs[0].text == llm.tokenizer.decode(ids[:end])


def test_eos_ends_unless_ignored(llm: LLM):
    outputs = llm.generate(["eos"] * 6, [SamplingParams(temperature=1.5, seed=s, max_tokens=300) for s in range(6)])
    ended = [o.outputs[0] for o in outputs if o.outputs[0].finish_reason == "stop"]
    assert ended, "with 300 ids a random model meets its end-of-sequence token sooner or later"
    assert all(c.token_ids[-1] == 256 and 256 not in c.token_ids[:-1] and c.stop_reason is None for c in ended)


def test_abort_at_any_moment(llm: LLM):
    outputs = [llm.add_request("abort me", greedy(max_tokens=50), f"r{i}") for i in range(3)]
    llm.abort_requests(["r0"])
    llm.step()
    llm.abort_requests(["r1", "unknown"])
    while llm.has_unfinished_requests():
        llm.step()
    assert [o.outputs[0].finish_reason for o in outputs] == ["abort", "abort", "length"]
    assert all(o.finished for o in outputs)
    assert llm.core.scheduler.kv.pool.num_free_blocks == 200


def test_a_bad_prompt_among_good_ones_leaves_nothing_behind(llm: LLM):
    for bad, says in (
        ("", "empty"),
        ([10**6], "vocabulary"),
        ([-1], "vocabulary"),
        (["a"], "list of token ids"),
        ([True], "list of token ids"),
        ([1.5], "list of token ids"),
        ([10**30], "list of token ids"),
        ({"prompt_token_ids": "abc"}, "list of token ids"),
        ({"text": "x"}, "A prompt is"),
        (list(range(200)) * 30, "max_model_len is 512"),
    ):
        with pytest.raises(UserError, match=says):
            llm.generate(["good", bad], greedy())  # type: ignore[list-item]
        assert not llm.has_unfinished_requests()
        assert llm.core.scheduler.kv.pool.num_free_blocks == 200
    with pytest.raises(UserError, match="2 prompts, 1 sampling params"):
        llm.generate(["a", "b"], [greedy()])


def test_options(tiny_model: Path):
    with pytest.raises(UserError, match="Unknown engine option blocksize"):
        LLM(str(tiny_model), blocksize=3)
    with pytest.raises(UserError, match="tensor_parallel_size can only be 1"):
        LLM(str(tiny_model), tensor_parallel_size=2)
    with pytest.raises(UserError, match="knows 512 positions"):
        LLM(str(tiny_model), max_model_len=513)
    with pytest.raises(UserError, match="MiB are free"):
        LLM(str(tiny_model), kv_cache_memory="100TiB")
    with pytest.raises(UserError, match="one block takes"):
        LLM(str(tiny_model), kv_cache_memory="1k")
    llm = LLM(str(tiny_model), kv_cache_memory="1MiB", trust_remote_code=False, gpu_memory_utilization=0.5)
    assert len(llm.core.scheduler.kv.pool.blocks) == 2**20 // (3 * 2 * 16 * 2 * 16 * 4)


def test_one_prompt_that_fills_the_whole_cache(tiny_model: Path):
    llm = LLM(str(tiny_model), num_blocks=4, block_size=8, check_invariants=True)
    (output,) = llm.generate([list(range(31))], greedy(max_tokens=100))
    assert len(output.outputs[0].token_ids) == 1
    (output,) = llm.generate([list(range(5))], greedy(max_tokens=100))
    assert len(output.outputs[0].token_ids) == 27
    with pytest.raises(UserError, match="at most 31 tokens"):
        llm.generate([list(range(32))], greedy())


def test_an_interrupted_prefill_leaves_no_trace_in_the_cache(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    """Whatever stops a step half-way: what it was to compute must not be found by the next request."""
    llm = LLM(str(tiny_model), dtype="float32", num_blocks=100, check_invariants=True)
    prompt = list(range(100))
    expected = (
        LLM(str(tiny_model), dtype="float32", num_blocks=100).generate([prompt], greedy())[0].outputs[0].token_ids
    )
    forward, calls = llm.core.runner._model_forward, []

    def stop_at_call(n: int) -> None:
        def stop(*args: object) -> object:
            calls.append(1)
            if len(calls) == n:
                raise KeyboardInterrupt
            return forward(*args)  # type: ignore[arg-type]

        calls.clear()
        monkeypatch.setattr(llm.core.runner, "_model_forward", stop)

    for n in (1, 2, 5):
        stop_at_call(n)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([prompt], greedy())
        monkeypatch.setattr(llm.core.runner, "_model_forward", forward)
        assert not llm.has_unfinished_requests()
        (output,) = llm.generate([prompt], greedy())
        assert output.outputs[0].token_ids == expected
        forget_cached(llm)
    # a request that is not aborted goes on by itself, with the same tokens
    stop_at_call(4)
    output = llm.add_request(prompt, greedy())

    def drain() -> None:
        while llm.has_unfinished_requests():
            llm.step()

    with pytest.raises(KeyboardInterrupt):
        drain()
    drain()
    assert output.outputs[0].token_ids == expected
    llm.step()
    assert not llm.core.runner.rows


def test_a_bad_salt_or_a_taken_id_leaves_nothing_behind(llm: LLM):
    with pytest.raises(UserError, match="cache_salt"):
        llm.add_request({"prompt": "x" * 40, "cache_salt": 5}, greedy())
    llm.add_request("x", greedy(), "q#1")
    with pytest.raises(UserError, match="already in use"):
        llm.add_request("x", greedy(n=3, temperature=1.0), "q")
    for taken in ("two", "12345"):
        llm.add_request("x", greedy(n=2, temperature=1.0), taken)
        with pytest.raises(UserError, match="already in use"):
            llm.add_request("x", greedy(), taken)
    llm._ids = iter(["12345", "12346"])  # type: ignore[assignment]
    assert llm.add_request("x", greedy()).request_id == "12346", "an id of ours gives way to one of the user's"
    llm.abort_requests(["q#1", "two", "12345", "12346"])
    llm._ids = iter(map(str, range(99999, 999999)))  # type: ignore[assignment]
    assert not llm.has_unfinished_requests()
    assert not llm.core.scheduler.requests


def test_priorities_are_served_in_order_and_refused_without_the_policy(tiny_model: Path):
    llm = LLM(str(tiny_model), num_blocks=50, max_num_seqs=1, scheduling_policy="priority")
    outputs = [llm.add_request([1, 2, i], SamplingParams(max_tokens=2), priority=3 - i) for i in range(4)]
    ended: list[str] = []
    while llm.has_unfinished_requests():
        ended += [output.request_id for output in llm.step() if output.finished]
    assert ended == [output.request_id for output in reversed(outputs)]
    assert len(llm.generate([[1], [2]], SamplingParams(max_tokens=2), priority=[1, 0])) == 2
    assert len(llm.generate([[1], [2]], SamplingParams(max_tokens=2), priority=1)) == 2
    line = add(llm, SamplingParams(max_tokens=2), {"prompt_token_ids": [1], "priority": 7}).request_id
    assert llm.core.scheduler.requests[line].priority == 7, "JSONL"
    assert parse(b'{"prompt": [1], "priority": 7}', False)[0].priority == 7, "HTTP"
    with pytest.raises(UserError, match="2 prompts, 2 sampling params and 1 priorities"):
        llm.generate([[1], [2]], SamplingParams(max_tokens=2), priority=[1])
    with pytest.raises(UserError, match="-1000 to 1000"):
        llm.generate([[1]], SamplingParams(max_tokens=2), priority=[1001])
    with pytest.raises(UserError, match="--scheduling-policy priority"):
        LLM(str(tiny_model), num_blocks=50).generate([[1]], SamplingParams(max_tokens=2), priority=[1])


def test_weights_are_packed_after_some_steps_and_the_tokens_stay(tiny_model: Path):
    llm = LLM(str(tiny_model), dtype="float32", num_blocks=50)
    linears = [module for module in llm.core.model.modules() if isinstance(module, Linear)]
    for linear in linears:
        linear.weight.copy_(linear.weight.bfloat16())  # as from a checkpoint in bfloat16
    params = SamplingParams(temperature=0, max_tokens=PACK_AFTER - 1, ignore_eos=True)
    plain = llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids
    assert all(linear.packed is None for linear in linears), "a short answer does not pay for it"
    again = llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids
    assert again == plain
    if "fbgemm" in torch.backends.quantized.supported_engines:
        assert any(linear.packed is not None for linear in linears)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_weights_are_packed_at_once_where_the_processor_does_not_know_their_type(
    tiny_model: Path, dtype: str, known: bool, monkeypatch: pytest.MonkeyPatch
):
    """Their products took 3 to 5 times as long. The tokens stay: the same numbers are multiplied, and rounded at the end."""
    monkeypatch.setattr(engine_core, "has_instructions_for", lambda _: known)
    llm = LLM(str(tiny_model), dtype=dtype, num_blocks=50)
    assert (llm.core.dtype, llm.core.runner.kv_cache.memory.dtype) == (getattr(torch, dtype),) * 2
    packed = [module.packed is not None for module in llm.core.model.modules() if isinstance(module, Linear)]
    assert not any(packed)
    prompts = [[1, 2, 3], [9, 8]]
    firsts = [
        output.outputs[0].token_ids for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1))
    ]
    packed = [module.packed is not None for module in llm.core.model.modules() if isinstance(module, Linear)]
    if "fbgemm" in torch.backends.quantized.supported_engines:
        assert any(packed) is not known
    for prompt, first in zip(prompts, firsts):
        check_greedy(tiny_model, prompt, first, min_margin=0.05)
