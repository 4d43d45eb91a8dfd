"""What routing would know of a request, for people to look at."""

from __future__ import annotations

from typing import Any

from msgspec.structs import asdict

from kvroute.clock import monotonic
from kvroute.conductor.prompts import ROUTES
from kvroute.router.errors import Failure, GatewayError
from kvroute.router.exchange import Services
from kvroute.router.parsed_request import PARSE_IN_THREAD_BYTES, ParsedRequest
from kvroute.router.request_headers import MalformedRequest
from kvroute.router.request_view import parse_request

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {b"content-type": b"application/json"}


class Explainer:
    """Answers for a body that some API route would get; charges nothing and tells nobody."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def explain(self, path: str | None, body: bytes) -> dict[str, Any]:
        """Prompt keys, and what each eligible worker holds of them. GatewayError as for a request."""
        services = self._services
        path = path or (COMPLETIONS if b'"prompt"' in body and b'"messages"' not in body else CHAT)
        if path.encode() not in ROUTES:
            known = ", ".join(sorted(route.decode() for route in ROUTES))
            raise GatewayError(
                Failure.MALFORMED, f"path: {path!r} carries no prompt; accepted: {known}", param="path"
            )
        parsed = await self._parse(path.encode(), body)
        prompt = services.knowledge.prompt(parsed)
        eligible = services.registry.eligible(parsed.view.model, monotonic())
        if services.knowledge.remote is not None and prompt.sets:
            prompt = await services.knowledge.ask(prompt, eligible)
        matches = services.knowledge.match(prompt, eligible)
        first = next(iter(prompt.sets[0].values())) if prompt.sets else None
        return {
            "model": parsed.view.model,
            "policy": services.dispatcher.policy_name,
            "keys": None if prompt.mode is None else prompt.mode.value,
            "path": path,
            "why_no_keys": services.knowledge.make_keys(parsed)[1],
            "why_not_tokens": parsed.no_tokens,
            "prompt_tokens": parsed.view.prompt_tokens,
            "block_tokens": [] if first is None else sorted(prompt.sets[0]),
            "prompts": len(prompt.sets),
            "workers": [
                {
                    "id": worker.id,
                    "url": worker.url,
                    "requests": load.requests,
                    "pending_prefill_tokens": load.pending_prefill_tokens,
                    "index": services.knowledge.following.state(worker.id),
                    "match": asdict(match),
                }
                for worker, load, match in zip(eligible.workers, eligible.loads, matches, strict=True)
            ],
        }

    async def _parse(self, path: bytes, body: bytes) -> ParsedRequest:
        if len(body) > PARSE_IN_THREAD_BYTES:
            message = f"explain takes bodies of up to {PARSE_IN_THREAD_BYTES // 2**10} KiB"
            raise GatewayError(Failure.MALFORMED, message)
        tokens = self._services.tokens
        try:
            parsed = parse_request(path, JSON, body, tokens)
        except MalformedRequest as error:
            raise GatewayError(Failure.MALFORMED, str(error), param=error.field) from None
        if parsed.fields is not None and tokens is not None:
            await tokens.ask(parsed, path)
        return parsed
