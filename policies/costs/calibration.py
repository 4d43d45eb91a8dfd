"""How fast workers turn out to be: every answer corrects the pace of the worker that gave it.

    TTFT = f (overhead_s + prefill_scale x (seconds of the preset ahead of the request, and its own prefill))
    ITL  = g decode_scale x (seconds of the preset that a step takes)

The overhead and the scales are those of a hardware class (preset, engine, model), learned from all of its
workers; f and g are a worker's own. They are 1, so that noise prefers none of those alike, until it proves
to be slower or faster than its class for longer than a burst lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import exp, log
from statistics import median

from kvroute.load import Charge
from kvroute.policies.costs.estimators import (
    FLOOR_S,
    LEAST_ANCHOR,
    LONG_S,
    MAX_OVERHEAD_S,
    MAX_SCALE,
    MIN_SCALE,
    Bunches,
    Deviation,
    Line,
    Ratio,
    RecentError,
)
from kvroute.policies.costs.pace import Pace
from kvroute.types import NO_MATCH, Outcome, PrefixMatch

CLASS_ANSWERS = 100.0
"""How many of the last answers of a class count. In a bunch, the n-th of a worker counts 1/sqrt(n)."""
APART = log(1.5)
"""A worker that differs by more, and by more than three of its own uncertainties, is priced apart."""
APART_BUNCHES = 3
"""How many bunches of answers must say so: a burst makes one or two."""
ALIKE = log(1.2)
"""One that differs by less is like its class again."""
REPRICE = 0.04
"""Workers are priced anew when an estimate has moved so far, as a logarithm."""
REPRICE_AT_S = (0.1, 2.0)
"""Waits, in seconds of the preset, at which estimates of a class are compared."""
TINY_S = 1e-3
"""A prediction of less was about nothing: what the answer took is overhead."""
RELIABILITY_GAIN = 0.05
MAX_CLASSES = 256


class _Class:
    """Workers that are taken to be alike."""

    __slots__ = ("decode", "members", "prefill", "price")

    def __init__(self) -> None:
        self.prefill = Line(0.0, 1.0, LEAST_ANCHOR, CLASS_ANSWERS)
        self.decode = Ratio(1.0, LEAST_ANCHOR, CLASS_ANSWERS)
        self.price = Pace()
        """What its workers are priced by; its corrections alone matter."""
        self.members: dict[Hashable, _Worker] = {}

    def reprice(self) -> None:
        """Price its workers by the estimates, when they have moved."""
        line, price = self.prefill, self.price
        if abs(log(self.decode.value / price.decode_scale)) > REPRICE:
            self._write()
            return
        for wait_s in REPRICE_AT_S:
            if abs(_off(line.predict(wait_s), _predict(price, wait_s))) > REPRICE:
                self._write()
                return

    def adopt(self) -> None:
        """When nobody whom it could learn from follows any more, it is what its best known worker is."""
        taught = [member for member in self.members.values() if member.answers]
        if not taught or any(member.follows for member in taught):
            return
        best = max(taught, key=lambda member: member.answers)
        self.prefill = Line(best.pace.overhead_s, best.pace.prefill_scale, 1.0, CLASS_ANSWERS)
        self.decode = Ratio(best.pace.decode_scale, 1.0, CLASS_ANSWERS)
        best.forget()
        self._write()

    def differs(self, one: _Worker, of: Callable[[_Worker], float]) -> bool:
        """Whether it is further off than the others: all are off while the estimates lag behind."""
        others = [of(member) for member in self.members.values() if member.answers and member is not one]
        off = of(one)
        beyond = off - median(others) if others else off
        return (beyond if off > 0 else -beyond) > APART

    def _write(self) -> None:
        price, line = self.price, self.prefill
        decode_by = log(self.decode.value / price.decode_scale)
        for member in self.members.values():
            if not member.follows:
                by = _off(line.predict(member.ahead_s), _predict(price, member.ahead_s))
                member.class_moved(by, decode_by)
        price.overhead_s, price.prefill_scale = line.overhead_s, line.scale
        price.decode_scale = self.decode.value
        for member in self.members.values():
            member.write(price)


class _Worker:
    """What sets one apart from its class, if anything does."""

    __slots__ = (
        "_written",
        "ahead_s",
        "answers",
        "bunches",
        "decode",
        "errors",
        "fast",
        "follows",
        "pace",
        "ttft",
    )

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.errors = Errors()
        self.forget()

    def forget(self) -> None:
        """Know nothing that would set it apart."""
        self.follows = True
        self.answers = 0
        self.bunches = Bunches()
        self.ttft, self.decode = Deviation(), Deviation()
        self.fast = Deviation()
        """TTFT after long prefills: only they tell a fast worker from one that was asked for little."""
        self.ahead_s = 0.0
        """What was ahead on average, where `ttft` is from."""
        self._written = 0.0, 0.0

    @property
    def ttft_off(self) -> float:
        """The logarithm of its own factor; above 0 is slower."""
        return max(self.ttft.value, min(self.fast.value, 0.0))

    def class_moved(self, ttft_by: float, decode_by: float) -> None:
        """What it is compared with predicts so much more now, as logarithms."""
        self.ttft.shift(ttft_by)
        self.fast.shift(ttft_by)
        self.decode.shift(decode_by)

    def judge(self, peers: _Class) -> bool:
        """Price it by itself if it is unlike its class, and like that if it is not; whether it left."""
        ttft_off, decode_off = self.ttft_off, self.decode.value
        if self.follows:
            ttft = self.ttft if ttft_off > 0 else self.fast
            if (_is_sure(ttft, ttft_off) and peers.differs(self, _ttft_off)) or (
                _is_sure(self.decode, decode_off) and peers.differs(self, _decode_off)
            ):
                self.follows = False
                self.write(peers.price)
                return True
        elif abs(ttft_off) < ALIKE and abs(decode_off) < ALIKE:
            self.follows = True
            self.write(peers.price)
        elif max(abs(ttft_off - self._written[0]), abs(decode_off - self._written[1])) > REPRICE:
            self.write(peers.price)
        return False

    def write(self, price: Pace) -> None:
        """Into its pace: its class's, times its own factors."""
        pace, ttft_off, decode_off = self.pace, 0.0, 0.0
        if not self.follows:
            ttft_off, decode_off = self.ttft_off, self.decode.value
        self._written = ttft_off, decode_off
        pace.overhead_s = min(price.overhead_s * exp(ttft_off), MAX_OVERHEAD_S)
        pace.prefill_scale = min(max(price.prefill_scale * exp(ttft_off), MIN_SCALE), MAX_SCALE)
        pace.decode_scale = min(max(price.decode_scale * exp(decode_off), MIN_SCALE), MAX_SCALE)


def _ttft_off(member: _Worker) -> float:
    return member.ttft_off


def _decode_off(member: _Worker) -> float:
    return member.decode.value


def _is_sure(deviation: Deviation, off: float) -> bool:
    return deviation.bunches >= APART_BUNCHES and abs(off) > max(APART, 3.0 * deviation.uncertainty)


def _predict(pace: Pace, ahead_s: float) -> float:
    return pace.overhead_s + pace.prefill_scale * ahead_s


def _off(actual_s: float, expected_s: float) -> float:
    """The logarithm of their ratio; the shortest times are all alike."""
    return log((actual_s + FLOOR_S) / (expected_s + FLOOR_S))


class Errors:
    """Recent errors of one worker's predictions."""

    __slots__ = ("itl", "ttft")

    def __init__(self) -> None:
        self.ttft = RecentError()
        self.itl = RecentError()


class Calibration:
    """The paces of all workers. Pure and synchronous; what is old is so by the answers since.

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
            member.forget()
            member.write(peers.price)

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
        now_s: float,
        charge: Charge | None = None,
        match: PrefixMatch = NO_MATCH,
        streamed: bool = True,
    ) -> None:
        """An attempt is over: correct `pace`. What failed, was refused or was not predicted teaches nothing.

        `charge` tells which prompt and cached part the prediction was about; without, it was about the
        reported prompt and `outcome.matched_tokens`. `match` is what the index said at the choice. The first
        byte of an answer that is not `streamed` comes with the last, so its TTFT is none. `now_s` tells which
        answers came together.
        """
        peers, member = self._member(worker_key, pace, hardware_class)
        if outcome.failure is not None or outcome.status is None or not 200 <= outcome.status < 300:
            return
        _learn_reliability(pace, outcome, match)
        prediction = outcome.prediction
        if prediction is None:
            return
        member.answers += 1
        member.bunches.add(now_s)
        if streamed and outcome.ttft_s is not None and outcome.ttft_s > 0:
            ahead_s = _corrected_ahead_s(prediction.ahead_s, pace, outcome, charge)
            queue_s = 0.0 if charge is None else max(prediction.ahead_s - charge.prefill_s, 0.0)
            _learn_ttft(member, peers, outcome.ttft_s, ahead_s, queue_s)
            member.errors.ttft.add(prediction.ttft_s, outcome.ttft_s)
        if outcome.itl_s is not None and outcome.itl_s > 0 and prediction.step_s > 0:
            _learn_itl(member, peers, outcome.itl_s / prediction.step_s)
            member.errors.itl.add(prediction.itl_s, outcome.itl_s)
        if member.judge(peers):
            peers.adopt()

    def _member(self, worker_key: Hashable, pace: Pace, hardware_class: Hashable) -> tuple[_Class, _Worker]:
        if self._class_of.get(worker_key) == hardware_class and worker_key in self._class_of:
            known = self._classes[hardware_class]
            member = known.members[worker_key]
            if member.pace is pace:
                return known, member
        self.forget(worker_key)
        peers = self._classes.pop(hardware_class, None) or _Class()
        self._classes[hardware_class] = peers
        self._class_of[worker_key] = hardware_class
        member = peers.members[worker_key] = _Worker(pace)
        member.write(peers.price)
        self._drop_classes()
        return peers, member

    def _drop_classes(self) -> None:
        """Those without workers, oldest first, while there are too many."""
        excess = len(self._classes) - self._max_classes
        if excess > 0:
            empty = [name for name, peers in self._classes.items() if not peers.members]
            for name in empty[:excess]:
                del self._classes[name]


def _learn_ttft(member: _Worker, peers: _Class, ttft_s: float, ahead_s: float, queue_s: float) -> None:
    """Of one answer: its class first, so that what all have in common sets nobody apart."""
    bunches = member.bunches
    if member.follows:
        peers.prefill.add(ahead_s, ttft_s, queue_s, bunches.answers**-0.5)
        peers.reprice()
    off = _off(ttft_s, _predict(peers.price, ahead_s))
    member.ttft.add(off, bunches.number)
    if ahead_s - queue_s >= LONG_S:
        member.fast.add(off, bunches.number)
    member.ahead_s += (ahead_s - member.ahead_s) / min(member.answers, CLASS_ANSWERS)


def _learn_itl(member: _Worker, peers: _Class, ratio: float) -> None:
    bunches = member.bunches
    if member.follows:
        peers.decode.add(ratio, bunches.answers**-0.5)
        peers.reprice()
    member.decode.add(log(ratio / peers.price.decode_scale), bunches.number)


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
