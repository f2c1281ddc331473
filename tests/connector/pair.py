"""Two engines in one process, joined by the real Mooncake: what the tests of the connector drive."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nanopd.config import EngineConfig, KVTransferConfig, SamplingParams
from nanopd.connector.protocol import KVTransferParams
from nanopd.core.output import EngineCoreOutput
from nanopd.engine.core import EngineCore
from nanopd.request import Request


class Node:
    """One engine, and what came out of it."""

    def __init__(self, model: Path, role: str | None, transfer: dict[str, Any] | None = None, **options: Any) -> None:
        options = {"model": str(model), "block_size": 4, "num_blocks": 200, "check_invariants": True} | options
        kv_transfer = KVTransferConfig(**{"role": role, "kv_port": 0} | (transfer or {}))
        self.core = EngineCore(EngineConfig(**options), kv_transfer)
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, EngineCoreOutput] = {}

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: KVTransferParams | None = None,
        max_tokens: int = 8,
        **wishes: Any,
    ) -> Request:
        """Greedy, unless `wishes` (sampling options) say otherwise."""
        sampling: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "seed": 0} | wishes
        sampling_params = SamplingParams(max_tokens=max_tokens, **sampling)
        request = Request(request_id, prompt, sampling_params, kv_transfer_params=params)
        self.core.add_request(request)
        self.tokens[request_id] = []
        return request

    def prefill(self, request_id: str, prompt: Sequence[int], transfer_id: str = "", **wishes: Any) -> Request:
        params = KVTransferParams(do_remote_decode=True, transfer_id=transfer_id or request_id)
        return self.add(request_id, prompt, params, 1, **wishes)

    def decode(
        self, request_id: str, prompt: Sequence[int], of: "Node | int", transfer_id: str = "", **wishes: Any
    ) -> Request:
        port = of if isinstance(of, int) else of.core.connector.port
        params = KVTransferParams(
            do_remote_prefill=True, remote_host="127.0.0.1", remote_port=port, transfer_id=transfer_id or request_id
        )
        return self.add(request_id, prompt, params, **wishes)

    def step(self) -> None:
        if not self.core.has_unfinished_requests():
            return
        for news in self.core.step():
            self.tokens[news.request_id] += news.new_token_ids
            if news.finish_reason:
                self.ended[news.request_id] = news

    @property
    def num_free(self) -> int:
        return self.core.scheduler.kv.pool.num_free_blocks


def run(*nodes: Node, seconds: float = 30.0, until: Any = None) -> None:
    """Steps all of them until nothing is left to do (or `until` is true). Fails after `seconds`: nobody may hang."""
    deadline = time.monotonic() + seconds
    while not (until() if until else not any(node.core.has_unfinished_requests() for node in nodes)):
        for node in nodes:
            node.step()
        assert time.monotonic() < deadline, [node.core.scheduler for node in nodes]


def alone(
    model: Path, prompts: Iterable[tuple[str, Sequence[int]]], max_tokens: int = 8, **wishes: Any
) -> dict[str, list[int]]:
    """The tokens that one engine gives without any connector. `wishes` are sampling options."""
    node = Node(model, None)
    for request_id, prompt in prompts:
        node.add(request_id, prompt, max_tokens=max_tokens, **wishes)
    run(node)
    return node.tokens
