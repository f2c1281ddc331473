"""What one sees of P and D: their queues and block pools, and of each request which state it was in when.

A Watch takes in what a node's /debug/state says, many times a second. A node answers between two steps, so what began and
ended within one step is never seen; `Track.see` says what follows all the same. When an answer has come, D's part of the
picture is replaced by the exact times that D itself has written down.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

WAITING, LOADING, RUNNING, PREEMPTED = "waiting", "waiting for remote KVs", "running", "preempted"  # RequestStatus
RECLAIMING = "reclaiming"  # ended, but its blocks stay: on P for D to fetch, on D while P may still write (rule P4)
GONE = ""
MARKS = {  # how a state is drawn; different also without colours
    WAITING: ("·", "yellow", "WAITING"),
    LOADING: ("░", "magenta", "WAITING_FOR_REMOTE_KVS"),
    RUNNING: ("█", "green", "RUNNING"),
    PREEMPTED: ("!", "red", "PREEMPTED"),
    RECLAIMING: ("▒", "cyan", "RECLAIMING (ended, blocks kept)"),
}


@dataclass
class Track:
    """The states of one request on one node: since when it is in which. Times are seconds since the demo's start."""

    sent: float = 0.0  # by the client
    times: list[float] = field(default_factory=list)
    states: list[str] = field(default_factory=list)

    @property
    def last(self) -> str:
        return self.states[-1] if self.states else GONE

    def see(self, state: str, before: float, now: float) -> list[tuple[float, str]]:
        """The request is in `state` now; `before`, a step or less ago, it was in the last one. Returns what is new."""
        new: list[tuple[float, str]] = []
        if state != self.last:
            began = max(before, self.sent)  # a step begins with the changes it makes, and ends with a request's end
            if self.last in (GONE, WAITING) and state in (RECLAIMING, GONE):
                new = [(began, RUNNING), (now, state)]  # one step has computed all of it
            else:
                new = [(now if state in (RECLAIMING, GONE) else began, state)]
            for time, name in new:
                self.add(time, name)
        return new

    def add(self, time: float, state: str) -> None:
        self.times.append(time)
        self.states.append(state)

    def between(self, start: float, end: float) -> str:
        """The last state in this time that is one."""
        first, after = bisect_right(self.times, start) - 1, bisect_right(self.times, end)
        return next((s for s in reversed(self.states[max(0, first) : after]) if s != GONE), GONE)


class Watch:
    """One node."""

    def __init__(self, name: str, url: str, request_ids: Sequence[str]) -> None:
        self.name, self.url = name, url
        self.tracks = {request_id: Track() for request_id in request_ids}
        self.num_computed: dict[str, int] = {}  # tokens, by request id
        self.num_tokens: dict[str, int] = {}  # when it was first seen: the prompt
        self.state: dict[str, Any] = {}  # as it was told last; empty: the node does not answer
        self._seen_at = 0.0

    def see(self, state: dict[str, Any], now: float) -> list[tuple[float, str, str]]:
        """Takes in a /debug/state. Returns what is new: time, request id, state."""
        self.state, before, self._seen_at = state, self._seen_at, now
        new: list[tuple[float, str, str]] = []
        for request_id, track in self.tracks.items():
            details = state["requests"].get(request_id)
            if details:
                self.num_computed[request_id] = details["num_computed_tokens"]
                self.num_tokens.setdefault(request_id, details["num_tokens"])
            status = details["status"] if details else RECLAIMING if request_id in state["reclaiming"] else GONE
            new += [(time, request_id, name) for time, name in track.see(status, before, now)]
        return new

    def lose(self, now: float) -> list[tuple[float, str, str]]:
        """The node does not answer. Returns what is new, as `see`."""
        self.state, new = {}, []
        for request_id, track in self.tracks.items():
            if track.last != GONE:
                track.add(now, GONE)
                new.append((now, request_id, GONE))
        return new

    @property
    def counts(self) -> list[int]:
        """How many are WAITING, WAITING_FOR_REMOTE_KVS, RUNNING, RECLAIMING."""
        status = [request["status"] for request in self.state["requests"].values()]
        loading, running = status.count(LOADING), status.count(RUNNING)
        return [len(status) - loading - running, loading, running, len(self.state["reclaiming"])]

    @property
    def is_idle(self) -> bool:
        return bool(self.state) and not any(self.counts)


@dataclass
class View:
    """The picture of both nodes, for rich to draw."""

    p: Watch
    d: Watch
    names: dict[str, str]  # of the requests, by request id
    prompt_tokens: dict[str, int] = field(default_factory=dict)  # by request id, once known
    num_output: dict[str, int] = field(default_factory=dict)  # tokens that the client has got
    now: float = 0.0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._nodes(options.max_width)
        yield ""
        yield self._timeline(options.max_width)
        yield Text("  ").join(
            Text(f"{mark} {name}", style) for mark, style, name in MARKS.values() if name != "PREEMPTED"
        )

    def _nodes(self, width: int) -> Table:
        table = Table(box=None, padding=(0, 1), header_style="bold")
        table.add_column("node", vertical="bottom")
        for head in ("WAITING", "WAITING_FOR_\nREMOTE_KVS", "RUNNING", "RECLAIMING", "KV blocks\nin use"):
            table.add_column(head, justify="right")
        columns = max(10, width - 82)
        for watch in (self.p, self.d):
            row: list[Any] = [f"{watch.name} {watch.url.removeprefix('http://')}"]
            if watch.state:
                total = watch.state["num_blocks"]
                used = total - watch.state["free_blocks"]
                style = (MARKS[s][1] for s in (WAITING, LOADING, RUNNING, RECLAIMING))
                row += [Text(str(n), s if n else "dim") for n, s in zip(watch.counts, style)]
                row += [f"{used}/{total}", _bar(used / total, columns)]
            table.add_row(*row)
        return table

    def _timeline(self, width: int) -> Table:
        columns = max(20, width - 32)
        step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60) if self.now <= s * columns or s == 60)
        table = Table(box=None, padding=(0, 1), header_style="bold")
        table.add_column("request", width=9, no_wrap=True)
        table.add_column("tokens", width=11, justify="right", no_wrap=True)
        table.add_column("", width=1)
        table.add_column(_axis(columns, step), width=columns, no_wrap=True)
        for id, name in self.names.items():
            length = self.prompt_tokens.get(id) or self.d.num_tokens.get(id) or self.p.num_tokens.get(id)
            on_p = self.p.tracks[id]
            computed = length if on_p.states and on_p.last in (RECLAIMING, GONE) else self.p.num_computed.get(id, 0)
            tokens = f"{computed}/{length}" if length else ""
            table.add_row(Text(name), tokens, "P", _segments(on_p, columns, step))
            table.add_row("", f"+{self.num_output.get(id, 0)}", "D", _segments(self.d.tracks[id], columns, step))
        return table


def _bar(share: float, columns: int) -> Text:
    full = round(share * columns)
    return Text("█" * full, "green").append("─" * (columns - full), "dim")


def _axis(columns: int, step: float) -> Text:
    """Seconds, at every tenth column."""
    return Text("".join(f"{f'|{i * step:.4g} s':<10}" for i in range(0, columns, 10))[:columns], "dim")


def _segments(track: Track, columns: int, step: float) -> Text:
    text = Text()
    for i in range(columns):
        mark, style, _ = MARKS.get(track.between(i * step, (i + 1) * step), (" ", "", ""))
        text.append(mark, style)
    return text
