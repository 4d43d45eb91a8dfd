"""Which way of handing KV over an engine has, from what it tells of itself. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from kvroute.types import Role

SHARED = "shared-storage"
VLLM_CONNECTORS: Mapping[str, str] = {
    "NixlConnector": "nixl",
    "NixlPullConnector": "nixl",
    "MooncakeConnector": "mooncake",
    "P2pNcclConnector": "p2p-nccl",
    "ExampleConnector": SHARED,
    "SharedStorageConnector": SHARED,  # its name before ExampleConnector
    "LMCacheConnector": SHARED,
    "LMCacheConnectorV1": SHARED,
    "LMCacheMPConnector": SHARED,
    "MooncakeStoreConnector": SHARED,
    "FlexKVConnectorV1": SHARED,
    "HF3FSKVConnector": SHARED,
}
"""vLLM's class (0.9 to 0.32): the connector that speaks to it. Others hand nothing over, or in a way that
none of ours speaks: OffloadingConnector, NixlPushConnector."""
VLLM_ROLES = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE, "kv_both": Role.BOTH}
SGLANG_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}
_SERIES = (
    (re.compile(r"^vllm:nixl_", re.MULTILINE), "nixl"),
    (re.compile(r'^sglang:[^\n{]+\{(?:[^\n}]*,)?engine_type="(?:prefill|decode)"', re.MULTILINE), "sglang"),
    (re.compile(r"^(?:lmcache:|vllm:mooncake_store_)", re.MULTILINE), SHARED),
)


class Transfer(Struct, frozen=True):
    """How one engine is set up to hand KV over."""

    engine_name: str
    """The engine's own name of it, for messages."""
    connector: str | None = None
    """None: no built-in connector speaks to it."""
    role: Role | None = None
    bootstrap_port: int | None = None
    """Of a prefill worker."""
    lease_s: float | None = None
    """Where it was set: how long the engine keeps KV that nobody fetches."""


def read_transfer(info: Any) -> Transfer | None:
    """From the JSON of /server_info, SGLang's or vLLM's (in development mode, `?config_format=json`).

    None when it tells of no transfer, or cannot be read.
    """
    if not isinstance(info, dict):
        return None
    if "disaggregation_mode" in info:
        return _of_sglang(info)
    config = info.get("vllm_config")
    transfer = config.get("kv_transfer_config") if isinstance(config, dict) else None
    return _of_vllm(transfer) if isinstance(transfer, dict) else None


def connector_of_metrics(text: str) -> str | None:
    """From the series of /metrics; None when they do not tell.

    vLLM 0.32 has the series of NIXL, at zero, from its start; SGLang's name the role in a label. An engine
    with NIXL and a store besides hands over by NIXL.
    """
    return next((connector for series, connector in _SERIES if series.search(text)), None)


def _of_sglang(info: Mapping[str, Any]) -> Transfer | None:
    role = SGLANG_ROLES.get(str(info["disaggregation_mode"]))
    if role is None:  # "null"
        return None
    backend = info.get("disaggregation_transfer_backend")
    port = _port(info.get("disaggregation_bootstrap_port")) if role is Role.PREFILL else None
    return Transfer(f"SGLang over {backend}", "sglang", role, port)


def _of_vllm(config: Mapping[str, Any]) -> Transfer | None:
    one = _main(config)
    name = one.get("kv_connector")
    if not isinstance(name, str):
        return None
    extra = one.get("kv_connector_extra_config")
    extra = extra if isinstance(extra, dict) else {}
    return Transfer(
        name,
        _connector(one),
        VLLM_ROLES.get(str(config.get("kv_role"))),
        _port(str(extra.get("bootstrap_server_address")).rpartition(":")[2]),
        _seconds(extra.get("kv_lease_duration")),
    )


def _main(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a MultiConnector's the first that hands over by itself, else the first that is known; or itself."""
    extra = config.get("kv_connector_extra_config")
    several = extra.get("connectors") if isinstance(extra, dict) else None
    if config.get("kv_connector") != "MultiConnector" or not isinstance(several, list):
        return config
    known = [one for one in several if isinstance(one, dict) and _connector(one) is not None]
    return next((one for one in known if _connector(one) != SHARED), next(iter(known), config))


def _connector(config: Mapping[str, Any]) -> str | None:
    """A class from elsewhere may have the name of one of vLLM's: Mooncake's own package had."""
    if config.get("kv_connector_module_path") is not None:
        return None
    return VLLM_CONNECTORS.get(str(config.get("kv_connector")))


def _port(value: Any) -> int | None:
    try:
        port = int(value)
    except (TypeError, ValueError):
        return None
    return port if 0 < port <= 65535 else None


def _seconds(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value < math.inf else None
