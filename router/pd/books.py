"""Where the legs of split requests are written down: metrics, health, paces, index."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from kvroute.config import Config
from kvroute.config_groups import Timeouts
from kvroute.router.dispatch import Choice, PrefillHalf
from kvroute.router.knowledge import Knowledge, Prompt
from kvroute.router.metrics import Metrics
from kvroute.router.pacing import Pacing
from kvroute.router.pd.metrics import PdMetrics
from kvroute.router.workers import Registry
from kvroute.types import Outcome, RequestView


class Asked(Struct, frozen=True):
    """A request as it is written down."""

    view: RequestView
    prompt: Prompt
    model_label: str
    request_id: str


class Books(Struct, frozen=True):
    """What a leg is judged by, and whom it tells."""

    config: Config
    registry: Registry
    metrics: Metrics
    pd_metrics: PdMetrics
    pacing: Pacing
    knowledge: Knowledge
    prefill_timeouts: Timeouts
    decode_timeouts: Timeouts
    """Of an answer that is streamed: the first byte of another is its end."""

    @property
    def prefill_is_short(self) -> bool:
        """Whether another worker may still be tried when a prefill leg has taken too long."""
        return self.prefill_timeouts.first_byte_s < self.config.timeouts.first_byte_s

    @property
    def decode_is_short(self) -> bool:
        return self.decode_timeouts.first_byte_s < self.config.timeouts.first_byte_s

    def prefilled(
        self, choice: Choice, half: PrefillHalf, asked: Asked, outcome: Outcome, *, teaches: bool
    ) -> None:
        """A prefill leg is over. It `teaches` how fast its worker is where it waited for nobody else."""
        member, url = half.member, half.member.endpoint.url
        self.metrics.worker_requests.add(url)
        if outcome.failure is not None:
            self.metrics.upstream_errors.add(url, outcome.failure)
            self.pd_metrics.failures.add("prefill", outcome.failure)
        elif outcome.status == 200:
            self.registry.answered(member)
            if half.match.tokens:
                self.metrics.matched_tokens.add(by=half.match.tokens)
        if teaches and half.prediction is not None:
            alone = Choice(member, choice.decision, half.lease, half.match, half.prediction, choice.chosen_s)
            self.pacing.observe(alone, replace(asked.view, stream=True), outcome)
        self.registry.observe(member, outcome, is_trial=half.lease.is_trial)
        self.knowledge.observe(asked.model_label, asked.prompt, half.match, outcome)


def shorter(timeouts: Timeouts, first_byte_s: float) -> Timeouts:
    """The same, with a first byte no later than that."""
    return timeouts.model_copy(update={"first_byte_s": min(timeouts.first_byte_s, first_byte_s)})
