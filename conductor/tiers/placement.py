"""Where copies of a block go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvroute.conductor.tiers.base import BlockInfo, Node, count_at_least


class LocalFirst:
    """Where it was computed, if there is room: no transfer. Else as `FreeRatio`."""

    def place(self, block: BlockInfo, nodes: Sequence[Node]) -> tuple[str, ...]:
        """One id, or none."""
        fitting = sorted(_with_room(block, nodes), key=lambda node: (not node.local, *_emptiest(node)))
        return tuple(node.id for node in fitting[:1])


class FreeRatio:
    """The node with the largest free share: fills a fleet evenly."""

    def place(self, block: BlockInfo, nodes: Sequence[Node]) -> tuple[str, ...]:
        """One id, or none."""
        return tuple(node.id for node in sorted(_with_room(block, nodes), key=_emptiest)[:1])


class HotReplication:
    """`copies` of what was read `hot_reads` times or more, else one; local first, then the emptiest."""

    def __init__(self, copies: int = 2, hot_reads: int = 8) -> None:
        count_at_least("copies", copies, 1)
        count_at_least("hot_reads", hot_reads, 1)
        self._copies = copies
        self._hot_reads = hot_reads

    def place(self, block: BlockInfo, nodes: Sequence[Node]) -> tuple[str, ...]:
        """As many ids as copies are due and nodes have room."""
        due = self._copies if block.reads >= self._hot_reads else 1
        fitting = sorted(_with_room(block, nodes), key=lambda node: (not node.local, *_emptiest(node)))
        return tuple(node.id for node in fitting[:due])


class FailureDomains:
    """`copies`, no two of them in one failure domain; fewer when there are not so many domains."""

    def __init__(self, copies: int = 2) -> None:
        count_at_least("copies", copies, 1)
        self._copies = copies

    def place(self, block: BlockInfo, nodes: Sequence[Node]) -> tuple[str, ...]:
        """Ids of the emptiest node of each domain, the emptiest domain first."""
        chosen: dict[str, str] = {}
        for node in sorted(_with_room(block, nodes), key=_emptiest):
            chosen.setdefault(node.domain, node.id)
        return tuple(chosen.values())[: self._copies]


def _with_room(block: BlockInfo, nodes: Sequence[Node]) -> Iterable[Node]:
    return (node for node in nodes if node.free_bytes >= block.bytes)


def _emptiest(node: Node) -> tuple[float, str]:
    return (-node.free_bytes / max(1, node.capacity_bytes), node.id)
