from __future__ import annotations

from array import array
from random import Random

import pytest

from kvroute.conductor.block_index import CPU, DISK, GPU
from kvroute.conductor.index import MAX_PLACES, Holder, HolderMatch, PrefixIndex
from kvroute.types import NO_MATCH, FoundMatches, KeyMode, PrefixMatch, PromptKeys

MIB = 2**20
BLOCK = 16


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def index(clock: Clock) -> PrefixIndex:
    return PrefixIndex(64 * MIB, clock, prediction_s=5.0)


@pytest.fixture
def random() -> Random:
    seed = 77
    print(f"seed {seed}")
    return Random(seed)


def prompt(keys: list[int], block_tokens: int = BLOCK) -> PromptKeys:
    return PromptKeys(KeyMode.TOKENS, keys, block_tokens, len(keys) * block_tokens + 3)


def chain(random: Random, blocks: int) -> list[int]:
    return [random.getrandbits(64) for _ in range(blocks)]


def pack(keys: list[int]) -> bytes:
    return array("Q", keys).tobytes()


def confirm(index: PrefixIndex, holder: Holder, keys: list[int], tier: int = GPU) -> None:
    """The engine's event; here its names of blocks are our keys."""
    index.blocks.store(index.slot(holder), tier, None, pack(keys), pack(keys))


def ask(index: PrefixIndex, keys: list[int], *worker_ids: str) -> list[PrefixMatch]:
    matches = index.match({BLOCK: prompt(keys)}, worker_ids)
    if isinstance(matches, FoundMatches) and matches.places is not None:
        assert set(matches.places) == {at for at, match in enumerate(matches) if match is not NO_MATCH}
    return matches


def test_a_match_says_what_is_confirmed_per_tier_and_what_is_predicted(
    index: PrefixIndex, random: Random
) -> None:
    a, b = Holder("a"), Holder("b")
    keys = chain(random, 10)
    index.add_holder(a, BLOCK)
    index.add_holder(b, BLOCK)
    confirm(index, a, keys[:3])
    index.blocks.store(index.slot(a), CPU, keys[2], pack(keys[3:5]), pack(keys[3:5]))
    index.blocks.store(index.slot(a), DISK, keys[4], pack(keys[5:7]), pack(keys[5:7]))
    index.predict("b", prompt(keys[:4]))
    index.predict("guessed", prompt(keys[:9]))
    assert ask(index, keys, "a", "b", "guessed", "never seen") == [
        PrefixMatch(112, gpu_tokens=48, cpu_tokens=80, confirmed_tokens=112),
        PrefixMatch(64, predicted_tokens=64),
        PrefixMatch(144, predicted_tokens=144),
        NO_MATCH,
    ]
    assert index.lookup({BLOCK: prompt(keys)}) == [HolderMatch(a, BLOCK, 48, 0, 0, 80, 112, 112)]
    index.check_integrity()


def test_a_prediction_covers_the_gap_until_the_event_and_then_no_longer_counts(
    index: PrefixIndex, clock: Clock, random: Random
) -> None:
    holder = Holder("a")
    index.add_holder(holder, BLOCK)
    kept, dropped = chain(random, 8), chain(random, 8)
    index.predict("a", prompt(kept))
    index.predict("a", prompt(dropped))
    assert ask(index, kept, "a")[0].tokens == 128
    confirm(index, holder, kept)
    clock.now_s += 4.9
    assert ask(index, dropped, "a") == [PrefixMatch(128, predicted_tokens=128)]
    assert ask(index, kept, "a")[0].predicted_tokens == 128
    clock.now_s += 0.1
    assert ask(index, dropped, "a") == [NO_MATCH]
    assert ask(index, kept, "a") == [PrefixMatch(128, 128, 128, 128)]
    clock.now_s += 10_000  # what is confirmed does not age
    assert ask(index, kept, "a") == [PrefixMatch(128, 128, 128, 128)]
    index.check_integrity()


def test_a_prompt_routed_again_lives_on_with_the_younger_prediction_on_that_worker_alone(
    index: PrefixIndex, clock: Clock, random: Random
) -> None:
    for name in ("a", "b"):
        index.add_holder(Holder(name), BLOCK)
    keys = chain(random, 8)
    index.predict("a", prompt(keys))
    index.predict("b", prompt(keys))
    clock.now_s += 3
    index.predict("a", prompt(keys[:5]))
    clock.now_s += 3
    assert [match.tokens for match in ask(index, keys, "a", "b")] == [80, 0]
    clock.now_s += 3
    assert [match.tokens for match in ask(index, keys, "a", "b")] == [0, 0]
    assert index.entries == 0
    index.check_integrity()


def test_without_believable_events_a_prediction_stays(
    index: PrefixIndex, clock: Clock, random: Random
) -> None:
    keys = chain(random, 8)
    index.predict("silent", prompt(keys))
    index.add_holder(Holder("loud"), BLOCK)
    index.believe_events("loud", False)
    index.predict("loud", prompt(keys))
    clock.now_s += 10_000
    assert [match.tokens for match in ask(index, keys, "silent", "loud")] == [128, 128]
    assert index.held_blocks("silent") == 8
    index.believe_events("loud", True)
    assert [match.tokens for match in ask(index, keys, "silent", "loud")] == [128, 0]
    index.check_integrity()


def test_keys_of_bytes_stay_predicted_where_events_are_believed(
    index: PrefixIndex, clock: Clock, random: Random
) -> None:
    holder, keys = Holder("a"), chain(random, 8)
    index.add_holder(holder, BLOCK)
    of_bytes = PromptKeys(KeyMode.BYTES, keys, 128, 8 * 128)
    index.predict("a", of_bytes)
    clock.now_s += 1000
    (match,) = index.match({128: of_bytes}, ["a"])
    assert match == PrefixMatch(8 * 128, predicted_tokens=8 * 128)
    index.clear(holder)
    assert index.match({128: of_bytes}, ["a"]) == [NO_MATCH]


def test_what_was_routed_before_events_were_believed_counts_again_when_they_no_longer_are(
    index: PrefixIndex, clock: Clock, random: Random
) -> None:
    keys = chain(random, 8)
    index.predict("a", prompt(keys))
    index.add_holder(Holder("a"), BLOCK)
    assert ask(index, keys, "a") == [NO_MATCH]
    index.believe_events("a", False)
    (match,) = ask(index, keys, "a")
    assert match.predicted_tokens == 8 * BLOCK


def test_a_cleared_holder_starts_again_without_blocks_or_predictions(
    index: PrefixIndex, clock: Clock, random: Random
) -> None:
    a, b = Holder("a"), Holder("b")
    keys, more = chain(random, 8), chain(random, 8)
    for holder in (a, b):
        index.add_holder(holder, BLOCK, silent_tier_blocks=4)
        confirm(index, holder, keys)
        index.predict(holder.worker_id, prompt(more))
    before = index.slot(a)
    index.clear(a)
    assert index.slot(a) != before
    assert [match.tokens for match in ask(index, keys, "a", "b")] == [0, 128]
    assert [match.tokens for match in ask(index, more, "a", "b")] == [0, 128]
    while index.sweep():
        pass
    index.predict("a", prompt(more))  # what expires of the first life takes nothing from the second
    clock.now_s += 4.9
    index.predict("a", prompt(more))
    clock.now_s += 0.2
    assert [match.tokens for match in ask(index, more, "a", "b")] == [128, 0]
    confirm(index, a, keys)
    index.blocks.remove(index.slot(a), GPU, pack(keys))
    assert index.blocks.held(index.slot(a)) == (0, 0, 0, 4)  # the silent tier is still known of
    index.clear(Holder("never seen"))
    index.check_integrity()


def test_a_removed_worker_is_gone_with_all_ranks_and_late_news_of_it_is_ignored(
    index: PrefixIndex, random: Random
) -> None:
    keys = chain(random, 8)
    for rank in range(3):
        index.add_holder(Holder("a", rank), BLOCK)
        confirm(index, Holder("a", rank), keys)
    index.predict("a", prompt(keys))
    index.remove_worker("a")
    assert ask(index, keys, "a") == [NO_MATCH]
    assert index.lookup({BLOCK: prompt(keys)}) == []
    index.predict("a", prompt(keys))
    index.add_holder(Holder("a"), BLOCK)
    index.believe_events("a", True)
    assert index.holders_of("a") == []
    with pytest.raises(KeyError):
        index.slot(Holder("a"))
    while index.sweep():
        pass
    assert (index.entries, index.blocks.blocks, index.held_blocks("a")) == (0, 0, 0)
    index.check_integrity()


def test_the_best_rank_of_a_worker_counts_and_is_named(index: PrefixIndex, random: Random) -> None:
    keys = chain(random, 8)
    for rank, blocks in ((0, 2), (1, 6), (2, 4)):
        index.add_holder(Holder("ranks", rank), BLOCK)
        confirm(index, Holder("ranks", rank), keys[:blocks])
    index.add_holder(Holder("single"), BLOCK)
    confirm(index, Holder("single"), keys[:3])
    best, only = ask(index, keys, "ranks", "single")
    assert (best.tokens, best.dp_rank) == (96, 1)
    assert (only.tokens, only.dp_rank) == (48, None)
    assert index.holders_of("ranks") == [Holder("ranks", rank) for rank in range(3)]
    assert index.held_blocks("ranks") == 12


def test_every_worker_is_asked_in_its_own_block_size(index: PrefixIndex, random: Random) -> None:
    small, large = chain(random, 40), chain(random, 10)
    index.add_holder(Holder("small"), 16)
    index.add_holder(Holder("large"), 64)
    confirm(index, Holder("small"), small)
    confirm(index, Holder("large"), large)
    both = {16: prompt(small, 16), 64: prompt(large, 64)}
    assert [match.tokens for match in index.match(both, ["small", "large"])] == [640, 640]
    assert [match.tokens for match in index.match({16: both[16]}, ["small", "large"])] == [640, 0]
    # Keys of one size never count for a worker of another, whatever they collide with.
    assert index.match({64: prompt(small, 64)}, ["small"]) == [NO_MATCH]
    index.add_holder(Holder("small"), 32)  # another block size: what was there is under useless keys
    assert index.match(both, ["small"]) == [NO_MATCH]
    index.check_integrity()


def test_a_silent_tier_counts_in_the_best_estimate_only(index: PrefixIndex, random: Random) -> None:
    keys = chain(random, 8)
    index.add_holder(Holder("a"), BLOCK, silent_tier_blocks=100)
    confirm(index, Holder("a"), keys)
    index.blocks.remove(index.slot(Holder("a")), GPU, pack(keys[4:]))
    assert ask(index, keys, "a") == [PrefixMatch(128, 64, 64, 64)]
    index.add_holder(Holder("a"), BLOCK)
    assert ask(index, keys, "a") == [PrefixMatch(64, 64, 64, 64)]


def test_for_room_predictions_go_first_and_a_share_is_always_theirs(clock: Clock, random: Random) -> None:
    index = PrefixIndex(4 * MIB, clock, prediction_s=1000)
    for name in ("a", "b"):
        index.add_holder(Holder(name), BLOCK)
    confirmed = [chain(random, 50) for _ in range(20)]
    for keys in confirmed:
        confirm(index, Holder("a"), keys)
    while not index.evicted_predicted:
        index.predict("b", prompt(chain(random, 100)))
        index.predict("guessed", prompt(chain(random, 100)))
        assert index.bytes_used <= index.max_bytes
    assert index.evicted_confirmed == 0
    assert all(ask(index, keys, "a")[0].confirmed_tokens == 800 for keys in confirmed)
    while not index.evicted_confirmed:
        confirm(index, Holder("a"), chain(random, 500))
        index.sweep()
        assert index.bytes_used <= index.max_bytes
    last = chain(random, 100)
    index.predict("b", prompt(last))
    assert ask(index, last, "b")[0].tokens == 1600
    assert index.evicted_blocks == index.evicted_predicted + index.evicted_confirmed
    index.check_integrity()


def test_a_very_long_prediction_cannot_push_all_else_out(clock: Clock, random: Random) -> None:
    index = PrefixIndex(MIB, clock)
    index.add_holder(Holder("a"), BLOCK)
    keys = chain(random, 100_000)
    index.predict("a", prompt(keys))
    index.predict("guessed", prompt(keys))
    assert index.bytes_used <= MIB
    index.check_integrity()


@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("max_bytes must be at least 1048576, not 5", lambda: PrefixIndex(5, Clock())),
        ("prediction_s must be 0 or more, not -1", lambda: PrefixIndex(MIB, Clock(), -1)),
        ("prediction_s must be 0 or more, not nan", lambda: PrefixIndex(MIB, Clock(), float("nan"))),
        ("block_tokens must be at least 1", lambda: PrefixIndex(MIB, Clock()).add_holder(Holder("a"), 0)),
    ],
)
def test_bad_arguments_are_named(message: str, make: object) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


def expected_of(index: PrefixIndex, prompts: dict[int, PromptKeys], worker_id: str, sent: int) -> PrefixMatch:
    """By what every holder has confirmed, and so many tokens predicted."""
    ranks = [row for row in index.lookup(prompts) if row.holder.worker_id == worker_id]
    if not ranks:
        return PrefixMatch(sent, predicted_tokens=sent)
    best = max(ranks, key=lambda row: (row.probable_tokens, row.gpu_tokens))
    return PrefixMatch(
        max(best.probable_tokens, sent),
        best.gpu_tokens,
        best.gpu_cpu_tokens,
        best.confirmed_tokens,
        sent,
        best.holder.dp_rank if len(index.holders_of(worker_id)) > 1 else None,
    )


def test_matches_for_the_same_ids_follow_every_change_of_holders(index: PrefixIndex) -> None:
    """Ids in one tuple, as the fleet has them; some holders have several ranks or another block size."""
    seed = Random().randrange(2**32)
    print(f"seed {seed}")
    random = Random(seed)
    names = tuple("abcdef")
    chains = {16: chain(random, 8), 32: chain(random, 4)}
    prompts = {size: prompt(keys, size) for size, keys in chains.items()}
    sent: dict[str, int] = {}
    for _ in range(400):
        holder = Holder(random.choice(names), random.choice([0, 0, 1]))
        size = index.block_tokens(holder)
        match random.randrange(8):
            case 0:
                index.add_holder(holder, random.choice([16, 32]))
            case 1:
                index.clear(holder)
                if size is not None:
                    sent.pop(holder.worker_id, None)
            case 2 if size is not None:
                sent[holder.worker_id] = max(sent.get(holder.worker_id, 0), 3 * 16)
                index.predict(holder.worker_id, prompt(chains[16][:3]))
            case _ if size is not None:
                held = chains[size][: random.randrange(1, len(chains[size]) + 1)]
                confirm(index, holder, held, random.choice([GPU, CPU, DISK]))
        expected = [expected_of(index, prompts, name, sent.get(name, 0)) for name in names]
        assert index.match(prompts, names) == expected
        assert index.match(prompts, [*names, names[0]]) == [*expected, expected[0]], "named twice"
    index.remove_worker("a")
    assert index.match(prompts, names)[0] == NO_MATCH


def test_more_sequences_of_ids_than_are_remembered_have_their_answers(
    index: PrefixIndex, random: Random
) -> None:
    keys = chain(random, 4)
    orders = [tuple(random.sample("abcdef", 6)) for _ in range(MAX_PLACES + 3)]
    index.add_holder(Holder("c"), BLOCK)
    confirm(index, Holder("c"), keys)
    for _ in range(2):
        for order in orders:
            assert [bool(match.tokens) for match in ask(index, keys, *order)] == [
                name == "c" for name in order
            ]
            assert index.match({BLOCK: prompt(keys)}, order)[order.index("c")].gpu_tokens == 64
    assert len(index._places) <= MAX_PLACES


@pytest.mark.parametrize(("holders", "named"), [(5, True), (6, False)])
def test_who_holds_something_is_named_where_few_do(
    index: PrefixIndex, random: Random, holders: int, named: bool
) -> None:
    names, keys = [f"w{number}" for number in range(20)], chain(random, 4)
    for name in names:
        index.add_holder(Holder(name), BLOCK)
    chosen = random.sample(range(20), holders)
    for at in chosen:
        confirm(index, Holder(names[at]), keys)
    index.predict(names[chosen[0]], prompt(keys))
    other = next(at for at in range(20) if at not in chosen)
    index.predict(names[other], prompt(keys))
    matches = index.match({BLOCK: prompt(keys)}, names)
    assert isinstance(matches, FoundMatches)
    assert {at for at, match in enumerate(matches) if match.tokens} == {*chosen, other}
    assert matches.places is None if not named else set(matches.places or ()) == {*chosen, other}
