"""The life of a split request: prefill on one worker, decode on another. Its states are in this file alone.

    chosen -> prefilling -> prefilled -> handed -> decoding -> done
      ^___________|____________|___________|          |
         another attempt, on other workers          failed

A concurrent connector sends both legs at once: from prefilling it goes to handed when the prefill's answer
is there, or straight to decoding. Up to `decoding`, which is the first byte of a good answer, nothing has
reached the client and another attempt is possible; from there on there is none.

What lies at the prefill worker between `prefilled` and `decoding` has one owner, `Kept`. It goes to a second
decode worker only if the first never got it: whoever got it may have fetched it, and engines answer a
second fetch with wrong text and status 200. It is not sent when it is nearly too old, and an answer that
comes later than that is not used if the prefill worker has let any KV go since. Whatever ends an attempt, in
whatever phase, ends in `end`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from functools import partial
from typing import Any

import orjson

from kvroute.clock import monotonic
from kvroute.router.dispatch import Choice
from kvroute.router.errors import Failure, GatewayError
from kvroute.router.heads import request_head
from kvroute.router.pd.age import Age
from kvroute.router.pd.asking import GivingUp, declines
from kvroute.router.pd.body import Fields, leg_body, short_prefill
from kvroute.router.pd.books import Asked
from kvroute.router.pd.connector import CannotHandOver, Connector, Leg, Pair
from kvroute.router.pd.desk import Desk, Kept
from kvroute.router.pd.planning import Planned
from kvroute.router.pd.prefill_leg import REFUSALS, PrefillFailed, PrefillLeg
from kvroute.router.pd.salting import salt_of
from kvroute.router.sending import Sending
from kvroute.router.sweeper import NEVER
from kvroute.router.upstream import Response, StaleConnection, UpstreamConnection
from kvroute.router.workers import State

BLAME_S = 0.05
"""When a decode worker fails, the cause may be a prefill worker that fails at the same time."""
NEVER_SENT = frozenset(
    {Failure.CONNECT_REFUSED, Failure.CONNECT_FAILED, Failure.CONNECT_TIMEOUT, Failure.EXHAUSTED}
)
"""Failures of a leg of which its worker has heard nothing."""


class Phase(StrEnum):
    CHOSEN = "chosen"
    PREFILLING = "prefilling"
    PREFILLED = "prefilled"
    HANDED = "handed"
    DECODING = "decoding"
    DONE = "done"
    FAILED = "failed"


class Split:
    """One request, over its attempts: `send` and `end` for each.

    `sending` is the decode leg's, from which the answer is relayed.
    """

    def __init__(self, desk: Desk, planned: Planned, asked: Asked, deadline_s: float) -> None:
        assert planned.fields is not None
        self._desk = desk
        self._request = planned.request
        self._fields: Fields = planned.fields
        self._prompts = planned.prompts
        self._asked = asked
        self._deadline_s = deadline_s
        self.age = Age(desk, asked)
        self.phase = Phase.CHOSEN
        self.sending: Sending | None = None
        self.cached_tokens: int | None = None
        """What the prefill found in a cache; None where it does not say."""
        self.giving_up: GivingUp | None = None
        """What a stream has to pass through that its worker may give up."""
        self._leg: PrefillLeg | None = None
        self._tasks: tuple[asyncio.Task[Any], ...] = ()
        self._kept: Kept | None = None
        self._unsent = self._keeps = False
        self._is_told = False
        """The decode worker may have begun to fetch."""
        self._since_s = 0.0
        """When this phase began."""

    def __repr__(self) -> str:
        return f"<Split {self._asked.request_id} {self.phase.value} kept={self._kept is not None}>"

    async def send(self, choice: Choice) -> Response:
        """One attempt: the decode worker's response, its first byte here.

        Raises `PrefillFailed`, and GatewayError where the decode leg failed.
        """
        assert choice.prefill is not None
        self._choice, self._half = choice, choice.prefill
        self._connector = self._desk.connector(self._half.member)
        self.sending = Sending(choice.member, self._desk.books.metrics)
        self._enter(Phase.CHOSEN)
        try:
            response = await self._legs()
            if response.status < 400:
                await self._check_age()
        except GatewayError as error:
            if not isinstance(error, PrefillFailed):
                self._desk.books.pd_metrics.failures.add("decode", error.failure.value)
            self._fail()
            raise
        if response.status < 400:
            self._decodes()
        else:
            self._is_told = False  # it was, and is done
            self._fail()
        return response

    async def _legs(self) -> Response:
        """The decode worker's response, in the connector's order."""
        if self._kept is None:
            await self._prepare()
            answered = await self._ask_first()
            if answered is not None:
                return answered
            if self._connector.is_concurrent:
                return await self._both()
            await self._prefill()
        return await self._hand_over()

    async def _ask_first(self) -> Response | None:
        """Of a decode worker that is asked before any prefill, its response; None where it declines."""
        connector, sending = self._desk.asks_first(self._connector), self.sending
        if connector is None or sending is None:
            return None
        own = connector.first_leg(self._request.target.partition(b"?")[0], self._pair)
        if own is None:
            return None
        readable = (b"Accept-Encoding", b"identity")  # what it declines with is to be read
        response = await self._post_decode(Leg(own.fields, [*own.headers, readable]))
        assert response is not None
        assert sending.connection is not None
        if response.status < 400 and await declines(connector, response, sending.connection):
            sending.finish()
            return None
        if response.content_type.startswith(b"text/event-stream"):
            self.giving_up = GivingUp(connector, partial(self._given_up, sending.connection))
        return response

    def _given_up(self, connection: UpstreamConnection, error: GatewayError) -> None:
        self._desk.books.pd_metrics.failures.add("decode", error.failure.value)
        connection.fail(error)

    # --- prefill -------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        """A pair with an id of its own, and what the connector has to ask of it."""
        choice, half = self._choice, self._half
        self._pair = Pair(
            half.member,
            choice.member,
            f"{self._asked.request_id}-{self._desk.fresh_id()}",
            self._prompts,
            half.match.dp_rank,
        )
        self._leg = PrefillLeg(
            self._desk.books, half, choice.chosen_s, partial(self._desk.prefilled, choice, self._asked)
        )
        self._prepared = self.cached_tokens = self.giving_up = None
        if self._connector.prepares:
            await self._ask_prefill(self._leg)

    async def _ask_prefill(self, leg: PrefillLeg) -> None:
        """For what the connector needs to know of it."""
        try:
            async with asyncio.timeout(self._desk.books.config.pd.prepare_timeout_s):
                self._prepared = await self._connector.prepare(self._pair)
        except CannotHandOver as fault:
            raise leg.failed(Failure.BAD_RESPONSE, str(fault)) from None
        except TimeoutError:
            raise leg.failed(Failure.PREFILL_TIMEOUT, "pd.prepare_timeout_s passed") from None
        except GatewayError as error:
            raise leg.failed(error.failure, error.message) from None

    async def _prefill(self) -> None:
        """Until its whole answer is there, and says what it hands over."""
        self._enter(Phase.PREFILLING)
        leg = self._leg
        assert leg is not None
        await self._run_prefill(leg)
        self._prefilled(leg, self._read_handoff(leg))

    def _read_handoff(self, leg: PrefillLeg) -> Any:
        try:
            return self._connector.handoff(leg.read())
        except (orjson.JSONDecodeError, CannotHandOver) as fault:
            raise leg.fault(str(fault)) from None

    async def _run_prefill(self, leg: PrefillLeg) -> None:
        connector = self._connector
        try:
            own = connector.prefill_leg(self._pair)
        except CannotHandOver as fault:
            raise leg.failed(Failure.BAD_RESPONSE, str(fault)) from None
        fields = self._fields
        if connector.shortens_prefill:
            fields = short_prefill(self._request.target.partition(b"?")[0], fields)
        if (member := self._half.member).salt:
            try:
                fields = {**fields, **salt_of(self._request.target.partition(b"?")[0], fields, member)}
            except GatewayError as error:
                raise leg.failed(error.failure, error.message) from None
        body = leg_body(fields, own.fields)
        headers = self._headers(own)
        await leg.run(
            self._request,
            body,
            headers,
            self._deadline_s,
            keeps=connector.shortens_prefill,
            once=connector.is_concurrent,
        )

    def _prefilled(self, leg: PrefillLeg, handoff: Any) -> None:
        self._kept = self._keep(self._connector, self._pair, handoff)
        self.cached_tokens = leg.usage.cached_tokens
        leg.end()
        self._enter(Phase.PREFILLED)

    def _keep(self, connector: Connector, pair: Pair, handoff: Any) -> Kept:
        return Kept.from_now(connector, pair, handoff, self._desk.books.config.pd.kv_lease_s)

    # --- decode --------------------------------------------------------------------------------

    async def _hand_over(self) -> Response:
        """Send the decode leg while its KV is young enough, and wait for its first byte."""
        kept = self._kept
        assert kept is not None
        self._check_caches(kept)
        self._enter(Phase.HANDED)
        own = self._decode_leg(kept.pair, kept.handoff)
        response = await self._post_decode(own, None if kept.handoff is None else kept.send_by_s)
        if response is None:
            self._is_told = False
            books = self._desk.books
            books.pd_metrics.expired.add("handoff")
            message = "its KV is too old to be sent on"
            raise PrefillFailed(Failure.HANDOFF_EXPIRED, message, is_nobodys=True)
        return response

    def _check_caches(self, kept: Kept) -> None:
        """What was computed over wrong KV is wrong, and so is what is decoded behind it."""
        if kept.pair.prefill.state is State.SPOILT:
            raise PrefillFailed(Failure.SPOILT, "its cache may hold wrong KV since")
        if self._choice.member.state is State.SPOILT:
            self._unsent = kept.handoff is not None
            raise GatewayError(Failure.SPOILT, "the decode worker's cache may hold wrong KV since")

    def _decode_leg(self, pair: Pair, handoff: Any) -> Leg:
        try:
            return self._connector.decode_leg(pair, handoff)
        except CannotHandOver as fault:
            raise PrefillFailed(Failure.NO_HANDOFF, str(fault), is_nobodys=True) from None

    async def _post_decode(self, own: Leg, send_by_s: float | None = None) -> Response | None:
        books, sending = self._desk.books, self.sending
        assert sending is not None
        if self._choice.member.salt:
            own = self._salted(own)
        try:
            body = leg_body(self._fields, own.fields) if own.fields else self._request.body
        except RecursionError:
            raise PrefillFailed(Failure.NO_HANDOFF, "what it hands over is nested too deeply") from None
        streams = self._asked.view.stream
        timeouts = books.decode_timeouts if streams else books.config.timeouts
        # Given up in time, it fetches nothing. What it fetches too late stays in its cache, wrong.
        by_s = send_by_s if streams and send_by_s is not None else NEVER
        head = request_head(
            self._request, self._choice.member, books.config, "", None, self._headers(own), len(body)
        )
        self._is_told = True
        try:
            return await sending.post(
                head,
                body,
                timeouts,
                self._deadline_s,
                once=True,
                send_by_s=send_by_s,
                first_byte_by_s=by_s,
            )
        except StaleConnection:
            message = "the decode worker closed its connection, and may have fetched the KV"
            raise PrefillFailed(Failure.RESET, message, is_nobodys=True) from None
        except GatewayError as error:
            if error.failure in NEVER_SENT:
                self._is_told = False
                self._unsent = self._kept is not None and self._kept.handoff is not None
            elif (
                error.failure is Failure.FIRST_BYTE_TIMEOUT
                and streams
                and (books.decode_is_short or by_s < NEVER)
            ):
                if monotonic() >= by_s:
                    self.age.grew_late(self._choice.member, self._kept)
                    self._kept = None
                raise GatewayError(Failure.DECODE_TIMEOUT, error.message) from None
            raise

    def _salted(self, own: Leg) -> Leg:
        """With what keeps it from wrong KV at its worker."""
        path, kept = self._request.target.partition(b"?")[0], self._kept
        try:
            return Leg({**own.fields, **salt_of(path, self._fields, self._choice.member)}, own.headers)
        except GatewayError:
            self._unsent = kept is not None and kept.handoff is not None
            raise

    def _headers(self, own: Leg) -> list[tuple[bytes, bytes]]:
        named = (b"X-Request-Id", self._pair.id.encode("latin-1", "replace"))
        if not own.headers:
            return [named]
        if any(name.lower() == b"x-request-id" for name, _ in own.headers):
            return list(own.headers)
        return [*own.headers, named]

    async def _check_age(self) -> None:
        """Of an answer that came when a lease may have been over: whether it can be what it should be."""
        kept = self._kept
        if kept is None or kept.handoff is None or self._connector.is_concurrent:
            return  # whoever pushes KV knows whether it is still there
        assert self.sending is not None
        assert self.sending.connection is not None
        await self.age.check(kept, self._choice, self.sending.connection)

    # --- both at once --------------------------------------------------------------------------

    async def _both(self) -> Response:
        """Both legs; whichever fails first ends the other, in `end`."""
        self._enter(Phase.PREFILLING)
        leg = self._leg
        assert leg is not None
        loop = asyncio.get_running_loop()
        prefill = loop.create_task(self._alongside(leg))
        decode = loop.create_task(self._post_decode(self._decode_leg(self._pair, self._prepared)))
        self._tasks = (prefill, decode)
        for task in self._tasks:
            task.add_done_callback(_seen)
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        if not decode.done():
            await self._judge_prefill(prefill, decode)
            self._enter(Phase.HANDED)
            await asyncio.wait((decode,))
        failed = decode.exception() is not None
        response = None if failed else decode.result()
        if response is None or response.status >= 400:
            await asyncio.wait((prefill,), timeout=BLAME_S)
            fault = prefill.exception() if prefill.done() else None
            if fault is not None and not (response is not None and _refuse_both(fault, response)):
                raise fault
        if response is None:
            response = decode.result()
        assert response is not None
        return response

    async def _judge_prefill(self, prefill: asyncio.Task[None], decode: asyncio.Task[Any]) -> None:
        """Raises where it failed, but for a refusal that the decode worker has an answer of its own to."""
        try:
            prefill.result()
        except PrefillFailed as error:
            if error.failure is Failure.PREFILL_REFUSED:
                await asyncio.wait((decode,), timeout=BLAME_S)
            if not decode.done():
                raise

    async def _alongside(self, leg: PrefillLeg) -> None:
        await self._run_prefill(leg)
        if self.phase is Phase.DECODING:  # KV was fetched before this was told
            leg.end()
            return
        if self._connector.shortens_prefill:
            self._read_handoff(leg)
        self._prefilled(leg, self._prepared)

    # --- phases --------------------------------------------------------------------------------

    def _enter(self, phase: Phase) -> None:
        now_s = monotonic()
        timed = _TIMED.get(self.phase)
        if timed is not None:
            self._desk.books.pd_metrics.phases.of(timed).observe(now_s - self._since_s)
        self.phase, self._since_s = phase, now_s

    def _decodes(self) -> None:
        """The first byte of a good answer: the KV was fetched."""
        if self.phase is Phase.HANDED:
            self._desk.handed_over(self._half, self._pair, monotonic() - self._since_s)
        self._enter(Phase.DECODING)
        self._kept = None

    def drop_body(self) -> None:
        """The request will not be sent again."""
        self._fields = {}

    def _fail(self) -> None:
        if self._connector.is_concurrent and self._connector.prepares:
            self._connector.forget(self._half.member)  # it may be another process than the one that was asked
        self.phase = Phase.FAILED

    @property
    def may_keep(self) -> bool:
        """Whether what the prefill left may go to another decode worker."""
        kept = self._kept
        return self._unsent and kept is not None and monotonic() < kept.send_by_s

    def keep(self) -> None:
        """Another one is chosen for it: `end` lets it lie."""
        self._keeps = True

    def end(self) -> None:
        """This attempt is over, whatever the phase: legs are closed and written down, KV is let go."""
        keeps = self._keeps
        self._unsent = self._keeps = False
        for task in self._tasks:
            task.cancel()
        self._tasks = ()
        leg, self._leg = self._leg, None
        if leg is not None:
            self._note_cut_off(leg)
            leg.end(self._hear_out)
        else:
            self._half.lease.release()
        if self.sending is not None:
            self.sending.finish()
        if self.phase is Phase.DECODING:
            self._enter(Phase.DONE)
        elif self.phase is not Phase.FAILED:
            self._fail()
        kept = self._kept
        if kept is not None and not keeps:
            self._kept = None
            self._desk.let_go(kept, self._choice.member, may_fetch=self._is_told)
        self._is_told = False

    def _note_cut_off(self, leg: PrefillLeg) -> None:
        """KV of a prefill leg that is given up: its worker may be done with it all the same."""
        if not self._connector.is_concurrent:
            if (answer := leg.cut_off()) is not None:
                self._let_go_late(self._connector, self._pair, answer)
        elif leg.is_out and self._prepared is not None and self.phase is not Phase.DECODING:
            self._kept = self._keep(self._connector, self._pair, self._prepared)

    def _hear_out(self, sending: Sending, pieces: list[bytes], over: Callable[[], None]) -> None:
        """Of a prefill leg that is out: an answer that is under way may name what is to be let go."""
        if self._connector.is_concurrent:
            sending.finish()
            over()
        else:
            then = partial(self._let_go_late, self._connector, self._pair)
            self._desk.hear_out(sending, pieces, over, then)

    def _let_go_late(self, connector: Connector, pair: Pair, answer: bytes) -> None:
        with suppress(orjson.JSONDecodeError, CannotHandOver):
            fields = orjson.loads(answer)
            if isinstance(fields, dict):
                kept = self._keep(connector, pair, connector.handoff(fields))
                self._desk.let_go(kept, pair.decode, may_fetch=False)


def _refuse_both(fault: BaseException, response: Response) -> bool:
    """Whether the request itself is at fault: then the client reads what the decode worker says of it."""
    return (
        isinstance(fault, PrefillFailed)
        and fault.failure is Failure.PREFILL_REFUSED
        and response.status in REFUSALS
    )


def _seen(task: asyncio.Task[Any]) -> None:
    """Its exception is nobody's news: `_both` has looked, or the attempt is over."""
    if not task.cancelled():
        task.exception()


_TIMED = {Phase.PREFILLING: "prefill", Phase.HANDED: "handoff", Phase.DECODING: "decode"}
