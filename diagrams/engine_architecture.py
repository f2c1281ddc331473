"""What runs where: processes, their parts, and what passes between them."""

from diagrams.drawing import Picture
from diagrams.runs import names_exist
from nanopd.engine import core, process


def draw() -> Picture:
    """The server's process on the left, the engine core's on the right, other engines at its right edge."""
    p = Picture(
        "The engine and what is around it",
        "The API server and the engine core are two processes joined by ZMQ; the engine core holds scheduler, KV "
        "cache manager, model runner and KV memory; a connector's two halves move blocks to and from other engines.",
        "serve/, engine/, core/, worker/, connector/",
    )
    names_exist(process, "EngineClient")
    names_exist(core, "EngineCore")
    client = p.box(0, 48, "client", 70, 40)
    p.group(110, 0, 200, 392, "API server process")
    api = p.box(126, 40, "HTTP API\n`serve/api.py`", 168, 56)
    token = p.box(126, 116, "tokenizer,\ndetokenizer", 168, 56)
    engine_client = p.box(126, 192, "`EngineClient`", 168, 44)
    p.text(126, 276, "parses and writes text\nwhile the core computes", kind="soft")
    p.arrow(client.r(), api.l(), both=True)
    p.arrow(api.b(), token.t(), both=True)
    p.arrow(token.b(), engine_client.t(), both=True)
    p.group(384, 0, 420, 392, "engine core process")
    p.group(396, 30, 396, 114, "decides: `core/`, no torch", "panel")
    kv = p.box(410, 66, "KV cache\nmanager", 112, 60, "accent")
    scheduler = p.box(540, 66, "`Scheduler`", 108, 60, "accent")
    scheduler_half = p.box(666, 66, "connector:\nscheduler half", 112, 60, "d")
    core_box = p.box(410, 192, "`EngineCore.step()`", 238, 44, "good")
    p.group(396, 264, 396, 114, "", "panel")
    p.text(410, 361, "computes: `worker/`, `models/`, `kernels/`", kind="soft", bold=True)
    memory = p.box(410, 282, "KV memory", 112, 60, "a")
    runner = p.box(540, 282, "`ModelRunner`,\nmodel", 108, 60, "c", pad=2)
    worker_half = p.box(666, 282, "connector:\nworker half", 112, 60, "d")
    p.arrow(scheduler.l(), kv.r(), both=True)
    p.arrow(scheduler.r(), scheduler_half.l(), both=True)
    p.arrow(scheduler.b(), core_box.t((594 - 410) / 238), "plan", side="left", both=True, at=0.68)
    p.arrow(core_box.b((594 - 410) / 238), runner.t(), both=True)
    p.arrow(runner.l(), memory.r(), both=True)
    p.arrow(scheduler_half.b(), worker_half.t(), "what to\nload, send", at=0.45, both=True)
    p.arrow(engine_client.r(), core_box.l(), both=True)
    p.text(347, 200, "ZMQ", "middle", "soft")
    p.text(347, 228, "`Add`,", "middle", "soft")
    p.text(347, 247, "`Outputs`", "middle", "soft")
    p.group(868, 0, 84, 392, "peers")
    peer = p.box(878, 262, "their\nhalf", 64, 48, "d")
    theirs = p.box(878, 322, "their\nKV", 64, 48, "a")
    p.arrow(worker_half.r(0.1), peer.l((288 - 262) / 48), both=True)
    p.text(836, 276, "ZMQ", "middle", "soft")
    p.arrow(worker_half.r(0.93), theirs.l((337.8 - 322) / 48), both=True)
    p.text(836, 324, "KV", "middle", "soft")
    return p
