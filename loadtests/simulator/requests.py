"""One request in the simulator: what became of it, and each attempt to run it on some workers."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from kvroute.loadtests.mock_engine.sequences import Sequence as EngineSequence
from kvroute.loadtests.results.measured import Measured
from kvroute.loadtests.simulator.peers import Pulled
from kvroute.loadtests.simulator.placing import Ask, Placement
from kvroute.loadtests.traces.arrivals import Arrival


class Record(Struct, gc=False):
    """One request and what became of it; times in seconds since the start."""

    arrival: Arrival
    number: int = 0
    """In order of arrival."""
    prefill: int = -1
    """Index of the worker it was sent to first; -1 when to none."""
    worker: int = -1
    """The same of the one that decodes it: another one where prefill and decode are apart."""
    placed_s: float | None = None
    """When its workers were chosen, for the last time."""
    start_s: float | None = None
    """When its prefill began."""
    first_s: float | None = None
    end_s: float | None = None
    longest_gap_s: float = 0.0
    """Between two of its tokens."""
    gpu_tokens: int = 0
    """Of the prompt, found in the prefill worker's GPU; below it, what came from elsewhere."""
    cpu_tokens: int = 0
    disk_tokens: int = 0
    peer_tokens: int = 0
    matched_tokens: int = 0
    """What the index promised at the choice."""
    predicted_ttft_s: float | None = None
    retries: int = 0
    rejected: str | None = None
    """Why, when admission refused it."""
    failure: str | None = None
    """Why it did not end, when it was not refused."""

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, that no engine had to compute."""
        return self.gpu_tokens + self.cpu_tokens + self.disk_tokens + self.peer_tokens

    @property
    def is_over(self) -> bool:
        return self.end_s is not None or self.failure is not None or self.rejected is not None

    def measured(self, names: Sequence[str], token_overhead_s: float = 0.0) -> Measured:
        """What a client would have measured; `names` of the workers."""
        tokens, first_s, end_s = self.arrival.output_tokens, self.first_s, self.end_s
        if end_s is not None:
            end_s += token_overhead_s * (tokens - 1)
        has_gap = end_s is not None and tokens > 1
        return Measured(
            arrival_s=self.arrival.arrival_s,
            prompt_tokens=self.arrival.view.prompt_tokens,
            output_tokens=tokens,
            worker=names[self.worker] if self.worker >= 0 else "",
            prefill_worker=names[self.prefill] if self.prefill >= 0 else "",
            sent_s=self.placed_s,
            start_s=self.start_s,
            first_s=first_s,
            end_s=end_s,
            longest_gap_s=self.longest_gap_s + token_overhead_s if has_gap else None,
            gpu_tokens=self.gpu_tokens,
            cpu_tokens=self.cpu_tokens,
            disk_tokens=self.disk_tokens,
            peer_tokens=self.peer_tokens,
            predicted_ttft_s=self.predicted_ttft_s,
            retries=self.retries,
            failure=self.failure or self.rejected,
            rejected=self.rejected is not None,
        )


class Attempt(Struct, eq=False):
    """A request on the workers chosen for it; what a sequence of an engine belongs to."""

    record: Record
    ask: Ask[Record]
    placement: Placement
    tried: tuple[int, ...] = ()
    """Workers that failed it before."""
    life: int = 0
    """Of its prefill worker, when it was sent there."""
    pulled: Pulled | None = None
    """What comes, or came, from a peer for it."""
    held: EngineSequence | None = None
    """Of a split request, the sequence whose KV its prefill worker keeps until it has left."""
    is_over: bool = False
    """It has ended, or failed: what was still to come of it does not."""
    since: int = 0
    """Steps of its engine when it had its first token."""
    stalled_s: float | None = None
    """When it had its last token, while it is computed again."""
