"""In place of what recipes would fetch: models of the same shape that write prompts in the same way, and a few rows.

Owns: descriptions without weights (config.json and a tokenizer), chat templates of the families in short, and
recipes that read them. Refuses: weights; a dry run and a plan need none.
"""

from __future__ import annotations

import functools
import gzip
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from temper.envs.library.problems import SAMPLES, last_boxed

_TURN = "{{- '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
_TOOL = "{{- '<|im_start|>user\n<tool_response>\n' + m['content'] + '\n</tool_response><|im_end|>\n' }}"
_TOOLS = (
    "{%- set said = messages[0]['content'] if messages[0]['role'] == 'system' else DEFAULT %}"
    "{%- if tools or said %}{{- '<|im_start|>system\n' + said }}{%- if tools %}{{- '\n\n# Tools\n<tools>' }}"
    "{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}"
    "{{- '\n</tools>\nFor each call, return a JSON object within <tool_call></tool_call>.' }}{%- endif %}"
    "{{- '<|im_end|>\n' }}{%- endif %}"
)
_CHATML = (
    _TOOLS + "{%- for m in messages %}{%- if m['role'] == 'tool' %}" + _TOOL
    + "{%- elif m['role'] != 'system' or not loop.first %}" + _TURN + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
)  # fmt: skip
_QWEN2 = _CHATML.replace("DEFAULT", "'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.'")
_QWEN3 = _CHATML.replace("DEFAULT", "''") + (
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
)
_SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SMOLLM3 = (
    "{# defaults #}\n{%- if enable_thinking is not defined -%}\n{%- set enable_thinking = true -%}\n{%- endif -%}\n"
    "{%- if enable_thinking -%}{%- set mode = '/think' -%}{%- else -%}{%- set mode = '/no_think' -%}{%- endif -%}\n"
    "{{- '<|im_start|>system\nReasoning Mode: ' + mode + '<|im_end|>\n' -}}"
    "{%- for m in messages -%}{%- if m['role'] == 'assistant' -%}{% generation %}" + _TURN + "{% endgeneration %}"
    "{%- else -%}" + _TURN + "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}"
    "{{- '<|im_start|>assistant\n' + ('' if enable_thinking else '<think>\n\n</think>\n\n') -}}{%- endif -%}"
)
_LLAMA3 = (
    "{{- bos_token }}{%- if date_string is not defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date_string + '<|eot_id|>' }}"
    "{%- for m in messages %}{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim }}"
    "{{- '<|eot_id|>' }}{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
_GEMMA = (
    "{{ bos_token }}{%- for m in messages -%}{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif -%}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim }}"
    "{{ '<end_of_turn>\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)
_OLMO2 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ '<|assistant|>\n' + m['content'] + eos_token + ('' if loop.last else '\n') }}"
    "{% else %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '\n' }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPEECH: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "qwen2": (_QWEN2 + "{%- endif %}", "", "<|im_end|>", _IM),
    "qwen3": (_QWEN3 + "{%- endif %}", "", "<|im_end|>", _IM),
    "smollm2": (_SMOLLM2, "<|im_start|>", "<|im_end|>", _IM),
    "smollm3": (_SMOLLM3, "", "<|im_end|>", _IM),
    "llama3": (_LLAMA3, "<|begin_of_text|>", "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>")),
    "gemma3": (_GEMMA, "<bos>", "<end_of_turn>", ("<start_of_turn>",)),
    "olmo2": (_OLMO2, "<|endoftext|>", "<|endoftext|>", ()),
}
"""How families write a conversation: chat template, tokens of start and end, further control tokens. In short, as
published in what matters here: who may speak, what stands before the first message, what a variable changes."""
SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}  # fmt: skip
LOCAL = {
    "models/qwen2.5-coder-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "models/qwen2.5-coder-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "models/smollm2-135m": "SmolLM2-135M",
    "runs/smollm2-sft-rl/checkpoints/1-rl/step-100": "SmolLM2-135M",
}
"""Folders that recipes name, and whose shape they have."""
ANSWERS = {"chosen": "Gladly.", "rejected": "No."}
"""Of a pair, to any question."""


def speech_of(name: str) -> str:
    """The entry of SPEECH of a published model."""
    marks = {"Qwen2": "qwen2", "Qwen3": "qwen3", "SmolLM2": "smollm2", "SmolLM3": "smollm3", "Llama": "llama3"}
    return next((kind for mark, kind in (marks | {"gemma": "gemma3", "OLMo": "olmo2"}).items() if mark in name))


def make_tokenizer(speech: str) -> PreTrainedTokenizerFast:
    """Any text is encoded without loss, in about as many tokens as by the published one."""
    template, start, end, more = SPEECH[speech]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()),
        bos_token=start or None,
        eos_token=end,
        additional_special_tokens=list(more),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    return fast


@functools.cache
def _trained() -> str:
    """A byte-level BPE of the samples' own words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    files = ("gsm8k.jsonl", "math.jsonl", "mbpp.jsonl", "questions.jsonl")
    tokenizer.train_from_iterator([(SAMPLES / file).read_text() for file in files], trainer)
    return str(tokenizer.to_str())


def describe_model(folder: Path, name: str, shape: Mapping[str, Any]) -> Path:
    """A checkpoint directory without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(speech_of(name)).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def write_data(folder: Path) -> dict[str, Path]:
    """Rows of the samples in the form of the data sets that recipes name, by that name."""
    problems = _rows(SAMPLES / "gsm8k.jsonl")
    mathematics = [{**row, "answer": last_boxed(row["solution"])} for row in _rows(SAMPLES / "math.jsonl")]
    pairs = [
        {side: f"\n\nHuman: {row['question']}\n\nAssistant: {said}" for side, said in ANSWERS.items()}
        for row in problems[:6]
    ]
    words, sums = _write(folder / "train.jsonl", problems[:6]), _write(folder / "math.jsonl", mathematics[:6])
    unseen = _write(folder / "test.jsonl", problems[6:9])
    packed = folder / "pairs.jsonl.gz"
    packed.write_bytes(gzip.compress("\n".join(map(json.dumps, pairs)).encode()))
    return {
        "openai/gsm8k:main/train": words, "data/gsm8k/train.jsonl": words, "data/svamp/train.jsonl": words,
        "openai/gsm8k:main/test": unseen, "data/gsm8k/test.jsonl": unseen, "data/svamp/test.jsonl": unseen,
        "agentica-org/DeepScaleR-Preview-Dataset:deepscaler": sums,
        "HuggingFaceH4/MATH-500:test": _write(folder / "unseen_math.jsonl", mathematics[6:9]),
        "data/hh_rlhf/harmless-base_test.jsonl.gz": packed,
        "data/mbpp/mbpp.jsonl": SAMPLES / "mbpp.jsonl",
    }  # fmt: skip


def with_stand_ins(recipe: Path, folder: Path, shapes: Mapping[str, Mapping[str, Any]]) -> Path:
    """The recipe as it stands, but for the models and files that are not here. `shapes`: config.json by hub name."""
    text, every = recipe.read_text(), {**shapes, "SmolLM2-135M": SMOLLM2}
    for name, place in {**{name: name for name in shapes}, **LOCAL}.items():
        if f'"{name}"' in text:
            model = describe_model(folder / place.replace("/", "_"), place, every[place])
            text = text.replace(f'"{name}"', f'"{model}"')
    for name, file in write_data(folder).items():
        if f'"{name}"' in text:
            text = text.replace(f'"{name}"', f'"{file}"')
            text = re.sub(r"(?<!\w)size = \d+", "size = 2", text)  # there are few rows
    copy = folder / recipe.name
    copy.write_text(text)
    return copy


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _write(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("\n".join(map(json.dumps, rows)))
    return file
