"""The attention layers of each family, from the fields of its config.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvroute.policies.costs.config_fields import Fields
from kvroute.policies.costs.geometry import KV_DTYPES, Attention, KvDtype, Layer

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


@dataclass(frozen=True, slots=True)
class Cache:
    """How elements are kept: K and V as `kv`; states in the model's own type, `element_bytes` each."""

    kv: KvDtype
    element_bytes: int


Builder = Callable[[Fields, Cache], Sequence[Layer]]
Kinds = Callable[[Fields, int], Sequence[str]]


def query_heads(fields: Fields) -> int:
    return fields.size("num_attention_heads", "n_head", "n_heads")


def head_dim(fields: Fields) -> int:
    """Explicit, or hidden size / attention heads."""
    names = ("head_dim", "attention_head_dim", "kv_channels")
    if fields.get(*names) is not None:
        return fields.size(*names)
    hidden, heads = fields.size("hidden_size", "n_embd", "d_model"), query_heads(fields)
    if hidden % heads:
        raise fields.wrong(
            "head_dim",
            f"missing, and hidden_size {hidden} is no multiple of {heads} heads; a number is expected",
        )
    return hidden // heads


def kv_heads(fields: Fields, *names: str) -> int:
    """Hkv: as many as attention heads (MHA) unless the config says fewer (GQA, MQA)."""
    heads = query_heads(fields)
    names = names or ("num_key_value_heads", "num_kv_heads", "n_head_kv")
    kept = fields.size_or(heads, *names)
    if kept > heads:
        raise fields.wrong(
            names[0], f"{kept} is more than the {heads} attention heads; at most as many are expected"
        )
    return kept


def plain_attention(fields: Fields, cache: Cache, window_tokens: int | None = None) -> Attention:
    dim = head_dim(fields)
    return Attention(kv_heads(fields), dim, dim, cache.kv, window_tokens)


def by_kinds(kinds: Kinds) -> Builder:
    """Equal attention in all layers; `kinds` says which of them keep a window only."""

    def build(fields: Fields, cache: Cache) -> list[Layer]:
        layers = fields.layers()
        kind_of = layer_kinds(fields, layers, kinds)
        attention = {
            kind: Layer(plain_attention(fields, cache, window_of(fields, kind)))
            for kind in dict.fromkeys(kind_of)
        }
        return [attention[kind] for kind in kind_of]

    return build


def layer_kinds(fields: Fields, layers: int, default: Kinds) -> Sequence[str]:
    """`layer_types` of the config, or what the family does without it."""
    given = fields.per_layer("layer_types", layers)
    if given is None:
        return default(fields, layers)
    for kind in given:
        if kind not in (FULL, SLIDING, CHUNKED):
            raise fields.wrong(
                "layer_types", f"{kind!r} is not known; {FULL}, {SLIDING} or {CHUNKED} is expected"
            )
    return given


def window_of(fields: Fields, kind: str) -> int | None:
    if kind == SLIDING:
        return fields.size("sliding_window", "sliding_window_size")
    if kind == CHUNKED and fields.get("attention_chunk_size") is not None:
        return fields.size("attention_chunk_size")
    return None


def full(_: Fields, layers: int) -> list[str]:
    return [FULL] * layers


def windowed(fields: Fields, layers: int) -> list[str]:
    """All layers have the window, if there is one."""
    return [FULL if fields.get("sliding_window") is None else SLIDING] * layers


def qwen_kinds(fields: Fields, layers: int) -> list[str]:
    """Windows only where asked for, and not in the first `max_window_layers`."""
    if not fields.flag("use_sliding_window"):
        return [FULL] * layers
    first = fields.size("max_window_layers", least=0)
    return [SLIDING if index >= first else FULL for index in range(layers)]


def every(period: int) -> Kinds:
    """Each `period`-th layer is full, the others have a window.

    `sliding_window_pattern` overrides the period. It may be a word as EXAONE 4 writes it: "LLLG"
    is three local layers and a global one.
    """

    def kinds(fields: Fields, layers: int) -> list[str]:
        if fields.get("sliding_window") is None:
            return [FULL] * layers
        word = fields.get("sliding_window_pattern")
        if isinstance(word, str) and word and set(word) <= {"L", "G"}:
            return [FULL if word[index % len(word)] == "G" else SLIDING for index in range(layers)]
        step = fields.size_or(period, "sliding_window_pattern", "_sliding_window_pattern")
        return [SLIDING if (index + 1) % step else FULL for index in range(layers)]

    return kinds


def llama4_kinds(fields: Fields, layers: int) -> list[str]:
    """Layers with rotary positions see only their chunk; by default three of four."""
    if fields.get("no_rope_layers"):
        rope = fields.per_layer("no_rope_layers", layers) or ()
        return [CHUNKED if uses_rope else FULL for uses_rope in rope]
    step = fields.size_or(4, "no_rope_layer_interval")
    return [CHUNKED if (index + 1) % step else FULL for index in range(layers)]


def shared_tail(build: Builder) -> Builder:
    """The last `num_kv_shared_layers` read K and V of earlier layers and keep none (Gemma 3n)."""

    def shared(fields: Fields, cache: Cache) -> list[Layer]:
        layers = list(build(fields, cache))
        tail = fields.size("num_kv_shared_layers", least=0) if fields.get("num_kv_shared_layers") else 0
        if tail >= len(layers):
            raise fields.wrong(
                "num_kv_shared_layers", f"{tail} of {len(layers)} layers leaves none; fewer are expected"
            )
        return layers[: len(layers) - tail] + [Layer()] * tail

    return shared


def gemma4(fields: Fields, cache: Cache) -> list[Layer]:
    """Its full layers have wider heads, and fewer where K and V are one projection (both are cached)."""
    layers = fields.layers()
    local = plain_attention(fields, cache, window_of(fields, SLIDING))
    dim = fields.size("global_head_dim")
    heads = local.kv_heads
    if fields.flag("attention_k_eq_v") and fields.get("num_global_key_value_heads") is not None:
        heads = kv_heads(fields, "num_global_key_value_heads")
    of = {SLIDING: Layer(local), FULL: Layer(Attention(heads, dim, dim, cache.kv))}
    kinds = list(layer_kinds(fields, layers, every(6)))
    return [of[kind] for kind in [*kinds[:-1], FULL]]


def gpt_bigcode(fields: Fields, cache: Cache) -> list[Layer]:
    dim = head_dim(fields)
    heads = 1 if fields.flag("multi_query") else query_heads(fields)
    return [Layer(Attention(heads, dim, dim, cache.kv))] * fields.layers()


def falcon(fields: Fields, cache: Cache) -> list[Layer]:
    """MQA in the first generation, GQA in the "new decoder architecture"."""
    dim = head_dim(fields)
    multi_query = fields.flag("multi_query") and not fields.flag("new_decoder_architecture")
    heads = 1 if multi_query else kv_heads(fields, "num_kv_heads", "n_head_kv")
    return [Layer(Attention(heads, dim, dim, cache.kv))] * fields.layers()


def chatglm(fields: Fields, cache: Cache) -> list[Layer]:
    dim = head_dim(fields)
    heads = (
        kv_heads(fields, "multi_query_group_num")
        if fields.flag("multi_query_attention")
        else query_heads(fields)
    )
    return [Layer(Attention(heads, dim, dim, cache.kv))] * fields.layers()


def dbrx(fields: Fields, cache: Cache) -> list[Layer]:
    dim, heads = head_dim(fields), fields.nested("attn_config").size("kv_n_heads")
    return [Layer(Attention(heads, dim, dim, cache.kv))] * fields.layers()


def mimo_v2(fields: Fields, cache: Cache) -> list[Layer]:
    """K and V of unequal width; window layers have heads of their own number and width."""
    layers = fields.layers()
    whole = Attention(kv_heads(fields), head_dim(fields), fields.size("v_head_dim"), cache.kv)
    local = Attention(
        fields.size_or(whole.kv_heads, "swa_num_key_value_heads"),
        fields.size_or(whole.k_dim, "swa_head_dim"),
        fields.size_or(whole.v_dim, "swa_v_head_dim"),
        cache.kv,
        window_of(fields, SLIDING),
    )
    pattern = fields.per_layer("hybrid_layer_pattern", layers)
    if pattern is None or not set(map(str, pattern)) <= {"0", "1"}:
        raise fields.wrong("hybrid_layer_pattern", f"{pattern!r} is no list of 0 (full) and 1 (window)")
    return [Layer(local if is_local else whole) for is_local in pattern]


def mla_attention(fields: Fields, cache: Cache) -> Attention:
    """The latent and the rope key, once per token and layer, in one row that every TP rank keeps whole."""
    return Attention(1, fields.size("kv_lora_rank") + fields.size("qk_rope_head_dim", least=0), 0, cache.kv)


def mla(fields: Fields, cache: Cache) -> list[Layer]:
    """DeepSeek V2 and V3. The layers of multi-token prediction are not counted: few engines load them."""
    return [Layer(mla_attention(fields, cache))] * fields.layers()


def sparse_mla(fields: Fields, cache: Cache) -> list[Layer]:
    """DeepSeek V3.2: beside the latent, the indexer's key in fp8 with a float32 scale for each 128 values.

    With fp8 the row is 656 bytes in vLLM 0.32 (fp8_ds_mla): the latent in fp8, a float32 scale for each 128
    of it, and the rope key in 16 bits.
    """
    latent, rope = fields.size("kv_lora_rank"), fields.size("qk_rope_head_dim", least=0)
    index = fields.size("index_head_dim")
    index_bytes = index + index // 128 * 4
    if cache.kv == KV_DTYPES["fp8"]:
        row = Attention(1, latent, 0, cache.kv, extra_bytes=latent // 128 * 4 + 2 * rope + index_bytes)
    else:
        row = Attention(1, latent + rope, 0, cache.kv, extra_bytes=index_bytes)
    return [Layer(row)] * fields.layers()
