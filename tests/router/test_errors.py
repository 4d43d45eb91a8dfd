from __future__ import annotations

import json

import pytest

from kvroute.router.errors import REASONS, Failure, GatewayError

STATUS = {
    400: {Failure.MALFORMED},
    401: {Failure.UNAUTHORIZED},
    404: {Failure.MODEL_NOT_FOUND, Failure.NOT_FOUND},
    408: {Failure.REQUEST_TIMEOUT},
    409: {Failure.CONFLICT},
    413: {Failure.BODY_TOO_LARGE},
    429: {Failure.OVERLOADED, Failure.REJECTED},
    431: {Failure.HEADERS_TOO_LARGE},
    500: {Failure.INTERNAL},
    502: {
        Failure.CONNECT_REFUSED,
        Failure.CONNECT_FAILED,
        Failure.RESET,
        Failure.BAD_RESPONSE,
        Failure.DIED,
        Failure.PREFILL_REFUSED,
        Failure.NO_HANDOFF,
        Failure.HANDOFF_EXPIRED,
    },
    503: {Failure.NO_WORKER, Failure.EXHAUSTED, Failure.SPOILT, Failure.GIVEN_UP},
    504: {
        Failure.CONNECT_TIMEOUT,
        Failure.FIRST_BYTE_TIMEOUT,
        Failure.IDLE_TIMEOUT,
        Failure.TOTAL_TIMEOUT,
        Failure.PREFILL_TIMEOUT,
        Failure.DECODE_TIMEOUT,
    },
}


@pytest.mark.parametrize("failure", Failure)
def test_every_failure_has_one_status_and_the_body_of_an_openai_error(failure: Failure) -> None:
    error = GatewayError(failure, "what happened", param="field")
    assert failure in STATUS[error.status]
    assert error.status in REASONS
    content = json.loads(error.body())["error"]
    assert set(content) == {"message", "type", "param", "code"}
    assert (content["message"], content["param"], content["code"]) == (
        "what happened",
        "field",
        failure.value,
    )
    assert content["type"].endswith("_error")


def test_codes_are_unique() -> None:
    assert len({failure.value for failure in Failure}) == len(Failure)


def test_the_response_is_whole() -> None:
    head, _, body = (
        GatewayError(Failure.OVERLOADED, "é", retry_after_s=2.4)
        .response("id", close=True)
        .partition(b"\r\n\r\n")
    )
    assert head.split(b"\r\n") == [
        b"HTTP/1.1 429 Too Many Requests",
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        b"retry-after: 2",
        b"x-request-id: id",
        b"connection: close",
    ]
    assert json.loads(body)["error"]["message"] == "é"


def test_the_response_to_head_says_how_long_the_body_would_be() -> None:
    error = GatewayError(Failure.NO_WORKER, "x")
    head = error.response(None, close=False, head_only=True)
    assert error.response(None, close=False) == head + error.body()


@pytest.mark.parametrize(("given", "sent"), [(0.01, b"1"), (0.0, b"1"), (1.6, b"2"), (30, b"30")])
def test_retry_after_is_whole_seconds_and_never_now(given: float, sent: bytes) -> None:
    response = GatewayError(Failure.REJECTED, "x", retry_after_s=given).response(None, close=False)
    assert b"\r\nretry-after: " + sent + b"\r\n" in response


def test_a_stream_ends_with_the_same_object() -> None:
    error = GatewayError(Failure.DIED, "line\nbreak", upstream_status=200)
    event = error.sse_event()
    assert event == b"data: " + error.body() + b"\n\n"
    assert event.count(b"\n") == 2
    assert json.loads(error.body())["error"]["upstream_status"] == 200
