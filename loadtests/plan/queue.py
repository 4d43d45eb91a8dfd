"""`kvroute plan queue`: what is in flight, and the buffers it needs, by Little's law."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvroute.loadtests.plan.choices import rate_of, whole_number
from kvroute.loadtests.plan.show import Plot, Report, Series
from kvroute.policies.costs.queueing import Overload, in_flight, mg1_wait_s, steady_utilisation, utilisation
from kvroute.policies.costs.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class QueuePlan:
    """`stay_s` from entry to exit, `service_s` of it with a server; None: whether it is stable is unknown."""

    rate_per_s: float
    stay_s: float
    service_s: float | None = None
    servers: int = 1
    bytes_each: int = 2**30
    service_cv2: float = 1.0

    def __post_init__(self) -> None:
        rate_of("--rate", self.rate_per_s)
        whole_number("--servers", self.servers)
        if self.service_s is not None and self.service_s > self.stay_s:
            raise ValueError(
                f"--service: {format_seconds(self.service_s)} is longer than the stay of "
                f"{format_seconds(self.stay_s)} that it is part of"
            )
        if not 0 <= self.service_cv2 <= 1e6:
            raise ValueError(f"--cv2: {self.service_cv2:g} is not usable; 0 (constant) or more is expected")


def plan_queue(plan: QueuePlan) -> tuple[Report, Plot]:
    """`stable` in the data is the verdict: if false, no figure of a steady state is given."""
    data: dict[str, Any] = {
        "rate_per_s": plan.rate_per_s,
        "stay_s": plan.stay_s,
        "service_s": plan.service_s,
        "servers": plan.servers,
        "bytes_each": plan.bytes_each,
        "stable": None,
        "verdict": "unknown: Little's law holds if the queue is stable; --service and --servers tell",
        **dict.fromkeys(("utilisation", "saturation_rate_per_s", "in_flight", "buffer_bytes", "mg1_wait_s")),
    }
    try:
        data |= _service(plan)
    except Overload as overload:
        data |= {"stable": False, "verdict": str(overload)}
    else:
        data["in_flight"] = in_flight(plan.rate_per_s, plan.stay_s)
        data["buffer_bytes"] = data["in_flight"] * plan.bytes_each
    if plan.service_s is not None:
        data["utilisation"] = utilisation(plan.rate_per_s, plan.service_s, plan.servers)
        data["saturation_rate_per_s"] = plan.servers / plan.service_s
    return _report(plan, data), _plot(plan)


def _service(plan: QueuePlan) -> dict[str, Any]:
    """What a known service time tells. Overload if there is no steady state."""
    if plan.service_s is None:
        return {}
    steady_utilisation(plan.rate_per_s, plan.service_s, plan.servers)
    wait_s = mg1_wait_s(plan.rate_per_s / plan.servers, plan.service_s, plan.service_cv2)
    return {"stable": True, "verdict": "stable: utilisation is below 1", "mg1_wait_s": wait_s}


def _report(plan: QueuePlan, data: dict[str, Any]) -> Report:
    rows = [("arrivals", f"{plan.rate_per_s:g} /s"), ("stay", format_seconds(plan.stay_s))]
    if plan.service_s is not None:
        servers = f"{plan.servers} x {format_seconds(plan.service_s)}"
        rows += [
            ("utilisation", f"{data['utilisation']:.2f} of {servers}"),
            ("saturation", f"{data['saturation_rate_per_s']:.4g} /s"),
        ]
    notes = [data["verdict"]]
    if data["in_flight"] is not None:
        rows += [
            ("in flight", f"{data['in_flight']:.4g}"),
            ("buffers", f"{format_bytes(data['buffer_bytes'])} at {format_bytes(plan.bytes_each)} each"),
        ]
        notes.append(
            "In flight is Little's law, rate x stay: the mean of a steady state, not a 99th percentile. "
            "Peaks need room above it."
        )
    if data["mg1_wait_s"] is not None:
        rows.append(("mean wait (M/G/1 estimate)", format_seconds(data["mg1_wait_s"])))
        notes.append(
            "The wait is an estimate (Pollaczek-Khinchine): Poisson arrivals, a queue for each server, "
            f"squared coefficient of variation of service {plan.service_cv2:g}. Bursts wait longer."
        )
    return Report("Little's law", ("", "mean"), tuple(rows), data, tuple(notes))


def _plot(plan: QueuePlan) -> Plot:
    """In flight over the rate, up to saturation, where there is no such number."""
    marks = [(plan.rate_per_s, f"given: {plan.rate_per_s:g} /s")]
    full = 2 * plan.rate_per_s if plan.service_s is None else plan.servers / plan.service_s
    rates = [full * step / 200 for step in range(1, 198)]
    series = [
        Series("rate x stay as given (Little)", rates, [in_flight(rate, plan.stay_s) for rate in rates])
    ]
    if plan.service_s is not None:
        marks.append((full, f"saturation: {full:.4g} /s"))
        service_s = plan.service_s
        held = [
            in_flight(rate, service_s + mg1_wait_s(rate / plan.servers, service_s, plan.service_cv2))
            for rate in rates
        ]
        series.append(Series("rate x (service + M/G/1 estimate of the wait)", rates, held))
    return Plot(
        "Requests in flight over the arrival rate",
        "arrivals (requests/s)",
        "in flight (requests)",
        tuple(series),
        log_y=True,
        marks=tuple(marks),
    )
