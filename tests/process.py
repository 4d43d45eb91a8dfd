"""A real `kvroute serve` in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from tests.kit import HANG_S


def clean_environment(**added: str) -> dict[str, str]:
    """This process's environment without settings of ours."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVROUTE_")}
    return {**kept, **added}


async def kvroute(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Run the command to its end: exit status, standard output, standard error."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvroute",
        *arguments,
        env=clean_environment(**environment),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(2 * HANG_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@dataclass
class Serving:
    """`lines` grows as the process logs."""

    process: asyncio.subprocess.Process
    url: str = ""
    admin_url: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def events(self) -> list[dict[str, Any]]:
        """Every log line; raises when one is not a JSON object."""
        events = [json.loads(line) for line in self.lines]
        assert all(isinstance(event, dict) for event in events)
        return events

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    async def exit_status(self) -> int:
        async with asyncio.timeout(HANG_S):
            return await self.process.wait()

    def cpu_s(self) -> float:
        """CPU time of all its threads so far."""
        return time.clock_gettime(~self.process.pid << 3 | 2)  # the kernel's name of another process's clock

    def rss_bytes(self) -> int:
        with open(f"/proc/{self.process.pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.asynccontextmanager
async def serve(*arguments: str, **environment: str) -> AsyncIterator[Serving]:
    """`kvroute serve` on free ports; killed on the way out if it is still there."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvroute",
        "serve",
        "--port=0",
        "--admin-port=0",
        *arguments,
        env=clean_environment(**environment),
        stderr=asyncio.subprocess.PIPE,
    )
    serving = Serving(process)
    listening = asyncio.Event()

    async def read() -> None:
        assert process.stderr is not None
        while line := (await process.stderr.readline()).decode():
            serving.lines.append(line)
            if not listening.is_set() and '"listening"' in line:
                event = json.loads(line)
                serving.url, serving.admin_url = event["url"], event["admin_url"]
                listening.set()

    reading = asyncio.create_task(read())
    try:
        async with asyncio.timeout(2 * HANG_S):
            waiting = asyncio.create_task(listening.wait())
            await asyncio.wait([waiting, reading], return_when=asyncio.FIRST_COMPLETED)
        assert listening.is_set(), "".join(serving.lines)
        yield serving
        if process.returncode is not None:
            await reading
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        reading.cancel()
        waiting.cancel()
