"""What must travel from a prefill to a decode worker, and who decodes where nobody chooses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvroute.load import WorkerLoad
from kvroute.policies.costs.links import Link, PdLinks
from kvroute.policies.costs.pace import Pace
from kvroute.policies.costs.speeds import PRESETS
from kvroute.policies.pairing import handoff_s, roomiest
from kvroute.types import NO_MATCH, PrefixMatch, Worker

LINKS = PdLinks.uniform(Link(1e9, 0.002))
PACE = Pace(replace(PRESETS["qwen3-32b-h200-tp2"], kv_bytes_per_token=100_000))
WORKER = Worker("d", "http://d.invalid", block_size_tokens=64)


@pytest.mark.parametrize(
    ("prompt", "match", "blocks"),
    [
        (1000, NO_MATCH, 16),
        (1000, PrefixMatch(640, 640, 640, 640), 6),
        (1000, PrefixMatch(640, 128, 640, 640), 14),  # what lies below its GPU does not count
        (1024, PrefixMatch(1024, 1024, 1024, 1024), 1),  # the block of the last token always travels
        (1, NO_MATCH, 1),
    ],
)
def test_whole_blocks_travel_that_are_not_there(prompt: int, match: PrefixMatch, blocks: int) -> None:
    expected_s = 0.002 + blocks * 64 * 100_000 / 1e9
    assert handoff_s(LINKS, prompt, WORKER, WORKER, match, PACE) == pytest.approx(expected_s)


def test_tokens_travel_where_the_block_size_is_not_known() -> None:
    worker = Worker("d", "http://d.invalid")
    assert handoff_s(LINKS, 1000, worker, worker, NO_MATCH, PACE) == pytest.approx(0.002 + 0.1)


def test_the_roomiest_has_the_fewest_kv_tokens_and_ties_go_round() -> None:
    loads = [WorkerLoad() for _ in range(4)]
    loads[1].charge(0.0, prompt_tokens=100)
    assert [roomiest(loads, [1, 2, 3], turn) for turn in range(4)] == [2, 2, 3, 2]
    loads[2].charge(0.0, prompt_tokens=50)
    loads[3].charge(0.0, prompt_tokens=60, output_tokens=50.0)
    assert [roomiest(loads, [1, 2, 3], turn) for turn in range(3)] == [2, 2, 2]
    assert roomiest(loads, [1, 3], 5) == 1
