"""`kvroute bench`: what parts of the product cost on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

app = typer.Typer(no_args_is_help=True, help="Measure a part of the product on this machine.")

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures there as well.")]


@app.command()
def index(
    workers: Annotated[int, typer.Option(help="Workers that hold blocks.")] = 16,
    blocks: Annotated[int, typer.Option(help="(Worker, block) pairs to store.")] = 1_000_000,
    shape: Annotated[str, typer.Option(help="disjoint, shared or chat.")] = "disjoint",
    event_blocks: Annotated[int, typer.Option(help="Blocks per event.")] = 64,
    reps: Annotated[int, typer.Option(help="Lookups of each kind and depth.")] = 2000,
    peer: Annotated[
        Path | None, typer.Option(help="Python with ai-dynamo-runtime: its RadixTree in the same run.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """The index of confirmed blocks: events in, lookups out, memory."""
    from kvroute.loadtests.bench_index import IndexBench, run_bench_index

    if peer is not None and not peer.is_file():
        _fail(ValueError(f"--peer: {peer} is no file; the path of a Python interpreter is expected"))
    try:
        bench = IndexBench(
            workers=workers, entries=blocks, shape=shape, event_blocks=event_blocks, reps=reps, peer=peer
        )
    except ValueError as error:
        _fail(error)
    result = run_bench_index(bench)
    _write(json_file, result)
    typer.echo(json.dumps(result))


@app.command()
def tokens(
    tokenizer: Annotated[Path, typer.Option(help="A model's directory, or its tokenizer.json.")],
    chat_template: Annotated[Path | None, typer.Option(help="Default: the tokenizer's own.")] = None,
    rounds: Annotated[int, typer.Option(help="Requests of each kind.")] = 25,
    json_file: JsonFile = None,
) -> None:
    """From a request's body to what the index knows of it: parse, render, tokenise, hash, look up."""
    from kvroute.conductor.tokens.files import UnusableTokenizer
    from kvroute.loadtests.bench_tokens import TokensBench, run_bench_tokens, show_bench_tokens

    try:
        result = run_bench_tokens(TokensBench(tokenizer, chat_template, rounds))
    except (ValueError, UnusableTokenizer) as error:
        _fail(error)
    _write(json_file, result)
    typer.echo(show_bench_tokens(result))


@app.command()
def decide(
    workers: Annotated[
        list[int] | None, typer.Option(help="Workers of a fleet; repeat for more [default: 8, 64, 512].")
    ] = None,
    policy: Annotated[str, typer.Option(help="Policy by name.")] = "ttft",
    blocks: Annotated[int, typer.Option(help="Blocks of each prompt.")] = 1000,
    reps: Annotated[int, typer.Option(help="Decisions per stage and round.")] = 500,
    rounds: Annotated[int, typer.Option(help="Rounds, for the spread.")] = 7,
    json_file: JsonFile = None,
) -> None:
    """One decision: the look-up in the index, the price of every worker, the charge."""
    from kvroute.loadtests.bench_decide import DecideBench, run_bench_decide, show_bench_decide
    from kvroute.policies.registry import PolicyError

    try:
        result = run_bench_decide(DecideBench(tuple(workers or (8, 64, 512)), policy, blocks, reps, rounds))
    except (ValueError, PolicyError) as error:
        _fail(error)
    _write(json_file, result)
    typer.echo(show_bench_decide(result))


@app.command()
def relay(
    connector: Annotated[str, typer.Option(help="How engines hand KV over: nixl, shared-storage.")] = "nixl",
    policy: Annotated[str, typer.Option(help="One that chooses no pairs splits all.")] = "round_robin",
    body_bytes: Annotated[
        list[int] | None, typer.Option("--bytes", help="Of a request's body [default: 2000, 100000].")
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests per round.")] = 500,
    rounds: Annotated[int, typer.Option(help="Rounds, for the spread.")] = 5,
    rate: Annotated[float, typer.Option(help="Requests per second; 0: as fast as they go.")] = 300.0,
    json_file: JsonFile = None,
) -> None:
    """CPU of the gateway per request: whole, and split into prefill and decode."""
    from kvroute.loadtests.bench_relay import RelayBench, run_bench_relay, show_bench_relay

    try:
        bench = RelayBench(connector, policy, tuple(body_bytes or (2_000, 100_000)), requests, rounds, rate)
        result = run_bench_relay(bench)
    except (ValueError, RuntimeError) as error:
        _fail(error)
    _write(json_file, result)
    typer.echo(show_bench_relay(result))


def _fail(error: Exception) -> NoReturn:
    typer.echo(f"kvroute: {error}", err=True)
    raise typer.Exit(2)


def _write(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        try:
            path.write_text(json.dumps(result), encoding="utf-8")
        except OSError as error:
            typer.echo(f"kvroute: --json: {path}: {error.strerror}", err=True)
            raise typer.Exit(2) from None
