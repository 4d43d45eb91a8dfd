"""What the gateway counts, and how Prometheus reads it.

The hot path adds to plain dictionaries and lists; prometheus-client turns them into families when it is
scraped. Labels are bounded: policy and failure names come from fixed sets, models from the workers,
workers from the registry, and whatever is not known is `other`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Protocol, runtime_checkable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

LATENCY_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0, 160.0, 320.0, 640.0,
)  # fmt: skip
ITL_BOUNDS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2,
    0.3, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
DECISION_BOUNDS_S = (
    0.000005,
    0.00001,
    0.000025,
    0.00005,
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.05,
)


RATIO_BOUNDS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.11, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


class Counter:
    """A counter with labels."""

    def __init__(self, name: str, help_text: str, labels: Sequence[str] = ()) -> None:
        self.name, self.help, self.labels = name, help_text, tuple(labels)
        self.values: dict[tuple[str, ...], float] = defaultdict(float)
        if not self.labels:
            self.values[()] = 0.0  # absent until its first event, it would hide that event from rate()

    def add(self, *labels: str, by: float = 1.0) -> None:
        self.values[labels] += by

    def value(self, *labels: str) -> float:
        return self.values.get(labels, 0.0)

    def total(self) -> float:
        return sum(self.values.values())

    def family(self) -> Metric:
        family = CounterMetricFamily(self.name, self.help, labels=self.labels)
        for labels, value in self.values.items():
            family.add_metric(labels, value)
        return family


class Series:
    """One histogram series; `observe` is a bisection and two additions."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)


class Histogram:
    """A histogram with labels."""

    def __init__(
        self, name: str, help_text: str, bounds: tuple[float, ...], labels: Sequence[str] = ()
    ) -> None:
        self.name, self.help, self.bounds, self.labels = name, help_text, bounds, tuple(labels)
        self.series: dict[tuple[str, ...], Series] = {}

    def of(self, *labels: str) -> Series:
        series = self.series.get(labels)
        if series is None:
            series = self.series[labels] = Series(self.bounds)
        return series

    def family(self) -> Metric:
        family = HistogramMetricFamily(self.name, self.help, labels=self.labels)
        for labels, series in self.series.items():
            edges = [*(repr(bound) for bound in self.bounds), "+Inf"]
            family.add_metric(labels, list(zip(edges, accumulate(series.counts), strict=True)), series.sum)
        return family


@runtime_checkable
class GaugeSource(Protocol):
    """Something that can state its gauges when asked."""

    def gauges(self) -> Iterable[Metric]: ...


class Metrics:
    """Every family of the gateway; a scrape calls `gauges` for what lives elsewhere."""

    def __init__(self) -> None:
        self.requests = Counter(
            "kvroute_requests", "Requests by route, model and status.", ("route", "model", "status")
        )
        self.decisions = Counter(
            "kvroute_decisions", "Workers chosen, by policy and by the policy's reason.", ("policy", "reason")
        )
        self.worker_requests = Counter(
            "kvroute_worker_requests", "Attempts ended, by the worker they were sent to.", ("worker",)
        )
        self.fallbacks = Counter(
            "kvroute_policy_fallbacks",
            "Choices made by least-loaded instead of the policy.",
            ("policy", "reason"),
        )
        self.overruns = Counter(
            "kvroute_policy_overruns", "Decisions that took longer than policy_budget_s.", ("policy",)
        )
        self.shadow = Counter(
            "kvroute_shadow_decisions",
            "The shadow policy beside the real one: same or other worker, rejected, error, paused.",
            ("policy", "agreement"),
        )
        self.no_keys = Counter(
            "kvroute_prompt_without_keys", "Prompts that prefix routing has no opinion on.", ("reason",)
        )
        self.prompts = Counter(
            "kvroute_prompts",
            "Prompts with keys, by how the keys were made: from tokens or from bytes.",
            ("mode",),
        )
        self.approximate = Counter(
            "kvroute_prompts_approximate",
            "Prompts whose keys were made from bytes, by why their tokens were not known.",
            ("reason",),
        )
        self.retries = Counter("kvroute_retries", "Attempts on another worker, by what failed.", ("reason",))
        self.retries_denied = Counter("kvroute_retries_denied", "Failures not retried, by why.", ("reason",))
        self.stale = Counter(
            "kvroute_stale_connections", "Pooled connections that had closed; sent again at once."
        )
        self.upstream_errors = Counter(
            "kvroute_upstream_errors",
            "Failed attempts by worker and cause, retried ones included.",
            ("worker", "reason"),
        )
        self.in_band_errors = Counter(
            "kvroute_in_band_errors", "Streams that carried an error event.", ("worker",)
        )
        self.failures = Counter(
            "kvroute_failures",
            "Error answers made by the gateway itself, clients' mistakes included, by cause.",
            ("reason",),
        )
        self.disconnects = Counter(
            "kvroute_client_disconnects", "Clients that left before the end.", ("phase",)
        )
        self.prompt_tokens = Counter(
            "kvroute_prompt_tokens",
            "Prompt tokens as engines count them; a stream tells only with stream_options.include_usage.",
        )
        self.cached_tokens = Counter("kvroute_cached_tokens", "Of these, reported by engines as cached.")
        self.matched_tokens = Counter(
            "kvroute_matched_tokens", "Prompt tokens the index expected to be cached."
        )
        self.completion_tokens = Counter(
            "kvroute_completion_tokens", "Output tokens as engines counted them."
        )
        self.ttft = Histogram(
            "kvroute_ttft_seconds",
            "Request received to first body byte relayed.",
            LATENCY_BOUNDS_S,
            ("model",),
        )
        self.itl = Histogram(
            "kvroute_itl_seconds", "Between two reads of a streamed body.", ITL_BOUNDS_S, ("model",)
        )
        self.e2e = Histogram(
            "kvroute_e2e_seconds",
            "Request received to response complete, of requests a worker answered.",
            LATENCY_BOUNDS_S,
            ("model",),
        )
        self.decision_time = Histogram(
            "kvroute_decision_seconds", "Time to decide: matches, policy, charge.", DECISION_BOUNDS_S
        )
        self.holds = Counter(
            "kvroute_holds",
            "Requests to be held, by how it ended: placed, expired, refused, left; not held: full, closing.",
            ("ended",),
        )
        self.hold_time = Histogram("kvroute_hold_seconds", "Time waited for a worker.", LATENCY_BOUNDS_S)
        self.ttft_error = Histogram(
            "kvroute_ttft_prediction_ratio", "TTFT from the choice on, actual / predicted.", RATIO_BOUNDS
        )
        self.itl_error = Histogram(
            "kvroute_itl_prediction_ratio", "Mean time between tokens, actual / predicted.", RATIO_BOUNDS
        )
        self._families = [item for item in vars(self).values() if isinstance(item, Counter | Histogram)]
        self._sources: list[GaugeSource] = []
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            yield family.family()
        for source in self._sources:
            yield from source.gauges()

    def add_source(self, source: GaugeSource) -> None:
        self._sources.append(source)

    def forget_worker(self, url: str) -> None:
        """Drop the series of a worker that left, so that churn does not pile up series."""
        for counter in (self.worker_requests, self.upstream_errors, self.in_band_errors):
            for labels in [labels for labels in counter.values if labels[0] == url]:
                del counter.values[labels]

    def render(self) -> bytes:
        return generate_latest(self.registry)


def gauge(
    name: str, help_text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    """A gauge family from its rows."""
    family = GaugeMetricFamily(name, help_text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family
