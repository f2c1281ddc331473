"""Clients that know nothing of us in front of P and D: the official one of OpenAI, and the proxy that Mooncake publishes in
its wheel, as it is."""

import asyncio
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.pd.conftest import CHAT, COMPLETIONS, Alone, Job, Node, Process, Router, ask_all, check, make_jobs, running

WORDS = "Tell me of rivers and of bridges, of the sea and the wind, and do not leave out the rain. "


class MooncakeProxy(Process):
    """mooncake/vllm_v1_proxy_server.py: asks P first, then D with the kv_transfer_params that P's answer brought."""

    sign = "INFO:     Uvicorn running on http://"

    def __init__(self, p: Node, d: Node) -> None:
        package = importlib.util.find_spec("mooncake")
        assert package and package.submodule_search_locations
        script = Path(package.submodule_search_locations[0]) / "vllm_v1_proxy_server.py"
        (p_host, p_port), (d_host, d_port) = p.address, d.address
        prefill = ("--prefiller-hosts", p_host, "--prefiller-ports", str(p_port))
        decode = ("--decoder-hosts", d_host, "--decoder-ports", str(d_port))
        super().__init__(sys.executable, str(script), "--port", "0", *prefill, *decode)


@pytest.fixture(scope="module")
def nodes(pd_model: Path) -> Iterator[tuple[Node, Node, Node]]:
    """P, D, and one that is alone."""
    p, d = Node(pd_model, "prefill", "--num-blocks", "400"), Node(pd_model, "decode", "--num-blocks", "400")
    single = Node(pd_model, None, "--num-blocks", "400")
    with running(p, d, single):
        yield p, d, single


@pytest.fixture(scope="module")
def router(nodes: tuple[Node, Node, Node]) -> Iterator[Router]:
    with Router([nodes[0].base_url], [nodes[1].base_url]) as it:
        yield it


@pytest.fixture(scope="module")
def proxy(nodes: tuple[Node, Node, Node]) -> Iterator[MooncakeProxy]:
    with MooncakeProxy(*nodes[:2]) as it:
        yield it


class Moved:
    """How many prompts have gone from P to D since it was made."""

    def __init__(self, nodes: tuple[Node, Node, Node]) -> None:
        self.p, self.d, _ = nodes
        self.start = self.now()

    def now(self) -> tuple[int, int]:
        return self.p.count("kv_transfer_sent"), self.d.count("kv_transfer_received")

    def check(self, count: int) -> None:
        sent, received = (now - start for now, start in zip(self.now(), self.start))
        assert sent == received == count
        for node in (self.p, self.d):
            node.wait_empty()


# ---------------------------------------------------------------- openai


def through_openai(url: str, salt: str) -> list[Any]:
    """Completions and chat, whole and streamed; each prompt is new."""
    with openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0, timeout=30) as client:
        (model,) = client.models.list()
        extra = {"ignore_eos": True, "skip_special_tokens": False, "cache_salt": salt}
        common: dict[str, Any] = {"model": model.id, "temperature": 0, "max_tokens": 20, "extra_body": extra}
        prompts = [f"{i} {WORDS}" for i in range(4)]
        answer = client.completions.create(prompt=prompts[0], logprobs=2, **common)
        assert answer.usage
        found = [[answer.choices[0].text, answer.choices[0].finish_reason, answer.usage.total_tokens]]
        found[0].append(answer.choices[0].logprobs.tokens)
        chunks = list(
            client.completions.create(prompt=prompts[1], stream=True, stream_options={"include_usage": True}, **common)
        )
        assert chunks[-1].usage
        texts = "".join(chunk.choices[0].text for chunk in chunks[:-1])
        found.append([texts, chunks[-2].choices[0].finish_reason, chunks[-1].usage.total_tokens])
        chat = client.chat.completions.create(messages=[{"role": "user", "content": prompts[2]}], **common)
        assert chat.usage
        found.append([chat.choices[0].message.content, chat.choices[0].finish_reason, chat.usage.total_tokens])
        stream = client.chat.completions.create(
            messages=[{"role": "user", "content": prompts[3]}], stream=True, **common
        )
        events = list(stream)
        found.append(["".join(e.choices[0].delta.content or "" for e in events), events[-1].choices[0].finish_reason])
        return found


def test_openai(nodes: tuple[Node, Node, Node], router: Router):
    expected = through_openai(nodes[2].base_url, "s")
    assert [len(answer[0]) for answer in expected] >= [20] * 4
    moved = Moved(nodes)
    assert through_openai(router.base_url, "r") == expected
    moved.check(4)


def test_openai_and_the_end_of_sequence(nodes: tuple[Node, Node, Node], router: Router):
    """Answers end where the model or a stop string ends them."""
    options: dict[str, Any] = {"model": "tiny-pd", "prompt": "end " + WORDS, "temperature": 0, "max_tokens": 300}
    answers = []
    for url in (nodes[2].base_url, router.base_url):
        with openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0, timeout=30) as client:
            first = client.completions.create(**options).choices[0]
            stop = client.completions.create(**options, stop=first.text[5:7]).choices[0]
            answers.append((first.text, first.finish_reason, stop.text, stop.finish_reason))
            assert stop.finish_reason == "stop" and stop.text == first.text[: first.text.index(first.text[5:7])]
    assert answers[0] == answers[1]


def test_openai_async(nodes: tuple[Node, Node, Node], router: Router):
    """Several at once, as most programs ask."""

    async def main(url: str, salt: str) -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="any", max_retries=0, timeout=60) as client:

            async def one(i: int) -> str | None:
                body = {"messages": [{"role": "user", "content": f"{i}. {WORDS}"}], "model": "tiny-pd"}
                extra = {"ignore_eos": True, "cache_salt": salt}
                answer = await client.chat.completions.create(
                    **body, temperature=0, max_completion_tokens=12, extra_body=extra
                )
                return answer.choices[0].message.content

            return await asyncio.gather(*map(one, range(8)))

    moved, expected = Moved(nodes), asyncio.run(main(nodes[2].base_url, "s"))
    assert asyncio.run(main(router.base_url, "r")) == expected
    moved.check(8)


# ---------------------------------------------------------------- Mooncake's proxy


def test_mooncakes_proxy(nodes: tuple[Node, Node, Node], proxy: MooncakeProxy, alone: Alone):
    """Twelve at once, half of them as streams; those of up to a block of 16 tokens are not fetched."""
    jobs: list[Job] = alone(make_jobs(12, 5, (1, 700, 15, 40, 300, 1500), (5, 30)))
    moved = Moved(nodes)
    check(ask_all(proxy.base_url, jobs, cache_salt="proxy"), jobs)
    moved.check(8)


def test_mooncakes_proxy_and_chat(nodes: tuple[Node, Node, Node], proxy: MooncakeProxy):
    moved = Moved(nodes)
    with openai.OpenAI(base_url=proxy.base_url + "/v1", api_key="any", max_retries=0, timeout=30) as client:
        alone_at = openai.OpenAI(base_url=nodes[2].base_url + "/v1", api_key="any", max_retries=0, timeout=30)
        for limit in ("max_tokens", "max_completion_tokens"):
            messages: Any = [{"role": "user", "content": f"{limit} {WORDS}"}]
            options: dict[str, Any] = {"model": "tiny-pd", "messages": messages, "temperature": 0, limit: 15}
            want = alone_at.chat.completions.create(**options)
            assert client.chat.completions.create(**options).choices == want.choices
            options["messages"] = [{"role": "user", "content": f"Stream! {limit} {WORDS}"}]
            want = alone_at.chat.completions.create(**options)
            chunks = list(client.chat.completions.create(**options, stream=True))
            assert "".join(c.choices[0].delta.content or "" for c in chunks) == want.choices[0].message.content
            assert chunks[-1].choices[0].finish_reason == want.choices[0].finish_reason
    moved.check(4)


def test_mooncakes_proxy_passes_errors(nodes: tuple[Node, Node, Node], proxy: MooncakeProxy):
    """What P refuses is not asked of D; the proxy answers 500, for it knows no better."""
    moved = Moved(nodes)
    assert proxy.request(COMPLETIONS, {"prompt": "x", "tools": [1]})[0] == 500
    assert proxy.request(CHAT, {"messages": [], "prompt": "x"})[0] == 500
    moved.check(0)
