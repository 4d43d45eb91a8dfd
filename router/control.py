"""The FastAPI apps: probes, metrics, the merged model list, dry runs, and what only operators may do."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from msgspec import to_builtins
from pydantic import SecretStr

from kvroute import __version__
from kvroute.clock import monotonic
from kvroute.conductor.shared import Intent
from kvroute.config_groups import WorkerConfig
from kvroute.router.decision_log import DecisionLog
from kvroute.router.errors import Failure, GatewayError
from kvroute.router.explain import Explainer
from kvroute.router.metrics import Metrics
from kvroute.router.workers import DuplicateWorker, Member, Registry, State

PUBLIC_PATHS = frozenset({b"/livez", b"/readyz", b"/metrics", b"/v1/models"})
"""What the gateway's own port answers itself to GET, beside EXPLAIN_PATH; all else belongs to the workers."""
EXPLAIN_PATH = b"/v1/route/explain"


def make_public_app(
    registry: Registry, metrics: Metrics, *, draining: Callable[[], bool], explainer: Explainer
) -> FastAPI:
    """Behind PUBLIC_PATHS and EXPLAIN_PATH on the data port, which has checked the client's key."""
    app = _app(openapi_url=None)
    app.include_router(_public_routes(registry, metrics, draining))
    app.include_router(_explain_routes(explainer))
    return app


def make_app(
    registry: Registry,
    metrics: Metrics,
    *,
    draining: Callable[[], bool],
    explainer: Explainer,
    admin_token: SecretStr | None,
    decided: Callable[[Member, Intent], None] | None = None,
    decision_log: DecisionLog | None = None,
) -> FastAPI:
    """Everything, for the admin port.

    `draining` is true from the first moment of a shutdown; `decided` is told what an operator does.
    """
    app = _app(openapi_url="/admin/openapi.json")
    app.include_router(_public_routes(registry, metrics, draining))
    authorised = Depends(_guard(admin_token))
    app.include_router(_explain_routes(explainer), dependencies=[authorised])
    if decision_log is not None:
        app.include_router(_log_routes(decision_log), dependencies=[authorised])
    app.include_router(_admin_routes(registry, authorised, decided or _nobody))
    return app


def _app(openapi_url: str | None) -> FastAPI:
    app = FastAPI(
        title="kvroute", version=__version__, openapi_url=openapi_url, docs_url=None, redoc_url=None
    )
    app.add_exception_handler(GatewayError, _gateway_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    return app


def _public_routes(registry: Registry, metrics: Metrics, draining: Callable[[], bool]) -> APIRouter:
    routes = APIRouter()

    @routes.get("/livez")
    async def livez() -> dict[str, str]:
        """The process answers."""
        return {"status": "alive"}

    @routes.get("/readyz")
    async def readyz() -> JSONResponse:
        """200 while at least one worker is usable and no shutdown has begun."""
        states = _count_states(registry)
        if draining():
            return JSONResponse({"status": "draining", "workers": states}, 503)
        ready = registry.usable
        return JSONResponse(
            {"status": "ready" if ready else "no usable worker", "workers": states}, 200 if ready else 503
        )

    @routes.get("/metrics")
    async def scrape() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=1.0.0; charset=utf-8")

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {
            "object": "list",
            "data": merge_cards(m.cards for m in registry.members.values() if _lists(m)),
        }

    return routes


def _lists(member: Member) -> bool:
    return member.state in (State.READY, State.UNHEALTHY)


def _count_states(registry: Registry) -> dict[str, int]:
    states = [member.state.value for member in registry.members.values()]
    return {state.value: states.count(state.value) for state in State if state.value in states}


def merge_cards(lists: Iterable[Iterable[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One card per model id, in order of first sight; a later worker only adds fields that were missing."""
    merged: dict[str, dict[str, Any]] = {}
    for cards in lists:
        for card in cards:
            known = merged.setdefault(card["id"], {})
            merged[card["id"]] = {**known, **{k: v for k, v in card.items() if known.get(k) is None}}
    return list(merged.values())


def describe(member: Member) -> dict[str, Any]:
    """A worker as the admin API shows it."""
    worker, load = member.worker, member.load
    return {
        "id": worker.id,
        "url": worker.url,
        "state": member.state.value,
        "breaker": member.breaker.state(monotonic()).value,
        "engine": worker.engine.value,
        "role": worker.role.value,
        "takes_whole": worker.takes_whole,
        "place": asdict(worker.place),
        "salted": bool(member.salt),
        "transfer": None if member.transfer is None else to_builtins(member.transfer),
        "models": list(worker.models),
        "block_size_tokens": worker.block_size_tokens,
        "data_parallel_size": worker.data_parallel_size,
        "last_error": member.last_error,
        "requests": load.requests,
        "pending_prefill_tokens": load.pending_prefill_tokens,
        "reported_running": load.reported_running,
        "reported_waiting": load.reported_waiting,
        "kv_usage_ratio": load.kv_usage_ratio,
        "kv_event_sources": member.kv_event_sources,
    }


def _nobody(_member: Member, _intent: Intent) -> None:
    """No other replica is there to be told."""


def _guard(token: SecretStr | None) -> Callable[[str], None]:
    """The check that stands before every admin route."""

    def authorised(authorization: Annotated[str, Header()] = "") -> None:
        if token is None:
            return
        expected = f"Bearer {token.get_secret_value()}"
        if not secrets.compare_digest(authorization.encode(), expected.encode()):
            raise GatewayError(
                Failure.UNAUTHORIZED, "the admin API needs the token of admin.token as a Bearer token"
            )

    return authorised


def _explain_routes(explainer: Explainer) -> APIRouter:
    routes = APIRouter()

    @routes.post(EXPLAIN_PATH.decode())
    async def explain(request: Request, path: str | None = None) -> Response:
        """Where this body would go, were it sent to `path`, and why: a dry run without any effect.

        By default that is /v1/completions for a body with a `prompt`, else /v1/chat/completions.
        """
        answer = await explainer.explain(path, await request.body(), dict(reversed(request.headers.raw)))
        # ASCII, since a client's JSON may hold lone surrogates, which UTF-8 has no bytes for.
        return Response(json.dumps(answer), media_type="application/json")

    return routes


def _log_routes(decision_log: DecisionLog) -> APIRouter:
    routes = APIRouter()

    @routes.get("/admin/decisions")
    async def decisions(limit: Annotated[int, Query(ge=1)] = 50) -> Response:
        """The last decisions that were kept, with their ends, newest first."""
        return Response(json.dumps(decision_log.recent(limit)), media_type="application/json")

    return routes


def _admin_routes(
    registry: Registry, authorised: Any, decided: Callable[[Member, Intent], None]
) -> APIRouter:
    routes = APIRouter(prefix="/admin/workers", dependencies=[authorised])

    def find(worker_id: str) -> Member:
        # Ids hold the worker's address, slashes included for a base path; the URL alone is not accepted,
        # since it may name an incarnation that the caller has not seen.
        member = registry.members.get(worker_id)
        if member is None:
            known = ", ".join(registry.members) or "none"
            raise GatewayError(Failure.NOT_FOUND, f"no worker has the id {worker_id!r}; known: {known}")
        return member

    @routes.get("")
    async def list_workers() -> dict[str, Any]:
        return {"workers": [describe(member) for member in registry.members.values()]}

    @routes.post("", status_code=201)
    async def add_worker(config: WorkerConfig) -> dict[str, Any]:
        try:
            member = registry.add(config)
        except DuplicateWorker as error:
            raise GatewayError(Failure.CONFLICT, str(error), param="url") from None
        decided(member, Intent.SERVING)
        return describe(member)

    @routes.post("/{worker_id:path}/drain", status_code=202)
    async def drain_worker(worker_id: str) -> dict[str, Any]:
        member = find(worker_id)
        registry.drain(member)
        decided(member, Intent.DRAINING)
        return describe(member)

    @routes.delete("/{worker_id:path}", status_code=202)
    async def remove_worker(worker_id: str) -> dict[str, Any]:
        member = find(worker_id)
        registry.remove(member)
        decided(member, Intent.REMOVED)
        return describe(member)

    return routes


async def _gateway_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return Response(error.body(), error.status, media_type="application/json")


async def _validation_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    # Of a body that is no JSON, the location is an offset into it.
    inside = () if first["type"] == "json_invalid" else first["loc"][1:]
    field = ".".join(map(str, inside))
    message = f"{field or 'body'}: {first['msg'].removeprefix('Value error, ')}"
    refused = GatewayError(Failure.MALFORMED, message, param=field or None)
    return Response(refused.body(), refused.status, media_type="application/json")
