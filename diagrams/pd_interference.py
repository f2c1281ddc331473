"""Why P/D: what a long prompt does to four requests that decode, on one engine, in chunks, and with a P beside D."""

from collections.abc import Sequence

from diagrams.drawing import Picture, Point
from nanopd.config import EngineConfig, SamplingParams
from nanopd.connector.base import KVConnectorScheduler
from nanopd.core.kv_cache import KVCacheManager
from nanopd.core.output import KVConnectorOutput, ModelRunnerOutput, SchedulerOutput
from nanopd.core.scheduler import Scheduler
from nanopd.request import Request

PROMPT, CHUNK, BEFORE = 1000, 100, 2
X0, H = 150, 36
# The width of a step: what any step costs (the weights are read once), and something for each token.
STEP, TOKEN = 29.0, 0.33
ON_THE_WAY = 50.0


class Elsewhere(KVConnectorScheduler):
    """The long prompt can be had from P."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return (PROMPT, True) if request.num_prompt_tokens == PROMPT else (0, False)

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> None:
        pass


def width(num_tokens: int) -> float:
    """Of a step, in pixels."""
    return STEP + TOKEN * max(0, num_tokens - 5)


def steps(count: int, chunk: int = 0, comes_in: int | None = None) -> list[int]:
    """The tokens of each step of a real scheduler, on which a long prompt arrives after BEFORE steps.

    `comes_in`: it is computed elsewhere, and is here at the end of this step.
    """
    config = EngineConfig(long_prefill_token_threshold=chunk)
    connector = None if comes_in is None else Elsewhere()
    scheduler = Scheduler(config, KVCacheManager(400, 4), 1500, connector)
    requests: dict[str, Request] = {}

    def add(name: str, tokens: Sequence[int]) -> None:
        requests[name] = Request(name, tokens, SamplingParams(max_tokens=100, seed=0))
        scheduler.add_request(requests[name])

    for i, name in enumerate("abcd"):
        add(name, range(2000 + 10 * i, 2008 + 10 * i))
    sizes = []
    for step in range(-1, count):  # the first: the four compute their prompts
        if step == BEFORE:
            add("long", range(PROMPT))
        plan = scheduler.schedule()
        caught_up = [i for i in plan.num_scheduled_tokens if requests[i].num_computed_tokens == requests[i].num_tokens]
        news = KVConnectorOutput(finished_recving={"long"}) if step == comes_in else None
        scheduler.update_from_output(plan, ModelRunnerOutput({i: [7] for i in caught_up}, {}, news))
        sizes.append(plan.total_num_scheduled_tokens)
    return sizes[1:]


def draw() -> Picture:
    """Time goes to the right; a mark under a step's end: a token has come out."""
    p = Picture(
        "A long prompt among four decodes",
        "One engine: the four wait for a step of 1,004 tokens. In chunks: ten steps of 104. With P computing the prompt, "
        "D goes on with steps of 4, and 5 when the blocks have come.",
        "Planned sizes of real schedulers",
    )
    arrival = X0 + BEFORE * STEP
    chunked = steps(BEFORE + PROMPT // CHUNK + 4, CHUNK)
    end = X0 + sum(map(width, chunked))
    there = arrival + width(PROMPT) + ON_THE_WAY
    comes_in = BEFORE + int((there - arrival) // STEP)

    def lane(y: float, label: str, about: str, sizes: list[int]) -> None:
        p.text(0, y + 9, label, bold=True)
        p.text(0, y + 28, about, kind="soft")
        x = float(X0)
        for n, later in zip(sizes, [*sizes[1:], 0]):
            after = x + width(n)
            if after > end + 1:
                break
            prefill, both = n > 5, n >= 5
            split = x + 9 if prefill else after - 8 if both else after - 1
            p.fill(x + 1, y, split - x - 1, H, "b")
            if both:
                p.fill(split, y, after - 1 - split, H, "a")
            left, right = (split, after) if prefill else (x, split)
            p.text((left + right) / 2, y + H / 2, f"{n:,}", "middle")
            p.fill(after - 6, y + H + 5, 5, 11, "b")
            if n == 5 or (prefill and later == 5):  # its prompt is there, so it has sampled
                p.fill(after - 12, y + H + 5, 5, 11, "a")
            x = after

    lane(52, "one engine", "all at once", steps(40))
    lane(142, "one engine", f"chunks of {CHUNK}", chunked)
    p.text(0, 241, "P", bold=True)
    p.text(0, 260, "computes", kind="soft")
    p.fill(arrival + 1, 232, width(PROMPT) - 2, H, "a")
    p.text(arrival + width(PROMPT) / 2, 250, f"{PROMPT:,}", "middle")
    lane(306, "D", "generates", steps(40, comes_in=comes_in))
    p.arrow(
        Point(arrival + width(PROMPT) + 2, 250),
        Point(there, 304),
        "the prompt's KV blocks",
        "-|",
        on=0,
        at=1.0,
        shift=70,
    )
    p.text(arrival, 8, "a prompt of 1,000 tokens arrives", kind="soft")
    p.line(Point(arrival, 20), Point(arrival, 46), kind="soft")
    p.legend(
        0,
        386,
        [
            ("a", "the long prompt, and what follows it"),
            ("b", "the four, a token each in every step; a mark below: it is out"),
        ],
    )
    p.text(
        0,
        414,
        "A number is what a step computes. A step ends for all at once, so nobody gets a token inside a wide one. The "
        "widths are a sketch:\n"
        "what any step costs, and a share for each token. Chunks make the gaps shorter, and the long prompt's first "
        "token (blue mark)\n"
        "comes later. D's four see no gap; the price is that the blocks have to travel.",
        kind="soft",
    )
    return p
