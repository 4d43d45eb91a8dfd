"""`kvroute replay`: the requests of a trace, sent live."""

from __future__ import annotations

import sys
from collections.abc import Callable
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
    from kvroute.loadtests.replay.player import Played
    from kvroute.loadtests.replay.rounds import Named, Replay
    from kvroute.loadtests.replay.running import Due
    from kvroute.loadtests.results.rows import Row

INTERRUPTED = 130


def replay(
    url: Annotated[
        list[str] | None,
        typer.Option(help="Root of an OpenAI endpoint, without /v1; name=URL, repeated, compares several."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What results call a lone --url [default: where it is].")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="File of requests (Mooncake, Azure, token ids, ShareGPT).")
    ] = None,
    trace_format: TraceFormat = "auto",
    bad_lines: BadLines = "stop",
    workload: Annotated[
        str | None,
        typer.Option(help=WORKLOAD),
    ] = None,
    requests: Requests = None,
    rate: Rate = None,
    speed: Annotated[float, typer.Option(help="Arrivals so many times faster.")] = 1.0,
    scale: Annotated[float, typer.Option(help="Prompts and answers so many times as long.")] = 1.0,
    jitter: Jitter = "0",
    arrivals: Arrivals = "trace",
    seed: Annotated[int, typer.Option(help="Of the first round; others count on from it.")] = 1,
    limit: Annotated[int | None, typer.Option(help="Only so many requests, the first.")] = None,
    rounds: Annotated[int, typer.Option(help="Repetitions, each to every URL in turn.")] = 1,
    api: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    prompts: Annotated[str, typer.Option(help="What they are made of: token ids, or text.")] = "ids",
    model: Annotated[str | None, typer.Option(help="[default: the first that is served]")] = None,
    timeout: Annotated[str, typer.Option(help="Of a request, from when it is due.")] = "600s",
    api_key: Annotated[
        str | None, typer.Option(envvar="KVROUTE_REPLAY_API_KEY", help="Sent as a bearer token.")
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option(help="Sent with every request, as 'name: value'; repeat for more.")
    ] = None,
    max_in_flight: Annotated[
        int, typer.Option(help="Requests under way at once; those beyond are not sent, and count as failed.")
    ] = 4096,
    jobs: Annotated[int, typer.Option(help="Processes that send.")] = 1,
    salt: Annotated[
        int | None,
        typer.Option(
            help="Of the prompts; each run has its own, so that no cache knows them yet [default: the time]."
        ),
    ] = None,
    ttft_limit: TtftLimit = "2s",
    tpot_limit: TpotLimit = "25ms",
    warm_up: Annotated[
        float, typer.Option(help="Share of the requests, the first, that does not count.")
    ] = 0.1,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write results there; - prints nothing else.")
    ] = None,
    write_trace: Annotated[
        Path | None,
        typer.Option(help="Write the requests there for others to send; without --url, only that."),
    ] = None,
    write_format: Annotated[
        str, typer.Option(help="Of that file: mooncake (aiperf, Dynamo), sglang, or vllm (prompts as text).")
    ] = "mooncake",
    block_size: Annotated[
        int | None, typer.Option(help="Tokens per block in that file [default: those of the trace].")
    ] = None,
) -> None:
    """Send a trace's requests to live endpoints, each when it is due, and measure what comes back."""
    from kvroute.loadtests.replay.bodies import Form
    from kvroute.loadtests.replay.rounds import Replay, named, play_rounds, rows
    from kvroute.loadtests.replay.saving import save_trace
    from kvroute.loadtests.results.files import STDOUT, check_writable, write_results
    from kvroute.loadtests.results.measured import Limits
    from kvroute.loadtests.simulator.sources import sources
    from kvroute.policies.costs.units import parse_seconds

    try:
        check_writable(json_file, None, None)
        access = {
            "api_key": api_key,
            "headers": tuple(header or ()),
            "timeout_s": parse_seconds(timeout, "--timeout"),
        }
        (source,) = sources(
            [] if trace is None else [trace],
            [] if workload is None else [workload],
            requests,
            rate,
            trace_format,
            bad_lines,
        )
        asked = Replay(
            [named(text, name, **access) for text in url or ()],
            source,
            Form(api, prompts),
            model,
            speed,
            scale,
            parse_seconds(jitter, "--jitter", zero_ok=True),
            arrivals,
            seed,
            limit,
            rounds,
            Limits(parse_seconds(ttft_limit, "--ttft-limit"), parse_seconds(tpot_limit, "--tpot-limit")),
            warm_up,
            max_in_flight,
            jobs,
            **({} if salt is None else {"salt": salt}),
        )
        if write_trace is not None:
            count = save_trace(asked.due(0, 0), write_trace, write_format, block_size)
            typer.echo(f"{write_trace}: {count} requests", err=True)
        if write_trace is not None and not url:
            return
        played, stopped = play_rounds(asked, _tell(asked))
        made = rows(asked, played)
        write_results(made, json_file)
    except ValueError as error:
        _fail(str(error), 2)
    if json_file != STDOUT:
        _show(asked, made, played)
    if stopped:
        _fail("interrupted; the figures are of what was measured until then", INTERRUPTED)


def _tell(asked: Replay) -> Callable[[int, Named, Due], None]:
    def tell(number: int, target: Named, due: Due) -> None:
        last_s = due.last_s
        typer.echo(
            f"round {number + 1} of {asked.rounds}, {target.name}: {due.count} requests in {last_s:.0f} s",
            err=True,
        )

    return tell


def _show(asked: Replay, made: list[Row], played: list[list[Played]]) -> None:
    from rich.console import Console

    from kvroute.loadtests.replay.outcome import notes
    from kvroute.loadtests.results.table import print_results

    # A pipe or file has no width: long lines rather than figures folded into 80 columns.
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    said = list(asked.source.remarks)
    for target, rounds in zip(asked.targets, played, strict=True):
        said += (
            notes(target.name, rounds, asked.warm_up_requests)
            if rounds
            else [f"{target.name}: nothing was sent"]
        )
    if made:
        print_results(made, console, said)


def _fail(message: str, status: int) -> NoReturn:
    typer.echo(f"kvroute: {message}", err=True)
    raise typer.Exit(status)
