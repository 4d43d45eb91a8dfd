"""HTTP/1.1 messages as bytes: the request that was read, responses, and how a body is framed."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from typing import Any

import orjson

from kvroute.loadtests.mock_engine.faults import Faults

Header = tuple[bytes, bytes]
JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"


@dataclass(slots=True)
class Request:
    """One request, whole. Header names as sent."""

    method: bytes
    path: str
    query: bytes
    headers: list[Header]
    body: bytes
    keep_alive: bool
    http_1_0: bool = False
    _by_name: dict[bytes, bytes] | None = None

    def header(self, name: bytes) -> str | None:
        """The header of that lower-case name; the last one when there are several."""
        if self._by_name is None:
            self._by_name = {key.lower(): value for key, value in self.headers}
        value = self._by_name.get(name)
        return None if value is None else value.decode("latin-1")


class ApiError(Exception):
    """A refusal in vLLM's shape."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param = status, message, kind, param

    @property
    def body(self) -> bytes:
        """The JSON object."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return orjson.dumps({"error": error})


def invalid(message: str, param: str | None = None) -> ApiError:
    """The body is not shaped like a request."""
    return ApiError(400, message, "Bad Request", param)


def rejected(message: str, param: str | None = None) -> ApiError:
    """The request is well formed and cannot be served."""
    return ApiError(400, message, "BadRequestError", param)


@lru_cache(maxsize=256)
def status_line(status: int) -> bytes:
    """With the usual headers."""
    phrase = HTTPStatus(status).phrase if status in set(HTTPStatus) else "Unknown"
    return b"HTTP/1.1 %d %s\r\nserver: uvicorn\r\n" % (status, phrase.encode())


def head(status: int, headers: Iterable[Header]) -> bytes:
    """Status line and headers, blank line included."""
    return status_line(status) + b"".join(b"%b: %b\r\n" % header for header in headers) + b"\r\n"


def response(
    status: int, body: bytes = b"", content_type: bytes = JSON, headers: Iterable[Header] = ()
) -> bytes:
    """A whole response with its length."""
    lines = b"".join(b"%b: %b\r\n" % header for header in headers)
    length = b"content-length: %d\r\ncontent-type: %b\r\n" % (len(body), content_type)
    return b"%b%b%b\r\n%b" % (status_line(status), length, lines, body)


def json_response(value: Any, status: int = 200, headers: Iterable[Header] = ()) -> bytes:
    """A whole response around a JSON value."""
    return response(status, orjson.dumps(value), headers=headers)


class Framing:
    """How the events of one stream become bytes on the connection."""

    def __init__(self, faults: Faults, chunked: bool) -> None:
        self.chunked = chunked
        self._split = faults.split
        self._crlf = faults.crlf
        self._gzip = zlib.compressobj(wbits=31) if faults.gzip else None
        self.plain = chunked and not (faults.split or faults.crlf or faults.gzip)

    def headers(self) -> list[Header]:
        """What the head says of the body."""
        headers = [(b"content-type", EVENT_STREAM)]
        if self._gzip is not None:
            headers.append((b"content-encoding", b"gzip"))
        if self.chunked:
            headers.append((b"transfer-encoding", b"chunked"))
        return headers

    def frame(self, data: bytes) -> bytes:
        """One chunk of events."""
        if self._crlf:
            data = data.replace(b"\n", b"\r\n")
        if self._gzip is not None:
            data = self._gzip.compress(data) + self._gzip.flush(zlib.Z_SYNC_FLUSH)
        return self._chunk(data)

    def end(self) -> bytes:
        """The end of the body."""
        rest = self._chunk(self._gzip.flush()) if self._gzip is not None else b""
        return rest + b"0\r\n\r\n" if self.chunked else rest

    def _chunk(self, data: bytes) -> bytes:
        if not self.chunked or not data:
            return data
        if self._split:
            return b"".join(b"1\r\n%c\r\n" % byte for byte in data)
        return b"%x\r\n%b\r\n" % (len(data), data)


def compressed(body: bytes) -> bytes:
    """The same bytes every time."""
    return gzip.compress(body, mtime=0)
