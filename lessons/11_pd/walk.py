# %% [markdown]
# # 11 P/D: router, two engines, one request
# First the decisions: the real schedulers with both real scheduler halves, no model, and messages that we play. Then the
# bytes: two real engines in this process, joined by the real side channel and the real Mooncake.

# %%
import contextlib
import importlib.util
import tempfile
import time
from pathlib import Path

import msgspec
import torch

from nanopd.config import KVTransferConfig
from nanopd.connector.consumer import GRACE
from nanopd.connector.mooncake import MooncakeScheduler
from nanopd.connector.producer import NUM_SENDERS, Stage
from nanopd.connector.protocol import RECV_TRANSITIONS, SEND_TRANSITIONS, KVTransferParams, Layout, RecvState, SendState
from nanopd.connector.transport import pieces_of
from nanopd.core.output import KVConnectorOutput
from nanopd.request import RequestStatus
from nanopd.serve.router import Node as RouterNode
from nanopd.serve.router import transfer
from nanopd.trace.file import read
from nanopd_lessons import drive, show

# %% [markdown]
# ## Why: count what a decoding request waits for
# Four requests decode. A prompt of 1,000 tokens arrives. How many tokens does each of the next steps compute?


# %%
def busy(**options):
    """A scheduler with four requests that decode."""
    scheduler = drive.scheduler(num_blocks=400, block_size=4, max_model_len=1500, **options)
    for name in "ABCD":
        scheduler.add_request(drive.request(name, 8, max_tokens=50))
    drive.step(scheduler)
    return scheduler


def sizes(scheduler, count, transfers=()):
    """The tokens of each of the next steps. `transfers`: what the worker half reports, by number of the step."""
    return [drive.step(scheduler, transfers=dict(transfers).get(i)).total_num_scheduled_tokens for i in range(count)]


one, chunked = busy(), busy(long_prefill_token_threshold=100)
for scheduler in (one, chunked):
    scheduler.add_request(drive.request("long", 1000, max_tokens=20))
alone, in_chunks = sizes(one, 12), sizes(chunked, 12)
assert alone == [1004] + 11 * [5], "the four wait for a step 251 times their own"
assert in_chunks == 10 * [104] + 2 * [5], "chunks: ten steps, each 26 times their own"
assert 1004 / 4 == 251 and 104 / 4 == 26

# %% [markdown]
# Now the four run on D, and the prompt is computed on P. D's scheduler half says that all 1,000 tokens come from
# elsewhere. They come, so we decide, in the sixth step.

# %%
layout = Layout("a model", "float32", "cross_layer", block_size=4, num_runs=1, run_bytes=2048, num_blocks=400)
TO_D = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 8998, "transfer_id": "X"}


def scheduler_half(role, block_size=4):
    memory = "its session", 0, msgspec.structs.replace(layout, block_size=block_size)
    return MooncakeScheduler(KVTransferConfig(role=role), 8998 if role == "prefill" else None, memory)


def asked(prompt, name="long", raw=TO_D, **params):
    request = drive.request(name, prompt, **params)
    request.kv_transfer_params = msgspec.convert(raw, KVTransferParams)
    return request


d = busy(connector=scheduler_half("decode"))
d.add_request(asked(1000, max_tokens=20))
on_d = sizes(d, 12, {5: KVConnectorOutput(finished_recving={"long"})})
assert on_d == 6 * [4] + 6 * [5], "D's steps hardly grow"
rows = [("one engine", *alone), ("one engine, chunks of 100", *in_chunks), ("D, with a P beside it", *on_d)]
show.table("tokens in each step", ("", *map(str, range(12))), rows)
assert sum(n - 4 for n in on_d[:6]) == 0, "not one token of the prompt was computed beside the four ..."
assert on_d[6] - 4 == 1, "... until it was there: then the last one, for its logits"

# %% [markdown]
# ## What the router sends
# The real function of the router, for a P that has said where its side channel is.

# %%
body = {"prompt": list(range(18)), "max_tokens": 8, "stream": True}
p_node = RouterNode("http://p", {"kv_host": "127.0.0.1", "kv_port": 8998})
to_p, to_d = transfer(body, p_node)
show.table(
    "two requests out of one",
    ("field", "to P", "to D"),
    [(key, str(to_p.get(key))[:70], str(to_d.get(key))[:70]) for key in body]
    + [(key, to_p["kv_transfer_params"].get(key), to_d["kv_transfer_params"].get(key)) for key in TO_D]
    + [("do_remote_decode", to_p["kv_transfer_params"]["do_remote_decode"], None)],
)
assert to_p["prompt"] == to_d["prompt"] == body["prompt"], "the full prompt goes to both"
assert to_p["max_tokens"] == 1 and to_p["stream"] is False and to_d["max_tokens"] == 8
assert to_p["kv_transfer_params"]["transfer_id"] == to_d["kv_transfer_params"]["transfer_id"], "what joins the two"
assert KVTransferConfig().kv_port == to_d["kv_transfer_params"]["remote_port"] == 8998

# %% [markdown]
# ## Both scheduler halves, messages played
# D first. The prompt of 18 tokens needs five blocks of 4. The request gets them and waits; the plan of the step has a Pull.

# %%
d = drive.scheduler(num_blocks=20, block_size=4, connector=scheduler_half("decode"))
pool = d.kv.pool
popped = pool.get_new_blocks(20)
pool.free(popped[i] for i in [7, 2, 3, 9, 4, *(i for i in range(20) if i not in (7, 2, 3, 9, 4))])
d.add_request(asked(18, "r"))
plan = d.schedule()
((request_id, address, pull),) = plan.kv_connector_metadata.reqs_to_recv
show.queues(d, "D after its first step")
show.say(f"  the Pull: to {address}, tokens {pull.num_tokens}, from block {pull.first_block}, into {pull.block_ids}")
assert d.requests["r"].status is RequestStatus.WAITING_FOR_REMOTE_KVS and plan.total_num_scheduled_tokens == 0
assert pull.block_ids == [7, 2, 3, 9, 4] == d.kv.get_block_ids("r") and pull.first_block == 0
assert address == ("127.0.0.1", 8998) and d.requests["r"].num_computed_tokens == 18
assert not pool.cached_block_hash_to_block, "K8: nobody may find what is not there yet"
drive.finish_step(d, plan)

# %% [markdown]
# P computes the prompt like any other. Its first plan says STARTED. The request ends with its first token; its
# blocks do not: the next plan says COMPLETE and names them.

# %%
p = drive.scheduler(num_blocks=20, block_size=4, connector=scheduler_half("prefill"))
p.add_request(asked(18, "r", {"do_remote_decode": True, "transfer_id": "X"}, max_tokens=1))
plan = p.schedule()
assert [send.stage for send in plan.kv_connector_metadata.reqs_to_send] == [Stage.STARTED]
drive.finish_step(p, plan)
assert not p.requests and p.reclaiming == {"r"} and p.kv.pool.num_free_blocks == 15, "ended, and its blocks are kept"
plan = p.schedule()
(send,) = plan.kv_connector_metadata.reqs_to_send
show.say(f"  P's plan: {send.stage.name}, blocks {send.block_ids}")
assert send.stage is Stage.COMPLETE and send.block_ids == [0, 1, 2, 3, 4]
assert send.prompt_hash == pull.prompt_hash, "both have hashed the same prompt: an id mixed up would be seen (P2)"

# %% [markdown]
# The worker halves move the bytes; here we only say that they did. P's blocks go back to the pool, D's request is
# promoted and computes one token.

# %%
drive.finish_step(p, plan, transfers=KVConnectorOutput(finished_sending={"r"}))
assert p.kv.pool.num_free_blocks == 20 and not p.reclaiming
drive.step(d, transfers=KVConnectorOutput(finished_recving={"r"}))
assert d.requests["r"].status is RequestStatus.WAITING_FOR_REMOTE_KVS and not d.loading, "known at the step's end"
plan = d.schedule()
show.plan(plan, "D, promoted")
assert plan.num_scheduled_tokens == {"r": 1} and plan.scheduled_new_reqs[0].num_computed_tokens == 17
assert len(pool.cached_block_hash_to_block) == 4, "now the four full blocks can be found"
drive.finish_step(d, plan)

# %% [markdown]
# ## The real thing: two engines
# A tiny model with random weights. Where Mooncake cannot be imported (macOS), a transport that copies takes its place,
# and all the rest stays. Mooncake logs "Local segment descriptor not found" once for each engine that starts: harmless.

# %%
directory = tempfile.TemporaryDirectory()
model = drive.tiny_model(Path(directory.name))
have_mooncake = importlib.util.find_spec("mooncake") is not None
stand_in = contextlib.ExitStack()
if not have_mooncake:
    show.say("  Mooncake is not installed here: the bytes are copied by lessons/drive.py.")
    stand_in.enter_context(drive.in_memory())
traces = {name: Path(directory.name, f"{name}.jsonl") for name in "PD"}
p = drive.Node(model, "prefill", trace=str(traces["P"]))
d = drive.Node(model, "decode", trace=str(traces["D"]))
prompt = list(range(100, 150))
request = p.prefill("r", prompt)
assert p.scheduler.kv.pool.num_free_blocks == d.scheduler.kv.pool.num_free_blocks == 100
drive.run_nodes(p, until=lambda: "r" in p.answers)
show.say(f"  P answers: {p.answers['r']}")
assert p.tokens["r"] and request.status is RequestStatus.FINISHED_LENGTH
assert p.answers["r"] is not None and p.answers["r"]["remote_port"] == p.core.connector.port
assert p.scheduler.reclaiming == {"r"} and p.scheduler.kv.pool.num_free_blocks == 87, "13 blocks stay"
p.step()  # the plan with COMPLETE goes to the worker half
sends = p.core.connector.producer._sends
drive.run_nodes(until=lambda: sends["r"].state is SendState.HELD)

# %% [markdown]
# D comes. Its step allocates, sends the Pull and ends. From here on we step *neither* engine: P's threads do what is left.

# %%
loading = d.decode("r", prompt, p)
d.step()
assert loading.status is RequestStatus.WAITING_FOR_REMOTE_KVS and d.scheduler.loading == {"r"}
drive.run_nodes(until=lambda: p.core.connector.stats().sent == 1)
ours, theirs = ([*range(13)] for _ in range(2))
for (pk, pv), (dk, dv) in zip(p.core.runner.kv_cache.layers, d.core.runner.kv_cache.layers):
    for mine, copy in ((pk, dk), (pv, dv)):
        assert torch.equal(mine[ours], copy[theirs]) and mine[ours].abs().sum() > 0
assert loading.status is RequestStatus.WAITING_FOR_REMOTE_KVS and d.scheduler.loading == {"r"}, (
    "and D knows nothing yet"
)
show.queues(d.scheduler, "D, with all bytes in its memory")

# %% [markdown]
# Only the message tells D. Its next step reads it, the one after promotes. And P frees.

# %%
drive.run_nodes(d, until=lambda: not d.scheduler.loading)
assert d.scheduler.finished_recving_kv_req_ids == {"r"}
before = d.scheduler.stats().num_scheduled_tokens
d.step()
assert d.scheduler.stats().num_scheduled_tokens - before == 1 and len(d.tokens["r"]) == 1
drive.run_nodes(p, d)
assert p.scheduler.kv.pool.num_free_blocks == d.scheduler.kv.pool.num_free_blocks == 100
single = drive.Node(model, None)
single.add("r", prompt)
drive.run_nodes(single)
show.table(
    "tokens",
    ("engine", *map(str, range(8))),
    [("one", *single.tokens["r"]), ("P", *p.tokens["r"], *7 * [None]), ("D", *d.tokens["r"])],
)
assert d.tokens["r"] == single.tokens["r"] and p.tokens["r"] == single.tokens["r"][:1]
moved = loading.metrics.transfer
assert moved["num_bytes"] == 13 * 2048 == 26_624 and moved["num_pieces"] == 1
assert p.core.runner.kv_cache.memory[0].nbytes == 2048, "a block of all layers"

# %% [markdown]
# Both engines have written a trace: the states that the transfer went through, on each side. P's begins as COMPUTING; the
# trace tells what it became then.


# %%
def states_of(name, transfer_id):
    lines = read(traces[name])[1]
    return [(e.state, e.about) for e in (line.event for line in lines) if getattr(e, "transfer_id", "") == transfer_id]


for name in "PD":
    show.table(f"{name}: states", ("state", "about"), states_of(name, "r"))
assert [state for state, _ in states_of("P", "r")] == ["held", "sending", "done"]
assert [state for state, _ in states_of("D", "r")] == ["asked", "done"]

# %% [markdown]
# ## Pieces: neighbours on both sides
# The same 13 blocks in three layouts. First both pools hand them out in a row. Then D's pool hands out two neighbours,
# leaves two out, and so on; then every second block.

# %%
rows, nodes = [], {"cross_layer": (p, d)}
for name in ("kv_first", "blocks_first"):
    nodes[name] = drive.Node(model, "prefill", kv_layout=name), drive.Node(model, "decode", kv_layout=name)
orders = {
    "in a row": [*range(13)],
    "in twos": [i for i in range(40) if i % 4 < 2][:13],
    "every second": [*range(0, 26, 2)],
}
for name, (p, d) in nodes.items():
    pieces = []
    for i, (order, block_ids) in enumerate(orders.items()):
        tokens = [200 + i, *prompt[1:]]  # another first token: nothing is found in the caches
        p.order_free_queue([*range(13)])
        d.order_free_queue(block_ids)
        p.prefill(order, tokens)
        request = d.decode(order, tokens, p, max_tokens=2)
        drive.run_nodes(p, d)
        assert request.metrics.transfer["num_bytes"] == 26_624
        pieces.append(request.metrics.transfer["num_pieces"])
        single.add(f"{name} {order}", tokens, max_tokens=2)
        drive.run_nodes(single)
        assert d.tokens[order] == single.tokens[f"{name} {order}"]
    rows.append((name, *pieces))
show.table("pieces of one transfer of 13 blocks", ("layout", *orders), rows)
assert {row[0]: row[1:] for row in rows} == {
    "cross_layer": (1, 7, 13),
    "kv_first": (4, 28, 52),
    "blocks_first": (2, 14, 26),
}

# %% [markdown]
# ## Only the suffix
# D has the first 32 tokens of a prompt in its prefix cache. It asks for the rest, and P skips its first eight blocks.

# %%
p, d = nodes["cross_layer"]
shared = list(range(10, 42))
d.add("warm", [*shared, 7], max_tokens=1)
drive.run_nodes(d)
p.prefill("suffix", [*shared, *range(60, 80)])
request = d.decode("suffix", [*shared, *range(60, 80)], p)
drive.run_nodes(p, d)
show.say(f"  {request.metrics.transfer}")
assert request.metrics.transfer["num_bytes"] == 5 * 2048 == 10_240, "5 blocks of 13"
assert request.metrics.num_cached_tokens == 52, "32 from here, 20 from P"

# %% [markdown]
# D finds the whole prompt. It asks for nothing, and still tells P: a Cancel, so that P lets go at once (P5). P logs
# "transfer whole failed: cancelled": that is this Cancel, and nothing went wrong.

# %%
p.prefill("whole", shared)
request = d.decode("whole", shared, p)
sent = p.core.connector.stats().sent
drive.run_nodes(p, d)
assert request.metrics.transfer is None and p.core.connector.stats().sent == sent
assert p.core.connector.stats().send_failures == 1, "P books it as a transfer that was cancelled"
assert p.scheduler.kv.pool.num_free_blocks == 100
for pair in nodes.values():
    for node in pair:
        node.core.close()

# %% [markdown]
# ## The tables of states
# `protocol.py` says what each side can be, and what may follow. The code asserts each change against them.

# %%
for title, transitions in (("P", SEND_TRANSITIONS), ("D", RECV_TRANSITIONS)):
    rows = [(state.name, ", ".join(sorted(s.name for s in then)) or "the end") for state, then in transitions.items()]
    show.table(title, ("state", "may become"), rows)
assert [s for s, then in SEND_TRANSITIONS.items() if SendState.DONE in then] == [SendState.SENDING]
live = [s for s, then in SEND_TRANSITIONS.items() if then]
assert all(SendState.FAILED in SEND_TRANSITIONS[s] for s in live), "any state of P can fail"
assert SendState.HELD not in SEND_TRANSITIONS[SendState.ASKED], "a D that asks early is never kept waiting in HELD"
assert RecvState.ASKED not in RECV_TRANSITIONS[RecvState.RECLAIMING], "given up is given up: nobody waits again"

# %% [markdown]
# ## P dies while it writes
# A transport that copies, with a gate that holds the write back. P is writing, then it is gone. D logs a warning.

# %%
config = KVTransferConfig()
assert (config.kv_load_timeout, config.kv_hold_timeout, GRACE) == (60, 120, 1)
traces["D2"] = Path(directory.name, "D2.jsonl")
with drive.in_memory() as transport:
    p, d = drive.Node(model, "prefill"), drive.Node(model, "decode", trace=str(traces["D2"]))
    transport.gate.clear()
    p.prefill("r", prompt)
    request = d.decode("r", prompt, p)
    drive.run_nodes(p, d, until=lambda: bool(transport.writes))
    old = d.scheduler.kv.get_block_ids("r")
    p.core.close()
    drive.run_nodes(d, until=lambda: "r" in d.scheduler.reclaiming)
    blocks = d.scheduler.kv.pool.blocks
    assert len(old) == 13 and all(blocks[i].ref_cnt == 1 for i in old), "not free: P might still write"
    assert all(blocks[i].block_hash is None for i in old), "and in no hash table"
    assert request.status is RequestStatus.WAITING, "the request itself waits for nobody"
    d.step()
    others = d.scheduler.kv.get_block_ids("r")
    show.say(f"  blocks that P may still write: {old}")
    show.say(f"  blocks of the request now:     {others}")
    assert len(others) >= 13 and not set(old) & set(others)
    drive.run_nodes(d)
    assert d.tokens["r"] == single.tokens["r"] and d.scheduler.kv.pool.num_free_blocks == 100, "all is well again"
    d.core.close()
show.table("D: P has died", ("state", "about"), states_of("D2", "r"))
assert [state for state, _ in states_of("D2", "r")] == ["asked", "reclaiming", "failed"]

# %% [markdown]
# No D asks. P has 30 blocks and holds two prompts of 13; a third does not fit. P gives up the first. Its D asks too late.

# %%
with drive.in_memory():
    traces["D3"] = Path(directory.name, "D3.jsonl")
    p, d = drive.Node(model, "prefill", num_blocks=30), drive.Node(model, "decode", trace=str(traces["D3"]))
    for i, name in enumerate(("first", "second", "third")):
        p.prefill(name, [210 + i, *prompt[1:]])
        if name != "third":
            drive.run_nodes(p, until=lambda name=name: name in p.answers)
    drive.run_nodes(p, until=lambda: "third" in p.answers)
    assert p.scheduler.reclaiming == {"second", "third"}, "the first was held longest"
    d.decode("first", [210, *prompt[1:]], p)
    drive.run_nodes(d)
    assert d.core.connector.stats().receive_failures == 1 and len(d.tokens["first"]) == 8, (
        "it computed the prompt itself"
    )
    d.core.close()
    p.core.close()
assert [state for state, _ in states_of("D3", "first")] == ["asked", "failed"], (
    "no quarantine: P said that it does not write"
)

# %% [markdown]
# ## The drawing's numbers, moved
# Eight inputs of 8k tokens, "576 x 8 blocks", 48 layers, 16 tokens a block, 8,192 bytes a block and layer (lesson 02).

# %%
GiB, MiB = 2**30, 2**20
per_layer = 1.125 * GiB / 147_456
assert per_layer == 8192 and 48 * per_layer == 384 * 1024
assert 8192 // 16 == 512 and 512 * 48 * per_layer == 192 * MiB and 8 * 192 / 1024 == 1.5

# %% [markdown]
# What do the real schedulers do with eight such prompts?

# %%
rows = []
for num_tokens, blocks in ((8192, 512), (9216, 576)):
    d = drive.scheduler(5000, 16, max_model_len=10_000, connector=scheduler_half("decode", 16))
    p = drive.scheduler(
        5000, 16, max_model_len=10_000, max_num_batched_tokens=8192, connector=scheduler_half("prefill", 16)
    )
    for i in range(8):
        d.add_request(asked(range(i, i + num_tokens), f"r{i}", TO_D | {"transfer_id": f"X{i}"}))
        p.add_request(asked(range(i, i + num_tokens), f"r{i}", {"do_remote_decode": True}, max_tokens=1))
    metadata = d.schedule().kv_connector_metadata
    assert len(metadata.reqs_to_recv) == 8, "loads cost no token budget: all eight ask in one step"
    pulls = [pull for _, _, pull in metadata.reqs_to_recv]
    assert [len(pull.block_ids) for pull in pulls] == 8 * [blocks]
    steps = 0
    complete = []
    while p.requests or not complete or len(complete) < 8:
        plan = p.schedule()
        complete += [s for s in plan.kv_connector_metadata.reqs_to_send if s.stage is Stage.COMPLETE]
        drive.finish_step(p, plan)
        steps += bool(plan.total_num_scheduled_tokens)
    assert [len(s.block_ids) for s in complete] == 8 * [blocks] and steps == num_tokens * 8 // 8192
    assert p.kv.pool.num_free_blocks == 5000 - 8 * blocks, "P holds all of them"
    message = len(msgspec.msgpack.encode(pulls[-1]))
    rows.append((num_tokens, blocks, 8 * blocks, steps, message))
    assert message < 3000
show.table("eight prompts", ("tokens", "blocks each", "together", "P's steps", "bytes of a Pull"), rows)
largest = msgspec.structs.replace(pulls[0], block_ids=[*range(147_456 - 512, 147_456)])
assert 2500 < len(msgspec.msgpack.encode(largest)) < 3000, "with ids as large as in the drawing"
assert rows[0][2] == 4096 and rows[1][2] == 4608 == 576 * 8 and rows[0][3] == 8 and rows[1][3] == 9

# %% [markdown]
# And the pieces of one of them, best case and worst, from the real `pieces_of`. Each costs some 40 µs over TCP.

# %%
rows = []
for name, num_runs, size in (("kv_first", 96, 4096), ("blocks_first", 48, 8192), ("cross_layer", 1, 48 * 8192)):
    big = Layout("a model", "bfloat16", name, 16, num_runs, size, 147_456)
    row = [len(pieces_of(big, 0, range(512), big, 0, ids)) for ids in (range(100, 612), range(0, 1024, 2))]
    assert sum(piece.num_bytes for piece in pieces_of(big, 0, range(512), big, 0, range(512))) == 192 * MiB
    rows.append((name, *row, row[0] * 40e-6, row[1] * 40e-6))
show.table("pieces of 192 MiB", ("layout", "in a row", "scattered", "s", "s"), rows)
assert [row[1:3] for row in rows] == [(96, 49_152), (48, 24_576), (1, 512)]
assert [round(row[4], 2) for row in rows] == [1.97, 0.98, 0.02]

# %% [markdown]
# Ten sender threads: ten transfers are written at a time, each by one thread. A gate holds all writes back; twelve prompts
# are ready.

# %%
with drive.in_memory() as transport:
    p, d = drive.Node(model, "prefill"), drive.Node(model, "decode")
    transport.gate.clear()
    for i in range(12):
        p.prefill(f"r{i}", [i, *range(20)])
        d.decode(f"r{i}", [i, *range(20)], p)
    drive.run_nodes(p, d, until=lambda: len(transport.writes) >= 10)
    time.sleep(0.2)
    assert len(transport.writes) == 10 == NUM_SENDERS, "two wait for a thread"
    transport.gate.set()
    drive.run_nodes(p, d)
    assert d.core.connector.stats().received == len(transport.writes) == 12
    p.core.close()
    d.core.close()

# %% [markdown]
# ## Check yourself
# The questions of the text, as far as they are not answered above.

# %%
half = scheduler_half("decode")
short, longer = asked(4, "short"), asked(5, "longer")
assert half.get_num_new_matched_tokens(short, 0) == (0, False) and half.get_num_new_matched_tokens(longer, 0) == (
    5,
    True,
)
ids = ([4, 5, 6, 9], [1, 2, 3, 4])
small = Layout("a model", "float32", "kv_first", 4, num_runs=4, run_bytes=100, num_blocks=10)
assert len(pieces_of(small, 0, ids[0], small, 0, ids[1])) == 8, "two pieces in each of the four runs"
assert len(pieces_of(small, 0, range(6), small, 0, range(5, -1, -1))) == 4 * 6, "backwards: no two are neighbours"
one_run = msgspec.structs.replace(small, kv_layout="cross_layer", num_runs=1, num_blocks=20)
assert len(pieces_of(one_run, 0, range(13), one_run, 0, range(12, -1, -1))) == 13
stand_in.close()
directory.cleanup()
