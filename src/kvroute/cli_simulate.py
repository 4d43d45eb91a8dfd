"""`kvroute simulate`: policies compared in virtual time."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from kvroute.cli_present import WIDTH
from kvroute.cli_requests import (
    WORKLOAD,
    Arrivals,
    BadLines,
    Jitter,
    Rate,
    Requests,
    TpotLimit,
    TraceFormat,
    TtftLimit,
)

if TYPE_CHECKING:
    from kvroute.loadtests.results.combine import Result
    from kvroute.loadtests.results.rows import Row
    from kvroute.loadtests.simulator.compare import Comparison, Run

DEFAULT_PRESET = "qwen3-32b-h200-tp2"
INTERRUPTED = 130
MAX_JOBS = 256


def simulate(
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Policies by name, with commas or repeated; the first is the baseline [default: all]."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="An option of a policy, as policy.option=value; repeat for more."),
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(help="File of requests (Mooncake, Azure, token ids, ShareGPT); repeat for more."),
    ] = None,
    trace_format: TraceFormat = "auto",
    bad_lines: BadLines = "stop",
    workload: Annotated[
        list[str] | None,
        typer.Option(help=WORKLOAD),
    ] = None,
    requests: Requests = None,
    rate: Rate = None,
    speed: Annotated[
        list[str] | None,
        typer.Option(help="Arrivals so many times faster; 1,1.5,2 or repeated [default: 1]."),
    ] = None,
    jitter: Jitter = "0",
    arrivals: Arrivals = "trace",
    seeds: Annotated[int, typer.Option(help="Repetitions, with other jitter or another workload.")] = 3,
    preset: Annotated[
        str,
        typer.Option(
            help="Engine by name, a file of `kvroute calibrate`, or polynomial-64x16384 (Dynamo's mocker)."
        ),
    ] = DEFAULT_PRESET,
    scale: Annotated[
        float | None,
        typer.Option(help="Every step takes so many times the preset's [default: 1.1, 1 for a file's]."),
    ] = None,
    workers: Annotated[
        list[str] | None,
        typer.Option(
            help="Engines: a number, 6P2D for prefill and decode apart, 8PD for either half; 4,8,16 compares."
        ),
    ] = None,
    kv_tokens: Annotated[
        int | None, typer.Option(help="KV room of each engine [default: the preset's].")
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(help="Tokens per cache block [default: those of the trace, or the preset's]."),
    ] = None,
    event_lag: Annotated[str, typer.Option(help="Until the index hears of stored and removed blocks.")] = "0",
    prefill_error: Annotated[
        float, typer.Option(help="What the router's preset makes of prefill, as a multiple of the truth.")
    ] = 1.0,
    decode_error: Annotated[float, typer.Option(help="The same for decode steps.")] = 1.0,
    outputs: Annotated[
        str, typer.Option(help="How long answers will be: learned by the router, or known to it.")
    ] = "learned",
    learns: Annotated[
        bool, typer.Option("--learns", help="Let answers correct the router's speeds, as in the gateway.")
    ] = False,
    event_loss: Annotated[
        float, typer.Option(help="Share of the events that the index never hears of.")
    ] = 0.0,
    worker_scales: Annotated[
        str | None, typer.Option(help="How much slower each worker is, as 1,1,2; the router knows.")
    ] = None,
    fail: Annotated[
        list[str] | None,
        typer.Option(help="A worker dies, as 2@60s, or is back empty later, as 2@60s-90s; repeat for more."),
    ] = None,
    handoff: Annotated[
        str | None, typer.Option(help="Link from prefill to decode workers, by name [default: ib-400g].")
    ] = None,
    gpu_eviction: Annotated[
        str | None,
        typer.Option(help="Of the GPU's cache, by name; or the bounds belady and endless [default: lru]."),
    ] = None,
    cpu_tokens: Annotated[
        int | None, typer.Option(help="KV room in each worker's CPU memory [default: 0].")
    ] = None,
    cpu_write: Annotated[
        str | None, typer.Option(help="When a block goes there: through, back or selective [default: back].")
    ] = None,
    cpu_eviction: Annotated[str | None, typer.Option(help="What leaves it, by name [default: lru].")] = None,
    cpu_admission: Annotated[
        str | None, typer.Option(help="What comes in, by name [default: always].")
    ] = None,
    cpu_link: Annotated[
        str | None, typer.Option(help="The way up to the GPU, by name [default: dram].")
    ] = None,
    disk_tokens: Annotated[
        int | None, typer.Option(help="KV room on each worker's disk [default: 0].")
    ] = None,
    tier_news: Annotated[
        str | None,
        typer.Option(help="What the router knows of tiers: events, size or none [default: events]."),
    ] = None,
    peer_link: Annotated[
        str | None, typer.Option(help="The way out of each worker for KV that others pull [default: none].")
    ] = None,
    pull_from: Annotated[
        str | None,
        typer.Option(help="What workers give to others: cpu (all below the GPU), or any [default: cpu]."),
    ] = None,
    ttft_limit: TtftLimit = "2s",
    tpot_limit: TpotLimit = "25ms",
    warm_up: Annotated[
        str,
        typer.Option(help="Requests not counted: the first share of them, or fill: until caches are full."),
    ] = "0.1",
    jobs: Annotated[int | None, typer.Option(help="Processes [default: one per core].")] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write results there, with all figures; - prints nothing else."),
    ] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="Write figures there, a line per row.")
    ] = None,
    parquet_file: Annotated[
        Path | None, typer.Option("--parquet", help="The same as Parquet; needs kvroute[parquet].")
    ] = None,
) -> None:
    """Goodput, latency and cache hits of policies over the same requests, engines and clock simulated."""
    from kvroute.loadtests.results.files import STDOUT, ResultsError, check_writable, write_results
    from kvroute.loadtests.results.measured import Limits
    from kvroute.loadtests.simulator.compare import Comparison, make_rows
    from kvroute.loadtests.simulator.parsing import failure, link, listed, number, said, scales
    from kvroute.loadtests.simulator.sources import fleets, policies, sources
    from kvroute.policies.costs.units import parse_seconds
    from kvroute.policies.registry import PolicyError

    try:
        check_writable(json_file, csv_file, parquet_file)
        given = {
            "scale": scale,
            "kv_tokens": kv_tokens,
            "event_lag_s": parse_seconds(event_lag, "--event-lag", zero_ok=True) or None,
            "event_loss": event_loss or None,
            "prefill_error": None if prefill_error == 1 else prefill_error,
            "decode_error": None if decode_error == 1 else decode_error,
            "learns": learns or None,
            "worker_scales": scales(worker_scales),
            "failures": tuple(map(failure, fail)) if fail else None,
            "handoff": link(handoff, "--handoff"),
        }
        memory = {
            "gpu_eviction": gpu_eviction,
            "cpu_tokens": cpu_tokens,
            "cpu_write": cpu_write,
            "cpu_eviction": cpu_eviction,
            "cpu_admission": cpu_admission,
            "cpu_link": link(cpu_link, "--cpu-link"),
            "disk_tokens": disk_tokens,
            "tier_news": tier_news,
            "peer_link": link(peer_link, "--peer-link"),
            "pull_from": pull_from,
        }
        comparison = Comparison(
            sources(trace or (), listed(workload), requests, rate, trace_format, bad_lines),
            policies(listed(policy), set_ or ()),
            fleets(listed(workers) or ["8"], preset, block_size, given, memory),
            [number(text, "--speed") for text in listed(speed)] or [1.0],
            seeds,
            parse_seconds(jitter, "--jitter", zero_ok=True),
            arrivals,
            outputs,
            Limits(parse_seconds(ttft_limit, "--ttft-limit"), parse_seconds(tpot_limit, "--tpot-limit")),
            None if warm_up == "fill" else number(warm_up, "--warm-up"),
        )
        if jobs is not None and not 1 <= jobs <= MAX_JOBS:
            raise ValueError(f"--jobs must be from 1 to {MAX_JOBS}, got {jobs}")
    except (ValueError, PolicyError) as error:
        _fail(str(error), 2)
    results = _run(comparison, min(jobs or os.cpu_count() or 1, len(comparison.runs)))
    about = {"command": ["kvroute", *sys.argv[1:]], "preset": preset, **said(given, memory)}
    rows = make_rows(comparison, results, about)
    try:
        write_results(rows, json_file, csv_file, parquet_file)
    except ResultsError as error:
        _fail(str(error), 1)
    if json_file != STDOUT:
        _show(rows, comparison)


def _run(comparison: Comparison, jobs: int) -> dict[Run, Result]:
    """All runs, with a bar where somebody looks; ends the command when one fails or it is interrupted."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from kvroute.loadtests.simulator.processes import RunFailed, compare

    total = len(comparison.runs)
    done = 0
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)

        def tell(run: Run) -> None:
            nonlocal done
            done += 1
            progress.update(task, advance=1, description=comparison.name(run))

        try:
            return compare(comparison, jobs, tell)
        except RunFailed as error:
            progress.stop()
            _fail(str(error), 1)
        except KeyboardInterrupt:
            progress.stop()
            _fail(f"interrupted after {done} of {total} runs; nothing was written", INTERRUPTED)


def _show(rows: list[Row], comparison: Comparison) -> None:
    from rich.console import Console

    from kvroute.loadtests.results.table import print_results

    # A pipe or file has no width: long lines rather than figures folded into 80 columns.
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    remarks = [remark for source in comparison.sources for remark in source.remarks]
    if comparison.seeds > 1 and comparison.same_for_seeds:
        remarks.append(
            "every seed has the same requests at the same times: --jitter or --arrivals tells more"
        )
    print_results(rows, console, remarks)


def _fail(message: str, status: int) -> NoReturn:
    typer.echo(f"kvroute: {message}", err=True)
    raise typer.Exit(status)
