"""`kvroute simulate`: policies compared in virtual time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvroute.cli_present import AsJson, present

if TYPE_CHECKING:
    from kvroute.loadtests.plan.show import Report

DEFAULT_PRESET = "qwen3-32b-h200-tp2"
PLATFORM_SCALE = 1.1
"""k of the built-in presets, as fitted to logs of real vLLM; what was measured live needs none."""


def simulate(
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Policy by name; repeat to compare, the first is the baseline [default: all]."),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="Of a policy, as policy.option=value; repeat for more.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="JSONL: timestamp, input_length, output_length, hash_ids.")
    ] = None,
    workload: Annotated[
        str | None, typer.Option(help="Without a trace: chat, agents, documents or mixed [default: mixed].")
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests of a workload.")] = 4000,
    rate: Annotated[float, typer.Option(help="Requests per second of a workload.")] = 4.0,
    speedup: Annotated[
        list[float] | None, typer.Option(help="Arrivals so many times faster; repeat for more [default: 1].")
    ] = None,
    jitter: Annotated[
        str, typer.Option(help="Of a trace stamped by ticks: each request up to so much later.")
    ] = "0",
    arrivals: Annotated[
        str, typer.Option(help="When requests come: trace (as recorded), poisson, or gamma (bursty).")
    ] = "trace",
    seeds: Annotated[int, typer.Option(help="Repetitions, with other jitter or another workload.")] = 3,
    preset: Annotated[
        str, typer.Option(help="Engine speed by name, or a file of `kvroute calibrate`.")
    ] = DEFAULT_PRESET,
    scale: Annotated[
        float | None,
        typer.Option(help="Every step takes so many times the preset's [default: 1.1, 1 for a file's]."),
    ] = None,
    workers: Annotated[int, typer.Option(help="Engines.")] = 8,
    kv_tokens: Annotated[
        int | None, typer.Option(help="KV room of each engine [default: the preset's].")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens per cache block [default: those of the trace].")
    ] = None,
    event_lag: Annotated[str, typer.Option(help="Until the index hears of stored and removed blocks.")] = "0",
    ttft_limit: Annotated[str, typer.Option(help="A good request's time to first token.")] = "2s",
    tpot_limit: Annotated[str, typer.Option(help="And its mean time per token after that.")] = "25ms",
    jobs: Annotated[int, typer.Option(help="Processes.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Goodput, latency and cache hits of policies over the same requests, engines and clock simulated."""
    from kvroute.loadtests.simulator.compare import Comparison, Run, compare
    from kvroute.loadtests.simulator.report import make_report
    from kvroute.loadtests.simulator.results import Limits
    from kvroute.loadtests.simulator.setting import Setting
    from kvroute.loadtests.simulator.sources import policies, source
    from kvroute.policies.costs.speeds import PRESETS
    from kvroute.policies.costs.units import parse_seconds
    from kvroute.policies.registry import PolicyError
    from kvroute.preset_file import PresetError, load_speed

    def plan() -> tuple[Report, None]:
        requests_of = source(trace, workload, requests, rate)
        try:
            speed = load_speed(preset)
            comparison = Comparison(
                requests_of,
                policies(policy or (), option or ()),
                Setting(
                    workers=workers,
                    speed=speed,
                    scale=(PLATFORM_SCALE if preset in PRESETS else 1.0) if scale is None else scale,
                    kv_tokens=speed.kv_tokens if kv_tokens is None else kv_tokens,
                    block_tokens=requests_of.block_tokens if block_size is None else block_size,
                    event_lag_s=parse_seconds(event_lag, "--event-lag", zero_ok=True),
                ),
                tuple(speedup or (1.0,)),
                seeds,
                parse_seconds(jitter, "--jitter", zero_ok=True),
                arrivals,
                Limits(parse_seconds(ttft_limit, "--ttft-limit"), parse_seconds(tpot_limit, "--tpot-limit")),
            )
        except (PolicyError, PresetError) as error:
            raise ValueError(str(error)) from error
        total, done = len(comparison.runs), 0

        def tell(run: Run) -> None:
            nonlocal done
            done += 1
            if sys.stderr.isatty():
                name = comparison.variants[run.variant].policy
                typer.echo(
                    f"\r{done}/{total} {name} x{run.speedup:g} seed {run.seed}\033[K", err=True, nl=False
                )

        results = compare(comparison, min(jobs, total) if jobs > 0 else jobs, tell)
        if sys.stderr.isatty():
            typer.echo("\r\033[K", err=True, nl=False)
        return make_report(comparison, results), None

    present(plan, as_json, None)
