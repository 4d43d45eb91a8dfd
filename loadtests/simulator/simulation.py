"""One gateway over a fleet in virtual time: requests arrive, are answered by the router, and end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from kvroute.conductor.index import PrefixIndex
from kvroute.config_groups import Retry
from kvroute.loadtests.results.packed import PackedRequests
from kvroute.loadtests.simulator.engine import SimulatedEngine
from kvroute.loadtests.simulator.fleet import EngineFleet
from kvroute.loadtests.simulator.held import HeldRequests
from kvroute.loadtests.simulator.loop import EventLoop
from kvroute.loadtests.simulator.placing import NOBODY, UNKNOWN, Answer, Ask, Served
from kvroute.loadtests.simulator.requests import Attempt, Record
from kvroute.loadtests.simulator.router import Router
from kvroute.loadtests.simulator.setting import Failure, Setting
from kvroute.loadtests.traces.arrivals import Arrival
from kvroute.policies.base import Policy
from kvroute.policies.costs.calibration import Calibration
from kvroute.policies.costs.links import PdLinks
from kvroute.policies.holding import Ticket
from kvroute.router.retry import RetryBudget
from kvroute.types import Rejection, Worker

__all__ = ["Record", "Simulation"]

INDEX_BYTES = 2**32


class Simulation:
    """One policy over one fleet and its requests; `run` once. `seed` draws which events are lost."""

    def __init__(self, setting: Setting, policy: Policy, seed: int = 0) -> None:
        self.setting = setting
        self._loop = EventLoop()
        self.names = [f"w{number}" for number in range(setting.workers)]
        self.index = PrefixIndex(INDEX_BYTES, self._loop.clock)
        self.fleet = EngineFleet(setting, self.names, self.index, self._loop, self, seed)
        self.router = self._router(policy)
        self.stays_s = 0.0
        """Of all requests that have left, refused ones too."""
        self.retries_denied = 0
        """Failed attempts that were not retried, by the gateway's rules."""
        self._retry = Retry()
        self._retry_budget = RetryBudget(self._retry)
        self._held = HeldRequests(setting, self.router, self._loop, self._answered)
        self._begun = 0
        self._is_expecting = False
        self._begins: Callable[[Record], None] = _nothing
        self._ended: Callable[[Record], None] = _nothing

    def _router(self, policy: Policy) -> Router[Record]:
        setting = self.setting
        workers = [
            Worker(
                name,
                f"http://{name}.invalid",
                setting.role(i),
                block_size_tokens=setting.block_tokens,
                takes_whole=setting.split is None,
            )
            for i, name in enumerate(self.names)
        ]
        return Router(
            policy,
            workers,
            [setting.pace(i) for i in range(setting.workers)],
            self.index,
            self._loop.clock,
            predicts=setting.predicts,
            hold_limit=setting.hold_limit,
            calibration=Calibration() if setting.learns else None,
            pd_links=PdLinks.uniform(setting.handoff) if setting.splits else None,
            peer_link=setting.memory.peer_link,
            decode_later=setting.decode_later,
        )

    @property
    def engines(self) -> Sequence[SimulatedEngine]:
        return self.fleet.engines

    @property
    def now_s(self) -> float:
        return self._loop.now_s

    @property
    def events(self) -> int:
        return self._loop.events

    @property
    def running_integral_s(self) -> float:
        """Requests in the system (held ones too) times seconds."""
        return self._loop.inside_s

    def run(self, arrivals: Iterable[Arrival]) -> list[Record]:
        """Until all requests have ended; their records in order of arrival."""
        records: list[Record] = []
        self._run(arrivals, records.append, _nothing)
        return records

    def measure(self, arrivals: Iterable[Arrival]) -> PackedRequests:
        """The same, and no more is kept of a request that has ended than what a client would have measured.

        Arrivals are taken as they come. RuntimeError when a request never ended: figures without it would be
        too good.
        """
        measured = PackedRequests()

        def begun(_: Record) -> None:
            measured.expect()

        def ended(record: Record) -> None:
            measured.put(record.number, record.measured(self.names, self.setting.token_overhead_s))

        self._run(arrivals, begun, ended)
        if measured.missing:
            raise RuntimeError(f"{measured.missing} of {len(measured)} requests never ended")
        return measured

    def check_integrity(self) -> None:
        """Raise unless everything is back where it began: for tests, after `run`."""
        self.fleet.check_integrity()
        for load in self.router.loads:
            load.check_integrity()
            assert not load.requests
        assert not self._loop.inside

    def _run(
        self,
        arrivals: Iterable[Arrival],
        begun: Callable[[Record], None],
        ended: Callable[[Record], None],
    ) -> None:
        """ValueError when the arrivals are not in order."""
        self._begins, self._ended = begun, ended
        for failure in self.setting.failures:
            self._loop.at(failure.at_s, self._fail, failure)
        if self.setting.memory.knows_future:
            arrivals = list(arrivals)
            self.fleet.memory.foretell((each.arrival_s, each.keys.keys) for each in arrivals)
        requests = iter(arrivals)
        self._expect(next(requests, None), requests)
        if self.setting.metrics_s is not None:
            self._loop.after(self.setting.metrics_s, self._read_metrics)
        self._loop.run()

    # --- the router's side -----------------------------------------------------------------------

    def _expect(self, arrival: Arrival | None, arrivals: Iterator[Arrival]) -> None:
        self._is_expecting = arrival is not None
        if arrival is None:
            return
        if arrival.arrival_s < self.now_s:
            raise ValueError(
                f"arrivals: number {self._begun} comes at {arrival.arrival_s} s, after one at {self.now_s} s;"
                " an order of time is expected"
            )
        self._loop.first_at(arrival.arrival_s, self._arrive, arrival, arrivals)

    def _arrive(self, arrival: Arrival, arrivals: Iterator[Arrival]) -> None:
        """Also those that come at the same moment, where the policy would have them together."""
        together = [self._ask(arrival)]
        following = next(arrivals, None)
        if self.router.orders:
            while following is not None and following.arrival_s == self.now_s:
                together.append(self._ask(following))
                following = next(arrivals, None)
            if len(together) > 1:
                together.sort(key=lambda ask: (ask.view.priority, self.router.order(ask)))
        self._expect(following, arrivals)
        for ask in together:
            answer = self.router.arrive(ask)
            if isinstance(answer, Ticket):
                self._held.add(answer)
            else:
                self._answered(ask, answer)

    def _ask(self, arrival: Arrival) -> Ask[Record]:
        record = Record(arrival, self._begun)
        self._begun += 1
        self._begins(record)
        self._loop.inside += 1
        self._retry_budget.request()
        return Ask(record, arrival.view, arrival.keys, self.now_s)

    def _read_metrics(self) -> None:
        """The router's regular look at what engines say of themselves, until the last request has left."""
        for engine, load in zip(self.engines, self.router.loads, strict=True):
            load.report_kv(engine.scheduler.cache.used_ratio, self.setting.kv_tokens)
        if self._loop.is_due and (self._loop.inside or self._is_expecting):
            assert self.setting.metrics_s is not None
            self._loop.after(self.setting.metrics_s, self._read_metrics)

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
        tokens = record.arrival.view.prompt_tokens + record.arrival.output_tokens
        if self.fleet.is_too_long(tokens):
            self._failed(attempt, "too_long")
        else:
            self._after_overhead(self.fleet.submit, attempt)

    def _after_overhead(self, do: Callable[[Attempt], None], attempt: Attempt) -> None:
        if self.setting.request_overhead_s:
            self._loop.after(self.setting.request_overhead_s, do, attempt)
        else:
            do(attempt)

    def _leave(self, record: Record) -> None:
        self._loop.inside -= 1
        self.stays_s += self.now_s - record.arrival.arrival_s
        self._ended(record)

    # --- what the engines say --------------------------------------------------------------------

    def first_token(self, attempt: Attempt) -> None:
        self.router.first_byte(attempt.placement)

    def prefilled(self, attempt: Attempt) -> None:
        self.router.prefilled(attempt.ask, attempt.placement, attempt.record.cached_tokens)
        if attempt.placement.decode == UNKNOWN:
            placement = self.router.pair(attempt.ask, attempt.placement)
            if placement is None:
                self._failed(attempt, NOBODY.reason)
                return
            attempt.placement, attempt.record.worker = placement, placement.decode
        self._after_overhead(self.fleet.hand_over, attempt)

    def finished(self, attempt: Attempt) -> None:
        record = attempt.record
        assert record.first_s is not None
        served = Served(record.first_s, record.arrival.output_tokens, record.cached_tokens)
        self.router.finish(attempt.ask, attempt.placement, served)
        self._leave(record)

    def freed(self) -> None:
        """Held requests are asked about again."""
        self._held.freed()

    # --- failures --------------------------------------------------------------------------------

    def _fail(self, failure: Failure) -> None:
        worker, detect_s = failure.worker, self.setting.detect_s
        self.fleet.fail(worker)
        if failure.back_s is None or failure.back_s > failure.at_s + detect_s:
            self._loop.after(detect_s, self._detected, worker, False)
        if failure.back_s is not None:
            self._loop.at(failure.back_s, self._restart, worker)

    def _restart(self, worker: int) -> None:
        self.fleet.restart(worker)
        self._loop.after(self.setting.detect_s, self._detected, worker, True)

    def _detected(self, worker: int, is_up: bool) -> None:
        if is_up == self.fleet.engines[worker].is_up:
            self.router.set_usable(worker, is_up)
            if not is_up:
                self.fleet.feed.gone(worker)
            self.freed()

    def broken(self, attempt: Attempt, worker: int) -> None:
        """A worker has failed an attempt: another one, where nothing was streamed yet."""
        record = attempt.record
        tried = (*attempt.tried, worker)
        if record.first_s is not None:
            self._failed(attempt, "worker_lost")
        elif len(tried) >= self._retry.attempts or not self._retry_budget.take():
            self.retries_denied += 1
            self._failed(attempt, "worker_lost")
        else:
            self._give_up(attempt)
            record.retries += 1
            self._answered(attempt.ask, self.router.retry(attempt.ask, tried), tried)

    def _failed(self, attempt: Attempt, why: str) -> None:
        self._give_up(attempt)
        attempt.record.failure = why
        self._leave(attempt.record)
        self.freed()

    def _give_up(self, attempt: Attempt) -> None:
        attempt.is_over = True
        self.fleet.pulls.let_go(attempt.pulled)
        self.fleet.let_go(attempt)
        self.router.drop(attempt.placement)


def _nothing(record: Record) -> None:
    """Records are kept by whoever asked for them."""
