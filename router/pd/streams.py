"""What may stand on wrong KV that was found in a worker's cache: answers that begin, streams that go on."""

from __future__ import annotations

from collections import defaultdict
from math import inf

from msgspec import Struct

from kvroute.router.errors import Failure, GatewayError
from kvroute.router.knowledge import Prompt
from kvroute.router.upstream import UpstreamConnection
from kvroute.router.workers import Member
from kvroute.types import KeyMode


class Start(Struct, frozen=True):
    """Of prompts, by their first blocks: who shares one shares the wrong KV of what follows, or may."""

    mode: KeyMode | None
    """None where there are no keys to tell by."""
    keys: frozenset[int]

    @classmethod
    def of(cls, prompt: Prompt) -> Start:
        sizes = [keys for one in prompt.sets for keys in one.values()]
        return cls(prompt.mode if sizes else None, frozenset(keys.keys[0] for keys in sizes if keys.keys))

    def may_share(self, other: Start) -> bool:
        return self.mode is None or self.mode is not other.mode or not self.keys.isdisjoint(other.keys)


class Wrong(Struct):
    """A prompt whose KV in a worker's cache is wrong."""

    start: Start
    until_s: float = inf
    """When the cache was cured. What the worker was given before may stand on it all the same."""


MAX_WRONG = 64
ANY = Start(None, frozenset())


class Streams:
    """`begin` with the first of a stream's body, `end` whatever happens; `cured` when a worker is not spoilt
    any more, `gone` when it is forgotten.
    """

    def __init__(self) -> None:
        self._wrong: dict[Member, list[Wrong]] = {}
        self._by_member: defaultdict[Member, dict[UpstreamConnection, tuple[float, Start]]] = defaultdict(
            dict
        )

    def begin(self, member: Member, connection: UpstreamConnection, now_s: float, prompt: Prompt) -> None:
        self._by_member[member][connection] = now_s, Start.of(prompt)

    def end(self, member: Member, connection: UpstreamConnection) -> None:
        streams = self._by_member[member]
        streams.pop(connection, None)
        if not streams:
            del self._by_member[member]

    def break_off(self, member: Member, since_s: float, prompt: Prompt) -> int:
        """Streams that began at `since_s` (on `kvroute.clock`) or later, and may share blocks with a prompt
        whose KV is wrong; how many that are.
        """
        wrong, broken = Start.of(prompt), 0
        known = self._wrong.setdefault(member, [])
        if len(known) >= MAX_WRONG:
            known[:] = [one for one in known if one.until_s == inf][-MAX_WRONG:]
        known.append(Wrong(wrong if len(known) < MAX_WRONG else ANY))
        for connection, (began_s, start) in list(self._by_member.get(member, {}).items()):
            if began_s >= since_s and start.may_share(wrong):
                message = "wrong KV was found in the worker's cache, on which this answer may stand"
                connection.fail(GatewayError(Failure.SPOILT, message))
                broken += 1
        return broken

    def is_suspect(self, member: Member, prompt: Prompt, chosen_s: float) -> bool:
        """Whether an answer by this worker that begins now may stand on wrong KV: one that was spoilt may
        have taken the request on before its cure.
        """
        known = self._wrong.get(member)
        if known is None:
            return False
        start = Start.of(prompt)
        return any(chosen_s <= one.until_s and start.may_share(one.start) for one in known)

    def cured(self, member: Member, now_s: float) -> None:
        """Also said of workers that never were spoilt."""
        for one in self._wrong.get(member, ()):
            one.until_s = min(one.until_s, now_s)
        if member.requests == 0:
            self._wrong.pop(member, None)

    def gone(self, member: Member) -> None:
        self._wrong.pop(member, None)
