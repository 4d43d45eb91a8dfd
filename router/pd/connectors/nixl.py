"""vLLM's NixlConnector: decode pulls what prefill holds. As of vLLM 0.32, older shapes included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kvroute.config_pd import PdConfig
from kvroute.router.pd.connector import CannotHandOver, Leg, Pair
from kvroute.router.pd.connectors.fields import PARAMS
from kvroute.router.pd.ranks import rank_headers
from kvroute.router.workers import Member

ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
NEEDED = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
"""Without any of these the decode engine exits (0.32), or computes the prompt itself and says nothing."""
TYPES: Mapping[str, tuple[type, ...]] = {
    "remote_engine_id": (str,),
    "remote_block_ids": (list,),
    "remote_host": (str,),
    "remote_port": (int, str),
}
NO_SUCH_MODEL = "kvroute-release"


class NixlConnector:
    """Sequential. The prefill worker keeps the blocks until they are pulled, released, or its lease is over;
    from then on a decode worker that asks for them gets whatever is there, and answers 200.
    """

    is_concurrent: ClassVar[bool] = False
    decode_takes_whole: ClassVar[bool] = True
    takes_lists: ClassVar[bool] = False  # the answer hands over the first prompt's blocks only
    shortens_prefill: ClassVar[bool] = True
    prepares: ClassVar[bool] = False
    client_fields: ClassVar[frozenset[str]] = frozenset({PARAMS})

    def __init__(self, config: PdConfig) -> None:
        pass

    async def prepare(self, pair: Pair) -> Any:
        return None

    def prefill_leg(self, pair: Pair) -> Leg:
        return Leg({PARAMS: ASK}, rank_headers(pair.prefill_rank))

    def handoff(self, answer: Mapping[str, Any]) -> Any:
        params = answer.get(PARAMS)
        if not isinstance(params, dict) or params.get("do_remote_prefill") is not True:
            raise CannotHandOver("the prefill's answer has no kv_transfer_params with do_remote_prefill")
        missing = [name for name in NEEDED if not params.get(name)]
        if missing:
            raise CannotHandOver(f"the prefill's kv_transfer_params have no {', '.join(missing)}")
        wrong = [name for name, kind in TYPES.items() if not isinstance(params[name], kind)]
        if wrong:
            raise CannotHandOver(f"of the prefill's kv_transfer_params {wrong[0]} is of no known type")
        return params

    def decode_leg(self, pair: Pair, handoff: Any) -> Leg:
        return Leg({PARAMS: handoff}, rank_headers(pair.decode_rank))

    def release(self, pair: Pair, handoff: Any) -> tuple[str, Mapping[str, Any]] | None:
        return release_by_refusal(handoff)

    def forget(self, member: Member) -> None:
        pass


def release_by_refusal(handoff: Any) -> tuple[str, Mapping[str, Any]]:
    """A decode worker that refuses a request tells the prefill worker so (vLLM 0.32): it is asked for a model
    that it does not have. The prompt must not be empty: then the body is refused before anybody looks at it.
    """
    return "/v1/completions", {"model": NO_SUCH_MODEL, "prompt": "x", "max_tokens": 1, PARAMS: handoff}
