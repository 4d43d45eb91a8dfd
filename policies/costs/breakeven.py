"""Fetch a cached prefix or compute it again: where the one beats the other, and what a prefix is worth.

    T_cold  = Q_cold + T_prefill_full + T_first
    T_reuse = Q_reuse + T_lookup + T_load_critical + T_prefill_suffix + T_first

What is saved is T_prefill_full - T_prefill_suffix, never the prefix's share of the full prefill: the suffix
still attends to every cached token.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Prefill(Protocol):
    """A `Speed` or a `Pace`."""

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Seconds to prefill alone."""
        ...


@dataclass(frozen=True, slots=True)
class Reuse:
    """One request on two ways under the same load, in seconds."""

    prefill_full_s: float
    prefill_suffix_s: float
    load_critical_s: float
    """Of the load, what nothing hides."""
    lookup_s: float = 0.0
    queue_cold_s: float = 0.0
    queue_reuse_s: float = 0.0
    first_token_s: float = 0.0
    """After the prefill, the same on both ways: logits, sampling, the answer's way back."""

    @property
    def cold_s(self) -> float:
        return self.queue_cold_s + self.prefill_full_s + self.first_token_s

    @property
    def reuse_s(self) -> float:
        fetched_s = self.lookup_s + self.load_critical_s
        return self.queue_reuse_s + fetched_s + self.prefill_suffix_s + self.first_token_s

    @property
    def worth_it(self) -> bool:
        cost_s = self.lookup_s + self.load_critical_s + (self.queue_reuse_s - self.queue_cold_s)
        return cost_s < self.prefill_full_s - self.prefill_suffix_s


def prefill_saved_s(speed: Prefill, prefix_tokens: int, suffix_tokens: int) -> float:
    """Prefill seconds that a cached prefix saves. ValueError without a suffix.

    Engines compute at least the last prompt token, for its logits (vLLM 0.32 drops the last block of a full
    hit), so a whole prompt is never a prefix.
    """
    if suffix_tokens < 1:
        raise ValueError(
            f"suffix_tokens: {suffix_tokens} is not above 0; the last prompt token is always computed"
        )
    full_s = speed.prefill_s(prefix_tokens + suffix_tokens)
    return full_s - speed.prefill_s(suffix_tokens, prefix_tokens)


def linear_breakeven_tokens(fixed_s: float, prefill_token_s: float, load_token_s: float) -> float:
    """Tokens from which fetching pays where every token costs the same: t0 / (prefill - transfer), or inf."""
    gain_s = prefill_token_s - load_token_s
    return fixed_s / gain_s if gain_s > 0 else math.inf


def breakeven_tokens(
    speed: Prefill,
    load_s: Callable[[int], float],
    *,
    suffix_tokens: int,
    most_tokens: int,
    extra_s: float = 0.0,
) -> int | None:
    """The length from which every prefix, up to `most_tokens`, is worth its load; None if there is none.

    `extra_s` is lookup and Q_reuse - Q_cold. `load_s` of a prefix must not grow faster for a longer one
    (set-up and bytes do not), while the prefill saved does: so the gain over length is convex, and past its
    least value it crosses 0 once.
    """

    def gain_s(tokens: int) -> float:
        return prefill_saved_s(speed, tokens, suffix_tokens) - load_s(tokens) - extra_s

    def first(start: int, holds: Callable[[int], bool]) -> int:
        return start + bisect_left(range(start, most_tokens), True, key=holds)

    least = first(1, lambda tokens: gain_s(tokens + 1) >= gain_s(tokens))
    if gain_s(least) > 0:
        return 1
    crossing = first(least, lambda tokens: gain_s(tokens) > 0)
    return crossing if gain_s(crossing) > 0 else None


def breakeven_bandwidth(payload_bytes: float, saved_s: float, fixed_s: float) -> float:
    """Bytes/s above which fetching pays, `fixed_s` being what no bandwidth shortens; inf if none does."""
    spare_s = saved_s - fixed_s
    return payload_bytes / spare_s if spare_s > 0 else math.inf


def value_per_byte(expected_reuses: float, saved_s: float, cost_s: float, size_bytes: float) -> float:
    """Seconds that a byte of cache earns: (reuses x saved - cost of writes, reads and copies) / bytes.

    A rule of thumb for what to keep, not one that a store applies. ValueError without a size.
    """
    if size_bytes <= 0:
        raise ValueError(f"size_bytes: {size_bytes} is not above 0")
    return (expected_reuses * saved_s - cost_s) / size_bytes
