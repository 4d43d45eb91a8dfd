"""llm-d's default scorers: prefix, queue and KV use, weighted and added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from kvroute.load import WorkerLoad
from kvroute.policies.reading import matched_tokens, paces_of, reason_of
from kvroute.policies.ties import cheapest_index
from kvroute.types import Decision, Fleet, RequestView

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Weighted:
    """Rule: argmax of the weighted sum of three scores from 0 to 1; ties go in turn.

        prefix   the share of the prompt that the worker holds
        queue    (longest - its own) / (longest - shortest) of waiting requests; 1 where all are equal
        KV use   1 - the share of its KV cache in use

    Source: the default profile of llm-d-router at 0b59e4e (2026), which is that of the Gateway API Inference
    Extension: `prefix-cache-scorer`, `queue-scorer`, `kv-cache-utilization-scorer` with weights 3, 2, 2 and
    `max-score-picker`.

    Options: `prefix_weight`, `queue_weight`, `kv_weight`, not all 0.

    Reasons: cached, cold, moved (a longer prefix was passed over), unreported.

    Differs: where an engine does not report its KV use, tokens charged by room stand in for it; where one
    does not report its waiting requests, requests without a first byte stand in for all of them, as counts of
    two kinds do not compare. The reason is then `unreported`. The original gives such a worker no score.

    Trade-offs: easy to extend, but shares, ranks and fractions have no common unit: one waiting request more
    than another weighs as much as forty, and reports are as old as the last poll.
    """

    needs_prefix: ClassVar[bool] = True

    @dataclass(frozen=True, slots=True)
    class Options:
        prefix_weight: Weight = 3.0
        queue_weight: Weight = 2.0
        kv_weight: Weight = 2.0

        def __post_init__(self) -> None:
            if not self.prefix_weight + self.queue_weight + self.kv_weight:
                raise ValueError(
                    "prefix_weight, queue_weight and kv_weight are all 0; one above 0 is expected"
                )

    def __init__(self, options: Options) -> None:
        self._options = options
        self._turn = -1

    def decide(self, request: RequestView, fleet: Fleet) -> Decision:
        self._turn += 1
        options = self._options
        matched = matched_tokens(request, fleet)
        queues, queues_known = _queues(fleet.loads)
        usage, usage_known = _usage(fleet)
        per_token = options.prefix_weight / (request.prompt_tokens or 1)
        spread = max(queues) - min(queues)
        per_waiting = options.queue_weight / spread if spread else 0.0
        # What is the same for all is left out, and the sign turned: the least of this is the highest score.
        penalties = [
            per_waiting * queue + options.kv_weight * used - per_token * held
            for queue, used, held in zip(queues, usage, matched, strict=True)
        ]
        at = cheapest_index(penalties, self._turn)
        reason = reason_of(matched, at) if queues_known and usage_known else "unreported"
        return Decision.whole(fleet.workers[at], reason, matched[at])


def _queues(loads: Sequence[WorkerLoad]) -> tuple[list[int], bool]:
    """Waiting requests per worker, and whether that is what the engines report."""
    reported = [load.reported_waiting for load in loads if load.reported_waiting is not None]
    if len(reported) == len(loads):
        return reported, True
    return [load.prefilling for load in loads], False


def _usage(fleet: Fleet) -> tuple[list[float], bool]:
    """KV use per worker, 0..1, and whether that is what the engines report."""
    known, usage = True, []
    for load, pace in zip(fleet.loads, paces_of(fleet), strict=True):
        used = load.kv_usage_ratio
        if used is None:
            known = False
            used = load.kv_tokens / pace.kv_tokens
        usage.append(min(max(used, 0.0), 1.0))
    return usage, known
