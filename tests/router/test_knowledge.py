"""What a request is told of the caches: trust, several prompts, a remote conductor; and what is learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest

from kvroute.conductor.index import Holder, pack_keys
from kvroute.conductor.keys import token_keys
from kvroute.conductor.remote import Fallback, Lookup, RemoteConductor
from kvroute.config import Config
from kvroute.router.knowledge import Knowledge, Prompt
from kvroute.router.metrics import Metrics
from kvroute.router.workers import Member
from kvroute.types import NO_MATCH, KeyMode, Outcome, PrefixMatch, PromptKeys, Trust
from tests.router.registry import Fleet

IDS = list(range(64))


@dataclass
class Remote:
    """A conductor that answers what the test says."""

    answers: list[Lookup] = field(default_factory=list)
    predicted: list[tuple[str, PromptKeys]] = field(default_factory=list)
    observed: list[tuple[str, int, int, int]] = field(default_factory=list)

    async def match(self, _keys: Sequence[PromptKeys], _worker_ids: Sequence[str]) -> Lookup:
        return self.answers.pop(0)

    def predict(self, worker_id: str, keys: PromptKeys) -> None:
        self.predicted.append((worker_id, keys))

    def observe(self, worker_id: str, predicted: int, cached: int, prompt: int) -> None:
        self.observed.append((worker_id, predicted, cached, prompt))


class Side:
    def __init__(self) -> None:
        self.fleet = Fleet()
        self.a, self.b = self.fleet.add("a"), self.fleet.add("b")
        self.knowledge = Knowledge(Config(), self.fleet.registry, Metrics())
        self.eligible = self.fleet.registry.eligible("m", self.fleet.now_s)

    def confirm(self, member: Member, ids: list[int], rank: int = 0) -> None:
        holder = Holder(member.worker.id, rank)
        index = self.knowledge.index
        index.add_holder(holder, 16)
        packed = pack_keys(token_keys(ids, 1, 16).keys)
        index.blocks.store(index.slot(holder), 0, None, packed, packed)

    def match(self, prompt: Prompt) -> list[PrefixMatch]:
        return list(self.knowledge.match(prompt, self.eligible))

    def remote(self, *answers: Lookup) -> Remote:
        remote = Remote(list(answers))
        self.knowledge.remote = cast(RemoteConductor, remote)
        return remote


@pytest.fixture
def side() -> Side:
    return Side()


def prompt(*prompts: list[int]) -> Prompt:
    return Prompt(tuple({16: token_keys(ids, 1, 16)} for ids in prompts or (IDS,)), KeyMode.TOKENS)


def test_of_a_worker_judged_by_its_load_alone_nothing_matches(side: Side) -> None:
    side.confirm(side.a, IDS)
    side.confirm(side.b, IDS)
    side.knowledge.following.untrusted.add(side.a.worker.id)
    assert [match.tokens for match in side.match(prompt())] == [0, 64]


def test_prompts_of_one_request_add_up_and_name_a_rank_only_if_they_agree(side: Side) -> None:
    other = [7, *IDS]
    side.confirm(side.a, IDS, rank=0)
    side.confirm(side.a, other, rank=1)
    side.confirm(side.b, IDS, rank=0)
    side.confirm(side.b, IDS[:16], rank=1)
    (on_a, on_b) = side.match(prompt(IDS, other))
    assert (on_a.tokens, on_a.gpu_tokens, on_a.dp_rank) == (128, 128, None)
    assert (on_b.tokens, on_b.dp_rank) == (64, None)
    (on_a, on_b) = side.match(prompt(IDS, IDS))
    assert (on_a.tokens, on_a.dp_rank, on_b.tokens, on_b.dp_rank) == (128, 0, 128, 0)


async def test_a_remote_conductor_s_answer_is_taken_as_far_as_it_trusts_it(side: Side) -> None:
    match = PrefixMatch(32, 32, 32, 32)
    side.remote(Lookup([match, match], [Trust.LOAD_ONLY, Trust.APPROXIMATE]))
    asked = await side.knowledge.ask(prompt(), side.eligible)
    assert side.match(asked) == [NO_MATCH, match]


async def test_without_the_remote_answer_to_every_prompt_what_was_routed_here_counts(side: Side) -> None:
    match = PrefixMatch(32, 32, 32, 32)
    side.knowledge.index.predict(side.b.worker.id, token_keys(IDS, 1, 16))
    nothing = Lookup([NO_MATCH] * 2, [Trust.LOAD_ONLY] * 2, Fallback.TIMEOUT)
    side.remote(Lookup([match, match], [Trust.EXACT] * 2), nothing)
    asked = await side.knowledge.ask(prompt(IDS, IDS), side.eligible)
    assert [one.tokens for one in side.match(asked)] == [0, 128]


async def test_a_remote_answer_is_read_by_worker_when_fewer_are_left(side: Side) -> None:
    match = PrefixMatch(32, 32, 32, 32)
    side.remote(Lookup([NO_MATCH, match], [Trust.EXACT] * 2))
    asked = await side.knowledge.ask(prompt(), side.eligible)
    rest = side.fleet.registry.eligible("m", side.fleet.now_s, [side.a])
    assert list(side.knowledge.match(asked, rest)) == [match]


def test_what_is_routed_is_told_to_the_remote_conductor_and_to_replicas(side: Side) -> None:
    remote = side.remote()
    told: list[tuple[Member, PromptKeys]] = []
    side.knowledge.on_routed(lambda member, keys: told.append((member, keys)))
    side.knowledge.routed(side.a, prompt())
    keys = token_keys(IDS, 1, 16)
    assert remote.predicted == [(side.a.worker.id, keys)]
    assert told == [(side.a, keys)]
    assert [match.predicted_tokens for match in side.match(prompt())] == [64, 0]


@pytest.mark.parametrize(
    ("mode", "match", "cached", "is_held_against_the_index"),
    [
        (KeyMode.TOKENS, PrefixMatch(32, 32, 32, 32), 32, True),
        (KeyMode.TOKENS, NO_MATCH, 0, True),
        (KeyMode.TOKENS, PrefixMatch(64, 32, 32, 32, 64), 32, False),
        (KeyMode.TOKENS, PrefixMatch(32, 32, 32, 32), None, False),
        (KeyMode.BYTES, PrefixMatch(32, 0, 0, 0, 32), 32, False),
        (None, NO_MATCH, 32, False),
    ],
)
def test_only_what_was_confirmed_is_held_against_the_index(
    side: Side, mode: KeyMode | None, match: PrefixMatch, cached: int | None, is_held_against_the_index: bool
) -> None:
    remote = side.remote()
    outcome = Outcome(side.a.worker, 200, prompt_tokens=70, cached_tokens=cached)
    side.knowledge.observe("m", Prompt(mode=mode), match, outcome)
    told = [(side.a.worker.id, match.tokens, cached, 70)]
    assert remote.observed == (told if is_held_against_the_index else [])


def test_failed_requests_are_no_hits_and_no_misses(side: Side) -> None:
    failed = Outcome(side.a.worker, 500, "status_500", prompt_tokens=70, cached_tokens=0)
    side.knowledge.observe("m", prompt(), NO_MATCH, failed)
    assert side.knowledge.hits.report().total.requests == 0
