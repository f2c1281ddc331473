"""Exercise 16: a diagnosis from a trace.

You get the lines of a trace, in order: `line.time` in seconds, `line.step`, and `line.event`. Of the events you need four
(read their docstrings in nanopd/trace/events.py): Arrived, Moved, Planned, Sampled. All engines here are single nodes.
"""

from collections.abc import Sequence

from nanopd.trace.events import Arrived, Moved, Planned, Sampled
from nanopd.trace.file import Line


def token_times(lines: Sequence[Line]) -> dict[str, list[float]]:
    """By request: the time of its arrival, and then the time of each of its tokens."""
    raise NotImplementedError("token_times")


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that is at least as large as this share of all of them. `share`: above 0, at most 1.

    Of [30, 10, 20, 40]: 20 for 0.5, 30 for 0.51, 40 for 0.99 and for 1.
    """
    raise NotImplementedError("percentile")


def recomputed_share(lines: Sequence[Line]) -> float:
    """Of all tokens that were planned, the share that had been planned for the same request before, at the same position.

    0 if nothing was planned.
    """
    raise NotImplementedError("recomputed_share")


def hit_rate(lines: Sequence[Line]) -> float:
    """Of all tokens of prompts, the share that the prefix cache had when their requests were admitted *for the first time*.

    What a preempted request finds of itself when it comes back does not count. Nor do requests that were never admitted.
    """
    raise NotImplementedError("hit_rate")


def diagnose(lines: Sequence[Line]) -> str:
    """What is wrong with this service, from what its trace says:

    "preemption"  the pool is too small: work is done twice (more than 5 % of it)
    "cache"       the prompts have a beginning in common, or should have; yet the prefix cache saves less than 5 %
    "queue"       requests wait to be admitted: that is more than half of the TTFT, for the median request
    "prefill"     decodes stand behind long prefills: most gaps are short, and the p99 gap is at least 4 times the median gap
    "well"        none of these

    Several may be true at once, since one trouble brings others along. Name the first of this list.
    """
    raise NotImplementedError("diagnose")
