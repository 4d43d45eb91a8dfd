"""What is counted of split requests."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric

from kvroute.router.metrics import LATENCY_BOUNDS_S, RATIO_BOUNDS, Counter, Histogram


class PdMetrics:
    """A source of metrics; labels are fixed words, and reasons of policies, which are few."""

    def __init__(self) -> None:
        self.requests = Counter(
            "kvroute_pd_requests",
            "Requests of fleets that split, and why they are not.",
            ("way", "reason"),
        )
        self.phases = Histogram(
            "kvroute_pd_phase_seconds",
            "Time of a split request in prefill, handoff (to the first byte) and decode.",
            LATENCY_BOUNDS_S,
            ("phase",),
        )
        self.handoff_error = Histogram(
            "kvroute_pd_handoff_actual_to_predicted",
            "Prefill's answer to first byte of the decode worker, over what was predicted of it.",
            RATIO_BOUNDS,
        )
        self.kv_bytes = Counter("kvroute_pd_kv_bytes", "KV handed over, as far as its size is known.")
        self.retries = Counter("kvroute_pd_retries", "Legs begun again, by leg and cause.", ("leg", "reason"))
        self.failures = Counter("kvroute_pd_leg_failures", "Legs that failed.", ("leg", "reason"))
        self.expired = Counter(
            "kvroute_pd_expired_leases",
            "Handoffs not sent, streams not waited for, answers not used: KV too old.",
            ("at",),
        )
        self.releases = Counter(
            "kvroute_pd_releases", "KV that nobody fetched, and what came of telling its worker.", ("result",)
        )
        self.resets = Counter(
            "kvroute_pd_cache_resets",
            "Tries to reset a prefix cache that may hold wrong KV, by what came of them.",
            ("result",),
        )
        self.client_fields = Counter(
            "kvroute_pd_client_fields",
            "Clients' own transfer fields, by what was done.",
            ("field", "done"),
        )

    def gauges(self) -> Iterable[Metric]:
        for each in (
            self.requests,
            self.kv_bytes,
            self.retries,
            self.failures,
            self.expired,
            self.releases,
            self.resets,
            self.client_fields,
            self.phases,
            self.handoff_error,
        ):
            yield each.family()
