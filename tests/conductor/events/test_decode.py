from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvroute.conductor.events.batches import (
    Batch,
    Cleared,
    Removed,
    StoreChange,
    Stored,
    Undecodable,
    fold_one,
)
from kvroute.conductor.events.decode import MAX_EVENTS, decode, ends_replay
from kvroute.conductor.keys import pack_ids
from kvroute.types import Tier
from tests.conductor.events.wire import (
    CLEARED,
    FRAMES,
    as_array,
    batch,
    captured,
    encode,
    frames,
    only,
    packed,
    removed,
    stored,
)

CAPTURED = sorted(FRAMES.glob("*.bin"))


@pytest.mark.parametrize("path", CAPTURED, ids=lambda path: path.stem)
def test_captured_frames_decode_and_their_array_twins_equally(path: Any) -> None:
    message = captured(path)
    if ends_replay(message):
        assert message == [b"", b"", b"\xff" * 8, b""]
        return
    decoded = decode(message)
    assert isinstance(decoded, Batch)
    assert (decoded.bad, decoded.unknown, decoded.dp_rank) == (0, 0, 0)
    assert decoded.events
    assert decoded.ts_s > 1.7e9
    ts_s, events, rank = msgspec.msgpack.decode(message[-1])
    twin = decode([b"", message[-2], encode([ts_s, [as_array(event) for event in events], rank])])
    assert isinstance(twin, Batch)
    assert twin.events == decoded.events


def test_a_captured_store_event_says_everything() -> None:
    decoded = decode(captured(FRAMES / "sha256_int_salt_lora_evict-0003.bin"))
    assert isinstance(decoded, Batch)
    assert decoded.seq == 3
    (event,) = decoded.events
    assert isinstance(event, Stored)
    hashes = packed(10508593743020381387, 17588727190958502799, 17792644561660296202, 8421879908150581067)
    assert event.hashes == hashes
    assert (event.parent, event.block_tokens, event.tier, event.lora_name) == (None, 32, Tier.GPU, "ad1")
    assert event.extra_keys == (("ad1",),) * 4
    assert event.token_ids[:8] == pack_ids([850, 2631])
    assert len(event.token_ids) == 4 * 32 * 4
    assert (event.group, event.kind) == (0, "full_attention")


def test_captured_names_of_32_bytes_are_folded_the_same_in_every_field() -> None:
    decoded = decode(captured(FRAMES / "sha256_cbor_bytes_P-0002.bin"))
    assert isinstance(decoded, Batch)
    event = decoded.events[-1]
    assert isinstance(event, Stored)
    first = bytes.fromhex("c069796f30e10c6167bc74c75a745beffabdc55328033c40bb7ae968df267deb")
    assert event.hashes[:8] == packed(xxh3_64_intdigest(first))


def test_removals_come_before_the_store_that_needed_the_room() -> None:
    decoded = decode(captured(FRAMES / "sha256_int_salt_lora_evict-0009.bin"))
    assert isinstance(decoded, Batch)
    assert [type(event) for event in decoded.events] == [Removed] * 14 + [Stored]


@pytest.mark.parametrize(
    "payload",
    [
        [1.5, [stored([1], [1, 2, 3, 4])]],
        [1.5, [stored([1], [1, 2, 3, 4])], 3],
        [1.5, [stored([1], [1, 2, 3, 4])], None, "later field", {"and": 1}],
        {"ts": 1.5, "events": [stored([1], [1, 2, 3, 4])], "data_parallel_rank": 3},
        {"ts": 1.5, "events": [stored([1], [1, 2, 3, 4])], "dp_rank": 3, "other": []},
        [1.5, [["BlockStored", [1], None, [1, 2, 3, 4], 4, None]]],
        [1.5, [["BlockStored", [1], None, [1, 2, 3, 4], 4]], 3],
        [1.5, [["BlockStored", [1], None, [1, 2, 3, 4], 4, None, "GPU", None, [None], 0, "mla", 1, 2]], 3],
        [1, [stored([1], [1, 2, 3, 4], session_id="s", locality="LOCAL", later=[{}])]],
    ],
)
def test_batches_of_two_or_three_elements_maps_short_and_long_tails(payload: Any) -> None:
    decoded = decode([b"", (7).to_bytes(8, "big"), encode(payload)])
    assert isinstance(decoded, Batch)
    assert (decoded.seq, decoded.bad, decoded.unknown) == (7, 0, 0)
    assert decoded.dp_rank in (None, 3)
    (event,) = decoded.events
    assert isinstance(event, Stored)
    assert (event.hashes, event.token_ids, event.block_tokens) == (packed(1), pack_ids([1, 2, 3, 4]), 4)
    assert event.tier is Tier.GPU


def test_what_a_replay_answers_in_new_and_old_builds() -> None:
    _, seq, payload = frames(5, CLEARED)
    for answer in ([b"", b"topic", seq, payload], [b"", seq, payload]):
        decoded = decode(answer)
        assert isinstance(decoded, Batch)
        assert (decoded.seq, decoded.events) == (5, (Cleared(),))
    assert ends_replay([b"", b"", b"\xff" * 8, b""])
    assert ends_replay([b"", b"\xff" * 8, b""])
    assert not ends_replay([b"", seq, payload])


def test_names_of_any_kind() -> None:
    assert fold_one(-1) == 2**64 - 1
    assert fold_one(2**64 - 1) == 2**64 - 1
    assert fold_one(b"\x00" * 7 + b"\x05") == 5
    assert fold_one(b"x" * 32) == xxh3_64_intdigest(b"x" * 32)
    event = only(removed(-2, b"x" * 32, 7))
    assert isinstance(event, Removed)
    assert event.hashes == packed(2**64 - 2, fold_one(b"x" * 32), 7)


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.GPU),
        ("GPU", Tier.GPU),
        ("gpu", Tier.GPU),
        ("CPU", Tier.CPU),
        ("cpu_pinned", Tier.CPU),
        ("CPU_PINNED", Tier.CPU),
        ("host", Tier.CPU),
        ("disk", Tier.DISK),
        ("STORAGE", Tier.DISK),
        ("tape", None),
    ],
)
def test_media_are_tiers(medium: str | None, tier: Tier | None) -> None:
    event = only(stored([1], [1, 2, 3, 4], medium=medium))
    assert isinstance(event, Stored)
    assert event.tier is tier


def test_one_bad_event_costs_only_itself() -> None:
    decoded = batch(
        0,
        removed(1),
        stored([2], [1, 2, 3], block_size=4),
        stored([2], [1, 2, 3, 4], block_size=0),
        stored([2, 3], [1, 2, 3, 4]),
        stored([2], [1, 2, 3, -4]),
        stored([2], [1, 2, 3, 2**32]),
        stored([2], [[1, 2], [2, 3], [3, 4], [4, 5]]),
        stored([2], [1, 2, 3, 4], extra_keys=[None, None]),
        stored([2], [1, 2, 3, 4], extra_keys=[[{"a": 1}]]),
        {"type": "BlockStored"},
        ["BlockRemoved"],
        {"no": "type"},
        {"type": "BlockPinned", "block_hashes": [1]},
        ["BlockPinned", [1]],
        [],
        None,
        5,
        "BlockStored",
        removed(9),
    )
    assert decoded.events == (Removed(packed(1), Tier.GPU, 0), Removed(packed(9), Tier.GPU, 0))
    assert (decoded.bad, decoded.unknown) == (15, 2)


def test_extra_keys_keep_their_kinds_and_none_at_all_are_none() -> None:
    event = only(stored([1, 2], range(8), extra_keys=[["ad", ["image", -3], "salt", b"\x00"], []]))
    assert isinstance(event, Stored)
    assert event.extra_keys == (("ad", ("image", -3), "salt", b"\x00"), None)
    for nothing in (None, [], [None, None], [[], []]):
        event = only(stored([1, 2], range(8), extra_keys=nothing))
        assert isinstance(event, Stored)
        assert event.extra_keys is None


def test_the_master_of_a_mooncake_store() -> None:
    change = {
        "event_id": 12,
        "timestamp": 1.0,
        "event_type": "stored",
        "tenant_id": "default",
        "backend_id": "node-1",
        "medium": "disk",
        "seq_hashes": [5, 6],
        "object_key": "k",
    }
    expected = StoreChange("stored", packed(5, 6), Tier.DISK, "k")
    for payload in ([1.0, [change]], [change], change):
        decoded = decode([b"", bytes(8), encode(payload)])
        assert isinstance(decoded, Batch)
        assert decoded.events == (expected,)
    assert batch(0, change | {"event_type": "moved"}).unknown == 1
    assert only({"event_type": "cleared"}) == StoreChange("cleared", b"", Tier.CPU)


@pytest.mark.parametrize(
    ("message", "reason", "seq"),
    [
        ([], "frames", None),
        ([b""] * 5, "frames", None),
        ([b"t", b"\0" * 7, b""], "seq", None),
        ([b"t", b"\xff" * 8, b"\x90"], "seq", None),
        ([b"t", b"\0" * 8, b""], "payload", 0),
        ([b"t", b"\0" * 8, b"\xc1"], "payload", 0),
        ([b"t", b"\0" * 8, b"\x91" * 100_000], "payload", 0),
        ([b"t", b"\0" * 8, b"\x92\x01" + b"\x91" * 100_000], "payload", 0),
        ([b"t", b"\0" * 8, b"\x92\x01\xdd\x00\x00\x00\x05\x90"], "payload", 0),
        ([b"t", b"\0" * 8, b"\x92\x01\xdd\xff\xff\xff\xff"], "payload", 0),
        ([b"t", b"\0" * 8, encode([1, [0] * (MAX_EVENTS + 1)])], "events", 0),
        ([b"t", b"\0" * 8, encode([{}] * (MAX_EVENTS + 1))], "events", 0),
        ([b"t", b"\0" * 8, bytes(1001)], "size", 0),
        ([b"t", b"\0" * 8, encode("text")], "payload", 0),
        ([b"t", b"\0" * 8, encode(["late", []])], "payload", 0),
    ],
)
def test_what_gives_no_batch_says_why(message: list[bytes], reason: str, seq: int | None) -> None:
    limit = 1000 if reason == "size" else 2**20
    assert decode(message, limit) == Undecodable(reason, seq)


def test_memory_stays_in_proportion_to_the_payload() -> None:
    size = 1 << 15
    bombs = [
        b"\x92\x01\xdd" + size.to_bytes(4, "big") + b"\x90" * size,
        b"\x92\x01\x91\x96" + encode("BlockStored") + b"\xdd" + size.to_bytes(4, "big") + b"\x90" * size,
        encode([1.0, [stored([1], [1, 2, 3, 4], extra_keys=[[[]] * size])]]),
        encode([1.0, [stored([1] * 100, [], extra_keys=[[[[]]] * 60] * 100)]]),
        encode([1.0, [{"type": [[]] * size}]]),
    ]
    for bomb, most in zip(bombs, (64, 40, 40, 40, 40), strict=True):
        tracemalloc.start()
        decode([b"", bytes(8), bomb])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < most * len(bomb) + 2**18


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=40)
    | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "stored", "GPU"]),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(
            st.sampled_from(
                ["type", "event_type", "block_hashes", "token_ids", "extra_keys", "events", "ts"]
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=20,
)
near_events = st.fixed_dictionaries(
    {"type": st.sampled_from(["BlockStored", "BlockRemoved"])},
    optional={
        "block_hashes": st.lists(st.integers(-5, 5) | st.binary(max_size=33), max_size=4) | values,
        "parent_block_hash": values,
        "token_ids": st.lists(st.integers(-1, 2**33), max_size=8) | values,
        "block_size": st.integers(-1, 5) | values,
        "extra_keys": values,
        "medium": values,
        "group_idx": values,
    },
)


@settings(derandomize=True)
@given(st.lists(st.binary(max_size=64), max_size=5), values, st.lists(near_events | values, max_size=4))
def test_nothing_that_arrives_raises(raw: list[bytes], payload: Any, events: list[Any]) -> None:
    decode(raw)
    decode([b"", bytes(8), encode(payload)])
    decoded = decode([b"", bytes(8), encode([1.0, [*events, removed(3)], 0])])
    assert isinstance(decoded, Batch)
    assert decoded.events[-1] == Removed(packed(3), Tier.GPU, 0)
    assert len(decoded.events) + decoded.bad + decoded.unknown == len(events) + 1


@settings(derandomize=True)
@given(st.data())
def test_a_frame_with_bytes_changed_raises_nothing(data: st.DataObject) -> None:
    payload = bytearray(captured(FRAMES / "sha256_int_salt_lora_evict-0003.bin")[-1])
    for _ in range(data.draw(st.integers(1, 6))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    decode([b"", bytes(8), bytes(payload[: data.draw(st.integers(0, len(payload)))])])


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_name": "x" * 1025},
        {"extra_keys": [["x" * 6000]]},
        {"extra_keys": [[b"x" * 6000]]},
    ],
)
def test_names_and_extra_keys_that_are_remembered_have_a_bound(fields: dict[str, Any]) -> None:
    made = batch(0, stored([1], range(4), **fields), stored([2], range(4)))
    assert (made.bad, len(made.events)) == (1, 1)
