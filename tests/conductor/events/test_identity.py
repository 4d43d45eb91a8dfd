from __future__ import annotations

from typing import Any

import pytest

from kvroute.conductor.events import identity
from kvroute.conductor.events.batches import Stored
from kvroute.conductor.events.identity import Identity, Roots, identify
from kvroute.conductor.keys import Namespace, pack_extras
from tests.conductor.events.wire import only, stored


def read(extra_keys: Any, parent: int | None = None, **fields: Any) -> Identity:
    blocks = len(extra_keys) if extra_keys else 1
    event = only(stored(range(blocks), range(4 * blocks), parent, extra_keys=extra_keys, **fields))
    assert isinstance(event, Stored)
    return identify(event)


def test_plain_blocks_have_nothing() -> None:
    assert read(None) == read([None, None]) == Identity()


def test_the_adapter_is_known_by_its_field_and_is_no_image() -> None:
    assert read([["ad-1"], ["ad-1"]], lora_id=1, lora_name="ad-1") == Identity("ad-1")
    assert read([["ad-1"]], parent=9, lora_id=1, lora_name="ad-1") == Identity("ad-1")


def test_the_salt_is_on_the_first_block_of_a_prompt_only() -> None:
    assert read([["tenant-1"], None]) == Identity(None, "tenant-1")
    assert read([["tenant-1"], None], parent=9) == Identity(extras={0: pack_extras(["tenant-1"])})


def test_an_adapter_and_a_salt_of_the_same_name() -> None:
    assert read([["x", "x"], ["x"]], lora_id=1, lora_name="x") == Identity("x", "x")
    assert read([["x"], None]) == Identity(None, "x")


def test_media_are_content_ids_by_block() -> None:
    listed = [["ad", ["img-a", 3], ["img-b", 9], "salt"], ["ad", ["img-b", -7]], ["ad"]]
    assert read(listed, lora_id=1, lora_name="ad") == Identity(
        "ad", "salt", {0: pack_extras(["img-a", "img-b"]), 1: pack_extras(["img-b"])}
    )


@pytest.mark.parametrize("unknown", [b"digest", 5, ["a pair of", None][1:], [7, "x"]])
def test_what_is_not_known_becomes_something_no_request_has(unknown: Any) -> None:
    found = read([[unknown], None])
    assert found.salt is None
    assert found.guessed == (0 if unknown == [] else 1)
    assert found.extras[0] not in (b"", pack_extras(["digest"]), pack_extras(["5"]), pack_extras(["x"]))


def test_an_adapter_of_which_only_a_number_is_known_is_never_the_base_model() -> None:
    found = read(None, lora_id=3)
    assert found.adapter not in (None, "3")
    assert found.guessed == 1
    assert read(None, lora_id=4).adapter != found.adapter


def test_roots_of_many_salts_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "ROOTS", 3)
    roots = Roots(Namespace(model="m"))
    for salt in [*map(str, range(10)), "0"]:
        expected = Namespace(model="m", cache_salt=salt).root("ids")
        assert roots.of(Identity(salt=salt)) == expected
        assert roots.of(Identity(salt=salt)) == expected
        assert len(roots._known) <= 3
