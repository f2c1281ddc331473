"""The solution of exercise 10."""

import math
from collections.abc import Sequence

from nanopd.config import SamplingParams
from nanopd.models.tokenizer import Tokenizer


def keep(logits: Sequence[float], params: SamplingParams) -> list[tuple[int, float]]:
    """The tokens that may be drawn, with their probabilities; the most probable first, equal ones by token id.

    The probabilities of all tokens are softmax(logits / temperature); the temperature is not 0. Then, in this order:
    min_p drops tokens with less than this share of the best one's probability; top_k keeps the first k (0 or -1: all);
    what is left is scaled up to add up to 1; top_p keeps the smallest number of first tokens that add up to at least
    that much. At least one token is left. The probabilities that are returned add up to 1.

    Logits can be large (1000), and -inf: such a token has probability 0 and is never returned.
    """
    best = max(logits)
    weights = [math.exp((logit - best) / params.temperature) for logit in logits]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    kept = [token for token in order if weights[token] > 0 and weights[token] >= params.min_p]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    total, before, count = sum(weights[token] for token in kept), 0.0, 0
    while count < len(kept) and (count == 0 or before / total < params.top_p):
        before += weights[kept[count]]
        count += 1
    return [(token, weights[token] / before) for token in kept[:count]]


def draw(kept: Sequence[tuple[int, float]], u: float) -> int:
    """The token on whose part of the stretch from 0 to 1 the number u falls; 0 <= u < 1. The parts lie in the order of
    `kept`; a border belongs to the part that begins there. Rounding may make them add up to a little less than 1."""
    end = 0.0
    for token, probability in kept:
        end += probability
        if u < end:
            return token
    return kept[-1][0]


class Detokenizer:
    """The text of one completion while it grows. `text` is what may be shown: it only ever gets longer.

    The tokenizer is a byte-level one: the text of tokens is their bytes, put together. `tokenizer.decode(ids)` puts
    U+FFFD ("\\ufffd") where bytes are not UTF-8, or not yet.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._stop = params.stop  # strings; empty: there are none
        self._pending: list[int] = []  # tokens that have given no text yet
        self._full = ""  # the text of all others: `text`, and what may be the beginning of a stop string

    def append(self, token_ids: Sequence[int], finished: bool = False) -> str | None:
        """Takes in the next tokens. Returns the stop string that has come, or None.

        A token whose text would end in U+FFFD is pending, and so are those after it, until together they do not. But
        when more than 4 are pending they have their text as it is: no character is that long.

        If a stop string is in the text, the text ends before it; of several, before the one that begins first. Else `text`
        leaves out the longest end with which a stop string begins. With `finished` nothing is pending or left out.
        A call decodes only what is pending.
        """
        for token_id in token_ids:
            self._pending.append(token_id)
            self._take_text(len(self._pending) > 4)
        self._take_text(finished)
        found = [(at, stop) for stop in self._stop if (at := self._full.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            self.text = self._full[:at]
            return stop
        ends = [n for stop in self._stop for n in range(1, len(stop)) if self._full.endswith(stop[:n])]
        held = 0 if finished else max(ends, default=0)
        self.text = self._full[: len(self._full) - held]
        return None

    def _take_text(self, whatever: bool) -> None:
        """The pending tokens have their text now, if it is whole, or whatever it is."""
        text = self._tokenizer.decode(self._pending) if self._pending else ""
        if whatever or not text.endswith("\ufffd"):
            self._full += text
            self._pending.clear()
