"""What a split request leaves at its prefill worker, and what it needs of the gateway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Struct

from kvroute.clock import monotonic
from kvroute.router.dispatch import Choice, PrefillHalf
from kvroute.router.knowledge import Prompt
from kvroute.router.pd.books import Asked, Books
from kvroute.router.pd.connector import Connector, DecodeFirst, Pair
from kvroute.router.sending import Sending
from kvroute.router.workers import Member
from kvroute.types import Outcome

SEND_WITHIN = 0.8
"""Of the engines' lease: later KV is not sent."""


class Kept(Struct):
    """KV that lies at a prefill worker for one request."""

    connector: Connector
    pair: Pair
    handoff: Any
    since_s: float
    until_s: float
    """Then it is gone."""
    expired: int
    """How often the worker had let KV go by then."""

    @classmethod
    def from_now(cls, connector: Connector, pair: Pair, handoff: Any, lease_s: float) -> Kept:
        """`lease_s` where the worker does not tell its own."""
        now_s, member = monotonic(), pair.prefill
        told = None if member.transfer is None else member.transfer.lease_s
        return cls(connector, pair, handoff, now_s, now_s + (told or lease_s), member.kv_expired or 0)

    @property
    def send_by_s(self) -> float:
        return self.since_s + SEND_WITHIN * (self.until_s - self.since_s)


class Desk(Protocol):
    """What a split request needs of the gateway."""

    books: Books

    def fresh_id(self) -> str:
        """One that no other attempt has, at no gateway."""
        ...

    def connector(self, prefill: Member) -> Connector: ...

    def asks_first(self, connector: Connector) -> DecodeFirst | None:
        """The same, where it asks the decode worker before any prefill."""
        ...

    def prefilled(self, choice: Choice, asked: Asked, outcome: Outcome) -> None:
        """A prefill leg is over."""
        ...

    def handed_over(self, half: PrefillHalf, pair: Pair, handoff_s: float) -> None:
        """From the prefill's answer to the first byte of the decode worker."""
        ...

    def spoilt(self, decode: Member, since_s: float, prompt: Prompt) -> None:
        """It may have fetched KV for `prompt` that was another's by then, at `since_s` or later, and may
        answer from it again.
        """
        ...

    def hear_out(
        self, sending: Sending, pieces: list[bytes], over: Callable[[], None], then: Callable[[bytes], None]
    ) -> None:
        """As `Releaser.hear_out`."""
        ...

    def let_go(self, kept: Kept, decode: Member, *, may_fetch: bool) -> None:
        """Nobody will fetch it; `decode` was to, and `may_fetch` it until it has heard that nobody waits."""
        ...
