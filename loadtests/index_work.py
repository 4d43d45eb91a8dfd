"""The work of the index benchmark: who stores which blocks in what order, and what is then asked.

Blocks are 16 tokens, known by a random 64-bit hash of their own tokens. All is drawn from one generator, so
the same arguments give the same work in every run and for every index.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from xxhash import xxh3_64_intdigest

DEEP_BLOCKS = 5000
SYSTEM_BLOCKS = 64
SYSTEM_PROMPTS = 8
QUERIES = 64
UNKNOWN_BLOCK = 12345
SHAPES = ("disjoint", "shared", "chat")
KINDS = ("hit", "miss0", "half")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Local hashes of a prompt's blocks, and who stores how many of them from the start."""

    blocks: array[int]
    holders: tuple[tuple[int, int], ...]
    """(worker, blocks)."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One event: what a worker stored, parallel arrays."""

    worker: int
    parent: tuple[int, int] | None
    """(engine hash, our key) of the block before; None for a first block."""
    hashes: array[int]
    """The engine's names of the blocks."""
    keys: array[int]
    """Ours."""
    local: array[int]
    """Hashes of each block's own tokens."""


def prompts(shape: str, workers: int, entries: int, random: Random) -> list[Prompt]:
    """Prompts of at least so many (worker, block) entries.

    disjoint: every block has one holder. shared: every worker stores each prompt, every other one half of
    it. chat: few system prompts, conversations of very different lengths on one to three workers each.
    """
    if shape not in SHAPES:
        raise ValueError(f"shape must be one of {', '.join(SHAPES)}, not {shape!r}")
    made: list[Prompt] = []
    total = 0
    system = [_blocks(random, SYSTEM_BLOCKS) for _ in range(SYSTEM_PROMPTS)] if shape == "chat" else []
    while total < entries:
        if shape == "disjoint":
            prompt = Prompt(_blocks(random, DEEP_BLOCKS), ((len(made) % workers, DEEP_BLOCKS),))
        elif shape == "shared":
            halves = (DEEP_BLOCKS, DEEP_BLOCKS // 2)
            holders = tuple((worker, halves[worker % 2]) for worker in range(workers))
            prompt = Prompt(_blocks(random, DEEP_BLOCKS), holders)
        else:
            prompt = _conversation(random, system, workers)
        made.append(prompt)
        total += sum(blocks for _, blocks in prompt.holders)
    for _ in range(4 if shape == "chat" else 0):  # long ones to ask for
        blocks = system[0] + _blocks(random, DEEP_BLOCKS - SYSTEM_BLOCKS)
        made.append(Prompt(blocks, ((random.randrange(workers), DEEP_BLOCKS),)))
    return made


def _conversation(random: Random, system: list[array[int]], workers: int) -> Prompt:
    turns = min(DEEP_BLOCKS - SYSTEM_BLOCKS, int(random.paretovariate(1.1) * 50))
    blocks = system[random.randrange(SYSTEM_PROMPTS)] + _blocks(random, turns)
    holders = random.sample(range(workers), min(workers, random.choice([1, 1, 1, 2, 3])))
    return Prompt(blocks, tuple((worker, len(blocks)) for worker in holders))


def _blocks(random: Random, count: int) -> array[int]:
    return array("Q", [random.getrandbits(64) for _ in range(count)])


def engine_hashes(blocks: array[int]) -> array[int]:
    """Names that stand for the whole prefix, as an engine gives them."""
    name, names = 0, array("Q")
    for block in blocks:
        name = (name * 6364136223846793005 + block + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        names.append(name)
    return names


def chained_keys(blocks: array[int]) -> array[int]:
    """Keys as kvroute chains them, with a block's local hash in the place of its tokens."""
    key, keys = 0, array("Q")
    for block in blocks:
        key = xxh3_64_intdigest(block.to_bytes(8, "little"), key)
        keys.append(key)
    return keys


def events(made: list[Prompt], event_blocks: int) -> Iterator[Stored]:
    """What the workers publish, prompt after prompt, in events of so many blocks."""
    for prompt in made:
        hashes, keys = engine_hashes(prompt.blocks), chained_keys(prompt.blocks)
        for worker, depth in prompt.holders:
            for start in range(0, depth, event_blocks):
                part = slice(start, min(depth, start + event_blocks))
                parent = (hashes[start - 1], keys[start - 1]) if start else None
                yield Stored(worker, parent, hashes[part], keys[part], prompt.blocks[part])


def queries(made: list[Prompt], kind: str, blocks: int, random: Random) -> list[array[int]]:
    """Prompts to ask for: known (hit), with an unknown first block (miss0), or known to the middle (half)."""
    deep = [prompt.blocks for prompt in made if len(prompt.blocks) >= DEEP_BLOCKS]
    asked = []
    for number in range(QUERIES):
        query = deep[number % len(deep)][:blocks]
        if kind == "miss0":
            query[0] = UNKNOWN_BLOCK
        elif kind == "half":
            query[blocks // 2 :] = _blocks(random, blocks - blocks // 2)
        asked.append(query)
    return asked
