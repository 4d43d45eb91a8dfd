"""Connectors by name, from the entry-point group; built-in and third-party ones load by the same path."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kvroute.config_pd import PdConfig
from kvroute.router.pd.connector import Connector

GROUP = "kvroute.pd_connectors"
FLAGS = ("is_concurrent", "decode_takes_whole", "takes_lists", "shortens_prefill", "prepares")
METHODS = ("prepare", "prefill_leg", "handoff", "decode_leg", "release", "forget")


class ConnectorError(Exception):
    """A connector cannot be made; the message names the connector, what is wrong and what is accepted."""


def connector_names() -> list[str]:
    """The names that `make_connector` knows, sorted."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def make_connector(name: str, config: PdConfig) -> Connector:
    """A new instance of the connector registered as `name`; raises `ConnectorError`."""
    connector_class = _load(name)
    try:
        connector: Connector = connector_class(config)
    except Exception as error:
        raise ConnectorError(
            f"pd connector {name!r} did not start: {type(error).__name__}: {error}"
        ) from error
    return connector


def _load(name: str) -> Any:
    entry = _find(name)
    what = f"pd connector {name!r} ({entry.value})"
    try:
        connector_class = entry.load()
    except Exception as error:
        raise ConnectorError(f"{what} does not import: {type(error).__name__}: {error}") from error
    if not isinstance(connector_class, type):
        raise ConnectorError(f"{what} is not a class")
    for method in METHODS:
        if not callable(getattr(connector_class, method, None)):
            raise ConnectorError(f"{what} has no method {method}; it needs {', '.join(METHODS)}")
    for flag in FLAGS:
        if not isinstance(getattr(connector_class, flag, None), bool):
            raise ConnectorError(f"{what} does not say {flag} = True or False")
    names = getattr(connector_class, "client_fields", None)
    if not (isinstance(names, frozenset) and all(isinstance(name, str) for name in names)):
        raise ConnectorError(f"{what} has no client_fields, a frozenset of names of body fields")
    return connector_class


def _find(name: str) -> EntryPoint:
    by_value = {entry.value: entry for entry in entry_points(group=GROUP) if entry.name == name}
    if not by_value:
        raise ConnectorError(f"unknown pd connector {name!r}; known: {', '.join(connector_names())}")
    if len(by_value) > 1:
        raise ConnectorError(
            f"pd connector {name!r} is registered more than once: {', '.join(sorted(by_value))}"
        )
    return next(iter(by_value.values()))
