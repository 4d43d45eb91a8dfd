"""The table of fetch against recompute: verdicts, crossings, and the lines of its plot."""

from __future__ import annotations

import math

import pytest

from kvroute.loadtests.plan.breakeven import BreakevenPlan, plan_breakeven, usual_links
from kvroute.policies.costs.links import LINKS, Link, Overlap
from kvroute.policies.costs.speeds import PRESETS

QWEN = PRESETS["qwen3-32b-h200-tp2"]


def a_plan(link: Link, **change: object) -> BreakevenPlan:
    return BreakevenPlan("qwen", QWEN, {"a": link}, **change)  # type: ignore[arg-type]


def test_a_length_by_hand() -> None:
    plan = a_plan(Link(10e9, 0.002), lengths=(1024,), suffix_tokens=1024, lookup_s=0.003, queue_reuse_s=0.004)
    report, _ = plan_breakeven(plan)
    length = report.data["links"][0]["lengths"][0]
    # 1024 x 262144 B is 268.4 MB: 26.84 ms behind 2 ms.
    assert length["payload_bytes"] == 2**28
    assert length["load_ms"] == pytest.approx(28.8435456)
    # 0.04536 x 1024, and 1.72e-6 x (2048^2 - 3 x 1024^2) / 2 of attention.
    saved_ms = 46.44864 + 1.72e-6 * 1024**2 / 2
    assert length["prefill_saved_ms"] == pytest.approx(saved_ms)
    assert length["fetch"]
    assert length["reuse_ms"] == pytest.approx(length["cold_ms"] - saved_ms + 28.8435456 + 3 + 4)
    assert length["breakeven_bytes_per_s"] == pytest.approx(2**28 / ((saved_ms - 2 - 3 - 4) / 1e3))


def test_a_queue_longer_than_what_is_saved_leaves_the_prefix() -> None:
    report, _ = plan_breakeven(
        a_plan(LINKS["ib-400g"], lengths=(8192,), queue_reuse_s=0.8, queue_cold_s=0.01)
    )
    assert not report.data["links"][0]["lengths"][0]["fetch"]
    assert report.rows[1][-1] == "(50.94 ms)"
    assert report.notes[-1] == "Fetching also costs 790 ms: lookup and the difference of the queues."


def test_every_verdict_agrees_with_the_crossing() -> None:
    lengths = (16, 256, 4096, 65_536, 1_000_000)
    report, _ = plan_breakeven(BreakevenPlan("qwen", QWEN, usual_links(), lengths=lengths))
    assert [link["link"] for link in report.data["links"]] == [*usual_links()]
    for link in report.data["links"]:
        crossing = link["breakeven_tokens"] or math.inf
        assert [each["fetch"] for each in link["lengths"]] == [tokens >= crossing for tokens in lengths]


def test_a_copy_to_the_gpu_overlaps_or_not() -> None:
    change = {"host_bytes_per_s": 20e9, "chunk_tokens": 512}
    for overlap, expected_ms in (
        # 8192 tokens are 2.147 GB: 214.75 ms on the link, half of that to copy, a sixteenth of it at the end.
        (Overlap.PIPELINED, 2 + 214.748 + 107.374 / 16),
        (Overlap.SERIAL, 2 + 214.748 + 107.374),
    ):
        plan = a_plan(Link(10e9, 0.002), lengths=(8192,), overlap=overlap, **change)
        length = plan_breakeven(plan)[0].data["links"][0]["lengths"][0]
        assert length["load_ms"] == pytest.approx(expected_ms, rel=1e-4)
        assert length["breakeven_bytes_per_s"] is None


def test_the_plot_marks_each_crossing_once() -> None:
    report, plot = plan_breakeven(BreakevenPlan("qwen", QWEN, usual_links()))
    crossings = {link["link"]: link["breakeven_tokens"] for link in report.data["links"]}
    assert plot.series[0].name == "recompute"
    assert f"fetch, tcp: pays from {crossings['tcp']}" in [line.name for line in plot.series]
    assert {x for x, _ in plot.marks} == {x for x in crossings.values() if x >= 16}
    # Between the two powers of two around it the lines change sides.
    recompute, tcp = plot.series[0], next(line for line in plot.series if "tcp" in line.name)
    for tokens, saved, load in zip(recompute.xs, recompute.ys, tcp.ys, strict=True):
        assert (saved > load) == (tokens >= crossings["tcp"])


def test_a_link_that_never_pays_says_so() -> None:
    report, plot = plan_breakeven(a_plan(Link(1e6)))
    assert report.data["links"][0]["breakeven_tokens"] is None
    assert report.rows[1][3] == "over 10000000"
    assert plot.series[1].name == "fetch, a: never pays"
    report.to_json()


@pytest.mark.parametrize(
    ("change", "message"), [({"suffix_tokens": 0}, "--suffix: 0"), ({"chunk_tokens": 0}, "--chunk: 0")]
)
def test_sizes_of_none_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        a_plan(Link(1e9), **change)
