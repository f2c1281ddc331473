"""Tables and pictures for the terminal: what the lessons' scripts print. Each function only reads what it is given."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nanopd.core.kv_cache import KVCacheManager
from nanopd.core.output import SchedulerOutput
from nanopd.core.scheduler import Scheduler

console = Console(highlight=False)
COLOURS = ("blue", "green", "yellow", "magenta", "cyan", "red")


def say(text: str) -> None:
    """A line of prose between the tables."""
    console.print(text, markup=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table. Numbers stand right, text left; None is an empty cell."""
    rows = [list(row) for row in rows]
    grid = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for i, name in enumerate(columns):
        numbers = all(isinstance(row[i], (int, float)) or row[i] is None for row in rows) and bool(rows)
        grid.add_column(name, justify="right" if numbers else "left")
    for row in rows:
        grid.add_row(*(_cell(value) for value in row))
    console.print(grid)
    console.print()


def _cell(value: Any) -> Text:
    if value is None:
        return Text("")
    if isinstance(value, bool):
        return Text("yes" if value else "no")
    if isinstance(value, float):
        return Text(f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}")
    return Text(f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else str(value))


def blocks(kv: KVCacheManager, title: str = "blocks") -> None:
    """The block pool: who holds which block, how often; which are cached; the free queue; the hash table."""
    pool = kv.pool
    colour = {request_id: COLOURS[i % len(COLOURS)] for i, request_id in enumerate(kv.tables)}
    console.print(Text(title, "bold"))
    for request_id, held in kv.tables.items():
        line = Text(f"  {request_id:<12} ", colour[request_id])
        for block in held:
            shared = f"×{block.ref_cnt}" if block.ref_cnt > 1 else ""
            line.append(f"B{block.block_id}{shared}", "underline" if block.block_hash else "").append(" ")
        console.print(line)
    order = " → ".join(f"B{block.block_id}" for block in pool.free_queue.in_order()) or "empty"
    console.print(Text(f"  {'free queue':<12} {order}"))
    pairs = (f"{h.hex()[:6]}→B{block.block_id}" for h, block in pool.cached_block_hash_to_block.items())
    console.print(Text(f"  {'hash table':<12} {'  '.join(pairs) or 'empty'}"))
    console.print()


def queues(scheduler: Scheduler, title: str = "queues") -> None:
    """Who stands in which queue, in which status, and how far it is: computed of all tokens."""
    rows = []
    queues = {name: getattr(scheduler, name) for name in ("skipped_waiting", "waiting", "running")}
    for name, queue in (queues | {"idle": scheduler.sessions.idle.values()}).items():
        rows += [
            (name, r.request_id, r.status.name, r.num_computed_tokens, r.num_tokens, r.metrics.num_preemptions)
            for r in queue
        ]
    table(title, ("queue", "request", "status", "computed", "tokens", "preemptions"), rows)


def plan(output: SchedulerOutput, title: str = "plan of the step") -> None:
    """What a step will compute: for each request the first token, how many, and the blocks that it is told of."""
    told = {new.request_id: ("whole", new.num_computed_tokens, new.block_ids) for new in output.scheduled_new_reqs}
    for known in output.scheduled_cached_reqs:
        told[known.request_id] = ("delta", known.num_computed_tokens, known.new_block_ids)
    rows = []
    for request_id, num_new in output.num_scheduled_tokens.items():
        data, start, block_ids = told[request_id]
        rows.append((request_id, data, start, num_new, " ".join(f"B{i}" for i in block_ids) or "none"))
    table(title, ("request", "data", "first token", "tokens", "blocks told"), rows)
    for name, ids in (("preempted", output.preempted_req_ids), ("ended", output.finished_req_ids)):
        if ids:
            say(f"  {name}: {', '.join(sorted(ids))}")
