"""The engine of Dynamo's mocker, whose results on public traces are exactly known: a check of the simulator.

step ms = prefill(T) + decode(p)
prefill = 4.209989e-7 T^2 + 1.518344e-2 T + 16.50142     T new tokens in the step, if any
decode  = max(1, -25.74 p^2 + 54.01 p + 5.74)            p = KV tokens attended to / capacity, if any decode
"""

from __future__ import annotations

from dataclasses import dataclass

KV_BLOCKS = 16_384
BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class MiniTimes:
    """Step times by the mocker's polynomials (ai-dynamo/dynamo, lib/mocker)."""

    kv_tokens: int = KV_BLOCKS * BLOCK_TOKENS

    def step_s(self, prefill_tokens: int, attention: float, decodes: int, context_tokens: float) -> float:
        """Seconds; what the prefill attends to does not matter."""
        step_ms = 0.0
        if prefill_tokens:
            step_ms += (4.209989e-7 * prefill_tokens + 1.518344e-2) * prefill_tokens + 16.50142
        if decodes:
            used = context_tokens / self.kv_tokens
            step_ms += max(1.0, (-25.74 * used + 54.01) * used + 5.74)
        return step_ms / 1e3
