# %% [markdown]
# # 14 Failure drills
# Two real engines in this process, the real connector, and a transport that copies within memory. D waits for half a
# second at most, so that the drills are short.

# %%
import importlib
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

from nanopd.config import EngineConfig
from nanopd.connector.protocol import RECV_TRANSITIONS, SEND_TRANSITIONS, RecvState, SendState
from nanopd.core.kv_cache import KVCacheManager
from nanopd.trace.events import Transfer
from nanopd_lessons import drills, drive, faults, show

stack = ExitStack()
Transport = stack.enter_context(drive.in_memory())
model = drive.tiny_model(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tiny")
seen: list[Transfer] = []  # every step of every transfer

# %% [markdown]
# The seam wraps the methods that have points. With no fault armed the calls go through.

# %%
seam = faults.Seam()
for name in sorted({point.where.split(":")[0] for point in faults.POINTS.values()}):
    stack.callback(faults.wrap(importlib.import_module(name), seam))
show.table(
    "points", ("point", "on", "when"), [(name, p.node, f"{p.when}: {p.what}") for name, p in faults.POINTS.items()]
)
assert seam.faults == [] and seam.fired == []


def arm(point: str, kind: str, **options) -> None:
    """From now on, and counted from zero."""
    seam.fired.clear()
    seam._calls.clear()
    seam.faults = [{"id": f"{point}.{kind}", "node": None, "point": point, "kind": kind, **options}]


@contextmanager
def pair(load_timeout: float = 0.5):
    """P and D. At the end both must be empty."""
    seam.faults = []
    timeouts = {"kv_load_timeout": load_timeout, "kv_hold_timeout": 5.0}
    p, d = (drive.Node(model, role, timeouts, num_blocks=90) for role in ("prefill", "decode"))
    for part in (p.core.connector.producer, d.core.connector.consumer):
        part._trace = lambda event: seen.append(event) if isinstance(event, Transfer) else None
    try:
        yield p, d
        drive.run_nodes(p, d)
        for node in (p, d):
            assert node.scheduler.kv.pool.num_free_blocks == 90 and not node.scheduler.reclaiming, "all blocks are free"
            node.scheduler.check_invariants()
    finally:
        p.core.close()
        d.core.close()


PROMPT = [(7 * i) % 290 for i in range(50)]
single = drive.Node(model, None)
single.add("x", PROMPT)
drive.run_nodes(single)
RIGHT = single.tokens["x"]


def states(request_id: str, side: str) -> str:
    """The life of a transfer, from the trace."""
    return " → ".join(event.state for event in seen if event.request_id == request_id and event.side == side)


# %% [markdown]
# ## Without a fault

# %%
with pair() as (p, d):
    p.prefill("plain", PROMPT)
    d.decode("plain", PROMPT, p)
    drive.run_nodes(p, d)
    assert d.tokens["plain"] == RIGHT and d.core.connector.stats().received == 1
show.say(f"  on D: {states('plain', 'recv')}")
assert states("plain", "recv") == "asked → done"

# %% [markdown]
# ## A message is lost
# All is written, and P's Done never arrives. D gives up after its timeout, says Cancel, and computes the prompt itself.

# %%
with pair() as (p, d):
    arm("done", "drop")
    p.prefill("done lost", PROMPT)
    d.decode("done lost", PROMPT, p)
    drive.run_nodes(p, d)
    assert seam.fired == [("done", "drop")], "a drill whose fault did not fire proves nothing"
    assert d.tokens["done lost"] == RIGHT, "the client notices nothing but the time"
    assert d.core.connector.stats().received == 0 and d.core.connector.stats().receive_failures == 1
show.say(f"  on D: {states('done lost', 'recv')}")
assert states("done lost", "recv") == "asked → reclaiming → failed"

# %% [markdown]
# Now D's Cancel is lost too: the client leaves while D waits for blocks. D says it again when another timeout has
# passed.

# %%
with pair() as (p, d):
    arm("cancel", "drop")
    d.decode("cancel lost", PROMPT, p)
    d.step()
    d.core.abort_requests(["cancel lost"])
    assert "cancel lost" in d.scheduler.reclaiming and "cancel lost" not in d.scheduler.requests
    drive.run_nodes(p, d)
    assert seam.fired == [("cancel", "drop")] and d.scheduler.reclaiming == set()
show.say(f"  on D: {states('cancel lost', 'recv')}")
assert states("cancel lost", "recv") == "asked → reclaiming → failed"

# %% [markdown]
# ## The late write
# P's write is held up until D has given up, as in a network card that has its orders already and does not ask again.
# Meanwhile another request on D wants almost all blocks. What does the late write hit?


# %%
def late_write(name: str) -> tuple[bool, int]:
    """Was the next owner's memory changed? And how many of the first request's blocks did it get?"""
    asked, go = threading.Event(), threading.Event()
    write = Transport.write

    def held_up(self, session, pieces, cancelled) -> None:
        asked.set()
        go.wait(30)
        write(self, session, pieces, lambda: False)

    with pair() as (p, d), patch.object(Transport, "write", held_up):
        p.prefill(name, PROMPT)
        d.decode(name, PROMPT, p)
        drive.run_nodes(p, d, until=asked.is_set)
        aimed_at = set(d.scheduler.kv.get_block_ids(name))
        assert len(aimed_at) == 13
        drive.run_nodes(p, d, until=lambda: bool(d.tokens[name]))  # given up, and computed on D, in other blocks
        d.core.abort_requests([name])  # and its client has left
        d.add("next", [(11 * i) % 290 for i in range(280)], max_tokens=30)
        drive.run_nodes(p, d, until=lambda: len(d.tokens["next"]) > 2)
        full = d.scheduler.kv.get_block_ids("next")[:70]  # its prompt: these it writes no more
        hit = [i for i in full if i in aimed_at]
        memory = d.core.runner.kv_cache.memory
        before = memory[full].clone()
        go.set()
        stats = p.core.connector.stats
        drive.run_nodes(p, until=lambda: stats().sent + stats().send_failures == 1)
        changed = not memory[full].equal(before)
        d.core.abort_requests(["next"])
        return changed, len(hit)


changed, hit = late_write("late")
assert (changed, hit) == (False, 0), "the next owner got none of these blocks"

# %% [markdown]
# The same with quarantine switched off: what was given up is free at once.

# %%
with patch.object(KVCacheManager, "quarantine", KVCacheManager.free):
    changed, hit = late_write("late, no quarantine")
show.say(f"  the next request got {hit} of the blocks; its K and V were overwritten: {changed}")
assert changed and hit > 0, "rule P4 is not for decoration"

# %% [markdown]
# ## P ends first
# P's engine aborts the request while D waits. D is told at once, and does not wait for its timeout, here a minute.

# %%
with pair(load_timeout=60.0) as (p, d):
    p.scheduler.config = EngineConfig(max_num_batched_tokens=8, model=str(model))
    p.prefill("aborted", PROMPT)
    d.decode("aborted", PROMPT, p)
    d.step()
    p.step()
    p.core.abort_requests(["aborted"])
    drive.run_nodes(p, d, seconds=20)
    assert d.tokens["aborted"] == RIGHT
show.say(f"  on D: {states('aborted', 'recv')}; on P: {states('aborted', 'send')}")
assert states("aborted", "recv") == "asked → failed", "no RECLAIMING: P itself said that it writes nothing"

# %% [markdown]
# ## P is gone
# D connects again, finds nobody, waits a second for bytes on their way, and has its blocks back. Its timeout is a
# minute again.

# %%
with pair(load_timeout=60.0) as (p, d):
    d.decode("p gone", PROMPT, p)
    drive.run_nodes(d, until=lambda: "p gone" in d.scheduler.loading)
    time.sleep(0.1)
    p.core.close()
    drive.run_nodes(d, seconds=20)
    assert d.tokens["p gone"] == RIGHT
show.say(f"  on D: {states('p gone', 'recv')}")
assert states("p gone", "recv") == "asked → reclaiming → failed"

# %% [markdown]
# ## One table for each side
# Which steps did these drills take, of all that the tables allow? A step that is not in a table would have raised.

# %%
rows = []
for side, table, kind in (("recv", RECV_TRANSITIONS, RecvState), ("send", SEND_TRANSITIONS, SendState)):
    lives: dict[str, list[str]] = {}
    for event in seen:
        if event.side == side:
            lives.setdefault(event.request_id, []).append(event.state)
    taken = {(kind(a), kind(b)) for life in lives.values() for a, b in pairwise(life) if a != b}
    for a, following in table.items():
        for b in sorted(following, key=lambda state: state.value):
            rows.append(("D" if side == "recv" else "P", a.value, b.value, (a, b) in taken))
    assert taken <= {(a, b) for a, following in table.items() for b in following}
show.table("steps", ("on", "from", "to", "seen here"), rows)
assert RecvState.ASKED not in RECV_TRANSITIONS[RecvState.RECLAIMING], "once given up, never taken back"

# %% [markdown]
# ## The matrix
# What `nanopd pd-demo --drill all` goes through, with real processes.

# %%
kinds = {}
for cell in drills.CELLS:
    kinds.setdefault(cell.point, []).append(cell.fault)
show.table("drills", ("point", "faults"), [(point, ", ".join(names)) for point, names in kinds.items()])
assert len(drills.CELLS) >= 40 and set(kinds) <= set(faults.POINTS)
assert all(cell.see.endswith(".") for cell in drills.CELLS), "each says what one will see"
stack.close()
