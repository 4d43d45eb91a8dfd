"""Drives Dynamo's RadixTree binding for the index benchmark, in a process and an interpreter of its own.

Run as a script with nothing but the standard library and that binding. It reads one JSON command a line and
answers each with one JSON line:

    {"do": "prepare", "worker", "parent", "hashes", "local"}   no answer: an event, serialised now
    {"do": "apply"}                        -> {"apply_s", "cpu_s", "rss_bytes"}
    {"do": "ask", "queries": [...]}        no answer: what "find" asks
    {"do": "find", "reps"}                 -> {"latencies_us": [...], "cpu_s", "matched", "workers"}
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from typing import Any


def rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peer:
    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self.events: list[tuple[int, bytes]] = []
        self.queries: list[list[int]] = []

    def prepare(self, worker: int, parent: int | None, hashes: list[int], local: list[int]) -> None:
        blocks = [{"block_hash": name, "tokens_hash": own} for name, own in zip(hashes, local, strict=True)]
        event = {"event_id": len(self.events) + 1, "dp_rank": 0}
        event["data"] = {"stored": {"parent_hash": parent, "blocks": blocks}}  # type: ignore[assignment]
        self.events.append((worker, json.dumps(event).encode()))

    def apply(self) -> dict[str, float]:
        gc.collect()
        before = rss_bytes()
        cpu_s, start_s = time.process_time(), time.perf_counter()
        for worker, event in self.events:
            self.tree.apply_event(worker, event)
        self.tree.find_matches([1])  # the binding applies on a thread of its own: wait for it
        elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
        return {"apply_s": elapsed_s, "cpu_s": cpu_s, "rss_bytes": rss_bytes() - before}

    def ask(self, queries: list[list[int]]) -> None:
        self.queries = queries

    def find(self, reps: int) -> dict[str, Any]:
        latencies_us, scores = [], {}
        cpu_s = time.process_time()
        for rep in range(reps):
            query = self.queries[rep % len(self.queries)]
            start_s = time.perf_counter()
            found = self.tree.find_matches(query)
            latencies_us.append((time.perf_counter() - start_s) * 1e6)
            scores = found.scores
        cpu_s = time.process_time() - cpu_s
        matched = max(scores.values(), default=0)
        return {"latencies_us": latencies_us, "cpu_s": cpu_s, "matched": matched, "workers": len(scores)}


def main() -> None:
    import dynamo._core  # type: ignore[import-not-found]

    peer = Peer(dynamo._core.RadixTree())
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(peer, command.pop("do"))(**command)
        if answer is not None:
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
