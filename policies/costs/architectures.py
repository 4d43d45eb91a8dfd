"""From a Hugging Face config.json (a dict) to what its model keeps. No download, no torch, no guess.

A family that is not listed is an error: its cache could be anything. `assume_standard` takes the fields of a
plain transformer at their word instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvroute.policies.costs import attentions as att
from kvroute.policies.costs import recurrent as rec
from kvroute.policies.costs.config_fields import Fields
from kvroute.policies.costs.geometry import KV_DTYPES, KvDtype, KvGeometry


@dataclass(frozen=True, slots=True)
class Family:
    build: att.Builder
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Of transformers' own class, for fields that published files leave out."""


_PLAIN = Family(att.by_kinds(att.full))
_WINDOWED = Family(att.by_kinds(att.windowed))
_QWEN = Family(att.by_kinds(att.qwen_kinds))
_GEMMA3 = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}
_PLAIN_TYPES = """
    apertus arcee baichuan bloom cohere deepseek ernie4_5 ernie4_5_moe exaone gemma glm glm4 glm4_moe gpt2
    gpt_neox gptj granite granitemoe granitemoeshared hunyuan_v1_dense hunyuan_v1_moe internlm2 internlm3
    llama minicpm minimax_m2 ministral3 nemotron olmo olmo2 olmoe opt orion persimmon phi qwen seed_oss
    stablelm xverse
""".split()

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(_PLAIN_TYPES, _PLAIN),
    **dict.fromkeys(("mixtral", "phi3", "phimoe", "starcoder2"), _WINDOWED),
    "mistral": Family(_WINDOWED.build, {"sliding_window": 4096}),
    **dict.fromkeys("qwen2 qwen2_moe qwen2_vl qwen2_5_vl qwen3 qwen3_moe smollm3".split(), _QWEN),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"), _QWEN),
    "gemma2": Family(att.by_kinds(att.every(2))),
    "gpt_oss": Family(att.by_kinds(att.every(2))),
    **dict.fromkeys(("cohere2", "olmo3", "exaone4"), Family(att.by_kinds(att.every(4)))),
    "gemma3_text": Family(att.by_kinds(att.every(6)), _GEMMA3),
    "gemma3n_text": Family(att.shared_tail(att.by_kinds(att.every(5)))),
    **dict.fromkeys(
        ("gemma4_text", "gemma4_unified_text"), Family(att.shared_tail(att.gemma4), {"global_head_dim": 512})
    ),
    "llama4_text": Family(att.by_kinds(att.llama4_kinds), {"attention_chunk_size": 8192}),
    "gpt_bigcode": Family(att.gpt_bigcode, {"multi_query": True}),
    "falcon": Family(att.falcon, {"multi_query": True}),
    "chatglm": Family(att.chatglm),
    "dbrx": Family(att.dbrx),
    **dict.fromkeys(("mimo_v2", "mimo_v2_flash"), Family(att.mimo_v2)),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"), Family(att.mla)),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), Family(att.sparse_mla)),
    "jamba": Family(rec.jamba),
    **dict.fromkeys(("mamba", "falcon_mamba"), Family(rec.mamba)),
    "mamba2": Family(rec.mamba2_only),
    "bamba": Family(rec.bamba),
    "granitemoehybrid": Family(rec.granite_hybrid),
    "falcon_h1": Family(rec.falcon_h1),
    "nemotron_h": Family(rec.nemotron_h, {"mamba_ssm_cache_dtype": "float32"}),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), Family(rec.qwen_hybrid)),
    **dict.fromkeys(("lfm2", "lfm2_moe"), Family(rec.lfm2)),
    "kimi_linear": Family(rec.kimi_linear),
}

_NO_CACHE = (
    "bert roberta xlm-roberta camembert distilbert electra deberta-v2 modernbert mpnet nomic_bert vit clip"
)
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
_MAX_NESTED = 4
_RECURRENT_ONLY = ("mamba", "falcon_mamba", "mamba2")
_MODEL_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
_KV_ALIASES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}


def read_config(
    config: Mapping[str, Any], *, kv_dtype: str = "auto", assume_standard: bool = False
) -> KvGeometry:
    """What the model of this config.json keeps, with K and V in `kv_dtype` (see `cache_dtype`).

    ValueError names the field and what is expected of it, or the architecture and the known ones.
    """
    text = _language_part(config)
    if config.get("is_encoder_decoder") or text.get("is_encoder_decoder"):
        raise ValueError("is_encoder_decoder: true; a decoder-only model is expected (no cross attention)")
    kind = _model_type(text) or _model_type(config)
    family = FAMILIES.get(kind) or _unlisted(kind, config, assume_standard)
    fields = Fields(text, defaults=family.defaults)
    kv, _ = cache_dtype(config, kv_dtype)
    heads = 0 if kind in _RECURRENT_ONLY else att.query_heads(fields)
    return KvGeometry(kind, heads, tuple(family.build(fields, att.Cache(kv, element_bytes=2))))


def cache_dtype(config: Mapping[str, Any], wanted: str = "auto") -> tuple[KvDtype, str]:
    """The type of K and V, and why: the one `wanted`, or what an engine takes for "auto".

    That is fp8 where the checkpoint says so, else the model's own type. Weights in float32, or of a type that
    is not said, are served in 16 bits by vLLM and SGLang, and so is their cache.
    """
    if wanted != "auto":
        name = _KV_ALIASES.get(wanted, wanted)
        if name not in KV_DTYPES:
            raise ValueError(f"kv_dtype: {wanted!r} is not known; auto, {', '.join(KV_DTYPES)} is expected")
        return KV_DTYPES[name], "as asked"
    text = _language_part(config)
    if _has_fp8_cache(config.get("quantization_config") or text.get("quantization_config")):
        return KV_DTYPES["fp8"], "the checkpoint's quantization_config"
    names = ("torch_dtype", "dtype")
    given = next((c[name] for c in (text, config) for name in names if c.get(name)), None)
    if given is None:
        return KV_DTYPES["bf16"], "assumed: the config has no torch_dtype"
    name = _MODEL_DTYPES.get(str(given).removeprefix("torch."), "")
    if not name:
        raise ValueError(
            f"torch_dtype: {given!r} is not known; {', '.join(_MODEL_DTYPES)} is expected, or a kv_dtype"
        )
    if name == "fp32":
        return KV_DTYPES["bf16"], "assumed: engines serve float32 weights in 16 bits"
    return KV_DTYPES[name], "the model's torch_dtype"


def _language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The nested config of the decoder, where there is one: vision and audio towers keep no cache."""
    part = config
    for _ in range(_MAX_NESTED):
        nested = next((part[name] for name in _NESTED if isinstance(part.get(name), Mapping)), None)
        if not nested:
            break
        part = nested
    return part


def _model_type(config: Mapping[str, Any]) -> str:
    """`model_type`, or the family of that name among `architectures`, or "" if neither says anything."""
    given = config.get("model_type")
    if isinstance(given, str) and given:
        return given
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        return ""
    stem = str(names[0]).lower().removesuffix("forcausallm").removesuffix("forconditionalgeneration")
    known = {name.replace("_", ""): name for name in FAMILIES}
    return known.get(stem, str(names[0]))


def _unlisted(kind: str, config: Mapping[str, Any], assume_standard: bool) -> Family:
    if kind in _NO_CACHE.split():
        raise ValueError(f"model_type: {kind!r} is an encoder and keeps no KV cache; a decoder is expected")
    if assume_standard:
        return _WINDOWED
    says = f"model_type {kind!r}" if kind else "no model_type"
    raise ValueError(
        f"model_type: unknown architecture ({says}, architectures {config.get('architectures')!r}); "
        f"known are {', '.join(sorted(FAMILIES))}; --assume-standard takes it as plain attention"
    )


def _has_fp8_cache(quantization: Any) -> bool:
    """compressed-tensors and ModelOpt say so in their quantization_config; vLLM's "auto" follows them."""
    if not isinstance(quantization, Mapping):
        return False
    scheme = quantization.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return scheme.get("num_bits") == 8
    inner = quantization.get("quantization")
    algo = quantization.get("kv_cache_quant_algo") or (inner if isinstance(inner, Mapping) else {}).get(
        "kv_cache_quant_algo"
    )
    return str(algo).upper() == "FP8"
