"""The nouns: one request of a trace, many of them packed, and the trace."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import eq
from typing import overload

import numpy as np
from msgspec import Struct

from kvroute.loadtests.traces.runs import ids_of, runs_of


class Row(Struct, frozen=True, gc=False):
    """One request. Block ids are chained: equal ids stand for equal tokens from the prompt's start on."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    """One for each block of the prompt, the last one perhaps partial."""
    session_id: str | None = None
    """Of a client that says which session it belongs to."""


class Rows(Sequence[Row]):
    """Many rows, packed: 32 bytes each, 16 for every run of consecutive ids; a `Row` is made when asked for.

    Ids are handed out in order, so a prompt is few runs: 2.8 on average in the conversation trace of
    Mooncake (FAST '25) for 24 blocks. Call `sort` once after the last `add`.
    """

    __slots__ = (
        "_arrivals_s",
        "_ends",
        "_inputs",
        "_names",
        "_numbers",
        "_order",
        "_outputs",
        "_runs",
        "_sessions",
    )

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._arrivals_s = array("d")
        self._inputs, self._outputs = array("i"), array("i")
        self._sessions = array("i")  # place in `_names`; -1 for none
        self._runs, self._ends = array("q"), array("q")
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._order = array("I")
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        self.add_runs(
            row.arrival_s, row.input_tokens, row.output_tokens, runs_of(row.block_ids), row.session_id
        )

    def add_runs(
        self, arrival_s: float, input_tokens: int, output_tokens: int, runs: list[int], session_id: str | None
    ) -> None:
        """The same with ids as `runs.runs_of` gives them; `runs` is copied."""
        self._order.append(len(self._inputs))
        self._arrivals_s.append(arrival_s)
        self._inputs.append(input_tokens)
        self._outputs.append(output_tokens)
        self._runs.extend(runs)
        self._ends.append(len(self._runs))
        number = -1
        if session_id is not None and (
            number := self._numbers.setdefault(session_id, len(self._names))
        ) == len(self._names):
            self._names.append(session_id)
        self._sessions.append(number)

    def sort(self, keep: int | None = None) -> int:
        """In order of arrival, equal times as they came; the first `keep` of them if given.

        Gives how many came before the row they followed.
        """
        times = np.array(self._arrivals_s)
        self._order = array("I", np.argsort(times, kind="stable")[:keep].astype(np.uint32).tobytes())
        self._numbers = {}
        return int(np.count_nonzero(np.diff(times) < 0))

    def shift(self, by_s: float) -> None:
        """All arrivals so much earlier."""
        self._arrivals_s = array("d", (np.array(self._arrivals_s) - by_s).tobytes())

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Row]:
        return map(self._row, self._order)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        if isinstance(index, slice):
            return tuple(map(self._row, self._order[index]))
        return self._row(self._order[index])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Rows({len(self)} rows, {len(self._runs) // 2} runs, {len(self._names)} sessions)"

    def _row(self, at: int) -> Row:
        session = self._sessions[at]
        return Row(
            self._arrivals_s[at],
            self._inputs[at],
            self._outputs[at],
            ids_of(self._runs[self._ends[at - 1] if at else 0 : self._ends[at]]),
            None if session < 0 else self._names[session],
        )


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows in order of arrival."""

    name: str
    block_tokens: int
    rows: Sequence[Row]
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Lines of the file that were left out, by reason."""
    unsorted: int = 0
    """Lines of the file that were stamped earlier than the one before."""

    @property
    def prompts(self) -> list[tuple[int, tuple[int, ...]]]:
        return [(row.input_tokens, row.block_ids) for row in self.rows]
