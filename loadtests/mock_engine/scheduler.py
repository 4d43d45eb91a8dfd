"""The step scheduler of an engine: decodes first, then prefill chunks within a token budget.

Pure: no clock, no I/O. `step()` decides one step and says how long it takes; `complete()` applies it and
says what came of it. Whoever drives it lets that time pass in between, on a real clock or a virtual one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvroute.loadtests.mock_engine.block_cache import BlockCache
from kvroute.loadtests.mock_engine.sequences import Phase, Sequence
from kvroute.loadtests.mock_engine.speeds import Speed


@dataclass(slots=True)
class Step:
    """What one step runs."""

    duration_s: float = 0.0
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)
    """(sequence, tokens of its chunk)"""
    decodes: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks `start` to `stop` of a sequence became resident."""

    sequence: Sequence
    start: int
    stop: int


@dataclass(slots=True)
class Outcome:
    """What a step did. Removals happened before the stores that needed their room."""

    tokens: list[Sequence] = field(default_factory=list)
    """Each got one more token."""
    finished: list[Sequence] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Totals:
    """Counters since the start."""

    queried_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """Chunked prefill, prefix sharing, decode growth and recompute preemption over one block cache."""

    def __init__(
        self,
        cache: BlockCache,
        speed: Speed,
        block_tokens: int,
        max_batched_tokens: int = 8192,
        max_sequences: int = 256,
    ) -> None:
        self.cache = cache
        self.totals = Totals()
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self._speed = speed
        self._block_tokens = block_tokens
        self._max_batched_tokens = max_batched_tokens
        self._max_sequences = max_sequences

    def __repr__(self) -> str:
        return f"<Scheduler {self.running} running, {len(self.waiting)} waiting, {self.cache!r}>"

    @property
    def running(self) -> int:
        """Sequences admitted and not ended."""
        return len(self.prefilling) + len(self.decoding)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. ValueError when it could never fit, or asks for no token."""
        tokens = sequence.prompt_tokens + sequence.output_tokens
        if sequence.prompt_tokens < 1 or sequence.output_tokens < 1:
            raise ValueError("a sequence needs a prompt token and an output token at least")
        if self._blocks(tokens) > self.cache.capacity_blocks:
            raise ValueError(f"{tokens} tokens do not fit in {self.cache.capacity_blocks} blocks")
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence in any phase and free its blocks; idempotent."""
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        elif sequence.phase is Phase.PREFILLING:
            self.prefilling.remove(sequence)
        elif sequence.phase is Phase.DECODING:
            self.decoding.remove(sequence)
        self._release(sequence, Phase.ENDED)

    def step(self) -> Step | None:
        """Decide the next step; None when there is nothing to run."""
        step = Step()
        context = self._schedule_decodes(step)
        budget = self._max_batched_tokens - len(step.decodes)
        budget = self._schedule_prefills(step, budget)
        if not step.preempted or not (step.prefills or step.decodes):
            self._admit(step, budget)
        if not step.prefills and not step.decodes:
            return None
        attention = sum(n * (sequence.computed_tokens + n / 2) for sequence, n in step.prefills)
        tokens = sum(n for _, n in step.prefills)
        step.duration_s = self._speed.step_s(tokens, attention, len(step.decodes), context)
        return step

    def complete(self, step: Step) -> Outcome:
        """Apply a step whose time has passed. Sequences aborted meanwhile are skipped."""
        outcome = Outcome()
        for sequence, tokens in step.prefills:
            if sequence.phase is not Phase.PREFILLING:
                continue
            sequence.computed_tokens += tokens
            self.totals.prefill_tokens += tokens
            self._publish(sequence, outcome)
            if sequence.computed_tokens == sequence.known_tokens:
                self.prefilling.remove(sequence)
                sequence.phase = Phase.DECODING
                self.decoding.append(sequence)
                self._emit(sequence, outcome)
        for sequence in step.decodes:
            if sequence.phase is not Phase.DECODING:
                continue
            sequence.computed_tokens += 1
            if not sequence.computed_tokens % self._block_tokens:
                self._publish(sequence, outcome)
            self._emit(sequence, outcome)
        outcome.removed = self.cache.take_removed()
        return outcome

    def admit_instantly(self) -> Outcome:
        """Prefill whatever waits and fits, in no time, with the room of its whole output taken at once.

        For a driver without a clock: such sequences run until `finish_instantly` or `abort`.
        """
        outcome = Outcome()
        while self.waiting and self.running < self._max_sequences:
            sequence = self.waiting[0]
            tokens = sequence.prompt_tokens + sequence.output_tokens
            if not self._take_room(sequence, tokens):
                break
            self.waiting.popleft()
            sequence.phase = Phase.DECODING
            self.decoding.append(sequence)
            self.totals.prefill_tokens += sequence.prompt_tokens - sequence.computed_tokens
            sequence.computed_tokens = sequence.prompt_tokens
            self._publish(sequence, outcome)
            outcome.tokens.append(sequence)
        outcome.removed = self.cache.take_removed()
        return outcome

    def finish_instantly(self, sequence: Sequence, generated_tokens: int) -> Outcome:
        """End a sequence of `admit_instantly` that has generated so much; its full blocks stay."""
        outcome = Outcome()
        sequence.generated_tokens = generated_tokens
        self.totals.generated_tokens += generated_tokens
        sequence.computed_tokens = sequence.known_tokens - 1
        self._publish(sequence, outcome)
        self.decoding.remove(sequence)
        self._release(sequence, Phase.ENDED)
        outcome.finished.append(sequence)
        return outcome

    def check_integrity(self) -> None:
        """Raise `CacheCorruption` unless cache and sequences agree."""
        live = [*self.waiting, *self.prefilling, *self.decoding]
        self.cache.check_integrity(sum(sequence.private_blocks for sequence in live))

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _schedule_decodes(self, step: Step) -> int:
        """Add a token for every decode, in order of admission; returns the context they attend to."""
        context = index = 0
        while index < min(len(self.decoding), self._max_batched_tokens):
            sequence = self.decoding[index]
            # A full last block means the next token needs a new one. The victim is taken from behind,
            # so it has no place in this step yet.
            if not self._grow(sequence, 1, [*self.prefilling[-1:]] or self.decoding, step):
                continue
            step.decodes.append(sequence)
            context += sequence.computed_tokens
            index += 1
        return context

    def _grow(self, sequence: Sequence, tokens: int, victims: list[Sequence], step: Step) -> bool:
        """Blocks for `tokens` more, preempting the last of `victims` once when there are none."""
        held = sequence.resident_blocks + sequence.private_blocks
        need = self._blocks(sequence.computed_tokens + tokens) - held
        if need <= 0:
            return True
        if self.cache.allocate(need):
            sequence.private_blocks += need
            return True
        self._preempt(victims[-1], step)
        return False

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        owner = self.prefilling if sequence.phase is Phase.PREFILLING else self.decoding
        owner.remove(sequence)
        self._release(sequence, Phase.WAITING)
        sequence.computed_tokens = 0
        self.waiting.appendleft(sequence)
        self.totals.preemptions += 1
        step.preempted.append(sequence)

    def _schedule_prefills(self, step: Step, budget: int) -> int:
        """Continue chunked prefills; returns the budget left."""
        index = 0
        while index < len(self.prefilling) and budget > 0:
            sequence = self.prefilling[index]
            tokens = min(sequence.known_tokens - sequence.computed_tokens, budget)
            if not self._grow(sequence, tokens, self.prefilling, step):
                continue
            step.prefills.append((sequence, tokens))
            budget -= tokens
            index += 1
        return budget

    def _admit(self, step: Step, budget: int) -> None:
        while self.waiting and budget > 0 and self.running < self._max_sequences:
            sequence = self.waiting[0]
            if not self._take_room(sequence, None, budget):
                return
            self.waiting.popleft()
            sequence.phase = Phase.PREFILLING
            self.prefilling.append(sequence)
            tokens = min(sequence.known_tokens - sequence.computed_tokens, budget)
            step.prefills.append((sequence, tokens))
            budget -= tokens

    def _take_room(self, sequence: Sequence, tokens: int | None, budget: int = 0) -> bool:
        """Share the cached prefix and take private blocks up to `tokens`, or for a chunk of `budget`.

        The last known token is always computed, as it yields the next one. False, and no change, when
        there is no room.
        """
        known = sequence.known_tokens
        hits = self.cache.match(sequence.keys[: (known - 1) // self._block_tokens])
        cached = hits * self._block_tokens
        upto = tokens if tokens is not None else min(known, cached + budget)
        shared = sequence.keys[:hits]
        self.cache.acquire(shared)
        need = self._blocks(upto) - hits
        if not self.cache.allocate(need):
            self.cache.release(shared, 0)
            return False
        sequence.resident_blocks = hits
        sequence.private_blocks = need
        sequence.computed_tokens = cached
        if sequence.cached_tokens is None:
            sequence.cached_tokens = cached
            self.totals.queried_tokens += sequence.prompt_tokens
            self.totals.cached_tokens += cached
        return True

    def _publish(self, sequence: Sequence, outcome: Outcome) -> None:
        """Make full computed blocks resident, and note the runs that are new."""
        keys, start = sequence.keys, sequence.resident_blocks
        stop = min(sequence.computed_tokens // self._block_tokens, len(keys))
        run = start
        for index in range(start, stop):
            if not self.cache.publish(keys[index], keys[index - 1] if index else None):
                if run < index:
                    outcome.stored.append(Stored(sequence, run, index))
                run = index + 1
        if run < stop:
            outcome.stored.append(Stored(sequence, run, stop))
        if stop > start:
            sequence.resident_blocks = stop
            sequence.private_blocks -= stop - start

    def _emit(self, sequence: Sequence, outcome: Outcome) -> None:
        sequence.generated_tokens += 1
        self.totals.generated_tokens += 1
        outcome.tokens.append(sequence)
        if sequence.generated_tokens == sequence.output_tokens:
            self.decoding.remove(sequence)
            self._release(sequence, Phase.ENDED)
            outcome.finished.append(sequence)

    def _release(self, sequence: Sequence, phase: Phase) -> None:
        self.cache.release(sequence.keys[: sequence.resident_blocks], sequence.private_blocks)
        sequence.resident_blocks = sequence.private_blocks = 0
        sequence.phase = phase
