"""What answers teach: how fast each worker is, and how long answers get."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from math import inf
from typing import TYPE_CHECKING

from kvroute.clock import Clock, monotonic
from kvroute.policies.costs.calibration import Calibration
from kvroute.policies.costs.lengths import OutputLengths
from kvroute.router.dispatch import Choice
from kvroute.router.metrics import Metrics, gauge
from kvroute.router.workers import Member, Registry, State, base_model
from kvroute.types import Outcome, Prediction, RequestView

if TYPE_CHECKING:
    from prometheus_client.core import Metric


IDLE_S = 60.0
"""After so long without an answer, a worker is priced like its class again."""
LOOK_EVERY_S = 5.0
HEED_EVERY_S = 0.02
"""Of one worker, an answer so soon after another teaches nothing of its pace: both tell the same."""


class Pacing:
    """Holds every outcome against what was predicted of it, and corrects what predicts the next."""

    def __init__(
        self, registry: Registry, lengths: OutputLengths, metrics: Metrics, clock: Clock = monotonic
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._looked_s = clock()
        self._answered_s: dict[str, float] = {}
        self._lengths = lengths
        self._metrics = metrics
        self._calibration = Calibration()
        registry.on_change(self._changed)
        metrics.add_source(self)

    def observe(self, choice: Choice, request: RequestView, outcome: Outcome) -> None:
        """An attempt is over. Failures and refusals teach nothing."""
        member = choice.member
        prediction = choice.prediction
        if prediction is None or member.state is State.GONE:
            return
        if outcome.failure is not None or outcome.status != 200:
            return
        if outcome.completion_tokens:
            self._lengths.observe(
                request.model, request.tenant, outcome.completion_tokens, request.max_output_tokens
            )
        if outcome.ttft_s is not None and request.stream and prediction.ttft_s > 0:
            self._metrics.ttft_error.of().observe(outcome.ttft_s / prediction.ttft_s)
        if outcome.itl_s is not None and prediction.itl_s > 0:
            self._metrics.itl_error.of().observe(outcome.itl_s / prediction.itl_s)
        self._calibrate(choice, request, outcome, prediction)

    def _calibrate(
        self, choice: Choice, request: RequestView, outcome: Outcome, prediction: Prediction
    ) -> None:
        now_s, worker_id = self._clock(), choice.member.worker.id
        if now_s - self._answered_s.get(worker_id, -inf) < HEED_EVERY_S:
            return
        self._answered_s[worker_id] = now_s
        self._calibration.observe(
            worker_id,
            choice.member.pace,
            outcome,
            _hardware_class(choice.member),
            now_s=now_s,
            charge=choice.lease.charge,
            match=choice.match,
            streamed=request.stream and prediction.is_plain,
        )
        if now_s - self._looked_s > LOOK_EVERY_S:
            self._look_after_idle(now_s)

    def _look_after_idle(self, now_s: float) -> None:
        """Give workers that are thought to be slow, and are not asked for that, another chance."""
        self._looked_s = now_s
        for worker_id, answered_s in self._answered_s.items():
            if now_s - answered_s > IDLE_S:
                self._calibration.retry(worker_id)

    def _changed(self, member: Member) -> None:
        if member.state is State.GONE:
            self._calibration.forget(member.worker.id)
            self._answered_s.pop(member.worker.id, None)
        elif member.state is State.READY:
            self._calibration.start(member.worker.id, member.pace, _hardware_class(member))

    def gauges(self) -> Iterator[Metric]:
        members = [member for member in self._registry.members.values() if member.state is State.READY]

        def per_worker(name: str, help_text: str, value: Callable[[Member], float]) -> Metric:
            return gauge(name, help_text, ("worker",), [((m.endpoint.url,), value(m)) for m in members])

        yield per_worker(
            "kvroute_worker_prefill_scale",
            "Prefill time on this worker per prefill time of its preset, as learned.",
            lambda member: member.pace.prefill_scale,
        )
        yield per_worker(
            "kvroute_worker_decode_scale",
            "The same for decode steps.",
            lambda member: member.pace.decode_scale,
        )
        yield per_worker(
            "kvroute_worker_overhead_seconds",
            "Part of every TTFT there that is neither queue nor prefill, as learned.",
            lambda member: member.pace.overhead_s,
        )
        for of in ("ttft", "itl"):
            known = [(m, errors) for m in members if (errors := self._calibration.errors(m.worker.id))]
            yield gauge(
                f"kvroute_worker_{of}_prediction_error",
                f"Mean absolute error of the last {of.upper()} predictions, as a share of the actual.",
                ("worker",),
                [((m.endpoint.url,), getattr(errors, of).absolute) for m, errors in known],
            )
            yield gauge(
                f"kvroute_worker_{of}_prediction_bias",
                "The same with its sign: above 0, too much was predicted.",
                ("worker",),
                [((m.endpoint.url,), getattr(errors, of).bias) for m, errors in known],
            )
        yield per_worker(
            "kvroute_worker_pending_prefill_seconds",
            "Prefill of the requests there that have not given a first byte.",
            lambda member: member.load.pending_prefill_s * member.pace.prefill_scale,
        )


def _hardware_class(member: Member) -> Hashable:
    """Workers that are taken to be equally fast until they prove otherwise."""
    return member.worker.engine, base_model(member), member.pace.speed
