"""Mock engines in real time, many of them, and as a process."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import httpx
import pytest

from kvroute.loadtests.mock_engine import PRESETS, MockFleet, MockOptions, serve
from tests.kit import until
from tests.loadtests.virtual_time import run_virtually


def chat(words: int, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "word" * words}], "max_tokens": 8, **fields}


def free_ports(count: int) -> int:
    """The first of `count` neighbouring ports that are free now."""
    for port in range(20_000 + os.getpid() % 20_000, 60_000, count):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for offset, sock in enumerate(sockets):
                sock.bind(("127.0.0.1", port + offset))
        except OSError:
            continue
        finally:
            for sock in sockets:
                sock.close()
        return port
    raise RuntimeError("no free ports")


def test_time_passes_as_the_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    options = MockOptions(speed=2.0, preset="qwen3-32b-h100-tp2", request_overhead_s=0.02)

    async def main() -> list[float]:
        now_s = asyncio.get_running_loop().time
        times = [now_s()]
        async with (
            MockFleet(options) as fleet,
            httpx.AsyncClient(base_url=fleet.urls[0], verify=False) as client,
        ):
            for _ in range(2):
                await client.post("/v1/chat/completions", json=chat(8000))
                times.append(now_s())
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    speed = PRESETS[options.preset]
    decode_s = 7 * speed.step_s(0, 0, 1, 8000)
    cold_model_s = (0.02 + speed.prefill_s(8000) + decode_s) / 2
    warm_model_s = (0.02 + speed.prefill_s(16, 7984) + decode_s) / 2
    assert run_virtually(main(), monkeypatch) == pytest.approx([cold_model_s, warm_model_s], abs=0.02)


async def test_requests_wait_and_decode_together() -> None:
    options = MockOptions(speed=1.0, max_sequences=2, request_overhead_s=0.0)
    async with MockFleet(options) as fleet, httpx.AsyncClient(base_url=fleet.urls[0], verify=False) as client:
        engine = fleet.engines[0]
        body = chat(10, max_tokens=30)
        tasks = [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for _ in range(5)]
        await until(lambda: (engine.running, engine.waiting) == (2, 3))
        metrics = (await client.get("/metrics")).text
        assert 'vllm:num_requests_running{engine="0",model_name="mock"} 2.0' in metrics
        assert 'vllm:num_requests_waiting{engine="0",model_name="mock"} 3.0' in metrics
        assert engine.scheduler.cache.used_ratio > 0
        for task in tasks:
            assert (await task).status_code == 200
        engine.scheduler.check_integrity()
        assert engine.scheduler.cache.used_ratio == 0


def test_the_head_of_a_stream_goes_out_before_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    options = MockOptions(request_overhead_s=0.3)

    async def main() -> None:
        now_s = asyncio.get_running_loop().time
        async with (
            MockFleet(options) as fleet,
            httpx.AsyncClient(base_url=fleet.urls[0], verify=False) as client,
        ):
            started_s = now_s()
            async with client.stream("POST", "/v1/chat/completions", json=chat(1, stream=True)) as stream:
                assert stream.status_code == 200
                assert now_s() - started_s < 0.2
                await stream.aread()
            assert now_s() - started_s > 0.3

    run_virtually(main(), monkeypatch)


async def test_a_client_that_leaves_frees_its_blocks_in_mid_step() -> None:
    async with MockFleet(MockOptions(request_overhead_s=0.0)) as fleet:
        engine = fleet.engines[0]
        timeout = httpx.Timeout(5, read=0.15)
        async with httpx.AsyncClient(base_url=fleet.urls[0], verify=False, timeout=timeout) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/chat/completions", json=chat(8000, max_tokens=500))
        await until(lambda: bool(engine.journal.totals["aborted"]))
        assert engine.journal.totals["aborted"] == 1
        assert (engine.running, engine.scheduler.cache.used_ratio) == (0, 0)
        engine.scheduler.check_integrity()


async def test_engines_stand_on_neighbouring_ports() -> None:
    port = free_ports(3)
    async with MockFleet(MockOptions(port=port, engines=3)) as fleet:
        assert fleet.urls == [f"http://127.0.0.1:{port + i}" for i in range(3)]
        with pytest.raises(OSError, match="in use"):
            await MockFleet(MockOptions(port=port + 2)).start()
    async with MockFleet(MockOptions(port=port)):
        pass


async def test_serve_ends_when_cancelled() -> None:
    port = free_ports(2)
    task = asyncio.create_task(serve(MockOptions(port=port, engines=2)))
    async with httpx.AsyncClient(verify=False) as client:
        for _ in range(100):
            await asyncio.sleep(0.01)
            try:
                assert (await client.get(f"http://127.0.0.1:{port + 1}/health")).status_code == 200
                break
            except httpx.ConnectError:
                continue
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with socket.socket() as sock:
        assert sock.connect_ex(("127.0.0.1", port)) != 0


def test_a_process_answers_and_ends_on_sigterm() -> None:
    port = free_ports(2)
    code = (
        "from kvroute.loadtests.mock_engine import *\n"
        f"run(MockOptions(port={port}, engines=2, speed=float('inf'), kv_events=True))"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        for _ in range(300):
            try:
                reply = httpx.post(f"http://127.0.0.1:{port + 1}/v1/chat/completions", json=chat(3))
                break
            except httpx.ConnectError:
                time.sleep(0.02)
        assert reply.json()["usage"]["completion_tokens"] == 8
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("preset", "h9000"),
        ("speed", 0.0),
        ("engines", 0),
        ("block_size_tokens", 0),
        ("kv_blocks", 0),
        ("model", ""),
        ("port", 65536),
        ("request_overhead_s", -1.0),
        ("close_idle_s", 0.0),
    ],
)
def test_options_name_the_field_at_fault(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        MockOptions(**{field: value})
