"""One request on its way to one worker: a connection that is given back or closed, whatever happens."""

from __future__ import annotations

from kvroute.clock import monotonic
from kvroute.config_groups import Timeouts
from kvroute.router.metrics import Metrics
from kvroute.router.sweeper import NEVER
from kvroute.router.upstream import Response, StaleConnection, UpstreamConnection
from kvroute.router.workers import Member


class Sending:
    """`finish` is due once `post` was called; it is idempotent."""

    __slots__ = ("_member", "_metrics", "connection")

    def __init__(self, member: Member, metrics: Metrics) -> None:
        self._member = member
        self._metrics = metrics
        self.connection: UpstreamConnection | None = None

    async def post(
        self,
        head: bytes,
        body: bytes,
        timeouts: Timeouts,
        deadline_s: float,
        *,
        head_only: bool = False,
        once: bool = False,
        send_by_s: float | None = None,
        first_byte_by_s: float = NEVER,
    ) -> Response | None:
        """Send on a pooled connection if there is one; if that has gone stale, once more on a fresh one.

        Not so with `once`: a worker that died over the request looks the same, and what names KV must not
        come to it twice. Then StaleConnection is raised. None when `send_by_s` (on `kvroute.clock`) has
        passed before it could be sent: nothing was. `first_byte_by_s` as in `UpstreamConnection.send`.
        """
        self.finish()
        pool = self._member.pool
        connection = pool.take_idle()
        while True:
            self.connection = connection = connection or await pool.connect()
            if send_by_s is not None and monotonic() >= send_by_s:
                self.connection = None
                pool.keep(connection)
                return None
            try:
                return await connection.send(head, body, head_only, timeouts, deadline_s, first_byte_by_s)
            except StaleConnection:
                self._metrics.stale.add()
                connection.finish()
                self.connection = connection = None
                if once:
                    raise

    def finish(self) -> None:
        """Back to the pool when the exchange is clean and over, else closed."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.finish()
