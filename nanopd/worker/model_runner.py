"""The model runner: carries out one step that the scheduler has planned, one method for each stage.

    synchronize_input_prep             wait until the last step has read its input buffers
      _update_states                   who is new, who goes, who has got more blocks
      _prepare_inputs                  token ids, positions, and which tokens need logits
      _determine_batch_execution_and_padding   a captured graph or eager, and how large
      _build_attention_metadata        lengths and block tables, on the device
      _preprocess                      input ids, positions and slots, on the device
    _model_forward                     hidden states, with K and V written into the cache on the way
    hidden_states[logits_indices] -> compute_logits -> sample

It keeps a row of numbers for each request it has seen (its tokens, its blocks), so a step sends only what changed. It
decides nothing about who runs. Rules K1, S7; lesson 07.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanopd.config import EngineConfig
from nanopd.connector.base import KVConnectorWorker
from nanopd.core.output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from nanopd.models.decoder import Decoder
from nanopd.worker.attention import AttentionBackend, AttentionMetadata, ForwardContext
from nanopd.worker.kv_memory import KVCache
from nanopd.worker.sampler import SamplingRow, sample, verify


class InputBuffer:
    """An array that the host fills and the device reads: pinned memory and its copy, or one memory for both.

    Buffers live as long as the runner, because a captured CUDA graph reads the addresses it was captured with.
    """

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=cuda)
        self._device = torch.zeros(shape, dtype=dtype, device=device) if cuda else self._host
        self.array = self._host.numpy()

    def on_device(self, n: int) -> Tensor:
        """The first n entries, where the device can read them. The copy is queued, not waited for."""
        if self._device is not self._host:
            self._device[:n].copy_(self._host[:n], non_blocking=True)
        return self._device[:n]


@dataclass(slots=True)
class StepInputs:
    """One step's flat batch, on the host: R requests. Its token ids, positions and logits indices are in the buffers."""

    request_ids: list[str]
    rows: np.ndarray  # int64 [R]: each request's row in the runner's tables
    query_lens: np.ndarray  # int64 [R]: new tokens of each request
    seq_lens: np.ndarray  # int64 [R]: tokens in the cache after this step
    sampled: np.ndarray  # int64 [S]: which of the R requests catch up in this step; the last token of each is sampled
    num_draft_tokens: np.ndarray  # int64 [S]: how many drafts each of these has at its end; they are sampled from, too


@dataclass(frozen=True, slots=True)
class BatchExecution:
    """How to run the forward pass: `num_tokens` includes padding; with `use_graph` it is a size that was captured."""

    use_graph: bool
    num_tokens: int


GRAPH_SIZES = (1, 2, 4, *range(8, 257, 8), 320, 384, 448, 512)
"""Batch sizes for which a decode step is captured: padding wastes at most 7 rows up to 256, 63 beyond."""


CASCADE_TOKENS = 1024
"""Cascade attention costs two more passes over the queries; it has to save the reading of at least so many tokens."""


class ModelRunner:
    """Runs the model for one engine.

    Args:
        config: most requests and most tokens in a step.
        model: the decoder.
        kv_cache: its K and V.
        backend: attention over that cache.
        max_model_len: most tokens of a request.
        connector: moves K and V to and from other engines; None: nobody does.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Decoder,
        kv_cache: KVCache,
        backend: AttentionBackend,
        max_model_len: int,
        connector: KVConnectorWorker | None = None,
    ) -> None:
        max_num_seqs, max_num_batched_tokens = config.max_num_seqs, config.max_num_batched_tokens
        self.model = model
        self.kv_cache = kv_cache
        self.backend = backend
        self.connector = connector
        self.device = kv_cache.memory.device
        self.cascade = config.cascade_attention
        self.block_size = kv_cache.layers[0][0].shape[1]
        self.context = ForwardContext(backend, kv_cache, model.config.sliding_window)

        # One row of these tables for each request in the engine.
        self.requests: dict[str, NewRequestData] = {}
        self.rows: dict[str, int] = {}
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))
        table_len = -(-max_model_len // self.block_size)
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int64)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.block_table = np.zeros((max_num_seqs, table_len), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)

        # What the device reads in a step.
        def buffer(*shape: int, dtype: torch.dtype) -> InputBuffer:
            return InputBuffer(*shape, dtype=dtype, device=self.device)

        self.input_ids = buffer(max_num_batched_tokens, dtype=torch.int64)
        self.positions = buffer(max_num_batched_tokens, dtype=torch.int64)
        self.query_start_loc = buffer(max_num_seqs + 1, dtype=torch.int32)
        self.logits_indices = buffer(max_num_batched_tokens, dtype=torch.int64)
        self.seq_lens = buffer(max_num_seqs, dtype=torch.int32)
        self.batch_block_table = buffer(max_num_seqs, table_len, dtype=torch.int32)
        self.slot_mapping = torch.zeros(max_num_batched_tokens, dtype=torch.int64, device=self.device)
        cuda = self.device.type == "cuda"
        self.inputs_copied = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # batch size -> graph, its hidden states

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """One step: from the scheduler's plan to sampled tokens."""
        if self.connector:
            self.connector.start_load_kv(scheduler_output.kv_connector_metadata)
        output = ModelRunnerOutput({})
        with self.synchronize_input_prep():
            self._update_states(scheduler_output)
            if scheduler_output.total_num_scheduled_tokens:
                inputs = self._prepare_inputs(scheduler_output.num_scheduled_tokens)
                num_common_prefix_blocks = self._compute_cascade(scheduler_output.num_common_prefix_blocks, inputs)
                execution = self._determine_batch_execution_and_padding(inputs)
                if num_common_prefix_blocks:  # graphs were captured without
                    execution = BatchExecution(False, int(inputs.query_lens.sum()))
                metadata = self._build_attention_metadata(inputs, execution)
                metadata.num_common_prefix_blocks = num_common_prefix_blocks
                input_ids, positions = self._preprocess(execution, metadata)
                num_logits = len(inputs.sampled) + int(inputs.num_draft_tokens.sum())
                logits_indices = self.logits_indices.on_device(num_logits)
        if scheduler_output.total_num_scheduled_tokens:
            hidden_states = self._model_forward(input_ids, positions, execution)
            sample_hidden_states = hidden_states[logits_indices]
            if num_logits:
                logits = self.model.compute_logits(sample_hidden_states)
                output = self._sample(logits, inputs, scheduler_output.grammar_bitmask)
            output.num_common_prefix_blocks = num_common_prefix_blocks
        if self.connector:
            output.kv_connector_output = self.connector.get_finished()
        return output

    @contextmanager
    def synchronize_input_prep(self) -> Iterator[None]:
        """Waits until the device has copied the last step's inputs, and marks when it will have copied these: the host
        must not overwrite a pinned buffer that is still being read."""
        if self.inputs_copied:
            self.inputs_copied.synchronize()
        yield
        if self.inputs_copied:
            self.inputs_copied.record()

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        """Brings the tables up to date with the scheduler's output (rule S7)."""
        gone = scheduler_output.finished_req_ids | scheduler_output.preempted_req_ids | scheduler_output.lost_req_ids
        for request_id in gone:
            if request_id in self.rows:
                self.free_rows.append(self.rows.pop(request_id))
                del self.requests[request_id]
        for new in scheduler_output.scheduled_new_reqs:
            row = self.rows[new.request_id] = self.free_rows.pop()
            self.requests[new.request_id] = new
            self.num_tokens[row] = len(new.token_ids)
            self.token_ids[row, : len(new.token_ids)] = new.token_ids
            self.num_computed_tokens[row] = new.num_computed_tokens
            self.num_blocks[row] = 0
            self._append_blocks(row, new.block_ids)
        for known in scheduler_output.scheduled_cached_reqs:
            row = self.rows[known.request_id]
            self.num_computed_tokens[row] = known.num_computed_tokens
            self._append_blocks(row, known.new_block_ids)
        for request_id, draft in scheduler_output.scheduled_spec_decode_tokens.items():
            row = self.rows[request_id]
            self.token_ids[row, self.num_tokens[row] : self.num_tokens[row] + len(draft)] = draft

    def _append_blocks(self, row: int, block_ids: Sequence[int]) -> None:
        if block_ids:
            start = self.num_blocks[row]
            self.block_table[row, start : start + len(block_ids)] = block_ids
            self.num_blocks[row] += len(block_ids)

    def _prepare_inputs(self, num_scheduled_tokens: dict[str, int]) -> StepInputs:
        """Lays the new tokens of all requests one after the other and finds each one's position."""
        request_ids = list(num_scheduled_tokens)
        rows = np.array([self.rows[request_id] for request_id in request_ids])
        query_lens = np.array(list(num_scheduled_tokens.values()))
        num_computed = self.num_computed_tokens[rows]

        #   query_lens    3        1    2          num_computed  4    9    0
        #   token_rows    a a a    b    c c        positions     4 5 6    9    0 1
        ends = np.cumsum(query_lens)
        token_rows = np.repeat(rows, query_lens)
        positions = np.arange(ends[-1]) - np.repeat(ends - query_lens - num_computed, query_lens)
        self.positions.array[: ends[-1]] = positions
        self.input_ids.array[: ends[-1]] = self.token_ids[token_rows, positions]

        seq_lens = num_computed + query_lens
        #   the last token known and 2 drafts, the next request's last token    num_logits  3    1    logits_indices 4 5 6 7
        num_draft_tokens = seq_lens - self.num_tokens[rows]  # below 0: it does not catch up
        sampled = np.flatnonzero(num_draft_tokens >= 0)
        num_draft_tokens = num_draft_tokens[sampled]
        num_logits = num_draft_tokens + 1
        logits_ends = np.cumsum(num_logits)
        logits_indices = np.arange(num_logits.sum()) + np.repeat(ends[sampled] - logits_ends, num_logits)
        self.logits_indices.array[: len(logits_indices)] = logits_indices
        return StepInputs(request_ids, rows, query_lens, seq_lens, sampled, num_draft_tokens)

    def _compute_cascade(self, num_common_prefix_blocks: int, inputs: StepInputs) -> int:
        """How many blocks that all requests share attention reads once for all of them: 0 where that does not pay.

        Every new token must see all of them, so they have to be computed before this step.
        """
        num_computed = int((inputs.seq_lens - inputs.query_lens).min())
        shared = min(num_common_prefix_blocks, num_computed // self.block_size)
        not_read_again = shared * self.block_size * (len(inputs.rows) - 1)
        pays = not_read_again >= CASCADE_TOKENS and not any(self.model.config.sliding_window)
        return shared if self.cascade and pays else 0

    def _determine_batch_execution_and_padding(self, inputs: StepInputs) -> BatchExecution:
        """A captured graph, padded to the next size, for a batch of nothing but decodes; else eager and as it is.

        A graph saves the launches, which cost more than the work when every request computes one token.
        """
        num_tokens = int(inputs.query_lens.sum())
        large_enough = [size for size in self.graphs if size >= num_tokens]
        if num_tokens == len(inputs.rows) and large_enough:
            return BatchExecution(True, min(large_enough))
        return BatchExecution(False, num_tokens)

    def _build_attention_metadata(self, inputs: StepInputs, execution: BatchExecution) -> AttentionMetadata:
        """Fills the buffers attention reads. Rows added by padding have no tokens and no length."""
        num_reqs, num_tokens = len(inputs.rows), int(inputs.query_lens.sum())
        rows = num_reqs + execution.num_tokens - num_tokens
        self.query_start_loc.array[1 : num_reqs + 1] = np.cumsum(inputs.query_lens)
        self.query_start_loc.array[num_reqs + 1 : rows + 1] = num_tokens
        self.seq_lens.array[:num_reqs] = inputs.seq_lens
        self.seq_lens.array[num_reqs:rows] = 0
        self.positions.array[num_tokens : execution.num_tokens] = 0
        longest = -(-int(inputs.seq_lens.max()) // self.block_size)
        self.batch_block_table.array[:num_reqs, :longest] = self.block_table[inputs.rows, :longest]
        return AttentionMetadata(
            query_start_loc=self.query_start_loc.on_device(rows + 1),
            seq_lens=self.seq_lens.on_device(rows),
            block_table=self.batch_block_table.on_device(rows),
            slot_mapping=self.slot_mapping[: execution.num_tokens],
            query_lens_list=inputs.query_lens.tolist(),
            seq_lens_list=inputs.seq_lens.tolist(),
            max_seq_len=None if execution.use_graph else int(inputs.seq_lens.max()),
        )

    def _preprocess(self, execution: BatchExecution, metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """Token ids, positions and slots (K1) on the device. The ids in the padding are some earlier step's: harmless."""
        input_ids = self.input_ids.on_device(execution.num_tokens)
        positions = self.positions.on_device(execution.num_tokens)
        self.backend.plan(metadata, positions, self.block_size)
        return input_ids, positions

    def _model_forward(self, input_ids: Tensor, positions: Tensor, execution: BatchExecution) -> Tensor:
        """[T] and [T] -> hidden states [T, hidden_size]."""
        if execution.use_graph:
            graph, hidden_states = self.graphs[execution.num_tokens]
            graph.replay()
            return hidden_states
        return self.model(input_ids, positions, self.context.attend)

    def _sample(self, logits: Tensor, inputs: StepInputs, grammar_bitmask: dict[str, list[bytes]]) -> ModelRunnerOutput:
        """Chooses tokens from logits [S + drafts, vocab_size], and writes them into the tables for the next step to find.

        A request with drafts is sampled at each of their positions as if those before it were true; `verify` says how many
        of the samples hold.
        """
        request_ids = [inputs.request_ids[i] for i in inputs.sampled]
        rows = inputs.rows[inputs.sampled]
        batch = list(zip(request_ids, rows.tolist(), self.num_tokens[rows].tolist(), inputs.num_draft_tokens.tolist()))
        sampling_rows = []
        for request_id, row, num_tokens, num_drafts in batch:
            r, masks = self.requests[request_id], iter(grammar_bitmask.get(request_id, ()))
            for n in range(num_tokens, num_tokens + num_drafts + 1):
                about = r.sampling_params, self.token_ids[row, :n], r.num_prompt_tokens, r.stop_token_ids
                sampling_rows.append(SamplingRow(*about, next(masks, None)))
        token_ids, logprobs = sample(logits, sampling_rows)
        output, start = ModelRunnerOutput({}), 0
        for request_id, row, num_tokens, num_drafts in batch:
            draft = self.token_ids[row, num_tokens : num_tokens + num_drafts].tolist()
            kept = verify(token_ids[start : start + num_drafts + 1], draft)
            self.token_ids[row, num_tokens : num_tokens + len(kept)] = kept
            self.num_tokens[row] += len(kept)
            output.sampled_token_ids[request_id] = kept
            if wanted := [p for p in logprobs[start : start + len(kept)] if p is not None]:
                output.logprobs[request_id] = wanted
            start += num_drafts + 1
        return output

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Captures the forward pass of a decode step for each batch size, largest first: they share one memory pool.

        The requests are made up and their tokens land in block 0, so this must happen before any request does.
        """
        pool = torch.cuda.graph_pool_handle()
        largest = min(len(self.free_rows), len(self.input_ids.array))
        for size in sorted((s for s in GRAPH_SIZES if s <= largest), reverse=True):
            ones, rows = np.ones(size, dtype=np.int64), np.arange(size)
            inputs = StepInputs([], rows, ones, ones, rows, rows * 0)
            eager, graphed = BatchExecution(False, size), BatchExecution(True, size)
            input_ids, positions = self._preprocess(graphed, self._build_attention_metadata(inputs, graphed))
            self._model_forward(input_ids, positions, eager)  # compiles what is not compiled yet
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                hidden_states = self._model_forward(input_ids, positions, eager)
            self.graphs[size] = graph, hidden_states
        torch.cuda.synchronize()
