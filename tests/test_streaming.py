"""Streamed text in every script: joined, the pieces are the text; no piece ends within a character."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT

from llama import Llama, LlamaError, Tokenizer

DIALOG: Any = [{"role": "user", "content": "?"}]
TEXTS = {
    "english": "It was late, and the cat slept.",
    "cjk": "日本語のテキスト、中文文本。한국어",
    "emoji": "🙂 👩‍👩‍👧‍👦🏳️‍🌈 ok 🇯🇵",
    "combining marks": "e\u0301a\u0308\u0323 Z\u0351\u036b\u0343 נִקּוּד ำ",
    "spaces": "   two  three   four    ",
    "lines": "\n\n  a\n\tb\n ",
    "mixed": " a日b🙂  e\u0301 ",
    "its own mark": "\ufffd a\ufffd",
}


class Script:
    """A model that says the tokens of `script` and then EOS (2), whatever the prompt."""

    class params:
        max_seq_len, max_batch_size, vocab_size = 400, 4, 1024

    def __init__(self) -> None:
        self.script: list[int] = []
        self.prompt = 0  # length

    def forward(self, tokens: torch.Tensor, start_pos: int) -> torch.Tensor:
        self.prompt = tokens.shape[1] if start_pos == 0 else self.prompt
        said = start_pos + tokens.shape[1] - self.prompt
        token = self.script[said] if said < len(self.script) else 2
        return F.one_hot(torch.full(tokens.shape, token), 1024).float()


@pytest.fixture(scope="module")
def generator() -> Llama:
    return Llama(Script(), Tokenizer(str(ROOT / "checkpoints" / "demo" / "tokenizer.model")))


def as_bytes(generator: Llama, text: str | bytes) -> list[int]:
    """A byte token for each byte."""
    data = text.encode() if isinstance(text, str) else text
    return [generator.tokenizer.sp_model.piece_to_id(f"<0x{byte:02X}>") for byte in data]


def check(generator: Llama, script: Sequence[int], **options: Any) -> list[list[str]]:
    """Both kinds of stream, with and without the first space, against the whole text; the pieces of each."""
    generator.model.script = list(script)
    found = []
    for keep_space in (False, True):
        settings: dict[str, Any] = {"temperature": 0, "keep_space": keep_space, **options}
        [whole] = generator.text_completion(["?"], **settings)
        [answer] = generator.chat_completion([DIALOG], **settings)
        assert answer["generation"]["content"] == whole["generation"]
        for stream in (generator.stream_text("?", **settings), generator.stream_chat(DIALOG, **settings)):
            pieces = list(stream)
            assert "".join(pieces) == whole["generation"]
            found.append(pieces)
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_comes_through_character_by_character(generator: Llama, name: str) -> None:
    """As the vocabulary writes it, and a byte at a time, which is how most of the world's text comes."""
    text = TEXTS[name]
    for script in (generator.tokenizer.encode(text, False, False), as_bytes(generator, text)):
        whole = generator.tokenizer.decode(script)
        assert whole in (text, text.removeprefix(" "))  # only the first space is SentencePiece's to take
        for pieces in check(generator, script):
            assert len(pieces) > 1 and all(pieces)
    for pieces in check(generator, as_bytes(generator, text))[2:]:
        assert "".join(pieces) == text
        if "\ufffd" not in text:
            assert pieces == list(text), "each character as soon as its last byte is there"


def test_the_first_space_is_kept_on_request(generator: Llama) -> None:
    plain, _, spaced, _ = check(generator, generator.tokenizer.encode("cat sat", False, False))
    assert ("".join(plain), "".join(spaced)) == ("cat sat", " cat sat")
    plain, _, spaced, _ = check(generator, generator.tokenizer.encode("   cat", False, False))
    assert ("".join(plain), "".join(spaced)) == ("   cat", "    cat")


def test_a_character_is_not_shown_before_it_is_whole(generator: Llama) -> None:
    generator.model.script = as_bytes(generator, "a🙂b")
    fed: list[int] = []
    forward = generator.model.forward

    def counting(tokens: torch.Tensor, start_pos: int) -> torch.Tensor:
        fed.append(start_pos)
        result: torch.Tensor = forward(tokens, start_pos)
        return result

    generator.model.forward = counting
    try:
        seen = [(len(fed), piece) for piece in generator.stream_text("?", temperature=0)]
    finally:
        del generator.model.forward
    assert seen == [(1, "a"), (5, "🙂"), (6, "b")]


BROKEN = {
    "cut off at the end": (b"ab\xe6\x97", ["a", "b", "\ufffd\ufffd"]),
    "cut off, then a letter": (b"a\xf0\x9f\x99b", ["a", "\ufffd\ufffd\ufffdb"]),
    "cut off, then a whole one": (b"\xe6\x97\xe6\x97\xa5c", ["\ufffd\ufffd日", "c"]),
    "no beginning": (b"\x97\xa5x", ["\ufffd\ufffdx"]),
    "never a character": (b"\xff\xfe\xff", ["\ufffd\ufffd\ufffd"]),
    "overlong": (b"\xc0\xafy", ["\ufffd\ufffdy"]),
    "half a surrogate pair": (b"\xed\xa0\xbdz", ["\ufffd\ufffd\ufffdz"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_bytes_that_form_no_character_show_at_the_end_of_their_run(generator: Llama, name: str) -> None:
    data, wanted = BROKEN[name]
    for pieces in check(generator, as_bytes(generator, data)):
        assert pieces == wanted


def test_any_mixture_of_tokens(generator: Llama) -> None:
    """Random runs of bytes, spaces, words and control tokens."""
    draw = random.Random(7)
    tokenizer = generator.tokenizer
    bytes_ = as_bytes(generator, "日🙂é\u0301 ".encode() + b"\xff\x80\xe6")
    spaces = [token for token in range(tokenizer.n_words) if set(tokenizer.sp_model.id_to_piece(token)) == {"▁"}]
    words = [draw.randrange(259, tokenizer.n_words) for _ in range(20)]
    for _ in range(30):
        script = [
            draw.choice(draw.choice((bytes_, bytes_, spaces, words, [0, 1]))) for _ in range(draw.randrange(1, 14))
        ]
        for pieces in check(generator, script):
            assert not any(piece and not piece.strip("\ufffd") for piece in pieces[:-1]), "a run that had not ended"


@pytest.mark.parametrize("stop", ["語", "🙂", "\u0301", "  ", "\ufffd"])
def test_a_stop_string_of_any_script(generator: Llama, stop: str) -> None:
    text = f"one  日本{stop}two"
    for pieces in check(generator, as_bytes(generator, text), stop=[stop]):
        assert "".join(pieces) == text[: text.index(stop)]


@pytest.mark.parametrize("stop", ["text", None, 5, [""], [None], [b"a"]])
def test_what_is_no_list_of_stop_strings(generator: Llama, stop: Any) -> None:
    with pytest.raises(LlamaError, match="stop(=| is ).*must be a list of texts"):
        generator.text_completion(["a"], stop=stop)
