"""Fleets for the policy tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvroute.load import WorkerLoad
from kvroute.policies.costs.pace import Pace
from kvroute.policies.costs.speeds import Speed
from kvroute.policies.pricing import REQUEST_S
from kvroute.types import NO_MATCH, Fleet, Place, PrefixMatch, Role, Worker


def fleet(
    *requests: int,
    matched: Sequence[int] = (),
    held: Sequence[int] = (),
    names: str = "abcdefghijklmnop",
) -> Fleet:
    """Workers a, b, c... with these leases, matched tokens and held blocks."""
    workers = [Worker(id=name, url=f"http://{name}:8000") for name in names[: len(requests)]]
    loads = [WorkerLoad(requests=count) for count in requests]
    return Fleet(0.0, workers, loads, [PrefixMatch(tokens) for tokens in matched], held)


PLAIN = Speed(
    floor_ms=0.0,
    base_ms=0.0,
    token_ms=0.1,
    attention_ms=0.0,
    decode_base_ms=10.0,
    decode_sequence_ms=0.0,
    decode_context_ms=0.0,
    kv_tokens=1_000_000,
    kv_bytes_per_token=100_000,
)
"""A prefill token takes 0.1 ms, a decode step 10 ms, whatever else there is."""


class Node(NamedTuple):
    """One worker of a priced fleet, at time 0."""

    queue_s: float = 0.0
    """Wait before the prefill, for one request that has made no progress."""
    decoding: int = 0
    cached: int | PrefixMatch = 0
    """Prompt tokens in its GPU, confirmed."""
    speed: Speed = PLAIN
    scale: float = 1.0
    role: Role = Role.BOTH
    kv_tokens: int = 0
    """Of those decoding, together."""
    takes_whole: bool = True
    place: Place = Place()


def priced_fleet(*nodes: Node, names: str = "abcdefghijklmnop", **fields: Any) -> Fleet:
    """Workers a, b, c... with these books."""
    workers, loads, matches, paces = [], [], [], []
    for name, node in zip(names, nodes, strict=False):
        load = WorkerLoad()
        for _ in range(node.decoding):
            load.charge(0.0, prompt_tokens=node.kv_tokens // node.decoding).first_byte(0.0)
        if node.queue_s:
            tokens = int(node.queue_s * 1e3 / node.speed.token_ms)
            queue_s = node.queue_s - REQUEST_S / node.scale
            load.charge(0.0, prefill_s=queue_s, uncached_tokens=tokens, prompt_tokens=tokens)
        cached = node.cached
        workers.append(
            Worker(name, f"http://{name}:8000", node.role, takes_whole=node.takes_whole, place=node.place)
        )
        loads.append(load)
        matches.append(in_gpu(cached) if isinstance(cached, int) else cached)
        paces.append(Pace(node.speed, node.scale, decode_scale=node.scale, kv_tokens=node.speed.kv_tokens))
    return Fleet(0.0, workers, loads, matches, paces=paces, **fields)


def in_gpu(tokens: int) -> PrefixMatch:
    """So many tokens, confirmed in the GPU."""
    return PrefixMatch(tokens, tokens, tokens, tokens) if tokens else NO_MATCH
