from __future__ import annotations

import json
from typing import Any

import pytest

from kvroute.router.meter import TAIL_BYTES, Meter, Usage
from kvroute.router.metrics import ITL_BOUNDS_S, Series


def _fed(*pieces: bytes, streams: bool = True) -> Meter:
    meter = Meter(Series(ITL_BOUNDS_S) if streams else None)
    for number, piece in enumerate(pieces):
        meter.feed(piece, float(number))
    return meter


def _usage(usage: Any, *, before: bytes = b"", after: bytes = b"") -> Usage:
    body = before + b'data: {"choices":[],"usage":' + json.dumps(usage).encode() + b"}\n\n" + after
    return _fed(body).usage()


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}, Usage(9, 5, None)),
        (
            {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}},
            Usage(9, 5, 4),
        ),
        ({"prompt_tokens": 9, "completion_tokens": 0, "prompt_tokens_details": None}, Usage(9, 0, None)),
        (
            {"input_tokens": 9, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 0}},
            Usage(9, 5, 0),
        ),
        ({"input_tokens": 9, "output_tokens": 5, "cache_read_input_tokens": 7}, Usage(16, 5, 7)),
        ({"prompt_tokens": "nine"}, Usage()),
        ({"prompt_tokens": -1}, Usage()),
        ({}, Usage()),
        (None, Usage()),
        ([], Usage()),
    ],
)
def test_usage_in_the_words_of_each_api(usage: Any, expected: Usage) -> None:
    assert _usage(usage) == expected
    assert _usage(usage, after=b"data: [DONE]\n\n") == expected


def test_usage_of_sglang_stands_in_meta_info() -> None:
    body = b'{"text":"a","meta_info":{"prompt_tokens":9,"completion_tokens":5,"cached_tokens":3,'
    body += b'"finish_reason":{"type":"stop"}}}'
    assert _fed(body, streams=False).usage() == Usage(9, 5, 3)


def test_the_last_usage_that_is_one_counts() -> None:
    first = b'data: {"usage":{"prompt_tokens":9,"completion_tokens":1}}\n\n'
    assert _usage({"prompt_tokens": 9, "completion_tokens": 2}, before=first) == Usage(9, 2, None)
    assert _usage(None, before=first) == Usage(9, 1, None)


def test_a_usage_within_a_text_is_not_one() -> None:
    text = json.dumps({"content": '"usage":{"prompt_tokens":1}'}).encode()
    assert _fed(b"data: " + text + b"\n\n").usage() == Usage()


@pytest.mark.parametrize("size", [1, 2, 100, 10**6])
def test_usage_does_not_depend_on_the_reads(size: int) -> None:
    body = b"data: {}\n\n" * 5000 + b'data: {"usage":{"prompt_tokens":9}}\n\ndata: [DONE]\n\n'
    meter = _fed(*(body[at : at + size] for at in range(0, len(body), size)))
    assert meter.usage() == Usage(9)
    assert meter.tail() == body[-TAIL_BYTES:]
    assert meter.body_bytes == len(body)


@pytest.mark.parametrize(("size", "count"), [(1, 100_000), (1000, 1000), (2**18, 8)])
def test_what_is_kept_is_bounded(size: int, count: int) -> None:
    meter = Meter(Series(ITL_BOUNDS_S))
    most = 0
    for number in range(count):
        meter.feed(b"x" * size, float(number))
        most = max(most, meter._kept_bytes)
    assert most <= 4 * TAIL_BYTES
    assert sum(len(piece) for piece in meter._kept) == meter._kept_bytes
    assert meter.tail() == b"x" * TAIL_BYTES


@pytest.mark.parametrize(
    ("body", "border"),
    [
        (b"data: 1\n\n", True),
        (b"data: 1\r\n\r\n", True),
        (b"data: 1\r\r", True),
        (b"data: 1\n", False),
        (b"data: 1\r\n", False),
        (b"data: 1", False),
        (b"", False),
    ],
)
def test_event_borders(body: bytes, border: bool) -> None:
    assert _fed(body).at_event_border is border
    assert _fed(*(body[at : at + 1] for at in range(len(body)))).at_event_border is border


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b'data: {"error":{"message":"x"}}\n\n', True),
        (b'data: {"a":1}\n\ndata:{"error":1}\n\ndata: [DONE]\n\n', True),
        (b'data: {"object":"error"}\n\n', True),
        (b'event: error\ndata: {"type":"error"}\n\n', True),
        (b'data: {"text":"data: {\\"error\\": 1}"}\n\n', False),
        (b'data: {"text":"error"}\n\n', False),
        (b": event: error\n\n", False),
        (b"", False),
    ],
)
def test_error_events(body: bytes, error: bool) -> None:
    assert _fed(body).in_band_error() is error


def test_times_are_those_of_the_first_and_last_read() -> None:
    meter = _fed(b"a", b"b", b"c")
    assert (meter.first_s, meter.last_s) == (0.0, 2.0)
    assert Meter(None).first_s is None


def test_gaps_between_reads_of_a_stream_are_observed() -> None:
    series = Series(ITL_BOUNDS_S)
    meter = Meter(series)
    for at_s in (5.0, 5.5, 7.5):
        meter.feed(b"data: 1\n\n", at_s)
    assert (series.count, series.sum) == (2, 2.5)
    assert (meter.first_s, meter.last_s) == (5.0, 7.5)
