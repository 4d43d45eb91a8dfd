"""Every path that generates nothing: discovery, health, tokens, adapters, and the truth under /debug."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any

import orjson

from kvroute.conductor.tiers.tier import Tier
from kvroute.loadtests.mock_engine.answers import DelayedReply
from kvroute.loadtests.mock_engine.connection import Connection
from kvroute.loadtests.mock_engine.dialects.chat import chat_tokens
from kvroute.loadtests.mock_engine.dialects.completions import prompt_tokens
from kvroute.loadtests.mock_engine.faults import FaultError, Faults
from kvroute.loadtests.mock_engine.tokens import detokenize, tokenize
from kvroute.loadtests.mock_engine.wire import ApiError, Request, invalid, json_response, rejected, response

if TYPE_CHECKING:
    from kvroute.loadtests.mock_engine.engine import MockEngine

Route = Callable[["MockEngine", Connection, Request], None]

VERSION = "0.32.0"
UNGUARDED = frozenset({"/health", "/ping", "/metrics", "/version", "/debug", "/debug/faults", "/query"})
"""Paths that need no key."""

ROUTES: dict[tuple[bytes, str], Route] = {}


def _route(method: bytes, *paths: str) -> Callable[[Route], Route]:
    def register(route: Route) -> Route:
        ROUTES.update({(method, path): route for path in paths})
        return route

    return register


def _reply(connection: Connection, data: bytes, delay_s: float) -> None:
    if delay_s:
        DelayedReply(connection, data, delay_s)
    else:
        connection.reply(data)


def _body(request: Request) -> dict[str, Any]:
    try:
        body = orjson.loads(request.body)
    except orjson.JSONDecodeError as error:
        raise invalid(f"1 validation error:\n  ('body', {error.pos}): JSON decode error") from error
    if not isinstance(body, dict):
        raise invalid("1 validation error:\n  ('body',): Input should be a valid dictionary")
    return body


# Health and load.


@_route(b"GET", "/health")
@_route(b"GET", "/ping")
@_route(b"POST", "/ping")
def health(engine: MockEngine, connection: Connection, request: Request) -> None:
    faults = engine.faults
    failing = faults.fail_health
    if isinstance(failing, list):
        failing = bool(failing) and failing[engine.health_checks % len(failing)]
    engine.health_checks += 1
    _reply(connection, response(503 if failing else 200), faults.slow_health)


@_route(b"GET", "/load")
def load(engine: MockEngine, connection: Connection, request: Request) -> None:
    connection.reply(json_response({"server_load": len(engine.live)}))


@_route(b"GET", "/metrics")
def metrics(engine: MockEngine, connection: Connection, request: Request) -> None:
    if engine.faults.fail_metrics:
        data = response(500, b"Internal Server Error", b"text/plain; charset=utf-8")
    else:
        content_type = b"text/plain; version=1.0.0; charset=utf-8"
        data = response(200, engine.metrics.text(), content_type)
    _reply(connection, data, engine.faults.slow_metrics)


# Discovery.


@_route(b"GET", "/version")
def version(engine: MockEngine, connection: Connection, request: Request) -> None:
    connection.reply(json_response({"version": VERSION}))


@_route(b"GET", "/v1/models")
def models(engine: MockEngine, connection: Connection, request: Request) -> None:
    faults, options = engine.faults, engine.options
    cards = [_card(options.model, options.model, None, options.max_tokens)]
    cards += [_card(name, path, options.model, None) for name, path in engine.adapters.items()]
    data = json_response({"object": "list", "data": cards})
    if faults.fail_models:
        data = response(503)
    _reply(connection, data, faults.slow_models)


def _card(name: str, root: str, parent: str | None, max_tokens: int | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_tokens,
        "permission": [],
    }


@_route(b"GET", "/server_info")
@_route(b"GET", "/get_server_info")
def server_info(engine: MockEngine, connection: Connection, request: Request) -> None:
    options, pd = engine.options, engine.pd.server_info()
    if not options.development and options.connector != "sglang":
        connection.reply(json_response({"detail": "Not Found"}, 404))
        return
    if options.connector == "sglang":
        own = {"version": VERSION, "model_path": options.model, "page_size": options.block_size_tokens}
        connection.reply(json_response(own | {"dp_size": 1, "tp_size": 1} | (pd or {})))
        return
    events = None if engine.events is None else engine.events.source()
    config = {
        "model_config": {"model": options.model, "max_model_len": options.max_tokens},
        "cache_config": {
            "block_size": options.block_size_tokens,
            "num_gpu_blocks": options.capacity_blocks,
            "enable_prefix_caching": True,
        },
        "parallel_config": {"data_parallel_size": 1, "tensor_parallel_size": 1},
        "scheduler_config": {
            "max_num_batched_tokens": options.max_batched_tokens,
            "max_num_seqs": options.max_sequences,
        },
        "kv_events_config": events,
        "kv_transfer_config": pd,
    }
    text = b"config_format=json" not in request.query
    info = {"vllm_config": str(config) if text else config, "vllm_env": {}, "system_env": {}}
    connection.reply(json_response(info))


@_route(b"GET", "/kv_event_sources")
def kv_event_sources(engine: MockEngine, connection: Connection, request: Request) -> None:
    connection.reply(json_response({} if engine.events is None else {"0": engine.events.source()}))


@_route(b"GET", "/query")
def query(engine: MockEngine, connection: Connection, request: Request) -> None:
    """Mooncake's bootstrap server, which has a port of its own in the real engine."""
    answer = engine.pd.bootstrap()
    if answer is None:
        connection.reply(json_response({"detail": "Not Found"}, 404))
    else:
        connection.reply(json_response(answer))


# Tokens.


@_route(b"POST", "/tokenize")
def tokenize_route(engine: MockEngine, connection: Connection, request: Request) -> None:
    body = _body(request)
    if isinstance(body.get("messages"), list):
        generation = body.get("add_generation_prompt") is not False
        ids = chat_tokens(body["messages"], body.get("tools"), generation)
    elif isinstance(body.get("prompt"), str):
        ids = tokenize(body["prompt"].encode("utf-8", "surrogatepass"))
    else:
        raise invalid("1 validation error:\n  ('body', 'prompt'): Field required", "prompt")
    strings = [detokenize([id]) for id in ids] if body.get("return_token_strs") else None
    answer = {
        "count": len(ids),
        "max_model_len": engine.options.max_tokens,
        "tokens": ids.tolist(),
        "token_strs": strings,
    }
    connection.reply(json_response(answer))


@_route(b"POST", "/v1/chat/completions/render")
def render_chat_route(engine: MockEngine, connection: Connection, request: Request) -> None:
    """vLLM's: the request as it would be run, with its token ids."""
    body = _body(request)
    generation = body.get("add_generation_prompt") is not False
    ids = chat_tokens(body.get("messages"), body.get("tools"), generation)  # type: ignore[arg-type]
    connection.reply(json_response(_rendered(engine, body, ids)))


@_route(b"POST", "/v1/completions/render")
def render_completion_route(engine: MockEngine, connection: Connection, request: Request) -> None:
    """The same, one for each prompt."""
    body = _body(request)
    rendered = [_rendered(engine, body, ids) for ids in prompt_tokens(body.get("prompt"))]
    connection.reply(json_response(rendered))


def _rendered(engine: MockEngine, body: dict[str, Any], ids: array[int]) -> dict[str, Any]:
    return {
        "request_id": f"render-{len(ids)}",
        "token_ids": ids.tolist(),
        "sampling_params": {},
        "model": body.get("model") or engine.options.model,
        "stream": bool(body.get("stream")),
    }


@_route(b"POST", "/detokenize")
def detokenize_route(engine: MockEngine, connection: Connection, request: Request) -> None:
    ids = _body(request).get("tokens")
    if not isinstance(ids, list) or not all(isinstance(id, int) for id in ids):
        raise invalid("1 validation error:\n  ('body', 'tokens'): Input should be a valid list", "tokens")
    connection.reply(json_response({"prompt": detokenize(ids)}))


# Adapters and cache.


@_route(b"POST", "/v1/load_lora_adapter")
def load_adapter(engine: MockEngine, connection: Connection, request: Request) -> None:
    body = _body(request)
    name, path = body.get("lora_name"), body.get("lora_path")
    if not (isinstance(name, str) and isinstance(path, str) and name and path):
        raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput")
    if name in engine.adapters and not body.get("load_inplace"):
        raise ApiError(400, f"The lora adapter '{name}' has already been loaded.", "InvalidUserInput")
    engine.adapters[name] = path
    engine.intake.forget()
    text = f"Success: LoRA adapter '{name}' added successfully.".encode()
    connection.reply(response(200, text, b"text/plain; charset=utf-8"))


@_route(b"POST", "/v1/unload_lora_adapter")
def unload_adapter(engine: MockEngine, connection: Connection, request: Request) -> None:
    name = _body(request).get("lora_name")
    if not isinstance(name, str) or not name:
        raise ApiError(400, "'lora_name' needs to be provided to unload a LoRA adapter.", "InvalidUserInput")
    if engine.adapters.pop(name, None) is None:
        raise ApiError(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
    engine.intake.forget()
    text = f"Success: LoRA adapter '{name}' removed successfully.".encode()
    connection.reply(response(200, text, b"text/plain; charset=utf-8"))


@_route(b"POST", "/reset_prefix_cache")
def reset_prefix_cache(engine: MockEngine, connection: Connection, request: Request) -> None:
    """As vLLM 0.32 in development mode; the event leaves with the next step."""
    if not engine.options.development:
        connection.reply(json_response({"detail": "Not Found"}, 404))
        return
    running = b"reset_running_requests=true" in request.query
    success = engine.driver.reset_cache(running=running)
    if running and not success:  # it raises, its running requests sent back in vain
        connection.reply(response(500, b"Internal Server Error", b"text/plain; charset=utf-8"))
    else:
        connection.reply(json_response({"success": success}))


@_route(b"POST", "/close_session")
def close_session(engine: MockEngine, connection: Connection, request: Request) -> None:
    """SGLang's: the session's KV loses its protection. Here it is only noted."""
    session_id = _body(request).get("session_id")
    if not isinstance(session_id, str):
        raise invalid("1 validation error:\n  ('body', 'session_id'): Field required", "session_id")
    engine.journal.closed_sessions.append(session_id)
    connection.reply(response(200))


# The truth.


@_route(b"GET", "/debug")
def debug(engine: MockEngine, connection: Connection, request: Request) -> None:
    connection.reply(json_response(truth(engine)))


@_route(b"POST", "/debug/faults")
def set_faults(engine: MockEngine, connection: Connection, request: Request) -> None:
    settings = _body(request)
    restart = settings.pop("restart", None)
    try:
        engine.faults.set(settings)
        refuse_s = None if restart is None else float(restart)
    except (FaultError, TypeError, ValueError) as error:
        raise rejected(str(error)) from error
    connection.reply(json_response(engine.faults.as_dict()))
    if refuse_s is not None:
        engine.begin_restart(refuse_s)


@_route(b"DELETE", "/debug/faults")
def reset_faults(engine: MockEngine, connection: Connection, request: Request) -> None:
    engine.faults = Faults()
    connection.reply(json_response({}))


def truth(engine: MockEngine) -> dict[str, Any]:
    """Everything a test may ask of an engine; lists are bounded by the options."""
    cache, totals, below = engine.scheduler.cache, engine.scheduler.totals, engine.scheduler.below
    return {
        "engine": engine.index,
        "url": engine.url,
        "incarnation": engine.incarnation,
        "hash_seed": engine.hash_seed,
        "running": engine.running,
        "waiting": engine.waiting,
        "kv": {
            "capacity_blocks": cache.capacity_blocks,
            "free_blocks": cache.free_blocks,
            "resident_blocks": cache.resident_blocks,
            "idle_blocks": cache.idle_blocks,
            "used_ratio": cache.used_ratio,
            "hashes": list(islice(cache.keys(), engine.options.journal_ids)),
            "lower_tiers": {}
            if below is None
            else {tier.medium: _tier(engine, tier) for tier in below.tiers},
            "event_seq": None if engine.events is None else engine.events.seq,
        },
        "tokens": {
            "prefill_computed": totals.prefill_tokens,
            "prefill_cached": totals.cached_tokens,
            "prefill_loaded": totals.loaded_tokens,
            "generated": totals.generated_tokens,
            "preemptions": totals.preemptions,
        },
        "connections": {
            "open": len(engine.connections),
            "accepted": engine.accepted,
            "bytes_read": engine.bytes_read,
            "bytes_written": engine.bytes_written,
        },
        "requests": engine.journal.as_dict(),
        "last_requests": engine.journal.requests_as_list(),
        "last_polls": engine.journal.requests_as_list(polls=True),
        "pd": {
            "connector": engine.options.connector,
            "role": engine.pd.role,
            "engine_id": engine.pd.engine_id,
            **engine.pd.holds.as_dict(),
            "parked_ids": engine.pd.parked(),
            **engine.pd_books.as_dict(),
        },
        "adapters": dict(engine.adapters),
        "closed_sessions": list(engine.journal.closed_sessions),
        "faults": engine.faults.as_dict(),
    }


def _tier(engine: MockEngine, tier: Tier) -> dict[str, Any]:
    return {
        "capacity_bytes": tier.capacity_bytes,
        "used_bytes": tier.used_bytes,
        "hashes": list(islice(tier.keys(), engine.options.journal_ids)),
        **asdict(tier.counts),
    }
