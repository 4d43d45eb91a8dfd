"""What stands between a request and a worker: gather the snapshot, ask the policy, charge the load, hold.

The gateway's decision without its network: `consider` is the counterpart of `Dispatcher.consider`, and the
queue that of `Waiting`. Nothing here knows of the simulator but through the clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from msgspec import Struct

from kvroute.clock import Clock
from kvroute.conductor.index import PrefixIndex
from kvroute.load import Charge, WorkerLoad
from kvroute.policies.base import Policy
from kvroute.policies.costs.calibration import Calibration
from kvroute.policies.costs.lengths import OutputLengths
from kvroute.policies.costs.pace import Pace
from kvroute.policies.costs.rates import Rate
from kvroute.policies.holding import HoldQueue, Ticket
from kvroute.policies.predicting import expect
from kvroute.types import (
    NO_MATCH,
    Decision,
    Fleet,
    Hold,
    Outcome,
    Prediction,
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


class Placement(Struct, frozen=True):
    """A decision that is already paid for: `charge` must be released."""

    worker: int
    decision: Decision
    charge: Charge
    match: PrefixMatch
    """What the worker is thought to hold of the prompt, whatever the policy made of it."""
    prediction: Prediction
    chosen_s: float


class Served(Struct, frozen=True):
    """What a client and an engine's usage tell of an answer that has ended."""

    first_s: float
    output_tokens: int
    cached_tokens: int


Answer = Placement | Rejection


class Router(Generic[T]):
    """One gateway over a fixed fleet. `predicts`: what was routed counts as held until events have come.
    With a `calibration`, answers correct the paces.
    """

    def __init__(
        self,
        policy: Policy,
        workers: Sequence[Worker],
        paces: Sequence[Pace],
        index: PrefixIndex,
        clock: Clock,
        *,
        predicts: bool = True,
        hold_limit: int = 1024,
        calibration: Calibration | None = None,
    ) -> None:
        self.workers = workers
        self.loads = [WorkerLoad() for _ in workers]
        self.lengths = OutputLengths()
        self._policy = policy
        self._needs_prefix = policy.needs_prefix
        self._needs_active_keys = bool(getattr(policy, "needs_active_keys", False))
        self.paces = paces
        self._index = index
        self._ids = [worker.id for worker in workers]
        self._clock = clock
        self._predicts = predicts
        self._arrivals = Rate()
        self._queue: HoldQueue[Ask[T]] = HoldQueue(hold_limit)
        self._calibration = calibration
        if calibration is not None:
            for worker, pace in zip(workers, paces, strict=True):
                calibration.start(worker.id, pace, pace.speed)

    @property
    def held(self) -> int:
        """Requests that wait for a worker."""
        return len(self._queue)

    def arrive(self, ask: Ask[T]) -> Answer | Ticket[Ask[T]]:
        """A new request: its answer, or its place in the queue, in which case `pump` is due."""
        self._arrivals.add(self._clock())
        if self._queue.full:
            return self.choose(ask)
        answer = self.consider(ask, self._queue.promised_s)
        if isinstance(answer, Hold):
            return self._queue.add(ask, ask.view, answer, self._clock())
        return answer

    def expire(self, ticket: Ticket[Ask[T]]) -> Answer:
        """It has waited long enough: an answer at any price."""
        self._queue.remove(ticket)
        return self.choose(ticket.item)

    def pump(self) -> list[tuple[Ask[T], Answer]]:
        """Something may have freed: who waits no more, and the answer."""
        return self._queue.pump(self.consider) if self._queue else []

    def first_byte(self, placement: Placement) -> None:
        """Its prefill is over."""
        placement.charge.first_byte(self._clock())

    def finish(self, ask: Ask[T], placement: Placement, served: Served) -> None:
        """It is over."""
        now_s = self._clock()
        placement.charge.release(now_s)
        self.lengths.observe(ask.view.model, ask.view.tenant, served.output_tokens)
        if self._calibration is None:
            return
        worker, pace = self.workers[placement.worker], self.paces[placement.worker]
        more = served.output_tokens - 1
        outcome = Outcome(
            worker,
            200,
            ttft_s=served.first_s - placement.chosen_s,
            e2e_s=now_s - placement.chosen_s,
            prompt_tokens=ask.view.prompt_tokens,
            cached_tokens=served.cached_tokens,
            completion_tokens=served.output_tokens,
            matched_tokens=placement.decision.matched_tokens,
            itl_s=(now_s - served.first_s) / more if more else None,
            prediction=placement.prediction,
        )
        self._calibration.observe(
            worker.id,
            pace,
            outcome,
            pace.speed,
            now_s=now_s,
            charge=placement.charge,
            match=placement.match,
            streamed=ask.view.stream,
        )

    def choose(self, ask: Ask[T]) -> Answer:
        """An answer that is no `Hold`."""
        answer = self.consider(ask, None)
        if isinstance(answer, Hold):
            raise TypeError(f"{type(self._policy).__name__} held a request although it may not")
        return answer

    def consider(self, ask: Ask[T], promised_s: Mapping[str, float] | None) -> Answer | Hold:
        """Ask the policy and charge its choice; `Hold` only where `promised_s` is given."""
        now_s = self._clock()
        fleet = self._fleet(ask, now_s, promised_s)
        decision = self._policy.decide(ask.view, fleet)
        if isinstance(decision, Decision):
            return self._charge(ask, fleet, decision)
        return decision

    def _fleet(self, ask: Ask[T], now_s: float, promised_s: Mapping[str, float] | None) -> Fleet:
        keys, ids, count = ask.keys, self._ids, len(self.workers)
        matches: Sequence[PrefixMatch] = ()
        held_blocks: Sequence[int] = ()
        if self._needs_prefix:
            matches = self._index.match({keys.block_tokens: keys}, ids)
            held_blocks = [self._index.held_blocks(id_) for id_ in ids]
        shows_keys = self._needs_active_keys
        return Fleet(
            now_s,
            self.workers,
            self.loads,
            matches,
            held_blocks,
            keys=keys.keys if shows_keys else (),
            block_tokens=keys.block_tokens if shows_keys else 0,
            paces=self.paces,
            output_tokens=self.lengths.expect(ask.view.model, ask.view.tenant, ask.view.max_output_tokens),
            arrivals_per_s=self._arrivals.per_s(now_s) / count,
            promised_s=[promised_s.get(id_, 0.0) for id_ in ids] if promised_s else (),
            may_hold=promised_s is not None,
            held_s=now_s - ask.since_s,
        )

    def _charge(self, ask: Ask[T], fleet: Fleet, decision: Decision) -> Placement:
        """Add what the request will cost its worker, by the same time model whatever the policy."""
        chosen = decision.candidate.decode
        at = next(i for i, worker in enumerate(self.workers) if worker is chosen)
        load = self.loads[at]
        match = fleet.matches[at] if fleet.matches else NO_MATCH
        expected = expect(ask.view, fleet, decision, at)
        prompt_tokens = ask.view.prompt_tokens
        charge = load.charge(
            fleet.now_s,
            prefill_s=expected.prefill_s,
            prompt_tokens=prompt_tokens,
            uncached_tokens=prompt_tokens - expected.cached_tokens,
            output_tokens=fleet.output_tokens,
            keys=fleet.keys,
        )
        if self._predicts and self._needs_prefix:
            self._index.predict(chosen.id, ask.keys)
        return Placement(at, decision, charge, match, expected.prediction, fleet.now_s)
