"""Code Llama's infilling: prompts piece by piece, what ends an answer, and what it says."""

import io
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from helpers import WINDOW, StubTokenizer, make_model

from llama import Llama, LlamaError
from llama.infilling import NAMES, infilling_pieces, infilling_prompt
from llama.tokenizer import Tokenizer

TEXT = [
    "def add(a, b):",
    "    return a + b",
    "print(add(1, 2))",
    "q☺w k☺j",
    "x = 1 + y",
    "the river runs past the stone house",
]


def vocabulary(folder: Path, pieces: tuple[str, ...] = NAMES, kind: str = "control_symbols") -> Tokenizer:
    """A SentencePiece vocabulary with Code Llama's four pieces, in another order than its."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT * 20),
        model_writer=out,
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **{kind: list(pieces)},
    )
    path = folder / "tokenizer.model"
    path.write_bytes(out.getvalue())
    return Tokenizer(str(path))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return vocabulary(tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(scope="module")
def llama(tokenizer: Tokenizer) -> Llama:
    return Llama(make_model(vocab_size=tokenizer.n_words), tokenizer)


@pytest.mark.parametrize("kind", ["control_symbols", "user_defined_symbols"])
def test_the_pieces_are_found_by_name(tmp_path: Path, kind: str) -> None:
    tokenizer = vocabulary(tmp_path, NAMES[::-1], kind)
    assert [tokenizer.sp_model.id_to_piece(token) for token in infilling_pieces(tokenizer)] == list(NAMES)


def test_the_prompt_piece_by_piece(tokenizer: Tokenizer) -> None:
    """As the published package encodes: a suffix behind ☺, whose two ids are cut off again."""
    pre, mid, suf, _ = infilling_pieces(tokenizer)
    sp, bos = tokenizer.sp_model, tokenizer.bos_id
    assert len(sp.encode("☺")) == 2
    for prefix, suffix in (
        ("x = ", " + 1"),
        ("", ""),
        ("def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"),
        ("a", "b"),
    ):
        before, behind = sp.encode(prefix), sp.encode("☺" + suffix)[2:]
        assert infilling_prompt(tokenizer, prefix, suffix, False) == [bos, pre, *before, suf, *behind, mid]
        assert infilling_prompt(tokenizer, prefix, suffix, True) == [bos, pre, suf, *behind, mid, *before]


def test_what_is_filled_in(llama: Llama, tokenizer: Tokenizer) -> None:
    prefixes, suffixes = ["x = ", "def add"], [" + 1", "return a"]
    settings: dict[str, Any] = {"temperature": 0.0, "max_gen_len": 6}
    for first in (False, True):
        prompts = [infilling_prompt(tokenizer, *pair, first) for pair in zip(prefixes, suffixes)]
        tokens, logprobs = llama.generate(prompts, 6, temperature=0, logprobs=True)
        found = llama.text_infilling(prefixes, suffixes, logprobs=True, suffix_first=first, **settings)
        for row, result in enumerate(found):
            smile = tokenizer.sp_model.piece_to_id("☺")  # the published way to a text with its space
            assert result["generation"] == tokenizer.sp_model.decode([smile, *tokens[row]])[1:]
            assert result["full_text"] == prefixes[row] + result["generation"] + suffixes[row]
            assert result["tokens"] == tokenizer.sp_model.id_to_piece(tokens[row])
            assert result["logprobs"] == pytest.approx(logprobs[row]) and min(logprobs[row]) < -0.1
        [plain, _] = llama.text_infilling(prefixes, suffixes, 0.0, 0.9, 6, False, first)
        assert plain == {"generation": found[0]["generation"], "full_text": found[0]["full_text"]}


def test_the_end_piece_ends_it(llama: Llama, tokenizer: Tokenizer) -> None:
    end = infilling_pieces(tokenizer).end
    [result] = llama.text_infilling(["a"], ["b"], logit_bias={end: 100.0}, details=True)
    assert result["generation"] == "" and result["full_text"] == "ab"
    assert (result["finish_reason"], result["completion_tokens"]) == ("stop", 0)
    [result] = llama.text_infilling(["a"], ["b"], logit_bias={end: -100.0, 2: -100.0}, details=True, stop_ids=[])
    assert result["finish_reason"] == "length" and result["completion_tokens"] == WINDOW - result["prompt_tokens"]
    [[row]] = [llama.generate([[1, 5]], 1, temperature=0, logit_bias={end: 100.0})[0]]
    assert row == [end], "only infilling ends there"


def test_without_the_pieces_it_is_refused(tmp_path: Path) -> None:
    tokenizer = vocabulary(tmp_path, NAMES[:2])
    llama = Llama(make_model(vocab_size=tokenizer.n_words), tokenizer)
    with pytest.raises(LlamaError, match="cannot fill in text: its vocabulary lacks ▁<SUF>, ▁<EOT>; Code Llama's 7B"):
        llama.text_infilling(["a"], ["b"])
    with pytest.raises(LlamaError, match="lacks ▁<PRE>, ▁<MID>, ▁<SUF>, ▁<EOT>"):
        infilling_pieces(StubTokenizer())


def test_what_cannot_be_is_said(llama: Llama) -> None:
    for prefixes, suffixes, complaint in (
        (["a", "b"], ["c"], "2 prefixes and 1 suffixes"),
        ("a", ["b"], "prefixes is 'a', a str"),
        (["a"], [7], "suffix 0 is a int"),
    ):
        with pytest.raises(LlamaError, match=complaint):
            llama.text_infilling(prefixes, suffixes)  # type: ignore[arg-type]
    assert llama.text_infilling([], []) == []
    with pytest.raises(LlamaError, match="max_seq_len"):
        llama.text_infilling(["a " * 60], [""])


def test_text_of_a_piece_is_text_or_refused(llama: Llama, tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name in NAMES:
        ids = infilling_prompt(tokenizer, f"a{name}", f"{name} b", False)
        assert sum(token in infilling_pieces(tokenizer) for token in ids) == 3
    careless = vocabulary(tmp_path, kind="user_defined_symbols")
    with pytest.raises(LlamaError, match=r"the suffix 'a <MID>' holds text of a control piece"):
        infilling_prompt(careless, "a", "a <MID>", False)
