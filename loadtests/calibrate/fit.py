"""From times to coefficients of the engine model: least squares, none below 0, outliers held down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

HUBER = 0.05
"""Relative errors above this count linearly."""
ROUNDS = 12
MIN_LINEAR = 3
"""Lengths that a line needs."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """max(floor, base + token n) + attention n^2 / 2, in milliseconds for n tokens alone."""

    floor_ms: float
    base_ms: float
    token_ms: float
    attention_ms: float

    def __call__(self, tokens: Floats) -> Floats:
        linear = np.maximum(self.floor_ms, self.base_ms + self.token_ms * tokens)
        return np.asarray(linear + self.attention_ms * tokens**2 / 2)


@dataclass(frozen=True, slots=True)
class Decode:
    """base + sequence B + context (sum of contexts), in milliseconds."""

    base_ms: float
    sequence_ms: float
    context_ms: float

    def __call__(self, sequences: Floats, context_tokens: Floats) -> Floats:
        return np.asarray(self.base_ms + self.sequence_ms * sequences + self.context_ms * context_tokens)


def fit_prefill(tokens: Sequence[float], times_ms: Sequence[float]) -> Prefill:
    """For each length that may end the floor a fit of what is above it; the best of them.

    ValueError for fewer than three lengths.
    """
    n, y = np.asarray(tokens, float), np.asarray(times_ms, float)
    lengths = np.unique(n)
    if len(lengths) < MIN_LINEAR:
        raise ValueError(f"prefill: {len(lengths)} lengths were measured; at least {MIN_LINEAR} are needed")
    best: tuple[float, Prefill] | None = None
    for start in range(len(lengths) - MIN_LINEAR + 1):
        above = n >= lengths[start]
        columns = np.stack([np.ones_like(n), n, n**2 / 2], axis=1)[above]
        base, token, attention = robust(columns, y[above])
        rest = y[~above] - attention * n[~above] ** 2 / 2
        floor = float(np.median(rest)) if rest.size else base + token * lengths[0]
        fit = Prefill(floor, base, token, attention)
        loss = _loss(fit(n), y)
        if best is None or loss < best[0]:
            best = loss, fit
    assert best is not None
    return best[1]


def fit_decode(
    sequences: Sequence[float], context_tokens: Sequence[float], steps_ms: Sequence[float]
) -> Decode:
    """ValueError for fewer than three points."""
    if len(steps_ms) < 3:
        raise ValueError(f"decode: {len(steps_ms)} points were measured; at least 3 are needed")
    b, ctx = np.asarray(sequences, float), np.asarray(context_tokens, float)
    columns = np.stack([np.ones_like(b), b, ctx], axis=1)
    base, sequence, context = robust(columns, np.asarray(steps_ms, float))
    return Decode(base, sequence, context)


def relative_error(predicted: Floats, measured: Sequence[float]) -> float:
    """Mean size, as a share of what was measured."""
    actual = np.asarray(measured, float)
    return float(np.mean(np.abs(predicted - actual) / actual))


def robust(columns: Floats, y: Floats) -> tuple[float, ...]:
    """Coefficients, none below 0, of the least relative errors in Huber's sense; y above 0."""
    weights = 1 / y
    coefficients = nonnegative(columns * weights[:, None], y * weights)
    for _ in range(ROUNDS):
        error = np.abs(columns @ coefficients - y) / y
        weights = np.sqrt(np.minimum(1.0, HUBER / np.maximum(error, 1e-12))) / y
        coefficients = nonnegative(columns * weights[:, None], y * weights)
    return tuple(float(value) for value in coefficients)


def nonnegative(columns: Floats, y: Floats) -> Floats:
    """Least squares with no coefficient below 0: the best of all subsets, of which there are few."""
    count = columns.shape[1]
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    scaled = columns / scale
    best, best_loss = np.zeros(count), float(y @ y)
    for size in range(1, count + 1):
        for subset in combinations(range(count), size):
            found = np.linalg.lstsq(scaled[:, subset], y, rcond=None)[0]
            if (found < 0).any():
                continue
            loss = float(np.sum((scaled[:, subset] @ found - y) ** 2))
            if loss < best_loss:
                best, best_loss = np.zeros(count), loss
                best[list(subset)] = found
    return np.asarray(best / scale)


def _loss(predicted: Floats, y: Floats) -> float:
    error = np.abs(predicted - y) / y
    return float(np.sum(np.where(error <= HUBER, error**2, HUBER * (2 * error - HUBER))))
