"""Tokens a second with and without drafts, on work that repeats its prompt and on free text: `nanopd bench speculative`.

One engine in one process serves the same prompts with drafts and without, in turns. Their blocks are in the prefix cache, so
what is measured is decoding.
"""

import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Any

from nanopd.config import SamplingParams
from nanopd.engine.llm import LLM

CODE = """def total_price(items, discount):
    total = 0
    for item in items:
        price = item.price * item.count
        if item.count > 10:
            price = price * (1 - discount)
        total = total + price
    return total
"""
TEXT = (
    "The ship left the harbour before dawn. Nobody on the quay waved, because nobody knew that it would sail. Its captain "
    "had bought bread for twelve days and water for twenty, and a map with the islands of the north drawn in red ink."
)
SUBJECTS = (
    "a lighthouse",
    "a lost letter",
    "the first snow",
    "an old clock",
    "a night train",
    "a quiet river",
    "bees",
    "salt",
)
KINDS = {
    "repeat": [f"Repeat this text word for word, {i + 2} times:\n\n{TEXT}" for i in range(8)],
    "edit": [
        f"Rename `total` to `sum_{i}` in this code and print all of it:\n\n```python\n{CODE}```" for i in range(8)
    ],
    "free": [f"Write a short story about {subject}." for subject in SUBJECTS],
}


def measure(llm: LLM, rounds: int, output_len: int) -> Iterator[dict[str, Any]]:
    """Each kind of work at batch 1 and 8, greedy; free text also at temperature 1. Medians over the rounds."""
    llm.core.warm_up()
    scheduler = llm.core.scheduler
    with_drafts, without = scheduler.config, dataclasses.replace(scheduler.config, speculative_ngram=0)
    for kind, temperature in (("repeat", 0.0), ("edit", 0.0), ("free", 0.0), ("free", 1.0)):
        params = SamplingParams(temperature=temperature, max_tokens=output_len, ignore_eos=True, seed=1)
        for batch in (1, 8):
            chats = [[{"role": "user", "content": text}] for text in KINDS[kind][:batch]]
            llm.chat(chats, params)  # warm up
            rates: dict[bool, list[float]] = {True: [], False: []}
            tokens: dict[bool, list[list[int]]] = {}
            before = llm.stats()
            for _ in range(rounds):
                for drafts in (False, True):
                    scheduler.config = with_drafts if drafts else without
                    start = time.perf_counter()
                    outputs = llm.chat(chats, params)
                    rates[drafts].append(batch * output_len / (time.perf_counter() - start))
                    tokens[drafts] = [output.outputs[0].token_ids for output in outputs]
            after = llm.stats()
            plain, speculative = (statistics.median(rates[drafts]) for drafts in (False, True))
            yield {
                "bench": "speculative",
                "work": kind,
                "temperature": temperature,
                "batch": batch,
                "speculative_ngram": with_drafts.speculative_ngram,
                "plain_tokens_per_s": plain,
                "speculative_tokens_per_s": speculative,
                "speedup": speculative / plain,
                "drafted": (after.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens) // rounds,
                "accepted": (after.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens) // rounds,
                "equal_answers": sum(a == b for a, b in zip(tokens[False], tokens[True])),
            }
