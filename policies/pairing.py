"""Pairs of a prefill and a decode worker: what KV must travel, and who decodes where nobody chooses."""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.load import WorkerLoad
from kvroute.policies.costs.links import Handoff, Link
from kvroute.policies.costs.pace import Pace
from kvroute.types import PrefixMatch, Worker


def handoff_s(link: Link, prompt_tokens: int, worker: Worker, match: PrefixMatch, pace: Pace) -> float:
    """Seconds for a prompt's KV to reach this decode worker, the link being free.

    Whole blocks travel, but for those that it is known to hold in its GPU. The last token is computed there
    again, so that its block always travels.
    """
    block_tokens = worker.block_size_tokens or 1
    held = min(match.gpu_tokens, max(prompt_tokens - 1, 0) // block_tokens * block_tokens)
    return Handoff(link, pace.speed.kv_bytes_per_token, block_tokens).seconds(prompt_tokens - held)


def roomiest(loads: Sequence[WorkerLoad], among: Sequence[int], turn: int) -> int:
    """Index, out of `among` (not empty), of the worker with the fewest KV tokens promised.

    The decode worker of a policy that chooses none. Ties go to the first at or after `turn`, going round.
    """
    count = len(among)
    start = turn % count
    best = min(range(count), key=lambda i: (loads[among[i]].kv_tokens, (i - start) % count))
    return among[best]
