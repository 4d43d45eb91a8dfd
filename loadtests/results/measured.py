"""One request as measured, in virtual time or live, and what makes it a good one."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct


class Measured(Struct, frozen=True, gc=False):
    """Times in seconds since the run began. Of a failed request `end_s` is None, and `failure` says why."""

    arrival_s: float
    """When it was due, not when it could be sent: no coordinated omission."""
    prompt_tokens: int
    output_tokens: int
    """That came, or of a failed one, that were asked for."""
    worker: str = ""
    """Who decoded it; empty when nobody did, or nobody told."""
    prefill_worker: str = ""
    """Who prefilled it: another one when it was split."""
    sent_s: float | None = None
    """When it was sent, or, simulated, when its worker was chosen."""
    start_s: float | None = None
    """When its prefill began; None where nobody tells."""
    first_s: float | None = None
    end_s: float | None = None
    longest_gap_s: float | None = None
    """Between two of its tokens; None for one token, or where nobody tells."""
    gpu_tokens: int = 0
    """Of the prompt, found in the prefill worker's GPU."""
    cpu_tokens: int = 0
    """Loaded from below it; the same for disk and peers."""
    disk_tokens: int = 0
    peer_tokens: int = 0
    predicted_ttft_s: float | None = None
    """From the choice of the worker on; compare with `first_s - sent_s`."""
    retries: int = 0
    failure: str | None = None
    rejected: bool = False
    """Refused by admission: a failure that was meant."""

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, that no engine had to compute."""
        return self.gpu_tokens + self.cpu_tokens + self.disk_tokens + self.peer_tokens

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token; infinite for a failure."""
        if self.failure is not None or self.first_s is None:
            return float("inf")
        return self.first_s - self.arrival_s

    @property
    def e2e_s(self) -> float:
        """From arrival to the last token; infinite for a failure."""
        if self.failure is not None or self.end_s is None:
            return float("inf")
        return self.end_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; infinite for a failure, not a number for a single token."""
        if self.failure is not None or self.end_s is None or self.first_s is None:
            return float("inf")
        return (
            (self.end_s - self.first_s) / (self.output_tokens - 1) if self.output_tokens > 1 else float("nan")
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must keep to be a good one; TPOT is undefined, and kept, for a single token.

    With `ttft_s_per_token`, prompts get so much more time for every token that is not cached.
    """

    ttft_s: float = 2.0
    tpot_s: float = 0.025
    ttft_s_per_token: float = 0.0

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.ttft_s_per_token < float("inf"):
            raise ValueError(f"ttft_s_per_token must be 0 or more, got {self.ttft_s_per_token}")
