"""Telling a prefill worker, beside the traffic, that nobody will fetch KV that it keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from kvroute.clock import monotonic
from kvroute.router.errors import GatewayError
from kvroute.router.metrics import Counter
from kvroute.router.pd.prefill_leg import MAX_KEPT_BYTES
from kvroute.router.probe import post
from kvroute.router.sending import Sending
from kvroute.router.upstream import UpstreamConnection
from kvroute.router.workers import Member

AT_A_TIME = 8
ASKED = 2
"""Decode workers that are asked to pass it on."""
HEAR_S = 1.0
"""For an answer that was under way when its worker was told."""
MAX_HEARD = 256
TRIES = 4
RETRY_S = 0.5
"""Until the next try, when none of them could be reached: the cause may be their restart."""


class Release(Struct, frozen=True):
    """One handoff to be let go."""

    path: str
    body: Mapping[str, Any]
    by: Callable[[], Sequence[Member]]
    """Decode workers, the likeliest to reach the prefill one first. Asked for at each try: they restart."""
    until_s: float
    """On `kvroute.clock`: from then on the KV is gone by itself."""
    again_after_s: float | None = None
    """A decode worker that has never met the prefill worker passes it on with the next request that comes to
    it (vLLM 0.32), so that it is told twice."""


class _Due(Struct, frozen=True):
    """Something to be sent."""

    release: Release
    tries: int = TRIES
    is_repeat: bool = False
    """It was sent before."""


class Releaser:
    """A few at a time; dropped and counted is what does not fit in the queue, and what comes too late."""

    def __init__(
        self, counter: Counter, grace_s: float = 0.0, timeout_s: float = 5.0, capacity: int = 1024
    ) -> None:
        """`grace_s` as `pd.prefill_grace_s`."""
        self._counter = counter
        self._grace_s = grace_s
        self._timeout_s = timeout_s
        self._capacity = capacity
        self._due: asyncio.Queue[_Due] = asyncio.Queue()
        self._later: dict[asyncio.TimerHandle, _Due] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._heard: set[asyncio.Task[None]] = set()
        self._hurry = asyncio.Event()
        """Grace is over for all: the gateway stops."""

    def __len__(self) -> int:
        return self._due.qsize() + len(self._later) + len(self._tasks) + len(self._heard)

    def release(self, release: Release, after_s: float = 0.0) -> None:
        """Soon after; nobody waits for it."""
        if after_s > 0:
            self._put_off(after_s, _Due(release))
        else:
            self._begin(_Due(release))

    def hear_out(
        self, sending: Sending, pieces: list[bytes], over: Callable[[], None], then: Callable[[bytes], None]
    ) -> None:
        """A prefill leg is given up. Its answer hands KV over all the same, which only it names: it goes to
        `then`, with the `pieces` that had come. An engine that is told in the step that ends a prefill keeps
        the KV and answers nobody, so it is told after the grace period. In any case it is `over`, soon.
        """
        connection = sending.connection
        if connection is None or len(self._heard) >= MAX_HEARD or connection.closed:
            sending.finish()
            over()
            return
        task = asyncio.get_running_loop().create_task(self._hear(sending, connection, pieces, then))
        task.add_done_callback(lambda _task: over())
        self._heard.add(task)
        task.add_done_callback(self._heard.discard)

    async def _hear(
        self,
        sending: Sending,
        connection: UpstreamConnection,
        pieces: list[bytes],
        then: Callable[[bytes], None],
    ) -> None:
        hurry = asyncio.get_running_loop().create_task(self._hurry.wait())
        try:
            pieces.append(connection.take_body())
            size = sum(map(len, pieces))

            def take(data: bytes, _now_s: float) -> None:
                nonlocal size
                size += len(data)
                if size <= MAX_KEPT_BYTES:
                    pieces.append(data)

            ended = connection.stream_to(take)
            await asyncio.wait((ended, hurry), timeout=self._grace_s, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done() and connection.half_close():
                await asyncio.wait((ended,), timeout=HEAR_S)
            # Else it has not answered, or with what cannot be read.
            if ended.done() and ended.exception() is None and size <= MAX_KEPT_BYTES:
                then(b"".join(pieces))
        finally:
            hurry.cancel()
            sending.finish()

    async def stop(self, within_s: float = 1.0) -> None:
        """Send what is due, but for so long at most; idempotent."""
        self._hurry.set()
        until_s = monotonic() + within_s
        while monotonic() < until_s:
            later, self._later = self._later, {}
            for timer, due in later.items():
                timer.cancel()
                if not due.is_repeat:
                    self._begin(due)
            if not (tasks := [*self._tasks, *self._heard]):
                break
            # One that was heard out has KV to let go: that is begun in the meantime.
            await asyncio.wait(tasks, timeout=until_s - monotonic(), return_when=asyncio.FIRST_COMPLETED)
        tasks = [*self._tasks, *self._heard]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for timer in self._later:
            timer.cancel()
        self._later.clear()

    def _begin(self, due: _Due) -> None:
        if self._is_full():
            self._drop(due)
            return
        self._due.put_nowait(due)
        if len(self._tasks) < AT_A_TIME:
            task = asyncio.get_running_loop().create_task(self._run())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _is_full(self) -> bool:
        return self._due.qsize() + len(self._later) >= self._capacity

    def _drop(self, due: _Due) -> None:
        if not due.is_repeat:
            self._counter.add("dropped")

    async def _run(self) -> None:
        while not self._due.empty():
            due = self._due.get_nowait()
            release = due.release
            result = await self._send(release)
            if due.is_repeat:
                continue
            if result in ("failed", "nobody") and due.tries > 1:
                self._put_off(RETRY_S, replace(due, tries=due.tries - 1))
                continue
            self._counter.add(result)
            if result == "released" and release.again_after_s is not None:
                self._put_off(release.again_after_s, _Due(release, is_repeat=True))

    def _put_off(self, delay_s: float, due: _Due) -> None:
        if self._is_full():
            self._drop(due)
            return

        def go_on() -> None:
            self._later.pop(timer, None)
            self._begin(due)

        timer = asyncio.get_running_loop().call_later(delay_s, go_on)
        self._later[timer] = due

    async def _send(self, release: Release) -> str:
        """`released` when a worker has heard it; what it answers is a refusal, as is meant."""
        try:
            body = msgspec.json.encode(release.body)
        except RecursionError:
            return "dropped"
        result = "nobody"
        for member in release.by()[:ASKED]:
            if monotonic() >= release.until_s:
                return "expired"
            try:
                answer = await post(member, release.path, body, self._timeout_s)
            except (TimeoutError, GatewayError):
                result = "failed"
                continue
            if answer.status < 500:
                return "released"
            result = "failed"
        return result
