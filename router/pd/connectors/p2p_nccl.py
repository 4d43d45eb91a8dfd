"""vLLM's P2pNcclConnector (before 0.32): prefill pushes to where the request's id says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from prometheus_client.core import Metric

from kvroute.config_pd import PdConfig
from kvroute.router.pd.connector import CannotHandOver, Leg, Pair
from kvroute.router.pd.connectors.numbers import hex_of
from kvroute.router.pd.connectors.registrations import Kind, Registrations
from kvroute.router.workers import Member


class P2pNcclConnector:
    """Sequential. Prefill keeps nothing: KV that nobody takes stays in the decode engine's buffer until newer
    KV pushes it out. A decode request whose KV does not come waits without a limit.
    """

    is_concurrent: ClassVar[bool] = False
    decode_takes_whole: ClassVar[bool] = False  # an id without an address ends the engine
    takes_lists: ClassVar[bool] = True
    shortens_prefill: ClassVar[bool] = True
    prepares: ClassVar[bool] = True
    client_fields: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: PdConfig) -> None:
        self._port = config.register_port
        self.registrations = Registrations()
        self._addresses: dict[Member, str] = {}

    async def start(self, host: str) -> None:
        if self._port is not None:
            await self.registrations.start(host, self._port)

    def close(self) -> None:
        self.registrations.close()

    def gauges(self) -> Iterable[Metric]:
        yield self.registrations.refused.family()

    async def prepare(self, pair: Pair) -> Any:
        for kind, member in _sides(pair):
            self._addresses[member] = self._find(kind, member)

    def prefill_leg(self, pair: Pair) -> Leg:
        return self._leg(pair)

    def handoff(self, answer: Mapping[str, Any]) -> Any:
        return None

    def decode_leg(self, pair: Pair, handoff: Any) -> Leg:
        return self._leg(pair)

    def release(self, pair: Pair, handoff: Any) -> tuple[str, Mapping[str, Any]] | None:
        return None

    def forget(self, member: Member) -> None:
        self._addresses.pop(member, None)

    def _find(self, kind: Kind, member: Member) -> str:
        http = member.endpoint.authority
        address = member.config.p2p_address or self.registrations.address(kind, http)
        if address is None:
            raise CannotHandOver(
                f"{member.worker.id} has no p2p_address, and no {kind} engine of {http} has registered"
            )
        return address

    def _leg(self, pair: Pair) -> Leg:
        """The engines look for addresses with greedy patterns: nothing of a client's may be in the id."""
        try:
            prefill, decode = (self._addresses[member] for _, member in _sides(pair))
        except KeyError:
            raise CannotHandOver(f"a worker of {pair.id} was replaced before its request was sent") from None
        id = f"___prefill_addr_{prefill}___decode_addr_{decode}_{hex_of(pair.id)}"
        return Leg(headers=((b"X-Request-Id", id.encode()),))


def _sides(pair: Pair) -> tuple[tuple[Kind, Member], tuple[Kind, Member]]:
    return ("P", pair.prefill), ("D", pair.decode)
