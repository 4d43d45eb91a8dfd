"""Speeds by name or from a file, and the files that `kvroute calibrate` writes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvroute.policies.costs.speeds import PRESETS, Speed

MAX_FILE_BYTES = 2**20

Milliseconds = Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=2**50, strict=True)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class PresetError(ValueError):
    """No speed can be had from this; the message says what was wrong and what is accepted."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Coefficients(_Part):
    """A `Speed`; what calibrates its platform is part of the figures."""

    floor_ms: Milliseconds
    base_ms: Milliseconds
    token_ms: Milliseconds
    attention_ms: Milliseconds
    decode_base_ms: Milliseconds
    decode_sequence_ms: Milliseconds
    decode_context_ms: Milliseconds
    kv_tokens: Count
    kv_bytes_per_token: Count

    def speed(self) -> Speed:
        """ValueError when prefill or decode would take no time at all."""
        if not self.floor_ms + self.base_ms + self.token_ms:
            raise ValueError("floor_ms, base_ms and token_ms are all 0; a prefill takes some time")
        if not self.decode_base_ms + self.decode_sequence_ms:
            raise ValueError("decode_base_ms and decode_sequence_ms are both 0; a decode takes some time")
        return Speed(**self.model_dump())


class Measured(_Part):
    """How the figures came about; nothing is computed from it."""

    date: str
    url: str
    model: str
    engine: str
    engine_version: str
    kv_bytes_per_token_from: str
    overhead_ms: Milliseconds
    """Of each request, outside the steps; learned anew wherever the preset is used."""
    prefill_samples: int
    prefill_error: Share
    """Mean error of the fit, as a share of what was measured."""
    decode_samples: int
    decode_error: Share


class PresetFile(_Part):
    """All of a file."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    speed: Coefficients
    measured: Measured | None = None


def read_preset(path: Path) -> PresetFile:
    """JSON or YAML. PresetError names the file, the field, and what is wrong."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise PresetError(
            f"{path}: {error.strerror}; a file that `kvroute calibrate` wrote is expected"
        ) from None
    if len(raw) > MAX_FILE_BYTES:
        raise PresetError(f"{path}: more than {MAX_FILE_BYTES} bytes; a preset is a small JSON or YAML file")
    try:
        preset = PresetFile.model_validate(yaml.safe_load(raw))
        preset.speed.speed()
    except ValidationError as error:
        raise PresetError(f"{path}: {_first(error)}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise PresetError(f"{path}: neither JSON nor YAML: {' '.join(str(error).split())[:200]}") from None
    except ValueError as error:
        raise PresetError(f"{path}: speed: {error}") from None
    return preset


def _first(error: ValidationError) -> str:
    """The first of the errors, with where it is."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"


def write_preset(preset: PresetFile, path: Path) -> None:
    """All of the file or nothing, even when interrupted; PresetError when it cannot be written."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                file.write(preset.model_dump_json(indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
                os.chmod(file.name, 0o644)
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise PresetError(f"{path}: {error.strerror}; a file that can be written is expected") from None


def load_speed(name_or_path: str) -> Speed:
    """A known preset, or one from a file; PresetError lists the known names."""
    known = PRESETS.get(name_or_path)
    if known is not None:
        return known
    path = Path(name_or_path)
    if not name_or_path or not path.is_file():
        raise PresetError(
            f"speed {name_or_path!r} is neither a preset nor a file; known: {', '.join(PRESETS)}, "
            f"or the path of a file that `kvroute calibrate` wrote"
        )
    return read_preset(path).speed.speed()
