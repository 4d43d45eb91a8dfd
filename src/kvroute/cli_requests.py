"""Options of the commands that take a trace or a workload, alike in all of them."""

from __future__ import annotations

from typing import Annotated

import typer

TraceFormat = Annotated[
    str, typer.Option("--format", help="Of the file: auto, mooncake, azure, token_ids or sharegpt.")
]
BadLines = Annotated[str, typer.Option(help="A line that does not fit: stop, or skip and count.")]
Requests = Annotated[int | None, typer.Option(help="Requests of a workload [default: 4000].")]
Rate = Annotated[float | None, typer.Option(help="Of a workload, per second [default: 4].")]
Jitter = Annotated[str, typer.Option(help="Of a trace stamped by ticks: each request up to so much later.")]
Arrivals = Annotated[
    str, typer.Option(help="When requests come: trace (as recorded), poisson, or gamma (bursty).")
]
TtftLimit = Annotated[str, typer.Option(help="A good request's time to first token.")]
TpotLimit = Annotated[str, typer.Option(help="And its mean time per token after that.")]
WORKLOAD = "Generated: chat, shared, agents, documents, scans, bursts or mixed [default: mixed]."
