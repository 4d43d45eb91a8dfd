"""One run: requests played against one target, in this process or split over several."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection

import uvloop

from kvroute.clock import monotonic
from kvroute.loadtests.replay.answer import Request
from kvroute.loadtests.replay.bodies import Bodies, Form
from kvroute.loadtests.replay.player import Played, Player
from kvroute.loadtests.replay.target import ReplayError, Target
from kvroute.loadtests.traces.arrivals import Arrival, arriving
from kvroute.loadtests.traces.cuts import Cut
from kvroute.loadtests.traces.prompts import Prompts
from kvroute.loadtests.traces.rows import Trace

LEAD_S = 0.2
"""Until the first request is due, once all processes are ready."""
SPARE_FILES = 100
MAX_JOBS = 64


@dataclass(frozen=True, slots=True)
class Access:
    """How a target is reached."""

    url: str
    api_key: str | None = None
    headers: tuple[str, ...] = ()
    timeout_s: float = 600.0

    def target(self) -> Target:
        """Within a running loop."""
        return Target(self.url, self.timeout_s, self.api_key, self.headers)


@dataclass(frozen=True, slots=True)
class Due:
    """Which requests come when: as `traces.arrivals.arriving` has it, the first `limit` of them."""

    trace: Trace
    speed: float = 1.0
    jitter_s: float = 0.0
    seed: int = 0
    process: str = "trace"
    scale: float = 1.0
    limit: int | None = None
    salt: int = 0
    """Other salts make other prompts of the same structure."""

    def arrivals(self) -> Iterator[Arrival]:
        """In order. ValueError, at once, for what is not understood."""
        made = arriving(
            self.trace,
            self.trace.block_tokens,
            self.speed,
            self.jitter_s,
            self.seed,
            self.process,
            self.scale,
        )
        return islice(made, self.limit)

    @property
    def count(self) -> int:
        """How many they are."""
        count = len(self.trace.rows)
        return count if self.limit is None else min(count, self.limit)

    @property
    def last_s(self) -> float:
        """When the last one is due."""
        (last,) = deque(self.arrivals(), maxlen=1)
        return last.arrival_s

    @property
    def cut(self) -> Cut:
        return Cut(self.trace.block_tokens, self.trace.block_tokens, self.scale)

    @property
    def prompts(self) -> Prompts:
        return Prompts(self.cut, self.salt)


@dataclass(frozen=True, slots=True)
class Run:
    """What is sent, and where to."""

    access: Access
    form: Form
    model: str
    due: Due
    warm_up: int = 0
    """Requests, the first, whose gaps do not count."""
    max_in_flight: int = 4096
    part: int = 0
    """Of several processes: this one sends every `parts`-th request from here on."""
    parts: int = 1

    def requests(self) -> Iterator[Request]:
        """Each is made when it is asked for."""
        bodies = Bodies(self.form, self.model, self.due.prompts)
        numbered = islice(enumerate(self.due.arrivals()), self.part, None, self.parts)
        return (bodies.request(arrival, number >= self.warm_up) for number, arrival in numbered)


def play(run: Run, jobs: int = 1) -> tuple[Played, bool]:
    """What came of it, and whether an interrupt stopped it; then it is what was measured until that."""
    check_jobs(run.max_in_flight, jobs)
    if jobs == 1:
        return uvloop.run(run_in_loop(run, monotonic() + LEAD_S))
    return _play_split(run, jobs)


def check_jobs(max_in_flight: int, jobs: int) -> None:
    """ReplayError for what this machine cannot do."""
    if not 1 <= jobs <= MAX_JOBS:
        raise ReplayError(f"--jobs must be from 1 to {MAX_JOBS}, got {jobs}")
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = jobs * (files - SPARE_FILES)
    if not jobs <= max_in_flight <= most:
        raise ReplayError(
            f"--max-in-flight must be from {jobs} to {most} (open files of {jobs} processes), "
            f"got {max_in_flight}"
        )


async def run_in_loop(run: Run, epoch_s: float) -> tuple[Played, bool]:
    """The same on a loop that runs already. An interrupt (SIGINT) stops it."""
    _raise_file_limit()
    target, stopped = run.access.target(), False
    player = Player(target, run.max_in_flight)

    def stop() -> None:
        nonlocal stopped
        stopped = True
        player.stop()

    loop = asyncio.get_running_loop()
    # Only the main thread may handle signals.
    with suppress(ValueError, RuntimeError, NotImplementedError):
        loop.add_signal_handler(signal.SIGINT, stop)
    try:
        return await player.play(run.requests(), epoch_s), stopped
    finally:
        with suppress(ValueError, RuntimeError, NotImplementedError):
            loop.remove_signal_handler(signal.SIGINT)
        target.close()


def _raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# --- several processes -----------------------------------------------------------------------------


def _play_split(run: Run, jobs: int) -> tuple[Played, bool]:
    """Every process takes each `jobs`-th request. They begin together: the clock is the machine's."""
    # Spawned: a forked child would share the parent's threads' locks, if it had any.
    context = get_context("spawn")
    pipes, children = [], []
    for part in range(jobs):
        ours, theirs = context.Pipe()
        share = replace(run, part=part, parts=jobs, max_in_flight=-(-run.max_in_flight // jobs))
        child = context.Process(target=_child, args=(theirs, share), daemon=True)
        child.start()
        theirs.close()
        pipes.append(ours)
        children.append(child)
    before = signal.signal(signal.SIGINT, lambda *_: _interrupt([child.pid for child in children]))
    try:
        for pipe in pipes:
            pipe.recv()
        epoch_s = monotonic() + LEAD_S
        for pipe in pipes:
            pipe.send(epoch_s)
        played, stopped = Played(), False
        for pipe in pipes:
            part_played, part_stopped = pipe.recv()
            played.merge(part_played)
            stopped = stopped or part_stopped
        return played, stopped
    except EOFError:
        raise ReplayError("a process of the replay died; its requests are lost") from None
    finally:
        signal.signal(signal.SIGINT, before)
        for child in children:
            child.join(1)
            child.kill()


def _interrupt(pids: Sequence[int | None]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, signal.SIGINT)


def _child(pipe: Connection, run: Run) -> None:
    """In a child: ready, wait for the time to begin, play, tell."""
    with suppress(KeyboardInterrupt):
        pipe.send("ready")
        pipe.send(uvloop.run(run_in_loop(run, pipe.recv())))
