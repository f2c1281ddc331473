"""The solution of exercise 16."""

import itertools
import math
from collections.abc import Sequence

from nanopd.trace.events import Arrived, Moved, Planned, Sampled
from nanopd.trace.file import Line


def token_times(lines: Sequence[Line]) -> dict[str, list[float]]:
    """By request: the time of its arrival, and then the time of each of its tokens."""
    times: dict[str, list[float]] = {}
    for line in lines:
        if isinstance(line.event, Arrived):
            times[line.event.request_id] = [line.time]
        if isinstance(line.event, Sampled):
            for request_id, token_ids in line.event.token_ids.items():
                times[request_id] += [line.time] * len(token_ids)
    return times


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that is at least as large as this share of all of them. `share`: above 0, at most 1.

    Of [30, 10, 20, 40]: 20 for 0.5, 30 for 0.51, 40 for 0.99 and for 1.
    """
    return sorted(values)[math.ceil(share * len(values)) - 1]


def recomputed_share(lines: Sequence[Line]) -> float:
    """Of all tokens that were planned, the share that had been planned for the same request before, at the same position.

    0 if nothing was planned.
    """
    reached: dict[str, int] = {}
    planned = again = 0
    for line in lines:
        if isinstance(line.event, Planned):
            for request_id, start, n in line.event.scheduled:
                before = reached.get(request_id, 0)
                planned += n
                again += max(0, min(before, start + n) - start)
                reached[request_id] = max(before, start + n)
    return again / planned if planned else 0.0


def hit_rate(lines: Sequence[Line]) -> float:
    """Of all tokens of prompts, the share that the prefix cache had when their requests were admitted *for the first time*.

    What a preempted request finds of itself when it comes back does not count. Nor do requests that were never admitted.
    """
    lengths: dict[str, int] = {}
    hits: dict[str, int] = {}
    for line in lines:
        if isinstance(line.event, Arrived):
            lengths[line.event.request_id] = len(line.event.token_ids)
        if isinstance(line.event, Moved) and line.event.status == "running":
            hits.setdefault(line.event.request_id, line.event.num_computed)
    queried = sum(lengths[request_id] for request_id in hits)
    return sum(hits.values()) / queried if queried else 0.0


def diagnose(lines: Sequence[Line]) -> str:
    """What is wrong with this service, from what its trace says:

    "preemption"  the pool is too small: work is done twice (more than 5 % of it)
    "cache"       the prompts have a beginning in common, or should have; yet the prefix cache saves less than 5 %
    "queue"       requests wait to be admitted: that is more than half of the TTFT, for the median request
    "prefill"     decodes stand behind long prefills: most gaps are short, and the p99 gap is at least 4 times the median gap
    "well"        none of these

    Several may be true at once, since one trouble brings others along. Name the first of this list.
    """
    if recomputed_share(lines) > 0.05:
        return "preemption"
    if hit_rate(lines) < 0.05:
        return "cache"
    times = token_times(lines)
    admitted: dict[str, float] = {}
    for line in lines:
        if isinstance(line.event, Moved) and line.event.status == "running":
            admitted.setdefault(line.event.request_id, line.time)
    waits = [(admitted[i] - t[0]) / (t[1] - t[0]) for i, t in times.items() if i in admitted and len(t) > 1]
    if percentile(waits, 0.5) > 0.5:
        return "queue"
    gaps = [b - a for t in times.values() for a, b in itertools.pairwise(t[1:])]
    return "prefill" if percentile(gaps, 0.99) >= 4 * percentile(gaps, 0.5) else "well"
