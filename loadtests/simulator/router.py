"""What stands between a request and a worker: gather the snapshot, ask the policy, charge the load, hold.

The gateway's decision without its network: `consider` is the counterpart of `Dispatcher.consider`, and the
queue that of `Waiting`. Nothing here knows of the simulator but through the clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from kvroute.clock import Clock
from kvroute.conductor.index import PrefixIndex
from kvroute.load import Charge, WorkerLoad
from kvroute.loadtests.simulator.placing import (
    NOBODY,
    UNKNOWN,
    Answer,
    Ask,
    Learning,
    Placement,
    Served,
)
from kvroute.policies.base import Orders, Policy
from kvroute.policies.costs.calibration import Calibration
from kvroute.policies.costs.lengths import OutputLengths
from kvroute.policies.costs.links import Link, PdLinks
from kvroute.policies.costs.pace import Pace
from kvroute.policies.costs.rates import Rate
from kvroute.policies.holding import HoldQueue, Ticket
from kvroute.policies.pairing import decoders, prefillers, roomiest
from kvroute.policies.predicting import expect
from kvroute.policies.ttft import Ttft
from kvroute.router.dispatch import HeldBlocks
from kvroute.types import (
    NO_MATCH,
    Candidate,
    Decision,
    Fleet,
    Hold,
    PrefixMatch,
    RequestView,
    Role,
    Worker,
)

T = TypeVar("T")


class _Members(Struct, frozen=True):
    """The workers that may take a request, those that prefill first; parallel but for the last two."""

    at: Sequence[int]
    workers: Sequence[Worker]
    loads: Sequence[WorkerLoad]
    paces: Sequence[Pace]
    ids: Sequence[str]
    prefillers: int
    places: Mapping[str, int]
    """By id: place in the sequences."""


class Router(Generic[T]):
    """One gateway over a fleet. `predicts`: what was routed counts as held until events have come. With a
    `calibration`, answers correct the paces. With `pd_links`, prefill and decode workers are apart, in this
    order: a policy that does not choose pairs is shown the prefill workers, and the decode worker is the one
    with the fewest KV tokens promised.
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
        pd_links: PdLinks | None = None,
        peer_link: Link | None = None,
        decode_later: bool = False,
    ) -> None:
        self.workers = workers
        self.loads = [WorkerLoad() for _ in workers]
        self.lengths = OutputLengths()
        self._policy = policy
        self.orders = isinstance(policy, Orders)
        """Whether the policy orders those that come together."""
        self._needs_prefix = policy.needs_prefix
        self._needs_active_keys = bool(getattr(policy, "needs_active_keys", False))
        self.paces = paces
        self._index = index
        self._pd_links = pd_links
        self._peer_link = peer_link
        self._chooses_pairs = bool(getattr(policy, "chooses_pairs", False))
        self._prices_alike = isinstance(policy, Ttft)
        self._is_apart = any(worker.role is not Role.BOTH for worker in workers)
        self._decode_later = decode_later and self._is_apart and not self._chooses_pairs
        self._choose_decode = getattr(policy, "choose_decode", self._roomiest)
        self._turn = -1
        self._is_usable = [True] * len(workers)
        self._members = self._members_without(())
        self._clock = clock
        self._predicts = predicts
        self._arrivals = Rate()
        self._queue: HoldQueue[Ask[T]] = HoldQueue(hold_limit)
        self._learning = None if calibration is None else Learning(calibration, workers, paces)

    @property
    def held(self) -> int:
        """Requests that wait for a worker."""
        return len(self._queue)

    @property
    def looks(self) -> int:
        """How many of them `pump` looks at."""
        return min(len(self._queue), self._queue.look)

    def order(self, ask: Ask[T]) -> tuple[int, ...]:
        """Among those that come together, by a policy that orders them: the lowest first."""
        assert isinstance(self._policy, Orders)
        if not self._members.at:
            return ()
        return self._policy.order(ask.view, self._fleet(ask, self._members, self._clock(), None))

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

    def set_usable(self, worker: int, is_usable: bool) -> None:
        """The gateway has found out that a worker is gone, or back."""
        self._is_usable[worker] = is_usable
        self._members = self._members_without(())

    def retry(self, ask: Ask[T], tried: Sequence[int]) -> Answer:
        """Another worker for an attempt that failed; a retry is never held."""
        answer = self.consider(ask, None, tried)
        assert not isinstance(answer, Hold)
        return answer

    def first_byte(self, placement: Placement) -> None:
        """Its first token is there."""
        placement.charge.first_byte(self._clock())
        placement.decode_charge.first_byte(self._clock())

    def prefilled(self, ask: Ask[T], placement: Placement, cached_tokens: int) -> None:
        """The prefill worker's part of a split request is over."""
        now_s = self._clock()
        placement.charge.first_byte(now_s)
        placement.charge.release(now_s)
        if self._learning is not None:
            self._learning.prefilled(ask, placement, cached_tokens, now_s)

    def drop(self, placement: Placement) -> None:
        """It has failed."""
        placement.charge.release(self._clock())
        placement.decode_charge.release(self._clock())

    def finish(self, ask: Ask[T], placement: Placement, served: Served) -> None:
        """It is over."""
        now_s = self._clock()
        self.drop(placement)
        self.lengths.observe(ask.view.model, ask.view.tenant, served.output_tokens)
        if self._learning is not None:
            self._learning.finished(ask, placement, served, now_s)

    def choose(self, ask: Ask[T]) -> Answer:
        """An answer that is no `Hold`."""
        answer = self.consider(ask, None)
        if isinstance(answer, Hold):
            raise TypeError(f"{type(self._policy).__name__} held a request although it may not")
        return answer

    def consider(
        self, ask: Ask[T], promised_s: Mapping[str, float] | None, tried: Sequence[int] = ()
    ) -> Answer | Hold:
        """Ask the policy and charge its choice; `Hold` only where `promised_s` is given."""
        members = self._members_without(tried) if tried else self._members
        count = len(members.at)
        if not members.prefillers or (self._is_apart and members.prefillers == count):
            return NOBODY
        fleet = self._fleet(ask, members, self._clock(), promised_s)
        if self._pd_links is None or self._chooses_pairs:
            decision = self._policy.decide(ask.view, fleet)
        else:
            decision = self._policy.decide(ask.view, prefillers(fleet))
        if not isinstance(decision, Decision):
            return decision
        workers, candidate = fleet.workers, decision.candidate
        at = members.places[candidate.prefill.id]
        if self._chooses_pairs:
            decode_at = members.places[candidate.decode.id]
        elif not self._is_apart:
            decode_at = at
        else:
            decode_at = members.prefillers
            if not self._decode_later:
                decode_at += self._choose_decode(ask.view, decoders(fleet))
            decision = replace(decision, candidate=Candidate(candidate.prefill, workers[decode_at]))
        return self._charge(ask, members, fleet, decision, at, decode_at)

    def pair(self, ask: Ask[T], placement: Placement) -> Placement | None:
        """The decode worker of one that is prefilled, chosen only now; None where there is none."""
        members = self._members
        if members.prefillers == len(members.at):
            return None
        now_s = self._clock()
        fleet = self._fleet(ask, members, now_s, None)
        decode_at = members.prefillers + self._choose_decode(ask.view, decoders(fleet))
        return replace(
            placement,
            decode=members.at[decode_at],
            decode_charge=self._charge_decode(ask, fleet, decode_at),
        )

    def _roomiest(self, _: RequestView, fleet: Fleet) -> int:
        self._turn += 1
        return roomiest(fleet.loads, range(len(fleet.loads)), self._turn)

    def _members_without(self, tried: Sequence[int]) -> _Members:
        """Tuples for the standing fleet, by whose identity much is kept; lists for a retry's."""
        as_many: type[tuple[Any, ...]] | type[list[Any]] = list if tried else tuple
        everyone = [i for i, usable in enumerate(self._is_usable) if usable and i not in tried]
        ids = as_many([self.workers[i].id for i in everyone])
        return _Members(
            everyone,
            as_many([self.workers[i] for i in everyone]),
            as_many([self.loads[i] for i in everyone]),
            as_many([self.paces[i] for i in everyone]),
            ids,
            sum([self.workers[i].role is not Role.DECODE for i in everyone]),
            {id_: place for place, id_ in enumerate(ids)},
        )

    def _fleet(
        self, ask: Ask[T], members: _Members, now_s: float, promised_s: Mapping[str, float] | None
    ) -> Fleet:
        keys, ids = ask.keys, members.ids
        matches: Sequence[PrefixMatch] = ()
        held_blocks: Sequence[int] = ()
        if self._needs_prefix:
            matches = self._index.match({keys.block_tokens: keys}, ids)
            held_blocks = HeldBlocks(self._index, ids)
        shows_keys = self._needs_active_keys
        return Fleet(
            now_s,
            members.workers,
            members.loads,
            matches,
            held_blocks,
            keys=keys.keys if shows_keys else (),
            block_tokens=keys.block_tokens if shows_keys else 0,
            paces=members.paces,
            output_tokens=self.lengths.expect(ask.view.model, ask.view.tenant, ask.view.max_output_tokens),
            arrivals_per_s=self._arrivals.per_s(now_s) / members.prefillers,
            promised_s=_parallel(promised_s, members) if promised_s else (),
            may_hold=promised_s is not None,
            pd_links=self._pd_links,
            peer_link=self._peer_link,
            held_s=now_s - ask.since_s,
        )

    def _charge(
        self, ask: Ask[T], members: _Members, fleet: Fleet, decision: Decision, at: int, decode_at: int
    ) -> Placement:
        """Add what the request will cost its workers, by the same time model whatever the policy."""
        match = fleet.matches[at] if fleet.matches else NO_MATCH
        is_split = at != decode_at
        expected = expect(
            ask.view, fleet, decision, at, priced_alike=is_split and self._prices_alike, decode_at=decode_at
        )
        prompt_tokens, output_tokens = ask.view.prompt_tokens, fleet.output_tokens
        charge = fleet.loads[at].charge(
            fleet.now_s,
            prefill_s=expected.prefill_s,
            prompt_tokens=prompt_tokens,
            uncached_tokens=prompt_tokens - expected.cached_tokens,
            output_tokens=1.0 if is_split else output_tokens,
            keys=fleet.keys,
        )
        decode_charge = charge
        if is_split and not self._decode_later:
            decode_charge = self._charge_decode(ask, fleet, decode_at)
        if self._predicts and self._needs_prefix:
            self._index.predict(fleet.workers[at].id, ask.keys)
        return Placement(
            members.at[at],
            UNKNOWN if self._decode_later else members.at[decode_at],
            decision,
            charge,
            decode_charge,
            match,
            expected,
            fleet.now_s,
        )

    @staticmethod
    def _charge_decode(ask: Ask[T], fleet: Fleet, at: int) -> Charge:
        """The decode worker's part of a split request; for prices, it decodes there from now on."""
        charge = fleet.loads[at].charge(
            fleet.now_s,
            prompt_tokens=ask.view.prompt_tokens,
            output_tokens=fleet.output_tokens,
            keys=fleet.keys,
        )
        charge.await_kv(fleet.now_s)
        return charge


def _parallel(promised_s: Mapping[str, float], members: _Members) -> array[float]:
    """To the workers: few of a large fleet are promised anything."""
    every_s = array("d", bytes(8 * len(members.ids)))
    for id_, seconds in promised_s.items():
        place = members.places.get(id_)
        if place is not None:
            every_s[place] = seconds
    return every_s
