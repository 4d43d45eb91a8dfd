"""KV pulled from another engine of the fleet before a request is queued, as vLLM's p2p tier does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvroute.loadtests.mock_engine.answers import TokenAnswer
from kvroute.loadtests.mock_engine.block_keys import block_keys, root_key

if TYPE_CHECKING:
    from kvroute.loadtests.mock_engine.engine import MockEngine


@dataclass(slots=True)
class Pull:
    """What one request pulls."""

    seconds: float
    """Until it is here."""
    blocks: list[tuple[Sequence[int], int]] = field(default_factory=list)
    """For each prompt, the chain of its keys up to what comes, and where that begins."""


def plan_pull(engine: MockEngine, answer: TokenAnswer) -> Pull | None:
    """What an answer's request pulls, and how long that takes; None when it names no peer.

    The peer gives what its lower tiers hold of the prompt, beyond what is here. A peer that is unknown, or
    holds nothing more, costs no time, and the prompt is computed.
    """
    hints, options = answer.hints, engine.options
    if not hints.pulls:
        return None
    pull = Pull(answer.faults.pull_delay)
    peer = next((each for each in engine.peers if each.port == hints.source_port), None)
    if peer is not None and peer.tiers is not None and engine.tiers is not None:
        root = root_key(peer.hash_seed, answer.call.lora, answer.call.salt)
        for part in answer.call.parts:
            there = peer.tiers.match(block_keys(part.tokens, options.block_size_tokens, root))
            keys = part.keys[:there]
            here = engine.scheduler.cache.match(keys)
            here += engine.tiers.match(keys[here:])
            if there > here:
                pull.blocks.append((keys, here))
    count = sum(len(keys) - start for keys, start in pull.blocks)
    answer.entry.pulled_tokens = count * options.block_size_tokens
    size = answer.entry.pulled_tokens * options.step_speed.kv_bytes_per_token
    pull.seconds += size / options.peer_load_bytes_per_s / options.speed
    return pull
