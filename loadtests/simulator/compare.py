"""Policies over the same arrivals: every (trace, fleet, speed, seed, policy) once, paired by seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from kvroute.loadtests.results.combine import WARM_UP, Result, make_row, result
from kvroute.loadtests.results.measured import Limits
from kvroute.loadtests.results.rows import Row
from kvroute.loadtests.simulator.knowing import KnownLengths, tell_lengths
from kvroute.loadtests.simulator.measuring import DecisionMeter, facts
from kvroute.loadtests.simulator.setting import Setting
from kvroute.loadtests.simulator.simulation import Simulation
from kvroute.loadtests.simulator.warming import requests_to_fill
from kvroute.loadtests.traces.arrivals import PROCESSES, Arrival, arriving
from kvroute.loadtests.traces.cuts import Cut
from kvroute.loadtests.traces.rows import Trace
from kvroute.policies.base import Policy
from kvroute.policies.registry import make_policy

MAX_RUNS = 10_000
OUTPUTS = ("learned", "known")
MAX_SEEDS = 1000
MAX_SPEED = 1000.0
MAX_SPAN_S = 366 * 86400.0
"""Simulated: engines are asked for their metrics every so often, however little comes."""
TTFT_INCLUDES = "time held, queueing, loads and transfers of KV, prefill; no network, no tokenising"


class Source(Protocol):
    """Where requests come from."""

    @property
    def name(self) -> str: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def is_drawn(self) -> bool:
        """Whether another seed has other requests."""
        ...

    @property
    def remarks(self) -> Sequence[str]:
        """What a reader of the results should know of it."""
        ...

    def __call__(self, seed: int) -> Trace:
        """The requests of a seed: a file's are the same for all of them."""
        ...


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
class FleetOf:
    """Engines, as they are named in results: how many, or "6P2D"."""

    workers: int | str
    setting: Setting
    block_tokens: int | None = None
    """None: those of each trace."""

    def setting_for(self, source: Source) -> Setting:
        """With blocks as they are asked for."""
        tokens = source.block_tokens if self.block_tokens is None else self.block_tokens
        return replace(self.setting, block_tokens=tokens)


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation of a comparison; numbers are places in its lists."""

    source: int
    fleet: int
    speed: float
    seed: int
    variant: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared. ValueError names the option."""

    sources: Sequence[Source]
    variants: Sequence[Variant]
    fleets: Sequence[FleetOf] = (FleetOf(8, Setting()),)
    speeds: Sequence[float] = (1.0,)
    seeds: int = 1
    jitter_s: float = 0.0
    process: str = "trace"
    """How requests arrive: see `arrivals`."""
    outputs: str = "learned"
    """By the router; or "known": it is told how long each answer will be."""
    limits: Limits = field(default_factory=Limits)
    warm_up: float | None = WARM_UP
    """Share of the requests, the first, that are not counted; None: until the fleet's caches are full."""

    def __post_init__(self) -> None:
        if not (self.sources and self.variants and self.fleets and self.speeds):
            raise ValueError("a trace, a policy, a fleet and a speed at least are needed")
        if not 1 <= self.seeds <= MAX_SEEDS:
            raise ValueError(f"--seeds must be from 1 to {MAX_SEEDS}, got {self.seeds}")
        for speed in self.speeds:
            if not 0 < speed <= MAX_SPEED:
                raise ValueError(f"--speed must be above 0 and at most {MAX_SPEED:g}, got {speed:g}")
        if len(set(self.speeds)) < len(self.speeds):
            raise ValueError(f"--speed: {self.speeds}: one is given more than once")
        if self.process not in PROCESSES:
            raise ValueError(f"--arrivals: unknown {self.process!r}; known: {', '.join(PROCESSES)}")
        if self.outputs not in OUTPUTS:
            raise ValueError(f"--outputs: unknown {self.outputs!r}; known: {', '.join(OUTPUTS)}")
        if self.warm_up is not None and not 0 <= self.warm_up < 1:
            raise ValueError(f"--warm-up must be from 0 to below 1, or fill, got {self.warm_up}")
        if len(self.runs) > MAX_RUNS:
            raise ValueError(f"{len(self.runs)} runs; at most {MAX_RUNS} are made")
        for variant in self.variants:
            make_policy(variant.policy, variant.options)
        for source in self.sources:
            self._check_blocks(source)

    def _check_blocks(self, source: Source) -> None:
        for fleet in self.fleets:
            try:
                Cut(source.block_tokens, fleet.setting_for(source).block_tokens)
            except ValueError as error:
                raise ValueError(f"--block-size: {source.name}: {error}") from None

    @property
    def runs(self) -> list[Run]:
        """All of them, those of the same requests together."""
        return [
            Run(source, fleet, speed, seed, variant)
            for source in range(len(self.sources))
            for fleet in range(len(self.fleets))
            for speed in self.speeds
            for seed in range(1, self.seeds + 1)
            for variant in range(len(self.variants))
        ]

    @property
    def same_for_seeds(self) -> bool:
        """Whether another seed has other policies' chances at most."""
        return not self.jitter_s and self.process == "trace" and not any(one.is_drawn for one in self.sources)

    def name(self, run: Run) -> str:
        """As people read it."""
        return (
            f"{self.variants[run.variant].policy} on {self.sources[run.source].name} x{run.speed:g}, "
            f"{self.fleets[run.fleet].workers} workers, seed {run.seed}"
        )

    def simulate(self, run: Run) -> Result:
        """Make one run."""
        source, fleet = self.sources[run.source], self.fleets[run.fleet]
        setting = fleet.setting_for(source)
        warm_up = self._warm_up(source, setting, run)
        simulation = Simulation(setting, self.variants[run.variant].policy_for(run.seed), run.seed)
        requests = self._arriving(source, setting, run)
        if self.outputs == "known":
            requests = tell_lengths(requests)
            simulation.router.lengths = KnownLengths()
        meter = DecisionMeter(simulation.router)
        measured = simulation.measure(requests)
        return result(measured, facts(simulation, meter), self.limits, warm_up, with_series=run.seed == 1)

    def _arriving(self, source: Source, setting: Setting, run: Run) -> Iterator[Arrival]:
        trace = source(run.seed)
        span_s = trace.rows[-1].arrival_s / run.speed
        if span_s > MAX_SPAN_S:
            raise ValueError(
                f"--speed, --rate or the times of the trace: the last request comes after {span_s:.3g} s; at "
                f"most {MAX_SPAN_S:.3g} s, a year, are simulated"
            )
        return arriving(trace, setting.block_tokens, run.speed, self.jitter_s, run.seed, self.process)

    def _warm_up(self, source: Source, setting: Setting, run: Run) -> int:
        if self.warm_up is None:
            blocks = setting.workers * (setting.kv_tokens // setting.block_tokens)
            return requests_to_fill(self._arriving(source, setting, run), blocks)
        return int(len(source(run.seed).rows) * self.warm_up)


def make_rows(comparison: Comparison, results: Mapping[Run, Result], about: Mapping[str, Any]) -> list[Row]:
    """A row for each policy in each case; all but the first policy are paired with it."""
    rows = []
    for run in comparison.runs:
        if run.seed != 1:
            continue
        variant, fleet = comparison.variants[run.variant], comparison.fleets[run.fleet]
        setting = fleet.setting_for(comparison.sources[run.source])
        mine, first = (
            [results[replace(run, seed=seed, variant=place)] for seed in range(1, comparison.seeds + 1)]
            for place in (run.variant, 0)
        )
        of_run = {
            **{"policy": variant.policy, "options": dict(variant.options), "speed": run.speed},
            **{"workers": fleet.workers, "trace": comparison.sources[run.source].name},
            **{"source": "simulated", "warm_up": comparison.warm_up},
            "setting": {
                **about,
                "kv_tokens": setting.kv_tokens,
                "block_tokens": setting.block_tokens,
                "ttft_includes": TTFT_INCLUDES,
            },
        }
        against = (comparison.variants[0].policy, first) if run.variant else None
        rows.append(make_row(mine, comparison.limits, of_run, against))
    return rows
