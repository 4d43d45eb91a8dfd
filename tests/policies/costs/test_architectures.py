"""Published models against sizes that others computed, and what a wrong config.json says.

"Engine" is vLLM 0.32: for each layer that transformers 5.19 makes of the config, `page_size_bytes` of
FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec or MLAAttentionSpec at a block of one token,
and the shapes and types of MambaStateShapeCalculator and MambaStateDtypeCalculator, summed per kind.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvroute.policies.costs.architectures import FAMILIES, cache_dtype, read_config
from tests.policies.costs import published as p
from tests.policies.costs.published import Config

ENGINE = {
    # model: (bytes per token without a window, those with one, state bytes per sequence), for TP 1, 2 and 8
    "LLAMA_2_7B": ((524288, 0, 0), (262144, 0, 0), (65536, 0, 0)),
    "LLAMA_3_8B": ((131072, 0, 0), (65536, 0, 0), (16384, 0, 0)),
    "LLAMA_3_70B": ((327680, 0, 0), (163840, 0, 0), (40960, 0, 0)),
    "QWEN_2_5_7B": ((57344, 0, 0), (28672, 0, 0), None),
    "QWEN_3_32B": ((262144, 0, 0), (131072, 0, 0), (32768, 0, 0)),
    "MISTRAL_7B_V0_1": ((0, 131072, 0), (0, 65536, 0), (0, 16384, 0)),
    "MISTRAL_7B_V0_3": ((131072, 0, 0), (65536, 0, 0), (16384, 0, 0)),
    "MIXTRAL_8X7B": ((131072, 0, 0), (65536, 0, 0), (16384, 0, 0)),
    "GEMMA_2B": ((18432, 0, 0), (18432, 0, 0), (18432, 0, 0)),
    "GEMMA_2_9B": ((172032, 172032, 0), (86016, 86016, 0), (21504, 21504, 0)),
    "GEMMA_3_4B": ((20480, 118784, 0), (10240, 59392, 0), (5120, 29696, 0)),
    "GEMMA_3_27B": ((81920, 425984, 0), (40960, 212992, 0), (10240, 53248, 0)),
    "GEMMA_3N_E4B": ((8192, 32768, 0), (4096, 16384, 0), (4096, 16384, 0)),
    "DEEPSEEK_V2": ((69120, 0, 0), (69120, 0, 0), (69120, 0, 0)),
    "DEEPSEEK_V2_LITE": ((31104, 0, 0), (31104, 0, 0), (31104, 0, 0)),
    "DEEPSEEK_V3": ((70272, 0, 0), (70272, 0, 0), (70272, 0, 0)),
    "GPT_OSS_120B": ((36864, 36864, 0), (18432, 18432, 0), (4608, 4608, 0)),
    "JAMBA_V0_1": ((16384, 0, 8716288), (8192, 0, 4358144), (2048, 0, 1089536)),
    "QWEN_3_NEXT_80B": ((24576, 0, 39518208), (12288, 0, 19759104), (12288, 0, 4939776)),
    "QWEN_3_5_9B": ((32768, 0, 51511296), (16384, 0, 25755648), (8192, 0, 6438912)),
    "PHI_3_MINI_4K": ((0, 393216, 0), (0, 196608, 0), (0, 49152, 0)),
    "PHI_3_MEDIUM_128K": ((0, 204800, 0), (0, 102400, 0), None),
    "LLAMA_4_SCOUT": ((49152, 147456, 0), (24576, 73728, 0), (6144, 18432, 0)),
    "COMMAND_R7B": ((32768, 98304, 0), (16384, 49152, 0), (4096, 12288, 0)),
    "MIMO_V2_FLASH": ((23040, 199680, 0), (11520, 99840, 0), (5760, 24960, 0)),
    "NEMOTRON_H_8B": ((16384, 0, 102137856), (8192, 0, 51068928), (2048, 0, 12767232)),
    "KIMI_LINEAR_48B": ((8064, 0, 43417600), (8064, 0, 21708800), (8064, 0, 5427200)),
    "GRANITE_4_H_SMALL": ((16384, 0, 77322240), (8192, 0, 38688768), (2048, 0, 9713664)),
    "BAMBA_9B": ((12288, 0, 62287360), (6144, 0, 31165952), (1536, 0, 7824896)),
    "FALCON_H1_7B": ((45056, 0, 70152192), (22528, 0, 35143680), None),
    "MAMBA_CODESTRAL_7B": ((0, 0, 138149888), (0, 0, 69074944), (0, 0, 17268736)),
    "FALCON_MAMBA_7B": ((0, 0, 19922944), (0, 0, 9961472), (0, 0, 2490368)),
    "LFM2_1_2B": ((12288, 0, 81920), (6144, 0, 40960), (1536, 0, 10240)),
}
"""None where the engine refuses the split: 8 divides neither 28 nor 12 heads, nor 10 KV heads."""


@pytest.mark.parametrize("name", ENGINE)
def test_what_the_engine_keeps(name: str) -> None:
    kept = read_config(getattr(p, name))
    for tp, engine in zip((1, 2, 8), ENGINE[name], strict=True):
        if engine is None:
            with pytest.raises(ValueError, match="tp: 8 "):
                kept.rank(tp)
            continue
        rank = kept.rank(tp)
        window_bytes = rank.bytes_per_token - rank.growth_bytes_per_token
        assert (rank.growth_bytes_per_token, window_bytes, rank.state_bytes) == engine


@pytest.mark.parametrize(
    ("config", "elements"),
    [
        # Llama 2 paper and the PagedAttention paper's OPT-13B figure (800 KB a token) are the MHA formula.
        (p.LLAMA_2_7B, 2 * 32 * 32 * 128),
        # DeepSeek-V2 paper, table 1: (d_c + d_h^R) l with d_c = 512, d_h^R = 64; for V3 l = 61.
        (p.DEEPSEEK_V2, (512 + 64) * 60),
        (p.DEEPSEEK_V3, (512 + 64) * 61),
        # Gemma 3 model card and report: 5 local layers for each global one, of 62.
        (p.GEMMA_3_27B, 2 * 62 * 16 * 128),
    ],
)
def test_the_papers_formulas(config: Config, elements: int) -> None:
    assert read_config(config).bytes_per_token == 2 * elements


def test_opt_13b_is_the_800_kb_of_the_paged_attention_paper() -> None:
    """Kwon et al. 2023, section 3: 2 x 5120 x 40 x 2 bytes."""
    config = {"model_type": "opt", "num_hidden_layers": 40, "hidden_size": 5120, "num_attention_heads": 40}
    assert read_config({**config, "torch_dtype": "float16"}).bytes_per_token == 800 * 1024


def test_the_llama_3_70b_of_10_gib_at_32k() -> None:
    """80 x 8 x 128 x 2 x 2 bytes = 320 KiB a token: 10 GiB for 32768 tokens."""
    assert read_config(p.LLAMA_3_70B).sequence_bytes(32768) == 10 * 2**30


def test_jamba_keeps_4_gb_at_256k() -> None:
    """Jamba paper, table 1: 4 GB at 256K tokens in 16 bits, where Mistral 7B has 32 GB."""
    jamba, mistral = read_config(p.JAMBA_V0_1), read_config(p.MISTRAL_7B_V0_3)
    assert jamba.sequence_bytes(2**18) - jamba.state_bytes == 4 * 2**30
    assert mistral.sequence_bytes(2**18) == 32 * 2**30


def test_mla_in_fp8_is_a_byte_an_element_and_sparse_mla_656_bytes() -> None:
    """vLLM 0.32, flashmla_sparse.py: 656 bytes a token and layer; the indexer's key is 128 + 4 more."""
    assert read_config(p.DEEPSEEK_V3, kv_dtype="fp8").bytes_per_token == 576 * 61
    assert read_config(p.DEEPSEEK_V3_2, kv_dtype="fp8").bytes_per_token == (656 + 132) * 61
    assert read_config(p.DEEPSEEK_V3_2).bytes_per_token == (1152 + 132) * 61
    assert read_config(p.DEEPSEEK_V3_2).rank(8).bytes_per_token == (1152 + 132) * 61


def test_sequences_longer_than_a_window() -> None:
    gemma, oss = read_config(p.GEMMA_3_27B), read_config(p.GPT_OSS_120B)
    assert gemma.sequence_bytes(32768) == 32768 * 81920 + 1024 * 425984
    assert oss.sequence_bytes(131072) == 131072 * 36864 + 128 * 36864
    assert read_config(p.MISTRAL_7B_V0_1).sequence_bytes(10**6) == 4096 * 131072


def test_shared_layers_keep_nothing_and_a_config_without_them_keeps_all() -> None:
    config = {k: v for k, v in p.GEMMA_3N_E4B.items() if k != "num_kv_shared_layers"}
    assert read_config(config).bytes_per_token == 35 * 2 * 2 * 256 * 2
    assert read_config(p.GEMMA_3N_E4B).bytes_per_token == 20 * 2 * 2 * 256 * 2


def test_llama_4_keeps_a_chunk_where_positions_are_rotary() -> None:
    text = p.LLAMA_4_SCOUT["text_config"]
    kept = read_config({**text, "no_rope_layers": [1] * 47 + [0]})
    assert kept.windows_tokens == (8192,)
    assert kept.growth_bytes_per_token == 4096
    assert read_config({**text, "attention_chunk_size": None}).windows_tokens == ()


def test_without_a_window_all_layers_of_a_pattern_are_full() -> None:
    assert read_config({**p.COMMAND_R7B, "sliding_window": None}).growth_bytes_per_token == 131072


def test_layers_of_nemotron_as_words() -> None:
    """The letters of the 8B model, spelled out as newer files do."""
    words = {"M": "mamba", "*": "attention", "-": "mlp"}
    kinds = [words[letter] for letter in p.NEMOTRON_H_8B["hybrid_override_pattern"]]
    assert read_config({**p.NEMOTRON_H_8B, "layers_block_type": kinds}) == read_config(p.NEMOTRON_H_8B)


def test_gemma_4_has_wider_and_fewer_heads_in_full_layers() -> None:
    """transformers 5.19, Gemma4TextConfig.per_layer_config: heads of 512, and their own number of them."""
    config = {
        "model_type": "gemma4_text",
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
    }
    full, local = 4 * 512 * 2 * 2, 8 * 256 * 2 * 2
    assert read_config(config).growth_bytes_per_token == 2 * full
    assert read_config(config).bytes_per_token == 2 * full + 10 * local
    separate = {**config, "attention_k_eq_v": False}
    assert read_config(separate).growth_bytes_per_token == 2 * 8 * 512 * 2 * 2
    assert read_config({**config, "num_kv_shared_layers": 6}).bytes_per_token == full + 5 * local


LLAMA = p.LLAMA_3_8B


@pytest.mark.parametrize(
    ("config", "per_token"),
    [
        ({**LLAMA, "head_dim": 64}, 65536),
        ({**LLAMA, "head_dim": None}, 131072),
        ({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}, 4 * 131072),
        ({**LLAMA, "model_type": None, "architectures": ["LlamaForCausalLM"]}, 131072),
        ({"text_config": LLAMA, "vision_config": {"hidden_size": 1}, "model_type": "llava"}, 131072),
        (
            {"model_type": "llama", "llm_config": {k: v for k, v in LLAMA.items() if k != "model_type"}},
            131072,
        ),
        ({"model_type": "qwen3_omni", "thinker_config": {"text_config": LLAMA}}, 131072),
        (
            {
                **LLAMA,
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 4096,
                "max_window_layers": 28,
            },
            131072,
        ),
        ({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12}, 2 * 12 * 768 * 2),
        (
            {"model_type": "falcon", "num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71},
            8192,
        ),
        (
            {
                "model_type": "gpt_bigcode",
                "n_layer": 40,
                "n_embd": 6144,
                "n_head": 48,
                "multi_query": True,
            },
            40 * 2 * 128 * 2,
        ),
        (
            {
                "model_type": "chatglm",
                "num_layers": 40,
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "kv_channels": 128,
                "multi_query_attention": True,
                "multi_query_group_num": 2,
            },
            40 * 2 * 2 * 128 * 2,
        ),
        (
            {
                "model_type": "dbrx",
                "n_layers": 40,
                "d_model": 6144,
                "n_heads": 48,
                "attn_config": {"kv_n_heads": 8},
            },
            40 * 2 * 8 * 128 * 2,
        ),
    ],
)
def test_the_ways_configs_are_written(config: Config, per_token: int) -> None:
    assert read_config(config).bytes_per_token == per_token


def test_windows_of_qwen_begin_where_it_says() -> None:
    config = {
        **LLAMA,
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }
    assert read_config(config).growth_bytes_per_token == 28 * 4096


def test_a_word_of_local_and_global_layers() -> None:
    config = {**LLAMA, "model_type": "exaone4", "sliding_window": 4096, "sliding_window_pattern": "LLLG"}
    assert read_config(config).growth_bytes_per_token == 8 * 4096


@pytest.mark.parametrize(
    ("extra", "wanted", "name", "why"),
    [
        ({}, "auto", "bf16", "the model's torch_dtype"),
        ({"torch_dtype": None, "dtype": "float16"}, "auto", "fp16", "the model's torch_dtype"),
        ({"torch_dtype": None}, "auto", "bf16", "assumed: the config has no torch_dtype"),
        ({"torch_dtype": "float32"}, "auto", "bf16", "assumed: engines serve float32"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "auto", "fp8", "quantization_config"),
        ({"quantization_config": {"kv_cache_quant_algo": "FP8"}}, "auto", "fp8", "quantization_config"),
        ({"quantization_config": {"quant_method": "fp8"}}, "auto", "bf16", "the model's torch_dtype"),
        ({"quantization_config": {"kv_cache_scheme": None}}, "auto", "bf16", "the model's torch_dtype"),
        ({}, "fp8_e4m3", "fp8", "as asked"),
        ({}, "fp32", "fp32", "as asked"),
    ],
)
def test_the_type_of_the_cache(extra: Config, wanted: str, name: str, why: str) -> None:
    dtype, reason = cache_dtype({**LLAMA, **extra}, wanted)
    assert dtype.name == name
    assert why in reason


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({**LLAMA, "model_type": "mystery"}, "unknown architecture (model_type 'mystery'"),
        ({k: v for k, v in LLAMA.items() if k != "model_type"}, "unknown architecture (no model_type"),
        ({"architectures": ["NewForCausalLM"]}, "unknown architecture (model_type 'NewForCausalLM'"),
        ({}, "unknown architecture"),
        ({"model_type": "bert"}, "is an encoder and keeps no KV cache"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "is_encoder_decoder: true"),
        ({**LLAMA, "num_hidden_layers": None}, "num_hidden_layers: missing"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers: 0 is not usable"),
        ({**LLAMA, "num_hidden_layers": -1}, "num_hidden_layers: -1 is not usable"),
        ({**LLAMA, "num_hidden_layers": "32"}, "num_hidden_layers: '32' is not usable"),
        ({**LLAMA, "num_hidden_layers": True}, "num_hidden_layers: True is not usable"),
        ({**LLAMA, "num_hidden_layers": 5000}, "num_hidden_layers: 5000 is too many"),
        ({**LLAMA, "num_key_value_heads": 0}, "num_key_value_heads: 0 is not usable"),
        ({**LLAMA, "num_key_value_heads": 64}, "num_key_value_heads: 64 is more than the 32 attention heads"),
        ({**LLAMA, "head_dim": -128}, "head_dim: -128 is not usable"),
        ({**LLAMA, "head_dim": 1e300}, "head_dim: 1e+300 is not usable"),
        ({**LLAMA, "head_dim": float("nan")}, "head_dim: nan is not usable"),
        ({**LLAMA, "hidden_size": 4095}, "head_dim: missing, and hidden_size 4095 is no multiple"),
        ({**LLAMA, "hidden_size": None}, "hidden_size: missing"),
        ({**LLAMA, "layer_types": ["full_attention"]}, "layer_types: 1 entries; a list of 32"),
        ({**LLAMA, "layer_types": ["magic"] * 32}, "layer_types: 'magic' is not known"),
        ({**LLAMA, "layer_types": [[]] * 32}, "layer_types: [] is not known"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 32}, "sliding_window: missing"),
        ({**LLAMA, "torch_dtype": "float7"}, "torch_dtype: 'float7' is not known"),
        (
            {**LLAMA, "model_type": "qwen2", "use_sliding_window": "yes"},
            "use_sliding_window: 'yes' is neither",
        ),
        ({**p.DEEPSEEK_V3, "kv_lora_rank": None}, "kv_lora_rank: missing"),
        ({**p.GEMMA_3N_E4B, "num_kv_shared_layers": 35}, "num_kv_shared_layers: 35 of 35 layers leaves none"),
        ({**p.JAMBA_V0_1, "attn_layer_offset": 8}, "attn_layer_offset: 8 is not below"),
        (
            {**p.NEMOTRON_H_8B, "hybrid_override_pattern": "M*"},
            "hybrid_override_pattern: 'M*' is not a word of 52",
        ),
        (
            {**p.NEMOTRON_H_8B, "hybrid_override_pattern": "X" * 52},
            "hybrid_override_pattern: 'X' is not known",
        ),
        ({**p.QWEN_3_NEXT_80B, "layer_types": [{}] * 48}, "layer_types: {} is not known"),
        ({**p.QWEN_3_NEXT_80B, "mamba_ssm_dtype": "fp4"}, "mamba_ssm_dtype: 'fp4' is not known"),
        ({**p.BAMBA_9B, "attn_layer_indices": None}, "attn_layer_indices: missing"),
        (
            {**p.BAMBA_9B, "attn_layer_indices": [32]},
            "attn_layer_indices: [32]; a list of layer numbers from 0 to 31",
        ),
        ({**p.LFM2_1_2B, "full_attn_idxs": None}, "full_attn_idxs: missing"),
        ({**p.KIMI_LINEAR_48B, "linear_attn_config": None}, "linear_attn_config: missing"),
        (
            {**p.KIMI_LINEAR_48B, "linear_attn_config": {"num_heads": 1}},
            "linear_attn_config.head_dim: missing",
        ),
        ({**p.MIMO_V2_FLASH, "hybrid_layer_pattern": ["a"] * 48}, "hybrid_layer_pattern: "),
    ],
)
def test_a_config_that_does_not_fit_is_named(config: Config, problem: str) -> None:
    with pytest.raises(ValueError) as error:
        read_config(config)
    assert problem in str(error.value)


def test_an_unknown_architecture_lists_the_known_and_is_never_guessed() -> None:
    unknown = {**LLAMA, "model_type": "mystery"}
    with pytest.raises(ValueError) as error:
        read_config(unknown)
    assert all(name in str(error.value) for name in FAMILIES)
    assert read_config(unknown, assume_standard=True).bytes_per_token == 131072
    with pytest.raises(ValueError, match="num_attention_heads: missing"):
        read_config({"model_type": "mystery", "num_hidden_layers": 1}, assume_standard=True)


def test_an_unknown_type_of_the_cache_lists_the_known() -> None:
    with pytest.raises(ValueError, match="kv_dtype: 'q4' is not known; auto, fp32, bf16"):
        read_config(LLAMA, kv_dtype="q4")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**9) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = sorted(
    {name for config in (p.GEMMA_3N_E4B, p.NEMOTRON_H_8B, p.KIMI_LINEAR_48B, LLAMA) for name in config}
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # a busy machine draws slowly
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.dictionaries(st.sampled_from([*FIELDS, "quantization_config", "text_config", "architectures"]), JSON),
)
def test_any_json_is_a_geometry_or_a_value_error(model_type: str, extra: dict[str, Any]) -> None:
    with contextlib.suppress(ValueError):
        assert read_config({**LLAMA, "model_type": model_type, **extra}).sequence_bytes(10) >= 0
