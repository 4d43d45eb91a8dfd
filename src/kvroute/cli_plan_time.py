"""The commands of `kvroute plan` that are about time: what fetching, splitting, chunks and queues cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvroute.cli_present import AsJson, PlotFile, present

if TYPE_CHECKING:
    from kvroute.loadtests.plan.show import Plot, Report
    from kvroute.loadtests.traces.rows import Trace

app = typer.Typer()

Preset = Annotated[str, typer.Option(help="Model and GPU by name, or a file of kvroute calibrate.")]
BytesPerToken = Annotated[
    str | None, typer.Option(help="KV of a token, such as 128KiB [default: the preset's].")
]
LinkName = Annotated[
    str,
    typer.Option(help="dram, nvme, nvme-write, object-store, tcp, roce-100g, ib-400g or ib-8x400g."),
]
Bandwidth = Annotated[
    str | None, typer.Option(help="Of payload on the link, such as 200Gbps or 20GiB/s [default: the link's].")
]
Latency = Annotated[
    str | None, typer.Option(help="Before the first byte, such as 2ms [default: the link's].")
]
TraceFile = Annotated[
    Path | None, typer.Option(help="JSONL with 512-token hash_ids [default: a generated workload].")
]
Seed = Annotated[int, typer.Option(help="Of the generated workload.")]
HostBandwidth = Annotated[
    str | None, typer.Option(help="A copy from CPU to GPU after the link [default: none].")
]
OverlapName = Annotated[str, typer.Option(help="Of link and copy: serial or pipelined.")]

DEFAULT_PRESET = "qwen3-32b-h200-tp2"


@app.command()
def breakeven(
    preset: Preset = DEFAULT_PRESET,
    bytes_per_token: BytesPerToken = None,
    link: Annotated[
        str | None, typer.Option(help="Only this link [default: all tiers and networks].")
    ] = None,
    bandwidth: Bandwidth = None,
    latency: Latency = None,
    lengths: Annotated[str, typer.Option(help="Prefix tokens.")] = "512,4096,32768,131072",
    suffix: Annotated[int, typer.Option(help="Tokens after the prefix, computed on both ways.")] = 512,
    lookup: Annotated[str, typer.Option(help="Time to find the prefix.")] = "0",
    queue_cold: Annotated[str, typer.Option(help="Wait of the worker that recomputes.")] = "0",
    queue_reuse: Annotated[str, typer.Option(help="Wait of the worker that fetches.")] = "0",
    host_bandwidth: HostBandwidth = None,
    overlap: OverlapName = "pipelined",
    chunk: Annotated[int, typer.Option(help="Tokens sent on to the copy at once.")] = 256,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a cached prefix or compute it again: where the lines cross, for each tier and network."""
    from kvroute.loadtests.plan.breakeven import BreakevenPlan, plan_breakeven, usual_links
    from kvroute.loadtests.plan.choices import link_of, optional_bandwidth, overlap_of, speed_of, token_counts
    from kvroute.policies.costs.units import parse_seconds

    def plan() -> tuple[Report, Plot]:
        one = link is not None or bandwidth is not None or latency is not None
        return plan_breakeven(
            BreakevenPlan(
                preset=preset,
                speed=speed_of(preset, bytes_per_token),
                links=dict([link_of(link or "ib-400g", bandwidth, latency)]) if one else usual_links(),
                lengths=token_counts("--lengths", lengths),
                suffix_tokens=suffix,
                lookup_s=parse_seconds(lookup, "--lookup", zero_ok=True),
                queue_cold_s=parse_seconds(queue_cold, "--queue-cold", zero_ok=True),
                queue_reuse_s=parse_seconds(queue_reuse, "--queue-reuse", zero_ok=True),
                host_bytes_per_s=optional_bandwidth("--host-bandwidth", host_bandwidth),
                chunk_tokens=chunk,
                overlap=overlap_of(overlap),
            )
        )

    present(plan, as_json, plot)


@app.command()
def chunks(
    preset: Preset = DEFAULT_PRESET,
    bytes_per_token: BytesPerToken = None,
    trace: TraceFile = None,
    seed: Seed = 0,
    sizes: Annotated[
        str, typer.Option(help="Tokens per chunk, whole pages.")
    ] = "16,32,64,128,256,512,1024,2048,4096",
    page: Annotated[int, typer.Option(help="Tokens per page of the engine.")] = 16,
    link: LinkName = "roce-100g",
    bandwidth: Bandwidth = None,
    latency: Latency = None,
    object_time: Annotated[str, typer.Option(help="Of each object read: key, RPC, completion.")] = "50us",
    metadata: Annotated[str, typer.Option(help="Kept for each object.")] = "256B",
    host_bandwidth: HostBandwidth = None,
    overlap: OverlapName = "pipelined",
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """Chunk sizes over a trace: objects, metadata, RPCs, usable prefix, tail waste, load time and TTFT."""
    from kvroute.loadtests.plan.choices import link_of, optional_bandwidth, overlap_of, speed_of, token_counts
    from kvroute.loadtests.plan.chunks import ChunksPlan, plan_chunks
    from kvroute.policies.costs.chunking import Store
    from kvroute.policies.costs.links import Link
    from kvroute.policies.costs.units import parse_bytes, parse_seconds

    def plan() -> tuple[Report, Plot]:
        speed = speed_of(preset, bytes_per_token)
        name, way = link_of(link, bandwidth, latency)
        copied = optional_bandwidth("--host-bandwidth", host_bandwidth)
        store = Store(
            way,
            speed.kv_bytes_per_token,
            object_s=parse_seconds(object_time, "--object-time", zero_ok=True),
            metadata_bytes=parse_bytes(metadata, "--metadata", zero_ok=True),
            after=() if copied is None else (Link(copied),),
            overlap=overlap_of(overlap),
        )
        counts = token_counts("--sizes", sizes)
        return plan_chunks(ChunksPlan(_trace(trace, seed), preset, speed, name, store, counts, page))

    present(plan, as_json, plot)


@app.command()
def pd(
    preset: Preset = DEFAULT_PRESET,
    prompt: Annotated[int, typer.Option(help="Prompt tokens.")] = 8192,
    output: Annotated[int, typer.Option(help="Output tokens.")] = 300,
    rate: Annotated[float, typer.Option(help="Requests a second of the whole fleet.")] = 8.0,
    workers: Annotated[int, typer.Option(help="Workers of the fleet.")] = 8,
    prefill_workers: Annotated[
        int | None, typer.Option(help="Of them, if split [default: the best number].")
    ] = None,
    link: LinkName = "ib-400g",
    bandwidth: Bandwidth = None,
    latency: Latency = None,
    pieces: Annotated[
        int, typer.Option(help="Parts (layers) of the KV sent as computed; 1 sends after the prefill.")
    ] = 1,
    chunk: Annotated[int, typer.Option(help="Most prefill tokens in a step.")] = 8192,
    itl: Annotated[str | None, typer.Option(help="Limit on the mean ITL, such as 25ms.")] = None,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """Prefill and decode on different workers: when it pays, over lengths, load and bandwidth."""
    from kvroute.loadtests.plan.choices import link_of, speed_of
    from kvroute.loadtests.plan.pd import PdPlan, pd_setting, plan_pd, usual_links
    from kvroute.policies.costs.units import parse_seconds

    def plan() -> tuple[Report, Plot]:
        name, way = link_of(link, bandwidth, latency)
        setting = pd_setting(
            speed_of(preset),
            way,
            prompt_tokens=prompt,
            output_tokens=output,
            rate_per_s=rate,
            workers=workers,
            prefill_workers=prefill_workers,
            pieces=pieces,
            chunk_tokens=chunk,
            itl_limit_s=parse_seconds(itl, "--itl") if itl is not None else None,
        )
        return plan_pd(PdPlan(preset, setting, name, usual_links(), fixed=prefill_workers is not None))

    present(plan, as_json, plot)


@app.command()
def queue(
    rate: Annotated[float, typer.Option(help="Requests a second.")] = 10.0,
    stay: Annotated[str, typer.Option(help="Mean time from entry to exit, such as 2s.")] = "2s",
    service: Annotated[
        str | None, typer.Option(help="Mean time of it that a server is taken [default: unknown].")
    ] = None,
    servers: Annotated[int, typer.Option(help="Servers that share the arrivals.")] = 1,
    buffer: Annotated[str, typer.Option(help="Buffer of each request in flight.")] = "1GiB",
    cv2: Annotated[
        float, typer.Option(help="Variance of the service time over its squared mean: 0 constant.")
    ] = 1.0,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """Requests in flight and their buffers, by Little's law. Exit status 1 if there is no steady state."""
    from kvroute.loadtests.plan.queue import QueuePlan, plan_queue
    from kvroute.policies.costs.units import parse_bytes, parse_seconds

    def plan() -> tuple[Report, Plot]:
        return plan_queue(
            QueuePlan(
                rate_per_s=rate,
                stay_s=parse_seconds(stay, "--stay"),
                service_s=None if service is None else parse_seconds(service, "--service"),
                servers=servers,
                bytes_each=parse_bytes(buffer, "--buffer"),
                service_cv2=cv2,
            )
        )

    if present(plan, as_json, plot).data["stable"] is False:
        raise typer.Exit(1)


@app.command()
def value(
    preset: Preset = DEFAULT_PRESET,
    bytes_per_token: BytesPerToken = None,
    trace: TraceFile = None,
    seed: Seed = 0,
    capacity: Annotated[str, typer.Option(help="Of the cache, such as 40GiB.")] = "40GiB",
    link: LinkName = "dram",
    bandwidth: Bandwidth = None,
    write_bandwidth: Annotated[
        str | None, typer.Option(help="Into the cache [default: as for reads].")
    ] = None,
    top: Annotated[int, typer.Option(help="Prefixes to show.")] = 15,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """Value per byte of a trace's prefixes, and how much of it a capacity holds."""
    from kvroute.loadtests.plan.choices import link_of, optional_bandwidth, speed_of
    from kvroute.loadtests.plan.value import ValuePlan, plan_value
    from kvroute.policies.costs.units import parse_bytes

    def plan() -> tuple[Report, Plot]:
        name, way = link_of(link, bandwidth, None)
        written = optional_bandwidth("--write-bandwidth", write_bandwidth)
        return plan_value(
            ValuePlan(
                trace=_trace(trace, seed),
                preset=preset,
                speed=speed_of(preset, bytes_per_token),
                capacity_bytes=parse_bytes(capacity, "--capacity"),
                link_name=name,
                read_bytes_per_s=way.bytes_per_s,
                write_bytes_per_s=way.bytes_per_s if written is None else written,
                top=top,
            )
        )

    present(plan, as_json, plot)


def _trace(path: Path | None, seed: int) -> Trace:
    from kvroute.loadtests.traces.reading import read_trace
    from kvroute.loadtests.traces.sample import generated

    return generated(seed) if path is None else read_trace(path)
