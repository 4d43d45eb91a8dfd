"""vLLM's ExampleConnector, one after the other: no parameters, both engines read and write one store.

A prompt is found as a whole or not at all: its full blocks before the last token are one entry.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvroute.loadtests.mock_engine.pd.base import Fetch, PdSide
from kvroute.loadtests.mock_engine.sequences import Sequence
from kvroute.types import Role

if TYPE_CHECKING:
    from kvroute.loadtests.mock_engine.answers import TokenAnswer
    from kvroute.loadtests.mock_engine.engine import MockEngine

Key = tuple[bytes, str | None, str | None]
_MAX_PROMPTS = 10_000


class SharedStore:
    """Of a fleet: outlives its engines, and keeps the prompts stored last."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[Key, bool] = OrderedDict()

    def put(self, key: Key, is_wrong: bool) -> None:
        """A prompt's KV; it may have been computed over wrong KV."""
        self._prompts[key] = is_wrong
        if len(self._prompts) > _MAX_PROMPTS:
            self._prompts.popitem(last=False)

    def get(self, key: Key) -> bool | None:
        """Whether what is stored is wrong; None when nothing is."""
        return self._prompts.get(key)


class SharedStorage(PdSide):
    """A producer only writes, a consumer only reads."""

    vllm_name = "ExampleConnector"

    def __init__(self, engine: MockEngine) -> None:
        super().__init__(engine)
        self._computing: dict[Sequence, Key] = {}

    def queue(self, answer: TokenAnswer, index: int, sequence: Sequence) -> bool:
        key = self._key(answer, index)
        if not key[0]:
            return True  # shorter than a block
        if self.role is not Role.PREFILL and self.engine.store.get(key) is not None:
            fetch = Fetch(answer, index, key)
            answer.fetches.append(fetch)
            self.expect(sequence, fetch)
            return True
        if self.role is Role.DECODE:
            if any(key in side._computing.values() for side in self._others()):
                self.books.note("order_violations", answer.entry.id)
            return True
        sequence.hold = True
        self._computing[sequence] = key
        return True

    def prefilled(self, sequence: Sequence) -> None:
        answer, index = sequence.payload
        self.engine.store.put(self._computing.pop(sequence), answer.call.parts[index].is_wrong)
        self.engine.driver.let_go(sequence)

    def fetch(self, sequence: Sequence) -> None:
        fetch = self._fetches[sequence]
        self.after(fetch, self.transfer_s(fetch, None), self._read)

    def ended(self, answer: TokenAnswer, outcome: str) -> None:
        super().ended(answer, outcome)
        for part in answer.call.parts:
            if part.sequence is not None:
                self._computing.pop(part.sequence, None)

    def _read(self, fetch: Fetch) -> None:
        is_wrong = self.engine.store.get(fetch.id)
        if is_wrong is None:
            self.failed(fetch)  # pushed out meanwhile
            return
        whole = (len(fetch.part.tokens) - 1) // self.engine.options.block_size_tokens
        self.received(fetch, "poisoned" if is_wrong else None, whole * self.engine.options.block_size_tokens)

    def _key(self, answer: TokenAnswer, index: int) -> Key:
        tokens, size = answer.call.parts[index].tokens, self.engine.options.block_size_tokens
        whole = (len(tokens) - 1) // size * size
        return tokens[:whole].tobytes(), answer.call.lora, answer.call.salt

    def _others(self) -> list[SharedStorage]:
        return [side for engine in self.engine.peers if isinstance(side := engine.pd, SharedStorage)]
