from __future__ import annotations

import re
from typing import Any, ClassVar

import pytest

from kvroute.config_pd import PdConfig
from kvroute.router.pd import registry
from kvroute.router.pd.connector import DecodeFirst, Serving
from kvroute.router.pd.connectors.shared_storage import SharedStorageConnector
from kvroute.router.pd.registry import ConnectorError, connector_names, make_connector
from tests import plugins

BUILT_IN = {"nixl", "mooncake", "p2p-nccl", "sglang", "shared-storage", "decode-first"}


class Telepathic(SharedStorageConnector):
    """A third-party connector."""

    client_fields: ClassVar[frozenset[str]] = frozenset({"thought"})

    def __init__(self, config: PdConfig) -> None:
        self.lease_s = config.kv_lease_s


class NoHandoff(Telepathic):
    handoff = None  # type: ignore[assignment]


class SaysNothingOfLists(Telepathic):
    takes_lists = None  # type: ignore[assignment]


class FieldsInAList(Telepathic):
    client_fields = ["thought"]  # type: ignore[assignment]  # noqa: RUF012


class FailsToStart(Telepathic):
    def __init__(self, config: PdConfig) -> None:
        raise OSError("no such library")


@pytest.fixture
def third_party(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Registers classes of this file under names."""
    return plugins.third_party(monkeypatch, registry.GROUP, globals())


def test_the_built_in_ones_are_all_registered() -> None:
    assert set(connector_names()) >= BUILT_IN
    made = {name: make_connector(name, PdConfig()) for name in BUILT_IN}
    assert {name for name, one in made.items() if isinstance(one, DecodeFirst)} == {"decode-first"}
    assert {name for name, one in made.items() if isinstance(one, Serving)} == {"p2p-nccl"}


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        ConnectorError, match=r"unknown pd connector 'nxil'; known: .*mooncake, nixl, p2p-nccl"
    ):
        make_connector("nxil", PdConfig())


def test_a_third_party_connector_takes_the_same_path(third_party: Any) -> None:
    third_party("telepathic", "Telepathic")
    assert "telepathic" in connector_names()
    made = make_connector("telepathic", PdConfig(kv_lease_s=7))
    assert isinstance(made, Telepathic)
    assert made.lease_s == 7


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("Missing", "does not import: AttributeError"),
        ("BUILT_IN", "is not a class"),
        ("NoHandoff", "has no method handoff; it needs prepare, prefill_leg, handoff, decode_leg, release"),
        ("SaysNothingOfLists", "does not say takes_lists = True or False"),
        ("FieldsInAList", "has no client_fields, a frozenset of names"),
        ("FailsToStart", "did not start: OSError: no such library"),
    ],
)
def test_a_broken_connector_says_what_is_broken(third_party: Any, value: str, message: str) -> None:
    third_party("broken", value)
    with pytest.raises(ConnectorError, match=f"pd connector 'broken'.*{re.escape(message)}"):
        make_connector("broken", PdConfig())


def test_two_connectors_of_one_name_are_refused_rather_than_shadowed(third_party: Any) -> None:
    third_party("nixl", "Telepathic")
    with pytest.raises(ConnectorError, match="'nixl' is registered more than once"):
        make_connector("nixl", PdConfig())
