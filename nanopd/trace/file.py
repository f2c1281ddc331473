"""The trace file: JSON lines, first a header, then one event a line with its time and step.

    {"format": "nanopd trace", "version": 2, "model": …, "config": {…}, "clock": [wall clock, monotonic], …}
    {"time": 81.25, "step": 7, "event": {"type": "Moved", "request_id": "3", "status": "preempted", …}}

It holds token ids, so whoever can read it can read the prompts. The events of a step are written at its end, in one go;
so a process that dies leaves a file that is good up to a step, or to a last line cut short, which the reader skips.
"""

import atexit
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from nanopd.config import EngineConfig, UserError
from nanopd.trace.events import AnyEvent, Event, Quiet, Stepped, Transfer

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Header(msgspec.Struct):
    """What does not change while an engine runs."""

    model: str  # its directory
    role: str | None
    config: EngineConfig
    num_blocks: int
    max_model_len: int
    dtype: str
    kv_layout: str
    strides: dict[str, int]  # bytes from one layer, kv, block, slot or head of the KV memory to the next
    clock: tuple[float, float]  # time.time() and time.monotonic() of one moment
    format: Literal["nanopd trace"] = "nanopd trace"
    version: Literal[2] = 2


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """One event in the file. `time`: seconds of time.monotonic()."""

    time: float
    step: int
    event: AnyEvent


class FileTracer:
    """A tracer that writes. Any thread may call it; the engine's own ends the steps."""

    def __init__(self, path: str, header: Header) -> None:
        self.step = 0
        self._file = open(path, "wb", buffering=0)
        self._pending: deque[tuple[float, Event]] = deque()
        self._last: list[Event] = []
        self._file.write(msgspec.json.encode(header) + b"\n")
        atexit.register(self.flush)

    def __call__(self, event: Event) -> None:
        self._pending.append((time.monotonic(), event))
        if type(event) is Stepped:
            self.flush(ended=True)

    def flush(self, ended: bool = False) -> None:
        """Writes what has come. A step in which nothing happens that did not happen in the one before is left out, and
        not counted: an engine that waits for a transfer takes thousands of them."""
        lines = [self._pending.popleft() for _ in range(len(self._pending))]
        happened: list[Any] = [event for _, event in lines]
        if happened != self._last or not all(isinstance(event, Quiet) for event in happened):
            encode, step = msgspec.json.encode, self.step
            self._file.write(b"".join(encode(Line(at, step, event)) + b"\n" for (at, _), event in zip(lines, happened)))
            self.step += ended
        self._last = happened


class TraceReader:
    """Reads a trace, also one that still grows. Raises UserError for what is no trace, or of another version."""

    def __init__(self, path: Path) -> None:
        self.path, self._file, self._count, self.rest = path, path.open("rb"), 0, b""
        self.header = self._decode(self._file.readline(), Header)

    def _decode(self, raw: bytes, kind: type[T]) -> T:
        self._count += 1
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.DecodeError as error:
            raise UserError(f"{self.path}, line {self._count}: not in a nanopd trace of version 2 ({error}).") from None

    def more(self) -> Iterator[Line]:
        """The lines that have come since the last call. A last one without its end stays for the next, as `rest`."""
        while (raw := self._file.readline()).endswith(b"\n"):
            yield self._decode(raw, Line)
        self.rest = raw
        self._file.seek(-len(raw), 1)


def read(path: Path) -> tuple[Header, list[Line]]:
    """A whole trace. A last line cut short is skipped with a warning."""
    reader = TraceReader(path)
    lines = list(reader.more())
    if reader.rest:
        logger.warning(f"The last line of {path} is cut short and skipped: its engine has died, or is still writing.")
    return reader.header, lines


def align(traces: Sequence[tuple[Header, list[Line]]]) -> list[float]:
    """What to add to the times of each trace so that all mean the wall clock of the first one's machine.

    Where two machines' clocks differ the transfers tell: D asks before P sends, and P is done before D knows it.
    """
    offsets, times = [], list[dict[tuple[str, str, str], float]]()
    for header, lines in traces:
        offsets.append(header.clock[0] - header.clock[1])
        seen = ((x.event, x.time + offsets[-1]) for x in lines if isinstance(x.event, Transfer))
        times.append({(event.side, event.state, event.transfer_id): at for event, at in seen})
        low, high = [0.0], [float("inf")]
        for a, b in ((("recv", "asked"), ("send", "sending")), (("send", "done"), ("recv", "done"))):
            low += [at - times[-1][*b, i] for (*k, i), at in times[0].items() if (*k,) == a and (*b, i) in times[-1]]
            high += [at - times[-1][*a, i] for (*k, i), at in times[0].items() if (*k,) == b and (*a, i) in times[-1]]
        offsets[-1] += min(max(low), *high) if len(offsets) > 1 else 0
    return offsets
