"""A GPU cache by another rule than LRU: any eviction of `conductor.tiers`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from kvroute.clock import Clock
from kvroute.conductor.tiers.base import BlockInfo, Eviction
from kvroute.conductor.tiers.stack import BlockModel
from kvroute.loadtests.mock_engine.block_cache import BlockCache, CacheCorruption

MAX_COMING = 8
"""Times the capacity: blocks of begun sequences that are remembered until they are computed."""


class RankedCache(BlockCache):
    """Leaf first, in the order of an `Eviction`.

    A block has to lie in the GPU until its sequence lets go of it, so nothing can be kept out: what the
    eviction would refuse is the first to go instead, once the cache has been full.
    """

    def __init__(
        self,
        capacity_blocks: int,
        eviction: Eviction,
        model: BlockModel,
        block_tokens: int,
        clock: Clock,
        conversations: Conversations | None = None,
    ) -> None:
        super().__init__(capacity_blocks)
        self._eviction = eviction
        self._model = model
        self._block_tokens = block_tokens
        self._clock = clock
        self._conversations = conversations
        self._infos: dict[int, BlockInfo] = {}
        self._children: dict[int, int] = {}
        self._coming: OrderedDict[int, tuple[int, int, int]] = OrderedDict()
        """Of blocks to be computed: turn, new tokens and blocks of the prompt."""
        self._refused: OrderedDict[int, None] = OrderedDict()
        """Idle leaves that the eviction would not have let in."""
        self._let_in: set[int] = set()
        """What it did let in, or had room for when it came."""
        self._was_full = False

    def begin(self, keys: Sequence[int], hits: int, prompt_tokens: int) -> None:
        now_s, blocks = self._clock(), prompt_tokens // self._block_tokens
        turn, known = 1, hits
        if self._conversations is not None:
            turn, known = self._conversations.next_turn(keys[:blocks])
        new_tokens = prompt_tokens - known * self._block_tokens
        for key in keys[:hits]:
            block = self._infos[key]
            block = replace(
                block, reads=block.reads + 1, last_access_s=now_s, turn=turn, new_tokens=new_tokens
            )
            self._infos[key] = block
            self._eviction.record(block)
        for key in keys[hits:]:
            self._coming[key] = turn, new_tokens, blocks
        while len(self._coming) > MAX_COMING * self.capacity_blocks:  # of sequences that were broken off
            self._coming.popitem(last=False)

    def acquire(self, keys: Sequence[int]) -> None:
        for key in keys:
            if not self._refs[key]:
                self._keep(key)
            self._refs[key] += 1

    def allocate(self, blocks: int) -> bool:
        short = blocks - self.free_blocks
        if short > len(self._idle):
            return False
        for _ in range(short):
            self._was_full = True
            self._evict()
        self.free_blocks += max(short, 0) - blocks
        return True

    def publish(self, key: int, parent: int | None) -> bool:
        coming = self._coming.pop(key, (1, 0, 0))
        count = self._refs.get(key)
        if count is not None:
            if not count:
                self._keep(key)
            self._refs[key] = count + 1
            self.free_blocks += 1
            return False
        self._refs[key] = 1
        self._parents[key] = parent
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        block = self._infos[key] = self._computed(key, parent, *coming)
        self._eviction.record(block)
        return True

    publish_run = BlockCache.publish_each

    def release(self, keys: Sequence[int], private_blocks: int) -> None:
        super().release(keys, private_blocks)
        for key in reversed(keys):
            if not self._refs[key]:
                if not self._was_full:
                    self._let_in.add(key)
                self._offer(key)

    def clear(self) -> bool:
        idle = list(self._idle)
        if not super().clear():
            return False
        for key in idle:
            self._eviction.withdraw(key)
        for book in (self._infos, self._children, self._coming, self._refused, self._let_in):
            book.clear()
        return True

    def offer_again(self, keys: Iterable[int]) -> None:
        """What the eviction thinks of these leading blocks of a prompt has changed."""
        for key in keys:
            if key not in self._refs:
                return
            if not self._refs[key]:
                self._offer(key)

    def check_integrity(self, private_blocks: int = 0) -> None:
        super().check_integrity(private_blocks)
        children: dict[int, int] = {}
        for parent in self._parents.values():
            if parent is not None:
                children[parent] = children.get(parent, 0) + 1
        if children != self._children or self._infos.keys() != self._refs.keys():
            raise CacheCorruption(f"{self!r} miscounts successors or blocks")

    def _computed(
        self, key: int, parent: int | None, turn: int, new_tokens: int, prompt_blocks: int
    ) -> BlockInfo:
        depth, model = 0 if parent is None else self._infos[parent].depth + 1, self._model
        return BlockInfo(
            key,
            parent,
            model.block_bytes,
            depth,
            prompt_blocks,
            model.recompute_s(depth),
            0,
            self._clock(),
            turn,
            new_tokens,
        )

    def _keep(self, key: int) -> None:
        """An idle block is referenced again."""
        del self._idle[key]
        if key in self._refused:
            del self._refused[key]
        else:
            self._eviction.withdraw(key)

    def _offer(self, key: int) -> None:
        """An idle block may go, if it is a leaf."""
        if key in self._children or key in self._refused:
            return
        block = self._infos[key]
        if key not in self._let_in and self._eviction.refuses(block, self._clock()):
            self._refused[key] = None
            return
        self._let_in.add(key)
        self._eviction.offer(block)

    def _evict(self) -> None:
        if self._refused:
            key, _ = self._refused.popitem(last=False)
        else:
            victim = self._eviction.victim(None, self._clock())
            assert victim is not None, "an idle block has an idle leaf below it"
            key = victim
        parent = self._parents.pop(key)
        del self._refs[key], self._idle[key], self._infos[key]
        self._let_in.discard(key)
        self._removed.append(key)
        if parent is None:
            return
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
            return
        del self._children[parent]
        if not self._refs[parent]:
            self._offer(parent)


class Conversations:
    """Turns of conversations, told by their prompts alone: a prompt goes on from another one when the longest
    part of it that was seen before is that whole other one. A first block alone says nothing, as all may
    share it.
    """

    def __init__(self, capacity_blocks: int = 2**19) -> None:
        self._capacity = capacity_blocks
        self._seen: OrderedDict[int, int] = OrderedDict()
        """Key -> the turn whose prompt it ends; 0 for one in the midst of prompts."""

    def next_turn(self, keys: Sequence[int]) -> tuple[int, int]:
        """The turn of a prompt of these full blocks, and how many leading ones were seen before."""
        seen = self._seen
        known = next((count for count, key in enumerate(keys) if key not in seen), len(keys))
        turn = 1 + (seen[keys[known - 1]] if known > 1 else 0)
        for key in keys:
            seen[key] = seen.pop(key, 0)
        if keys:
            seen[keys[-1]] = max(seen[keys[-1]], turn)
        while len(seen) > self._capacity:
            seen.popitem(last=False)
        return turn, known
