"""KV pulled from a peer before a request is queued, as by vLLM's p2p tier, with the gateway's deadline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from kvroute.loadtests.mock_engine.scheduler import Scheduler
from kvroute.loadtests.mock_engine.sequences import Sequence as EngineSequence
from kvroute.loadtests.simulator.engine import SimulatedEngine
from kvroute.loadtests.simulator.memory import Memory
from kvroute.loadtests.simulator.placing import Placement
from kvroute.loadtests.simulator.tiers import PulledTiers
from kvroute.loadtests.traces.arrivals import Arrival
from kvroute.policies.costs.links import LinkQueue
from kvroute.router.hints.fields import HintOptions
from kvroute.router.hints.pulling import first_byte_limit_s

_OPTIONS = HintOptions()


class Pulled(Struct):
    """What comes for one attempt, and when."""

    keys: Sequence[int]
    """Of its blocks from `start` on; empty when none comes in time, and the prompt is computed."""
    start: int
    at_s: float
    source: int
    target: int
    lives: tuple[int, int]
    """Of the two engines, when it was asked for."""
    is_here: bool = False


class PeerPulls:
    """The way out of each worker, used in turn by those that pull from it. One that fails meanwhile gives
    nothing.
    """

    def __init__(
        self, memory: Memory, names: Sequence[str], engines: Sequence[SimulatedEngine], block_bytes: int
    ) -> None:
        link = memory.peer_link
        self._queues = [] if link is None else [LinkQueue(link) for _ in engines]
        self._from_gpu = memory.pull_from == "any"
        self._numbers = {name: number for number, name in enumerate(names)}
        self._engines = engines
        self._block_bytes = block_bytes
        self.results: Counter[str] = Counter()
        """Pulls by what came of them: pulled, late, lost, or nothing (the peer had no more than was here)."""

    def begin(self, placement: Placement, arrival: Arrival, now_s: float) -> Pulled | None:
        """Ask the peer that was decided on for what is missing; None where nothing is to be pulled."""
        pull, target = placement.decision.pull, placement.prefill
        if pull is None or not self._queues:
            return None
        source, keys = self._numbers[pull.source.id], arrival.keys.keys
        there, here = self._engines[source], self._engines[target]
        stop = _held(there.scheduler, keys, with_gpu=self._from_gpu)
        start = _held(here.scheduler, keys, with_gpu=True)
        if stop <= start or not there.is_up:
            self.results["nothing"] += 1
            return None
        at_s = self._queues[source].send((stop - start) * self._block_bytes, now_s)
        # The gateway watches the first byte; here the arrival of the KV stands for it.
        limit_s = first_byte_limit_s(pull, placement.expected.prediction, arrival.view, _OPTIONS)
        pulled = Pulled(keys[start:stop], start, at_s, source, target, (there.life, here.life))
        if limit_s is not None and at_s - now_s > limit_s:
            self.results["late"] += 1
            pulled.keys, pulled.at_s = (), now_s + limit_s
        return pulled

    def arrive(self, pulled: Pulled | None) -> None:
        """It is due; the request goes to its engine now."""
        if pulled is None or not pulled.keys:
            return
        if pulled.lives != (self._engines[pulled.source].life, self._engines[pulled.target].life):
            self.results["lost"] += 1
            pulled.keys = ()
            return
        self.results["pulled"] += 1
        pulled.is_here = True
        self._tiers(pulled).receive(pulled.keys)

    def let_go(self, pulled: Pulled | None) -> None:
        """The request has it, or is over; idempotent."""
        if pulled is None:
            return
        if pulled.is_here and pulled.lives[1] == self._engines[pulled.target].life:
            self._tiers(pulled).let_go(pulled.keys)
        pulled.is_here = False

    def _tiers(self, pulled: Pulled) -> PulledTiers:
        tiers = self._engines[pulled.target].scheduler.below
        assert isinstance(tiers, PulledTiers)
        return tiers


def tokens_by_place(
    sequence: EngineSequence, pulled: Pulled | None, block_tokens: int
) -> tuple[int, int, int, int]:
    """Cached tokens of a prompt: found in the GPU, CPU and disk tiers, and pulled."""
    cached, loaded = sequence.cached_tokens or 0, sequence.loaded_tokens
    peer = 0
    if pulled is not None:
        start, stop = pulled.start * block_tokens, (pulled.start + len(pulled.keys)) * block_tokens
        peer = max(0, min(stop, cached) - max(start, cached - loaded))
    disk = min(sequence.disk_tokens, loaded - peer)
    return cached - loaded, loaded - peer - disk, disk, peer


def _held(engine: Scheduler, keys: Sequence[int], *, with_gpu: bool) -> int:
    """Leading blocks that lie below the GPU, or there too."""
    count = 0
    while count < len(keys):
        left = keys[count:]
        more = engine.cache.match(left) if with_gpu else 0
        if engine.below is not None:
            more += engine.below.match(left[more:])
        if not more:
            break
        count += more
    return count
