from __future__ import annotations

from typing import Any

import pytest

from kvroute.conductor.events import EventSource, discovered_sources

SAID = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://*:5557",
    "replay_endpoint": "tcp://0.0.0.0:5567",
    "buffer_steps": 10_000,
    "topic": "kv@a:8000@m",
}


def test_ranks_come_with_their_own_ports_and_a_wildcard_is_the_workers_host() -> None:
    answer = {
        "0": SAID,
        "1": SAID | {"endpoint": "tcp://10.0.0.9:5558", "replay_endpoint": None, "topic": None},
    }
    assert discovered_sources(answer, "10.0.0.1") == (
        EventSource("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5567", 0, "kv@a:8000@m"),
        EventSource("tcp://10.0.0.9:5558", None, 1),
    )
    assert discovered_sources({"8": SAID | {"endpoint": "tcp://[::]:5557"}}, "[fe80::1]")[0] == EventSource(
        "tcp://[fe80::1]:5557", "tcp://[fe80::1]:5567", 8, "kv@a:8000@m"
    )
    assert discovered_sources({}, "h") == ()
    assert discovered_sources({"0": SAID | {"publisher": "null"}}, "h") == ()
    assert discovered_sources({"0": SAID | {"enable_kv_cache_events": False}}, "h") == ()


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        ([], "must be an object by rank"),
        ({"0": 5}, "kv_event_sources['0'] must be an object"),
        ({"first": SAID}, "kv_event_sources['first']: the rank"),
        ({"9999": SAID}, "kv_event_sources['9999']: dp_rank must be from 0 to 1023"),
        ({"0": SAID | {"endpoint": None}}, "kv_event_sources['0'].endpoint"),
        ({"0": SAID | {"replay_endpoint": 5}}, "kv_event_sources['0'].replay_endpoint"),
        ({"0": SAID | {"endpoint": "http://a:1"}}, "kv_event_sources['0']: endpoint must be tcp://"),
        ({"0": SAID | {"endpoint": "tcp://a:70000"}}, "kv_event_sources['0']: endpoint must have a port"),
        ({str(i): SAID for i in range(1025)}, "at most 256 ranks"),
    ],
)
def test_errors_name_the_field(answer: Any, names: str) -> None:
    with pytest.raises(ValueError) as failure:
        discovered_sources(answer, "h")
    assert names in str(failure.value)


def test_without_discovery_the_ports_follow_each_other() -> None:
    first = EventSource("tcp://a:5557", "tcp://a:5567", topic="t", bind=True)
    assert first.ranks(3)[2] == EventSource("tcp://a:5559", "tcp://a:5569", 2, "t", bind=True)
    assert EventSource("ipc:///run/kv").ranks(2)[1] == EventSource("ipc:///run/kv_dp1", dp_rank=1)
    assert [source.dp_rank for source in EventSource("tcp://a:5557", dp_rank=8).ranks(2)] == [8, 9]


@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint", "topic"])
def test_what_a_frame_to_a_conductor_could_not_hold_is_refused_here(field: str) -> None:
    fields = {"endpoint": "tcp://a:1", field: "ipc:///" + "x" * 512}
    with pytest.raises(ValueError, match=f"{field} must have at most 512 characters"):
        EventSource(**fields)
