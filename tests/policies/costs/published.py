"""The fields that size the cache, of published config.json files. The rest does not matter here."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

_NEMOTRON_H_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"


def _config(model_type: str, layers: int, hidden: int, heads: int, **rest: Any) -> Config:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "torch_dtype": "bfloat16",
        **rest,
    }


def _gqa(model_type: str, layers: int, hidden: int, heads: int, kv_heads: int, **rest: Any) -> Config:
    return _config(model_type, layers, hidden, heads, num_key_value_heads=kv_heads, **rest)


def _mla(model_type: str, layers: int, hidden: int, heads: int, **rest: Any) -> Config:
    dims = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    return _gqa(model_type, layers, hidden, heads, heads, **dims, **rest)


def _mamba_d(heads: int, dim: int, size: int) -> Config:
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": dim,
        "mamba_d_state": size,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    }


LLAMA_2_7B = _config("llama", 32, 4096, 32, num_key_value_heads=32)
LLAMA_3_8B = _gqa("llama", 32, 4096, 32, 8)
LLAMA_3_70B = _gqa("llama", 80, 8192, 64, 8)
QWEN_2_5_7B = _gqa(
    "qwen2", 28, 3584, 28, 4, sliding_window=131072, use_sliding_window=False, max_window_layers=28
)
QWEN_3_32B = _gqa("qwen3", 64, 5120, 64, 8, head_dim=128, sliding_window=None, use_sliding_window=False)
MISTRAL_7B_V0_1 = _gqa("mistral", 32, 4096, 32, 8, sliding_window=4096)
MISTRAL_7B_V0_3 = _gqa("mistral", 32, 4096, 32, 8, sliding_window=None)
MIXTRAL_8X7B = _gqa("mixtral", 32, 4096, 32, 8, sliding_window=None)
GEMMA_2B = _gqa("gemma", 18, 2048, 8, 1, head_dim=256)
GEMMA_2_9B = _gqa("gemma2", 42, 3584, 16, 8, head_dim=256, sliding_window=4096)
GEMMA_3_4B = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
    },
}
GEMMA_3_27B = _gqa("gemma3_text", 62, 5376, 32, 16, head_dim=128, sliding_window=1024)
GEMMA_3N_E4B = _gqa(
    "gemma3n_text",
    35,
    2048,
    8,
    2,
    head_dim=256,
    sliding_window=512,
    num_kv_shared_layers=15,
    layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7,
)
DEEPSEEK_V2 = _mla("deepseek_v2", 60, 5120, 128)
DEEPSEEK_V2_LITE = _mla("deepseek_v2", 27, 2048, 16)
DEEPSEEK_V3 = _mla("deepseek_v3", 61, 7168, 128, num_nextn_predict_layers=1)
DEEPSEEK_V3_2 = _mla("deepseek_v32", 61, 7168, 128, index_head_dim=128, index_topk=2048)
GPT_OSS_120B = _gqa(
    "gpt_oss",
    36,
    2880,
    64,
    8,
    head_dim=64,
    sliding_window=128,
    layer_types=["sliding_attention", "full_attention"] * 18,
)
JAMBA_V0_1 = _gqa(
    "jamba",
    32,
    4096,
    32,
    8,
    attn_layer_period=8,
    attn_layer_offset=4,
    mamba_d_state=16,
    mamba_d_conv=4,
    mamba_expand=2,
)
_DELTA_NET = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "full_attention_interval": 4,
}
QWEN_3_NEXT_80B = _gqa("qwen3_next", 48, 2048, 16, 2, head_dim=256, **_DELTA_NET)
QWEN_3_5_9B = {
    "model_type": "qwen3_5",
    "text_config": _gqa(
        "qwen3_5_text",
        32,
        4096,
        16,
        4,
        head_dim=256,
        mamba_ssm_dtype="float32",
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 8,
        **_DELTA_NET,
    ),
}
PHI_3_MINI_4K = _gqa("phi3", 32, 3072, 32, 32, sliding_window=2047)
PHI_3_MEDIUM_128K = _gqa("phi3", 40, 5120, 40, 10, sliding_window=131072)
LLAMA_4_SCOUT = {
    "model_type": "llama4",
    "torch_dtype": "bfloat16",
    "text_config": _gqa(
        "llama4_text", 48, 5120, 40, 8, head_dim=128, attention_chunk_size=8192, no_rope_layers=[]
    ),
}
COMMAND_R7B = _gqa("cohere2", 32, 4096, 32, 8, sliding_window=4096, sliding_window_pattern=4)
MIMO_V2_FLASH = _gqa(
    "mimo_v2_flash",
    48,
    4096,
    64,
    4,
    head_dim=192,
    v_head_dim=128,
    swa_num_key_value_heads=8,
    swa_head_dim=192,
    swa_v_head_dim=128,
    sliding_window=128,
    hybrid_layer_pattern=[0 if layer == 0 or (layer + 1) % 6 == 0 else 1 for layer in range(48)],
)
NEMOTRON_H_8B = _gqa(
    "nemotron_h",
    52,
    4096,
    32,
    8,
    attention_head_dim=128,
    hybrid_override_pattern=_NEMOTRON_H_8B,
    mamba_num_heads=128,
    mamba_head_dim=64,
    n_groups=8,
    ssm_state_size=128,
    conv_kernel=4,
)
KIMI_LINEAR_48B = _mla(
    "kimi_linear",
    27,
    2304,
    32,
    linear_attn_config={
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [n for n in range(1, 27) if n % 4],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
)

GRANITE_4_H_SMALL = _gqa(
    "granitemoehybrid",
    40,
    4096,
    32,
    8,
    layer_types=["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
    **_mamba_d(heads=128, dim=64, size=128),
)
BAMBA_9B = _gqa("bamba", 32, 4096, 32, 8, attn_layer_indices=[9, 18, 27], **_mamba_d(128, 64, 128))
FALCON_H1_7B = _gqa("falcon_h1", 44, 3072, 12, 2, head_dim=128, mamba_d_ssm=3072, **_mamba_d(24, 128, 256))
MAMBA_CODESTRAL_7B = {
    "model_type": "mamba2",
    "num_hidden_layers": 64,
    "hidden_size": 4096,
    "num_heads": 128,
    "head_dim": 64,
    "n_groups": 8,
    "state_size": 128,
    "conv_kernel": 4,
}
FALCON_MAMBA_7B = {
    "model_type": "falcon_mamba",
    "num_hidden_layers": 64,
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "state_size": 16,
    "conv_kernel": 4,
}
LFM2_1_2B = _gqa("lfm2", 16, 2048, 32, 8, conv_L_cache=3, full_attn_idxs=[2, 5, 8, 10, 12, 14])
