"""Whose tokenizer a request's model has, and what engines then say of the tokens it foretold."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import httpx
from prometheus_client.core import CounterMetricFamily

from kvroute.clock import monotonic
from kvroute.conductor.tokens.outcome import TokenizedPrompts, Unavailable
from kvroute.conductor.tokens.registry import TokenizerOptions, Tokenizers
from kvroute.config_groups import ModelConfig
from kvroute.endpoint import Endpoint
from kvroute.router.errors import GatewayError
from kvroute.router.metrics import Metrics, gauge
from kvroute.router.parsed_request import ParsedRequest, TokenIds
from kvroute.router.request_view import take_tokens
from kvroute.router.workers import Identity, Member, Registry, State, identities
from kvroute.types import EngineKind

if TYPE_CHECKING:
    from prometheus_client.core import Metric

ENGINE_CONNECTIONS = 32


class GatewayTokens:
    """The `TokenSource` of a gateway: tokenizers by configured model, models and adapters by registry."""

    def __init__(self, models: Mapping[str, ModelConfig], registry: Registry, metrics: Metrics) -> None:
        self._registry = registry
        self._names = frozenset(models)
        self._client = httpx.AsyncClient(
            auth=_WorkerKeys(registry),
            limits=httpx.Limits(max_connections=ENGINE_CONNECTIONS),
            trust_env=False,
        )
        self._tokenizers = Tokenizers({name: _options(model) for name, model in models.items()}, self._client)
        self._tasks: set[asyncio.Task[Any]] = set()
        metrics.add_source(self)

    def start(self) -> None:
        """Load the tokenizers in the background; requests get approximate keys until then."""
        self._spawn(self._load())
        self._registry.on_change(self._member_changed)

    async def close(self) -> None:
        """Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    async def _load(self) -> None:
        await self._tokenizers.run()
        for member in list(self._registry.members.values()):
            self._member_changed(member)

    def _member_changed(self, member: Member) -> None:
        """Have an engine that turns ready tokenise a little: a wrong tokenizer shows before any prompt."""
        if member.state is not State.READY or member.worker.engine is not EngineKind.VLLM:
            return
        for name, identity in identities(member):
            if identity.adapter is None and name in self._names and self._tokenizers.loaded().get(name):
                self._spawn(self._tokenizers.compare(name, member.worker.url))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def __call__(
        self, model: str | None, path: bytes, fields: Mapping[str, Any]
    ) -> TokenIds | Unavailable | None:
        identity = self._registry.identify(model)
        if identity is None:
            return Unavailable("no_tokenizer")
        made = self._tokenizers.now(self._name(model, identity), path, fields)
        return None if made is None else _told(made, identity)

    async def ask(self, request: ParsedRequest, path: bytes) -> None:
        """Let the engine tokenise a request whose `fields` are there for it."""
        fields, request.fields = request.fields, None
        model = request.view.model
        identity = self._registry.identify(model)
        assert fields is not None
        if identity is None:  # its last worker has just left
            request.no_tokens = "no_tokenizer"
            return
        try:
            url = self._registry.eligible(model, monotonic()).workers[0].url
        except GatewayError:  # the choice that follows will meet it too
            request.no_tokens = "engine_error"
            return
        made = await self._tokenizers.ask_engine(self._name(model, identity), path, fields, url)
        take_tokens(request, _told(made, identity), fields)

    def observe(self, model: str | None, foretold_tokens: int, prompt_tokens: int) -> None:
        """An engine counted the prompt of a request whose tokens had been foretold."""
        identity = self._registry.identify(model)
        if identity is not None:
            self._tokenizers.observe_prompt_tokens(
                self._name(model, identity), foretold_tokens, prompt_tokens
            )

    def _name(self, model: str | None, identity: Identity) -> str:
        """The configured name: the request's own, an alias of it, or the base model of its adapter."""
        return model if model is not None and model in self._names else identity.model

    def gauges(self) -> Iterator[Metric]:
        yield gauge(
            "kvroute_tokenizer_ready",
            "1 for a model whose tokenizer is loaded and checked.",
            ("model",),
            [((name,), ready) for name, ready in self._tokenizers.loaded().items()],
        )
        fallbacks = CounterMetricFamily(
            "kvroute_tokenizer_template_fallbacks",
            "Chats that the fast engine of templates could not render, so that jinja2 did.",
            labels=("model",),
        )
        for name, count in self._tokenizers.template_fallbacks().items():
            fallbacks.add_metric((name,), count)
        yield fallbacks
        agreements = self._tokenizers.agreements()
        yield gauge(
            "kvroute_tokenizer_trusted",
            "1 while engines count the tokens that were foretold.",
            ("model",),
            [((name,), agreement.trusted) for name, agreement in agreements.items()],
        )
        counts = CounterMetricFamily(
            "kvroute_tokenizer_compared",
            "Prompts whose tokens were foretold and counted.",
            labels=("model", "as"),
        )
        for name, agreement in agreements.items():
            counts.add_metric((name, "right"), agreement.matches)
            counts.add_metric((name, "wrong"), agreement.mismatches)
        yield counts


def _told(made: TokenizedPrompts | Unavailable, identity: Identity) -> TokenIds | Unavailable:
    return (
        TokenIds(made.prompts, identity.model, identity.adapter)
        if isinstance(made, TokenizedPrompts)
        else made
    )


def _options(model: ModelConfig) -> TokenizerOptions:
    return TokenizerOptions(
        model.source,
        model.tokenizer,
        model.chat_template,
        model.chat_template_kwargs,
        model.engine,
        model.tokenize_timeout_s,
    )


class _WorkerKeys(httpx.Auth):
    """Each worker is asked with its own key."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        url = Endpoint.parse(str(request.url).removesuffix("/tokenize")).url
        for member in self._registry.members.values():
            if member.endpoint.url == url and member.config.api_key is not None:
                request.headers["Authorization"] = f"Bearer {member.config.api_key.get_secret_value()}"
                break
        yield request
