"""Recursive estimates that outliers hardly move: a line through times, and a ratio of times.

Errors of times are by a factor, so what lies further off than a few usual factors is taken as that far off
and no further (Huber's psi, on logarithms). The usual factor is learned as well: one that stays far off is no
outlier, and soon counts in full.
"""

from __future__ import annotations

from math import exp, log, sqrt

MIN_SCALE, MAX_SCALE = 0.05, 20.0
MAX_OVERHEAD_S = 0.05
"""Of network, HTTP and tokenizing. Whatever else comes on top, such as contention in a burst, is slowness."""
LONG_S = 0.05
"""A prefill of more, in seconds of the preset, can be told from overhead."""
FLOOR_S = 0.005
"""Noise of the shortest times; shorter ones than this are not told apart."""
NOISE = 0.2
"""Of longer times: their noise as a share of them."""
UNSURE_NOISE = 0.25
"""Of what is hearsay: the share of it that is noise on top."""
OVERHEAD_SPREAD_S = 0.03
"""How far from its anchor an overhead is thought to be: where all requests are alike, which leaves open what
is overhead and what is scale, the rest is scale."""
LEAST_ANCHOR = 0.1
"""Observations that an anchor is worth which nothing stands behind."""
BUNCH_PAUSE_S, BUNCH_S = 0.3, 0.5
BUNCHES = 20
"""How many of the last count."""

_FIRST_SPREAD = 0.7
_SPREAD_GAIN = 0.05
_LIMIT_SPREADS = 3.0
_MIN_LIMIT, _MAX_LIMIT = 0.3, 3.0


class _Spread:
    """How far off observations usually are, as a logarithm."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = _FIRST_SPREAD

    def limited(self, off: float, weight: float = 1.0) -> float:
        """The part of `off` that counts; it is learned from by so much of an observation."""
        limit = _LIMIT_SPREADS * self.value
        if limit < _MIN_LIMIT:
            limit = _MIN_LIMIT
        elif limit > _MAX_LIMIT:
            limit = _MAX_LIMIT
        size = abs(off)
        counted = size if size < limit else limit
        self.value += weight * _SPREAD_GAIN * (counted - self.value)
        return counted if off > 0 else -counted


class Line:
    """y = overhead_s + scale x by least squares: noise grows with x, what is old fades, an anchor stays.

    `remembered` is how many observations count. Overhead within 0..0.05 s, scale within 0.05..20, and below 1
    only as far as long prefills say so: of a scale that is too low, all that is priced by it looks free.
    """

    __slots__ = (
        "_anchor",
        "_fading",
        "_long",
        "_oo",
        "_os",
        "_oy",
        "_remembered",
        "_spread",
        "_ss",
        "_sy",
        "overhead_s",
        "scale",
    )

    def __init__(self, overhead_s: float, scale: float, anchor: float, remembered: float) -> None:
        """Starts at, and stays anchored to, these values; the scale as if by `anchor` observations."""
        self.overhead_s, self.scale = overhead_s, scale
        overhead_weight, scale_weight = OVERHEAD_SPREAD_S**-2, anchor / NOISE**2
        self._anchor = overhead_weight, overhead_weight * overhead_s, scale_weight, scale_weight * scale
        self._remembered = remembered
        self._fading = 1 - 1 / remembered
        self._spread = _Spread()
        self._oo = self._os = self._ss = self._oy = self._sy = 0.0
        self._long = 0.0, 0.0, 0.0
        """The sums of x, of its square and of its product with y, of long prefills alone."""

    def add(self, x_s: float, y_s: float, unsure_s: float = 0.0, share: float = 1.0) -> None:
        """One observation, or a share of one, in seconds; of x so much is hearsay."""
        expected_s = max(self.overhead_s + self.scale * x_s, FLOOR_S)
        y_s = expected_s * exp(self._spread.limited(log(max(y_s, FLOOR_S) / expected_s), share))
        fading = self._fading**share
        weight = share * (FLOOR_S + NOISE * x_s + UNSURE_NOISE * unsure_s) ** -2
        self._oo = self._oo * fading + weight
        self._os = self._os * fading + weight * x_s
        self._ss = self._ss * fading + weight * x_s * x_s
        self._oy = self._oy * fading + weight * y_s
        self._sy = self._sy * fading + weight * x_s * y_s
        if x_s - unsure_s >= LONG_S:
            os, ss, sy = self._long
            self._long = (
                os * fading + weight * x_s,
                ss * fading + weight * x_s * x_s,
                sy * fading + weight * x_s * y_s,
            )
        self._solve()

    def _solve(self) -> None:
        overhead_weight, overhead_sum, scale_weight, scale_sum = self._anchor
        oo, os, ss = self._oo + overhead_weight, self._os, self._ss + scale_weight
        oy, sy = self._oy + overhead_sum, self._sy + scale_sum
        overhead_s = (oy * ss - sy * os) / (oo * ss - os * os)
        if not 0.0 <= overhead_s <= MAX_OVERHEAD_S:
            overhead_s = min(max(overhead_s, 0.0), MAX_OVERHEAD_S)
        scale = (sy - os * overhead_s) / ss
        if scale < 1.0:
            os_long, ss_long, sy_long = self._long
            usual_s = min(scale_sum, scale_weight)
            at_least = (sy_long - os_long * overhead_s + usual_s) / (ss_long + scale_weight)
            if scale < at_least:
                scale = min(at_least, 1.0)
                overhead_s = min(max((oy - os * scale) / oo, 0.0), MAX_OVERHEAD_S)
        if not MIN_SCALE <= scale <= MAX_SCALE:
            scale = min(max(scale, MIN_SCALE), MAX_SCALE)
            overhead_s = min(max((oy - os * scale) / oo, 0.0), MAX_OVERHEAD_S)
        self.overhead_s, self.scale = overhead_s, scale

    def predict(self, x_s: float) -> float:
        """y for x, in seconds."""
        return self.overhead_s + self.scale * x_s


class Ratio:
    """A factor between two times: the fading mean of its logarithm, within 0.05..20."""

    __slots__ = ("_anchor", "_count", "_log", "_remembered", "_spread")

    def __init__(self, value: float, anchor: float, remembered: float) -> None:
        """Starts at `value`, as if by `anchor` observations."""
        self._log = log(value)
        self._anchor = anchor
        self._remembered = remembered
        self._spread = _Spread()
        self._count = 0.0

    def add(self, ratio: float, share: float = 1.0) -> None:
        """One observation above 0, or a share of one."""
        self._count += share
        counted = self._spread.limited(log(ratio) - self._log, share)
        self._log += share * counted / min(self._count + self._anchor, self._remembered)
        self._log = min(max(self._log, _LOG_MIN), _LOG_MAX)

    @property
    def value(self) -> float:
        return exp(self._log)


_LOG_MIN, _LOG_MAX = log(MIN_SCALE), log(MAX_SCALE)


class Bunches:
    """Which answers of a worker came together, and so say the same.

    They were slow together, by a burst or a neighbour. A bunch ends with a pause, or after a while.
    """

    __slots__ = ("_began_s", "_last_s", "answers", "number")

    def __init__(self) -> None:
        self.number = 0
        self.answers = 0
        """In this bunch."""
        self._began_s = self._last_s = 0.0

    def add(self, now_s: float) -> None:
        """One answer."""
        if not self.number or now_s - self._last_s > BUNCH_PAUSE_S or now_s - self._began_s > BUNCH_S:
            self.number += 1
            self.answers = 0
            self._began_s = now_s
        self.answers += 1
        self._last_s = now_s


class Deviation:
    """How far a worker is off its class: the fading mean of a logarithm, in which a bunch counts as one."""

    __slots__ = ("_answers", "_bunch", "_mean", "_spread", "_sum", "bunches", "value")

    def __init__(self) -> None:
        self.value = 0.0
        """The logarithm; above 0 is slower."""
        self.bunches = 0
        """With the one that may go on."""
        self._bunch = 0
        self._mean = self._sum = 0.0
        self._answers = 0
        self._spread = _Spread()

    def add(self, off: float, bunch: int) -> None:
        """One answer, in the bunch of this number, was off by so much."""
        if bunch != self._bunch:
            if self._answers:
                self._spread.limited(self._sum / self._answers - self._mean)
            self._mean, self._bunch = self.value, bunch
            self._sum, self._answers = 0.0, 0
            self.bunches += 1
        self._answers += 1
        self._sum += off
        counted = self._spread.limited(self._sum / self._answers - self._mean, 0.0)
        self.value = self._mean + counted / min(self.bunches, BUNCHES)

    def shift(self, by: float) -> None:
        """What it is compared with predicts so much more now."""
        self.value -= by
        self._mean -= by
        self._sum -= by * self._answers

    @property
    def uncertainty(self) -> float:
        """About one standard deviation."""
        return self._spread.value / sqrt(min(max(self.bunches, 1), BUNCHES))


class RecentError:
    """Of the last predictions, relative to what happened: 0.5 is half as long again, -0.5 half as long."""

    __slots__ = ("absolute", "bias", "count")

    def __init__(self) -> None:
        self.absolute = 0.0
        """Mean of the size."""
        self.bias = 0.0
        """Mean with its sign: above 0 where more is predicted than happens."""
        self.count = 0

    def add(self, predicted_s: float, actual_s: float) -> None:
        """One prediction; `actual_s` above 0. More than ten times too much counts as ten times."""
        error = min((predicted_s - actual_s) / actual_s, 10.0)
        self.count += 1
        gain = max(1 / self.count, 0.05)
        self.absolute += gain * (abs(error) - self.absolute)
        self.bias += gain * (error - self.bias)
