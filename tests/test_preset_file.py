from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvroute.policies.costs.speeds import PRESETS, Speed
from kvroute.preset_file import (
    Coefficients,
    Measured,
    PresetError,
    PresetFile,
    load_speed,
    read_preset,
    write_preset,
)

SPEED = Speed(7.0, 2.0, 0.02, 8e-7, 6.0, 0.01, 4e-5, 400_000, 131_072)
COEFFICIENTS: dict[str, Any] = {
    "floor_ms": 7.0,
    "base_ms": 2.0,
    "token_ms": 0.02,
    "attention_ms": 8e-7,
    "decode_base_ms": 6.0,
    "decode_sequence_ms": 0.01,
    "decode_context_ms": 4e-5,
    "kv_tokens": 400_000,
    "kv_bytes_per_token": 131_072,
}
PRESET = PresetFile(
    name="mine",
    speed=Coefficients(**COEFFICIENTS),
    measured=Measured(
        date="2026-01-02T03:04:05+00:00",
        url="http://h:1",
        model="m",
        engine="vllm",
        engine_version="0.32.0",
        kv_bytes_per_token_from="--kv-bytes-per-token",
        overhead_ms=1.5,
        prefill_samples=9,
        prefill_error=0.01,
        decode_samples=5,
        decode_error=0.02,
    ),
)


def test_a_known_name_is_its_preset() -> None:
    for name, speed in PRESETS.items():
        assert load_speed(name) is speed


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    write_preset(PRESET, path)
    assert load_speed(str(path)) == SPEED
    assert read_preset(path) == PRESET
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_yaml_by_hand_is_read_as_well(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nspeed:\n" + "".join(f"  {k}: {v}\n" for k, v in COEFFICIENTS.items()))
    assert load_speed(str(path)) == SPEED


@pytest.mark.parametrize("name", ["", "no-such", "/no/such/file.json"])
def test_an_unknown_name_is_told_what_is_known(name: str) -> None:
    with pytest.raises(
        PresetError, match=r"neither a preset nor a file; known: llama-3\.1-8b-h100-tp1, "
    ) as e:
        load_speed(name)
    assert repr(name) in str(e.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"floor_ms": -1}, "speed.floor_ms: Input should be greater than or equal to 0"),
        ({"token_ms": "fast"}, "speed.token_ms: Input should be a valid number"),
        ({"token_ms": float("nan")}, "speed.token_ms"),
        ({"kv_tokens": 0}, "speed.kv_tokens: Input should be greater than or equal to 1"),
        ({"kv_tokens": 1.5}, "speed.kv_tokens: Input should be a valid integer"),
        ({"kv_bytes_per_token": None}, "speed.kv_bytes_per_token: Input should be a valid integer"),
        ({"extra": 1}, "speed.extra: Extra inputs are not permitted"),
        ({"floor_ms": 0, "base_ms": 0, "token_ms": 0}, "a prefill takes some time"),
        ({"decode_base_ms": 0, "decode_sequence_ms": 0}, "a decode takes some time"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"name": "mine", "speed": {**COEFFICIENTS, **changes}}))
    with pytest.raises(PresetError) as error:
        load_speed(str(path))
    assert str(error.value).startswith(f"{path}: ")
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "the file: Input should be a valid dictionary"),
        (b"[1]", "the file: Input should be a valid dictionary"),
        (b"{", "neither JSON nor YAML"),
        (b"\xff\xfe\x00", "neither JSON nor YAML"),
        (b"name: mine", "speed: Field required"),
        (b" " * 2**21, "more than 1048576 bytes"),
    ],
)
def test_what_is_no_preset_is_refused(tmp_path: Path, raw: bytes, says: str) -> None:
    path = tmp_path / "mine"
    path.write_bytes(raw)
    with pytest.raises(PresetError) as error:
        load_speed(str(path))
    assert says in str(error.value)


def test_an_interrupted_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.json"
    path.write_text("before")

    def interrupted(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_preset(PRESET, path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "mine.json"
    with pytest.raises(PresetError, match=r"mine\.json: No such file or directory"):
        write_preset(PRESET, path)
