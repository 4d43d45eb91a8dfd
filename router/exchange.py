"""One request from choice to last byte: attempts, relay, outcome. Every route takes this path."""

from __future__ import annotations

from functools import partial

import structlog
from msgspec import Struct

from kvroute.clock import monotonic
from kvroute.config import Config
from kvroute.config_groups import Timeouts
from kvroute.router.client import ClientConnection
from kvroute.router.decision_log import DecisionLog
from kvroute.router.dispatch import Choice, Dispatcher
from kvroute.router.errors import REASONS, Failure, GatewayError
from kvroute.router.heads import request_head, response_head
from kvroute.router.hints.hints import Hints, RequestHints
from kvroute.router.knowledge import NO_PROMPT, Knowledge, Prompt
from kvroute.router.meter import NO_USAGE, Meter, Usage
from kvroute.router.metrics import Metrics
from kvroute.router.pacing import Pacing
from kvroute.router.parsed_request import ParsedRequest
from kvroute.router.request_parser import Request
from kvroute.router.retry import RetryBudget
from kvroute.router.terms import short_form
from kvroute.router.token_source import GatewayTokens
from kvroute.router.upstream import Response, StaleConnection, UpstreamConnection
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
        self._connection: UpstreamConnection | None = None
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
        """The worker tried last; None before the first choice."""
        return self._tried[-1].worker.id if self._tried else None

    async def run(self) -> None:
        """Relay one response; raises GatewayError when none came and nothing was written to the client."""
        self._prompt = await self._services.dispatcher.prepare(self._parsed)
        choice: Choice | None = await self._services.waiting.choose(
            self._parsed, self._prompt, self._request_id
        )
        if self._services.hints is not None:
            self._hints = self._services.hints.of(self._parsed.view, self._prompt)
        while choice is not None:
            choice = await self._attempt(choice)

    def _choose_again(self, reason: str) -> Choice | None:
        """Another worker for a failed attempt, or None; counts the retry, or why there is none."""
        services = self._services
        metrics = services.metrics
        if reason in (Failure.FIRST_BYTE_TIMEOUT, Failure.TOTAL_TIMEOUT):
            metrics.retries_denied.add("timeout")  # it may still be computing: a second one doubles the load
        elif len(self._tried) >= services.config.retry.attempts:
            metrics.retries_denied.add("attempts")
        else:
            budget = services.retry_budget
            try:
                services.registry.eligible(self._parsed.view.model, monotonic(), self._tried)
                dispatcher = services.dispatcher
                choice = None
                if budget.take():
                    choice = dispatcher.choose(self._parsed, self._prompt, self._tried, self._request_id)
            except GatewayError:
                metrics.retries_denied.add("no_other_worker")
                return None
            if choice is not None:
                metrics.retries.add(str(reason))
                return choice
            metrics.retries_denied.add("budget")
        return None

    # --- one attempt ---------------------------------------------------------------------------

    async def _attempt(self, choice: Choice) -> Choice | None:
        """None when a response was relayed, whole or broken off; else the next choice to try.

        Whatever happens here, cancellation included, ends in `finally`: the connection goes back or is
        closed, the outcome is recorded, the lease is released.
        """
        self._tried.append(choice.member)
        status: int | None = None
        failure: str | None = None
        usage = NO_USAGE
        try:
            response = await self._send(choice)
            status = response.status
            if status >= 500:
                failure = f"status_{status if status in REASONS else OTHER}"
            if status in self._services.config.retry.statuses:
                again = self._choose_again(f"status_{status}")
                if again is not None:
                    return again
            usage, in_band_error = await self._relay(response, choice)
            failure = IN_BAND_ERROR if in_band_error else failure
        except GatewayError as error:
            failure = error.failure.value
            if self.status:
                self._break_off(error)
                return None
            again = self._choose_again(error.failure)
            if again is None:
                raise
            return again
        finally:
            self._end_attempt(choice, status, failure, usage)
        return None

    def _end_attempt(self, choice: Choice, status: int | None, failure: str | None, usage: Usage) -> None:
        self._finish_connection()
        if self._hints is not None:
            self._hints.ended()
        try:
            self._record(choice, status, failure, usage)
        finally:
            choice.lease.release()  # last: a removed worker is forgotten with its last lease, series and all

    def _finish_connection(self) -> None:
        if self._connection is not None:
            self._connection.finish()
            self._connection = None

    async def _send(self, choice: Choice) -> Response:
        """Send to the chosen worker, with hints where there are any; then twice when a pull is late."""
        request, timeouts = self._request, self._services.config.timeouts
        if self._hints is None:
            return await self._post(choice, request, timeouts)
        return await self._hints.send(request, choice, timeouts, partial(self._post, choice))

    async def _post(self, choice: Choice, request: Request, timeouts: Timeouts) -> Response:
        """Send on a pooled connection if there is one; if that has gone stale, once more on a fresh one."""
        services, member = self._services, choice.member
        self._finish_connection()
        head = request_head(request, member, services.config, self._request_id, choice.match.dp_rank)
        connection = member.pool.take_idle()
        while True:
            self._connection = connection = connection or await member.pool.connect()
            try:
                return await connection.send(
                    head, request.body, request.method == b"HEAD", timeouts, self._deadline_s
                )
            except StaleConnection:
                services.metrics.stale.add()
                connection.finish()
                self._connection = connection = None

    # --- relaying ------------------------------------------------------------------------------

    async def _relay(self, response: Response, choice: Choice) -> tuple[Usage, bool]:
        """Relay one response to its end; what it said of usage, and whether it carried an error event."""
        choice.lease.first_byte()
        if response.status < 400:
            self._services.registry.answered(choice.member)
        is_sse = response.content_type.startswith(b"text/event-stream")
        meter = Meter(self._services.metrics.itl.of(self.model_label) if is_sse else None)
        self._meter = meter
        if not self._start(response, choice, meter):
            await self._stream()
        return meter.usage(), meter.streams and meter.in_band_error()

    def _start(self, response: Response, choice: Choice, meter: Meter) -> bool:
        """Write the head and what has arrived of the body; True when that is all of it."""
        connection, services = self._connection, self._services
        assert connection is not None
        if connection.error is not None:
            raise connection.error
        first = connection.take_body()
        if first:
            now_s = monotonic()
            meter.feed(first, now_s)
            services.metrics.ttft.of(self.model_label).observe(now_s - self._request.received_s)
        self._may_append = meter.streams and not response.content_length and not response.encoded
        extra = self._decision_headers(choice) if services.config.decision_headers else ()
        head, chunked = response_head(response, self._request, extra, keep_alive=self._client.keep_alive)
        self.status = response.status
        self._client.start(head, first, chunked, connection.complete)
        return connection.complete

    async def _stream(self) -> None:
        """Relay the rest of the body, read by read."""
        connection, client, meter = self._connection, self._client, self._meter
        assert connection is not None
        assert meter is not None
        client.drop_request_body()
        parsed = self._parsed  # lets go of the prompt's text, and of its keys
        self._parsed = ParsedRequest(parsed.view, foretold_tokens=parsed.foretold_tokens)
        self._prompt = Prompt(mode=self._prompt.mode)
        client.reads_from(connection)
        feed, write = meter.feed, client.write

        def relay(data: bytes, now_s: float) -> None:
            feed(data, now_s)
            write(data)

        await connection.stream_to(relay)
        client.end()

    def _decision_headers(self, choice: Choice) -> tuple[bytes, bytes]:
        decision = choice.decision
        policy = self._services.dispatcher.policy_name
        return (
            b"x-kvroute-worker: " + choice.member.url_header,
            b"x-kvroute-decision: " + short_form(policy, decision),
        )

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
        self._services.knowledge.observe(self.model_label, self._prompt, choice.match, outcome)
