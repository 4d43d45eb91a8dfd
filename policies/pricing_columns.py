"""The prices of `pricing` for a large fleet, by numpy: a column for each quantity, a row for each worker.

What a row holds is worked out when a worker's books or pace change, which few do between two decisions. The
formulas are those of `price_sides`, rearranged so that little is left for each decision: the two differ by
rounding alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from math import inf
from operator import ne
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from kvroute.load import PREFILL_SHARE_TAU_S, WorkerLoad
from kvroute.policies.costs.pace import Pace
from kvroute.policies.pricing import (
    BUSY_PREFILL_SHARE,
    CHUNK_TOKENS,
    MAX_PREFILL_SHARE,
    REQUEST_S,
    Floats,
    Halves,
    Side,
    Weights,
    cheapest_source,
    price_one,
)
from kvroute.types import Fleet, FoundMatches, PrefixMatch, RequestView

MIN_WORKERS = 48
"""From here on it takes less time than `price_sides`, the rows that have changed included."""
MAX_FLEETS = 8
"""Whose columns are kept: one for each model asked for in turn."""

Value = TypeVar("Value", float, Floats)


class _Row(NamedTuple, Generic[Value]):
    """What prices need of one worker, or of all: seconds as its pace corrects them."""

    scale: Value
    token_s: Value
    """Per uncached token; the next two are what a prefill takes besides, and at least, on an idle worker."""
    base_s: Value
    floor_s: Value
    attention_s: Value
    """Per uncached token and twice the tokens it attends to."""
    queue_s: Value
    """Wait before the prefill, without what is promised, the head's progress and the step that it shares."""
    head_since_s: Value
    head_s: Value
    pending_tokens: Value
    behind_s: Value
    """What those decoding add to the steps of prefills, per token of those ahead and its own."""
    share: Value
    """Of time spent prefilling, as of `share_at`, in time constants of its fading."""
    share_at: Value
    step_s: Value
    """A decode step with this request in it, but for its context."""
    context_s: Value
    """Per token of that."""
    kv_room_tokens: Value
    kv_used_tokens: Value
    kv_over_tokens: Value
    decodes: Value
    prefilling: Value
    slower_s: Value
    """What this request adds to the steps of others: by being there, and per token of context."""
    slower_context_s: Value


def _row(load: WorkerLoad, pace: Pace) -> _Row[float]:
    speed, scale = pace.speed, pace.prefill_scale
    prefilling, requests = load.prefilling, load.requests
    decodes = requests - prefilling
    prefill_ms, step_s = scale / 1e3, pace.decode_scale / 1e3
    context_ms = speed.decode_context_ms * load.context_tokens
    queue_s = load.others_prefill_s * scale
    if prefilling:
        queue_s += prefilling * REQUEST_S + load.pending_prefill_s * scale
    elif decodes:  # half a step is still running, on average
        queue_s += (speed.decode_base_ms + speed.decode_sequence_ms * decodes + context_ms) * step_s / 2
    next_step_ms = (
        speed.decode_base_ms
        + speed.decode_sequence_ms * (requests + 1)
        + speed.decode_context_ms * load.kv_tokens
    )
    return _Row(
        scale=scale,
        token_s=speed.token_ms * prefill_ms,
        base_s=0.0 if prefilling else speed.base_ms * prefill_ms,
        floor_s=-inf if prefilling else speed.floor_ms * prefill_ms,
        attention_s=speed.attention_ms * prefill_ms / 2,
        queue_s=queue_s,
        head_since_s=load.head_since_s if prefilling else 0.0,
        head_s=load.head_prefill_s * scale if prefilling else 0.0,
        pending_tokens=load.pending_prefill_tokens,
        behind_s=(speed.token_ms * decodes + context_ms) * step_s / CHUNK_TOKENS if decodes else 0.0,
        share=load.prefilled_s * scale / PREFILL_SHARE_TAU_S,
        share_at=load.prefilled_at_s / PREFILL_SHARE_TAU_S,
        step_s=next_step_ms * step_s,
        context_s=speed.decode_context_ms * step_s,
        kv_room_tokens=pace.kv_tokens,
        kv_used_tokens=load.kv_used_tokens,
        kv_over_tokens=load.kv_used_tokens - pace.kv_tokens,
        decodes=decodes,
        prefilling=prefilling,
        slower_s=speed.decode_sequence_ms * step_s * decodes / 2,
        slower_context_s=speed.decode_context_ms * step_s * decodes / 2,
    )


class PricedColumns:
    """What all workers of a fleet would charge for one request: as `Sides`, with few `Side`s made."""

    __slots__ = (
        "_cached",
        "_fleet",
        "_halves",
        "_made",
        "_prefill_s",
        "_queue_s",
        "_request",
        "_weights",
        "total_s",
    )

    def __init__(
        self,
        request: RequestView,
        fleet: Fleet,
        weights: Weights,
        columns: tuple[Floats, Floats, Floats, Floats],
        halves: Halves | None,
    ) -> None:
        self._request, self._fleet, self._weights = request, fleet, weights
        self.total_s, self._queue_s, self._prefill_s, self._cached = columns
        self._halves = halves
        self._made: dict[int, Side] = {}

    def __getitem__(self, at: int) -> Side:
        side = self._made.get(at)
        if side is None:
            promised_s = self._fleet.promised_s[at] if self._fleet.promised_s else 0.0
            side = price_one(self._request, self._fleet, self._weights, at, promised_s)
            self._made[at] = side
        return side

    def cheapest(self, start: int) -> tuple[int, float]:
        prices = self.total_s
        at = start + int(prices[start:].argmin())
        if start and prices[:start].min() < prices[at]:
            at = int(prices[:start].argmin())
        return at, float(prices[at])

    def total_s_of(self, at: int) -> float:
        return float(self.total_s[at])

    def halves(self) -> Halves:
        assert self._halves is not None, "made for fleets with links only"
        return self._halves

    @property
    def shortest_prefill_s(self) -> float:
        return float(self._prefill_s.min())

    @property
    def shortest_queue_s(self) -> float:
        return float(self._queue_s.min())

    @property
    def longest_cached(self) -> int:
        return int(self._cached.max())


class _Columns:
    """The books and paces of one fleet, and what they come to for a request."""

    def __init__(self, loads: Sequence[WorkerLoad], paces: Sequence[Pace]) -> None:
        self._loads, self._paces = loads, paces
        self._load_versions = self._pace_versions = [-1] * len(loads)
        self._table: Floats = np.empty((len(_Row._fields), len(loads)))
        self._columns = _Row[Floats](*self._table)

    def price(self, request: RequestView, fleet: Fleet, weights: Weights) -> PricedColumns:
        """`fleet` has these loads and paces."""
        self._refresh()
        of = self._columns
        prompt, output = request.prompt_tokens, fleet.output_tokens
        cached, load_s = self._sources(prompt, fleet.matches)
        new = (prompt or 1) - cached  # the last token is always computed
        prefill_s = np.maximum(of.token_s * new + of.base_s, of.floor_s)
        prefill_s += new * (2 * (prompt or 1) - new) * of.attention_s
        queue_s = self._queue_s(fleet, new)
        share = np.exp(of.share_at - fleet.now_s / PREFILL_SHARE_TAU_S)
        share *= of.share
        np.minimum(share, MAX_PREFILL_SHARE, out=share)
        itl_s = (of.step_s + of.context_s * prompt) / (1.0 - share)

        cache_share = np.minimum(share * (weights.cache / BUSY_PREFILL_SHARE), weights.cache)
        per_prefill = cache_share.copy()
        per_prefill += 1.0 + of.decodes * weights.stall + of.prefilling * weights.ahead
        per_prefill += queue_s * (weights.delay * fleet.arrivals_per_s)
        total_s = prefill_s * per_prefill
        total_s += queue_s
        if load_s is not None:
            load_s = np.maximum(load_s - queue_s, 0.0) * (load_s > 0)
            total_s += load_s
        start_s = None if fleet.pd_links is None else total_s.copy()
        slower_s = of.slower_s + of.slower_context_s * (prompt + output / 2)
        total_s += (itl_s + slower_s) * (weights.decode * output)
        room_s = np.zeros(len(total_s))
        if of.kv_over_tokens.max() + prompt + output > 0:
            over = of.kv_used_tokens + (prompt + output) - of.kv_room_tokens
            full = over > 0
            full_s = over[full] / np.maximum(of.kv_used_tokens[full], over[full]) * output * itl_s[full]
            total_s[full] += full_s
            room_s[full] = full_s
        halves = None
        if start_s is not None:
            ahead_s = queue_s + prefill_s if load_s is None else queue_s + load_s + prefill_s
            halves = Halves(
                start_s, total_s - start_s, queue_s, ahead_s, prefill_s * cache_share, room_s, itl_s
            )
        return PricedColumns(request, fleet, weights, (total_s, queue_s, prefill_s, cached), halves)

    def _queue_s(self, fleet: Fleet, new: Floats) -> Floats:
        of = self._columns
        queue_s = of.queue_s - np.minimum(fleet.now_s - of.head_since_s, of.head_s)
        queue_s += np.maximum(of.pending_tokens + new, CHUNK_TOKENS) * of.behind_s
        if fleet.promised_s:
            queue_s += np.array(fleet.promised_s) * of.scale
        return queue_s

    def _sources(self, prompt_tokens: int, matches: Sequence[PrefixMatch]) -> tuple[Floats, Floats | None]:
        """(cached tokens, seconds of the load); None where nobody has anything to load."""
        if not matches:
            return np.zeros(len(self._loads)), None
        named = matches.places if isinstance(matches, FoundMatches) else None
        some = matches if named is None else [matches[at] for at in named]
        tokens, gpu_tokens = [one.tokens for one in some], [one.gpu_tokens for one in some]
        if named is None:
            cached = np.array(gpu_tokens, np.float64)
        else:
            cached = np.zeros(len(matches))
            cached[named] = gpu_tokens
        np.minimum(cached, max(prompt_tokens - 1, 0), out=cached)
        if tokens == gpu_tokens:
            return cached, None
        load_s = np.zeros(len(matches))
        places = range(len(matches)) if named is None else named
        for at in compress(places, map(ne, tokens, gpu_tokens)):
            cached[at], _, load_s[at] = cheapest_source(matches[at], prompt_tokens, self._paces[at])
        return cached, load_s

    def _refresh(self) -> None:
        """Rows of workers that have changed, by the versions of their books and paces."""
        loads, paces = self._loads, self._paces
        load_versions, pace_versions = [one.version for one in loads], [one.version for one in paces]
        for now, then in ((load_versions, self._load_versions), (pace_versions, self._pace_versions)):
            if now != then:
                for at in compress(range(len(now)), map(ne, now, then)):
                    self._table[:, at] = _row(loads[at], paces[at])
        self._load_versions, self._pace_versions = load_versions, pace_versions


class ColumnPricing:
    """Columns of the fleets asked about of late, by the identity of their loads and paces.

    They are made for a fleet's second request: one that is gone with its first, as without the workers that
    have failed it, is not worth them. A copy starts without any.
    """

    def __init__(self) -> None:
        self._fleets: dict[tuple[int, int], _Columns] = {}

    def __deepcopy__(self, memo: object) -> ColumnPricing:
        return ColumnPricing()

    def price(self, request: RequestView, fleet: Fleet, weights: Weights) -> PricedColumns | None:
        """None for a fleet that `price_sides` is for: small, new, or of sequences that may change."""
        loads, paces = fleet.loads, fleet.paces
        if len(loads) < MIN_WORKERS or not isinstance(loads, tuple) or not isinstance(paces, tuple):
            return None
        if len(paces) != len(loads):  # none are given: all are like the default preset
            return None
        key = id(loads), id(paces)
        columns = self._fleets.pop(key, None)
        if columns is not None:
            self._fleets[key] = columns
            return columns.price(request, fleet, weights)
        if len(self._fleets) == MAX_FLEETS:
            del self._fleets[next(iter(self._fleets))]
        self._fleets[key] = _Columns(loads, paces)
        return None
