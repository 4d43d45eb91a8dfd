"""What is simulated: engines, their number, and what the router knows of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite

from kvroute.loadtests.mock_engine.scheduler import Scheduler
from kvroute.loadtests.mock_engine.steps import StepTimes
from kvroute.loadtests.simulator.memory import BOUNDS, Memory
from kvroute.policies.costs.links import LINKS, Link
from kvroute.policies.costs.pace import Pace
from kvroute.policies.costs.speeds import PRESETS, Speed
from kvroute.types import Role, Tier

MAX_SCALE = 1000
"""Times the preset: a run of slower engines would not end."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker dies with all it holds, and comes back empty, if at all."""

    worker: int
    at_s: float
    back_s: float | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """A fleet of engines, alike but for `worker_scales` and `worker_speeds`. Validated once; errors name the
    field.
    """

    workers: int = 8
    """With `split`, the sum of that."""
    split: tuple[int, int] | None = None
    """Prefill and decode workers, in this order, of which none does all of a request; None: every worker does
    both.
    """
    joint: bool = False
    """Whether any worker may also prefill for any other; not with `split`."""
    decode_later: bool = False
    """With `split` and a policy that chooses no pairs: whether the decode worker is chosen only when the
    prefill is over, as by Dynamo's router; else with the prefill worker, as by the gateway.
    """
    handoff: Link = LINKS["ib-400g"]
    """From prefill to decode workers: what each of them has."""
    speed: Speed = PRESETS["qwen3-32b-h200-tp2"]
    scale: float = 1.1
    """k of the platform."""
    offset_ms: float = 0.0
    """o of it, added to every step."""
    worker_scales: tuple[float, ...] = ()
    """How much slower each engine is, as a multiple of `scale`; empty: all alike. The router knows."""
    worker_speeds: tuple[Speed, ...] = ()
    """Of each engine, in place of `speed`; empty: all alike."""
    kv_tokens: int = 750_000
    """KV room of each engine."""
    memory: Memory = Memory()  # noqa: RUF009  # frozen
    """What the engines make of that room, and what they have below and beside it."""
    block_tokens: int = 512
    max_batched_tokens: int = 8192
    max_sequences: int = 256
    request_overhead_s: float = 0.0
    """Between the choice of a worker and its engine's queue: HTTP, tokenizing."""
    token_overhead_s: float = 0.0
    """Of the API for every output token; added to the times reported."""
    event_lag_s: float = 0.0
    """Until the index hears what an engine stored or removed."""
    event_loss: float = 0.0
    """Share of the batches of events that the index never hears of."""
    failures: tuple[Failure, ...] = ()
    detect_s: float = 1.0
    """Until the router knows that a worker is gone, or back."""
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
    hold_limit_s: float = 300.0
    metrics_s: float | None = 1.0
    """How often the router reads the engines' KV usage; None: never."""
    sweep_s: float | None = 0.05
    """Held requests are priced again this often although nothing was heard; None: not."""
    in_a_row: bool = True
    """Decode steps in one go; only tests do without."""
    step_times: StepTimes | None = None
    """Replaces `speed` in the engines, not in the router."""
    scheduler: type[Scheduler] = Scheduler

    def __post_init__(self) -> None:
        if self.split is not None:
            if min(self.split) < 1:
                raise ValueError(f"split must be a prefill and a decode worker at least, got {self.split}")
            if self.joint:
                raise ValueError(f"joint: none of the workers of a split ({self.split}) does both")
            object.__setattr__(self, "workers", sum(self.split))
        for name in ("workers", "kv_tokens", "block_tokens", "max_batched_tokens", "max_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("scale", "prefill_error", "decode_error", "hold_limit_s", "metrics_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in (
            "offset_ms",
            "request_overhead_s",
            "token_overhead_s",
            "event_lag_s",
            "hold_limit",
            "detect_s",
        ):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if not 0 <= self.event_loss <= 1:
            raise ValueError(f"event_loss must be a share of 0 to 1, got {self.event_loss}")
        if self.kv_tokens < self.block_tokens:
            raise ValueError(
                f"kv_tokens must hold a block of {self.block_tokens} tokens at least, got {self.kv_tokens}"
            )
        self._check_workers()
        memory = self.memory
        if self.splits and (memory.gpu_eviction in BOUNDS or memory.peer_link is not None):
            raise ValueError("memory: no bound and no peer link where prefill and decode are apart")

    def _check_workers(self) -> None:
        for scale in (self.scale, *self.worker_scales):
            if scale > MAX_SCALE:
                raise ValueError(f"scale and worker_scales must be {MAX_SCALE} at most, got {scale}")
        for name in ("worker_scales", "worker_speeds"):
            count = len(getattr(self, name))
            if count and count != self.workers:
                raise ValueError(f"{name} must be one for each of {self.workers} workers, got {count}")
            if count and self.step_times is not None:
                raise ValueError(f"{name} cannot go with step_times, which are those of all workers")
        if not all(0 < scale < float("inf") for scale in self.worker_scales):
            raise ValueError(f"worker_scales must be positive, got {self.worker_scales}")
        back_s = [0.0] * self.workers
        for failure in sorted(self.failures, key=lambda failure: failure.at_s):
            if not 0 <= failure.worker < self.workers:
                raise ValueError(f"failures: no worker {failure.worker} among {self.workers}")
            if not (isfinite(failure.at_s) and failure.at_s >= back_s[failure.worker]):
                raise ValueError(f"failures: at_s must come when the worker is there, got {failure}")
            if failure.back_s is not None and not failure.at_s < failure.back_s < float("inf"):
                raise ValueError(f"failures: back_s must be after at_s, got {failure}")
            back_s[failure.worker] = float("inf") if failure.back_s is None else failure.back_s

    @property
    def splits(self) -> bool:
        """Whether KV may go from one worker to another."""
        return self.joint or self.split is not None

    def role(self, worker: int) -> Role:
        if self.split is None:
            return Role.BOTH
        return Role.PREFILL if worker < self.split[0] else Role.DECODE

    def engine_times(self, worker: int) -> StepTimes:
        speed, scale = self._speed(worker)
        return self.step_times or speed.calibrated(scale, self.offset_ms)

    def pace(self, worker: int) -> Pace:
        """What the router knows of one engine at first."""
        wrong = self.prefill_error
        speed, scale = self._speed(worker)
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
        links = {Tier.CPU: self.memory.cpu_link, Tier.DISK: self.memory.disk_link}
        return Pace(known, scale, scale, self.request_overhead_s, self.kv_tokens, links=links)

    def _speed(self, worker: int) -> tuple[Speed, float]:
        """Preset, and k."""
        speed = self.worker_speeds[worker] if self.worker_speeds else self.speed
        return speed, self.scale * (self.worker_scales[worker] if self.worker_scales else 1.0)
