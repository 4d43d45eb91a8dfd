from __future__ import annotations

import asyncio
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from kvroute.config import load
from kvroute.loadtests.mock_engine import MockFleet, MockOptions
from kvroute.loadtests.replay.aiperf import ARTIFACTS, CACHE, TRACE, command, environment, played, prepare
from kvroute.loadtests.replay.bodies import Form
from kvroute.loadtests.replay.player import Played
from kvroute.loadtests.replay.running import Access, Due, Run, run_in_loop
from kvroute.loadtests.traces.rows import Row, Trace
from kvroute.router.server import running
from tests.kit import until

GAP_S = 0.4
ROWS = tuple(
    Row(number * GAP_S, 16 * len(ids) - rest, 3 + number, ids)
    for number, (ids, rest) in enumerate(
        [((1, 2, 3), 0), ((1, 2, 4), 5), ((1, 2, 7, 5), 0), ((9,), 3), ((1, 2, 3), 0), ((1, 2, 7, 5, 6), 1)]
    )
)
"""Prompts of blocks of 16 tokens, the last one of so many fewer."""
CACHED = [0, 32, 32, 0, 32, 64]
"""Full blocks that another prompt had; of one that is cached whole, the last block is computed again."""


def due() -> Due:
    return Due(Trace("t", 16, ROWS), salt=3)


def test_aiperf_reads_bytes_for_tokens(tmp_path: Path) -> None:
    prepare(tmp_path, due(), 16)
    lines = [json.loads(line) for line in (tmp_path / TRACE).read_text().splitlines()]
    assert lines[1] == {
        "timestamp": 400,
        "input_length": 4 * 43,
        "output_length": 4,
        "hash_ids": [1, 2, 4],
        "session_id": "1",
    }
    (file,) = (tmp_path / CACHE).glob("hub/models--kvroute--bytes/snapshots/1/tokenizer.json")
    vocabulary = json.loads(file.read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(256))
    assert {"a", "Ġ", "Ċ"} <= set(vocabulary), "GPT-2's letters for space and line end"
    asked = command(Path("aiperf"), tmp_path, "http://x", "m", 16, 1)
    assert asked[asked.index("--isl-block-size") + 1] == "64"


def record(number: int, start_ns: int, **metrics: float) -> dict[str, Any]:
    return {
        "metadata": {"conversation_id": str(number), "request_start_ns": start_ns},
        "metrics": {name: {"value": value, "unit": "x"} for name, value in metrics.items()},
    }


def test_records_of_aiperf_are_requests_as_measured(tmp_path: Path) -> None:
    """In any order; time 0 is where the least late request, here the first, was in time."""
    prepare(tmp_path, due(), 16)
    tokens = {"usage_prompt_tokens": 43, "usage_completion_tokens": 4, "usage_prompt_cache_read_tokens": 32}
    first = record(0, 10**18, time_to_first_token=50.0, request_latency=60.0, **tokens)
    second = record(1, 10**18 + 410_000_000, time_to_first_token=20.0, request_latency=80.0, **tokens)
    failed = {**record(2, 10**18 + 900_000_000), "error": {"type": "Refused", "code": 503}}
    (tmp_path / ARTIFACTS).mkdir()
    text = "".join(json.dumps(one) + "\n" for one in (failed, second, first))
    (tmp_path / ARTIFACTS / "profile_export.jsonl").write_text(text)
    made = played(tmp_path).requests
    assert [one.failure for one in made] == [None, None, "Refused"]
    assert made[1].sent_s == pytest.approx(0.41)
    assert made[1].ttft_s == pytest.approx(0.03), "from when it was due"
    assert made[1].tpot_s == pytest.approx(0.02)
    assert (made[1].prompt_tokens, made[1].output_tokens, made[1].cached_tokens) == (43, 4, 32)


async def _both(aiperf: Path, folder: Path) -> tuple[Played, Played]:
    """Through the gateway, replay's first. The engine answers at once: what counts here are tokens."""
    options = MockOptions(engines=1, speed=math.inf, kv_events=True)
    async with MockFleet(options) as fleet:
        config = {
            "port": 0,
            "workers": fleet.urls,
            "models": {"mock": {"source": "engine"}},
            "admin": {"enabled": False},
        }
        async with running(load(None, config)) as gateway:
            await until(lambda: [m.state.value for m in gateway.registry.members.values()] == ["ready"])
            ours, _ = await run_in_loop(
                Run(Access(gateway.url), Form(prompts="text"), "mock", due()),
                asyncio.get_running_loop().time(),
            )
            prepare(folder, due(), 16)
            asked = command(aiperf, folder, gateway.url, "mock", 16, 1)
            pipe = asyncio.subprocess.PIPE
            child = await asyncio.create_subprocess_exec(
                *asked, env=environment(folder), stdout=pipe, stderr=asyncio.subprocess.STDOUT
            )
            said, _ = await child.communicate()
            assert child.returncode == 0, said.decode()[-4000:]
    return ours, played(folder)


@pytest.mark.soak
@pytest.mark.skipif("KVROUTE_AIPERF" not in os.environ, reason="KVROUTE_AIPERF does not say where aiperf is")
def test_aiperf_sends_what_replay_sends(tmp_path: Path) -> None:
    for tool in asyncio.run(_both(Path(os.environ["KVROUTE_AIPERF"]), tmp_path)):
        made = sorted(tool.requests, key=lambda one: one.arrival_s)
        assert [one.failure for one in made] == [None] * len(ROWS)
        assert [one.prompt_tokens for one in made] == [row.input_tokens for row in ROWS]
        assert [one.output_tokens for one in made] == [row.output_tokens for row in ROWS]
        assert [one.cached_tokens for one in made] == CACHED
