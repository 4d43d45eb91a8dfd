"""What a choice adds to the books of its worker, and what is predicted of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from kvroute.config import Config
from kvroute.policies.base import Policy
from kvroute.policies.least_loaded import LeastLoaded
from kvroute.policies.ttft import Ttft
from kvroute.router.decision_log import DecisionLog
from kvroute.router.dispatch import Choice, Dispatcher, NamedPolicy
from kvroute.router.knowledge import Knowledge
from kvroute.router.metrics import Metrics
from kvroute.router.parsed_request import ParsedRequest
from kvroute.types import Cost, Decision, Priced, Pull, RequestView
from kvroute.types import Fleet as Offered
from tests.router.registry import Fleet

PROMPT = bytes(range(256)) * 40
WRONG = Cost(queue_wait_s=1e9, prefill_s=1e9, itl_s=1e9)


@dataclass(frozen=True)
class Options:
    cost: Cost | None = None


class Other:
    """Decides as `Ttft` does, and says another price or none."""

    Options = Options
    needs_prefix = True
    needs_seconds = True

    def __init__(self, options: Options) -> None:
        self._ttft = Ttft(Ttft.Options())
        self._cost = options.cost

    def decide(self, request: RequestView, fleet: Any) -> Any:
        return msgspec.structs.replace(self._ttft.decide(request, fleet), cost=self._cost)


async def choices(policy: Policy, decisions: DecisionLog | None = None) -> list[Choice]:
    """Twenty requests with a few prompts, some of them answered."""
    fleet, metrics = Fleet(), Metrics()
    for name in "abc":
        pace = fleet.add(name).pace
        pace.prefill_scale, pace.decode_scale, pace.overhead_s = 1.7, 0.8, 0.01
    knowledge = Knowledge(Config(), fleet.registry, metrics)
    dispatcher = Dispatcher(
        fleet.registry,
        knowledge,
        metrics,
        NamedPolicy("p", policy),
        budget_s=1,
        clock=lambda: fleet.now_s,
        decision_log=decisions or DecisionLog(0.0, "p", lambda: fleet.now_s),
    )
    made = []
    for number in range(20):
        fleet.now_s += 0.01
        prompt = PROMPT[: 5000 - 1000 * (number % 3)]
        request = ParsedRequest(RequestView("m", prompt_tokens=len(prompt) // 4), _prompt=prompt, _root=1)
        dispatcher.arrived()
        made.append(dispatcher.choose(request, await dispatcher.prepare(request)))
        if number % 3:
            made[number // 2].lease.first_byte()
        if number % 5 == 4:
            made[number // 3].lease.release()
    fleet.registry.check_integrity()
    return made


def books(choice: Choice) -> list[float]:
    charge, prediction = choice.lease.charge, choice.prediction
    return [
        *(charge.prefill_s, charge.prompt_tokens, charge.uncached_tokens, charge.output_tokens),
        *(prediction.ttft_s, prediction.itl_s, prediction.ahead_s, prediction.step_s),
    ]


@pytest.mark.parametrize("cost", [None, WRONG])
async def test_the_books_are_the_same_whoever_prices(cost: Cost | None) -> None:
    """By the price that ttft gives with its decision, and by one of the gateway's own for other policies."""
    by_price, by_own = await choices(Ttft(Ttft.Options())), await choices(Other(Options(cost)))
    for one, other in zip(by_price, by_own, strict=True):
        assert one.member.endpoint == other.member.endpoint
        assert books(one) == pytest.approx(books(other), rel=1e-9)
    assert {choice.decision.reason for choice in by_price} >= {"cached", "cold"}


async def test_where_nobody_prices_tokens_are_charged_and_no_seconds() -> None:
    made = await choices(LeastLoaded(LeastLoaded.Options()))
    for choice in made:
        assert choice.prediction is None
        assert (choice.lease.charge.prefill_s, choice.lease.charge.prompt_tokens > 0) == (0.0, True)
    assert made[0].lease.charge.uncached_tokens == 1250


class Pulling(Other):
    """Wants a pull where nobody can."""

    def decide(self, request: RequestView, fleet: Offered) -> Decision:
        decision = self._ttft.decide(request, fleet)
        assert isinstance(decision, Decision)
        return msgspec.structs.replace(decision, pull=Pull(fleet.workers[0], 1000, 0.1))


async def test_a_pull_that_cannot_be_is_not_counted_on() -> None:
    for choice in await choices(Pulling(Options())):
        assert choice.decision.pull is None
        assert choice.lease.charge.uncached_tokens >= choice.lease.charge.prompt_tokens - choice.match.tokens


async def test_a_policy_that_cannot_price_is_logged_without_prices() -> None:
    class Unpriced(Other):
        def price(self, _request: RequestView, _fleet: Offered) -> list[Priced]:
            raise RuntimeError("no prices today")

    decisions = DecisionLog(1.0, "p", lambda: 0.0)
    made = await choices(Unpriced(Options()), decisions)
    assert len(made) == 20, "all were served"
