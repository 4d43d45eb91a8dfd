"""Connectors by name."""

from __future__ import annotations

from typing import Any

from kvroute.config_pd import PdConfig
from kvroute.plugins import Plugins
from kvroute.router.pd.connector import Connector

GROUP = "kvroute.pd_connectors"
FLAGS = ("is_concurrent", "decode_takes_whole", "takes_lists", "shortens_prefill", "prepares")
METHODS = ("prepare", "prefill_leg", "handoff", "decode_leg", "release", "forget")


class ConnectorError(Exception):
    """A connector cannot be made; the message names the connector, what is wrong and what is accepted."""


_PLUGINS = Plugins("pd connector", GROUP, ConnectorError)


def connector_names() -> list[str]:
    """The names that `make_connector` knows, sorted."""
    return _PLUGINS.names()


def make_connector(name: str, config: PdConfig) -> Connector:
    """A new instance of the connector registered as `name`; raises `ConnectorError`."""
    connector: Connector = _PLUGINS.make(name, _load(name), config)
    return connector


def _load(name: str) -> Any:
    connector_class, what = _PLUGINS.load(name)
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
