"""The three streams of a deployment, and the times both ends agree on."""

from __future__ import annotations

from dataclasses import dataclass

FLUSH_S = 0.005
"""What is routed within it is told in one call."""
LOADS_S = 0.05
"""Between two reports of a load that changes."""
HEARTBEAT_S = 1.0
"""Between two reports of a load that does not."""
LOAD_TTL_S = 3.0
"""A replica not heard of for so long carries nothing."""
REPEAT_S = 10.0
"""Each replica repeats all decisions about workers so often, so that who joins learns them from any."""
WORKERS_BACK_S = 3 * REPEAT_S
REPORTS_KEPT = 256
DECISIONS_KEPT = 1024


@dataclass(frozen=True, slots=True)
class Streams:
    """Key names; each stream has a bounded length and expires when nobody writes to it."""

    routed: str
    loads: str
    workers: str

    @classmethod
    def under(cls, prefix: str) -> Streams:
        return cls(f"{prefix}:routed", f"{prefix}:loads", f"{prefix}:workers")
