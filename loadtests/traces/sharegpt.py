"""Conversations as ShareGPT has them: what was said, and nothing of when.

[{"id": ..., "conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}, ...]
in one JSON list, or one such object a line. Every answer is a request; its prompt is all that was said
before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from random import Random
from typing import ClassVar

import msgspec

from kvroute.conductor.keys import BYTES_PER_TOKEN, TOKEN_ID_BYTES, pack_ids
from kvroute.conductor.tokens.encoder import load_reference
from kvroute.conductor.tokens.files import UnusableTokenizer, read_files
from kvroute.loadtests.traces.lines import BOM, MAX_LINE_BYTES, BadLine, NoRequest, length, numbered_lines
from kvroute.loadtests.traces.numbering import BlockNumbers
from kvroute.loadtests.traces.rows import Row

MAX_LIST_BYTES = 2**31
"""A list is read whole: the file of 94,000 conversations that benchmarks use has 0.7 GB."""
DECODE_S = 0.02
"""What a reader sees of an answer's tokens, each."""
ROLES = {"system": "system", "human": "user", "user": "user", "tool": "user", "function_response": "user"}
ANSWERS = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard", "model"})


@dataclass(frozen=True, slots=True)
class Chats:
    """What such a file does not say, and how its text is counted."""

    sessions_per_s: float = 1.0
    """Conversations begin so often, as a Poisson process."""
    think_s: float = 45.0
    """From the end of an answer to the next question, on average; exponential."""
    seed: int = 0
    tokenizer: Path | None = None
    """A model's directory or tokenizer.json; None takes four bytes for a token."""

    def __post_init__(self) -> None:
        if not 0 < self.sessions_per_s < float("inf"):
            raise ValueError(f"sessions_per_s must be above 0, got {self.sessions_per_s}")
        if not 0 <= self.think_s < float("inf"):
            raise ValueError(f"think_s must be 0 or more, got {self.think_s}")


class _Message(msgspec.Struct, gc=False):
    value: str
    role: str = msgspec.field(name="from")


class _Conversation(msgspec.Struct, gc=False):
    conversations: list[_Message]
    id: str | int | None = None


class ShareGpt:
    """One file."""

    unit: ClassVar[str] = "entry"
    stamped: ClassVar[bool] = False

    def __init__(self, block_tokens: int, chats: Chats) -> None:
        self.block_tokens = block_tokens
        self._chats = chats
        self._source = Random(chats.seed)
        self._decode = msgspec.json.Decoder(_Conversation).decode
        self._numbers = BlockNumbers(block_tokens)
        self._encode = _four_bytes if chats.tokenizer is None else _encoder(chats.tokenizer)
        self._begins_s = 0.0
        self._entries = 0

    def items(self, file: BufferedReader) -> Iterator[tuple[int, bytes]]:
        if not file.peek(1).removeprefix(BOM).lstrip().startswith(b"["):
            yield from numbered_lines(file)
            return
        text = file.read(MAX_LIST_BYTES + 1)
        if len(text) > MAX_LIST_BYTES:
            raise BadLine(
                "endless", f": a list longer than {MAX_LIST_BYTES} bytes; one object a line is not limited"
            )
        try:
            entries = msgspec.json.decode(text.removeprefix(BOM), type=list[msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadLine("malformed", f": {error}; a list of conversations is expected") from None
        for number, entry in enumerate(entries, 1):
            yield number, bytes(memoryview(entry)[: MAX_LINE_BYTES + 1])

    def rows(self, item: bytes) -> Iterator[Row]:
        try:
            read = self._decode(item)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadLine("malformed", f"{error}; conversations of from and value are expected") from None
        self._entries += 1
        self._begins_s += self._source.expovariate(self._chats.sessions_per_s)
        rows = list(self._turns(read.conversations, f"c{self._entries}"))
        if not rows:
            raise NoRequest("no_turn", "conversations: no answer (from: gpt) to a question (from: human)")
        return iter(rows)

    def _turns(self, messages: list[_Message], session: str) -> Iterator[Row]:
        prompt, asked, at_s = b"", False, self._begins_s
        for message in messages:
            role = "assistant" if message.role in ANSWERS else ROLES.get(message.role)
            if role is None:
                known = ", ".join((*ROLES, *sorted(ANSWERS)))
                raise BadLine("role", f"from: unknown {message.role!r}; known: {known}")
            said = self._encode(message.value)
            if role == "assistant" and asked and said:
                output_tokens = len(said) // TOKEN_ID_BYTES
                opened = prompt + self._encode("<|assistant|>\n")
                tokens = length("value", len(opened) // TOKEN_ID_BYTES)
                yield Row(at_s, tokens, length("value", output_tokens), self._numbers.ids(opened), session)
                at_s += output_tokens * DECODE_S
                at_s += self._source.expovariate(1 / self._chats.think_s) if self._chats.think_s else 0.0
            asked = role == "user" or (asked and role == "system")
            prompt += self._encode(f"<|{role}|>\n") + said


def _four_bytes(text: str) -> bytes:
    """Each four bytes stand for an id; the last ones are filled up."""
    data = text.encode("utf-8", "surrogatepass")
    return data + b" " * (-len(data) % BYTES_PER_TOKEN)


def _encoder(path: Path) -> Callable[[str], bytes]:
    try:
        files = read_files(path)
        tokenizer = load_reference(files, files.added_tokens)
    except UnusableTokenizer as error:
        raise ValueError(f"--tokenizer: {error}") from None
    except Exception as error:  # `tokenizers` raises plain Exception for what it cannot read
        raise ValueError(f"--tokenizer: {path}: {error}") from None
    return lambda text: pack_ids(tokenizer.encode(text, add_special_tokens=False).ids)
