"""Tokenizer: ids and text, files that are no vocabulary, llama2.c's tokenizer.bin, and the incremental decoder."""

import copy
import pickle
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from llama.errors import LlamaError
from llama.tokenizer import StreamDecoder, Tokenizer

GOLDEN = Path(__file__).parent / "golden"
MODEL = GOLDEN / "mha" / "tokenizer.model"
TEXTS = [
    "",
    "river stone",
    " begins with a space",
    "  runs   of    spaces  ",
    "\n\ttabs and\r\nlines\n\n",
    "日本語のテキスト",
    "a family 👩‍👩‍👧‍👦 and a flag 🏳️‍🌈",
    "e\u0301 n\u0303 combining",
    "</s><s> <unk>",
    "nul \x00 and \x02",
    "the replacement \ufffd itself",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(str(MODEL))


def streamed(tokenizer: object, ids: Sequence[int], keep_space: bool = False) -> str:
    decoder = StreamDecoder(tokenizer, keep_space=keep_space)
    return "".join([decoder.put(token) for token in ids]) + decoder.end()


# --------------------------------------------------------------------------------- ids and text


def test_published_attributes(tokenizer: Tokenizer) -> None:
    assert (tokenizer.n_words, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (360, 1, 2, -1)
    assert tokenizer.sp_model.id_to_piece(261) == "▁r"


def test_encode_puts_marks_where_asked(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("river stone", False, False)
    assert [tokenizer.sp_model.id_to_piece(token) for token in ids] == ["▁river", "▁stone"]
    assert tokenizer.encode("river stone", bos=True, eos=False) == [1, *ids]
    assert tokenizer.encode("river stone", bos=False, eos=True) == [*ids, 2]
    assert tokenizer.encode("", bos=True, eos=True) == [1, 2]


@pytest.mark.parametrize("text", TEXTS)
def test_decode_gives_back_what_was_encoded(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, bos=True, eos=True)) == text


def test_eos_in_a_text_is_text(tokenizer: Tokenizer) -> None:
    for prefix_space in (True, False):
        ids = tokenizer.encode("a </s></s> b<s>", bos=False, eos=False, prefix_space=prefix_space)
        assert not {1, 2} & set(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_continuation_follows_without_a_space(tokenizer: Tokenizer, text: str) -> None:
    for prompt in ("the cold", "river ", "日"):
        ids = tokenizer.encode(prompt, bos=True, eos=False)
        ids += tokenizer.encode(text, bos=False, eos=False, prefix_space=False)
        assert tokenizer.decode(ids) == prompt + text


def test_continuation_differs_from_a_new_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("ver", False, False, prefix_space=False) == [tokenizer.sp_model.piece_to_id("ver")]
    assert tokenizer.encode("ver", False, False) != tokenizer.encode("ver", False, False, prefix_space=False)
    marked = tokenizer.encode("ver", True, True, prefix_space=False)
    assert (marked[0], marked[-1]) == (1, 2)


@pytest.mark.parametrize("text", ["\ud800", "fine until \udfff", b"bytes", 5, None, ["a"]])
def test_encode_refuses_what_is_no_text(tokenizer: Tokenizer, text: object) -> None:
    for prefix_space in (True, False):
        with pytest.raises(LlamaError, match=r"half a character|takes a str"):
            tokenizer.encode(text, bos=True, eos=False, prefix_space=prefix_space)  # type: ignore[arg-type]


def test_encode_without_the_mark_it_needs(tokenizer: Tokenizer) -> None:
    bare = copy.deepcopy(tokenizer)
    bare.eos_id, bare.bos_id = None, -1
    assert bare.encode("a", bos=False, eos=True)[-1] is None  # as published: a caller has taken EOS away
    with pytest.raises(LlamaError, match="bos_id is -1"):
        bare.encode("a", bos=True, eos=False)
    assert bare.encode("a", bos=False, eos=False) == tokenizer.encode("a", bos=False, eos=False)


def test_decode_takes_a_list_or_one_id(tokenizer: Tokenizer) -> None:
    torch = pytest.importorskip("torch")
    ids = tokenizer.encode("river stone", bos=True, eos=False)
    assert tokenizer.decode(ids[1]) == tokenizer.decode([ids[1]]) == "river"
    assert tokenizer.decode(torch.tensor(ids)) == tokenizer.decode(tuple(ids)) == "river stone"
    assert tokenizer.decode(torch.tensor(ids[1])) == "river"
    assert tokenizer.decode([]) == tokenizer.decode(1) == ""


def test_decode_keeps_the_space_of_a_continuation(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("river stone", bos=False, eos=False)
    assert tokenizer.decode(ids) == "river stone"
    assert tokenizer.decode(ids, keep_space=True) == " river stone"
    assert tokenizer.decode(ids[1], keep_space=True) == " stone"
    assert tokenizer.decode([1, 2], keep_space=True) == ""


@pytest.mark.parametrize("token", [-1, 360, 2**70])
def test_decode_names_an_id_out_of_range(tokenizer: Tokenizer, token: int) -> None:
    for ids in (token, [5, token]):
        with pytest.raises(LlamaError, match=rf"id {token} .* 0 to 359"):
            tokenizer.decode(ids)


@pytest.mark.parametrize("ids", ["river", 1.5, [1.5], [[1], 2], [[[1.5]]], [None]])
def test_decode_refuses_what_are_no_ids(tokenizer: Tokenizer, ids: object) -> None:
    with pytest.raises(LlamaError, match="list of ids"):
        tokenizer.decode(ids)  # type: ignore[arg-type]


def test_decode_takes_what_generate_returns(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([[5, 6], [300, 301]]) == [tokenizer.decode([5, 6]), tokenizer.decode([300, 301])]
    assert tokenizer.decode(None) == "" and tokenizer.decode([]) == ""


def test_stop_ids_follow_eos_id(tokenizer: Tokenizer) -> None:
    replaced = copy.copy(tokenizer)
    assert replaced.stop_ids == {2}
    replaced.eos_id = 7
    assert replaced.stop_ids == {7}
    replaced.eos_id = None
    assert replaced.stop_ids == set()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
@pytest.mark.parametrize("used", [False, True])
def test_copies_work(duplicate: Callable[[Tokenizer], Tokenizer], used: bool) -> None:
    original = Tokenizer(str(MODEL))
    original.eos_id = 9
    if used:
        original.encode("x", False, False, prefix_space=False)
    twin = duplicate(original)
    assert twin.sp_model is not original.sp_model
    for prefix_space in (True, False):
        assert twin.encode("the river", True, True, prefix_space=prefix_space) == original.encode(
            "the river", True, True, prefix_space=prefix_space
        )
    assert twin.decode(twin.encode("the river", True, True)) == "the river" + twin.decode(9)
    assert (twin.n_words, twin.eos_id, twin.pad_id) == (360, 9, -1)


# --------------------------------------------------------------------------- files of other kinds

FOREIGN = {
    "empty": (b"", "is empty"),
    "html": (b"\n<!DOCTYPE html>\n<html><body>Sign in</body></html>", "HTML page"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:9e55\nsize 499723\n", "git lfs pull"),
    "json": (b'{\n  "version": "1.0",\n  "model": {}}', "tokenizer.json"),
    "llama3": (b"IQ== 0\nIg== 1\nIw== 2\n", "Llama 3"),
    "garbage": (bytes(range(255, 0, -1)) * 40, "neither a whole SentencePiece model"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_a_file_is_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    content, expected = FOREIGN[kind]
    (tmp_path / "tokenizer.model").write_bytes(content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LlamaError) as caught:
        Tokenizer("tokenizer.model")
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "tokenizer.model")) and expected in message
    assert any(advice in message for advice in ("fetch it again", "git lfs pull", "give the")), message
    assert [other for other, (_, words) in FOREIGN.items() if words in message and other != kind] == []


def test_a_missing_file_and_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path}/nowhere.model.*give the path") as caught:
        Tokenizer("nowhere.model")
    assert not isinstance(caught.value, LlamaError)
    with pytest.raises(LlamaError, match=rf"{tmp_path} is a folder .*give the path"):
        Tokenizer(".")


def test_a_missing_sentencepiece_is_named() -> None:
    code = (  # the module alone: the package imports torch, which takes its time
        "import sys, types; sys.modules['sentencepiece'] = None; package = types.ModuleType('llama');"
        "package.__path__ = ['llama']; sys.modules['llama'] = package; import llama.tokenizer"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: llama needs the package sentencepiece")
    assert f"{sys.executable} -m pip install sentencepiece" in last


# ----------------------------------------------------------------------- llama2.c's tokenizer.bin


@pytest.fixture(scope="module")
def llama2c() -> Tokenizer:
    return Tokenizer(str(GOLDEN / "llama2c" / "tokenizer.bin"))


def test_llama2c_is_the_same_vocabulary(tokenizer: Tokenizer, llama2c: Tokenizer) -> None:
    every = range(tokenizer.n_words)
    assert [llama2c.sp_model.id_to_piece(i) for i in every] == [tokenizer.sp_model.id_to_piece(i) for i in every]
    for name in ("n_words", "bos_id", "eos_id", "pad_id", "stop_ids"):
        assert getattr(llama2c, name) == getattr(tokenizer, name)
    for kind in ("is_control", "is_unknown", "is_byte"):
        flags = [getattr(it.sp_model, kind)(i) for it in (tokenizer, llama2c) for i in every]
        assert flags[:360] == flags[360:]


def test_llama2c_gives_the_same_ids_and_text(tokenizer: Tokenizer, llama2c: Tokenizer) -> None:
    draw = random.Random(0)
    parts = ["the ", "river", " ", "over", "é", "日", "👍", "\n", "ing", "\u0301", "?"]
    for text in TEXTS + ["".join(draw.choices(parts, k=draw.randrange(1, 30))) for _ in range(500)]:
        for prefix_space in (True, False):
            ids = tokenizer.encode(text, True, True, prefix_space=prefix_space)
            assert llama2c.encode(text, True, True, prefix_space=prefix_space) == ids, text
        assert llama2c.decode(ids) == tokenizer.decode(ids)


def test_llama2c_that_breaks_off(tmp_path: Path) -> None:
    data = (GOLDEN / "llama2c" / "tokenizer.bin").read_bytes()
    path = tmp_path / "tokenizer.bin"
    not_finite = data[:4] + struct.pack("<f", float("nan")) + data[8:]
    twice = data + data[-9:]  # the last piece a second time
    for broken in (data[:-1], data[:2000], data[:20], data + b"\0", data[:17], not_finite, twice):
        path.write_bytes(broken)
        with pytest.raises(LlamaError, match=rf"^{path} is neither"):
            Tokenizer(str(path))


def test_mutated_files_load_or_end_in_a_clean_error(tmp_path: Path) -> None:
    draw, path = random.Random(0), tmp_path / "tokenizer"
    sources = [MODEL.read_bytes(), (GOLDEN / "llama2c" / "tokenizer.bin").read_bytes()]
    loaded = 0
    for number in range(300):
        data = bytearray(sources[number % 2])
        place = draw.randrange(len(data))
        for i in range(place, min(place + number % 5, len(data))):
            data[i] = draw.randrange(256)
        path.write_bytes(data[:place] if number % 5 == 0 else data)
        try:
            mutated = Tokenizer(str(path))
        except LlamaError as error:
            assert str(path) in str(error)
        else:
            loaded += 1
            mutated.encode("the river 日", bos=False, eos=False)
            mutated.decode(range(mutated.n_words))
    assert 0 < loaded < 300


# ------------------------------------------------------------------------------- ids one by one


class OnlyDecode:
    """What a stub tokenizer has."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode

    def decode(self, t: list[int]) -> str:
        assert type(t) is list
        return self._decode(t)


class Words:
    """A tokenizer that is not SentencePiece: bytes as they are, spaces included."""

    def decode(self, t: list[int]) -> str:
        return bytes(t).decode(errors="replace")


class Pieces:
    """One that strips all space before the text, or puts a sign between its words."""

    words = ("", "▁", "▁a", "a", "b", "▁c")

    def __init__(self, between: str, strip: bool) -> None:
        self._between = between
        self._strip = strip

    def decode(self, t: list[int]) -> str:
        text = self._between.join(self.words[token] for token in t).replace("▁", " ")
        return text.lstrip(" ") if self._strip else text


def random_ids(draw: random.Random, tokenizer: Tokenizer) -> list[int]:
    spaced = [i for i in range(tokenizer.n_words) if tokenizer.sp_model.id_to_piece(i).startswith("▁")]
    characters = [[3 + byte for byte in text.encode()] for text in ("é", "€", "😀", "\ufffd", " ", "\u0301")]
    ids: list[int] = []
    for _ in range(draw.randrange(25)):
        choices = [
            [draw.randrange(tokenizer.n_words)],  # anything
            [draw.randrange(3, 259)],  # a byte
            [draw.choice([0, 1, 2])],  # unknown, BOS, EOS
            [draw.choice(spaced)],
            draw.choice(characters),
            draw.choice(characters)[:-1],  # one that is never completed
        ]
        ids += draw.choice(choices)
    return ids


@pytest.mark.parametrize("keep_space", [False, True])
@pytest.mark.parametrize("stub", [False, True])
def test_streamed_is_whole_for_any_ids(tokenizer: Tokenizer, keep_space: bool, stub: bool) -> None:
    draw = random.Random(1)
    source = OnlyDecode(tokenizer) if stub else tokenizer
    for _ in range(2000):
        ids = random_ids(draw, tokenizer)
        assert streamed(source, ids, keep_space) == tokenizer.decode(ids, keep_space=keep_space), ids


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_is_whole_for_texts(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, bos=True, eos=True)
    assert streamed(tokenizer, ids) == text
    assert streamed(tokenizer, ids, keep_space=True) == (" " + text if text else "")


def test_lead_is_the_space_that_decode_drops(tokenizer: Tokenizer) -> None:
    draw = random.Random(2)
    for ids in [[0], [3 + 0x20], *(random_ids(draw, tokenizer) for _ in range(500))]:
        decoder = StreamDecoder(tokenizer)
        for token in ids:
            decoder.put(token)
        decoder.end()
        assert decoder.lead + tokenizer.decode(ids) == tokenizer.decode(ids, keep_space=True)


def test_text_comes_as_soon_as_it_is_certain(tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(tokenizer)
    river, stone = tokenizer.encode("river stone", bos=False, eos=False)
    smile = [3 + byte for byte in "😀".encode()]
    pieces = [decoder.put(token) for token in [1, river, *smile, stone, smile[0], stone, smile[0], smile[1]]]
    assert pieces == ["", "river", "", "", "", "😀", " stone", "", "\ufffd stone", "", ""]
    assert decoder.end() == "\ufffd\ufffd"
    assert decoder.end() == ""


def test_other_tokenizers_stream_too() -> None:
    for text in (" two  spaces", "plain", "日本 👍", " "):
        for keep_space in (False, True):  # nothing is dropped, so nothing is added
            assert streamed(Words(), list(text.encode()), keep_space) == text
    stripped, joined = Pieces("", strip=True), Pieces("-", strip=False)
    for words in (["▁", "▁a"], ["a", "▁", "▁", "b", "", "▁c"], ["", "▁", "", "▁", "▁a", "▁"]):
        ids = [stripped.words.index(word) for word in words]
        assert streamed(stripped, ids) == stripped.decode(ids)
        assert streamed(stripped, ids, keep_space=True) == "".join(words).replace("▁", " ")
        for keep_space in (False, True):  # what stands between the words is no space that was dropped
            assert streamed(joined, ids, keep_space) == joined.decode(ids)
    assert streamed(Words(), [0xE2, 0x41, 0xE2]) == "\ufffdA\ufffd"


def test_a_bad_id_leaves_no_trace(tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(tokenizer)
    river, stone = tokenizer.encode("river stone", bos=False, eos=False)
    decoder.put(river)
    with pytest.raises(LlamaError, match="id 360"):
        decoder.put(360)
    assert decoder.put(stone) == " stone"


def test_a_token_costs_the_decoding_of_a_few(tokenizer: Tokenizer) -> None:
    lengths: list[int] = []

    class Counting:
        def decode(self, t: list[int]) -> str:
            lengths.append(len(t))
            return tokenizer.decode(t)

    ids = tokenizer.encode("the river 😀 stone " * 100, bos=True, eos=False)
    streamed(Counting(), ids)
    assert max(lengths) <= 12
    assert len(lengths) <= 2 * len(ids) + 2
