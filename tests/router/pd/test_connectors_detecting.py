"""Which connector an engine has, from answers as the engines give them."""

from __future__ import annotations

from typing import Any

import pytest

from kvroute.router.pd.detecting import VLLM_CONNECTORS, Transfer, connector_of_metrics, read_transfer
from kvroute.router.pd.registry import connector_names
from kvroute.types import Role


def vllm(name: Any = "NixlConnector", role: Any = "kv_both", **more: Any) -> dict[str, Any]:
    """/server_info of vLLM 0.32, what matters of it."""
    config = {
        "kv_connector": name,
        "engine_id": "5f1d",
        "kv_role": role,
        "kv_connector_extra_config": {},
        "kv_connector_module_path": None,
        "kv_load_failure_policy": "fail",
    }
    return {"vllm_config": {"cache_config": {"block_size": 16}, "kv_transfer_config": config | more}}


def sglang(mode: Any, **more: Any) -> dict[str, Any]:
    port = {"disaggregation_bootstrap_port": 8998, "disaggregation_transfer_backend": "mooncake"}
    return {"page_size": 1, "disaggregation_mode": mode} | port | more


@pytest.mark.parametrize(
    ("role", "read"),
    [
        ("kv_producer", Role.PREFILL),
        ("kv_consumer", Role.DECODE),
        ("kv_both", Role.BOTH),
        (None, None),
        (1, None),
    ],
)
def test_vllm_tells_connector_and_role(role: Any, read: Role | None) -> None:
    assert read_transfer(vllm(role=role)) == Transfer("NixlConnector", "nixl", read)


@pytest.mark.parametrize(
    ("name", "connector"),
    [*VLLM_CONNECTORS.items(), ("NixlPushConnector", None), ("OffloadingConnector", None), ("Other", None)],
)
def test_each_class_of_vllm_has_its_connector_or_none(name: str, connector: str | None) -> None:
    assert read_transfer(vllm(name)) == Transfer(name, connector, Role.BOTH)
    assert connector is None or connector in connector_names()


def test_a_class_from_elsewhere_is_not_taken_for_vllms() -> None:
    found = read_transfer(
        vllm("MooncakeConnector", kv_connector_module_path="mooncake.mooncake_connector_v1")
    )
    assert found == Transfer("MooncakeConnector", None, Role.BOTH)


@pytest.mark.parametrize(
    ("lease", "read"),
    [
        (6, 6.0),
        (0.5, 0.5),
        (0, None),
        (-1, None),
        ("6", None),
        (True, None),
        (float("inf"), None),
        (None, None),
    ],
)
def test_the_lease_is_told_where_it_was_set(lease: Any, read: float | None) -> None:
    found = read_transfer(vllm(kv_connector_extra_config={"kv_lease_duration": lease}))
    assert found == Transfer("NixlConnector", "nixl", Role.BOTH, lease_s=read)


@pytest.mark.parametrize(
    ("address", "port"),
    [("10.0.0.1:9001", 9001), ("[::1]:9001", 9001), ("host", None), (7, 7), ("h:70000", None)],
)
def test_the_bootstrap_port_is_told_where_it_was_set(address: Any, port: int | None) -> None:
    found = read_transfer(
        vllm(
            "MooncakeConnector",
            "kv_producer",
            kv_connector_extra_config={"bootstrap_server_address": address},
        )
    )
    assert found == Transfer("MooncakeConnector", "mooncake", Role.PREFILL, port)


def multi(*names: str) -> dict[str, Any]:
    inner = [
        {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": {"kv_lease_duration": 9}}
        for name in names
    ]
    return vllm("MultiConnector", "kv_producer", kv_connector_extra_config={"connectors": inner})


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (
            ("OffloadingConnector", "NixlConnector"),
            Transfer("NixlConnector", "nixl", Role.PREFILL, lease_s=9),
        ),
        (
            ("LMCacheConnectorV1", "NixlConnector"),
            Transfer("NixlConnector", "nixl", Role.PREFILL, lease_s=9),
        ),
        (
            ("OffloadingConnector", "LMCacheConnectorV1"),
            Transfer("LMCacheConnectorV1", "shared-storage", Role.PREFILL, lease_s=9),
        ),
        (("OffloadingConnector",), Transfer("MultiConnector", None, Role.PREFILL)),
        ((), Transfer("MultiConnector", None, Role.PREFILL)),
    ],
)
def test_of_several_the_one_that_hands_over_counts(names: tuple[str, ...], read: Transfer) -> None:
    assert read_transfer(multi(*names)) == read


def test_sglang_tells_its_role_and_a_prefill_worker_its_bootstrap_port() -> None:
    prefill = read_transfer(sglang("prefill", disaggregation_bootstrap_port=9001))
    assert prefill == Transfer("SGLang over mooncake", "sglang", Role.PREFILL, 9001)
    decode = read_transfer(sglang("decode", disaggregation_transfer_backend="nixl"))
    assert decode == Transfer("SGLang over nixl", "sglang", Role.DECODE)
    assert read_transfer(sglang("null")) is None
    assert read_transfer(sglang(None)) is None
    broken = read_transfer(sglang("prefill", disaggregation_bootstrap_port="x"))
    assert broken == Transfer("SGLang over mooncake", "sglang", Role.PREFILL)


@pytest.mark.parametrize(
    "info",
    [
        None,
        [],
        "text",
        {},
        {"vllm_config": "VllmConfig(...)"},  # without config_format=json
        {"vllm_config": {}},
        {"vllm_config": {"kv_transfer_config": None}},
        {"vllm_config": {"kv_transfer_config": []}},
        {"vllm_config": {"kv_transfer_config": {}}},
        vllm(None),
        vllm(kv_connector=["NixlConnector"]),
    ],
)
def test_what_tells_of_no_transfer_is_none(info: Any) -> None:
    assert read_transfer(info) is None


@pytest.mark.parametrize(
    ("text", "connector"),
    [
        ("", None),
        ('vllm:num_requests_running{engine="0"} 0.0\n', None),
        ("# HELP vllm:nixl_x y\n# TYPE vllm:nixl_x counter\n", None),
        ('vllm:a 1\nvllm:nixl_num_kv_expired_reqs_total{engine="0"} 0.0\n', "nixl"),
        ("lmcache:num_hit_tokens_total 0\nvllm:nixl_num_failed_transfers_total 0\n", "nixl"),
        ('vllm:a 1\nlmcache:num_hit_tokens_total{x="y"} 0\n', "shared-storage"),
        ('vllm:mooncake_store_operation_total{operation="get"} 0\n', "shared-storage"),
        ('sglang:num_running_reqs{engine_type="prefill",model_name="m"} 0\n', "sglang"),
        ('sglang:num_running_reqs{model_name="m",engine_type="decode",tp_rank="0"} 0\n', "sglang"),
        ('sglang:num_running_reqs{engine_type="unified",model_name="m"} 0\n', None),
        ('sglang:num_running_reqs{model_name="x_engine_type=\\"prefill\\""} 0\n', None),
    ],
)
def test_metrics_tell_the_connector(text: str, connector: str | None) -> None:
    assert connector_of_metrics(text) == connector
