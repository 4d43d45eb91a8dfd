"""The event loop: arrivals, the ends of steps, and what is due in between, in the order of virtual time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from random import Random

from kvroute.conductor.index import Holder, PrefixIndex
from kvroute.config_groups import Retry
from kvroute.loadtests.mock_engine.block_cache import BlockCache
from kvroute.loadtests.mock_engine.sequences import Phase
from kvroute.loadtests.mock_engine.sequences import Sequence as EngineSequence
from kvroute.loadtests.mock_engine.steps import Step
from kvroute.loadtests.results.measured import Measured
from kvroute.loadtests.simulator.engine import SimulatedEngine
from kvroute.loadtests.simulator.handoff import Handoffs
from kvroute.loadtests.simulator.index_feed import IndexFeed
from kvroute.loadtests.simulator.requests import Attempt, Record
from kvroute.loadtests.simulator.router import NOBODY, Answer, Ask, Router, Served
from kvroute.loadtests.simulator.setting import Failure, Setting
from kvroute.loadtests.traces.arrivals import Arrival
from kvroute.policies.base import Policy
from kvroute.policies.costs.calibration import Calibration
from kvroute.policies.costs.links import Handoff
from kvroute.policies.holding import Ticket
from kvroute.router.retry import RetryBudget
from kvroute.types import Rejection, Worker

INDEX_BYTES = 2**32
OUTPUT_KEYS = 2**63
"""Keys from here on are those of generated blocks; traces number theirs from 0."""
FIRST = -(2**62)
"""Arrivals come before everything else of the same moment."""


class Simulation:
    """One policy over one fleet and its requests; `run` once. `seed` draws which events are lost.

    Split requests are served as by vLLM's proxy for NIXL. The prefill worker computes the prompt and a token,
    which is thrown away; then the decode worker gives room, the KV travels, and the prompt's last token is
    computed there again: the client's first token is the decode worker's. Blocks stay cached at the prefill
    worker, where they may be evicted although they have not left.
    """

    def __init__(self, setting: Setting, policy: Policy, seed: int = 0) -> None:
        self.now_s = 0.0
        self.setting = setting
        numbers = range(setting.workers)
        self.names = [f"w{number}" for number in numbers]
        workers = [
            Worker(name, f"http://{name}.invalid", setting.role(i), block_size_tokens=setting.block_tokens)
            for i, name in enumerate(self.names)
        ]
        self.index = PrefixIndex(INDEX_BYTES, self._clock)
        holders = [Holder(name) for name in self.names]
        for holder in holders:
            self.index.add_holder(holder, setting.block_tokens)
        self.feed = IndexFeed(
            self.index, holders, setting.event_lag_s, setting.event_loss, Random(seed), self._after
        )
        self.engines = [self._engine(number) for number in numbers]
        handoff = Handoff(setting.handoff, setting.speed.kv_bytes_per_token, setting.block_tokens)
        self.handoffs = Handoffs(handoff, setting.workers)
        self.router: Router[Record] = Router(
            policy,
            workers,
            [setting.pace(number) for number in numbers],
            self.index,
            self._clock,
            predicts=setting.predicts,
            hold_limit=setting.hold_limit,
            calibration=Calibration() if setting.learns else None,
            pd_link=None if setting.split is None else setting.handoff,
        )
        self.running_integral_s = 0.0
        """Requests in the system (held ones too) times seconds."""
        self.events = 0
        self.stays_s = 0.0
        """Of all requests that have left, refused ones too."""
        self.retries_denied = 0
        """Failed attempts that were not retried, by the gateway's rules."""
        self._retry = Retry()
        self._retry_budget = RetryBudget(self._retry)
        self._inside = 0
        self._next_output_key = OUTPUT_KEYS
        self._pumps = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = 0
        self._ended: Callable[[Record], None] = _nothing

    def run(self, arrivals: Iterable[Arrival]) -> list[Record]:
        """Until all requests have ended; their records in order of arrival."""
        records: list[Record] = []
        self._run(arrivals, records.append, _nothing)
        return records

    def measure(self, arrivals: Iterable[Arrival]) -> list[Measured]:
        """The same, and no more is kept of a request that has ended than what a client would have measured.

        Arrivals are taken as they come.
        """
        measured: list[Measured | None] = []

        def begun(_: Record) -> None:
            measured.append(None)

        def ended(record: Record) -> None:
            measured[record.number] = record.measured(self.names, self.setting.token_overhead_s)

        self._run(arrivals, begun, ended)
        return [one for one in measured if one is not None]

    def check_integrity(self) -> None:
        """Raise unless everything is back where it began: for tests, after `run`."""
        for engine, load in zip(self.engines, self.router.loads, strict=True):
            engine.scheduler.check_integrity()
            load.check_integrity()
            assert not load.requests
            assert engine.ends_s is None
            assert not engine.scheduler.running
        assert not self._inside

    # --- the loop --------------------------------------------------------------------------------

    def _run(
        self,
        arrivals: Iterable[Arrival],
        begun: Callable[[Record], None],
        ended: Callable[[Record], None],
    ) -> None:
        """ValueError when the arrivals are not in order."""
        self._ended = ended
        for failure in self.setting.failures:
            self._at(failure.at_s, self._fail, failure)
        self._expect_next(iter(arrivals), 0, begun)
        was_enabled = gc.isenabled()
        gc.disable()  # nothing here is cyclic garbage, and a look for it takes a third of the time
        try:
            self._loop()
        finally:
            if was_enabled:
                gc.enable()

    def _clock(self) -> float:
        return self.now_s

    def _at(self, when_s: float, do: Callable[..., None], *arguments: object) -> None:
        self._order += 1
        heappush(self._heap, (when_s, self._order, do, arguments))

    def _after(self, seconds: float, do: Callable[..., None], *arguments: object) -> None:
        self._at(self.now_s + seconds, do, *arguments)

    def _loop(self) -> None:
        heap = self._heap
        while heap:
            when_s, _, do, arguments = heappop(heap)
            self.running_integral_s += self._inside * (when_s - self.now_s)
            self.now_s = when_s
            self.events += 1
            do(*arguments)

    # --- the router's side -----------------------------------------------------------------------

    def _expect_next(self, arrivals: Iterator[Arrival], number: int, begun: Callable[[Record], None]) -> None:
        arrival = next(arrivals, None)
        if arrival is None:
            return
        if arrival.arrival_s < self.now_s:
            raise ValueError(
                f"arrivals: number {number} comes at {arrival.arrival_s} s, after one at {self.now_s} s;"
                " an order of time is expected"
            )
        heappush(
            self._heap, (arrival.arrival_s, FIRST + number, self._arrive, (arrival, number, arrivals, begun))
        )

    def _arrive(
        self, arrival: Arrival, number: int, arrivals: Iterator[Arrival], begun: Callable[[Record], None]
    ) -> None:
        self._expect_next(arrivals, number + 1, begun)
        record = Record(arrival, number)
        begun(record)
        self._inside += 1
        self._retry_budget.request()
        ask = Ask(record, arrival.view, arrival.keys, self.now_s)
        answer = self.router.arrive(ask)
        if isinstance(answer, Ticket):
            self._at(self.now_s + self.setting.hold_limit_s, self._expire, answer)
            self._pump()
        else:
            self._answered(ask, answer)

    def _expire(self, ticket: Ticket[Ask[Record]]) -> None:
        record = ticket.item.item
        if record.placed_s is None and not record.is_over:
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

    def _answered(self, ask: Ask[Record], answer: Answer, tried: tuple[int, ...] = ()) -> None:
        record = ask.item
        if isinstance(answer, Rejection):
            if answer is NOBODY:
                record.failure = answer.reason
            else:
                record.rejected = answer.reason
            self._leave(record)
            return
        record.prefill, record.worker, record.placed_s = answer.prefill, answer.decode, self.now_s
        record.matched_tokens, record.start_s = answer.match.tokens, None
        record.predicted_ttft_s = answer.expected.prediction.ttft_s
        attempt = Attempt(record, ask, answer, tried, self.engines[answer.prefill].life)
        self._after_overhead(self._submit, attempt)

    def _after_overhead(self, do: Callable[[Attempt], None], attempt: Attempt) -> None:
        if self.setting.request_overhead_s:
            self._after(self.setting.request_overhead_s, do, attempt)
        else:
            do(attempt)

    def _leave(self, record: Record) -> None:
        self._inside -= 1
        self.stays_s += self.now_s - record.arrival.arrival_s
        self._ended(record)

    # --- the engines' side -----------------------------------------------------------------------

    def _engine(self, number: int) -> SimulatedEngine:
        setting = self.setting
        scheduler = setting.scheduler(
            BlockCache(setting.kv_tokens // setting.block_tokens),
            setting.engine_times(number),
            setting.block_tokens,
            setting.max_batched_tokens,
            setting.max_sequences,
        )
        return SimulatedEngine(scheduler, setting.in_a_row)

    def _submit(self, attempt: Attempt) -> None:
        """All of it, or its prefill, to the worker that was chosen for that."""
        arrival, placement = attempt.record.arrival, attempt.placement
        tokens, output = arrival.view.prompt_tokens, arrival.output_tokens
        if self._is_too_long(tokens + output):
            self._failed(attempt, "too_long")
            return
        if placement.is_split:
            sequence = EngineSequence("", tokens, 1, arrival.keys.keys, attempt)
        else:
            sequence = EngineSequence("", tokens, output, self._all_keys(arrival), attempt)
        self._give(placement.prefill, sequence)

    def _hand_over(self, attempt: Attempt) -> None:
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
            self._broken(sequence.payload, worker)
            return
        turn = engine.turn
        engine.submit(sequence, self.now_s)
        self._attend(worker, turn)

    def _attend(self, worker: int, turn: int) -> None:
        """After something came to an engine, that was at `turn` before."""
        if self.engines[worker].ends_s is None:
            self._at(self.now_s, self._wake, worker)
        else:
            self._follow(worker, turn)

    def _is_too_long(self, tokens: int) -> bool:
        block_tokens = self.setting.block_tokens
        return -(-tokens // block_tokens) > self.setting.kv_tokens // block_tokens

    def _wake(self, worker: int) -> None:
        engine = self.engines[worker]
        turn = engine.turn
        if engine.is_up and engine.step is None:
            engine.wake(self.now_s)
            self._began(worker, engine.step)
        self._follow(worker, turn)

    def _all_keys(self, arrival: Arrival) -> Sequence[int]:
        """Those of the prompt, and where output stays, keys that nobody else has for the blocks it fills."""
        keys = arrival.keys.keys
        if not self.setting.keeps_output:
            return keys
        first = self._next_output_key
        tokens = arrival.view.prompt_tokens + arrival.output_tokens
        self._next_output_key += tokens // self.setting.block_tokens - len(keys)
        return (*keys, *range(first, self._next_output_key))

    def _follow(self, worker: int, turn: int) -> None:
        """Be there when the engine's step ends, if that is another time than at `turn`."""
        engine = self.engines[worker]
        if engine.turn != turn and engine.ends_s is not None:
            self._at(engine.ends_s, self._step_ended, worker, engine.turn)

    def _began(self, worker: int, step: Step | None) -> None:
        """An engine has decided what it does next."""
        if step is not None:
            for sequence in step.preempted:
                if sequence.generated_tokens and sequence.payload.stalled_s is None:
                    sequence.payload.stalled_s = self.now_s
            for sequence, _ in step.prefills:
                record: Record = sequence.payload.record
                if record.start_s is None:
                    record.start_s = self.now_s
        for sequence in self.engines[worker].scheduler.take_fetches():
            self._fetch(sequence)

    def _step_ended(self, worker: int, turn: int) -> None:
        engine = self.engines[worker]
        if engine.turn != turn:
            return
        step, outcome = engine.complete(self.now_s)
        self._began(worker, engine.step)
        self._follow(worker, turn)
        self.feed.tell(worker, outcome)
        for sequence in outcome.firsts:
            self._first_token(worker, sequence)
        for sequence, _ in step.prefills:
            self._caught_up(sequence.payload, sequence)
        for sequence in outcome.finished:
            self._finished(worker, sequence)
        if outcome.firsts or outcome.finished:
            self._pump()

    def _first_token(self, worker: int, sequence: EngineSequence) -> None:
        attempt: Attempt = sequence.payload
        record, placement = attempt.record, attempt.placement
        if worker == placement.prefill:
            record.gpu_tokens = sequence.cached_tokens or 0
        if worker == placement.decode:
            record.first_s = self.now_s
            attempt.since = self.engines[worker].gaps.steps
            self.router.first_byte(placement)

    def _caught_up(self, attempt: Attempt, sequence: EngineSequence) -> None:
        """The next token of one that was preempted, once it is computed again."""
        if attempt.stalled_s is not None and sequence.phase is not Phase.PREFILLING:
            record = attempt.record
            record.longest_gap_s = max(record.longest_gap_s, self.now_s - attempt.stalled_s)
            attempt.stalled_s = None

    def _finished(self, worker: int, sequence: EngineSequence) -> None:
        attempt: Attempt = sequence.payload
        record, placement = attempt.record, attempt.placement
        if worker != placement.decode:
            self.router.prefilled(attempt.ask, placement, record.cached_tokens)
            self._after_overhead(self._hand_over, attempt)
            return
        assert record.first_s is not None
        gaps = self.engines[worker].gaps
        record.longest_gap_s = max(record.longest_gap_s, gaps.longest_s(attempt.since))
        record.end_s = self.now_s
        served = Served(record.first_s, sequence.output_tokens, record.cached_tokens)
        self.router.finish(attempt.ask, placement, served)
        self._leave(record)

    # --- handoff ---------------------------------------------------------------------------------

    def _fetch(self, sequence: EngineSequence) -> None:
        """There is room for a prompt that was prefilled elsewhere: what is not here already can come."""
        attempt: Attempt = sequence.payload
        placement = attempt.placement
        source = self.engines[placement.prefill]
        if source.life != attempt.life:
            self._at(self.now_s, self._lose, sequence)
            return
        tokens = sequence.prompt_tokens - sequence.resident_blocks * self.setting.block_tokens
        there_s = self.handoffs.send(placement.prefill, placement.decode, tokens, self.now_s)
        self._at(there_s, self._receive, sequence)

    def _receive(self, sequence: EngineSequence) -> None:
        attempt: Attempt = sequence.payload
        if attempt.is_over:
            return
        worker = attempt.placement.decode
        engine = self.engines[worker]
        turn = engine.turn
        self.feed.tell(worker, engine.receive(sequence, self.now_s))
        self._attend(worker, turn)

    # --- failures --------------------------------------------------------------------------------

    def _fail(self, failure: Failure) -> None:
        worker, setting = failure.worker, self.setting
        lost = self.engines[worker].fail()
        for sequence in lost:
            self._broken(sequence.payload, worker)
        for engine in self.engines:
            for sequence in list(engine.scheduler.receiving):
                if sequence.payload.placement.prefill == worker:
                    self._lose(sequence)
        if failure.back_s is None or failure.back_s > failure.at_s + setting.detect_s:
            self._after(setting.detect_s, self._detected, worker, False)
        if failure.back_s is not None:
            self._at(failure.back_s, self._restart, worker)
        self._pump()

    def _restart(self, worker: int) -> None:
        self.engines[worker].is_up = True
        self.feed.gone(worker)
        self._after(self.setting.detect_s, self._detected, worker, True)

    def _detected(self, worker: int, is_up: bool) -> None:
        if is_up == self.engines[worker].is_up:
            self.router.set_usable(worker, is_up)
            if not is_up:
                self.feed.gone(worker)
            self._pump()

    def _lose(self, sequence: EngineSequence) -> None:
        """KV that was to come does not."""
        attempt: Attempt = sequence.payload
        if attempt.is_over:
            return
        worker = attempt.placement.decode
        engine = self.engines[worker]
        turn = engine.turn
        engine.abort(sequence, self.now_s)
        self._attend(worker, turn)
        self._broken(attempt, attempt.placement.prefill)

    def _broken(self, attempt: Attempt, worker: int) -> None:
        """A worker has failed an attempt: another one, where nothing was streamed yet."""
        record = attempt.record
        tried = (*attempt.tried, worker)
        if record.first_s is not None:
            self._failed(attempt, "worker_lost")
        elif len(tried) >= self._retry.attempts or not self._retry_budget.take():
            self.retries_denied += 1
            self._failed(attempt, "worker_lost")
        else:
            attempt.is_over = True
            self.router.drop(attempt.placement)
            record.retries += 1
            self._answered(attempt.ask, self.router.retry(attempt.ask, tried), tried)

    def _failed(self, attempt: Attempt, why: str) -> None:
        attempt.is_over = True
        attempt.record.failure = why
        self.router.drop(attempt.placement)
        self._leave(attempt.record)
        self._pump()


def _nothing(record: Record) -> None:
    """Records are kept by whoever asked for them."""
