"""The event loop: arrivals, the ends of steps, and what is due in between, in the order of virtual time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import TypeAlias

from msgspec import Struct

from kvroute.conductor.block_index import GPU
from kvroute.conductor.index import Holder, PrefixIndex, pack_keys
from kvroute.loadtests.mock_engine.block_cache import BlockCache
from kvroute.loadtests.mock_engine.sequences import Phase
from kvroute.loadtests.mock_engine.sequences import Sequence as EngineSequence
from kvroute.loadtests.mock_engine.steps import Outcome
from kvroute.loadtests.simulator.engine import SimulatedEngine
from kvroute.loadtests.simulator.router import Answer, Ask, Placement, Router, Served
from kvroute.loadtests.simulator.setting import Setting
from kvroute.loadtests.traces.arrivals import Arrival
from kvroute.policies.base import Policy
from kvroute.policies.costs.calibration import Calibration
from kvroute.policies.holding import Ticket
from kvroute.types import Rejection, Worker

INDEX_BYTES = 2**32
OUTPUT_KEYS = 2**63
"""Keys from here on are those of generated blocks; traces number theirs from 0."""


class Record(Struct):
    """One request and what became of it; times in seconds since the start."""

    arrival: Arrival
    worker: int = -1
    """Index of the one it was sent to; -1 when to none."""
    placed_s: float | None = None
    """When its worker was chosen."""
    first_s: float | None = None
    end_s: float | None = None
    cached_tokens: int = 0
    matched_tokens: int = 0
    """What the index promised at the choice."""
    rejected: str | None = None
    """Why, when it was refused."""


_Ask: TypeAlias = Ask[Record]


class _Running(Struct):
    """What a sequence of an engine belongs to."""

    record: Record
    ask: _Ask
    placement: Placement


class Simulation:
    """One policy over one fleet and one list of arrivals; `run` once."""

    def __init__(self, setting: Setting, policy: Policy) -> None:
        self.now_s = 0.0
        self.setting = setting
        workers = [
            Worker(f"w{i}", f"http://w{i}.invalid", block_size_tokens=setting.block_tokens)
            for i in range(setting.workers)
        ]
        self.index = PrefixIndex(INDEX_BYTES, self._clock)
        for worker in workers:
            self.index.add_holder(Holder(worker.id), setting.block_tokens)
        self._slots = [self.index.slot(Holder(worker.id)) for worker in workers]
        self.engines = [self._engine() for _ in workers]
        self.router: Router[Record] = Router(
            policy,
            workers,
            [setting.pace() for _ in workers],
            self.index,
            self._clock,
            predicts=setting.predicts,
            hold_limit=setting.hold_limit,
            calibration=Calibration() if setting.learns else None,
        )
        self.running_integral_s = 0.0
        """Requests in the system (held ones too) times seconds."""
        self.events = 0
        self.stays_s = 0.0
        """Of all requests that have left, refused ones too."""
        self._inside = 0
        self._next_output_key = OUTPUT_KEYS
        self._pumps = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = 0

    def run(self, arrivals: Sequence[Arrival]) -> list[Record]:
        """Until all requests have ended; their records in order of arrival."""
        records = [Record(arrival) for arrival in arrivals]
        for record in records:
            self._at(record.arrival.arrival_s, self._arrive, record)
        was_enabled = gc.isenabled()
        gc.disable()  # nothing here is cyclic garbage, and a look for it takes a third of the time
        try:
            self._loop()
        finally:
            if was_enabled:
                gc.enable()
        return records

    def check_integrity(self) -> None:
        """Raise unless everything is back where it began: for tests, after `run`."""
        for engine, load in zip(self.engines, self.router.loads, strict=True):
            engine.scheduler.check_integrity()
            load.check_integrity()
            assert not load.requests
            assert engine.ends_s is None
        assert not self._inside

    # --- the loop --------------------------------------------------------------------------------

    def _clock(self) -> float:
        return self.now_s

    def _at(self, when_s: float, do: Callable[..., None], *arguments: object) -> None:
        self._order += 1
        heappush(self._heap, (when_s, self._order, do, arguments))

    def _loop(self) -> None:
        heap = self._heap
        while heap:
            when_s, _, do, arguments = heappop(heap)
            self.running_integral_s += self._inside * (when_s - self.now_s)
            self.now_s = when_s
            self.events += 1
            do(*arguments)

    # --- the router's side -----------------------------------------------------------------------

    def _arrive(self, record: Record) -> None:
        self._inside += 1
        arrival = record.arrival
        ask: _Ask = Ask(record, arrival.view, arrival.keys, self.now_s)
        answer = self.router.arrive(ask)
        if isinstance(answer, Ticket):
            self._at(self.now_s + self.setting.hold_limit_s, self._expire, answer)
            self._pump()
        else:
            self._answered(ask, answer)

    def _expire(self, ticket: Ticket[_Ask]) -> None:
        record = ticket.item.item
        if record.placed_s is None and record.rejected is None:
            self._answered(ticket.item, self.router.expire(ticket))

    def _pump(self) -> None:
        for ask, answer in self.router.pump():
            self._answered(ask, answer)
        if self.setting.sweep_s is not None and self.router.held:
            self._pumps += 1
            self._at(self.now_s + self.setting.sweep_s, self._sweep, self._pumps)

    def _sweep(self, pumps: int) -> None:
        if pumps == self._pumps:
            self._pump()

    def _answered(self, ask: _Ask, answer: Answer) -> None:
        record = ask.item
        if isinstance(answer, Rejection):
            record.rejected = answer.reason
            self._leave(record)
            return
        record.worker, record.placed_s = answer.worker, self.now_s
        record.matched_tokens = answer.match.tokens
        running = _Running(record, ask, answer)
        if self.setting.request_overhead_s:
            self._at(self.now_s + self.setting.request_overhead_s, self._submit, running)
        else:
            self._submit(running)

    def _leave(self, record: Record) -> None:
        self._inside -= 1
        self.stays_s += self.now_s - record.arrival.arrival_s

    # --- the engines' side -----------------------------------------------------------------------

    def _engine(self) -> SimulatedEngine:
        setting = self.setting
        scheduler = setting.scheduler(
            BlockCache(setting.kv_tokens // setting.block_tokens),
            setting.engine_times,
            setting.block_tokens,
            setting.max_batched_tokens,
            setting.max_sequences,
        )
        return SimulatedEngine(scheduler, setting.in_a_row)

    def _submit(self, running: _Running) -> None:
        record = running.record
        arrival = record.arrival
        engine = self.engines[record.worker]
        turn = engine.turn
        tokens = arrival.view.prompt_tokens
        keys = arrival.keys.keys
        if self.setting.keeps_output:
            keys = (*keys, *self._output_keys(tokens + arrival.output_tokens, len(keys)))
        sequence = EngineSequence("", tokens, arrival.output_tokens, keys, running)
        try:
            engine.submit(sequence, self.now_s)
        except ValueError:
            record.rejected = "too_long"
            running.placement.charge.release(self.now_s)
            self._leave(record)
            self._pump()
            return
        if engine.ends_s is None:
            self._at(self.now_s, self._wake, record.worker)
        else:
            self._follow(record.worker, turn)

    def _wake(self, worker: int) -> None:
        engine = self.engines[worker]
        turn = engine.turn
        engine.wake(self.now_s)
        self._follow(worker, turn)

    def _output_keys(self, tokens: int, prompt_blocks: int) -> range:
        """Keys that nobody else has, for the blocks that a request fills after its prompt's."""
        first = self._next_output_key
        self._next_output_key += tokens // self.setting.block_tokens - prompt_blocks
        return range(first, self._next_output_key)

    def _follow(self, worker: int, turn: int) -> None:
        """Be there when the engine's step ends, if that is another time than at `turn`."""
        engine = self.engines[worker]
        if engine.turn != turn and engine.ends_s is not None:
            self._at(engine.ends_s, self._step_ended, worker, engine.turn)

    def _step_ended(self, worker: int, turn: int) -> None:
        engine = self.engines[worker]
        if engine.turn != turn:
            return
        step, outcome = engine.complete(self.now_s)
        self._follow(worker, turn)
        if outcome.removed or outcome.stored:
            if self.setting.event_lag_s:
                self._at(self.now_s + self.setting.event_lag_s, self._tell, worker, outcome)
            else:
                self._tell(worker, outcome)
        freed = bool(outcome.finished)
        for sequence, _ in step.prefills:
            if sequence.phase is not Phase.PREFILLING and sequence.generated_tokens == 1:
                running: _Running = sequence.payload
                running.record.first_s = self.now_s
                running.record.cached_tokens = sequence.cached_tokens or 0
                self.router.first_byte(running.placement)
                freed = True
        for sequence in outcome.finished:
            running = sequence.payload
            record = running.record
            record.end_s = self.now_s
            assert record.first_s is not None
            served = Served(record.first_s, sequence.output_tokens, record.cached_tokens)
            self.router.finish(running.ask, running.placement, served)
            self._leave(record)
        if freed:
            self._pump()

    def _tell(self, worker: int, outcome: Outcome) -> None:
        """The index hears what an engine stored and removed; its hashes are the keys themselves."""
        blocks, slot = self.index.blocks, self._slots[worker]
        if outcome.removed:
            blocks.remove(slot, GPU, pack_keys(outcome.removed))
        for stored in outcome.stored:
            keys, start = stored.sequence.keys, stored.start
            packed = pack_keys(keys[start : stored.stop])
            blocks.store(slot, GPU, keys[start - 1] if start else None, packed, packed)
