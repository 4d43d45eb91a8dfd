"""vLLM's MooncakeConnector: both legs at once, decode asks and prefill pushes. As of vLLM 0.32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kvroute.config_pd import PdConfig
from kvroute.router.pd.connector import CannotHandOver, Leg, Pair
from kvroute.router.pd.connectors.bootstrap import EngineIds, Engines, bootstrap_url
from kvroute.router.pd.connectors.fields import PARAMS
from kvroute.router.pd.connectors.nixl import release_by_refusal
from kvroute.router.pd.connectors.numbers import hex_of, number_of
from kvroute.router.pd.ranks import rank_headers
from kvroute.router.workers import Member

UNSTOPPED = {"ignore_eos": True, "stop": None, "stop_token_ids": None}
"""A prefill that ends by anything but its limit keeps no KV, and decode waits for it in vain (480 s).
/v1/messages has no such field: there `handoff` sees it."""
CUT_SHORT = ("length", "max_tokens", "incomplete")
"""How chat and completions, messages and responses spell an end by the limit."""


class MooncakeConnector:
    """Concurrent. Prefill keeps KV until a decode worker has asked for it by transfer id, or for
    VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT (480 s). Versions before 0.32 wait as long for an engine id whose
    process has ended.
    """

    is_concurrent: ClassVar[bool] = True
    decode_takes_whole: ClassVar[bool] = True
    takes_lists: ClassVar[bool] = False  # a request has one transfer id, whatever the number of its prompts
    shortens_prefill: ClassVar[bool] = True
    prepares: ClassVar[bool] = True
    client_fields: ClassVar[frozenset[str]] = frozenset({PARAMS})

    def __init__(self, config: PdConfig) -> None:
        self._config = config
        self._ids = EngineIds(config)

    async def prepare(self, pair: Pair) -> Any:
        engines = await self._ids.of(pair.prefill)
        rank = _rank(pair, engines)
        if rank not in engines:
            known = ", ".join(map(str, sorted(engines)))
            raise CannotHandOver(f"{pair.prefill.worker.id} has no rank {rank}; registered: {known}")
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": bootstrap_url(pair.prefill, self._config),
            "remote_engine_id": engines[rank],
            "transfer_id": _transfer_id(pair),
        }

    def prefill_leg(self, pair: Pair) -> Leg:
        rank = _rank(pair, self._ids.known(pair.prefill))
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": _transfer_id(pair)}
        return Leg({PARAMS: params, **UNSTOPPED}, rank_headers(rank))

    def handoff(self, answer: Mapping[str, Any]) -> Any:
        choices = answer.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else answer
        ends = choice if isinstance(choice, dict) else {}
        end = ends.get("finish_reason") or ends.get("stop_reason") or ends.get("status")
        if end not in CUT_SHORT:
            raise CannotHandOver(f"the prefill ended by {end!r} and not by its limit: it keeps no KV")

    def decode_leg(self, pair: Pair, handoff: Any) -> Leg:
        return Leg({PARAMS: handoff}, rank_headers(pair.decode_rank))

    def release(self, pair: Pair, handoff: Any) -> tuple[str, Mapping[str, Any]] | None:
        return release_by_refusal(handoff)

    def forget(self, member: Member) -> None:
        self._ids.forget(member)


def _transfer_id(pair: Pair) -> str:
    return f"xfer-{hex_of(pair.id)}"


def _rank(pair: Pair, engines: Engines) -> int:
    """KV is asked for at one rank, so prefill has to be there: one is taken where none was chosen."""
    if pair.prefill_rank is not None:
        return pair.prefill_rank
    ranks = sorted(engines)
    return ranks[number_of(pair.id) % len(ranks)]
