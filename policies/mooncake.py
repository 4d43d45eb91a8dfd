"""Mooncake's Conductor: the shortest predicted TTFT, with the best cached prefix brought along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from kvroute.policies.costs.links import Link
from kvroute.policies.costs.pace import Pace
from kvroute.policies.limits import Limits
from kvroute.policies.reading import matched_tokens, paces_of, reason_of
from kvroute.policies.ties import cheapest_index
from kvroute.types import Candidate, Decision, Fleet, Pull, Rejection, RequestView

Limit = Annotated[float, Field(gt=0, allow_inf_nan=False)] | None


class Mooncake:
    """Rule: for every worker i, with len_i the prefix it holds and best_len the longest that anybody holds,

        best_len > threshold x len_i   transfer(best_len - len_i) + queue_i + prefill(prompt, best_len)
        else                           queue_i + prefill(prompt, len_i)

    and the least of these. If the choice breaks the limit on TTFT or on the time between tokens, the request
    is rejected. If it counted on the longer prefix, that is pulled, which is how hot prefixes spread.
    As a product the test needs no len_i above 0: who holds nothing always counts on the transfer.

    Source: Algorithm 1 of "Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving"
    (arXiv 2407.00079v4; FAST '25). The paper gives no value for the threshold.

    Options: `balancing_threshold` (at least 1), `transfer_bytes_per_s` (of a link between workers, where the
    fleet names none; without either nothing is transferred and len_i counts), `ttft_limit_s`, `itl_limit_s`
    (a request's own limits go first).

    Reasons: cached, cold, moved (a longer prefix was passed over), migrated (it is pulled). Rejections: ttft,
    itl.

    Differs: one worker prefills and decodes, as in the fleets of this router by default; the time between
    tokens is that of the chosen one when all that is queued there decodes. Only confirmed blocks are pulled.

    Trade-offs: prices in seconds, but its own only. The threshold, not the clock, says who transfers: over a
    slow link it pulls what is computed sooner.
    """

    needs_prefix: ClassVar[bool] = True
    needs_seconds: ClassVar[bool] = True

    @dataclass(frozen=True, slots=True)
    class Options:
        balancing_threshold: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0
        transfer_bytes_per_s: Limit = None
        ttft_limit_s: Limit = None
        itl_limit_s: Limit = None

    def __init__(self, options: Options) -> None:
        self._options = options
        rate = options.transfer_bytes_per_s
        self._link = None if rate is None else Link(rate)
        self._turn = -1

    def decide(self, request: RequestView, fleet: Fleet) -> Decision | Rejection:
        self._turn += 1
        paces = paces_of(fleet)
        last = max(request.prompt_tokens - 1, 0)  # the last token is always computed
        held = [min(tokens, last) for tokens in matched_tokens(request, fleet)]
        confirmed = [min(match.confirmed_tokens, last) for match in fleet.matches]
        best = max(confirmed, default=0)
        transfers = self._transfers(fleet, paces, held, best)
        times = [
            (transfer_s or 0.0)
            + load.ahead_s(fleet.now_s, pace.prefill_scale)
            + _prefill_s(pace, request.prompt_tokens, own if transfer_s is None else best)
            for load, pace, own, transfer_s in zip(fleet.loads, paces, held, transfers, strict=True)
        ]
        at = cheapest_index(times, self._turn)
        rejection = self._rejection(request, fleet, paces[at], at, times[at])
        if rejection is not None:
            return rejection
        worker, transfer_s = fleet.workers[at], transfers[at]
        if transfer_s is None:
            return Decision.whole(worker, reason_of(held, at), held[at])
        pull = Pull(fleet.workers[confirmed.index(best)], best - held[at], transfer_s)
        return Decision(Candidate(worker, worker), "migrated", held[at], pull=pull)

    def _transfers(
        self, fleet: Fleet, paces: Sequence[Pace], held: Sequence[int], best: int
    ) -> list[float | None]:
        """Seconds to bring each the difference to the best prefix; None for those that use their own."""
        link = fleet.peer_link or self._link
        threshold = self._options.balancing_threshold
        return [
            link.transfer_s((best - own) * pace.speed.kv_bytes_per_token)
            if link is not None and best > threshold * own
            else None
            for own, pace in zip(held, paces, strict=True)
        ]

    def _rejection(
        self, request: RequestView, fleet: Fleet, pace: Pace, at: int, time_s: float
    ) -> Rejection | None:
        ttft_limit_s, itl_limit_s = request.ttft_limit_s, request.itl_limit_s
        limits = Limits(
            self._options.ttft_limit_s if ttft_limit_s is None else ttft_limit_s,
            self._options.itl_limit_s if itl_limit_s is None else itl_limit_s,
        )
        load = fleet.loads[at]
        ttft_s = pace.overhead_s + time_s
        itl_s = pace.decode_s(load.requests + 1, load.kv_tokens + request.prompt_tokens)
        broken = limits.broken(ttft_s, itl_s, fleet.output_tokens)
        if broken is None:
            return None
        return Rejection(broken, limits.wait_s(ttft_s, itl_s, fleet.output_tokens))


def _prefill_s(pace: Pace, prompt_tokens: int, cached_tokens: int) -> float:
    return pace.prefill_s(prompt_tokens - cached_tokens, cached_tokens)
