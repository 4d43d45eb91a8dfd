"""Answers of the HTTP API from the index: who of the registered holds how much of a prompt."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvroute.conductor.core import Conductor, ConductorError, Registration, Service
from kvroute.conductor.index import Holder, HolderMatch
from kvroute.conductor.keys import Namespace, token_keys
from kvroute.conductor.packing import pack_keys
from kvroute.types import KeyMode, PromptKeys

STORE = "Mooncake"
"""Type of a publisher that is a store shared by the instances of its group, and no instance itself."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose blocks may count in an answer."""

    model: str
    lora_name: str | None = None
    tenant_id: str | None = None
    """None: every tenant's."""
    instance_id: str | None = None
    cache_salt: str | None = None

    def anywhere(self) -> Scope:
        """The same without a tenant."""
        return replace(self, tenant_id=None)

    def takes(self, service: Service) -> bool:
        """Whether `service` is one of the group asked about, whatever it holds."""
        return (
            service.modelname == self.model
            and self.tenant_id in (None, service.tenant_id)
            and (self.instance_id is None or self.instance_id == service.instance_id or service.type == STORE)
            and (not service.lora_name or service.lora_name == self.lora_name)
            and (not service.additionalsalt or service.additionalsalt == self.cache_salt)
        )

    @property
    def takes_followed(self) -> bool:
        """Whether engines that gateways follow count: they have no tenant and no instance name."""
        return self.tenant_id is None and self.instance_id is None

    def root(self, service: Service | None) -> int:
        """Of the keys of a prompt's blocks at `service`, or at an engine that gateways follow.

        A query's salt stands for the one the service was registered with, and where that has none, for the
        salt that the engine was given with the request.
        """
        salted = service is None or not service.additionalsalt
        salt = self.cache_salt if salted else None
        return Namespace(model=self.model, adapter=self.lora_name, cache_salt=salt).root("ids")


async def by_tokens(conductor: Conductor, scope: Scope, packed_ids: bytes, block_size: int) -> dict[str, Any]:
    """{tenant: {instance: hits}} of packed token ids; raises `ConductorError` for an unknown instance."""
    members = _members(conductor, scope)
    groups: dict[int, list[Registration]] = defaultdict(list)
    for one in members:
        groups[scope.root(one.service)].append(one)
    rows: dict[str, HolderMatch] = {}
    for root, group in groups.items():
        sizes = {_block_size(conductor, one) for one in group}
        keys = {size: token_keys(packed_ids, root, size) for size in sizes}
        ids = {one.worker_id for one in group}
        rows |= {
            row.holder.worker_id: row for row in conductor.index.lookup(keys) if row.holder.worker_id in ids
        }
        await asyncio.sleep(0)
    return _hits(scope, members, rows, block_size)


async def by_hashes(
    conductor: Conductor, scope: Scope, hashes: Sequence[int], block_size: int
) -> dict[str, Any]:
    """The same by the engines' own block hashes; services of another block size are left out, and counted."""
    members = []
    rows = {}
    for one in _members(conductor, scope):
        if _block_size(conductor, one) != block_size:
            conductor.counts.skipped["block_size"] += 1
            continue
        members.append(one)
        row = _resolved(conductor, _holder(one), hashes, block_size)
        if row is not None:
            rows[one.worker_id] = row
        await asyncio.sleep(0)
    return _hits(scope, members, rows, block_size)


def lookup(
    conductor: Conductor,
    scope: Scope,
    packed_ids: bytes | None,
    keys: Sequence[int],
    block_tokens: int | None,
) -> dict[str, Any]:
    """Every holder of the start of a prompt with tiers and freshness, the longest first."""
    services = {one.worker_id: one.service for one in conductor.registrations.values()}
    if packed_ids is None:
        assert block_tokens is not None
        given = PromptKeys(KeyMode.TOKENS, keys, block_tokens, len(keys) * block_tokens)
        rows = conductor.index.lookup({block_tokens: given})
    else:
        rows = _rows_by_tokens(conductor, scope, services, packed_ids)
    urls = {one.worker_id: engine.url for engine, one in conductor.instances.items()}
    found = []
    for row in rows:
        service = services.get(row.holder.worker_id)
        if scope.takes(service) if service is not None else scope.takes_followed:
            found.append(_described(conductor, row, service, urls.get(row.holder.worker_id)))
    found.sort(key=lambda one: (-one["longest"], one["worker"], one["dp_rank"]))
    return {"holders": found}


def _rows_by_tokens(
    conductor: Conductor, scope: Scope, services: Mapping[str, Service], packed_ids: bytes
) -> list[HolderMatch]:
    index = conductor.index
    roots = {scope.root(None), *(scope.root(one) for one in services.values() if scope.takes(one))}
    return [
        row
        for root in roots
        for row in index.lookup({size: token_keys(packed_ids, root, size) for size in index.block_sizes})
        if scope.root(services.get(row.holder.worker_id)) == root
    ]


def services(conductor: Conductor) -> dict[str, Any]:
    """What `/services` answers."""
    return {
        "count": len(conductor.registrations),
        "services": [_listed(conductor, one) for one in conductor.registrations.values()],
    }


def global_view(conductor: Conductor) -> dict[str, Any]:
    """What `/global_view` answers."""
    groups: dict[tuple[Any, ...], list[Registration]] = defaultdict(list)
    for one in conductor.registrations.values():
        said = one.service
        group = (said.tenant_id, said.modelname, said.lora_name, said.block_size, said.additionalsalt)
        groups[group].append(one)
    contexts = []
    for (tenant, model, lora, block_size, salt), members in groups.items():
        instances: dict[str, list[int]] = defaultdict(list)
        for one in members:
            if one.service.type != STORE:
                instances[one.service.instance_id].append(one.service.dp_rank)
        contexts.append(
            {
                "model_name": model,
                "lora_name": lora,
                "block_size": block_size,
                "additional_salt": salt,
                "tenant_id": tenant,
                "instances": {name: sorted(ranks) for name, ranks in instances.items()},
                "prefix_count": sum(conductor.index.held_blocks(one.worker_id) for one in members),
            }
        )
    index = conductor.index
    return {
        "context_count": len(contexts),
        "model_contexts": contexts,
        "followed_engines": len(conductor.instances),
        "blocks": index.blocks.blocks,
        "entries": index.entries,
        "bytes_used": index.bytes_used,
    }


def _members(conductor: Conductor, scope: Scope) -> list[Registration]:
    known = list(conductor.registrations.values())
    if scope.instance_id is not None and not any(
        one.service.instance_id == scope.instance_id and one.service.tenant_id == scope.tenant_id
        for one in known
    ):
        raise ConductorError(404, f"instance_id: {scope.instance_id} is not registered for {scope.tenant_id}")
    return [one for one in known if scope.takes(one.service)]


def _holder(one: Registration) -> Holder:
    return Holder(one.worker_id, one.service.dp_rank)


def _block_size(conductor: Conductor, one: Registration) -> int:
    """As its events say, which may be another than it was registered with."""
    return conductor.index.block_tokens(_holder(one)) or one.service.block_size


def _resolved(
    conductor: Conductor, holder: Holder, hashes: Sequence[int], block_size: int
) -> HolderMatch | None:
    """What `holder` holds of a chain of its engine's hashes."""
    index = conductor.index
    if index.block_tokens(holder) != block_size:
        return None
    slot = index.slot(holder)
    keys = []
    for name in hashes:
        key = index.blocks.key_of(slot, name)
        if key is None:
            break
        keys.append(key)
    for found, *counts in index.blocks.match(pack_keys(keys)):
        if found == slot:
            return HolderMatch(holder, block_size, *(count * block_size for count in counts))
    return None


def _hits(
    scope: Scope, members: Sequence[Registration], rows: Mapping[str, HolderMatch], block_size: int
) -> dict[str, Any]:
    """Hits by instance, in whole blocks of the query; a store's count for every instance beside it."""
    stores = [rows[one.worker_id] for one in members if one.service.type == STORE and one.worker_id in rows]
    instances: dict[str, dict[str, Any]] = {}
    for one in members:
        if one.service.type != STORE:
            hits = instances.setdefault(
                one.service.instance_id, {"longest_matched": 0, "GPU": 0, "DP": {}, "CPU": 0, "DISK": 0}
            )
            row = rows.get(one.worker_id)
            held = 0 if row is None else row.confirmed_tokens // block_size * block_size
            hits["DP"][str(one.service.dp_rank)] = held
            _raise(hits, [] if row is None else [row], block_size)
    for hits in instances.values():
        _raise(hits, stores, block_size)
    return {scope.tenant_id or "": instances}


def _raise(hits: dict[str, Any], rows: Iterable[HolderMatch], block_size: int) -> None:
    for row in rows:
        for name, tokens in (
            ("longest_matched", row.confirmed_tokens),
            ("GPU", row.gpu_tokens),
            ("CPU", row.cpu_tokens),
            ("DISK", row.disk_tokens),
        ):
            hits[name] = max(hits[name], tokens // block_size * block_size)


def _described(
    conductor: Conductor, row: HolderMatch, service: Service | None, url: str | None
) -> dict[str, Any]:
    known: dict[str, Any] = {"worker": row.holder.worker_id}
    if service is not None:
        known |= {"instance_id": service.instance_id, "tenant_id": service.tenant_id}
    if url is not None:
        known["url"] = url
    return known | {
        "dp_rank": row.holder.dp_rank,
        "block_tokens": row.block_tokens,
        "tokens": {
            "GPU": row.gpu_tokens,
            "CPU": row.cpu_tokens,
            "DISK": row.disk_tokens,
            "GPU_CPU": row.gpu_cpu_tokens,
        },
        "longest": row.confirmed_tokens,
        "probable": row.probable_tokens,
        **_freshness(conductor, row.holder),
    }


def _freshness(conductor: Conductor, holder: Holder) -> dict[str, Any]:
    health = conductor.feed.health(holder.worker_id)
    for rank in () if health is None else health.holders:
        if rank.dp_rank == holder.dp_rank:
            return {
                "last_seq": rank.last_seq,
                "lag_s": rank.lag_s,
                "trust": rank.trust.value,
                "reasons": list(rank.reasons),
            }
    return {
        "last_seq": -1,
        "lag_s": None,
        "trust": conductor.trust(holder.worker_id).value,
        "reasons": [],
    }


def _listed(conductor: Conductor, one: Registration) -> dict[str, Any]:
    service, fresh = one.service, _freshness(conductor, _holder(one))
    return {
        "Endpoint": service.endpoint,
        "ReplayEndpoint": service.replay_endpoint or "",
        "Type": service.type,
        "ModelName": service.modelname,
        "LoraName": service.lora_name,
        "TenantID": service.tenant_id,
        "InstanceID": service.instance_id,
        "BlockSize": service.block_size,
        "DPRank": service.dp_rank,
        "AdditionalSalt": service.additionalsalt,
        "Trust": fresh["trust"],
        "Reasons": fresh["reasons"],
        "LastSeq": fresh["last_seq"],
        "LagS": fresh["lag_s"],
    }
