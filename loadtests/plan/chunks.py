"""`kvroute plan chunks`: chunk sizes of a KV store, swept over a trace."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvroute.loadtests.plan.choices import show_bandwidth
from kvroute.loadtests.plan.show import Plot, Report, Series
from kvroute.loadtests.traces.rows import Trace
from kvroute.policies.costs.chunking import ChunkFigures, Store, check_chunk, chunk_figures, shared_tokens
from kvroute.policies.costs.speeds import Speed
from kvroute.policies.costs.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class ChunksPlan:
    trace: Trace
    preset: str
    speed: Speed
    link_name: str
    store: Store
    chunks: tuple[int, ...]
    page_tokens: int = 16

    def __post_init__(self) -> None:
        for chunk in self.chunks:
            check_chunk(chunk, self.page_tokens)


def plan_chunks(plan: ChunksPlan) -> tuple[Report, Plot]:
    prompts = plan.trace.prompts
    swept = [
        chunk_figures(prompts, plan.trace.block_tokens, chunk, plan.store, plan.speed)
        for chunk in sorted(plan.chunks)
    ]
    shared = shared_tokens(prompts, plan.trace.block_tokens)
    cold_s = sum(plan.speed.prefill_s(tokens) for tokens, _ in prompts) / len(prompts)
    best = min(swept, key=lambda figures: figures.ttft_mean_s)
    data = {
        "trace": plan.trace.name,
        "trace_block_tokens": plan.trace.block_tokens,
        "prompts": len(prompts),
        "input_tokens": swept[0].input_tokens,
        "shared_tokens": shared,
        "preset": plan.preset,
        "page_tokens": plan.page_tokens,
        "link": plan.link_name,
        "ttft_mean_without_store_s": cold_s,
        "best_chunk_tokens": best.chunk_tokens,
        "chunks": [_figures(figures, shared) for figures in swept],
    }
    return _report(plan, swept, data), _plot(plan, swept, cold_s, best)


def _figures(figures: ChunkFigures, shared: int) -> dict[str, Any]:
    data = asdict(figures)
    for name in ("prompts", "input_tokens"):
        del data[name]
    data["boundary_tokens"] = shared - figures.usable_tokens
    data["usable_share"] = figures.usable_tokens / figures.input_tokens
    data["tail_tokens_mean"] = figures.tail_tokens / figures.prompts
    return data


def _report(plan: ChunksPlan, swept: list[ChunkFigures], data: dict[str, Any]) -> Report:
    columns = (
        "chunk",
        "objects",
        "metadata",
        "hashes",
        "RPCs",
        "usable",
        "lost at ends",
        "tail/prompt",
        "load",
        "TTFT mean",
        "TTFT p99",
    )
    rows = tuple(
        (
            f"{each.chunk_tokens}",
            f"{each.objects}",
            format_bytes(each.metadata_bytes),
            f"{each.hashes}",
            f"{each.rpcs}",
            f"{each.usable_tokens / each.input_tokens:.1%}",
            f"{(data['shared_tokens'] - each.usable_tokens) / each.input_tokens:.1%}",
            f"{each.tail_tokens / each.prompts:.0f}",
            format_seconds(each.load_mean_s),
            format_seconds(each.ttft_mean_s),
            format_seconds(each.ttft_p99_s),
        )
        for each in swept
    )
    title = (
        f"Chunk sizes (tokens) over {data['prompts']} prompts of {plan.trace.name}: {plan.preset}, "
        f"{plan.link_name} {show_bandwidth(plan.store.link.bytes_per_s)}"
    )
    return Report(title, columns, rows, data, _notes(plan, swept, data))


def _notes(plan: ChunksPlan, swept: list[ChunkFigures], data: dict[str, Any]) -> tuple[str, ...]:
    notes = [
        f"TTFT is load and prefill alone, least at {data['best_chunk_tokens']} tokens; without a store it is "
        f"{format_seconds(data['ttft_mean_without_store_s'])}. It is of this trace, model and link.",
        f"An endless store: {format_bytes(swept[0].stored_bytes)} in the end. Every object costs "
        f"{format_seconds(plan.store.object_s)} of a load and {plan.store.metadata_bytes} bytes of metadata.",
        "usable: prefix tokens found, of all; lost at ends: shared, but not in a whole chunk; load: of "
        "prefixes sooner fetched than computed. RPCs: one for each prompt's lookup and each chunk read or "
        "written.",
    ]
    finer = [each.chunk_tokens for each in swept if each.chunk_tokens < plan.trace.block_tokens]
    if finer:
        notes.append(
            f"The trace tells prefixes apart every {plan.trace.block_tokens} tokens: for smaller chunks, "
            "usable is a lower bound."
        )
    return tuple(notes)


def _plot(plan: ChunksPlan, swept: list[ChunkFigures], cold_s: float, best: ChunkFigures) -> Plot:
    sizes = [float(each.chunk_tokens) for each in swept]
    return Plot(
        f"Chunk sizes over {plan.trace.name}: {plan.preset}, {plan.link_name}",
        "chunk (tokens)",
        "mean time (ms)",
        (
            Series("TTFT, load and prefill", sizes, [each.ttft_mean_s * 1e3 for each in swept]),
            Series("load, of prompts that fetch", sizes, [each.load_mean_s * 1e3 for each in swept]),
            Series("TTFT without a store", sizes, [cold_s * 1e3] * len(sizes)),
        ),
        log_x=True,
        marks=((best.chunk_tokens, f"least TTFT: {best.chunk_tokens}"),),
    )
