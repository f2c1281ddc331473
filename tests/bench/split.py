"""Where the time of a step goes: `nanopd bench offline --profile` and `nanopd bench step`.

The engine has no clocks in it. `watch` puts them around its methods and modules from outside, for as long as it is asked
to, and a part's time is what its calls took less what the parts called inside them took, so all parts add up to the whole.
The clocks themselves cost a microsecond a call, some 250 calls a step of the default model. CPU only: on a GPU they would
see launches, not work.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from nanopd.config import SamplingParams, UserError
from nanopd.engine.llm import LLM

PARTS = {
    "linear": "the matrix products of the layers",
    "attention": "storing K and V, and attention over their blocks",
    "norms": "RMSNorm",
    "elementwise": "RoPE, SwiGLU, residuals, and whatever else the model does",
    "logits": "embedding and logits",
    "sampling": "logits to tokens",
    "inputs": "the model runner's tables, positions, slots",
    "scheduler": "schedule and update_from_output",
    "frontend": "detokenizing, outputs",
}


class Split:
    """Seconds by part, of everything that ran through `timed` functions."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._inside = 0.0  # of the call that is running: seconds in the timed calls that it made

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, and its time goes to `part`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            outside, self._inside = self._inside, 0.0
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                self.seconds[part] += took - self._inside
                self._inside = outside + took

        return call

    def take(self) -> dict[str, float]:
        """Seconds by part since the last `take`."""
        taken, self.seconds = self.seconds, dict.fromkeys(PARTS, 0.0)
        return taken


@contextmanager
def watch(llm: LLM) -> Iterator[Split]:
    """Puts clocks into an engine. Raises UserError if it runs on a GPU."""
    if llm.core.device != "cpu":
        raise UserError("Where the time of a step goes is measured on a CPU only (--attention-backend cpu).")
    split, core = Split(), llm.core
    backend = type(core.runner.backend)
    points: list[tuple[str, Any, str]] = [
        ("frontend", llm, "step"),
        ("scheduler", core.scheduler, "schedule"),
        ("scheduler", core.scheduler, "update_from_output"),
        ("inputs", core.runner, "execute_model"),
        ("elementwise", core.model, "forward"),
        ("logits", core.model, "compute_logits"),
        ("attention", backend, "__call__"),
        ("sampling", core.runner, "_sample"),
    ]
    for name, module in core.model.named_modules():
        if name.endswith("_proj"):
            points.append(("linear", module, "forward"))
        elif name.endswith("norm"):
            points.append(("norms", module, "forward"))
        elif name == "embed_tokens":
            points.append(("logits", module, "forward"))
    with ExitStack() as patches:
        for part, owner, name in points:
            patches.enter_context(patch.object(owner, name, split.timed(part, getattr(owner, name))))
        yield split


def numbers(text: str, option: str) -> list[int]:
    """What `text` says, "1,8,32". Raises UserError that names the option."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"{option} is {text!r}; it must be numbers like 1,8,32.")
    return [int(part) for part in parts]


def decode_steps(
    llm: LLM, batches: list[int], contexts: list[int], num_steps: int, warm_up: int = 2
) -> Iterator[dict[str, Any]]:
    """For each size of batch and each context: the median milliseconds of a decode step, and of each part of it.

    Whose blocks the cache cannot hold, or who would be longer than the model allows, gets a row that says so. The prompts
    are not computed, only scheduled: what K and V hold does not change how long a step takes.
    """
    core = llm.core
    core.warm_up()
    core.runner.kv_cache.memory.fill_(0.5)  # or all of it would be one page of zeros, which fits into any cache
    num_slots = len(core.scheduler.kv.pool.blocks) * llm.config.block_size
    rng, vocab_size = random.Random(llm.config.seed), core.model.config.vocab_size
    for context in contexts:
        for batch in batches:
            row: dict[str, Any] = {"bench": "step", "dtype": str(core.dtype).removeprefix("torch.")}
            row |= {"batch": batch, "context": context, "threads": torch.get_num_threads()}
            longest = context + num_steps + warm_up + 2
            if batch * (longest + llm.config.block_size) > num_slots or longest > core.max_model_len:
                yield row | {"skipped": f"the KV cache holds {num_slots} tokens, a request {core.max_model_len}"}
                continue
            params = SamplingParams(temperature=0, max_tokens=longest, ignore_eos=True)
            with patch.object(core.runner, "_model_forward", _no_forward(core.model.config.hidden_size, core.dtype)):
                ids = [
                    llm.add_request([rng.randrange(vocab_size) for _ in range(context)], params).request_id
                    for _ in range(batch)
                ]
                while core.scheduler.waiting or any(r.num_output_tokens == 0 for r in core.scheduler.running):
                    llm.step()
            for _ in range(warm_up):
                llm.step()
            steps = []
            with watch(llm) as split:
                for _ in range(num_steps):
                    llm.step()
                    steps.append(split.take())
            llm.abort_requests(ids)
            row["step_ms"] = 1000 * statistics.median(sum(step.values()) for step in steps)
            yield row | {f"{part}_ms": 1000 * statistics.median(step[part] for step in steps) for part in PARTS}


def headings() -> str:
    """What stands above the `line`s of a table."""
    return f"{'batch':>6} {'context':>8} {'step ms':>9} " + " ".join(f"{part:>11}" for part in PARTS)


def line(row: dict[str, Any]) -> str:
    """One row of `decode_steps` for people: milliseconds, of the step and of its parts."""
    start = f"{row['batch']:>6} {row['context']:>8} "
    if "skipped" in row:
        return start + f"skipped: {row['skipped']}"
    return start + f"{row['step_ms']:>9.1f} " + " ".join(f"{row[f'{part}_ms']:>11.2f}" for part in PARTS)


def _no_forward(hidden_size: int, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    return lambda input_ids, positions, execution: torch.zeros(len(input_ids), hidden_size, dtype=dtype)
