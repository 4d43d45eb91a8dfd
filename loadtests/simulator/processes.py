"""The runs of a comparison in several processes, which end with this one however it ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from threading import Thread
from traceback import extract_tb

from kvroute.loadtests.results.combine import Result
from kvroute.loadtests.simulator.compare import Comparison, Run

Done = Callable[[Run], None]


class RunFailed(Exception):
    """A run did not come to its end; the message names it, and what went wrong where."""


def compare(comparison: Comparison, jobs: int = 1, done: Done | None = None) -> dict[Run, Result]:
    """Make every run; `done` hears of each. RunFailed when one fails: the others are given up."""
    if jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {jobs}")
    if jobs == 1:
        results = {}
        for run in comparison.runs:
            results[run] = _named(comparison, run)
            if done is not None:
                done(run)
        return results
    others = set(active_children())
    # Spawned: a forked child would share the parent's threads' locks, if it had any.
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _begin, (comparison,))
    try:
        return _collect(comparison, pool, done)
    except BaseException as error:
        for child in set(active_children()) - others:
            child.kill()
        if isinstance(error, BrokenProcessPool):
            raise RunFailed("a process ended before its run; perhaps there was not enough memory") from None
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _collect(comparison: Comparison, pool: ProcessPoolExecutor, done: Done | None) -> dict[Run, Result]:
    # An interrupt is for the parent: what is started meanwhile never hears of it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        futures: dict[Future[Result], Run] = {pool.submit(_simulate, run): run for run in comparison.runs}
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    for future in as_completed(futures):
        future.result()
        if done is not None:
            done(futures[future])
    return {run: future.result() for future, run in futures.items()}


_comparison: Comparison | None = None
"""In a child process: what it works on."""


def _begin(comparison: Comparison) -> None:
    global _comparison  # noqa: PLW0603  # the way to give a pool's processes something once
    _comparison = comparison
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed parent closes nothing: its children would wait for work for ever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _simulate(run: Run) -> Result:
    assert _comparison is not None
    return _named(_comparison, run)


def _named(comparison: Comparison, run: Run) -> Result:
    try:
        return comparison.simulate(run)
    except Exception as error:
        last = extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        raise RunFailed(f"{comparison.name(run)}: {type(error).__name__}: {error} (at {where})") from error
