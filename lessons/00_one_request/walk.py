# %% [markdown]
# # 00 One request, end to end
# The real `EngineCore` with the default model. If that is not in the cache (`nanopd model fetch`), a tiny random model
# stands in: the text is then nonsense, and every claim below still holds.

# %%
import contextlib
import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import msgspec

import nanopd.engine.core as engine_core
from nanopd.config import EngineConfig, SamplingParams, UserError
from nanopd.engine.core import EngineCore
from nanopd.engine.detokenizer import Detokenizer
from nanopd.engine.llm import EngineInfo, Frontend
from nanopd.engine.process import Add
from nanopd.models.default import default_model_path
from nanopd.models.tokenizer import load_tokenizer
from nanopd.request import FINISHED, TRANSITIONS, Request, RequestStatus
from nanopd.trace.file import read
from nanopd_lessons import drive, show

scratch = tempfile.TemporaryDirectory()
path, there = default_model_path(), (default_model_path() / "model.safetensors").is_file()
if not there:
    path = drive.byte_tokenizer(drive.tiny_model(Path(scratch.name) / "tiny"))
    show.say("The default model is not in the cache; a tiny random one stands in.")
tokenizer = load_tokenizer(path)

# %% [markdown]
# ## Text becomes numbers
# The tokenizer cuts the prompt into pieces of its vocabulary. Its end of the bargain: decoding gives the text back.

# %%
prompt = "The capital of France is"
prompt_ids = tokenizer.encode(prompt)
show.table("the prompt", ("token id", "text"), [(i, repr(tokenizer.decode([i]))) for i in prompt_ids])
assert tokenizer.decode(prompt_ids) == prompt
assert not there or (len(prompt_ids) == 5 and prompt_ids[3] == 4649)

# %% [markdown]
# ## A request
# Numbers go into a `Request`, with what the user asked for. It is WAITING, and nothing of it is computed.

# %%
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3, seed=0)
request = Request("A", prompt_ids, params, eos_token_ids=tokenizer.eos_token_ids)
assert request.status is RequestStatus.WAITING
assert (request.num_computed_tokens, request.num_tokens) == (0, len(prompt_ids))

# %% [markdown]
# ## The engine core
# It starts once, and the order matters: how many blocks there can be is known only when the weights are in memory and a
# step has been tried. We note who is called.

# %%
trace = Path(scratch.name) / "run.jsonl"
config = EngineConfig(
    model=str(path), dtype="float32", num_blocks=32, max_model_len=256, trace=str(trace), check_invariants=True
)
called: list[str] = []


def noted(name: str) -> Callable[..., object]:
    """The function or class of that name in engine/core.py, which also puts its name on the list."""
    real = getattr(engine_core, name)
    return lambda *args, **options: (called.append(name), real(*args, **options))[1]


parts = (
    "load_config",
    "load_model",
    "profile_peak_memory",
    "plan_num_blocks",
    "KVCacheManager",
    "Scheduler",
    "ModelRunner",
)
with contextlib.ExitStack() as stack:
    for name in parts:
        stack.enter_context(patch.object(engine_core, name, noted(name)))
    core = EngineCore(config)
show.say("start: " + " → ".join(called))
assert [name for i, name in enumerate(called) if name not in called[i + 1 :]] == list(parts)

# %% [markdown]
# From now on it takes token ids. A new request goes to the end of `waiting`.

# %%
assert not core.has_unfinished_requests()
core.add_request(request)
assert list(core.scheduler.waiting) == [request] and not core.scheduler.running
show.queues(core.scheduler, "after add_request")

# %% [markdown]
# ## The first step, by hand
# `schedule` decides: all tokens of the prompt in one go. The request is RUNNING from here on. And the books already
# say "computed", although nothing has run yet (S8).

# %%
plan = core.scheduler.schedule()
show.plan(plan, "schedule: the plan of step 0")
assert plan.num_scheduled_tokens == {"A": len(prompt_ids)}
assert request.status is RequestStatus.RUNNING and core.scheduler.running == [request]
assert request.num_computed_tokens == request.num_tokens == len(prompt_ids)

# %% [markdown]
# `execute_model` computes: the worker runs the model over these tokens and chooses one new token from the logits of the
# last. It knows the plan, and nothing of queues.

# %%
output = core.runner.execute_model(plan)
assert list(output.sampled_token_ids) == ["A"]
[first] = output.sampled_token_ids["A"]
top = output.logprobs["A"][0].top
show.table(
    "the best three", ("token id", "text", "log-probability"), [(t, repr(tokenizer.decode([t])), p) for t, p in top]
)
assert first == top[0][0], "greedy: the best one is taken"
assert core.model.config.vocab_size == (49152 if there else 300), "one logit for each token there is"

# %% [markdown]
# `update_from_output` takes the token in. The request is one token longer than what is computed: that one token is the
# work of the next step.

# %%
news = core.scheduler.update_from_output(plan, output)
assert [(n.request_id, n.new_token_ids, n.finish_reason) for n in news] == [("A", [first], None)]
assert request.num_tokens - request.num_computed_tokens == 1
show.queues(core.scheduler, "after the first step")

# %% [markdown]
# ## The steps after it
# `EngineCore.step` is these three calls. A detokenizer turns what is new into text. Every step computes one token now.

# %%
detokenizer = Detokenizer(tokenizer, prompt_ids, params)
detokenizer.append([first])
rows = [(0, len(prompt_ids), first, repr(detokenizer.text), request.status.name)]
before = core.scheduler.stats().num_scheduled_tokens
while core.has_unfinished_requests():
    (item,) = core.step()
    computed = core.scheduler.stats().num_scheduled_tokens
    detokenizer.append(item.new_token_ids, finished=item.finish_reason is not None)
    rows.append((len(rows), computed - before, item.new_token_ids[0], repr(detokenizer.text), request.status.name))
    before = computed
show.table("all steps", ("step", "tokens computed", "token sampled", "text so far", "status"), rows)
assert [row[1] for row in rows] == [len(prompt_ids), 1, 1, 1]
assert len(rows) == params.max_tokens, "as many steps as output tokens, however long the prompt"
assert not there or "Paris" in detokenizer.text

# %% [markdown]
# The last token is never computed: nobody asks what comes after it. So prompt + output - 1 tokens went through the model.

# %%
assert core.scheduler.stats().num_scheduled_tokens == len(prompt_ids) + params.max_tokens - 1
assert request.num_computed_tokens == request.num_tokens - 1
assert item.finish_reason == "length" and request.status is RequestStatus.FINISHED_LENGTH

# %% [markdown]
# ## States
# Which state may follow which stands in one table. Against it nothing moves, not by accident either.

# %%
show.table(
    "request.py: TRANSITIONS",
    ("from", "to"),
    [(a.name, ", ".join(sorted(b.name for b in after)) or "nothing: final") for a, after in TRANSITIONS.items()],
)
assert [status for _, status in request.metrics.history] == ["waiting", "running", "length"]
assert all(not TRANSITIONS[status] for status in FINISHED) and len(FINISHED) == 4
assert TRANSITIONS[RequestStatus.RUNNING] > FINISHED
assert RequestStatus.FINISHED_LENGTH not in TRANSITIONS[RequestStatus.WAITING], (
    "who never ran has no output to end with"
)


def refusal(act: Callable[[], object]) -> str:
    """What the engine says when it refuses, "" when it does not."""
    try:
        act()
    except (UserError, RuntimeError) as error:
        show.say(f"refused: {error}")
        return str(error)
    return ""


assert "not a legal transition" in refusal(lambda: setattr(request, "status", RequestStatus.RUNNING))
assert request.status is RequestStatus.FINISHED_LENGTH

# %% [markdown]
# ## What the engine told
# The trace of all this: every decision is an event, and the events of one step end with `Stepped`.

# %%
_, lines = read(trace)


def about(event: msgspec.Struct) -> str:
    facts = {name: value for name, value in msgspec.structs.asdict(event).items() if value and name != "request_id"}
    return ", ".join(f"{name} {value}" for name, value in facts.items() if name not in ("token_ids", "hashes"))


kinds = [type(line.event).__name__ for line in lines]
show.table("the trace", ("step", "event", "what"), [(x.step, k, about(x.event)) for x, k in zip(lines, kinds)])
step = ["Planned", "Sampled", "Stepped"]
last = ["Planned", "Sampled", "Moved", "Freed", "Stepped"]
admitted = ["Arrived", "Allocated", "Moved"]
assert [k for k in kinds if k != "Cached"] == [*admitted, *step, *step, *step, *last]
moves = [line.event for line in lines if type(line.event).__name__ == "Moved"]
assert [(move.status, move.rule) for move in moves] == [("running", "S4"), ("length", "")]

# %% [markdown]
# ## The front end
# `Frontend` does with any engine core what we did by hand: text to request, tokens to text. We give it ours.

# %%
frontend = Frontend(core, EngineInfo.of(core), seed=0)
answer = frontend.add_request(prompt, dataclasses.replace(params, logprobs=None))
while frontend.has_unfinished_requests():
    frontend.process_outputs(core.step())
assert answer.outputs[0].text == detokenizer.text and answer.outputs[0].finish_reason == "length"

# %% [markdown]
# Who ends a request? End-of-sequence and `max_tokens` the core sees itself. A stop *string* it cannot see: it has no
# text. The front end finds it, and tells the core to abort.

# %%
stop = detokenizer.text[1:3] if there else detokenizer.text[0]
answer = frontend.add_request(prompt, dataclasses.replace(params, stop=(stop,)), request_id="S")
inside = core.scheduler.requests["S"]
while frontend.has_unfinished_requests():
    frontend.process_outputs(core.step())
assert (answer.outputs[0].finish_reason, answer.outputs[0].stop_reason) == ("stop", stop)
assert stop not in answer.outputs[0].text
assert not core.has_unfinished_requests(), "the core was told, so no step is wasted on it"
assert [status for _, status in inside.metrics.history] == ["waiting", "running", "abort"], (
    "stop for the user, abort inside"
)

# %% [markdown]
# ## An id names one request
# A second request under the id of one that is unfinished is refused, and nothing happens to the first.

# %%
core.add_request(Request("A", prompt_ids, params))
assert "already in use" in refusal(lambda: core.add_request(Request("A", prompt_ids, params)))
core.step()
core.abort_requests(["A"])
assert not core.has_unfinished_requests()

# %% [markdown]
# Once it has ended, its id may come again. The next plan tells the worker both: that A has ended, and that A is new.

# %%
core.add_request(Request("A", prompt_ids, params))
plan = core.scheduler.schedule()
assert plan.finished_req_ids == {"A"} and [new.request_id for new in plan.scheduled_new_reqs] == ["A"]
output = core.runner.execute_model(plan)
assert output.sampled_token_ids == {"A": [first]}, "a new life, and the same token"
core.scheduler.update_from_output(plan, output)
core.abort_requests(["A"])

# %% [markdown]
# ## Two processes
# In `nanopd serve` the front end and the core are two processes. What crosses between them is plain data: here is all of
# it, for a new request. The server's process never imports torch.

# %%
r = request
message = Add(r.request_id, prompt_ids, params, list(tokenizer.eos_token_ids), None, None, 0, None, r.metrics)
wire = msgspec.msgpack.encode(message)
assert msgspec.msgpack.decode(wire, type=Add).prompt_token_ids == prompt_ids
show.say(f"{len(wire)} bytes: {wire[:60]!r} …")
check = "import sys, nanopd.serve.api; print('torch' in sys.modules)"
done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
assert done.stdout.strip() == "False"

# %% [markdown]
# ## Check yourself
# The questions of the text: a prompt of 100 tokens and 20 output tokens, the budget of a step, and an end in mid-queue.


# %%
def steps_and_tokens(scheduler, n: int, max_tokens: int) -> tuple[int, int]:
    scheduler.add_request(drive.request("Q", n, max_tokens=max_tokens))
    return drive.run(scheduler), scheduler.stats().num_scheduled_tokens


assert steps_and_tokens(drive.scheduler(num_blocks=100), 100, 20) == (20, 119)
assert steps_and_tokens(drive.scheduler(num_blocks=100, max_num_batched_tokens=64), 100, 20) == (21, 119)

scheduler = drive.scheduler(num_blocks=100)
scheduler.add_request(gone := drive.request("gone", 100))
scheduler.finish_requests(["gone"])
assert gone.status is RequestStatus.FINISHED_ABORTED and scheduler.stats().num_scheduled_tokens == 0
scratch.cleanup()
