"""The simulator against Dynamo's mocker where prefill and decode are apart: figures of ai-dynamo 1.6.1.

Its handoffs take no time unless told otherwise, and its router chooses the decode worker once a prompt is
prefilled.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvroute.loadtests.simulator.mini import MINI, MiniTimes
from kvroute.loadtests.simulator.setting import Setting
from kvroute.loadtests.simulator.simulation import Simulation
from kvroute.loadtests.traces.arrivals import arrivals
from kvroute.loadtests.traces.reading import read_trace
from kvroute.loadtests.traces.rows import Row, Trace
from kvroute.policies.costs.links import Link
from kvroute.policies.registry import make_policy
from tests.loadtests.validation import figures, trace_path

AT_ONCE = Link(bytes_per_s=float("inf"), latency_s=0.0)
SETTING = replace(MINI, split=(1, 1), handoff=AT_ONCE, predicts=False)

# Milliseconds of arrival, prompt and output tokens, 512-token blocks; milliseconds of first and last token.
Replayed = tuple[int, int, int, tuple[int, ...], float, float]
ROOMY: list[Replayed] = [
    (0, 1024, 50, (1, 2), 90.3635, 382.6037),
    (0, 3000, 60, tuple(range(3, 9)), 90.3635, 441.6803),
    (100, 12000, 1, tuple(range(10, 34)), 376.5993, 376.5993),
    (100, 1024, 4, (40, 41), 376.5993, 394.5030),
]
"""Also prompts that wait for a decode step to end."""
FULL: list[Replayed] = [
    (0, 179, 24, (1,), 27.2839, 644.9456),
    (5, 410, 79, (2,), 69.8129, 2613.4624),
    (19, 498, 10, (3,), 69.8129, 314.1669),
    (63, 388, 111, (4,), 110.0802, 3747.0511),
    (114, 1106, 96, (5, 6, 7), 183.7275, 3356.9805),
    (153, 975, 129, (8, 9), 246.991, 4447.1186),
    (168, 137, 8, (10,), 246.991, 476.1132),
    (191, 716, 98, (11, 12), 509.8632, 5759.4801),
    (219, 1140, 43, (13, 14, 15), 2647.2024, 4046.1726),
    (260, 547, 60, (16, 17), 3389.4177, 5247.6832),
    (261, 729, 45, (18, 19), 3780.2504, 5159.875),
    (268, 1108, 93, (20, 21, 22), 4479.3804, 6677.695),
]
"""64 blocks: prompts wait for room, hold it at the prefill worker, and one is preempted."""
SHARED: list[Replayed] = [
    (0, 3844, 86, tuple(range(1, 9)), 96.6089, 2643.3376),
    (58, 6382, 296, tuple(range(9, 22)), 279.1687, 9985.0743),
    (66, 4598, 197, tuple(range(22, 31)), 474.8155, 7011.5914),
    (102, 216, 128, (31,), 474.8155, 4682.7287),
    (148, 7263, 80, tuple(range(32, 47)), 2677.3476, 5360.8205),
    (246, 5288, 86, (*range(32, 42), 47), 2677.3476, 14025.1899),
    (247, 9693, 17, (*range(22, 26), *range(48, 63)), 5394.8305, 5938.9905),
    (249, 5965, 244, (32, *range(63, 74)), 5972.4909, 12432.6107),
    (253, 2416, 92, (*range(32, 36), 74), 7043.8155, 9985.0743),
    (277, 10028, 296, (*range(1, 6), *range(75, 90)), 12465.0804, 20735.6725),
]
"""300 blocks: prefixes found at both workers; one is preempted, and finds a part of itself."""


@pytest.mark.parametrize(
    ("replayed", "blocks", "preempted"),
    [(ROOMY, 16384, 0), (FULL, 64, 1), (SHARED, 300, 1)],
    ids=["roomy", "full", "shared"],
)
def test_split_requests_to_the_tenth_of_a_millisecond(
    replayed: list[Replayed], blocks: int, preempted: int
) -> None:
    setting = replace(SETTING, kv_tokens=64 * blocks, step_times=MiniTimes(64 * blocks))
    trace = Trace("replayed", 512, tuple(Row(at / 1e3, *row) for at, *row, _, _ in replayed))
    simulation = Simulation(setting, make_policy("round_robin", {}))
    records = simulation.run(arrivals(trace, 64))
    simulation.check_integrity()
    assert [record.first_s for record in records] == pytest.approx(
        [one[4] / 1e3 for one in replayed], abs=1e-7
    )
    assert [record.end_s for record in records] == pytest.approx([one[5] / 1e3 for one in replayed], abs=1e-7)
    assert [engine.scheduler.totals.preemptions for engine in simulation.engines] == [0, preempted]


def test_rows_of_decode_steps_change_nothing_where_the_room_is_full() -> None:
    setting = replace(SETTING, kv_tokens=64 * 64, step_times=MiniTimes(64 * 64))
    trace = Trace("replayed", 512, tuple(Row(at / 1e3, *row) for at, *row, _, _ in FULL))
    ends = []
    for in_a_row in (True, False):
        simulation = Simulation(replace(setting, in_a_row=in_a_row), make_policy("round_robin", {}))
        ends.append([record.end_s for record in simulation.run(arrivals(trace, 64))])
    assert ends[0] == pytest.approx(ends[1], abs=1e-9)


def conversation(policy: str, options: dict[str, object], setting: Setting, speed: float) -> dict[str, float]:
    """Mooncake (FAST '25), without jitter."""
    trace = read_trace(trace_path("conversation_trace.jsonl"))
    simulation = Simulation(setting, make_policy(policy, options))
    return figures(simulation.measure(arrivals(trace, 64, speed)))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("split", "speed", "ttft", "p50", "p99", "e2e", "hit"),
    [
        ((6, 2), 1, 385.94, 249.05, 2154.2, 3926.7, 0.0802),
        ((6, 2), 4, 2417.87, 1714.34, 8834.4, 14630.7, 0.0807),
        ((5, 3), 4, 751.33, 472.57, 3423.3, 9701.6, 0.0851),
    ],
)
def test_round_robin_over_both_halves(
    split: tuple[int, int], speed: float, ttft: float, p50: float, p99: float, e2e: float, hit: float
) -> None:
    got = conversation("round_robin", {}, replace(SETTING, split=split), speed)
    print({name: round(value, 4) for name, value in got.items()})
    assert got["ttft mean"] == pytest.approx(ttft, rel=0.002)
    assert got["ttft p50"] == pytest.approx(p50, rel=0.01)
    assert got["ttft p99"] == pytest.approx(p99, rel=0.005)
    assert got["e2e mean"] == pytest.approx(e2e, rel=0.001)
    assert got["hit"] == pytest.approx(hit, rel=0.005)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("split", "rel", "ttft", "p99", "e2e", "hit"),
    [
        ((6, 2), 0.1, 1043.2, 5029.5, 12648.9, 0.1960),
        ((5, 3), 0.02, 435.5, 1869.0, 9536.5, 0.1755),
    ],
)
def test_dynamos_own_figures(
    split: tuple[int, int], rel: float, ttft: float, p99: float, e2e: float, hit: float
) -> None:
    """Means of six replays, which draw their ties. On 6P2D the decode workers' room is full for most of the
    time, and the TTFT of single replays is 949 to 1146 ms.
    """
    runs = [
        conversation("dynamo", {"seed": seed}, replace(SETTING, split=split), 4)
        for seed in range(1, 5 if split == (6, 2) else 2)
    ]
    got = {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}
    print({name: round(value, 4) for name, value in got.items()})
    assert got["ttft mean"] == pytest.approx(ttft, rel=rel)
    assert got["ttft p99"] == pytest.approx(p99, rel=rel)
    assert got["e2e mean"] == pytest.approx(e2e, rel=rel / 4)
    assert got["hit"] == pytest.approx(hit, rel=0.03)
