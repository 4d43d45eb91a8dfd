"""The engines of a simulation: what they are given, the ends of their steps, KV between them, failures."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol

from kvroute.conductor.index import Holder, PrefixIndex
from kvroute.loadtests.mock_engine.sequences import Phase
from kvroute.loadtests.mock_engine.sequences import Sequence as EngineSequence
from kvroute.loadtests.mock_engine.steps import Step
from kvroute.loadtests.simulator.engine import SimulatedEngine
from kvroute.loadtests.simulator.handoff import Handoffs
from kvroute.loadtests.simulator.index_feed import IndexFeed
from kvroute.loadtests.simulator.loop import EventLoop
from kvroute.loadtests.simulator.peers import PeerPulls, tokens_by_place
from kvroute.loadtests.simulator.requests import Attempt
from kvroute.loadtests.simulator.setting import Setting
from kvroute.loadtests.simulator.tiers import FleetMemory
from kvroute.loadtests.traces.arrivals import Arrival
from kvroute.policies.costs.links import Handoff

OUTPUT_KEYS = 2**63
"""Keys from here on are those of generated blocks; traces number theirs from 0."""


class Listener(Protocol):
    """Who hears what becomes of attempts."""

    def first_token(self, attempt: Attempt) -> None:
        """The client has its first token."""

    def prefilled(self, attempt: Attempt) -> None:
        """The prefill worker of a split request has done its part."""

    def finished(self, attempt: Attempt) -> None: ...

    def broken(self, attempt: Attempt, worker: int) -> None:
        """That worker has failed it."""

    def freed(self) -> None:
        """Some worker has less to do."""


class EngineFleet:
    """Their events in virtual time; `Listener` hears what becomes of whom they serve.

    Split requests are served as by vLLM's proxy for NIXL. The prefill worker computes the prompt and a token,
    which is thrown away; then the decode worker gives room, the KV travels, and the prompt's last token is
    computed there again: the client's first token is the decode worker's. Until its KV is there, a prompt
    keeps its room at the prefill worker; then its blocks stay cached at both.
    """

    def __init__(
        self,
        setting: Setting,
        names: Sequence[str],
        index: PrefixIndex,
        loop: EventLoop,
        listener: Listener,
        seed: int,
    ) -> None:
        self._setting = setting
        self._loop = loop
        self._listener = listener
        holders = [Holder(name) for name in names]
        self.memory = FleetMemory(setting, loop.clock)
        for holder in holders:
            index.add_holder(holder, setting.block_tokens, self.memory.silent_tier_blocks)
        self.feed = IndexFeed(
            index,
            holders,
            setting.event_lag_s,
            setting.event_loss,
            Random(seed),
            loop.after,
            tells_tiers=setting.memory.tier_news == "events",
            is_shared=setting.memory.is_shared,
        )
        self.engines = [self._engine(number) for number in range(setting.workers)]
        handoff = Handoff(setting.handoff, setting.speed.kv_bytes_per_token, setting.block_tokens)
        self.handoffs = Handoffs(handoff, setting.workers)
        self.pulls = PeerPulls(setting.memory, names, self.engines, self.memory.block_bytes)
        self._next_output_key = OUTPUT_KEYS

    def check_integrity(self) -> None:
        """Raise unless nothing is running."""
        for engine in self.engines:
            engine.scheduler.check_integrity()
            assert engine.ends_s is None
            assert not engine.scheduler.running

    def _engine(self, number: int) -> SimulatedEngine:
        setting = self._setting
        scheduler = setting.scheduler(
            self.memory.cache(),
            setting.engine_times(number),
            setting.block_tokens,
            setting.max_batched_tokens,
            setting.max_sequences,
            self.memory.tiers(),
        )
        return SimulatedEngine(scheduler, setting.in_a_row)

    def submit(self, attempt: Attempt) -> None:
        """All of it, or its prefill, to the worker that was chosen for that; after what it is to pull."""
        pulled = attempt.pulled = self.pulls.begin(
            attempt.placement, attempt.record.arrival, self._loop.now_s
        )
        if pulled is None:
            self._submit(attempt)
        else:
            self._loop.at(pulled.at_s, self._submit, attempt)

    def _submit(self, attempt: Attempt) -> None:
        self.pulls.arrive(attempt.pulled)
        arrival, placement = attempt.record.arrival, attempt.placement
        tokens, output = arrival.view.prompt_tokens, arrival.output_tokens
        if placement.is_split:
            sequence = EngineSequence("", tokens, 1, arrival.keys.keys, attempt, hold=True)
            attempt.held = sequence
        else:
            sequence = EngineSequence("", tokens, output, self._all_keys(arrival), attempt)
        self._give(placement.prefill, sequence)

    def hand_over(self, attempt: Attempt) -> None:
        """The rest of a request that was prefilled elsewhere, to the worker that was chosen for that."""
        arrival = attempt.record.arrival
        sequence = EngineSequence(
            "",
            arrival.view.prompt_tokens,
            arrival.output_tokens,
            self._all_keys(arrival),
            attempt,
            remote=True,
        )
        self._give(attempt.placement.decode, sequence)

    def _give(self, worker: int, sequence: EngineSequence) -> None:
        engine = self.engines[worker]
        if not engine.is_up:
            self._listener.broken(sequence.payload, worker)
            return
        turn = engine.turn
        engine.submit(sequence, self._loop.now_s)
        self._attend(worker, turn)

    def _attend(self, worker: int, turn: int) -> None:
        """After something came to an engine, that was at `turn` before."""
        if self.engines[worker].ends_s is None:
            self._loop.at(self._loop.now_s, self._wake, worker)
        else:
            self._follow(worker, turn)

    def is_too_long(self, tokens: int) -> bool:
        """Whether so many can never fit."""
        block_tokens = self._setting.block_tokens
        return -(-tokens // block_tokens) > self._setting.kv_tokens // block_tokens

    def _wake(self, worker: int) -> None:
        engine = self.engines[worker]
        turn = engine.turn
        if engine.is_up and engine.step is None:
            self._begin(worker)
        self._follow(worker, turn)

    def _begin(self, worker: int) -> None:
        """An engine's next step, once those have room who are given it between two steps."""
        engine = self.engines[worker]
        while engine.scheduler.reserve():
            for sequence in engine.scheduler.take_fetches():
                self._fetch(sequence, joins=True)
        engine.wake(self._loop.now_s)
        self._began(worker, engine.step)

    def _all_keys(self, arrival: Arrival) -> Sequence[int]:
        """Those of the prompt, and where output stays, keys that nobody else has for the blocks it fills."""
        keys = arrival.keys.keys
        if not self._setting.keeps_output:
            return keys
        first = self._next_output_key
        tokens = arrival.view.prompt_tokens + arrival.output_tokens
        self._next_output_key += tokens // self._setting.block_tokens - len(keys)
        return (*keys, *range(first, self._next_output_key))

    def _follow(self, worker: int, turn: int) -> None:
        """Be there when the engine's step ends, if that is another time than at `turn`."""
        engine = self.engines[worker]
        if engine.turn != turn and engine.ends_s is not None:
            # Many prompts that come at one moment are computed in steps that end at one moment.
            self._loop.turn_at(engine.ends_s, worker, self._step_ended, worker, engine.turn)

    def _began(self, worker: int, step: Step | None) -> None:
        """An engine has decided what it does next."""
        if step is not None:
            for sequence in step.preempted:
                if sequence.generated_tokens and sequence.payload.stalled_s is None:
                    sequence.payload.stalled_s = self._loop.now_s
            for sequence, _ in step.prefills:
                if sequence.payload.record.start_s is None:
                    sequence.payload.record.start_s = self._loop.now_s
        for sequence in self.engines[worker].scheduler.take_fetches():
            self._fetch(sequence)

    def _step_ended(self, worker: int, turn: int) -> None:
        engine = self.engines[worker]
        if engine.turn != turn:
            return
        step, outcome = engine.complete()
        self.feed.tell(worker, outcome)
        is_first = not (engine.scheduler.reserves and any([one.hold for one in outcome.finished]))
        if is_first:
            self._begin(worker)
            self._follow(worker, turn)
        for sequence in outcome.firsts:
            self._first_token(worker, sequence)
        for sequence, _ in step.prefills:
            self._caught_up(sequence.payload, sequence)
        for sequence in outcome.finished:
            self._finished(worker, sequence)
        if outcome.firsts or outcome.finished:
            self._listener.freed()
        if not is_first:
            self._loop.at(self._loop.now_s, self._wake, worker)

    def _first_token(self, worker: int, sequence: EngineSequence) -> None:
        attempt: Attempt = sequence.payload
        if worker == attempt.placement.prefill:
            record = attempt.record
            record.gpu_tokens, record.cpu_tokens, record.disk_tokens, record.peer_tokens = tokens_by_place(
                sequence, attempt.pulled, self._setting.block_tokens
            )
            self.pulls.let_go(attempt.pulled)
        if worker == attempt.placement.decode:
            attempt.record.first_s = self._loop.now_s
            attempt.since = self.engines[worker].gaps.steps
            self._listener.first_token(attempt)

    def _caught_up(self, attempt: Attempt, sequence: EngineSequence) -> None:
        """The next token of one that was preempted, once it is computed again."""
        if attempt.stalled_s is not None and sequence.phase is not Phase.PREFILLING:
            record = attempt.record
            record.longest_gap_s = max(record.longest_gap_s, self._loop.now_s - attempt.stalled_s)
            attempt.stalled_s = None

    def _finished(self, worker: int, sequence: EngineSequence) -> None:
        attempt: Attempt = sequence.payload
        if worker != attempt.placement.decode:
            self._listener.prefilled(attempt)
            return
        record, gaps = attempt.record, self.engines[worker].gaps
        record.longest_gap_s = max(record.longest_gap_s, gaps.longest_s(attempt.since))
        record.end_s = self._loop.now_s
        attempt.is_over = True
        self._listener.finished(attempt)

    # --- handoff ---------------------------------------------------------------------------------

    def _fetch(self, sequence: EngineSequence, joins: bool = False) -> None:
        """There is room for a prompt that was prefilled elsewhere: what is not here already can come. What
        takes no time `joins` the step that is about to begin.
        """
        attempt: Attempt = sequence.payload
        placement = attempt.placement
        source = self.engines[placement.prefill]
        if source.life != attempt.life:
            self._loop.at(self._loop.now_s, self._lose, sequence)
            return
        tokens = sequence.prompt_tokens - sequence.resident_blocks * self._setting.block_tokens
        there_s = self.handoffs.send(placement.prefill, placement.decode, tokens, self._loop.now_s)
        if joins and there_s == self._loop.now_s:
            self._receive(sequence)
        else:
            self._loop.at(there_s, self._receive, sequence)

    def _receive(self, sequence: EngineSequence) -> None:
        attempt: Attempt = sequence.payload
        if attempt.is_over:
            return
        worker = attempt.placement.decode
        engine = self.engines[worker]
        turn = engine.turn
        self.feed.tell(worker, engine.receive(sequence, self._loop.now_s))
        self._attend(worker, turn)
        self.let_go(attempt)

    def let_go(self, attempt: Attempt) -> None:
        """The KV of a prompt prefilled for another worker has left, or is not to."""
        held, worker = attempt.held, attempt.placement.prefill
        engine = self.engines[worker]
        if held is None or engine.life != attempt.life:
            return
        attempt.held = None
        turn = engine.turn
        engine.let_go(held, self._loop.now_s)
        self._attend(worker, turn)

    # --- failures --------------------------------------------------------------------------------

    def fail(self, worker: int) -> None:
        """It is gone with all it held, and so is KV that was to come from it."""
        for sequence in self.engines[worker].fail():
            self._listener.broken(sequence.payload, worker)
        for engine in self.engines:
            for sequence in list(engine.scheduler.receiving):
                if sequence.payload.placement.prefill == worker:
                    self._lose(sequence)
        self._listener.freed()

    def restart(self, worker: int) -> None:
        """It is back, and empty."""
        self.engines[worker].is_up = True
        self.feed.gone(worker)

    def _lose(self, sequence: EngineSequence) -> None:
        """KV that was to come does not."""
        attempt: Attempt = sequence.payload
        if attempt.is_over:
            return
        worker = attempt.placement.decode
        engine = self.engines[worker]
        turn = engine.turn
        engine.abort(sequence, self._loop.now_s)
        self._attend(worker, turn)
        self._listener.broken(attempt, attempt.placement.prefill)
