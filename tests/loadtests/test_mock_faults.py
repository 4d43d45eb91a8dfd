"""The mock engine's faults, as bytes on real connections."""

from __future__ import annotations

import asyncio
import gzip
import math
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx
import orjson
import pytest

from kvroute.loadtests.mock_engine import Faults, MockFleet, MockOptions
from kvroute.loadtests.mock_engine.faults import FaultError, parse_header
from tests.kit import HANG_S
from tests.loadtests.virtual_time import run_virtually

BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}


@pytest.fixture
async def fleet() -> AsyncIterator[MockFleet]:
    async with MockFleet(MockOptions(speed=math.inf)) as fleet:
        yield fleet
        for engine in fleet.engines:
            engine.scheduler.check_integrity()


class Client:
    """One raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, fleet: MockFleet, **limits: int) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", fleet.engines[0].port, **limits))

    def post(self, faults: str = "", path: str = "/v1/chat/completions", **fields: Any) -> None:
        body = orjson.dumps({**BODY, **fields})
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nx-mock-fault: {faults}\r\nx-request-id: r\r\n"
        self.writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    async def until(self, marker: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(marker), HANG_S)

    async def rest(self) -> tuple[bytes, bool]:
        """Everything up to the end, and whether that was a reset."""
        data = bytearray()
        try:
            while part := await asyncio.wait_for(self.reader.read(65536), HANG_S):
                data += part
        except ConnectionResetError:
            return bytes(data), True
        return bytes(data), False

    async def silent(self, for_s: float = 0.1) -> bool:
        try:
            return not await asyncio.wait_for(self.reader.read(1), for_s)
        except TimeoutError:
            return True


async def ended(fleet: MockFleet, outcome: str, within_s: float = HANG_S) -> None:
    """Wait until request `r` has that outcome."""
    deadline = time.monotonic() + within_s
    while fleet.engines[0].journal.outcome("r") != outcome:
        assert time.monotonic() < deadline, fleet.engines[0].journal.outcome("r")
        await asyncio.sleep(0.002)


def test_ttft_comes_before_the_head_and_gaps_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with MockFleet(MockOptions(speed=math.inf)) as fleet:
            now_s = asyncio.get_running_loop().time
            client = await Client.open(fleet)
            client.post("ttft=0.1,gap=0.05,n=4", stream=True)
            started_s = now_s()
            await client.until(b"\r\n\r\n")
            times = [now_s() - started_s]
            for _ in range(4):
                await client.until(b'"delta":{"content":')
                times.append(now_s() - started_s)
            await client.until(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert times == pytest.approx([0.1, 0.1, 0.15, 0.2, 0.25], abs=0.01)
            await ended(fleet, "finished")

    run_virtually(main(), monkeypatch)


def test_a_plain_answer_waits_as_long_as_the_stream_would(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with (
            MockFleet(MockOptions(speed=math.inf)) as fleet,
            httpx.AsyncClient(base_url=fleet.urls[0], verify=False) as client,
        ):
            started_s = asyncio.get_running_loop().time()
            header = {"x-mock-fault": "ttft=0.1,gap=0.02,n=6"}
            reply = await client.post("/v1/chat/completions", json=BODY, headers=header)
            took_s = asyncio.get_running_loop().time() - started_s
        assert took_s == pytest.approx(0.2, abs=0.01)
        assert reply.json()["usage"]["completion_tokens"] == 6

    run_virtually(main(), monkeypatch)


@pytest.mark.parametrize("events", [0, 2, 5])
@pytest.mark.parametrize(("fault", "is_reset"), [("die_at", True), ("close_at", False)])
async def test_a_stream_is_cut_after_that_many_events(
    fleet: MockFleet, fault: str, is_reset: bool, events: int
) -> None:
    client = await Client.open(fleet)
    client.post(f"{fault}={events}", stream=True)
    data, reset = await client.rest()
    assert data.startswith(b"HTTP/1.1 200 OK\r\n")
    assert data.count(b'"content":" ') == events
    assert b"[DONE]" not in data
    assert reset is is_reset
    await ended(fleet, "broken")


@pytest.mark.parametrize(("fault", "part"), [("die_at=0", False), ("die_at=1", True)])
async def test_a_plain_answer_is_cut_before_or_within_its_body(
    fleet: MockFleet, fault: str, part: bool
) -> None:
    client = await Client.open(fleet)
    client.post(fault)
    data, reset = await client.rest()
    assert reset
    assert bool(data.partition(b"\r\n\r\n")[2]) is part


async def test_die_before_sends_nothing(fleet: MockFleet) -> None:
    client = await Client.open(fleet)
    client.post("die_before")
    assert await client.rest() == (b"", True)
    await ended(fleet, "broken")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("faults", ["hang", "ttft=600", "gap=600,n=3", "hang_at=1"])
async def test_a_client_that_leaves_is_seen_at_once(fleet: MockFleet, faults: str, stream: bool) -> None:
    client = await Client.open(fleet)
    client.post(faults, stream=stream)
    if stream and faults.startswith(("gap", "hang_at")):
        await client.until(b"}\n\n")
        await client.until(b"}\n\n")
    else:
        await asyncio.sleep(0.03)
    engine = fleet.engines[0]
    assert engine.journal.outcome("r") == "open"
    assert engine.running == 1
    client.writer.transport.abort()
    await ended(fleet, "aborted")
    assert engine.running == 0
    assert engine.scheduler.cache.used_ratio == 0
    assert engine.journal.ids("aborted") == ["r"]


async def test_hang_accepts_and_never_answers(fleet: MockFleet) -> None:
    client = await Client.open(fleet)
    client.post("hang")
    assert await client.silent()


async def test_hang_at_sends_that_many_events_and_no_more(fleet: MockFleet) -> None:
    client = await Client.open(fleet)
    client.post("hang_at=2", stream=True)
    await client.until(b"}\n\n\r\n")
    await client.until(b"}\n\n\r\n")
    assert await client.silent()
    assert fleet.engines[0].journal.entries["r"].events == 2


async def test_a_status_with_retry_after(fleet: MockFleet) -> None:
    async with httpx.AsyncClient(base_url=fleet.urls[0], verify=False) as client:
        header = {"x-mock-fault": "status=429,retry_after=7"}
        reply = await client.post("/v1/chat/completions", json={**BODY, "stream": True}, headers=header)
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "7")
    assert reply.headers["content-type"] == "application/json"
    assert reply.json()["error"]["code"] == 429
    await asyncio.sleep(0)
    assert fleet.engines[0].journal.totals["rejected"] == 1


async def test_split_and_join_change_the_chunks_and_not_the_bytes(fleet: MockFleet) -> None:
    bodies = []
    for faults in ("", "split=1", "join=1"):
        client = await Client.open(fleet)
        client.post(faults, stream=True)
        head = await client.until(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head
        chunks = []
        while size := int(await client.until(b"\r\n"), 16):
            chunks.append((await client.reader.readexactly(size + 2))[:-2])
        bodies.append(b"".join(chunks))
        lengths = {len(chunk) for chunk in chunks}
        assert {"split=1": lengths == {1}, "join=1": len(chunks) == 1, "": len(chunks) == 6}[faults]
    created = [body.replace(b'"created":', b"|").split(b"|")[0] for body in bodies]
    assert created[0] == created[1] == created[2]
    assert len(set(map(len, bodies))) == 1


async def test_events_end_in_crlf_when_told(fleet: MockFleet) -> None:
    client = await Client.open(fleet)
    client.post("crlf", stream=True)
    await client.until(b"data: [DONE]\r\n\r\n\r\n0\r\n\r\n")


async def test_an_error_event_in_mid_stream_then_done(fleet: MockFleet) -> None:
    client = await Client.open(fleet)
    client.post("error_event_at=2", stream=True)
    data = await client.until(b"0\r\n\r\n")
    assert data.count(b'"content":" ') == 2
    assert b'data: {"error":{' in data
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_malformed_chunk(fleet: MockFleet) -> None:
    async with httpx.AsyncClient(base_url=fleet.urls[0], verify=False) as client:
        header = {"x-mock-fault": "corrupt_at=1"}
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/v1/chat/completions", json={**BODY, "stream": True}, headers=header)


async def test_gzip_is_for_plain_answers_and_streams(fleet: MockFleet) -> None:
    async with httpx.AsyncClient(base_url=fleet.urls[0], verify=False) as client:
        for stream in (False, True):
            body = {**BODY, "stream": stream}
            header = {"x-mock-fault": "gzip"}
            reply = await client.post("/v1/chat/completions", json=body, headers=header)
            assert reply.headers["content-encoding"] == "gzip"
            assert reply.text.rstrip().endswith("[DONE]" if stream else "}")
    client = await Client.open(fleet)
    client.post("gzip")
    head = await client.until(b"\r\n\r\n")
    length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
    assert gzip.decompress(await client.reader.readexactly(length)).startswith(b'{"id":')


async def test_odd_bodies(fleet: MockFleet) -> None:
    async with httpx.AsyncClient(base_url=fleet.urls[0], verify=False) as client:

        async def post(faults: str, stream: bool = False) -> httpx.Response:
            header = {"x-mock-fault": faults}
            body = {**BODY, "stream": stream}
            return await client.post("/v1/chat/completions", json=body, headers=header)

        assert (await post("no_content")).status_code == 204
        wrong = await post("error_body")
        assert (wrong.status_code, "error" in wrong.json()) == (200, True)
        unsized = await post("no_length")
        assert "content-length" not in unsized.headers
        assert unsized.json()["usage"]["completion_tokens"] == 5
        assert (await post("close")).headers["connection"] == "close"
        assert (await post("unicode,n=40")).json()["choices"][0]["message"]["content"].isascii() is False
        lie = (await post("cached_tokens=3")).json()["usage"]["prompt_tokens_details"]
        assert lie == {"cached_tokens": 3}
        flood = (await post("flood_bytes=300000", stream=True)).content
        assert flood == b"x" * 300_000 + b"\n\ndata: [DONE]\n\n"
        refused = await post("nonsense=1")
        assert refused.status_code == 400
        assert "known: ttft, gap" in refused.json()["error"]["message"]


async def test_a_slow_reader_stalls_the_writer(fleet: MockFleet) -> None:
    client = await Client.open(fleet, limit=1024)
    client.post("n=60000", stream=True)
    await client.until(b"\r\n\r\n")
    engine = fleet.engines[0]
    await asyncio.sleep(0.1)
    before = engine.bytes_written
    await asyncio.sleep(0.1)
    assert engine.bytes_written == before
    assert engine.journal.entries["r"].events < 60_000
    assert engine.running == 1
    total = 0
    while b"[DONE]" not in (part := await client.reader.read(1 << 20)):
        total += len(part)
    assert total > before
    await ended(fleet, "finished")


async def test_faults_set_at_run_time_and_from_a_test(fleet: MockFleet) -> None:
    engine = fleet.engines[0]
    async with httpx.AsyncClient(base_url=fleet.urls[0], verify=False) as client:

        async def status() -> int:
            return (await client.post("/v1/chat/completions", json=BODY)).status_code

        reply = await client.post("/debug/faults", json={"status": 503, "times": 2})
        assert reply.json() == {"status": 503, "times": 2}
        assert [await status() for _ in range(3)] == [503, 503, 200]
        assert (await client.post("/debug/faults", json={"gape": 1})).status_code == 400
        assert (await client.post("/debug/faults", json={"gap": "x"})).status_code == 400
        await client.delete("/debug/faults")
        engine.faults.status = 500
        assert await status() == 500
        engine.faults = Faults()
        assert await status() == 200


async def test_health_models_and_metrics_can_fail_and_lag(fleet: MockFleet) -> None:
    faults = fleet.engines[0].faults
    async with httpx.AsyncClient(base_url=fleet.urls[0], verify=False) as client:

        async def status(path: str) -> int:
            return (await client.get(path)).status_code

        faults.fail_health = [True, False, False]
        assert [await status("/health") for _ in range(4)] == [503, 200, 200, 503]
        faults.fail_health = True
        assert await status("/health") == 503
        faults.fail_metrics = faults.fail_models = True
        assert (await status("/metrics"), await status("/v1/models")) == (500, 503)
        faults.slow_health = faults.slow_metrics = faults.slow_models = 0.05
        for path in ("/health", "/metrics", "/v1/models"):
            started = time.monotonic()
            await status(path)
            assert time.monotonic() - started >= 0.05


async def test_a_key_is_demanded_where_the_engine_does(fleet: MockFleet) -> None:
    fleet.engines[0].faults.api_key = "k"
    async with httpx.AsyncClient(base_url=fleet.urls[0], verify=False) as client:
        assert (await client.get("/health")).status_code == 200
        for path in ("/v1/models", "/server_info"):
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers={"authorization": "Bearer k"})).status_code == 200


def test_an_idle_connection_is_closed_and_a_busy_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with MockFleet(MockOptions(speed=math.inf, close_idle_s=0.1)) as fleet:
            client = await Client.open(fleet)
            client.post("ttft=0.25")
            await client.until(b"}}}")
            started_s = asyncio.get_running_loop().time()
            assert await client.rest() == (b"", False)
            assert 0.05 < asyncio.get_running_loop().time() - started_s < 0.3

    run_virtually(main(), monkeypatch)


async def test_pipelined_requests_are_answered_in_order(fleet: MockFleet) -> None:
    client = await Client.open(fleet)
    client.post("ttft=0.05", stream=True)
    client.post("status=418")
    client.post()
    assert b"[DONE]" in await client.until(b"0\r\n\r\n")
    assert b" 418 " in await client.until(b"}}")
    assert b" 200 " in await client.until(b"}}}")


async def test_restart_forgets_and_refuses_for_a_while(fleet: MockFleet) -> None:
    engine = fleet.engines[0]
    async with httpx.AsyncClient(base_url=fleet.urls[0], verify=False) as client:
        await client.post("/v1/completions", json={"prompt": "x" * 400})
        before = set(engine.scheduler.cache.keys())
        client_left = await Client.open(fleet)
        client_left.post("hang")
        await asyncio.sleep(0.02)
        await client.post("/debug/faults", json={"restart": 0.2})
        assert (await client_left.rest())[0] == b""
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")
        with suppress(httpx.TransportError):
            for _ in range(100):
                await asyncio.sleep(0.02)
                if not engine.restarting:
                    break
        assert engine.incarnation == 1
        assert engine.scheduler.cache.resident_blocks == 0
        await client.post("/v1/completions", json={"prompt": "x" * 400})
        after = set(engine.scheduler.cache.keys())
    assert len(before) == len(after) > 0
    assert not before & after
    assert engine.journal.outcome("r") == "broken"


def test_settings_are_read_by_kind() -> None:
    faults = Faults().merged(parse_header("ttft=1.5, n=3,hang,die_at=0,fail_health=1-0-0"))
    assert (faults.ttft, faults.n, faults.hang, faults.die_at) == (1.5, 3, True, 0)
    assert faults.fail_health == [True, False, False]
    assert faults.merged({"die_at": None}).die_at is None
    assert faults.as_dict().keys() == {"ttft", "n", "hang", "die_at", "fail_health"}
    for wrong in ({"ttft": "soon"}, {"n": -1}, {"hang": "maybe"}, {"nope": 1}, {"n": None}):
        with pytest.raises(FaultError):
            faults.merged(wrong)
