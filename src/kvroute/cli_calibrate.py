"""`kvroute calibrate`: measure a live engine, write a preset."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer


def calibrate(
    url: Annotated[str, typer.Option(help="Root of an engine that serves nobody else, without /v1.")],
    out: Annotated[Path, typer.Option(help="File to write; `speed` of a configuration accepts its path.")],
    model: Annotated[str | None, typer.Option(help="Served model [default: the engine's first].")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="KVROUTE_CALIBRATE_API_KEY", help="Of the engine.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter prompts.")] = False,
    name: Annotated[str, typer.Option(help="Name of the preset [default: the model's].")] = "",
    kv_tokens: Annotated[
        int | None, typer.Option(help="Size of the KV cache, if /metrics do not tell it.", min=1)
    ] = None,
    kv_bytes_per_token: Annotated[
        str | None, typer.Option(help="Size of a token's KV, such as 128KiB.")
    ] = None,
    config_json: Annotated[
        Path | None, typer.Option(help="Instead: the model's config.json, to compute it from.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write a poor fit as well.")] = False,
) -> None:
    """Measure how fast an engine is, and write it as a preset.

    Exit status 1, and nothing written, when the times do not fit the model, as those of a busy engine.
    """
    from rich.console import Console

    from kvroute.loadtests.calibrate.measure import FULL, QUICK
    from kvroute.loadtests.calibrate.run import Wanted, report
    from kvroute.loadtests.calibrate.run import calibrate as measure_engine
    from kvroute.loadtests.plan.show import print_report
    from kvroute.policies.costs.units import parse_bytes
    from kvroute.preset_file import write_preset

    if not out.parent.is_dir():
        _fail(f"--out: {out.parent} is no directory; the path of a file in one is expected")
    if out.is_dir():
        _fail(f"--out: {out} is a directory; the path of a file is expected")
    if kv_bytes_per_token is not None and config_json is not None:
        _fail("--config-json: --kv-bytes-per-token says it already; one of the two is expected")
    errors = Console(stderr=True)
    try:
        token_bytes = kv_bytes_per_token and parse_bytes(kv_bytes_per_token, "--kv-bytes-per-token")
        effort = QUICK if quick else FULL
        wanted = Wanted(url, effort, model, api_key, name, kv_tokens, token_bytes or None, config_json)
        with errors.status("asking the engine") as status:
            result = measure_engine(wanted, status.update)
        print_report(report(result), Console())
        if result.complaint is not None and not force:
            _fail(f"{result.complaint}, or --force; nothing was written", status=1)
        write_preset(result.preset, out)
    except ValueError as error:
        _fail(str(error))
    if result.complaint is not None:
        typer.echo(f"kvroute: warning: {result.complaint}", err=True)
    typer.echo(f"{out} written")


def _fail(message: str, status: int = 2) -> NoReturn:
    typer.echo(f"kvroute: {message}", err=True)
    raise typer.Exit(status)
