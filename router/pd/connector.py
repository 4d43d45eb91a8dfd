"""The contract of a connector: what the two legs of a split request say, and what is read between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

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

    Everything but `prepare` is synchronous, and the same pair gets the same answer until one of its workers
    is forgotten. It may be called for many requests at a time, from one thread. One that is a `GaugeSource`
    has its metrics among the gateway's.
    """

    is_concurrent: ClassVar[bool]
    """Both legs at once; else the decode leg follows the prefill's whole answer."""
    decode_takes_whole: ClassVar[bool]
    """Whether a decode worker can also do a request all by itself."""
    takes_lists: ClassVar[bool]
    """Whether one request with several prompts can be split."""
    shortens_prefill: ClassVar[bool]
    """Whether the prefill leg asks for one token, not streamed; else its body is the client's."""
    prepares: ClassVar[bool]
    """Whether `prepare` has anything to ask; else it is not called."""
    client_fields: ClassVar[frozenset[str]]
    """Top-level fields of the body that are the connector's own: a client's are never passed on."""

    def __init__(self, config: PdConfig) -> None: ...

    async def prepare(self, pair: Pair) -> Any:
        """Learn what both legs need of the workers, before anything is sent.

        A concurrent connector returns what it hands over, which goes to `decode_leg` and `release`; of others
        the result is not used. Raises `CannotHandOver` or GatewayError, which count as the prefill worker's.
        The gateway bounds its time.
        """
        ...

    def prefill_leg(self, pair: Pair) -> Leg:
        """Raises `CannotHandOver` when a worker was forgotten since `prepare`."""
        ...

    def handoff(self, answer: Mapping[str, Any]) -> Any:
        """What the prefill's answer, a JSON object, hands over; None for connectors that read nothing of it.

        Raises `CannotHandOver` where it should hand over and does not. Of a concurrent connector that alone
        counts, and only while decode has not begun to answer: then it waits in vain.
        """
        ...

    def decode_leg(self, pair: Pair, handoff: Any) -> Leg:
        """Raises `CannotHandOver` when a worker was forgotten since `prepare`."""
        ...

    def release(self, pair: Pair, handoff: Any) -> tuple[str, Mapping[str, Any]] | None:
        """(path, body) of a request to any decode worker by which the prefill worker is told to keep the KV
        no longer; None where there is no such thing, and a lease of the engine's own has to end.
        """
        ...

    def forget(self, member: Member) -> None:
        """A worker is gone, or is a new process: what is known of it is not true any more."""
        ...


@runtime_checkable
class DecodeFirst(Connector, Protocol):
    """A connector whose decode worker is asked before any prefill: it does all by itself, or declines.

    Where `first_leg` gives one, it goes to the decode worker. Its answer is kept back, a stream event by
    event, for as long as `declined` says None; at False it is relayed from its start, at True dropped, and
    the request goes on as any other: prefill leg, decode leg. A stream that declines later is broken off.
    """

    declines_by: ClassVar[bytes]
    """Of a stream that is being relayed only events with these bytes are looked at."""
    whole_fields: ClassVar[Mapping[str, Any]]
    """Top-level fields of the body of a request that one worker does alone: it must not decline."""

    def first_leg(self, path: bytes, pair: Pair) -> Leg | None:
        """None: this request is not for asking, it begins with its prefill leg."""
        ...

    def declined(self, event: Mapping[str, Any]) -> bool | None:
        """Of a whole answer, or of one event of a stream, a JSON object each. None: the next one tells."""
        ...


@runtime_checkable
class Serving(Connector, Protocol):
    """A connector with something of its own that runs: the gateway starts it before it listens."""

    async def start(self, host: str) -> None:
        """`host`: where the gateway listens. Raises OSError, on which the gateway does not start."""
        ...

    def close(self) -> None:
        """Idempotent, and harmless before `start`."""
        ...
