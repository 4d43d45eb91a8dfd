"""`kvroute plan`: the cost model as a person uses it. Options in, one report out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvroute import cli_plan_time
from kvroute.cli_present import AsJson, PlotFile, present

if TYPE_CHECKING:
    from kvroute.loadtests.plan.show import Plot, Report

app = typer.Typer(no_args_is_help=True, help="Size a fleet and see what its KV cache is worth.")

app.add_typer(cli_plan_time.app)


@app.command()
def capacity(
    model: Annotated[Path, typer.Option(help="A Hugging Face config.json.")],
    kv_memory: Annotated[str | None, typer.Option(help="Memory for KV on each GPU, such as 40GiB.")] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Instead of --kv-memory: all memory of each GPU.")
    ] = None,
    utilisation: Annotated[float, typer.Option(help="Share of --gpu-memory that the engine uses.")] = 0.9,
    weights: Annotated[str | None, typer.Option(help="Size of the whole model's weights.")] = None,
    overhead: Annotated[
        str | None, typer.Option(help="Activations, graphs and the like on each GPU.")
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    dp: Annotated[int, typer.Option(help="Instances with a cache of their own.")] = 1,
    kv_dtype: Annotated[
        str, typer.Option(help="Type of K and V: auto, bf16, fp16, fp32, fp8, int8, or one with scales.")
    ] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens per block.")] = 16,
    lengths: Annotated[str, typer.Option(help="Prompt tokens of requests to count.")] = "1024,8192,32768",
    output_tokens: Annotated[int, typer.Option(help="Tokens each request then decodes.")] = 256,
    assume_standard: Annotated[
        bool, typer.Option("--assume-standard", help="Take an unknown architecture as plain attention.")
    ] = False,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """Bytes per token, token slots, and how many requests fit, at the start and while they decode."""
    from kvroute.loadtests.plan.capacity import (
        CapacityPlan,
        kv_memory_bytes,
        parse_lengths,
        plan_capacity,
        read_config_file,
    )

    def plan() -> tuple[Report, Plot]:
        return plan_capacity(
            CapacityPlan(
                config=read_config_file(model),
                memory_bytes=kv_memory_bytes(
                    kv_memory, gpu_memory, utilisation, weights, overhead, gpus=tp * pp
                ),
                tp=tp,
                pp=pp,
                dp=dp,
                kv_dtype=kv_dtype,
                block_tokens=block_size,
                lengths=parse_lengths(lengths),
                output_tokens=output_tokens,
                assume_standard=assume_standard,
            )
        )

    present(plan, as_json, plot)
