"""The nouns every layer speaks.

Units live in names: `_s` seconds, `_tokens`, `_bytes`. Everything here is frozen except `WorkerLoad`,
which the gateway charges in place (see there). What is made for every request is a frozen `Struct`: made in
a tenth of a frozen dataclass's time, and (`gc=False`, it takes part in no cycle) no work for the collector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from msgspec import Struct


class Role(StrEnum):
    """What a worker may be asked to do."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class EngineKind(StrEnum):
    """The dialect a worker speaks; `openai` is any server of the OpenAI API that is neither of the others."""

    VLLM = "vllm"
    SGLANG = "sglang"
    OPENAI = "openai"


class KeyMode(StrEnum):
    """How prompt keys were made: from the engine's token ids, or from the prompt's bytes (approximate)."""

    TOKENS = "tokens"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Worker:
    """One incarnation of an engine behind a URL. A worker that leaves and returns is another `Worker`."""

    id: str
    """Unique for the life of the gateway, never reused: the URL's slug and a counter."""
    url: str
    role: Role = Role.BOTH
    engine: EngineKind = EngineKind.OPENAI
    models: tuple[str, ...] = ()
    """Names it serves, adapters included; empty while unknown, which means "any"."""
    block_size_tokens: int | None = None
    data_parallel_size: int = 1

    def serves(self, model: str | None) -> bool:
        """True when a request for `model` may go here; None means the request names no model."""
        return model is None or not self.models or model in self.models


@dataclass(slots=True)
class WorkerLoad:
    """What a worker is carrying now.

    Mutable on purpose: the gateway charges and releases it in the same synchronous step as the choice,
    so a policy never reads a stale copy. Policies only read it.
    """

    requests: int = 0
    """Leases charged here and not yet released, those of other gateway replicas included; never negative."""
    pending_prefill_tokens: int = 0
    """Estimated prompt tokens of those leases that have not answered their first byte."""
    reported_running: int | None = None
    """From the engine's own metrics; None is unknown (never polled, or the sample is too old)."""
    reported_waiting: int | None = None
    kv_usage_ratio: float | None = None


class PromptKeys(Struct, frozen=True, gc=False):
    """Chained keys of a prompt's full blocks, first block first."""

    mode: KeyMode
    keys: Sequence[int]
    """64-bit; key i covers blocks 0..i, so equal keys mean equal prefixes."""
    block_tokens: int
    """Tokens per block; in byte mode an estimate."""
    prompt_tokens: int
    """Length of the whole prompt, tail included; in byte mode an estimate."""


class Tier(IntEnum):
    """Where a block lies, nearest first."""

    GPU = 0
    CPU = 1
    DISK = 2


class Trust(StrEnum):
    """How far the index of one worker may be believed."""

    EXACT = "exact"
    """Its KV events are complete: what is not confirmed is not there."""
    APPROXIMATE = "approximate"
    """No events, or not all of them: what was routed there is believed for as long as it is remembered."""
    LOAD_ONLY = "load_only"
    """What is known of it has proved wrong: it is judged by its load alone."""


class PrefixMatch(Struct, frozen=True, gc=False):
    """The longest contiguous prefix of one prompt that one worker is thought to hold, in tokens."""

    tokens: int = 0
    """The best estimate over all tiers: the longer of what is confirmed and what is predicted."""
    gpu_tokens: int = 0
    """Confirmed in the GPU alone."""
    cpu_tokens: int = 0
    """Confirmed in GPU or CPU memory."""
    confirmed_tokens: int = 0
    """Confirmed in any tier."""
    predicted_tokens: int = 0
    """Routed there and not yet confirmed, or not to be confirmed by events at all."""
    dp_rank: int | None = None
    """The data-parallel rank that holds it; None where the worker has only one."""


NO_MATCH = PrefixMatch()


class RequestView(Struct, frozen=True, gc=False):
    """What routing knows of a request, parsed once; the body itself is forwarded untouched."""

    model: str | None = None
    session_id: str | None = None
    prompt_tokens: int = 0
    """Estimated where no tokenizer is at hand; 0 is unknown."""
    stream: bool = False


class Fleet(Struct, frozen=True, gc=False):
    """A snapshot of the workers that may take one request. The sequences are parallel and not empty."""

    now_s: float
    workers: Sequence[Worker]
    loads: Sequence[WorkerLoad]
    matches: Sequence[PrefixMatch] = ()
    """Parallel to `workers`; empty when the prompt has no keys or no policy asked for them."""
    held_blocks: Sequence[int] = ()
    """Blocks the index knows per worker, parallel to `workers`; empty as `matches` is."""


class Candidate(Struct, frozen=True, gc=False):
    """Who prefills and who decodes; the same worker twice when the request is not split."""

    prefill: Worker
    decode: Worker


class Decision(Struct, frozen=True, gc=False):
    """A policy's choice, with a short reason from a small fixed set (it becomes a metric label)."""

    candidate: Candidate
    reason: str
    matched_tokens: int = 0

    @classmethod
    def whole(cls, worker: Worker, reason: str, matched_tokens: int = 0) -> Decision:
        """One worker does both prefill and decode."""
        return cls(Candidate(worker, worker), reason, matched_tokens)


class Rejection(Struct, frozen=True, gc=False):
    """No worker should take this now; the client is told when to come back."""

    reason: str
    retry_after_s: float = 1.0


class Outcome(Struct, frozen=True, gc=False):
    """How one attempt on one worker ended, for calibration, metrics and logs."""

    worker: Worker
    status: int | None
    """Upstream status; None when no response head arrived."""
    failure: str | None = None
    """None on success, else one of the gateway's failure classes."""
    ttft_s: float | None = None
    e2e_s: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    matched_tokens: int = 0
    """What the index promised at choice."""
