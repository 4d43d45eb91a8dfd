"""A small tokenizer, trained here, and a few chat templates: models' directories without any download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from kvroute.conductor.tokens.cases import WORDS
from kvroute.conductor.tokens.check import judge
from kvroute.conductor.tokens.exact import ExactTokenizer
from kvroute.conductor.tokens.files import read_files
from kvroute.conductor.tokens.outcome import TokenizedPrompts
from kvroute.types import EngineKind

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
SIMPLE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DUMP = "{{ messages | tojson }}{{ tools | tojson }}{{ reasoning_effort }}{{ enable_thinking }}"
DUMP_PARTS = DUMP + "{% for message in messages %}{% for part in message.content %}{% endfor %}{% endfor %}"


def train(special: tuple[str, ...] = SPECIAL) -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([*WORDS, *WORDS], trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return bpe


def write(directory: Path, template: str | None = SIMPLE, **config: Any) -> Path:
    """A model's directory with that tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    train().save(str(directory / "tokenizer.json"))
    given = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(given))
    return directory


def exact(
    directory: Path, engine: EngineKind = EngineKind.VLLM, defaults: dict[str, Any] | None = None
) -> ExactTokenizer:
    files = read_files(directory)
    return ExactTokenizer(files, judge(files, seed=1, fuzz_s=0.0), engine, defaults or {})


def ids(made: object) -> list[list[int]]:
    assert isinstance(made, TokenizedPrompts), made
    return [list(memoryview(prompt).cast("I")) for prompt in made.prompts]
