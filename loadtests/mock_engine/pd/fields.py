"""What a generation request says of prefill and decode, in the dialects of vLLM and SGLang."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class PdFields:
    """As they stand in the body, unchecked: whoever reads them decides what is wrong with them."""

    params: dict[str, Any] = field(default_factory=dict)
    """vLLM's `kv_transfer_params`; empty when it is no object. Shared by equal bodies: never changed."""
    host: Any = None
    """SGLang's `bootstrap_host`, `bootstrap_port`, `bootstrap_room`: one value, or one for each prompt."""
    port: Any = None
    room: Any = None
    reads_prompt: bool = False
    """It asks for log probabilities of the prompt, which only who computed the prompt has."""

    @property
    def prefills(self) -> bool:
        """vLLM's prefill leg."""
        return bool(self.params.get("do_remote_decode"))

    @property
    def decodes(self) -> bool:
        """vLLM's decode leg."""
        return bool(self.params.get("do_remote_prefill"))

    def names(self, *params: str) -> bool:
        """Whether all of these are among `params`, null or not, as vLLM asks."""
        return all(name in self.params for name in params)


NO_PD = PdFields()


def read_pd_fields(body: dict[str, Any]) -> PdFields:
    """The fields of a request's body."""
    params = body.get("kv_transfer_params")
    room = body.get("bootstrap_room")
    host, port = body.get("bootstrap_host"), body.get("bootstrap_port")
    if params is None and room is None and host is None:
        return NO_PD
    echoes = bool(body.get("echo")) and body.get("logprobs") is not None
    return PdFields(
        params if isinstance(params, dict) else {},
        host,
        port,
        room,
        body.get("prompt_logprobs") is not None or echoes,
    )


def for_each(value: Any, prompts: int) -> list[Any] | None:
    """One value for each prompt, as SGLang spreads a lone one; None when a list has another length."""
    if isinstance(value, list):
        return value if len(value) == prompts else None
    return [value] * prompts


def rooms_for_each(value: Any, prompts: int) -> list[Any] | None:
    """As `for_each`, but a lone room number is counted up from prompt to prompt."""
    if type(value) is int:
        return [value + index for index in range(prompts)]
    return for_each(value, prompts)
