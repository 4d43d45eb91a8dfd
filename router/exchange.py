"""One request from choice to last byte: attempts, relay, outcome. Every route takes this path."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import structlog
from msgspec import Struct

from kvroute.clock import monotonic
from kvroute.config import Config
from kvroute.config_groups import Timeouts
from kvroute.router.client import ClientConnection
from kvroute.router.decision_log import DecisionLog
from kvroute.router.dispatch import Choice, Dispatcher
from kvroute.router.eligible import Task
from kvroute.router.errors import REASONS, Failure, GatewayError
from kvroute.router.heads import request_head, response_head
from kvroute.router.hints.hints import Hints, RequestHints
from kvroute.router.knowledge import NO_PROMPT, Knowledge, Prompt
from kvroute.router.meter import NO_USAGE, Meter, Usage
from kvroute.router.metrics import Metrics
from kvroute.router.pacing import Pacing
from kvroute.router.parsed_request import ParsedRequest
from kvroute.router.pd.answer import own_headers
from kvroute.router.pd.asking import GivingUp
from kvroute.router.pd.books import Asked
from kvroute.router.pd.planning import Planned
from kvroute.router.pd.prefill_leg import PrefillFailed
from kvroute.router.pd.salting import salted
from kvroute.router.pd.service import Pd
from kvroute.router.pd.split import Split
from kvroute.router.pd.usage import CachedTokens
from kvroute.router.request_parser import Request
from kvroute.router.retry import RetryBudget
from kvroute.router.sending import Sending
from kvroute.router.terms import short_form
from kvroute.router.token_source import GatewayTokens
from kvroute.router.upstream import Response, Sink
from kvroute.router.waiting import Waiting
from kvroute.router.workers import IN_BAND_ERROR, Member, Registry
from kvroute.types import Outcome

log = structlog.get_logger(__name__)

OTHER = "other"


class Services(Struct, frozen=True):
    """What exchanges work with."""

    config: Config
    registry: Registry
    dispatcher: Dispatcher
    metrics: Metrics
    retry_budget: RetryBudget
    knowledge: Knowledge
    waiting: Waiting
    pacing: Pacing
    decision_log: DecisionLog
    pd: Pd
    tokens: GatewayTokens | None = None
    hints: Hints | None = None


class Exchange:
    """Attempts on one worker after another until a first body byte is there, then relays that response.

    Nothing reaches the client before the worker's first body byte, so a worker that dies up to then is
    replaced unnoticed; from that byte on there is no second attempt, ever.
    """

    def __init__(
        self,
        services: Services,
        request: Request,
        parsed: ParsedRequest,
        client: ClientConnection,
        request_id: str,
    ) -> None:
        self._services = services
        self._request = request
        self._parsed = parsed
        self._prompt = NO_PROMPT
        self._client = client
        self._request_id = request_id
        self._deadline_s = request.received_s + services.config.timeouts.total_s
        self._tried: list[Member] = []
        """Those that have failed it."""
        self._attempts = 0
        self._member: Member | None = None
        self._sending: Sending | None = None
        self._planned: Planned | None = None
        self._split: Split | None = None
        self._redone = False
        """A worker that was late has had its second chance."""
        self._filter: CachedTokens | GivingUp | None = None
        """What the answer passes through."""
        self._body = b""
        """Of an answer that was read whole before its head was written."""
        self._meter: Meter | None = None
        self._may_append = False
        self._hints: RequestHints | None = None
        self.status = 0
        """Status of the response that was begun; 0 before."""
        model = parsed.view.model
        self.model_label = "none" if model is None else model if model in services.registry.models else OTHER
        """A name some worker serves, else `other`: labels are not for clients to invent."""

    @property
    def worker_id(self) -> str | None:
        """The worker tried last, of two the one that decodes; None before the first choice."""
        return None if self._member is None else self._member.worker.id

    async def run(self) -> None:
        """Relay one response; raises GatewayError when none came and nothing was written to the client."""
        if self._services.registry.splits:
            planned = self._planned = self._services.pd.plan(self._request)
            self._request, self._parsed.task = planned.request, planned.task
        self._prompt = await self._services.dispatcher.prepare(self._parsed)
        choice: Choice | None = await self._services.waiting.choose(
            self._parsed, self._prompt, self._request_id
        )
        if self._services.hints is not None:
            self._hints = self._services.hints.of(self._parsed.view, self._prompt)
        if self._planned is not None and choice is not None:
            self._services.pd.count(self._planned, choice)
        while choice is not None:
            choice = await self._attempt(choice)

    def _choose_again(self, choice: Choice, reason: str, error: GatewayError | None = None) -> Choice | None:
        """Other workers for a failed attempt, or None; counts the retry, or why there is none."""
        services, metrics = self._services, self._services.metrics
        leg = None if choice.prefill is None else "prefill" if isinstance(error, PrefillFailed) else "decode"
        if reason in (Failure.FIRST_BYTE_TIMEOUT, Failure.TOTAL_TIMEOUT):
            metrics.retries_denied.add("timeout")  # it may still be computing: a second one doubles the load
        elif self._attempts >= services.config.retry.attempts and reason != Failure.SPOILT:
            metrics.retries_denied.add("attempts")
        else:
            is_free = isinstance(error, PrefillFailed) and error.asks_for_whole
            if is_free:
                self._parsed.task = Task.WHOLE
            try:  # a cache is no worker's failure, and of each it is found once
                again = self._another(choice, is_free=is_free or reason == Failure.SPOILT)
            except GatewayError:
                metrics.retries_denied.add("no_other_worker")
                return None
            if again is not None:
                metrics.retries.add(str(reason))
                if leg is not None:
                    services.pd.books.pd_metrics.retries.add(leg, str(reason))
                return again
            metrics.retries_denied.add("budget")
        return None

    def _another(self, choice: Choice, *, is_free: bool) -> Choice | None:
        """None where the budget of retries is spent; GatewayError where there is nobody."""
        services, parsed = self._services, self._parsed
        services.registry.eligible(parsed.view.model, monotonic(), self._tried, parsed.task)
        if not is_free and not services.retry_budget.take():
            return None
        if self._split is not None and self._split.may_keep:
            with suppress(GatewayError):  # no other decodes: there may be one that does it all
                again = services.dispatcher.choose_decode(parsed, choice, self._tried)
                self._split.keep()
                return again
        return services.dispatcher.choose(parsed, self._prompt, self._tried, self._request_id)

    # --- one attempt ---------------------------------------------------------------------------

    async def _attempt(self, choice: Choice) -> Choice | None:
        """None when a response was relayed, whole or broken off; else the next choice to try.

        Whatever happens here, cancellation included, ends in `finally`: the connection goes back or is
        closed, the outcome is recorded, the lease is released.
        """
        self._attempts += 1
        self._member = choice.member
        status: int | None = None
        failure: str | None = None
        usage = NO_USAGE
        try:
            response = await self._send(choice)
            status = response.status
            if status >= 500:
                failure = f"status_{status if status in REASONS else OTHER}"
            if status in self._services.config.retry.statuses:
                self._tried.append(choice.member)
                again = self._choose_again(choice, f"status_{status}")
                if again is not None:
                    return again
            usage, in_band_error = await self._relay(response, choice)
            failure = IN_BAND_ERROR if in_band_error else failure
        except GatewayError as error:
            if not isinstance(error, PrefillFailed):
                failure = error.failure.value
            if self.status:
                self._break_off(error)
                return None
            self._blame(choice, error)
            again = self._choose_again(choice, error.failure, error)
            if again is None:
                raise
            return again
        finally:
            self._end_attempt(choice, status, failure, usage)
        return None

    def _check_cache(self, choice: Choice) -> None:
        """Of a worker that was found to be spoilt before it began to answer."""
        if self._services.pd.streams.is_suspect(choice.member, self._prompt, choice.chosen_s):
            raise GatewayError(Failure.SPOILT, "the worker's cache may hold wrong KV since")

    def _blame(self, choice: Choice, error: GatewayError) -> None:
        """Whoever failed is not tried again."""
        if not isinstance(error, PrefillFailed):
            if not self._may_redo(choice, error):
                self._tried.append(choice.member)
        elif choice.prefill is not None and not error.is_nobodys:
            self._tried.append(choice.prefill.member)

    def _may_redo(self, choice: Choice, error: GatewayError) -> bool:
        """Once: where KV grew too old before its decode worker came to it, and no other one could."""
        is_late = self._split is not None and self._split.age.late_at is choice.member
        if not is_late or self._redone or error.failure is not Failure.DECODE_TIMEOUT:
            return False
        tried, parsed = [*self._tried, choice.member], self._parsed
        try:
            self._services.registry.eligible(parsed.view.model, monotonic(), tried, parsed.task)
        except GatewayError:
            self._redone = True
        return self._redone

    def _end_attempt(self, choice: Choice, status: int | None, failure: str | None, usage: Usage) -> None:
        if self._split is not None and choice.prefill is not None:
            self._split.end()
        if self._sending is not None:
            self._sending.finish()
            self._sending = None
        if self._hints is not None:
            self._hints.ended()
        try:
            self._record(choice, status, failure, usage)
        finally:
            choice.lease.release()  # last: a removed worker is forgotten with its last lease, series and all

    async def _send(self, choice: Choice) -> Response:
        """Send to the chosen worker, with hints where there are any; then twice when a pull is late."""
        self._filter = None
        if choice.prefill is not None:
            return await self._send_split(choice)
        request, timeouts = self._request, self._services.config.timeouts
        self._sending = Sending(choice.member, self._services.metrics)
        if self._hints is None:
            response = await self._post(choice, request, timeouts)
        else:
            response = await self._hints.send(request, choice, timeouts, partial(self._post, choice))
        if self._split is not None and response.status < 400 and self._sending.connection is not None:
            await self._split.age.check_late(choice.member, self._sending.connection)
        return response

    async def _post(self, choice: Choice, request: Request, timeouts: Timeouts) -> Response:
        sending = self._sending
        assert sending is not None
        if choice.member.salt:
            request = salted(request, choice.member)
        head = request_head(
            request, choice.member, self._services.config, self._request_id, choice.match.dp_rank
        )
        head_only = request.method == b"HEAD"
        response = await sending.post(head, request.body, timeouts, self._deadline_s, head_only=head_only)
        assert response is not None  # there is no time by which it had to be sent
        return response

    async def _send_split(self, choice: Choice) -> Response:
        """The response of the decode worker."""
        split = self._split
        if split is None:
            assert self._planned is not None
            asked = Asked(self._parsed.view, self._prompt, self.model_label, self._request_id)
            split = self._split = self._services.pd.split(self._planned, asked, self._deadline_s)
        response = await split.send(choice)
        self._sending = split.sending
        if split.cached_tokens is not None and not response.encoded:
            self._filter = CachedTokens(split.cached_tokens)
        elif split.giving_up is not None and not response.encoded:
            self._filter = split.giving_up
        return response

    # --- relaying ------------------------------------------------------------------------------

    async def _relay(self, response: Response, choice: Choice) -> tuple[Usage, bool]:
        """Relay one response to its end; what it said of usage, and whether it carried an error event."""
        choice.lease.first_byte()
        if response.status < 400:
            self._services.registry.answered(choice.member)
        is_sse = response.content_type.startswith(b"text/event-stream")
        meter = Meter(self._services.metrics.itl.of(self.model_label) if is_sse else None)
        self._meter = meter
        if self._filter is not None and response.content_length:
            await self._read_all()
        if response.status < 400:
            self._check_cache(choice)
        if not self._start(response, choice, meter):
            await self._stream()
        return meter.usage(), meter.streams and meter.in_band_error()

    async def _read_all(self) -> None:
        """Of an answer whose length is in its head, and will change."""
        sending, cached = self._sending, self._filter
        assert sending is not None
        assert cached is not None
        connection = sending.connection
        assert connection is not None
        pieces = [connection.take_body()]
        if not connection.complete:
            await connection.stream_to(lambda data, _now_s: pieces.append(data))
        self._body = cached.whole(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        self._filter = None

    def _start(self, response: Response, choice: Choice, meter: Meter) -> bool:
        """Write the head and what has arrived of the body; True when that is all of it."""
        assert self._sending is not None
        connection, services = self._sending.connection, self._services
        assert connection is not None
        if connection.error is not None:
            raise connection.error
        first = self._body or connection.take_body()
        if self._filter is not None:
            first = self._filter.feed(first)
            if connection.error is not None:
                raise connection.error
            if connection.complete:
                first += self._filter.end()
        if first:
            now_s = monotonic()
            meter.feed(first, now_s)
            services.metrics.ttft.of(self.model_label).observe(now_s - self._request.received_s)
        self._may_append = meter.streams and not response.content_length and not response.encoded
        if choice.prefill is not None:
            own_headers(response, self._request_id, len(self._body) if self._body else None)
        extra = self._decision_headers(choice) if services.config.decision_headers else ()
        head, chunked = response_head(response, self._request, extra, keep_alive=self._client.keep_alive)
        self.status = response.status
        self._client.start(head, first, chunked, connection.complete)
        return connection.complete

    async def _stream(self) -> None:
        """Relay the rest of the body, read by read."""
        client, meter = self._client, self._meter
        assert self._sending is not None
        connection = self._sending.connection
        assert connection is not None
        assert meter is not None
        client.drop_request_body()
        self._planned, self._request.body = None, b""
        if self._split is not None:
            self._split.drop_body()
        parsed = self._parsed  # lets go of the prompt's text, and of its keys
        self._parsed = ParsedRequest(parsed.view, foretold_tokens=parsed.foretold_tokens)
        streams = self._services.pd.streams if self._services.registry.splits else None
        if streams is not None and self._member is not None:
            streams.begin(self._member, connection, monotonic(), self._prompt)
        self._prompt = Prompt(mode=self._prompt.mode)
        client.reads_from(connection)
        feed, write = meter.feed, client.write

        def relay(data: bytes, now_s: float) -> None:
            feed(data, now_s)
            write(data)

        try:
            await connection.stream_to(relay if self._filter is None else self._filtered(self._filter, relay))
        finally:
            if streams is not None and self._member is not None:
                streams.end(self._member, connection)
        if self._filter is not None and (rest := self._filter.end()):
            write(rest)
        client.end()

    @staticmethod
    def _filtered(passes: CachedTokens | GivingUp, relay: Sink) -> Sink:
        """The same, with the prefill's count of cached tokens, or up to where the worker gives up."""

        def counted(data: bytes, now_s: float) -> None:
            if data := passes.feed(data):
                relay(data, now_s)

        return counted

    def _decision_headers(self, choice: Choice) -> tuple[bytes, ...]:
        decision = choice.decision
        policy = self._services.dispatcher.policy_name
        lines = (
            b"x-kvroute-worker: " + choice.member.url_header,
            b"x-kvroute-decision: " + short_form(policy, decision),
        )
        if choice.prefill is None:
            return lines
        return (*lines, b"x-kvroute-prefill: " + choice.prefill.member.url_header)

    def _break_off(self, error: GatewayError) -> None:
        """The worker failed after the first byte: an error event where one fits, else a broken body."""
        meter = self._meter
        assert meter is not None
        log.warning(
            "response broke off",
            request_id=self._request_id,
            worker=self.worker_id,
            reason=error.failure.value,
            upstream_status=error.upstream_status,
            body_bytes=meter.body_bytes,
        )
        if self._may_append and meter.at_event_border:
            self._client.write(error.sse_event(self._request.target))
            self._client.end()
        else:
            self._client.break_body()

    # --- what is learned -----------------------------------------------------------------------

    def _record(self, choice: Choice, status: int | None, failure: str | None, usage: Usage) -> None:
        """Count one attempt, and tell the registry how its worker did."""
        metrics, member, meter = self._services.metrics, choice.member, self._meter
        is_split = choice.prefill is not None
        if is_split and status is None and failure is None:  # it was not asked, or not to the end
            nothing = Outcome(member.worker, None)
            self._services.registry.observe(member, nothing, is_trial=choice.lease.is_trial)
            return
        first_s = None if meter is None else meter.first_s
        matched_tokens = choice.match.tokens
        metrics.worker_requests.add(member.endpoint.url)
        if failure is not None:
            metrics.upstream_errors.add(member.endpoint.url, failure)
            if failure == IN_BAND_ERROR:
                metrics.in_band_errors.add(member.endpoint.url)
        foretold_tokens = self._parsed.foretold_tokens
        if foretold_tokens and usage.prompt_tokens is not None and self._services.tokens is not None:
            self._services.tokens.observe(self._parsed.view.model, foretold_tokens, usage.prompt_tokens)
        if usage.prompt_tokens is not None:
            metrics.prompt_tokens.add(by=usage.prompt_tokens)
            metrics.completion_tokens.add(by=usage.completion_tokens or 0)
            metrics.cached_tokens.add(by=usage.cached_tokens or 0)
        if matched_tokens:
            metrics.matched_tokens.add(by=matched_tokens)
        outcome = Outcome(
            member.worker,
            status,
            failure,
            None if first_s is None else first_s - choice.chosen_s,
            monotonic() - self._request.received_s,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            matched_tokens,
            None if meter is None else meter.itl_s(usage.completion_tokens),
            choice.prediction,
        )
        if choice.decision.pull is None:  # what a pull took is not what the worker takes
            self._services.pacing.observe(choice, self._parsed.view, outcome)
        self._services.decision_log.ended(self._request_id, outcome)
        self._services.registry.observe(member, outcome, is_trial=choice.lease.is_trial)
        if not is_split:  # what was cached was the prefill worker's
            self._services.knowledge.observe(self.model_label, self._prompt, choice.match, outcome)
