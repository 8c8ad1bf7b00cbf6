"""Tokenizers in GGUF's metadata, against the vocabularies that they were taken from: the same ids, the same text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoint_files as files
import helpers
import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from llama import Llama
from llama.checkpoint import open_checkpoint
from llama.checkpoint.companions import tokenizer_bin
from llama.checkpoint.tokenizers import open_tokenizer
from llama.cli.convert import convert
from llama.cli.info import info
from llama.errors import LlamaError

DEMO = helpers.ROOT / "checkpoints" / "demo" / "tokenizer.model"
TEXTS = [
    *("", " ", "a", "Hello, world!", "  two  spaces  ", "tabs\tand\nlines\r\n\n\nend", "it's we'll THEY'RE", "x" * 70),
    *("1", "12 345 6789 1234567", "v1.2.3-rc4", "$5+3=8 <tag> ~a^b|c", "na\u00efve caf\u00e9", "\u4f60\u597d\u4e16\u754c"),
    *("\u0417\u0434\u0440\u0430\u0432\u0441\u0442\u0432\u0443\u0439", "\U0001f642\U0001f468\u200d\U0001f469", "\u0663\u0664", "<|end|> and <s>"),
    *("trailing ", "...!?", "\u00a0\u3000wide", "def f(x):\n    return x ** 2  # square\n", "\0\x07control"),
]  # fmt: skip
SPECIALS = ["<|begin|>", "<|end|>", "<|pad|>"]
DIGITS = pre_tokenizers.Digits(individual_digits=True)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
PRE: dict[str, Any] = {
    "gpt-2": WORDS,
    "smollm": pre_tokenizers.Sequence([DIGITS, WORDS]),
    "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES]),
}


def settings(**values: Any) -> dict[str, Any]:
    return {f"tokenizer__ggml__{name}": value for name, value in values.items()}


def data(path: Path, **values: Any) -> tuple[bytes, dict[str, Any]]:
    """What the checkpoint of a file with these settings gives for its tokenizer."""
    found = open_checkpoint(files.write_gguf(path, files.weights(), **settings(**values))).tokenizer_data
    assert found is not None
    return found


# ------------------------------------------------------------------------------------ SentencePiece


@pytest.fixture
def demo() -> Iterator[tuple[SentencePieceProcessor, dict[str, Any]]]:
    model = SentencePieceProcessor(model_file=str(DEMO))
    ids = range(len(model))
    kinds = {"is_unknown": 2, "is_control": 3, "is_byte": 6}
    types = [next((kind for name, kind in kinds.items() if getattr(model, name)(i)), 1) for i in ids]
    tokens, scores = [model.id_to_piece(i) for i in ids], [model.get_score(i) for i in ids]
    yield model, {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types}


def test_a_sentencepiece_vocabulary(tmp_path: Path, demo: tuple[SentencePieceProcessor, dict[str, Any]]) -> None:
    theirs, stored = demo
    proto, facts = data(tmp_path / "x.gguf", **stored, bos_token_id=theirs.bos_id(), eos_token_id=theirs.eos_id())
    ours = SentencePieceProcessor(model_proto=proto)
    assert len(ours) == len(theirs)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids and ours.decode(ids) == theirs.decode(ids), text
    names = ("bos_id", "eos_id", "unk_id", "pad_id")
    assert [getattr(ours, name)() for name in names] == [getattr(theirs, name)() for name in names]
    assert facts == {"bos_id": 1, "eos_id": 2, "pad_id": None, "stop_ids": {2}, "add_bos": True}


def test_other_marks_and_no_space_before_a_text(
    tmp_path: Path, demo: tuple[SentencePieceProcessor, dict[str, Any]]
) -> None:
    theirs, stored = demo
    tokens = [*stored["tokens"], "<|im_end|>", "<user>", ""]
    types, scores = [*stored["token_type"], 3, 4, 5], [*stored["scores"], 0.0, 0.0, 0.0]
    more = {"eos_token_id": len(theirs), "eot_token_id": len(theirs) + 1, "add_bos_token": False}
    values = {**stored, "tokens": tokens, "token_type": types, "scores": scores, "add_space_prefix": False, **more}
    proto, facts = data(tmp_path / "x.gguf", **values)
    ours = SentencePieceProcessor(model_proto=proto)
    assert (ours.eos_id(), ours.bos_id()) == (len(theirs), 1)
    assert facts == {
        "bos_id": 1,
        "eos_id": len(theirs),
        "pad_id": None,
        "stop_ids": {len(theirs), len(theirs) + 1},
        "add_bos": False,
    }
    assert ours.id_to_piece(len(theirs) + 2) == f"[EMPTY_{len(theirs) + 2}]" and ours.is_unused(len(theirs) + 2)
    assert len(theirs) + 1 in ours.encode("a<user>b") and len(theirs) not in ours.encode("a<|im_end|>b")
    first = next(iter(theirs.encode("Once")))
    assert theirs.id_to_piece(first).startswith("\u2581") and not ours.id_to_piece(ours.encode("Once")[0]).startswith(
        "\u2581"
    )


# ------------------------------------------------------------------------------------ BPE over bytes


def trained(pre: str) -> Tokenizer:
    """A vocabulary of our own: the README and CONTRIBUTING.md, in this way of cutting."""
    theirs = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    theirs.pre_tokenizer, theirs.decoder = PRE[pre], decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    theirs.train([str(helpers.ROOT / name) for name in ("README.md", "CONTRIBUTING.md")], trainer)
    return theirs


def metadata(theirs: Tokenizer, pre: str) -> dict[str, Any]:
    model = json.loads(theirs.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [3 if token in SPECIALS else 1 for token in tokens]
    return {
        **{"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types},
        **{"merges": [" ".join(pair) for pair in model["merges"]], "bos_token_id": 0, "eos_token_id": 1},
        "padding_token_id": 2,
    }


@pytest.mark.parametrize("pre", PRE)
def test_a_vocabulary_of_bytes(tmp_path: Path, pre: str) -> None:
    theirs = trained(pre)
    made, facts = data(tmp_path / "x.gguf", **metadata(theirs, pre))
    ours = Tokenizer.from_buffer(made)
    assert ours.get_vocab() == theirs.get_vocab()
    for text in TEXTS:
        ids = theirs.encode(text).ids
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        assert ours.encode(text).ids == [0] * facts["add_bos"] + ids
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)
    assert facts == {"bos_id": 0, "eos_id": 1, "pad_id": 2, "stop_ids": {1}, "add_bos": pre == "llama-bpe"}
    assert ours.encode("<|end|>", add_special_tokens=False).ids == [1]


def test_patterns_differ(tmp_path: Path) -> None:
    """Each pattern can fail: of the same vocabulary they make other ids."""
    theirs = trained("gpt-2")
    values = metadata(theirs, "gpt-2")
    made = {}
    for pre in ("gpt-2", "smollm", "llama-bpe", "default"):
        ours = Tokenizer.from_buffer(data(tmp_path / "x.gguf", **{**values, "pre": pre})[0])
        made[pre] = [
            [piece for piece, _ in ours.pre_tokenizer.pre_tokenize_str(text)]
            for text in ("a 1234567", "x=(y)+\u00ab1\u00bb\n\n")
        ]
    assert made["gpt-2"][0] == ["a", "\u01201234567"]
    assert made["smollm"][0] == ["a", "\u0120", *"1234567"]
    assert made["llama-bpe"][0] == ["a", "\u0120", "123", "456", "7"]
    assert made["default"][0] == ["a", "\u0120", "123", "456", "7"]  # llama.cpp's own, of files that name no other
    assert len({str(words) for words in made.values()}) == 4


def test_padding_behind_the_vocabulary_is_left_out(tmp_path: Path) -> None:
    """Ids that the converter made up, because the embedding has more rows."""
    theirs = trained("gpt-2")
    values = metadata(theirs, "gpt-2")
    count = len(values["tokens"])
    values["tokens"], values["token_type"] = [*values["tokens"], f"[PAD{count}]", ""], [*values["token_type"], 5, 5]
    ours = Tokenizer.from_buffer(data(tmp_path / "x.gguf", **values)[0])
    assert ours.get_vocab() == {**theirs.get_vocab(), f"[PAD{count}]": count, f"[EMPTY_{count + 1}]": count + 1}
    values["tokens"] = [*values["tokens"][:-1], f"[PAD{count + 1}]"]
    assert Tokenizer.from_buffer(data(tmp_path / "x.gguf", **values)[0]).get_vocab() == theirs.get_vocab()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": "llama", "tokens": ["a", "<0x1P>"], "token_type": [2, 6], "scores": [0.0, 0.0]}, "1 tokens of .*'byte'"),
    ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; expected 'llama'"),
    ({"pre": "qwen2"}, "tokenizer.ggml.pre is 'qwen2'.* one of llama-bpe"),
    ({"pre": None}, "tokenizer.ggml.pre is None"),
    ({"merges": None}, "tokenizer.ggml.merges is None"),
    ({"merges": [1, 2]}, "tokenizer.ggml.merges is"),
    ({"tokens": None}, "tokenizer.ggml.tokens is None"),
    ({"tokens": ["a", "b", "a"], "token_type": None}, "the token 'a' with the ids 0 and 2"),
    ({"token_type": [1, 2]}, "token_type is .* one for each token"),
    ({"bos_token_id": 5_000}, "bos_token_id is 5000; expected an id from 0 to"),
    ({"eot_token_id": "x"}, "eot_token_id is 'x'"),
    ({"add_bos_token": 1}, "add_bos_token is 1; expected true or false"),
    ({"model": "llama"}, "tokenizer.ggml.scores is None"),
    ({"model": "llama", "tokens": ["a", "b"], "token_type": [1, 1], "scores": [0.0, float("nan")]}, "NaN or inf"),
    (
        {"model": "llama", "tokens": ["a", "b"], "token_type": [1, 1], "scores": [0.0, 0.0]},
        "0 tokens of the type 'unknown'",
    ),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_tokenizers_that_cannot_be_followed(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    """Refused only when it is asked for: with a tokenizer of one's own the weights load."""
    values = {**metadata(trained("gpt-2"), "gpt-2"), **changes}
    checkpoint = open_checkpoint(files.write_gguf(tmp_path / "x.gguf", files.weights(), **settings(**values)))
    with pytest.raises(LlamaError, match=words) as error:
        _ = checkpoint.tokenizer_data
    assert "tokenizer_path" in str(error.value) and len(str(error.value)) < 1000


def test_a_file_without_a_tokenizer_and_one_with_a_template(tmp_path: Path) -> None:
    path = files.write_gguf(tmp_path / "x.gguf", files.weights())
    assert open_checkpoint(path).tokenizer_data is None and open_checkpoint(path).chat_template is None
    values = {**settings(model="gpt2", tokens=["a"]), "tokenizer__chat_template": "{{ messages }}"}
    assert open_checkpoint(files.write_gguf(path, files.weights(), **values)).chat_template == "{{ messages }}"


# ------------------------------------------------------------------------------- in the whole library


@pytest.mark.parametrize("pre", ["llama", "smollm", "llama-bpe"])
def test_it_is_the_checkpoints_tokenizer_and_is_written(
    tmp_path: Path, demo: tuple[SentencePieceProcessor, dict[str, Any]], pre: str
) -> None:
    """The same ids from the file itself and from the folders that `convert` makes of it, by our tokenizer and by
    transformers'.
    """
    values = {**demo[1], "bos_token_id": 1, "eos_token_id": 2} if pre == "llama" else metadata(trained(pre), pre)
    params = {**files.GQA, "vocab_size": len(values["tokens"]) + 5}
    more = {"tokenizer__chat_template": "{{ bos_token }}{{ messages[0]['content'] }}"}
    path = files.write_gguf(tmp_path / "x.gguf", files.weights(params), params, **settings(**values), **more)
    checkpoint = open_checkpoint(path)
    ours = open_tokenizer(None, checkpoint)
    wanted = [ours.encode(text, bos=True, eos=False) for text in TEXTS]
    assert all(ours.decode(ids[ours.add_bos :]) == text for ids, text in zip(wanted, TEXTS))
    for to in ("hf", "meta"):
        convert(str(path), str(tmp_path / to), to)
        written = open_tokenizer(None, open_checkpoint(tmp_path / to))
        assert [written.encode(text, bos=True, eos=False) for text in TEXTS] == wanted
        assert (written.bos_id, written.stop_ids) == (ours.bos_id, ours.stop_ids)
        config = json.loads((tmp_path / to / "tokenizer_config.json").read_text())
        assert config["chat_template"] == more["tokenizer__chat_template"]
        assert config["bos_token"] == values["tokens"][ours.bos_id] and config["add_bos_token"] is ours.add_bos
    if pre != "llama":  # transformers 5 makes other ids of Llama 2's kind itself where spaces are many
        theirs = AutoTokenizer.from_pretrained(str(tmp_path / "hf"))
        assert [theirs(text)["input_ids"] for text in TEXTS if "<" not in text] == [
            ids for ids, text in zip(wanted, TEXTS) if "<" not in text
        ]


def test_a_tokenizer_of_ones_own_and_one_that_cannot_be_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    values = {**metadata(trained("gpt-2"), "gpt-2"), "pre": "qwen2"}
    path = files.write_gguf(tmp_path / "x.gguf", files.weights(), **settings(**values))
    checkpoint = open_checkpoint(path)
    assert open_tokenizer(str(DEMO), checkpoint).encode("a", bos=False, eos=False)
    with pytest.raises(LlamaError, match="pre is 'qwen2'"):
        open_tokenizer(None, checkpoint)
    info(str(path))
    assert "which cannot be read: " in capsys.readouterr().out
    convert(str(path), str(tmp_path / "out"), "hf")
    assert not list((tmp_path / "out").glob("tokenizer*"))
    assert "the tokenizer is not written: " in caplog.text and "'qwen2'" in caplog.text


def test_to_llama2c(tmp_path: Path, demo: tuple[SentencePieceProcessor, dict[str, Any]]) -> None:
    """A SentencePiece vocabulary becomes tokenizer.bin, as one beside the weights does; another kind is refused."""
    values = {**demo[1], "bos_token_id": 1, "eos_token_id": 2}
    params = {**files.GQA, "vocab_size": len(values["tokens"])}
    path = files.write_gguf(tmp_path / "x.gguf", files.weights(params), params, **settings(**values))
    convert(str(path), str(tmp_path / "out"), "llama2c")
    assert (tmp_path / "out" / "tokenizer.bin").read_bytes() == tokenizer_bin(demo[0])
    bpe = files.write_gguf(tmp_path / "y.gguf", files.weights(), **settings(**metadata(trained("gpt-2"), "gpt-2")))
    with pytest.raises(LlamaError, match=r"a vocabulary of the kind tokenizer.json"):
        convert(str(bpe), str(tmp_path / "other"), "llama2c")


def test_built_from_one_file(tmp_path: Path) -> None:
    values = metadata(trained("smollm"), "smollm")
    params = {**files.GQA, "vocab_size": len(values["tokens"]) + 3}
    path = files.write_gguf(tmp_path / "x.gguf", files.weights(params), params, **settings(**values))
    generator = Llama.build(str(path), None, max_seq_len=24, max_batch_size=2)
    try:
        assert generator.tokenizer.stop_ids == {1}
        [found] = generator.text_completion(["The cache"], temperature=0, max_gen_len=5, logprobs=True)
        assert len(found["tokens"]) <= 5
    finally:
        generator.close()


def test_its_chat_template_knows_its_special_tokens(tmp_path: Path) -> None:
    """The same ids as transformers makes with the folder that is written of it."""
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    values = metadata(trained("llama-bpe"), "llama-bpe")
    params = {**files.GQA, "vocab_size": len(values["tokens"])}
    more = {"tokenizer__chat_template": template}
    path = files.write_gguf(tmp_path / "x.gguf", files.weights(params), params, **settings(**values), **more)
    convert(str(path), str(tmp_path / "hf"), "hf")
    dialog = [{"role": "user", "content": "What is a cache?"}]
    theirs = AutoTokenizer.from_pretrained(str(tmp_path / "hf"))
    wanted = theirs.apply_chat_template(dialog, add_generation_prompt=True, return_dict=False)
    generator = Llama.build(str(path), None, max_seq_len=64, max_batch_size=1)
    try:
        ids = generator.chat_format.encode(generator.tokenizer, dialog)
    finally:
        generator.close()
    assert ids == wanted and ids[0] == 0 and 1 in ids
