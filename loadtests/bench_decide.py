"""`kvroute bench decide`: what one decision costs, with the look-up in the index of confirmed blocks.

The gateway's own dispatcher, registry, index and policy, and a fleet as it may stand at some moment: every
worker decodes for some requests and prefills for a few, and holds the system prompt that all prompts share;
one in sixteen holds a long part of the conversation asked for. CPU of the thread per call, that of reading
the clock taken off.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Any, Protocol, cast

from kvroute.clock import monotonic
from kvroute.conductor.block_index import GPU
from kvroute.conductor.index import Holder, pack_keys
from kvroute.conductor.keys import token_keys
from kvroute.config import Config
from kvroute.config_groups import WorkerConfig
from kvroute.policies.base import Policy, Prices
from kvroute.policies.registry import make_policy
from kvroute.router.decision_log import DecisionLog
from kvroute.router.dispatch import Dispatcher, NamedPolicy
from kvroute.router.knowledge import NO_PROMPT, Knowledge, Prompt
from kvroute.router.metrics import Metrics
from kvroute.router.parsed_request import ParsedRequest
from kvroute.router.pool import UpstreamPool
from kvroute.router.workers import Member, Registry, State
from kvroute.types import PromptKeys, RequestView

SEED = 1
MODEL = "model"
BLOCK_TOKENS = 16
SYSTEM_SHARE = 1 / 16
"""Of a prompt's blocks: what all prompts begin with, held by every worker."""
PROMPTS = 16
WORKERS_PER_HOLDER = 16
DECODING = (4, 32)
PREFILLING = (0, 3)


class Stage(Protocol):
    """A function that decides, or does a part of it."""

    __name__: str

    def __call__(self, rep: int, /) -> object: ...


@dataclass(frozen=True, slots=True)
class DecideBench:
    """`workers`: fleets to measure, by size; `reps` decisions per stage in each of `rounds`."""

    workers: Sequence[int] = (8, 64, 512)
    policy: str = "ttft"
    blocks: int = 1000
    reps: int = 500
    rounds: int = 7

    def __post_init__(self) -> None:
        for name, least in (("blocks", 2), ("reps", 1), ("rounds", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not self.workers or min(self.workers) < 1:
            raise ValueError(f"workers must be at least 1, not {', '.join(map(str, self.workers)) or 'none'}")


class _Side:
    """One fleet with its dispatcher, and prompts to decide on."""

    def __init__(self, bench: DecideBench, workers: int, policy: Policy) -> None:
        self._random = Random(SEED)
        config, metrics = Config(), Metrics()
        self.registry = Registry(
            lambda _endpoint: cast(UpstreamPool, None),  # nothing is sent
            health=config.health,
            breaker=config.breaker,
            limits=config.limits,
            clock=monotonic,
        )
        self.knowledge = Knowledge(config, self.registry, metrics)
        named = NamedPolicy(bench.policy, policy)
        self.dispatcher = Dispatcher(
            self.registry,
            self.knowledge,
            metrics,
            named,
            budget_s=float("inf"),
            clock=monotonic,
            decision_log=DecisionLog(0.0, bench.policy, monotonic),
        )
        self.members = [
            self.registry.add(WorkerConfig(url=f"http://10.0.{i >> 8}.{i & 255}:8000"))
            for i in range(workers)
        ]
        for member in self.members:
            self.registry.update(member, models=(MODEL,))
            member.state = State.READY  # unannounced: no slow start, no line in the log for each
            self.knowledge.index.add_holder(Holder(member.worker.id), BLOCK_TOKENS)
        self.registry.changed()
        keys = self._keys(bench.blocks)
        counts_keys = getattr(policy, "needs_active_keys", False)
        for member in self.members:
            self._fill(member.worker.id, keys)
            self._burden(member, keys if counts_keys else ())
        self.view = RequestView(MODEL, prompt_tokens=bench.blocks * BLOCK_TOKENS + 1)
        self.request = ParsedRequest(self.view)
        self.prompts = [self._prompt(each) for each in keys]
        self.eligible = self.registry.eligible(MODEL, monotonic())
        self.fleets = [self.dispatcher.snapshot(self.request, prompt) for prompt in self.prompts]

    def _keys(self, blocks: int) -> list[PromptKeys]:
        system = int(blocks * SYSTEM_SHARE) or 1
        draw = self._random.getrandbits
        shared = [draw(17) for _ in range(system * BLOCK_TOKENS)]
        own = (blocks - system) * BLOCK_TOKENS
        return [
            token_keys(array("I", [*shared, *(draw(17) for _ in range(own))]).tobytes(), 1, BLOCK_TOKENS)
            for _ in range(PROMPTS)
        ]

    def _fill(self, worker_id: str, keys: Sequence[PromptKeys]) -> None:
        """The system prompt for everyone, and long parts of a sixteenth of the conversations."""
        index, random = self.knowledge.index, self._random
        slot = index.slot(Holder(worker_id))
        blocks = len(keys[0].keys)
        system = int(blocks * SYSTEM_SHARE) or 1
        for each in keys:
            held = random.randint(blocks // 2, blocks) if random.random() < 1 / WORKERS_PER_HOLDER else system
            packed = pack_keys(each.keys[:held])
            index.blocks.store(slot, GPU, None, packed, packed)

    def _burden(self, member: Member, keys: Sequence[PromptKeys]) -> None:
        random, now_s = self._random, monotonic()
        decoding = random.randint(*DECODING)
        for number in range(decoding + random.randint(*PREFILLING)):
            tokens = random.randint(500, 8000)
            lease = self.registry.charge(
                member,
                now_s,
                prefill_s=tokens * 2e-5,
                prompt_tokens=tokens,
                uncached_tokens=tokens,
                output_tokens=300.0,
                keys=keys[number % len(keys)].keys if keys else (),
            )
            if number < decoding:
                lease.first_byte()

    def _prompt(self, keys: PromptKeys) -> Prompt:
        return Prompt(({BLOCK_TOKENS: keys},), keys.mode) if self.dispatcher.needs_prefix else NO_PROMPT

    def stages(self) -> list[Stage]:
        """What is measured; each is given the number of the call."""
        policy, dispatcher = self.dispatcher.policy, self.dispatcher
        view, request, eligible = self.view, self.request, self.eligible
        prompts, fleets = self.prompts, self.fleets

        def look_up(rep: int) -> object:
            return self.knowledge.match(prompts[rep % PROMPTS], eligible)

        def decide(rep: int) -> object:
            return policy.decide(view, fleets[rep % PROMPTS])

        def look_up_and_decide(rep: int) -> object:
            return policy.decide(view, dispatcher.snapshot(request, prompts[rep % PROMPTS]))

        def choose_and_charge(rep: int) -> object:
            choice = dispatcher.choose(request, prompts[rep % PROMPTS])
            choice.lease.release()
            return choice

        stages: list[Stage] = [decide, look_up_and_decide, choose_and_charge]
        if isinstance(policy, Prices):
            prices = policy

            def price(rep: int) -> object:
                return prices.price(view, fleets[rep % PROMPTS])

            stages.insert(0, price)
        if dispatcher.needs_prefix:
            stages.insert(0, look_up)
        return stages


def run_bench_decide(bench: DecideBench) -> dict[str, Any]:
    """One row per fleet and stage: CPU us per call, p50 and p99, each the median of the rounds, with the
    lowest and the highest. Raises `PolicyError` for a policy that cannot be made.

    Stages: look_up (the index alone), price (all candidates, for people), decide (the policy alone),
    look_up_and_decide (with the snapshot between them), choose_and_charge (all that the dispatcher does, and
    the release).
    """
    rows = []
    for workers in bench.workers:
        side = _Side(bench, workers, make_policy(bench.policy, {}))
        with _collector_at_rest():
            for stage in side.stages():  # the charge comes last: it leaves predictions in the index
                measured = [_measure(stage, bench.reps) for _ in range(bench.rounds)]
                rows.append({"workers": workers, "stage": stage.__name__, **_row(measured)})
    return {
        "policy": bench.policy,
        "blocks": bench.blocks,
        "rounds": bench.rounds,
        "reps": bench.reps,
        "rows": rows,
    }


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """As the gateway has it: what was made before is not looked at again."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _measure(call: Stage, reps: int) -> tuple[float, float]:
    """(p50, p99) in us of the thread's CPU."""
    now_ns = time.thread_time_ns
    clock_ns, taken_ns = [], []
    for rep in range(reps):
        empty_ns = now_ns()
        start_ns = now_ns()
        call(rep)
        end_ns = now_ns()
        clock_ns.append(start_ns - empty_ns)
        taken_ns.append(end_ns - start_ns)
    taken_ns.sort()
    own_ns = median(clock_ns)
    p50_ns, p99_ns = median(taken_ns), taken_ns[min(reps - 1, int(0.99 * reps))]
    return max(p50_ns - own_ns, 0) / 1e3, max(p99_ns - own_ns, 0) / 1e3


def _row(rounds: Sequence[tuple[float, float]]) -> dict[str, float]:
    row: dict[str, float] = {}
    for name, values in zip(("p50", "p99"), zip(*rounds, strict=True), strict=True):
        row |= {f"{name}_us": median(values), f"{name}_min_us": min(values), f"{name}_max_us": max(values)}
    return row


def show_bench_decide(result: dict[str, Any]) -> str:
    """The figures as a table of text."""
    lines = [
        f"{result['policy']}, prompts of {result['blocks']} blocks; CPU us per call, the median of"
        f" {result['rounds']} rounds of {result['reps']} (lowest to highest)",
        "",
        f"{'workers':>7}  {'':<20}{'p50':>9}{'':20}{'p99':>9}",
    ]
    for row in result["rows"]:
        cells = ""
        for name in ("p50", "p99"):
            spread = f"({row[f'{name}_min_us']:.1f} to {row[f'{name}_max_us']:.1f})"
            cells += f"{row[f'{name}_us']:>9.1f}{spread:>20}"
        lines.append(f"{row['workers']:>7}  {row['stage'].replace('_', ' '):<20}{cells}")
    return "\n".join(lines)
