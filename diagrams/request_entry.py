"""How a request comes in: from HTTP to the end of `waiting`."""

from diagrams.drawing import Picture
from diagrams.runs import names_exist
from nanopd.core.scheduler import Scheduler
from nanopd.engine.process import EngineClient


def draw() -> Picture:
    """Two processes, and the questions that are asked on the way."""
    p = Picture(
        "A request comes in",
        "From the HTTP request to the end of the waiting queue: parsed and tokenized in the server's process, sent "
        "to the engine core as an Add message, checked once by Scheduler.add_request.",
        "serve/api.py, engine/process.py, core/scheduler.py",
    )
    names_exist(EngineClient, "add_request")
    names_exist(Scheduler, "add_request")
    p.group(0, 0, 270, 330, "server process")
    a = p.box(20, 44, "`POST /v1/completions`\n`POST /v1/chat/completions`", 230, h=56)
    b = p.box(20, 136, "checked, bounded (P7),\nchat template, tokenized", 230, h=56)
    c = p.box(20, 228, "`Request`, `SamplingParams`\nand a seed", 230, h=56)
    p.arrow(a.b(), b.t())
    p.arrow(b.b(), c.t())
    p.group(380, 0, 570, 330, "engine core process:  `Scheduler.add_request`")
    q1 = p.box(410, 44, "id in use, or still in `reclaiming`?", 250, 44, "accent")
    q2 = p.box(410, 118, "no tokens?", 250, 44, "accent")
    q3 = p.box(410, 192, "`num_tokens >= max_model_len`?", 250, 44, "accent")
    d = p.box(410, 266, "`update_block_hashes` (K3)", 250, 44)
    error = p.box(770, 92, "`UserError`:\na sentence that\nsays what to do\n(S9)", 160, 96, "bad")
    queue = p.group(745, 250, 190, 76, "`waiting`")
    p.cells(828, 282, [("new", "a")], 48, 32)
    p.cells(880, 282, [("…", "plain")], 36, 32)
    p.arrow(c.r(), q1.l(), "`Add`", "-|-", bend=325, on=0)
    p.text(325, 274, "msgpack over", "middle", "soft")
    p.text(325, 293, "ZMQ (P1)", "middle", "soft")
    for above, below in ((q1, q2), (q2, q3), (q3, d)):
        p.arrow(above.b(), below.t(), "no")
    p.arrow(q1.r(), error.l(0.25), "yes", "-|-", bend=715, on=0)
    p.arrow(q2.r(), error.l(0.5), "yes", "-|-", bend=715, on=0, at=0.5)
    p.arrow(q3.r(), error.l(0.75), "yes", "-|-", bend=715, on=0)
    p.arrow(d.r(), queue.l(0.5))
    return p
