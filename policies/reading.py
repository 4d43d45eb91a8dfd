"""What several rules read off a fleet in the same way."""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.policies.costs.pace import Pace
from kvroute.types import Fleet, RequestView

DEFAULT_BLOCK_TOKENS = 16
"""vLLM's default; where nobody says how many tokens a block has."""
_DEFAULT_PACE = Pace()


def matched_tokens(request: RequestView, fleet: Fleet) -> list[int]:
    """Tokens of the prompt's beginning that each worker is thought to hold in any tier; at most all of it."""
    prompt = request.prompt_tokens
    if not fleet.matches:
        return [0] * len(fleet.workers)
    return [match.tokens if match.tokens < prompt else prompt for match in fleet.matches]


def paces_of(fleet: Fleet) -> Sequence[Pace]:
    """Parallel to the workers; the default preset where none are known."""
    return fleet.paces or [_DEFAULT_PACE] * len(fleet.workers)


def reason_of(matched: Sequence[int], at: int) -> str:
    """`moved` when somebody holds more of the prompt than the chosen worker, else `cached`, or `cold`."""
    if matched[at] < max(matched):
        return "moved"
    return "cached" if matched[at] else "cold"
