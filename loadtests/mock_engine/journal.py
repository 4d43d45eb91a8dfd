"""What really happened at an engine, for /debug and for tests."""

from __future__ import annotations

import base64
import time
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

from kvroute.loadtests.mock_engine.wire import Request


@dataclass(slots=True, eq=False)
class Entry:
    """One generation request."""

    id: str
    path: str
    received_s: float
    """Seconds since the epoch, as every `_s` here."""
    status: int | None = None
    outcome: str = "open"
    """open | finished | aborted (the client left) | rejected (an error answer) | broken (a fault cut it) |
    fatal (it ended the process)"""
    ended_s: float | None = None
    events: int = 0
    """Tokens put on the wire."""
    hints: dict[str, Any] = field(default_factory=dict)
    """What it said of its KV."""
    pulled_tokens: int | None = None
    """Of its prompt, from a peer; None when it named none."""

    def as_dict(self) -> dict[str, Any]:
        """As /debug shows it."""
        return {
            "outcome": self.outcome,
            "path": self.path,
            "status": self.status,
            "received_s": self.received_s,
            "ended_s": self.ended_s,
            "events": self.events,
            "hints": self.hints,
            "pulled_tokens": self.pulled_tokens,
        }


@dataclass(slots=True)
class Journal:
    """Bounded in entries; the totals are not."""

    max_ids: int
    max_requests: int
    totals: Counter[str] = field(default_factory=Counter)
    entries: OrderedDict[str, Entry] = field(default_factory=OrderedDict)
    """By request id; a repeated id shows its latest request."""
    received: deque[str] = field(init=False)
    requests: deque[tuple[str | None, Request]] = field(init=False)
    """The last generation requests whole, with their ids."""
    polls: deque[tuple[str | None, Request]] = field(init=False)
    """The last requests of other paths."""
    closed_sessions: deque[str] = field(init=False)
    """Sessions that clients ended."""

    def __post_init__(self) -> None:
        self.received = deque(maxlen=self.max_ids)
        self.requests = deque(maxlen=self.max_requests)
        self.polls = deque(maxlen=self.max_requests)
        self.closed_sessions = deque(maxlen=self.max_ids)

    def open(self, id: str, request: Request) -> Entry:
        """Note a generation request that arrived."""
        entry = Entry(id, request.path, time.time())
        self.totals["received"] += 1
        self.received.append(id)
        self.requests.append((id, request))
        self.entries[id] = entry
        self.entries.move_to_end(id)
        if len(self.entries) > self.max_ids:
            self.entries.popitem(last=False)
        return entry

    def poll(self, request: Request) -> None:
        """Note a request of any other path."""
        self.totals["polled"] += 1
        self.polls.append((None, request))

    def end(self, entry: Entry, outcome: str) -> None:
        """Note how it ended; the first ending counts."""
        if entry.outcome == "open":
            entry.outcome = outcome
            entry.ended_s = time.time()
            self.totals[outcome] += 1

    def outcome(self, id: str) -> str | None:
        """The outcome of a request id; None when it never arrived."""
        entry = self.entries.get(id)
        return None if entry is None else entry.outcome

    def ids(self, outcome: str) -> list[str]:
        """Ids with that outcome, oldest first."""
        return [entry.id for entry in self.entries.values() if entry.outcome == outcome]

    def as_dict(self) -> dict[str, Any]:
        """As /debug shows it."""
        names = ("received", "finished", "aborted", "rejected", "broken", "fatal", "polled")
        return {
            **{f"{name}_total": self.totals[name] for name in names},
            "received": list(self.received),
            "finished": self.ids("finished"),
            "aborted": self.ids("aborted"),
            "outcomes": {entry.id: entry.as_dict() for entry in self.entries.values()},
        }

    def requests_as_list(self, polls: bool = False) -> list[dict[str, Any]]:
        """The last requests, or the last of other paths, bodies in base64."""
        return [
            {
                "id": id,
                "method": request.method.decode("latin-1"),
                "path": request.path,
                "query": request.query.decode("latin-1"),
                "headers": [[k.decode("latin-1"), v.decode("latin-1")] for k, v in request.headers],
                "body_b64": base64.b64encode(request.body).decode(),
            }
            for id, request in (self.polls if polls else self.requests)
        ]
