"""Driving an engine's scheduler on the clock, or at once, and telling answers what came of it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from kvroute.loadtests.mock_engine.answers import TokenAnswer
from kvroute.loadtests.mock_engine.pulls import Pull, plan_pull
from kvroute.loadtests.mock_engine.sequences import Phase, Sequence
from kvroute.loadtests.mock_engine.steps import Outcome

if TYPE_CHECKING:
    from kvroute.loadtests.mock_engine.engine import MockEngine


class Driver:
    """Of one engine incarnation."""

    def __init__(self, engine: MockEngine) -> None:
        self._engine = engine
        self._wake = asyncio.Event()
        self._stepper: asyncio.Task[None] | None = None
        self._is_up = False

    def start(self) -> None:
        """Begin to run what is queued."""
        self._is_up = True
        if not self._engine.options.instant:
            self._stepper = asyncio.get_running_loop().create_task(self._run_steps())

    async def stop(self) -> None:
        """Run nothing any more; idempotent."""
        self._is_up = False
        stepper, self._stepper = self._stepper, None
        if stepper is not None:
            stepper.cancel()
            with suppress(asyncio.CancelledError):
                await stepper

    def submit(self, answer: TokenAnswer) -> None:
        """Queue an answer's prompts once it is time to."""
        engine = self._engine
        pull = plan_pull(engine, answer)
        if engine.options.instant and (pull is None or not pull.seconds):
            self._enqueue(answer, pull)
            if not answer.ended:
                answer.start()
            return
        answer.start()
        delay_s = engine.options.request_overhead_s / engine.options.speed + (pull.seconds if pull else 0.0)
        asyncio.get_running_loop().call_later(delay_s, self._enqueue, answer, pull)

    def add(self, sequence: Sequence) -> None:
        """Queue one prompt."""
        self._engine.scheduler.add(sequence)
        self._more()

    def received(self, sequence: Sequence) -> None:
        """The KV of a remote prompt is here."""
        self._publish(self._engine.scheduler.receive(sequence))
        answer, index = sequence.payload
        self._engine.metrics.started(answer)
        if self._engine.options.instant:
            answer.on_tokens(index, answer.call.parts[index].output_tokens)
        else:
            self._wake.set()

    def compute_instead(self, answer: TokenAnswer, index: int) -> None:
        """The KV of a remote prompt will not come: queue the prompt again, to be computed here."""
        part = answer.call.parts[index]
        if part.sequence is not None:
            self._engine.scheduler.abort(part.sequence)
        part.sequence = self._sequence(answer, index)
        self.add(part.sequence)

    def let_go(self, sequence: Sequence) -> None:
        """Free the KV of a sequence that is held."""
        self._engine.scheduler.let_go(sequence)
        self._more()

    def reset_cache(self, *, running: bool) -> bool:
        """Forget every block; False, and none forgotten, while any is in use. Those of requests that are
        `running` need not be: they are computed again.
        """
        engine = self._engine
        again = engine.scheduler.preempt_all() if running else []
        cleared = engine.scheduler.clear()
        if cleared:
            engine.pd.forget()
            if engine.events is not None:
                engine.events.cleared = True
        if again and engine.options.instant:
            self._publish(engine.scheduler.resume_instantly(again))
        self._more()
        return cleared

    def ended(self, answer: TokenAnswer, outcome: str) -> None:
        """An answer is over: its sequences leave the scheduler."""
        engine = self._engine
        for part in answer.call.parts:
            sequence = part.sequence
            if sequence is None:
                continue
            is_whole = outcome == "finished" or engine.pd.holds.of(sequence) is not None
            if engine.options.instant and is_whole and sequence.phase is Phase.DECODING:
                finished = engine.scheduler.finish_instantly(sequence, sequence.output_tokens)
                self._publish(finished, one_by_one=True)
            else:
                engine.scheduler.abort(sequence)
            if engine.tiers is not None:
                engine.tiers.finish(part.keys, answer.hints, engine.options.block_size_tokens)
        self._more()

    def _sequence(self, answer: TokenAnswer, index: int) -> Sequence:
        part = answer.call.parts[index]
        id, tokens = answer.call.id, len(part.tokens)
        return Sequence(id, tokens, part.kv_output_tokens, part.keys, (answer, index))

    def _enqueue(self, answer: TokenAnswer, pull: Pull | None) -> None:
        if answer.ended:
            return
        engine = self._engine
        if engine.tiers is not None:
            for keys, start in pull.blocks if pull else ():
                engine.tiers.receive(keys, start)
            for part in answer.call.parts:
                engine.tiers.begin(part.keys, answer.hints, engine.options.block_size_tokens)
        for index, part in enumerate(answer.call.parts):
            part.sequence = self._sequence(answer, index)
            if engine.pd.queue(answer, index, part.sequence):
                engine.scheduler.add(part.sequence)
        self._more()

    def _more(self) -> None:
        """Something was queued, or freed."""
        if self._engine.options.instant:
            self._admit_instantly()
        else:
            self._wake.set()

    def _admit_instantly(self) -> None:
        engine = self._engine
        if not self._is_up or not engine.scheduler.waiting:
            return
        outcome = engine.scheduler.admit_instantly()
        self._publish(outcome)
        fetches = engine.scheduler.take_fetches()
        for sequence in outcome.tokens:
            self._begun(sequence)
            if sequence.hold:
                engine.pd.prefilled(sequence)
            answer, index = sequence.payload
            answer.on_tokens(index, answer.call.parts[index].output_tokens)
        for sequence in fetches:
            engine.pd.fetch(sequence)

    async def _run_steps(self) -> None:
        """Let the scheduler's time pass on the clock, without drift while there is work."""
        loop, engine = asyncio.get_running_loop(), self._engine
        due_s = 0.0
        while True:
            step = engine.scheduler.step()
            fetches = engine.scheduler.take_fetches()
            for sequence in fetches:
                engine.pd.fetch(sequence)
            if step is None:
                if fetches:
                    continue  # what came at once can run
                self._wake.clear()
                await self._wake.wait()
                due_s = loop.time()
                continue
            for sequence, _ in step.prefills:
                self._begun(sequence)
            due_s = max(due_s, loop.time() - 0.05) + step.duration_s / engine.options.speed
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            self._tell(engine.scheduler.complete(step))

    def _begun(self, sequence: Sequence) -> None:
        self._engine.metrics.started(sequence.payload[0])
        self._engine.pd.begun(sequence)

    def _tell(self, outcome: Outcome) -> None:
        """Pass a step's tokens on."""
        self._publish(outcome)
        for sequence in outcome.finished:
            if sequence.hold:
                self._engine.pd.prefilled(sequence)
        for sequence in outcome.tokens:
            answer, index = sequence.payload
            extra = 0
            if sequence.generated_tokens == sequence.output_tokens:
                extra = answer.call.parts[index].output_tokens - sequence.output_tokens
            answer.on_tokens(index, 1 + extra)

    def _publish(self, outcome: Outcome, one_by_one: bool = False) -> None:
        engine = self._engine
        if outcome.removed:
            engine.pd.evicted(outcome.removed)
        if engine.events is None:
            return
        if not engine.options.tier_events:
            outcome.demoted, outcome.offloaded = [], []
        if outcome.has_changes or engine.events.cleared:
            engine.events.publish(engine, outcome, one_by_one)
