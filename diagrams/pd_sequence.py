"""One request through router, P and D: who says what to whom, and when blocks are held and freed."""

from diagrams.drawing import Picture, Sequences
from nanopd.connector.protocol import Done, KVTransferParams, Pull


def draw() -> Picture:
    """Five columns; the bytes go straight from P's memory into D's."""
    p = Picture(
        "One request, P and D",
        "The router sends the prompt to P and D; D reserves blocks and asks P with a Pull; P computes, writes the "
        "blocks into D's memory through Mooncake and says Done; only then are P's blocks freed and D decodes.",
        "serve/router.py, connector/: S5, K8, P1-P4",
    )
    fields = {*KVTransferParams.__struct_fields__, *Pull.__struct_fields__, *Done.__struct_fields__}
    assert {"do_remote_decode", "do_remote_prefill", "remote_host", "first_block", "block_ids", "num_bytes"} <= fields
    s = Sequences(
        p,
        [
            ("client", 28, "plain"),
            ("router", 126, "plain"),
            ("P: scheduler\nand worker", 358, "a"),
            ("P: connector\n`Producer`", 532, "a"),
            ("D: connector\n`Consumer`", 735, "b"),
            ("D: scheduler", 888, "b"),
        ],
    )
    s.say(0, 1, "prompt")
    s.say(1, 2, "`do_remote_decode`, max_tokens 1")
    s.say(1, 5, "`do_remote_prefill, remote_host`: same prompt, same `transfer_id`")
    s.note(5, "blocks reserved:\nwaits (S5, K8)", "warn")
    s.say(5, 4, "`reqs_to_recv`")
    s.say(4, 3, "`Pull`: first_block, block_ids", kind="warn-line")
    s.note(2, "prefill, in chunks", "a")
    s.say(2, 3, "`reqs_to_send`")
    s.note(2, "request has ended, its\nblocks stay held (P4)", "warn")
    s.say(3, 4, "KV bytes, into D's memory", kind="b-line")
    s.say(3, 4, "`Done`", kind="warn-line")
    s.say(3, 2, "`finished_sending`")
    s.note(2, "blocks freed (K6)", "free")
    s.y -= 30
    s.say(4, 5, "`finished_recving`")
    s.note(5, "hash table (K8),\npromoted (S5)", "good")
    s.frame("decode", 0, 5, left=28, right=58)
    s.say(5, 0, "tokens, through the router", dashed=True)
    s.end()
    s.finish()
    p.text(
        0,
        s.y + 34,
        "The Pull may come before, during or after the prefill. D waits for at most `kv_load_timeout`, P "
        "holds blocks for at\n"
        "most `kv_hold_timeout` (P3). The bytes are one-sided: Mooncake writes, D's program takes no part in it.",
        kind="soft",
    )
    return p
