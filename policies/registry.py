"""Policies by name, from the entry-point group; built-in and third-party ones load by the same path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kvroute.policies.base import Policy

GROUP = "kvroute.policies"


class PolicyError(Exception):
    """A policy cannot be made; the message names the policy, what is wrong and what is accepted."""


def policy_names() -> list[str]:
    """The names that `make_policy` knows, sorted."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def make_policy(name: str, options: Mapping[str, Any]) -> Policy:
    """A new instance of the policy registered as `name`; raises `PolicyError`."""
    policy_class = _load(name)
    parsed = _parse_options(name, policy_class.Options, options)
    try:
        policy: Policy = policy_class(parsed)
    except Exception as error:
        raise PolicyError(f"policy {name!r} did not start: {type(error).__name__}: {error}") from error
    return policy


def _load(name: str) -> Any:
    entry = _find(name)
    try:
        policy_class = entry.load()
    except Exception as error:
        raise PolicyError(
            f"policy {name!r} ({entry.value}) does not import: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(policy_class, type):
        raise PolicyError(f"policy {name!r} ({entry.value}) is not a class")
    if not callable(getattr(policy_class, "decide", None)):
        raise PolicyError(f"policy {name!r} ({entry.value}) has no decide(request, fleet) method")
    options_class = getattr(policy_class, "Options", None)
    if not (isinstance(options_class, type) and is_dataclass(options_class)):
        raise PolicyError(f"policy {name!r} ({entry.value}) has no Options dataclass")
    if not isinstance(getattr(policy_class, "needs_prefix", None), bool):
        raise PolicyError(f"policy {name!r} ({entry.value}) does not say needs_prefix = True or False")
    return policy_class


def _find(name: str) -> EntryPoint:
    by_value = {entry.value: entry for entry in entry_points(group=GROUP) if entry.name == name}
    if not by_value:
        raise PolicyError(f"unknown policy {name!r}; known: {', '.join(policy_names())}")
    if len(by_value) > 1:
        raise PolicyError(f"policy {name!r} is registered more than once: {', '.join(sorted(by_value))}")
    return next(iter(by_value.values()))


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
