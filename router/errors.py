"""What can go wrong, and the one table that maps it to a status and an OpenAI error body."""

from __future__ import annotations

import json
from enum import StrEnum

import orjson


class Failure(StrEnum):
    """One cause, one status. The values are metric labels and the `code` of the error body."""

    MALFORMED = "malformed_request"
    UNAUTHORIZED = "invalid_api_key"
    MODEL_NOT_FOUND = "model_not_found"
    NOT_FOUND = "not_found"
    CONFLICT = "already_exists"
    REQUEST_TIMEOUT = "request_timeout"
    BODY_TOO_LARGE = "body_too_large"
    HEADERS_TOO_LARGE = "headers_too_large"
    OVERLOADED = "overloaded"
    REJECTED = "rejected"
    NO_WORKER = "no_worker"
    EXHAUSTED = "gateway_exhausted"
    CONNECT_REFUSED = "connect_refused"
    CONNECT_FAILED = "connect_failed"
    CONNECT_TIMEOUT = "connect_timeout"
    RESET = "upstream_reset"
    BAD_RESPONSE = "bad_upstream_response"
    FIRST_BYTE_TIMEOUT = "first_byte_timeout"
    IDLE_TIMEOUT = "idle_timeout"
    TOTAL_TIMEOUT = "total_timeout"
    DIED = "upstream_died"
    PREFILL_REFUSED = "prefill_refused"
    PREFILL_TIMEOUT = "prefill_timeout"
    DECODE_TIMEOUT = "decode_timeout"
    NO_HANDOFF = "no_handoff"
    HANDOFF_EXPIRED = "handoff_expired"
    SPOILT = "spoilt_cache"
    GIVEN_UP = "given_up"
    INTERNAL = "internal_error"


_INVALID = "invalid_request_error"
_UPSTREAM = "upstream_error"
_TIMEOUT = "timeout_error"

# failure -> (HTTP status, OpenAI error type)
_TABLE: dict[Failure, tuple[int, str]] = {
    Failure.MALFORMED: (400, _INVALID),
    Failure.UNAUTHORIZED: (401, "authentication_error"),
    Failure.MODEL_NOT_FOUND: (404, _INVALID),
    Failure.NOT_FOUND: (404, _INVALID),
    Failure.CONFLICT: (409, _INVALID),
    Failure.REQUEST_TIMEOUT: (408, _TIMEOUT),
    Failure.BODY_TOO_LARGE: (413, _INVALID),
    Failure.HEADERS_TOO_LARGE: (431, _INVALID),
    Failure.OVERLOADED: (429, "rate_limit_error"),
    Failure.REJECTED: (429, "rate_limit_error"),
    Failure.NO_WORKER: (503, "service_unavailable_error"),
    Failure.EXHAUSTED: (503, "service_unavailable_error"),
    Failure.CONNECT_REFUSED: (502, _UPSTREAM),
    Failure.CONNECT_FAILED: (502, _UPSTREAM),
    Failure.CONNECT_TIMEOUT: (504, _TIMEOUT),
    Failure.RESET: (502, _UPSTREAM),
    Failure.BAD_RESPONSE: (502, _UPSTREAM),
    Failure.FIRST_BYTE_TIMEOUT: (504, _TIMEOUT),
    Failure.IDLE_TIMEOUT: (504, _TIMEOUT),
    Failure.TOTAL_TIMEOUT: (504, _TIMEOUT),
    Failure.DIED: (502, _UPSTREAM),
    Failure.PREFILL_REFUSED: (502, _UPSTREAM),
    Failure.PREFILL_TIMEOUT: (504, _TIMEOUT),
    Failure.DECODE_TIMEOUT: (504, _TIMEOUT),
    Failure.NO_HANDOFF: (502, _UPSTREAM),
    Failure.HANDOFF_EXPIRED: (502, _UPSTREAM),
    Failure.SPOILT: (503, "service_unavailable_error"),
    Failure.GIVEN_UP: (503, "service_unavailable_error"),
    Failure.INTERNAL: (500, "internal_error"),
}

REASONS = {
    400: b"Bad Request",
    401: b"Unauthorized",
    404: b"Not Found",
    409: b"Conflict",
    408: b"Request Timeout",
    413: b"Content Too Large",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
}


def shorten(text: str, limit: int = 100) -> str:
    """A client's own words for a message or a log line."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def _to_json(value: dict[str, object]) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # a lone surrogate, out of a client's JSON
        return json.dumps(value).encode()


class GatewayError(Exception):
    """A request that ends with an answer of the gateway's own."""

    def __init__(
        self,
        failure: Failure,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        upstream_status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.failure = failure
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.upstream_status = upstream_status

    @property
    def status(self) -> int:
        return _TABLE[self.failure][0]

    def body(self) -> bytes:
        """The OpenAI error object; `upstream_status` is there when a worker had already answered."""
        error: dict[str, object] = {
            "message": self.message,
            "type": _TABLE[self.failure][1],
            "param": self.param,
            "code": self.failure.value,
        }
        if self.upstream_status is not None:
            error["upstream_status"] = self.upstream_status
        return _to_json({"error": error})

    def sse_event(self, target: bytes = b"") -> bytes:
        """The last event of a stream that has begun, as the API of the request's target spells it."""
        kind = _TABLE[self.failure][1]
        if target.startswith(b"/v1/messages"):
            error: dict[str, object] = {"type": "error", "error": {"type": kind, "message": self.message}}
        elif target.startswith(b"/v1/responses"):
            error = {"type": "error", "code": self.failure.value, "message": self.message, "param": None}
        else:
            return b"data: " + self.body() + b"\n\n"
        return b"event: error\ndata: " + _to_json(error) + b"\n\n"

    def response(self, request_id: str | None, *, close: bool, head_only: bool = False) -> bytes:
        """The whole HTTP response."""
        body = self.body()
        lines = [
            b"HTTP/1.1 %d %s" % (self.status, REASONS.get(self.status, b"Refused")),
            b"content-type: application/json",
            b"content-length: %d" % len(body),
        ]
        if self.retry_after_s is not None:
            lines.append(b"retry-after: %d" % max(1, round(self.retry_after_s)))
        if self.failure is Failure.UNAUTHORIZED:
            lines.append(b"www-authenticate: Bearer")
        if request_id is not None:
            lines.append(b"x-request-id: " + request_id.encode("latin-1", "replace"))
        if close:
            lines.append(b"connection: close")
        return b"\r\n".join(lines) + b"\r\n\r\n" + (b"" if head_only else body)
