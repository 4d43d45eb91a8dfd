"""A tokenizer and a chat template that are cheap, deterministic and shaped like real ones.

Four bytes of text are one token; a role marker and its newline are one token of their own, and text is cut
at markers first. Output is written in four-byte words, so a conversation sent back with the answer in it
tokenises to exactly the earlier prompt and output, followed by what is new.
"""

from __future__ import annotations

import random
import re
import zlib
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import orjson

TOKEN_BYTES = 4
VOCABULARY = 1 << 17
_MARKERS = [b"<|%s|>\n" % name for name in (b"system", b"user", b"assistant", b"tool", b"end", b"image")]
_MARKER_IDS = {marker: index + 1 for index, marker in enumerate(_MARKERS)}
_CUT = re.compile(b"(" + b"|".join(map(re.escape, _MARKERS)) + b")")
_PIECES: dict[int, bytes] = {index: marker for marker, index in _MARKER_IDS.items()}
_FIRST_ID = 16


def tokenize(text: bytes) -> array[int]:
    """Token ids of a text, markers recognised wherever they stand."""
    ids = array("I")
    for segment in _CUT.split(text) if b"<|" in text else (text,):
        marker = _MARKER_IDS.get(segment)
        if marker is not None:
            ids.append(marker)
        elif segment:
            ids.extend(_segment_ids(segment))
    return ids


def detokenize(ids: Sequence[int]) -> str:
    """The text of ids that `tokenize` produced in this process; others show as a placeholder."""
    return b"".join(_PIECES.get(i, b"\xef\xbf\xbd") for i in ids).decode("utf-8", "replace")


@lru_cache(maxsize=1024)
def _segment_ids(segment: bytes) -> array[int]:
    crc32 = zlib.crc32
    pieces = [segment[i : i + TOKEN_BYTES] for i in range(0, len(segment), TOKEN_BYTES)]
    ids = [_FIRST_ID + crc32(piece) % (VOCABULARY - _FIRST_ID) for piece in pieces]
    _PIECES.update(zip(ids, pieces, strict=True))
    return array("I", ids)


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
) -> bytes:
    """The prompt of a chat: role marker, content, end marker; tools before everything.

    TypeError or KeyError when a message is not shaped like one.
    """
    out: list[bytes] = []
    if tools:
        out += (b"<|system|>\n", b"# Tools\n", orjson.dumps(tools), b"<|end|>\n")
    for message in messages:
        role = message["role"]
        marker = b"<|%s|>\n" % {"developer": "system", "function": "tool"}.get(role, role).encode()
        if marker not in _MARKER_IDS:
            raise ValueError(f"Unexpected message role: {role}")
        out += (marker, _content(message), b"<|end|>\n")
    if add_generation_prompt:
        out.append(b"<|assistant|>\n")
    return b"".join(out)


def _content(message: Mapping[str, Any]) -> bytes:
    content = message.get("content")
    if isinstance(content, str):
        text = content.encode("utf-8", "surrogatepass")
    elif content is None:
        text = b""
    else:
        text = b"\n".join(_part(part) for part in content)
    if calls := message.get("tool_calls"):
        text += b"\n".join(b"<tool_call>" + orjson.dumps(call["function"]) for call in calls)
    return text


def _part(part: str | Mapping[str, Any]) -> bytes:
    """Text as it is; anything else as a marker and a digest, so that two images differ."""
    if isinstance(part, str):
        return part.encode()
    text = part.get("text")
    if isinstance(text, str):
        return text.encode()
    body = orjson.dumps(part, option=orjson.OPT_SORT_KEYS)
    return b"<|image|>\n%08x%08x" % (zlib.crc32(body), zlib.adler32(body))


class Words:
    """An endless text in four-byte words, and its tokens; every reader starts at its own place."""

    def __init__(self, pieces: Sequence[bytes], seed: int) -> None:
        self.pieces = list(pieces)
        random.Random(seed).shuffle(self.pieces)
        self.ids = tokenize(b"".join(self.pieces))
        self._text = b"".join(self.pieces)

    def start(self, prompt_digest: int) -> int:
        """Where the answer to a prompt begins: the same on every engine of one seed."""
        return prompt_digest % len(self.pieces)

    def elsewhere(self, start: int) -> int:
        """Another place, whose every word differs from those at `start`."""
        return (start + len(self.pieces) // 2) % len(self.pieces)

    def text(self, start: int, count: int) -> bytes:
        """`count` words from `start` on."""
        laps = -(-(start + count) // len(self.pieces))
        return (self._text * laps)[start * TOKEN_BYTES : (start + count) * TOKEN_BYTES]

    def tokens(self, start: int, count: int) -> array[int]:
        """Their token ids."""
        laps = -(-(start + count) // len(self.pieces))
        return (self.ids * laps)[start : start + count]

    def run(self, start: int, count: int, before: bytes, after: bytes) -> bytes:
        """`count` words from `start` on, each between two texts."""
        size = len(self.pieces)
        start %= size
        pieces = self.pieces[start : start + count]
        while len(pieces) < count:
            pieces += self.pieces[: count - len(pieces)]
        return before + (after + before).join(pieces) + after

    def piece(self, index: int) -> bytes:
        """One word."""
        return self.pieces[index % len(self.pieces)]


_CONSONANTS, _VOWELS = b"bdfghjklmnprstvwxyz", b"aeiou"


@lru_cache(maxsize=8)
def plain_words(seed: int) -> Words:
    """ASCII syllables, each after a space."""
    return Words(
        [b" %c%c%c" % (a, b, c) for a in _CONSONANTS for b in _VOWELS for c in _CONSONANTS],
        seed,
    )


@lru_cache(maxsize=8)
def wide_words(seed: int) -> Words:
    """Characters of two, three and four bytes, for readers that cut in the middle of one."""
    wide = [chr(0x4E00 + i).encode() + b" " for i in range(600)]
    wide += [(chr(0xC0 + i) + chr(0x100 + i)).encode() for i in range(60)]
    wide += [chr(0x1F600 + i).encode() for i in range(60)]
    return Words(wide, seed)
