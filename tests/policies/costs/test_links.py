"""Transfers: alone, in stages, queued, and from prefill to decode."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.policies.costs.links import (
    LINKS,
    TIER_LINKS,
    Handoff,
    Link,
    LinkQueue,
    Nearness,
    Overlap,
    PdLinks,
    nearness,
    path_s,
)
from kvroute.types import Place, Tier, Worker

GIB = 2**30
NETWORK, LAYOUT_S = Link(20 * GIB), 0.008
HOST_TO_GPU = Link(25 * GIB)  # 1 GiB in 40 ms

seconds = st.floats(1e-6, 1e-1)
links = st.builds(Link, st.floats(1e8, 1e12), st.floats(0, 0.05))
stages = st.lists(st.one_of(seconds, links), min_size=1, max_size=4)


def test_a_gib_over_20_gib_per_s_takes_50_ms_on_the_network_and_98_ms_through_all_stages() -> None:
    assert NETWORK.transfer_s(GIB) == pytest.approx(0.050)
    path = [NETWORK, HOST_TO_GPU, LAYOUT_S]
    assert path_s(path, GIB, overlap=Overlap.SERIAL) == pytest.approx(0.050 + 0.040 + 0.008)


def test_a_pipeline_takes_one_chunk_through_all_stages_and_the_slowest_stage_for_the_others() -> None:
    path = [NETWORK, HOST_TO_GPU, LAYOUT_S]
    # Ten chunks of 5, 4 and 0.8 ms: start and tail 9.8 ms, then nine times 5 ms.
    assert path_s(path, GIB, overlap=Overlap.PIPELINED, chunks=10) == pytest.approx(0.0098 + 0.045)
    assert path_s(path, GIB, overlap=Overlap.PIPELINED, chunks=1) == pytest.approx(0.098)


def test_every_chunk_pays_the_latency_of_every_link() -> None:
    path = [Link(1e9, 0.001), Link(1e9, 0.002)]
    assert path_s(path, 1e6, overlap=Overlap.SERIAL, chunks=10) == pytest.approx(10 * 0.003 + 0.002)
    # Per chunk 1.1 and 2.1 ms.
    assert path_s(path, 1e6, overlap=Overlap.PIPELINED, chunks=10) == pytest.approx(0.0032 + 9 * 0.0021)


def test_nothing_takes_no_time_and_no_chunks_are_refused() -> None:
    assert path_s([Link(1e9, 1.0), 0.5], 0, overlap=Overlap.SERIAL) == 0
    with pytest.raises(ValueError, match=r"chunks: 0 is not above 0"):
        path_s([NETWORK], GIB, overlap=Overlap.PIPELINED, chunks=0)


@given(stages, st.floats(1, 1e12), st.integers(1, 500))
def test_a_pipeline_is_never_slower_than_serial_nor_faster_than_its_slowest_stage(
    path: list[Link | float], payload_bytes: float, chunks: int
) -> None:
    serial_s = path_s(path, payload_bytes, overlap=Overlap.SERIAL, chunks=chunks)
    pipelined_s = path_s(path, payload_bytes, overlap=Overlap.PIPELINED, chunks=chunks)
    slowest_s = max(path_s([stage], payload_bytes, overlap=Overlap.SERIAL, chunks=chunks) for stage in path)
    assert slowest_s * (1 - 1e-9) <= pipelined_s <= serial_s * (1 + 1e-9)


@given(stages, st.integers(0, 3), st.floats(1, 1e12), st.integers(1, 50), st.sampled_from(Overlap))
def test_more_bandwidth_never_makes_a_path_slower(
    path: list[Link | float], index: int, payload_bytes: float, chunks: int, overlap: Overlap
) -> None:
    index %= len(path)
    changed = path[index]
    if isinstance(changed, Link):
        faster: list[Link | float] = [*path]
        faster[index] = Link(changed.bytes_per_s * 2, changed.latency_s)
        before_s = path_s(path, payload_bytes, overlap=overlap, chunks=chunks)
        assert path_s(faster, payload_bytes, overlap=overlap, chunks=chunks) <= before_s * (1 + 1e-9)


def test_tiers_and_networks_have_the_measured_bandwidth_of_payload() -> None:
    assert TIER_LINKS[Tier.CPU] == Link(20e9, 1e-6)
    assert TIER_LINKS[Tier.DISK] == Link(7e9, 80e-6)
    assert LINKS["nvme-write"] == Link(5e9, 80e-6)
    assert LINKS["object-store"] == Link(1e9, 30e-3)
    assert LINKS["roce-100g"].bytes_per_s == 12.1e9
    assert 38e9 <= LINKS["ib-400g"].bytes_per_s <= 49e9
    assert 3.5e9 <= LINKS["tcp"].bytes_per_s <= 4.9e9
    assert LINKS["ib-8x400g"].bytes_per_s == 190e9
    assert all(0.5e-3 <= LINKS[name].latency_s <= 2e-3 for name in ("roce-100g", "ib-400g", "ib-8x400g"))
    assert 2e-3 <= LINKS["tcp"].latency_s <= 10e-3


def test_a_handoff_moves_whole_blocks_at_its_share_of_the_link() -> None:
    handoff = Handoff(Link(10e9, 0.002), bytes_per_token=100_000, block_tokens=16, share=0.5)
    assert handoff.payload_bytes(1000) == 63 * 16 * 100_000
    # 1008 tokens of 100 kB at 5 GB/s: 20.16 ms behind 2 ms of set-up.
    assert handoff.seconds(1000) == pytest.approx(0.02216)
    assert handoff.seconds(1000, hidden_s=0.015) == pytest.approx(0.00716)
    assert handoff.seconds(1000, hidden_s=1.0) == pytest.approx(0.002)
    assert handoff.seconds(0) == 0


def test_layers_sent_during_the_prefill_leave_the_last_one_and_the_backlog() -> None:
    handoff = Handoff(Link(10e9), bytes_per_token=100_000)  # 1600 tokens: 16 ms on the wire
    # A prefill of 100 ms outlasts the wire: of ten layers only the last one's 1.6 ms are left.
    assert handoff.hidden_s(1600, 0.100, 10) == pytest.approx(0.016 - 0.0016)
    # One of 4 ms does not: 0.4 ms until the first layer is done, ten layers of 1.6 ms, less the 4 ms.
    assert handoff.hidden_s(1600, 0.004, 10) == pytest.approx(0.016 - (0.0004 + 0.016 - 0.004))
    assert handoff.hidden_s(1600, 0.100, 1) == pytest.approx(0)


def test_a_busy_link_serves_in_turn_and_an_idle_one_at_once() -> None:
    queue = LinkQueue(Link(1e9, 0.01))
    assert queue.send(1e8, now_s=1.0) == pytest.approx(1.11)
    assert queue.wait_s(1.04) == pytest.approx(0.06)
    assert queue.send(2e8, now_s=1.04) == pytest.approx(1.31)  # 1.1 + 0.2 + latency
    assert queue.wait_s(9.0) == 0
    assert queue.send(1e8, now_s=9.0) == pytest.approx(9.11)
    assert queue.send(0, now_s=20.0) == 20.0


@given(links, st.lists(st.floats(1, 1e11), min_size=1, max_size=20), st.floats(0, 1e3))
def test_transfers_asked_for_at_once_end_as_behind_so_many_queued_bytes(
    link: Link, payloads: list[float], now_s: float
) -> None:
    queue, queued_bytes = LinkQueue(link), 0.0
    for payload_bytes in payloads:
        alone_s = link.transfer_s(payload_bytes, queued_bytes)
        assert queue.send(payload_bytes, now_s) - now_s == pytest.approx(alone_s, rel=1e-6, abs=1e-9)
        queued_bytes += payload_bytes


# --- from prefill to decode workers ------------------------------------------------------------


def at(host: str = "", rack: str = "", zone: str = "") -> Worker:
    return Worker("w", "http://w:8000", place=Place(host, rack, zone))


@pytest.mark.parametrize(
    ("one", "other", "near"),
    [
        (at("h", "r", "z"), at("h", "r", "z"), "host"),
        (at("h", "r", "z"), at("i", "r", "z"), "rack"),
        (at("h", "r", "z"), at("i", "s", "z"), "zone"),
        (at("h", "r", "z"), at("i", "s", "y"), "far"),
        (at("h"), at("h"), "host"),
        (at("h"), at("h", "r", "z"), "host"),  # what is not known is not apart
        (at(), at(), "far"),
        (at(rack="r"), at(), "far"),
        (at("h", "r", "z"), at("h", "r", "y"), "far"),  # rack r of another zone
        (at("h", "r", "z"), at("h", "s", "z"), "zone"),  # host h of another rack
    ],
)
def test_how_near_two_workers_are(one: Worker, other: Worker, near: str) -> None:
    assert nearness(one, other) == nearness(other, one) == near


def test_every_nearness_has_a_link_that_can_be_replaced() -> None:
    links = PdLinks(*[Link(float(10 - place)) for place in range(4)])
    pairs = (at("h", "r", "z"), at("i", "r", "z"), at("i", "s", "z"), at("i", "s", "y"))
    assert [links.between(pairs[0], other) for other in pairs] == [links.of(near) for near in Nearness]
    measured = links.with_link(Nearness.RACK, Link(5.5))
    assert measured.between(*pairs[:2]) == Link(5.5)
    assert (measured.of(Nearness.ZONE), links.rack) == (Link(8.0), Link(9.0)), "the others, and the old, stay"
    assert {PdLinks.uniform(Link(3.0)).of(near) for near in Nearness} == {Link(3.0)}
