"""Small vocabularies and chat templates of our own, in the manner of several families, for the tests of chat formats."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = [
    "The river runs past the stone house, and the cat sleeps in the sun all day long.",
    "system user assistant tool\n\nHello there! How are you today? I am fine, thank you.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))  # 3",
    "Wie geht es dir? Mir geht es gut. ¿Qué tal? 你好 😀 [INST] <<SYS>> answer [/INST]",
]
LLAMA3_PIECES = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"]
LLAMA3_PIECES += ["<|eot_id|>", "<|python_tag|>"]
CHATML_PIECES = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ZEPHYR_PIECES = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]

LLAMA3 = """{{- bos_token -}}
{%- for turn in messages -%}
    {%- set head = '<|start_header_id|>' ~ turn.role ~ '<|end_header_id|>' -%}
    {{- head + '\\n\\n' + (turn['content'] | trim) + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>' ~ '\\n\\n' -}}{%- endif -%}"""

CHATML = """{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nAnswer in a few words.<|im_end|>\\n' }}{% endif %}
{% for turn in messages %}
<|im_start|>{{ turn.role }}
{% generation %}{{ turn.content }}{% endgeneration %}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""

LLAMA2 = """{%- set state = namespace(lead='', asked=0) -%}
{%- for turn in messages -%}
    {%- if turn.role == 'system' -%}
        {%- if not loop.first -%}{{ raise_exception('only the first message may be the system\\'s') }}{%- endif -%}
        {%- set state.lead = '<<SYS>>\\n' + turn.content + '\\n<</SYS>>\\n\\n' -%}
        {%- continue -%}
    {%- endif -%}
    {%- if (turn.role == 'user') != (state.asked % 2 == 0) -%}
        {{- raise_exception('turns must go user, assistant, user, ...') -}}
    {%- endif -%}
    {%- set state.asked = state.asked + 1 -%}
    {%- if turn.role == 'user' -%}
        {{- bos_token ~ '[INST] ' ~ state.lead ~ turn.content.strip() ~ ' [/INST]' -}}
        {%- set state.lead = '' -%}
    {%- else -%}
        {{- ' ' ~ turn.content | trim ~ ' ' ~ eos_token -}}
    {%- endif -%}
{%- endfor -%}"""

ZEPHYR = """{% for turn in messages %}
{% if turn['role'] == 'assistant' %}
{{ '<|assistant|>\\n' + turn['content'] + eos_token }}
{% elif turn['role'] in ['user', 'system'] %}
{{ ('<|user|>\\n' if turn['role'] == 'user' else '<|system|>\\n') + turn['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

TAGGED = "{% for turn in messages %}{{ '<|' + turn.role + '|>' + turn.content + eos_token }}{% endfor %}<|assistant|>"


def byte_level(specials: list[str], words: tuple[str, ...] = ()) -> Tokenizer:
    """Byte-level BPE, as Llama 3's and SmolLM2's; `words` are added tokens that are not special."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    model.add_special_tokens(specials)
    model.add_tokens(list(words))
    return model


def byte_fallback(specials: list[str]) -> Tokenizer:
    """SentencePiece's BPE as transformers writes it for Llama 2: a space before the text, bytes for what has no piece."""
    model = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model.decoder = decoders.Sequence(parts)
    model.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    state = json.loads(model.to_str())
    head = ["<unk>", *specials, *(f"<0x{byte:02X}>" for byte in range(256))]
    learnt = sorted(state["model"]["vocab"], key=state["model"]["vocab"].get)
    state["model"]["vocab"] = {piece: i for i, piece in enumerate(head + [p for p in learnt if p not in head])}
    model = Tokenizer.from_str(json.dumps(state))
    model.add_special_tokens(["<unk>", *specials])
    return model


def kinds() -> dict[str, tuple[Tokenizer, str, dict[str, str]]]:
    """Per family: a vocabulary, a template in its manner, and which tokens begin and end a text."""
    llama3, chatml = byte_level(LLAMA3_PIECES), byte_level(CHATML_PIECES, ("<think>", "</think>", "\t\t"))
    return {
        "llama3": (llama3, LLAMA3, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
        "chatml": (chatml, CHATML, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}),
        "llama2": (byte_fallback(["<s>", "</s>"]), LLAMA2, {"bos_token": "<s>", "eos_token": "</s>"}),
        "zephyr": (byte_fallback(["<s>", "</s>"]), ZEPHYR, {"bos_token": "<s>", "eos_token": "</s>"}),
        "zephyr with pieces": (byte_level(ZEPHYR_PIECES), ZEPHYR, {"bos_token": "<s>", "eos_token": "</s>"}),
        "built of pieces": (byte_level(ZEPHYR_PIECES), TAGGED, {"bos_token": "<s>", "eos_token": "</s>"}),
    }


def save(model: Tokenizer, folder: Path) -> Path:
    path = folder / "tokenizer.json"
    model.save(str(path))
    return path


def as_transformers(transformers: Any, path: Path, template: str, tokens: dict[str, str]) -> Any:
    """The same vocabulary and template in transformers' hands."""
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), chat_template=template, **tokens)


def dialogs() -> list[list[dict[str, str]]]:
    """Ten, with nothing in them that looks like a control piece."""

    def talk(*texts: str, system: str | None = None) -> list[dict[str, str]]:
        roles = ("user", "assistant")
        lead = [] if system is None else [{"role": "system", "content": system}]
        return lead + [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]

    return [
        talk("Hello there!"),
        talk("Hello", system="Be brief."),
        talk("How are you?", "I am fine.", "And the cat?"),
        talk("  two spaces before\n", " one after ", "\n\nlines\n\n", system=" a system text "),
        talk("你好 😀", "¿Qué tal?", "naïve café – “quotes”"),
        talk("def add(a, b):\n    return a + b\n", "```python\nadd(1, 2)\n```", "\ttabs\tand\t\tmore"),
        talk("1234567890 + 0.5 = ?", "x", "y", "z", "w", system=""),
        talk(""),
        talk("<b>not a token</b> <| |> [x] {{ 7 * 7 }} {% raw %}", "'quotes' \"and\" \\n backslashes", "< s > </ s>"),
        talk("The river runs past the stone house. " * 20, "long " * 50, "end", system="words " * 40),
    ]


__all__ = ["as_transformers", "dialogs", "kinds", "save", "tokenizers"]
