"""Where the prompt's beginning was last sent, unless the fleet is out of balance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from kvroute.policies.reading import matched_tokens
from kvroute.policies.ties import cheapest_index, emptiest_index
from kvroute.types import Decision, Fleet, RequestView

SLACK = 2
"""Leases a worker may carry beyond `max_load_ratio` times the mean, so that small numbers do not trip it."""


class PrefixAffinity:
    """Rule: SGLang's cache_aware, with its known faults mended.

    1. Out of balance (most - fewest leases > `balance_abs` and most > `balance_rel` x fewest): only workers
       that are not themselves that far above the fewest are considered, and among them the longest prefix
       wins, so affinity narrows under load but is not lost.
    2. Otherwise the longest match wins if it covers more than `match_threshold` of the prompt; equal
       matches go to the less loaded.
    3. Otherwise the least loaded; equal loads go to the fewest held blocks. (The original sends a miss to
       the smallest tree whatever its load, so an overloaded worker with a small tree got all of them.)

    In 1 and 2 a matched worker that carries more than `max_load_ratio` times the mean of the fleet, plus
    two, is passed over: one prefix that all requests share would otherwise pin them all to one worker.

    With `original` it is the peer's rule to the letter, for comparisons: out of balance, the least loaded
    whatever is cached; else the longest match above the threshold whatever the load; else the smallest tree
    (held blocks). Ties go in turn, and `max_load_ratio` has no say.

    Source: `cache_aware` of SGLang's first router; its thresholds have changed between releases, and its
    later model gateway (at 053b63f) sends a miss to the least loaded, too.

    Options: `match_threshold` (0..1), `balance_abs` (leases), `balance_rel` (at least 1),
    `max_load_ratio` (0 is off, else at least 1), `original`.

    Reasons: match, miss, imbalance, overloaded.

    Trade-offs: cheap and robust where prompts share long prefixes, but the thresholds are unitless: it
    cannot tell a queue of 800 ms from a prefill of 300 ms, and counts requests, not tokens.
    """

    needs_prefix: ClassVar[bool] = True

    @dataclass(frozen=True, slots=True)
    class Options:
        match_threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
        balance_abs: Annotated[int, Field(ge=0)] = 32
        balance_rel: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.1
        max_load_ratio: float = 1.5
        original: bool = False

        def __post_init__(self) -> None:
            if self.max_load_ratio != 0 and not 1 <= self.max_load_ratio < float("inf"):
                raise ValueError("max_load_ratio must be 0 (off) or at least 1")

    def __init__(self, options: Options) -> None:
        self._options = options
        self._turn = -1

    def decide(self, request: RequestView, fleet: Fleet) -> Decision:
        self._turn += 1
        options = self._options
        requests = [load.requests for load in fleet.loads]
        fewest, most = min(requests), max(requests)
        unbalanced = most - fewest > options.balance_abs and most > options.balance_rel * fewest
        if options.original:
            return self._original(request, fleet, requests, unbalanced=unbalanced)
        ratio = options.max_load_ratio
        limit = ratio * sum(requests) / len(requests) + SLACK if ratio else most
        everyone = range(len(requests))
        if unbalanced:
            ceiling = max(fewest + options.balance_abs, options.balance_rel * fewest)
            near = [i for i in everyone if requests[i] <= ceiling]
            best, _ = self._longest(fleet, requests, near, 0.0, limit)
            if best < 0:
                best = emptiest_index(fleet, near, self._turn)
            return self._decision(fleet, best, "imbalance")
        floor = options.match_threshold * request.prompt_tokens
        best, passed_over = self._longest(fleet, requests, everyone, floor, limit)
        if best < 0:
            best = emptiest_index(fleet, everyone, self._turn)
            return self._decision(fleet, best, "overloaded" if passed_over else "miss")
        return self._decision(fleet, best, "overloaded" if passed_over else "match")

    def _original(
        self, request: RequestView, fleet: Fleet, requests: list[int], *, unbalanced: bool
    ) -> Decision:
        if unbalanced:
            return self._decision(fleet, cheapest_index(requests, self._turn), "imbalance")
        matched = matched_tokens(request, fleet)
        if max(matched) > self._options.match_threshold * request.prompt_tokens:
            longest = cheapest_index([-tokens for tokens in matched], self._turn)
            return self._decision(fleet, longest, "match")
        trees = list(fleet.held_blocks) or requests
        return self._decision(fleet, cheapest_index(trees, self._turn), "miss")

    def _longest(
        self, fleet: Fleet, requests: list[int], among: Sequence[int], floor_tokens: float, limit: float
    ) -> tuple[int, bool]:
        """Index of the longest match above the floor and within the limit, or -1; was a longer refused?"""
        matches = fleet.matches
        if not matches:
            return -1, False
        best, longest, lightest, refused = -1, floor_tokens, 0, floor_tokens
        for turn in range(len(among)):
            i = among[(turn + self._turn) % len(among)]
            tokens = matches[i].tokens
            if tokens <= floor_tokens or tokens < longest:
                continue
            if requests[i] > limit:
                refused = max(refused, tokens)
            elif tokens > longest or requests[i] < lightest:
                best, longest, lightest = i, tokens, requests[i]
        return best, refused > longest

    def _decision(self, fleet: Fleet, index: int, reason: str) -> Decision:
        matched = fleet.matches[index].tokens if fleet.matches else 0
        return Decision.whole(fleet.workers[index], reason, matched)
