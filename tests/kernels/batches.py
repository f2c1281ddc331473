"""Random batches for the kernel tests, poisoned wherever a kernel must not look, and attention in float64 to compare with.

Nothing here calls the package: the reference goes token by token, head by head, and finds each key by rule K1.
"""

import random
from dataclasses import dataclass

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYOUTS = ("kv_first", "blocks_first", "cross_layer")
# float32: rounding of a few hundred terms. The others: the output's own last bit (the interpreter cuts bfloat16 off
# instead of rounding), and on a GPU the softmax weights are rounded before they meet V.
TOLERANCE = {torch.float32: (2e-5, 2e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1.2e-2, 1e-2)}  # rtol, atol
GARBAGE = torch.tensor([-1, -(2**31), 2**31 - 1, 1 << 30])  # entries that crash if they are followed


def fresh_seed() -> int:
    """Another one each run; pytest prints it when the test fails."""
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    return seed


def empty_cache(layout: str, num_blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype):
    """(K, V) of one layer, all NaN, cut from memory in one of the layouts of `worker/kv_memory.py`."""
    size, layers = (block_size, heads, dim), 3
    if layout == "kv_first":
        k, v = torch.full((2, num_blocks, *size), torch.nan, dtype=dtype, device=DEVICE)
    elif layout == "blocks_first":
        k, v = torch.full((num_blocks, 2, *size), torch.nan, dtype=dtype, device=DEVICE).unbind(1)
    else:
        k, v = torch.full((num_blocks, layers, 2, *size), torch.nan, dtype=dtype, device=DEVICE)[:, 1].unbind(1)
    return k, v


@dataclass
class Batch:
    """The arguments of paged_attention, and what they should give."""

    query: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    scale: float
    max_query_len: int

    def args(self):
        return (
            *(self.query, self.k_cache, self.v_cache, self.block_table, self.query_start_loc, self.seq_lens),
            self.scale,
        )

    def poisoned_out(self):
        return torch.full_like(self.query, torch.nan)

    def expected(self, window=None, causal=True):
        """(out [T, Hq, D], lse [T, Hq]) in float64; zeros and -inf for a token that sees nothing."""
        tokens, heads, dim = self.query.shape
        out = torch.zeros(tokens, heads, dim, dtype=torch.float64)
        lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float64)
        query, keys, values, table = (x.cpu() for x in (self.query, self.k_cache, self.v_cache, self.block_table))
        starts, block_size, group = self.query_start_loc.tolist(), keys.shape[1], heads // keys.shape[2]
        for r, seq_len in enumerate(self.seq_lens.tolist()):
            for t in range(starts[r], starts[r + 1]):
                position = seq_len - (starts[r + 1] - t)
                last = position if causal else seq_len - 1
                seen = range(0 if window is None else max(0, position - window + 1), last + 1)
                if not seen:
                    continue
                at = [table[r, j // block_size].item() * block_size + j % block_size for j in seen]  # slots
                for h in range(heads):
                    k = torch.stack([keys[s // block_size, s % block_size, h // group] for s in at]).double()
                    v = torch.stack([values[s // block_size, s % block_size, h // group] for s in at]).double()
                    scores = k @ query[t, h].double() * self.scale
                    out[t, h] = scores.softmax(0) @ v
                    lse[t, h] = scores.logsumexp(0)
        return out, lse


def make_batch(
    requests, *, dtype=torch.float32, dim=64, group=2, kv_heads=2, block_size=16, layout="kv_first", seed=None
):
    """`requests` is [(query_len, seq_len), …]. Only the slots that a request's tokens occupy hold numbers."""
    gen = torch.Generator().manual_seed(fresh_seed() if seed is None else seed)
    used = [-(-seq_len // block_size) for _, seq_len in requests]
    num_blocks, width = sum(used) + 5, max(used) + 3
    k_cache, v_cache = empty_cache(layout, num_blocks, block_size, kv_heads, dim, dtype)
    order = torch.randperm(num_blocks, generator=gen).int()
    # The table is a slice of a wider one, so that its stride is not its width.
    table = GARBAGE[torch.randint(4, (len(requests), width + 2), generator=gen)].int()
    for r, (_, seq_len) in enumerate(requests):
        table[r, : used[r]], order = order[: used[r]], order[used[r] :]
        for j in range(seq_len):
            where = table[r, j // block_size].item(), j % block_size
            k_cache[where], v_cache[where] = torch.randn(2, kv_heads, dim, generator=gen).to(DEVICE, dtype)
    starts = torch.tensor([0, *(q for q, _ in requests)]).cumsum(0).int()
    fused = torch.randn(int(starts[-1]), kv_heads * (group + 2), dim, generator=gen).to(
        DEVICE, dtype
    )  # Q, K, V together
    return Batch(
        fused[:, : kv_heads * group], k_cache, v_cache, table.to(DEVICE)[:, :width], starts.to(DEVICE),
        torch.tensor([s for _, s in requests], dtype=torch.int32, device=DEVICE), dim**-0.5, max(q for q, _ in requests),
    )  # fmt: skip


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, looser: float = 1) -> None:
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(got.cpu().double(), want, rtol=looser * rtol, atol=looser * atol)
