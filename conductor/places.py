"""Where the answers about some workers belong, and how rows of blocks become matches of theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from kvroute.conductor.block_index import Match
from kvroute.types import NO_MATCH, FoundMatches, PrefixMatch

FEW = 4
"""Of so many workers one may hold something for them to be named: more are read faster one after another."""


@dataclass(frozen=True, slots=True)
class Places:
    """Of one sequence of worker ids."""

    worker_ids: Sequence[str]
    """Kept, so that no other sequence can have its identity."""
    at: dict[str, int]
    """Worker id -> index."""
    slots: dict[int, dict[int, int]] = field(default_factory=dict)
    """Tokens per block -> slot of a holder -> its worker's index."""
    ranks: dict[int, int] = field(default_factory=dict)
    """Slot -> data-parallel rank, of workers that have several."""

    @classmethod
    def of(cls, worker_ids: Sequence[str]) -> Places:
        """Without any slots."""
        return cls(worker_ids, {name: at for at, name in enumerate(worker_ids)})

    def put_confirmed(self, rows: Sequence[Match], block_tokens: int, matches: FoundMatches) -> None:
        """Of several ranks the best counts. Equal rows share one object: there may be hundreds."""
        slots, ranks = self.slots.get(block_tokens, {}), self.ranks
        shared: dict[tuple[int, ...] | int, PrefixMatch] = {}
        for slot, gpu, _, _, gpu_cpu, known, probable in rows:
            at = slots.get(slot)
            if at is None:
                continue
            # Nothing beyond the GPU's: a number instead of a tuple, which takes half the time.
            counts = gpu if gpu == probable else (gpu, gpu_cpu, known, probable)
            match = shared.get(counts)
            if match is None:
                match = shared[counts] = PrefixMatch(
                    probable * block_tokens, gpu * block_tokens, gpu_cpu * block_tokens, known * block_tokens
                )
            if ranks and slot in ranks:
                other = matches[at]
                if (match.tokens, match.gpu_tokens) <= (other.tokens, other.gpu_tokens):
                    continue
                match = replace(match, dp_rank=ranks[slot])
            matches[at] = match
        if matches.places is not None:
            if len(rows) * FEW > len(matches):
                matches.places = None
            else:
                matches.places += [slots[row[0]] for row in rows if row[0] in slots]

    def put_predicted(self, tokens_by_worker: Mapping[str, int], matches: FoundMatches) -> None:
        """What was sent to workers, those included that nobody asks about."""
        shared: dict[tuple[int, int], PrefixMatch] = {}
        places = matches.places
        for worker_id, tokens in tokens_by_worker.items():
            at = self.at.get(worker_id)
            if at is None:
                continue
            match = matches[at]
            if match is NO_MATCH and places is not None:
                places.append(at)
            both = shared.get((id(match), tokens))
            if both is None:
                both = shared[id(match), tokens] = PrefixMatch(
                    match.tokens if match.tokens > tokens else tokens,
                    match.gpu_tokens,
                    match.cpu_tokens,
                    match.confirmed_tokens,
                    tokens,
                    match.dp_rank,
                )
            matches[at] = both
