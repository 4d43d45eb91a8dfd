"""The same requests to several targets in turn, round by round."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvloop

from kvroute.loadtests.replay.bodies import Bodies, Form
from kvroute.loadtests.replay.outcome import row
from kvroute.loadtests.replay.player import Played
from kvroute.loadtests.replay.running import Access, Due, Run, check_jobs, play
from kvroute.loadtests.replay.target import ReplayError
from kvroute.loadtests.results.measured import Limits
from kvroute.loadtests.results.rows import Row
from kvroute.loadtests.simulator.compare import Source

MAX_ROUNDS = 1000
MAX_NAME = 100
MAX_LAST_S = 30 * 86_400.0
_NAMED = re.compile(r"([^=:]+)=(.+)")


@dataclass(frozen=True, slots=True)
class Named:
    """A target under the name that results have for it."""

    name: str
    access: Access


@dataclass(frozen=True, slots=True)
class Replay:
    """What is replayed. Validated once; ValueError names the option."""

    targets: Sequence[Named]
    source: Source
    form: Form = field(default_factory=Form)
    model: str | None = None
    """None: the first that a target serves."""
    speed: float = 1.0
    scale: float = 1.0
    jitter_s: float = 0.0
    process: str = "trace"
    seed: int = 1
    """Of the first round; others count on from it."""
    limit: int | None = None
    rounds: int = 1
    limits: Limits = field(default_factory=Limits)
    warm_up: float = 0.1
    """Share of the requests, the first, that does not count."""
    max_in_flight: int = 4096
    jobs: int = 1
    salt: int = field(default_factory=time.time_ns)
    """Of the prompts: another for every run, so that no run finds in the caches what another left."""

    def __post_init__(self) -> None:
        names = [target.name for target in self.targets]
        if len(set(names)) < len(names):
            raise ReplayError("--url: two of one name; name=URL tells them apart")
        if not 1 <= self.rounds <= MAX_ROUNDS:
            raise ReplayError(f"--rounds must be from 1 to {MAX_ROUNDS}, got {self.rounds}")
        if not 0 <= self.warm_up < 1:
            raise ReplayError(f"--warm-up must be 0 or more and below 1, got {self.warm_up:g}")
        check_jobs(self.max_in_flight, self.jobs)
        self.due(0, 0)

    @property
    def warm_up_requests(self) -> int:
        """Of a run, the first, that do not count."""
        return int(self.due(0, 0).count * self.warm_up)

    def due(self, number: int, target: int) -> Due:
        """Of one run of a round; every target of a round has the same requests at the same times."""
        salt = self.salt + number * len(self.targets) + target
        seed = self.seed + number
        return due(self.source, seed, self.speed, self.scale, self.jitter_s, self.process, self.limit, salt)


def due(
    source: Source,
    seed: int,
    speed: float,
    scale: float,
    jitter_s: float,
    process: str,
    limit: int | None,
    salt: int,
) -> Due:
    """ValueError names the option."""
    if not 0 < speed < float("inf"):
        raise ReplayError(f"--speed must be positive, got {speed:g}")
    if limit is not None and limit < 1:
        raise ReplayError(f"--limit must be at least 1, got {limit}")
    made = Due(source(seed), speed, jitter_s, seed, process, scale, limit, salt)
    try:
        made.arrivals()
    except ValueError as error:
        raise ReplayError(f"--scale, --arrivals or --jitter: {error}") from None
    if made.last_s > MAX_LAST_S:
        days = MAX_LAST_S / 86400
        raise ReplayError(
            f"--speed or --rate: the last request is due after {made.last_s:.3g} s; {days:g} days is most"
        )
    return made


def named(text: str, name: str | None, **access: Any) -> Named:
    """From `name=URL`, or a URL alone, which is called `name` or by where it is."""
    found = _NAMED.fullmatch(text)
    url = text if found is None else found[2]
    called = found[1] if found is not None else name or url.partition("://")[2] or url
    if not 1 <= len(called) <= MAX_NAME:
        raise ReplayError(f"--url: a name has from 1 to {MAX_NAME} characters, got {called!r}")
    return Named(called, Access(url, **access))


def models(replay: Replay) -> list[str]:
    """Of every target, asked now. ReplayError when one does not answer, or not as it should."""

    async def ask(access: Access) -> str:
        target = access.target()
        try:
            model = replay.model or await target.model()
            bodies = Bodies(replay.form, model, replay.due(0, 0).prompts)
            await target.check(bodies.path, bodies.least)
            return model
        finally:
            target.close()

    async def ask_all() -> list[str]:
        return [await ask(target.access) for target in replay.targets]

    return uvloop.run(ask_all())


Tell = Callable[[int, Named, Due], None]


def play_rounds(replay: Replay, tell: Tell) -> tuple[list[list[Played]], bool]:
    """Per target, every round; and whether it was stopped. `tell` hears of each run before it begins.

    ReplayError before anything is sent when a target cannot be used.
    """
    if not replay.targets:
        raise ReplayError("--url: at least one is needed")
    served = models(replay)
    played: list[list[Played]] = [[] for _ in replay.targets]
    for number in range(replay.rounds):
        for at, target in enumerate(replay.targets):
            run = _run(replay, number, at, served[at])
            tell(number, target, run.due)
            one, stopped = play(run, replay.jobs)
            if one.requests or not stopped:
                played[at].append(one)
            if stopped:
                return played, True
    return played, False


def _run(replay: Replay, number: int, at: int, model: str) -> Run:
    due = replay.due(number, at)
    return Run(
        replay.targets[at].access,
        replay.form,
        model,
        due,
        replay.warm_up_requests,
        replay.max_in_flight,
    )


def rows(replay: Replay, played: Sequence[Sequence[Played]]) -> list[Row]:
    """One for each target that was sent anything; the others' are paired with the first's, where all rounds
    came to the same requests: of one that was stopped, the rest would be compared with all.
    """
    made: list[Row] = []
    first, counts = None, [len(one.requests) for one in played[0]]
    for target, rounds in zip(replay.targets, played, strict=True):
        if not rounds:
            continue
        about = {
            "speed": replay.speed,
            "trace": replay.source.name,
            "warm_up": replay.warm_up,
            "setting": _setting(replay, target),
        }
        against = first if [len(one.requests) for one in rounds] == counts else None
        one, results = row(target.name, rounds, replay.limits, about, replay.warm_up_requests, against)
        made.append(one)
        first = first or (target.name, results)
    return made


def _setting(replay: Replay, target: Named) -> dict[str, Any]:
    return {
        "url": target.access.url,
        "api": replay.form.api,
        "prompts": replay.form.prompts,
        "scale": replay.scale,
        "jitter_s": replay.jitter_s,
        "arrivals": replay.process,
        "seed": replay.seed,
        "salt": replay.salt,
        "jobs": replay.jobs,
    }
