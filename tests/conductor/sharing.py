"""Gateways that are nothing but what the shared state needs of one."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from kvroute.conductor.shared import LocalWorker, OthersLoad, SharedOptions, SharedState, SharedWorker
from kvroute.types import KeyMode, PromptKeys
from tests.redis import RedisServer

URL = "http://10.0.0.1:8000"


@dataclass
class Replica:
    """Records what it is told; `workers` is what it has registered."""

    workers: dict[str, LocalWorker] = field(default_factory=lambda: {URL: LocalWorker("w~1", 100.0)})
    loads: dict[str, tuple[int, int]] = field(default_factory=dict)
    predicted: list[tuple[str, PromptKeys]] = field(default_factory=list)
    others: dict[str, OthersLoad] = field(default_factory=dict)
    adopted: list[SharedWorker] = field(default_factory=list)
    fails: bool = False
    """Every call raises."""

    def local_loads(self) -> Iterable[tuple[str, int, int]]:
        self._check()
        return [(url, *load) for url, load in self.loads.items()]

    def find_worker(self, url: str) -> LocalWorker | None:
        self._check()
        return self.workers.get(url)

    def predict(self, worker_id: str, keys: PromptKeys) -> None:
        self._check()
        self.predicted.append((worker_id, keys))

    def others_load(self, url: str, load: OthersLoad) -> None:
        self._check()
        self.others[url] = load

    def adopt(self, worker: SharedWorker) -> None:
        self._check()
        self.adopted.append(worker)

    def _check(self) -> None:
        if self.fails:
            raise RuntimeError("told to fail")


@contextlib.asynccontextmanager
async def sharing(
    server: RedisServer, replica: Replica, name: str = "a", within_s: float = 2.0, **options: object
) -> AsyncIterator[SharedState]:
    """A started replica; its counters must agree with its queues on the way out."""
    fields: dict[str, object] = {"url": server.url, "password": server.password, "timeout_s": 1.0, **options}
    state = SharedState(SharedOptions(**fields), name, replica)  # type: ignore[arg-type]
    try:
        await state.start(within_s)
        yield state
    finally:
        await state.stop()
        assert state.stats.queue_bytes == 0
        assert not state.stats.connected


def prompt(blocks: int, seed: int, block_tokens: int = 16, tail_tokens: int = 3) -> PromptKeys:
    generator = random.Random(seed)
    keys = [generator.getrandbits(64) for _ in range(blocks)]
    return PromptKeys(KeyMode.TOKENS, keys, block_tokens, blocks * block_tokens + tail_tokens)
