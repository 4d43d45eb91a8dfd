"""The nouns and the five decisions about a tier of KV blocks. Sizes in bytes, times in seconds.

Every policy is synchronous, reads no clock of its own (`now_s` is given) and keeps bounded state. Keys are
64-bit and name a block with everything before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from msgspec import Struct


class BlockInfo(Struct, frozen=True, gc=False):
    """One block as policies see it."""

    key: int
    parent: int | None
    """Key of the block before it; None for the first of a prompt."""
    bytes: int
    depth: int
    """Blocks before it in its prompt."""
    prompt_blocks: int
    """Full blocks of the prompt that computed it."""
    recompute_s: float
    """Prefill time of this block alone, its prefix being there."""
    reads: int = 0
    """Hits since it was computed."""
    last_access_s: float = 0.0
    turn: int = 1
    """Of its conversation, the request that used it last; 1 where nobody tells turns apart."""
    new_tokens: int = 0
    """Tokens of that request's prompt that were not cached; 0 where nobody tells."""


class Node(Struct, frozen=True, gc=False):
    """A place that could hold a copy."""

    id: str
    capacity_bytes: int
    free_bytes: int
    domain: str = ""
    """Nodes of one domain fail together."""
    local: bool = False
    """Whether it is where the block was computed."""


class Fetch(Struct, frozen=True, gc=False):
    """Leading blocks of a prompt that wait in a lower tier."""

    blocks: int
    block_bytes: int
    needed_at_s: float
    """When the request will want them in the GPU."""


class Link(Struct, frozen=True, gc=False):
    """The way up from a tier, used in turn by the fetches on it."""

    bytes_per_s: float
    latency_s: float = 0.0
    in_flight_bytes: int = 0
    """Of earlier fetches, not yet arrived."""


class Admission(Protocol):
    """Is the block worth writing into the tier at all?"""

    def record(self, block: BlockInfo) -> None:
        """The block was computed or read, wherever it is. Precedes `admit`."""

    def admit(self, block: BlockInfo, now_s: float) -> bool:
        """Whether to write it; asked only for blocks that the tier does not hold."""


class Placement(Protocol):
    """Where are its copies?"""

    def place(self, block: BlockInfo, nodes: Sequence[Node]) -> tuple[str, ...]:
        """Ids of different nodes with room for the block, the first copy first; empty when none has."""


class Eviction(Protocol):
    """Which block goes when the tier is full?

    The tier keeps the rule of prefix caches, not the policy: it offers only leaves, that is blocks none of
    whose successors it holds, as a block without its predecessors is of no use.
    """

    def record(self, block: BlockInfo) -> None:
        """The block was computed or read, wherever it is."""

    def offer(self, block: BlockInfo) -> None:
        """The block may go from now on. Offered again, it takes its new place."""

    def withdraw(self, key: int) -> None:
        """The block may not go, or is gone; no matter whether it was offered."""

    def refuses(self, newcomer: BlockInfo, now_s: float) -> bool:
        """Whether the newcomer is worth less than whatever would go for it; changes nothing."""

    def victim(self, newcomer: BlockInfo | None, now_s: float) -> int | None:
        """The offered block that goes for the newcomer, and is withdrawn by this; None: the newcomer does,
        or nothing is offered. Without a newcomer the least of those offered goes.
        """


class Prefetch(Protocol):
    """How much to fetch before it is needed?"""

    def blocks(self, fetch: Fetch, link: Link, now_s: float) -> int:
        """How many of the leading blocks to fetch, from 0 to all."""


class WriteBack(Protocol):
    """When is a block written to the tier below?"""

    at_access: ClassVar[bool]
    """Whether `after_access` is ever true; if not, it is not asked. The same of `before_eviction`."""
    at_eviction: ClassVar[bool]

    def after_access(self, block: BlockInfo) -> bool:
        """Whether to write it now that it has been computed (`reads` is 0) or read."""

    def before_eviction(self, block: BlockInfo) -> bool:
        """Whether to write it now that it leaves the tier above."""


def note_nothing(self: object, block: BlockInfo) -> None:
    """The `record` of a policy that knows enough of a block as it is: it need not be called."""


def at_least(name: str, value: float, minimum: float) -> None:
    """Raise `ValueError` unless `value` is a number not below `minimum`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= minimum:
        raise ValueError(f"{name} must be a number of at least {minimum:g}, got {value!r}")


def count_at_least(name: str, value: int, minimum: int) -> None:
    """Raise `ValueError` unless `value` is an integer not below `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, got {value!r}")
