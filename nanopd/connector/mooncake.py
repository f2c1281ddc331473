"""P/D disaggregation over Mooncake: both halves of the connector, put together.

    scheduler half   knows requests: who wants blocks from where, whose blocks are wanted. Plans; touches no memory.
    worker half      hands the plan to the Consumer (we are D) and to the Producer (we are P)

A request with `do_remote_prefill` finds all its prompt tokens "elsewhere" and loads them asynchronously (rule S5); one
with `do_remote_decode` is computed like any other, and keeps its blocks when it has ended. Lesson 11.
"""

import hashlib
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from nanopd.config import KVTransferConfig
from nanopd.connector.base import KVConnectorScheduler, KVConnectorWorker
from nanopd.connector.consumer import Address, Consumer
from nanopd.connector.producer import Producer, SendPlan, Stage
from nanopd.connector.protocol import VERSION, KVTransferParams, Layout, Pull
from nanopd.connector.transport import MooncakeTransport, Transport
from nanopd.core.kv_cache import HASH_SEED, hash_block
from nanopd.core.output import KVConnectorOutput, SchedulerOutput, TransferStats
from nanopd.models.decoder import Decoder
from nanopd.request import Request, RequestStatus
from nanopd.trace.events import Tracer, ignore
from nanopd.worker.kv_memory import KVCache


@dataclass(slots=True)
class MooncakeMetadata:
    """The plan of one step, for the worker half."""

    reqs_to_recv: list[tuple[str, Address, Pull]] = field(default_factory=list)  # D asks P
    # D does not want it (any more): request id, P, transfer id, and whether it has been asked.
    reqs_to_cancel: list[tuple[str, Address, str, bool]] = field(default_factory=list)
    reqs_to_send: list[SendPlan] = field(default_factory=list)  # P: true already
    make_room: list[bool] = field(default_factory=list)  # P is stuck for want of blocks
    again: list[bool] = field(default_factory=list)  # the last step failed: what was reported in it may have been lost
    chunks: list[SendPlan] = field(default_factory=list)  # P: true when this step is computed (kv_push per_chunk)


class MooncakeScheduler(KVConnectorScheduler):
    """The scheduler half.

    Args:
        config: whether prompts are pushed in chunks, and where D finds us.
        port: of our side channel; None if we are no P.
        memory: where P writes for us: the session of our transfer engine, the address of our KV memory, its layout.
    """

    def __init__(self, config: KVTransferConfig, port: int | None, memory: tuple[str, int, Layout]) -> None:
        self._config, self._port, self._memory, self._block_size = config, port, memory, memory[2].block_size
        self._next = MooncakeMetadata()
        self._asked: set[str] = set()  # D: requests that have got their blocks once, loaded or not
        # P: unfinished requests whose blocks are wanted, and which blocks these are (kv_push per_chunk).
        self._sending: dict[str, tuple[Request, SendPlan, list[int]]] = {}

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        params, missing = request.kv_transfer_params, request.num_prompt_tokens - num_computed_tokens
        wanted = params is not None and params.do_remote_prefill and request.request_id not in self._asked
        return (missing, True) if wanted and missing > self._block_size else (0, False)  # a block is computed sooner

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        params: KVTransferParams | None = request.kv_transfer_params
        if params is None:
            return
        if params.do_remote_decode:
            plan = SendPlan(params.transfer_id, request.request_id, request.num_prompt_tokens, _prompt_hash(request))
            self._sending[request.request_id] = request, plan, list(block_ids)
            self._next.reqs_to_send.append(plan)
        elif num_external_tokens:
            first = (request.num_computed_tokens - num_external_tokens) // self._block_size
            count, ids = request.num_prompt_tokens, block_ids[first:]
            pull = Pull(VERSION, params.transfer_id, *self._memory, count, _prompt_hash(request), first, ids)
            self._next.reqs_to_recv.append((request.request_id, _address(params), pull))
        elif request.request_id not in self._asked:  # all was here: P need not wait for us (rule P5)
            self._next.reqs_to_cancel.append((request.request_id, _address(params), params.transfer_id, False))
        self._asked.add(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MooncakeMetadata:
        metadata, self._next = self._next, MooncakeMetadata()
        if self._config.kv_push == "per_chunk":
            new_blocks = {r.request_id: r.new_block_ids for r in scheduler_output.scheduled_cached_reqs}
            for request_id, num_new in scheduler_output.num_scheduled_tokens.items():
                if request_id in self._sending:
                    request, plan, table = self._sending[request_id]
                    table += new_blocks.get(request_id, [])
                    num_full = min(request.num_computed_tokens + num_new, plan.num_tokens) // self._block_size
                    metadata.chunks.append(replace(plan, stage=Stage.CHUNK, block_ids=table[:num_full]))
        return metadata

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        params: KVTransferParams | None = request.kv_transfer_params
        if params is None:
            return False, None
        asked = request.request_id in self._asked
        self._asked.discard(request.request_id)
        if params.do_remote_prefill:
            self._next.reqs_to_cancel.append((request.request_id, _address(params), params.transfer_id, asked))
            return False, None
        sending = self._sending.pop(request.request_id, None)
        if sending is None or request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR):
            self._next.reqs_to_send.append(SendPlan(params.transfer_id, request.request_id, 0, b"", Stage.ABORTED))
            return True, None
        blocks = block_ids[: -(-request.num_prompt_tokens // self._block_size)]
        seconds = (request.metrics.first_token_time or 0.0) - (request.metrics.first_scheduled_time or 0.0)
        plan = replace(sending[1], stage=Stage.COMPLETE, block_ids=blocks, prefill_seconds=seconds)
        self._next.reqs_to_send.append(plan)
        where = {"remote_host": self._config.kv_host, "remote_port": self._port, "transfer_id": params.transfer_id}
        return True, {"do_remote_prefill": True, "do_remote_decode": False} | where

    def make_room(self) -> None:
        self._next.make_room = [True]

    def has_news(self) -> bool:
        return self._next != MooncakeMetadata()

    def step_failed(self, metadata: MooncakeMetadata) -> None:
        metadata.chunks, metadata.again = [], [True]  # the chunks were not computed
        both = (getattr(metadata, f.name) + getattr(self._next, f.name) for f in fields(metadata))
        self._next = MooncakeMetadata(*both)


def _address(params: KVTransferParams) -> Address:
    return params.remote_host or "", params.remote_port or 0


def _prompt_hash(request: Request) -> bytes:
    tokens = request.token_ids[: request.num_prompt_tokens].tobytes()
    return hash_block(HASH_SEED, tokens, [request.cache_salt] if request.cache_salt else [])


class MooncakeWorker(KVConnectorWorker):
    """The worker half: `producer` if we are P, `consumer` if we are D, both for role both. The transport has to live as
    long as peers may write."""

    def __init__(
        self, transport: Transport, producer: Producer | None, consumer: Consumer | None, stats: TransferStats
    ) -> None:
        self.transport, self.producer, self.consumer, self._stats = transport, producer, consumer, stats
        self.port = producer.port if producer else None
        self._chunks: list[SendPlan] = []
        self._reported = KVConnectorOutput()

    def start_load_kv(self, metadata: MooncakeMetadata) -> None:
        self._chunks = metadata.chunks
        if not metadata.again:
            self._reported = KVConnectorOutput()
        if self.consumer:
            for to_recv in metadata.reqs_to_recv:
                self.consumer.start(*to_recv)
            for to_cancel in metadata.reqs_to_cancel:
                self.consumer.cancel(*to_cancel)
        if self.producer:
            for plan in metadata.reqs_to_send:
                self.producer.update(plan)
            if metadata.make_room:
                self.producer.make_room()

    def get_finished(self) -> KVConnectorOutput:
        if self.consumer:
            self._reported.add(self.consumer.poll())
        if self.producer:
            if self._chunks and torch.cuda.is_available():
                torch.cuda.synchronize()  # the transport does not know of CUDA streams
            for plan in self._chunks:
                self.producer.update(plan)
            self._reported.finished_sending |= self.producer.take_finished()
        return self._reported

    def stats(self) -> TransferStats:
        return self._stats

    def close(self) -> None:
        for part in (self.producer, self.consumer):
            if part:
                part.close()


def make_connector(
    config: KVTransferConfig, model: Decoder, kv_cache: KVCache, kv_layout: str, trace: Tracer = ignore
) -> tuple[MooncakeScheduler, MooncakeWorker]:
    """Both halves for one engine. Raises UserError: no Mooncake, or an address that cannot be used."""
    layout, memory, stats = layout_of(model, kv_cache, kv_layout), kv_cache.memory, TransferStats()
    transport = MooncakeTransport(config, memory.data_ptr(), memory.nbytes)
    ours = transport, layout, memory.data_ptr(), stats, trace
    producer = Producer(config, *ours) if config.role != "decode" else None
    consumer = Consumer(config.kv_load_timeout, stats, trace) if config.role != "prefill" else None
    worker = MooncakeWorker(transport, producer, consumer, stats)
    return MooncakeScheduler(config, worker.port, (transport.session, memory.data_ptr(), layout)), worker


def layout_of(model: Decoder, kv_cache: KVCache, kv_layout: str) -> Layout:
    """What a peer must know of this engine's KV memory: all dimensions before that of the blocks count runs, all after
    it lie inside one."""
    shape, block_size = kv_cache.memory.shape, kv_cache.by_layer.shape[3]
    dim = {"kv_first": 2, "blocks_first": 1, "cross_layer": 0}[kv_layout]
    run_bytes = shape[dim + 1 :].numel() * kv_cache.memory.itemsize
    dtype = str(kv_cache.memory.dtype).removeprefix("torch.")
    return Layout(fingerprint(model), dtype, kv_layout, block_size, shape[:dim].numel(), run_bytes, shape[dim])


def fingerprint(model: Decoder) -> str:
    """Tells models apart, finetunes of one architecture too: a hash of the config and of 64 numbers of each weight."""
    digest = hashlib.sha256(repr(model.config).encode())
    for name, weight in model.named_parameters():
        digest.update(name.encode() + weight.flatten()[:64].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
