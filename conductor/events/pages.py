"""Engines whose blocks are smaller than the index's: pages, grouped.

A group is `k` pages in a row, counted from the start of the prompt. The index has it in a tier while that
tier has all of its pages, whatever the order they come and go in. Its name there is that of its last page.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping

from kvroute.conductor.block_index import BlockIndex
from kvroute.conductor.keys import TOKEN_ID_BYTES, chain_keys

TIERS = 3


class _Page:
    __slots__ = ("above", "children", "counts", "extras", "ids", "key", "parent", "place", "seed")

    def __init__(self, parent: int | None, place: int, seed: int, above: int | None) -> None:
        self.parent = parent
        self.place = place
        """In its group, from 0."""
        self.seed = seed
        self.above = above
        """Key of the group before; None at the start of a prompt. `seed` is the same, or the root."""
        self.ids = b""
        """Token ids of its group up to itself."""
        self.extras = b""
        self.key: int | None = None
        """Of the group that it completes; None when it completes none."""
        self.counts = [0] * TIERS
        self.children: set[int] = set()


class Pages:
    """The pages of one slot; hashes are the engine's, folded."""

    def __init__(self, blocks: BlockIndex, slot: int, page_tokens: int, pages_per_group: int) -> None:
        self._blocks = blocks
        self._slot = slot
        self._page_tokens = page_tokens
        self._per_group = pages_per_group
        self._pages: dict[int, _Page] = {}

    def __contains__(self, page_hash: int) -> bool:
        return page_hash in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    def store(
        self,
        tier: int,
        parent: int | None,
        root: int,
        hashes: array[int],
        ids: bytes,
        extras: Mapping[int, bytes],
    ) -> None:
        """A chain of pages that follows `parent` (which must be known), or begins a prompt at `root`."""
        size = self._page_tokens * TOKEN_ID_BYTES
        for index, page_hash in enumerate(hashes):
            if page_hash not in self._pages:
                page_ids = ids[index * size : (index + 1) * size]
                self._add(page_hash, parent, root, page_ids, extras.get(index, b""))
            self.count(tier, page_hash)
            parent = page_hash

    def count(self, tier: int, page_hash: int) -> None:
        """A known page is in a tier once more."""
        page = self._pages[page_hash]
        page.counts[tier] += 1
        if page.counts[tier] == 1:
            for last_hash, last in self._completed(tier, page_hash):
                self._blocks.store(self._slot, tier, last.above, _one(last_hash), _one(last.key or 0))

    def remove(self, tier: int, page_hash: int) -> bool:
        """A page leaves a tier once; False when it was not there."""
        page = self._pages.get(page_hash)
        if page is None or not page.counts[tier]:
            return False
        if page.counts[tier] == 1:
            for last_hash, _ in list(self._completed(tier, page_hash)):
                self._blocks.remove(self._slot, tier, _one(last_hash))
        page.counts[tier] -= 1
        self._prune(page_hash)
        return True

    def _add(self, page_hash: int, parent_hash: int | None, root: int, ids: bytes, extras: bytes) -> None:
        parent = None if parent_hash is None else self._pages[parent_hash]
        if parent is None:
            page = _Page(None, 0, root, None)
        elif parent.key is not None:
            page = _Page(parent_hash, 0, parent.key, parent.key)
        else:
            page = _Page(parent_hash, parent.place + 1, parent.seed, parent.above)
            page.ids, page.extras = parent.ids, parent.extras
        page.ids += ids
        page.extras += extras
        if page.place == self._per_group - 1:
            tokens = self._per_group * self._page_tokens
            (page.key,) = chain_keys(page.ids, page.seed, tokens, {0: page.extras} if page.extras else None)
            page.ids = page.extras = b""
        if parent is not None:
            parent.children.add(page_hash)
        self._pages[page_hash] = page

    def _completed(self, tier: int, page_hash: int) -> Iterator[tuple[int, _Page]]:
        """Last pages of the groups through this page that the tier has whole."""
        if not self._above_held(tier, page_hash):
            return
        below = [page_hash]
        while below:
            current = below.pop()
            page = self._pages[current]
            if not page.counts[tier]:
                continue
            if page.key is not None:
                yield current, page
            else:
                below.extend(page.children)

    def _above_held(self, tier: int, page_hash: int) -> bool:
        page = self._pages[page_hash]
        while page.place and page.parent is not None:
            page = self._pages[page.parent]
            if not page.counts[tier]:
                return False
        return True

    def _prune(self, page_hash: int) -> None:
        """Forget a page that no tier has and none follows, and those before it that only led to it."""
        while True:
            page = self._pages[page_hash]
            if page.children or any(page.counts):
                return
            del self._pages[page_hash]
            if page.parent is None:
                return
            self._pages[page.parent].children.discard(page_hash)
            page_hash = page.parent


def _one(value: int) -> bytes:
    return array("Q", (value,)).tobytes()
