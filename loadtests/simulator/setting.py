"""What is simulated: engines, their number, and what the router knows of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvroute.loadtests.mock_engine.scheduler import Scheduler
from kvroute.loadtests.mock_engine.steps import StepTimes
from kvroute.policies.costs.pace import Pace
from kvroute.policies.costs.speeds import PRESETS, Speed


@dataclass(frozen=True, slots=True)
class Setting:
    """A fleet of equal engines. Validated once; errors name the field."""

    workers: int = 8
    speed: Speed = PRESETS["qwen3-32b-h200-tp2"]
    scale: float = 1.1
    """k of the platform."""
    offset_ms: float = 0.0
    """o of it, added to every step."""
    kv_tokens: int = 750_000
    """KV room of each engine."""
    block_tokens: int = 512
    max_batched_tokens: int = 8192
    max_sequences: int = 256
    request_overhead_s: float = 0.0
    """Between the choice of a worker and its engine's queue: HTTP, tokenizing."""
    token_overhead_s: float = 0.0
    """Of the API for every output token; added to the times reported."""
    event_lag_s: float = 0.0
    """Until the index hears what an engine stored or removed."""
    keeps_output: bool = False
    """Whether full blocks of generated tokens stay cached, as in vLLM; no prompt here ever repeats them, so
    they only take room. Without, that room is free once a request ends.
    """
    predicts: bool = True
    """Whether a prompt just routed counts as held until events have come, as in the gateway."""
    prefill_error: float = 1.0
    """What the router's preset makes of prefill, as a multiple of the truth; the same for decode steps."""
    decode_error: float = 1.0
    learns: bool = False
    """Whether answers correct the router's paces, as in the gateway; they begin at the bare preset."""
    hold_limit: int = 1024
    hold_limit_s: float = 60.0
    sweep_s: float | None = None
    """Held requests are priced again this often although nothing was heard; None: not."""
    in_a_row: bool = True
    """Decode steps in one go; only tests do without."""
    step_times: StepTimes | None = None
    """Replaces `speed` in the engines, not in the router."""
    scheduler: type[Scheduler] = Scheduler

    def __post_init__(self) -> None:
        for name in ("workers", "kv_tokens", "block_tokens", "max_batched_tokens", "max_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("scale", "prefill_error", "decode_error", "hold_limit_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("offset_ms", "request_overhead_s", "token_overhead_s", "event_lag_s", "hold_limit"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.kv_tokens < self.block_tokens:
            raise ValueError(
                f"kv_tokens must hold a block of {self.block_tokens} tokens at least, got {self.kv_tokens}"
            )

    @property
    def engine_times(self) -> StepTimes:
        return self.step_times or self.speed.calibrated(self.scale, self.offset_ms)

    def pace(self) -> Pace:
        """What the router knows of one engine at first."""
        wrong, speed = self.prefill_error, self.speed
        known = replace(
            speed,
            floor_ms=speed.floor_ms * wrong,
            base_ms=speed.base_ms * wrong,
            token_ms=speed.token_ms * wrong,
            attention_ms=speed.attention_ms * wrong,
            decode_base_ms=speed.decode_base_ms * self.decode_error,
            decode_sequence_ms=speed.decode_sequence_ms * self.decode_error,
            decode_context_ms=speed.decode_context_ms * self.decode_error,
        )
        return Pace(known, self.scale, self.scale, self.request_overhead_s, self.kv_tokens)
