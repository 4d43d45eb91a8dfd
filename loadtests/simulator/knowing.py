"""A router that is told how long each answer will be: what its own predictions cost, by comparison."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from kvroute.loadtests.traces.arrivals import Arrival
from kvroute.policies.costs.lengths import OutputLengths


class KnownLengths(OutputLengths):
    """Expects what a request says, where it says it."""

    def expect(self, model: str | None, tenant: str = "", max_output_tokens: int | None = None) -> float:
        if max_output_tokens is None:
            return super().expect(model, tenant)
        return float(max_output_tokens)


def tell_lengths(requests: Iterable[Arrival]) -> Iterator[Arrival]:
    """The same requests, each of which says how long its answer will be."""
    for one in requests:
        yield replace(one, view=replace(one.view, max_output_tokens=one.output_tokens))
