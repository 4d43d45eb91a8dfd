"""What each worker would charge for one request, in seconds: the terms that `ttft` adds up.

With P the prefill of the uncached tokens, Q the wait before it, L the load of cached tokens from lower tiers,
B the requests decoding there, W those without a first token, A arrivals per second, N the expected output,
ITL the decode step with this request in it and rho the share of time spent prefilling:

    max(Q, L) + P                   this request's own time to first token, and where the KV of all would not
                                    fit, the wait for room
    + cache_weight P min(1, rho/r)  what is computed here evicts, or duplicates, what others would use; less
                                    on a worker with time to spare
    + delay_weight A Q P            later arrivals that wait for it
    + stall_weight P B              requests decoding there that it stalls
    + ahead P W                     those before it: their steps hold chunks of it
    + decode_weight N ITL/(1-rho)   its own decode life, stretched by the prefills around it
    + decode_weight N/2 B dITL      what it adds to every step of those decoding there, for the rest of theirs

A weight turns a second of another kind into a second of TTFT. Q and P come from the time model, never from
token counts alone; the decode life is what makes prefills gather on some workers and decodes on others.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf
from typing import NamedTuple, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kvroute.load import PREFILL_SHARE_TAU_S, WorkerLoad
from kvroute.policies.costs.pace import Pace
from kvroute.types import NO_MATCH, Cost, Fleet, PrefixMatch, RequestView, Tier

Floats = NDArray[np.float64]

MAX_PREFILL_SHARE = 0.9
"""Of a worker's time. Beyond it, decodes would be kept away from the one that prefills most for good."""
REQUEST_S = 0.002
"""What an engine's server spends on a request before its scheduler sees it, one request after another: vLLM's
takes some 500 a second. It is what makes a burst of equal prompts spread, whose prefill is paid but once."""
CHUNK_TOKENS = 8192
"""Prefill tokens in one step of an engine, by vLLM's default for servers."""

AHEAD = 0.4
"""Of a prefill, what it delays the first tokens of those before it: chunks of both are in one step, which
ends for all together."""
ROOM = 0.95
"""Of a worker's KV room, what is given away: outputs are as often longer than expected as shorter, and what
does not fit is preempted and computed again."""
BUSY_PREFILL_SHARE = 0.05
"""Share of time spent prefilling from which on the cache counts in full: r."""


class Weights(Struct, frozen=True, gc=False):
    """What a second that others lose is worth in seconds of one's own."""

    cache: float
    delay: float
    stall: float
    decode: float
    ahead: float = AHEAD


DECODE_WEIGHT = 0.22
"""Of a decode second, where nothing else is configured."""
FREE = Weights(0.0, 0.0, 0.0, 0.0, 0.0)
"""Nothing that others lose counts: what is left is this request's own time."""


class Side(Struct, frozen=True, gc=False):
    """One worker's terms, in seconds, for doing all of the request or either half of it."""

    start_s: float
    """Price of the prefill: everything but the next."""
    stay_s: float
    """Price of the decode."""
    queue_s: float
    load_s: float
    """Beyond the queue."""
    prefill_s: float
    cache_s: float
    delay_s: float
    stall_s: float
    room_s: float
    """Wait for KV room before it can decode there."""
    decode_s: float
    itl_s: float
    """Mean time between tokens, when decode begins, the prefills between them included."""
    cached_tokens: int
    loaded_tokens: int
    """Of those cached, from lower tiers."""
    raw_prefill_s: float
    """In seconds of the preset."""


class Halves(NamedTuple):
    """What every worker would charge for either half of a request, parallel to the workers, in seconds."""

    start_s: Floats
    """Price of the prefill."""
    stay_s: Floats
    """Price of the decode."""
    queue_s: Floats
    ahead_s: Floats
    """Until the prefill is over: queue, load and prefill."""
    cache_s: Floats
    """Part of `start_s`: what comes into the cache there evicts or duplicates."""
    room_s: Floats
    itl_s: Floats


class Offers(Protocol):
    """What every worker of a fleet would charge for one request."""

    def __getitem__(self, at: int, /) -> Side: ...

    def cheapest(self, start: int) -> tuple[int, float]:
        """The worker with the lowest price for all of the request, and that; of equals the first at or
        after `start`, going round.
        """
        ...

    def total_s_of(self, at: int) -> float:
        """The price of one that does all of it."""
        ...

    def halves(self) -> Halves:
        """Where requests can be split."""
        ...

    @property
    def shortest_prefill_s(self) -> float: ...

    @property
    def shortest_queue_s(self) -> float: ...

    @property
    def longest_cached(self) -> int:
        """Tokens."""
        ...


class Sides(list[Side]):
    """All of them worked out."""

    def cheapest(self, start: int) -> tuple[int, float]:
        best, best_s, count = start, inf, len(self)
        for at in (*range(start, count), *range(start)):
            side = self[at]
            if side.start_s + side.stay_s < best_s:
                best, best_s = at, side.start_s + side.stay_s
        return best, best_s

    def total_s_of(self, at: int) -> float:
        return self[at].start_s + self[at].stay_s

    def halves(self) -> Halves:
        columns = [
            (
                side.start_s,
                side.stay_s,
                side.queue_s,
                side.queue_s + side.load_s + side.prefill_s,
                side.cache_s,
                side.room_s,
                side.itl_s,
            )
            for side in self
        ]
        return Halves(*np.array(columns).T)

    @property
    def shortest_prefill_s(self) -> float:
        return min(side.prefill_s for side in self)

    @property
    def shortest_queue_s(self) -> float:
        return min(side.queue_s for side in self)

    @property
    def longest_cached(self) -> int:
        return max([side.cached_tokens for side in self])


def price_sides(request: RequestView, fleet: Fleet, weights: Weights, paces: Sequence[Pace]) -> Sides:  # noqa: PLR0912, PLR0915
    """Terms of every worker, parallel to `fleet.workers`.

    One long loop: a call per worker would double what a decision costs.
    """
    now_s, prompt, output = fleet.now_s, request.prompt_tokens, fleet.output_tokens
    matches = fleet.matches or [NO_MATCH] * len(paces)
    promised = fleet.promised_s or [0.0] * len(paces)
    last = prompt - 1 if prompt else 0
    cache_weight = weights.cache
    delay_weight = weights.delay * fleet.arrivals_per_s
    stall_weight, decode_weight = weights.stall, weights.decode
    sides = Sides()
    for load, pace, match, promised_s in zip(fleet.loads, paces, matches, promised, strict=True):
        speed, scale = pace.speed, pace.prefill_scale
        if match is NO_MATCH:
            cached = loaded = 0
            load_s = 0.0
        elif match.tokens == match.gpu_tokens:
            cached = match.gpu_tokens if match.gpu_tokens < last else last
            loaded = 0
            load_s = 0.0
        else:
            cached, loaded, load_s = cheapest_source(match, prompt, pace)
        new = prompt - cached or 1  # the last token is always computed
        prefilling, requests = load.prefilling, load.requests
        raw_s = speed.token_ms * new
        if not prefilling:
            raw_s += speed.base_ms
            if raw_s < speed.floor_ms:  # noqa: PLR1730  # max() takes longer than the rest of the line
                raw_s = speed.floor_ms
        raw_s = (raw_s + speed.attention_ms * new * (cached + new / 2)) / 1e3
        prefill_s = raw_s * scale

        decodes = requests - prefilling
        step_scale = pace.decode_scale / 1e3
        queue_s = (promised_s + load.others_prefill_s) * scale
        if prefilling:
            queue_s += prefilling * REQUEST_S
            done_s = (now_s - load.head_since_s) / scale
            head_s = load.head_prefill_s
            queue_s += (load.pending_prefill_s - (done_s if done_s < head_s else head_s)) * scale
        if decodes:
            ahead = load.pending_prefill_tokens + new
            steps = ahead / CHUNK_TOKENS if ahead > CHUNK_TOKENS else 1.0
            context_ms = speed.decode_context_ms * load.context_tokens
            queue_s += steps * (speed.token_ms * decodes + context_ms) * step_scale
            if not prefilling:  # half a step is still running, on average
                queue_s += (
                    (speed.decode_base_ms + speed.decode_sequence_ms * decodes + context_ms) * step_scale / 2
                )
        kv_tokens = load.kv_tokens
        step_s = step_scale * (
            speed.decode_base_ms
            + speed.decode_sequence_ms * (requests + 1)
            + speed.decode_context_ms * (kv_tokens + prompt)
        )
        share = load.prefilled_s
        if share:
            share *= exp((load.prefilled_at_s - now_s) / PREFILL_SHARE_TAU_S) * scale / PREFILL_SHARE_TAU_S
            if share > MAX_PREFILL_SHARE:  # noqa: PLR1730
                share = MAX_PREFILL_SHARE
        itl_s = step_s / (1 - share)
        over = load.kv_used_tokens + prompt + output - pace.kv_tokens
        room_s = 0.0 if over <= 0 else over / max(load.kv_used_tokens, over) * output * itl_s
        if load_s:
            load_s = load_s - queue_s if load_s > queue_s else 0.0
        delay_s = delay_weight * queue_s * prefill_s
        stall_s = prefill_s * (stall_weight * decodes + weights.ahead * prefilling)
        cache_s = cache_weight * prefill_s
        if share < BUSY_PREFILL_SHARE:
            cache_s *= share / BUSY_PREFILL_SHARE
        added_ms = speed.decode_sequence_ms + speed.decode_context_ms * (prompt + output / 2)
        decode_s = decode_weight * output * (itl_s + added_ms * step_scale * decodes / 2)
        sides.append(
            Side(
                queue_s + load_s + prefill_s + cache_s + delay_s + stall_s,
                room_s + decode_s,
                queue_s,
                load_s,
                prefill_s,
                cache_s,
                delay_s,
                stall_s,
                room_s,
                decode_s,
                itl_s,
                cached,
                loaded,
                raw_s,
            )
        )
    return sides


def price_one(request: RequestView, fleet: Fleet, weights: Weights, at: int, promised_s: float = 0.0) -> Side:
    """Terms of the worker with this index, with so much promised there. The fleet needs its paces."""
    one = Fleet(
        fleet.now_s,
        (fleet.workers[at],),
        (fleet.loads[at],),
        (fleet.matches[at],) if fleet.matches else (),
        paces=(fleet.paces[at],),
        output_tokens=fleet.output_tokens,
        arrivals_per_s=fleet.arrivals_per_s,
        promised_s=(promised_s,),
    )
    return price_sides(request, one, weights, one.paces)[0]


def cheapest_source(match: PrefixMatch, prompt_tokens: int, pace: Pace) -> tuple[int, int, float]:
    """Which part of a known prefix is worth using: (cached tokens, of those loaded, seconds of the load).

    Each tier further down adds tokens and a load: it is taken only where load and remaining prefill together
    take less. What is only predicted counts by how far such predictions have held on this worker.
    """
    last = max(prompt_tokens - 1, 0)
    believed = int(match.tokens * pace.match_reliability) if match.tokens > match.confirmed_tokens else 0
    in_gpu = min(max(match.gpu_tokens, min(match.predicted_tokens, believed)), last)
    best, loaded, load_s = in_gpu, 0, 0.0
    if match.tokens <= in_gpu or in_gpu == last:
        return best, loaded, load_s
    base_s = _prefill_s(pace, prompt_tokens, best)
    below = 0.0
    reached = best
    for tier, tokens in (
        (Tier.CPU, match.cpu_tokens),
        (Tier.DISK, match.confirmed_tokens),
        (Tier.CPU, believed),
    ):
        upto = min(tokens, last)
        if upto <= reached:
            continue
        below += pace.load_s(tier, upto - reached)
        reached = upto
        total_s = below + _prefill_s(pace, prompt_tokens, reached)
        if total_s < base_s:
            base_s, best, loaded, load_s = total_s, reached, reached - in_gpu, below
    return best, loaded, load_s


def _prefill_s(pace: Pace, prompt_tokens: int, cached: int) -> float:
    return pace.speed.marginal_prefill_s(max(prompt_tokens - cached, 1), cached) * pace.prefill_scale


def cost_of(
    side: Side, decoder: Side, handoff_s: float = 0.0, copy_s: float = 0.0, delay_s: float = 0.0
) -> Cost:
    """The price of one candidate: `side` does the prefill, and `decoder` (the same one, unless it is split)
    goes on after it. The rest is what a split adds.
    """
    return Cost(
        queue_wait_s=side.queue_s + decoder.room_s,
        load_s=side.load_s,
        prefill_s=side.prefill_s,
        handoff_s=handoff_s,
        cache_s=side.cache_s + copy_s,
        delay_s=side.delay_s + delay_s,
        stall_s=side.stall_s,
        decode_s=decoder.decode_s,
        itl_s=decoder.itl_s,
        room_s=decoder.room_s,
    )


def has_room(load: WorkerLoad, pace: Pace, prompt_tokens: int, output_tokens: float) -> bool:
    """Whether the KV of everything promised there, and of this request, fits beside each other."""
    needs = load.kv_used_tokens + prompt_tokens + output_tokens
    return needs <= pace.kv_tokens * ROOM or not load.requests
