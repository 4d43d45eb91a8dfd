"""What `/metrics` says of the index, of each worker's KV events, and of a remote conductor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvroute.conductor.block_index import BlockIndex
from kvroute.conductor.events import WorkerHealth
from kvroute.conductor.hits import HitAccount
from kvroute.conductor.index import PrefixIndex
from kvroute.conductor.remote import RemoteConductor
from kvroute.router.metrics import gauge
from kvroute.types import Trust

if TYPE_CHECKING:
    from prometheus_client.core import Metric


def index_gauges(index: PrefixIndex) -> Iterator[Metric]:
    """Size and evictions of the embedded index."""
    yield gauge(
        "kvroute_index_blocks",
        "Prefix blocks the index knows, per holder and tier.",
        (),
        [((), index.entries)],
    )
    yield gauge("kvroute_index_bytes", "Memory of the index.", (), [((), index.bytes_used)])
    compiled = type(index.blocks) is not BlockIndex
    yield gauge("kvroute_index_compiled", "1 where it runs in C, 0 in Python.", (), [((), compiled)])
    evicted = CounterMetricFamily(
        "kvroute_index_evicted_blocks", "Blocks dropped for room.", labels=("kind",)
    )
    evicted.add_metric(("predicted",), index.evicted_predicted)
    evicted.add_metric(("confirmed",), index.evicted_confirmed)
    yield evicted


def feed_gauges(healths: Mapping[str, WorkerHealth]) -> Iterator[Metric]:
    """Per worker (its URL) and data-parallel rank: trust, lag, sequence, and what went wrong so far."""
    trust = GaugeMetricFamily(
        "kvroute_index_trust",
        "1 for how far a worker's index is believed now, else 0.",
        labels=("worker", "trust"),
    )
    reasons = GaugeMetricFamily(
        "kvroute_index_not_exact",
        "1 for each reason why a worker's index is not exact.",
        labels=("worker", "reason"),
    )
    compared = CounterMetricFamily(
        "kvroute_index_compared",
        "Answers whose cached tokens were compared with the index: equal to within a block, fewer or more.",
        labels=("worker", "reported"),
    )
    labels = ("worker", "dp_rank")
    seq = GaugeMetricFamily("kvroute_kv_events_last_seq", "Last batch applied.", labels=labels)
    lag = GaugeMetricFamily(
        "kvroute_kv_events_lag_seconds", "Age of the last batch when applied.", labels=labels
    )
    waiting = GaugeMetricFamily("kvroute_kv_events_waiting", "Batches that wait for a replay.", labels=labels)
    parked = GaugeMetricFamily(
        "kvroute_kv_events_parked", "Blocks that wait for their parent.", labels=labels
    )
    held = GaugeMetricFamily("kvroute_kv_events_held_blocks", "Blocks confirmed.", labels=labels)
    counted = CounterMetricFamily(
        "kvroute_kv_events", "KV events of a worker, and what went wrong with them.", labels=(*labels, "kind")
    )
    for url, health in healths.items():
        for level in Trust:
            trust.add_metric((url, level.value), health.trust is level)
        for reason in health.reasons:
            reasons.add_metric((url, reason), 1)
        wrong = health.overpredicted + health.underpredicted
        compared.add_metric((url, "equal"), health.observed - wrong)
        compared.add_metric((url, "fewer"), health.overpredicted)
        compared.add_metric((url, "more"), health.underpredicted)
        for holder in health.holders:
            at = (url, str(holder.dp_rank))
            seq.add_metric(at, holder.last_seq)
            if holder.lag_s is not None:
                lag.add_metric(at, holder.lag_s)
            waiting.add_metric(at, holder.waiting)
            parked.add_metric(at, holder.parked)
            held.add_metric(at, holder.held_blocks)
            for kind, count in holder.counters.items():
                counted.add_metric((*at, kind), count)
    yield from (trust, reasons, compared, seq, lag, waiting, parked, held, counted)


def hit_gauges(account: HitAccount) -> Iterator[Metric]:
    """What the caches saved, by model; rates over the last minute, all else since the start."""
    rates = GaugeMetricFamily(
        "kvroute_hit_ratio",
        "Share of requests, prompt tokens or KV bytes that caches served, over the last minute.",
        labels=("model", "of"),
    )
    skipped = CounterMetricFamily(
        "kvroute_prefill_tokens_skipped",
        "Prompt tokens not computed, by where the index knew them.",
        labels=("model", "tier"),
    )
    saved = CounterMetricFamily(
        "kvroute_prefill_gpu_seconds_saved", "Estimated from models.*.prefill.", labels=("model",)
    )
    requests = CounterMetricFamily(
        "kvroute_hit_requests", "Requests answered, and those that reused a prefix.", labels=("model", "of")
    )
    tokens = CounterMetricFamily(
        "kvroute_foretold_tokens",
        "Of requests compared: cached tokens predicted and reported, and how far apart they were.",
        labels=("model", "of"),
    )
    foretold = CounterMetricFamily(
        "kvroute_foretold_requests",
        "Of requests compared: foretold right, too much, too little.",
        labels=("model", "as"),
    )
    for model in account.models:
        report = account.report(model)
        total, window = report.total, report.window
        for what, rate in (
            ("requests", window.request_hit_rate),
            ("tokens", window.token_hit_rate),
            ("bytes", window.byte_hit_rate),
        ):
            if rate is not None:
                rates.add_metric((model, what), rate)
        for tier, count in (
            ("gpu", total.gpu_tokens),
            ("cpu", total.cpu_tokens),
            ("disk", total.disk_tokens),
            ("unconfirmed", total.unconfirmed_tokens),
        ):
            skipped.add_metric((model, tier), count)
        saved.add_metric((model,), total.saved_gpu_s)
        requests.add_metric((model, "all"), total.requests)
        requests.add_metric((model, "hit"), total.hit_requests)
        requests.add_metric((model, "unreported"), total.unreported_requests)
        tokens.add_metric((model, "usable"), total.usable_tokens)
        tokens.add_metric((model, "predicted"), total.predicted_tokens)
        tokens.add_metric((model, "reported"), total.reported_tokens)
        tokens.add_metric((model, "error"), total.absolute_error_tokens)
        right = total.compared_requests - total.over_predicted - total.under_predicted
        foretold.add_metric((model, "right"), right)
        foretold.add_metric((model, "too_much"), total.over_predicted)
        foretold.add_metric((model, "too_little"), total.under_predicted)
    yield from (rates, skipped, saved, requests, tokens, foretold)


def remote_gauges(remote: RemoteConductor) -> Iterator[Metric]:
    """How the remote conductor answers."""
    yield gauge("kvroute_conductor_connected", "1 while it can be asked.", (), [((), remote.connected)])
    lookups = CounterMetricFamily("kvroute_conductor_lookups", "Lookups begun.", labels=())
    lookups.add_metric((), remote.lookups)
    yield lookups
    fallbacks = CounterMetricFamily(
        "kvroute_conductor_fallbacks", "Lookups done without its answer, by why.", labels=("reason",)
    )
    for reason, count in remote.fallbacks.items():
        fallbacks.add_metric((reason.value,), count)
    yield fallbacks
    dropped = CounterMetricFamily(
        "kvroute_conductor_news_dropped", "News not sent, by why.", labels=("reason",)
    )
    for cause, count in remote.dropped.items():
        dropped.add_metric((str(cause),), count)
    yield dropped
    yield gauge(
        "kvroute_conductor_follow_errors",
        "Workers it does not follow.",
        (),
        [((), len(remote.follow_errors))],
    )
