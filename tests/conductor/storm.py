"""Random traffic on mock engines, straight on their schedulers, and what they then hold in our keys."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace

from kvroute.conductor.events import EventSource, discovered_sources
from kvroute.conductor.index import Holder, PrefixIndex
from kvroute.conductor.keys import Namespace, pack_ids, token_keys
from kvroute.loadtests.mock_engine import MockEngine
from kvroute.loadtests.mock_engine.block_keys import block_keys, root_key
from kvroute.loadtests.mock_engine.sequences import Sequence

MODEL = Namespace(model="mock")


class Prompts:
    """A pool of prompts with shared beginnings, in several namespaces."""

    def __init__(self, dice: random.Random, block: int, blocks: int) -> None:
        self._dice = dice
        self._block = block
        self._blocks = blocks
        self._stems = [self._ids(dice.randrange(1, blocks)) for _ in range(6)]

    def _ids(self, blocks: int) -> array[int]:
        return array("I", (self._dice.randrange(30_000) for _ in range(blocks * self._block)))

    def draw(self) -> tuple[array[int], str | None, str | None]:
        """(token ids, adapter, salt)"""
        dice = self._dice
        ids = dice.choice(self._stems) + self._ids(dice.randrange(2))
        if dice.random() < 0.2:
            ids = ids[: dice.randrange(1, len(ids))] + self._ids(1)
        return ids, dice.choice((None, None, "ad1")), dice.choice((None, None, None, "x", "ad1"))


class Driven:
    """One engine, what was ever computed on it, and the truth."""

    def __init__(self, engine: MockEngine, block: int) -> None:
        self.engine = engine
        self.block = block
        """Tokens of a block of the index: a multiple of the engine's."""
        self._per_group = block // engine.options.block_size_tokens
        self._names: dict[int, tuple[int, ...]] = {}
        """Our key -> the engine's keys of its pages, for everything this incarnation computed."""
        self._incarnation = 0

    @property
    def source(self) -> EventSource:
        """Where it publishes."""
        assert self.engine.events is not None
        return discovered_sources({"0": self.engine.events.source()}, "127.0.0.1")[0]

    @property
    def last_seq(self) -> int:
        """Of the last batch published; -1 before any."""
        assert self.engine.events is not None
        return self.engine.events.seq - 1

    def run(self, prompt: tuple[array[int], str | None, str | None], output: int) -> None:
        """Prefill and decode one request, in no time."""
        ids, adapter, salt = prompt
        engine, size = self.engine, self.engine.options.block_size_tokens
        tokens = ids + array("I", (7 * i % 30_000 for i in range(output)))
        names = block_keys(tokens, size, root_key(engine.hash_seed, adapter, salt))
        self._learn(tokens, adapter, salt, names)
        part = SimpleNamespace(all_tokens=tokens)
        answer = SimpleNamespace(call=SimpleNamespace(parts=[part], lora=adapter, salt=salt))
        sequence = Sequence("r", len(ids), output, names, (answer, 0))
        engine.scheduler.add(sequence)
        engine.driver._publish(engine.scheduler.admit_instantly())
        engine.driver._publish(engine.scheduler.finish_instantly(sequence, output), one_by_one=True)

    def clear(self) -> None:
        """Reset the prefix cache; it is said with the next batch."""
        assert self.engine.events is not None
        self.engine.events.cleared = self.engine.scheduler.cache.clear() or self.engine.events.cleared

    def truth(self) -> set[int]:
        """Our keys of all blocks it holds."""
        cache = self.engine.scheduler.cache
        return {key for key, pages in self._names.items() if all(page in cache for page in pages)}

    def cached_tokens(self, keys: list[int]) -> int:
        """Contiguous tokens from the start that it holds."""
        held = self.truth()
        whole = next((i for i, key in enumerate(keys) if key not in held), len(keys))
        return whole * self.block

    def _learn(self, tokens: array[int], adapter: str | None, salt: str | None, names: list[int]) -> None:
        if self.engine.incarnation != self._incarnation:
            self._incarnation = self.engine.incarnation
            self._names.clear()
        for i, key in enumerate(our_keys((tokens, adapter, salt), self.block)):
            self._names[key] = tuple(names[i * self._per_group : (i + 1) * self._per_group])


def our_keys(prompt: tuple[array[int], str | None, str | None], block: int) -> list[int]:
    ids, adapter, salt = prompt
    root = Namespace(model="mock", adapter=adapter, cache_salt=salt).root("ids")
    return list(token_keys(pack_ids(ids), root, block).keys)


def known(index: PrefixIndex, holder: Holder) -> set[int]:
    """Our keys of all blocks that the index thinks a holder has in its GPU."""
    if holder not in index.holders_of(holder.worker_id):
        return set()
    return {key for tier, _, _, key, _ in index.blocks.export(index.slot(holder)) if tier == 0}
