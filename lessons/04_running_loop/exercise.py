"""Exercise 04: the running loop.

Write the two functions. The real scheduler will use them: `nanopd grade 04 exercise.py`.

Rules: S1, S2, S7; see lessons/rules.md. What happens when there are no blocks (S3) is the next lesson's; here you are
given a function that takes care of it.
"""

from collections.abc import Callable

from nanopd.core.output import CachedRequestData, SchedulerOutput
from nanopd.request import Request


def num_new_tokens(request: Request, num_computed: int, budget: int, threshold: int, max_model_len: int) -> int:
    """How many tokens of a request are computed in this step: the least of four limits (S2), and never less than 0.

    Args:
        request: it wants to catch up with `request.num_tokens_with_spec`.
        num_computed: how many of its tokens are computed. (For a request that is admitted in this step the scheduler
            knows this before the request does.)
        budget: tokens that the step may still get.
        threshold: longest chunk, `long_prefill_token_threshold`; 0 means that there is no such limit.
        max_model_len: most tokens of prompt and output. The last of them is never computed.
    """
    raise NotImplementedError("num_new_tokens")


def schedule_running(
    running: list[Request],
    budget: int,
    threshold: int,
    max_model_len: int,
    allocate: Callable[[Request, int], list[int] | None],
    output: SchedulerOutput,
) -> None:
    """Plans one step's tokens for the running requests, in their order, as long as there is budget (S2).

    A request that gets no token is left out, and the loop goes on with the next one. For each of the others:

    - `allocate(request, number of new tokens)` makes its block table long enough. It returns the ids of the blocks that
      are new to the table. To get them it may preempt requests: they are gone from the end of `running` when it
      returns. None: the request itself is gone too, and the loop ends.
    - The worker is told what is new (S7): `output.scheduled_cached_reqs` gets a CachedRequestData with the number of
      tokens computed *before* this step.
    - `output.num_scheduled_tokens` (request id -> tokens) and `output.total_num_scheduled_tokens` are kept.

    `request.num_computed_tokens` is not changed here: the scheduler does that when the whole plan is made (S8).
    """
    raise NotImplementedError("schedule_running")
