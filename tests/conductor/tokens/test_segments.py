"""Where a text may be cut, and the cache of what lies between."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from kvroute.conductor.tokens.cases import texts
from kvroute.conductor.tokens.segments import SegmentCache, cut_tokens

from .tiny import SPECIAL, train


def added(content: str, **more: Any) -> dict[str, Any]:
    return {"content": content, "special": True, "normalized": False, "lstrip": False, "rstrip": False} | more


def tokenizer(*tokens: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"added_tokens": list(tokens), "model": {"type": "BPE"}, "normalizer": None, **more}


A, B = added("<a>"), added("<b>")


@pytest.mark.parametrize(
    ("given", "cuts"),
    [
        (tokenizer(A, B), ("<a>", "<b>")),
        (tokenizer(A, added("<b>", special=False)), ("<a>",)),
        (tokenizer(A, added("<b>", lstrip=True)), ("<a>",)),
        (tokenizer(A, added("<b>", rstrip=True)), ("<a>",)),
        (tokenizer(A, added("<b>", normalized=True)), ("<a>", "<b>")),
        (tokenizer(A, added("<b>", normalized=True), normalizer={"type": "NFC"}), ("<a>",)),
        (tokenizer(A, added("x<a>y", special=False)), ()),
        (tokenizer(A, added("a>b", special=False)), ()),
        (tokenizer(A, added(">", special=False)), ()),
        (tokenizer(A, added("b<", special=False)), ()),
        (tokenizer(A, B, added("a>b", special=False)), ("<b>",)),
        (tokenizer(A, added("<b>", single_word=True)), ()),
        (tokenizer(A, model={"type": "BPE", "dropout": 0.1}), ()),
        (tokenizer(A, truncation={"max_length": 5}), ()),
        (tokenizer(A, padding={"strategy": "BatchLongest"}), ()),
        (tokenizer(A, pre_tokenizer={"type": "Metaspace", "prepend_scheme": "first"}), ()),
        (tokenizer(A, pre_tokenizer={"type": "Metaspace", "prepend_scheme": "always"}), ("<a>",)),
        (
            tokenizer(A, pre_tokenizer={"type": "Sequence", "pretokenizers": [{"prepend_scheme": "first"}]}),
            (),
        ),
    ],
)
def test_cut_tokens(given: dict[str, Any], cuts: tuple[str, ...]) -> None:
    assert cut_tokens(given) == cuts


def test_segments_give_the_ids_of_the_whole() -> None:
    reference = train()
    seen: list[str] = []

    def encode(batch: Sequence[str]) -> list[bytes]:
        seen.extend(batch)
        return [bytes(str(reference.encode(text, add_special_tokens=False).ids), "ascii") for text in batch]

    seed = Random().randrange(2**32)
    print("seed", seed)
    cache = SegmentCache(encode, SPECIAL, 20_000)
    for text in texts(seed, 150, SPECIAL):
        whole = reference.encode(text, add_special_tokens=False).ids
        made = cache.encode(text).replace(b"][", b", ")
        assert made == bytes(str(whole), "ascii").replace(b"[]", b""), text
        assert cache.bytes_used <= 20_000


def test_only_new_text_is_encoded() -> None:
    seen: list[str] = []

    def encode(batch: Sequence[str]) -> list[bytes]:
        seen.extend(batch)
        return [text.encode() for text in batch]

    cache = SegmentCache(encode, ["<a>", "<a>b"], 10_000)
    assert cache.encode("one<a>two<a>one") == b"one<a>two<a>one"
    assert seen == ["one", "<a>", "two"]
    assert cache.encode("one<a>two<a>b<a>") == b"one<a>two<a>b<a>"
    assert seen == ["one", "<a>", "two", "<a>b"]
    assert cache.encode("") == b""
    assert (cache.hits, cache.misses) == (4, 6)


def test_bytes_are_bounded_and_the_oldest_goes() -> None:
    seen: list[str] = []

    def encode(batch: Sequence[str]) -> list[bytes]:
        seen.extend(batch)
        return [text.encode() for text in batch]

    # 350 bytes an entry: two fit.
    cache = SegmentCache(encode, ["|"], 1000)
    for name in "abacbad":
        cache.encode(name * (300 if name == "d" else 20))
        assert cache.bytes_used <= 1000
    # c takes the room of b, which was used before a; then b takes that of a, and a that of c.
    assert [text[0] for text in seen] == ["a", "b", "c", "b", "a", "d"]
    # What is too large to keep, d, took nobody's.
    cache.encode("b" * 20)
    cache.encode("a" * 20)
    assert len(seen) == 6
