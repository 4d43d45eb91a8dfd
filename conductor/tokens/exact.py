"""`ExactTokenizer`: the ids an engine will prefill for a request, of one model, on any API route."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jinja2
import structlog

from kvroute.conductor.keys import TOKEN_ID_BYTES, pack_ids
from kvroute.conductor.tokens import sglang, vllm
from kvroute.conductor.tokens.call import ChatCall, Cut, FlatCall, is_deep
from kvroute.conductor.tokens.check import Verdict
from kvroute.conductor.tokens.encoder import Encoder, FastEncoder, ReferenceEncoder
from kvroute.conductor.tokens.files import TokenizerFiles
from kvroute.conductor.tokens.outcome import NotExact, TokenizedPrompts, Unavailable
from kvroute.conductor.tokens.template import ChatTemplate
from kvroute.conductor.tokens.vllm_messages import messages
from kvroute.conductor.tokens.vllm_responses import responses
from kvroute.conductor.tokens.yielding import let_others_run
from kvroute.types import EngineKind

log = structlog.get_logger(__name__)

MAX_PROMPT_CHARS = 8 * 2**20
"""Of all prompts of a request; longer ones have approximate keys."""
CACHE_BYTES = 64 * 2**20

Call = ChatCall | FlatCall


class ExactTokenizer:
    """Thread-safe. `encode` is synchronous and takes time in proportion to the prompt: 2 ms for 100 KB."""

    def __init__(
        self,
        files: TokenizerFiles,
        verdict: Verdict,
        engine: EngineKind = EngineKind.VLLM,
        template_defaults: Mapping[str, Any] = MappingProxyType({}),
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """`template_defaults` are what the server was given as its default `chat_template_kwargs`.

        Reads the vocabulary: a second of work, most of it without the GIL where fastokens is used.
        """
        self.encoder: Encoder = (
            FastEncoder(files, verdict.added, cache_bytes)
            if verdict.not_fast is None
            else ReferenceEncoder(files, verdict.added, verdict.cuts, cache_bytes)
        )
        self._engine = engine
        self._defaults = dict(template_defaults)
        self._prefix, self._suffix = pack_ids(verdict.prefix), pack_ids(verdict.suffix)
        self._templates = _compile(files, verdict)
        self._routes = self._routes_of(engine)

    def encode(self, path: bytes, fields: Mapping[str, Any]) -> TokenizedPrompts | Unavailable:
        """`fields` is the request's parsed body, which is not changed. Never raises."""
        route = self._routes.get(path)
        if route is None:
            return Unavailable("route")
        try:
            call = route(fields)
            return self._render(call) if isinstance(call, ChatCall) else self._flat(call)
        except NotExact as error:
            return Unavailable(error.reason)
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
            return Unavailable("shape")  # such as text that is not Unicode, or nested without end

    @property
    def template_fallbacks(self) -> int:
        """Renders for which jinja2 was asked after minijinja."""
        return sum(template.fallbacks for template in self._templates.values())

    def _routes_of(self, engine: EngineKind) -> dict[bytes, Callable[[Mapping[str, Any]], Call]]:
        if engine is EngineKind.SGLANG:
            return {
                b"/v1/chat/completions": lambda f: (
                    sglang.chat(f, self._template(f)) if f.get("input_ids") is None else sglang.generate(f)
                ),
                b"/v1/completions": sglang.completion,
                b"/generate": sglang.generate,
            }
        return {
            b"/v1/chat/completions": lambda f: vllm.chat(f, self._template(f), self._defaults),
            b"/v1/completions": vllm.completion,
            b"/v1/responses": lambda f: responses(f, self._template(f), self._defaults),
            b"/v1/messages": lambda f: messages(f, self._template(f), self._defaults),
            b"/v1/embeddings": vllm.embedding,
        }

    def _template(self, fields: Mapping[str, Any]) -> ChatTemplate:
        """The one for tools where the model has one and the request has some, else the default."""
        name = "tool_use" if fields.get("tools") and "tool_use" in self._templates else "default"
        if (template := self._templates.get(name)) is None:
            raise NotExact("template")
        return template

    def _render(self, call: ChatCall) -> TokenizedPrompts:
        let_others_run()
        if is_deep((call.messages, call.variables)):
            raise NotExact("too_deep")
        template = self._template(call.variables)
        text = template.render(call.messages, call.continue_final, **call.variables) + call.suffix
        let_others_run()
        return self._flat(FlatCall([text], call.add_special, call.cut))

    def _flat(self, call: FlatCall) -> TokenizedPrompts:
        if sum(map(len, call.prompts)) > MAX_PROMPT_CHARS:
            raise NotExact("too_long")
        made = [
            self._text(prompt, call) if isinstance(prompt, str) else _cut(pack_ids(prompt), call.cut)
            for prompt in call.prompts
        ]
        if not all(made):
            raise NotExact("empty")
        return TokenizedPrompts(tuple(made))

    def _text(self, text: str, call: FlatCall) -> bytes:
        ids, cut = self.encoder.encode(text), call.cut
        if not call.add_special:
            return _cut(ids, cut)
        if cut is not None and not cut.whole:
            room = cut.tokens - (len(self._prefix) + len(self._suffix)) // TOKEN_ID_BYTES
            if room < 1:
                raise NotExact("truncated")
            return self._prefix + _cut(ids, Cut(room, cut.side, whole=True)) + self._suffix
        return _cut(self._prefix + ids + self._suffix, cut)


def _compile(files: TokenizerFiles, verdict: Verdict) -> dict[str, ChatTemplate]:
    compiled = {}
    for name, source in files.templates.items():
        try:
            compiled[name] = ChatTemplate(source, files.special_tokens, name in verdict.minijinja)
        except jinja2.TemplateError as error:  # requests that need it say "template"
            log.warning(
                "chat_template_failed", tokenizer=str(files.tokenizer_json), template=name, error=str(error)
            )
    return compiled


def _cut(ids: bytes, cut: Cut | None) -> bytes:
    if cut is None:
        return ids
    kept = cut.tokens * TOKEN_ID_BYTES
    return ids[-kept:] if cut.side == "left" else ids[:kept]
