"""`kvroute plan breakeven`: fetch a cached prefix or compute it again, by length, bandwidth and tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvroute.loadtests.plan.choices import MAX_TOKENS, finite, show_bandwidth, whole_number
from kvroute.loadtests.plan.show import Plot, Report, Series
from kvroute.policies.costs.breakeven import (
    Reuse,
    breakeven_bandwidth,
    breakeven_tokens,
    prefill_saved_s,
)
from kvroute.policies.costs.links import LINKS, Link, Overlap, path_s
from kvroute.policies.costs.speeds import Speed
from kvroute.policies.costs.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class BreakevenPlan:
    """`host_bytes_per_s` adds the copy from CPU to GPU after the link, in chunks of `chunk_tokens`."""

    preset: str
    speed: Speed
    links: Mapping[str, Link]
    lengths: tuple[int, ...] = (512, 4096, 32_768, 131_072)
    suffix_tokens: int = 512
    lookup_s: float = 0.0
    queue_cold_s: float = 0.0
    queue_reuse_s: float = 0.0
    host_bytes_per_s: float | None = None
    chunk_tokens: int = 256
    overlap: Overlap = Overlap.PIPELINED

    def __post_init__(self) -> None:
        whole_number("--suffix", self.suffix_tokens)
        whole_number("--chunk", self.chunk_tokens)

    def load_s(self, link: Link, tokens: int) -> float:
        """Critical seconds of a load. The link's latency is once; then chunks stream through both stages."""
        payload_bytes = tokens * self.speed.kv_bytes_per_token
        if self.host_bytes_per_s is None:
            return link.transfer_s(payload_bytes)
        stages = (Link(link.bytes_per_s), Link(self.host_bytes_per_s))
        chunks = max(1.0, tokens / self.chunk_tokens)
        return link.latency_s + path_s(stages, payload_bytes, overlap=self.overlap, chunks=chunks)

    def reuse(self, link: Link, tokens: int) -> Reuse:
        return Reuse(
            prefill_full_s=self.speed.prefill_s(tokens + self.suffix_tokens),
            prefill_suffix_s=self.speed.prefill_s(self.suffix_tokens, tokens),
            load_critical_s=self.load_s(link, tokens),
            lookup_s=self.lookup_s,
            queue_cold_s=self.queue_cold_s,
            queue_reuse_s=self.queue_reuse_s,
        )

    @property
    def extra_s(self) -> float:
        """Of fetching, beside the load."""
        return self.lookup_s + self.queue_reuse_s - self.queue_cold_s


def usual_links() -> dict[str, Link]:
    """All tiers and networks that are read from."""
    return {name: link for name, link in LINKS.items() if name != "nvme-write"}


def plan_breakeven(plan: BreakevenPlan) -> tuple[Report, Plot]:
    links = [_link(plan, name, link) for name, link in plan.links.items()]
    data = {
        "preset": plan.preset,
        "bytes_per_token": plan.speed.kv_bytes_per_token,
        "suffix_tokens": plan.suffix_tokens,
        "overlap": plan.overlap.value,
        "lookup_ms": plan.lookup_s * 1e3,
        "queue_cold_ms": plan.queue_cold_s * 1e3,
        "queue_reuse_ms": plan.queue_reuse_s * 1e3,
        "links": links,
    }
    return _report(plan, data), _plot(plan, links)


def _link(plan: BreakevenPlan, name: str, link: Link) -> dict[str, Any]:
    crossing = _crossing(plan, link)
    return {
        "link": name,
        "bytes_per_s": link.bytes_per_s,
        "latency_ms": link.latency_s * 1e3,
        "breakeven_tokens": crossing,
        "lengths": [_length(plan, link, tokens) for tokens in plan.lengths],
    }


def _crossing(plan: BreakevenPlan, link: Link) -> int | None:
    """The shortest prefix worth fetching, of up to MAX_TOKENS."""
    return breakeven_tokens(
        plan.speed,
        lambda tokens: plan.load_s(link, tokens),
        suffix_tokens=plan.suffix_tokens,
        most_tokens=MAX_TOKENS,
        extra_s=plan.extra_s,
    )


def _length(plan: BreakevenPlan, link: Link, tokens: int) -> dict[str, Any]:
    way = plan.reuse(link, tokens)
    payload_bytes = tokens * plan.speed.kv_bytes_per_token
    fixed_s = link.latency_s + plan.extra_s
    saved_s = prefill_saved_s(plan.speed, tokens, plan.suffix_tokens)
    bandwidth = None
    if plan.host_bytes_per_s is None:
        bandwidth = finite(breakeven_bandwidth(payload_bytes, saved_s, fixed_s))
    return {
        "prefix_tokens": tokens,
        "payload_bytes": payload_bytes,
        "prefill_saved_ms": saved_s * 1e3,
        "load_ms": way.load_critical_s * 1e3,
        "cold_ms": way.cold_s * 1e3,
        "reuse_ms": way.reuse_s * 1e3,
        "fetch": way.worth_it,
        "breakeven_bytes_per_s": bandwidth,
    }


def _report(plan: BreakevenPlan, data: dict[str, Any]) -> Report:
    columns = ("link", "payload", "set-up", "pays from", *map(str, plan.lengths))
    saved = [prefill_saved_s(plan.speed, tokens, plan.suffix_tokens) for tokens in plan.lengths]
    rows = [("recompute", "", "", "", *map(format_seconds, saved))]
    for link in data["links"]:
        loads = [
            format_seconds(each["load_ms"] / 1e3)
            if each["fetch"]
            else f"({format_seconds(each['load_ms'] / 1e3)})"
            for each in link["lengths"]
        ]
        rows.append(
            (
                link["link"],
                show_bandwidth(link["bytes_per_s"]),
                format_seconds(link["latency_ms"] / 1e3),
                str(link["breakeven_tokens"] or f"over {MAX_TOKENS}"),
                *loads,
            )
        )
    size = format_bytes(plan.speed.kv_bytes_per_token)
    title = f"Fetch or recompute a prefix: {plan.preset}, {size} per token"
    return Report(title, columns, tuple(rows), data, _notes(plan))


def _notes(plan: BreakevenPlan) -> tuple[str, ...]:
    notes = [
        "Columns are prefix lengths in tokens. recompute: prefill time that the prefix saves before "
        f"{plan.suffix_tokens} further tokens, which still attend to it. Others: its load; (in brackets) "
        "where computing again is sooner.",
    ]
    if plan.host_bytes_per_s is not None:
        notes.append(
            f"Loads go on to the GPU at {show_bandwidth(plan.host_bytes_per_s)}, {plan.overlap.value} in "
            f"chunks of {plan.chunk_tokens} tokens."
        )
    if plan.extra_s:
        notes.append(
            f"Fetching also costs {format_seconds(plan.extra_s)}: lookup and the difference of the queues."
        )
    return tuple(notes)


def _plot(plan: BreakevenPlan, links: list[dict[str, Any]]) -> Plot:
    """Milliseconds over prefix length; a mark where a link's line goes below the recomputation's."""
    longest = max(131_072, *plan.lengths)
    lengths = [2**power for power in range(4, longest.bit_length() + 1)]
    saved = [prefill_saved_s(plan.speed, tokens, plan.suffix_tokens) * 1e3 for tokens in lengths]
    series = [Series("recompute", lengths, saved)]
    for link, each in zip(plan.links.values(), links, strict=True):
        load = [(plan.load_s(link, tokens) + plan.extra_s) * 1e3 for tokens in lengths]
        pays = f"pays from {each['breakeven_tokens']}" if each["breakeven_tokens"] else "never pays"
        series.append(Series(f"fetch, {each['link']}: {pays}", lengths, load))
    # The legend has the numbers: beside the marks those of fast links would lie on each other.
    marks = tuple(
        (each["breakeven_tokens"], "")
        for each in links
        if each["breakeven_tokens"] and lengths[0] <= each["breakeven_tokens"] <= lengths[-1]
    )
    return Plot(
        f"Fetch or recompute a prefix, {plan.preset}",
        "prefix (tokens)",
        "time (ms)",
        tuple(series),
        log_x=True,
        log_y=True,
        marks=marks,
    )
