"""The sweep of chunk sizes as it is shown."""

from __future__ import annotations

import pytest

from kvroute.loadtests.plan.chunks import ChunksPlan, plan_chunks
from kvroute.loadtests.traces.rows import Row, Trace
from kvroute.loadtests.traces.sample import generated
from kvroute.policies.costs.chunking import Store
from kvroute.policies.costs.links import Link
from kvroute.policies.costs.speeds import PRESETS

QWEN = PRESETS["qwen3-32b-h200-tp2"]
STORE = Store(Link(12.1e9, 0.001), QWEN.kv_bytes_per_token)
COARSE = Trace("coarse", 512, (Row(0, 1025, 1, (1, 2, 3)), Row(1, 1025, 1, (1, 2, 4))))


def test_sizes_are_swept_in_order_and_the_best_is_named() -> None:
    report, plot = plan_chunks(
        ChunksPlan(generated(sessions=20), "qwen", QWEN, "a link", STORE, (4096, 16, 256))
    )
    chunks = report.data["chunks"]
    assert [each["chunk_tokens"] for each in chunks] == [16, 256, 4096]
    ttfts_s = [each["ttft_mean_s"] for each in chunks]
    best = report.data["best_chunk_tokens"]
    assert ttfts_s[[16, 256, 4096].index(best)] == min(ttfts_s) < report.data["ttft_mean_without_store_s"]
    assert plot.marks == ((best, f"least TTFT: {best}"),)
    shares = [each["usable_share"] for each in chunks]
    assert shares == sorted(shares, reverse=True)
    objects = [each["objects"] for each in chunks]
    assert objects == sorted(objects, reverse=True)


def test_two_prompts_as_shown() -> None:
    report, _ = plan_chunks(ChunksPlan(COARSE, "qwen", QWEN, "a link", STORE, (512,)))
    (chunk,) = report.data["chunks"]
    assert (chunk["objects"], chunk["hashes"], chunk["rpcs"]) == (2, 4, 2 + 2 + 2)
    assert (chunk["usable_tokens"], chunk["tail_tokens"], chunk["tail_tokens_mean"]) == (1024, 2, 1)
    assert chunk["metadata_bytes"] == 512
    assert chunk["boundary_tokens"] == 0
    assert report.rows[0][:8] == ("512", "2", "512 B", "4", "6", "50.0%", "0.0%", "1")


def test_chunks_finer_than_the_trace_are_said_to_be_a_lower_bound() -> None:
    assert (
        plan_chunks(ChunksPlan(COARSE, "qwen", QWEN, "x", STORE, (256,)))[0]
        .notes[-1]
        .endswith("lower bound.")
    )
    assert "lower bound" not in plan_chunks(ChunksPlan(COARSE, "qwen", QWEN, "x", STORE, (512,)))[0].notes[-1]


def test_broken_pages_are_refused_before_anything_is_computed() -> None:
    with pytest.raises(ValueError, match="chunk: 48 tokens are not whole pages of 32 tokens"):
        ChunksPlan(COARSE, "qwen", QWEN, "x", STORE, (64, 48), page_tokens=32)
