"""Workers whose prefix cache may hold wrong KV: they get nothing until it is reset, or nothing finds it."""

from __future__ import annotations

import asyncio
import itertools
import secrets

import structlog

from kvroute.router.errors import Failure, GatewayError
from kvroute.router.metrics import Counter
from kvroute.router.probe import Answer, post
from kvroute.router.workers import Member, Registry, State
from kvroute.types import EngineKind

log = structlog.get_logger(__name__)

PATH = "/reset_prefix_cache?reset_running_requests=true"
"""In vLLM's development mode only. What runs is computed again; what waits for KV makes it a 500 (0.32)."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.5, 30.0
ABSENT = (404, 405)


class Resets:
    """One task for each such worker, from `spoilt` until it is ready again, or gone. `stop` ends them."""

    def __init__(self, registry: Registry, counter: Counter, timeout_s: float = 5.0) -> None:
        self._registry = registry
        self._counter = counter
        self._timeout_s = timeout_s
        self._tasks: dict[Member, asyncio.Task[None]] = {}
        self._again: set[Member] = set()
        """Spoilt once more since the reset that is under way was asked for."""

    def spoilt(self, member: Member) -> None:
        """It has fetched what may have been another's KV."""
        self._registry.set_state(member, State.SPOILT)
        if member in self._tasks:
            self._again.add(member)
            return
        self._tasks[member] = asyncio.get_running_loop().create_task(self._cure(member))

    async def stop(self) -> None:
        """Idempotent."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()  # of those that had not begun

    async def _cure(self, member: Member) -> None:
        try:
            await self._try(member)
        finally:  # in the same step: who is spoilt after it needs a task of its own
            self._tasks.pop(member, None)
            self._again.discard(member)

    async def _try(self, member: Member) -> None:
        """A worker that drains, or was replaced by its next process, needs no cure."""
        pause_s = FIRST_PAUSE_S
        for tries in itertools.count(1):
            if member.state is not State.SPOILT:
                return
            self._again.discard(member)
            result = await self._ask(member)
            self._counter.add(result)
            if result == "reset" and member not in self._again:
                self._registry.set_state(member, State.READY)
                continue
            if result == "absent" and self._may_salt(member):
                member.salt = secrets.token_hex(8)
                self._counter.add("salted")
                self._registry.set_state(member, State.READY)
                continue
            if tries == 1:
                log.warning("prefix cache not reset", worker=member.worker.id, result=result)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    @staticmethod
    def _may_salt(member: Member) -> bool:
        """Once nothing that was sent without the salt is there any more."""
        is_vllm = member.worker.engine is EngineKind.VLLM
        return is_vllm and member.requests == 0 and member.state is State.SPOILT

    async def _ask(self, member: Member) -> str:
        """`reset`, `refused` (it says so), `absent` (there is no such path), `unsure` or `failed`."""
        try:
            answer = await post(member, PATH, b"{}", self._timeout_s)
        except GatewayError as error:
            if error.failure is Failure.CONNECT_REFUSED:
                member.was_refused = True
            return "failed"
        except TimeoutError:
            return "failed"
        return self._judge(member, answer)

    @staticmethod
    def _judge(member: Member, answer: Answer) -> str:
        """vLLM 0.32 says {"success": bool}, others 409, and older ones 200 whatever came of it: theirs counts
        once they have nothing of ours to do.
        """
        if answer.status >= 400:
            return "absent" if answer.status in ABSENT else "refused" if answer.status == 409 else "failed"
        said = answer.body.replace(b" ", b"")
        if b'"success":true' in said:
            return "reset"
        if b'"success"' in said:
            return "refused"
        return "reset" if member.requests == 0 else "unsure"
