"""Structured output: what makes an answer fit a JSON schema, a regular expression or a choice (rule S12).

A grammar is compiled in a thread, while other requests run; until it is ready its request stands in
WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR. Then a matcher walks along with the output: before a token is sampled it says, one
bit for each token of the vocabulary, what the grammar allows. The sampler gives everything else a logit of -inf.

Compiling and matching are the work of the library `llguidance`. Its limits bound both: a grammar that is too large ends its
own request with an error. Lesson 06.
"""

import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from nanopd.config import StructuredOutputsParams
from nanopd.models.tokenizer import load_tokenizer
from nanopd.request import Request

_LIMITS = LLParserLimits(max_lexer_states=50_000, max_grammar_size=50_000, verbose_errors=False)
# JSON as Python's json.dumps writes it: were any white space allowed, a small model might write nothing else.
_STYLE: Any = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
# Text that is certain would be cut into tokens by the tokenizer, which takes "<|im_end|>" in it for the special token.
_HEADER = '%llguidance {"no_forcing": true}\n'


def _reason(error: str) -> str:
    """The library's words in one line, for whoever wrote the schema: without the grammar that we have made of it."""
    error, _, _ = error.removeprefix("at 2(8): ").replace("<non-verbose/>", "").partition("\n   1 | ")
    return f"structured_outputs: {' '.join(error.replace('NoExtensionBias', 'no text can match it').split())}"


class StructuredOutputManager:
    """The grammars of all unfinished requests that have one.

    Args:
        model_path: where the tokenizer is.
        vocab_size: how many logits there are; the tokenizer may know fewer tokens.
        eos_token_ids: which tokens end a text; without any, the tokenizer's.
    """

    def __init__(self, model_path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._model_path, self._vocab_size, self._eos_token_ids = model_path, vocab_size, eos_token_ids
        self._executor = ThreadPoolExecutor(1, "grammar")
        self._futures: dict[str, Future[LLMatcher]] = {}  # of those that get_finished has not named yet
        self._matchers: dict[str, LLMatcher] = {}
        self._num_seen: dict[str, int] = {}  # how many tokens of its output a matcher has seen
        self._errors: dict[str, str | None] = {}  # of matchers that have failed since the last get_finished

    def start(self, request: Request) -> None:
        """Begins to compile a request's grammar."""
        params = request.sampling_params.structured_outputs
        assert params
        self._futures[request.request_id] = self._executor.submit(self._compile, params)

    def get_finished(self) -> dict[str, str | None]:
        """Whose grammar has become ready since the last call (None), or can't be used, or failed while matching: why."""
        finished, self._errors = self._errors, {}
        for request_id in [i for i, future in self._futures.items() if future.done()]:
            future = self._futures.pop(request_id)
            if error := future.exception():
                finished[request_id] = _reason(str(error))
            else:
                finished[request_id] = None
                self._matchers[request_id], self._num_seen[request_id] = future.result(), 0
        return finished

    def bitmask(self, request: Request) -> dict[str, list[bytes]]:
        """By request id: which tokens may come next, and then after each draft. Empty without a grammar, or when its matcher
        fails.

        First the matcher sees what the output has got since it was last asked. So nothing has to be undone after a
        preemption, or after a step that was taken back.
        """
        matcher = self._matchers.get(request.request_id)
        if matcher is None:
            return {}
        new = request.token_ids[request.num_prompt_tokens + self._num_seen[request.request_id] :]
        matcher.consume_tokens(new.tolist())
        self._num_seen[request.request_id] = request.num_output_tokens
        bitmasks = [matcher.compute_bitmask()]
        if matcher.is_error():
            self._errors[request.request_id] = _reason(matcher.get_error())
            return {}
        ahead = matcher.deep_copy() if request.spec_token_ids else matcher
        for token_id in request.spec_token_ids:
            ahead.consume_token(token_id)
            bitmask = ahead.compute_bitmask()
            if ahead.is_error():
                break  # mostly a draft that the grammar forbids: the sampler won't choose it, and what follows won't count
            bitmasks.append(bitmask)
        return {request.request_id: bitmasks}

    def forget(self, request_id: str) -> None:
        """The request has ended. What the thread has begun for it goes on, for nobody."""
        if future := self._futures.pop(request_id, None):
            future.cancel()
        self._matchers.pop(request_id, None)
        self._num_seen.pop(request_id, None)
        self._errors.pop(request_id, None)

    def close(self) -> None:
        """Ends the thread, as soon as it can."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    # ---------------------------------------------------------------- in the thread

    def _compile(self, params: StructuredOutputsParams) -> LLMatcher:
        """Raises ValueError with the library's reason."""
        if params.regex is not None:
            grammar = json.loads(LLMatcher.grammar_from_regex(params.regex))["grammars"][0]["lark_grammar"]
        elif params.choice is not None:
            grammar = grammar_from("choice", json.dumps(params.choice))
        else:
            schema = params.json or {"type": "object"}
            schema = json.loads(schema) if isinstance(schema, str) else schema
            grammar = f"start: %json {json.dumps(schema | _STYLE)}"
        grammar = _HEADER + grammar
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Made when the first grammar comes: that takes about a second."""
        tokenizer = load_tokenizer(self._model_path)
        eos_token_ids = list(self._eos_token_ids or tokenizer.eos_token_ids)
        return LLTokenizer(tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=eos_token_ids)
