"""Rows of results as `simulate --json` writes them, invented."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

POLICIES = (
    *("round_robin", "random", "least_loaded", "power_of_two", "session", "prefix_affinity"),
    *("dynamo", "weighted", "mooncake", "preble", "lmetric", "ttft"),
)


def rows(
    policies: tuple[str, ...] = POLICIES,
    speeds: tuple[float, ...] = (1.0, 1.5, 2.0),
    traces: tuple[str, ...] = ("conversation", "synthetic"),
    workers: int = 8,
    seeds: int = 10,
) -> list[dict[str, Any]]:
    """The first policy is what the others are paired against; later ones are better."""
    return [
        row(policy, rank, len(policies), speed, trace, workers, seeds, policies[0])
        for trace in traces
        for speed in speeds
        for rank, policy in enumerate(policies)
    ]


def row(
    policy: str, rank: int, of: int, speed: float, trace: str, workers: int, seeds: int, against: str
) -> dict[str, Any]:
    """One row, with every figure and series."""
    source = np.random.default_rng(rank + round(100 * speed) + len(trace))
    skill = (rank + 1) / of
    goodput = float(np.clip(0.95 + 0.1 * skill - (0.55 - 0.3 * skill) * speed**1.3, 0.02, 0.98))
    scale = 500 * speed**2 * (1.6 - skill)
    ttft, tpot, itl = (_latencies(source, size) for size in (scale, 15 * speed, 12 * speed))
    e2e = _latencies(source, 12 * scale)
    made: dict[str, Any] = {
        **{"policy": policy, "options": {}, "speed": speed, "workers": workers, "trace": trace},
        **{"source": "simulated", "seeds": seeds, "offered": 10828, "offered_per_s": 3.4 * speed},
        "goodput": goodput,
        "goodput_by_limit": {
            **{"2 s / 25 ms": goodput, "30 s / 100 ms": 0.9, "30 s / 300 ms": 0.93},
            "0.5 s + 0.25 ms per uncached token / 25 ms": 0.5 * goodput,
        },
        "sent_after_ms": {"mean": 1.0, "p50": 0.0, "p90": 2.0, "p99": 40.0},
        **{"retries": 0.0, "prefix_loaded_tokens": 300.0 * rank},
        **{
            "ttft_ms": _spread(ttft),
            "tpot_ms": _spread(tpot),
            "itl_ms": _spread(itl),
            "e2e_ms": _spread(e2e),
        },
        **{"token_hit_rate": 0.1 + 0.25 * skill, "request_hit_rate": 0.2 + 0.4 * skill},
        "hit_by_tier": {
            "gpu": 0.05 + 0.2 * skill,
            "cpu": 0.03 + 0.03 * skill,
            "disk": 0.01,
            "peer": 0.02 * skill,
        },
        **{"prefill_tokens_skipped": 2.4e7 * skill, "gpu_seconds_saved": 1100 * skill},
        **{"rejected": 0.03 if policy == "mooncake" else 0.0, "failed": 0.0, "preemptions": 3 * speed},
        **{"peak_to_mean": 2.4 - skill, "decision_us": 20.0 + rank, "little": 1.0003, "warm_up": 0.1},
        "limits": {"ttft_s": 2.0, "tpot_s": 0.025},
        "setting": {
            "ttft_includes": "time held, queueing and prefill",
            "command": f"kvroute simulate --trace {trace}.jsonl --policy a,b --seeds {seeds}",
            **{"preset": "qwen3-32b-h200-tp2", "block_tokens": 512, "kv_tokens": 750000},
        },
        "series": {
            "ttft_ms": _quantiles(ttft),
            "itl_ms": _quantiles(itl),
            "load": _load(source, speed, skill, workers),
            "gantt": _gantt(source, workers),
            "predicted_ms": _predicted(source, ttft),
        },
    }
    figures = dict(_figures(made))
    made["ci95"] = {name: [0.97 * value, 1.03 * value] for name, value in figures.items()}
    steps = {**dict.fromkeys(figures, 0.0), "goodput": 0.04, "ttft_ms.mean": -30.0, "token_hit_rate": 0.01}
    made["paired"] = {
        "against": against,
        "figures": {
            name: [step * rank, step * rank - 0.01, step * rank + 0.01] for name, step in steps.items()
        },
    }
    return made


def _figures(made: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Those that have intervals, by their names."""
    for name, value in made.items():
        if name in ("speed", "workers", "seeds", "warm_up"):
            continue
        if isinstance(value, float | int):
            yield name, float(value)
        elif name.endswith("_ms") or name in ("hit_by_tier", "goodput_by_limit"):
            yield from ((f"{name}.{inner}", float(one)) for inner, one in value.items())


def _latencies(source: np.random.Generator, scale: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    return scale * source.lognormal(0, 0.9, 4000)


def _spread(values: Any) -> dict[str, float]:
    at = np.quantile(values, (0.5, 0.9, 0.99))
    return {
        "mean": float(values.mean()),
        **{f"p{p}": float(x) for p, x in zip((50, 90, 99), at, strict=True)},
    }


def _quantiles(values: Any) -> list[float]:
    return [float(x) for x in np.quantile(values, np.linspace(0, 1, 101))]


def _load(source: np.random.Generator, speed: float, skill: float, workers: int) -> dict[str, Any]:
    at = np.linspace(0, 3537, 240)
    mean = 18 * speed * (1.3 + 0.3 * np.sin(at / 300))
    spread = source.normal(0, 7 * (1.3 - skill), (workers, 1)) + source.normal(0, 3, (workers, 240))
    requests = np.maximum(0, mean + spread).round()
    return {"at_s": at.round(1).tolist(), "requests": requests.tolist()}


def _gantt(source: np.random.Generator, workers: int) -> dict[str, Any]:
    spans: list[list[float | int | None]] = []
    for arrival in np.sort(source.uniform(1000, 1030, 120)):
        start = float(arrival + source.exponential(0.3))
        first = float(start + source.exponential(0.6))
        spans.append(
            [
                int(source.integers(workers)),
                float(arrival),
                start,
                first,
                first + float(source.exponential(6)),
            ]
        )
    return {"from_s": 1000.0, "to_s": 1030.0, "spans": spans}


def _predicted(source: np.random.Generator, ttft: Any) -> list[list[float]]:
    return [[float(x * source.lognormal(0, 0.15)), float(x)] for x in ttft[:500]]
