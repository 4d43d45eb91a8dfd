"""The sketch: close, aging, bounded."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvroute.conductor.tiers.frequency import FrequencySketch


def test_counts_are_never_low_and_rarely_high() -> None:
    seed = 3
    rng = random.Random(seed)
    sketch = FrequencySketch(4096)
    keys = [rng.getrandbits(64) for _ in range(2000)]
    true = Counter({key: 1 + rng.randrange(10) for key in keys})
    for key, times in true.items():
        for _ in range(times):
            sketch.add(key)
    high = [sketch.count(key) - times for key, times in true.items()]
    assert min(high) == 0, f"seed {seed}"
    assert sum(excess > 0 for excess in high) <= 20, f"seed {seed}"


def test_heat_fades_and_counts_saturate() -> None:
    sketch = FrequencySketch(16)
    for _ in range(80):
        sketch.add(1)
    assert sketch.count(1) == 80
    for _ in range(80):
        sketch.add(2)
    assert sketch.count(1) == 40, "halved after 160 additions to 16 places"
    big = FrequencySketch(1 << 12)
    for _ in range(300):
        big.add(1)
    assert big.count(1) == 255


def test_memory_does_not_grow() -> None:
    sketch = FrequencySketch(1000)
    for key in range(50_000):
        sketch.add(key * 0x9E3779B97F4A7C15 % 2**64)
    assert [len(row) for row in sketch._rows] == [1024] * 4


def test_no_entries_are_refused() -> None:
    with pytest.raises(ValueError, match="entries must be an integer of at least 1"):
        FrequencySketch(0)
