"""What every process of ours that listens has in common."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Generator

import uvicorn

from kvroute.endpoint import http_origin, join_host_port

BACKLOG = 2048


class CannotListen(Exception):
    """An address to listen on cannot be had; the message names the setting."""


def listen(host: str, port: int, section: str = "") -> socket.socket:
    """A listening TCP socket; raises CannotListen naming `host` or `port` of the section (as in "admin.")."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise CannotListen(f"{section}host: cannot resolve {host!r}: {error}") from None
    # The protocol is named because asyncio turns Nagle's algorithm off only where it is.
    sock = socket.socket(info[0], socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(info[4])
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise CannotListen(
            f"{section}port: cannot listen on {join_host_port(host, port)}: {error.strerror}"
        ) from None
    sock.setblocking(False)
    return sock


def url_of(sock: socket.socket) -> str:
    """`http://host:port` of a listening socket."""
    host, port = sock.getsockname()[:2]
    return http_origin(host, port)


class HttpServer(uvicorn.Server):
    """Signals belong to the process, which stops it in its own order."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
