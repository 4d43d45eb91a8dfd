"""Pairs of a prefill and a decode worker: what KV must travel, and who decodes where nobody chooses."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from kvroute.load import WorkerLoad
from kvroute.policies.costs.links import PdLinks
from kvroute.policies.costs.pace import Pace
from kvroute.policies.pricing import DECODE_WEIGHT, Weights, price_sides
from kvroute.types import NO_MATCH, Fleet, PrefixMatch, RequestView, Role, Worker

DECODING = Weights(0.0, 0.0, 0.0, DECODE_WEIGHT, 0.0)
"""For who only decodes."""


def payload_bytes(prompt_tokens: int, decode: Worker, match: PrefixMatch, pace: Pace) -> int:
    """What of a prompt's KV must travel to this worker, whose match and pace these are.

    Whole blocks, but for those that it is known to hold in its GPU. The last token is computed there again,
    so that its block always travels.
    """
    block_tokens = decode.block_size_tokens or 1
    held = min(match.gpu_tokens, max(prompt_tokens - 1, 0) // block_tokens * block_tokens)
    return -(-(prompt_tokens - held) // block_tokens) * block_tokens * pace.speed.kv_bytes_per_token


def handoff_s(
    links: PdLinks, prompt_tokens: int, prefill: Worker, decode: Worker, match: PrefixMatch, pace: Pace
) -> float:
    """Seconds for a prompt's KV to reach the decode worker, whose match and pace these are; links idle."""
    return links.between(prefill, decode).transfer_s(payload_bytes(prompt_tokens, decode, match, pace))


def cheapest_decode(request: RequestView, fleet: Fleet, prefill: Worker) -> int | None:
    """Index of the worker to decode a prompt whose KV lies finished at `prefill` (in the fleet or not); None
    where no other decodes. The fleet needs its paces, and links.

    Price: what it would be there as the decode half of a split, the wait for KV room included, and the
    handoff. One that would break the request's ITL limit is taken when no other is left.
    """
    links = fleet.pd_links
    if links is None:
        raise ValueError("pd_links: None; links are expected, KV is to travel")
    among = [
        j for j, one in enumerate(fleet.workers) if one.role is not Role.PREFILL and one.id != prefill.id
    ]
    sides = price_sides(request, fleet, DECODING, fleet.paces)
    itl_limit_s = request.itl_limit_s

    def price(j: int) -> tuple[bool, float]:
        worker, pace = fleet.workers[j], fleet.paces[j]
        match = fleet.matches[j] if fleet.matches else NO_MATCH
        travel_s = handoff_s(links, request.prompt_tokens, prefill, worker, match, pace)
        return itl_limit_s is not None and sides[j].itl_s > itl_limit_s, sides[j].stay_s + travel_s

    return min(among, key=price, default=None)


def roomiest(loads: Sequence[WorkerLoad], among: Sequence[int], turn: int) -> int:
    """Index, out of `among` (not empty), of the worker with the fewest KV tokens promised.

    The decode worker of a policy that chooses none. Ties go to the first at or after `turn`, going round.
    """
    start = turn % len(among)
    best = among[start]
    fewest = loads[best].kv_tokens
    for at in (*among[start + 1 :], *among[:start]):
        if (tokens := loads[at].kv_tokens) < fewest:
            best, fewest = at, tokens
    return best


def prefillers(fleet: Fleet) -> Fleet:
    """Of a fleet in which prefill and decode are apart, those that do not only decode, as if they did it all.

    For policies that choose no pairs. They come first.
    """
    count = sum(worker.role is not Role.DECODE for worker in fleet.workers)
    return _part(fleet, slice(count))


def decoders(fleet: Fleet) -> Fleet:
    """The others, those that only decode."""
    count = sum(worker.role is not Role.DECODE for worker in fleet.workers)
    return _part(fleet, slice(count, None))


def _part(fleet: Fleet, which: slice) -> Fleet:
    return replace(
        fleet,
        workers=fleet.workers[which],
        loads=fleet.loads[which],
        matches=fleet.matches[which],
        held_blocks=fleet.held_blocks[which],
        paces=fleet.paces[which],
        promised_s=fleet.promised_s[which],
        pd_links=None,
    )
