"""Prompts made from block ids: an engine's cache must find in them what the trace says, no more, no less."""

from __future__ import annotations

from random import Random

import pytest

from kvroute.conductor.keys import byte_keys, token_keys
from kvroute.loadtests.mock_engine.tokens import tokenize
from kvroute.loadtests.traces.arrivals import Arrival, arrivals
from kvroute.loadtests.traces.cuts import Cut
from kvroute.loadtests.traces.prompts import MAX_ID, MIN_ID, Prompts
from kvroute.loadtests.traces.words import WORDS
from kvroute.loadtests.traces.workloads import generate
from tests.loadtests.random_traces import in_common, random_trace, shared


def token_ids(prompts: Prompts, one: Arrival) -> list[int]:
    return prompts.token_ids(one.block_ids, one.view.prompt_tokens)


def text(prompts: Prompts, one: Arrival) -> str:
    return prompts.text(one.block_ids, one.view.prompt_tokens)


@pytest.mark.parametrize("engine_block_tokens", [8, 16, 24, 64])
@pytest.mark.parametrize("scale", [1.0, 0.3, 1.7])
def test_prompts_share_exactly_the_blocks_of_the_trace(engine_block_tokens: int, scale: float) -> None:
    for seed in range(8):
        trace = random_trace(Random(seed), 64)
        cut = Cut(64, 64, scale)
        prompts = Prompts(cut, seed)
        made = arrivals(trace, 64, scale=scale)
        ids = [token_ids(prompts, one) for one in made]
        texts = [text(prompts, one) for one in made]
        words = [list(tokenize(one.encode())) for one in texts]
        bytes_ = [byte_keys(one.encode(), 0, 4 * engine_block_tokens).keys for one in texts]
        by_ids, by_words = (
            [token_keys(one, 0, engine_block_tokens).keys for one in tokens] for tokens in (ids, words)
        )
        owners: dict[int, int] = {}
        for a, row in enumerate(trace.rows):
            assert len(ids[a]) == len(words[a]) == made[a].view.prompt_tokens
            for keys in by_ids, by_words, bytes_:
                for b, other in enumerate(trace.rows):
                    expected = in_common(row, other, cut) // engine_block_tokens
                    assert shared(keys[a], keys[b]) == expected, f"seed {seed}, rows {a} and {b}"
            for index, key in enumerate(by_ids[a]):  # and no block is like one elsewhere
                assert owners.setdefault(key, index) == index, f"seed {seed}"


def test_the_keys_a_simulator_uses_are_those_an_engine_would_find() -> None:
    made = arrivals(generate("agents", 60, seed=2), 64, scale=0.25)
    prompts = Prompts(Cut(64, 64, 0.25))
    names: dict[int, int] = {}
    hits = 0
    for one in made:
        found = token_keys(token_ids(prompts, one), 0, 64).keys
        assert len(found) == len(one.keys.keys)
        for simulated, real in zip(one.keys.keys, found, strict=True):
            hits += simulated in names
            assert names.setdefault(simulated, real) == real
    assert len(set(names.values())) == len(names)
    assert hits > 100


def test_prompts_are_the_same_everywhere_and_others_for_another_seed() -> None:
    cut = Cut(64, 64)
    assert Prompts(cut).token_ids((0, 2**40), 66)[:3] == [3433, 9180, 28188]
    assert Prompts(cut).token_ids((0, 2**40), 66)[64:] == [2568, 24119]
    assert Prompts(cut).text((7,), 4) == " one saw gun fog"
    assert Prompts(cut, seed=1).token_ids((0,), 64) != Prompts(cut).token_ids((0,), 64)
    assert Prompts(cut).token_ids((3,), 64)[:10] == Prompts(cut).token_ids((3,), 10)


def test_token_ids_fill_their_range() -> None:
    ids = Prompts(Cut(512, 512)).token_ids(range(200), 100_000)
    assert MIN_ID <= min(ids) < MIN_ID + 10
    assert MAX_ID - 10 < max(ids) < MAX_ID
    assert set(Prompts(Cut(64, 64), min_id=5, max_id=7).token_ids((1,), 64)) == {5, 6}
    assert set(Prompts(Cut(512, 512)).text(range(20), 10_000).split()) == set(WORDS)


def test_words_are_256_of_three_letters() -> None:
    assert len(set(WORDS)) == len(WORDS) == 256
    assert all(len(word) == 3 and word.isascii() and word.islower() for word in WORDS)


def test_prompts_that_cannot_be_are_refused() -> None:
    cut = Cut(64, 64)
    with pytest.raises(ValueError, match="2 blocks hold from 1 to 128 tokens, not 129"):
        Prompts(cut).token_ids((1, 2), 129)
    with pytest.raises(ValueError, match="2 blocks hold from 1 to 128 tokens, not 0"):
        Prompts(cut).text((1, 2), 0)
    with pytest.raises(ValueError, match="token ids from 5 to below 6: at least two are needed"):
        Prompts(cut, min_id=5, max_id=6)
