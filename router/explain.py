"""What routing would make of a request, for people to look at."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import structlog
from msgspec.structs import asdict

from kvroute.clock import monotonic
from kvroute.conductor.prompts import ROUTES
from kvroute.load import WorkerLoad
from kvroute.policies.base import Policy, Prices
from kvroute.policies.costs.pace import Pace
from kvroute.policies.costs.speeds import PRESETS
from kvroute.router.errors import Failure, GatewayError
from kvroute.router.exchange import Services
from kvroute.router.parsed_request import PARSE_IN_THREAD_BYTES, ParsedRequest
from kvroute.router.request_headers import READ_HEADERS, MalformedRequest
from kvroute.router.request_parser import Request
from kvroute.router.request_view import parse_request
from kvroute.router.terms import say_why, show_priced, to_ms
from kvroute.types import NO_MATCH, Decision, Fleet, Hold, Priced, Rejection, RequestView

log = structlog.get_logger(__name__)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PRESET_NAMES = {speed: name for name, speed in PRESETS.items()}


class Explainer:
    """A dry run for a body that some API route would get: charges nothing, tells nobody, changes no policy.

    Long bodies are read one at a time, on a thread.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._reading = asyncio.Lock()

    async def explain(self, path: str | None, body: bytes, headers: Mapping[bytes, bytes]) -> dict[str, Any]:
        """Who would get it and why, candidate by candidate; GatewayError as for the request itself.

        `headers` by lower-case name: those that routing reads count here too.
        """
        services = self._services
        knowledge, dispatcher = services.knowledge, services.dispatcher
        path = path or (COMPLETIONS if b'"prompt"' in body and b'"messages"' not in body else CHAT)
        if path.encode() not in ROUTES:
            known = ", ".join(sorted(route.decode() for route in ROUTES))
            raise GatewayError(
                Failure.MALFORMED, f"path: {path!r} carries no prompt; accepted: {known}", param="path"
            )
        parsed = await self._parse(path.encode(), body, headers)
        why_not_split = None
        if services.registry.splits:
            asked = Request(b"POST", path.encode(), [], dict(headers), body, True, False, 0.0)
            parsed.task, why_not_split = services.pd.look(asked)
        prompt = knowledge.prompt(parsed)
        if knowledge.remote is not None and prompt.sets:
            eligible = services.registry.eligible(parsed.view.model, monotonic(), (), parsed.task)
            prompt = await knowledge.ask(prompt, eligible)
        fleet = dispatcher.snapshot(parsed, prompt)
        return {
            "path": path,
            **_show_request(parsed.view),
            "expected_output_tokens": round(fleet.output_tokens, 1),
            "keys": None if prompt.mode is None else prompt.mode.value,
            "why_no_keys": knowledge.make_keys(parsed)[1],
            "why_not_tokens": parsed.no_tokens,
            "block_tokens": sorted(prompt.sets[0]) if prompt.sets else [],
            "prompts": len(prompt.sets),
            "why_not_split": why_not_split or None,
            "policy": dispatcher.policy_name,
            **dry_run(dispatcher.policy_name, dispatcher.policy, parsed.view, fleet),
            "workers": show_workers(
                fleet, [knowledge.following.state(worker.id) for worker in fleet.workers]
            ),
        }

    async def _parse(self, path: bytes, body: bytes, headers: Mapping[bytes, bytes]) -> ParsedRequest:
        limit = self._services.config.limits.body_bytes
        if len(body) > limit:
            raise GatewayError(
                Failure.BODY_TOO_LARGE, f"request body is over {limit} bytes (limits.body_bytes)"
            )
        said = {name: headers[name] for name in READ_HEADERS & headers.keys()}
        said[b"content-type"] = b"application/json"
        tokens = self._services.tokens

        def read() -> ParsedRequest:
            parsed = parse_request(path, said, body, tokens)
            if parsed.fields is None:
                self._services.knowledge.make_keys(parsed)
            return parsed

        try:
            if len(body) <= PARSE_IN_THREAD_BYTES:
                parsed = read()
            else:
                async with self._reading:
                    parsed = await asyncio.to_thread(read)
        except MalformedRequest as error:
            raise GatewayError(Failure.MALFORMED, str(error), param=error.field) from None
        if parsed.fields is not None and tokens is not None:
            await tokens.ask(parsed, path)
        return parsed


def dry_run(name: str, policy: Policy, request: RequestView, fleet: Fleet) -> dict[str, Any]:
    """`chosen`, `why` and `candidates`: what a policy that prices would answer now.

    A copy decides, so that the policy's own turn and state stay as they are. One that does not price cannot
    say why, and is not asked.
    """
    if not isinstance(policy, Prices):
        why = f"policy {name} does not price its candidates: only its decision itself tells whom it chooses"
        return {"chosen": None, "why": why, "candidates": []}
    try:
        priced = policy.price(request, fleet)
        answer = deepcopy(policy).decide(request, fleet)
        why = say_why(request.prompt_tokens, priced, answer)
    except Exception as error:
        log.exception("policy failed in a dry run", policy=name)
        return {"chosen": None, "why": f"policy {name} failed: {type(error).__name__}", "candidates": []}
    return {"chosen": _show_answer(answer, priced), "why": why, "candidates": list(map(show_priced, priced))}


def _show_answer(answer: Decision | Hold | Rejection, priced: Sequence[Priced]) -> dict[str, Any] | None:
    """The decision with its price; None for a request that waits or is rejected, as `why` says."""
    if not isinstance(answer, Decision):
        return None
    total_s = next((each.cost.total_s for each in priced if each.candidate == answer.candidate), None)
    pull = answer.pull
    return {
        "prefill": answer.candidate.prefill.url,
        "decode": answer.candidate.decode.url,
        "reason": answer.reason,
        "matched_tokens": answer.matched_tokens,
        "total_ms": None if total_s is None else to_ms(total_s),
        "pull": None
        if pull is None
        else {"source": pull.source.url, "tokens": pull.tokens, "expected_ms": to_ms(pull.expected_s)},
    }


def _show_request(view: RequestView) -> dict[str, Any]:
    limits = {"ttft_ms": view.ttft_limit_s, "itl_ms": view.itl_limit_s, "e2e_ms": view.e2e_limit_s}
    return {
        "model": view.model,
        "tenant": view.tenant,
        "priority": view.priority,
        "session": view.session_id,
        "session_continues": view.continues,
        "prompt_tokens": view.prompt_tokens,
        "max_output_tokens": view.max_output_tokens,
        "limits": {name: None if limit_s is None else to_ms(limit_s) for name, limit_s in limits.items()},
    }


def show_workers(fleet: Fleet, index: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What each worker carries, how fast it is and what it holds of the prompt; `index` parallel to them."""
    count = len(fleet.workers)
    paces: Sequence[Pace | None] = fleet.paces or [None] * count
    matches = fleet.matches or [NO_MATCH] * count
    return [
        {
            "id": worker.id,
            "url": worker.url,
            "role": worker.role.value,
            **_show_load(load, fleet.now_s, 1.0 if pace is None else pace.prefill_scale),
            "pace": None if pace is None else _show_pace(pace),
            "index": state,
            "match": asdict(match),
        }
        for worker, load, pace, match, state in zip(
            fleet.workers, fleet.loads, paces, matches, index, strict=True
        )
    ]


def _show_load(load: WorkerLoad, now_s: float, scale: float) -> dict[str, Any]:
    return {
        "requests": load.requests,
        "prefilling": load.prefilling,
        "pending_prefill_tokens": load.pending_prefill_tokens,
        "pending_ms": to_ms(load.ahead_s(now_s, scale)),
        "context_tokens": round(load.context_tokens),
        "kv_tokens": round(load.kv_tokens),
        "reported_running": load.reported_running,
        "reported_waiting": load.reported_waiting,
        "kv_usage_ratio": load.kv_usage_ratio,
    }


def _show_pace(pace: Pace) -> dict[str, Any]:
    return {
        "preset": PRESET_NAMES.get(pace.speed),
        "prefill_scale": round(pace.prefill_scale, 4),
        "decode_scale": round(pace.decode_scale, 4),
        "overhead_ms": to_ms(pace.overhead_s),
        "match_reliability": round(pace.match_reliability, 4),
    }
