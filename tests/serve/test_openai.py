"""The official client, which knows nothing of us: what it asks must be understood, what it gets must fit its types."""

import json
from typing import Any

import pytest

from tests.serve.conftest import Server

openai = pytest.importorskip("openai")
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(server: Server) -> "openai.OpenAI":
    return openai.OpenAI(base_url=server.base_url + "/v1", api_key="any", max_retries=0)


def test_models(client: "openai.OpenAI"):
    assert [model.id for model in client.models.list()] == ["tiny-llama"]


def test_completions(client: "openai.OpenAI"):
    options = {"model": "tiny-llama", "prompt": "hello", "temperature": 0, "max_tokens": 12, "logprobs": 2}
    whole = client.completions.create(**options)
    (choice,) = whole.choices
    assert whole.usage.completion_tokens == len(choice.logprobs.tokens) == 12
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    *chunks, last = client.completions.create(stream=True, stream_options={"include_usage": True}, **options)
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert [t for chunk in chunks for t in chunk.choices[0].logprobs.tokens] == choice.logprobs.tokens
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason == "length"
    assert last.usage.total_tokens == whole.usage.total_tokens
    assert chunks[-1].metrics["num_preemptions"] == whole.metrics["num_preemptions"] == 0, "our extra field"


def test_chat(client: "openai.OpenAI"):
    options = {"model": "tiny-llama", "messages": HI, "temperature": 0, "max_completion_tokens": 12}
    options |= {"logprobs": True, "top_logprobs": 3, "n": 2, "stop": ["zzz"], "user": "me", "seed": 1}
    whole = client.chat.completions.create(**options, extra_body={"ignore_eos": True, "min_p": 0.1})
    assert [choice.index for choice in whole.choices] == [0, 1]
    first, second = whole.choices
    assert first.message.content == second.message.content
    assert first.message.role == "assistant"
    assert [len(entry.top_logprobs) for entry in first.logprobs.content] == [3] * 12
    texts = ["", ""]
    for chunk in client.chat.completions.create(**options, extra_body={"ignore_eos": True}, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [first.message.content] * 2


def test_with_its_helper_for_streams(client: "openai.OpenAI"):
    with client.chat.completions.stream(model="tiny-llama", messages=HI, temperature=0, max_tokens=8) as stream:
        for _ in stream:
            pass
        final = stream.current_completion_snapshot
    whole = client.chat.completions.create(model="tiny-llama", messages=HI, temperature=0, max_tokens=8)
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_response_format_and_structured_outputs(client: "openai.OpenAI"):
    """Rule S12 over HTTP: what comes fits, streamed or not, from both endpoints."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 99}},
        "required": ["n"],
    }
    schema |= {"additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "a number", "strict": True, "schema": schema}}
    options = {"model": "tiny-llama", "messages": HI, "max_tokens": 100, "seed": 1, "response_format": wanted}
    (choice,) = client.chat.completions.create(**options).choices
    assert choice.finish_reason == "stop" and json.loads(choice.message.content).keys() == {"n"}
    chunks = client.chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    text = client.completions.create(
        model="tiny-llama", prompt="x", max_tokens=50, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert text.choices[0].text in ("yes", "no")
    schema["properties"]["n"]["minimum"] = 100
    with pytest.raises(openai.BadRequestError, match="Unsatisfiable schema"):
        client.chat.completions.create(**options, stream=True)


def test_errors(client: "openai.OpenAI"):
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'") as caught:
        client.completions.create(model="gpt", prompt="x")
    assert caught.value.code == "model_not_found"
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError, match="tools is not supported") as caught:
        client.chat.completions.create(model="tiny-llama", messages=HI, tools=[tool])
    assert caught.value.param == "tools"
