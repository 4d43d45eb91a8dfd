"""Many requests as measured, packed: a million of them lie in memory until a run's figures are made."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from operator import eq
from typing import overload

from msgspec.msgpack import Decoder, Encoder
from msgspec.structs import astuple

from kvroute.loadtests.results.measured import Measured

_encode, _decode = Encoder().encode, Decoder().decode


class PackedRequests(Sequence[Measured]):
    """Some 120 bytes each, in place of 450; a `Measured` is made when asked for.

    A place is taken when a request comes and filled when it has ended; read it once all are. Slices, and
    what `where` gives, share the bytes.
    """

    __slots__ = ("_data", "_sizes", "_starts")

    def __init__(self) -> None:
        self._data = bytearray()
        self._starts = array("Q")
        self._sizes = array("I")  # 0 until it is filled

    def expect(self) -> None:
        """One more has come."""
        self._starts.append(0)
        self._sizes.append(0)

    def put(self, number: int, measured: Measured) -> None:
        """The one that was expected as this number, from 0 on, has ended."""
        packed = _encode(astuple(measured))
        self._starts[number], self._sizes[number] = len(self._data), len(packed)
        self._data += packed

    @property
    def missing(self) -> int:
        """How many have not ended."""
        return self._sizes.count(0)

    def where(self, keep: Callable[[Measured], bool]) -> PackedRequests:
        """Those for which it holds."""
        places = [place for place, one in enumerate(self) if keep(one)]
        return self._view(
            array("Q", [self._starts[place] for place in places]),
            array("I", [self._sizes[place] for place in places]),
        )

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[Measured]:
        return map(self._made, self._starts, self._sizes)

    @overload
    def __getitem__(self, index: int) -> Measured: ...
    @overload
    def __getitem__(self, index: slice) -> PackedRequests: ...
    def __getitem__(self, index: int | slice) -> Measured | PackedRequests:
        if isinstance(index, slice):
            return self._view(self._starts[index], self._sizes[index])
        return self._made(self._starts[index], self._sizes[index])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"PackedRequests({len(self)} requests, {len(self._data)} bytes)"

    def _made(self, start: int, size: int) -> Measured:
        return Measured(*_decode(self._data[start : start + size]))

    def _view(self, starts: array[int], sizes: array[int]) -> PackedRequests:
        view = PackedRequests()
        view._data, view._starts, view._sizes = self._data, starts, sizes
        return view


def those(measured: Sequence[Measured], keep: Callable[[Measured], bool]) -> Sequence[Measured]:
    """For which it holds; packed where they are packed."""
    if isinstance(measured, PackedRequests):
        return measured.where(keep)
    return [one for one in measured if keep(one)]
