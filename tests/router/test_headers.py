from __future__ import annotations

import pytest

from kvroute.router.headers import HOP_BY_HOP, REWRITTEN_ON_REQUEST, named_by_connection


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ([], set()),
        ([b"close"], set()),
        ([b"Keep-Alive"], set()),
        ([b"X-A"], {b"x-a"}),
        ([b" x-A ,close, X-b"], {b"x-a", b"x-b"}),
        ([b"x-a", b"x-b"], {b"x-a", b"x-b"}),
        ([b""], set()),
    ],
)
def test_names_listed_in_connection_are_hop_by_hop(values: list[bytes], named: set[bytes]) -> None:
    headers = [(b"X-C", b"1"), *((b"CONNECTION", value) for value in values)]
    assert named_by_connection(headers) - HOP_BY_HOP - {b"close", b""} == named


def test_framing_and_connection_headers_are_never_passed_on() -> None:
    assert {b"connection", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"keep-alive"} <= HOP_BY_HOP
    assert HOP_BY_HOP | {b"content-length", b"host", b"expect"} == REWRITTEN_ON_REQUEST
    assert b"content-encoding" not in REWRITTEN_ON_REQUEST
