"""The requests of a replay as files that the load generators of others read."""

from __future__ import annotations

from pathlib import Path

from kvroute.loadtests.replay.running import Due
from kvroute.loadtests.replay.target import ReplayError
from kvroute.loadtests.traces.cuts import Cut
from kvroute.loadtests.traces.writing import write_mooncake, write_text

FORMATS = ("mooncake", "sglang", "vllm")


def save_trace(due: Due, path: Path, format: str, block_tokens: int | None = None) -> int:
    """How many were written. SGLang reads Mooncake's format; vLLM's has prompts, and no times.

    ReplayError names the option.
    """
    if format not in FORMATS:
        raise ReplayError(f"--write-format: unknown {format!r}; known: {', '.join(FORMATS)}")
    try:
        if format == "vllm":
            return write_text(path, due.arrivals(), due.prompts)
        wanted = due.trace.block_tokens if block_tokens is None else block_tokens
        cut = Cut(due.trace.block_tokens, wanted, due.scale)
        return write_mooncake(path, due.arrivals(), cut)
    except ValueError as error:
        raise ReplayError(f"--write-trace: {error}") from None
