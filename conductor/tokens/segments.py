"""Text once tokenised is not tokenised again.

The ids of a text are the ids of the stretches between its special tokens, one after the other, where the
tokenizer allows that: see `cut_tokens`. The stretches of a chat that goes on are those of its last turn and
one more.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

ENTRY_OVERHEAD_BYTES = 250
"""What CPython adds to a short str and a short bytes in a dictionary."""


def cut_tokens(tokenizer: Mapping[str, Any]) -> tuple[str, ...]:
    """Special tokens of a tokenizer.json at which a text can be cut without changing its ids; maybe none.

    None when anything could look across a cut: a token matched only as a whole word, a Metaspace that
    marks the first word of a text alone, dropout, truncation, padding. A token is no place to cut when it
    swallows spaces beside it, when the normaliser runs before it is found, or when another added token can
    take its characters: contains it, or begins with its end.
    """
    added = [token for token in tokenizer.get("added_tokens") or [] if token.get("content")]
    model = tokenizer.get("model") or {}
    if (
        any(token.get("single_word") for token in added)
        or model.get("dropout")
        or tokenizer.get("truncation")
        or tokenizer.get("padding")
        or _marks_first_word(tokenizer.get("pre_tokenizer"))
        or _marks_first_word(tokenizer.get("normalizer"))
    ):
        return ()
    normalised = tokenizer.get("normalizer") is not None
    everything = [token["content"] for token in added]
    cuts = {
        token["content"]
        for token in added
        if token.get("special")
        and not token.get("lstrip")
        and not token.get("rstrip")
        and not (normalised and token.get("normalized"))
    }
    while stolen := {cut for cut in cuts if any(_can_take(other, cut, cuts) for other in everything)}:
        cuts -= stolen
    return tuple(sorted(cuts))


def _marks_first_word(part: Any) -> bool:
    """Whether a pre-tokenizer or normaliser treats the beginning of a text unlike its middle."""
    if not isinstance(part, Mapping):
        return False
    inner = [*(part.get("pretokenizers") or []), *(part.get("normalizers") or [])]
    return (
        part.get("prepend_scheme") == "first"
        or (
            part.get("type") == "Metaspace"
            and part.get("add_prefix_space") is True
            and "prepend_scheme" not in part
        )
        or any(map(_marks_first_word, inner))
    )


def _can_take(other: str, cut: str, cuts: set[str]) -> bool:
    """Whether finding `other` can consume characters of an occurrence of `cut`.

    Two tokens that can only be cuts both are found leftmost first, by the tokenizer and by the pattern alike.
    """
    if other == cut:
        return False
    if cut in other:
        return True
    return any(
        other.startswith(cut[at:]) or other.endswith(cut[: len(cut) - at]) for at in range(1, len(cut))
    )


class SegmentCache:
    """An encoder in front of another, which sees only text that is new. Thread-safe.

    Bounded in bytes, text and ids counted; what was used longest ago goes first.
    """

    def __init__(
        self, encode_batch: Callable[[Sequence[str]], Sequence[bytes]], cuts: Sequence[str], max_bytes: int
    ) -> None:
        """`encode_batch` gives the packed ids of several texts at once; `cuts` is not empty."""
        self._encode_batch = encode_batch
        # The longest first: at one place the tokenizer takes the longest of its tokens, a pattern the first.
        ordered = sorted(cuts, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, ordered)) + ")")
        self._max_bytes = max_bytes
        self._ids: OrderedDict[str, bytes] = OrderedDict()
        self._lock = Lock()
        self.bytes_used = 0
        self.hits = 0
        self.misses = 0

    def encode(self, text: str) -> bytes:
        """Packed ids; raises what the encoder behind raises."""
        segments = [segment for segment in self._cut.split(text) if segment]
        with self._lock:
            known = self._known(segments)
        missing = [segment for segment in dict.fromkeys(segments) if segment not in known]
        if missing:
            new = dict(zip(missing, self._encode_batch(missing), strict=True))
            known |= new
            with self._lock:
                self._remember(new)
        return b"".join([known[segment] for segment in segments])

    def _known(self, segments: Sequence[str]) -> dict[str, bytes]:
        found = {}
        for segment in segments:
            if (ids := self._ids.get(segment)) is not None:
                found[segment] = ids
                self._ids.move_to_end(segment)
                self.hits += 1
            else:
                self.misses += 1
        return found

    def _remember(self, new: Mapping[str, bytes]) -> None:
        for segment, ids in new.items():
            size = _size(segment, ids)
            if size > self._max_bytes or segment in self._ids:
                continue
            self._ids[segment] = ids
            self.bytes_used += size
        while self.bytes_used > self._max_bytes:
            self.bytes_used -= _size(*self._ids.popitem(last=False))


def _size(segment: str, ids: bytes) -> int:
    """Bytes of an entry; a character counts four, which no str exceeds."""
    return 4 * len(segment) + len(ids) + ENTRY_OVERHEAD_BYTES
