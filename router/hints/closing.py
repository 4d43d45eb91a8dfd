"""Telling SGLang that a session is over, beside the traffic."""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec

from kvroute.router.errors import GatewayError
from kvroute.router.metrics import Counter
from kvroute.router.probe import post
from kvroute.router.workers import Member, State


class SessionCloser:
    """Sends POST /close_session, one after another.

    Dropped and counted is what does not fit in the queue, and what is left for a worker that did not answer.
    """

    def __init__(self, counter: Counter, timeout_s: float = 5.0, capacity: int = 1024) -> None:
        self._counter = counter
        self._timeout_s = timeout_s
        self._capacity = capacity
        self._due: deque[tuple[Member, str]] = deque()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._due)

    def close(self, member: Member, session_id: str) -> None:
        """Close a session at one worker, soon; nobody waits for it."""
        if len(self._due) >= self._capacity:
            self._counter.add("dropped")
            return
        self._due.append((member, session_id))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Drop what is due; idempotent."""
        self._due.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            while self._due:
                member, session_id = self._due.popleft()
                result = await self._send(member, session_id)
                self._counter.add(result)
                if result in ("timeout", "failed"):
                    self._drop(member)
        finally:
            self._task = None

    def _drop(self, member: Member) -> None:
        left = [each for each in self._due if each[0] is not member]
        self._counter.add("dropped", by=len(self._due) - len(left))
        self._due = deque(left)

    async def _send(self, member: Member, session_id: str) -> str:
        if member.state is State.GONE:
            return "gone"
        body = msgspec.json.encode({"session_id": session_id})
        try:
            answer = await post(member, "/close_session", body, self._timeout_s)
        except TimeoutError:
            return "timeout"
        except GatewayError:
            return "failed"
        return "closed" if answer.status < 400 else "refused"
