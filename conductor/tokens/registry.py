"""`Tokenizers`: by model, where exact token ids come from, and whether they can be relied on now."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import structlog

from kvroute.clock import Clock, monotonic
from kvroute.conductor.tokens.agreement import Agreement, Use
from kvroute.conductor.tokens.check import check
from kvroute.conductor.tokens.engine import BUDGET_S, EngineTokenizer, agrees_with_engine
from kvroute.conductor.tokens.exact import ExactTokenizer
from kvroute.conductor.tokens.files import UnusableTokenizer, read_files
from kvroute.conductor.tokens.outcome import TokenizedPrompts, Unavailable
from kvroute.types import EngineKind

log = structlog.get_logger(__name__)

CHECK_LIMIT_S = 60.0
RETRY_FIRST_S = 5.0
RETRY_MOST_S = 600.0
FUZZ_SEED = 20_251


@dataclass(frozen=True, slots=True)
class TokenizerOptions:
    """Where the token ids of one model come from."""

    source: Literal["local", "engine", "bytes"] = "local"
    """A tokenizer of one's own; the engine's `/tokenize`; or none, byte keys."""
    tokenizer: Path | None = None
    """For "local": the model's directory, or its tokenizer.json."""
    chat_template: Path | None = None
    """A file, where the engine was given one by --chat-template."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """What the engine was given by --default-chat-template-kwargs."""
    engine: EngineKind = EngineKind.VLLM
    engine_timeout_s: float = BUDGET_S
    """For "engine": what a prompt waits for its ids before it is routed by approximate keys."""

    def __post_init__(self) -> None:
        if (self.tokenizer is None) == (self.source == "local"):
            raise ValueError(
                f"tokenizer is {self.tokenizer!r} with source {self.source!r}; "
                "a path is expected with source 'local', and with no other"
            )


Load = Callable[[TokenizerOptions], Awaitable[ExactTokenizer]]


async def load_checked(options: TokenizerOptions) -> ExactTokenizer:
    """Read, check in a child, then read the vocabulary on a thread. Raises `UnusableTokenizer`."""
    assert options.tokenizer is not None
    files = await asyncio.to_thread(read_files, options.tokenizer, options.chat_template)
    verdict = await check(files, FUZZ_SEED, CHECK_LIMIT_S)
    if verdict.not_fast is not None:
        log.warning("tokenizer_slow", tokenizer=str(options.tokenizer), reason=verdict.not_fast)
    made = (files, verdict, options.engine, options.chat_template_kwargs)
    return await asyncio.to_thread(ExactTokenizer, *made)


class _Model:
    """One model's source and its standing."""

    def __init__(self, options: TokenizerOptions, clock: Clock) -> None:
        self.options = options
        self.agreement = Agreement(clock)
        self.exact: ExactTokenizer | None = None
        self.failures = 0
        """Loads in a row that failed."""

    def missing(self) -> Unavailable:
        return Unavailable("load_failed" if self.failures else "loading")


class Tokenizers:
    """All models of a gateway.

    `now` may be called from any thread, by several at a time. All else belongs to one event loop.
    """

    def __init__(
        self,
        options: Mapping[str, TokenizerOptions],
        client: httpx.AsyncClient | None = None,
        clock: Clock = monotonic,
        load: Load = load_checked,
    ) -> None:
        """`options` by served model name; `client` is needed for the source "engine" and for `compare`."""
        self._models = {
            name: _Model(given, clock) for name, given in options.items() if given.source != "bytes"
        }
        if client is None and any(model.options.source == "engine" for model in self._models.values()):
            raise ValueError("client is None; an HTTP client is expected with the source 'engine'")
        self._engine = EngineTokenizer(client) if client is not None else None
        self._load = load

    def now(
        self, model: str, path: bytes, fields: Mapping[str, Any]
    ) -> TokenizedPrompts | Unavailable | None:
        """Ids of a request, why there are none, or None: then `ask_engine` has the answer.

        `model` is a configured name, `fields` the parsed body. Takes 2 ms for a prompt of 100 KB.
        """
        found = self._models.get(model)
        if found is None:
            return Unavailable("no_tokenizer")
        if found.options.source == "engine":
            return None
        exact = found.exact
        if exact is None:
            return found.missing()
        use = found.agreement.use()
        return _judge(use, exact.encode(path, fields)) if use is not Use.NONE else Unavailable("mismatch")

    async def ask_engine(
        self, model: str, path: bytes, fields: Mapping[str, Any], engine_url: str
    ) -> TokenizedPrompts | Unavailable:
        """The same where the source is "engine", by the worker at `engine_url`, which serves the model."""
        found = self._models.get(model)
        if found is None or found.options.source != "engine":
            return Unavailable("no_tokenizer")
        assert self._engine is not None
        use = found.agreement.use()
        if use is Use.NONE:
            return Unavailable("mismatch")
        timeout_s = found.options.engine_timeout_s
        return _judge(use, await self._engine.encode(engine_url, path, fields, timeout_s))

    def observe_prompt_tokens(self, model: str, predicted: int, reported: int) -> None:
        """What an engine reported for a request whose `tokens` (or `predicted_tokens`) were known before."""
        if (found := self._models.get(model)) is None:
            return
        agreement = found.agreement
        if agreement.observe_prompt_tokens(predicted, reported):
            event = "token_predictions_trusted" if agreement.trusted else "token_predictions_distrusted"
            log.warning(event, model=model, predicted=predicted, reported=reported)

    async def compare(self, model: str, engine_url: str) -> bool | None:
        """Ask an engine that serves `model` for some ids, and distrust predictions that differ.

        None where nothing could be compared: another source, no client, not loaded, or no answer in time.
        """
        found = self._models.get(model)
        if found is None or self._engine is None or found.exact is None:
            return None
        same = await agrees_with_engine(found.exact, self._engine, engine_url, model)
        if same is False:
            found.agreement.distrust()
            log.warning("token_predictions_distrusted", model=model, engine=engine_url)
        return same

    def agreements(self) -> Mapping[str, Agreement]:
        """By model: matches, mismatches and trust, for metrics."""
        return {name: model.agreement for name, model in self._models.items()}

    def loaded(self) -> Mapping[str, bool]:
        """By model with a tokenizer of its own, whether it is ready."""
        return {
            name: model.exact is not None
            for name, model in self._models.items()
            if model.options.source == "local"
        }

    def template_fallbacks(self) -> Mapping[str, int]:
        """By model with a tokenizer of its own: renders that took the slower engine of templates."""
        return {
            name: 0 if model.exact is None else model.exact.template_fallbacks
            for name, model in self._models.items()
            if model.options.source == "local"
        }

    async def run(self) -> None:
        """Load every tokenizer, one after the other, and again those that fail; ends when all are there."""
        delay_s = RETRY_FIRST_S
        while missing := [name for name, ready in self.loaded().items() if not ready]:
            for name in missing:
                await self._load_one(name, self._models[name])
            if all(self.loaded().values()):
                return
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, RETRY_MOST_S)

    async def _load_one(self, name: str, model: _Model) -> None:
        try:
            model.exact = await self._load(model.options)
        except Exception as error:  # whatever is in the files: the gateway goes on without them
            model.failures += 1
            kind = "" if isinstance(error, UnusableTokenizer) else type(error).__name__
            log.warning(
                "tokenizer_failed", model=name, failures=model.failures, error=f"{kind} {error}".strip()
            )
            return
        model.failures = 0
        log.info("tokenizer_ready", model=name, encoder=model.exact.encoder.name)


def _judge(use: Use, made: TokenizedPrompts | Unavailable) -> TokenizedPrompts | Unavailable:
    if use is Use.PROBE and isinstance(made, TokenizedPrompts):
        return Unavailable("mismatch", made.tokens)
    return made
