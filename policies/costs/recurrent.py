"""Hybrid and recurrent families: states per sequence, and attention in some layers.

Shapes and element types are those of vLLM 0.32 (`MambaStateShapeCalculator`, `MambaStateDtypeCalculator`),
which keeps recurrent states in the model's type unless the config or the family says otherwise; SGLang keeps
some in float32, twice as much. Speculative decoding widens convolution states and is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.policies.costs.attentions import Cache, mla_attention, plain_attention
from kvroute.policies.costs.config_fields import Fields
from kvroute.policies.costs.geometry import Layer, State

_STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def mamba1(channels: int, state_size: int, conv_kernel: int, cache: Cache) -> tuple[State, ...]:
    return _states(
        State(channels, conv_kernel - 1, cache.element_bytes),
        State(channels, state_size, cache.element_bytes),
    )


def mamba2(
    fields: Fields, cache: Cache, heads: int, dim: int, groups: int, size: int, kernel: int, channels: int = 0
) -> tuple[State, ...]:
    """`channels` of the convolution beside B and C: heads x dim unless said."""
    conv = State(channels or heads * dim, kernel - 1, cache.element_bytes, groups, 2 * size)
    return _states(conv, State(heads, dim * size, _ssm_bytes(fields, cache)))


def gated_delta_net(fields: Fields, cache: Cache) -> tuple[State, ...]:
    k_heads, v_heads = fields.size("linear_num_key_heads"), fields.size("linear_num_value_heads")
    k_dim, v_dim = fields.size("linear_key_head_dim"), fields.size("linear_value_head_dim")
    kernel = fields.size("linear_conv_kernel_dim")
    conv = State(2 * k_heads * k_dim + v_heads * v_dim, kernel - 1, cache.element_bytes)
    return _states(conv, State(v_heads, v_dim * k_dim, _ssm_bytes(fields, cache)))


def qwen_hybrid(fields: Fields, cache: Cache) -> list[Layer]:
    """Qwen3-Next and Qwen3.5: each fourth layer has full attention, the others a gated delta net."""
    layers = fields.layers()
    step = fields.size_or(4, "full_attention_interval")
    kinds = fields.per_layer("layer_types", layers) or [
        "linear_attention" if (index + 1) % step else "full_attention" for index in range(layers)
    ]
    of = {
        "full_attention": Layer(plain_attention(fields, cache)),
        "linear_attention": Layer(states=gated_delta_net(fields, cache)),
    }
    return _pick(fields, "layer_types", kinds, of)


def jamba(fields: Fields, cache: Cache) -> list[Layer]:
    period, offset = fields.size("attn_layer_period"), fields.size("attn_layer_offset", least=0)
    if offset >= period:
        raise fields.wrong("attn_layer_offset", f"{offset} is not below attn_layer_period {period}")
    channels = fields.size("mamba_expand") * fields.size("hidden_size")
    states = mamba1(channels, fields.size("mamba_d_state"), fields.size("mamba_d_conv"), cache)
    attention = Layer(plain_attention(fields, cache))
    return [
        attention if index % period == offset else Layer(states=states) for index in range(fields.layers())
    ]


def mamba(fields: Fields, cache: Cache) -> list[Layer]:
    channels = fields.get("intermediate_size")
    channels = (
        fields.size("intermediate_size")
        if channels is not None
        else fields.size("expand") * fields.size("hidden_size")
    )
    states = mamba1(channels, fields.size("state_size"), fields.size("conv_kernel"), cache)
    return [Layer(states=states)] * fields.layers()


def mamba2_only(fields: Fields, cache: Cache) -> list[Layer]:
    heads, dim, groups = fields.size("num_heads"), fields.size("head_dim"), fields.size("n_groups")
    size, kernel = fields.size("state_size"), fields.size("conv_kernel")
    return [Layer(states=mamba2(fields, cache, heads, dim, groups, size, kernel))] * fields.layers()


def granite_hybrid(fields: Fields, cache: Cache) -> list[Layer]:
    """Granite 4: `layer_types` says "mamba" or "attention"."""
    kinds = fields.per_layer("layer_types", fields.layers())
    if kinds is None:
        raise fields.wrong("layer_types", "missing; a list of mamba and attention is expected")
    attention, recurrent = Layer(plain_attention(fields, cache)), Layer(states=_mamba_d(fields, cache))
    of = {
        "attention": attention,
        "full_attention": attention,
        "mamba": recurrent,
        "linear_attention": recurrent,
    }
    return _pick(fields, "layer_types", kinds, of)


def bamba(fields: Fields, cache: Cache) -> list[Layer]:
    layers = fields.layers()
    with_attention = fields.indices("attn_layer_indices", layers)
    attention, recurrent = Layer(plain_attention(fields, cache)), Layer(states=_mamba_d(fields, cache))
    return [attention if index in with_attention else recurrent for index in range(layers)]


def falcon_h1(fields: Fields, cache: Cache) -> list[Layer]:
    """Attention and Mamba 2 side by side in each layer."""
    return [Layer(plain_attention(fields, cache), _mamba_d(fields, cache))] * fields.layers()


def nemotron_h(fields: Fields, cache: Cache) -> list[Layer]:
    """A letter or a word for each layer: Mamba 2, attention, or an MLP that keeps nothing."""
    heads, dim = fields.size("mamba_num_heads"), fields.size("mamba_head_dim")
    groups, size, kernel = fields.size("n_groups"), fields.size("ssm_state_size"), fields.size("conv_kernel")
    recurrent = Layer(states=mamba2(fields, cache, heads, dim, groups, size, kernel))
    attention = Layer(plain_attention(fields, cache))
    letters = {"M": recurrent, "*": attention, "-": Layer(), "E": Layer()}
    words = {"mamba": recurrent, "attention": attention, "mlp": Layer(), "moe": Layer()}
    layers = fields.layers()
    kinds = fields.per_layer("layers_block_type", layers)
    if kinds is not None:
        return _pick(fields, "layers_block_type", kinds, words)
    pattern = fields.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or len(pattern) != layers:
        raise fields.wrong(
            "hybrid_override_pattern", f"{pattern!r} is not a word of {layers} letters, one per layer"
        )
    return _pick(fields, "hybrid_override_pattern", list(pattern), letters)


def lfm2(fields: Fields, cache: Cache) -> list[Layer]:
    """Short convolutions, and attention in the layers of `layer_types` or `full_attn_idxs`."""
    layers = fields.layers()
    kinds = fields.per_layer("layer_types", layers)
    if kinds is None:
        with_attention = fields.indices("full_attn_idxs", layers)
        kinds = ["full_attention" if index in with_attention else "conv" for index in range(layers)]
    channels = fields.size("conv_dim", "hidden_size")
    states = _states(State(channels, fields.size("conv_L_cache") - 1, cache.element_bytes))
    of = {"full_attention": Layer(plain_attention(fields, cache)), "conv": Layer(states=states)}
    return _pick(fields, "layer_types", kinds, of)


def kimi_linear(fields: Fields, cache: Cache) -> list[Layer]:
    """Kimi delta attention with a recurrent state in float32, and MLA in the other layers."""
    linear = fields.nested("linear_attn_config")
    heads, dim = linear.size("num_heads"), linear.size("head_dim")
    kernel = linear.size("short_conv_kernel_size")
    states = _states(State(3 * heads * dim, kernel - 1, cache.element_bytes), State(heads, dim * dim, 4))
    layers = fields.layers()
    delta, attention = linear.indices("kda_layers", layers, first=1), Layer(mla_attention(fields, cache))
    return [Layer(states=states) if index in delta else attention for index in range(layers)]


def _mamba_d(fields: Fields, cache: Cache) -> tuple[State, ...]:
    """Mamba 2 as Bamba, Falcon H1 and Granite 4 name its fields."""
    heads, size = fields.size("mamba_n_heads"), fields.size("mamba_d_state")
    channels = fields.size_or(0, "mamba_d_ssm") or fields.size("mamba_expand") * fields.size("hidden_size")
    dim = fields.get("mamba_d_head")
    dim = channels // heads if dim in (None, "auto") else fields.size("mamba_d_head")
    groups, kernel = fields.size("mamba_n_groups"), fields.size("mamba_d_conv")
    return mamba2(fields, cache, heads, dim, groups, size, kernel, channels)


def _ssm_bytes(fields: Fields, cache: Cache) -> int:
    given = fields.get("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    if given is None:
        return cache.element_bytes
    if given not in _STATE_BYTES:
        raise fields.wrong(
            "mamba_ssm_dtype", f"{given!r} is not known; {', '.join(_STATE_BYTES)} is expected"
        )
    return _STATE_BYTES[given]


def _states(*states: State) -> tuple[State, ...]:
    """Without empty ones: a convolution over one value keeps no history."""
    return tuple(state for state in states if state.values)


def _pick(fields: Fields, name: str, kinds: Sequence[str], of: dict[str, Layer]) -> list[Layer]:
    for kind in kinds:
        if not isinstance(kind, str) or kind not in of:
            raise fields.wrong(name, f"{kind!r} is not known; {', '.join(of)} is expected")
    return [of[kind] for kind in kinds]
