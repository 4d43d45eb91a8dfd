"""Long work on a thread that lets the event loop's thread run in between.

A thread that waits for the GIL asks for it only after the interpreter's switch interval (5 ms), and native
code does not listen even then. Half a millisecond of work, then a pause, keeps the loop's waits short.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, SupportsIndex, overload

PAUSE_S = 20e-6
"""Long enough that the loop's thread, which wakes when the GIL is free, has it before this one is back."""
READS = 256
"""Of a list between two pauses: a template reads each of its messages a few times, at a microsecond each."""


def let_others_run() -> None:
    """Give up the GIL for a moment; nothing on the main thread, where that would only take time."""
    if threading.get_ident() != _MAIN:
        time.sleep(PAUSE_S)


_MAIN = threading.main_thread().ident


class YieldingList(list[Any]):
    """A list during whose reading, by Python or by native code, others run. Belongs to one thread."""

    _reads = 0

    @overload
    def __getitem__(self, at: SupportsIndex) -> Any: ...
    @overload
    def __getitem__(self, at: slice) -> YieldingList: ...
    def __getitem__(self, at: SupportsIndex | slice) -> Any:
        if isinstance(at, slice):
            return YieldingList(super().__getitem__(at))
        self._reads += 1
        if self._reads % READS == 0:
            let_others_run()
        return super().__getitem__(at)

    def __iter__(self) -> Iterator[Any]:
        for read, item in enumerate(super().__iter__(), 1):
            if read % READS == 0:
                let_others_run()
            yield item
