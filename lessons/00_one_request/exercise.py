"""Exercise 00: drive the engine core.

EngineCore takes token ids and gives token ids, a step at a time. Write what stands in front of it: a driver that takes
prompts, calls `step` until all have their answers, and ends a request itself where the core cannot know that it is over.
`nanopd grade 00 exercise.py`.

Read EngineCore in nanopd/engine/core.py first (add_request, step, abort_requests), and EngineCoreOutput in
nanopd/core/output.py: that is what `step` returns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from nanopd.config import SamplingParams, UserError
from nanopd.engine.core import EngineCore
from nanopd.request import Request


@dataclass
class Answer:
    """What has come of one prompt so far. `finish_reason`: None while it runs; "error" if the core refused it, and then
    `problem` says why."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    problem: str | None = None


class Driver:
    """Answers prompts with an engine core: greedily, and never stopping at end-of-sequence."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.answers: list[Answer] = []  # in the order of `submit`
        self.stops: list[tuple[int, ...]] = []  # of each: the tokens that end it; () if none do

    def submit(self, prompt: Sequence[int], max_tokens: int, stop: Sequence[int] = ()) -> int:
        """Hands a prompt to the core. Runs nothing. Returns its number: 0, 1, 2 …

        The request's id is that number as a string. Greedy: temperature 0, ignore_eos, seed 0. A prompt that the core
        refuses (UserError) gets its number all the same; its answer has finished with "error".
        """
        raise NotImplementedError("submit")

    def step(self) -> None:
        """One step of the core; takes in what is new, request by request.

        If the end of an answer's tokens is its stop sequence, then the answer is over: these tokens are cut off, its
        finish reason is "stop", and the core must not spend another step on it.
        """
        raise NotImplementedError("step")

    def cancel(self, number: int) -> None:
        """The client has gone: the answer keeps what it has and finishes with "abort". One that is over stays as it is."""
        raise NotImplementedError("cancel")

    def run(self) -> list[Answer]:
        """Steps until every answer is over, and not once more. Returns them in the order of `submit`."""
        raise NotImplementedError("run")
