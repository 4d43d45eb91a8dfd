"""How fast workers turn out to be: every answer corrects the pace of the worker that gave it.

    TTFT = overhead_s + prefill_scale x (seconds of the preset ahead of the request, and its own prefill)
    ITL  = decode_scale x (seconds of the preset that a step takes)

Workers of one hardware class (preset, engine, model) are taken to be alike until one proves otherwise: they
share their answers, and hold exactly equal paces, so that noise prefers none of them.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import log

from kvroute.load import Charge
from kvroute.policies.costs.estimators import FLOOR_S, LEAST_ANCHOR, Line, Ratio, RecentError
from kvroute.policies.costs.pace import Pace
from kvroute.types import NO_MATCH, Outcome, PrefixMatch

WORKER_ANSWERS, CLASS_ANSWERS = 50.0, 100.0
"""How many of the last answers count, of one worker and of a class."""
APART = 0.4
"""A worker that differs by more (a logarithm), beyond its own uncertainty, is priced by its own answers."""
ALIKE = 0.2
"""One that differs by less is like its class again."""
REPRICE = 0.04
"""A class's workers are priced anew when its estimate has moved so far."""
SHORT_S, LONG_S = 0.1, 2.0
"""Waits, in seconds of the preset, at which estimates are compared."""
TINY_S = 1e-3
"""A prediction of less was about nothing: what the answer took is overhead."""
FULL_ANCHOR_ANSWERS = 20
"""Answers of a class after which its estimate counts like one answer of a worker that joins it."""
RELIABILITY_GAIN = 0.05
MAX_CLASSES = 256


class _Estimate:
    """What a worker's or a class's answers say."""

    __slots__ = ("decode", "prefill")

    def __init__(self, start: _Estimate | None, remembered: float) -> None:
        if start is None:
            self.prefill = Line(0.0, 1.0, LEAST_ANCHOR, remembered)
            self.decode = Ratio(1.0, LEAST_ANCHOR, remembered)
            return
        prefill, decode = start.prefill, start.decode
        self.prefill = Line(prefill.overhead_s, prefill.scale, _anchor(prefill.count), remembered)
        self.decode = Ratio(decode.value, _anchor(decode.count), remembered)

    @property
    def answers(self) -> int:
        return max(self.prefill.count, self.decode.count)

    def write(self, pace: Pace) -> None:
        pace.overhead_s, pace.prefill_scale = self.prefill.overhead_s, self.prefill.scale
        pace.decode_scale = self.decode.value

    def is_within(self, limit: float, pace: Pace, uncertainties: float = 0.0) -> bool:
        """Whether it and `pace` predict the same, up to so much or so many of its own uncertainties."""
        prefill, decode = self.prefill, self.decode
        own_limit = max(limit, uncertainties * prefill.uncertainty)
        for ahead_s in (SHORT_S, LONG_S):
            own_s = prefill.overhead_s + prefill.scale * ahead_s + FLOOR_S
            its_s = pace.overhead_s + pace.prefill_scale * ahead_s + FLOOR_S
            if abs(log(own_s / its_s)) > own_limit:
                return False
        own_limit = max(limit, uncertainties * decode.uncertainty)
        return abs(log(decode.value / pace.decode_scale)) <= own_limit


def _anchor(answers: int) -> float:
    return LEAST_ANCHOR + (1 - LEAST_ANCHOR) * min(answers / FULL_ANCHOR_ANSWERS, 1.0)


class _Class:
    """Workers that are taken to be alike."""

    __slots__ = ("estimate", "members", "price")

    def __init__(self) -> None:
        self.estimate = _Estimate(None, CLASS_ANSWERS)
        self.price = Pace()
        """What those that follow are priced by; its corrections alone matter."""
        self.members: dict[Hashable, _Worker] = {}

    def reprice(self) -> None:
        """Let those that follow have the estimate, when it has moved."""
        if not self.estimate.is_within(REPRICE, self.price):
            self._write_price()

    def adopt(self) -> None:
        """When nobody whom it could learn from follows any more, it is what its best known worker is."""
        taught = [member for member in self.members.values() if member.estimate is not None]
        if not taught or any(member.follows for member in taught):
            return
        best = max(taught, key=lambda member: 0 if member.estimate is None else member.estimate.answers)
        self.estimate = _Estimate(best.estimate, CLASS_ANSWERS)
        best.follows = True
        self._write_price()

    def _write_price(self) -> None:
        self.estimate.write(self.price)
        for member in self.members.values():
            if member.follows:
                member.follow(self.price)


class _Worker:
    __slots__ = ("errors", "estimate", "follows", "pace")

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.estimate: _Estimate | None = None
        """None before its first answer."""
        self.follows = True
        self.errors = Errors()

    def follow(self, price: Pace) -> None:
        pace = self.pace
        pace.overhead_s, pace.prefill_scale = price.overhead_s, price.prefill_scale
        pace.decode_scale = price.decode_scale


class Errors:
    """Recent errors of one worker's predictions."""

    __slots__ = ("itl", "ttft")

    def __init__(self) -> None:
        self.ttft = RecentError()
        self.itl = RecentError()


class Calibration:
    """The paces of all workers. Pure and synchronous, without a clock: answers are what ages answers.

    A worker `start`s once, with its pace; it is the only one to write the corrections in there.
    """

    def __init__(self, max_classes: int = MAX_CLASSES) -> None:
        self._max_classes = max_classes
        self._classes: dict[Hashable, _Class] = {}
        self._class_of: dict[Hashable, Hashable] = {}

    def __repr__(self) -> str:
        return f"<Calibration {len(self._class_of)} workers in {len(self._classes)} classes>"

    def start(self, worker_key: Hashable, pace: Pace, hardware_class: Hashable) -> None:
        """A worker is there, or is of another class or pace than before: it is priced like its class."""
        self._member(worker_key, pace, hardware_class)

    def forget(self, worker_key: Hashable) -> None:
        """A worker is gone; its class remembers what it taught. Idempotent."""
        if worker_key in self._class_of:
            peers = self._classes[self._class_of.pop(worker_key)]
            del peers.members[worker_key]
            peers.adopt()
            self._drop_classes()

    def retry(self, worker_key: Hashable) -> None:
        """Forget what set a worker apart, and price it like its class.

        Else one that was slow for a while, and is asked no more for that, could never show that it is not.
        """
        if not self.follows_class(worker_key) and worker_key in self._class_of:
            peers = self._classes[self._class_of[worker_key]]
            member = peers.members[worker_key]
            member.estimate, member.follows = None, True
            member.follow(peers.price)

    def errors(self, worker_key: Hashable) -> Errors | None:
        """How good the last predictions for a worker were; None for one that is not there."""
        if worker_key not in self._class_of:
            return None
        return self._classes[self._class_of[worker_key]].members[worker_key].errors

    def follows_class(self, worker_key: Hashable) -> bool:
        """Whether it is priced like its class; False for one that is not there."""
        known = worker_key in self._class_of
        return known and self._classes[self._class_of[worker_key]].members[worker_key].follows

    def observe(
        self,
        worker_key: Hashable,
        pace: Pace,
        outcome: Outcome,
        hardware_class: Hashable,
        *,
        charge: Charge | None = None,
        match: PrefixMatch = NO_MATCH,
        streamed: bool = True,
    ) -> None:
        """An attempt is over: correct `pace`. What failed, was refused or was not predicted teaches nothing.

        `charge` tells which prompt and cached part the prediction was about; without, it was about the
        reported prompt and `outcome.matched_tokens`. `match` is what the index said at the choice. The first
        byte of an answer that is not `streamed` comes with the last, so its TTFT is none.
        """
        member = self._member(worker_key, pace, hardware_class)
        if outcome.failure is not None or outcome.status is None or not 200 <= outcome.status < 300:
            return
        _learn_reliability(pace, outcome, match)
        prediction, peers = outcome.prediction, self._classes[hardware_class]
        if prediction is None:
            return
        if member.estimate is None:
            member.estimate = _Estimate(peers.estimate, WORKER_ANSWERS)
        estimates = (member.estimate, peers.estimate) if member.follows else (member.estimate,)
        if streamed and outcome.ttft_s is not None and outcome.ttft_s > 0:
            ahead_s = _corrected_ahead_s(prediction.ahead_s, pace, outcome, charge)
            queue_s = 0.0 if charge is None else max(prediction.ahead_s - charge.prefill_s, 0.0)
            for estimate in estimates:
                estimate.prefill.add(ahead_s, outcome.ttft_s, queue_s)
            member.errors.ttft.add(prediction.ttft_s, outcome.ttft_s)
        if outcome.itl_s is not None and outcome.itl_s > 0 and prediction.step_s > 0:
            for estimate in estimates:
                estimate.decode.add(outcome.itl_s / prediction.step_s)
            member.errors.itl.add(prediction.itl_s, outcome.itl_s)
        peers.reprice()
        self._price(member, member.estimate, peers)

    @staticmethod
    def _price(member: _Worker, estimate: _Estimate, peers: _Class) -> None:
        """By its own answers where they differ from its class's, else like the class."""
        if member.follows:
            member.follows = estimate.is_within(APART, peers.price, 3.0)
            if not member.follows:
                peers.adopt()
        elif estimate.is_within(ALIKE, peers.price):
            member.follows = True
            member.follow(peers.price)
        if not member.follows:
            estimate.write(member.pace)

    def _member(self, worker_key: Hashable, pace: Pace, hardware_class: Hashable) -> _Worker:
        if self._class_of.get(worker_key) == hardware_class and worker_key in self._class_of:
            member = self._classes[hardware_class].members[worker_key]
            if member.pace is pace:
                return member
        self.forget(worker_key)
        peers = self._classes.pop(hardware_class, None) or _Class()
        self._classes[hardware_class] = peers
        self._class_of[worker_key] = hardware_class
        member = peers.members[worker_key] = _Worker(pace)
        member.follow(peers.price)
        self._drop_classes()
        return member

    def _drop_classes(self) -> None:
        """Those without workers, oldest first, while there are too many."""
        excess = len(self._classes) - self._max_classes
        if excess > 0:
            empty = [name for name, peers in self._classes.items() if not peers.members]
            for name in empty[:excess]:
                del self._classes[name]


def _corrected_ahead_s(ahead_s: float, pace: Pace, outcome: Outcome, charge: Charge | None) -> float:
    """As if prompt and cached part had been known as the engine reports them; 0 for next to nothing."""
    prompt, cached = outcome.prompt_tokens, outcome.cached_tokens
    if charge is not None:
        assumed_prompt, assumed_new = charge.prompt_tokens, charge.uncached_tokens
    elif prompt is not None:
        assumed_prompt, assumed_new = prompt, prompt - outcome.matched_tokens
    if prompt is not None and cached is not None:
        new, assumed_new = max(prompt - cached, 1), max(assumed_new, 1)
        if (prompt, new) != (assumed_prompt, assumed_new):
            speed = pace.speed
            ahead_s += speed.marginal_prefill_s(new, prompt - new)
            ahead_s -= speed.marginal_prefill_s(assumed_new, max(assumed_prompt - assumed_new, 0))
    return ahead_s if ahead_s > TINY_S else 0.0


def _learn_reliability(pace: Pace, outcome: Outcome, match: PrefixMatch) -> None:
    """What came of the part of a match that was predicted and not confirmed."""
    unsure = match.tokens - match.confirmed_tokens
    if unsure > 0 and outcome.cached_tokens is not None:
        held = min(max(outcome.cached_tokens - match.confirmed_tokens, 0), unsure) / unsure
        pace.match_reliability += RELIABILITY_GAIN * (held - pace.match_reliability)
