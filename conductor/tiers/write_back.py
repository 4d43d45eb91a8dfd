"""When a block is written to the tier below."""

from __future__ import annotations

from typing import ClassVar

from kvroute.conductor.tiers.base import BlockInfo, count_at_least


class Through:
    """At once: nothing is lost to an eviction, at the price of the most writes."""

    at_access: ClassVar[bool] = True
    at_eviction: ClassVar[bool] = False

    def after_access(self, block: BlockInfo) -> bool:
        """True; again at every read, where admission refused before."""
        return True

    def before_eviction(self, block: BlockInfo) -> bool:
        """False: it was offered when it was computed."""
        return False


class Selective:
    """Once it has been read `hits` times: few writes, but what is evicted before is lost."""

    at_access: ClassVar[bool] = True
    at_eviction: ClassVar[bool] = False

    def __init__(self, hits: int = 1) -> None:
        count_at_least("hits", hits, 1)
        self._hits = hits

    def after_access(self, block: BlockInfo) -> bool:
        """True from that read on."""
        return block.reads >= self._hits

    def before_eviction(self, block: BlockInfo) -> bool:
        """False."""
        return False


class Back:
    """When it leaves the tier above: the tiers hold different blocks, and evictions cost writes."""

    at_access: ClassVar[bool] = False
    at_eviction: ClassVar[bool] = True

    def after_access(self, block: BlockInfo) -> bool:
        """False."""
        return False

    def before_eviction(self, block: BlockInfo) -> bool:
        """True."""
        return True
