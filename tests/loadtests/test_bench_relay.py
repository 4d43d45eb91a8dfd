from __future__ import annotations

import socket

import pytest

from kvroute.loadtests import bench_relay
from kvroute.loadtests.bench_relay import RelayBench, run_bench_relay, show_bench_relay


@pytest.mark.parametrize(("rate_per_s", "said"), [(500.0, "500 requests/s"), (0.0, "as fast as they go")])
def test_whole_and_split_requests_are_measured_side_by_side(rate_per_s: float, said: str) -> None:
    bench = RelayBench(body_bytes=(300,), requests=20, rounds=2, rate_per_s=rate_per_s)
    result = run_bench_relay(bench)
    assert [row["streams"] for row in result["rows"]] == [False, True]
    assert all(row["body_bytes"] > 300 for row in result["rows"])
    for row in result["rows"]:
        for way in ("whole", "split"):
            assert 0 < row[f"{way}_min_us"] <= row[f"{way}_us"] <= row[f"{way}_max_us"]
        assert row["ratio"] > 0
    assert show_bench_relay(result).startswith(f"round_robin, nixl, {said}; CPU us of the gateway")


def test_a_port_that_others_took_meanwhile_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken, free = other.getsockname()[1], bench_relay._free_port()
        ports = iter((taken, free))
        monkeypatch.setattr(bench_relay, "_free_port", lambda: next(ports))
        with bench_relay._gateway(RelayBench(), "whole") as (port, _pid):
            assert port == free


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"requests": 0}, "requests: 0 is not above 0"),
        ({"rounds": 0}, "rounds: 0 is not above 0"),
        ({"rate_per_s": -1.0}, "rate: -1; from 0 to 100000 per second is expected"),
        ({"rate_per_s": float("nan")}, "rate: nan; from 0 to 100000 per second is expected"),
        ({"body_bytes": (10,)}, "bytes: bodies of 200 bytes or more are expected"),
        ({"body_bytes": ()}, "bytes: bodies of 200 bytes or more are expected"),
    ],
)
def test_what_cannot_be_measured_is_said(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RelayBench(**fields)  # type: ignore[arg-type]
