"""One request on one node: server, engine core, scheduler, KV cache manager, model runner."""

from diagrams.drawing import Picture, Sequences
from diagrams.runs import names_exist
from nanopd.core.kv_cache import KVCacheManager
from nanopd.core.scheduler import Scheduler
from nanopd.engine.core import EngineCore
from nanopd.worker.model_runner import ModelRunner


def draw() -> Picture:
    """The loop in the middle is `EngineCore.step`."""
    p = Picture(
        "One request, from prompt to last token",
        "The server tokenizes and sends Add; each step of EngineCore schedules, executes and takes in the output, "
        "until the request ends and its blocks are freed.",
        "engine/core.py: step()",
    )
    names_exist(EngineCore, "step")
    names_exist(Scheduler, "schedule", "add_request", "update_from_output")
    names_exist(KVCacheManager, "get_computed_blocks", "allocate_slots", "free")
    names_exist(ModelRunner, "execute_model")
    s = Sequences(
        p,
        [
            ("client", 30, "plain"),
            ("API server", 150, "plain"),
            ("`EngineCore`", 330, "accent"),
            ("`Scheduler`", 520, "accent"),
            ("`KVCacheManager`", 710, "accent"),
            ("`ModelRunner`", 890, "c"),
        ],
    )
    s.say(0, 1, "prompt")
    s.say(1, 1, "tokenize")
    s.say(1, 2, "`Add`, over ZMQ")
    s.say(2, 3, "`add_request` (S9)")
    s.say(3, 4, "`update_block_hashes`")
    s.frame("each step, until it ends", 0, 5, left=30, right=60)
    s.say(2, 3, "`schedule()`")
    s.say(3, 4, "`get_computed_blocks`")
    s.say(3, 4, "`allocate_slots`")
    s.say(4, 3, "blocks, or None", dashed=True)
    s.say(3, 2, "`SchedulerOutput`", dashed=True)
    s.say(2, 5, "`execute_model`: inputs, forward, sample")
    s.say(5, 2, "`ModelRunnerOutput`: a token for each who has caught up", dashed=True)
    s.say(2, 3, "`update_from_output`")
    s.say(3, 2, "`EngineCoreOutput`", dashed=True)
    s.say(2, 1, "`Outputs`", dashed=True)
    s.say(1, 0, "text", dashed=True)
    s.end()
    s.say(3, 4, "`free` (K6)")
    s.finish()
    p.text(
        0,
        s.y + 34,
        "With a connector a peer may still read the blocks: then they are freed when it has let go (P4).",
        kind="soft",
    )
    return p
