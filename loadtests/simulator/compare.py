"""Policies over the same arrivals: every (policy, speedup, seed) once, paired by seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields
from multiprocessing import get_context

import numpy as np

from kvroute.loadtests.simulator.results import Limits, Result, summarize
from kvroute.loadtests.simulator.setting import Setting
from kvroute.loadtests.simulator.simulation import Simulation
from kvroute.loadtests.traces.arrivals import PROCESSES, arrivals
from kvroute.loadtests.traces.rows import Trace
from kvroute.policies.base import Policy
from kvroute.policies.registry import make_policy

RESAMPLES = 10_000
MAX_RUNS = 10_000


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy with its options."""

    policy: str
    options: Mapping[str, object] = field(default_factory=dict)

    def policy_for(self, seed: int) -> Policy:
        """A new one; where chance is part of the rule, of this seed unless the options name another."""
        policy = make_policy(self.policy, self.options)
        if "seed" in self.options or "seed" not in {option.name for option in fields(policy.Options)}:
            return policy
        return make_policy(self.policy, {**self.options, "seed": seed})


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation of a comparison."""

    variant: int
    speedup: float
    seed: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared. `trace` makes the requests of a seed: a file's are the same for all of them."""

    trace: Callable[[int], Trace]
    variants: Sequence[Variant]
    setting: Setting = field(default_factory=Setting)
    speedups: Sequence[float] = (1.0,)
    seeds: int = 1
    jitter_s: float = 0.0
    process: str = "trace"
    """How requests arrive: see `arrivals`."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not self.variants or not self.speedups:
            raise ValueError("a policy and a speedup at least are needed")
        if self.seeds < 1:
            raise ValueError(f"--seeds must be at least 1, got {self.seeds}")
        if len(self.runs) > MAX_RUNS:
            raise ValueError(f"{len(self.runs)} runs; at most {MAX_RUNS} are made")
        if self.process not in PROCESSES:
            raise ValueError(f"--arrivals: unknown {self.process!r}; known: {', '.join(PROCESSES)}")
        for speedup in self.speedups:
            if not 0 < speedup < float("inf"):
                raise ValueError(f"--speedup must be positive, got {speedup}")
        for variant in self.variants:
            make_policy(variant.policy, variant.options)

    @property
    def runs(self) -> list[Run]:
        """All of them, the runs of one seed and speedup together."""
        return [
            Run(variant, speedup, seed)
            for speedup in self.speedups
            for seed in range(1, self.seeds + 1)
            for variant in range(len(self.variants))
        ]

    def simulate(self, run: Run) -> Result:
        """Make one run."""
        simulation = Simulation(self.setting, self.variants[run.variant].policy_for(run.seed))
        requests = arrivals(
            self.trace(run.seed),
            self.setting.block_tokens,
            run.speedup,
            self.jitter_s,
            run.seed,
            self.process,
        )
        return summarize(simulation, simulation.run(requests), self.limits)


def compare(
    comparison: Comparison, jobs: int = 1, done: Callable[[Run], None] | None = None
) -> dict[Run, Result]:
    """Make every run, in so many processes; `done` hears of each."""
    if jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {jobs}")
    runs, results = comparison.runs, {}
    if jobs == 1:
        for run in runs:
            results[run] = comparison.simulate(run)
            if done is not None:
                done(run)
        return results
    # Spawned: a forked child would share the parent's threads' locks, if it had any.
    with ProcessPoolExecutor(jobs, get_context("spawn"), _begin, (comparison,)) as pool:
        for run, result in zip(runs, pool.map(_simulate, runs), strict=True):
            results[run] = result
            if done is not None:
                done(run)
    return results


_comparison: Comparison | None = None
"""In a child process: what it works on."""


def _begin(comparison: Comparison) -> None:
    global _comparison  # noqa: PLW0603  # the way to give a pool's processes something once
    _comparison = comparison


def _simulate(run: Run) -> Result:
    assert _comparison is not None
    return _comparison.simulate(run)


def interval(differences: Sequence[float], seed: int = 0) -> tuple[float, float] | None:
    """95 % bootstrap interval of the mean of paired differences; None for fewer than two, or infinite."""
    values = np.asarray(differences, dtype=np.float64)
    if len(values) < 2 or not np.isfinite(values).all():
        return None
    source = np.random.default_rng(seed)
    means = values[source.integers(0, len(values), (RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)
