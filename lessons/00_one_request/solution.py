"""The solution of exercise 00."""

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
        number = len(self.answers)
        self.answers.append(Answer())
        self.stops.append(tuple(stop))
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=0)
        try:
            self.core.add_request(Request(str(number), prompt, params))
        except UserError as error:
            self.answers[number] = Answer([], "error", str(error))
        return number

    def step(self) -> None:
        """One step of the core; takes in what is new, request by request.

        If the end of an answer's tokens is its stop sequence, then the answer is over: these tokens are cut off, its
        finish reason is "stop", and the core must not spend another step on it.
        """
        for news in self.core.step():
            number = int(news.request_id)
            answer, stop = self.answers[number], self.stops[number]
            answer.token_ids += news.new_token_ids
            answer.finish_reason = news.finish_reason
            if stop and tuple(answer.token_ids[-len(stop) :]) == stop:
                del answer.token_ids[-len(stop) :]
                answer.finish_reason = "stop"
                self.core.abort_requests([news.request_id])

    def cancel(self, number: int) -> None:
        """The client has gone: the answer keeps what it has and finishes with "abort". One that is over stays as it is."""
        if self.answers[number].finish_reason is None:
            self.answers[number].finish_reason = "abort"
            self.core.abort_requests([str(number)])

    def run(self) -> list[Answer]:
        """Steps until every answer is over, and not once more. Returns them in the order of `submit`."""
        while any(answer.finish_reason is None for answer in self.answers):
            self.step()
        return self.answers
