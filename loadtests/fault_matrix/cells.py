"""The cells: which fault, of which leg, when, and how mock engines are brought to it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

CONNECTORS = ("nixl", "mooncake", "sglang", "shared-storage", "p2p-nccl")
FAULTS = ("refused", "4xx", "500", "hang", "dies", "garbage", "slow", "restart")
LEGS = ("prefill", "decode")
MOMENTS = ("before", "during", "after")
FLEETS = (2, 1)
"""Workers of each role."""
SLOW_S = 0.25
HANG_S = 30.0
"""Longer than any limit of a cell's gateway."""
ANSWERED = "its answer is whole by then"
MOVED_FIRST = "it answers once its KV has moved"
STATUS_SENT = "its status was sent"
NO_PART = "the store hands the KV over"


class Cell(Struct, frozen=True):
    """One fault, once. The moment: before the KV moves, while it moves, after it has."""

    connector: str
    leg: str
    moment: str
    fault: str
    workers: int

    @property
    def streams(self) -> bool:
        """Whether the request is for a stream: only that has a first byte long before its last."""
        return self.moment == "after" or self.workers > 1

    @property
    def waits_for_lease(self) -> bool:
        """Whether nobody can know that KV is to be released: what NIXL hands over stands in the prefill's
        answer, which is lost, or the decode worker says 200 and has not fetched it.
        """
        lost = self.leg == "prefill" and self.connector == "nixl" and self.fault in ("dies", "garbage")
        unfetched = self.leg == "decode" and self.moment == "before" and self.fault == "garbage"
        return lost or unfetched

    @property
    def name(self) -> str:
        fleet = f"{self.workers}P{self.workers}D"
        return f"{self.connector} {fleet}: {self.leg} {self.fault} {self.moment} the handoff"


class Plan(Struct, frozen=True):
    """What is done to the engines of the leg's role, of which the first request uses it up, and to others."""

    faults: Mapping[str, Any] = {}
    others: Mapping[str, Any] = {}
    """Faults of the other role's engines, for as long as the cell runs."""
    act: str = ""
    """stop or restart: of the engine that has the leg, at the cell's moment, or before there is a request."""
    first: bool = False
    """Before there is a request."""
    kv_wait_s: float = HANG_S
    """See `MockOptions`."""


def cells() -> Iterator[Cell]:
    """All of them, those that cannot exist too."""
    for workers in FLEETS:
        for leg in LEGS:
            for moment in MOMENTS:
                for fault in FAULTS:
                    for connector in CONNECTORS:
                        yield Cell(connector, leg, moment, fault, workers)


def plan(cell: Cell) -> Plan | str:
    """How it is brought about, or why it cannot be."""
    if cell.fault in ("refused", "restart"):
        return _process(cell)
    if cell.leg == "prefill":
        return _PREFILL[cell.moment](cell)
    return _DECODE[cell.moment](cell)


def _process(cell: Cell) -> Plan:
    """The worker's process ends: for good, or to come back."""
    act = "stop" if cell.fault == "refused" else "restart"
    if cell.moment == "before" and cell.fault == "refused":
        return Plan(act=act, first=True)
    is_prefill = cell.leg == "prefill"
    if cell.moment == "before":  # while the prompt is computed
        computing: Mapping[str, Any] = {"ttft": SLOW_S}
        # SGLang's prefill worker hands KV over before it answers: else all could be over at once.
        waiting: Mapping[str, Any] = {"handoff_delay": SLOW_S} if cell.connector == "sglang" else {}
        return Plan(computing, waiting, act) if is_prefill else Plan(waiting, computing, act)
    slow = {"handoff_delay": SLOW_S} if cell.moment == "during" else {"gap": SLOW_S / 5}
    return Plan({} if is_prefill else slow, slow if is_prefill else {}, act)


_ANSWERS: Mapping[str, Mapping[str, Any]] = {
    "4xx": {"status": 400},
    "500": {"status": 500},
    "hang": {"hang": True},
    "slow": {"ttft": SLOW_S},
}
"""In place of an answer, or late."""
_MOVES: Mapping[str, Mapping[str, Any]] = {
    "hang": {"handoff_delay": HANG_S},
    "slow": {"handoff_delay": SLOW_S},
}
"""What holds up KV on its way."""


def _prefill_before(cell: Cell) -> Plan | str:
    if cell.fault in _ANSWERS:
        return Plan(_ANSWERS[cell.fault])
    if cell.connector == "sglang":
        return MOVED_FIRST
    return Plan({"die_at": 1} if cell.fault == "dies" else {"garbage_body": True})


def _prefill_during(cell: Cell) -> Plan | str:
    if cell.fault not in _MOVES:
        return MOVED_FIRST if cell.connector == "sglang" else ANSWERED
    return NO_PART if cell.connector == "shared-storage" else Plan(_MOVES[cell.fault])


def _prefill_after(cell: Cell) -> Plan | str:
    if cell.connector != "sglang":
        return ANSWERED
    if cell.fault in ("4xx", "500"):
        return STATUS_SENT
    faults: dict[str, Mapping[str, Any]] = {
        "dies": {"die_at": 1},
        "garbage": {"corrupt_at": 1},
        "hang": {"hang_at": 1},
        "slow": {"ttft": SLOW_S},
    }
    return Plan(faults[cell.fault], {"gap": SLOW_S / 5})


def _decode_before(cell: Cell) -> Plan | str:
    if cell.fault in _ANSWERS:
        return Plan(_ANSWERS[cell.fault])
    return Plan({"die_before": True} if cell.fault == "dies" else {"error_body": True})


def _decode_during(cell: Cell) -> Plan | str:
    if cell.fault in _MOVES:
        return Plan(_MOVES[cell.fault])
    if cell.fault == "500" and cell.connector == "sglang":  # KVTransferError, of both legs
        return Plan({"handoff_delay": HANG_S}, kv_wait_s=SLOW_S)
    if cell.fault in ("4xx", "500"):
        return "it has taken the request"
    return Plan(
        {"die_at": 0} if cell.fault == "dies" else {"corrupt_at": 0} if cell.streams else {"close_at": 0}
    )


def _decode_after(cell: Cell) -> Plan | str:
    if cell.fault in ("4xx", "500"):
        return STATUS_SENT
    faults: dict[str, Mapping[str, Any]] = {
        "dies": {"die_at": 3},
        "garbage": {"corrupt_at": 3},
        "hang": {"hang_at": 3},
        "slow": {"gap": SLOW_S / 5},
    }
    return Plan(faults[cell.fault])


_PREFILL = {"before": _prefill_before, "during": _prefill_during, "after": _prefill_after}
_DECODE = {"before": _decode_before, "during": _decode_during, "after": _decode_after}
