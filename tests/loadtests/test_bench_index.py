from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from textwrap import dedent

import pytest

from kvroute.loadtests.bench_index import IndexBench, run_bench_index
from kvroute.loadtests.index_work import SHAPES, Prompt, chained_keys, engine_hashes, events, prompts, queries


def test_the_figures_have_the_names_that_are_promised() -> None:
    result = run_bench_index(IndexBench(workers=2, entries=5000, reps=40))
    assert json.loads(json.dumps(result)) == result
    assert result["entries"] == 5000
    assert result["apply_entries_per_s"] > 0
    assert result["own_bytes_per_entry"] > 0
    assert "bytes_per_entry" in result
    rows = {(row["kind"], row["n"]): row for row in result["find"]}
    assert len(rows) == len(result["find"]) == 9
    for row in rows.values():
        assert {"p50_us", "p99_us", "cpu_us", "from_ints_p50_us"} <= row.keys()
        assert row["p50_us"] <= row["p99_us"]
    assert [
        (rows[kind, 1000]["matched"], rows[kind, 1000]["workers_matched"])
        for kind in ("hit", "half", "miss0")
    ] == [
        (1000, 1),
        (500, 1),
        (0, 0),
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_work_is_the_same_every_time_and_as_much_as_was_asked_for(shape: str) -> None:
    made = prompts(shape, 4, 20_000, Random(1))
    assert made == prompts(shape, 4, 20_000, Random(1))
    stored = list(events(made, 64))
    assert (
        sum(len(event.hashes) for event in stored)
        == sum(n for prompt in made for _, n in prompt.holders)
        >= 20_000
    )
    assert {event.worker for event in stored} == set(range(4))
    assert all(len(event.hashes) <= 64 for event in stored)
    deepest = max(made, key=lambda prompt: len(prompt.blocks))
    assert len(deepest.blocks) == 5000


def test_events_are_chains_that_name_the_block_before() -> None:
    blocks = queries(prompts("disjoint", 1, 1, Random(2)), "hit", 150, Random(2))[0]
    stored = list(events([Prompt(blocks, ((3, 150),))], 64))
    hashes, keys = engine_hashes(blocks), chained_keys(blocks)
    assert [event.parent for event in stored] == [None, (hashes[63], keys[63]), (hashes[127], keys[127])]
    assert [key for event in stored for key in event.keys] == keys.tolist()
    assert [own for event in stored for own in event.local] == blocks.tolist()
    assert {event.worker for event in stored} == {3}


def test_a_peer_gets_the_same_work_in_its_own_process(tmp_path: Path) -> None:
    """With a stand-in for the binding: what it is told, and how its answers are compared."""
    package = tmp_path / "dynamo"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_core.py").write_text(
        dedent("""
            import json
            from types import SimpleNamespace

            class RadixTree:
                def __init__(self):
                    self.depth, self.held = {}, {}

                def apply_event(self, worker, event):
                    stored = json.loads(event)["data"]["stored"]
                    depth = self.depth.get(stored["parent_hash"], 0)
                    for block in stored["blocks"]:
                        depth += 1
                        self.depth[block["block_hash"]] = depth
                        self.held[depth - 1, block["tokens_hash"]] = worker

                def find_matches(self, query):
                    scores = {}
                    for at, block in enumerate(query):
                        worker = self.held.get((at, block))
                        if worker is None:
                            break
                        scores[worker] = at + 1
                    return SimpleNamespace(scores=scores)
        """)
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    result = run_bench_index(IndexBench(workers=2, entries=5000, reps=4, peer=python))
    for ours, theirs in zip(result["find"], result["peer"]["find"], strict=True):
        assert (ours["kind"], ours["n"], ours["matched"]) == (theirs["kind"], theirs["n"], theirs["matched"])
    assert result["ratios"]["apply"] == pytest.approx(
        result["apply_entries_per_s"] / result["peer"]["apply_entries_per_s"]
    )
    assert {row["n"] for row in result["ratios"]["find"]} == {100, 1000, 5000}


def test_a_peer_that_cannot_start_says_so(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\ncat > /dev/null & exit 3\n")
    python.chmod(0o755)
    with pytest.raises((RuntimeError, BrokenPipeError)):
        run_bench_index(IndexBench(workers=1, entries=5000, peer=python))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("workers", 0, "workers must be at least 1, not 0"),
        ("entries", -5, "entries must be at least 1, not -5"),
        ("event_blocks", 0, "event_blocks must be at least 1, not 0"),
        ("shape", "round", "shape must be one of disjoint, shared, chat, not 'round'"),
    ],
)
def test_bad_options_are_named(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        IndexBench(**{field: value})  # type: ignore[arg-type]
