"""Very many slow streams through one process: none fails, probes stay quick, memory stays bounded."""

from __future__ import annotations

import asyncio
import resource

import pytest

from tests.kit import CHAT, Client, Engine, Received, Wire, ask, until
from tests.process import Serving, serve

TAIL = b"data: [DONE]\n\n"


async def run(streams: int, events: int, gap_s: float) -> tuple[list[bytes], list[float], Serving, int]:
    """Bodies that came, how long /livez took meanwhile, the process, and its growth in bytes.

    A wait is CPU time that the process spent in it, as a share of what it spent in all: what else the
    machine does is no part of it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 6 * streams + 256  # both ends of both connections are sockets of this process, or its child's
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"needs {wanted} open files, the hard limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    begin = asyncio.Event()

    async def script(_request: Received, wire: Wire) -> None:
        await wire.start_stream()
        await wire.chunk(b"data: 0\n\n")
        await begin.wait()
        for number in range(1, events):
            await asyncio.sleep(gap_s)
            await wire.chunk(b"data: %d\n\n" % number)
        await wire.chunk(TAIL)
        await wire.chunk(b"")

    async def stream(url: str) -> bytes:
        client = await Client.connect(url)
        await client.send(CHAT, {"model": "m", "stream": True, "prompt": "x" * 2000})
        status, _, _ = await client.head()
        assert status == 200
        body = b""
        while piece := await client.chunk():
            body += piece
        client.close()
        return body

    waits: list[float] = []

    async def probe(serving: Serving) -> None:
        while True:
            spent_s = serving.cpu_s()
            assert (await ask(serving.url, "/livez", method="GET")).status == 200
            waits.append(serving.cpu_s() - spent_s)
            await asyncio.sleep(0.05)

    async with (
        Engine(script=script) as a,
        Engine(script=script) as b,
        serve(
            "--worker",
            a.url,
            "--worker",
            b.url,
            "--policy=least_loaded",
            KVROUTE_SHUTDOWN__KEEP_SERVING_S="0",
            KVROUTE_HEALTH__TIMEOUT_S="60",
        ) as serving,
    ):
        await until(lambda: sum(event.get("state") == "ready" for event in serving.events) == 2)
        for _ in range(20):
            await ask(serving.url, "/livez", method="GET")
        before = serving.rss_bytes()
        tasks = []
        for start in range(0, streams, 50):
            tasks += [asyncio.create_task(stream(serving.url)) for _ in range(min(50, streams - start))]
            await until(lambda: len(a.received) + len(b.received) == len(tasks), within_s=20)  # noqa: B023
        assert len(a.received) == len(b.received)
        probing = asyncio.create_task(probe(serving))
        spent_s = serving.cpu_s()
        begin.set()
        async with asyncio.timeout(120):
            bodies = await asyncio.gather(*tasks)
        growth = serving.rss_bytes() - before
        spent_s = serving.cpu_s() - spent_s
        assert not probing.done(), probing  # it ends only by failing
        probing.cancel()
        page = (await ask(serving.url, "/metrics", method="GET")).body.decode()
        assert "kvroute_requests_in_flight 0.0" in page
        assert "kvroute_buffered_request_bytes 0.0" in page
        serving.signal()
        assert await serving.exit_status() == 0
    return bodies, [wait_s / spent_s for wait_s in waits], serving, growth


def check(bodies: list[bytes], waits: list[float], serving: Serving, events: int) -> None:
    assert set(bodies) == {b"".join(b"data: %d\n\n" % number for number in range(events)) + TAIL}
    assert len(waits) >= 5
    print("waits:", [round(share, 4) for share in sorted(waits)])
    assert sorted(waits)[int(0.95 * (len(waits) - 1))] < 2 / events, "behind a round of all streams at most"
    assert [event for event in serving.events if event["level"] != "info"] == []


async def test_two_hundred() -> None:
    bodies, waits, serving, growth = await run(streams=200, events=20, gap_s=0.1)
    assert len(bodies) == 200
    check(bodies, waits, serving, events=20)
    assert growth < 16 * 2**20


@pytest.mark.soak
async def test_a_thousand() -> None:
    bodies, waits, serving, growth = await run(streams=1000, events=30, gap_s=1.0)
    assert len(bodies) == 1000
    check(bodies, waits, serving, events=30)
    assert growth < 48 * 2**20
