"""Exercise 10: from logits to what a client may see.

Two halves of one way: choose a token, and show its text when it can no longer change. The engine will use both instead of
its own: `nanopd grade 10 exercise.py`. Plain Python suffices; read nanopd/worker/sampler.py and
nanopd/engine/detokenizer.py only after you have tried.
"""

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
    raise NotImplementedError("keep")


def draw(kept: Sequence[tuple[int, float]], u: float) -> int:
    """The token on whose part of the stretch from 0 to 1 the number u falls; 0 <= u < 1. The parts lie in the order of
    `kept`; a border belongs to the part that begins there. Rounding may make them add up to a little less than 1."""
    raise NotImplementedError("draw")


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
        raise NotImplementedError("append")
