# %% [markdown]
# # 01 Why a KV cache
# First what is computed twice without a cache, counted in the real engine. Then what a step costs: FLOPs and bytes, counted
# on paper and inside the real decoder. At the end this machine is measured, and its steps predicted.

# %%
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from torch.nn import functional

from nanopd.config import EngineConfig, SamplingParams
from nanopd.engine.core import EngineCore
from nanopd.models.config import ModelConfig
from nanopd.models.decoder import Decoder
from nanopd.models.default import default_model_path
from nanopd.models.loader import load_config
from nanopd.request import Request
from nanopd.worker.kv_memory import bytes_per_block
from nanopd_lessons import drive, show

scratch = tempfile.TemporaryDirectory()
tiny = drive.tiny_model(Path(scratch.name) / "tiny")
there = (default_model_path() / "model.safetensors").is_file()


def engine(path: Path, **options: object) -> EngineCore:
    return EngineCore(
        EngineConfig(model=str(path), num_blocks=256, max_model_len=512, attention_backend="cpu", **options)
    )


def request(name: str, prompt: Sequence[int], max_tokens: int) -> Request:
    return Request(name, prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=0))


# %% [markdown]
# ## With and without
# The same 16 tokens, twice. With: one request, as always. Without: for each token a new request that holds everything so
# far, in an engine that may not find old blocks again. Its prompt is computed from the first token on, every time.

# %%
prompt = list(range(20, 52))
core = engine(tiny, dtype="float32", enable_prefix_caching=False)
core.add_request(request("with", prompt, 16))
with_cache: list[int] = []
while core.has_unfinished_requests():
    with_cache += [token for news in core.step() for token in news.new_token_ids]
num_with = core.scheduler.stats().num_scheduled_tokens

without_cache: list[int] = []
while len(without_cache) < 16:
    core.add_request(request("without", prompt + without_cache, 1))
    without_cache += core.step()[0].new_token_ids
num_without = core.scheduler.stats().num_scheduled_tokens - num_with

assert without_cache == with_cache, "nothing is approximated"
assert (num_with, num_without) == (47, 632)

# %% [markdown]
# As formulas, for a prompt of n tokens and m output tokens. They agree with what the engine has counted; so we can use them
# for the question of the text.


# %%
def tokens_with(n: int, m: int) -> int:
    return n + m - 1


def tokens_without(n: int, m: int) -> int:
    return sum(n + i for i in range(m))


assert (tokens_with(32, 16), tokens_without(32, 16)) == (num_with, num_without)
rows = [(n, m, tokens_with(n, m), tokens_without(n, m)) for n, m in ((32, 16), (512, 128), (512, 256), (512, 1024))]
show.table("tokens computed", ("prompt", "output", "with cache", "without"), rows)
assert rows[1][2:] == (639, 73_664) and rows[3][2:] == (1535, 1_048_064)
assert tokens_without(512, 128) // tokens_with(512, 128) == 115
assert tokens_without(0, 2000) > 3.99 * tokens_without(0, 1000), "twice the output, four times the work"

# %% [markdown]
# ## What is kept
# For each token, in each layer, a key and a value for each KV head. These are SmolLM2-135M's sizes; if the model is in the
# cache we compare.

# %%
sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
sizes |= {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192}
smol = ModelConfig.from_hf(
    sizes | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "tie_word_embeddings": True}
)
names = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size", "intermediate_size", "vocab_size")
if there:
    real = load_config(default_model_path())
    assert [getattr(smol, name) for name in names] == [getattr(real, name) for name in names]


def kv_bytes_per_token(model: ModelConfig, itemsize: int) -> int:
    return model.num_layers * 2 * model.num_kv_heads * model.head_dim * itemsize


assert kv_bytes_per_token(smol, 2) == 23_040
assert bytes_per_block(smol, 16, torch.bfloat16) == 16 * 23_040, "what the engine allocates for a block"
assert kv_bytes_per_token(smol, 2) * 3 == smol.num_layers * 2 * smol.num_heads * smol.head_dim * 2 == 69_120, (
    "with as many KV heads as query heads it would be three times as much"
)
assert round(kv_bytes_per_token(smol, 2) * 8192 / 2**20) == 180, "MiB, for the longest sequence"

# %% [markdown]
# ## What a step costs: FLOPs
# Every weight of a matrix is multiplied and added once a token: 2 FLOPs. Attention adds 4 FLOPs for each pair of a query and
# a position it sees, for each number of a query (a product for the score, one for the sum).


# %%
@dataclass(frozen=True)
class Work:
    """One request in one step: `num_new` tokens on top of `num_computed`; with `sampled` the last one needs logits."""

    num_computed: int
    num_new: int
    sampled: bool = True


Step = Sequence[Work]


def layer_weights(model: ModelConfig) -> int:
    """Weights of all matrices of all layers: QKV, output, gate and up, down."""
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return model.num_layers * model.hidden_size * (q + 2 * kv + q + 3 * model.intermediate_size)


def head_weights(model: ModelConfig) -> int:
    return model.vocab_size * model.hidden_size


def pairs(work: Work) -> int:
    """Queries times the positions that each of them sees: itself and all before it."""
    return sum(work.num_computed + i + 1 for i in range(work.num_new))


def flops(model: ModelConfig, step: Step) -> int:
    tokens, sampled = sum(w.num_new for w in step), sum(w.sampled for w in step)
    attention = 4 * model.num_layers * model.num_heads * model.head_dim * sum(map(pairs, step))
    return 2 * layer_weights(model) * tokens + 2 * head_weights(model) * sampled + attention


assert layer_weights(smol) == 106_168_320 and head_weights(smol) == 28_311_552
with torch.device("meta"):
    decoder = Decoder(smol, 16)
matrices = sum(p.numel() for p in decoder.parameters() if p.dim() == 2)
norms = sum(p.numel() for p in decoder.parameters() if p.dim() == 1)
assert matrices == layer_weights(smol) + head_weights(smol), "the head is the embedding once more, and is counted once"
assert matrices + norms == 134_515_008, "that is where the 135M in its name come from"
assert round(2 * 134_515_008 / 2**20) == 257, "MiB"

# %% [markdown]
# Is that so? We look over the real engine's shoulder: at what goes into each matrix product and each attention, in a
# prefill, a decode, and steps that hold both. (This backend computes the whole square of a prefill's attention and throws
# the half above the diagonal away; on paper we count the half that is needed.)


# %%
def counted(core: EngineCore) -> tuple[Step, int, int]:
    """One step: its work, and the FLOPs of its matrix products and of its attention, from the shapes that were seen."""
    seen = {"matrices": 0, "attention": 0}
    before = {i: (r.num_computed_tokens, r.num_tokens) for i, r in core.scheduler.requests.items()}
    plan = core.scheduler.schedule()
    attend = functional.scaled_dot_product_attention

    def matrix(module: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        if isinstance(module, torch.nn.Linear):
            seen["matrices"] += 2 * inputs[0].numel() * module.out_features

    def attention(query: torch.Tensor, key: torch.Tensor, *rest: torch.Tensor, **options: object) -> torch.Tensor:
        seen["attention"] += 4 * query.numel() * key.shape[2]
        return attend(query, key, *rest, **options)

    hook = torch.nn.modules.module.register_module_forward_hook(matrix)
    with patch.object(functional, "scaled_dot_product_attention", attention):
        core.scheduler.update_from_output(plan, core.runner.execute_model(plan))
    hook.remove()
    work = [Work(before[i][0], n, sum((before[i][0], n)) == before[i][1]) for i, n in plan.num_scheduled_tokens.items()]
    return work, seen["matrices"], seen["attention"]


core = engine(default_model_path() if there else tiny, enable_prefix_caching=False, max_num_batched_tokens=32)
core.pack()  # else it would do so in the middle of what we measure
model = core.model.config
per_pair = 4 * model.num_layers * model.num_heads * model.head_dim
rows = []
core.add_request(request("a", range(100, 116), 10))
for what in ("prefill", "decode", "decode + prefill", "decode + rest of it"):
    if what == "decode + prefill":
        core.add_request(request("b", range(200, 238), 10))
    step, in_matrices, in_attention = counted(core)
    attention = per_pair * sum(map(pairs, step))
    rows.append((what, sum(w.num_new for w in step), flops(model, step) / 1e6, (in_matrices + in_attention) / 1e6))
    assert in_matrices == flops(model, step) - attention, "every matrix product is in the formula, and no other"
    square = per_pair * sum(w.num_new * (w.num_computed + w.num_new) for w in step)
    assert in_attention == square
    assert what != "decode" or square == attention, "one query sees everything: there is no half to save"
show.table("MFLOP", ("step", "tokens", "on paper", "counted"), rows)
assert [row[1] for row in rows] == [16, 1, 32, 8], (
    "1 + 31 tokens are the budget of 32; the other 7 follow, beside a decode"
)

# %% [markdown]
# ## What a step costs: bytes
# The matrices are read once, however many tokens there are; the head only if somebody needs logits. K and V of the context
# are read, those of new tokens written. What passes between the layers is small, and left out.


# %%
def bytes_moved(model: ModelConfig, step: Step, itemsize: int) -> int:
    weights = layer_weights(model) + (head_weights(model) if any(w.sampled for w in step) else 0)
    tokens = sum(w.num_computed + w.num_new for w in step)
    return weights * itemsize + tokens * kv_bytes_per_token(model, itemsize)


def intensity(step: Step, itemsize: int = 2) -> float:
    return flops(smol, step) / bytes_moved(smol, step, itemsize)


def decode(batch: int, context: int) -> Step:
    return [Work(context, 1)] * batch


weight_bytes = 2 * (layer_weights(smol) + head_weights(smol))
assert weight_bytes == 268_959_744
assert 0.99 < intensity(decode(1, 0)) < 1.01, "2 bytes a weight, 2 FLOPs a weight"

# %% [markdown]
# Each request more in a batch brings FLOPs, and hardly any bytes. Each token of context brings bytes.

# %%
rows = []
for batch in (1, 8, 64):
    rows.append((f"decode, batch {batch}", *(intensity(decode(batch, context)) for context in (0, 100, 1000, 8000))))
show.table("FLOPs a byte, by context", ("step", "0", "100", "1,000", "8,000"), rows)
prefill = [Work(0, 512)]
show.say(f"  prefill of 512 tokens: {intensity(prefill):.0f} FLOPs a byte")
for context in (0, 100, 1000, 8000):
    by_batch = [intensity(decode(batch, context)) for batch in (1, 8, 64, 512)]
    assert by_batch == sorted(by_batch), "a larger batch is always denser"
for batch in (8, 64):
    by_context = [intensity(decode(batch, context)) for context in (0, 100, 1000, 8000)]
    assert by_context == sorted(by_context, reverse=True), "a longer context is not"
assert round(intensity(prefill)) == 420
assert [round(intensity(decode(b, 0)), 1) for b in (1, 8, 64)] == [1.0, 8.0, 63.7]
assert [round(intensity(decode(b, 100)), 1) for b in (1, 8, 64)] == [1.0, 7.7, 42.3]

# %% [markdown]
# ## The roofline
# A machine has a speed for FLOPs and a speed for bytes. A step takes at least as long as the slower of the two. Where both
# take the same time is the ridge: FLOP/s divided by bytes/s. A laptop's numbers here are assumed; the H100's are its
# maker's.


# %%
@dataclass(frozen=True)
class Machine:
    name: str
    flops: float  # a second
    bandwidth: float  # bytes a second

    @property
    def ridge(self) -> float:
        return self.flops / self.bandwidth

    def seconds(self, model: ModelConfig, step: Step, itemsize: int = 2) -> float:
        return max(flops(model, step) / self.flops, bytes_moved(model, step, itemsize) / self.bandwidth)


laptop, h100 = Machine("laptop", 200e9, 20e9), Machine("H100", 989e12, 3350e9)
assert laptop.ridge == 10 and round(h100.ridge) == 295
steps = {"prefill 512": prefill} | {f"decode, batch {b}, context 100": decode(b, 100) for b in (1, 8, 64)}
for machine in (laptop, h100):
    show.table(
        f"{machine.name}: ridge at {machine.ridge:.0f} FLOPs a byte",
        ("step", "FLOPs a byte", "bound by", "ms", "ms a token"),
        [
            (
                name,
                intensity(step),
                "compute" if intensity(step) > machine.ridge else "memory",
                1e3 * machine.seconds(smol, step),
                1e3 * machine.seconds(smol, step) / sum(w.num_new for w in step),
            )
            for name, step in steps.items()
        ],
    )
sides = {m.name: [intensity(step) > m.ridge for step in steps.values()] for m in (laptop, h100)}
assert sides == {"laptop": [True, False, False, True], "H100": [True, False, False, False]}

# %% [markdown]
# So on both machines 8 requests at once cost hardly more time than one; and on the H100 64 do not cost twice as much.

# %%
ratio = {b: h100.seconds(smol, decode(b, 100)) / h100.seconds(smol, decode(1, 100)) for b in (8, 64)}
show.say(f"  H100: batch 8 takes {ratio[8]:.2f} times as long as batch 1, batch 64 {ratio[64]:.2f} times")
assert round(ratio[8], 2) == 1.06 and round(ratio[64], 2) == 1.54
assert round(laptop.seconds(smol, decode(8, 100)) / laptop.seconds(smol, decode(1, 100)), 2) == 1.06

# %% [markdown]
# Why not a batch of thousands? The weights are shared by all, K and V by nobody. From some number of tokens on, counted
# over the whole batch, the cache is more to read than the model.

# %%
break_even = weight_bytes / kv_bytes_per_token(smol, 2)
assert round(break_even) == 11_674
assert round(break_even / 64) == 182, "64 requests of this length read as much K and V as weights"
limit = {c: intensity(decode(10**6, c)) for c in (100, 1000)}
show.say(f"  the densest decode there can be: {limit[100]:.0f} FLOPs a byte at context 100, {limit[1000]:.1f} at 1,000")
assert limit[100] < h100.ridge and round(limit[1000], 1) == 14.7, (
    "on the H100 no batch makes such a decode compute-bound"
)

# %% [markdown]
# ## This machine
# Two numbers first: reading a large tensor (reading alone: a copy would count each byte twice), and a large matrix product.
# Then real steps, and what the formula says about them. Times are shown and not asserted: other programs run here too.


# %%
def best_seconds(run, times: int = 3) -> float:
    found = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


dtype = core.dtype
big, square = torch.ones(2**25), torch.ones(1024, 1024, dtype=dtype)
here = Machine(
    "this machine",
    2 * 1024**3 / best_seconds(lambda: functional.linear(square, square)),
    big.nbytes / best_seconds(lambda: big.sum()),
)
show.say(f"  {here.bandwidth / 1e9:.1f} GB/s, {here.flops / 1e9:.0f} GFLOP/s in {dtype}: ridge at {here.ridge:.1f}")

core.abort_requests(list(core.scheduler.requests))
rows = []


def measure(what: str, work: Step, times: int) -> None:
    measured = best_seconds(core.step, times)
    predicted = here.seconds(model, work, dtype.itemsize)
    rows.append((what, 1e3 * predicted, 1e3 * measured, predicted / measured))


core.add_request(request("r0", range(100, 132), 100))
measure("prefill 32", [Work(0, 32)], 1)
for batch in (1, 8):
    for i in range(len(core.scheduler.requests), batch):
        core.add_request(request(f"r{i}", range(100 + 9 * i, 104 + 9 * i), 100))
    core.step()
    context = sum(r.num_tokens for r in core.scheduler.requests.values()) // batch
    assert len(core.scheduler.running) == batch
    measure(f"decode, batch {batch}", decode(batch, context), 2)
show.table("predicted and measured", ("step", "predicted ms", "measured ms", "share of the roofline"), rows)
core.abort_requests(list(core.scheduler.requests))

# %% [markdown]
# A share that falls with the batch needs a reason. Here are matrix products alone: one matrix of each layer, with 1, 2 and
# 8 rows. First as `functional.linear` computes them from a float32 matrix: the bytes are the same, and if the times are not,
# it is the matrix library that is not ready for few rows. Then as the engine does (`pack` in decoder.py): in float32 on an
# x86 CPU it keeps these matrices as float16, in tiles.

# %%
projections = [layer.mlp.gate_up_proj for layer in core.model.layers]
weights = [torch.ones(2 * model.intermediate_size, model.hidden_size, dtype=dtype) for _ in projections]
read, rows = sum(weight.nbytes for weight in weights), []
for num_rows in (1, 2, 8):
    x = torch.ones(num_rows, model.hidden_size, dtype=dtype)
    took = best_seconds(lambda x=x: [functional.linear(x, weight) for weight in weights])
    engine = best_seconds(lambda x=x: [projection(x) for projection in projections])
    rows.append((num_rows, 1e3 * took, read / took / 1e9, 1e3 * engine))
show.table("products alone", ("rows", "linear: ms", "GB/s", "the engine's: ms"), rows)
assert read == model.num_layers * 2 * model.intermediate_size * model.hidden_size * dtype.itemsize
packed = [projection.packed is not None for projection in projections]
show.say(f"  {sum(packed)} of {len(packed)} of these matrices are packed")

# %% [markdown]
# The formula is a bound, not a forecast. What it leaves out here: products with few rows that do not run at full speed,
# copying K and V together for attention, and the Python between the products. How large the gap is says how much there is
# to gain; lessons 07 to 09 go after it.
#
# ## Check yourself
# The three questions of the text.

# %%
assert tokens_without(1000, 1) == tokens_with(1000, 1) == 1000, "one output token: the cache saves nothing"
half = kv_bytes_per_token(smol, 1)
assert half * 2 == kv_bytes_per_token(smol, 2)
saved = {c: 1 - (weight_bytes + c * 64 * half) / bytes_moved(smol, decode(64, c - 1), 2) for c in (20, 2000)}
show.say(
    f"  K and V in one byte a number, batch 64: {saved[20]:.0%} of the bytes saved at 20 tokens, {saved[2000]:.0%} at 2,000"
)
assert f"{saved[20]:.0%}" == "5%" and f"{saved[2000]:.0%}" == "46%"
assert h100.seconds(smol, decode(1, 7999)) < 2 * h100.seconds(smol, decode(1, 0)), (
    "8,000 tokens are less than the weights"
)
assert h100.seconds(smol, decode(32, 7999)) > 20 * h100.seconds(smol, decode(32, 0))
scratch.cleanup()
