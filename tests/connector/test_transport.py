"""Which runs of memory a transfer writes: checked byte by byte against copying the blocks one by one."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanopd.config import LAYOUTS, KVTransferConfig
from nanopd.connector.protocol import Layout
from nanopd.connector.transport import MooncakeTransport, Piece, TransferError, _batches, pieces_of
from nanopd.worker.kv_memory import KVCache

LAYERS, BLOCK_SIZE, HEADS, DIM = 2, 2, 1, 3
BASE, TO_BASE = 10_000, 50_000  # where the two memories are said to start


class Shape:
    """What KVCache.allocate wants to know of a model."""

    num_layers, num_kv_heads, head_dim = LAYERS, HEADS, DIM


def cache(layout: str, num_blocks: int) -> KVCache:
    return KVCache.allocate(Shape, num_blocks, BLOCK_SIZE, layout, torch.uint8, "cpu")  # type: ignore[arg-type]


def described(layout: str, num_blocks: int) -> Layout:
    """As `layout_of` says it, worked out here by hand."""
    slot = BLOCK_SIZE * HEADS * DIM
    runs, run_bytes = {
        "kv_first": (LAYERS * 2, slot),
        "blocks_first": (LAYERS, 2 * slot),
        "cross_layer": (1, LAYERS * 2 * slot),
    }[layout]
    return Layout("m", "uint8", layout, BLOCK_SIZE, runs, run_bytes, num_blocks)


@st.composite
def pairs(draw: Any) -> tuple[int, int, list[int], list[int]]:
    """Pool sizes, and which block goes where: with runs, both ways, as real tables have them."""
    here, there = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    count = draw(st.integers(0, min(here, there)))

    def ids(size: int) -> list[int]:
        shuffled = draw(st.permutations(range(size))) if draw(st.booleans()) else range(size)
        if draw(st.booleans()):
            start = draw(st.integers(0, size - count))
            shuffled = range(start, start + count)
        taken = list(shuffled)[:count]
        return taken[::-1] if draw(st.booleans()) else taken

    return here, there, ids(here), ids(there)


def copy(pieces: Iterable[Piece], source: bytes, target: bytearray) -> list[int]:
    """What a transport does; returns how often each byte was written."""
    written = [0] * len(target)
    for piece in pieces:
        start, to = piece.source - BASE, piece.target - TO_BASE
        assert piece.num_bytes > 0
        assert 0 <= start <= start + piece.num_bytes <= len(source), "reads beyond the memory"
        assert 0 <= to <= to + piece.num_bytes <= len(target), "writes beyond the memory"
        target[to : to + piece.num_bytes] = source[start : start + piece.num_bytes]
        for i in range(to, to + piece.num_bytes):
            written[i] += 1
    return written


@pytest.mark.parametrize("layout", LAYOUTS)
@given(case=pairs(), most=st.integers(1, 9), most_bytes=st.integers(1, 100), batched=st.booleans())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_every_byte_arrives_where_it_should(layout: str, case: Any, most: int, most_bytes: int, batched: bool):
    num_here, num_there, ids, to_ids = case
    here, there, want = cache(layout, num_here), cache(layout, num_there), cache(layout, num_there)
    torch.manual_seed(0)
    here.memory.copy_(torch.randint(1, 255, here.memory.shape, dtype=torch.uint8))
    for layer in range(LAYERS):
        for kind in range(2):  # keys, values
            for a, b in zip(ids, to_ids):
                want.layers[layer][kind][b] = here.layers[layer][kind][a]
    pieces = pieces_of(described(layout, num_here), BASE, ids, described(layout, num_there), TO_BASE, to_ids)
    source, target = here.memory.numpy().tobytes(), bytearray(there.memory.nbytes)
    sent = [piece for batch in _batches(pieces, most, most_bytes) for piece in batch] if batched else pieces
    written = copy(sent, source, target)
    assert bytes(target) == want.memory.numpy().tobytes()
    assert max(written, default=0) <= 1 and sum(written) == sum(piece.num_bytes for piece in pieces)


@pytest.mark.parametrize("layout", LAYOUTS)
@given(case=pairs())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_merging_is_maximal(layout: str, case: Any):
    """In each run of the layout there are as few pieces as there are runs of neighbours, in whatever order they stand."""
    num_here, num_there, ids, to_ids = case
    there = described(layout, num_there)
    pieces = pieces_of(described(layout, num_here), BASE, ids, there, TO_BASE, to_ids)
    pairs_ = set(zip(ids, to_ids))
    heads = sum((a - 1, b - 1) not in pairs_ for a, b in pairs_)
    assert len(pieces) == heads * there.num_runs


@given(
    sizes=st.lists(st.one_of(st.integers(1, 8), st.integers(1, 200)), max_size=60),
    most=st.integers(1, 9),
    most_bytes=st.integers(1, 64),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_batches_are_bounded_and_complete(sizes: list[int], most: int, most_bytes: int):
    pieces, at = [], 0
    for size in sizes:
        pieces.append(Piece(1000 + at, 5000 + at, size))
        at += size + 3
    batches = list(_batches(pieces, most, most_bytes))
    for batch in batches:
        assert 1 <= len(batch) <= most and 1 <= sum(piece.num_bytes for piece in batch) <= most_bytes
    for batch, following in itertools.pairwise(batches):  # none is ended too early
        assert len(batch) == most or sum(p.num_bytes for p in batch) + following[0].num_bytes > most_bytes
    covered = [(p.source + i, p.target + i) for batch in batches for p in batch for i in range(p.num_bytes)]
    assert covered == [(p.source + i, p.target + i) for p in pieces for i in range(p.num_bytes)]


class Engine:
    """Mooncake, made to fail: answers what it is told to, notes what it was asked."""

    def __init__(self, answers: list[int]) -> None:
        self.answers, self.calls = answers, []

    def batch_transfer_sync_write(self, session: str, *columns: list[int]) -> int:
        self.calls.append((session, *columns))
        return self.answers.pop(0) if self.answers else 0


def transport(answers: list[int], monkeypatch: pytest.MonkeyPatch) -> MooncakeTransport:
    made = MooncakeTransport.__new__(MooncakeTransport)
    made._engine = Engine(answers)
    monkeypatch.setattr(MooncakeTransport, "PAUSES", (0.0, 0.0, 0.0))
    return made


PIECES = [Piece(1, 2, 3), Piece(10, 20, 30)]


def test_a_batch_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    made = transport([-1, -1], monkeypatch)
    made.write("s", PIECES, lambda: False)
    assert made._engine.calls == [("s", [1, 10], [2, 20], [3, 30])] * 3


def test_a_batch_that_fails_for_good(monkeypatch: pytest.MonkeyPatch):
    made = transport([-1] * 10, monkeypatch)
    with pytest.raises(TransferError, match="could not write to s"):
        made.write("s", PIECES, lambda: False)
    assert len(made._engine.calls) == 3


def test_no_batch_after_a_cancel(monkeypatch: pytest.MonkeyPatch):
    made = transport([], monkeypatch)
    monkeypatch.setattr(MooncakeTransport, "MAX_PIECES", 1)
    answers = iter([False, True])
    with pytest.raises(TransferError, match="cancelled"):
        made.write("s", PIECES, lambda: next(answers))
    assert len(made._engine.calls) == 1


@pytest.fixture(scope="module")
def ends() -> tuple[MooncakeTransport, torch.Tensor, MooncakeTransport, torch.Tensor]:
    memories = [torch.zeros(2**20, dtype=torch.uint8) for _ in range(2)]
    config = KVTransferConfig("both")
    a, b = (MooncakeTransport(config, memory.data_ptr(), memory.nbytes) for memory in memories)
    return a, memories[0], b, memories[1]


def never() -> bool:
    return False


@pytest.mark.parametrize("stop", [never, lambda: True], ids=["written", "cancelled"])
def test_mooncake_writes_into_another_memory(ends: Any, stop: Callable[[], bool], monkeypatch: pytest.MonkeyPatch):
    """More pieces and bytes than one batch may have."""
    a, here, b, there = ends
    monkeypatch.setattr(MooncakeTransport, "MAX_PIECES", 7)
    monkeypatch.setattr(MooncakeTransport, "MAX_BYTES", 1000)
    here.copy_(torch.randint(1, 255, here.shape, dtype=torch.uint8))
    there.zero_()
    pieces = [Piece(here.data_ptr() + i * 3000, there.data_ptr() + i * 2500, 2400) for i in range(20)]
    if stop():
        with pytest.raises(TransferError):
            a.write(b.session, pieces, stop)
        assert not there.any()
        return
    a.write(b.session, pieces, stop)
    for i in range(20):
        assert torch.equal(there[i * 2500 : i * 2500 + 2400], here[i * 3000 : i * 3000 + 2400])
        assert not there[i * 2500 + 2400 : (i + 1) * 2500].any()
    assert not there[50_000:].any()


def test_mooncake_refuses_memory_that_is_not_registered(ends: Any):
    a, here, b, there = ends
    before = there.clone()
    with pytest.raises(TransferError):
        a.write(b.session, [Piece(here.data_ptr(), there.data_ptr() + there.nbytes - 8, 16)], never)
    assert torch.equal(there, before)
