"""llm-d's way with a shared store: decode first, and prefill only where decode lacks the prompt.

The field `cache_hit_threshold` and the finish reason `cache_threshold` are those of the proposal to vLLM
(RFC 24256) that llm-d's engines have; vLLM 0.32 has not, and its decode workers do every request whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from kvroute.config_pd import PdConfig
from kvroute.router.pd.connector import Leg, Pair
from kvroute.router.pd.connectors.fields import THRESHOLD
from kvroute.router.pd.connectors.shared_storage import SharedStorageConnector

DECLINED = "cache_threshold"
ROUTES = frozenset({b"/v1/chat/completions", b"/v1/completions"})
"""Whose answers have a finish reason as the engine spells it."""


class DecodeFirstConnector(SharedStorageConnector):
    """As a shared store, with a question before it. Later legs say 0, whatever the engine's own default."""

    client_fields: ClassVar[frozenset[str]] = frozenset({THRESHOLD})
    declines_by: ClassVar[bytes] = f'"{DECLINED}"'.encode()
    whole_fields: ClassVar[Mapping[str, Any]] = {THRESHOLD: 0}

    def __init__(self, config: PdConfig) -> None:
        super().__init__(config)
        self._threshold = config.cache_threshold

    def first_leg(self, path: bytes, pair: Pair) -> Leg | None:
        """Not with several prompts: some could be declined while others are answered."""
        if path not in ROUTES or pair.prompts is not None:
            return None
        return _with(super().decode_leg(pair, None), self._threshold)

    def declined(self, event: Mapping[str, Any]) -> bool | None:
        """A chat stream begins with an event that has but a role: that tells nothing."""
        choices = event.get("choices")
        if not isinstance(choices, list):
            return False  # an error, or nothing that is known: not for the connector to judge
        found = [choice for choice in choices if isinstance(choice, dict)]
        if any(choice.get("finish_reason") == DECLINED for choice in found):
            return True
        return False if any(map(_says_something, found)) else None

    def prefill_leg(self, pair: Pair) -> Leg:
        return _with(super().prefill_leg(pair), 0)

    def decode_leg(self, pair: Pair, handoff: Any) -> Leg:
        return _with(super().decode_leg(pair, handoff), 0)


def _with(leg: Leg, threshold: float) -> Leg:
    return msgspec.structs.replace(leg, fields={THRESHOLD: threshold})


def _says_something(choice: Mapping[str, Any]) -> bool:
    """Whether it has an end, text, or a delta with more than a role."""
    if choice.get("finish_reason") is not None or choice.get("text"):
        return True
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(value for name, value in delta.items() if name != "role")
