"""The tokens of P/D are those of one engine: over HTTP, with 64 requests at once, and pools that are too small for them
(rules S5, S10, K8, P4, P8)."""

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from nanopd.config import LAYOUTS, SamplingParams
from nanopd.engine.llm import LLM
from nanopd.models.default import fetch_default_model
from tests.pd.conftest import Alone, Answer, Job, Node, Router, ask, ask_all, check, make_jobs, running, statuses

LENGTHS = (1, 200, 15, 16, 17, 120, 40, 1500, 5, 90, 64, 33)
ORDERS = ("together", "prefill_first")
PUSHES = ("whole", "per_chunk")
P_OPTIONS = ("--num-blocks", "200", "--max-num-batched-tokens", "256")
D_OPTIONS = ("--num-blocks", "120", "--max-num-batched-tokens", "512")


@pytest.fixture(scope="module")
def jobs(alone: Alone) -> list[Job]:
    return alone(make_jobs(64, 0, LENGTHS, (10, 50)))


@pytest.fixture(scope="module", params=LAYOUTS)
def nodes(pd_model: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, Node]]:
    """A P for each kv_push, and a D that serves them all."""
    layout = ("--kv-layout", request.param, "--check-invariants")
    found = {push: Node(pd_model, "prefill", "--kv-push", push, *layout, *P_OPTIONS) for push in PUSHES}
    found["D"] = Node(pd_model, "decode", *layout, *D_OPTIONS)
    with running(*found.values()):
        yield found


@pytest.fixture(scope="module")
def routers(nodes: dict[str, Node]) -> Iterator[dict[str, Router]]:
    """By order; both know a P of each kv_push, and take them in turn."""
    p, d = [nodes[push].base_url for push in PUSHES], nodes["D"].base_url
    found = {order: Router(p, [d], "--order", order, "--policy", "round_robin") for order in ORDERS}
    with running(*found.values()):
        yield found


def salt() -> str:
    """None of this is in the caches already."""
    return os.urandom(8).hex()


def metrics(answer: Answer) -> dict[str, Any]:
    return (answer.raw[-1] if isinstance(answer.raw, list) else answer.raw)["metrics"]


@pytest.mark.parametrize("order", ORDERS)
def test_64_requests_at_once(nodes: dict[str, Node], routers: dict[str, Router], jobs: list[Job], order: str):
    d, names = nodes["D"], ("num_preemptions", "kv_transfer_received")
    before, sent = {name: d.count(name) for name in names}, {p: nodes[p].count("kv_transfer_sent") for p in PUSHES}
    check(ask_all(routers[order].base_url, jobs, cache_salt=salt()), jobs)
    for node in nodes.values():
        node.wait_empty()
    more = {name: d.count(name) - before[name] for name in names}
    more_sent = [nodes[p].count("kv_transfer_sent") - sent[p] for p in PUSHES]
    assert all(more.values()) and all(more_sent), (more, more_sent)
    assert sum(more_sent) == more["kv_transfer_received"]


def test_preempted_after_a_load(nodes: dict[str, Node], routers: dict[str, Router], alone: Alone):
    """At first they need 84 blocks of D's 120, and at their ends 168."""
    rng = random.Random(2)
    jobs = alone(Job([rng.randrange(256) for _ in range(112)], 100) for _ in range(12))
    answers = ask_all(routers["together"].base_url, jobs, cache_salt=salt())
    check(answers, jobs)
    assert any(m["transfer"] and m["num_preemptions"] for m in map(metrics, answers)), list(map(metrics, answers))
    nodes["D"].wait_empty()


@pytest.mark.parametrize("push", PUSHES)
def test_d_is_asked_long_before_p(nodes: dict[str, Node], jobs: list[Job], push: str):
    """By hand, as a router of another make might do it."""
    p, d, chosen = nodes[push], nodes["D"], [job for job in jobs if 100 < len(job.prompt) < 300][:4]
    received = d.count("kv_transfer_received")

    async def main() -> list[Answer]:
        async with aiohttp.ClientSession() as session:
            where = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": p.kv_port}
            first, mark = [], salt()
            for i, job in enumerate(chosen):
                kv = {"kv_transfer_params": where | {"transfer_id": f"{mark}-{i}"}, "cache_salt": mark}
                first.append(asyncio.create_task(ask(session, d.base_url, job.body | kv)))
            await asyncio.sleep(0.5)
            assert statuses(await asyncio.to_thread(d.state), "waiting for remote KVs") == len(chosen)
            for i, job in enumerate(chosen):
                kv = {"kv_transfer_params": {"do_remote_decode": True, "transfer_id": f"{mark}-{i}"}}
                await ask(session, p.base_url, job.body | kv | {"max_tokens": 1, "cache_salt": mark})
            return await asyncio.gather(*first)

    check(asyncio.run(main()), chosen)
    assert d.count("kv_transfer_received") - received == len(chosen)
    for node in (p, d):
        node.wait_empty()


@pytest.mark.parametrize("order", ORDERS)
def test_a_request_id_used_again(nodes: dict[str, Node], routers: dict[str, Router], jobs: list[Job], order: str):
    """The client's id is only a name: one after the other or at once, what is transferred is each one's own."""
    few, mine = [job for job in jobs if 16 < len(job.prompt) < 300][:8], {"X-Request-Id": order}
    received = nodes["D"].count("kv_transfer_received")
    for these in (few[:1], few[1:2], few):
        check(ask_all(routers[order].base_url, these, headers=lambda i: mine, cache_salt=salt()), these)
    assert nodes["D"].count("kv_transfer_received") - received > 2


@pytest.mark.parametrize("at_once", [False, True])
def test_a_transfer_id_used_again(nodes: dict[str, Node], jobs: list[Job], at_once: bool):
    """Without a transfer id in kv_transfer_params it is the X-Request-Id, and two clients may have the same. One of two
    prompts under one id at one time cannot be had from P; then D computes it (never wrong tokens, P8)."""
    p, d, mine, mark = nodes["whole"], nodes["D"], {"X-Request-Id": salt()}, salt()
    chosen = [job for job in jobs if 60 < len(job.prompt) < 300][:3]
    received, to_d = d.count("kv_transfer_received"), []

    def prefill(job: Job) -> None:
        body = job.body | {"max_tokens": 1, "cache_salt": mark, "kv_transfer_params": {"do_remote_decode": True}}
        to_d.append(p.post("/v1/completions", mine, **body)["kv_transfer_params"])

    def decode(i: int) -> None:
        answer = d.post("/v1/completions", mine, **chosen[i].body, cache_salt=mark, kv_transfer_params=to_d[i])
        assert answer["choices"][0]["text"] == chosen[i].text

    for i, job in enumerate(chosen):
        prefill(job)
        if not at_once:
            decode(i)
    if at_once:
        for i in range(len(chosen)):
            decode(i)
    assert d.count("kv_transfer_received") - received == (1 if at_once else len(chosen))
    for node in (p, d):
        node.wait_empty()


@pytest.mark.slow
def test_the_default_model():
    """The same with a real model, whose tokens are compared by text and by log-probability."""
    model, lengths = fetch_default_model(), (1, 100, 15, 16, 17, 120, 40, 700, 5, 90, 64, 33)
    jobs, rng = make_jobs(64, 0, lengths, (10, 40)), random.Random(0)
    ids = [rng.randrange(1000, 49_000) for _ in range(256)]
    llm = LLM(str(model), dtype="float32", num_blocks=1500)
    for job in jobs:
        job.prompt = [ids[i] for i in job.prompt]
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=job.max_tokens, logprobs=0) for job in jobs]
    expected = [output.outputs[0] for output in llm.generate([job.prompt for job in jobs], params)]
    for job, completion in zip(jobs, expected):
        job.text = llm.tokenizer.decode(completion.token_ids, skip_special_tokens=False)
    del llm
    p, d = Node(model, "prefill", *P_OPTIONS), Node(model, "decode", *D_OPTIONS)
    with running(p, d), Router([p.base_url], [d.base_url]) as router:
        answers = ask_all(router.base_url, jobs, timeout=1500, logprobs=0)
        check(answers, jobs)
        for answer, completion in zip(answers, expected):
            events = answer.raw if isinstance(answer.raw, list) else [answer.raw]
            got = [p for event in events for p in event["choices"][0]["logprobs"]["token_logprobs"]]
            assert got == pytest.approx(
                [top[i].logprob for i, top in zip(completion.token_ids, completion.logprobs)], abs=1e-3
            )
        assert d.count("num_preemptions") > 0 and d.count("kv_transfer_received") > 0
        for node in (p, d):
            node.wait_empty()
