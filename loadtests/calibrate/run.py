"""`kvroute calibrate` from end to end: ask, measure, fit, judge, and what is shown of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy as np

from kvroute.loadtests.calibrate.client import About, CalibrateError, Engine, local_config
from kvroute.loadtests.calibrate.fit import Decode, Prefill, fit_decode, fit_prefill, relative_error
from kvroute.loadtests.calibrate.measure import Effort, Samples, measure
from kvroute.loadtests.plan.capacity import read_config_file
from kvroute.loadtests.plan.show import Report
from kvroute.policies.costs.architectures import read_config
from kvroute.policies.costs.pace import DEFAULT_PRESET
from kvroute.policies.costs.speeds import PRESETS
from kvroute.preset_file import Coefficients, Measured, PresetFile

MAX_ERROR = 0.15
"""Mean error of a fit, as a share; above it something else was going on."""
MAX_FOREIGN = 0.02
"""Prompt tokens that the engine computed for others meanwhile, as a share of ours."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a person asked for."""

    url: str
    effort: Effort
    model: str | None = None
    api_key: str | None = None
    name: str = ""
    kv_tokens: int | None = None
    kv_bytes_per_token: int | None = None
    config_json: Path | None = None


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A preset, and what it was made of."""

    preset: PresetFile
    about: About
    samples: Samples
    prefill: Prefill
    decode: Decode
    complaint: str | None
    """Why the fit is not to be trusted; None when it is."""


def calibrate(wanted: Wanted, progress: Callable[[str], None]) -> Calibrated:
    """Measure an engine. ValueError says what is wrong with the request or the engine."""
    return asyncio.run(calibrate_engine(wanted, progress))


async def calibrate_engine(wanted: Wanted, progress: Callable[[str], None]) -> Calibrated:
    """The same, on the caller's loop."""
    kv_bytes = _kv_bytes(wanted)
    engine = Engine(wanted.url, wanted.api_key)
    try:
        about = await engine.about(wanted.model)
        kv_tokens = wanted.kv_tokens or about.kv_tokens
        if kv_tokens is None:
            raise CalibrateError(
                f"{engine.endpoint.url}: its /metrics do not tell the size of the KV cache; "
                f"--kv-tokens is expected"
            )
        samples = await measure(engine, about, kv_tokens, wanted.effort, progress)
        foreign = _foreign(about, (await engine.metrics()).prompt_tokens, engine.sent_tokens)
        prefill = fit_prefill(*zip(*samples.prefill, strict=True))
        decode = fit_decode(*_columns(samples))
        if kv_bytes is None:
            kv_bytes = _engine_kv_bytes(about)
        preset = _preset(wanted, engine.endpoint.url, about, samples, prefill, decode, kv_tokens, kv_bytes)
        return Calibrated(preset, about, samples, prefill, decode, complaint(preset, foreign))
    finally:
        engine.close()


def _columns(samples: Samples) -> tuple[list[float], list[float], list[float]]:
    points = samples.decode
    return (
        [float(point.sequences) for point in points],
        [point.context_tokens for point in points],
        [point.step_ms for point in points],
    )


def _kv_bytes(wanted: Wanted) -> tuple[int, str] | None:
    """What the person says, and from where."""
    if wanted.kv_bytes_per_token is not None:
        return wanted.kv_bytes_per_token, "--kv-bytes-per-token"
    if wanted.config_json is None:
        return None
    try:
        return read_config(read_config_file(wanted.config_json)).bytes_per_token, str(wanted.config_json)
    except ValueError as error:
        raise CalibrateError(f"--config-json: {str(error).removeprefix('--model: ')}") from None


def _engine_kv_bytes(about: About) -> tuple[int, str]:
    """From the config.json beside the engine's weights where it can be read, else a guess that says so."""
    config = local_config(about.root)
    if config is not None:
        try:
            return read_config(read_config_file(config)).bytes_per_token, str(config)
        except ValueError:
            pass
    return PRESETS[DEFAULT_PRESET].kv_bytes_per_token, f"assumed, as {DEFAULT_PRESET}"


def _preset(
    wanted: Wanted,
    url: str,
    about: About,
    samples: Samples,
    prefill: Prefill,
    decode: Decode,
    kv_tokens: int,
    kv_bytes: tuple[int, str],
) -> PresetFile:
    tokens, times_ms = map(np.asarray, zip(*samples.prefill, strict=True))
    sequences, context, steps_ms = _columns(samples)
    return PresetFile(
        name=wanted.name or about.model,
        speed=Coefficients(
            floor_ms=prefill.floor_ms,
            base_ms=prefill.base_ms,
            token_ms=prefill.token_ms,
            attention_ms=prefill.attention_ms,
            decode_base_ms=decode.base_ms,
            decode_sequence_ms=decode.sequence_ms,
            decode_context_ms=decode.context_ms,
            kv_tokens=kv_tokens,
            kv_bytes_per_token=kv_bytes[0],
        ),
        measured=Measured(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            url=url,
            model=about.model,
            engine=about.engine,
            engine_version=about.version,
            kv_bytes_per_token_from=kv_bytes[1],
            overhead_ms=samples.overhead_ms,
            prefill_samples=len(times_ms),
            prefill_error=relative_error(prefill(tokens.astype(float)), times_ms.tolist()),
            decode_samples=len(steps_ms),
            decode_error=relative_error(decode(np.asarray(sequences), np.asarray(context)), steps_ms),
        ),
    )


def _foreign(about: About, prompt_tokens: int | None, sent_tokens: int) -> float:
    """Prompt tokens of others, as a share of ours; 0 where the engine does not count."""
    if about.prompt_tokens is None or prompt_tokens is None:
        return 0.0
    return (prompt_tokens - about.prompt_tokens) / sent_tokens - 1


def complaint(preset: PresetFile, foreign: float) -> str | None:
    """Why a fit is not to be trusted; None when it is."""
    measured = preset.measured
    assert measured is not None
    wrong = [
        f"{name} times lie {error:.0%} off the model on average (at most {MAX_ERROR:.0%} is accepted)"
        for name, error in (("prefill", measured.prefill_error), ("decode", measured.decode_error))
        if error > MAX_ERROR
    ]
    if foreign > MAX_FOREIGN:
        wrong.append(f"it served others meanwhile: {foreign:.0%} more prompt tokens than were sent from here")
    return f"{measured.url}: {'; '.join(wrong)}; measure an engine that is idle" if wrong else None


def report(result: Calibrated) -> Report:
    """What was measured beside what the preset says."""
    prefill, decode, measured = result.prefill, result.decode, result.preset.measured
    assert measured is not None
    rows = []
    for n in sorted({n for n, _ in result.samples.prefill}):
        times = [time_ms for tokens, time_ms in result.samples.prefill if tokens == n]
        rows.append(_row(f"prefill of {n} tokens", median(times), float(prefill(np.asarray(float(n))))))
    for point in result.samples.decode:
        step_ms = float(decode(np.asarray(float(point.sequences)), np.asarray(point.context_tokens)))
        what = f"step of {point.sequences} decodes over {point.context_tokens:.0f} tokens"
        rows.append(_row(what, point.step_ms, step_ms))
    speed = result.preset.speed
    notes = [
        f"prefill_ms = max({speed.floor_ms:.3g}, {speed.base_ms:.3g} + {speed.token_ms:.3g} n)"
        f" + {speed.attention_ms:.3g} n^2/2, mean error {measured.prefill_error:.1%}",
        f"step_ms = {speed.decode_base_ms:.3g} + {speed.decode_sequence_ms:.3g} B"
        f" + {speed.decode_context_ms:.3g} context, mean error {measured.decode_error:.1%}",
        f"overhead {measured.overhead_ms:.3g} ms a request; {speed.kv_tokens} tokens of KV cache,"
        f" {speed.kv_bytes_per_token} bytes each ({measured.kv_bytes_per_token_from})",
        *result.samples.notes,
    ]
    title = f"{measured.model} on {measured.engine} {measured.engine_version}, {measured.url}"
    columns = ("", "measured ms", "preset ms", "error")
    return Report(title, columns, tuple(rows), result.preset.model_dump(), tuple(notes))


def _row(what: str, measured_ms: float, preset_ms: float) -> tuple[str, ...]:
    error = f"{(preset_ms - measured_ms) / measured_ms:+.1%}"
    return what, f"{measured_ms:.2f}", f"{preset_ms:.2f}", error
