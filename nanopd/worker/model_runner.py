"""The model runner: carries out one step that the scheduler has planned, one method for each stage.

    synchronize_input_prep             wait until the last step has read its input buffers
      _update_states                   who is new, who goes, who has got more blocks
      _prepare_inputs                  positions, slot mapping, and which tokens need logits
      _determine_batch_execution_and_padding
      _build_attention_metadata
      _preprocess                      input ids and positions, on the device
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

from nanopd.connector.base import KVConnectorWorker
from nanopd.core.output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from nanopd.models.decoder import Decoder
from nanopd.worker.attention import AttentionBackend, AttentionMetadata, ForwardContext
from nanopd.worker.kv_memory import KVCache
from nanopd.worker.sampler import SamplingRow, sample


@dataclass(slots=True)
class StepInputs:
    """The flat batch of one step, on the host: R requests, T tokens."""

    request_ids: list[str]
    rows: np.ndarray  # int64 [R]: each request's row in the runner's tables
    query_lens: np.ndarray  # int64 [R]: new tokens of each request
    seq_lens: np.ndarray  # int64 [R]: tokens in the cache after this step
    input_ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T]
    slot_mapping: np.ndarray  # int64 [T]
    logits_indices: np.ndarray  # int64 [S]: the last token of each request that catches up in this step
    sampled: np.ndarray  # int64 [S]: which of the R requests those are


@dataclass(frozen=True, slots=True)
class BatchExecution:
    """How to run the forward pass: as a captured CUDA graph of a fixed size, or eagerly as it is."""

    use_graph: bool
    num_padded_tokens: int


class ModelRunner:
    """Runs the model for one engine.

    Args:
        model: the decoder.
        kv_cache: its K and V.
        backend: attention over that cache.
        max_num_seqs: most requests in a step.
        max_model_len: most tokens of a request.
        connector: moves K and V to and from other engines; None: nobody does.
    """

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        backend: AttentionBackend,
        *,
        max_num_seqs: int,
        max_model_len: int,
        connector: KVConnectorWorker | None = None,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.backend = backend
        self.connector = connector
        self.device = kv_cache.memory.device
        self.block_size = kv_cache.layers[0][0].shape[1]
        self.context = ForwardContext(backend, kv_cache, model.config.sliding_window)

        self.rows: dict[str, int] = {}  # request id -> its row in the tables below
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.requests: dict[str, NewRequestData] = {}
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int64)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.block_table = np.zeros((max_num_seqs, -(-max_model_len // self.block_size)), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """One step: from the scheduler's plan to sampled tokens."""
        if self.connector:
            self.connector.start_load_kv(scheduler_output.kv_connector_metadata)
        with self.synchronize_input_prep():
            self._update_states(scheduler_output)
            output = ModelRunnerOutput({})
            if scheduler_output.total_num_scheduled_tokens:
                inputs = self._prepare_inputs(scheduler_output.num_scheduled_tokens)
                execution = self._determine_batch_execution_and_padding(inputs)
                self.backend.plan(self._build_attention_metadata(inputs, execution))
                input_ids, positions = self._preprocess(inputs, execution)
        if scheduler_output.total_num_scheduled_tokens:
            hidden_states = self._model_forward(input_ids, positions)
            sample_hidden_states = hidden_states[torch.from_numpy(inputs.logits_indices).to(self.device)]
            if len(inputs.sampled):
                output = self._sample(self.model.compute_logits(sample_hidden_states), inputs)
        if self.connector:
            output.kv_connector_output = self.connector.get_finished()
        return output

    @contextmanager
    def synchronize_input_prep(self) -> Iterator[None]:
        """On a GPU the last step may still be copying from the input buffers; on a CPU there is nothing to wait for."""
        yield

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        """Brings the tables up to date with the scheduler's output (rule S7)."""
        for request_id in scheduler_output.finished_req_ids | scheduler_output.preempted_req_ids:
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

    def _append_blocks(self, row: int, block_ids: Sequence[int]) -> None:
        if block_ids:
            start = self.num_blocks[row]
            self.block_table[row, start : start + len(block_ids)] = block_ids
            self.num_blocks[row] += len(block_ids)

    def _prepare_inputs(self, num_scheduled_tokens: dict[str, int]) -> StepInputs:
        """Lays the new tokens of all requests one after the other and finds each one's position and slot (rule K1)."""
        request_ids = list(num_scheduled_tokens)
        rows = np.array([self.rows[request_id] for request_id in request_ids])
        query_lens = np.array(list(num_scheduled_tokens.values()))
        num_computed = self.num_computed_tokens[rows]
        seq_lens = num_computed + query_lens

        #   query_lens    3        1    2          num_computed  4    9    0
        #   token_rows    a a a    b    c c        positions     4 5 6    9    0 1
        ends = np.cumsum(query_lens)
        token_rows = np.repeat(rows, query_lens)
        positions = np.arange(ends[-1]) - np.repeat(ends - query_lens - num_computed, query_lens)
        block_ids = self.block_table[token_rows, positions // self.block_size].astype(np.int64)
        slot_mapping = block_ids * self.block_size + positions % self.block_size

        sampled = np.flatnonzero(seq_lens == self.num_tokens[rows])
        return StepInputs(
            request_ids,
            rows,
            query_lens,
            seq_lens,
            input_ids=self.token_ids[token_rows, positions],
            positions=positions,
            slot_mapping=slot_mapping,
            logits_indices=ends[sampled] - 1,
            sampled=sampled,
        )

    def _determine_batch_execution_and_padding(self, inputs: StepInputs) -> BatchExecution:
        return BatchExecution(use_graph=False, num_padded_tokens=len(inputs.input_ids))

    def _build_attention_metadata(self, inputs: StepInputs, execution: BatchExecution) -> AttentionMetadata:
        longest_table = -(-int(inputs.seq_lens.max()) // self.block_size)
        query_start_loc = np.concatenate(([0], np.cumsum(inputs.query_lens)))
        return AttentionMetadata(
            query_start_loc=self._to_device(query_start_loc.astype(np.int32)),
            seq_lens=self._to_device(inputs.seq_lens.astype(np.int32)),
            block_table=self._to_device(self.block_table[inputs.rows, :longest_table]),
            slot_mapping=self._to_device(inputs.slot_mapping),
            query_lens_list=inputs.query_lens.tolist(),
            seq_lens_list=inputs.seq_lens.tolist(),
        )

    def _preprocess(self, inputs: StepInputs, execution: BatchExecution) -> tuple[Tensor, Tensor]:
        return self._to_device(inputs.input_ids), self._to_device(inputs.positions)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _model_forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """[T] and [T] -> hidden states [T, hidden_size]."""
        hidden_states: Tensor = self.model(input_ids, positions, self.context.attend)
        return hidden_states

    def _sample(self, logits: Tensor, inputs: StepInputs) -> ModelRunnerOutput:
        """Chooses tokens from logits [S, vocab_size] and writes them into the tables: the next step finds them there."""
        sampling_rows = []
        for i in inputs.sampled:
            request, row = self.requests[inputs.request_ids[i]], inputs.rows[i]
            tokens = self.token_ids[row, : self.num_tokens[row]]
            sampling_rows.append(
                SamplingRow(request.sampling_params, tokens, request.num_prompt_tokens, request.stop_token_ids)
            )
        token_ids, logprobs = sample(logits, sampling_rows)
        rows = inputs.rows[inputs.sampled]
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1
        request_ids = [inputs.request_ids[i] for i in inputs.sampled]
        return ModelRunnerOutput(
            dict(zip(request_ids, token_ids)), {i: p for i, p in zip(request_ids, logprobs) if p is not None}
        )
