"""Steps of a small real run: chunks of prefill and decodes share each step's token budget."""

from diagrams.drawing import Picture, Point
from diagrams.runs import Run
from nanopd.config import EngineConfig
from nanopd.trace.events import Arrived, Planned

BUDGET, CHUNK = 16, 8


def draw() -> Picture:
    """Rows of requests above, the budget of each step below."""
    p = Picture(
        "Steps of a run: prefill chunks next to decodes",
        "A real run of the scheduler with a budget of 16 tokens a step and chunks of at most 8: how many tokens each "
        "request computes in each step, and how the budget is used.",
        f"Planned events; max_num_batched_tokens {BUDGET}, long_prefill_token_threshold {CHUNK}",
    )
    run = Run(config=EngineConfig(max_num_batched_tokens=BUDGET, long_prefill_token_threshold=CHUNK))
    arrivals = {0: [("a", 6, 9), ("b", 27, 6)], 2: [("c", 20, 5)], 4: [("d", 10, 4)]}
    for step in range(12):
        for name, length, output in arrivals.get(step, []):
            run.add(name, length, output)
        if not run.scheduler.has_unfinished_requests():
            break
        run.step()
    arrived = {name: step for step, new in arrivals.items() for name, _, _ in new}
    plans = [event.scheduled for event in run.events if isinstance(event, Planned)]
    lengths = {e.request_id: len(e.token_ids) for e in run.events if isinstance(e, Arrived)}
    x0, w = 150, 64
    for step, _ in enumerate(plans):
        p.text(x0 + step * w + w / 2, 0, str(step + 1), "middle", "soft")
    p.text(0, 0, "step", kind="soft")
    for row, (name, length) in enumerate(lengths.items()):
        y = 20 + row * 46
        p.text(0, y + 17, f"{name}: {length} tokens")
        if arrived[name]:
            p.text(x0 + arrived[name] * w - 6, y + 17, f"arrives after step {arrived[name]}", "end", "soft")
        for step, plan in enumerate(plans):
            for request_id, first, n in plan:
                if request_id == name:
                    prefill = first < length
                    p.box(
                        x0 + step * w + 2,
                        y,
                        f"{first}-{first + n - 1}" if n > 1 else f"{first}",
                        w - 4,
                        34,
                        name if prefill else f"{name} old",
                    )
    y, unit = 20 + len(lengths) * 46 + 24, 8
    p.text(0, y + 20, "budget used")
    for step, plan in enumerate(plans):
        bottom = y + BUDGET * unit
        p.group(x0 + step * w + 6, y, w - 12, BUDGET * unit)
        for request_id, _, n in plan:
            top = bottom - n * unit
            p.fill(x0 + step * w + 6, top, w - 12, n * unit, request_id)
            if n > 1:
                p.text(x0 + step * w + w / 2, (top + bottom) / 2, f"{n}", "middle")
            bottom = top
    p.text(0, y + 39, f"of {BUDGET} tokens", kind="soft")
    p.legend(
        x0,
        y + BUDGET * unit + 24,
        [("a", "prompt tokens, by position: a prefill or a chunk of one"), ("a old", "one output token: a decode")],
    )
    p.text(
        0,
        y + BUDGET * unit + 54,
        'Nobody said "prefill" or "decode": each request catches up with its tokens (S1), running ones first '
        "(S2), and what is left of\n"
        "the budget goes to those who wait (S4). So c and d start in the step after they arrive, without stopping a and "
        "b, who go on.",
        kind="soft",
    )
    p.line(Point(x0, y + BUDGET * unit), Point(x0 + len(plans) * w, y + BUDGET * unit))
    return p
