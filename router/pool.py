"""The connections to one worker."""

from __future__ import annotations

import asyncio
import errno
import ssl

from kvroute.clock import monotonic
from kvroute.config_groups import Timeouts
from kvroute.endpoint import Endpoint
from kvroute.router.errors import Failure, GatewayError
from kvroute.router.sweeper import Sweeper
from kvroute.router.upstream import UpstreamConnection

OUR_OWN = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Faults of this machine, which say nothing of a worker."""


class UpstreamPool:
    """Connections to one worker; idle ones are reused, last in first out, and closed before it does."""

    def __init__(
        self,
        endpoint: Endpoint,
        timeouts: Timeouts,
        sweeper: Sweeper,
        loop: asyncio.AbstractEventLoop,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.loop = loop
        self._timeouts = timeouts
        self._sweeper = sweeper
        self._tls = (tls or ssl.create_default_context()) if endpoint.tls else None
        self._idle: list[UpstreamConnection] = []
        self._open: set[UpstreamConnection] = set()
        self._closing = False

    def __repr__(self) -> str:
        return f"<UpstreamPool {self.endpoint.url} open={len(self._open)} idle={len(self._idle)}>"

    @property
    def open_connections(self) -> int:
        return len(self._open)

    def take_idle(self) -> UpstreamConnection | None:
        """A connection that was used before, or None."""
        now = monotonic()
        while self._idle:
            connection = self._idle.pop()
            if connection.deadline_s > now:
                return connection
            connection.close()
        return None

    async def connect(self) -> UpstreamConnection:
        """A fresh connection; raises GatewayError with the cause."""
        endpoint = self.endpoint
        try:
            async with asyncio.timeout(self._timeouts.connect_s):
                if endpoint.unix_path is not None:
                    _, protocol = await self.loop.create_unix_connection(self._protocol, endpoint.unix_path)
                else:
                    _, protocol = await self.loop.create_connection(
                        self._protocol, endpoint.host, endpoint.port, ssl=self._tls
                    )
        except TimeoutError:
            raise GatewayError(
                Failure.CONNECT_TIMEOUT, "worker did not accept a connection within timeouts.connect_s"
            ) from None
        except (ConnectionRefusedError, FileNotFoundError) as error:
            raise GatewayError(Failure.CONNECT_REFUSED, f"nobody listens at the worker: {error}") from None
        except OSError as error:
            if error.errno in OUR_OWN:
                raise GatewayError(
                    Failure.EXHAUSTED, f"the gateway itself is out of means: {error}"
                ) from None
            raise GatewayError(Failure.CONNECT_FAILED, f"cannot connect to worker: {error}") from None
        except UnicodeError as error:
            raise GatewayError(Failure.CONNECT_FAILED, f"cannot connect to worker: {error}") from None
        # Not in connection_made: uvloop, cancelled right after that, closes without connection_lost.
        if not protocol.closed:
            self._open.add(protocol)
            self._sweeper.watch(protocol)
        return protocol

    def _protocol(self) -> UpstreamConnection:
        return UpstreamConnection(self)

    def keep(self, connection: UpstreamConnection) -> None:
        if self._closing:
            connection.close()
            return
        connection.deadline_s = monotonic() + self._timeouts.upstream_keep_alive_s
        self._idle.append(connection)

    def lost(self, connection: UpstreamConnection) -> None:
        self._open.discard(connection)
        self._sweeper.forget(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close_idle(self) -> None:
        """No connection is kept from here on; those in use end with their exchange."""
        self._closing = True
        for connection in self._idle.copy():
            connection.close()

    def close(self) -> None:
        self.close_idle()
        for connection in self._open.copy():
            connection.close()
