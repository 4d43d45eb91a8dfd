"""Text to packed token ids, by fastokens where it was found to agree with `tokenizers`, else by that."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fastokens import Tokenizer as FastTokenizer  # type: ignore[import-untyped]
from tokenizers import AddedToken, Tokenizer

from kvroute.conductor.keys import pack_ids
from kvroute.conductor.tokens.files import TokenizerFiles
from kvroute.conductor.tokens.segments import SegmentCache

WARM_TEXT = "The tokenizer is built on its first text. " * 64


class Encoder(Protocol):
    """Thread-safe; neither adds special tokens at the ends nor cuts to a length."""

    name: str

    def encode(self, text: str) -> bytes:
        """Little-endian uint32 ids. Raises `ValueError` or `TypeError` on text that is not valid Unicode."""
        ...


class FastEncoder:
    """fastokens; keeps text it has seen in its own bounded cache of segments.

    Beside that cache its memory is the vocabulary and a cache of words that stops growing: 150 and 250 MB
    were measured with 150k tokens and millions of made-up words.
    """

    name = "fastokens"

    def __init__(self, files: TokenizerFiles, added: Sequence[Mapping[str, Any]], cache_bytes: int) -> None:
        """Raises `ValueError` (among others) when fastokens cannot read the tokenizer."""
        # A long text would take every core from the event loop's thread, for a third less time. Read once.
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
        self._tokenizer = FastTokenizer.from_file(str(files.tokenizer_json))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if added:
            self._tokenizer.add_tokens([AddedToken(**token) for token in added])
        self._tokenizer.enable_segment_cache(cache_bytes)
        self.encode(WARM_TEXT)

    def encode(self, text: str) -> bytes:
        try:
            ids: bytes = self._tokenizer.encode_batch_flat([text])[0]
        except Exception:
            raise
        except BaseException as error:
            if type(error).__name__ == "PanicException":  # Rust's, which no `except Exception` sees
                raise ValueError(f"fastokens failed: {error}") from None
            raise
        return ids


class ReferenceEncoder:
    """`tokenizers`, which the engines use, behind a cache of segments where the tokenizer allows one."""

    name = "tokenizers"

    def __init__(
        self, files: TokenizerFiles, added: Sequence[Mapping[str, Any]], cuts: Sequence[str], cache_bytes: int
    ) -> None:
        self.tokenizer = load_reference(files, added)
        self._segments = SegmentCache(self.encode_batch, cuts, cache_bytes) if cuts else None

    def encode(self, text: str) -> bytes:
        return self._segments.encode(text) if self._segments is not None else self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[bytes]:
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [pack_ids(encoding.ids) for encoding in encodings]


def load_reference(files: TokenizerFiles, added: Sequence[Mapping[str, Any]]) -> Tokenizer:
    """Holds the GIL while it reads the vocabulary (some 0.4 s for 150k tokens)."""
    tokenizer = Tokenizer.from_file(str(files.tokenizer_json))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if added:
        tokenizer.add_tokens([AddedToken(**token) for token in added])
    return tokenizer
