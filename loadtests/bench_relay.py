"""`kvroute bench relay`: the gateway's CPU per request, whole and split into prefill and decode.

Real processes on this machine: mock engines that answer at once, two gateways before them (one whose workers
do all, one whose workers do half), and this one, which asks both in turn, so that noise meets both. CPU time
is that of the gateway's threads, by the kernel's own clock.

Both are asked at the same rate. Asked as fast as they go, the one that goes faster meets more events in each
turn of its loop, and pays for fewer turns.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

START_LIMIT_S = 60.0
START_TRIES = 3
"""Others may take the port that was free."""
OUTPUT_TOKENS = 16
WARM_UP = 100
CONNECTIONS = 8
MAX_RATE_PER_S = 100_000.0
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RelayBench:
    """ValueError for what cannot be measured."""

    connector: str = "nixl"
    policy: str = "round_robin"
    body_bytes: tuple[int, ...] = (2_000, 100_000)
    requests: int = 500
    rounds: int = 5
    rate_per_s: float = 300.0
    """0: as fast as a few connections go."""

    def __post_init__(self) -> None:
        for name in ("requests", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not above 0; 1 or more is expected")
        if not 0 <= self.rate_per_s <= MAX_RATE_PER_S:
            raise ValueError(
                f"rate: {self.rate_per_s:g}; from 0 to {MAX_RATE_PER_S:g} per second is expected"
            )
        if not self.body_bytes or min(self.body_bytes) < 200:
            raise ValueError("bytes: bodies of 200 bytes or more are expected")


def run_bench_relay(bench: RelayBench) -> dict[str, Any]:
    """The figures, `rows` by body and kind of answer."""
    with ExitStack() as stack:
        gateways = {name: stack.enter_context(_gateway(bench, name)) for name in ("whole", "split")}
        rows = [
            _measure(bench, gateways, size, streams=streams)
            for size in bench.body_bytes
            for streams in (False, True)
        ]
    return {
        "connector": bench.connector,
        "policy": bench.policy,
        "rounds": bench.rounds,
        "rate_per_s": bench.rate_per_s,
        "rows": rows,
    }


def show_bench_relay(result: dict[str, Any]) -> str:
    """For people."""
    rate = f"{result['rate_per_s']:g} requests/s" if result["rate_per_s"] else "as fast as they go"
    lines = [
        f"{result['policy']}, {result['connector']}, {rate}; CPU us of the gateway per request, "
        f"the median of {result['rounds']} rounds [lowest-highest]",
        f"{'body':>8}  {'answer':<8}{'whole':>18}{'split':>18}  ratio",
    ]
    for row in result["rows"]:
        shown = [
            f"{row[f'{way}_us']:.0f} [{row[f'{way}_min_us']:.0f}-{row[f'{way}_max_us']:.0f}]"
            for way in ("whole", "split")
        ]
        kind = "stream" if row["streams"] else "plain"
        lines.append(f"{row['body_bytes']:>8}  {kind:<8}{shown[0]:>18}{shown[1]:>18}  {row['ratio']:.2f}")
    return "\n".join(lines)


def _measure(
    bench: RelayBench, gateways: dict[str, tuple[int, int]], size: int, *, streams: bool
) -> dict[str, Any]:
    body = {"model": "mock", "prompt": "ab " * (size // 3), "max_tokens": OUTPUT_TOKENS, "stream": streams}
    data = json.dumps(body).encode()
    taken: dict[str, list[float]] = {name: [] for name in gateways}
    for port, _ in gateways.values():
        asyncio.run(_ask(port, data, WARM_UP))
    for _ in range(bench.rounds):
        for name, (port, pid) in gateways.items():
            before_s = _cpu_s(pid)
            asyncio.run(_ask(port, data, bench.requests, bench.rate_per_s))
            taken[name].append((_cpu_s(pid) - before_s) / bench.requests * 1e6)
    row: dict[str, Any] = {"body_bytes": len(data), "streams": streams}
    for name, us in taken.items():
        row |= {f"{name}_us": median(us), f"{name}_min_us": min(us), f"{name}_max_us": max(us)}
    ratios = [split / whole for whole, split in zip(taken["whole"], taken["split"], strict=True)]
    return {**row, "ratio": median(ratios)}


def _cpu_s(pid: int) -> float:
    """Of all threads of a process so far."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def _ask(port: int, body: bytes, count: int, rate_per_s: float = 0.0) -> None:
    """So many requests, over a few connections or at a rate; RuntimeError for an answer that is none."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    )
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def one() -> None:
        reader, writer = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + body)
        await _read_answer(reader)
        idle.append((reader, writer))

    await (_at_rate(one, count, rate_per_s) if rate_per_s else _in_turn(one, count))
    for _, writer in idle:
        writer.close()


async def _in_turn(one: Callable[[], Coroutine[Any, Any, None]], count: int) -> None:
    left = iter(range(count))

    async def some() -> None:
        for _ in left:
            await one()

    await asyncio.gather(*(some() for _ in range(CONNECTIONS)))


async def _at_rate(one: Callable[[], Coroutine[Any, Any, None]], count: int, rate_per_s: float) -> None:
    began_s = time.monotonic()
    async with asyncio.TaskGroup() as asked:
        for i in range(count):
            await asyncio.sleep(began_s + i / rate_per_s - time.monotonic())
            asked.create_task(one())


async def _read_answer(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        raise RuntimeError(f"the gateway answered {head.splitlines()[0].decode('latin-1')}")
    if (length := _LENGTH.search(head)) is not None:
        await reader.readexactly(int(length[1]))
        return
    while size := int(await reader.readuntil(b"\r\n"), 16):
        await reader.readexactly(size + 2)
    await reader.readexactly(2)


# Processes.


@contextmanager
def _gateway(bench: RelayBench, way: str) -> Iterator[tuple[int, int]]:
    """(port, pid) of a gateway before four engines of its own, all ready."""
    is_split = way == "split"
    halves = ["--prefill", "2", "--decode", "2", "--pd-connector", bench.connector]
    engines = ["mock-engine", "--speed", "inf", "--kv-blocks", "400000"]
    with _process([*engines, *(halves if is_split else ["--engines", "4"])]) as fleet:
        assert fleet.stdout is not None
        urls = [fleet.stdout.readline().decode().strip() for _ in range(4)]
        if is_split:
            workers = [*_each("--prefill", urls[:2]), *_each("--decode", urls[2:])]
            workers += ["--pd-connector", bench.connector]
        else:
            workers = _each("--worker", urls)
        serve = ["serve", "--policy", bench.policy, "--log-level", "error", *workers]
        for _ in range(START_TRIES):
            port = _free_port()
            with _process([*serve, "--port", str(port)]) as gateway:
                if _is_ready(gateway, port):
                    yield port, gateway.pid
                    return
        raise RuntimeError("the gateway ends as soon as it is started; it says why on standard error")


def _each(flag: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (flag, value)]


@contextmanager
def _process(arguments: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVROUTE_")}
    env = {**kept, "KVROUTE_ADMIN__ENABLED": "false", "KVROUTE_HEALTH__SLOW_START_S": "0"}
    process = subprocess.Popen([sys.executable, "-m", "kvroute", *arguments], env=env, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _is_ready(gateway: subprocess.Popen[bytes], port: int) -> bool:
    """Once its four workers are ready; False when it has ended. RuntimeError when they are not in time."""
    until_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < until_s:
        if gateway.poll() is not None:
            return False
        try:
            if httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=5).json()["workers"].get("ready") == 4:
                return True
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"the gateway had not four workers within {START_LIMIT_S:.0f} s")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
