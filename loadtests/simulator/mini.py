"""The engine of Dynamo's mocker, whose results on public traces are exactly known: a check of the simulator.

step ms = prefill(T) + decode(p)
prefill = 4.209989e-7 T^2 + 1.518344e-2 T + 16.50142     T new tokens in the step, if any
decode  = max(1, -25.74 p^2 + 54.01 p + 5.74)            p = KV tokens of its decodes / capacity, 1 at most

Where prefill and decode are apart it is less of a machine than vLLM with its NixlConnector, for which
`Scheduler` stands. The first token comes of a decode step over the whole prompt, none of it computed again.
KV takes no time on its way unless the setting's link does, and joins the step that begins when there is room
for it: room is given between two steps, before those that decode grow. While a prompt waits for room there,
nobody that was preempted runs again, and what such a one computes again takes no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

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
            used = min(1.0, (context_tokens + decodes) / self.kv_tokens)
            step_ms += max(1.0, (-25.74 * used + 54.01) * used + 5.74)
        return step_ms / 1e3


class MiniScheduler(Scheduler):
    """What the mocker does otherwise: a block is shared as soon as its chunk is in a step, also with who is
    let into the same one (as in vLLM); a prompt is let in when all of it would fit; the last one admitted is
    preempted, whatever it does; new tokens count as chunks times the difference of two means in whole tokens.
    """

    reserves: ClassVar[bool] = True

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._shared = Outcome()
        self._turns: dict[Sequence, int] = {}
        """Of those admitted, in order."""
        self._turn = 0

    def complete(self, step: Step) -> Outcome:
        """The index hears of blocks when their step is over, as of any other's."""
        outcome = super().complete(step)
        if any([sequence.received for sequence, _ in step.prefills]):
            self.decoding.sort(key=self._turns.__getitem__)
        outcome.stored = self._shared.stored + outcome.stored
        self._shared = Outcome()
        return outcome

    def reserve(self) -> bool:
        """The first of the remote prompts is given room, before anybody decoding grows."""
        sequence = next((one for one in self.waiting if one.remote), None)
        if sequence is None or len(self.decoding) + len(self.prefilling) >= self._max_sequences:
            return False
        if not self._take_room(sequence, sequence.prompt_tokens):
            return False
        self.waiting.remove(sequence)
        self._await(sequence)
        return True

    def receive(self, sequence: Sequence) -> Outcome:
        """It waits, with its room, behind those that were preempted."""
        outcome = super().receive(sequence)
        self.decoding.remove(sequence)
        sequence.phase = Phase.WAITING
        self.waiting.append(sequence)
        return outcome

    def _admit(self, step: Step, budget: int) -> None:
        """In order, also those whose KV has come; while a remote prompt has no room, those alone."""
        is_full = any([one.remote for one in self.waiting])
        while self.waiting and len(self.decoding) + len(self.prefilling) < self._max_sequences:
            sequence = self.waiting[0]
            if is_full:
                sequence = next(filter(_has_come, self.waiting), sequence)
            tokens: int | None = None
            if _has_come(sequence):
                self._join(step, sequence)
                tokens = 0
            elif budget and not is_full:
                tokens = self._admit_first(step, budget)
            if tokens is None:
                return
            self._turn += 1
            self._turns[sequence] = self._turn
            budget -= tokens
            if not budget and not tokens:
                return

    def _join(self, step: Step, sequence: Sequence) -> None:
        """Its prompt's KV is here: it decodes in this step."""
        self.waiting.remove(sequence)
        sequence.phase = Phase.DECODING
        self.decoding.append(sequence)
        step.decodes.append(sequence)
        step.context_tokens += sequence.computed_tokens

    def _grow(self, sequence: Sequence, tokens: int, victims: list[Sequence], step: Step) -> bool:
        running = [*self.decoding[-1:], *self.prefilling[-1:]]
        grown = super()._grow(sequence, tokens, [max(running, key=self._turns.__getitem__)], step)
        if grown and sequence.phase is Phase.PREFILLING:
            self._share(sequence, tokens)
        return grown

    def _repeats(self, step: Step) -> int:
        """Not beyond the step in which more is attended to than there is room, as prompts share blocks: from
        there on a step takes no longer.
        """
        decodes, capacity = len(step.decodes), self.cache.capacity_blocks * self._block_tokens
        below = (capacity - step.context_tokens) // decodes
        repeats = super()._repeats(step)
        return min(repeats, below) if below > 0 else repeats

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        if sequence in step.decodes:
            step.decodes.remove(sequence)
            step.context_tokens -= sequence.computed_tokens
        super()._preempt(sequence, step)

    def _release(self, sequence: Sequence, phase: Phase) -> None:
        self._turns.pop(sequence, None)
        super()._release(sequence, phase)

    def _take_room(self, sequence: Sequence, tokens: int | None, budget: int = 0) -> bool:
        if not sequence.remote:
            known, block_tokens = sequence.known_tokens, self._block_tokens
            hits = self.cache.match(sequence.keys[: (known - 1) // block_tokens])
            if not self.cache.fits(sequence.keys[:hits], self._blocks(known) - hits):
                return False
        taken = super()._take_room(sequence, tokens, budget)
        if taken and not sequence.remote:
            self._share(sequence, min(sequence.known_tokens - sequence.computed_tokens, budget))
        return taken

    def _share(self, sequence: Sequence, tokens: int) -> None:
        """Its next chunk is in the step."""
        sequence.computed_tokens += tokens
        self._publish(sequence, self._shared)
        sequence.computed_tokens -= tokens

    def _mixed_s(self, step: Step) -> float:
        chunks = before = after = 0
        decodes, context = len(step.decodes), step.context_tokens
        for sequence, tokens in step.prefills:
            computed = sequence.computed_tokens + tokens
            if not sequence.received:
                chunks, before, after = chunks + 1, before + sequence.computed_tokens, after + computed
            elif computed == sequence.known_tokens:
                decodes, context = decodes + 1, context + computed - 1
        tokens = chunks * (after // chunks - before // chunks) if chunks else 0
        return self._speed.step_s(tokens, 0.0, decodes, context)


def _has_come(sequence: Sequence) -> bool:
    """Whether its KV came from elsewhere, and it is to decode from the next step on."""
    return sequence.received and sequence.private_blocks + sequence.resident_blocks > 0


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
    decode_later=True,
)
"""Eight of them. Dynamo's own handoffs take no time; here they take what `handoff` says."""
