"""GET /metrics: vLLM's names, labels and buckets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

if TYPE_CHECKING:
    from kvroute.loadtests.mock_engine.answers import TokenAnswer
    from kvroute.loadtests.mock_engine.engine import MockEngine
    from kvroute.loadtests.mock_engine.steps import Totals

_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0),
    *(40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0),
    *(40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0),
    *(480.0, 960.0, 1920.0, 7680.0),
)


class Histogram:
    """Counts per bucket and a sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """`count` observations of one value."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by upper bound, and the sum."""
        total, out = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            out.append((bound, float(total)))
        return out, self._sum


class EngineMetrics:
    """Of one engine since its start; a collector of its own registry."""

    def __init__(self, engine: MockEngine) -> None:
        self._engine = engine
        self._labels = {"model_name": engine.options.model, "engine": "0"}
        self.ttft_s = Histogram(_TTFT_S)
        self.itl_s = Histogram(_ITL_S)
        self.queue_s = Histogram(_REQUEST_S)
        self.e2e_s = Histogram(_REQUEST_S)
        self.prompt_tokens = 0
        self.by_reason = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)

    # Observations.

    def started(self, answer: TokenAnswer) -> None:
        """The scheduler took the request in; only the first time counts."""
        if answer.started_s is None:
            answer.started_s = self._engine.now_s()
            self.queue_s.observe(answer.started_s - answer.arrived_s)
            self.prompt_tokens += answer.call.prompt_tokens

    def tokens(self, answer: TokenAnswer, count: int) -> None:
        """Tokens of a request were generated."""
        now_s = self._engine.now_s()
        if answer.token_s is None:
            self.ttft_s.observe(now_s - answer.arrived_s)
            count -= 1
            if count:
                self.itl_s.observe(0.0, count)
        else:
            self.itl_s.observe((now_s - answer.token_s) / count, count)
        answer.token_s = now_s

    def ended(self, answer: TokenAnswer, outcome: str) -> None:
        """A request is over."""
        now_s = self._engine.now_s()
        if outcome == "finished":
            self.e2e_s.observe(now_s - answer.arrived_s)
            self.by_reason[answer.call.parts[0].finish_reason] += 1
        else:
            self.by_reason["abort" if outcome == "aborted" else "error"] += 1

    # Exposition.

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        yield from self._gauges()
        yield from self._counters()
        yield self._config()
        yield self._histogram("time_to_first_token_seconds", "time to first token", self.ttft_s)
        yield self._histogram("inter_token_latency_seconds", "inter-token latency", self.itl_s)
        yield self._histogram("request_queue_time_seconds", "time spent in WAITING phase", self.queue_s)
        yield self._histogram("e2e_request_latency_seconds", "e2e request latency", self.e2e_s)

    def _gauges(self) -> Iterator[Metric]:
        engine = self._engine
        for name, text, value in (
            ("num_requests_running", "Number of requests in model execution batches.", engine.running),
            ("num_requests_waiting", "Number of requests waiting to be processed.", engine.waiting),
            (
                "kv_cache_usage_perc",
                "KV-cache usage. 1 means 100 percent usage.",
                engine.scheduler.cache.used_ratio,
            ),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            yield family
        reasons = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Number of waiting requests by reason.",
            labels=[*self._labels, "reason"],
        )
        for reason, value in (("capacity", engine.waiting), ("deferred", 0)):
            reasons.add_metric([*self._labels.values(), reason], value)
        yield reasons

    def _counters(self) -> Iterator[Metric]:
        totals = self._engine.scheduler.totals
        for name, text, value in (
            (
                "prefix_cache_queries",
                "Prefix cache queries, in number of queried tokens.",
                totals.queried_tokens,
            ),
            ("prefix_cache_hits", "Prefix cache hits, in number of cached tokens.", totals.cached_tokens),
            ("num_preemptions", "Cumulative number of preemption from the engine.", totals.preemptions),
            ("prompt_tokens", "Number of prefill tokens processed.", self.prompt_tokens),
            ("generation_tokens", "Number of generation tokens processed.", totals.generated_tokens),
            *self._external(totals),
        ):
            family = CounterMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            yield family
        success = CounterMetricFamily(
            "vllm:request_success",
            "Count of successfully processed requests.",
            labels=[*self._labels, "finished_reason"],
        )
        for reason, value in self.by_reason.items():
            success.add_metric([*self._labels.values(), reason], value)
        yield success

    def _external(self, totals: Totals) -> Iterator[tuple[str, str, int]]:
        """Of the tiers below the GPU and of other engines; asked for what the GPU does not hold."""
        engine = self._engine
        received = engine.pd.received_tokens
        if engine.options.connector == "nixl":
            text = "Number of requests that had their KV expire."
            yield "nixl_num_kv_expired_reqs", text, engine.pd.holds.expired_total
        if engine.scheduler.below is not None or received:
            asked = totals.queried_tokens - totals.cached_tokens
            text = "External prefix cache queries, in number of queried tokens."
            yield "external_prefix_cache_queries", text, asked
            text = "External prefix cache hits, in number of cached tokens."
            yield "external_prefix_cache_hits", text, totals.loaded_tokens + received

    def _config(self) -> Metric:
        options = self._engine.options
        size, blocks = options.block_size_tokens, options.capacity_blocks
        values = {
            "block_size": size,
            "cache_dtype": "auto",
            "enable_prefix_caching": True,
            "engine": 0,
            "gpu_memory_utilization": 0.92,
            "kv_cache_size_tokens": size * blocks,
            "num_cpu_blocks": None,
            "num_gpu_blocks": blocks,
            "num_gpu_blocks_override": options.kv_blocks,
            "prefix_caching_hash_algo": "sha256",
            "sliding_window": None,
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=list(values)
        )
        family.add_metric([str(value) for value in values.values()], 1)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(
            f"vllm:{name}", f"Histogram of {text} in seconds.", labels=list(self._labels)
        )
        buckets, total = histogram.buckets()
        family.add_metric(list(self._labels.values()), buckets, total)
        return family
