# SPDX-License-Identifier: Apache-2.0
"""GET /metrics: our own names as the truth, and a copy under vLLM's that its tools read.

Under trees `spec_decode_num_draft_tokens` counts verified nodes, siblings included, so accepted
over drafted is not comparable with a chain's; `position` is the depth less one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator

    from treespark.serving.async_engine import AsyncEngine
    from treespark.serving.records import RequestRecord

OWN, COMPATIBLE = "treespark", "vllm"
_LABELS = ("model_name", "engine")
# Seconds; from a chunk of a small model to a full answer of a large one.
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_HISTOGRAMS = {
    "time_to_first_token_seconds": "Arrival to first token, waiting for a slot included.",
    "inter_token_latency_seconds": "Mean time per token behind the first, per request.",
    "e2e_request_latency_seconds": "Arrival to last token.",
    "request_queue_time_seconds": "Arrival to slot.",
}
# Name -> field of EngineStats, text.
_COUNTERS = {
    "prompt_tokens": ("num_prompt_tokens", "Prompt tokens read."),
    "prefix_cache_queries": ("num_prompt_tokens", "Prompt tokens looked for in the cache."),
    "prefix_cache_hits": ("num_cached_tokens", "Prompt tokens found in the cache."),
    "generation_tokens": ("num_generation_tokens", "Tokens put out."),
    "spec_decode_num_drafts": ("num_drafts", "Rounds of a request with a draft."),
    "spec_decode_num_draft_tokens": ("num_draft_tokens", "Draft nodes verified."),
    "spec_decode_num_accepted_tokens": ("num_accepted_tokens", "Draft tokens accepted."),
}
_GAUGES = {
    "num_requests_running": ("num_running", "Requests that hold a slot."),
    "num_requests_waiting": ("num_waiting", "Requests that wait for a slot."),
    "kv_cache_usage_perc": ("kv_usage", "Share of the cache in use, 0 to 1."),
}
# These have no vLLM name.
_OWN_COUNTERS = {
    "rounds": ("num_rounds", "Rounds of all requests."),
    "committed_tokens": ("num_committed_tokens", "Tokens that rounds put out."),
}
_OWN_GAUGES = {
    "tree_budget": ("tree_budget", "Nodes that a tree may have now."),
    "free_slots": ("num_free_slots", "Slots that no request holds."),
}


class Telemetry:
    """Counts of ended requests, and a reader of the engine's own counts.

    compatible: export vLLM's names too.
    """

    def __init__(self, engine: AsyncEngine, model_name: str, compatible: bool = True) -> None:
        """Start at zero."""
        self._engine, self._values = engine, (model_name, "0")
        self._prefixes = (OWN, COMPATIBLE) if compatible else (OWN,)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._finished = {"stop": 0, "length": 0}
        self._histograms = {
            name: [self._histogram(f"{prefix}:{name}", text) for prefix in self._prefixes]
            for name, text in _HISTOGRAMS.items()
        }

    def _histogram(self, name: str, text: str) -> Any:
        histogram = Histogram(name, text, _LABELS, buckets=_BUCKETS, registry=self._registry)
        return histogram.labels(*self._values)

    def count_finished(self, record: RequestRecord, reason: str) -> None:
        """Add one request that ended by itself."""
        self._finished[reason] += 1
        first, end, admitted = record.first_token_s, record.finished_s, record.admitted_s
        if first is None or end is None or admitted is None:
            return
        seconds = {
            "time_to_first_token_seconds": first - record.arrival_s,
            "e2e_request_latency_seconds": end - record.arrival_s,
            "request_queue_time_seconds": admitted - record.arrival_s,
        }
        if record.num_output_tokens > 1:
            later = record.num_output_tokens - 1
            seconds["inter_token_latency_seconds"] = (end - first) / later
        for name, value in seconds.items():
            for histogram in self._histograms[name]:
                histogram.observe(value)

    def text(self) -> bytes:
        """Return the page in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Any]:
        """Yield the families that are read from the engine; called by the registry."""
        for prefix in self._prefixes:
            yield from self._shared(prefix)
        for name, (field, text) in _OWN_COUNTERS.items():
            yield self._counter(f"{OWN}:{name}", text, getattr(self._engine.stats, field))
        for name, (field, text) in _OWN_GAUGES.items():
            yield self._gauge(f"{OWN}:{name}", text, getattr(self._engine.stats, field))
        yield from self._phases()
        aborted = "Requests dropped by their clients."
        yield self._counter(f"{OWN}:requests_aborted", aborted, self._engine.num_aborted)

    def _phases(self) -> Iterator[Any]:
        """Where the time of the rounds goes, from an engine that takes it."""
        stats = self._engine.stats
        if stats.phase_s is None:
            return
        name, text = f"{OWN}:round_seconds", "Time of the engine's steps by phase."
        family = CounterMetricFamily(name, text, labels=(*_LABELS, "phase"))
        for phase, seconds in stats.phase_s.items():
            family.add_metric((*self._values, phase), seconds)
        yield family
        text = "Rounds of the whole batch in that time."
        yield self._counter(f"{OWN}:timed_rounds", text, stats.num_timed_rounds)

    def _shared(self, prefix: str) -> Iterator[Any]:
        """Families that exist under both prefixes."""
        stats = self._engine.stats
        for name, (field, text) in _GAUGES.items():
            yield self._gauge(f"{prefix}:{name}", text, getattr(stats, field))
        for name, (field, text) in _COUNTERS.items():
            yield self._counter(f"{prefix}:{name}", text, getattr(stats, field))
        rejected = "Requests refused because the queue was full."
        yield self._counter(f"{prefix}:admission_rejections", rejected, self._engine.num_rejected)
        name, text = "spec_decode_num_accepted_tokens_per_pos", "Rounds that accepted this deep."
        family = CounterMetricFamily(f"{prefix}:{name}", text, labels=(*_LABELS, "position"))
        for position, count in enumerate(stats.num_accepted_per_position):
            family.add_metric((*self._values, str(position)), count)
        yield family
        success = CounterMetricFamily(
            f"{prefix}:request_success", "Ended requests.", labels=(*_LABELS, "finished_reason")
        )
        counts = self._finished | {"abort": self._engine.num_aborted}
        for reason, count in counts.items():
            success.add_metric((*self._values, reason), count)
        yield success

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._values, value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._values, value)
        return family
