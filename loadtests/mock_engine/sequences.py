"""What the scheduler schedules: one prompt, its output and the blocks they hold."""

from __future__ import annotations

from collections.abc import Sequence as Keys
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Phase(Enum):
    """Where a sequence is in its life."""

    NEW = "new"
    """Not the scheduler's yet."""
    WAITING = "waiting"
    LOADING = "loading"
    """Its prefix comes up from the tiers below the GPU."""
    RECEIVING = "receiving"
    """Its prompt's KV comes from a prefill worker."""
    PREFILLING = "prefilling"
    DECODING = "decoding"
    HELD = "held"
    """Over, but its KV stays for a decode worker to fetch."""
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and its output. The scheduler owns every field below `hold`."""

    id: str
    prompt_tokens: int
    output_tokens: int
    keys: Keys[int]
    """Chained keys of the full blocks of prompt and output; blocks past its end are never shared."""
    payload: Any = None
    """The driver's own."""
    remote: bool = False
    """A prefill worker has computed the prompt; `Scheduler.receive` says when its KV is here. Only once:
    after a preemption it is computed like any other."""
    hold: bool = False
    """Its KV stays after its end, until `Scheduler.let_go`."""
    received: bool = False
    """Its prompt's KV came from a prefill worker."""
    phase: Phase = Phase.NEW
    cached_tokens: int | None = None
    """Prompt tokens found in the GPU or below it at first admission; None before."""
    loaded_tokens: int = 0
    """Of those, found below it; and of these, below the first tier."""
    disk_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    resident_blocks: int = 0
    """Leading blocks held under `keys`."""
    private_blocks: int = 0

    @property
    def known_tokens(self) -> int:
        """Prompt and what was generated so far: what a prefill must compute before the next token."""
        return self.prompt_tokens + self.generated_tokens
