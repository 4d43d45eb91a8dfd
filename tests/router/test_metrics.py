from __future__ import annotations

import math

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from kvroute.router.metrics import LATENCY_BOUNDS_S, Metrics, gauge
from tests.kit import CHAT, Engine, ask
from tests.router.edge import edge


def _scrape(metrics: Metrics) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}


def _value(families: dict[str, Metric], name: str, sample: str, **labels: str) -> float | None:
    found = (each for each in families[name].samples if each.name == sample and each.labels == labels)
    return next((each.value for each in found), None)


def test_counters_and_their_labels() -> None:
    metrics = Metrics()
    metrics.requests.add("/r", "m", "200")
    metrics.requests.add("/r", "m", "200", by=2)
    metrics.requests.add("/r", 'odd "name"\n\\', "404")
    families = _scrape(metrics)
    labels = {"route": "/r", "model": "m", "status": "200"}
    assert _value(families, "kvroute_requests", "kvroute_requests_total", **labels) == 3
    odd = {"route": "/r", "model": 'odd "name"\n\\', "status": "404"}
    assert _value(families, "kvroute_requests", "kvroute_requests_total", **odd) == 1
    assert families["kvroute_requests"].type == "counter"


def test_histograms_are_cumulative_and_agree_with_their_count_and_sum() -> None:
    metrics = Metrics()
    values = [0.0, 0.001, 0.0011, 0.3, 5.0, 10_000.0]
    for value in values:
        metrics.ttft.of("m").observe(value)
    samples = _scrape(metrics)["kvroute_ttft_seconds"].samples
    buckets = {float(s.labels["le"]): s.value for s in samples if s.name.endswith("_bucket")}
    assert list(buckets) == [*LATENCY_BOUNDS_S, math.inf]
    for bound, count in buckets.items():
        assert count == sum(value <= bound for value in values), bound
    others = {s.name: s.value for s in samples if not s.name.endswith("_bucket")}
    assert others["kvroute_ttft_seconds_count"] == buckets[math.inf] == 6
    assert math.isclose(others["kvroute_ttft_seconds_sum"], sum(values))


def test_gauges_are_asked_for_at_each_scrape() -> None:
    class Source:
        value = 1.0

        def gauges(self) -> list[Metric]:
            return [gauge("kvroute_thing", "A thing.", ("kind",), [(("a",), self.value)])]

    metrics, source = Metrics(), Source()
    metrics.add_source(source)
    for value in (1.0, 2.0):
        source.value = value
        assert _value(_scrape(metrics), "kvroute_thing", "kvroute_thing", kind="a") == value


def test_the_series_of_a_worker_that_left_are_dropped() -> None:
    metrics = Metrics()
    for url in ("http://a:1", "http://b:1"):
        metrics.worker_requests.add(url)
        metrics.upstream_errors.add(url, "upstream_reset")
        metrics.in_band_errors.add(url)
    metrics.forget_worker("http://a:1")
    assert "http://a:1" not in metrics.render().decode()
    assert metrics.worker_requests.value("http://b:1") == 1


async def test_what_a_gateway_says_of_itself_parses_and_adds_up() -> None:
    async with Engine() as engine, edge(engine) as server:
        for _ in range(3):
            await ask(server.url, CHAT, {"model": "m"})
        await ask(server.url, CHAT, {"model": "invented"})
        await ask(server.url, "/invented/path", b"{}")
        await ask(server.url, CHAT, b"[")
        answer = await ask(server.url, "/metrics", method="GET")
    assert (answer.header("content-type") or "").startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(answer.body.decode())}
    assert all(family.type != "unknown" for family in families.values())
    names = ("route", "model", "status")
    rows = {tuple(s.labels[n] for n in names): s.value for s in families["kvroute_requests"].samples}
    assert rows == {
        (CHAT, "m", "200"): 3,
        (CHAT, "other", "404"): 1,
        ("other", "none", "200"): 1,
        (CHAT, "none", "400"): 1,
    }
    sent = _value(families, "kvroute_worker_requests", "kvroute_worker_requests_total", worker=engine.url)
    assert sent == len(engine.received) == 4
    assert _value(families, "kvroute_e2e_seconds", "kvroute_e2e_seconds_count", model="m") == 3
    assert _value(families, "kvroute_requests_in_flight", "kvroute_requests_in_flight") == 0
    assert _value(families, "kvroute_workers", "kvroute_workers", state="ready") == 1
