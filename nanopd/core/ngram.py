"""Drafts by prompt lookup: what followed the last time the request's own text went like this?

    ... the cat sat on the mat. Then the cat sat on      its last 4 tokens stood here before, so the draft is
        --- --- --- -- === ===       --- --- --- --      "the mat": a guess that cost no model

It works where an answer repeats what is there: a text that is edited, a quotation, code. A wrong guess costs some computing
and nothing else, because the model has the last word (worker/sampler.py). The idea is from Saxena's prompt lookup decoding
(2023); vLLM calls it `ngram`. Lesson 10.
"""

from array import array

import numpy as np

CHANCE = 2  # so many tokens are often the same by chance: no reason to guess what comes next


def propose(token_ids: "array[int]", most: int) -> list[int]:
    """At most `most` tokens that may come next; empty if there is nothing to go by. Time: O(tokens), `most` times at worst.

    The place counts that is like the end of the text for longest, of several the latest. The draft is as long as that,
    less `CHANCE`: where a text is copied each right draft makes the next one longer, and after a wrong one it begins anew.
    If the copy reaches the end of the text, the text repeats itself, and the copy does too.
    """
    if most < 1 or len(token_ids) < 2:
        return []
    known, n = np.frombuffer(token_ids, dtype=np.int64), 1  # no copy
    starts = (known[:-1] == known[-1]).nonzero()[0] + 1  # the n tokens before each of these are the last n
    while n < most + CHANCE and len(longer := starts[(starts > n) & (known[starts - n - 1] == known[-n - 1])]):
        starts, n = longer, n + 1
    if (length := n - CHANCE) < 1:
        return []
    draft = token_ids[starts[-1] : starts[-1] + length]
    return (draft * length)[:length].tolist()
