"""Whether an answer that came late can stand on KV that was let go by then."""

from __future__ import annotations

from kvroute.clock import monotonic
from kvroute.router.discovery import read_metrics
from kvroute.router.dispatch import Choice
from kvroute.router.errors import Failure, GatewayError
from kvroute.router.meter import Meter
from kvroute.router.pd.books import Asked
from kvroute.router.pd.desk import Desk, Kept
from kvroute.router.probe import get
from kvroute.router.upstream import UpstreamConnection
from kvroute.router.workers import Member

SURELY = 0.8
"""Of the predicted time of an answer's tokens, what they take at least."""
ASK_S = 5.0
"""For a prefill worker's count of what it has let go."""


class Age:
    """Of one request's KV, over its attempts. A check raises GatewayError for an answer not to be used."""

    def __init__(self, desk: Desk, asked: Asked) -> None:
        self._desk = desk
        self._asked = asked
        self.late_at: Member | None = None
        """The decode worker that a stream was given up at, as its KV grew too old before the first byte."""
        self._late: Kept | None = None
        """What it had not fetched by then, or not used."""

    def grew_late(self, member: Member, kept: Kept | None) -> None:
        """A stream is given up at this worker.

        It tells the prefill worker itself that it does not fetch; if it does not, the lease soon ends. To let
        the KV go before would leave it nothing to be right by.
        """
        self._desk.books.pd_metrics.expired.add("wait")
        self.late_at, self._late = member, kept

    async def check(self, kept: Kept, choice: Choice, connection: UpstreamConnection) -> None:
        """Of an answer by KV that was handed over, and that may have come when the lease was over."""
        if monotonic() >= kept.send_by_s and not self._began_in_time(kept, choice, connection):
            await self._check_expired(kept, choice.member, connection)
        await self.check_late(choice.member, connection)

    async def check_late(self, member: Member, connection: UpstreamConnection) -> None:
        """Of an answer to the same prompt, split or not, by a worker that was too late before: it may have
        come to that leg after all.
        """
        late = self._late
        if late is not None and member is self.late_at and monotonic() >= late.until_s:
            await self._check_expired(late, member, connection)

    async def _check_expired(self, kept: Kept, member: Member, connection: UpstreamConnection) -> None:
        connection.pause()  # nobody takes what comes meanwhile
        expired = await _expired_at(kept.pair.prefill)
        connection.resume()
        if expired is None or expired > kept.expired:
            self._desk.books.pd_metrics.expired.add("answer")
            self._desk.spoilt(member, kept.send_by_s, self._asked.prompt)
            message = "the answer came when the prefill worker had let KV go"
            raise GatewayError(Failure.HANDOFF_EXPIRED, message)

    def _began_in_time(self, kept: Kept, choice: Choice, connection: UpstreamConnection) -> bool:
        """Of an answer that is not streamed and all there: whether its tokens alone take so long that the
        first of them, and the KV before it, came while the lease lasted.
        """
        prediction = choice.prediction
        if self._asked.view.stream or prediction is None or not connection.complete:
            return False
        body, now_s = connection.take_body(), monotonic()
        connection.give_back(body)
        meter = Meter(None)
        meter.feed(body, now_s)
        tokens = meter.usage().completion_tokens or 0
        return now_s - SURELY * tokens * prediction.itl_s < kept.send_by_s


async def _expired_at(prefill: Member) -> int | None:
    """How often the prefill worker has let KV go; None when it does not say."""
    try:
        answer = await get(prefill, "/metrics", ASK_S)
    except (GatewayError, TimeoutError):
        return None
    return read_metrics(answer.body.decode("utf-8", "replace")).kv_expired
