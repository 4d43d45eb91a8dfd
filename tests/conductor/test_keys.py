from __future__ import annotations

import random
import subprocess
import sys
from array import array
from hashlib import sha256
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict, fields, replace
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from kvroute.conductor.keys import (
    Namespace,
    byte_keys,
    chain_keys,
    object_key,
    pack_extras,
    pack_ids,
    prefix_digests,
    token_keys,
)
from kvroute.loadtests.mock_engine.block_keys import block_keys
from kvroute.types import KeyMode

TEXT_ROOTS = {
    Namespace(): 0xA4E4EDB25E57F53B,
    Namespace(model="m"): 0x8886767C65EAFD66,
    Namespace(model="m", adapter="x"): 0x0C9941727DADFB4E,
    Namespace(model="m", cache_salt="x"): 0xBFAC8023FA084EA9,
}
TEXT_ROOT = 0x8886767C65EAFD66
BYTE_VECTOR = [0xBD2836E526A5DE4E, 0x2ACD098B6E732394, 0xC58921DE0F09FEAE]
TOKEN_VECTOR = [0x5FA7514C76AC4F31, 0xBB816FDC20703BA4]
FULL = Namespace(
    model="m",
    adapter="a",
    cache_salt="s",
    extra_key="x",
    architecture="arch",
    revision="r1",
    tokenizer="tok",
    chat_template="tmpl",
    positions="rope",
    attention="full",
    adapter_version="1",
    kv_dtype="fp8",
    kv_scales="q",
    kv_layout="l",
    tensor_parallel=2,
    pipeline_parallel=1,
    sharing_group="g",
)
IDS_ROOTS = {
    Namespace(): 0xF9643B4C88C0A7E9,
    Namespace(model="m"): 0xC8D60BBAB35622EF,
    Namespace(model="m", adapter="x"): 0xD90A0EB332BB5993,
    Namespace(model="m", cache_salt="x"): 0x3AF699316AD0C2C8,
    FULL: 0xF250DDD981ED0BE0,
}
TWO_BLOCKS = [0x2EB5391A6B11BFB4, 0x4B4D35BC22CF9943]
WITH_IMAGE = [0x2EB5391A6B11BFB4, 0x0AF7BCD005B9F670]
IMAGE = {1: pack_extras(["img-1"])}
SHARDED = Namespace(model="m", tensor_parallel=2)
DIGESTS = [
    "5bd5ed9361853c7a553c3e131c81a7582bfdb0dc417f76809fe730808d6d0747",
    "4bf9abf96bafe097fc401fc966a102ade3a7705a694f95d1919ff17b61bce43a",
]
OBJECT = "b631105b0898f4a2d281085da850a85629d2dc7784b276c6164b276ab4d2fed3"
FULL_OBJECT = "d7da89b32e26cf0cfea1b08aea80add82616f4da523e404555960616b663a445"
TEXTS = st.one_of(st.none(), st.text("amsx\0\1\x05", max_size=12), st.text(max_size=4))
SIZES = st.one_of(st.none(), st.integers(0, 2**63))


def namespaces() -> st.SearchStrategy[Namespace]:
    given_fields = {
        field.name: SIZES if field.name.endswith("_parallel") else TEXTS for field in fields(Namespace)
    }
    return st.builds(Namespace, **given_fields)


def plain_cbor(value: Any) -> bytes:
    """Deterministic CBOR of what keys are made of, written from RFC 8949 alone."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return cbor_head(0, value)
    if isinstance(value, bytes):
        return cbor_head(2, len(value)) + value
    if isinstance(value, str):
        return cbor_head(3, len(value.encode())) + value.encode()
    if isinstance(value, list):
        return cbor_head(4, len(value)) + b"".join(map(plain_cbor, value))
    items = sorted((plain_cbor(name), plain_cbor(inner)) for name, inner in value.items())
    return cbor_head(5, len(items)) + b"".join(name + inner for name, inner in items)


def cbor_head(major: int, number: int) -> bytes:
    if number < 24:
        return bytes([major << 5 | number])
    size, more = next((size, more) for more, size in enumerate((1, 2, 4, 8)) if number < 256**size)
    return bytes([major << 5 | 24 + more]) + number.to_bytes(size, "big")


def test_vectors() -> None:
    """Keys are shared between processes, replicas and versions: these may never change."""
    assert {parts: parts.root("text") for parts in TEXT_ROOTS} == TEXT_ROOTS
    assert list(byte_keys(bytes(range(200)), TEXT_ROOT, 64).keys) == BYTE_VECTOR
    assert list(token_keys(range(40), TEXT_ROOT, 16).keys) == TOKEN_VECTOR


def test_another_process_with_another_hash_seed_makes_the_same_keys() -> None:
    code = (
        "from kvroute.conductor.keys import *;"
        "root = Namespace(model='m', adapter='a', cache_salt='s').root('text');"
        "print(byte_keys(bytes(range(200)), root, 64).keys)"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    root = Namespace(model="m", adapter="a", cache_salt="s").root("text")
    assert outputs == {f"{byte_keys(bytes(range(200)), root, 64).keys}\n"}


def test_each_part_of_the_namespace_separates_and_none_can_pose_as_another() -> None:
    """Base model, adapter and salt give separate keys; a LoRA named "x" is not a salt "x"."""
    apart = [
        Namespace(),
        Namespace(model="x"),
        Namespace(adapter="x"),
        Namespace(cache_salt="x"),
        Namespace(extra_key="x"),
        Namespace(model=""),
        Namespace(adapter=""),
        Namespace(model="x", adapter="y"),
        Namespace(model="xy"),
        Namespace(model="x", cache_salt="y"),
        Namespace(model="xa\x01\0\0\0\0\0\0\0y"),
        Namespace(model="\ud800"),
    ]
    roots = {namespace.root("text") for namespace in apart} | {Namespace().root("x")}
    assert len(roots) == len(apart) + 1


def test_only_full_chunks_have_keys_and_a_longer_prompt_extends_them() -> None:
    root = TEXT_ROOT
    prompt = b"0123456789" * 20
    short, longer = byte_keys(prompt[:130], root, 64), byte_keys(prompt, root, 64)
    assert len(short.keys) == 2
    assert len(longer.keys) == 3
    assert list(longer.keys[:2]) == list(short.keys)
    assert (short.mode, short.block_tokens, short.prompt_tokens) == (KeyMode.BYTES, 16, 33)
    assert list(byte_keys(prompt[:63], root, 64).keys) == []
    assert list(byte_keys(b"", root, 64).keys) == []


def test_keys_are_chained_over_all_blocks() -> None:
    """[a, b, c] is not [z, b, c], and B after A is not B alone."""
    root = TEXT_ROOT
    abc, zbc, bc = (
        token_keys(ids, root, 2).keys for ids in ([1, 1, 2, 2, 3, 3], [9, 9, 2, 2, 3, 3], [2, 2, 3, 3])
    )
    assert not set(abc) & set(zbc)
    assert not set(abc) & set(bc)
    assert not set(abc) & set(token_keys([1, 1, 2, 2], Namespace(model="other").root("text"), 2).keys)


def test_token_ids_as_integers_or_packed() -> None:
    ids = [0, 1, 2**32 - 1, 7]
    keys = token_keys(ids, 1, 2)
    assert pack_ids(ids) == b"\0\0\0\0\x01\0\0\0\xff\xff\xff\xff\x07\0\0\0"
    assert keys == token_keys(pack_ids(ids), 1, 2)
    assert (keys.mode, keys.block_tokens, keys.prompt_tokens, len(keys.keys)) == (KeyMode.TOKENS, 2, 4, 2)


@pytest.mark.parametrize("ids", [[-1, 2], [2**32], [1.5], ["1"], [None], b"12345"])
def test_ids_that_are_no_ids_are_refused(ids: object) -> None:
    with pytest.raises(ValueError, match="token ids"):
        token_keys(ids, 1, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, -1])
def test_a_block_of_no_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="at least 1 byte"):
        byte_keys(b"x" * 100, 1, size)


def test_composed_and_decomposed_characters_are_different_bytes() -> None:
    composed, decomposed = "é".encode() * 64, "e\u0301".encode() * 64
    assert byte_keys(composed, 1, 64).keys[0] != byte_keys(decomposed, 1, 64).keys[0]


def test_vectors_of_the_specification() -> None:
    assert {namespace: namespace.root("ids") for namespace in IDS_ROOTS} == IDS_ROOTS
    root = Namespace(model="m").root("ids")
    assert chain_keys(pack_ids(range(8)), root, 4) == TWO_BLOCKS
    assert chain_keys(pack_ids(range(8)), root, 4, IMAGE) == WITH_IMAGE
    digests = prefix_digests(range(8), SHARDED, 4, IMAGE)
    assert [digest.hex() for digest in digests] == DIGESTS
    assert object_key(SHARDED, digests[1], 1, 3) == OBJECT
    assert object_key(FULL, prefix_digests(range(8), FULL, 4)[1], 0, 1) == FULL_OBJECT


def test_the_specification_says_the_same_vectors() -> None:
    written = (Path(__file__).parents[2] / "conductor" / "KEYS.md").read_text()
    for key in (*IDS_ROOTS.values(), *TWO_BLOCKS, *WITH_IMAGE):
        assert f"`{key:016x}`" in written
    for text in (*DIGESTS, OBJECT, FULL_OBJECT, IMAGE[1].hex()):
        assert f"`{text}`" in written
    for field in fields(Namespace):
        assert f"| `{field.name}` |" in written


def test_routing_keys_from_the_formulas_alone() -> None:
    """Written from KEYS.md, without the module's helpers."""
    parts = b"".join(
        tag + len(value).to_bytes(8, "little") + value for tag, value in ((b"d", b"ids"), (b"m", b"m"))
    )
    root = xxh3_64_intdigest(b"kvroute/routing-key/1" + parts)
    blocks = [b"".join(i.to_bytes(4, "little") for i in ids) for ids in (range(4), range(4, 8))]
    first = xxh3_64_intdigest(blocks[0], root)
    extras = b"c" + (5).to_bytes(8, "little") + b"img-1"
    assert root == IDS_ROOTS[Namespace(model="m")]
    assert [first, xxh3_64_intdigest(blocks[1], first)] == TWO_BLOCKS
    assert xxh3_64_intdigest(blocks[1] + b"\xff" + xxh3_128_digest(extras), first) == WITH_IMAGE[1]


def test_object_keys_from_bytes_written_by_hand() -> None:
    namespace = b"\xa2\x65model\x61m\x6ftensor_parallel\x02"
    digest = sha256(b"\x83\x6ekvroute/prefix\x01" + namespace).digest()
    blocks = [b"".join(i.to_bytes(4, "little") for i in ids) for ids in (range(4), range(4, 8))]
    digest = sha256(b"\x83\x58\x20" + digest + b"\x50" + blocks[0] + b"\xf6").digest()
    assert digest.hex() == DIGESTS[0]
    extras = b"\x4ec\x05\0\0\0\0\0\0\0img-1"
    digest = sha256(b"\x83\x58\x20" + digest + b"\x50" + blocks[1] + extras).digest()
    assert digest.hex() == DIGESTS[1]
    named = sha256(
        b"\xa6\x64kind\x6ekvroute/object\x65shard\x01\x66prefix\x58\x20" + digest + b"\x67version\x01"
        b"\x69namespace" + namespace + b"\x6elayout_version\x03"
    )
    assert named.hexdigest() == OBJECT


@settings(max_examples=60)
@given(namespaces(), st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(0, 2**64 - 1))
def test_object_keys_agree_with_an_encoder_of_their_own(
    namespace: Namespace, ids: list[int], shard: int
) -> None:
    given_fields = {name: value for name, value in asdict(namespace).items() if value is not None}
    digest = sha256(plain_cbor(["kvroute/prefix", 1, given_fields])).digest()
    for index, found in enumerate(prefix_digests(ids, namespace, 3, {1: b"e"})):
        block = array("I", ids[index * 3 : index * 3 + 3]).tobytes()
        digest = sha256(plain_cbor([digest, block, b"e" if index == 1 else None])).digest()
        assert found == digest
    whole = {
        "kind": "kvroute/object",
        "version": 1,
        "namespace": given_fields,
        "prefix": digest,
        "shard": shard,
        "layout_version": 9,
    }
    assert object_key(namespace, digest, shard, 9) == sha256(plain_cbor(whole)).hexdigest()


def test_a_later_field_would_change_no_key() -> None:
    """What is not said is left out of both encodings."""
    assert cbor2.loads(cbor2.dumps(SHARDED.canonical(), canonical=True)) == {
        "model": "m",
        "tensor_parallel": 2,
    }
    assert Namespace().canonical() == {}


@settings(max_examples=60)
@given(namespaces(), st.data())
def test_any_one_field_changes_root_and_object_key(namespace: Namespace, data: st.DataObject) -> None:
    names = [field.name for field in fields(Namespace)]
    name = data.draw(st.sampled_from(names))
    value = data.draw(SIZES if name.endswith("_parallel") else TEXTS)
    other = replace(namespace, **{name: value})
    same = getattr(namespace, name) == value
    digest = bytes(32)
    assert (namespace.root("ids") == other.root("ids")) == same
    assert (object_key(namespace, digest, 0, 1) == object_key(other, digest, 0, 1)) == same
    assert (prefix_digests([1], namespace, 1) == prefix_digests([1], other, 1)) == same


@settings(max_examples=100)
@given(namespaces(), namespaces())
def test_no_two_namespaces_meet(one: Namespace, two: Namespace) -> None:
    """Small alphabets of tags and lengths, so that texts try to pose as the encoding around them."""
    assert (one.root("ids") == two.root("ids")) == (one == two)
    assert (object_key(one, bytes(32), 0, 1) == object_key(two, bytes(32), 0, 1)) == (one == two)


def test_one_value_moved_through_all_fields_gives_as_many_keys() -> None:
    spaces = [
        Namespace(**{field.name: 7 if field.name.endswith("_parallel") else "7"})  # type: ignore[arg-type]
        for field in fields(Namespace)
    ]
    assert len({space.root("ids") for space in spaces}) == len(spaces)
    assert len({object_key(space, bytes(32), 0, 1) for space in spaces}) == len(spaces)


def test_a_text_that_poses_as_two_fields_is_one() -> None:
    posing = "m" + "a" + "\x01" + "\0" * 7 + "x"
    assert Namespace(model=posing).root("ids") != Namespace(model="m", adapter="x").root("ids")


def test_shard_layout_and_prefix_each_change_the_object_key() -> None:
    variants = [
        object_key(SHARDED, digest, shard, layout)
        for digest in (bytes(32), bytes(31) + b"\1")
        for shard in (0, 1)
        for layout in (0, 1)
    ]
    assert len(set(variants)) == 8


@pytest.mark.parametrize(
    ("digest", "shard", "layout", "message"),
    [
        (b"short", 0, 1, "prefix_digest must be 32 bytes, got 5"),
        (bytes(32), -1, 1, "shard must be from 0 to"),
        (bytes(32), 0, 2**64, "layout_version must be from 0 to"),
    ],
)
def test_what_can_be_no_object_key_is_refused(digest: bytes, shard: int, layout: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        object_key(SHARDED, digest, shard, layout)


def test_a_text_without_utf8_is_refused_by_its_field_but_still_routes() -> None:
    broken = Namespace(model="m", kv_scales="\ud800")
    with pytest.raises(ValueError, match="namespace kv_scales must be text"):
        object_key(broken, bytes(32), 0, 1)
    assert broken.root("ids") != Namespace(model="m").root("ids")


def test_a_chain_goes_on_from_any_block() -> None:
    """What an event stores after a parent is what a request finds there."""
    rng = random.Random(11)
    ids = [rng.randrange(2**32) for _ in range(16 * 20)]
    root = Namespace(model="m").root("ids")
    extras = {3: pack_extras(["a"]), 12: pack_extras(["b", "c"])}
    whole = token_keys(ids, root, 16, extras).keys
    for cut in range(20):
        parent = whole[cut - 1] if cut else root
        later = {index - cut: extra for index, extra in extras.items() if index >= cut}
        assert chain_keys(pack_ids(ids[cut * 16 :]), parent, 16, later) == list(whole[cut:])
    assert chain_keys(b"", 5, 16) == []
    assert chain_keys(bytes(4 * 15), 5, 16) == []
    with pytest.raises(ValueError, match="packed token ids"):
        chain_keys(b"123", 5, 16)


def test_extras_change_their_block_and_all_after_it() -> None:
    root = Namespace(model="m").root("ids")
    packed = pack_ids(range(12))
    plain = chain_keys(packed, root, 4)
    one, two = (chain_keys(packed, root, 4, {1: pack_extras([name])}) for name in ("one", "two"))
    assert plain[0] == one[0] == two[0]
    assert all(len({a, b, c}) == 3 for a, b, c in zip(plain[1:], one[1:], two[1:], strict=True))
    assert chain_keys(packed, root, 4, {}) == chain_keys(packed, root, 4, {9: b"x"}) == plain
    assert chain_keys(packed, root, 4, {1: b""}) != plain
    assert pack_extras(["ab", "c"]) != pack_extras(["a", "bc"]) != pack_extras(["abc"])


def test_an_adapter_is_no_image() -> None:
    """An adapter's name in the namespace and the same text as a block's content are different things."""
    packed = pack_ids(range(8))
    base, lora = (Namespace(model="m", adapter=name).root("ids") for name in (None, "ad-1"))
    image = {0: pack_extras(["ad-1"])}
    chains = [chain_keys(packed, root, 4, extras) for root in (base, lora) for extras in (None, image)]
    assert all(not set(one) & set(two) for one, two in combinations(chains, 2))


def test_base_adapter_and_salt_over_the_same_tokens_match_only_themselves() -> None:
    packed = pack_ids(range(64))
    spaces = [Namespace(model="m"), Namespace(model="m", adapter="v"), Namespace(model="m", cache_salt="v")]
    chains = [chain_keys(packed, space.root("ids"), 16) for space in spaces]
    assert all(not set(one) & set(two) for one, two in combinations(chains, 2))
    assert chains == [list(token_keys(range(64), space.root("ids"), 16).keys) for space in spaces]


def test_engines_that_hash_differently_hold_the_same_keys() -> None:
    """Their own block hashes share nothing; the keys of the tokens they report are equal."""
    tokens = array("I", range(64))
    one, two = (block_keys(tokens, 16, seed) for seed in (1, 2))
    assert not set(one) & set(two)
    root = Namespace(model="m").root("ids")
    assert chain_keys(tokens.tobytes(), root, 16) == list(token_keys(range(64), root, 16).keys)


def test_a_block_size_is_part_of_the_chain() -> None:
    root = Namespace(model="m").root("ids")
    chains = [chain_keys(pack_ids(range(64)), root, size) for size in (4, 8, 16, 32)]
    assert all(not set(one) & set(two) for one, two in pairwise(chains))
