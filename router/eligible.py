"""Who may take a request now: by model, by what has to be done, and by how they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvroute.load import WorkerLoad
from kvroute.policies.costs.pace import Pace
from kvroute.router.errors import Failure, GatewayError
from kvroute.types import Role, Worker

if TYPE_CHECKING:
    from kvroute.router.workers import Member


class Task(StrEnum):
    """What a worker is wanted for. Where all workers do all, these are one."""

    ANSWER = "answer"
    """A route that generates nothing: whoever answers."""
    WHOLE = "whole"
    """All of a request that cannot be split."""
    SPLIT = "split"
    """All of a request, or either half of it."""


@dataclass(frozen=True, slots=True)
class Eligible:
    """Members that may take a request now; parallel sequences, never empty.

    Prefill workers come first, then those for both, then decode workers.
    """

    members: Sequence[Member]
    workers: Sequence[Worker]
    loads: Sequence[WorkerLoad]
    ids: Sequence[str]
    paces: Sequence[Pace]
    prefilling: int = 1
    """How many of them do prefills."""
    can_split: bool = False
    """Whether two of them may share a request."""

    @classmethod
    def of(cls, members: Iterable[Member], *, can_split: bool = False) -> Eligible:
        chosen = tuple(members)
        workers = tuple(member.worker for member in chosen)
        return cls(
            chosen,
            workers,
            tuple(member.load for member in chosen),
            tuple(worker.id for worker in workers),
            tuple(member.pace for member in chosen),
            sum(worker.prefills for worker in workers) or 1,
            can_split and _make_a_pair(workers),
        )

    def without(self, left_out: Iterable[Member]) -> Eligible | None:
        """The others; None where they cannot do the request."""
        rest = [member for member in self.members if member not in left_out]
        can_do = self.can_split and _make_a_pair([member.worker for member in rest])
        if not can_do and not any(_does_all(member.worker) or not self.can_split for member in rest):
            return None
        if self.can_split and not can_do:
            rest = [member for member in rest if _does_all(member.worker)]
        return Eligible.of(rest, can_split=self.can_split)


def select(members: Sequence[Member], task: Task, limit: int, now_s: float, *, splits: bool) -> Eligible:
    """Out of `members`, that are not empty and serve the model; GatewayError 429 or 503 when none may.

    `limit` is of requests per worker. `splits`: whether workers for both may share a request. When no worker
    is well, trying one beats refusing: probes can be wrong.
    """
    wanted = _wanted(members, task)
    room = [member for member in wanted if member.requests < limit]
    if not any(member.worker.role is not Role.PREFILL for member in room):
        if not any(member.worker.role is not Role.PREFILL for member in wanted) and task is not Task.ANSWER:
            raise GatewayError(
                Failure.NO_WORKER, "there is no decode worker that may take requests", retry_after_s=1
            )
        if task is not Task.ANSWER or not room:
            message = f"every worker has {limit} requests in flight (limits.requests_per_worker)"
            raise GatewayError(Failure.OVERLOADED, message, retry_after_s=1)
    well = [member for member in room if member.is_well(now_s)]
    if task is not Task.SPLIT:
        return Eligible.of(well or room)
    decoding = [m for m in well if m.worker.role is not Role.PREFILL]
    decoding = decoding or [m for m in room if m.worker.role is not Role.PREFILL]
    prefilling = [m for m in well if m.worker.role is Role.PREFILL]
    if not prefilling and not any(_does_all(member.worker) for member in decoding):
        prefilling = [m for m in room if m.worker.role is Role.PREFILL]
        if not prefilling:
            message = "there is no prefill worker with room for a request"
            raise GatewayError(Failure.NO_WORKER, message, retry_after_s=1)
    decoding.sort(key=lambda member: member.worker.role is Role.DECODE)
    return Eligible.of([*prefilling, *decoding], can_split=splits or bool(prefilling))


def _wanted(members: Sequence[Member], task: Task) -> Sequence[Member]:
    if task is Task.SPLIT:
        return members
    if task is Task.ANSWER:
        return [m for m in members if m.worker.role is not Role.PREFILL] or members
    whole = [member for member in members if _does_all(member.worker)]
    if not whole:
        message = "this request cannot be split, and no worker takes whole ones"
        raise GatewayError(Failure.NO_WORKER, message)
    return whole


def _does_all(worker: Worker) -> bool:
    return worker.takes_whole and worker.role is not Role.PREFILL


def _make_a_pair(workers: Sequence[Worker]) -> bool:
    """Whether one of them can prefill and another one decode."""
    prefilling = [worker for worker in workers if worker.role is not Role.DECODE]
    decoding = [worker for worker in workers if worker.role is not Role.PREFILL]
    return bool(prefilling and decoding) and (len(prefilling) > 1 or prefilling != decoding)
