"""`Tokenizers`: by model, where exact token ids come from, and whether they can be relied on now."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Semaphore
from typing import Any, Literal, TypeVar

import httpx
import orjson
import structlog

from kvroute.clock import Clock, monotonic
from kvroute.conductor.tokens.agreement import Agreement, Use
from kvroute.conductor.tokens.check import check
from kvroute.conductor.tokens.engine import BUDGET_S, EngineTokenizer, agrees_with_engine
from kvroute.conductor.tokens.exact import THREAD_ABOVE_BYTES, ExactTokenizer
from kvroute.conductor.tokens.files import UnusableTokenizer, read_files
from kvroute.conductor.tokens.outcome import TokenizedPrompts, Unavailable
from kvroute.conductor.tokens.yielding import let_others_run
from kvroute.types import EngineKind

log = structlog.get_logger(__name__)

CHECK_LIMIT_S = 60.0
RETRY_FIRST_S = 5.0
RETRY_MOST_S = 600.0
THREADS = 2
MAX_WAITING = 64
"""Long prompts on their way through the threads; more have approximate keys."""
MAX_BODY_BYTES = 4 * 2**20
MAX_ADAPTERS = 10_000
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

    def __post_init__(self) -> None:
        if (self.tokenizer is None) == (self.source == "local"):
            raise ValueError(
                f"tokenizer is {self.tokenizer!r} with source {self.source!r}; "
                "a path is expected with source 'local', and with no other"
            )


T = TypeVar("T")
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
    """All models of a gateway. Belongs to one event loop; `close` it.

    `now` answers what takes little time at once, and says None where `later` must be awaited.
    """

    def __init__(
        self,
        options: Mapping[str, TokenizerOptions],
        client: httpx.AsyncClient | None = None,
        engine_budget_s: float = BUDGET_S,
        clock: Clock = monotonic,
        load: Load = load_checked,
    ) -> None:
        """`options` by served model name; `client` is needed for the source "engine" and for `compare`."""
        self._models = {
            name: _Model(given, clock) for name, given in options.items() if given.source != "bytes"
        }
        if client is None and any(model.options.source == "engine" for model in self._models.values()):
            raise ValueError("client is None; an HTTP client is expected with the source 'engine'")
        self._engine = EngineTokenizer(client, engine_budget_s) if client is not None else None
        self._adapters: Mapping[str, str] = {}
        self._load = load
        self._threads = ThreadPoolExecutor(THREADS, "tokenize") if self._models else None
        self._room = Semaphore(MAX_WAITING)

    def name_adapters(self, base_of: Mapping[str, str]) -> None:
        """Served adapter names and the model each belongs to; replaces what was named before."""
        self._adapters = dict(list(base_of.items())[:MAX_ADAPTERS])

    def base_of(self, model: str | None) -> str | None:
        """The configured name of a request's model; None has no tokenizer. No name means the only model."""
        if model is None:
            return next(iter(self._models)) if len(self._models) == 1 else None
        base = self._adapters.get(model, model)
        if base in self._models:
            return base
        before, colon, _ = base.partition(":")  # SGLang: model:adapter
        return before if colon and before in self._models else None

    def now(
        self, model: str | None, path: bytes, fields: Mapping[str, Any] | bytes
    ) -> TokenizedPrompts | Unavailable | None:
        """Ids of a request, why there are none, or None: then `later` has the answer.

        `fields` is the parsed body, or the body itself where it is too large to be parsed here.
        """
        base = self.base_of(model)
        if base is None:
            return Unavailable("no_tokenizer")
        found = self._models[base]
        if found.options.source == "local" and found.exact is None:
            return found.missing()
        if found.options.source == "engine" or isinstance(fields, bytes):
            return None
        return self._judged(found, lambda tokenizer: tokenizer.encode(path, fields))

    async def later(
        self, model: str | None, path: bytes, fields: Mapping[str, Any] | bytes, engine_url: str | None = None
    ) -> TokenizedPrompts | Unavailable:
        """For bodies above `THREAD_ABOVE_BYTES`, and for the source "engine", which needs a worker's URL."""
        base = self.base_of(model)
        if base is None:
            return Unavailable("no_tokenizer")
        found = self._models[base]
        if found.options.source == "local" and found.exact is None:
            return found.missing()
        if (use := found.agreement.use()) is Use.NONE:
            return Unavailable("mismatch")
        return _judge(use, await self._made(found, path, fields, engine_url))

    def _judged(
        self, found: _Model, make: Callable[[ExactTokenizer], TokenizedPrompts | Unavailable]
    ) -> TokenizedPrompts | Unavailable:
        if (use := found.agreement.use()) is Use.NONE:
            return Unavailable("mismatch")
        assert found.exact is not None
        return _judge(use, make(found.exact))

    async def _made(
        self, found: _Model, path: bytes, fields: Mapping[str, Any] | bytes, engine_url: str | None
    ) -> TokenizedPrompts | Unavailable:
        if isinstance(fields, bytes) and len(fields) > MAX_BODY_BYTES:
            return Unavailable("too_long")
        if found.exact is not None:
            return await self._on_thread(_encode, found.exact, path, fields)
        if self._engine is None or engine_url is None:
            return Unavailable("engine_error")
        parsed = await self._on_thread(_parsed, fields) if isinstance(fields, bytes) else fields
        return (
            parsed if isinstance(parsed, Unavailable) else await self._engine.encode(engine_url, path, parsed)
        )

    async def _on_thread(self, function: Callable[..., T], *arguments: Any) -> T | Unavailable:
        """Room is given back when the work has ended, which a caller that is cancelled does not wait for."""
        if self._threads is None or not self._room.acquire(blocking=False):
            return Unavailable("busy")
        work = self._threads.submit(function, *arguments)
        work.add_done_callback(lambda _: self._room.release())
        return await asyncio.wrap_future(work)

    def observe_prompt_tokens(self, model: str | None, predicted: int, reported: int) -> None:
        """What an engine reported for a request whose `tokens` (or `predicted_tokens`) were known before."""
        if (base := self.base_of(model)) is None:
            return
        agreement = self._models[base].agreement
        if agreement.observe_prompt_tokens(predicted, reported):
            event = "token_predictions_trusted" if agreement.trusted else "token_predictions_distrusted"
            log.warning(event, model=base, predicted=predicted, reported=reported)

    async def compare(self, model: str | None, engine_url: str) -> bool | None:
        """Ask an engine that serves `model` for some ids, and distrust predictions that differ.

        None where nothing could be compared: another source, no client, not loaded, or no answer in time.
        """
        base = self.base_of(model)
        if base is None or self._engine is None or (exact := self._models[base].exact) is None:
            return None
        same = await agrees_with_engine(exact, self._engine, engine_url, model)
        if same is False:
            self._models[base].agreement.distrust()
            log.warning("token_predictions_distrusted", model=base, engine=engine_url)
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

    def close(self) -> None:
        """Idempotent. Does not wait for prompts under way."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def needs_later(body_bytes: int) -> bool:
    """Whether a body of this size is for `later`: it would hold the event loop for more than some 2 ms."""
    return body_bytes > THREAD_ABOVE_BYTES


def _judge(use: Use, made: TokenizedPrompts | Unavailable) -> TokenizedPrompts | Unavailable:
    if use is Use.PROBE and isinstance(made, TokenizedPrompts):
        return Unavailable("mismatch", made.tokens)
    return made


def _encode(
    exact: ExactTokenizer, path: bytes, fields: Mapping[str, Any] | bytes
) -> TokenizedPrompts | Unavailable:
    parsed = _parsed(fields) if isinstance(fields, bytes) else fields
    let_others_run()
    return parsed if isinstance(parsed, Unavailable) else exact.encode(path, parsed)


def _parsed(body: bytes) -> Mapping[str, Any] | Unavailable:
    """An object. What orjson refuses (NaN, lone surrogates) an engine's own parser may take."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            parsed = json.loads(body)
        except (ValueError, RecursionError):
            parsed = None
    return parsed if isinstance(parsed, dict) else Unavailable("shape")
