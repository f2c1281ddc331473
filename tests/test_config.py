"""Values out of range are refused once, with what is allowed."""

from typing import Any

import pytest

from nanopd.config import EngineConfig, SamplingParams, UserError, parse_bytes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; it must be a number from 0.0 to 10000.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": "1"}, "temperature is '1'"),
        ({"temperature": True}, "temperature is True"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.01}, "from 1e-06 to 1.0"),
        ({"top_k": -2}, "a whole number from -1 to"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"min_p": 2}, "from 0.0 to 1.0"),
        ({"seed": 2**63}, "seed is"),
        ({"top_k": 10**400}, "from -1 to 2147483647"),
        ({"max_tokens": 10**12}, "from 1 to 2147483647"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be a whole number from 1 to"),
        ({"max_tokens": None}, "max_tokens is None"),
        ({"min_tokens": 17}, "at most max_tokens, 16"),
        ({"stop": [""]}, "stop is"),
        ({"stop": 5}, "list of strings"),
        ({"stop": [5]}, "list of strings"),
        ({"stop_token_ids": ["a"]}, "list of token ids"),
        ({"stop_token_ids": {"a": 1}}, "list of token ids"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"presence_penalty": 3}, "from -2.0 to 2.0"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty is inf"),
        ({"logprobs": 101}, "from 0 to 100"),
        ({"n": 0}, "from 1 to 128"),
        ({"ignore_eos": "yes"}, "true or false"),
    ],
)
def test_sampling_params(options: dict[str, Any], says: str):
    with pytest.raises(UserError) as error:
        SamplingParams(**options)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"block_size": 0}, "from 1 to 1024"),
        ({"num_blocks": 0}, "from 1 to"),
        ({"max_model_len": 1}, "from 2 to"),
        ({"max_num_batched_tokens": 0}, "from 1 to 1048576"),
        ({"long_prefill_token_threshold": -1}, "from 0 to"),
        ({"kv_layout": "x"}, "one of kv_first, blocks_first, cross_layer"),
        ({"dtype": "int8"}, "one of auto, float32"),
        ({"attention_backend": "flash"}, "one of auto, cpu, triton"),
        ({"kv_load_failure_policy": "x"}, "recompute, fail"),
        ({"kv_cache_memory": "lots"}, "not an amount of memory"),
        ({"enable_prefix_caching": 1}, "true or false"),
    ],
)
def test_engine_config(options: dict[str, Any], says: str):
    with pytest.raises(UserError) as error:
        EngineConfig(**options)
    assert says in str(error.value)


def test_one_stop_string_is_as_good_as_a_list():
    assert SamplingParams(stop="x").stop == ("x",)
    assert SamplingParams(stop=["x", "y"], stop_token_ids=[3]).stop == ("x", "y")
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=0).stop_token_ids == (0,)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "size"), [("512MiB", 512 << 20), ("4GB", 4 << 30), ("1.5g", 3 << 29), ("1000", 1000), (" 2 k", 2048)]
)
def test_amounts_of_memory(text: str, size: int):
    assert parse_bytes(text) == size
