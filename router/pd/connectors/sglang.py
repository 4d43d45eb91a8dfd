"""SGLang's disaggregation, over Mooncake or NIXL: both legs at once, met in one room."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kvroute.config_pd import PdConfig
from kvroute.router.pd.connector import Leg, Pair
from kvroute.router.pd.connectors.bootstrap import bootstrap_port
from kvroute.router.pd.connectors.fields import SGLANG_FIELDS
from kvroute.router.pd.connectors.numbers import number_of
from kvroute.router.workers import Member

MAX_ROOM = 2**63 - 1


class SGLangConnector:
    """Concurrent. Prefill answers once its KV has moved, and keeps nothing longer: a room that only one side
    comes to ends by the engine's own time-out (SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT, 300 s) or with the
    connection.
    """

    is_concurrent: ClassVar[bool] = True
    decode_takes_whole: ClassVar[bool] = False  # it waits for a room that nobody comes to
    takes_lists: ClassVar[bool] = True
    shortens_prefill: ClassVar[bool] = False  # a prefill engine makes one token, whatever it is asked
    prepares: ClassVar[bool] = False
    client_fields: ClassVar[frozenset[str]] = SGLANG_FIELDS

    def __init__(self, config: PdConfig) -> None:
        self._config = config

    async def prepare(self, pair: Pair) -> Any:
        return None

    def prefill_leg(self, pair: Pair) -> Leg:
        return Leg(self._meeting(pair) | _rank("routed_dp_rank", pair.prefill_rank))

    def handoff(self, answer: Mapping[str, Any]) -> Any:
        return None

    def decode_leg(self, pair: Pair, handoff: Any) -> Leg:
        ranks = _rank("routed_dp_rank", pair.decode_rank) | _rank("disagg_prefill_dp_rank", pair.prefill_rank)
        return Leg(self._meeting(pair) | ranks)

    def release(self, pair: Pair, handoff: Any) -> tuple[str, Mapping[str, Any]] | None:
        return None

    def forget(self, member: Member) -> None:
        pass

    def _meeting(self, pair: Pair) -> dict[str, Any]:
        host, port = _url_host(pair.prefill), bootstrap_port(pair.prefill, self._config)
        count = pair.prompts
        if count is None:
            return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": _room(pair, 0)}
        return {
            "bootstrap_host": [host] * count,
            "bootstrap_port": [port] * count,
            "bootstrap_room": [_room(pair, index) for index in range(count)],
        }


def _room(pair: Pair, index: int) -> int:
    """Where prefill is at rank r of n, r modulo n: engines that read no rank, and decode engines that look
    for the prefill's, take that one (SGLang's `follow_bootstrap_room`).
    """
    room, rank = number_of(pair.id, index), pair.prefill_rank
    size = pair.prefill.worker.data_parallel_size
    if rank is None or rank >= size:
        return room
    room += rank - room % size
    return room if room <= MAX_ROOM else room - size


def _rank(name: str, rank: int | None) -> dict[str, Any]:
    return {} if rank is None else {name: rank}


def _url_host(member: Member) -> str:
    """As it stands in a URL: SGLang puts `:port` behind it, so IPv6 is in brackets, as in its own router."""
    host = member.endpoint.host
    return f"[{host}]" if ":" in host else host
