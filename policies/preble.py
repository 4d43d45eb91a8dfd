"""Preble's E2: exploit a cached prefix when it is most of the prompt, else explore."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field

from kvroute.policies.costs.pace import Pace
from kvroute.policies.reading import DEFAULT_BLOCK_TOKENS, matched_tokens, paces_of
from kvroute.policies.ties import cheapest_index
from kvroute.types import Decision, Fleet, RequestView

MAX_DECISIONS = 65_536
"""In the window; above some 360 requests a second it gets shorter than its default of 3 minutes."""


class _Sent(NamedTuple):
    """One decision in the window."""

    at_s: float
    worker_id: str
    load_s: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class _Recent:
    """Sums over a worker's decisions in the window."""

    decisions: int = 0
    load_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0


_NOTHING = _Recent()


class Preble:
    """Rule: if the longest cached prefix is longer than the rest of the prompt, the least loaded (by L) of
    those that hold it; else argmin of L + M + P in seconds. Ties go in turn.

        L   prefill of uncached tokens and decode of the requests sent there within the window
        M   prefill of what has to be evicted for this prompt, times how likely it is used again
        P   prefill of this prompt's uncached tokens

    Source: E2 of "Preble: Efficient Distributed Prompt Scheduling for LLM Serving" (ICLR '25,
    arXiv 2407.00023) and `GlobalSchedulerWithTime` of WukLab/preble at 0c962c4: a window of 3 minutes.

    Options: `window_s`.

    Reasons: exploit, explore.

    Differs: the window holds this gateway's own choices, priced when they were made, not refined by what came
    of them. The index keeps no hit counts per block, so what is evicted is as likely to be used again as the
    worker's prompt tokens of late were cached, and an engine that does not state its KV room evicts nothing.
    Moving prefixes off an overloaded worker, and the engine-side scheduler, are not part of the rule here.

    Trade-offs: keeps shared prefixes together and spreads the rest by work sent, but a window of minutes
    knows nothing of the queue at this moment, and a hot prefix stays where it is.
    """

    needs_prefix: ClassVar[bool] = True
    needs_seconds: ClassVar[bool] = True

    @dataclass(frozen=True, slots=True)
    class Options:
        window_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 180.0

    def __init__(self, options: Options) -> None:
        self._window_s = options.window_s
        self._sent: deque[_Sent] = deque()
        self._recent: dict[str, _Recent] = {}
        self._turn = -1

    def decide(self, request: RequestView, fleet: Fleet) -> Decision:
        self._turn += 1
        self._forget(fleet.now_s)
        turn, count, prompt = self._turn, len(fleet.workers), request.prompt_tokens
        paces = paces_of(fleet)
        matched = matched_tokens(request, fleet)
        recent = [self._recent.get(worker.id, _NOTHING) for worker in fleet.workers]
        longest = max(matched)
        if longest > prompt - longest:
            holders = [i for i, held in enumerate(matched) if held == longest]
            at = min(holders, key=lambda i: (recent[i].load_s, (i - turn) % count))
            reason = "exploit"
        else:
            at = cheapest_index(_costs(fleet, paces, prompt, matched, recent), turn)
            reason = "explore"
        self._note(request, fleet, paces[at], at, matched[at])
        return Decision.whole(fleet.workers[at], reason, matched[at])

    def _note(self, request: RequestView, fleet: Fleet, pace: Pace, at: int, cached: int) -> None:
        load, prompt = fleet.loads[at], request.prompt_tokens
        step_s = pace.decode_s(load.requests + 1, load.context_tokens + prompt)
        load_s = pace.prefill_s(prompt - cached, cached) + fleet.output_tokens * step_s
        sent = _Sent(fleet.now_s, fleet.workers[at].id, load_s, prompt, cached)
        if len(self._sent) == MAX_DECISIONS:
            self._forget_oldest()
        self._sent.append(sent)
        sums = self._recent.setdefault(sent.worker_id, _Recent())
        sums.decisions += 1
        sums.load_s += load_s
        sums.prompt_tokens += prompt
        sums.cached_tokens += cached

    def _forget(self, now_s: float) -> None:
        start_s = now_s - self._window_s
        while self._sent and self._sent[0].at_s < start_s:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        sent = self._sent.popleft()
        sums = self._recent[sent.worker_id]
        sums.decisions -= 1
        if not sums.decisions:  # a worker that left, too; and sums of fractions drift
            del self._recent[sent.worker_id]
            return
        sums.load_s -= sent.load_s
        sums.prompt_tokens -= sent.prompt_tokens
        sums.cached_tokens -= sent.cached_tokens


def _costs(
    fleet: Fleet, paces: Sequence[Pace], prompt: int, matched: Sequence[int], recent: Sequence[_Recent]
) -> list[float]:
    """L + M + P of every worker, in seconds."""
    costs = []
    for at, (pace, cached, sums) in enumerate(zip(paces, matched, recent, strict=True)):
        new = prompt - cached
        cost_s = sums.load_s + pace.prefill_s(new, cached)
        if sums.cached_tokens:  # else nothing of it is used again
            over = _held_tokens(fleet, at) + new - pace.kv_tokens
            if over > 0:
                cost_s += pace.prefill_s(min(over, new)) * sums.cached_tokens / sums.prompt_tokens
        costs.append(cost_s)
    return costs


def _held_tokens(fleet: Fleet, at: int) -> int:
    """Tokens in a worker's KV cache, as far as the index knows, or as running requests need."""
    running = int(fleet.loads[at].kv_tokens)
    if not fleet.held_blocks:
        return running
    block = fleet.workers[at].block_size_tokens or fleet.block_tokens or DEFAULT_BLOCK_TOKENS
    return max(running, fleet.held_blocks[at] * block)
