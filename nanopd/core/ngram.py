"""Drafts by prompt lookup: what followed the last time the request's own text went like this?

    ... the cat sat on the mat. Then the cat sat      its last 3 tokens stood here before, so the draft is
            --- --- === === ===          --- ---      "on the mat": a guess that cost no model

It works where an answer repeats what is there: a text that is edited, a quotation, code. A wrong guess costs some computing
and nothing else, because the model has the last word (worker/sampler.py). The idea is from Saxena's prompt lookup decoding
(2023); vLLM calls it `ngram`. Lesson 10.
"""

from array import array

import numpy as np

LONGEST, SHORTEST = 3, 2  # how many tokens must have stood there before: tried in this order


def propose(token_ids: "array[int]", most: int) -> list[int]:
    """At most `most` tokens that may come next; empty if there is nothing to go by. Time: O(tokens).

    What is near is more alike, so the latest place counts. If the copy reaches the end of the text, the text repeats
    itself, and the copy does too.
    """
    if most < 1:
        return []
    known = np.frombuffer(token_ids, dtype=np.int64)  # no copy
    for n in range(min(LONGEST, len(known) - 1), SHORTEST - 1, -1):
        # Where are n tokens like the last n? One comparison for each of the n, all places at once.
        alike = np.logical_and.reduce([known[i : len(known) - n + i] == known[i - n] for i in range(n)])
        if alike.any():
            start = int(alike.nonzero()[0][-1]) + n
            draft = token_ids[start : start + most]
            return (draft * most)[:most].tolist()
    return []
