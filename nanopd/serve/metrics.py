"""What `/metrics` shows, in Prometheus' text format. Names follow vLLM's.

What the engine core counts is read from its last stats whenever somebody asks; what only the server sees (how completions
ended, how long requests took) is counted here.
"""

import dataclasses
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nanopd.core.output import SchedulerStats, TransferStats
from nanopd.engine.llm import RequestOutput

_STATES = ("running", "waiting", "loading", "compiling", "reclaiming", "idle", "early")
_COUNTS = ["num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "cascade_saved_tokens"]
_COUNTS += ["spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"]
_TIMES = {"time_to_first_token": "time_to_first_token", "inter_token_latency": "inter_token_latency"}
_TIMES |= {"e2e_request_latency": "e2e_latency"}  # by name: what RequestMetrics calls it
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics(Collector):
    """`scheduler` and `transfer` are the engine core's latest stats."""

    def __init__(self) -> None:
        self.scheduler, self.transfer = SchedulerStats(), TransferStats()
        self._registry = registry = CollectorRegistry()
        registry.register(self)
        self._ended = Counter("nanopd:requests", "Completions that have ended.", ["finish_reason"], registry=registry)
        self._prompt_tokens = Counter("nanopd:prompt_tokens", "Tokens of their prompts.", registry=registry)
        self._generation_tokens = Counter("nanopd:generation_tokens", "Tokens of their answers.", registry=registry)
        self._times = {
            field: Histogram(f"nanopd:{name}_seconds", "One value a request.", registry=registry, buckets=_SECONDS)
            for name, field in _TIMES.items()
        }

    def observe(self, output: RequestOutput) -> None:
        """Counts a request that has ended, one way or another."""
        for completion in output.outputs:
            self._ended.labels(completion.finish_reason).inc()
            self._generation_tokens.inc(len(completion.token_ids))
        self._prompt_tokens.inc(len(output.prompt_token_ids))
        values = output.metrics.as_dict(len(output.outputs[0].token_ids))
        for field, histogram in self._times.items():
            if values[field] is not None:
                histogram.observe(values[field])

    def collect(self) -> Iterator[Metric]:
        """What the engine core counts."""
        for state in _STATES:
            value = getattr(self.scheduler, f"num_{state}")
            yield GaugeMetricFamily(f"nanopd:num_requests_{state}", f"Requests that are {state} now.", value)
        yield GaugeMetricFamily("nanopd:kv_cache_usage", "Share of the blocks in use.", self.scheduler.kv_cache_usage)
        for name in _COUNTS:
            yield CounterMetricFamily(f"nanopd:{name}", "See SchedulerStats.", getattr(self.scheduler, name))
        for name, value in dataclasses.asdict(self.transfer).items():
            yield CounterMetricFamily(f"nanopd:kv_transfer_{name}", "See TransferStats.", value)

    def text(self) -> bytes:
        """The whole page."""
        return generate_latest(self._registry)
