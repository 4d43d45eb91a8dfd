"""The step scheduler of an engine: decodes first, then prefill chunks within a token budget.

Pure: no clock, no I/O. `step()` decides one step and says how long it takes; `complete()` applies it and
says what came of it. Whoever drives it lets that time pass in between, on a real clock or a virtual one.
On a virtual one `step` may answer a row of steps that only decode, so that nothing happens between them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import ClassVar

from kvroute.conductor.tiers.stack import TierStack
from kvroute.loadtests.mock_engine.block_cache import BlockCache
from kvroute.loadtests.mock_engine.loads import LoadQueue
from kvroute.loadtests.mock_engine.rows import longest_s, row_s, steps_alike, steps_until
from kvroute.loadtests.mock_engine.sequences import Phase, Sequence
from kvroute.loadtests.mock_engine.steps import Outcome, Step, StepTimes, Stored, Totals


class Scheduler:
    """Chunked prefill, prefix sharing, decode growth and recompute preemption over one block cache."""

    reserves: ClassVar[bool] = False
    """Whether room for remote prompts is given, and that of handed over ones freed, between two steps."""

    def __init__(
        self,
        cache: BlockCache,
        speed: StepTimes,
        block_tokens: int,
        max_batched_tokens: int = 8192,
        max_sequences: int = 256,
        below: TierStack | None = None,
    ) -> None:
        self.cache = cache
        self.below = below
        self.totals = Totals()
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.loading = LoadQueue()
        self.receiving: list[Sequence] = []
        self.held: dict[Sequence, None] = {}
        self._fetches: list[Sequence] = []
        self._speed = speed
        self._block_tokens = block_tokens
        self._max_batched_tokens = max_batched_tokens
        self._max_sequences = max_sequences

    def __repr__(self) -> str:
        return f"<Scheduler {self.running} running, {len(self.waiting)} waiting, {self.cache!r}>"

    @property
    def running(self) -> int:
        """Sequences admitted and not ended."""
        return len(self.loading) + len(self.receiving) + len(self.prefilling) + len(self.decoding)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. ValueError when it could never fit, or asks for no token."""
        tokens = sequence.prompt_tokens + sequence.output_tokens
        if sequence.prompt_tokens < 1 or sequence.output_tokens < 1:
            raise ValueError("a sequence needs a prompt token and an output token at least")
        if self._blocks(tokens) > self.cache.capacity_blocks:
            raise ValueError(f"{tokens} tokens do not fit in {self.cache.capacity_blocks} blocks")
        sequence.phase = Phase.WAITING
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence in any phase and free its blocks, but for one that is held; idempotent."""
        if sequence.phase is Phase.HELD:
            return
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        elif sequence.phase is Phase.LOADING:
            self.loading.remove(sequence)
        elif sequence.phase is Phase.RECEIVING:
            self.receiving.remove(sequence)
        elif sequence.phase is Phase.PREFILLING:
            self.prefilling.remove(sequence)
        elif sequence.phase is Phase.DECODING:
            self.decoding.remove(sequence)
        self._release(sequence, Phase.ENDED)

    def let_go(self, sequence: Sequence) -> None:
        """Free the KV of a sequence that is held, or do not hold it at its end; idempotent."""
        sequence.hold = False
        if sequence in self.held:
            del self.held[sequence]
            self._release(sequence, Phase.ENDED)

    def clear(self) -> bool:
        """Forget every block, in the tiers below too; False, and no change, while any is in use."""
        cleared = self.cache.clear()
        if cleared and self.below is not None:
            self.below.clear()
        return cleared

    def preempt_all(self) -> list[Sequence]:
        """Send what runs back to the queue, to be computed again; returned in order of admission.

        A sequence that waits for KV from elsewhere keeps its blocks.
        """
        running = [*self.decoding, *self.prefilling]
        for sequence in reversed(running):
            self._preempt(sequence, Step())
        return running

    def step(self, in_a_row: bool = False) -> Step | None:
        """Decide the next step; None when there is nothing to run or to wait for.

        `in_a_row`: or as many as run alike, up to the first that ends a sequence, evicts or preempts. To
        `add` or `abort` meanwhile, `cut` the row first.
        """
        step = Step()
        step.context_tokens = self._schedule_decodes(step)
        budget = self._max_batched_tokens - len(step.decodes)
        budget = self._schedule_prefills(step, budget)
        if not step.preempted or not (step.prefills or step.decodes):
            self._admit(step, budget)
        if not step.prefills and not step.decodes:
            if not self.loading:
                return None
            step.duration_s = self.loading.next_s
            return step
        if not step.prefills:
            if in_a_row:
                step.count = self._repeats(step)
            step.duration_s = row_s(self._speed, step.count, len(step.decodes), step.context_tokens)
            return step
        step.duration_s = self._mixed_s(step)
        return step

    def cut(self, step: Step, elapsed_s: float) -> None:
        """End a row with the step that runs `elapsed_s` after its beginning; one that only waits, now."""
        if not step.prefills and not step.decodes:
            step.duration_s = min(step.duration_s, elapsed_s)
        if step.count == 1:
            return
        decodes, context = len(step.decodes), step.context_tokens
        step.count = steps_until(self._speed, elapsed_s, step.count, decodes, context)
        step.duration_s = row_s(self._speed, step.count, decodes, context)

    def longest_s(self, step: Step) -> float:
        """Seconds of a step, or of the longest one of a row."""
        if step.count == 1:
            return step.duration_s
        return longest_s(self._speed, step.count, len(step.decodes), step.context_tokens)

    def reserve(self) -> bool:
        """Give room to a remote prompt between two steps; whether there was any: never, as in vLLM, where a
        step gives it.
        """
        return False

    def take_fetches(self) -> Iterable[Sequence]:
        """Remote sequences that were given room since the last call: their KV can come."""
        if not self._fetches:
            return ()
        fetches, self._fetches = self._fetches, []
        return fetches

    def receive(self, sequence: Sequence) -> Outcome:
        """A remote prompt's KV is here. It decodes from the next step on, beginning with the prompt's last
        token, as in vLLM. `cut` a row in progress first.
        """
        outcome = Outcome()
        self.receiving.remove(sequence)
        sequence.remote, sequence.received = False, True
        sequence.phase = Phase.DECODING
        sequence.computed_tokens = sequence.prompt_tokens - 1
        self.decoding.append(sequence)
        self._publish(sequence, outcome)
        return self._settled(outcome)

    def complete(self, step: Step) -> Outcome:
        """Apply a step whose time has passed. Sequences aborted meanwhile are skipped."""
        outcome = Outcome()
        for sequence in self.loading.advance(step.duration_s):
            sequence.phase = Phase.PREFILLING
            self.prefilling.append(sequence)
            self._publish(sequence, outcome)
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
        count, block_tokens, given = step.count, self._block_tokens, outcome.tokens
        before = len(given)
        for sequence in step.decodes:
            if sequence.phase is not Phase.DECODING:
                continue
            computed = sequence.computed_tokens = sequence.computed_tokens + count
            if count > 1:
                need = self._blocks(computed) - sequence.resident_blocks - sequence.private_blocks
                if need > 0:
                    self.cache.allocate(need)
                    sequence.private_blocks += need
            if computed % block_tokens < count and sequence.resident_blocks < len(sequence.keys):
                self._publish(sequence, outcome)
            # As `_emit` does, whose call would take longer than all this.
            given.append(sequence)
            generated = sequence.generated_tokens = sequence.generated_tokens + count
            if generated == count:
                outcome.firsts.append(sequence)
            if generated == sequence.output_tokens:
                self._end(sequence, outcome)
        self.totals.generated_tokens += count * (len(given) - before)
        return self._settled(outcome)

    def admit_instantly(self) -> Outcome:
        """Load and prefill whatever waits and fits, in no time, and take the room of its whole output.

        For a driver without a clock: such sequences run until `finish_instantly` or `abort`. A remote one
        waits for its KV with all that room, and runs after `receive`.
        """
        outcome = Outcome()
        while self.waiting and self.running < self._max_sequences:
            sequence = self.waiting[0]
            tokens = sequence.prompt_tokens + sequence.output_tokens
            if not self._take_room(sequence, tokens):
                break
            self.waiting.popleft()
            if sequence.remote:
                self._await(sequence)
                continue
            sequence.phase = Phase.DECODING
            self.decoding.append(sequence)
            self.totals.prefill_tokens += sequence.prompt_tokens - sequence.computed_tokens
            sequence.computed_tokens = sequence.prompt_tokens
            self._publish(sequence, outcome)
            outcome.tokens.append(sequence)
        return self._settled(outcome)

    def finish_instantly(self, sequence: Sequence, generated_tokens: int) -> Outcome:
        """End a sequence of `admit_instantly` that has generated so much; its full blocks stay."""
        outcome = Outcome()
        sequence.generated_tokens = generated_tokens
        self.totals.generated_tokens += generated_tokens
        sequence.computed_tokens = sequence.known_tokens - 1
        self._publish(sequence, outcome)
        self._end(sequence, outcome)
        return self._settled(outcome)

    def resume_instantly(self, sequences: Iterable[Sequence]) -> Outcome:
        """Sequences of `admit_instantly` that `preempt_all` has just sent back run on, computed again."""
        outcome = Outcome()
        for sequence in sequences:
            self.waiting.remove(sequence)
            self._take_room(sequence, sequence.prompt_tokens + sequence.output_tokens)
            sequence.phase = Phase.DECODING
            self.decoding.append(sequence)
            sequence.computed_tokens = sequence.prompt_tokens
            self._publish(sequence, outcome)
        return self._settled(outcome)

    def check_integrity(self) -> None:
        """Raise `CacheCorruption` unless cache and sequences agree."""
        live = [*self.waiting, *self.loading, *self.receiving, *self.prefilling, *self.decoding, *self.held]
        self.cache.check_integrity(sum(sequence.private_blocks for sequence in live))
        if self.below is not None:
            self.below.check_integrity()

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _schedule_decodes(self, step: Step) -> int:
        """Add a token for every decode, in order of admission; returns the context they attend to."""
        context = index = 0
        block_tokens = self._block_tokens
        while index < min(len(self.decoding), self._max_batched_tokens):
            sequence = self.decoding[index]
            room = (sequence.resident_blocks + sequence.private_blocks) * block_tokens
            # A full last block means the next token needs a new one. The victim is taken from behind,
            # so it has no place in this step yet.
            if sequence.computed_tokens >= room and not self._grow(
                sequence, 1, self.prefilling[-1:] or self.decoding, step
            ):
                continue
            step.decodes.append(sequence)
            context += sequence.computed_tokens
            index += 1
        return context

    def _mixed_s(self, step: Step) -> float:
        """Seconds of a step with prefills."""
        attention = sum([n * (sequence.computed_tokens + n / 2) for sequence, n in step.prefills])
        tokens = sum([n for _, n in step.prefills])
        return self._speed.step_s(tokens, attention, len(step.decodes), step.context_tokens)

    def _repeats(self, step: Step) -> int:
        """How many steps in a row are like this one, which only decodes."""
        # What was evicted is told with the end of this step, not of the row.
        told_late = self.cache.has_removed
        if told_late or self.loading or step.preempted or len(step.decodes) < len(self.decoding):
            return 1
        if not all([sequence.generated_tokens for sequence in step.decodes]):
            return 1  # a received one's first token is told by itself
        return steps_alike(step.decodes, self._block_tokens, self.cache.free_blocks)

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
            tokens = self._admit_first(step, budget)
            if tokens is None:
                return
            budget -= tokens

    def _admit_first(self, step: Step, budget: int) -> int | None:
        """The first that waits: tokens of its chunk in the step; None, and no change, without room."""
        sequence = self.waiting[0]
        if not self._take_room(sequence, sequence.prompt_tokens if sequence.remote else None, budget):
            return None
        self.waiting.popleft()
        if sequence.remote:
            self._await(sequence)
            return 0
        if self._load(sequence):
            return 0
        sequence.phase = Phase.PREFILLING
        self.prefilling.append(sequence)
        tokens = min(sequence.known_tokens - sequence.computed_tokens, budget)
        step.prefills.append((sequence, tokens))
        return tokens

    def _await(self, sequence: Sequence) -> None:
        """A remote sequence has room: its KV may come."""
        sequence.phase = Phase.RECEIVING
        self.receiving.append(sequence)
        self._fetches.append(sequence)

    def _take_room(self, sequence: Sequence, tokens: int | None, budget: int = 0) -> bool:
        """Share the cached prefix and take private blocks up to `tokens`, or for a chunk of `budget`.

        What the tiers below hold of the prefix counts as computed, and needs room of its own; it is taken
        alone, as the chunk comes after the load. The last known token is always computed, as it yields the
        next one. False, and no change, when there is no room.
        """
        known = sequence.known_tokens
        usable = sequence.keys[: (known - 1) // self._block_tokens]
        hits = self.cache.match(usable)
        below = None if sequence.remote else self.below
        loads = 0 if below is None else below.match(usable[hits:])
        cached = (hits + loads) * self._block_tokens
        upto = tokens if tokens is not None else min(known, cached + (0 if loads else budget))
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
            self.totals.cached_tokens += hits * self._block_tokens
            self.totals.loaded_tokens += loads * self._block_tokens
            sequence.loaded_tokens = loads * self._block_tokens
            if below is not None and loads and len(below.tiers) > 1:
                deeper = below.below_first(usable[hits : hits + loads])
                sequence.disk_tokens = deeper * self._block_tokens
            self.cache.begin(sequence.keys, hits, sequence.prompt_tokens)
        if below is not None:
            below.read(usable[: hits + loads])
        return True

    def _load(self, sequence: Sequence) -> bool:
        """Whether the computed part of a sequence just admitted has to come up first."""
        computed_blocks = sequence.computed_tokens // self._block_tokens
        if self.below is None or computed_blocks == sequence.resident_blocks:
            return False
        sequence.phase = Phase.LOADING
        keys = sequence.keys[sequence.resident_blocks : computed_blocks]
        self.loading.add(sequence, self.below.load_s(keys))
        return True

    def _settled(self, outcome: Outcome) -> Outcome:
        """Note what was evicted, and let the tiers below follow."""
        outcome.removed = self.cache.take_removed()
        if self.below is not None:
            self.below.evicted(outcome.removed)
            outcome.demoted = self.below.take_changes()
            for stored in outcome.stored:
                keys = stored.sequence.keys
                prompt_blocks = stored.sequence.prompt_tokens // self._block_tokens
                self.below.computed(keys[: stored.stop], stored.start, prompt_blocks)
            outcome.offloaded = self.below.take_changes()
        return outcome

    def _publish(self, sequence: Sequence, outcome: Outcome) -> None:
        """Make full computed blocks resident, and note the runs that are new."""
        keys, start = sequence.keys, sequence.resident_blocks
        stop = min(sequence.computed_tokens // self._block_tokens, len(keys))
        if stop <= start:
            return
        for begin, end in self.cache.publish_run(keys, start, stop):
            outcome.stored.append(Stored(sequence, begin, end))
        sequence.resident_blocks = stop
        sequence.private_blocks -= stop - start

    def _emit(self, sequence: Sequence, outcome: Outcome) -> None:
        """The token that a prefill yields."""
        sequence.generated_tokens += 1
        self.totals.generated_tokens += 1
        outcome.tokens.append(sequence)
        if sequence.generated_tokens == 1:
            outcome.firsts.append(sequence)
        if sequence.generated_tokens == sequence.output_tokens:
            self._end(sequence, outcome)

    def _end(self, sequence: Sequence, outcome: Outcome) -> None:
        self.decoding.remove(sequence)
        outcome.finished.append(sequence)
        if not sequence.hold:
            self._release(sequence, Phase.ENDED)
            return
        spare = sequence.resident_blocks + sequence.private_blocks - self._blocks(sequence.computed_tokens)
        self.cache.release((), spare)
        sequence.private_blocks -= spare
        sequence.phase = Phase.HELD
        self.held[sequence] = None

    def _release(self, sequence: Sequence, phase: Phase) -> None:
        self.cache.release(sequence.keys[: sequence.resident_blocks], sequence.private_blocks)
        sequence.resident_blocks = sequence.private_blocks = 0
        sequence.phase = phase
