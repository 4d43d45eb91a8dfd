from __future__ import annotations

from pathlib import Path

import pytest

from kvroute.cli_calibrate import calibrate
from kvroute.preset_file import load_speed, read_preset

from .fleet import Server

pytestmark = pytest.mark.engines


def test_a_real_engine_is_measured(
    engines: list[Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "preset.json"
    calibrate(engines[0].url, out, quick=True, kv_bytes_per_token="4KiB", force=True)
    print(capsys.readouterr().out)
    speed, measured = load_speed(str(out)), read_preset(out).measured
    assert measured is not None
    assert measured.engine == "vllm"
    assert measured.engine_version != "unknown"
    assert (speed.kv_tokens, speed.kv_bytes_per_token) == (288 * 32, 4096)
    assert speed.token_ms > 0
    assert 0 < speed.decode_s(1, 100) < speed.prefill_s(4096)
    assert measured.prefill_error < 0.6  # two processors, two engines, 4 ms steps
    assert measured.decode_error < 0.6
