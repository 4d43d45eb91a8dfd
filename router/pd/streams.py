"""What may stand on wrong KV that was found in a worker's cache: answers that begin, streams that go on."""

from __future__ import annotations

from collections import defaultdict

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


MAX_WRONG = 64
ANY = Start(None, frozenset())


class Streams:
    """`begin` with the first of a stream's body, `end` whatever happens; `cured` when a worker is not spoilt
    any more.
    """

    def __init__(self) -> None:
        self._wrong: dict[Member, list[Start]] = {}
        """By worker, the prompts whose KV is."""
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
        known.append(wrong if len(known) < MAX_WRONG else ANY)
        del known[MAX_WRONG + 1 :]
        for connection, (began_s, start) in list(self._by_member.get(member, {}).items()):
            if began_s >= since_s and start.may_share(wrong):
                message = "wrong KV was found in the worker's cache, on which this answer may stand"
                connection.fail(GatewayError(Failure.SPOILT, message))
                broken += 1
        return broken

    def is_suspect(self, member: Member, prompt: Prompt) -> bool:
        """Whether an answer to it that begins now, at a spoilt worker, may stand on wrong KV."""
        start = Start.of(prompt)
        return any(start.may_share(wrong) for wrong in self._wrong.get(member, (ANY,)))

    def cured(self, member: Member) -> None:
        self._wrong.pop(member, None)
