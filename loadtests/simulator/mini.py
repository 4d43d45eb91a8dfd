"""The engine of Dynamo's mocker, whose results on public traces are exactly known: a check of the simulator.

step ms = prefill(T) + decode(p)
prefill = 4.209989e-7 T^2 + 1.518344e-2 T + 16.50142     T new tokens in the step, if any
decode  = max(1, -25.74 p^2 + 54.01 p + 5.74)            p = KV tokens of its decodes / capacity, if any
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvroute.loadtests.mock_engine.scheduler import Scheduler
from kvroute.loadtests.mock_engine.sequences import Phase, Sequence
from kvroute.loadtests.mock_engine.steps import Outcome, Step
from kvroute.loadtests.simulator.setting import Setting
from kvroute.policies.costs.speeds import Speed

KV_TOKENS = 16_384 * 64


@dataclass(frozen=True, slots=True)
class MiniTimes:
    """The polynomials of ai-dynamo/dynamo, lib/mocker. A decode's KV counts the token it computes."""

    kv_tokens: int = KV_TOKENS

    def step_s(self, prefill_tokens: int, attention: float, decodes: int, context_tokens: float) -> float:
        """Seconds; what the prefill attends to does not matter."""
        step_ms = 0.0
        if prefill_tokens:
            step_ms += (4.209989e-7 * prefill_tokens + 1.518344e-2) * prefill_tokens + 16.50142
        if decodes:
            used = (context_tokens + decodes) / self.kv_tokens
            step_ms += max(1.0, (-25.74 * used + 54.01) * used + 5.74)
        return step_ms / 1e3


class MiniScheduler(Scheduler):
    """What the mocker does otherwise: a block is shared as soon as its chunk is in a step, also with who is
    let into the same one (as in vLLM); new tokens count as chunks times the difference of two means in whole
    tokens.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._shared = Outcome()

    def complete(self, step: Step) -> Outcome:
        """The index hears of blocks when their step is over, as of any other's."""
        outcome = super().complete(step)
        outcome.stored = self._shared.stored + outcome.stored
        self._shared = Outcome()
        return outcome

    def _grow(self, sequence: Sequence, tokens: int, victims: list[Sequence], step: Step) -> bool:
        grown = super()._grow(sequence, tokens, victims, step)
        if grown and sequence.phase is Phase.PREFILLING:
            self._share(sequence, tokens)
        return grown

    def _take_room(self, sequence: Sequence, tokens: int | None, budget: int = 0) -> bool:
        taken = super()._take_room(sequence, tokens, budget)
        if taken and not sequence.remote:
            self._share(sequence, min(sequence.known_tokens - sequence.computed_tokens, budget))
        return taken

    def _share(self, sequence: Sequence, tokens: int) -> None:
        """Its next chunk is in the step."""
        sequence.computed_tokens += tokens
        self._publish(sequence, self._shared)
        sequence.computed_tokens -= tokens

    def _mixed_s(self, step: Step, context: int) -> float:
        chunks = len(step.prefills)
        before = sum([sequence.computed_tokens for sequence, _ in step.prefills])
        after = before + sum([tokens for _, tokens in step.prefills])
        return self._speed.step_s(
            chunks * (after // chunks - before // chunks), 0.0, len(step.decodes), context
        )


MINI = Setting(
    # What the router thinks of it: lines through both polynomials where traces lie. The prefill's goes over
    # whole chunks, as a longer prompt is one chunk after another; the decode's from a tenth of the room on.
    speed=Speed(16.5, 9.0, 0.0199, 0.0, 7.0, 0.0, 36.0 / KV_TOKENS, KV_TOKENS, 131_072),
    scale=1.0,
    kv_tokens=KV_TOKENS,
    block_tokens=64,
    keeps_output=True,
    step_times=MiniTimes(),
    scheduler=MiniScheduler,
)
"""Eight of them."""
