from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from kvroute.cli_calibrate import calibrate as command
from kvroute.loadtests.calibrate import run
from kvroute.loadtests.calibrate.client import CalibrateError, Engine, EngineMetrics, Stream, read_metrics
from kvroute.loadtests.calibrate.fit import fit_decode, fit_prefill, nonnegative, relative_error
from kvroute.loadtests.calibrate.measure import QUICK, Effort, decode_point
from kvroute.loadtests.calibrate.run import Calibrated, Wanted, calibrate_engine, report
from kvroute.loadtests.mock_engine import PRESETS, Faults, MockFleet, MockOptions
from kvroute.preset_file import load_speed

from .virtual_time import run_virtually

SHORT = Effort(1024, 1, (1, 2, 3, 4), (), 64, 40, 10.0)
FAST = MockOptions(speed=5.0)

app = typer.Typer()
app.command()(command)


async def invoke(url: str, out: Path, *options: str) -> Result:
    """The command, beside an engine on this loop."""
    arguments = ["--url", url, "--out", str(out), *options]
    return await asyncio.to_thread(CliRunner().invoke, app, arguments)


def calibrate_virtually(options: MockOptions, monkeypatch: pytest.MonkeyPatch, **wanted: Any) -> Calibrated:
    """Over real sockets and in virtual time."""

    async def main() -> Calibrated:
        async with MockFleet(options) as fleet:
            return await calibrate_engine(Wanted(fleet.urls[0], QUICK, **wanted), lambda _: None)

    upstream = ("kvroute.router.upstream", "kvroute.router.pool", "kvroute.router.sweeper")
    return run_virtually(main(), monkeypatch, "kvroute.loadtests.calibrate.client", *upstream)


@pytest.mark.parametrize("preset", ["llama-3.1-8b-h100-tp1", "llama-3-70b-a100-tp8"])
def test_a_mock_engine_is_measured_as_its_preset_says(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    truth, k = PRESETS[preset], 1.2
    options = MockOptions(preset=preset, step_scale=k, close_idle_s=None)
    result = calibrate_virtually(
        options, monkeypatch, name="mine", kv_bytes_per_token=truth.kv_bytes_per_token
    )
    found, measured = result.preset.speed.speed(), result.preset.measured
    for tokens in (16, 100, 512, 4096, 8192):
        assert found.prefill_s(tokens) == pytest.approx(truth.prefill_s(tokens) * k, rel=0.1)
    for sequences in (1, 8, 64):
        for context in (500, 200_000):
            expected = truth.decode_s(sequences, context) * k
            assert found.decode_s(sequences, context) == pytest.approx(expected, rel=0.05)
    for name in ("floor_ms", "token_ms", "decode_base_ms", "decode_sequence_ms", "decode_context_ms"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name) * k, rel=0.1), name
    assert found.kv_tokens == truth.kv_tokens // 16 * 16
    assert found.kv_bytes_per_token == truth.kv_bytes_per_token
    assert result.complaint is None
    assert measured is not None
    assert measured.overhead_ms == pytest.approx(options.request_overhead_s * 1e3, rel=0.1)
    assert (measured.engine, measured.engine_version, measured.model) == ("vllm", "0.32.0", "mock")
    assert result.preset.name == "mine"
    shown = report(result)
    assert shown.title.startswith("mock on vllm 0.32.0, http://127.0.0.1:")
    assert [row[0] for row in shown.rows[:2]] == ["prefill of 16 tokens", "prefill of 64 tokens"]


async def test_the_command_writes_a_file_that_speeds_are_loaded_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvroute.loadtests.calibrate.measure.QUICK", SHORT)
    monkeypatch.setattr(run, "MAX_ERROR", 1e9)
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "num_hidden_layers": 32,
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "torch_dtype": "bfloat16",
            }
        )
    )
    out = tmp_path / "mine.json"
    async with MockFleet(FAST) as fleet:
        result = await invoke(fleet.urls[0], out, "--quick", "--config-json", str(config))
    assert result.exit_code == 0, result.output
    assert "mine.json written" in result.output
    assert load_speed(str(out)).kv_bytes_per_token == 131_072
    assert load_speed(str(out)).kv_tokens == 432_992


async def test_a_poor_fit_is_not_written_unless_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvroute.loadtests.calibrate.measure.QUICK", SHORT)
    monkeypatch.setattr(run, "MAX_ERROR", 0.0)
    out = tmp_path / "mine.json"
    async with MockFleet(FAST) as fleet:
        refused = await invoke(fleet.urls[0], out, "--quick")
        assert refused.exit_code == 1
        assert "off the model on average" in refused.output
        assert "measure an engine that is idle, or --force; nothing was written" in refused.output
        assert not os.listdir(tmp_path)
        forced = await invoke(fleet.urls[0], out, "--quick", "--force")
    assert forced.exit_code == 0
    assert "warning" in forced.output
    assert out.exists()


async def test_an_interrupted_run_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "fit_decode", interrupted)
    monkeypatch.setattr("kvroute.loadtests.calibrate.measure.QUICK", SHORT)
    async with MockFleet(FAST) as fleet:
        result = await invoke(fleet.urls[0], tmp_path / "mine.json", "--quick")
    assert result.exit_code == 130
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("faults", "options", "says"),
    [
        (Faults(api_key="secret"), (), "answered 401; --api-key with a valid key is expected"),
        (Faults(api_key="secret"), ("--api-key", "wrong"), "answered 401"),
        (Faults(), ("--api-key", "n\u00f6"), "--api-key: only printable ASCII"),
        (Faults(fail_models=True), (), "is no engine: GET /v1/models answered 503"),
        (Faults(), ("--model", "other"), "--model: 'other' is not served; served: mock"),
        (Faults(status=500), (), "POST /v1/completions answered 500"),
        (Faults(die_at=0), (), "/v1/completions: worker closed the connection"),
        (Faults(no_content=True), (), "POST /v1/completions answered 204"),
        (Faults(fail_metrics=True), (), "do not tell the size of the KV cache; --kv-tokens is expected"),
        (Faults(cached_tokens=16), (), "16 of 16 random tokens were cached"),
        (Faults(), ("--kv-bytes-per-token", "7 miles"), "--kv-bytes-per-token: '7 miles'"),
        (Faults(), ("--config-json", "/no/such"), "--config-json: /no/such: No such file"),
        (
            Faults(),
            ("--config-json", "/no/such", "--kv-bytes-per-token", "1KiB"),
            "one of the two is expected",
        ),
    ],
)
async def test_what_is_wrong_is_named(
    tmp_path: Path, faults: Faults, options: Sequence[str], says: str
) -> None:
    out = tmp_path / "mine.json"
    async with MockFleet(MockOptions(speed=1000.0, faults=faults)) as fleet:
        result = await invoke(fleet.urls[0], out, *options)
    assert result.exit_code == 2, result.output
    assert says in result.output
    assert not out.exists()


async def test_a_key_is_sent(tmp_path: Path) -> None:
    options = MockOptions(speed=1000.0, faults=Faults(api_key="secret", status=418))
    async with MockFleet(options) as fleet:
        result = await invoke(fleet.urls[0], tmp_path / "x", "--api-key", "secret")
    assert "POST /v1/completions answered 418" in result.output


async def test_nobody_there_and_no_place_to_write(tmp_path: Path) -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    silent = await invoke(url, tmp_path / "x")
    server.close()
    await server.wait_closed()
    gone = await invoke(url, tmp_path / "x")
    for result, says in (
        (silent, "/v1/models: worker closed the connection before it answered"),
        (gone, "/v1/models: nobody listens"),
        (await invoke("http://h/v1", tmp_path / "x"), "--url: worker url 'http://h/v1' ends in /v1"),
        (await invoke(url, tmp_path / "no" / "x"), "is no directory"),
        (await invoke(url, tmp_path), "is a directory; the path of a file is expected"),
    ):
        assert result.exit_code == 2
        assert says in result.output
    assert not os.listdir(tmp_path)


def test_a_fit_finds_the_coefficients_through_noise_and_outliers() -> None:
    seed = 3
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    truth = PRESETS["qwen3-32b-h200-tp2"]
    lengths = np.repeat([16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768], 5)
    times = np.array([truth.prefill_s(int(n)) * 1e3 for n in lengths])
    times *= rng.lognormal(0, 0.02, len(lengths))
    times[::13] *= 4
    fit = fit_prefill(lengths.tolist(), times.tolist())
    assert fit.floor_ms == pytest.approx(truth.floor_ms, rel=0.1)
    assert fit.token_ms == pytest.approx(truth.token_ms, rel=0.1)
    assert fit.attention_ms == pytest.approx(truth.attention_ms, rel=0.1)
    sequences = np.tile([1, 4, 16, 64], 2)
    context = sequences * np.repeat([64, 8192], 4)
    steps = np.array([truth.decode_s(int(b), c) * 1e3 for b, c in zip(sequences, context, strict=True)])
    decode = fit_decode(sequences.tolist(), context.tolist(), steps.tolist())
    assert decode.base_ms == pytest.approx(truth.decode_base_ms, rel=1e-3)
    assert decode.sequence_ms == pytest.approx(truth.decode_sequence_ms, rel=1e-2)
    assert decode.context_ms == pytest.approx(truth.decode_context_ms, rel=1e-2)
    assert relative_error(decode(sequences, context), steps.tolist()) < 1e-3


def test_no_coefficient_is_below_zero() -> None:
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert nonnegative(columns, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])


def test_too_few_points_are_no_fit() -> None:
    with pytest.raises(ValueError, match="prefill: 2 lengths were measured; at least 3 are needed"):
        fit_prefill([16, 64, 64], [1.0, 2.0, 2.0])
    with pytest.raises(ValueError, match="decode: 2 points were measured; at least 3 are needed"):
        fit_decode([1, 2], [1, 2], [1, 2])


def test_tokens_are_counted_across_reads() -> None:
    event = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
    stream = Stream(1)
    body = event * 3 + b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\n'
    for at, byte in enumerate(body):
        stream.read(bytes([byte]), at)
    assert len(stream.token_s) == 3
    assert stream.token_s[1] - stream.token_s[0] == len(event)


def test_a_step_is_counted_while_all_decode() -> None:
    early = Stream(100, token_s=[float(t) for t in range(30)])
    late = Stream(50, token_s=[float(t) for t in range(10, 40)])
    point = decode_point([early, late])
    assert point is not None
    assert (point.sequences, point.step_ms) == (2, 1000.0)
    assert point.context_tokens == 100 + (10 + 29) / 2 + 50 + (0 + 19) / 2
    assert decode_point([early, Stream(50, token_s=[float(t) for t in range(25, 60)])]) is None
    at_once = Stream(50, token_s=[15.0] * 40)
    assert decode_point([at_once]) is None
    assert decode_point([early, at_once]) is None


def test_what_engines_say_in_metrics() -> None:
    info = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"%s} 1.0\n'
    sums = 'vllm:prompt_tokens_total{engine="0"} 20.0\nvllm:prompt_tokens_total{engine="1"} 10.0\n'
    assert read_metrics(info % "" + sums) == EngineMetrics("vllm", 1600, 30)
    assert read_metrics(info % ',kv_cache_size_tokens="1599"') == EngineMetrics("vllm", 1599, None)
    sglang = 'sglang:max_total_num_tokens{model_name="m"} 5000.0\n'
    assert read_metrics(sglang) == EngineMetrics("sglang", 5000, None)
    assert read_metrics("nothing at all") == EngineMetrics()


async def test_an_engine_that_serves_others_is_found_out() -> None:
    async with MockFleet(FAST) as fleet:
        other = Engine(fleet.urls[0], None)
        await other.about(None)

        def at_the_end(what: str) -> None:
            if what.startswith("4 streams"):
                others.append(asyncio.ensure_future(other.stream(2000, 1)))

        others: list[asyncio.Future[Stream]] = []
        result = await calibrate_engine(Wanted(fleet.urls[0], SHORT), at_the_end)
        await asyncio.gather(*others)
        other.close()
    assert result.complaint is not None
    assert "it served others meanwhile" in result.complaint


async def test_fits_are_judged() -> None:
    async with MockFleet(FAST) as fleet:
        result = await calibrate_engine(Wanted(fleet.urls[0], SHORT), lambda _: None)
    assert result.preset.measured is not None
    fits = result.preset.measured.model_copy(update={"decode_error": 0.1, "prefill_error": 0.0})
    assert run.complaint(result.preset.model_copy(update={"measured": fits}), 0.0) is None
    poor = fits.model_copy(update={"decode_error": 0.4})
    said = run.complaint(result.preset.model_copy(update={"measured": poor}), 0.0)
    assert said is not None
    assert "decode times lie 40% off the model on average (at most 15% is accepted)" in said
    assert "others" not in said


async def test_an_engine_without_room_is_refused() -> None:
    async with MockFleet(MockOptions(speed=1000.0, kv_blocks=16)) as fleet:
        with pytest.raises(CalibrateError, match="has room for 179 tokens; 256 are needed"):
            await calibrate_engine(Wanted(fleet.urls[0], SHORT), lambda _: None)
