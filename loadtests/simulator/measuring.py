"""What a simulation knows besides its requests: what engines counted, what the router's decisions took."""

from __future__ import annotations

from time import thread_time
from typing import Any

from kvroute.loadtests.mock_engine.steps import StepTimes
from kvroute.loadtests.results.figures import Facts
from kvroute.loadtests.simulator.router import Router
from kvroute.loadtests.simulator.simulation import Simulation
from kvroute.types import Role

EVERY = 16
"""Of so many decisions one is timed."""


class DecisionMeter:
    """CPU time of a router's decisions: snapshot, matches in the index, the policy, the charge."""

    def __init__(self, router: Router[Any]) -> None:
        self.timed = 0
        self._seen = 0
        self._total_s = 0.0
        consider = router.consider

        def timed(*arguments: Any) -> Any:
            self._seen += 1
            if self._seen % EVERY:
                return consider(*arguments)
            began_s = thread_time()
            answer = consider(*arguments)
            self._total_s += thread_time() - began_s
            self.timed += 1
            return answer

        every: Any = timed
        # All of the router's ways to a decision go through this one.
        router.consider = every  # type: ignore[method-assign]

    @property
    def mean_us(self) -> float | None:
        """Microseconds of one; None before any was timed."""
        return self._total_s / self.timed * 1e6 if self.timed else None


def facts(simulation: Simulation, meter: DecisionMeter) -> Facts:
    """What the fleet counted, and what a prefill takes there."""
    setting = simulation.setting
    roles: dict[Role, list[str]] = {}
    for number, name in enumerate(simulation.names):
        roles.setdefault(setting.role(number), []).append(name)
    times, chunk = setting.engine_times(0), setting.max_batched_tokens

    def saved_s(prompt: int, cached: int) -> float:
        return prefill_s(times, prompt, 0, chunk) - prefill_s(times, prompt, cached, chunk)

    return Facts(
        groups=tuple(tuple(names) for names in roles.values()),
        saved_s=saved_s,
        preemptions=sum(engine.scheduler.totals.preemptions for engine in simulation.engines),
        decision_us=meter.mean_us,
    )


def prefill_s(times: StepTimes, prompt: int, cached: int, chunk: int) -> float:
    """Seconds of a prefill that an engine has nothing else to do beside, in chunks as it takes them."""
    total_s = 0.0
    for start in range(cached, prompt, chunk):
        tokens = min(chunk, prompt - start)
        total_s += times.step_s(tokens, tokens * (start + tokens / 2), 0, 0.0)
    return total_s
