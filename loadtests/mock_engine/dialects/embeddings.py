"""POST /v1/embeddings: a prefill, and a short vector that depends on the tokens alone."""

from __future__ import annotations

import zlib

import orjson

from kvroute.loadtests.mock_engine.dialects.base import Body, Call, Defaults, Dialect, Part, ScriptBase
from kvroute.loadtests.mock_engine.dialects.completions import prompt_tokens
from kvroute.loadtests.mock_engine.wire import invalid, rejected

_DIMENSIONS = 8


def parse(body: Body, defaults: Defaults) -> Call:
    if body.get("input") is None:
        raise invalid("1 validation error:\n  ('body', 'input'): Field required", "input")
    parts = [Part(tokens) for tokens in prompt_tokens(body["input"])]
    for part in parts:
        if not 0 < len(part.tokens) < defaults.max_tokens:
            raise rejected(f"The prompt must have 1 to {defaults.max_tokens - 1} tokens.", "input")
    return Call(body.get("model") or defaults.model, parts)


class EmbeddingScript(ScriptBase):
    """Never streamed."""

    def _vector(self, part: Part) -> list[float]:
        digest = zlib.crc32(part.tokens.tobytes())
        return [((digest >> (4 * i)) & 15) / 8 - 1 for i in range(_DIMENSIONS)]

    def opening(self) -> bytes:
        return b""

    def token(self, part: int, index: int) -> bytes:
        return b""

    def plain(self) -> bytes:
        call = self.call
        data = [
            {"index": index, "object": "embedding", "embedding": self._vector(part)}
            for index, part in enumerate(call.parts)
        ]
        usage = {"prompt_tokens": call.prompt_tokens, "total_tokens": call.prompt_tokens}
        return orjson.dumps(
            {
                "id": call.id,
                "object": "list",
                "created": call.created,
                "model": call.model,
                "data": data,
                "usage": {**usage, "completion_tokens": 0, "prompt_tokens_details": None},
            }
        )


DIALECT = Dialect("/v1/embeddings", parse, EmbeddingScript, "embd-")
