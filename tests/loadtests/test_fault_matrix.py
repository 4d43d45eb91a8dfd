"""The fault matrix: what each cell is judged by, the table, and cells that are run."""

from __future__ import annotations

import json

import pytest

from kvroute.loadtests.fault_matrix.__main__ import run
from kvroute.loadtests.fault_matrix.cells import CONNECTORS, FAULTS, LEGS, MOMENTS, Cell, Plan, cells, plan
from kvroute.loadtests.fault_matrix.judging import Got, Outcome, judge
from kvroute.loadtests.fault_matrix.running import Result
from kvroute.loadtests.fault_matrix.table import bad, render
from kvroute.loadtests.mock_engine.faults import Faults

RIGHT = " one two three"
ERROR = b'{"error":{"message":"no","code":500}}'


def stream(*texts: str, done: bool = True, error: bool = False) -> bytes:
    events = [json.dumps({"choices": [{"text": text}]}).encode() for text in texts]
    events += [ERROR] * error + [b"[DONE]"] * done
    return b"".join(b"data: " + event + b"\n\n" for event in events)


def plain(text: str) -> bytes:
    return json.dumps({"choices": [{"text": text}]}).encode()


@pytest.mark.parametrize(
    ("status", "body", "complete", "outcome"),
    [
        (200, plain(RIGHT), True, Outcome.RIGHT),
        (200, plain(" one two four"), True, Outcome.WRONG),
        (200, plain(" one two"), True, Outcome.WRONG),
        (200, b"garbage", True, Outcome.WRONG),
        (200, b"", True, Outcome.WRONG),
        (200, plain(RIGHT)[:-4], False, Outcome.BROKEN),
        (200, ERROR, True, Outcome.ERROR),
        (502, ERROR, True, Outcome.ERROR),
        (502, b"<html>", True, Outcome.WRONG),
        (502, ERROR, False, Outcome.WRONG),
        (200, stream(" one", " two three"), True, Outcome.RIGHT),
        (200, stream(" one", " two three", done=False), True, Outcome.WRONG),
        (200, stream(" one", " two"), True, Outcome.WRONG),
        (200, stream(" one", done=False), False, Outcome.BROKEN),
        (200, stream(" two", done=False), False, Outcome.WRONG),
        (200, stream(" one", done=False, error=True), True, Outcome.BROKEN),
        (200, stream(" six", done=False, error=True), True, Outcome.WRONG),
        (200, stream(" one", done=False) + b'data: {"choi', False, Outcome.BROKEN),
    ],
)
def test_what_a_client_got_is_judged(status: int, body: bytes, complete: bool, outcome: Outcome) -> None:
    assert judge(Got(status, body, complete), RIGHT) is outcome


def test_there_is_a_cell_for_every_fault_of_either_leg_in_every_phase_of_every_connector() -> None:
    every = list(cells())
    assert len(set(every)) == len(every) == 2 * len(LEGS) * len(MOMENTS) * len(FAULTS) * len(CONNECTORS)
    plans = [plan(cell) for cell in every]
    assert sum(isinstance(one, Plan) for one in plans) == 342
    for one in plans:
        if isinstance(one, Plan):
            Faults().merged(one.faults)
            Faults().merged(one.others)
            assert one.faults or one.act


def test_the_table_has_every_result_and_says_why_there_is_none() -> None:
    good = Result(Outcome.RIGHT, 200, 0.25, 1, 0, 0, [])
    leak = Result(Outcome.ERROR, 502, 1.5, 0, 6, 3, ["6 blocks were not released"])
    results: dict[Cell, Result | str] = {
        Cell("nixl", "prefill", "before", "500", 2): good,
        Cell("sglang", "prefill", "before", "500", 2): leak,
        Cell("mooncake", "prefill", "before", "500", 2): "it has no such thing",
    }
    text = render(results)
    row = next(line for line in text.splitlines() if line.startswith("| prefill"))
    assert row == (
        "| prefill | before | 500 | 2P2D | right 200, 0.25 s, 1 retry, 0 stranded | - "
        "| **error 502, 1.50 s, 6 stranded (3 after the lease): 6 blocks were not released** | - | - |"
    )
    assert "2 cells: 1 right, 1 error; 1 bad; the slowest took 1.50 s." in text
    assert "* prefill, 500 before, mooncake: it has no such thing" in text
    assert bad(results) == ["sglang 2P2D: prefill 500 before the handoff: 6 blocks were not released"]


PART = {
    ("nixl", "decode", "before", "refused", 2): (Outcome.RIGHT, 1),
    ("nixl", "decode", "during", "restart", 2): (Outcome.RIGHT, 1),
    ("mooncake", "prefill", "before", "500", 2): (Outcome.RIGHT, 1),
    ("sglang", "prefill", "before", "4xx", 1): (Outcome.ERROR, 0),
    ("shared-storage", "prefill", "before", "refused", 1): (Outcome.RIGHT, 1),
    ("p2p-nccl", "decode", "after", "dies", 1): (Outcome.BROKEN, 0),
}
"""Cells that wait for no limit."""


async def test_a_part_of_the_matrix() -> None:
    chosen = [Cell(*names) for names in PART]
    results = await run(chosen)
    assert bad(results) == []
    for cell, (outcome, retries) in zip(chosen, PART.values(), strict=True):
        one = results[cell]
        assert isinstance(one, Result)
        assert (one.outcome, one.retries) == (outcome, retries), cell.name


@pytest.mark.soak
async def test_the_whole_matrix() -> None:
    results = await run(list(cells()))
    assert bad(results) == []
