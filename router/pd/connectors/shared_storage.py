"""A store that prefill and decode engines share: vLLM's ExampleConnector, LMCache, MooncakeStoreConnector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kvroute.config_pd import PdConfig
from kvroute.router.pd.connector import Leg, Pair
from kvroute.router.pd.ranks import rank_headers
from kvroute.router.workers import Member


class SharedStorageConnector:
    """Sequential. Nothing is handed over in the requests: decode finds the prompt's blocks in the store by
    their content, and computes those that are not there. Nobody waits, and nothing is kept for a request.
    """

    is_concurrent: ClassVar[bool] = False
    decode_takes_whole: ClassVar[bool] = True
    takes_lists: ClassVar[bool] = True
    shortens_prefill: ClassVar[bool] = True
    prepares: ClassVar[bool] = False
    client_fields: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: PdConfig) -> None:
        pass

    async def prepare(self, pair: Pair) -> Any:
        return None

    def prefill_leg(self, pair: Pair) -> Leg:
        return Leg(headers=rank_headers(pair.prefill_rank))

    def handoff(self, answer: Mapping[str, Any]) -> Any:
        return None

    def decode_leg(self, pair: Pair, handoff: Any) -> Leg:
        return Leg(headers=rank_headers(pair.decode_rank))

    def release(self, pair: Pair, handoff: Any) -> tuple[str, Mapping[str, Any]] | None:
        return None

    def forget(self, member: Member) -> None:
        pass
