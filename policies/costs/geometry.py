"""What a model keeps of the tokens it has read, in bytes: per token, per sequence and per rank.

    bytes_per_token = sum over layers (K elements x K bytes + V elements x V bytes)

where a layer's elements come from its KV heads (Hkv, never the query heads). Recurrent and convolution
layers keep a state per sequence instead, whatever its length. Nothing here includes weights, activations, the
engine's reserve or the tail of the last block (see paging.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class KvDtype:
    """The numbers in the cache. Scales kept once per tensor are left out: a few bytes for the whole model."""

    name: str
    bits: int
    scale_bytes: int = 0
    """For each token and head, once for K and once for V."""


KV_DTYPES: dict[str, KvDtype] = {
    dtype.name: dtype
    for dtype in (
        KvDtype("fp32", 32),
        KvDtype("bf16", 16),
        KvDtype("fp16", 16),
        KvDtype("fp8", 8),
        KvDtype("int8", 8),
        # vLLM 0.32 (triton_attn.py) packs a float32 scale after the values of each token and head, K and V.
        KvDtype("fp8_per_token_head", 8, scale_bytes=4),
        KvDtype("int8_per_token_head", 8, scale_bytes=4),
        KvDtype("int4_per_token_head", 4, scale_bytes=4),
    )
}


@dataclass(frozen=True, slots=True)
class Attention:
    """What one attention layer keeps of a token: `kv_heads` x (`k_dim` + `v_dim`) elements.

    MLA is one head whose K is the latent and the rope key, without a V (v_dim 0), kept once: vLLM 0.32.
    """

    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: KvDtype
    window_tokens: int | None = None
    """Only the last so many are kept; None keeps all. A layer of local chunks keeps up to a chunk."""
    extra_bytes: int = 0
    """Beside K and V, for each token, whole on every rank: the key of a sparse attention's indexer."""

    @property
    def bytes_per_token(self) -> int:
        # A half-byte element still fills whole bytes in each head's row, and both scales stand even
        # without a V (vLLM 0.32, triton_attn.py and mla_attention.py).
        values_bytes = (self.k_dim * self.dtype.bits) // 8 + (self.v_dim * self.dtype.bits) // 8
        return self.kv_heads * (values_bytes + 2 * self.dtype.scale_bytes) + self.extra_bytes

    def kept_tokens(self, tokens: int) -> int:
        return tokens if self.window_tokens is None else min(tokens, self.window_tokens)

    def on_rank(self, tp: int) -> Attention:
        """Heads are spread; with fewer heads than ranks each rank keeps one whole head, a copy."""
        if self.kv_heads % tp and tp % self.kv_heads:
            raise ValueError(
                f"tp: {tp} neither divides the {self.kv_heads} KV heads nor is a multiple of them; "
                f"a divisor or a multiple is expected"
            )
        return replace(self, kv_heads=max(1, self.kv_heads // tp))


@dataclass(frozen=True, slots=True)
class State:
    """A recurrent or convolution state of one sequence: `channels` x `values` elements, over the TP ranks.

    `groups` x `group_channels` more channels are shared by the heads of a group (B and C of Mamba 2). Where
    the ranks do not divide the groups, each rank holds one: vLLM 0.32, `extra_groups_for_head_shards`.
    """

    channels: int
    values: int
    element_bytes: int
    groups: int = 0
    group_channels: int = 0

    @property
    def sequence_bytes(self) -> int:
        return (self.channels + self.groups * self.group_channels) * self.values * self.element_bytes

    def on_rank(self, tp: int) -> State:
        if self.channels % tp:
            raise ValueError(
                f"tp: {tp} does not divide the {self.channels} channels of a recurrent state; "
                f"a divisor is expected"
            )
        groups = self.groups if self.groups % tp == 0 else tp
        return replace(self, channels=self.channels // tp, groups=groups // tp)


@dataclass(frozen=True, slots=True)
class Layer:
    """One of the model's layers. It may keep both kinds, or nothing (an MLP; K and V of an earlier layer)."""

    attention: Attention | None = None
    states: tuple[State, ...] = ()


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """The cache of a whole model, or with `rank` of one of its ranks: the same sums hold for both."""

    model_type: str
    query_heads: int
    """0 where no layer has attention."""
    layers: tuple[Layer, ...]

    @property
    def bytes_per_token(self) -> int:
        """Of a token that every attention layer still keeps, those with a window included."""
        return sum(layer.attention.bytes_per_token for layer in self.layers if layer.attention)

    @property
    def growth_bytes_per_token(self) -> int:
        """What one more token adds to a sequence longer than every window."""
        unlimited = [layer.attention for layer in self.layers if layer.attention]
        return sum(kept.bytes_per_token for kept in unlimited if kept.window_tokens is None)

    @property
    def state_bytes(self) -> int:
        """Of one sequence, whatever its length."""
        return sum(state.sequence_bytes for layer in self.layers for state in layer.states)

    @property
    def windows_tokens(self) -> tuple[int, ...]:
        """The distinct windows, ascending."""
        kept = (layer.attention.window_tokens for layer in self.layers if layer.attention)
        return tuple(sorted({window for window in kept if window is not None}))

    def sequence_bytes(self, tokens: int) -> int:
        """Of one sequence of `tokens`, without paging. ValueError if negative."""
        if tokens < 0:
            raise ValueError(f"tokens: {tokens} is negative; 0 or more is expected")
        attention = (layer.attention for layer in self.layers if layer.attention)
        kept = sum(layer.kept_tokens(tokens) * layer.bytes_per_token for layer in attention)
        return kept + (self.state_bytes if tokens else 0)

    def rank(self, tp: int, pp: int = 1, stage: int = 0) -> KvGeometry:
        """What each of the `tp` ranks of pipeline stage `stage` keeps. ValueError if the split does not work.

        Data parallel ranks and replicas are further instances with a cache of their own: they split nothing.
        """
        _check_parallel("tp", tp)
        if self.query_heads % tp:
            raise ValueError(
                f"tp: {tp} does not divide the {self.query_heads} attention heads; a divisor is expected"
            )
        counts = stage_layers(len(self.layers), pp)
        start = sum(counts[:stage])
        own = self.layers[start : start + counts[stage]]
        return replace(self, query_heads=self.query_heads // tp, layers=tuple(_on_rank(x, tp) for x in own))

    def ranks(self, tp: int, pp: int = 1) -> tuple[KvGeometry, ...]:
        """One rank of each stage, in the order of stages; all `tp` ranks of a stage keep the same amount."""
        stages = range(len(stage_layers(len(self.layers), pp)))
        return tuple(self.rank(tp, pp, stage) for stage in stages)


def stage_layers(layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each pipeline stage. ValueError if there are more stages than layers.

    What is left of an even split goes to the stages before the last, from the back: the last one has
    the final norm and the head (vLLM 0.32, `get_pp_indices`).
    """
    _check_parallel("pp", pp)
    if pp > layers:
        raise ValueError(f"pp: {pp} stages for {layers} layers; at most one stage per layer is expected")
    counts = [layers // pp] * pp
    for index in range(2, layers % pp + 2):
        counts[-index] += 1
    return tuple(counts)


def _on_rank(layer: Layer, tp: int) -> Layer:
    attention = layer.attention.on_rank(tp) if layer.attention else None
    return Layer(attention, tuple(state.on_rank(tp) for state in layer.states))


def _check_parallel(field: str, ranks: int) -> None:
    if ranks < 1:
        raise ValueError(f"{field}: {ranks} is not above 0; 1 or more is expected")
