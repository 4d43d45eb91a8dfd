"""What a fleet of mock engines is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvroute.conductor.tiers.registry import ADMISSIONS, EVICTIONS, WRITE_BACKS
from kvroute.loadtests.mock_engine.faults import Faults
from kvroute.loadtests.mock_engine.pd import SIDES
from kvroute.policies.costs.speeds import PRESETS, Speed
from kvroute.types import Role


@dataclass(frozen=True, slots=True)
class MockOptions:
    """Frozen and validated: ValueError names the field at fault."""

    host: str = "127.0.0.1"
    port: int = 0
    """Engine i listens on port + i; 0 takes free ports."""
    engines: int = 1
    seed: int = 0
    """Of the output text, and of each engine's own block hashes."""
    model: str = "mock"
    adapters: tuple[str, ...] = ()
    """LoRA names served from the start."""
    preset: str = "llama-3.1-8b-h100-tp1"
    """Row of the speed table, see `policies.costs.speeds.PRESETS`."""
    step_scale: float = 1.0
    """Multiplies every step's time (k of the engine model)."""
    step_offset_s: float = 0.0
    """Added to every step's time (o of the engine model)."""
    request_overhead_s: float = 0.0156
    """Between a request's arrival and its place in the queue."""
    speed: float = 1.0
    """Simulated seconds per real second; infinity answers at once."""
    block_size_tokens: int = 16
    kv_blocks: int | None = None
    """None: as many as the preset has room for."""
    cpu_blocks: int = 0
    """Blocks of a CPU tier; 0: none."""
    cpu_write: str = "through"
    """When blocks go there: through, selective or back, as in `conductor.tiers`; so the next two."""
    cpu_admission: str = "always"
    cpu_eviction: str = "lru"
    cpu_load_bytes_per_s: float = 20e9
    disk_blocks: int = 0
    """Blocks of a disk tier, for what leaves the tier above it; 0: none."""
    disk_load_bytes_per_s: float = 3e9
    peer_load_bytes_per_s: float = 25e9
    """Of a pull from another engine of the fleet, from its lower tiers into the CPU tier here."""
    tier_events: bool = True
    """Publish events of these tiers; without, they are silent, as those of most engines are."""
    max_model_len_tokens: int | None = None
    """Longest prompt plus output; None: 131072, or what fits in the KV blocks."""
    max_batched_tokens: int = 8192
    max_sequences: int = 256
    output_tokens: int = 32
    """Length of an answer whose request sets no limit; a limit is used up to its end."""
    prefill: int = 0
    """Engines of the prefill role, the first ones; then those of both roles."""
    decode: int = 0
    """Engines of the decode role, the last ones."""
    connector: str = ""
    """How they hand KV over, see `pd.SIDES`; "": they do not."""
    kv_lease_s: float = 30.0
    """Real seconds that KV is kept for a decode engine that does not come; Mooncake's own default is 480."""
    kv_wait_s: float = 480.0
    """Real seconds that a request waits for its other half, of Mooncake or SGLang (300 there)."""
    kv_load_failure: str = "recompute"
    """What becomes of a request whose prefill engine is gone: recompute or fail, as in vLLM."""
    register_at: str = ""
    """Where engines of P2pNccl tell their addresses, such as tcp://127.0.0.1:30001; "": nowhere."""
    handoff_bytes_per_s: float = 25e9
    """Of the KV from a prefill to a decode engine."""
    development: bool = True
    """vLLM's development mode: it resets its prefix cache, and tells its configuration."""
    kv_events: bool = False
    """Publish KV cache events over ZMQ."""
    kv_event_replay_batches: int = 10_000
    close_idle_s: float | None = 5.0
    """Idle keep-alive connections are closed after this; None: never."""
    journal_requests: int = 64
    """Requests kept whole (headers and body) for /debug."""
    journal_ids: int = 4096
    """Request ids and block hashes shown in /debug."""
    faults: Faults = field(default_factory=Faults)
    """How every engine misbehaves from the start."""

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ValueError(f"preset {self.preset!r} is unknown; known: {', '.join(PRESETS)}")
        if not self.model:
            raise ValueError("model must not be empty")
        if math.isnan(self.speed) or self.speed <= 0:
            raise ValueError(f"speed must be above 0, got {self.speed}")
        if not 0 <= self.port <= 65535 or (self.port and self.port + self.engines - 1 > 65535):
            raise ValueError(f"port {self.port} leaves no room for {self.engines} engines")
        for name in ("engines", "block_size_tokens", "max_batched_tokens", "max_sequences", "output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("kv_blocks", "max_model_len_tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("request_overhead_s", "step_offset_s", "journal_requests", "journal_ids"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.step_scale <= 0 or (self.close_idle_s is not None and self.close_idle_s <= 0):
            raise ValueError("step_scale and close_idle_s must be above 0")
        self._check_tiers()
        self._check_pd()

    def _check_pd(self) -> None:
        for name in ("prefill", "decode", "kv_lease_s", "kv_wait_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.prefill + self.decode > self.engines:
            raise ValueError(
                f"prefill {self.prefill} and decode {self.decode} are more than {self.engines} engines"
            )
        if self.connector not in SIDES:
            raise ValueError(
                f"connector {self.connector!r} is unknown; known: {', '.join(filter(None, SIDES))}"
            )
        if (self.prefill or self.decode) and not self.connector:
            raise ValueError(f"prefill and decode need a connector: {', '.join(filter(None, SIDES))}")
        if self.kv_load_failure not in ("recompute", "fail"):
            raise ValueError(f"kv_load_failure must be recompute or fail, got {self.kv_load_failure!r}")
        if not self.handoff_bytes_per_s > 0:
            raise ValueError(f"handoff_bytes_per_s must be above 0, got {self.handoff_bytes_per_s}")

    def role_of(self, index: int) -> Role:
        """Of engine `index`."""
        if index < self.prefill:
            return Role.PREFILL
        return Role.DECODE if index >= self.engines - self.decode else Role.BOTH

    def _check_tiers(self) -> None:
        for name, known in (
            ("cpu_write", WRITE_BACKS.names),
            ("cpu_admission", ADMISSIONS.names),
            ("cpu_eviction", EVICTIONS.names),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} is unknown; known: {', '.join(known)}")
        for name in ("cpu_blocks", "disk_blocks"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("cpu_load_bytes_per_s", "disk_load_bytes_per_s", "peer_load_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")

    @property
    def instant(self) -> bool:
        """True when the scheduler adds no delay."""
        return math.isinf(self.speed)

    @property
    def step_speed(self) -> Speed:
        """The preset's row, calibrated."""
        return PRESETS[self.preset].calibrated(self.step_scale, self.step_offset_s * 1e3)

    @property
    def capacity_blocks(self) -> int:
        """KV blocks of each engine."""
        if self.kv_blocks is not None:
            return self.kv_blocks
        return max(1, PRESETS[self.preset].kv_tokens // self.block_size_tokens)

    @property
    def max_tokens(self) -> int:
        """Longest prompt plus output, in tokens, that an engine takes."""
        capacity = self.capacity_blocks * self.block_size_tokens
        return min(self.max_model_len_tokens or 131_072, capacity)
