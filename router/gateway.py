"""The gateway: what happens to a request before and after its exchange with a worker."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import structlog

from kvroute.clock import monotonic
from kvroute.conductor.prompts import ROUTES
from kvroute.conductor.tokens.yielding import let_others_run
from kvroute.router.asgi import App, run_app
from kvroute.router.breaker import BreakerState
from kvroute.router.client import ClientConnection
from kvroute.router.control import EXPLAIN_PATH, PUBLIC_PATHS
from kvroute.router.errors import Failure, GatewayError, shorten
from kvroute.router.exchange import OTHER, Exchange, Services
from kvroute.router.metrics import gauge
from kvroute.router.parsed_request import PARSE_IN_THREAD_BYTES, ParsedRequest
from kvroute.router.request_headers import MalformedRequest
from kvroute.router.request_parser import Request
from kvroute.router.request_view import parse_request
from kvroute.router.workers import State

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = structlog.get_logger(__name__)

PARSE_TOOLS_IN_THREAD_BYTES = 16 * 2**10
READERS = 2
"""Threads for larger bodies; more would only get in each other's way, and in the event loop's."""
MAX_REQUEST_ID_BYTES = 256


class Gateway:
    """Handles every request of the data port."""

    def __init__(self, services: Services, app: App) -> None:
        self._services = services
        self._app = app
        self._in_flight = 0
        self._max_in_flight = services.config.limits.requests
        self._logs_access = services.config.access_log
        self._id_prefix = os.urandom(6).hex()
        self._ids = itertools.count()
        self._readers = ThreadPoolExecutor(READERS, "read")
        key = services.config.api_key
        self._expected_key = None if key is None else b"Bearer " + key.get_secret_value().encode()
        services.metrics.add_source(self)

    async def handle(self, request: Request, client: ClientConnection) -> None:
        """Answer one request; cancelled when its client goes away."""
        path = request.target.partition(b"?")[0]
        if path == EXPLAIN_PATH or (path in PUBLIC_PATHS and request.method in (b"GET", b"HEAD")):
            await self._handle_own(path, request, client)
            return
        metrics = self._services.metrics
        request_id = self._request_id(request)
        exchange: Exchange | None = None
        ended = "500"
        self._in_flight += 1
        try:
            self._admit(request)
            parsed = (
                self._parse(request)
                if self._is_quickly_read(request.body)
                else await asyncio.get_running_loop().run_in_executor(
                    self._readers, self._parse_large, request
                )
            )
            if parsed.fields is not None and self._services.tokens is not None:
                await self._services.tokens.ask(parsed, path)
            exchange = Exchange(self._services, request, parsed, client, request_id)
            del parsed
            await exchange.run()
            ended = str(exchange.status)
            metrics.e2e.of(exchange.model_label).observe(monotonic() - request.received_s)
        except GatewayError as error:
            ended = str(error.status)
            self._answer(error, request, client, request_id)
        except asyncio.CancelledError:
            phase = "streaming" if client.started else "waiting"
            ended = "client_left"
            metrics.disconnects.add(phase)
            log.debug("client left", request_id=request_id, phase=phase)
            raise
        finally:
            self._in_flight -= 1
            model = "none" if exchange is None else exchange.model_label
            metrics.requests.add(path.decode() if path in ROUTES else OTHER, model, ended)
            if self._logs_access:
                self._log_access(request, request_id, exchange, ended)

    def close(self) -> None:
        """No request is under way any more."""
        self._readers.shutdown(wait=False, cancel_futures=True)

    def refused(self, error: GatewayError) -> None:
        """Count and log a request that was refused while it arrived."""
        self._services.metrics.failures.add(error.failure)
        log.info("refused", reason=error.failure.value, status=error.status, message=error.message)

    # --- before --------------------------------------------------------------------------------

    def _check_key(self, request: Request) -> None:
        if self._expected_key is None:
            return
        given = request.fields.get(b"authorization", b"")
        if not secrets.compare_digest(given, self._expected_key):
            message = "the Authorization header does not carry the key of api_key"
            raise GatewayError(Failure.UNAUTHORIZED, message)

    def _admit(self, request: Request) -> None:
        self._check_key(request)
        self._check_room()
        self._services.retry_budget.request()

    def _check_room(self) -> None:
        if self._in_flight > self._max_in_flight:
            message = f"{self._max_in_flight} requests are in flight (limits.requests)"
            raise GatewayError(Failure.OVERLOADED, message, retry_after_s=1)

    def _is_quickly_read(self, body: bytes) -> bool:
        """Whether it takes a millisecond or two. A template may make ten times their size of tools."""
        size = len(body)
        if size <= PARSE_TOOLS_IN_THREAD_BYTES or self._services.tokens is None:
            return size <= PARSE_IN_THREAD_BYTES
        return size <= PARSE_IN_THREAD_BYTES and b'"tools"' not in body

    def _parse(self, request: Request) -> ParsedRequest:
        try:
            return parse_request(request.target, request.fields, request.body, self._services.tokens)
        except MalformedRequest as error:
            raise GatewayError(Failure.MALFORMED, str(error), param=error.field) from None

    def _parse_large(self, request: Request) -> ParsedRequest:
        """In a thread: keys too, since making those of a long prompt is half of the work.

        Not where the engine is still to be asked for the tokens that they are made of.
        """
        parsed = self._parse(request)
        if parsed.fields is None:
            let_others_run()
            self._services.knowledge.make_keys(parsed)
        return parsed

    def _request_id(self, request: Request) -> str:
        given = request.fields.get(b"x-request-id")
        if given is not None and len(given) <= MAX_REQUEST_ID_BYTES:
            return given.decode("latin-1")
        return f"{self._id_prefix}-{next(self._ids):x}"

    # --- after ---------------------------------------------------------------------------------

    def _answer(
        self, error: GatewayError, request: Request, client: ClientConnection, request_id: str
    ) -> None:
        self._services.metrics.failures.add(error.failure)
        tell = log.warning if error.status >= 500 else log.info
        tell(
            "request failed",
            request_id=request_id,
            reason=error.failure.value,
            status=error.status,
            message=error.message,
        )
        data = error.response(request_id, close=not client.keep_alive, head_only=request.method == b"HEAD")
        client.respond(data)

    @staticmethod
    def _log_access(request: Request, request_id: str, exchange: Exchange | None, ended: str) -> None:
        log.info(
            "request",
            request_id=shorten(request_id),
            method=shorten(request.method.decode("latin-1")),
            target=shorten(request.target.decode("latin-1")),
            status=ended,
            worker=None if exchange is None else exchange.worker_id,
            e2e_s=round(monotonic() - request.received_s, 6),
        )

    async def _handle_own(self, path: bytes, request: Request, client: ClientConnection) -> None:
        """A dry run counts as a request in flight: reading its body costs as much."""
        counts = path == EXPLAIN_PATH
        self._in_flight += counts
        try:
            if counts or path == b"/v1/models":
                self._check_key(request)
            if counts:
                self._check_room()
            _, data = await run_app(self._app, request, keep_alive=client.keep_alive)
            client.respond(data)
        except GatewayError as error:
            self._answer(error, request, client, self._request_id(request))
        finally:
            self._in_flight -= counts

    # --- gauges --------------------------------------------------------------------------------

    def gauges(self) -> Iterable[Metric]:
        registry = self._services.registry
        members = list(registry.members.values())
        by_url: dict[str, int] = {}
        for member in members:
            by_url[member.endpoint.url] = by_url.get(member.endpoint.url, 0) + member.requests
        yield gauge("kvroute_requests_in_flight", "Requests being handled.", (), [((), self._in_flight)])
        yield gauge(
            "kvroute_worker_in_flight",
            "Requests sent to a worker and not yet ended.",
            ("worker",),
            [((url,), requests) for url, requests in by_url.items()],
        )
        now_s = monotonic()
        yield gauge(
            "kvroute_worker_up",
            "1 for a worker that is ready with its breaker closed, else 0.",
            ("worker",),
            [
                ((m.endpoint.url,), m.state is State.READY and m.breaker.state(now_s) is BreakerState.CLOSED)
                for m in members
                if m.state is not State.DRAINING
            ],
        )
        yield gauge(
            "kvroute_workers",
            "Workers by state.",
            ("state",),
            [((s.value,), sum(m.state is s for m in members)) for s in State if s is not State.GONE],
        )
