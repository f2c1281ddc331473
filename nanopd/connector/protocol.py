"""What P and D say to each other about one request, and in which states each side can be.

    D                                          P
    Pull: "send the blocks of transfer X   ->   waits until they are computed,
           into these blocks of mine"           writes them into D's memory,
                                           <-   Done, or Failed with a reason
    Cancel: "I don't want X (any more)"    ->   lets go of the blocks, writes nothing more,
                                           <-   Failed("cancelled") once it can no longer write

Both tables below are the whole truth about a transfer; the two halves, the lesson and the tests read them. Messages are
msgpack, typed, and decoded strictly: what does not fit is refused, nothing is unpickled (rule P1). Every Pull carries
what D's cache looks like, so a P with another model or layout refuses before a byte moves (P2). Lesson 11.
"""

import enum
from typing import Annotated

import msgspec

from nanopd.config import require

VERSION = 1
MAX_FRAME = 2**20  # bytes of one message: the ids of 100,000 blocks
CANCELLED = "cancelled"  # the reason of the Failed that answers a Cancel
BAD_MESSAGE = (msgspec.MsgspecError, RecursionError)  # what decoding somebody's bytes can raise
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Id = Annotated[str, msgspec.Meta(max_length=256)]  # P remembers thousands of them


def tcp_address(host: str, port: int | str) -> str:
    """As ZMQ wants it."""
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


class SendState(enum.Enum):
    """P's side of a transfer."""

    ASKED = "asked"  # D has asked; P's own request has not come yet
    COMPUTING = "computing"  # P computes the prompt; D may have asked or not
    HELD = "held"  # the blocks are there; D has not asked
    SENDING = "sending"  # D has asked, and there are blocks to write
    DONE = "done"
    FAILED = "failed"


class RecvState(enum.Enum):
    """D's side of a transfer."""

    ASKED = "asked"  # the Pull is sent; its blocks wait for data
    RECLAIMING = "reclaiming"  # given up, but P may still write into the blocks (rule P4)
    DONE = "done"
    FAILED = "failed"


SEND_TRANSITIONS: dict[SendState, frozenset[SendState]] = {
    SendState.ASKED: frozenset({SendState.COMPUTING, SendState.FAILED}),
    SendState.COMPUTING: frozenset({SendState.HELD, SendState.SENDING, SendState.FAILED}),
    SendState.HELD: frozenset({SendState.SENDING, SendState.FAILED}),
    SendState.SENDING: frozenset({SendState.DONE, SendState.FAILED}),
    SendState.DONE: frozenset(),
    SendState.FAILED: frozenset(),
}
RECV_TRANSITIONS: dict[RecvState, frozenset[RecvState]] = {
    RecvState.ASKED: frozenset({RecvState.DONE, RecvState.FAILED, RecvState.RECLAIMING}),
    RecvState.RECLAIMING: frozenset({RecvState.DONE, RecvState.FAILED}),  # P has answered, or is gone
    RecvState.DONE: frozenset(),
    RecvState.FAILED: frozenset(),
}


class KVTransferParams(msgspec.Struct, frozen=True):
    """`kv_transfer_params` of an HTTP request. The router sets them; other fields (vLLM's) are ignored. Raises UserError for
    what goes not together."""

    do_remote_decode: bool = False  # this engine is P: compute the prompt and keep its blocks for a D
    do_remote_prefill: bool = False  # this engine is D: fetch the prompt's blocks from the P named below
    remote_host: str | None = None
    remote_port: int | None = None
    transfer_id: Id = ""  # the same on both sides; the server fills in X-Request-Id where it is missing

    def __post_init__(self) -> None:
        where = self.remote_host and 0 < (self.remote_port or 0) < 65536
        require(bool(where) or not self.do_remote_prefill, "do_remote_prefill needs remote_host and remote_port")
        both = self.do_remote_prefill and self.do_remote_decode
        require(not both, "there can be do_remote_prefill or do_remote_decode, not both")


class Layout(msgspec.Struct, frozen=True):
    """How an engine's KV memory is laid out: equal on both sides but for `num_blocks`, or nothing can be sent (P2).

    A block is `num_runs` runs of `run_bytes` contiguous bytes; run r of block b starts at
    `(r * num_blocks + b) * run_bytes` (see worker/kv_memory.py: cross_layer has one run, kv_first two for each layer).
    """

    model: str  # a fingerprint of config and weights
    dtype: str
    kv_layout: str
    block_size: Count
    num_runs: Count
    run_bytes: Count
    num_blocks: Count


class Pull(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """D to P: write blocks `first_block`, … of this prompt into mine."""

    version: int
    transfer_id: Id
    session: str  # D's transfer engine, host:port
    base_address: Count  # of D's KV memory
    layout: Layout
    num_tokens: Count
    prompt_hash: bytes  # of all prompt tokens and the salt: P compares, so an id mixed up can't give wrong tokens
    first_block: Count  # D has those before it
    block_ids: list[Count]


class Cancel(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """D to P: let go of this transfer. P answers Failed when it writes no more."""

    version: int
    transfer_id: Id


class Done(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """P to D: all is written."""

    transfer_id: Id
    num_bytes: int
    num_pieces: int  # contiguous runs of memory that were written
    seconds: float  # of writing
    prefill_seconds: float


class Failed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """P to D: this transfer will not be completed, and nothing is written any more."""

    transfer_id: Id
    reason: str


class _Envelope(msgspec.Struct):
    transfer_id: Id = ""


def transfer_of(frame: bytes) -> str:
    """The transfer that a message is about which cannot be understood otherwise; "" if that cannot be told either."""
    try:
        return msgspec.msgpack.decode(frame, type=_Envelope).transfer_id
    except BAD_MESSAGE:
        return ""
