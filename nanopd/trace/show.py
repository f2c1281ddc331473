"""A trace in the terminal, step by step. Where the output is no terminal: all its events, a line each.

→ or space  on        g  first        p  next preemption
←           back      G  last         q  quit
"""

import os
import select
import sys
import termios
import tty
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import msgspec
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nanopd.trace.events import Allocated, Event, Moved, Planned, Refused, Sampled, Skipped
from nanopd.trace.file import Header, Line, TraceReader
from nanopd.trace.replay import State, replay

_QUEUES = "waiting", "skipped_waiting", "running", "idle", "finished"
_KEYS = {b"\x1b[C": "n", b" ": "n", b"\x1b[D": "b", b"\x1b[H": "g", b"\x1b[F": "G"}
_COLOURS = "blue", "green", "yellow", "magenta", "cyan", "red", "bright_blue", "bright_green", "bright_magenta"


def tell(event: Event) -> str:
    """One event in one line: `Moved request_id='3' status='preempted' rule='S3 case A' by='1'`."""
    fields = msgspec.to_builtins(event)
    return " ".join([fields.pop("type"), *(f"{name}={value!r}" for name, value in fields.items())])


def why(header: Header, events: Sequence[Event], state: State) -> tuple[dict[str, str], str]:
    """What each request got in a step, or the rule that kept it from getting any; and the rule for all the others."""
    got, others = dict[str, str](), "S2 budget"
    for event in events:
        match event:
            case Planned(scheduled):
                got |= {i: f"+{n}" for i, _, n in scheduled}
            case Sampled(token_ids):
                got |= {i: f"{what} S2 cut" for i, what in got.items() if what[0] == "+" and i not in token_ids}
                got |= {i: f"{got[i]} gave {len(ids)}" for i, ids in token_ids.items() if len(ids) > 1 and i in got}
            case Skipped(request_ids):
                got |= dict.fromkeys(request_ids, "S6 not ready yet")
            case Refused(i):
                others = f"S4 no blocks for {i}"
            case Allocated(i) if others == f"S4 no blocks for {i}":  # a session has given some
                others = "S2 budget"
            case Moved(i, status, rule=rule) if rule:
                got[i], others = rule, "S4 preemption" if status == "preempted" else others
    return got, "S4 max_num_seqs" if len(state.running) >= header.config.max_num_seqs else others


def frame(header: Header, step: int, lines: Sequence[Line], state: State, last: int) -> Group:
    """What happened in a step, and what the engine held after it."""
    pool, events, budget = state.kv.pool, [line.event for line in lines], header.config.max_num_batched_tokens
    (got, others), colour = why(header, events, state), dict(zip(state.requests, cycle(_COLOURS)))
    used = sum(n for event in events if isinstance(event, Planned) for *_, n in event.scheduled)
    queues, columns = Table(expand=True), []
    for ids, name in ((getattr(state, name), name) for name in _QUEUES if name != "idle" or state.idle):
        queues.add_column(f"{name} {len(ids)}")
        columns.append(column := Text())
        for i in ids[:-13:-1] if name == "finished" else ids[:12]:
            r, reason = state.requests[i], got.get(i, "" if name in ("idle", "finished") else others)
            stands = f" {r.num_computed_tokens}/{r.num_tokens} {r.status.value}{' +input' * bool(r.streaming_queue)}"
            column.append(repr(i)[1:-1], colour[i]).append(stands, "dim").append(f" {reason}\n")
    queues.add_row(*columns)
    holders = {
        b.block_id: colour[i.removesuffix(" (reclaiming)")] for i, table in state.kv.tables.items() for b in table
    }
    grid = Text("blocks     ")
    for b in pool.blocks[:400]:
        style = f"black on {holders[b.block_id]}" if b.ref_cnt else "dim"
        count = f"×{b.ref_cnt}" if b.ref_cnt > 1 else "  "
        grid.append(f"{b.block_id:3}{count}", style + " underline" * bool(b.block_hash))
    free = " → ".join(str(block.block_id) for block in pool.free_queue.in_order()[:60])
    table = "  ".join(f"{h.hex()[:6]}→{b.block_id}" for h, b in [*pool.cached_block_hash_to_block.items()][:60])
    title = f"step {step} of {last}    budget: {used} of {budget} tokens    ← → step, g G ends, p preemption, q quit"
    told = Text("\n".join(tell(event) for event in events)[:4000])
    bar = ProgressBar(total=budget, completed=used)
    return Group(Text(title, "bold"), bar, Text(), queues, grid, f"\nfree queue {free}\n\nhash table {table}\n", told)


def show(path: Path, follow: bool) -> None:
    """Plays a trace. With `follow` it shows the newest step of a trace that still grows, until a key is pressed."""
    reader, lines, at, key = TraceReader(path), list[Line](), 0, "G" if follow else ""
    while not sys.stdout.isatty():
        for line in reader.more():
            print(f"{line.step:6} {tell(line.event)}", flush=True)
        if not follow:
            return
        select.select([], [], [], 0.2)
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        with Live(screen=True, auto_refresh=False) as live:
            while key != "q":
                lines += reader.more()
                last = lines[-1].step if lines else 0
                preempted = (x.step for x in lines if isinstance(x.event, Moved) and x.event.status == "preempted")
                goal = {"n": at + 1, "b": at - 1, "g": 0, "G": last, "p": next((k for k in preempted if k > at), at)}
                at = min(max(goal.get(key, at), 0), last)
                for step, happened, state in replay(reader.header, lines):
                    if step == at:
                        live.update(frame(reader.header, step, happened, state, last), refresh=True)
                        break
                if select.select([sys.stdin], [], [], 0.2 if follow else None)[0]:
                    raw = os.read(sys.stdin.fileno(), 8)
                    key = _KEYS.get(raw, raw.decode(errors="replace"))
                else:
                    key = "G" if key == "G" else ""
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
