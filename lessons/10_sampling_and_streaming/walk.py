# %% [markdown]
# # 10 Sampling and streaming
# First the real sampler on logits that we make up, then the real detokenizer on bytes that we make up, and at the end both
# in a real engine, with the server's own answer object cutting the stream into chunks.

# %%
import tempfile
from array import array
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import torch

from nanopd import LLM
from nanopd.config import SamplingParams
from nanopd.core.ngram import propose
from nanopd.engine.detokenizer import Detokenizer
from nanopd.models.default import default_model_path
from nanopd.models.tokenizer import load_tokenizer
from nanopd.request import Request
from nanopd.serve.api import Answer, Body
from nanopd.worker.sampler import SamplingRow, sample, uniform, verify
from nanopd_lessons import drive, show

scratch = tempfile.TemporaryDirectory()

# %% [markdown]
# ## From logits to shares
# Five tokens. Their logits are such that at temperature 1 their probabilities are 0.4, 0.3, 0.15, 0.1 and 0.05.

# %%
SHARES = [0.4, 0.3, 0.15, 0.1, 0.05]
LOGITS = torch.tensor([SHARES]).log()


def row(seed: int = 0, position: int = 0, **params) -> SamplingRow:
    """A request with this seed that has `position` output tokens already."""
    tokens = np.zeros(1 + position, dtype=np.int64)
    return SamplingRow(SamplingParams(seed=seed, **params), tokens, 1, frozenset())


def drawn(n: int = 2000, logits: torch.Tensor = LOGITS, **params) -> list[float]:
    """How often each token comes, over n seeds."""
    tokens, _ = sample(logits.repeat(n, 1), [row(seed, **params) for seed in range(n)])
    counts = Counter(tokens)
    return [counts[token] / n for token in range(logits.shape[1])]


rows = []
for temperature in (0.0, 0.5, 1.0, 2.0):
    expected = (LOGITS[0] / temperature).softmax(-1).tolist() if temperature else [1.0, 0, 0, 0, 0]
    rows.append((temperature, *expected))
    seen = drawn(temperature=temperature)
    assert max(abs(a - b) for a, b in zip(seen, expected)) < 0.03
show.table("probability by temperature", ("temperature", *map(str, range(5))), rows)
best = [line[1] for line in rows]
assert best == sorted(best, reverse=True), "the hotter, the less the best one gets"
assert [round(p, 2) for p in best] == [1.0, 0.56, 0.4, 0.3]

# %% [markdown]
# ## One number, one token
# A draw needs one number u between 0 and 1. The tokens share the stretch from 0 to 1 among them; the one on whose part u
# falls is drawn.

# %%
ends = np.cumsum(SHARES)
examples = []
for seed in range(6):
    u = uniform(seed, position=0)
    (token,), _ = sample(LOGITS.clone(), [row(seed)])
    examples.append((seed, u, token, f"{ends[token] - SHARES[token]:.2f} to {ends[token]:.2f}"))
    assert ends[token] - SHARES[token] <= u < ends[token]
show.table("the draw", ("seed", "u", "token", "its part"), examples)

# %% [markdown]
# ## Cutting the tail
# Who can still be drawn? min-p and top-k look at the probabilities as they are; then what is left is scaled up to 1, and
# top-p looks at that.


# %%
def left(**params) -> list[int]:
    return [token for token, share in enumerate(drawn(500, **params)) if share]


rows = [
    ("nothing", left()),
    ("top_k=2", left(top_k=2)),
    ("top_p=0.8", left(top_p=0.8)),
    ("min_p=0.3", left(min_p=0.3)),
    ("top_p=0.000001", left(top_p=1e-6)),
    ("top_k=2, top_p=0.5", left(top_k=2, top_p=0.5)),
    ("top_p=0.5", left(top_p=0.5)),
]
show.table("who is left", ("cut", "tokens"), rows)
assert [tokens for _, tokens in rows] == [[0, 1, 2, 3, 4], [0, 1], [0, 1, 2], [0, 1, 2], [0], [0], [0, 1]]
assert round(SHARES[0] / (SHARES[0] + SHARES[1]), 2) == 0.57 and SHARES[0] < 0.5, (
    "scaled up, the first reaches 0.5 alone"
)
flat, peaked = torch.zeros(1, 5), torch.tensor([[10.0, 0, 0, 0, 0]])
by_top_k = [sum(share > 0 for share in drawn(500, logits, top_k=3)) for logits in (flat, peaked)]
by_min_p = [sum(share > 0 for share in drawn(500, logits, min_p=0.3)) for logits in (flat, peaked)]
assert by_min_p == [5, 1], "min-p asks how sure the model is"
assert by_top_k[0] == 3, "top-k does not"

# %% [markdown]
# ## Chance without a state
# u is a hash of the seed and of the position in the output. Nothing is remembered from draw to draw. So it is of no
# consequence who else is in the batch, in which order, or how often the request was thrown out.

# %%
assert uniform(7, 0) == uniform(7, 0) and len({uniform(7, position) for position in range(1000)}) == 1000
crowd = [row(seed, position=3) for seed in range(64)]
alone = [sample(LOGITS.clone(), [one])[0][0] for one in crowd]
together, _ = sample(LOGITS.repeat(64, 1), crowd)
backwards, _ = sample(LOGITS.repeat(64, 1), crowd[::-1])
assert alone == together == backwards[::-1]

mates = [row(seed, top_k=5) for seed in range(64)]  # cut, so sorted; five of five are kept, so nothing else changes
turned = LOGITS.flip(1)  # the best token last
plain, _ = sample(turned.repeat(64, 1), crowd)
assert sample(turned.repeat(128, 1), [*crowd, *mates])[0][:64] == plain, "a batch mate's sort is its own affair"
assert sample(turned.repeat(64, 1), [row(seed, position=3, top_k=5) for seed in range(64)])[0] != plain, (
    "sorting changes draws"
)

chance = torch.Generator().manual_seed(7)  # the other way: one generator for everybody
share = torch.tensor(SHARES)
mine_first = torch.multinomial(share, 8, True, generator=chance).tolist()
chance.manual_seed(7)
torch.multinomial(share, 3, True, generator=chance)  # three tokens for somebody else
assert torch.multinomial(share, 8, True, generator=chance).tolist() != mine_first

# %% [markdown]
# In the real engine: the same eight requests, once with room for all, once in a pool so small that some are preempted and
# begin again. Tokens do not differ.

# %%
path = drive.byte_tokenizer(drive.tiny_model(Path(scratch.name) / "tiny"))
wish = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=24, ignore_eos=True, seed=11)
prompts = [list(range(20 + i, 40 + i)) for i in range(8)]
answers = []
for num_blocks in (64, 8):
    llm = LLM(model=str(path), num_blocks=num_blocks, max_model_len=64, attention_backend="cpu")
    answers.append([output.outputs[0].token_ids for output in llm.generate(prompts, wish)])
    show.say(f"  {num_blocks} blocks: {llm.stats().num_preemptions} preemptions")
assert answers[0] == answers[1] and llm.stats().num_preemptions > 0
llm.add_request(prompts[0], SamplingParams(), request_id="no seed")
assert llm.core.scheduler.requests["no seed"].sampling_params.seed is not None, "it has one before it is ever scheduled"
llm.abort_requests(["no seed"])
assert not llm.core.has_unfinished_requests(), "P5: a client that goes takes its request with it"
assert len(set(map(tuple, answers[0]))) == 8, "one seed, but eight prompts: eight answers"

# %% [markdown]
# ## Guessing ahead
# The drafter knows no model. It looks for what followed the last time. A token is a byte here.


# %%
def guess(text: str, most: int = 4) -> str:
    return bytes(propose(array("q", list(text.encode())), most)).decode()


assert guess("the cat sat on the mat. Then the cat") == " sat"
assert guess("la la la la ", 6) == "la la ", "a copy that reaches the end goes on with itself"
assert guess("something new") == ""
assert [guess(f"abcdefgh, {'abcdefgh'[:alike]}") for alike in range(6)] == ["", "", "", "d", "ef", "fgh"], "less two"

# %% [markdown]
# Every position is sampled as if the draft before it were true, and samples hold up to the first that differs (Leviathan,
# Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", ICML 2023, arXiv 2211.17192). Let the
# draft be token 1, whose probability is 0.3, for 2,000 seeds. (The second sample, of the position behind it, is made up.)

# %%
plain, _ = sample(LOGITS.repeat(2000, 1), [row(seed) for seed in range(2000)])
held = [verify([token, 0], [1]) for token in plain]
accepted = sum(len(tokens) == 2 for tokens in held) / 2000
instead = Counter(tokens[0] for tokens in held if len(tokens) == 1)
show.say(f"  accepted: {accepted:.2f}; where not, token 0 in {instead[0] / instead.total():.2f} of the cases")
assert abs(accepted - SHARES[1]) < 0.03 and 1 not in instead
assert abs(instead[0] / instead.total() - SHARES[0] / (1 - SHARES[1])) < 0.03 and round(0.4 / 0.7, 2) == 0.57
assert [tokens[0] for tokens in held] == plain, "the tokens of a seed are the same"

# %% [markdown]
# The real engine, step by step; we play the drafter. The request has 9 tokens, one of them sampled. First, what it will say.

# %%
options = {"model": str(path), "num_blocks": 64, "block_size": 4, "max_model_len": 64, "attention_backend": "cpu"}
greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
answer = LLM(**options).generate([prompts[0][:8]], greedy)[0].outputs[0].token_ids
right, wrong = answer[1:4], [(token + 1) % 300 for token in answer[1:4]]
rows = []
for draft in (right, [*right[:2], wrong[2]], wrong):
    core = LLM(speculative_ngram=3, **options).core
    request = Request("A", prompts[0][:8], greedy)
    core.add_request(request)
    core.step()
    assert (request.num_tokens, request.num_computed_tokens) == (9, 8)
    request.spec_token_ids = list(draft)
    plan = core.scheduler.schedule()
    assert plan.num_scheduled_tokens == {"A": 4} and plan.scheduled_spec_decode_tokens == {"A": draft}, "S1"
    planned = request.num_computed_tokens
    hashed = [block.block_hash is not None for block in core.scheduler.kv.tables["A"]]
    assert planned == 12 and hashed == [True, True, False], "K9: block 2 is full, but of guesses"
    output = core.runner.execute_model(plan)
    (news,) = core.scheduler.update_from_output(plan, output)
    rows.append((len(draft), len(news.new_token_ids) - 1, planned, request.num_computed_tokens, request.num_tokens))
    assert [answer[0], *news.new_token_ids] == answer[: 1 + len(news.new_token_ids)], (
        "what came is what would have come"
    )
    while core.has_unfinished_requests():  # and the wrong K and V disturb nobody
        core.step()
    assert request.token_ids[8:].tolist() == answer
show.table("drafts", ("drafted", "right", "computed by the plan", "after it", "tokens"), rows)
assert rows == [(3, 3, 12, 12, 13), (3, 2, 12, 11, 12), (3, 0, 12, 9, 10)]

# %% [markdown]
# Penalties make this model repeat itself. Then its own drafter has something to find, and the same tokens take fewer steps.

# %%
stuck, counts, texts = replace(wish, max_tokens=40, repetition_penalty=0.05), [], []
for ngram in (0, 4):
    llm = LLM(speculative_ngram=ngram, **options)
    output, num_steps = llm.add_request(prompts[0], stuck), 0
    while not output.finished:
        llm.step()
        num_steps += 1
    counts.append((num_steps, output.metrics.num_draft_tokens, output.metrics.num_accepted_tokens))
    texts.append(output.outputs[0].token_ids)
assert texts[0] == texts[1], "temperature 0.9, and the same tokens"
show.table("40 tokens", ("steps", "drafted", "accepted"), counts)
assert counts[0] == (40, 0, 0) and counts[1][0] == 40 - counts[1][2] < 40

# %% [markdown]
# ## Log-probabilities
# They are taken from the raw logits, before temperature and cuts: they say what the model thinks, not what was done with it.

# %%
for temperature in (0.0, 0.5, 2.0):
    (token,), (about,) = sample(LOGITS.clone(), [row(3, temperature=temperature, top_k=2, logprobs=3)])
    assert abs(about.logprob - np.log(SHARES[token])) < 1e-6 and about.rank == token + 1
    assert [t for t, _ in about.top] == [0, 1, 2], "three were asked for, though only two could be drawn"

# %% [markdown]
# ## Half a character
# A token is some bytes, and a character may be several tokens. This tokenizer has one byte a token: "€" is three.
# Decoded one by one they are three times nothing.

# %%
tokenizer = load_tokenizer(path)
euro = tokenizer.encode("€")
assert len(euro) == 3 and "".join(tokenizer.decode([token]) for token in euro) == "\ufffd" * 3
assert tokenizer.decode(euro) == "€"


def shown(text: str, stop: tuple[str, ...] = (), tokens: list[int] | None = None) -> list[str]:
    """What may be shown after each token."""
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(max_tokens=1000, stop=stop))
    seen = []
    for token in tokens or tokenizer.encode(text):
        found = detokenizer.append([token])
        seen.append(detokenizer.text)
        if found:
            break
    return seen


show.table(
    "5 €", ("token", "shown"), [(token, repr(text)) for token, text in zip(tokenizer.encode("5 €!"), shown("5 €!"))]
)
assert shown("5 €!") == ["5", "5 ", "5 ", "5 ", "5 €", "5 €!"]

# %% [markdown]
# The default model's tokenizer does the same to rarer characters.

# %%
if (default_model_path() / "tokenizer.json").is_file():
    real = load_tokenizer(default_model_path())
    thumb = real.encode(" 👍")
    detokenizer, steps = Detokenizer(real, [], SamplingParams(max_tokens=9)), []
    for token in thumb:
        detokenizer.append([token])
        steps.append(detokenizer.text)
    show.table(
        "a thumb", ("token", "alone", "shown"), [(t, repr(real.decode([t])), repr(s)) for t, s in zip(thumb, steps)]
    )
    assert steps == ["", "", " 👍"]

# %% [markdown]
# Some bytes never become a character. A character has at most 4, so after 5 tokens it is clear, and they are let go. At the
# end everything is.

# %%
assert shown("", tokens=[0xFF] * 5 + [0x41]) == ["", "", "", "", "\ufffd" * 5, "\ufffd" * 5 + "A"]
detokenizer = Detokenizer(tokenizer, [], SamplingParams(max_tokens=9))
detokenizer.append(tokenizer.encode("ab")), detokenizer.append([0xE2])
assert detokenizer.text == "ab"
detokenizer.append([], finished=True)
assert detokenizer.text == "ab\ufffd"

# %% [markdown]
# ## Half a stop string
# Text that has been sent cannot be taken back. So what could become a stop string is kept back: the longest end of the
# text with which one of them begins.

# %%
seen = shown("a STONE, no STOP here", stop=("STOP",))
show.table(
    "stop at STOP", ("after", "shown"), [(repr("a STONE, no STOP"[: i + 1]), repr(s)) for i, s in enumerate(seen)]
)
assert seen[1:7] == ["a ", "a ", "a ", "a ", "a STON", "a STONE"], "N shows that it is none"
assert seen[-1] == "a STONE, no " and len(seen) == len("a STONE, no STOP"), "nothing of it is ever shown"
assert max(len("a STONE, no STOP"[: i + 1]) - len(s) for i, s in enumerate(seen[:-1])) == 3, "at most its length less 1"

# %% [markdown]
# A token can hold a stop string, and more around it. And of several the one that begins first in the text counts.

# %%
words = drive.byte_tokenizer(drive.tiny_model(Path(scratch.name) / "words"), ["x\n\ny", " END"])
wordy = load_tokenizer(words)
detokenizer = Detokenizer(wordy, [], SamplingParams(max_tokens=9, stop=("\n\n",)))
assert detokenizer.append([*wordy.encode("ab"), 256]) == "\n\n" and detokenizer.text == "abx"
detokenizer = Detokenizer(wordy, [], SamplingParams(max_tokens=9, stop=("D", " E")))
assert detokenizer.append([*wordy.encode("ab"), 257]) == " E" and detokenizer.text == "ab"

# %% [markdown]
# ## A stream
# The server's `Answer` knows how much of the text a client has, and `news()` is what it does not have. We ask after every
# step, as for a fast client, and after every tenth, as for one that reads slowly.

# %%
llm = LLM(model=str(path), num_blocks=64, max_model_len=64, attention_backend="cpu")
chunks: dict[int, list[str]] = {}
for pace in (1, 10):
    answer = Answer("cmpl-1", "tiny", False, Body(prompt="x", stream=True), None)
    answer.add(llm.add_request(prompts[0], replace(wish, max_tokens=40)))
    chunks[pace], num_steps = [], 0
    while answer.sent:
        llm.step()
        num_steps += 1
        if num_steps % pace == 0 and (news := answer.news())["choices"]:
            chunks[pace].append(news["choices"][0]["text"])
            last = news
    assert num_steps == 40
whole = answer.outputs[0].outputs[0].text
show.say(f"  40 tokens: {len(chunks[1])} chunks for the fast client, {len(chunks[10])} for the slow one")
assert "".join(chunks[1]) == "".join(chunks[10]) == whole, "whatever the chunks, the text is the same"
assert len(chunks[10]) == 4 and 4 < len(chunks[1]) < 40, "a token is no chunk: some show nothing yet"
assert last["choices"][0]["finish_reason"] == "length"

# %% [markdown]
# On the wire, a server-sent event is a line with JSON and an empty line; the last one says `[DONE]`.

# %%
event = b"data: " + msgspec.json.encode({"choices": last["choices"]}) + b"\n\n"
assert msgspec.json.decode(event.removeprefix(b"data: "))["choices"][0]["text"] == chunks[10][-1]
assert event.count(b"\n") == 2, "JSON escapes the line breaks of the text"
show.say(event.decode()[:100])

# %% [markdown]
# ## Check yourself
# The questions of the text.

# %%
assert left(top_k=1, temperature=2.0) == [0], "greedy after all"
assert shown("ab\n", stop=("\n\n",))[-1] == "ab" and shown("ab\nc", stop=("\n\n",))[-1] == "ab\nc"
first = [uniform(5, position) for position in range(3)]
assert [uniform(5, position) for position in (2, 0, 1)] == [first[2], first[0], first[1]]
scratch.cleanup()
