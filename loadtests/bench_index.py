"""`kvroute bench index`: how fast the index of confirmed blocks takes events and answers, and what it weighs.

Events and queries are made before anything is timed. `find` takes what the gateway has at that point: packed
chained keys. Dynamo's binding takes a list of integers, so the same from such a list is timed beside it
(`from_ints_p50_us`): packing is then part of the lookup.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import time
from array import array
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from kvroute.conductor.block_index import GPU, BlockIndex, make_block_index
from kvroute.conductor.packing import pack_keys
from kvroute.loadtests.index_work import KINDS, SHAPES, Stored, chained_keys, events, prompts, queries

SEED = 1
DEPTHS = (100, 1000, 5000)
ROUNDS = 4
"""Each lookup is measured in so many rounds; with a peer, in turns with it."""


@dataclass(frozen=True, slots=True)
class IndexBench:
    """What to run. `entries`: (worker, block) pairs to store; `peer`: interpreter with Dynamo's binding."""

    workers: int = 16
    entries: int = 1_000_000
    shape: str = "disjoint"
    event_blocks: int = 64
    reps: int = 2000
    """Lookups measured per kind and depth; half as many of the deepest."""
    peer: Path | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "entries", "event_blocks", "reps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.shape not in SHAPES:
            raise ValueError(f"shape must be one of {', '.join(SHAPES)}, not {self.shape!r}")


@dataclass
class _Samples:
    latencies_us: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    matched: int = 0
    workers: int = 0

    def add(self, latencies_us: Sequence[float], cpu_s: float, matched: int, workers: int) -> None:
        self.latencies_us += latencies_us
        self.cpu_s += cpu_s
        self.matched, self.workers = matched, workers

    def quantile_us(self, quantile: float) -> float:
        ordered = sorted(self.latencies_us)
        return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]

    def row(self) -> dict[str, Any]:
        return {
            "p50_us": self.quantile_us(0.5),
            "p99_us": self.quantile_us(0.99),
            "cpu_us": self.cpu_s / len(self.latencies_us) * 1e6,
            "matched": self.matched,
            "workers_matched": self.workers,
        }


class _Ours:
    def __init__(self, workers: int) -> None:
        self.index: BlockIndex = make_block_index()
        self.slots = [self.index.open() for _ in range(workers)]
        self.queries: list[bytes] = []

    def apply(self, stored: Iterable[Stored]) -> dict[str, float]:
        prepared = [
            (
                self.slots[event.worker],
                None if event.parent is None else event.parent[1],
                event.hashes.tobytes(),
                event.keys.tobytes(),
            )
            for event in stored
        ]
        store = self.index.store
        gc.collect()
        before = rss_bytes()
        cpu_s, start_s = time.process_time(), time.perf_counter()
        for slot, parent, hashes, keys in prepared:
            store(slot, GPU, parent, hashes, keys)
        elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
        return {"apply_s": elapsed_s, "cpu_s": cpu_s, "rss_bytes": rss_bytes() - before}

    def find(self, asked: Sequence[bytes], reps: int, samples: _Samples) -> None:
        match = self.index.match
        rows: Sequence[tuple[int, ...]] = ()
        latencies_us = []
        cpu_s = time.process_time()
        for rep in range(reps):
            query = asked[rep % len(asked)]
            start_s = time.perf_counter()
            rows = match(query)
            latencies_us.append((time.perf_counter() - start_s) * 1e6)
        cpu_s = time.process_time() - cpu_s
        samples.add(latencies_us, cpu_s, max((row[-1] for row in rows), default=0), len(rows))

    def find_from_ints(self, asked: Sequence[list[int]], reps: int) -> list[float]:
        match = self.index.match
        latencies_us = []
        for rep in range(reps):
            query = asked[rep % len(asked)]
            start_s = time.perf_counter()
            match(pack_keys(query))
            latencies_us.append((time.perf_counter() - start_s) * 1e6)
        return latencies_us


class _Peer:
    """The other index, in its own process: see index_peer.py."""

    def __init__(self, python: Path, stack: ExitStack) -> None:
        script = Path(__file__).with_name("index_peer.py")
        self._process = stack.enter_context(
            subprocess.Popen([python, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        stack.callback(self._process.kill)

    def tell(self, **command: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")

    def ask(self, **command: Any) -> dict[str, Any]:
        """Raises `RuntimeError` when the process has ended: its own message is on stderr."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.tell(**command)
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def prepare(self, stored: Iterable[Stored]) -> None:
        for event in stored:
            parent = None if event.parent is None else event.parent[0]
            hashes, local = event.hashes.tolist(), event.local.tolist()
            self.tell(do="prepare", worker=event.worker, parent=parent, hashes=hashes, local=local)


def rss_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_bench_index(bench: IndexBench) -> dict[str, Any]:
    """Run it, and give the figures as one JSON object.

    apply_entries_per_s, bytes_per_entry (of resident memory), own_bytes_per_entry (as the index counts), and
    find: one row per kind and depth, its times in us. With a peer, the same of it under "peer", and how ours
    compares under "ratios": a rate above 1 and a time or weight below 1 are in our favour.
    """
    random = Random(SEED)
    made = prompts(bench.shape, bench.workers, bench.entries, random)
    with ExitStack() as stack:
        peer = None if bench.peer is None else _Peer(bench.peer, stack)
        ours = _Ours(bench.workers)
        entries = sum(blocks for prompt in made for _, blocks in prompt.holders)
        applied = ours.apply(events(made, bench.event_blocks))
        result: dict[str, Any] = {
            "index": f"{type(ours.index).__module__}.{type(ours.index).__name__}",
            "shape": bench.shape,
            "workers": bench.workers,
            "entries": entries,
            "event_blocks": bench.event_blocks,
            **_weights(applied, entries),
            "own_bytes_per_entry": ours.index.bytes_used / entries,
        }
        if peer is not None:
            peer.prepare(events(made, bench.event_blocks))
            result["peer"] = _weights(peer.ask(do="apply"), entries)
        result["find"] = [
            _measure(ours, peer, queries(made, kind, blocks, random), kind, bench.reps)
            for kind in KINDS
            for blocks in DEPTHS
        ]
    if peer is not None:
        result["peer"]["find"] = [row.pop("peer") for row in result["find"]]
        result["ratios"] = _ratios(result)
    return result


def _weights(applied: dict[str, float], entries: int) -> dict[str, float]:
    return {
        "apply_entries_per_s": entries / applied["apply_s"],
        "apply_cpu_us_per_entry": applied["cpu_s"] / entries * 1e6,
        "bytes_per_entry": applied["rss_bytes"] / entries,
    }


def _measure(
    ours: _Ours, peer: _Peer | None, asked: list[array[int]], kind: str, reps: int
) -> dict[str, Any]:
    blocks = len(asked[0])
    keys = [chained_keys(query) for query in asked]
    packed, ints = [one.tobytes() for one in keys], [one.tolist() for one in keys]
    reps = max(1, (reps if blocks < DEPTHS[-1] else reps // 2) // ROUNDS)
    mine, theirs = _Samples(), _Samples()
    from_ints = _Samples()
    if peer is not None:
        peer.tell(do="ask", queries=[query.tolist() for query in asked])
    for _ in range(ROUNDS):
        ours.find(packed, reps, mine)
        from_ints.latencies_us += ours.find_from_ints(ints, reps)
        if peer is not None:
            theirs.add(**peer.ask(do="find", reps=reps))
    row = {"kind": kind, "n": blocks, **mine.row(), "from_ints_p50_us": from_ints.quantile_us(0.5)}
    if peer is not None:
        row["peer"] = {"kind": kind, "n": blocks, **theirs.row()}
    return row


def _ratios(result: dict[str, Any]) -> dict[str, Any]:
    peer = result["peer"]
    pairs = zip(result["find"], peer["find"], strict=True)
    return {
        "apply": result["apply_entries_per_s"] / peer["apply_entries_per_s"],
        "bytes_per_entry": result["bytes_per_entry"] / peer["bytes_per_entry"],
        "find": [
            {
                "kind": mine["kind"],
                "n": mine["n"],
                "p50": mine["p50_us"] / theirs["p50_us"],
                "from_ints_p50": mine["from_ints_p50_us"] / theirs["p50_us"],
            }
            for mine, theirs in pairs
        ],
    }
