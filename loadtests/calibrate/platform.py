"""k and o of a platform from the log of a real engine: steps of `Speed` take k times as long, and o more.

The whole log is simulated; the requests that are `counted` say how well. Least squares over the relative
errors of their TPOT and over those of their TTFT, in means of it; Gauss-Newton, each derivative from one
more simulation, as an engine's times are almost linear in k and o.

Left out: vLLM schedules a step ahead (0.14 and later, by default), so that who comes waits for a step more
than here. With a queue that is nothing; alone it is a step, about a fifth of the TTFT of a short prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvroute.loadtests.calibrate.engine_log import EngineLog
from kvroute.loadtests.calibrate.fit import nonnegative
from kvroute.loadtests.results.measured import Measured
from kvroute.loadtests.simulator.setting import Setting
from kvroute.loadtests.simulator.simulation import Simulation
from kvroute.policies.registry import make_policy

ROUNDS = 16
CLOSE = 1e-4
"""Of k, and of o in milliseconds: no better is looked for."""
MIN_SCALE = 0.01
WIDEST, NARROWEST = 0.16, 0.001
"""Shares of k over which slopes are taken, first and last: one request let in a step later is a jump, which
narrow ones take for a slope.
"""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Platform:
    """k and o, and what is still wrong: the root of the mean square of the errors, as a share."""

    scale: float
    offset_ms: float
    error: float


def fit_platform(log: EngineLog, setting: Setting, counted: Sequence[bool] | None = None) -> Platform:
    """`setting`: one worker with the engine's speed preset, KV room, batched tokens and sequences; its
    `scale` and `offset_ms` are where the search begins. `counted`: which requests the errors are taken of,
    all without.

    May end beside the best where many requests wait for a few places: `error` tells, another beginning helps.
    ValueError when a request counted has no TTFT or TPOT, or none is left.
    """
    mask = np.ones(len(log.measured), bool) if counted is None else np.asarray(counted, bool)
    actual = _times([one for one, is_in in zip(log.measured, mask, strict=True) if is_in])
    if not actual.size or not np.isfinite(actual).all():
        raise ValueError("counted: at least one request, all with a first and a last token, are needed")

    def errors(scale: float, offset_ms: float) -> Floats:
        simulated = _times(simulate(log, replace(setting, scale=scale, offset_ms=offset_ms)))[mask]
        off = simulated - actual
        return np.concatenate([off[:, 0] / actual[:, 0].mean(), off[:, 1] / actual[:, 1]])

    best = Platform(setting.scale, setting.offset_ms, float("inf"))
    goal = best
    share = WIDEST
    for _ in range(ROUNDS):
        found = errors(goal.scale, goal.offset_ms)
        error = float(np.sqrt(np.mean(found**2)))
        if error < best.error:
            best = replace(goal, error=error)
            goal = _next(best, found, errors, share)
        else:
            goal = replace(
                best, scale=(goal.scale + best.scale) / 2, offset_ms=(goal.offset_ms + best.offset_ms) / 2
            )
        share = max(share / 2, NARROWEST)
        if max(abs(goal.scale - best.scale), abs(goal.offset_ms - best.offset_ms)) < CLOSE:
            break
    return best


def _next(at: Platform, found: Floats, errors: Callable[[float, float], Floats], share: float) -> Platform:
    """Where the errors would be least, were they straight lines; slopes are taken over that share of k."""
    wide_ms = 10 * share
    by_scale = (errors(at.scale * (1 + share), at.offset_ms) - found) / (at.scale * share)
    by_offset = (errors(at.scale, at.offset_ms + wide_ms) - found) / wide_ms
    slopes = np.stack([by_scale, by_offset], axis=1)
    scale, offset_ms = nonnegative(slopes, slopes @ np.array([at.scale, at.offset_ms]) - found)
    return Platform(max(float(scale), MIN_SCALE), float(offset_ms), at.error)


def simulate(log: EngineLog, setting: Setting) -> list[Measured]:
    """What the simulated engine makes of the log's requests. ValueError for more than one worker."""
    if setting.workers != 1 or setting.block_tokens != log.block_tokens:
        raise ValueError(
            f"setting: one worker with blocks of {log.block_tokens} tokens is expected, "
            f"got {setting.workers} with {setting.block_tokens}"
        )
    return list(Simulation(setting, make_policy("round_robin", {})).measure(log.requests))


def _times(measured: Sequence[Measured]) -> Floats:
    """(requests, 2): TTFT and TPOT in seconds; TPOT of a single token is its TTFT."""
    return np.array([(one.ttft_s, one.tpot_s if one.output_tokens > 1 else one.ttft_s) for one in measured])
