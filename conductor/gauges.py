"""What a conductor process shows of itself to Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvroute.conductor.core import Conductor, Engine
from kvroute.conductor.lookups import LookupServer
from kvroute.types import Trust

PREFIX = "kvroute_conductor_"


class ConductorGauges:
    """A collector: reads everything when it is scraped. Workers are labelled by service key or URL."""

    def __init__(self, conductor: Conductor, lookups: LookupServer, snapshots: Counter[str]) -> None:
        self._conductor = conductor
        self._lookups = lookups
        self._snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        yield from self._index()
        yield from self._workers()
        yield from self._traffic()

    def _index(self) -> Iterator[Metric]:
        conductor, index = self._conductor, self._conductor.index
        yield _gauge("index_blocks", "Distinct confirmed blocks.", index.blocks.blocks)
        yield _gauge("index_entries", "Holder, tier and block triples, and predictions.", index.entries)
        yield _gauge("index_bytes", "Memory of the index.", index.bytes_used)
        yield _counter(
            "index_evicted_blocks",
            "Blocks dropped for room.",
            "kind",
            {"confirmed": index.evicted_confirmed, "predicted": index.evicted_predicted},
        )
        yield _gauge("services", "Publishers registered over HTTP.", len(conductor.registrations))
        yield _gauge("followed_engines", "Engines that gateways follow.", len(conductor.instances))
        yield _gauge("restoring_engines", "Engines whose snapshot is not loaded yet.", conductor.restoring)
        yield _counter("snapshots", "Snapshots and their sections, by result.", "result", self._snapshots)

    def _workers(self) -> Iterator[Metric]:
        trusts = dict.fromkeys(map(str, Trust), 0)
        lag = GaugeMetricFamily(
            PREFIX + "event_lag_seconds", "Age of the last batch when applied.", labels=["worker", "dp_rank"]
        )
        seq = GaugeMetricFamily(
            PREFIX + "event_last_seq", "Last batch applied.", labels=["worker", "dp_rank"]
        )
        news: Counter[str] = Counter()
        for worker, worker_id in self._conductor.members():
            trusts[self._conductor.trust(worker_id)] += 1
            health = self._conductor.feed.health(worker_id)
            name = worker.url if isinstance(worker, Engine) else worker.key
            for rank in () if health is None else health.holders:
                seq.add_metric((name, str(rank.dp_rank)), rank.last_seq)
                if rank.lag_s is not None:
                    lag.add_metric((name, str(rank.dp_rank)), rank.lag_s)
                news.update(rank.counters)
        yield _labelled("workers", "Engines by how far their index is believed.", "trust", trusts)
        yield _counter("events", "What became of the engines' events, of engines followed now.", "kind", news)
        yield lag
        yield seq

    def _traffic(self) -> Iterator[Metric]:
        counts, lookups = self._conductor.counts, self._lookups
        asked = {
            "match": counts.matches,
            "predict": counts.predictions,
            "observe": counts.observations,
            "unknown_worker": counts.unknown_workers,
        }
        yield _counter("requests", "Requests of gateways, by kind.", "kind", asked)
        yield _counter("skipped_services", "Services left out of an answer.", "reason", counts.skipped)
        yield _gauge("lookup_connections", "Gateways connected.", len(lookups.connections))
        yield _gauge("lookup_buffered_bytes", "Unfinished frames.", lookups.buffered_bytes)
        yield _counter("lookup_closed", "Connections ended by the conductor.", "reason", lookups.closed)
        frames = CounterMetricFamily(PREFIX + "lookup_frames", "Frames read; each has a batch of requests.")
        frames.add_metric((), lookups.frames)
        yield frames


def _gauge(name: str, text: str, value: float) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text)
    family.add_metric((), value)
    return family


def _labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=[label])
    for value, count in values.items():
        family.add_metric((value,), count)
    return family


def _counter(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for value, count in values.items():
        family.add_metric((value,), count)
    return family
