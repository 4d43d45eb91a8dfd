"""NVIDIA Dynamo's KV router: blocks to prefill and blocks in use, added."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, ClassVar

from pydantic import Field

from kvroute.load import WorkerLoad
from kvroute.policies.reading import DEFAULT_BLOCK_TOKENS, matched_tokens, reason_of
from kvroute.types import Decision, Fleet, RequestView, Role


class Dynamo:
    """Rule: argmin, in blocks, of

        s max(0, (active prefill tokens + input) / block - overlap) + |active blocks U request's blocks|

    Active prefill tokens are the uncached tokens of requests without a first token, in full until it comes;
    active blocks are those of running requests, each distinct one counted once. Ties are drawn evenly.

    Source: `DefaultWorkerSelector` and `ActiveSequences` of ai-dynamo/dynamo, lib/kv-router at 07a6c9c
    (2026), with overlap credit 1 and no decay, temperature 0, no output blocks tracked.

    Where prefill and decode are apart, memory does not count among those that only prefill, and who decodes
    is the one with the fewest blocks of prompts decoding, whatever they share (`derive_prefill_router_config`
    and `derive_decode_router_config` of lib/mocker).

    Options: `prefill_load_scale`, s (1; tuned values are 8 and 32); `seed` of the draws.

    Reasons: cached, cold, moved (a longer prefix was passed over).

    Differs: one overlap over all tiers, where the original credits host and disk hits in part. Where the
    fleet has no keys, the union is estimated as KV tokens / block + request's blocks - overlap.

    Trade-offs: sees load twice, as prefill and as memory, but in blocks: s stands in for speed and has to be
    found per model. Greedy: what a choice costs the requests that follow is not in it.
    """

    needs_prefix: ClassVar[bool] = True
    needs_active_keys: ClassVar[bool] = True

    @dataclass(frozen=True, slots=True)
    class Options:
        prefill_load_scale: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
        seed: int | None = None

    def __init__(self, options: Options) -> None:
        self._scale = options.prefill_load_scale
        self._random = Random(options.seed).random

    def decide(self, request: RequestView, fleet: Fleet) -> Decision:
        prompt, loads = request.prompt_tokens, fleet.loads
        matched = matched_tokens(request, fleet)
        block = fleet.block_tokens or DEFAULT_BLOCK_TOKENS
        if fleet.workers[0].role is Role.PREFILL:
            in_use: list[float] = [0.0] * len(loads)
        elif fleet.block_tokens:
            in_use = _unions(loads, fleet.keys)
        else:
            in_use = [
                (load.kv_tokens + prompt - held) / block for load, held in zip(loads, matched, strict=True)
            ]
        scale = self._scale
        # No max(0, ...): a match is never longer than the prompt.
        costs = [
            scale * (load.pending_prefill_tokens + prompt - held) / block + blocks
            for load, held, blocks in zip(loads, matched, in_use, strict=True)
        ]
        at = self._least(costs)
        return Decision.whole(fleet.workers[at], reason_of(matched, at), matched[at])

    def choose_decode(self, request: RequestView, fleet: Fleet) -> int:
        """Index of the decode worker."""
        return self._least([load.context_tokens - load.growth_tokens for load in fleet.loads])

    def _least(self, costs: Sequence[float]) -> int:
        lowest = min(costs)
        at = costs.index(lowest)
        if costs.count(lowest) > 1:
            ties = [i for i, cost in enumerate(costs) if cost == lowest]
            at = ties[int(self._random() * len(ties))]
        return at


def _unions(loads: Sequence[WorkerLoad], keys: Sequence[int]) -> list[float]:
    """Per worker: distinct blocks in use with this request there.

    Keys are chained, so the request's that are in use are its first ones: their end is found by halving.
    """
    count = len(keys)
    if not count:
        return [len(load.active_keys) for load in loads]
    first, last_first = keys[0], keys[::-1]
    unions: list[float] = []
    for load in loads:
        active = load.active_keys
        blocks = len(active) + count
        if first in active:
            blocks -= count - bisect_left(last_first, True, key=active.__contains__)
        unions.append(blocks)
    return unions
