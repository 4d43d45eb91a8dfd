"""LMetric: two loads, multiplied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvroute.policies.reading import matched_tokens, reason_of
from kvroute.policies.ties import cheapest_index
from kvroute.types import Decision, Fleet, RequestView


class LMetric:
    """Rule: argmin of (pending prefill tokens + this prompt's uncached tokens) x (requests there + 1).

    Equal products go to the fewest requests, then in turn.

    Source: "LMetric: Simple is Better - Multiplication May Be All You Need for LLM Request Scheduling"
    (arXiv 2603.15202). A factor in either load scales all products alike, so there is nothing to tune.

    Options: none.

    Reasons: cached, cold, moved (a longer prefix was passed over).

    Differs: the ports in llm-d and SGLang's gateway count this prompt's tokens alone; here those that wait
    before it count too. A prompt that is wholly cached where nothing is pending makes the product 0 whatever
    the batch: the one case where multiplying fails, met here by the tie-break.

    Trade-offs: strong for its size, since a busy decode batch makes prefill dear. Tokens and requests are not
    seconds: a slow worker, or a long context, counts like any other.
    """

    needs_prefix: ClassVar[bool] = True

    @dataclass(frozen=True, slots=True)
    class Options:
        pass

    def __init__(self, options: Options) -> None:
        self._turn = -1

    def decide(self, request: RequestView, fleet: Fleet) -> Decision:
        self._turn += 1
        prompt = request.prompt_tokens
        matched = matched_tokens(request, fleet)
        at = cheapest_index(
            [
                ((load.pending_prefill_tokens + prompt - held) * (load.requests + 1.0), load.requests)
                for load, held in zip(fleet.loads, matched, strict=True)
            ],
            self._turn,
        )
        return Decision.whole(fleet.workers[at], reason_of(matched, at), matched[at])
