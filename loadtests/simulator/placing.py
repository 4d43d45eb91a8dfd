"""What the router says of a request, and what its answer teaches the paces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from msgspec import Struct

from kvroute.load import Charge
from kvroute.policies.costs.calibration import Calibration
from kvroute.policies.costs.pace import Pace
from kvroute.policies.predicting import Expected
from kvroute.types import (
    NO_MATCH,
    Decision,
    Outcome,
    PrefixMatch,
    PromptKeys,
    Rejection,
    RequestView,
    Worker,
)

T = TypeVar("T")


class Ask(Struct, Generic[T], frozen=True):
    """A request as routing sees it, and whose it is."""

    item: T
    view: RequestView
    keys: PromptKeys
    since_s: float
    """When it arrived."""


UNKNOWN = -1
"""Who decodes is chosen once the prefill is over."""


class Placement(Struct, frozen=True):
    """A decision that is already paid for: `Router.finish` or `drop` is due."""

    prefill: int
    decode: int
    """The same worker unless prefill and decode are apart; `UNKNOWN` where that is chosen later."""
    decision: Decision
    charge: Charge
    """Of the prefill worker."""
    decode_charge: Charge
    """The same one, unless they are apart."""
    match: PrefixMatch
    """What the prefill worker is thought to hold of the prompt, whatever the policy made of it."""
    expected: Expected
    chosen_s: float

    @property
    def is_split(self) -> bool:
        return self.prefill != self.decode


class Served(Struct, frozen=True):
    """What a client and an engine's usage tell of an answer that has ended."""

    first_s: float
    output_tokens: int
    cached_tokens: int


Answer = Placement | Rejection
NOBODY = Rejection("no_worker")
"""No policy was asked: there is no worker that could take it."""


class Learning:
    """Corrects paces by answers, as the gateway does."""

    def __init__(self, calibration: Calibration, workers: Sequence[Worker], paces: Sequence[Pace]) -> None:
        self._calibration = calibration
        self._workers = workers
        self._paces = paces
        for worker, pace in zip(workers, paces, strict=True):
            calibration.start(worker.id, pace, pace.speed)

    def prefilled(self, ask: Ask[Any], placement: Placement, cached_tokens: int, now_s: float) -> None:
        """The prefill worker of a split request has answered."""
        prediction = placement.expected.prefill
        if prediction is None:
            return
        outcome = Outcome(
            self._workers[placement.prefill],
            200,
            ttft_s=now_s - placement.chosen_s,
            e2e_s=now_s - placement.chosen_s,
            prompt_tokens=ask.view.prompt_tokens,
            cached_tokens=cached_tokens,
            completion_tokens=1,
            matched_tokens=placement.decision.matched_tokens,
            prediction=prediction,
        )
        self._observe(placement.prefill, placement, outcome, now_s, ttft_teaches=prediction.is_plain)

    def finished(self, ask: Ask[Any], placement: Placement, served: Served, now_s: float) -> None:
        """The whole answer is there."""
        more = served.output_tokens - 1
        prediction = placement.expected.prediction
        outcome = Outcome(
            self._workers[placement.decode],
            200,
            ttft_s=served.first_s - placement.chosen_s,
            e2e_s=now_s - placement.chosen_s,
            prompt_tokens=ask.view.prompt_tokens,
            cached_tokens=served.cached_tokens,
            completion_tokens=served.output_tokens,
            matched_tokens=placement.decision.matched_tokens,
            itl_s=(now_s - served.first_s) / more if more else None,
            prediction=prediction,
        )
        teaches = ask.view.stream and prediction.is_plain
        self._observe(placement.decode, placement, outcome, now_s, ttft_teaches=teaches)

    def _observe(
        self, at: int, placement: Placement, outcome: Outcome, now_s: float, *, ttft_teaches: bool
    ) -> None:
        pace, is_prefill = self._paces[at], at == placement.prefill
        self._calibration.observe(
            self._workers[at].id,
            pace,
            outcome,
            pace.speed,
            now_s=now_s,
            charge=placement.charge if is_prefill else None,
            match=placement.match if is_prefill else NO_MATCH,
            streamed=ttft_teaches,
        )
