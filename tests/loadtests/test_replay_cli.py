from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvroute.cli import app
from kvroute.loadtests.mock_engine import MockFleet, MockOptions
from kvroute.loadtests.replay.answer import Request
from kvroute.loadtests.replay.player import Player

WORK = ("--workload", "chat", "--requests", "300", "--scale", "0.25")


@pytest.fixture(scope="module")
def engines() -> Iterator[list[str]]:
    """Two that answer at once, on a loop in a thread."""
    started = threading.Event()
    urls: list[str] = []
    loop = asyncio.new_event_loop()

    async def serve(stop: asyncio.Event) -> None:
        async with MockFleet(MockOptions(engines=2, speed=math.inf)) as fleet:
            urls.extend(fleet.urls)
            started.set()
            await stop.wait()

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve(stop)))
    thread.start()
    assert started.wait(30)
    yield urls
    loop.call_soon_threadsafe(stop.set)
    thread.join(30)


def replay(*options: str, status: int = 0) -> Any:
    result = CliRunner().invoke(app, ["replay", *options])
    assert result.exit_code == status, result.output
    return result


def test_rows_per_target_in_the_shape_of_results(engines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    options = ("--speed", "200", "--limit", "20", "--rounds", "2", "--json", str(path))
    said = replay("--url", f"a={engines[0]}", "--url", f"b={engines[1]}", *WORK, *options)
    rows = json.loads(path.read_text())
    assert [(row["policy"], row["source"], row["seeds"], row["offered"]) for row in rows] == [
        ("a", "live", 2, 18),
        ("b", "live", 2, 18),
    ]
    assert [row["failed"] for row in rows] == [0, 0]
    assert rows[1]["paired"]["against"] == "a"
    assert rows[0]["setting"]["lag_ms"]["p50"] >= 0
    assert rows[0]["token_hit_rate"] == rows[1]["token_hit_rate"] > 0.2
    assert len(rows[0]["series"]["ttft_ms"]) == 101
    assert [line for line in said.stderr.splitlines() if line.startswith("round")] == [
        f"round {number} of 2, {name}: 20 requests in 0 s" for number in (1, 2) for name in ("a", "b")
    ]
    assert "a: sent" in said.stdout


def test_json_on_standard_output_is_all_there_is(engines: list[str]) -> None:
    said = replay("--url", engines[0], "--name", "n", *WORK, "--speed", "200", "--limit", "5", "--json", "-")
    assert [row["policy"] for row in json.loads(said.stdout)] == ["n"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "--url: at least one is needed"),
        (("--url", "http://127.0.0.1:1"), "nobody listens"),
        (("--url", "nowhere"), "--url"),
        (("--speed", "-1"), "--speed must be positive, got -1"),
        (("--scale", "0"), "--scale"),
        (("--trace", "/no/such"), "--trace: /no/such: No such file"),
        (("--workload", "tides"), "--workload: unknown 'tides'"),
        (("--api", "chat"), "--prompts"),
        (("--timeout", "soon"), "--timeout"),
        (("--write-trace", "/no/such/t.jsonl"), "--write-trace: /no/such/t.jsonl"),
    ],
)
def test_what_cannot_be_is_named(options: tuple[str, ...], said: str) -> None:
    assert said in replay(*options, status=2).stderr


def test_a_model_that_is_not_served(engines: list[str]) -> None:
    said = replay("--url", engines[0], "--model", "zz", "--limit", "2", status=2)
    assert "404" in said.stderr
    assert "`zz` does not exist" in said.stderr


def test_an_interrupt_shows_what_was_measured(
    engines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes with the third answer of the first round; the second round is never begun."""
    path, ended = tmp_path / "r.json", Player._ended

    def interrupt(self: Player, request: Request, task: Any) -> None:
        ended(self, request, task)
        if len(self.played.requests) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Player, "_ended", interrupt)
    options = ("--speed", "50", "--rounds", "3", "--warm-up", "0", "--json", str(path))
    said = replay("--url", engines[0], *WORK, *options, status=130)
    (row,) = json.loads(path.read_text())
    assert 3 <= row["offered"] < 300
    assert row["seeds"] == 1
    assert "round 2" not in said.stderr
    assert "interrupted" in said.stderr


@pytest.mark.soak
def test_processes_share_the_requests(engines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    replay("--url", engines[0], *WORK, "--speed", "200", "--limit", "41", "--jobs", "2", "--json", str(path))
    (row,) = json.loads(path.read_text())
    assert (row["offered"], row["failed"]) == (37, 0)
