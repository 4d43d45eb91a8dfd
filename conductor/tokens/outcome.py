"""What asking for the token ids of a request gives: the ids, or one reason of a fixed set."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

Reason = Literal[
    "no_tokenizer",
    "loading",
    "load_failed",
    "route",
    "empty",
    "shape",
    "stateful",
    "truncated",
    "template",
    "multimodal",
    "too_long",
    "too_deep",
    "busy",
    "engine_error",
    "engine_timeout",
    "mismatch",
]
REASONS: Final[dict[Reason, str]] = {
    "no_tokenizer": "the model has no tokenizer configured",
    "loading": "its tokenizer is still being loaded and checked",
    "load_failed": "its tokenizer could not be loaded; it is tried again",
    "route": "this API route's prompt is not known how to be made by this engine",
    "empty": "there is no prompt, or an empty one",
    "shape": "the engine would refuse the request, or reads a field in a way that is not reproduced",
    "stateful": "the prompt depends on what the engine keeps (an earlier response)",
    "truncated": "the prompt is cut to a length that only the engine knows",
    "template": "there is no chat template, it refuses the conversation, or the request brings its own",
    "multimodal": "images, audio or video: what they become depends on the engine's processor",
    "too_long": "the prompt is longer than what is tokenised",
    "too_deep": "its tools or other objects lie too deep in one another",
    "busy": "too many long prompts, or questions to engines, are under way",
    "engine_error": "the engine's own endpoint failed or answered something else",
    "engine_timeout": "the engine's own endpoint was not in time",
    "mismatch": "what the engine counted has lately not been what was predicted",
}
"""Why exact ids were not possible. A fixed set, fit for a metric label."""


class TokenizedPrompts(Struct, frozen=True, gc=False):
    """The prompts of one request, in the engine's order: packed little-endian uint32 token ids each."""

    prompts: tuple[bytes, ...]

    @property
    def tokens(self) -> int:
        """Over all prompts of the request: what the engine reports as its prompt tokens."""
        return sum(map(len, self.prompts)) // 4


class Unavailable(Struct, frozen=True, gc=False):
    """No exact ids for this request; whoever asked falls back to approximate keys and counts the reason."""

    reason: Reason
    predicted_tokens: int | None = None
    """With "mismatch" on some requests: what would have been predicted, to be observed all the same."""


class NotExact(Exception):
    """Raised inside this package where a request leaves what is reproduced exactly."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(REASONS[reason])
        self.reason: Final = reason
