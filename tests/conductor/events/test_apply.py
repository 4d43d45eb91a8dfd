from __future__ import annotations

from typing import Any

import pytest

from kvroute.conductor.events import objects
from kvroute.conductor.events.apply import INSISTENCE, Applier
from kvroute.conductor.events.limits import FeedLimits
from kvroute.conductor.index import Holder, PrefixIndex
from kvroute.conductor.keys import Namespace, pack_extras, token_keys
from kvroute.types import PromptKeys
from tests.conductor.events.wire import CLEARED, batch, removed, stored

HOLDER = Holder("w")
TOKENS = list(range(100, 200))


class Bench:
    """One holder, its events and what the index then says."""

    def __init__(self, **options: Any) -> None:
        self.now_s = 0.0
        self.index = PrefixIndex(2**24, lambda: self.now_s)
        self.applier = Applier(self.index, HOLDER, Namespace(model="m"), **options)
        self._seq = 0

    def happens(self, *events: Any) -> None:
        self.applier.apply(batch(self._seq, *events), self.now_s)
        self._seq += 1
        self.index.check_integrity()

    def lookup(self, count: int = 16, block: int = 4, **fields: Any) -> Any:
        (row,) = self.index.lookup({block: self.keys(count, block, **fields)}) or (None,)
        return row

    def gpu_tokens(self, count: int = 16, block: int = 4, **fields: Any) -> int:
        row = self.lookup(count, block, **fields)
        return 0 if row is None else row.gpu_tokens

    @staticmethod
    def keys(count: int, block: int, extras: dict[int, bytes] | None = None, **fields: Any) -> PromptKeys:
        root = Namespace(model=fields.pop("model", "m"), **fields).root("ids")
        return token_keys(TOKENS[:count], root, block, extras)


def chain(first: int, last: int, parent: int | None = None, block: int = 4, **fields: Any) -> dict[str, Any]:
    """Blocks first..last of TOKENS, named by their number from 1."""
    ids = TOKENS[(first - 1) * block : last * block]
    above = parent if parent is not None else (first - 1 or None)
    return stored(range(first, last + 1), ids, above, block, **fields)


def test_the_index_knows_by_our_keys_what_an_engine_named_as_it_liked() -> None:
    bench = Bench()
    bench.happens(chain(1, 2), chain(3, 3))
    assert bench.gpu_tokens() == 12
    assert bench.gpu_tokens(model="other") == 0
    assert bench.applier.block_tokens == 4


def test_two_engines_with_other_hashes_both_match() -> None:
    index = PrefixIndex(2**24, lambda: 0.0)
    for number, worker in enumerate(("a", "b")):
        applier = Applier(index, Holder(worker), Namespace(model="m"))
        names = [number * 10**9 + 7 * i for i in range(1, 4)]
        applier.apply(batch(0, stored(names, TOKENS[:12])), 0.0)
    rows = index.lookup({4: Bench.keys(12, 4)})
    assert [(row.holder.worker_id, row.gpu_tokens) for row in rows] == [("a", 12), ("b", 12)]


def test_base_adapter_and_salt_are_three_namespaces() -> None:
    bench = Bench()
    bench.happens(stored([1, 2], TOKENS[:8]))
    bench.happens(stored([11], TOKENS[:4], lora_id=1, lora_name="x", extra_keys=[["x"]]))
    bench.happens(stored([21, 22, 23], TOKENS[:12], extra_keys=[["x"], None, None]))
    bench.happens(stored([31] * 1, TOKENS[:4], lora_id=1, lora_name="x", extra_keys=[["x", "x"]]))
    bench.happens(stored([32], TOKENS[4:8], 31, lora_id=1, lora_name="x", extra_keys=[["x"]]))
    assert bench.gpu_tokens() == 8
    assert bench.gpu_tokens(adapter="x") == 4
    assert bench.gpu_tokens(cache_salt="x") == 12
    assert bench.gpu_tokens(adapter="x", cache_salt="x") == 8
    assert bench.gpu_tokens(cache_salt="y") == 0


def test_media_are_part_of_the_keys() -> None:
    bench = Bench()
    bench.happens(stored([1, 2], TOKENS[:8], extra_keys=[None, [["image", 1]]]))
    assert bench.gpu_tokens() == 4
    assert bench.gpu_tokens(extras={1: pack_extras(["image"])}) == 8


def test_stored_twice_and_removed_once_is_still_there() -> None:
    bench = Bench()
    bench.happens(chain(1, 2), chain(1, 2), removed(1, 2))
    assert bench.gpu_tokens() == 8
    bench.happens(removed(2))
    assert bench.gpu_tokens() == 4
    bench.happens(removed(1))
    assert bench.gpu_tokens() == 0


def test_a_removal_of_nothing_is_counted_and_harmless() -> None:
    bench = Bench()
    bench.happens(removed(77))
    bench.happens(chain(1, 2), removed(77, 1))
    assert bench.applier.counts["orphan_removals"] == 1
    assert bench.gpu_tokens() == 0


def test_a_cleared_cache_is_empty_and_its_slot_another() -> None:
    bench = Bench()
    bench.happens(chain(1, 3))
    slot = bench.index.slot(HOLDER)
    bench.happens(CLEARED, chain(1, 1))
    assert bench.gpu_tokens() == 4
    assert bench.index.slot(HOLDER) != slot
    assert bench.applier.counts["clears"] == 1


def test_lower_tiers_are_resolved_by_hash_when_the_event_has_no_tokens() -> None:
    bench = Bench()
    bench.happens(chain(1, 3))
    bare = {"block_size": 0, "extra_keys": None, "group_idx": None, "kv_cache_spec_kind": None}
    bench.happens(stored([1, 2, 99], [], medium="CPU") | bare)
    bench.happens(removed(1, 2, 3))
    row = bench.lookup()
    assert (row.gpu_tokens, row.cpu_tokens, row.confirmed_tokens) == (0, 8, 8)
    assert bench.applier.counts["unresolved"] == 1
    bench.happens(removed(1, medium="cpu", group_idx=None))
    assert bench.lookup() is None


def test_a_lower_tier_with_tokens_stands_by_itself() -> None:
    bench = Bench()
    bench.happens(chain(1, 2, medium="cpu_pinned"), chain(1, 1, medium="disk"))
    row = bench.lookup()
    assert (row.gpu_tokens, row.cpu_tokens, row.disk_tokens) == (0, 8, 4)


@pytest.mark.parametrize(
    "kind", ["sliding_window", "mamba", "chunked_local_attention", "cross_attention", "unknown"]
)
def test_other_groups_create_no_residency_and_remove_none(kind: str) -> None:
    bench = Bench()
    bench.happens(chain(1, 3, group_idx=1, kv_cache_spec_kind=kind))
    assert bench.gpu_tokens() == 0
    bench.happens(chain(1, 3))
    bench.happens(removed(1, 2, 3, group_idx=1))
    assert bench.gpu_tokens() == 12
    assert bench.applier.counts["foreign_groups"] == 2


@pytest.mark.parametrize("kind", [None, "full_attention", "mla_attention", "sink_full_attention"])
def test_dense_groups_do(kind: str | None) -> None:
    bench = Bench()
    bench.happens(chain(1, 3, kv_cache_spec_kind=kind, group_idx=None if kind is None else 2))
    assert bench.gpu_tokens() == 12


def test_of_two_dense_groups_a_block_is_gone_when_one_has_lost_it() -> None:
    bench = Bench()
    bench.happens(chain(1, 2), chain(1, 2, group_idx=1))
    bench.happens(removed(2, group_idx=1))
    assert bench.gpu_tokens() == 4
    bench.happens(removed(2, group_idx=0))
    assert bench.gpu_tokens() == 4


def test_an_unknown_medium_is_counted_and_holds_nothing() -> None:
    bench = Bench()
    bench.happens(chain(1, 2, medium="tape"), removed(1, medium="tape"))
    assert bench.gpu_tokens() == 0
    assert bench.applier.counts["unknown_media"] == 2


def test_the_block_size_is_that_of_the_events() -> None:
    bench = Bench(block_tokens=16)
    bench.happens(chain(1, 2, block=8))
    assert bench.applier.block_tokens == 8
    assert bench.gpu_tokens(16, 8) == 16
    assert bench.applier.counts["block_size_changes"] == 1


def test_blocks_of_another_size_are_refused_loudly_until_there_are_many() -> None:
    bench = Bench()
    bench.happens(chain(1, 4))
    bench.happens(chain(1, 1, block=8))
    assert bench.gpu_tokens() == 16
    assert bench.applier.counts["block_size_refused"] == 1
    assert bench.applier.reasons == ("block_size",)
    for _ in range(INSISTENCE - 2):
        bench.happens(chain(1, 1, block=8))
    assert bench.gpu_tokens() == 16
    bench.happens(chain(1, 2, block=8))
    assert (bench.gpu_tokens(), bench.gpu_tokens(16, 8)) == (0, 16)


def test_after_a_clear_the_engine_may_have_another_block_size() -> None:
    bench = Bench()
    bench.happens(chain(1, 4))
    bench.happens(CLEARED, chain(1, 2, block=8))
    assert bench.gpu_tokens(16, 8) == 16
    assert bench.applier.counts["block_size_refused"] == 0


def test_a_missing_parent_parks_the_event_until_it_comes() -> None:
    bench = Bench()
    bench.happens(chain(3, 4), chain(5, 5), chain(1, 1))
    assert bench.gpu_tokens(20) == 4
    assert bench.applier.counts["orphans"] == 3
    assert bench.applier.reasons == ("orphans",)
    bench.happens(chain(2, 2))
    assert bench.gpu_tokens(20) == 20
    assert bench.applier.reasons == ()
    assert not bench.applier.orphans


def test_a_parked_block_that_was_removed_does_not_come_back() -> None:
    bench = Bench()
    bench.happens(chain(2, 4), removed(3))
    assert bench.applier.counts["orphan_removals"] == 0
    bench.happens(chain(1, 1))
    assert bench.gpu_tokens() == 8
    bench.happens(removed(4), removed(2))
    assert bench.gpu_tokens() == 4
    bench.happens(stored([4], TOKENS[12:16], 3))
    assert bench.gpu_tokens() == 4


def test_a_parked_block_that_went_to_a_lower_tier_is_there() -> None:
    bench = Bench()
    bench.happens(chain(2, 2), stored([2], [], medium="CPU", block_size=4, extra_keys=None), removed(2))
    bench.happens(chain(1, 1, medium="CPU"))
    row = bench.lookup()
    assert (row.gpu_tokens, row.cpu_tokens) == (0, 8)


def test_parked_events_expire_and_say_so() -> None:
    bench = Bench(limits=FeedLimits(parked_s=10.0))
    bench.happens(chain(3, 4))
    bench.now_s = 9.0
    bench.happens(chain(1, 1))
    assert len(bench.applier.orphans) == 2
    bench.now_s = 10.5
    bench.happens()
    assert (len(bench.applier.orphans), bench.applier.orphans.expired) == (0, 2)
    assert bench.applier.reasons == ("orphans",)
    bench.happens(chain(2, 2))
    assert bench.gpu_tokens() == 8
    bench.happens(CLEARED)
    assert bench.applier.reasons == ()


def test_parking_is_bounded() -> None:
    bench = Bench(limits=FeedLimits(parked_bytes=10_000))
    for number in range(1000):
        bench.happens(stored([number + 5000], TOKENS[:4], number + 9000))
    assert len(bench.applier.orphans) < 20
    assert bench.applier.orphans.expired + len(bench.applier.orphans) == 1000


def test_bad_events_lower_trust_until_the_cache_is_cleared() -> None:
    bench = Bench()
    bench.happens(chain(1, 1), stored([2], [1, 2, 3], 1))
    assert (bench.applier.counts["bad_events"], bench.applier.reasons) == (1, ("bad_events",))
    assert bench.gpu_tokens() == 4
    bench.happens(CLEARED)
    assert bench.applier.reasons == ()


def test_news_of_a_removed_worker_changes_nothing() -> None:
    bench = Bench()
    bench.happens(chain(1, 2))
    bench.index.remove_worker("w")
    other = Applier(bench.index, Holder("other"), Namespace(model="m"), block_tokens=4)
    other.apply(batch(0, chain(1, 1)), 0.0)
    while bench.index.sweep():
        pass
    bench.happens(chain(3, 3), removed(1), CLEARED, chain(1, 1))
    (row,) = bench.index.lookup({4: bench.keys(16, 4)})
    assert (row.holder.worker_id, row.gpu_tokens) == ("other", 4)


def test_objects_of_a_store_are_known_by_the_engines_names() -> None:
    bench = Bench()
    bench.happens(chain(1, 3))
    store = Applier(bench.index, Holder("store"), Namespace(model="m"), resolve=bench.applier.key_of)

    def change(kind: str, *hashes: int, **fields: Any) -> None:
        event = {"event_type": kind, "seq_hashes": list(hashes), "medium": "cpu", "object_key": ""} | fields
        store.apply(batch(0, event), 0.0)

    def held() -> tuple[int, int]:
        rows = {row.holder.worker_id: row for row in bench.index.lookup({4: bench.keys(16, 4)})}
        row = rows.get("store")
        return (row.cpu_tokens, row.disk_tokens) if row else (0, 0)

    change("stored", 1, 2, 99, object_key="o")
    change("stored", 1, medium="disk", object_key="p")
    assert held() == (8, 4)
    assert store.counts["unresolved"] == 1
    change("removed", object_key="o")
    assert held() == (0, 4)
    change("cleared")
    assert held() == (0, 0)
    bench.index.check_integrity()


def test_names_of_objects_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "OBJECTS", 2)
    bench = Bench()
    bench.happens(chain(1, 3))
    store = Applier(bench.index, Holder("store"), Namespace(model="m"), resolve=bench.applier.key_of)
    for name in (3, 2, 1):
        event = {"event_type": "stored", "seq_hashes": [name], "object_key": f"o{name}"}
        store.apply(batch(0, event), 0.0)
    held = bench.index.held_blocks("store")
    for name, left in ((3, held), (2, held - 1), (1, held - 2)):  # the first one's name is forgotten
        store.apply(batch(0, {"event_type": "removed", "object_key": f"o{name}"}), 0.0)
        assert bench.index.held_blocks("store") == left
    assert held == 3


BAD = {"type": "BlockRemoved", "block_hashes": "no list"}


def test_what_was_not_read_is_a_flaw_wherever_it_stands_in_its_batch() -> None:
    for events in ((chain(1, 2), BAD), (CLEARED, chain(1, 2), BAD), (BAD, CLEARED, chain(1, 2))):
        bench = Bench()
        bench.happens(*events)
        assert bench.applier.reasons == ("bad_events",)
    bench.happens(CLEARED)
    assert bench.applier.reasons == ()


def test_a_removal_from_a_tier_that_is_not_known_is_a_flaw() -> None:
    bench = Bench()
    bench.happens(chain(1, 2), removed(2, medium="HBM9"))
    assert bench.applier.counts["unknown_media"] == 1
    assert bench.applier.reasons == ("bad_events",)


def test_children_that_waited_for_a_parent_which_came_and_went_are_not_keyed_without_it() -> None:
    bench = Bench()
    bench.happens(chain(3, 3), chain(2, 2), removed(2), chain(1, 1), chain(2, 2))
    assert bench.gpu_tokens() == 8
    assert bench.index.held_blocks(HOLDER.worker_id) == 2
    assert bench.applier.reasons == ("orphans",)
