"""The hints of this gateway, request by request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from msgspec.structs import replace
from prometheus_client.core import Metric

from kvroute.clock import Clock, monotonic
from kvroute.config_groups import Timeouts
from kvroute.policies.retention import FirstBlocks, SessionBook, retention
from kvroute.router.dispatch import Choice
from kvroute.router.errors import Failure, GatewayError
from kvroute.router.hints.closing import SessionCloser
from kvroute.router.hints.fields import (
    KV_PARAMS,
    PRIORITY,
    REMOTE_SOURCE,
    ROUTES,
    SESSION,
    Fields,
    HintOptions,
    fields_for,
)
from kvroute.router.hints.pulling import first_byte_limit_s, has_p2p, kv_source
from kvroute.router.knowledge import Prompt
from kvroute.router.metrics import Counter, Metrics
from kvroute.router.request_parser import Request
from kvroute.router.splice import given_fields, splice
from kvroute.router.upstream import Response
from kvroute.router.workers import Member, Registry
from kvroute.types import EngineKind, RequestView

MAX_BODY_BYTES = 2**20
"""Longer ones go as they are: what is read here is read on the event loop, at 0.4 ms per MiB."""
DIGESTS = frozenset({b"content-digest", b"content-encoding", b"content-md5", b"digest", b"repr-digest"})
"""Headers that speak of the body's very bytes."""
REFUSALS = (400, 422, 500)
"""What an engine may answer because of a pull; overload is not among it."""

Post = Callable[[Request, Timeouts], Awaitable[Response]]
"""Sends one request to the chosen worker, in place of one sent before."""


class Hints:
    """Off unless configured: engines act on these fields only where they were started for it."""

    def __init__(
        self, options: HintOptions, registry: Registry, metrics: Metrics, clock: Clock = monotonic
    ) -> None:
        self.options = options
        self.set = Counter(
            "kvroute_hints",
            "Retention hints by engine and field: set, or why not.",
            ("engine", "hint", "result"),
        )
        self.pulls = Counter(
            "kvroute_pulls", "Decisions to pull KV from a peer, by what came of it.", ("result",)
        )
        self.closes = Counter("kvroute_session_closes", "Sessions closed at engines, by result.", ("result",))
        self.first_blocks = FirstBlocks()
        self.sessions = SessionBook(options.session_idle_s)
        self.closer = SessionCloser(self.closes)
        self._registry = registry
        self._clock = clock
        metrics.add_source(self)

    def gauges(self) -> Iterable[Metric]:
        return [counter.family() for counter in (self.set, self.pulls, self.closes)]

    def of(self, view: RequestView, prompt: Prompt) -> RequestHints:
        """Begin with a request: once, whatever the number of its attempts."""
        first_use = None
        if len(prompt.sets) == 1:
            sizes = prompt.sets[0]
            first_use = self.first_blocks.is_first_use(sizes[min(sizes)].keys[0])
        return RequestHints(self, view, first_use)

    def session_used(self, session_id: str, member: Member) -> None:
        """A worker holds something in the name of a session from now on."""
        for over, worker_id in self.sessions.used(session_id, member.worker.id, self._clock()):
            self._close(over, worker_id)

    def session_ended(self, session_id: str) -> None:
        """The client is done with a session: every worker that holds something of it is told."""
        for worker_id in self.sessions.ended(session_id):
            self._close(session_id, worker_id)

    def _close(self, session_id: str, worker_id: str) -> None:
        member = self._registry.members.get(worker_id)
        if member is None:
            self.closes.add("gone")
        else:
            self.closer.close(member, session_id)


class RequestHints:
    """One request, over its attempts."""

    def __init__(self, hints: Hints, view: RequestView, first_use: bool | None) -> None:
        self._hints = hints
        self._view = view
        self._first_use = first_use

    async def send(self, request: Request, choice: Choice, timeouts: Timeouts, post: Post) -> Response:
        """One attempt with its hints; where it pulls and the pull is late or refused, once more without.

        Raises GatewayError as `post` does. The same request id goes out twice to one engine: those that can
        pull make an id of their own of it.
        """
        limit_s = self._limit_s(choice, timeouts)
        fields = self._fields(request, choice, pulls=limit_s is not None)
        self._note(choice, fields)
        hinted = _with(request, fields)
        if limit_s is None or REMOTE_SOURCE not in fields.kv:
            return await post(hinted, timeouts)
        response = await self._pull(hinted, timeouts.model_copy(update={"first_byte_s": limit_s}), post)
        if response is not None:
            return response
        del fields.kv[REMOTE_SOURCE]
        return await post(_with(request, fields), timeouts)

    def _limit_s(self, choice: Choice, timeouts: Timeouts) -> float | None:
        """For the first byte, when there is a pull that can be watched."""
        pull = choice.decision.pull
        if pull is None:
            return None
        limit_s = None
        if choice.prediction is not None:
            limit_s = first_byte_limit_s(pull, choice.prediction, self._view, self._hints.options)
        if limit_s is None or limit_s >= timeouts.first_byte_s:
            self._hints.pulls.add("unguarded")
            return None
        return limit_s

    async def _pull(self, hinted: Request, timeouts: Timeouts, post: Post) -> Response | None:
        """The response to a request that pulls; None when it came too late, or as a refusal."""
        count = self._hints.pulls.add
        try:
            response = await post(hinted, timeouts)
        except GatewayError as error:
            late = error.failure is Failure.FIRST_BYTE_TIMEOUT
            count("late" if late else "failed")
            if late:
                return None
            raise
        count("refused" if response.status in REFUSALS else "pulled")
        return None if response.status in REFUSALS else response

    def ended(self) -> None:
        """The request is over: so may be its session."""
        if self._view.continues is False and self._view.session_id is not None:
            self._hints.session_ended(self._view.session_id)

    def _fields(self, request: Request, choice: Choice, *, pulls: bool) -> Fields:
        hints, member, decision = self._hints, choice.member, choice.decision
        engine = member.worker.engine
        source = None
        if pulls and decision.pull is not None:
            if engine is EngineKind.VLLM and has_p2p(member.worker.url, hints.options):
                source = kv_source(decision.pull, hints.options)
            if source is None:
                hints.pulls.add("no_source")
        kept = retention(self._view, first_use=self._first_use, reused_tokens=choice.match.tokens)
        fields = fields_for(engine, self._view, kept, decision, source, hints.options)
        if fields.top or fields.kv:
            _check(fields, request, engine)
        if source is not None and REMOTE_SOURCE not in fields.kv:
            hints.pulls.add("not_set")
        return fields

    def _note(self, choice: Choice, fields: Fields) -> None:
        engine, count = choice.member.worker.engine.value, self._hints.set.add
        for hint in (*fields.top, *fields.kv):
            count(engine, hint, "set")
        for hint, reason in fields.passed_over:
            count(engine, hint, reason)
        if SESSION in fields.top:
            self._hints.session_used(fields.top[SESSION], choice.member)


def _check(fields: Fields, request: Request, engine: EngineKind) -> None:
    """Take back what the request leaves no place for."""
    if request.target.partition(b"?")[0] not in ROUTES[engine]:
        fields.pass_all("route")
    elif not DIGESTS.isdisjoint(request.fields):
        fields.pass_all("digest")
    elif len(request.body) > MAX_BODY_BYTES:
        fields.pass_all("body_too_large")
    elif (given := given_fields(request.body)) is None:
        fields.pass_all("body")
    else:
        if KV_PARAMS in given:
            fields.pass_kv("client_set")
        for hint, owned in ((PRIORITY, {PRIORITY}), (SESSION, {SESSION, "session_params"})):
            if hint in fields.top and not owned.isdisjoint(given):
                del fields.top[hint]
                fields.passed_over.append((hint, "client_set"))


def _with(request: Request, fields: Fields) -> Request:
    added = fields.spliced()
    return replace(request, body=splice(request.body, added)) if added else request
