"""What a comparison is made of, from what a person writes: requests, fleets, policies with options."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvroute.loadtests.simulator.compare import FleetOf, Source, Variant
from kvroute.loadtests.simulator.memory import Memory
from kvroute.loadtests.simulator.mini import MINI
from kvroute.loadtests.simulator.parsing import choice
from kvroute.loadtests.simulator.setting import Setting
from kvroute.loadtests.traces.reading import BAD_LINES, FORMATS, read_trace
from kvroute.loadtests.traces.rows import Trace
from kvroute.loadtests.traces.workloads import BLOCK_TOKENS, WORKLOADS, generate
from kvroute.policies.costs.speeds import PRESETS
from kvroute.policies.registry import policy_names
from kvroute.preset_file import PresetError, load_speed

MAX_REQUESTS = 1_000_000
MAX_PER_S = 100_000.0
MAX_WORKERS = 10_000
PLATFORM_SCALE = 1.1
"""k of the built-in presets, as fitted to logs of real vLLM; what was measured live needs none."""
SETTINGS: dict[str, Setting] = {"polynomial-64x16384": MINI}
"""Presets that are more than a speed: 64-token blocks, 16384 of them, and steps by polynomials."""

_WORKERS = re.compile(r"([0-9]{1,6})(?:P([0-9]{1,6})D|(PD))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class FileSource:
    """The same rows for every seed; every process reads them for itself."""

    path: Path
    block_tokens: int
    format: str = "auto"
    bad_lines: str = "stop"

    @property
    def name(self) -> str:
        return Path(self.path.name.removesuffix(".gz")).stem

    @property
    def is_drawn(self) -> bool:
        return False

    @property
    def remarks(self) -> Sequence[str]:
        """What of the file was left out or put in order."""
        trace = self(1)
        skipped = ", ".join(f"{count} {reason}" for reason, count in trace.skipped.items())
        return [
            *([f"{self.name}: lines skipped: {skipped}"] if skipped else []),
            *([f"{self.name}: {trace.unsorted} lines were not in order of time"] if trace.unsorted else []),
        ]

    def __call__(self, seed: int) -> Trace:
        return _read(self.path, self.format, self.bad_lines)


@dataclass(frozen=True, slots=True)
class GeneratedSource:
    """Another sample for every seed."""

    kind: str
    requests: int = 4000
    per_s: float = 4.0

    @property
    def name(self) -> str:
        return self.kind

    @property
    def block_tokens(self) -> int:
        return BLOCK_TOKENS

    @property
    def is_drawn(self) -> bool:
        return True

    @property
    def remarks(self) -> Sequence[str]:
        return ()

    def __call__(self, seed: int) -> Trace:
        return _generate(self.kind, self.requests, self.per_s, seed)


# Runs of the same requests follow each other: what was read or made last serves most of them.
_read = lru_cache(maxsize=1)(read_trace)
_generate = lru_cache(maxsize=1)(generate)


def sources(
    traces: Sequence[Path],
    workloads: Sequence[str],
    requests: int | None = None,
    per_s: float | None = None,
    format: str = "auto",
    bad_lines: str = "stop",
) -> list[Source]:
    """Files and workloads, one at least; ValueError names the option."""
    choice(format, "--format", ("auto", *FORMATS))
    choice(bad_lines, "--bad-lines", BAD_LINES)
    if traces and not workloads:
        for option, value in (("--requests", requests), ("--rate", per_s)):
            if value is not None:
                raise ValueError(f"{option} is of generated workloads; a trace has its own, see --speed")
    files: list[Source] = [
        FileSource(path, _read(path, format, bad_lines).block_tokens, format, bad_lines) for path in traces
    ]
    made = GeneratedSource("mixed") if requests is None else GeneratedSource("mixed", requests)
    made = made if per_s is None else replace(made, per_s=per_s)
    if not 1 <= made.requests <= MAX_REQUESTS:
        raise ValueError(f"--requests must be from 1 to {MAX_REQUESTS}, got {requests}")
    if not 0 < made.per_s <= MAX_PER_S:
        raise ValueError(f"--rate must be above 0 and at most {MAX_PER_S:g} per second, got {per_s}")
    for kind in workloads:
        choice(kind, "--workload", WORKLOADS)
    kinds = workloads or ([] if traces else ["mixed"])
    every: list[Source] = [*files, *(replace(made, kind=kind) for kind in kinds)]
    names = [source.name for source in every]
    if len(set(names)) < len(names):
        raise ValueError(f"--trace, --workload: {', '.join(names)}: a name is all that tells two apart")
    return every


def fleets(
    workers: Sequence[str],
    preset: str,
    block_tokens: int | None = None,
    given: Mapping[str, Any] = MappingProxyType({}),
    memory: Mapping[str, Any] = MappingProxyType({}),
) -> list[FleetOf]:
    """A fleet for each number of workers.

    `given` are fields of `Setting`, `memory` those of `Memory`, None where they are the preset's. ValueError
    names option or field.
    """
    fields = {name: value for name, value in given.items() if value is not None}
    of_memory = {name: value for name, value in memory.items() if value is not None}
    if of_memory:
        fields["memory"] = Memory(**of_memory)
    known = SETTINGS.get(preset)
    if known is not None:
        if "scale" in fields:
            raise ValueError(f"--scale: the steps of {preset} take what they take; leave it out")
        base, block_tokens = known, known.block_tokens if block_tokens is None else block_tokens
    else:
        base = _of_speed(preset)
    numbers = [_counted(text) for text in workers]
    if len({label for label, _ in numbers}) < len(numbers):
        raise ValueError(f"--workers: {', '.join(workers)}: one is given more than once")
    return [FleetOf(label, replace(base, **fields, **counts), block_tokens) for label, counts in numbers]


def _of_speed(preset: str) -> Setting:
    try:
        speed = load_speed(preset)
    except PresetError as error:
        also = ", ".join(SETTINGS)
        raise ValueError(f"--preset: {error} (to simulate, also {also})") from None
    scale = PLATFORM_SCALE if preset in PRESETS else 1.0
    # Its blocks come with the trace: no size but the smallest is right for every KV room until then.
    return Setting(speed=speed, scale=scale, kv_tokens=speed.kv_tokens, block_tokens=1)


def _counted(text: str) -> tuple[int | str, dict[str, Any]]:
    """What the fleet is called, and fields of `Setting`."""
    match = _WORKERS.fullmatch(text)
    if match is None:
        raise ValueError(f"--workers: {text!r} is not understood; a number is expected, or 6P2D, or 8PD")
    first, decoders, joint = match.groups()
    counts = [int(part) for part in (first, decoders) if part is not None]
    if min(counts) < 1 or sum(counts) > MAX_WORKERS:
        raise ValueError(f"--workers: {text!r}: from 1 to {MAX_WORKERS} of them are accepted")
    if len(counts) == 2:
        return f"{counts[0]}P{counts[1]}D", {"split": (counts[0], counts[1])}
    return (text if joint else counts[0]), {"workers": counts[0], "joint": joint is not None}


def policies(names: Sequence[str], options: Sequence[str]) -> list[Variant]:
    """One variant per name, all that are known without any; options are `policy.option=value`."""
    wanted = list(names) or policy_names()
    doubled = {name for name in wanted if wanted.count(name) > 1}
    if doubled:
        raise ValueError(f"--policy: {', '.join(sorted(doubled))} is given more than once")
    given: dict[str, dict[str, object]] = {name: {} for name in wanted}
    for text in options:
        place, equals, value = text.partition("=")
        name, dot, option = place.partition(".")
        if not (equals and dot and option):
            raise ValueError(f"--set: {text!r} is not understood; policy.option=value is expected")
        if name not in given:
            raise ValueError(f"--set: {text!r} is for none of the policies compared: {', '.join(wanted)}")
        given[name][option] = value
    return [Variant(name, chosen) for name, chosen in given.items()]
