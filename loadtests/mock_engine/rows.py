"""Steps in a row that only decode: how many are alike, how long they take together, where to cut them."""

from __future__ import annotations

from collections.abc import Sequence as Many

from kvroute.loadtests.mock_engine.sequences import Sequence
from kvroute.loadtests.mock_engine.steps import StepTimes


def row_s(speed: StepTimes, steps: int, decodes: int, context_tokens: float) -> float:
    """Seconds of so many steps that only decode, each adding a token per sequence to the context.

    The sum of a quadratic over j = 0 .. n-1 is n f(m) + a n (n^2 - 1) / 12, with m = (n-1)/2 and the
    curvature a = (f(0) - 2 f(m) + f(n-1)) / (2 m^2).
    """
    first_s = speed.step_s(0, 0.0, decodes, context_tokens)
    if steps == 1:
        return first_s
    half = (steps - 1) / 2
    middle_s = speed.step_s(0, 0.0, decodes, context_tokens + half * decodes)
    last_s = speed.step_s(0, 0.0, decodes, context_tokens + (steps - 1) * decodes)
    return steps * middle_s + (first_s - 2 * middle_s + last_s) * (steps + 1) * steps / (6 * (steps - 1))


def longest_s(speed: StepTimes, steps: int, decodes: int, context_tokens: float) -> float:
    """Seconds of the longest of them: the last, as time grows with the context."""
    return speed.step_s(0, 0.0, decodes, context_tokens + (steps - 1) * decodes)


def steps_until(speed: StepTimes, elapsed_s: float, most: int, decodes: int, context_tokens: float) -> int:
    """How many steps end with the one that runs `elapsed_s` after the beginning: 1 to `most`."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if row_s(speed, middle, decodes, context_tokens) < elapsed_s:
            low = middle + 1
        else:
            high = middle
    return low


def steps_alike(decodes: Many[Sequence], block_tokens: int, free_blocks: int) -> int:
    """How many steps may follow one another, the first included, for which there is room, until one of these
    sequences ends or a block must be evicted.

    Nobody who waits can be let in before: a block published meanwhile that he could share leaves its owner
    in need of another.
    """
    steps = min([one.output_tokens - one.generated_tokens for one in decodes])
    slacks = [
        (one.resident_blocks + one.private_blocks) * block_tokens - one.computed_tokens for one in decodes
    ]
    growth = sum([-((slack - steps) // block_tokens) for slack in slacks if slack < steps])
    return steps if growth <= free_blocks else min(steps, *slacks)
