from __future__ import annotations

import subprocess
import sys

import pytest

from kvroute.conductor.keys import byte_keys, namespace_key, pack_ids, token_keys
from kvroute.types import KeyMode

ROOT_VECTORS = {
    (): 0xA4E4EDB25E57F53B,
    ("m",): 0x8886767C65EAFD66,
    ("m", "x"): 0x0C9941727DADFB4E,
    ("m", None, "x"): 0xBFAC8023FA084EA9,
}
BYTE_VECTOR = [0xBD2836E526A5DE4E, 0x2ACD098B6E732394, 0xC58921DE0F09FEAE]
TOKEN_VECTOR = [0x5FA7514C76AC4F31, 0xBB816FDC20703BA4]


def test_vectors() -> None:
    """Keys are shared between processes, replicas and versions: these may never change."""
    assert {parts: namespace_key(*parts) for parts in ROOT_VECTORS} == ROOT_VECTORS
    assert list(byte_keys(bytes(range(200)), namespace_key("m"), 64).keys) == BYTE_VECTOR
    assert list(token_keys(range(40), namespace_key("m"), 16).keys) == TOKEN_VECTOR


def test_another_process_with_another_hash_seed_makes_the_same_keys() -> None:
    code = (
        "from kvroute.conductor.keys import *;"
        "print(byte_keys(bytes(range(200)), namespace_key('m', 'a', 's'), 64).keys)"
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
    assert outputs == {f"{byte_keys(bytes(range(200)), namespace_key('m', 'a', 's'), 64).keys}\n"}


def test_each_part_of_the_namespace_separates_and_none_can_pose_as_another() -> None:
    """Base model, adapter and salt give separate keys; a LoRA named "x" is not a salt "x"."""
    parts = [
        {},
        {"model": "x"},
        {"adapter": "x"},
        {"cache_salt": "x"},
        {"extra_key": "x"},
        {"domain": "x"},
        {"model": ""},
        {"adapter": ""},
        {"model": "x", "adapter": "y"},
        {"model": "xy"},
        {"model": "x", "cache_salt": "y"},
        {"model": "xa\x01\0\0\0\0\0\0\0y"},
        {"model": "\ud800"},
    ]
    assert len({namespace_key(**each) for each in parts}) == len(parts)


def test_only_full_chunks_have_keys_and_a_longer_prompt_extends_them() -> None:
    root = namespace_key("m")
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
    root = namespace_key("m")
    abc, zbc, bc = (
        token_keys(ids, root, 2).keys for ids in ([1, 1, 2, 2, 3, 3], [9, 9, 2, 2, 3, 3], [2, 2, 3, 3])
    )
    assert not set(abc) & set(zbc)
    assert not set(abc) & set(bc)
    assert not set(abc) & set(token_keys([1, 1, 2, 2], namespace_key("other"), 2).keys)


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
