"""Where an engine publishes: endpoints by data-parallel rank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TCP = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.%]+\]|[^\[\]:/\s]+):(?P<port>\d{1,5})")
_LOCAL = re.compile(r"ipc://\S+")
_WILDCARDS = ("*", "0.0.0.0", "[::]")
MAX_RANKS = 1024
MAX_TEXT = 512
MAX_PUBLISHERS = 256
"""Of one engine: each takes sockets."""


@dataclass(frozen=True, slots=True)
class EventSource:
    """One publisher: one data-parallel rank of one engine. ValueError names the field that cannot be."""

    endpoint: str
    """`tcp://host:port` or `ipc://path`."""
    replay_endpoint: str | None = None
    """Where what was missed is asked for; None: it cannot be had again."""
    dp_rank: int = 0
    topic: str = ""
    """Prefix of the topics to take; empty takes all."""
    bind: bool = False
    """True where the engine connects to us: it was told a host without a wildcard."""

    def __post_init__(self) -> None:
        for name in ("endpoint", "replay_endpoint", "topic"):
            if len(getattr(self, name) or "") > MAX_TEXT:
                raise ValueError(f"{name} must have at most {MAX_TEXT} characters")
        check_endpoint("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            check_endpoint("replay_endpoint", self.replay_endpoint)
        if not 0 <= self.dp_rank < MAX_RANKS:
            raise ValueError(f"dp_rank must be from 0 to {MAX_RANKS - 1}, got {self.dp_rank}")

    @property
    def unreachable(self) -> str | None:
        """The endpoint that has a wildcard where a host is needed; None when none has."""
        ends = (None if self.bind else self.endpoint, self.replay_endpoint)
        wild = (
            end
            for end in ends
            if end is not None and (at := _TCP.fullmatch(end)) and at["host"] in _WILDCARDS
        )
        return next(wild, None)

    def at(self, host: str) -> EventSource:
        """Itself with the engine's host in place of a wildcard: whoever binds to all is met at its own."""
        replay = self.replay_endpoint
        return EventSource(
            _at(self.endpoint, host),
            None if replay is None else _at(replay, host),
            self.dp_rank,
            self.topic,
            self.bind,
        )

    def ranks(self, count: int) -> tuple[EventSource, ...]:
        """The publishers of `count` ranks from this one on: each has the next port, as engines do."""
        replay = self.replay_endpoint
        return tuple(
            EventSource(
                _shifted(self.endpoint, i),
                None if replay is None else _shifted(replay, i),
                self.dp_rank + i,
                self.topic,
                self.bind,
            )
            for i in range(count)
        )


def discovered_sources(answer: Any, host: str) -> tuple[EventSource, ...]:
    """What an engine's `GET /kv_event_sources` says: {"0": {endpoint, replay_endpoint, topic}} by rank.

    `host` is the engine's own (a name, an address, or an IPv6 address in brackets): it replaces wildcards.
    Ranks that do not publish are left out. Raises ValueError when the answer is of another shape.
    """
    if not isinstance(answer, Mapping):
        raise ValueError(f"kv_event_sources must be an object by rank, got {type(answer).__name__}")
    if len(answer) > MAX_PUBLISHERS:
        raise ValueError(f"kv_event_sources must have at most {MAX_PUBLISHERS} ranks, got {len(answer)}")
    return tuple(_discovered(rank, said, host) for rank, said in answer.items() if _publishes(rank, said))


def check_endpoint(field: str, endpoint: str) -> None:
    """ValueError, naming the field, unless ZMQ could connect or bind there."""
    tcp = _TCP.fullmatch(endpoint)
    if tcp is None and not _LOCAL.fullmatch(endpoint):
        raise ValueError(f"{field} must be tcp://host:port or ipc://path, got {endpoint!r}")
    if tcp is not None and not 1 <= int(tcp["port"]) <= 65535:
        raise ValueError(f"{field} must have a port from 1 to 65535, got {endpoint!r}")


def _publishes(rank: Any, said: Any) -> bool:
    if not isinstance(said, Mapping):
        raise ValueError(f"kv_event_sources[{rank!r}] must be an object, got {type(said).__name__}")
    return said.get("enable_kv_cache_events", True) is not False and said.get("publisher", "zmq") == "zmq"


def _discovered(rank: Any, said: Mapping[str, Any], host: str) -> EventSource:
    where = f"kv_event_sources[{rank!r}]"
    if not str(rank).isdecimal():
        raise ValueError(f"{where}: the rank must be a number")
    for name, kinds in (("endpoint", str), ("replay_endpoint", str | None), ("topic", str | None)):
        if not isinstance(said.get(name), kinds):
            raise ValueError(f"{where}.{name} must be text, got {said.get(name)!r}")
    try:
        source = EventSource(
            said["endpoint"], said.get("replay_endpoint") or None, int(rank), said.get("topic") or ""
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return source.at(host)


def _at(endpoint: str, host: str) -> str:
    tcp = _TCP.fullmatch(endpoint)
    if tcp is None or tcp["host"] not in _WILDCARDS:
        return endpoint
    return f"tcp://{host}:{tcp['port']}"


def _shifted(endpoint: str, by: int) -> str:
    tcp = _TCP.fullmatch(endpoint)
    if tcp is not None:
        return f"tcp://{tcp['host']}:{int(tcp['port']) + by}"
    return f"{endpoint}_dp{by}" if by else endpoint
