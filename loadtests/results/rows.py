"""A row of results: one policy on one trace at one speed over one fleet, as it is kept in JSON.

Means over seeds, with 95 % intervals; what is infinite, or nobody measured, is None. A figure's name is its
path in the row: "goodput", "ttft_ms.p99", "hit_by_tier.cpu".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

Share = Annotated[float, Meta(ge=0, le=1)]
NotNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Name = Annotated[str, Meta(min_length=1, max_length=500)]
Quantiles = Annotated[list[float | None], Meta(max_length=1001)]
Bounds = tuple[float, float]
Span = tuple[str | int, float, float | None, float | None, float | None]


class Spread(Struct, frozen=True, gc=False):
    """Of one latency, in milliseconds. Failures are infinite in the percentiles and not part of the mean."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class Limits(Struct, frozen=True, gc=False):
    """What `goodput` is told by."""

    ttft_s: Positive
    tpot_s: Positive


class Paired(Struct, frozen=True):
    """Mean differences to another policy over the same requests, seed by seed, with their 95 % intervals."""

    against: str
    figures: dict[str, tuple[float | None, float | None, float | None]] = {}
    """Mean, low and high; the bounds are None where there are too few seeds."""


class Load(Struct, frozen=True):
    """Requests inside each worker over time, warm-up included."""

    at_s: list[float] = []
    requests: Sequence[Sequence[float | None]] = []
    """A list per worker, as long as `at_s`."""
    workers: list[str] = []
    """Their ids; none where nobody told."""

    def __post_init__(self) -> None:
        for worker, values in enumerate(self.requests):
            if len(values) != len(self.at_s):
                raise ValueError(f"load.requests[{worker}]: {len(values)} values for {len(self.at_s)} times")


class Gantt(Struct, frozen=True):
    """The requests of one stretch, about the moment of most load; seconds since the run began."""

    from_s: float = 0.0
    to_s: float = 0.0
    spans: Sequence[Span] = []
    """Worker (its place in `Load.requests`), arrival, begin of prefill, first token, end; by arrival."""


class Series(Struct, frozen=True):
    """Of one seed, the first, for plots: bounded in size. What is infinite is None."""

    ttft_ms: Quantiles = []
    """101 quantiles, of 0 % to 100 %."""
    itl_ms: Quantiles = []
    load: Load = Load()
    gantt: Gantt = Gantt()
    predicted_ms: Sequence[tuple[float | None, float | None]] = []
    """(foretold, actual) time from the choice of a worker to the first token."""


class Row(Struct, frozen=True, kw_only=True):
    """The first ten fields are what every row has; others are None or empty where nobody measured."""

    policy: Name
    speed: Positive
    workers: Annotated[int, Meta(gt=0)] | Name
    """How many, or how many prefill and decode apart: "6P2D"."""
    goodput: Share | None
    ttft_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread
    token_hit_rate: Share | None
    """Prompt tokens that no engine had to compute. Of bytes it is the same: a token's KV has one size."""
    rejected: Share | None
    ci95: dict[str, Bounds | None]
    """Bootstrap interval of the mean over seeds, per figure; None for one seed."""
    options: dict[str, Any] = {}
    """Of the policy, as given."""
    trace: Name = "unnamed"
    source: Name = "simulated"
    """"simulated" or "live"."""
    seeds: Annotated[int, Meta(gt=0)] = 1
    offered: NotNegative | None = None
    """Requests that count, per seed; the same for `offered_per_s`, and every sum below."""
    offered_per_s: NotNegative | None = None
    warm_up: Share | None = None
    """Share of the requests, the first, that does not count."""
    limits: Limits | None = None
    goodput_by_limit: dict[str, Share | None] = {}
    itl_ms: Spread = Spread()
    sent_after_ms: Spread = Spread()
    """From when a request was due to when it was sent: time held, or, live, how late the schedule ran."""
    request_hit_rate: Share | None = None
    hit_by_tier: dict[str, Share | None] = {}
    """Of the prompt tokens: gpu, cpu, disk, peer."""
    prefix_loaded_tokens: NotNegative | None = None
    """Per request, loaded from below the GPU or from a peer: always the prefix's next ones."""
    prefill_tokens_skipped: NotNegative | None = None
    gpu_seconds_saved: NotNegative | None = None
    """By the engine's own time model, of one prefill alone; an engine of several GPUs counts as one."""
    failed: Share | None = None
    """Timed out, cut off, refused by an engine: all but what admission rejected."""
    retries: NotNegative | None = None
    """Per request."""
    preemptions: NotNegative | None = None
    peak_to_mean: NotNegative | None = None
    """Requests inside the fullest worker, on the average over time, to the mean of all."""
    decision_us: NotNegative | None = None
    """CPU time of the router per decision."""
    little: NotNegative | None = None
    """L / (lambda W): 1 by Little's law."""
    little_reason: str | None = None
    """Why it is not told."""
    setting: dict[str, Any] = {}
    """Whatever else the run was made with."""
    paired: Paired | None = None
    series: Series = Series()

    def figure(self, name: str) -> float | None:
        """By its name."""
        value: Any = self
        for part in name.split(".", 1):
            value = value.get(part) if isinstance(value, dict) else getattr(value, part)
        return None if value is None else float(value)
