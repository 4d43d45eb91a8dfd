"""What an engine's part in prefill and decode came to; only /debug reads it, and it outlives restarts."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class PdBooks:
    """Counters are unbounded, lists hold the last `max_ids`. What should never happen has a list of ids."""

    max_ids: int
    held_total: int = 0
    """Prompts whose KV was kept for a decode engine."""
    freed_by: Counter[str] = field(default_factory=Counter)
    """Of those, which ended how: pulled, released, expired, aborted, or lost with the process."""
    received_tokens: int = 0
    """Prompt tokens whose KV came from elsewhere."""
    failed_loads: int = 0
    """KV that did not come, as its prefill engine was gone: its prompt was computed, or it failed."""
    deaths: int = 0
    """Requests that ended the process."""
    totals: Counter[str] = field(default_factory=Counter)
    lists: dict[str, deque[Any]] = field(default_factory=dict)

    def note(self, what: str, item: Any) -> None:
        """Something that should never happen did: wrong_text, unknown, order_violations or repeated."""
        self.totals[what] += 1
        self.lists.setdefault(what, deque(maxlen=self.max_ids)).append(item)

    def as_dict(self) -> dict[str, Any]:
        """As /debug shows it."""
        loud = ("wrong_text", "unknown", "order_violations", "repeated")
        freed = {why: self.freed_by[why] for why in ("pulled", "released", "expired", "aborted", "lost")}
        return {
            "held_total": self.held_total,
            "released_by": freed,
            "expired_total": self.freed_by["expired"],
            "received_tokens": self.received_tokens,
            "failed_loads": self.failed_loads,
            "deaths": self.deaths,
            **{name: self.totals[name] for name in loud},
            **{f"{name}_ids": list(self.lists.get(name, ())) for name in loud},
        }
