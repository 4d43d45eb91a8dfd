"""When does it pay to prefill on some workers and decode on others?

An estimate for planning, over means, of a fleet in a steady state. Every worker is the same, every prompt and
answer as long as the next. A whole worker does both: each prefill step stalls its resident decodes, but there
is no handoff, and every worker serves either phase. Waits are those of `mg1_wait_s` at constant service.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from kvroute.policies.costs.links import Handoff, Link
from kvroute.policies.costs.queueing import Overload, mg1_wait_s
from kvroute.policies.costs.speeds import Speed

MODEL_ERROR = 0.03
"""Of E2E: a smaller gain is not claimed. The speeds fit their measurements to 2-4 %."""
_ROUNDS = 2000
"""Of the fixed point of residents and ITL: slow next to saturation, beyond it the limit is soon passed."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A fleet and its load. ValueError, naming the field, for what cannot be."""

    speed: Speed
    prompt_tokens: int
    output_tokens: int
    rate_per_s: float
    """Of the whole fleet."""
    workers: int
    prefill_workers: int
    """Of `workers`, if split; the others decode."""
    link: Link
    """Of each worker."""
    pieces: int = 1
    """Parts (layers) of a prompt's KV that are sent as soon as computed; 1 sends after the prefill."""
    chunk_tokens: int = 8192
    """Most prefill tokens in a step (vLLM's max_num_batched_tokens)."""
    max_sequences: int = 256
    """Most decodes of a worker."""
    itl_limit_s: float = math.inf
    """On the mean."""
    second_leg_s: float = 0.0156
    """What a second engine request adds: API overhead of vLLM, measured per request."""

    def __post_init__(self) -> None:
        for field in ("prompt_tokens", "output_tokens", "prefill_workers", "pieces", "chunk_tokens"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: {getattr(self, field)} is not above 0; 1 or more is expected")
        if not 0 < self.rate_per_s < math.inf:
            raise ValueError(f"rate_per_s: {self.rate_per_s} is not usable; a number above 0 is expected")
        if not self.prefill_workers < self.workers:
            raise ValueError(
                f"prefill_workers: {self.prefill_workers} of {self.workers} workers leaves none to decode; "
                f"1 to {self.workers - 1} is expected"
            )


@dataclass(frozen=True, slots=True)
class Way:
    """What a request meets on the mean, and how full the workers are."""

    ttft_s: float
    itl_s: float
    itl_worst_s: float
    """The gap beside the longest prefill step."""
    e2e_s: float
    residents: float
    """Decodes on each worker that decodes."""
    prefill_share: float
    """Of the time of each worker that prefills."""
    handoff_s: float = 0.0
    """Wait for the link, transfer, and the second leg."""


@dataclass(frozen=True, slots=True)
class Saturated:
    """No steady state: `what` is full."""

    what: str


class Reason(StrEnum):
    PAYS = "pays"
    RESCUES = "only the split fleet keeps up"
    LIMIT = "only the split fleet keeps the ITL limit"
    OVERLOAD = "overload"
    UNBALANCED = "unbalanced fleet"
    LOW_CONCURRENCY = "low concurrency"
    SLOW_LINK = "slow link"
    SHORT_PROMPT = "short prompts"
    POOLING = "two groups queue longer than one"
    BREAKS_LIMIT = "only the whole fleet keeps the ITL limit"


PAYING = frozenset({Reason.PAYS, Reason.RESCUES, Reason.LIMIT})


@dataclass(frozen=True, slots=True)
class Verdict:
    whole: Way | Saturated
    split: Way | Saturated
    reason: Reason
    detail: str

    @property
    def pays(self) -> bool:
        return self.reason in PAYING

    @property
    def gain_s(self) -> float | None:
        """E2E seconds a request saves by splitting; None unless both fleets keep up."""
        if isinstance(self.whole, Saturated) or isinstance(self.split, Saturated):
            return None
        return self.whole.e2e_s - self.split.e2e_s


def judge(setting: Setting) -> Verdict:
    """Compare the split of `setting` with the same workers whole, and say why it pays or not."""
    whole, split = whole_way(setting), split_way(setting)
    reason, detail = _compare(setting, whole, split)
    if reason is Reason.POOLING:
        reason, detail = _why_not(setting, whole, split) or (reason, detail)
    return Verdict(whole, split, reason, detail)


def best_split(setting: Setting) -> Setting:
    """`setting` with the prefill workers that answer soonest; unchanged if no number of them keeps up."""
    splits = [replace(setting, prefill_workers=count) for count in range(1, setting.workers)]
    ways = [(way.e2e_s, split) for split in splits if isinstance(way := split_way(split), Way)]
    return min(ways, key=lambda pair: pair[0])[1] if ways else setting


def whole_way(setting: Setting) -> Way | Saturated:
    """Every worker does both."""
    rate = setting.rate_per_s / setting.workers
    residents = _residents(setting, rate, prefills=True)
    if residents is None:
        return Saturated("whole workers")
    steps_s = _prefill_steps_s(setting, residents)
    service_s = sum(steps_s)
    try:
        ttft_s = mg1_wait_s(rate, service_s, service_cv2=0) + service_s
    except Overload:
        return Saturated("whole workers")
    itl_s = _itl_s(setting, rate, residents, prefills=True)
    e2e_s = ttft_s + (setting.output_tokens - 1) * itl_s
    return Way(ttft_s, itl_s, max(steps_s), e2e_s, residents, rate * service_s)


def split_way(setting: Setting) -> Way | Saturated:
    """Prefill on the prefill workers, hand the KV over, decode on the others."""
    prefill_rate = setting.rate_per_s / setting.prefill_workers
    decode_rate = setting.rate_per_s / (setting.workers - setting.prefill_workers)
    prefill_s = sum(_prefill_steps_s(setting, 0))
    residents = _residents(setting, decode_rate, prefills=False)
    if residents is None:
        return Saturated("decode workers")
    handoff = Handoff(setting.link, setting.speed.kv_bytes_per_token)
    try:
        wait_s = mg1_wait_s(prefill_rate, prefill_s, service_cv2=0)
    except Overload:
        return Saturated("prefill workers")
    try:
        # The busier end of the links: each transfer needs one at both ends.
        wire_s = handoff.transfer_s(setting.prompt_tokens)
        link_wait_s = mg1_wait_s(max(prefill_rate, decode_rate), wire_s, service_cv2=0)
    except Overload:
        return Saturated("links")
    hidden_s = handoff.hidden_s(setting.prompt_tokens, prefill_s, setting.pieces)
    handoff_s = link_wait_s + handoff.seconds(setting.prompt_tokens, hidden_s=hidden_s) + setting.second_leg_s
    ttft_s = wait_s + prefill_s + handoff_s
    itl_s = _itl_s(setting, decode_rate, residents, prefills=False)
    e2e_s = ttft_s + (setting.output_tokens - 1) * itl_s
    return Way(ttft_s, itl_s, itl_s, e2e_s, residents, prefill_rate * prefill_s, handoff_s)


def _compare(setting: Setting, whole: Way | Saturated, split: Way | Saturated) -> tuple[Reason, str]:
    """POOLING stands for every reason that needs a closer look."""
    if isinstance(split, Saturated):
        if isinstance(whole, Saturated):
            return Reason.OVERLOAD, f"{whole.what} are full, and so are the {split.what} of a split fleet"
        return Reason.POOLING, f"the {split.what} of the split fleet are full"
    if isinstance(whole, Saturated):
        return Reason.RESCUES, f"{whole.what} are full"
    whole_ok, split_ok = (way.itl_s <= setting.itl_limit_s for way in (whole, split))
    if whole_ok is not split_ok:
        detail = f"ITL is {whole.itl_s * 1e3:.1f} ms whole and {split.itl_s * 1e3:.1f} ms split"
        return (Reason.LIMIT if split_ok else Reason.BREAKS_LIMIT), detail
    if whole.e2e_s - split.e2e_s > MODEL_ERROR * whole.e2e_s:
        return Reason.PAYS, f"ITL falls by {(whole.itl_s - split.itl_s) * 1e3:.1f} ms"
    return Reason.POOLING, "waits and handoff outweigh what prefills cost decodes"


def _why_not(setting: Setting, whole: Way | Saturated, split: Way | Saturated) -> tuple[Reason, str] | None:
    """Change one thing at a time until splitting pays: that was the reason. None if nothing does."""
    other = best_split(setting)
    if _pays(other):
        return Reason.UNBALANCED, f"{other.prefill_workers} prefill workers would pay"
    if _pays(best_split(replace(setting, link=Link(math.inf, setting.link.latency_s)))):
        full = "no number of prefill workers keeps up over this link"
        taken = full if isinstance(split, Saturated) else f"the handoff takes {split.handoff_s * 1e3:.0f} ms"
        return Reason.SLOW_LINK, taken
    if isinstance(split_way(other), Saturated):
        return Reason.UNBALANCED, f"no division of {setting.workers} workers keeps up, whole they do"
    if isinstance(whole, Way) and whole.residents < 1:
        return Reason.LOW_CONCURRENCY, f"{whole.residents:.1f} decodes on a worker to be disturbed"
    longer = _paying_length(setting)
    return None if longer is None else (Reason.SHORT_PROMPT, f"prompts of {longer} tokens would pay")


def _paying_length(setting: Setting) -> int | None:
    """The first of ever longer prompts, up to 256 times, that would pay at the same rate."""
    for doubling in range(1, 9):
        tokens = setting.prompt_tokens << doubling
        if _pays(best_split(replace(setting, prompt_tokens=tokens))):
            return tokens
    return None


def _pays(setting: Setting) -> bool:
    return _compare(setting, whole_way(setting), split_way(setting))[0] in PAYING


def _prefill_steps_s(setting: Setting, residents: float) -> list[float]:
    """Seconds of each step of one prompt's prefill beside `residents` decodes."""
    steps_s = []
    for done in range(0, setting.prompt_tokens, setting.chunk_tokens):
        new = min(setting.chunk_tokens, setting.prompt_tokens - done)
        context = residents * _context_tokens(setting)
        steps_s.append(setting.speed.step_s(new, new * (done + new / 2), round(residents), context))
    return steps_s


def _context_tokens(setting: Setting) -> float:
    return setting.prompt_tokens + setting.output_tokens / 2


def _itl_s(setting: Setting, rate_per_s: float, residents: float, *, prefills: bool) -> float:
    """Mean gap of a resident: it gets a token in every step, in those of prefills too. inf if full."""
    step_s = setting.speed.decode_s(round(residents), residents * _context_tokens(setting))
    if not prefills:
        return step_s
    steps_s = _prefill_steps_s(setting, residents)
    share = rate_per_s * sum(steps_s)
    if share >= 1:
        return math.inf
    return 1 / (rate_per_s * len(steps_s) + (1 - share) / step_s)


def _residents(setting: Setting, rate_per_s: float, *, prefills: bool) -> float | None:
    """Decodes on a worker, by Little's law: rate x tokens x ITL(residents). None if they do not fit."""
    most = min(
        setting.max_sequences, setting.speed.kv_tokens // (setting.prompt_tokens + setting.output_tokens)
    )
    if most < 1:
        return None
    residents = 0.0
    for _ in range(_ROUNDS):
        itl_s = _itl_s(setting, rate_per_s, residents, prefills=prefills)
        stays = rate_per_s * (setting.output_tokens - 1) * itl_s
        if math.isinf(itl_s) or stays > most:
            return None
        if abs(stays - residents) <= 1e-9 * max(1.0, residents):
            return stays
        residents = stays
    return residents
