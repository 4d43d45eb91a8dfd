"""What a comparison is made of, from what a person writes: policies with options, and requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvroute.loadtests.simulator.compare import Variant
from kvroute.loadtests.traces.rows import Trace, read_trace
from kvroute.loadtests.traces.workloads import BLOCK_TOKENS, generate
from kvroute.policies.registry import policy_names

MAX_REQUESTS = 1_000_000


@dataclass(frozen=True, slots=True)
class FileSource:
    """The same rows for every seed."""

    rows: Trace

    @property
    def block_tokens(self) -> int:
        return self.rows.block_tokens

    def __call__(self, seed: int) -> Trace:
        return self.rows


@dataclass(frozen=True, slots=True)
class GeneratedSource:
    """Another sample for every seed."""

    kind: str
    requests: int
    per_s: float
    block_tokens: int = BLOCK_TOKENS

    def __call__(self, seed: int) -> Trace:
        return generate(self.kind, self.requests, self.per_s, seed)


def source(
    trace: Path | None, workload: str | None, requests: int, per_s: float
) -> FileSource | GeneratedSource:
    """From a file or generated, not both; ValueError names the option."""
    if trace is not None:
        if workload is not None:
            raise ValueError("--trace and --workload: only one of them is accepted")
        return FileSource(read_trace(trace))
    if not 1 <= requests <= MAX_REQUESTS:
        raise ValueError(f"--requests must be from 1 to {MAX_REQUESTS}, got {requests}")
    if not 0 < per_s < float("inf"):
        raise ValueError(f"--rate must be positive, got {per_s}")
    made = GeneratedSource(workload or "mixed", requests, per_s)
    generate(made.kind, 1)
    return made


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
            raise ValueError(f"--option: {text!r} is not understood; policy.option=value is expected")
        if name not in given:
            raise ValueError(f"--option: {text!r} is for none of the policies compared: {', '.join(wanted)}")
        given[name][option] = value
    return [Variant(name, chosen) for name, chosen in given.items()]
