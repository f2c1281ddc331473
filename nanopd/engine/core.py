"""EngineCore: one scheduler, one model runner, and the step that joins them.

    step():  schedule  ->  execute_model  ->  update_from_output

It takes and gives token ids and knows nothing about text, tokenizers or clients. Lesson 00.
"""

import logging
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from nanopd.config import EngineConfig, KVTransferConfig, require
from nanopd.core.kv_cache import KVCacheManager
from nanopd.core.output import EngineCoreOutput, SchedulerStats, TransferStats
from nanopd.core.scheduler import Scheduler
from nanopd.engine.structured_output import StructuredOutputManager
from nanopd.models.decoder import pack
from nanopd.models.loader import load_config, load_model, resolve_model
from nanopd.request import Request
from nanopd.trace.file import FileTracer, Header
from nanopd.worker.attention import CPUAttention, choose_backend
from nanopd.worker.kv_memory import KVCache, plan_num_blocks, profile_peak_memory, strides
from nanopd.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)

PACK_AFTER = 16
"""Steps until the weights are packed: who comes so far will go on for long enough to win back what it costs."""


def has_instructions_for(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies numbers of a narrow type (bfloat16, float16) itself; else they are widened or emulated."""
    ops = torch.ops.mkldnn
    supported = {torch.bfloat16: ops._is_mkldnn_bf16_supported, torch.float16: ops._is_mkldnn_fp16_supported}
    return dtype in supported and supported[dtype]()


class EngineCore:
    """Starts in this order: config, device, weights, profile, plan of the blocks, cache and scheduler, graphs.

    Args:
        config: what the user asked for.
        kv_transfer: with a role, KV blocks move between this engine and others (P/D).

    Raises:
        UserError: the model cannot be found or loaded, or the memory does not suffice.
    """

    def __init__(self, config: EngineConfig, kv_transfer: KVTransferConfig | None = None) -> None:
        self.config = config
        kv_transfer = kv_transfer or KVTransferConfig()
        on_cpu = config.attention_backend == "cpu" or os.environ.get("TRITON_INTERPRET") == "1"
        self.device = "cuda" if torch.cuda.is_available() and not on_cpu else "cpu"
        self.model_path = resolve_model(config.model)
        model = load_config(self.model_path)
        known = model.max_position_embeddings
        max_model_len = config.max_model_len or known
        limit = f"--max-model-len is {max_model_len}, and the model knows {known} positions; ask for at most as many."
        require(max_model_len <= known, limit)
        dtype_name = config.dtype if config.dtype != "auto" else model.dtype
        if config.dtype == "auto" and self.device == "cpu" and not has_instructions_for(torch.bfloat16):
            dtype_name = "float32"  # without instructions for it, bfloat16 is several times slower
        dtype = self.dtype = getattr(torch, dtype_name)
        backend = choose_backend(config.attention_backend, self.device, dtype)
        # Tables are as long as the longest request; one that even an empty machine could not hold needs none.
        ceiling = plan_num_blocks(config, model, dtype, self.device) * config.block_size
        self.model = load_model(self.model_path, dtype_name, self.device, min(max_model_len, ceiling))

        most_logits = config.max_num_seqs * (1 + config.speculative_ngram)
        peak = profile_peak_memory(self.model, config.max_num_batched_tokens, most_logits, self.device)
        num_blocks = plan_num_blocks(config, model, dtype, self.device, reserved=peak)
        self.max_model_len = min(max_model_len, ceiling, num_blocks * config.block_size)  # what the pool can hold (S9)
        require(self.max_model_len > 1, "The KV cache holds one token, a request needs two; ask for more --num-blocks.")
        layout = config.kv_layout or ("cross_layer" if kv_transfer.role else "kv_first")
        kv_cache = KVCache.allocate(model, num_blocks, config.block_size, layout, dtype, self.device)
        kv = KVCacheManager(num_blocks, config.block_size, config.enable_prefix_caching)
        if config.trace:
            facts = str(self.model_path), kv_transfer.role, config, num_blocks, self.max_model_len, dtype_name, layout
            kv.trace = FileTracer(config.trace, Header(*facts, strides(kv_cache), (time.time(), time.monotonic())))
        scheduler_half, worker_half = None, None
        if kv_transfer.role:
            from nanopd.connector.mooncake import make_connector

            scheduler_half, worker_half = make_connector(kv_transfer, self.model, kv_cache, layout, kv.trace)
        self.connector = worker_half
        known = self.dtype == torch.float32 or has_instructions_for(self.dtype)
        self._steps_until_pack = PACK_AFTER if known else 1
        self.structured_outputs = StructuredOutputManager(self.model_path, model.vocab_size, model.eos_token_ids)
        self.scheduler = Scheduler(config, kv, self.max_model_len, scheduler_half, self.structured_outputs)
        self.runner = ModelRunner(config, self.model, kv_cache, backend, self.max_model_len, worker_half)
        if self.device == "cuda":
            self.runner.capture_graphs()

        num_tokens, gib = num_blocks * config.block_size, kv_cache.memory.nbytes / 2**30
        logger.info(
            f"KV cache: {num_blocks} blocks of {config.block_size} tokens = {num_tokens} tokens, {gib:.2f} GiB, "
            f"{layout}; room for {num_tokens / self.max_model_len:.1f} requests of {self.max_model_len} tokens"
        )
        if self.max_model_len < max_model_len:
            cause = "the KV cache can hold no more (--num-blocks, --kv-cache-memory)"
            logger.warning(f"max_model_len is {self.max_model_len}, not {max_model_len}: {cause}")

    def pack(self) -> None:
        """Lays the weights out anew (see `decoder.pack`), on an x86 CPU, and takes the compiled loops for what is between
        products, if those for attention have been loaded.

        It takes up to two seconds, so `step` does it when it has seen `PACK_AFTER` steps; at once in a narrow type that the
        processor does not know.
        """
        self._steps_until_pack = 0
        x86 = self.device == "cpu" and "fbgemm" in torch.backends.quantized.supported_engines
        native = has_instructions_for(self.dtype)
        if x86 and (not native or self.dtype == torch.bfloat16):
            modules = reversed([*self.model.modules()])  # the head, which is largest, first
            with ThreadPoolExecutor(torch.get_num_threads()) as pool:
                list(pool.map(partial(pack, native=native), modules))
        if isinstance(self.runner.backend, CPUAttention) and self.runner.backend.loaded:
            from nanopd.kernels import cpu_elementwise  # Numba is there already

            for module in self.model.modules():
                module.elementwise = cpu_elementwise  # type: ignore[assignment]

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Does now, in seconds, what `step` would do when it sees that it pays: loads the compiled loops, and packs the
        weights. For servers, and before something is measured."""
        if isinstance(self.runner.backend, CPUAttention):
            self.runner.backend.load(self.runner.kv_cache, self.model.config.num_heads)
        self.pack()
        if self.device == "cpu":
            for num_tokens in (1, 64):  # in one thread, and in all of them
                tokens = torch.zeros(num_tokens, dtype=torch.int64)
                self.model(tokens, tokens, lambda layer, query, key, value: query)

    def add_request(self, request: Request) -> None:
        """Queues a request. Raises UserError if it can never be served."""
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests now; nothing more is reported about them. Unknown ids are ignored."""
        self.scheduler.finish_requests(request_ids)

    def abort_turn(self, request_id: str, turn: int) -> None:
        """Ends one answer of a session, which stays."""
        self.scheduler.sessions.abort_turn(request_id, turn)

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def step(self) -> list[EngineCoreOutput]:
        """One step of the engine. Returns what is new, request by request.

        If the computation does not finish (Ctrl-C, out of memory), the plan is taken back: the engine stays usable.
        """
        self._steps_until_pack -= 1
        if self._steps_until_pack == 0:
            self.pack()
        scheduler_output = self.scheduler.schedule()
        try:
            output = self.runner.execute_model(scheduler_output)
            news = self.scheduler.update_from_output(scheduler_output, output)
        except BaseException:
            self.scheduler.take_back(scheduler_output)
            raise
        if self.config.check_invariants:
            self.scheduler.check_invariants()
        if not scheduler_output.total_num_scheduled_tokens:
            time.sleep(0.001)  # only transfers in flight: leave the processor to them
        return news

    def stats(self) -> tuple[SchedulerStats, TransferStats | None]:
        """The scheduler's numbers, and the connector's if there is one."""
        return self.scheduler.stats(), self.connector.stats() if self.connector else None

    def close(self) -> None:
        """Lets go of what other processes see of this engine, and of its threads."""
        self.structured_outputs.close()
        if self.connector:
            self.connector.close()
