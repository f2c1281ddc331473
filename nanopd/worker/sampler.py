"""From logits to tokens, for the whole batch at once.

Order: log-probabilities are taken from the raw logits; then grammars, `min_tokens`, penalties, temperature, min-p, top-k,
top-p, and one draw. Greedy rows take the best token after the penalties.

A draw turns one uniform number u into a token by inverting the cumulative distribution. u is a hash of the request's
seed and the position in its output: no generator has a state, so neither batch mates nor a preemption can change what a
seed gives. Lesson 10.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanopd.config import SamplingParams
from nanopd.core.output import TokenLogprobs

GREEDY_BELOW = 1e-5  # temperatures under this are greedy: dividing by them would overflow


@dataclass(slots=True)
class SamplingRow:
    """What the sampler has to know about one request."""

    params: SamplingParams
    token_ids: np.ndarray  # int64 [prompt + output so far]
    num_prompt_tokens: int
    stop_token_ids: frozenset[int]
    grammar_bitmask: bytes | None = None  # a bit for each token, from the lowest: what its grammar allows now (S12)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but the two arguments."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> tuple[list[int], list[TokenLogprobs | None]]:
    """One token for each row.

    Args:
        logits: float32 [n, vocab_size]; may be changed.
        rows: the n requests. `params.seed` must be set where the temperature is not 0.
    """
    want_logprobs = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    raw_logprobs = logits[want_logprobs].log_softmax(dim=-1) if want_logprobs else logits
    _apply_grammars(logits, rows)
    _forbid_early_stop(logits, rows)
    _apply_penalties(logits, rows)

    tokens = logits.argmax(dim=-1)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature >= GREEDY_BELOW]
    # Rows that cut the distribution need a sort; the others must not get one just because a batch mate does, or the
    # same seed would give another token.
    cut = {i for i in drawn if rows[i].params.top_k > 0 or rows[i].params.top_p < 1 or rows[i].params.min_p > 0}
    for truncate in (True, False):
        if group := [i for i in drawn if (i in cut) == truncate]:
            tokens[group] = _draw(logits[group], [rows[i] for i in group], truncate)
    token_ids: list[int] = tokens.tolist()

    logprobs: list[TokenLogprobs | None] = [None] * len(rows)
    for i, row_logprobs in zip(want_logprobs, raw_logprobs):
        logprobs[i] = _token_logprobs(row_logprobs, token_ids[i], rows[i].params.logprobs or 0)
    return token_ids, logprobs


def verify(sampled: list[int], draft: list[int]) -> list[int]:
    """Of the tokens sampled at the positions of a draft and the one after it: those that would have been sampled one by one.

    Each was sampled as if the draft before it were true, so they hold up to and including the first that differs. This is
    the rejection sampling of Leviathan et al. (arXiv 2211.17192), algorithm 1, for a drafter that is certain of its token x:
    accept x with the model's probability p(x), else draw from p without x. One draw from p does both. It uses the number u
    of its own position, so even the tokens of a seed are the same as without drafts.

    Args:
        sampled: one token more than `draft` has.
    """
    agreed = next((i for i, token_id in enumerate(draft) if sampled[i] != token_id), len(draft))
    return sampled[: agreed + 1]


def _column(rows: Sequence[SamplingRow], get: Callable[[SamplingParams], float], like: Tensor) -> Tensor:
    """One parameter of all rows, [n, 1]."""
    return torch.tensor([get(row.params) for row in rows], dtype=like.dtype, device=like.device).unsqueeze(1)


def _draw(logits: Tensor, rows: Sequence[SamplingRow], truncate: bool) -> Tensor:
    """Tokens [n] drawn from softmax(logits / temperature), cut by min-p, top-k and top-p if `truncate`."""
    logits = logits / _column(rows, lambda p: p.temperature, logits)
    order = None
    if truncate:
        logits, order = logits.sort(dim=-1, descending=True, stable=True)
    probs = logits.softmax(dim=-1)
    if truncate:
        vocab_size = probs.shape[-1]
        top_k = _column(rows, lambda p: p.top_k if p.top_k > 0 else vocab_size, probs)
        min_p = _column(rows, lambda p: p.min_p, probs)
        probs *= (torch.arange(vocab_size, device=probs.device) < top_k) & (probs >= min_p * probs[:, :1])
        probs /= probs.sum(dim=-1, keepdim=True)
        probs *= probs.cumsum(dim=-1) - probs < _column(rows, lambda p: p.top_p, probs)  # what stands before it
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    u = [uniform(row.params.seed or 0, row.num_output_tokens) for row in rows]
    target = torch.tensor(u, dtype=torch.float64, device=probs.device).unsqueeze(1) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True).clamp(max=probs.shape[-1] - 1)
    return (index if order is None else order.gather(1, index)).squeeze(1)


def _apply_grammars(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """No token that a request's grammar does not allow."""
    masks = {i: row.grammar_bitmask for i, row in enumerate(rows) if row.grammar_bitmask is not None}
    if masks:
        bits = np.stack([np.frombuffer(mask, np.uint8) for mask in masks.values()])
        allowed = np.unpackbits(bits, axis=1, count=logits.shape[-1], bitorder="little")
        forbidden = torch.from_numpy(allowed == 0).to(logits.device)
        logits[list(masks)] = logits[list(masks)].masked_fill(forbidden, -torch.inf)


def _forbid_early_stop(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """No token that would end a request before its `min_tokens`, unless its grammar allows nothing else (S12)."""
    for i, row in enumerate(rows):
        if row.num_output_tokens < row.params.min_tokens and row.stop_token_ids:
            others = logits[i].clone()
            others[[t for t in row.stop_token_ids if t < logits.shape[-1]]] = -torch.inf
            if row.grammar_bitmask is None or others.isfinite().any():
                logits[i] = others


def _apply_penalties(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Repetition (prompt and output: divides what is positive, multiplies what is negative, as in CTRL, arXiv
    1909.05858), frequency and presence (output only: subtracts, as in OpenAI's API)."""
    params = [row.params for row in rows]
    penalties = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params]
    index = [i for i, penalty in enumerate(penalties) if penalty != (1, 0, 0)]
    if not index:
        return
    repetition, frequency, presence = logits.new_tensor([penalties[i] for i in index]).T.unsqueeze(2)  # [n, 1] each
    vocab_size, chosen = logits.shape[-1], [rows[i] for i in index]
    parts = [(row.token_ids, row.token_ids[row.num_prompt_tokens :]) for row in chosen]
    counts = np.array([[np.bincount(ids, minlength=vocab_size) for ids in part] for part in parts], dtype=np.float32)
    in_any, in_output = torch.from_numpy(counts).to(logits.device).unbind(1)  # [n, vocab_size] each
    penalised = logits[index]
    repetition = torch.where(in_any > 0, repetition, 1.0)
    penalised = torch.where(penalised > 0, penalised / repetition, penalised * repetition)
    logits[index] = penalised - in_output * frequency - (in_output > 0) * presence


def _token_logprobs(logprobs: Tensor, token_id: int, k: int) -> TokenLogprobs:
    """From one row of log-probabilities [vocab_size]."""
    chosen = logprobs[token_id]
    top = logprobs.topk(min(k, len(logprobs)))
    pairs = list(zip(top.indices.tolist(), top.values.tolist()))
    return TokenLogprobs(float(chosen), int((logprobs > chosen).sum()) + 1, pairs)
