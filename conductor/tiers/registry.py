"""The tier policies by name, with their options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from kvroute.conductor.tiers import admission, eviction, hazard, placement, prefetch, write_back
from kvroute.conductor.tiers.base import Admission, Eviction, Placement, Prefetch, WriteBack
from kvroute.conductor.tiers.value import Costs

P = TypeVar("P")


class TierPolicyError(Exception):
    """A tier policy cannot be made; the message names it, what is wrong and what is accepted."""


class Registry(Generic[P]):
    """The policies that take one kind of decision."""

    def __init__(self, kind: str, makers: Mapping[str, Callable[..., P]]) -> None:
        self._kind = kind
        self._makers = makers

    @property
    def names(self) -> list[str]:
        """What `make` knows, sorted."""
        return sorted(self._makers)

    def make(self, name: str, options: Mapping[str, Any] | None = None) -> P:
        """A new policy with a state of its own; raises `TierPolicyError`."""
        maker = self._makers.get(name)
        if maker is None:
            raise TierPolicyError(f"unknown {self._kind} policy {name!r}; known: {', '.join(self.names)}")
        accepted = _accepted(maker)
        unknown = [key for key in options or {} if key not in accepted]
        if unknown:
            named = ", ".join(map(repr, unknown))
            raise TierPolicyError(f"{self._kind} policy {name!r} has no option {named}; {_listed(accepted)}")
        try:
            return maker(**(options or {}))
        except ValueError as error:
            raise TierPolicyError(f"{self._kind} policy {name!r}: {error}; {_listed(accepted)}") from None


def _accepted(maker: Callable[..., Any]) -> dict[str, Any]:
    """Option names and their defaults."""
    accepted: dict[str, Any] = {}
    for parameter in inspect.signature(maker).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            accepted |= {name: each.default for name, each in inspect.signature(Costs).parameters.items()}
        else:
            accepted[parameter.name] = parameter.default
    return accepted


def _listed(accepted: Mapping[str, Any]) -> str:
    if not accepted:
        return "it takes no options"
    return "accepted: " + ", ".join(f"{name} (default {default!r})" for name, default in accepted.items())


ADMISSIONS: Registry[Admission] = Registry(
    "admission",
    {
        "always": admission.Always,
        "second_access": admission.SecondAccess,
        "length_threshold": admission.LengthThreshold,
        "expected_benefit": admission.ExpectedBenefit,
    },
)
PLACEMENTS: Registry[Placement] = Registry(
    "placement",
    {
        "local_first": placement.LocalFirst,
        "free_ratio": placement.FreeRatio,
        "hot_replication": placement.HotReplication,
        "failure_domains": placement.FailureDomains,
    },
)
EVICTIONS: Registry[Eviction] = Registry(
    "eviction",
    {
        "lru": eviction.LRU,
        "lfu": eviction.LFU,
        "tiny_lfu": eviction.TinyLFU,
        "value_per_byte": eviction.ValuePerByte,
        "hazard": hazard.Hazard,
    },
)
PREFETCHES: Registry[Prefetch] = Registry(
    "prefetch", {"deadline": prefetch.Deadline, "buffer": prefetch.Buffer}
)
WRITE_BACKS: Registry[WriteBack] = Registry(
    "write-back",
    {"through": write_back.Through, "selective": write_back.Selective, "back": write_back.Back},
)
