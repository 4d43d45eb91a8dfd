from __future__ import annotations

import pytest

from kvroute.loadtests.bench_relay import RelayBench, run_bench_relay, show_bench_relay


def test_whole_and_split_requests_are_measured_side_by_side() -> None:
    result = run_bench_relay(RelayBench(body_bytes=(300,), requests=20, rounds=2))
    assert [row["streams"] for row in result["rows"]] == [False, True]
    assert all(row["body_bytes"] > 300 for row in result["rows"])
    for row in result["rows"]:
        for way in ("whole", "split"):
            assert 0 < row[f"{way}_min_us"] <= row[f"{way}_us"] <= row[f"{way}_max_us"]
        assert row["ratio"] > 0
    assert show_bench_relay(result).splitlines()[0].startswith("round_robin, nixl; CPU us of the gateway")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"requests": 0}, "requests: 0 is not above 0"),
        ({"rounds": 0}, "rounds: 0 is not above 0"),
        ({"body_bytes": (10,)}, "bytes: bodies of 200 bytes or more are expected"),
        ({"body_bytes": ()}, "bytes: bodies of 200 bytes or more are expected"),
    ],
)
def test_what_cannot_be_measured_is_said(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RelayBench(**fields)  # type: ignore[arg-type]
