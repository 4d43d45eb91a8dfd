from __future__ import annotations

import random
from array import array
from collections import Counter

import pytest

from kvroute.conductor.block_index import make_block_index
from kvroute.conductor.events.apply import Applier
from kvroute.conductor.events.pages import Pages
from kvroute.conductor.index import Holder, PrefixIndex
from kvroute.conductor.keys import Namespace, chain_keys, pack_ids, token_keys
from tests.conductor.events.wire import CLEARED, batch, removed, stored

ROOT = 77


@pytest.mark.parametrize(
    ("page", "least", "block"), [(1, 4, 4), (1, 16, 16), (3, 4, 6), (4, 4, 4), (8, 4, 8)]
)
def test_small_pages_become_blocks_of_a_multiple(page: int, least: int, block: int) -> None:
    index = PrefixIndex(2**24, lambda: 0.0)
    applier = Applier(index, Holder("w"), Namespace(model="m"), min_block_tokens=least)
    ids = list(range(48))
    pages = 48 // page
    for i in range(pages):
        event = stored([i + 1], ids[i * page : (i + 1) * page], i or None, page)
        applier.apply(batch(i, event), 0.0)
    assert applier.block_tokens == block
    assert applier.grouped == (page < least)
    keys = {block: token_keys(ids, Namespace(model="m").root("ids"), block)}
    assert index.lookup(keys)[0].gpu_tokens == 48
    last_but_one = pages - 1 if page >= least else pages
    applier.apply(batch(99, removed(last_but_one)), 0.0)
    lost = 2 * block if page >= least else block
    assert index.lookup(keys)[0].gpu_tokens == 48 - lost
    applier.apply(batch(100, CLEARED), 0.0)
    assert index.lookup(keys) == []
    index.check_integrity()


def test_parked_pages_and_pages_in_a_lower_tier() -> None:
    index = PrefixIndex(2**24, lambda: 0.0)
    applier = Applier(index, Holder("w"), Namespace(model="m"), min_block_tokens=4)
    keys = {4: token_keys(range(8), Namespace(model="m").root("ids"), 4)}
    applier.apply(batch(0, stored([3, 4], [2, 3], 2, 1)), 0.0)
    applier.apply(batch(1, stored([1, 2], [0, 1], None, 1)), 0.0)
    assert index.lookup(keys)[0].gpu_tokens == 4
    applier.apply(batch(2, stored([1, 2, 3], [], None, 0, medium="CPU", extra_keys=None)), 0.0)
    applier.apply(batch(3, removed(2)), 0.0)
    assert index.lookup(keys) == []
    applier.apply(batch(4, stored([4], [], None, 0, medium="CPU", extra_keys=None)), 0.0)
    assert index.lookup(keys)[0].cpu_tokens == 4
    assert applier.counts["unresolved"] == applier.counts["orphan_removals"] == 0


@pytest.mark.parametrize("seed", range(20))
def test_a_group_is_held_while_all_of_its_pages_are(seed: int) -> None:
    """Random trees of pages stored and removed in any order, against their definition."""
    dice = random.Random(seed)
    per_group, page = dice.choice(((2, 1), (3, 2), (4, 1)))
    blocks = make_block_index()
    slot = blocks.open()
    pages = Pages(blocks, slot, page, per_group)
    ids: dict[int, list[int]] = {0: []}
    parents: dict[int, int] = {}
    counts: Counter[tuple[int, int]] = Counter()
    for name in range(1, 40):
        parents[name] = dice.choice(sorted(ids))
        ids[name] = ids[parents[name]] + [dice.randrange(1000) for _ in range(page)]

    def path(name: int) -> list[int]:
        return [*path(parents[name]), name] if name else []

    def known(name: int) -> bool:
        return name == 0 or name in pages

    for _ in range(400):
        name, tier = dice.randrange(1, 40), dice.randrange(3)
        if dice.random() < 0.6 and known(parents[name]):
            parent = parents[name] or None
            pages.store(tier, parent, ROOT, array("Q", (name,)), pack_ids(ids[name][-page:]), {})
            counts[name, tier] += 1
        else:
            assert pages.remove(tier, name) == (counts[name, tier] > 0)
            counts[name, tier] = max(0, counts[name, tier] - 1)
    blocks.check_integrity()
    held = [0, 0, 0]
    for name in parents:
        whole = path(name)[-per_group:]
        if len(path(name)) % per_group == 0:
            for tier in range(3):
                held[tier] += all(counts[page_name, tier] for page_name in whole)
            keys = chain_keys(pack_ids(ids[name]), ROOT, per_group * page)
            for tier in range(3):
                expected = 0
                while expected < len(keys) and all(
                    counts[page_name, tier]
                    for page_name in path(name)[expected * per_group : (expected + 1) * per_group]
                ):
                    expected += 1
                found = {row[0]: row[1 + tier] for row in blocks.match(array("Q", keys).tobytes())}
                assert found.get(slot, 0) == expected, f"seed {seed}"
    assert list(blocks.held(slot)[:3]) == held, f"seed {seed}"
    for name, tier in list(counts):
        for _ in range(counts[name, tier]):
            pages.remove(tier, name)
    assert len(pages) == 0
    assert blocks.held(slot)[:3] == (0, 0, 0)
