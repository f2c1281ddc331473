"""Traces as one HTML page (viewer.html with the data in it), and as JSON for Perfetto (https://ui.perfetto.dev).

Both take several traces: those of a prefill and a decode engine are put on one clock and shown together.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from nanopd.models.tokenizer import load_tokenizer
from nanopd.request import RequestStatus
from nanopd.trace.events import Arrived, Moved, Planned, Sampled, Stepped, Transfer
from nanopd.trace.file import Header, Line, align, read
from nanopd.trace.replay import replay


def html(files: Sequence[Path]) -> str:
    """A page that needs nothing else: no network, no other file."""
    traces = [read(file) for file in files]
    engines = [
        {"header": header, "lines": lines, "texts": _texts(header, lines), "offset": offset}
        for (header, lines), offset in zip(traces, align(traces))
    ]
    data = msgspec.json.encode(engines).decode().replace("<", "\\u003c")  # so that no text can end the script element
    return (Path(__file__).parent / "viewer.html").read_text().replace("/*TRACES*/", data)


def _texts(header: Header, lines: Sequence[Line]) -> dict[int, str]:
    """The tokens of the trace as text, if the model it was made with is still there."""
    prompts = (line.event.token_ids for line in lines if isinstance(line.event, Arrived))
    drafts = (line.event.drafts.values() for line in lines if isinstance(line.event, Planned))
    sampled = (line.event.token_ids.values() for line in lines if isinstance(line.event, Sampled))
    token_ids = set(itertools.chain(*prompts, *itertools.chain(*sampled, *drafts)))
    try:
        tokenizer = load_tokenizer(Path(header.model))
        return {t: tokenizer.decode([t], False) for t in token_ids}
    except Exception:  # whatever has become of that directory: the page shows ids then
        return {}


def perfetto(files: Sequence[Path]) -> bytes:
    """Chrome's trace format: a process for each engine, in it a track for its steps and one for each request, and arrows
    from where blocks are sent to where they have come."""
    traces = [read(file) for file in files]
    tracks = (_tracks(pid, *trace, 1e6 * offset) for pid, (trace, offset) in enumerate(zip(traces, align(traces)), 1))
    return msgspec.json.encode({"traceEvents": list(itertools.chain(*tracks))})


def _tracks(pid: int, header: Header, lines: Sequence[Line], offset: float) -> list[dict[str, Any]]:
    out, tracks, since = list[dict[str, Any]](), dict[str, int](), dict[str, tuple[str, float]]()

    def add(kind: str, name: str, at: float, track: str, **more: Any) -> None:
        if track not in tracks:
            tracks[track] = len(tracks)
            add("M", "thread_name", 0, track, args={"name": track})
        out.append({"ph": kind, "name": name, "pid": pid, "tid": tracks[track], "ts": at, "cat": "nanopd"} | more)

    def become(track: str, state: str | None, at: float) -> None:
        """Ends the slice of what was on this track, and begins the next."""
        if track in since:
            name, start = since.pop(track)
            add("X", name, start, track, dur=at - start)
        if state:
            since[track] = state, at

    add("M", "process_name", 0, "steps", args={"name": header.role or "engine"})
    for step, happened, state in replay(header, lines):
        for event, at in ((line.event, line.time * 1e6 + offset) for line in happened):
            track = f"request {getattr(event, 'request_id', '')}"
            match event:
                case Arrived() if track not in since:  # further input of a session changes nothing yet
                    become(track, "waiting", at)
                case Moved(_, status):
                    become(track, None if RequestStatus(status).is_finished else status, at)
                case Planned(scheduled):
                    become("steps", f"step {step}: {sum(n for *_, n in scheduled)} tokens", at)
                case Stepped():
                    become("steps", None, at)
                    add("C", "free blocks", at, "steps", args={"free": state.kv.pool.num_free_blocks})
                case Transfer(_, transfer_id, "send", status):
                    become(track, f"blocks: {status}" if status in ("held", "sending") else None, at)
                    if status == "sending":
                        add("s", "KV blocks", at, track, id=transfer_id)
                case Transfer(_, transfer_id, "recv", "done"):
                    add("f", "KV blocks", at, track, id=transfer_id, bp="e")
    for track in list(since):
        become(track, None, lines[-1].time * 1e6 + offset)
    return out
