"""Many engines in one process."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from types import TracebackType

import uvloop

from kvroute.loadtests.mock_engine.engine import MockEngine
from kvroute.loadtests.mock_engine.options import MockOptions
from kvroute.loadtests.mock_engine.pd.shared_storage import SharedStore


class MockFleet:
    """`options.engines` engines on one event loop; an async context manager."""

    def __init__(self, options: MockOptions | None = None) -> None:
        self.options = options or MockOptions()
        self.engines = [MockEngine(self.options, index) for index in range(self.options.engines)]
        store = SharedStore()
        for engine in self.engines:
            engine.peers, engine.store = self.engines, store

    def __repr__(self) -> str:
        return f"<MockFleet {len(self.engines)} engines>"

    @property
    def urls(self) -> list[str]:
        """One per engine, known once started."""
        return [engine.url for engine in self.engines]

    async def start(self) -> MockFleet:
        """Listen on every port; OSError, and nothing left open, when one is taken."""
        try:
            for engine in self.engines:
                await engine.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def stop(self) -> None:
        """Close everything; idempotent."""
        for engine in self.engines:
            await engine.stop()

    async def __aenter__(self) -> MockFleet:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


async def serve(options: MockOptions) -> None:
    """Run a fleet until cancelled, or until SIGTERM or SIGINT; prints one URL a line once it listens."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    # Only the main thread may handle signals; elsewhere cancellation is the way to stop.
    with suppress(ValueError, RuntimeError, NotImplementedError):
        for number in signals:
            loop.add_signal_handler(number, stopped.set)
    try:
        async with MockFleet(options) as fleet:
            print(*fleet.urls, sep="\n", flush=True)
            await stopped.wait()
    finally:
        with suppress(ValueError, RuntimeError, NotImplementedError):
            for number in signals:
                loop.remove_signal_handler(number)


def run(options: MockOptions) -> None:
    """`serve` on a loop of its own."""
    uvloop.run(serve(options))
