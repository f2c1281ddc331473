"""Faults on purpose: named points in the engine where something can be made to go wrong. Lesson 14; rule P8.

    point    a method of the engine, and whether the fault comes before it, after it or in the middle of it (POINTS)
    fault    what goes wrong there: see KINDS
    armed    a JSON file lists the faults that wait for their point; it is read again whenever it changes

The engine knows nothing of this. `install` wraps the methods from outside, and only in processes that were started with
NANOPD_FAULTS in their environment (faults_site/sitecustomize.py); without it nothing here could cost time. Each fault that
fires is written to a log beside the file, before it acts: so a drill knows that what it saw was its own doing.
Only the standard library is imported here, for this runs at the start of each process.
"""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

FILE, NODE = "NANOPD_FAULTS", "NANOPD_FAULT_NODE"  # environment: the file, and which node the process belongs to
KINDS = {
    "drop": "the call does not happen",
    "delay": "it waits",
    "duplicate": "it happens twice",
    "error": "it raises",
    "kill": "kill -9 of some processes, this one or others",
    "freeze": "SIGSTOP to some processes; whoever armed the fault wakes them up again",
    "abort": "the engine ends all its requests, and tells nobody that waits for them",
    "mark": "nothing but a short wait, for whoever armed the fault to do something meanwhile",
}


def _is(kind: str) -> Callable[..., bool]:
    """Calls whose last argument is a message of this kind."""
    return lambda *args: type(args[-1]).__name__ == kind


def _computes(core: Any) -> bool:
    return bool(core.scheduler.running)


def _only_generates(core: Any) -> bool:
    s = core.scheduler
    return bool(s.running) and not (s.loading or s.waiting or s.skipped_waiting)


def _has_come(scheduler: Any, request: Any) -> bool:
    return request.request_id in scheduler.finished_recving_kv_req_ids


@dataclass(frozen=True)
class Point:
    """A place in the engine."""

    node: str  # P, D or router
    where: str  # module:Class.method
    when: str  # before, middle, after
    what: str
    only: Callable[..., bool] = lambda *_: True  # of all calls, by their arguments
    error: str = "RuntimeError"  # what it raises; module:Class, or a built-in


_WRITE, _TROUBLE = "nanopd.connector.transport:MooncakeTransport.write", "nanopd.connector.transport:TransferError"
_D_SENDS, _P_SENDS = "nanopd.connector.consumer:Consumer._send", "nanopd.connector.producer:Producer._reply"
_STEP = "nanopd.engine.core:EngineCore.step"
POINTS = {
    "router": Point("router", "nanopd.serve.router:Router.attempt", "before", "the router is about to ask P and D"),
    "p-asked": Point(
        "P", "nanopd.engine.process:EngineClient.add_request", "before", "P's server has a request for its engine core"
    ),
    "before-pull": Point("D", _D_SENDS, "before", "D is about to ask P for blocks", _is("Pull")),
    "after-pull": Point("D", _D_SENDS, "after", "D has asked P for blocks", _is("Pull")),
    "cancel": Point("D", _D_SENDS, "before", "D is about to tell P that it wants nothing (any more)", _is("Cancel")),
    "prefill": Point("P", _STEP, "before", "P computes prompts", _computes),
    "before-write": Point("P", _WRITE, "before", "P is about to write into D's memory", error=_TROUBLE),
    "middle-of-write": Point("P", _WRITE, "middle", "P has written a half of the blocks", error=_TROUBLE),
    "after-write": Point("P", _WRITE, "after", "P has written all of the blocks", error=_TROUBLE),
    "done": Point("P", _P_SENDS, "before", "P is about to tell D that all is written", _is("Done")),
    "failed": Point("P", _P_SENDS, "before", "P is about to tell D that it writes nothing any more", _is("Failed")),
    "done-arrives": Point(
        "D", "nanopd.connector.consumer:Consumer._on_message", "before", "D has heard that all is there", _is("Done")
    ),
    "promotion": Point(
        "D", "nanopd.core.scheduler:Scheduler._try_promote", "before", "D puts a loaded request to work", _has_come
    ),
    "decode": Point("D", _STEP, "before", "D generates for all", _only_generates),
}


# ---------------------------------------------------------------- what happens at a point


class Seam:
    """The faults that are armed in this process.

    Args:
        file: where they are listed; None: whoever made this sets `faults`.
        node: those of other nodes are none of our business; None: all are.

    A fault is a dict: `id`, `node`, `point`, `kind`; `skip` calls go by, then `times` of them are hit (1); `seconds` for
    those that wait; `pids` for those that kill and freeze.
    """

    def __init__(self, file: Path | None = None, node: str | None = None) -> None:
        self.file, self.node = file, node
        self.faults: list[dict[str, Any]] = []
        self.fired: list[tuple[str, str]] = []  # point, kind
        self._calls: dict[str, int] = {}  # of a fault's point since it was armed, by its id
        self._changed = 0
        self._lock = threading.Lock()  # P writes with ten threads

    def run(self, points: Iterable[str], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The call, with what is armed for these points."""
        do = functools.partial(call, *args, **kwargs)
        for name in points:
            if fault := self._take(name, args):
                do = functools.partial(self._with, POINTS[name], fault, do, call, args)
        return do()

    def _take(self, name: str, args: Sequence[Any]) -> dict[str, Any] | None:
        with self._lock:
            self._read()
            for fault in self.faults:
                if fault["point"] == name and POINTS[name].only(*args):
                    count = self._calls[fault["id"]] = self._calls.get(fault["id"], 0) + 1
                    if 0 < count - fault.get("skip", 0) <= fault.get("times", 1):
                        self._tell(fault)
                        return fault
        return None

    def _read(self) -> None:
        if self.file is None or (changed := self.file.stat().st_mtime_ns) == self._changed:
            return
        self._changed, self._calls = changed, {}
        self.faults = [fault for fault in json.loads(self.file.read_text()) if fault["node"] == self.node]

    def _tell(self, fault: dict[str, Any]) -> None:
        self.fired.append((fault["point"], fault["kind"]))
        if self.file is not None:
            row = {"time": time.monotonic(), "pid": os.getpid()} | fault
            with self.file.with_suffix(".log").open("a") as log:
                log.write(json.dumps(row) + "\n")

    def _with(
        self, point: Point, fault: dict[str, Any], do: Callable[[], Any], call: Callable[..., Any], args: Sequence[Any]
    ) -> Any:
        kind = fault["kind"]
        if kind == "drop":
            return None
        if kind == "duplicate":
            do()
            return do()
        if point.when == "before":
            self._act(point, fault, args)
            return do()
        if point.when == "after":
            result = do()
            self._act(point, fault, args)
            return result
        transport, session, pieces, cancelled = args  # the only thing that has a middle is a write
        first, second = _halves(list(pieces))
        call(transport, session, first, cancelled)
        self._act(point, fault, args)
        return call(transport, session, second, cancelled)

    @staticmethod
    def _act(point: Point, fault: dict[str, Any], args: Sequence[Any]) -> None:
        kind = fault["kind"]
        if kind in ("delay", "mark"):
            time.sleep(fault["seconds"])
        elif kind == "error":
            raise _find(point.error)(f"a fault on purpose: when {point.what}")
        elif kind == "abort":
            args[0].abort_requests(list(args[0].scheduler.requests))
        else:
            for pid in sorted(fault["pids"], key=lambda pid: pid == os.getpid()):  # ourselves last
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


def _halves(pieces: list[Any]) -> tuple[list[Any], list[Any]]:
    """Of what is to be written; a single piece is cut."""
    if len(pieces) > 1:
        return pieces[: len(pieces) // 2], pieces[len(pieces) // 2 :]
    (piece,), half = pieces, pieces[0].num_bytes // 2
    rest = type(piece)(piece.source + half, piece.target + half, piece.num_bytes - half)
    return [piece._replace(num_bytes=half)], [rest]


def _find(name: str) -> Any:
    """module:Class, or a built-in exception."""
    module, _, attribute = name.rpartition(":")
    return getattr(sys.modules[module or "builtins"], attribute)


# ---------------------------------------------------------------- how the points come into the engine


def _methods() -> dict[str, dict[str, list[str]]]:
    """module -> Class.method -> its points."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, point in POINTS.items():
        module, method = point.where.split(":")
        found.setdefault(module, {}).setdefault(method, []).append(name)
    return found


def wrap(module: ModuleType, seam: Seam) -> Callable[[], None]:
    """Wraps the methods of this module that have points; the result undoes it. AttributeError: there is no such method."""
    undo: list[tuple[type, str, Any]] = []
    for method, names in _methods()[module.__name__].items():
        owner, attribute = getattr(module, method.split(".")[0]), method.split(".")[1]
        original = owner.__dict__.get(attribute)
        if original is None:
            raise AttributeError(f"{module.__name__} has no {method}, where a fault has its place")
        undo.append((owner, attribute, original))
        setattr(owner, attribute, _wrapped(original, seam, names))

    def unwrap() -> None:
        for owner, attribute, original in undo:
            setattr(owner, attribute, original)

    return unwrap


def _wrapped(original: Callable[..., Any], seam: Seam, names: list[str]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return seam.run(names, original, *args, **kwargs)

    return wrapper


class _Hook(importlib.abc.MetaPathFinder):
    """Wraps modules as they are imported: a process gets only those that it needs anyway."""

    def __init__(self, seam: Seam) -> None:
        self.seam, self.modules = seam, _methods()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in self.modules else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            wrap(module, self.seam)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """In this process, as its environment says."""
    if file := os.environ.get(FILE):
        sys.meta_path.insert(0, _Hook(Seam(Path(file), os.environ.get(NODE))))
