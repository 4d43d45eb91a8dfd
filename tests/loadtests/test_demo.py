from __future__ import annotations

import io
import math

from rich.console import Console

from kvroute.loadtests.demo import SETTINGS, Result, run_demo
from kvroute.loadtests.workload import CHARS_PER_TOKEN, MultiTurn

# Over long enough that on a slow machine no queue builds up: `ttft` rightly leaves a hot cache for it.
SMALL = MultiTurn(
    conversations=8, turns=3, document_tokens=600, system_tokens=100, span_s=5.0, output_tokens=4
)


def test_a_row_per_setting_and_what_each_one_knows() -> None:
    out = io.StringIO()
    results = run_demo(3, Console(file=out, width=120), SMALL)
    round_robin, prefix_affinity, ttft, exact = results
    rows = [line.strip() for line in out.getvalue().splitlines()]
    names = [setting.name.strip() for setting in SETTINGS]
    assert [name for row in rows for name in names if row.startswith(name) and "ms" in row] == names
    for result in results:
        assert (len(result.ttft_s), sum(result.split.values()), result.failures) == (24, 24, 0)
    assert sorted(round_robin.split.values()) == [6, 6, 6, 6]
    assert min(each.hit_rate for each in (prefix_affinity, ttft, exact)) > 0.5 > round_robin.hit_rate
    assert round_robin.foretold is None
    assert prefix_affinity.foretold is not None
    assert exact.foretold is not None
    assert exact.foretold > 0.9
    assert prefix_affinity.foretold < 0.5


def test_a_failed_request_is_an_infinite_ttft() -> None:
    result = Result(SETTINGS[0], ttft_s=[0.1, math.inf, 0.2])
    assert (result.ttft_ms(0.5), result.ttft_ms(0.99)) == (200.0, math.inf)
    assert result.hit_rate == 0.0


def test_the_same_seed_gives_the_same_conversations() -> None:
    assert SMALL.generate(1) == SMALL.generate(1) != SMALL.generate(2)
    first = SMALL.generate(1)[0]
    assert len(first.turns) == 3
    assert len(first.system) == 100 * CHARS_PER_TOKEN
    assert len(first.turns[0].text) == (600 + 150) * CHARS_PER_TOKEN
    assert [turn.due_s for turn in first.turns] == sorted(turn.due_s for turn in first.turns)
