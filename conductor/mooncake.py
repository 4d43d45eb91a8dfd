"""The HTTP API: that of the Mooncake Conductor as it is documented, and a lookup that says more.

`/register`, `/unregister`, `/query`, `/query_by_hash`, `/services` and `/global_view` take and give the JSON
that clients of Mooncake's indexer know. Tokens are counted from the prompt's start, in whole blocks of the
query, without holes. A service of another block size than the query's is looked up by its own. Errors are
`{"error": "field: what was wrong and what is accepted"}` with status 400, 404, 405, 409, 413 or 503.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import orjson
from fastapi import APIRouter, FastAPI, Request, Response
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from starlette.exceptions import HTTPException

from kvroute.conductor import queries
from kvroute.conductor.core import DEFAULT_TENANT, Conductor, ConductorError, Service
from kvroute.conductor.events.sources import MAX_RANKS, check_endpoint
from kvroute.conductor.keys import pack_ids

MAX_QUOTES = 1024
"""In a body: its texts are few, however many numbers it has."""
MAX_BODY_BYTES = 16 * 2**20
BODY_WITHIN_S = 30.0
MAX_TOKENS = 2**20
MAX_HASHES = 2**16
ACCEPTED_ENDPOINTS = "tcp://host:port, tcp://*:port (this conductor binds) or ipc://path"

# A bar would make two service keys one.
Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^|\x00-\x1f\x7f]+$")]
Text = Annotated[str, Field(max_length=256)]
BlockSize = Annotated[int, Field(ge=1, le=2**16)]
Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS)]
Key = Annotated[int, Field(ge=0, lt=2**64)]


class Body(BaseModel):
    """Strict: a number in quotes is no number, and an unknown field is an error rather than ignored."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    most_bytes: ClassVar[int] = 64 * 2**10


B = TypeVar("B", bound=Body)


class RegisterBody(Body):
    """A publisher of KV events: one data-parallel rank of one instance."""

    endpoint: Annotated[str, Field(max_length=512)]
    replay_endpoint: Annotated[str, Field(max_length=512)] | None = None
    type: Literal["vLLM", "SGLang", "Mooncake"]
    modelname: Name
    lora_name: Text | None = None
    tenant_id: Name | Literal[""] | None = None
    instance_id: Name
    block_size: BlockSize
    dp_rank: Rank
    additionalsalt: Text | None = None
    cache_group: Literal[0] | None = None
    """Other groups hold no prefixes that a request could use."""
    hash_profile: dict[str, Any] | None = None
    """Of no use here: the engine's hashes are learnt from its events, not computed."""

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _usable(cls, value: str | None) -> str | None:
        if not value:
            if value is None:
                return None
            raise ValueError(f"is empty; accepted: {ACCEPTED_ENDPOINTS}")
        try:
            check_endpoint("endpoint", value)
        except ValueError:
            raise ValueError(f"{value!r} cannot be used; accepted: {ACCEPTED_ENDPOINTS}") from None
        return value

    @model_validator(mode="before")
    @classmethod
    def _without_empty_replay(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("replay_endpoint") == "":
            return {**value, "replay_endpoint": None}
        return value

    def service(self) -> Service:
        return Service(
            endpoint=self.endpoint,
            instance_id=self.instance_id,
            modelname=self.modelname,
            block_size=self.block_size,
            type=self.type,
            replay_endpoint=self.replay_endpoint,
            lora_name=self.lora_name or "",
            tenant_id=self.tenant_id or DEFAULT_TENANT,
            dp_rank=self.dp_rank,
            additionalsalt=self.additionalsalt or "",
        )


class UnregisterBody(Body):
    """The same fields as in `RegisterBody`; instance, tenant and rank say which service."""

    instance_id: Name
    tenant_id: Name | Literal[""] | None = None
    dp_rank: Rank = 0
    endpoint: str | None = None
    replay_endpoint: str | None = None
    type: str | None = None
    modelname: str | None = None
    lora_name: str | None = None
    block_size: int | None = None
    additionalsalt: str | None = None
    cache_group: int | None = None
    hash_profile: dict[str, Any] | None = None

    @property
    def key(self) -> str:
        return f"{self.instance_id}|{self.tenant_id or DEFAULT_TENANT}|{self.dp_rank}"


class Scope(Body):
    """Whose blocks may count: what the queries have in common."""

    most_bytes: ClassVar[int] = MAX_BODY_BYTES

    model: Name
    lora_name: Text | None = None
    lora_id: Annotated[int, Field(ge=-1, le=-1)] | None = None
    """-1 is none. Adapters are known by name."""
    tenant_id: Name | Literal[""] | None = None
    instance_id: Name | None = None
    cache_salt: Text | None = None

    def scope(self) -> queries.Scope:
        return queries.Scope(
            self.model,
            self.lora_name or None,
            self.tenant_id or DEFAULT_TENANT,
            self.instance_id,
            self.cache_salt or None,
        )


class QueryBody(Scope):
    """A prompt's token ids."""

    block_size: BlockSize
    token_ids: Annotated[list[int], Field(fail_fast=True, max_length=MAX_TOKENS)]


class HashQueryBody(Scope):
    """Block hashes as the engines' events name them, the first block's first; each stands for its prefix."""

    block_size: BlockSize
    seq_hashes: Annotated[list[Key], Field(fail_fast=True, max_length=MAX_HASHES)] | None = None
    block_hash: Annotated[list[Key], Field(fail_fast=True, max_length=MAX_HASHES)] | None = None
    """The older name of `seq_hashes`."""

    @model_validator(mode="after")
    def _one_of_two(self) -> HashQueryBody:
        if (self.seq_hashes is None) == (self.block_hash is None):
            raise ValueError("exactly one of seq_hashes and block_hash must be given")
        return self

    @property
    def hashes(self) -> list[int]:
        return self.seq_hashes or self.block_hash or []


class LookupBody(Scope):
    """A prompt's token ids, or its routing keys (KEYS.md) and the tokens of a block each stands for."""

    tenant_id: Name | None = None
    """Only this tenant's services; default: all holders, followed by gateways or registered."""
    token_ids: Annotated[list[int], Field(fail_fast=True, max_length=MAX_TOKENS)] | None = None
    keys: Annotated[list[Key], Field(fail_fast=True, max_length=MAX_HASHES)] | None = None
    block_tokens: BlockSize | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> LookupBody:
        if (self.token_ids is None) == (self.keys is None):
            raise ValueError("exactly one of token_ids and keys must be given")
        if (self.keys is None) != (self.block_tokens is None):
            raise ValueError("block_tokens must be given with keys, and only with them")
        return self


def make_routes(conductor: Conductor) -> APIRouter:
    """The API over `conductor`."""
    routes = APIRouter()

    @routes.post("/register", openapi_extra=_takes(RegisterBody))
    async def register(request: Request) -> Response:
        """Follow a publisher of KV events. The same registration again changes nothing."""
        service = (await _read(request, RegisterBody)).service()
        conductor.register(service)
        return _json({"status": "registered successfully", "instance_id": service.instance_id})

    @routes.post("/unregister", openapi_extra=_takes(UnregisterBody))
    async def unregister(request: Request) -> Response:
        """Stop to follow a publisher and forget what it holds."""
        key = (await _read(request, UnregisterBody)).key
        conductor.unregister(key)
        return _json({"status": "unregistered successfully", "removed_instances": [key]})

    @routes.post("/query", openapi_extra=_takes(QueryBody))
    async def query(request: Request) -> Response:
        """Tokens that each instance holds of a prompt: {tenant: {instance: {longest_matched, GPU, DP, CPU,
        DISK}}}. Every registered instance of the model is listed, with zeros where it holds nothing.
        """
        body = await _read(request, QueryBody)
        return _json(
            await queries.by_tokens(conductor, body.scope(), _packed(body.token_ids), body.block_size)
        )

    @routes.post("/query_by_hash", openapi_extra=_takes(HashQueryBody))
    async def query_by_hash(request: Request) -> Response:
        """As `/query`, by hashes. Hashes cannot be cut anew: services of another block size are left out."""
        body = await _read(request, HashQueryBody)
        return _json(await queries.by_hashes(conductor, body.scope(), body.hashes, body.block_size))

    @routes.get("/services")
    async def services() -> Response:
        """Every registered publisher, with how far its index may be believed."""
        return _json(queries.services(conductor))

    @routes.get("/global_view")
    async def global_view() -> Response:
        """The groups that share prefixes, their instances with ranks, and how many blocks they hold."""
        return _json(queries.global_view(conductor))

    @routes.post("/lookup", openapi_extra=_takes(LookupBody))
    async def lookup(request: Request) -> Response:
        """All holders of the start of a prompt, the longest first.

        {"holders": [{"worker", "instance_id"?, "tenant_id"?, "url"?, "dp_rank", "block_tokens",
        "tokens": {"GPU", "CPU", "DISK", "GPU_CPU"}, "longest", "probable", "last_seq", "lag_s", "trust",
        "reasons"}]}. `tokens` are contiguous from the start in that tier alone (GPU_CPU: each block in
        one of the two), `longest` in any tier, `probable` counts a lower tier that sends no events as
        well. `last_seq` and `lag_s` are of the last batch of events applied; `trust` is exact,
        approximate or load_only.
        """
        body = await _read(request, LookupBody)
        packed = None if body.token_ids is None else _packed(body.token_ids)
        scope = body.scope() if body.tenant_id else body.scope().anywhere()
        return _json(queries.lookup(conductor, scope, packed, body.keys or (), body.block_tokens))

    return routes


def add_error_handlers(app: FastAPI) -> None:
    """Errors of every kind as `{"error": ...}`."""
    app.add_exception_handler(ConductorError, _refused)
    app.add_exception_handler(HTTPException, _no_route)


async def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ConductorError)
    return _json({"error": str(error)}, error.status)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    allowed = (error.headers or {}).get("Allow", "")
    if error.status_code == 404:
        message = f"no such path: {request.url.path[:256]}"
    elif error.status_code == 405:
        message = f"method {request.method[:16]} is not allowed; accepted: {allowed}"
    else:
        message = str(error.detail)
    return _json({"error": message}, error.status_code, dict(error.headers or {}))


async def _read(request: Request, model: type[B]) -> B:
    """The body, validated; `ConductorError` names the field, what was wrong and what is accepted."""
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            body = await _body(request, model.most_bytes)
    except TimeoutError:
        raise ConductorError(400, f"body: not complete within {BODY_WITHIN_S:g} s") from None
    if (
        body.count(b'"') > MAX_QUOTES
    ):  # each field that is none would be an error of its own, and a copy of it
        raise ConductorError(400, f"body: too many fields; accepted: {', '.join(model.model_fields)}")
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise ConductorError(400, _explain(error, model)) from None


async def _body(request: Request, most_bytes: int) -> bytes:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > most_bytes:
            raise ConductorError(413, f"body: at most {most_bytes} bytes are accepted")
    return bytes(data)


def _explain(error: ValidationError, model: type[Body]) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return f"body: {first['msg']}; accepted: a JSON object"
    if first["type"] == "extra_forbidden":
        return f"{str(first['loc'][0])[:64]}: is no field; accepted: {', '.join(model.model_fields)}"
    field = ".".join(str(part)[:64] for part in first["loc"]) or "body"
    return f"{field}: {first['msg'].removeprefix('Value error, ')}"


def _packed(token_ids: list[int]) -> bytes:
    """As little-endian uint32; `ConductorError` names the first id that is none."""
    try:
        return pack_ids(token_ids)
    except ValueError:
        index = next(i for i, token in enumerate(token_ids) if not 0 <= token < 2**32)
        raise ConductorError(
            400, f"token_ids.{index}: must be from 0 to {2**32 - 1}, got {str(token_ids[index])[:32]}"
        ) from None


def _takes(model: type[Body]) -> dict[str, Any]:
    """The body's schema, for the OpenAPI document."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, "application/json")
