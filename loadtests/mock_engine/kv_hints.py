"""What a request tells an engine of its KV: what to offload, load and pull, and for whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvroute.conductor.tiers.base import BlockInfo
from kvroute.conductor.tiers.stack import TierStack


@dataclass(frozen=True, slots=True)
class KvHints:
    """As vLLM and SGLang read them: what is of another type or negative counts as not given."""

    max_offload_tokens: int | None = None
    """Of the request's beginning, what may go to the tiers below."""
    max_load_tokens: int | None = None
    """0 loads nothing from there; this engine knows no other limit."""
    source_id: str = ""
    """Of the transfer; the engine pulls when there are id, host and port."""
    source_host: str = ""
    source_port: int = 0
    """This engine's peers have no side channel: they are known by their HTTP port."""
    priority: int | None = None
    session_id: str | None = None

    @property
    def pulls(self) -> bool:
        """Whether the request names a peer to pull from."""
        return bool(self.source_id and self.source_host and self.source_port)

    def given(self) -> dict[str, Any]:
        """What differs from a request without hints."""
        if self is NO_HINTS:
            return {}
        return {name: value for name, value in asdict(self).items() if value != getattr(NO_HINTS, name)}


NO_HINTS = KvHints()


def read_hints(body: dict[str, Any]) -> KvHints:
    """The hints in a request's body."""
    params = body.get("kv_transfer_params")
    priority, session_id = body.get("priority"), body.get("session_id")
    if not isinstance(params, dict):
        if priority is None and session_id is None:
            return NO_HINTS
        params = {}
    source = params.get("remote_kv_source")
    if not isinstance(source, dict):
        source = {}
    return KvHints(
        _limit(params.get("max_offload_tokens")),
        _limit(params.get("max_load_tokens")),
        str(source.get("kv_request_id") or ""),
        str(source.get("remote_host") or ""),
        _limit(source.get("remote_port")) or 0,
        priority if type(priority) is int else None,
        session_id if isinstance(session_id, str) else None,
    )


def _limit(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


class HintedTiers(TierStack):
    """Tiers that heed the hints of the requests that run.

    By block: while a request runs that must not offload or load a block, no other does so either.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._kept_out: Counter[int] = Counter()
        self._not_loaded: Counter[int] = Counter()

    def begin(self, keys: Sequence[int], hints: KvHints, block_tokens: int) -> None:
        """A request of these blocks begins to run."""
        for book, blocks in self._meant(keys, hints, block_tokens):
            book.update(blocks)

    def finish(self, keys: Sequence[int], hints: KvHints, block_tokens: int) -> None:
        """It is over."""
        for book, blocks in self._meant(keys, hints, block_tokens):
            book.subtract(blocks)
            for key in blocks:
                if not book[key]:
                    del book[key]

    def receive(self, keys: Sequence[int], start: int) -> None:
        """Blocks `start` to the end of a chain came from a peer, into the first tier below."""
        now_s = self._clock()
        for depth in range(start, len(keys)):
            parent = keys[depth - 1] if depth else None
            cost_s = self._model.recompute_s(depth)
            block = BlockInfo(
                keys[depth], parent, self._model.block_bytes, depth, len(keys), cost_s, 0, now_s
            )
            self._store(0, block, now_s)

    def match(self, keys: Sequence[int]) -> int:
        return super().match(keys[: _before(keys, self._not_loaded)])

    def computed(self, keys: Sequence[int], start: int, prompt_blocks: int) -> None:
        super().computed(keys[: _before(keys, self._kept_out)], start, prompt_blocks)

    def _meant(
        self, keys: Sequence[int], hints: KvHints, block_tokens: int
    ) -> list[tuple[Counter[int], Sequence[int]]]:
        meant = []
        if hints.max_offload_tokens is not None:
            meant.append((self._kept_out, keys[hints.max_offload_tokens // block_tokens :]))
        if hints.max_load_tokens == 0:
            meant.append((self._not_loaded, keys))
        return meant


def _before(keys: Sequence[int], book: Counter[int]) -> int:
    """How many leading keys are not in a book."""
    if not book:
        return len(keys)
    return next((index for index, key in enumerate(keys) if key in book), len(keys))
