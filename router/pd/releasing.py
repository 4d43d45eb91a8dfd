"""Telling a prefill worker, beside the traffic, that nobody will fetch KV that it keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct

from kvroute.clock import monotonic
from kvroute.router.errors import GatewayError
from kvroute.router.metrics import Counter
from kvroute.router.probe import post
from kvroute.router.workers import Member, State

AT_A_TIME = 8
TRIES = 2
"""Decode workers that are asked to pass it on."""


class Release(Struct, frozen=True):
    """One handoff to be let go."""

    path: str
    body: Mapping[str, Any]
    by: Sequence[Member]
    """Decode workers, the likeliest to reach the prefill worker first."""
    until_s: float
    """On `kvroute.clock`: from then on the KV is gone by itself."""
    again_after_s: float | None = None
    """A decode worker that has never met the prefill worker passes it on with the next request that comes to
    it (vLLM 0.32), so that it is told twice."""


class Releaser:
    """A few at a time; dropped and counted is what does not fit in the queue, and what comes too late."""

    def __init__(self, counter: Counter, timeout_s: float = 5.0, capacity: int = 1024) -> None:
        self._counter = counter
        self._timeout_s = timeout_s
        self._capacity = capacity
        self._due: asyncio.Queue[Release] = asyncio.Queue(capacity)
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return self._due.qsize() + len(self._tasks)

    def release(self, release: Release) -> None:
        """Soon; nobody waits for it."""
        if not release.by:
            self._counter.add("nobody")
            return
        if self._due.full():
            self._counter.add("dropped")
            return
        self._due.put_nowait(release)
        if len(self._tasks) < AT_A_TIME:
            task = asyncio.get_running_loop().create_task(self._run())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def reset(self, member: Member) -> None:
        """Have a worker forget its prefix cache: what it holds may not be what it seems."""
        task = asyncio.get_running_loop().create_task(self._reset(member))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reset(self, member: Member) -> None:
        try:
            answer = await post(member, "/reset_prefix_cache", b"{}", self._timeout_s)
            self._counter.add("reset" if answer.status < 400 else "not_reset")
        except (TimeoutError, GatewayError):
            self._counter.add("not_reset")

    async def stop(self, within_s: float = 1.0) -> None:
        """Send what is due, but for so long at most; idempotent."""
        tasks = list(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=within_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while not self._due.empty():
            self._counter.add(await self._send(self._due.get_nowait()))

    async def _send(self, release: Release) -> str:
        """`released` when a worker has heard it; what it answers is a refusal, as is meant."""
        body = msgspec.json.encode(release.body)
        result = "gone"
        for member in release.by[:TRIES]:
            if monotonic() >= release.until_s:
                return "expired"
            if member.state is State.GONE:
                continue
            try:
                answer = await post(member, release.path, body, self._timeout_s)
            except (TimeoutError, GatewayError):
                result = "failed"
                continue
            if answer.status < 500:
                if release.again_after_s is not None:
                    await asyncio.sleep(release.again_after_s)
                    with suppress(TimeoutError, GatewayError):
                        await post(member, release.path, body, self._timeout_s)
                return "released"
            result = "failed"
        return result
