"""The prefill leg of a split request: sent, read to its end, and told to the books."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import orjson

from kvroute.clock import monotonic
from kvroute.router.dispatch import PrefillHalf
from kvroute.router.errors import Failure, GatewayError, shorten
from kvroute.router.heads import request_head
from kvroute.router.meter import NO_USAGE, Meter, Usage, usage_in
from kvroute.router.pd.books import Books
from kvroute.router.pd.connector import Header
from kvroute.router.request_parser import Request
from kvroute.router.sending import Sending
from kvroute.router.upstream import Response, StaleConnection
from kvroute.types import Outcome

MAX_KEPT_BYTES = 16 * 2**20
"""Of an answer that is needed whole; a longer one hands nothing over."""
MAX_SAID_CHARS = 300
REFUSALS = range(400, 500)
BUSY = (408, 429)
"""Which of them say nothing of the request itself."""


class PrefillFailed(GatewayError):
    """The prefill leg's fault, or nobody's: the decode worker is not to blame."""

    def __init__(
        self, failure: Failure, message: str, status: int | None = None, *, is_nobodys: bool = False
    ) -> None:
        super().__init__(failure, f"prefill: {message}", upstream_status=status)
        self.is_nobodys = is_nobodys
        """The same workers may be tried again."""

    @property
    def asks_for_whole(self) -> bool:
        """The request can be done, but not like this: no other prefill worker is worth a try."""
        return not self.is_nobodys and self.failure in (Failure.PREFILL_REFUSED, Failure.NO_HANDOFF)


class PrefillRefused(PrefillFailed):
    """With a status of 4xx. Where nobody else can do the request, its client reads what the worker said."""

    def __init__(self, message: str, status: int, answer: bytes) -> None:
        super().__init__(Failure.PREFILL_REFUSED, message, status)
        self._status = status
        self._answer = answer

    @property
    def status(self) -> int:
        return self._status

    def body(self) -> bytes:
        return self._answer if self._answer.lstrip()[:1] == b"{" else super().body()


HearOut = Callable[[Sending, list[bytes], Callable[[], None]], None]


def _nothing() -> None:
    pass


class PrefillLeg:
    """`run` once, then `end`, which is idempotent and never fails."""

    def __init__(
        self, books: Books, half: PrefillHalf, chosen_s: float, record: Callable[[Outcome], None]
    ) -> None:
        self._books = books
        self._half = half
        self._chosen_s = chosen_s
        self._record = record
        self._sending = Sending(half.member, books.metrics)
        self._meter = Meter(None)
        self._usage = NO_USAGE
        self._pieces: list[bytes] = []
        self._status: int | None = None
        self._failure: str | None = None
        self._over = False
        self._ended = False

    async def run(
        self,
        request: Request,
        body: bytes,
        headers: Sequence[Header],
        deadline_s: float,
        *,
        keeps: bool,
        once: bool,
    ) -> None:
        """Until its answer is there, which it `keeps` or not; raises `PrefillFailed`.

        `once` as in `Sending.post`.
        """
        books, member = self._books, self._half.member
        head = request_head(request, member, books.config, "", None, headers, len(body))
        try:
            response = await self._sending.post(head, body, books.prefill_timeouts, deadline_s, once=once)
            assert response is not None
            self._status = response.status
            await self._read(response, keeps=keeps or response.status != 200)
        except StaleConnection:
            message = "its worker closed the connection, and may have met the decode worker"
            raise PrefillFailed(Failure.RESET, message, is_nobodys=True) from None
        except GatewayError as error:
            failure = error.failure
            if failure is Failure.FIRST_BYTE_TIMEOUT and books.prefill_is_short:
                failure = Failure.PREFILL_TIMEOUT
            raise self.failed(failure, error.message, error.upstream_status) from None
        self._over = True
        if not keeps:
            self._usage = self._meter.usage()
        if response.status != 200:
            self._refuse(response.status)

    async def _read(self, response: Response, *, keeps: bool) -> None:
        connection, meter, pieces = self._sending.connection, self._meter, self._pieces
        assert connection is not None

        def feed(data: bytes, now_s: float) -> None:
            meter.feed(data, now_s)
            if keeps and meter.body_bytes <= MAX_KEPT_BYTES:
                pieces.append(data)

        if connection.error is not None:
            raise connection.error
        if first := connection.take_body():
            feed(first, monotonic())
        if not connection.complete:
            await connection.stream_to(feed)

    def _refuse(self, status: int) -> NoReturn:
        answer = b"".join(self._pieces)
        said = shorten(answer.decode("utf-8", "replace"), MAX_SAID_CHARS)
        message = f"worker answered {status}: {said}"
        if status in REFUSALS and status not in BUSY:
            raise PrefillRefused(message, status, answer)
        self._failure = f"status_{status}"
        raise PrefillFailed(Failure.BAD_RESPONSE, message, status)

    def failed(self, failure: Failure, message: str, status: int | None = None) -> PrefillFailed:
        """Note that its worker has failed."""
        self._failure = failure.value
        return PrefillFailed(failure, message, status)

    def fault(self, message: str) -> PrefillFailed:
        """Its answer is none that a decode worker could go on with."""
        if self._says_error():
            return self.failed(Failure.BAD_RESPONSE, message, self._status)
        return PrefillFailed(Failure.NO_HANDOFF, message, self._status)

    def _says_error(self) -> bool:
        try:
            answer = orjson.loads(b"".join(self._pieces))
        except orjson.JSONDecodeError:
            return True
        return not isinstance(answer, dict) or bool(answer.get("error"))

    def read(self) -> dict[str, Any]:
        """Its answer, which was kept.

        Raises JSONDecodeError where it is no JSON object, and `PrefillFailed` where it is an error.
        """
        answer = orjson.loads(b"".join(self._pieces))
        if not isinstance(answer, dict):
            raise orjson.JSONDecodeError("a JSON object is expected", "", 0)
        if error := answer.get("error"):  # with status 200, and not every connector would miss its handoff
            said = shorten(str(error), MAX_SAID_CHARS)
            raise self.failed(Failure.BAD_RESPONSE, f"its answer is an error: {said}", self._status)
        self._usage = usage_in(answer)
        return answer

    @property
    def usage(self) -> Usage:
        """What the answer says of it, once it is there."""
        return self._usage

    def cut_off(self) -> bytes | None:
        """A whole answer that has arrived and was not waited for any more; None when there is none."""
        connection = self._sending.connection
        if self._over or connection is None or not connection.complete:
            return None
        return b"".join(self._pieces) + connection.take_body()

    @property
    def is_out(self) -> bool:
        """It was sent, and its answer is not here."""
        return not self._over and self._sending.connection is not None

    def end(self, hear_out: HearOut | None = None) -> None:
        """Its connection goes back or is closed, what came of it is recorded, its lease is released.

        Where it is out, `hear_out` may have the connection, what has come, and the end of the lease: with
        that a worker that was removed is forgotten, connections and all.
        """
        if self._ended:
            return
        self._ended = True
        release = self._half.lease.release
        if hear_out is not None and self.is_out:
            hear_out(self._sending, self._pieces, release)
            release = _nothing
        else:
            self._sending.finish()
        try:
            self._record(self._outcome())
        finally:
            release()

    def _outcome(self) -> Outcome:
        usage, first_s = self.usage, self._meter.first_s
        status = self._status if self._over or self._failure is not None else None
        return Outcome(
            self._half.member.worker,
            status,
            self._failure,
            None if first_s is None else first_s - self._chosen_s,
            monotonic() - self._chosen_s,
            usage.prompt_tokens,
            usage.cached_tokens,
            None,
            self._half.match.tokens,
            None,
            self._half.prediction,
        )
