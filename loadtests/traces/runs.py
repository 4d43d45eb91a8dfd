"""Sequences of ids as runs of consecutive ones: first, end, first, end, ... in one flat list."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def runs_of(ids: Iterable[int]) -> list[int]:
    """(4, 5, 6, 9) is [4, 7, 9, 10]."""
    runs: list[int] = []
    end = None
    for id_ in ids:
        if id_ != end:
            if end is not None:
                runs.append(end)
            runs.append(id_)
        end = id_ + 1
    if end is not None:
        runs.append(end)
    return runs


def ids_of(runs: Sequence[int]) -> tuple[int, ...]:
    """[4, 7, 9, 10] is (4, 5, 6, 9)."""
    if len(runs) == 2:
        return tuple(range(runs[0], runs[1]))
    ids: list[int] = []
    for i in range(0, len(runs), 2):
        ids += range(runs[i], runs[i + 1])
    return tuple(ids)
