"""D loads KV blocks: the scheduler, both halves of its connector, P and Mooncake; when it works and when it does not."""

from diagrams.drawing import Picture, Sequences
from diagrams.runs import names_exist
from nanopd.connector.base import KVConnectorScheduler, KVConnectorWorker
from nanopd.core.scheduler import Scheduler


def draw() -> Picture:
    """Above what always happens, then the two ends."""
    p = Picture(
        "Loading KV blocks, and what if they do not come",
        "D's scheduler asks its connector half, reserves blocks, and hands a plan to the worker half, which asks P. "
        "Done leads to a promotion, Failed or a timeout to recomputing.",
        "connector/base.py: S5, S10, K8, P3, P4",
    )
    names_exist(KVConnectorScheduler, "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta")
    names_exist(KVConnectorWorker, "start_load_kv", "get_finished")
    names_exist(Scheduler, "forget_external_tokens")
    s = Sequences(
        p,
        [
            ("`Scheduler`", 90, "b"),
            ("`MooncakeScheduler`\nscheduler half", 350, "b"),
            ("`MooncakeWorker`\nworker half", 580, "b"),
            ("P: side channel\n(ZMQ)", 760, "a"),
            ("P: Mooncake", 886, "a"),
        ],
    )
    s.say(0, 1, "`get_num_new_matched_tokens`")
    s.say(1, 0, "prompt - local hit, asynchronous", dashed=True)
    s.say(0, 0, "`allocate_slots(delay_caching=True)` (K8)")
    s.say(0, 1, "`update_state_after_alloc`")
    s.note(0, "waits, no tokens\n(S5)", "warn")
    s.say(0, 1, "`build_connector_meta`")
    s.say(1, 2, "plan: `reqs_to_recv`")
    s.say(2, 3, "`start_load_kv`: `Pull`")
    s.frame("done", 0, 4, left=90, right=58, kind="good-line")
    s.say(3, 4, "write")
    s.say(4, 2, "bytes, into D's blocks", kind="b-line")
    s.say(3, 2, "`Done`")
    s.say(2, 0, "`get_finished`: `finished_recving`")
    s.say(0, 0, "`_try_promote`: blocks into the hash table (K8), goes on as WAITING")
    s.end()
    s.frame(
        "failed: refused (P2), nobody there (P6), no answer in kv_load_timeout (P3)",
        0,
        4,
        left=90,
        right=58,
        kind="bad-line",
    )
    s.say(3, 2, "`Failed`, or nothing")
    s.say(2, 3, "after a timeout: `Cancel`")
    s.say(2, 0, "`get_finished`: `failed_recving`, or `given_up`")
    s.say(0, 0, "`forget_external_tokens`: recompute, in other blocks (S10)")
    s.note(0, "given up: the old blocks\nstay out of use until P\ncannot write (P4)", "bad")
    s.end()
    s.finish()
    return p
