from __future__ import annotations

import io
import math

from rich.console import Console

from kvroute.loadtests.demo import Result, run_demo
from kvroute.loadtests.workload import CHARS_PER_TOKEN, MultiTurn

SMALL = MultiTurn(
    conversations=8, turns=3, document_tokens=600, system_tokens=100, span_s=1.5, output_tokens=4
)


def test_a_row_per_policy_and_affinity_finds_what_round_robin_scatters() -> None:
    out = io.StringIO()
    round_robin, prefix_affinity = run_demo(3, Console(file=out, width=100), SMALL)
    rows = [line.split() for line in out.getvalue().splitlines()]
    assert [row[0] for row in rows if row and row[0] in ("round_robin", "prefix_affinity")][-2:] == [
        "round_robin",
        "prefix_affinity",
    ]
    for result in (round_robin, prefix_affinity):
        assert (len(result.ttft_s), sum(result.split.values()), result.failures) == (24, 24, 0)
    assert sorted(round_robin.split.values()) == [6, 6, 6, 6]
    assert prefix_affinity.hit_rate > 0.5 > round_robin.hit_rate


def test_a_failed_request_is_an_infinite_ttft() -> None:
    result = Result("p", ttft_s=[0.1, math.inf, 0.2])
    assert (result.ttft_ms(0.5), result.ttft_ms(0.99)) == (200.0, math.inf)
    assert result.hit_rate == 0.0


def test_the_same_seed_gives_the_same_conversations() -> None:
    assert SMALL.generate(1) == SMALL.generate(1) != SMALL.generate(2)
    first = SMALL.generate(1)[0]
    assert len(first.turns) == 3
    assert len(first.system) == 100 * CHARS_PER_TOKEN
    assert len(first.turns[0].text) == (600 + 150) * CHARS_PER_TOKEN
    assert [turn.due_s for turn in first.turns] == sorted(turn.due_s for turn in first.turns)
