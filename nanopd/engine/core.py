"""EngineCore: one scheduler, one model runner, and the step that joins them.

    step():  schedule  ->  execute_model  ->  update_from_output

It takes and gives token ids and knows nothing about text, tokenizers or clients. Lesson 00.
"""

import logging
import time
from collections.abc import Iterable

import torch

from nanopd.config import EngineConfig, UserError
from nanopd.connector.base import KVConnectorScheduler, KVConnectorWorker
from nanopd.core.kv_cache import KVCacheManager
from nanopd.core.output import EngineCoreOutput
from nanopd.core.scheduler import Scheduler
from nanopd.models.config import ModelConfig
from nanopd.models.loader import load_config, load_model, resolve_model
from nanopd.request import Request
from nanopd.worker.attention import choose_backend
from nanopd.worker.kv_memory import KVCache, bytes_per_block, plan_num_blocks, profile_peak_memory
from nanopd.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class EngineCore:
    """Starts in the order of the knowledge map: config, device, weights, profile, plan of the blocks, cache and
    scheduler, capture of the graphs.

    Args:
        config: what the user asked for.
        connector: both halves of a KV connector, or None.

    Raises:
        UserError: the model cannot be found or loaded, or the memory does not suffice.
    """

    def __init__(
        self, config: EngineConfig, connector: tuple[KVConnectorScheduler, KVConnectorWorker] | None = None
    ) -> None:
        self.config = config
        self.device = "cuda" if torch.cuda.is_available() and config.attention_backend != "cpu" else "cpu"
        backend = choose_backend(config.attention_backend, self.device)
        self.model_path = resolve_model(config.model)
        model = load_config(self.model_path)
        max_model_len = config.max_model_len or model.max_position_embeddings
        if max_model_len > model.max_position_embeddings:
            raise UserError(
                f"--max-model-len is {max_model_len}, and the model knows {model.max_position_embeddings} positions; "
                "ask for at most as many."
            )
        dtype_name = config.dtype
        if dtype_name == "auto" and self.device == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            dtype_name = "float32"  # without instructions for it, bfloat16 is several times slower
        self.model = load_model(self.model_path, dtype_name, self.device, max_model_len)
        dtype = self.dtype = self.model.embed_tokens.weight.dtype

        peak = profile_peak_memory(self.model, config.max_num_batched_tokens, config.max_num_seqs, self.device)
        num_blocks = plan_num_blocks(config, model, dtype, self.device, reserved=peak)
        kv_cache = KVCache.allocate(model, num_blocks, config.block_size, config.kv_layout, dtype, self.device)
        kv = KVCacheManager(num_blocks, config.block_size, config.enable_prefix_caching)
        self.scheduler = Scheduler(
            kv,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            connector=connector[0] if connector else None,
            kv_load_failure_policy=config.kv_load_failure_policy,
        )
        self.max_model_len = self.scheduler.max_model_len
        self.runner = ModelRunner(
            self.model,
            kv_cache,
            backend,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            connector=connector[1] if connector else None,
        )
        if self.device == "cuda":
            self.runner.capture_graphs()
        self._report(model, num_blocks, dtype, max_model_len)

    def _report(self, model: ModelConfig, num_blocks: int, dtype: torch.dtype, wished_len: int) -> None:
        num_tokens = num_blocks * self.config.block_size
        size = num_blocks * bytes_per_block(model, self.config.block_size, dtype)
        logger.info(
            "KV cache: %d blocks of %d tokens = %d tokens, %.2f GiB, %s; room for %.1f requests of %d tokens",
            num_blocks,
            self.config.block_size,
            num_tokens,
            size / 2**30,
            self.config.kv_layout,
            num_tokens / self.max_model_len,
            self.max_model_len,
        )
        if self.max_model_len < wished_len:
            logger.warning(
                "max_model_len lowered from %d to %d, which is what the KV cache can hold; more --num-blocks or "
                "--kv-cache-memory would raise it",
                wished_len,
                self.max_model_len,
            )

    def add_request(self, request: Request) -> None:
        """Queues a request. Raises UserError if it can never be served."""
        bad = [t for t in request.token_ids if not 0 <= t < self.model.config.vocab_size]
        if bad:
            raise UserError(
                f"Token id {bad[0]} is not in the vocabulary; ids go from 0 to {self.model.config.vocab_size - 1}."
            )
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests now; nothing more is reported about them. Unknown ids are ignored."""
        self.scheduler.finish_requests(request_ids)

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def step(self) -> list[EngineCoreOutput]:
        """One step of the engine. Returns what is new, request by request."""
        scheduler_output = self.scheduler.schedule()
        output = self.runner.execute_model(scheduler_output)
        news = self.scheduler.update_from_output(scheduler_output, output)
        if self.config.check_invariants:
            self.scheduler.check_invariants()
        if not scheduler_output.total_num_scheduled_tokens:
            time.sleep(0.0005)  # only transfers in flight: leave the processor to them
        return news
