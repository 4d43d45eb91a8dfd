"""Recursive estimates that outliers hardly move: a line through times, and a ratio of times.

Errors of times are by a factor, so what lies further off than a few usual factors is taken as that far off
and no further (Huber's psi, on logarithms). The usual factor is learned as well: one that stays far off is no
outlier, and soon counts in full.
"""

from __future__ import annotations

from math import copysign, exp, log, sqrt

MIN_SCALE, MAX_SCALE = 0.05, 20.0
MAX_OVERHEAD_S = 10.0
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

_FIRST_SPREAD = 0.7
_SPREAD_GAIN = 0.05
_LIMIT_SPREADS = 3.0
_MIN_LIMIT, _MAX_LIMIT = 0.3, 3.0


class _Spread:
    """How far off observations usually are, as a logarithm."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = _FIRST_SPREAD

    def limited(self, off: float) -> float:
        """The part of `off` that counts."""
        limit = min(max(_LIMIT_SPREADS * self.value, _MIN_LIMIT), _MAX_LIMIT)
        counted = min(abs(off), limit)
        self.value += _SPREAD_GAIN * (counted - self.value)
        return copysign(counted, off)


class Line:
    """y = overhead_s + scale x by least squares: noise grows with x, what is old fades, an anchor stays.

    `remembered` is how many observations count. Overhead within 0..10 s, scale within 0.05..20.
    """

    __slots__ = (
        "_anchor",
        "_fading",
        "_oo",
        "_os",
        "_oy",
        "_remembered",
        "_spread",
        "_ss",
        "_sy",
        "count",
        "overhead_s",
        "scale",
    )

    def __init__(self, overhead_s: float, scale: float, anchor: float, remembered: float) -> None:
        """Starts at, and stays anchored to, these values; the scale as if by `anchor` observations."""
        self.overhead_s, self.scale = overhead_s, scale
        self.count = 0
        overhead_weight, scale_weight = OVERHEAD_SPREAD_S**-2, anchor / NOISE**2
        self._anchor = overhead_weight, overhead_weight * overhead_s, scale_weight, scale_weight * scale
        self._remembered = remembered
        self._fading = 1 - 1 / remembered
        self._spread = _Spread()
        self._oo = self._os = self._ss = self._oy = self._sy = 0.0

    def add(self, x_s: float, y_s: float, unsure_s: float = 0.0) -> None:
        """One observation, in seconds; of x so much is hearsay."""
        expected_s = max(self.overhead_s + self.scale * x_s, FLOOR_S)
        y_s = expected_s * exp(self._spread.limited(log(max(y_s, FLOOR_S) / expected_s)))
        fading, weight = self._fading, (FLOOR_S + NOISE * x_s + UNSURE_NOISE * unsure_s) ** -2
        self._oo = self._oo * fading + weight
        self._os = self._os * fading + weight * x_s
        self._ss = self._ss * fading + weight * x_s * x_s
        self._oy = self._oy * fading + weight * y_s
        self._sy = self._sy * fading + weight * x_s * y_s
        self.count += 1
        self._solve()

    def _solve(self) -> None:
        overhead_weight, overhead_sum, scale_weight, scale_sum = self._anchor
        oo, os, ss = self._oo + overhead_weight, self._os, self._ss + scale_weight
        oy, sy = self._oy + overhead_sum, self._sy + scale_sum
        overhead_s = (oy * ss - sy * os) / (oo * ss - os * os)
        if not 0.0 <= overhead_s <= MAX_OVERHEAD_S:
            overhead_s = min(max(overhead_s, 0.0), MAX_OVERHEAD_S)
        scale = (sy - os * overhead_s) / ss
        if not MIN_SCALE <= scale <= MAX_SCALE:
            scale = min(max(scale, MIN_SCALE), MAX_SCALE)
            overhead_s = min(max((oy - os * scale) / oo, 0.0), MAX_OVERHEAD_S)
        self.overhead_s, self.scale = overhead_s, scale

    @property
    def uncertainty(self) -> float:
        """Of what it says of a time, as a logarithm; about one standard deviation."""
        return self._spread.value / sqrt(min(max(self.count, 1), self._remembered))


class Ratio:
    """A factor between two times: the fading mean of its logarithm, within 0.05..20."""

    __slots__ = ("_anchor", "_log", "_remembered", "_spread", "count")

    def __init__(self, value: float, anchor: float, remembered: float) -> None:
        """Starts at `value`, as if by `anchor` observations."""
        self._log = log(value)
        self._anchor = anchor
        self._remembered = remembered
        self._spread = _Spread()
        self.count = 0

    def add(self, ratio: float) -> None:
        """One observation, above 0."""
        self.count += 1
        counted = self._spread.limited(log(ratio) - self._log)
        self._log += counted / min(self.count + self._anchor, self._remembered)
        self._log = min(max(self._log, _LOG_MIN), _LOG_MAX)

    @property
    def value(self) -> float:
        return exp(self._log)

    @property
    def uncertainty(self) -> float:
        """As a logarithm; about one standard deviation."""
        return self._spread.value / sqrt(min(max(self.count, 1), self._remembered))


_LOG_MIN, _LOG_MAX = log(MIN_SCALE), log(MAX_SCALE)


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
