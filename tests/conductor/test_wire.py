"""The lookup protocol: addresses, and frames cut out of a stream."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.conductor import wire
from tests.conductor.lookup_kit import framed


@pytest.mark.parametrize(
    "address",
    ["", "x", "unix://rel", "unix:/x", "unix:///" + "x" * 107, "unix:///a%00", "tcp://:1", "tcp://a", "tcp://a:",
     "tcp://a:x", "tcp://a:65536", "tcp://::1:5", "tcp://[::1:5", "http://a:1", "tcp://a:²"],
)  # fmt: skip
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be used; accepted: unix:///path/to.sock, tcp://host:port"):
        wire.SocketAddress.parse(address)


def test_addresses() -> None:
    assert wire.SocketAddress.parse("tcp://[::1]:5") == wire.SocketAddress("::1", 5)
    assert wire.SocketAddress.parse("tcp://a.b:5") == wire.SocketAddress("a.b", 5)
    assert wire.SocketAddress.parse("unix:///a%20b") == wire.SocketAddress(unix_path="/a b")


def test_both_sides_bound_the_messages_of_a_frame() -> None:
    for decoder, message in (
        (wire.requests_decoder, wire.Hello(wire.PROTOCOL)),
        (wire.answers_decoder, wire.Followed(1)),
    ):
        most = msgspec.msgpack.encode([message] * wire.MAX_MESSAGES)
        assert wire.decode(decoder, most) == [message] * wire.MAX_MESSAGES
        with pytest.raises(wire.WireError, match="frame: Expected `array` of length <= 4096"):
            wire.decode(decoder, msgspec.msgpack.encode([message] * (wire.MAX_MESSAGES + 1)))


FRAMES = st.lists(st.binary(max_size=200), max_size=6)


@given(bodies=FRAMES, cuts=st.lists(st.integers(1, 50), max_size=20))
def test_frames_are_the_same_however_they_are_cut(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(framed, bodies))
    reader = wire.FrameReader()
    found: list[bytes] = []
    for cut in cuts:
        piece, stream = stream[:cut], stream[cut:]
        found += reader.feed(piece)
    found += reader.feed(stream)
    assert found == bodies
    assert reader.buffered_bytes == 0
