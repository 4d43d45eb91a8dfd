"""Write a small random Llama with a tokenizer and a chat template to a directory; nothing is downloaded.

    python make_tiny_model.py DIRECTORY

An adapter for it (LoRA, as PEFT lays it out) goes to DIRECTORY/adapter.

Runs in vLLM's environment (torch, transformers, tokenizers). Seeded, and the tokenizer is trained on the
Python documentation that the interpreter carries, so one environment always makes the same model.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 2048
CONTEXT_TOKENS = 8192
RANK = 8
PAD, BOS, END = SPECIAL = ("<pad>", "<bos>", "<end>")
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}[{{ message['role'] }}]\n{{ message['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, so that every UTF-8 text has tokens and a token can end inside a character."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((topics[name] for name in sorted(topics)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=END,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def make_model() -> LlamaForCausalLM:
    """Weights wide enough that greedy text depends on the prompt instead of settling on one token."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT_TOKENS,
            tie_word_embeddings=False,
            initializer_range=0.2,
            pad_token_id=SPECIAL.index(PAD),
            bos_token_id=SPECIAL.index(BOS),
            eos_token_id=SPECIAL.index(END),
        )
    )


def save_adapter(model: LlamaForCausalLM, directory: Path) -> None:
    """On every query and value projection, strong enough that the adapter's KV differs from the model's."""
    directory.mkdir(exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    weights = {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "v_proj")):
            outputs, inputs = module.weight.shape
            weights[f"base_model.model.{name}.lora_A.weight"] = 0.3 * torch.randn(RANK, inputs)
            weights[f"base_model.model.{name}.lora_B.weight"] = 0.3 * torch.randn(outputs, RANK)
    save_file(weights, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def main(directory: str) -> None:
    model = make_model()
    make_tokenizer().save_pretrained(directory)
    model.save_pretrained(directory)
    save_adapter(model, Path(directory) / "adapter")


if __name__ == "__main__":
    main(sys.argv[1])
