"""How long an engine step takes: coefficients fitted to public profiling tables, per model and GPU.

    step_ms = k [ max(F, a + b (C+B), d0 + d1 B) + c sum n (P + n/2) + d2 sum ctx ] + o     C > 0
    step_ms = k [ d0 + d1 B + d2 sum ctx ] + o                                               C = 0

C prefill tokens and B decodes in the step, n new tokens after P cached ones per prefill chunk, ctx the
tokens each decode attends to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Speed:
    """One row of the table, with the two constants that calibrate a platform. Times in milliseconds."""

    floor_ms: float
    base_ms: float
    token_ms: float
    attention_ms: float
    decode_base_ms: float
    decode_sequence_ms: float
    decode_context_ms: float
    kv_tokens: int
    """Tokens of KV cache the deployment has room for."""
    kv_bytes_per_token: int
    scale: float = 1.0
    """k: multiplies every step."""
    offset_ms: float = 0.0
    """o: added to every step."""

    def step_s(self, prefill_tokens: int, attention: float, decodes: int, context_tokens: float) -> float:
        """Seconds one step takes; `attention` is the sum of n (P + n/2) over its prefill chunks."""
        decode_ms = self.decode_base_ms + self.decode_sequence_ms * decodes
        if prefill_tokens:
            linear_ms = self.base_ms + self.token_ms * (prefill_tokens + decodes)
            step_ms = max(self.floor_ms, linear_ms, decode_ms) + self.attention_ms * attention
        else:
            step_ms = decode_ms
        step_ms += self.decode_context_ms * context_tokens
        return (self.scale * step_ms + self.offset_ms) / 1e3

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Seconds to prefill `new_tokens` alone after `cached_tokens` already held."""
        linear_ms = max(self.floor_ms, self.base_ms + self.token_ms * new_tokens)
        return (linear_ms + self.attention_ms * new_tokens * (cached_tokens + new_tokens / 2)) / 1e3

    def marginal_prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Seconds that `new_tokens` add to a step that runs anyway: no floor, no base. For a price."""
        attended = cached_tokens + new_tokens / 2
        return (self.token_ms + self.attention_ms * attended) * new_tokens / 1e3

    def decode_s(self, decodes: int, context_tokens: float) -> float:
        """Seconds of a step that only decodes, for that many sequences over that much context in all."""
        return self.step_s(0, 0.0, decodes, context_tokens)

    def block_s(self, depth: int, block_tokens: int) -> float:
        """Seconds that one more block adds to a prefill, after `depth` blocks."""
        attended = block_tokens * (depth * block_tokens + block_tokens / 2)
        return self.scale * (self.token_ms * block_tokens + self.attention_ms * attended) / 1e3

    def calibrated(self, scale: float, offset_ms: float) -> Speed:
        """The same row on another platform, for simulated steps: prices take a `Pace` for that."""
        return replace(self, scale=scale, offset_ms=offset_ms)


PRESETS: dict[str, Speed] = {
    "llama-3.1-8b-h100-tp1": Speed(7.42, 1.94, 0.01975, 8.09e-7, 6.43, 0.0102, 4.25e-5, 432_992, 131_072),
    "llama-3.1-8b-h200-tp1": Speed(5.49, 2.29, 0.01914, 8.30e-7, 4.96, 0.0107, 3.00e-5, 882_732, 131_072),
    "qwen3-32b-h100-tp2": Speed(18.37, 4.65, 0.04967, 1.62e-6, 13.61, 0.0257, 4.26e-5, 301_810, 262_144),
    "qwen3-32b-h200-tp2": Speed(13.64, 7.90, 0.04536, 1.72e-6, 10.80, 0.0233, 3.01e-5, 751_550, 262_144),
    "llama-3-70b-h100-tp8": Speed(11.44, 7.92, 0.03753, 5.14e-7, 10.00, 0.0233, 1.35e-5, 1_338_649, 327_680),
    "llama-3-70b-h200-tp4": Speed(13.99, 5.70, 0.05981, 1.05e-6, 12.26, 0.0307, 1.88e-5, 1_173_601, 327_680),
    "llama-3-70b-a100-tp8": Speed(19.88, 13.30, 0.09986, 1.76e-6, 17.42, 0.0676, 2.65e-5, 1_338_649, 327_680),
}
"""By preset name: model, GPU, tensor parallel size."""
