"""Exercise 05: preemption.

Write the two functions. The real scheduler will use them: `nanopd grade 05 exercise.py`.

Rules: S2, S3, S7, K6; see lessons/rules.md.
"""

from nanopd.core.output import CachedRequestData, SchedulerOutput
from nanopd.core.scheduler import Scheduler
from nanopd.request import Request, RequestStatus


def preempt(scheduler: Scheduler, request: Request) -> None:
    """The books of a preemption. The request is out of `scheduler.running` already; it

    - has nothing computed any more, and its status is `RequestStatus.PREEMPTED`;
    - holds no block any more (`scheduler.kv` knows how to free a request's blocks in the right order);
    - counts the preemption in `request.metrics.num_preemptions`;
    - waits, and whoever waits already stands behind it (`scheduler.waiting` is a deque of requests).
    """
    raise NotImplementedError("preempt")


def schedule_running(scheduler: Scheduler, output: SchedulerOutput) -> None:
    """Plans one step's tokens for `scheduler.running`, in order, as long as there is budget (S2), and preempts (S3).

    Given: `scheduler.config.max_num_batched_tokens` is the budget, and
    `scheduler._num_new_tokens(request, request.num_computed_tokens, budget left)` the number of tokens; 0 is skipped.
    `scheduler.kv.allocate_slots(request, request.num_computed_tokens, new tokens)` returns a list of the new blocks
    (objects with a `block_id`), or None if there are too few: then nothing has changed.

    As long as it returns None, a victim leaves `scheduler.running`: the last. Call
    `scheduler._preempt(victim, rule, request.request_id)`, which leads to your `preempt`; the rule is "S3 case A" if the
    victim is a later request, and "S3 case B" if it is the request itself. The victim's id goes into
    `output.preempted_req_ids`. After case A the request tries again; after case B the loop ends.

    For each request that gets tokens, as in exercise 04: a CachedRequestData (id, ids of new blocks, tokens computed before
    this step) in `output.scheduled_cached_reqs`, `output.num_scheduled_tokens` and `output.total_num_scheduled_tokens`.
    Do not advance `request.num_computed_tokens`: the scheduler does, when the whole plan is made (S8).
    """
    raise NotImplementedError("schedule_running")
