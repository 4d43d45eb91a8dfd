"""Policies by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kvroute.plugins import Plugins
from kvroute.policies.base import Policy

GROUP = "kvroute.policies"


class PolicyError(Exception):
    """A policy cannot be made; the message names the policy, what is wrong and what is accepted."""


_PLUGINS = Plugins("policy", GROUP, PolicyError)


def policy_names() -> list[str]:
    """The names that `make_policy` knows, sorted."""
    return _PLUGINS.names()


def make_policy(name: str, options: Mapping[str, Any]) -> Policy:
    """A new instance of the policy registered as `name`; raises `PolicyError`."""
    policy_class = _load(name)
    policy: Policy = _PLUGINS.make(name, policy_class, _parse_options(name, policy_class.Options, options))
    return policy


def _load(name: str) -> Any:
    policy_class, what = _PLUGINS.load(name)
    if not callable(getattr(policy_class, "decide", None)):
        raise PolicyError(f"{what} has no decide(request, fleet) method")
    options_class = getattr(policy_class, "Options", None)
    if not (isinstance(options_class, type) and is_dataclass(options_class)):
        raise PolicyError(f"{what} has no Options dataclass")
    if not isinstance(getattr(policy_class, "needs_prefix", None), bool):
        raise PolicyError(f"{what} does not say needs_prefix = True or False")
    return policy_class


def _parse_options(name: str, options_class: type[Any], options: Mapping[str, Any]) -> Any:
    known = {field.name for field in fields(options_class) if field.init}
    unknown = [str(key) for key in options if key not in known]
    if unknown:
        raise PolicyError(
            f"policy {name!r} has no option {', '.join(map(repr, unknown))}; {_accepted(options_class)}"
        )
    try:
        return TypeAdapter(options_class).validate_python(dict(options))
    except ValidationError as error:
        faults = "; ".join(_fault(name, detail) for detail in error.errors())
        raise PolicyError(f"{faults}; {_accepted(options_class)}") from error
    except Exception as error:
        raise PolicyError(f"policy {name!r} has Options that cannot be validated: {error}") from error


def _fault(name: str, detail: Mapping[str, Any]) -> str:
    message = str(detail["msg"]).removeprefix("Value error, ")
    if not detail["loc"]:  # the dataclass's own check, whose message names the field
        return f"policy {name!r}: {message}"
    field = ".".join(map(str, detail["loc"]))
    if detail["type"] == "missing":
        return f"policy {name!r}, option {field!r}: {message}"
    return f"policy {name!r}, option {field!r}: {message}, got {detail['input']!r}"


def _accepted(options_class: type[Any]) -> str:
    accepted = [
        field.name if field.default is MISSING else f"{field.name} (default {field.default!r})"
        for field in fields(options_class)
        if field.init
    ]
    return f"accepted: {', '.join(accepted)}" if accepted else "it takes no options"
