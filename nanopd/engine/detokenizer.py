"""From tokens to text while they come: nothing is shown that a later token could still change.

Two things can make the end of the text provisional: a character whose bytes are spread over several tokens, and the
beginning of what may become a stop string. Both are held back until they are settled. Lesson 10.
"""

from collections.abc import Sequence

from nanopd.config import SamplingParams
from nanopd.models.tokenizer import Tokenizer

_CONTEXT = 6  # prompt tokens decoded with the first output tokens: some tokenizers drop a leading space without them


class Detokenizer:
    """Text of one completion.

    `text` is what may be shown. `append` returns the stop string that was found, if any; the text then ends before it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._params = params
        self._ids = list(prompt_token_ids[-_CONTEXT:])
        self._num_output = 0
        # ids[read:] have given no text yet. ids[prefix:read] have; they are decoded again together with what follows,
        # because the text of a token can depend on its neighbours.
        self._prefix, self._read = 0, len(self._ids)
        self._full = ""  # `text` and what is held back

    def append(self, token_ids: Sequence[int], finished: bool = False) -> str | None:
        """Takes in the next tokens; with `finished`, everything held back is shown."""
        searched = len(self._full)
        for token_id in token_ids:
            self._ids.append(token_id)
            self._num_output += 1
            # A character is at most 4 bytes: whatever is still incomplete after more tokens than that never will be one.
            self._take_text(settled=len(self._ids) - self._read > 4)
        if finished:
            self._take_text(settled=True)
        stop = self._find_stop(searched) if self._num_output >= self._params.min_tokens else None
        held = 0 if finished or stop else self._num_held_back()
        self.text = self._full[: len(self._full) - held]
        return stop

    def _take_text(self, settled: bool) -> None:
        """Text of ids[read:], if there is any, and if it is `settled` or ends with a whole character."""
        shown = self._decode(self._ids[self._prefix : self._read])
        longer = self._decode(self._ids[self._prefix :])
        if longer == shown:  # a token without text, such as a special one: nothing is pending
            self._read = len(self._ids)
        elif len(longer) > len(shown) and (settled or not longer.endswith("�")):
            self._full += longer[len(shown) :]
            self._prefix, self._read = self._read, len(self._ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, self._params.skip_special_tokens)

    def _find_stop(self, searched: int) -> str | None:
        """The stop string that appears first, if one does in the text beyond `searched`; cuts the text before it."""
        found = [(self._full.find(s, max(0, searched - len(s) + 1)), s) for s in self._params.stop]
        at, stop = min((f for f in found if f[0] >= 0), default=(0, None))
        if stop is not None:
            self._full = self._full[:at]
        return stop

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        ends = (n for stop in self._params.stop for n in range(1, len(stop)) if self._full.endswith(stop[:n]))
        return max(ends, default=0)
