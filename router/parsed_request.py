"""One request as routing knows it, and the keys of its prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from kvroute.conductor.keys import TOKEN_ID_BYTES, byte_keys, token_keys
from kvroute.conductor.tokens.outcome import Unavailable
from kvroute.router.eligible import Task
from kvroute.types import PromptKeys, RequestView

NO_KEYS = ("route", "content_type", "empty", "shape", "short")
"""Why a prompt has no keys: not a prompt route; not a JSON body; no prompt or an empty one; a prompt of no
shape an engine takes; shorter than one block. A fixed set, fit for a metric label."""

PARSE_IN_THREAD_BYTES = 128 * 2**10
"""Above it, reading a body and making its keys takes a millisecond and more: other requests go on meanwhile,
but for the JSON parser itself, which holds the interpreter for some 2 ms per MB."""
MAX_KEYED_BYTES = 4 * 2**20
"""About a million tokens; what a longer prompt adds is not told apart."""
MAX_KEYED_PROMPTS = 16
"""Of a batch in one request; the others are routed along with these."""
KeySets = tuple[Mapping[int, PromptKeys], ...]
"""For each prompt of a request, its keys by tokens per block."""


class TokenIds(Struct, frozen=True, gc=False):
    """The exact tokens that the engine will prefill."""

    prompts: tuple[bytes, ...]
    """Packed little-endian uint32 ids, one item per prompt of the request."""
    model: str | None = None
    """Name of the base model."""
    adapter: str | None = None


class TokenSource(Protocol):
    """Knows the tokens of some models' prompts."""

    def __call__(
        self, model: str | None, path: bytes, fields: Mapping[str, Any]
    ) -> TokenIds | Unavailable | None:
        """The tokens of one request, or why they are not known; None where the engine has to be asked.

        Called from any thread.
        """
        ...


class ParsedRequest(Struct):
    """A request's view and, on demand, its prompt keys. Drop it once routed: it holds the prompt's text."""

    view: RequestView
    no_keys: str | None = None
    """One of `NO_KEYS` when the prompt gives no keys whatever the block size."""
    no_tokens: str | None = None
    """Why its keys are not made of tokens; None when they are, or when there are none."""
    foretold_tokens: int = 0
    """What the engine should count as its prompt; 0 where nothing is foretold."""
    fields: Mapping[str, Any] | None = None
    """The body, where the engine has to be asked for the tokens."""
    _prompt: bytes = b""
    _ids: tuple[bytes, ...] = ()
    """Exact tokens of each prompt; where they are known, they are what keys are made of."""
    _root: int = 0
    """Root of the key chain: what separates this prompt from equal text elsewhere."""
    _keys: tuple[Sequence[int], KeySets] | None = None
    task: Task = Task.SPLIT
    """What of it one worker may be given."""

    def take_tokens(self, ids: tuple[bytes, ...], root: int) -> None:
        """Make the keys of these tokens, in the namespace of `root`."""
        self._ids, self._root, self.no_tokens, self.no_keys = ids, root, None, None
        self.foretold_tokens = sum(map(len, ids)) // TOKEN_ID_BYTES
        self.view = replace(self.view, prompt_tokens=self.foretold_tokens)

    def prompt_bytes(self) -> bytes:
        """The canonical bytes that byte keys are made of; empty when there is no prompt, or tokens of it."""
        return self._prompt

    def prompt_keys(self, chunk_bytes: int, block_sizes: Sequence[int] = ()) -> tuple[KeySets, str | None]:
        """Keys of the full blocks, per prompt and block size, made once; or none and why, one of `NO_KEYS`.

        `block_sizes` in tokens is used where the tokens are known, `chunk_bytes` where they are not.
        """
        made = self._keys
        if made is not None and (made[0] is block_sizes or made[0] == block_sizes):
            return made[1], None if made[1] else "short"
        if self.no_keys is not None:
            return (), self.no_keys
        if self._ids:
            sets = self._token_keys(block_sizes)
        elif len(self._prompt) < chunk_bytes:
            sets = ()
        else:
            keys = byte_keys(self._prompt[:MAX_KEYED_BYTES], self._root, chunk_bytes)
            sets = ({keys.block_tokens: keys},)
        self._keys = block_sizes, sets
        return sets, None if sets else "short"

    def _token_keys(self, block_sizes: Sequence[int]) -> KeySets:
        sets = []
        for ids in self._ids[:MAX_KEYED_PROMPTS]:
            tokens = len(ids) // TOKEN_ID_BYTES
            keys = {size: token_keys(ids, self._root, size) for size in block_sizes if size <= tokens}
            if keys:
                sets.append(keys)
        return tuple(sets)
