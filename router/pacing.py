"""What answers teach: how fast each worker is, and how long answers get."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvroute.policies.costs.lengths import OutputLengths
from kvroute.router.metrics import Metrics, gauge
from kvroute.router.workers import Member, Registry
from kvroute.types import Outcome, PrefixMatch, RequestView

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class Pacing:
    """Holds every outcome against what was predicted of it, and corrects what predicts the next."""

    def __init__(self, registry: Registry, lengths: OutputLengths, metrics: Metrics) -> None:
        self._registry = registry
        self._lengths = lengths
        self._metrics = metrics
        metrics.add_source(self)

    def observe(self, member: Member, request: RequestView, match: PrefixMatch, outcome: Outcome) -> None:
        """An attempt is over. Failures and refusals teach nothing."""
        if outcome.failure is not None or outcome.status != 200 or outcome.prediction is None:
            return
        prediction = outcome.prediction
        if outcome.completion_tokens:
            self._lengths.observe(request.model, request.tenant, outcome.completion_tokens)
        if outcome.ttft_s is not None and request.stream and prediction.ttft_s > 0:
            self._metrics.ttft_error.of().observe(outcome.ttft_s / prediction.ttft_s)
        if outcome.itl_s is not None and prediction.itl_s > 0:
            self._metrics.itl_error.of().observe(outcome.itl_s / prediction.itl_s)

    def gauges(self) -> Iterator[Metric]:
        members = list(self._registry.members.values())
        yield gauge(
            "kvroute_worker_prefill_scale",
            "Prefill time here per prefill time of the preset, as learned.",
            ("worker",),
            [((m.endpoint.url,), m.pace.prefill_scale) for m in members],
        )
        yield gauge(
            "kvroute_worker_decode_scale",
            "The same for decode steps.",
            ("worker",),
            [((m.endpoint.url,), m.pace.decode_scale) for m in members],
        )
        yield gauge(
            "kvroute_worker_overhead_seconds",
            "Part of every TTFT that is neither queue nor prefill.",
            ("worker",),
            [((m.endpoint.url,), m.pace.overhead_s) for m in members],
        )
