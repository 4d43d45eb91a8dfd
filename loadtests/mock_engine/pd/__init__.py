"""Prefill and decode on two engines: what the mock engine does of it, by connector."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvroute.loadtests.mock_engine.pd.base import EngineDies, PdSide
from kvroute.loadtests.mock_engine.pd.mooncake import Mooncake
from kvroute.loadtests.mock_engine.pd.nixl import Nixl
from kvroute.loadtests.mock_engine.pd.p2p_nccl import P2pNccl
from kvroute.loadtests.mock_engine.pd.sglang import SGLang
from kvroute.loadtests.mock_engine.pd.shared_storage import SharedStorage

if TYPE_CHECKING:
    from kvroute.loadtests.mock_engine.engine import MockEngine

SIDES: dict[str, type[PdSide]] = {
    "": PdSide,
    "nixl": Nixl,
    "mooncake": Mooncake,
    "sglang": SGLang,
    "shared-storage": SharedStorage,
    "p2p-nccl": P2pNccl,
}
"""By the name of the connector."""


def make_pd_side(engine: MockEngine) -> PdSide:
    """Of one incarnation of an engine."""
    return SIDES[engine.options.connector](engine)


__all__ = ["SIDES", "EngineDies", "PdSide", "make_pd_side"]
