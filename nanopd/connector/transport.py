"""Moving bytes into another process's memory: which runs of memory, and the Mooncake Transfer Engine that writes them.

A transfer is one-sided: P writes into D's memory, and D's program takes no part in it. D has registered that memory once
and tells P where it is. Everything that knows about Mooncake is in this file; a `Transport` of another make needs a
`session` and a `write`. Lesson 12.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from nanopd.config import KVTransferConfig, UserError
from nanopd.connector.protocol import Layout


class Piece(NamedTuple):
    """One contiguous run of memory to write."""

    source: int
    target: int
    num_bytes: int


class TransferError(Exception):
    """Bytes could not be written; some of them may have been."""


class Transport(Protocol):
    """Writes into the memory of peers. `session` is how a peer names this end."""

    session: str

    def write(self, session: str, pieces: Iterable[Piece], cancelled: Callable[[], bool]) -> None:
        """Returns when all pieces are in the peer's memory. Raises TransferError; then nothing is written any more."""


def pieces_of(
    layout: Layout, base: int, ids: Sequence[int], to: Layout, to_base: int, to_ids: Sequence[int]
) -> list[Piece]:
    """The memory of blocks `ids` here and `to_ids` there, pairwise. Blocks that are neighbours on both sides are one
    piece: each costs some 40 µs, however small it is, so a long run is what makes a transfer fast.

        here   | 4 | 5 | 6 | . | 9 |       4 5 6 -> 1 2 3   one piece in each run of the layout
        there  | 1 | 2 | 3 | 4 | . |           9 -> 4       a second one: 9 is no neighbour of 6
    """
    groups: list[tuple[int, int, int]] = []  # first block here, first block there, how many
    for here, there in sorted(zip(ids, to_ids)):
        if groups and (here, there) == (groups[-1][0] + groups[-1][2], groups[-1][1] + groups[-1][2]):
            groups[-1] = (*groups[-1][:2], groups[-1][2] + 1)
        else:
            groups.append((here, there, 1))
    size = layout.run_bytes
    return [
        Piece(base + (r * layout.num_blocks + here) * size, to_base + (r * to.num_blocks + there) * size, n * size)
        for r in range(layout.num_runs)
        for here, there, n in groups
    ]


class MooncakeTransport:
    """Mooncake's Transfer Engine, peer to peer: no metadata server, engines find each other by `session` (host:port).

    Args:
        address: start of the KV memory, registered once as a whole.
        num_bytes: its size.
    """

    MAX_PIECES, MAX_BYTES = 512, 64 * 2**20  # of one batch: above some 2,000 pieces Mooncake refuses it at once
    # Seconds after each try that failed: a full queue empties quickly. The last one is for what a failed batch may still
    # have on its way: Mooncake does not wait for it.
    PAUSES = (0.01, 0.05, 0.2, 1.0)

    def __init__(self, config: KVTransferConfig, address: int, num_bytes: int) -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # its log goes to stderr, and is long
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            wheel = "mooncake-transfer-engine, or mooncake-transfer-engine-non-cuda on a machine without CUDA"
            what = f"Mooncake's Transfer Engine cannot be loaded ({error})"
            raise UserError(f"{what}. Install {wheel}, and Debian's libibverbs1.") from error
        self._engine: Any = TransferEngine()
        if self._engine.initialize(config.kv_host, "P2PHANDSHAKE", config.kv_protocol, config.kv_device):
            raise UserError(f"Mooncake cannot start on {config.kv_host} with {config.kv_protocol}; check --kv-host.")
        if self._engine.batch_register_memory([address], [num_bytes]):
            raise UserError(f"Mooncake cannot register {num_bytes} bytes of KV cache with {config.kv_protocol}.")
        self.session = f"{config.kv_host}:{self._engine.get_rpc_port()}"

    def write(self, session: str, pieces: Iterable[Piece], cancelled: Callable[[], bool]) -> None:
        for batch in _batches(pieces, self.MAX_PIECES, self.MAX_BYTES):
            columns = [list(column) for column in zip(*batch)]
            if cancelled():
                raise TransferError("cancelled")
            for pause in self.PAUSES:
                if self._engine.batch_transfer_sync_write(session, *columns) == 0:
                    break
                time.sleep(pause)
            else:
                raise TransferError(f"Mooncake could not write to {session}")


def _batches(pieces: Iterable[Piece], most: int, most_bytes: int) -> Iterator[list[Piece]]:
    """Pieces in batches bounded in number and bytes; a piece that reaches beyond the end of a batch is cut there."""
    batch: list[Piece] = []
    room = most_bytes
    for source, target, num_bytes in pieces:
        while num_bytes:
            if len(batch) == most or not room:
                yield batch
                batch, room = [], most_bytes
            size = min(num_bytes, room)
            batch.append(Piece(source, target, size))
            source, target, num_bytes, room = source + size, target + size, num_bytes - size, room - size
    if batch:
        yield batch
