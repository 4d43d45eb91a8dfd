"""POST /generate: SGLang's own API. Events repeat the text so far, as SGLang's do."""

from __future__ import annotations

import orjson

from kvroute.loadtests.mock_engine.dialects.base import (
    Body,
    Call,
    Defaults,
    Dialect,
    Part,
    ScriptBase,
    field_of,
    plan_output,
    sse,
)
from kvroute.loadtests.mock_engine.dialects.completions import prompt_tokens, token_ids
from kvroute.loadtests.mock_engine.wire import invalid


def parse(body: Body, defaults: Defaults) -> Call:
    ids, text = field_of(body, "input_ids", list), field_of(body, "text", (str, list))
    if (ids is None) == (text is None):
        raise invalid("Either text, input_ids or input_embeds should be provided.")
    sampling = field_of(body, "sampling_params", dict, {})
    if text is not None:
        prompts = prompt_tokens(text)
    else:
        prompts = prompt_tokens(ids) if ids and isinstance(ids[0], list) else [token_ids(ids)]
    parts = [Part(tokens) for tokens in prompts]
    for part in parts:
        limit = field_of(sampling, "max_new_tokens", int)
        plan_output(part, defaults, limit, field_of(sampling, "min_new_tokens", int, 0))
    stream = bool(field_of(body, "stream", bool, False))
    call = Call(body.get("model") or field_of(body, "lora_path", str) or defaults.model, parts, stream)
    call.batch = isinstance(text, list) or bool(ids and isinstance(ids[0], list))
    return call


class GenerateScript(ScriptBase):
    """Objects of text and meta_info; a list of them for a batch."""

    def _answer(self, index: int, count: int) -> Body:
        part = self.call.parts[index]
        finish: Body | None = None
        if count == part.output_tokens:
            finish = {"type": "stop", "matched": 2}
            if part.finish_reason == "length":
                finish = {"type": "length", "length": count}
        cached = part.sequence.cached_tokens if part.sequence is not None else 0
        if self.call.cached_tokens_lie is not None:
            cached = self.call.cached_tokens_lie
        answer: Body = {
            "text": self.words.text(part.start, count).decode(),
            "output_ids": self.words.tokens(part.start, count).tolist(),
            "meta_info": {
                "id": self.call.id if not self.call.batch else f"{self.call.id}_{index}",
                "finish_reason": finish,
                "prompt_tokens": len(part.tokens),
                "completion_tokens": count,
                "cached_tokens": cached or 0,
            },
        }
        return {**answer, "index": index} if self.call.batch and self.call.stream else answer

    def opening(self) -> bytes:
        return b""

    def token(self, part: int, index: int) -> bytes:
        return sse(self._answer(part, index + 1))

    def error(self, message: str) -> bytes:
        return sse({"error": {"message": message}}) + b"data: [DONE]\n\n"

    def plain(self) -> bytes:
        answers = [self._answer(i, part.output_tokens) for i, part in enumerate(self.call.parts)]
        return orjson.dumps(answers if self.call.batch else answers[0])


DIALECT = Dialect("/generate", parse, GenerateScript, "", id_field="rid")
