"""What is in flight, and what is not said of a queue that grows."""

from __future__ import annotations

import pytest

from kvroute.loadtests.plan.queue import QueuePlan, plan_queue


def test_in_flight_and_buffers() -> None:
    report, plot = plan_queue(QueuePlan(10, 2.0, service_s=0.3, servers=4, bytes_each=2**30))
    data = report.data
    assert data["stable"] is True
    assert data["utilisation"] == pytest.approx(0.75)
    assert data["in_flight"] == 20
    assert data["buffer_bytes"] == 20 * 2**30
    assert data["saturation_rate_per_s"] == pytest.approx(13.333, abs=1e-3)
    # M/M/1 at three quarters: 0.75 / 0.25 x 300 ms.
    assert data["mg1_wait_s"] == pytest.approx(0.9)
    assert ("mean wait (M/G/1 estimate)", "900 ms") in report.rows
    assert [x for x, _ in plot.marks] == [10, pytest.approx(13.333, abs=1e-3)]


@pytest.mark.parametrize("rate", [10.0, 12.5])
def test_no_figure_of_a_steady_state_without_one(rate: float) -> None:
    report, plot = plan_queue(QueuePlan(rate, 2.0, service_s=0.4, servers=4))
    assert report.data["stable"] is False
    assert report.data["utilisation"] == pytest.approx(rate / 10)
    assert all(report.data[name] is None for name in ("in_flight", "buffer_bytes", "mg1_wait_s"))
    assert not any(row[0] in ("in flight", "buffers") for row in report.rows)
    assert report.notes[0].startswith(f"utilisation {rate / 10:.2f} is not below 1")
    assert all(x < 10 for line in plot.series for x in line.xs)


def test_without_a_service_time_stability_is_not_claimed() -> None:
    report, _ = plan_queue(QueuePlan(10, 2.0))
    assert report.data["stable"] is None
    assert report.data["in_flight"] == 20
    assert report.notes[0].startswith("unknown: Little's law holds if the queue is stable")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate_per_s": 0.0}, "--rate: 0 is not usable"),
        ({"rate_per_s": -1.0}, "--rate: -1 is not usable"),
        ({"servers": 0}, "--servers: 0"),
        ({"service_s": 3.0}, "--service: 3 s is longer than the stay of 2 s"),
        ({"service_cv2": -0.1}, r"--cv2: -0\.1"),
    ],
)
def test_bad_options_are_named(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QueuePlan(**{"rate_per_s": 1.0, "stay_s": 2.0, **change})  # type: ignore[arg-type]
