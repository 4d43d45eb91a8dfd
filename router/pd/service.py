"""Split requests, as the gateway's other parts see them."""

from __future__ import annotations

import secrets
from functools import partial
from itertools import count
from typing import cast

import structlog
from msgspec import Raw
from msgspec.structs import replace

from kvroute.policies.costs.links import nearness
from kvroute.router.dispatch import Choice, Dispatcher, PrefillHalf
from kvroute.router.eligible import Task
from kvroute.router.errors import Failure, GatewayError
from kvroute.router.knowledge import Prompt
from kvroute.router.metrics import GaugeSource
from kvroute.router.pd.body import LIMITS, Fields, leg_body, read_fields, read_oddly, without
from kvroute.router.pd.books import Asked, Books
from kvroute.router.pd.connector import Connector, DecodeFirst, Pair, Serving
from kvroute.router.pd.connectors.fields import CLIENT_FIELDS
from kvroute.router.pd.desk import Kept
from kvroute.router.pd.measuring import HandoffSpeeds
from kvroute.router.pd.planning import Planned, plan, read_body
from kvroute.router.pd.registry import make_connector
from kvroute.router.pd.releasing import Release, Releaser
from kvroute.router.pd.resetting import Resets
from kvroute.router.pd.split import Split
from kvroute.router.pd.streams import Streams
from kvroute.router.request_parser import Request
from kvroute.router.workers import Member, State
from kvroute.types import EngineKind, Outcome, Role

log = structlog.get_logger(__name__)

AGAIN_S = 1.0
HEARD_S = 0.5
"""By then a decode worker has heard that its client left: it lets KV go itself, or fetches no more. What it
fetches after it was let go stays in its cache, wrong.
"""
MAX_SHAKEN = 4096
XARGS = "vllm_xargs"
NESTED = frozenset({"kv_transfer_params", "ec_transfer_params"})
"""vLLM takes what is in `vllm_xargs` for arguments of its own, these among them."""
RANK_HEADERS = frozenset({b"x-data-parallel-rank"})
PASSING_ON = (State.READY, State.SPOILT, State.DRAINING, State.UNHEALTHY)
"""A request that is refused looks into no cache, and is not one more to be finished."""


class Pd:
    """Asked where `registry.splits`. Connectors are made when first needed, and live as long as this."""

    def __init__(self, books: Books, dispatcher: Dispatcher) -> None:
        self.books = books
        self._dispatcher = dispatcher
        self._config = books.config.pd
        self._connectors: dict[str, Connector] = {}
        self._fleets: Connector | None = None
        self._asks_first: dict[type[Connector], bool] = {}
        self._shaken: dict[tuple[str, str], None] = {}
        """Pairs that have handed over: a decode worker reaches those prefill workers at once."""
        self.releaser = Releaser(books.pd_metrics.releases, self._config.prefill_grace_s)
        self.hear_out = self.releaser.hear_out
        self.streams = Streams()
        self._resets = Resets(books.registry, books.pd_metrics.resets)
        self._speeds = HandoffSpeeds(dispatcher)
        self._id_prefix = secrets.token_hex(8)
        self._ids = count()
        if self._config.connector is not None:
            self._named(self._config.connector)
        books.registry.on_change(self._changed)
        books.metrics.add_source(books.pd_metrics)

    async def start(self, host: str) -> None:
        """What a configured connector has of its own; raises OSError, on which the gateway does not start."""
        for connector in self._connectors.values():
            if isinstance(connector, Serving):
                await connector.start(host)

    async def close(self) -> None:
        """Idempotent; KV that is still to be let go has a moment."""
        await self._resets.stop()
        await self.releaser.stop()
        for connector in self._connectors.values():
            if isinstance(connector, Serving):
                connector.close()

    # --- before anything is chosen -------------------------------------------------------------

    def plan(self, request: Request) -> Planned:
        """What may be done with a request, and the request without a client's own transfer fields."""
        fields = read_body(request)
        way = self._config.client_fields
        if way != "forward":
            request, fields = self._cleaned(request, fields, refuse=way == "refuse")
        connector = self._any_connector()
        task, why_not, prompts = plan(request, fields, connector)
        asking = self.asks_first(connector)
        is_signed = why_not == "digest"
        if asking is not None and fields is not None and not is_signed and _path(request) in LIMITS:
            request = replace(request, body=leg_body(fields, asking.whole_fields))
        return Planned(request, fields, task, prompts, why_not)

    def look(self, request: Request) -> tuple[Task, str]:
        """The task a request would be, and why it is not split; for dry runs."""
        task, why_not, _ = plan(request, read_body(request), self._any_connector())
        return task, why_not

    def _cleaned(
        self, request: Request, fields: Fields | None, *, refuse: bool
    ) -> tuple[Request, Fields | None]:
        if fields is None:
            given = _odd_fields(request.body)
        else:
            given = [] if CLIENT_FIELDS.isdisjoint(fields) else sorted(CLIENT_FIELDS & fields.keys())
            if XARGS in fields and not NESTED.isdisjoint(nested := read_fields(bytes(fields[XARGS])) or {}):
                given.append(XARGS)
                fields = {**fields, XARGS: Raw(leg_body(without(nested, NESTED), {}))}
        if not given and RANK_HEADERS.isdisjoint(request.fields):
            return request, fields
        ranks = RANK_HEADERS & request.fields.keys()
        counter = self.books.pd_metrics.client_fields
        if given and (refuse or fields is None):
            counter.add(given[0], "refused")
            message = f"{given[0]} is the gateway's own field here; a request without it is expected"
            raise GatewayError(Failure.MALFORMED, message, param=given[0])
        for name in (*given, *(name.decode() for name in ranks)):
            counter.add(name, "stripped")
        if given and fields is not None:
            fields = without(fields, CLIENT_FIELDS)
            request = replace(request, body=leg_body(fields, {}))
        if ranks:
            headers = [header for header in request.headers if header[0].lower() not in ranks]
            kept = {name: value for name, value in request.fields.items() if name not in ranks}
            request = replace(request, headers=headers, fields=kept)
        return request, fields

    def fresh_id(self) -> str:
        return f"{self._id_prefix}-{next(self._ids):x}"

    def split(self, planned: Planned, asked: Asked, deadline_s: float) -> Split:
        return Split(self, planned, asked, deadline_s)

    def count(self, planned: Planned, choice: Choice) -> None:
        """How the first attempt at a request is made, and why it is not split."""
        reason = choice.decision.reason
        if choice.prefill is None:
            reason = planned.why_not or (reason if choice.could_split else "no_pair")
        self.books.pd_metrics.requests.add("whole" if choice.prefill is None else "split", reason)

    # --- connectors ----------------------------------------------------------------------------

    def connector(self, prefill: Member) -> Connector:
        """The configured one, else by what the worker tells of itself."""
        if self._config.connector is not None:
            return self._named(self._config.connector)
        told = None if prefill.transfer is None else prefill.transfer.connector
        is_sglang = prefill.worker.engine is EngineKind.SGLANG
        return self._named(told or ("sglang" if is_sglang else "nixl"))

    def _any_connector(self) -> Connector:
        """Of the workers that prefill, the first one's: a fleet has one."""
        if self._fleets is None:
            self._fleets = self._find_connector()
        return self._fleets

    def _find_connector(self) -> Connector:
        members = self.books.registry.members.values()
        first = next((m for m in members if m.worker.role is not Role.DECODE), None)
        return self._named(self._config.connector or "nixl") if first is None else self.connector(first)

    def _named(self, name: str) -> Connector:
        """Raises `ConnectorError` for one that does not load, which the configuration's does at the start."""
        connector = self._connectors.get(name)
        if connector is None:
            connector = self._connectors[name] = make_connector(name, self._config)
            if isinstance(connector, GaugeSource):
                self.books.metrics.add_source(connector)
        return connector

    def _changed(self, member: Member) -> None:
        self._fleets = None
        if member.state is not State.SPOILT:
            self.streams.cured(member, self.books.registry.clock())
        if member.state is State.GONE:
            self.streams.gone(member)
            for connector in self._connectors.values():
                connector.forget(member)
            for pair in [pair for pair in self._shaken if member.worker.id in pair]:
                del self._shaken[pair]
        elif member.worker.role is Role.DECODE:
            takes_whole = self.connector(member).decode_takes_whole
            self.books.registry.update(member, takes_whole=takes_whole)

    # --- what split requests tell (`split.Desk`) -----------------------------------------------

    def asks_first(self, connector: Connector) -> DecodeFirst | None:
        kind = type(connector)
        if kind not in self._asks_first:
            self._asks_first[kind] = isinstance(connector, DecodeFirst)
        return cast("DecodeFirst", connector) if self._asks_first[kind] else None

    def prefilled(self, choice: Choice, asked: Asked, outcome: Outcome) -> None:
        half = choice.prefill
        assert half is not None
        teaches = not self.connector(half.member).is_concurrent
        self.books.prefilled(choice, half, asked, outcome, teaches=teaches)

    def handed_over(self, half: PrefillHalf, pair: Pair, handoff_s: float) -> None:
        metrics = self.books.pd_metrics
        metrics.kv_bytes.add(by=half.payload_bytes)
        if half.handoff_s > 0:
            metrics.handoff_error.of().observe(handoff_s / half.handoff_s)
        near = nearness(pair.prefill.worker, pair.decode.worker)
        self._speeds.observe(near, half.payload_bytes, handoff_s - (half.handoff_s - half.wire_s))
        self._shaken[pair.prefill.worker.id, pair.decode.worker.id] = None
        if len(self._shaken) > MAX_SHAKEN:
            del self._shaken[next(iter(self._shaken))]

    def spoilt(self, decode: Member, since_s: float, prompt: Prompt) -> None:
        broken = self.streams.break_off(decode, since_s, prompt)
        if broken:
            self.books.pd_metrics.failures.add("decode", Failure.SPOILT.value, by=broken)
        log.error("kv fetched too late", worker=decode.worker.id, broken_off=broken)
        self._resets.spoilt(decode)

    def let_go(self, kept: Kept, decode: Member, *, may_fetch: bool) -> None:
        told = kept.connector.release(kept.pair, kept.handoff)
        if told is None:
            return
        prefill, shaken = kept.pair.prefill, self._shaken
        others = self._decode_workers(prefill, decode)
        met = bool(others) and (prefill.worker.id, others[0].worker.id) in shaken
        by = partial(self._decode_workers, prefill, decode)
        release = Release(*told, by, kept.until_s, None if met else AGAIN_S)
        self.releaser.release(release, HEARD_S if may_fetch else 0.0)

    def _decode_workers(self, prefill: Member, decode: Member) -> list[Member]:
        """Those that may pass a release on, the likeliest to reach the prefill worker first."""
        able = [one for one in self.books.registry.members.values() if one.state in PASSING_ON]
        others = [one for one in able if one.worker.role is not Role.PREFILL and one is not prefill]
        shaken = self._shaken
        others.sort(
            key=lambda one: (
                one.state is not State.READY,
                (prefill.worker.id, one.worker.id) not in shaken,
                one is not decode,
            )
        )
        return others


def _path(request: Request) -> bytes:
    return request.target.partition(b"?")[0]


def _odd_fields(body: bytes) -> list[str]:
    """Transfer fields in a body that cannot be changed, however they are written there."""
    found = {name for name in CLIENT_FIELDS if b'"%b"' % name.encode() in body}
    if b"\\u" in body or b"\0" in body:
        value = read_oddly(body)
        nested = value.get(XARGS)
        found |= CLIENT_FIELDS & {*value, *(nested if isinstance(nested, dict) else ())}
    return sorted(found)
