"""What the caches saved, and how well it was foretold.

    request_hit_rate = requests that reused any prefix / requests
    token_hit_rate   = prompt tokens reused / prompt tokens
    byte_hit_rate    = KV bytes reused / KV bytes of the prompts

A hundred small hits may be worth less than a long one, so tokens skipped and GPU seconds saved stand beside
the rates. The seconds are not in proportion to the tokens: with a the time of a token and c that of a pair
in attention, prefilling S tokens takes a S + c S^2/2, and the S - P after a hit of P tokens take
a (S - P) + c (S^2 - P^2)/2, so that a hit saves

    a P + c P^2/2

What an engine reports is what counts; where it reports nothing, the prediction stands in and is counted so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from kvroute.clock import Clock
from kvroute.types import NO_MATCH, PrefixMatch

OTHER_MODELS = "other"
"""Takes the requests of models beyond `max_models`."""


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """What prompt tokens of a model weigh and take, on the deployment that serves it."""

    token_s: float = 0.0
    attention_s: float = 0.0
    """Per pair of a token and one before it."""
    kv_bytes_per_token: int = 0
    gpus: int = 1
    """That work on one prefill."""


@dataclass(slots=True)
class HitFigures:
    """Sums over requests; the rates are None where there is nothing to divide by."""

    requests: int = 0
    hit_requests: int = 0
    prompt_tokens: int = 0
    skipped_tokens: int = 0
    """Prefill tokens that were not computed: as reported, or else as predicted."""
    gpu_tokens: int = 0
    """Of those skipped, as the index had confirmed them: in the GPU,"""
    cpu_tokens: int = 0
    """from CPU memory after them,"""
    disk_tokens: int = 0
    """from disk after those;"""
    unconfirmed_tokens: int = 0
    """and what the index had only predicted, or not known."""
    usable_tokens: int = 0
    """Contiguous prefixes predicted, as far as an engine can use them: it always computes the last token."""
    prompt_bytes: int = 0
    skipped_bytes: int = 0
    saved_gpu_s: float = 0.0
    """Estimated by `PrefillCost`; the loading is not taken off."""
    unreported_requests: int = 0
    """The engine did not say what it reused."""
    implausible_reports: int = 0
    """Reports of more than the prompt, or less than nothing, cut to what is possible."""
    compared_requests: int = 0
    """Predicted and reported; the next five are of these."""
    predicted_tokens: int = 0
    reported_tokens: int = 0
    absolute_error_tokens: int = 0
    over_predicted: int = 0
    """Requests of which more was predicted than reported."""
    under_predicted: int = 0

    @property
    def request_hit_rate(self) -> float | None:
        """0..1, or None before the first request; the same for the next two."""
        return self.hit_requests / self.requests if self.requests else None

    @property
    def token_hit_rate(self) -> float | None:
        return self.skipped_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def byte_hit_rate(self) -> float | None:
        return self.skipped_bytes / self.prompt_bytes if self.prompt_bytes else None

    @property
    def bias_tokens(self) -> float | None:
        """Mean of predicted minus reported, per request: above 0, the index promises too much."""
        compared = self.compared_requests
        return (self.predicted_tokens - self.reported_tokens) / compared if compared else None

    @property
    def mean_absolute_error_tokens(self) -> float | None:
        compared = self.compared_requests
        return self.absolute_error_tokens / compared if compared else None

    def __add__(self, other: HitFigures) -> HitFigures:
        return HitFigures(*(getattr(self, name) + getattr(other, name) for name in _NAMES))


_NAMES = tuple(field.name for field in fields(HitFigures))


@dataclass(frozen=True, slots=True)
class HitReport:
    """Of one model, or of all: since the start, and over the last `window_s`."""

    total: HitFigures
    window: HitFigures


@dataclass(slots=True)
class _Book:
    """One model's figures: `past` holds the slices that are over, `recent` those of them in the window."""

    cost: PrefillCost
    slice: int
    now: HitFigures = field(default_factory=HitFigures)
    past: HitFigures = field(default_factory=HitFigures)
    recent: deque[tuple[int, HitFigures]] = field(default_factory=deque)

    def turn(self, slice: int, slices: int) -> None:
        """Start the given slice of time, if it is a new one."""
        if slice != self.slice:
            self.past += self.now
            self.recent.append((self.slice, self.now))
            self.now, self.slice = HitFigures(), slice
        while self.recent and self.recent[0][0] <= slice - slices:
            self.recent.popleft()


class HitAccount:
    """Accounts for every request in constant time; bounded by `max_models` and the slices of the window."""

    def __init__(
        self,
        clock: Clock,
        costs: Mapping[str, PrefillCost] | None = None,
        window_s: float = 60.0,
        slices: int = 6,
        max_models: int = 64,
    ) -> None:
        """`costs` by model; what it does not name saves no seconds and has no bytes."""
        if not window_s > 0 or slices < 1 or max_models < 1:
            raise ValueError(
                "window_s must be above 0, slices and max_models at least 1; "
                f"got {window_s}, {slices}, {max_models}"
            )
        self._clock = clock
        self._costs = dict(costs or {})
        self._slices = slices
        self._slice_s = window_s / slices
        self._max_models = max_models
        self._books: dict[str, _Book] = {}

    def observe(
        self,
        model: str,
        prompt_tokens: int,
        match: PrefixMatch | None,
        block_tokens: int,
        reported_tokens: int | None,
    ) -> None:
        """A request was answered: its prompt, what the index said of the worker that prefilled it (None where
        it was not asked), and what that engine reported as cached (None where it did not)."""
        book = self._books.get(model) or self._open(model)
        slice = int(self._clock() / self._slice_s)
        if slice != book.slice:
            book.turn(slice, self._slices)
        now = book.now
        foretold = match is not None
        match = match or NO_MATCH
        usable = min(match.tokens, max(0, prompt_tokens - 1) // block_tokens * block_tokens)
        if reported_tokens is None:
            now.unreported_requests += 1
            skipped = usable
        else:
            skipped = reported_tokens
            if not 0 <= skipped <= prompt_tokens:
                now.implausible_reports += 1
                skipped = min(max(skipped, 0), prompt_tokens)
            if foretold:
                _compare(now, usable, skipped)
        now.requests += 1
        now.prompt_tokens += prompt_tokens
        now.usable_tokens += usable
        cost = book.cost
        now.prompt_bytes += prompt_tokens * cost.kv_bytes_per_token
        if skipped:
            _count_hit(now, skipped, match, cost)

    def report(self, model: str | None = None) -> HitReport:
        """Of one model, or of all together."""
        slice = int(self._clock() / self._slice_s)
        books = self._books.values() if model is None else filter(None, [self._books.get(model)])
        total, window = HitFigures(), HitFigures()
        for book in books:
            book.turn(slice, self._slices)
            total = total + book.past + book.now
            window = sum((figures for _, figures in book.recent), window + book.now)
        return HitReport(total, window)

    @property
    def models(self) -> list[str]:
        """Those that have figures of their own, and `OTHER_MODELS` once there were too many."""
        return list(self._books)

    def _open(self, model: str) -> _Book:
        if len(self._books) >= self._max_models:
            model = OTHER_MODELS
        book = self._books.get(model)
        if book is None:
            cost = self._costs.get(model, PrefillCost())
            book = self._books[model] = _Book(cost, int(self._clock() / self._slice_s))
        return book


def _compare(now: HitFigures, predicted: int, reported: int) -> None:
    error = predicted - reported
    now.compared_requests += 1
    now.predicted_tokens += predicted
    now.reported_tokens += reported
    if error > 0:
        now.over_predicted += 1
        now.absolute_error_tokens += error
    elif error:
        now.under_predicted += 1
        now.absolute_error_tokens -= error


def _count_hit(now: HitFigures, skipped: int, match: PrefixMatch, cost: PrefillCost) -> None:
    """A prefix is contiguous, so its tokens come from the GPU first, then from each tier further down."""
    in_gpu = min(skipped, match.gpu_tokens)
    in_cpu = max(in_gpu, min(skipped, match.cpu_tokens))
    confirmed = max(in_cpu, min(skipped, match.confirmed_tokens))
    now.hit_requests += 1
    now.skipped_tokens += skipped
    now.gpu_tokens += in_gpu
    now.cpu_tokens += in_cpu - in_gpu
    now.disk_tokens += confirmed - in_cpu
    now.unconfirmed_tokens += skipped - confirmed
    now.skipped_bytes += skipped * cost.kv_bytes_per_token
    now.saved_gpu_s += (cost.token_s + cost.attention_s * skipped / 2) * skipped * cost.gpus
