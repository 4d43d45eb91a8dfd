"""The nouns every layer speaks.

Units live in names: `_s` seconds, `_tokens`, `_bytes`. Everything here is frozen; `WorkerLoad` and `Pace`,
which a `Fleet` points to, are live objects that policies only read. What is made for every request is a
frozen `Struct`: made in a tenth of a frozen dataclass's time, and (`gc=False`, it takes part in no cycle) no
work for the collector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from kvroute.load import WorkerLoad
    from kvroute.policies.costs.links import Link, PdLinks
    from kvroute.policies.costs.pace import Pace

PRIOR_OUTPUT_TOKENS = 300.0
"""Output length of a request of which nothing is known."""


class Role(StrEnum):
    """What a worker may be asked to do."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class EngineKind(StrEnum):
    """The dialect a worker speaks; `openai` is any server of the OpenAI API that is neither of the others."""

    VLLM = "vllm"
    SGLANG = "sglang"
    OPENAI = "openai"


class KeyMode(StrEnum):
    """How prompt keys were made: from the engine's token ids, or from the prompt's bytes (approximate)."""

    TOKENS = "tokens"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker runs, by its labels; empty is not known, and is near to nothing."""

    host: str = ""
    rack: str = ""
    zone: str = ""


@dataclass(frozen=True, slots=True)
class Worker:
    """One incarnation of an engine behind a URL. A worker that leaves and returns is another `Worker`."""

    id: str
    """Unique for the life of the gateway, never reused: the URL's slug and a counter."""
    url: str
    role: Role = Role.BOTH
    engine: EngineKind = EngineKind.OPENAI
    models: tuple[str, ...] = ()
    """Names it serves, adapters included; empty while unknown, which means "any"."""
    block_size_tokens: int | None = None
    data_parallel_size: int = 1
    takes_whole: bool = True
    """Whether it may both prefill and decode one request. Not a prefill worker, whatever this says."""
    place: Place = Place()

    @property
    def prefills(self) -> bool:
        """Whether it computes prompts, be it only those of requests that it does all of."""
        return self.role is not Role.DECODE or self.takes_whole

    def serves(self, model: str | None) -> bool:
        """True when a request for `model` may go here; None means the request names no model."""
        return model is None or not self.models or model in self.models


class PromptKeys(Struct, frozen=True, gc=False):
    """Chained keys of a prompt's full blocks, first block first."""

    mode: KeyMode
    keys: Sequence[int]
    """64-bit; key i covers blocks 0..i, so equal keys mean equal prefixes."""
    block_tokens: int
    """Tokens per block; in byte mode an estimate."""
    prompt_tokens: int
    """Length of the whole prompt, tail included; in byte mode an estimate."""


class Tier(IntEnum):
    """Where a block lies, nearest first."""

    GPU = 0
    CPU = 1
    DISK = 2


class Trust(StrEnum):
    """How far the index of one worker may be believed."""

    EXACT = "exact"
    """Its KV events are complete: what is not confirmed is not there."""
    APPROXIMATE = "approximate"
    """No events, or not all of them: what was routed there is believed for as long as it is remembered."""
    LOAD_ONLY = "load_only"
    """What is known of it has proved wrong: it is judged by its load alone."""


class PrefixMatch(Struct, frozen=True, gc=False):
    """The longest contiguous prefix of one prompt that one worker is thought to hold, in tokens."""

    tokens: int = 0
    """The best estimate over all tiers: the longer of what is confirmed and what is predicted."""
    gpu_tokens: int = 0
    """Confirmed in the GPU alone."""
    cpu_tokens: int = 0
    """Confirmed in GPU or CPU memory."""
    confirmed_tokens: int = 0
    """Confirmed in any tier."""
    predicted_tokens: int = 0
    """Routed there and not yet confirmed, or not to be confirmed by events at all."""
    dp_rank: int | None = None
    """The data-parallel rank that holds it; None where the worker has only one."""


NO_MATCH = PrefixMatch()


class FoundMatches(list[PrefixMatch]):
    """Of all workers of a fleet. In a large one most may hold nothing, and need not be looked at then."""

    __slots__ = ("places",)

    def __init__(self, workers: int) -> None:
        super().__init__([NO_MATCH] * workers)
        self.places: list[int] | None = []
        """Of all that are not `NO_MATCH`, some perhaps more than once; None where they are many."""


class RequestView(Struct, frozen=True, gc=False):
    """What routing knows of a request, parsed once; the body itself is forwarded untouched."""

    model: str | None = None
    session_id: str | None = None
    prompt_tokens: int = 0
    """Estimated where no tokenizer is at hand; 0 is unknown."""
    stream: bool = False
    tenant: str = ""
    """Whose share of the fleet this counts against; empty is nobody's in particular."""
    priority: int = 0
    """Lower goes first, as in vLLM."""
    max_output_tokens: int | None = None
    """The request's own limit on its output."""
    ttft_limit_s: float | None = None
    """The client's own limits; None leaves the policy's."""
    itl_limit_s: float | None = None
    e2e_limit_s: float | None = None
    continues: bool | None = None
    """Whether the client says its session goes on after this; None when it does not say."""


class Fleet(Struct, frozen=True, gc=False):
    """A snapshot of the workers that may take one request. The sequences are parallel and not empty."""

    now_s: float
    workers: Sequence[Worker]
    loads: Sequence[WorkerLoad]
    matches: Sequence[PrefixMatch] = ()
    """Parallel to `workers`; empty when the prompt has no keys or no policy asked for them."""
    held_blocks: Sequence[int] = ()
    """Blocks the index knows per worker, parallel to `workers`; empty as `matches` is."""
    keys: Sequence[int] = ()
    """The prompt's block keys, where a policy `needs_active_keys`; else empty."""
    block_tokens: int = 0
    """Tokens per block of `keys`."""
    paces: Sequence[Pace] = ()
    """How fast each is, parallel to `workers`; empty means all like the default preset."""
    output_tokens: float = PRIOR_OUTPUT_TOKENS
    """Expected output of this request."""
    arrivals_per_s: float = 0.0
    """Requests that arrive for each worker, of late."""
    promised_s: Sequence[float] = ()
    """Prefill seconds of held requests that go before this one, by the worker each waits for; parallel to
    `workers`, empty when none is held."""
    may_hold: bool = False
    """Whether the answer may be `Hold`."""
    pd_links: PdLinks | None = None
    """Carry KV from prefill to decode workers; None: requests cannot be split, and
    every worker does both."""
    peer_link: Link | None = None
    """Carries KV from one worker's cache to another's; None: they cannot pull."""
    held_s: float = 0.0
    """How long this request has waited in the gateway: part of its time to first token."""


class Candidate(Struct, frozen=True, gc=False):
    """Who prefills and who decodes; the same worker twice when the request is not split."""

    prefill: Worker
    decode: Worker


class Cost(Struct, frozen=True, gc=False):
    """The price of one candidate in seconds, term by term."""

    queue_wait_s: float = 0.0
    """Until the prefill can begin, and until there is KV room to decode."""
    load_s: float = 0.0
    """What loading KV from lower tiers or a peer adds to that wait: the part the queue does not hide."""
    prefill_s: float = 0.0
    """Of the uncached tokens."""
    handoff_s: float = 0.0
    """From the prefill's end to the first token, where another decodes: the KV's way, and the step there."""
    cache_s: float = 0.0
    """To others: what is computed here, or copied, evicts or duplicates what they would use."""
    delay_s: float = 0.0
    """To others: arrivals that this prefill will delay, and transfers that this handoff will."""
    stall_s: float = 0.0
    """To others: requests there that this prefill stalls."""
    decode_s: float = 0.0
    """Of this request's own decode life, and of what it adds to the steps of others."""
    itl_s: float = 0.0
    """Predicted time between tokens, when decode begins. No part of the sum."""
    room_s: float = 0.0
    """Of the queue's wait, that for KV room. Counted there."""

    @property
    def ttft_s(self) -> float:
        """Predicted time to first token."""
        return self.queue_wait_s + self.load_s + self.prefill_s + self.handoff_s

    @property
    def externality_s(self) -> float:
        """What the choice costs others, and this request later."""
        return self.cache_s + self.delay_s + self.stall_s + self.decode_s

    @property
    def total_s(self) -> float:
        """What is minimised."""
        return self.ttft_s + self.externality_s


class Priced(Struct, frozen=True, gc=False):
    """A candidate with its price, for people to look at."""

    candidate: Candidate
    cost: Cost
    matched_tokens: int = 0
    loaded_tokens: int = 0
    """Of those, to be loaded from a lower tier."""
    infeasible: str | None = None
    """The limit it would break; None when it keeps all."""


class Pull(Struct, frozen=True, gc=False):
    """KV to fetch from another worker's cache before the prefill."""

    source: Worker
    tokens: int
    """Of the prompt's beginning, that the source holds and the target does not."""
    expected_s: float


class Decision(Struct, frozen=True, gc=False):
    """A policy's choice, with a short reason from a small fixed set (it becomes a metric label)."""

    candidate: Candidate
    reason: str
    matched_tokens: int = 0
    cost: Cost | None = None
    """None where the policy does not price."""
    loads: bool = True
    """Whether what lies in tiers below the GPU is worth loading."""
    pull: Pull | None = None

    @classmethod
    def whole(cls, worker: Worker, reason: str, matched_tokens: int = 0) -> Decision:
        """One worker does both prefill and decode."""
        return cls(Candidate(worker, worker), reason, matched_tokens)


class Hold(Struct, frozen=True, gc=False):
    """Nobody should take this yet: it waits in the gateway and is priced again when something frees."""

    worker: Worker
    """The one it would go to as things stand."""
    prefill_s: float
    """What it would cost there, in seconds of the preset; those behind it see it as promised."""
    rank_s: float = 0.0
    """Held requests go in the order of arrival plus this: short first, and aged."""


class Rejection(Struct, frozen=True, gc=False):
    """No worker should take this now; the client is told when to come back."""

    reason: str
    retry_after_s: float = 1.0


class Prediction(Struct, frozen=True, gc=False):
    """What was expected of an attempt at its choice, by the pace of its worker."""

    ttft_s: float
    itl_s: float
    ahead_s: float
    """Queue and prefill before the pace's correction: nearly seconds of the preset; so the decode step."""
    step_s: float
    is_plain: bool = True
    """False where it waits for a load, a pull or KV room too, whose times say nothing of the pace."""


class Outcome(Struct, frozen=True, gc=False):
    """How one attempt on one worker ended, for calibration, metrics and logs."""

    worker: Worker
    status: int | None
    """Upstream status; None when no response head arrived."""
    failure: str | None = None
    """None on success, else one of the gateway's failure classes."""
    ttft_s: float | None = None
    """From the choice of the worker to the first body byte."""
    e2e_s: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    matched_tokens: int = 0
    """What the index promised at choice."""
    itl_s: float | None = None
    """Mean time between tokens; None for fewer than two."""
    prediction: Prediction | None = None
    """What was expected of it; None when nothing was."""
