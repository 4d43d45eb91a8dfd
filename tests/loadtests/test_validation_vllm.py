"""The simulated engine against a real one: k and o are fitted on half of a log, errors taken of the other."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kvroute.loadtests.calibrate.engine_log import EngineLog, read_vllm_log
from kvroute.loadtests.calibrate.platform import fit_platform, simulate
from kvroute.loadtests.simulator.setting import Setting
from kvroute.loadtests.traces.arrivals import arrivals
from kvroute.loadtests.traces.rows import Row, Rows, Trace
from kvroute.policies.costs.speeds import PRESETS
from tests.loadtests.validation import figures, trace_path

LLAMA = Setting(
    workers=1,
    speed=PRESETS["llama-3.1-8b-h100-tp1"],
    scale=1.0,
    kv_tokens=520_000,
    block_tokens=16,
    max_batched_tokens=2048,
    max_sequences=128,
)
"""As the log's engine was set, on 90 % of 96 GB."""
SIX = replace(LLAMA, max_sequences=6)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("preset", "scale"), [("llama-3.1-8b-h100-tp1", 2.15), ("llama-3.1-8b-h200-tp1", 2.55)]
)
def test_vllm_on_an_rtx_pro_6000(preset: str, scale: float) -> None:
    """vLLM 0.19, Llama-3.1-8B, 300 ShareGPT requests at 10 per second, a third of them in a queue of 20 s."""
    prompts = trace_path("vllm_groundtruth/sharegpt-llama-3.1-8b-300-sps10.jsonl")
    log = read_vllm_log(prompts, trace_path("vllm_groundtruth/Llama-3.1-8B/requests.jsonl"))
    setting = replace(LLAMA, speed=PRESETS[preset])
    odd = [number % 2 == 1 for number in range(len(log.requests))]
    platform = fit_platform(log, setting, odd)
    print(platform)
    assert platform.scale == pytest.approx(scale, rel=0.03)
    simulated = simulate(log, replace(setting, scale=platform.scale, offset_ms=platform.offset_ms))
    ours, real = figures(simulated[::2]), figures(log.measured[::2])
    for name in ("ttft mean", "ttft p50", "ttft p90", "tpot mean", "tpot p50", "tpot p90"):
        print(f"{name}: {ours[name]:.1f} for {real[name]:.1f} ms, {ours[name] / real[name] - 1:+.1%}")
    for name in ("ttft mean", "ttft p50", "ttft p90", "tpot mean", "tpot p50", "tpot p90"):
        assert ours[name] == pytest.approx(real[name], rel=0.05), name


def made_log(scale: float, offset_ms: float, seed: int, requests: int = 24) -> EngineLog:
    """What an engine of this k and o would have logged: six at a time, the others in a queue."""
    source = random.Random(seed)
    rows, at_s = Rows(), 0.0
    for number in range(requests):
        at_s += source.expovariate(20.0)
        tokens = source.randrange(50, 3000)
        blocks = range(1000 * number, 1000 * number + -(-tokens // 16))
        rows.add(Row(at_s, tokens, source.randrange(5, 40), tuple(blocks)))
    work = arrivals(Trace("made", 16, rows), 16)
    engine = replace(SIX, scale=scale, offset_ms=offset_ms)
    return EngineLog(work, simulate(EngineLog(work, [], 16), engine), 16)


@pytest.mark.parametrize("seed", [1, 7, 19])
@pytest.mark.parametrize(("scale", "offset_ms"), [(1.7, 3.0), (2.3, 0.0)])
def test_a_made_logs_k_and_o_are_found(seed: int, scale: float, offset_ms: float) -> None:
    platform = fit_platform(made_log(scale, offset_ms, seed), SIX, [i % 2 == 0 for i in range(24)])
    assert platform.scale == pytest.approx(scale, rel=1e-3)
    assert platform.offset_ms == pytest.approx(offset_ms, abs=0.02)
    assert platform.error < 1e-3


def test_a_log_of_another_setting_or_half_a_log_is_refused() -> None:
    log = made_log(1.0, 0.0, 1, requests=3)
    with pytest.raises(ValueError, match="one worker with blocks of 16 tokens is expected, got 2 with 16"):
        fit_platform(log, replace(LLAMA, workers=2))
    with pytest.raises(ValueError, match="counted: at least one request, all with a first and a last token"):
        fit_platform(log, LLAMA, [False] * 3)
    log.measured[1] = msgspec.structs.replace(log.measured[1], first_s=None)
    with pytest.raises(ValueError, match="counted: at least one request, all with a first and a last token"):
        fit_platform(log, LLAMA)


def vllm_files(folder: Path, *changes: dict[str, float]) -> tuple[Path, Path]:
    """Two requests: the engine's clock is 100 s behind and 2 ms late for the first, 50 ms for the second."""
    prompts, requests = folder / "prompts.jsonl", folder / "requests.jsonl"
    lines = [
        {"arrival_time_ns": 10**9 * i, "input_tok_ids": [7] * 20, "input_toks": 20, "output_toks": 5 + i}
        for i in range(2)
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    times: list[dict[str, float]] = [
        {"arrival_time": 1000.0, "queued_ts": 900.002, "first_token_ts": 900.1, "last_token_ts": 900.5},
        {"arrival_time": 1001.0, "queued_ts": 901.05, "first_token_ts": 901.2, "last_token_ts": 901.7},
    ]
    made = [
        one | {"input_toks": 20, "output_toks": 5 + i} | change
        for i, (one, change) in enumerate(zip(times, changes or ({}, {}), strict=True))
    ]
    requests.write_text("\n".join(map(json.dumps, made)))
    return prompts, requests


def test_vllms_two_clocks_are_laid_together(tmp_path: Path) -> None:
    log = read_vllm_log(*vllm_files(tmp_path))
    assert [request.arrival_s for request in log.requests] == [0.0, 1.0]
    assert [request.output_tokens for request in log.requests] == [5, 6]
    assert log.requests[0].keys.keys == log.requests[1].keys.keys
    assert [one.ttft_s for one in log.measured] == pytest.approx([0.098, 0.198])
    assert [one.tpot_s for one in log.measured] == pytest.approx([0.1, 0.1])


def test_logs_that_do_not_fit_are_named(tmp_path: Path) -> None:
    prompts, requests = vllm_files(tmp_path, {}, {"input_toks": 21})
    with pytest.raises(ValueError, match=r"requests.jsonl: line 2: input_toks: 21, but the prompt has 20"):
        read_vllm_log(prompts, requests)
    requests.write_text(requests.read_text().splitlines()[0])
    with pytest.raises(ValueError, match=r"requests.jsonl: 1 lines for the 2 prompts of .*prompts.jsonl"):
        read_vllm_log(prompts, requests)
    requests.write_text('{"input_toks": 20}')
    with pytest.raises(ValueError, match=r"requests.jsonl: line 1: Object missing required field"):
        read_vllm_log(prompts, requests)
    requests.write_text("")
    with pytest.raises(ValueError, match=r"requests.jsonl: empty; a line of JSON for every request"):
        read_vllm_log(prompts, requests)
