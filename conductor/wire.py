"""The lookup protocol between a gateway and a conductor of its own process: frames and messages.

    frame    = length of the body (uint32, big endian), body
    body     = msgpack array of messages, at most `MAX_FRAME_BYTES`
    message  = msgpack array [tag, fields...]

A connection begins with `Hello` from both sides, the client's first. Then the client sends any mix of
requests, as many in one frame as it has at hand, and need not wait: each `Match` and `Follow` bears an id
that comes back in its answer. `Predict`, `Observe` and `Unfollow` are not answered.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Annotated, Any
from urllib.parse import unquote

import msgspec
from msgspec import Meta, Struct

from kvroute.conductor.events.sources import MAX_RANKS, EventSource
from kvroute.conductor.keys import Namespace
from kvroute.conductor.packing import pack_keys
from kvroute.types import KeyMode, PrefixMatch, PromptKeys, Trust

PROTOCOL = 1
MAX_FRAME_BYTES = 4 * 2**20
HEADER_BYTES = 4
KEY_BYTES = 8
MAX_WORKERS = 4096
MAX_MESSAGES = 4096
"""Of one frame."""

ACCEPTED_ADDRESSES = "accepted: unix:///path/to.sock, tcp://host:port, tcp://[ipv6]:port"
UNIX_PATH_BYTES = 107
"""What a socket address holds on Linux, its final zero left out."""

Count = Annotated[int, Meta(ge=0, lt=2**32)]
Name = Annotated[str, Meta(min_length=1, max_length=512)]
Text = Annotated[str, Meta(max_length=512)]


class WireError(Exception):
    """The other side does not keep the protocol; `reason` is one of a small fixed set."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


MAX_KEY_SETS = 16
"""Of one lookup: block sizes among the workers."""


class SocketAddress(Struct, frozen=True):
    """Where a conductor takes lookups."""

    host: str = ""
    port: int = 0
    unix_path: str | None = None

    @classmethod
    def parse(cls, text: str) -> SocketAddress:
        """Raises `ValueError` that says what is accepted."""
        wrong = f"lookup address {text!r} cannot be used; {ACCEPTED_ADDRESSES}"
        scheme, separator, rest = text.partition("://")
        if scheme == "unix" and separator:
            path = unquote(rest)
            if not path.startswith("/") or "\0" in path or len(path.encode()) > UNIX_PATH_BYTES:
                raise ValueError(f"{wrong}, the path at most {UNIX_PATH_BYTES} bytes")
            return cls(unix_path=path)
        host, _, port = rest.rpartition(":")
        if scheme != "tcp" or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ValueError(wrong)
        if (":" in host) != (host.startswith("[") and host.endswith("]")):
            raise ValueError(wrong)
        return cls(host.strip("[]"), int(port))


class Message(Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """What all messages have in common: arrays, in the order of their fields."""


class Keys(Message, frozen=True):
    """`PromptKeys`, packed."""

    mode: KeyMode
    block_tokens: Annotated[int, Meta(ge=1, lt=2**32)]
    prompt_tokens: Count
    packed: bytes
    """Little-endian uint64 each."""

    @classmethod
    def pack(cls, keys: PromptKeys) -> Keys:
        packed = _little_endian(pack_keys(keys.keys))
        return cls(keys.mode, keys.block_tokens, keys.prompt_tokens, packed)

    def unpack(self) -> PromptKeys:
        """Raises `WireError` when the bytes are no whole number of keys."""
        if len(self.packed) % KEY_BYTES:
            raise WireError(
                "malformed", f"packed keys are {len(self.packed)} bytes, not a multiple of {KEY_BYTES}"
            )
        return PromptKeys(
            self.mode, array("Q", _little_endian(self.packed)), self.block_tokens, self.prompt_tokens
        )


class Hello(Message, tag=0, frozen=True):
    """First message of both sides."""

    protocol: int


class Match(Message, tag=1, frozen=True):
    """Ask what each of these workers holds of a prompt."""

    id: Count
    keys: Annotated[list[Keys], Meta(max_length=MAX_KEY_SETS)]
    """One per block size among the workers, and one of bytes where some are approximate."""
    worker_ids: Annotated[list[Name], Meta(max_length=MAX_WORKERS)]


class Predict(Message, tag=2, frozen=True):
    """A prompt was just routed to a worker."""

    worker_id: Name
    keys: Keys


class Observe(Message, tag=3, frozen=True):
    """What an engine said of a prompt's cached tokens, beside what the index had said."""

    worker_id: Name
    predicted_tokens: Count
    cached_tokens: Count
    prompt_tokens: Count


class Source(Message, frozen=True):
    """`EventSource` of one data-parallel rank."""

    endpoint: Name
    replay_endpoint: Name | None
    dp_rank: Count
    topic: Text
    bind: bool

    @classmethod
    def pack(cls, source: EventSource) -> Source:
        return cls(source.endpoint, source.replay_endpoint, source.dp_rank, source.topic, source.bind)

    def unpack(self) -> EventSource:
        """Raises `ValueError` that names the field."""
        return EventSource(self.endpoint, self.replay_endpoint, self.dp_rank, self.topic, self.bind)


class Follow(Message, tag=4, frozen=True):
    """A worker has come: its events are followed from now on, or only predictions where it has no sources."""

    id: Count
    worker_id: Name
    url: Name
    namespace: Namespace
    """Of its base model."""
    sources: Annotated[list[Source], Meta(max_length=MAX_RANKS)]
    block_tokens: Annotated[int, Meta(ge=1, lt=2**20)] | None = None
    min_block_tokens: Annotated[int, Meta(ge=1, lt=2**20)] = 16
    silent_tier_blocks: Count = 0


class Unfollow(Message, tag=5, frozen=True):
    """A worker has left for good."""

    worker_id: Name


class Row(Message, frozen=True):
    """`PrefixMatch` of one worker, and how far it may be believed."""

    tokens: Count
    gpu_tokens: Count
    cpu_tokens: Count
    confirmed_tokens: Count
    predicted_tokens: Count
    dp_rank: int | None
    trust: Trust

    @classmethod
    def pack(cls, match: PrefixMatch, trust: Trust) -> Row:
        return cls(
            match.tokens,
            match.gpu_tokens,
            match.cpu_tokens,
            match.confirmed_tokens,
            match.predicted_tokens,
            match.dp_rank,
            trust,
        )

    def match(self) -> PrefixMatch:
        return PrefixMatch(
            self.tokens,
            self.gpu_tokens,
            self.cpu_tokens,
            self.confirmed_tokens,
            self.predicted_tokens,
            self.dp_rank,
        )


class Matched(Message, tag=6, frozen=True):
    """Answer to `Match`: rows parallel to its worker ids."""

    id: Count
    rows: Annotated[list[Row], Meta(max_length=MAX_WORKERS)]


class Followed(Message, tag=7, frozen=True):
    """Answer to `Follow`; `error` says what was wrong with it."""

    id: Count
    error: Text | None = None


Request = Hello | Match | Predict | Observe | Follow | Unfollow
Answer = Hello | Matched | Followed

_encoder = msgspec.msgpack.Encoder()
requests_decoder = msgspec.msgpack.Decoder(Annotated[list[Request], Meta(max_length=MAX_MESSAGES)])
answers_decoder = msgspec.msgpack.Decoder(Annotated[list[Answer], Meta(max_length=MAX_MESSAGES)])


def frame(messages: Sequence[Message]) -> bytes:
    """One frame of these messages; raises `WireError` when it would be too long."""
    body = _encoder.encode(messages)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError("too_long", f"a frame of {len(body)} bytes; at most {MAX_FRAME_BYTES} are accepted")
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def check(message: Request) -> None:
    """Raises `WireError` unless the other side would take it: one bad message costs a frame its others."""
    decode(requests_decoder, frame([message])[HEADER_BYTES:])


def decode(decoder: msgspec.msgpack.Decoder[Any], body: bytes) -> Any:
    """The messages of one frame; raises `WireError` for anything else, however it is malformed."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
        raise WireError("malformed", f"frame: {error}") from None


class FrameReader:
    """Cuts a byte stream into frame bodies; holds at most one unfinished frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def buffered_bytes(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Bodies complete with `data`; raises `WireError` at a length above the limit, before it arrives."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= HEADER_BYTES:
                length = int.from_bytes(buffer[start : start + HEADER_BYTES], "big")
                if length > MAX_FRAME_BYTES:
                    raise WireError(
                        "oversized", f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are accepted"
                    )
                end = start + HEADER_BYTES + length
                if end > len(buffer):
                    break
                body = bytes(buffer[start + HEADER_BYTES : end])
                start = end
                yield body
        finally:
            del buffer[:start]


def _little_endian(packed: bytes) -> bytes:
    """From this machine's byte order, or to it."""
    if sys.byteorder == "little":
        return packed
    keys = array("Q", packed)
    keys.byteswap()
    return keys.tobytes()
