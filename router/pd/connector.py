"""The contract of a connector: what the two legs of a split request say, and what is read between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from msgspec import Struct

from kvroute.config_pd import PdConfig
from kvroute.router.workers import Member

Header = tuple[bytes, bytes]


class CannotHandOver(Exception):
    """This pair cannot be used now, or the prefill's answer hands nothing over; the message says why."""


class Pair(Struct, frozen=True):
    """One attempt at a split request: two workers, and an id that no other attempt has."""

    prefill: Member
    decode: Member
    id: str
    """X-Request-Id of both legs, unless the connector makes its own of it."""
    prompts: int | None = None
    """Length of a list of prompts; None for a single one."""
    prefill_rank: int | None = None
    """Data-parallel ranks that were chosen; None where the worker has one, or it does not matter."""
    decode_rank: int | None = None


class Leg(Struct, frozen=True):
    """What one leg has beside the client's own request."""

    fields: Mapping[str, Any] = {}
    """Top-level fields of the body, in place of the client's where it has such."""
    headers: Sequence[Header] = ()
    """In place of the client's headers of these names. X-Request-Id is the pair's where it is not here."""


class Connector(Protocol):
    """A class registered in the entry-point group `kvroute.pd_connectors`, made once with the configuration.

    Everything but `prepare` is synchronous and pure. It may be called for many requests at a time, from one
    thread.
    """

    is_concurrent: ClassVar[bool]
    """Both legs at once; else the decode leg follows the prefill's whole answer."""
    decode_takes_whole: ClassVar[bool]
    """Whether a decode worker can also do a request all by itself."""
    takes_lists: ClassVar[bool]
    """Whether one request with several prompts can be split."""
    shortens_prefill: ClassVar[bool]
    """Whether the prefill leg asks for one token, not streamed; else its body is the client's."""
    client_fields: ClassVar[frozenset[str]]
    """Top-level fields of the body that are the connector's own: a client's are never passed on."""

    def __init__(self, config: PdConfig) -> None: ...

    async def prepare(self, pair: Pair) -> None:
        """Learn what both legs need of the workers, before anything is sent.

        Raises `CannotHandOver` or GatewayError, which count as the prefill worker's. The gateway bounds its
        time.
        """
        ...

    def prefill_leg(self, pair: Pair) -> Leg: ...

    def handoff(self, answer: Mapping[str, Any]) -> Any:
        """What the prefill's answer, a JSON object, hands over; None for connectors that read nothing of it.

        Raises `CannotHandOver` where it should hand over and does not. Concurrent connectors are not asked.
        """
        ...

    def decode_leg(self, pair: Pair, handoff: Any) -> Leg: ...

    def release(self, handoff: Any, model: str | None) -> tuple[str, Mapping[str, Any]] | None:
        """(path, body) of a request to any decode worker by which the prefill worker is told to keep the KV
        no longer; None where there is no such thing, and a lease of the engine's own has to end.
        """
        ...

    def forget(self, member: Member) -> None:
        """A worker is gone, or is a new process: what is known of it is not true any more."""
        ...
