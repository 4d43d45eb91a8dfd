"""What the validations of the simulator have in common."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvroute.loadtests.results.measured import Measured


def trace_path(name: str) -> Path:
    """Of a file in the folder of KVROUTE_TRACES; skips the test, and says so, where it is not there."""
    folder = os.environ.get("KVROUTE_TRACES")
    if folder is None:
        pytest.skip("needs traces: KVROUTE_TRACES=FOLDER")
    path = Path(folder) / name
    if not path.exists():
        pytest.skip(f"needs a trace: {path} is not there")
    return path


def figures(measured: Sequence[Measured]) -> dict[str, float]:
    """Milliseconds, and the hit rate by token."""
    ttft, tpot = (
        np.array([getattr(one, name) for one in measured if one.output_tokens > 1 or name != "tpot_s"]) * 1e3
        for name in ("ttft_s", "tpot_s")
    )
    made = {
        "hit": sum(one.cached_tokens for one in measured) / sum(one.prompt_tokens for one in measured),
        "e2e mean": float(np.mean([one.e2e_s for one in measured])) * 1e3,
    }
    for name, values in (("ttft", ttft), ("tpot", tpot)):
        made[f"{name} mean"] = float(values.mean())
        for share in (50, 90, 99):
            made[f"{name} p{share}"] = float(np.percentile(values, share, method="nearest"))
    return made
