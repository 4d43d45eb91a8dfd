"""Prompts for requests that a trace only describes: an engine's cache sees in them what the trace says.

A token depends on its block's id and its place in the block alone, so prompts are equal as far as their ids
are, and differ from the first block on that is another (single drawn tokens are the same by chance once in
hundreds of words or thousands of ids; a block of 16 never is). That holds for any block size of the engine,
and for routers that compare bytes. Nothing may stand before a prompt: send it to /v1/completions, where no
template is added.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvroute.loadtests.traces.cuts import Cut
from kvroute.loadtests.traces.words import WORDS

MIN_ID, MAX_ID = 1000, 31_000
"""Above the special and byte tokens, and below the end of the vocabulary, of every model in use."""
_STEP = 0x9E3779B97F4A7C15
_BYTES = np.array([b" " + word.encode() for word in WORDS])


class Prompts:
    """Of one trace, whose blocks `cut` knows. The same prompts for the same seed, everywhere."""

    def __init__(self, cut: Cut, seed: int = 0, min_id: int = MIN_ID, max_id: int = MAX_ID) -> None:
        """Token ids are from `min_id` to below `max_id`; ValueError unless those are 2 or more."""
        if not 0 <= min_id < max_id - 1 <= 2**32:
            raise ValueError(f"token ids from {min_id} to below {max_id}: at least two are needed")
        self._cut = cut
        self._seed = np.array([seed % 2**64], np.uint64)
        self._min_id, self._ids = min_id, np.uint64(max_id - min_id)

    def token_ids(self, block_ids: Sequence[int], tokens: int) -> list[int]:
        """The prompt of an `Arrival` with these `block_ids` and so many tokens, as an engine takes it."""
        drawn = self._drawn(block_ids, tokens) % self._ids
        ids: list[int] = (drawn.astype(np.int64) + self._min_id).tolist()
        return ids

    def text(self, block_ids: Sequence[int], tokens: int) -> str:
        """The same in words, one for each token: a space and three letters.

        One token for a tokenizer that takes four bytes for one, as mock engines do; a real one has
        vocabulary for most of these words.
        """
        drawn = self._drawn(block_ids, tokens) % np.uint64(len(WORDS))
        return _BYTES[drawn.astype(np.intp)].tobytes().decode()

    def _drawn(self, block_ids: Sequence[int], tokens: int) -> npt.NDArray[np.uint64]:
        """(tokens,) random numbers."""
        edges = np.array([self._cut.edge(index) for index in range(len(block_ids) + 1)])
        if not 0 < tokens <= edges[-1]:
            raise ValueError(f"{len(block_ids)} blocks hold from 1 to {edges[-1]} tokens, not {tokens}")
        edges = np.minimum(edges, tokens)
        sizes = np.diff(edges)
        starts = _mix(np.array(block_ids, np.int64).astype(np.uint64) + _mix(self._seed))
        places = (np.arange(tokens) - np.repeat(edges[:-1], sizes)).astype(np.uint64)
        return _mix(np.repeat(starts, sizes) + places * np.uint64(_STEP))


def _mix(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA '14), on each."""
    numbers = numbers + np.uint64(_STEP)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
