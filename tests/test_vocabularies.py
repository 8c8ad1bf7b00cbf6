"""Tokenizers of three kinds behind one interface: SentencePiece, Llama 3's tiktoken, Hugging Face's tokenizer.json."""

import builtins
import copy
import hashlib
import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vocabularies import CHATML, MAKERS, WORDS, added, byte_level, fallback, letters_first, merged, tiktoken_file, write

from llama.errors import LlamaError
from llama.tokenizer import StreamDecoder, Tokenizer, ids_without_piece, piece, stop_ids
from llama.vocabulary import from_tiktoken
from llama.vocabulary.tiktoken import read_ranks, slices

tiktoken = pytest.importorskip("tiktoken")
tokenizers = pytest.importorskip("tokenizers")

GOLDEN = Path(__file__).parent / "golden"
FIGURES = json.loads((GOLDEN / "llama3-ids.json").read_text("utf-8"))  # Llama 3's ids of 32 texts and 6 long ones
PUBLISHED = Path(__file__).resolve().parents[2] / "shared" / "data"  # Llama's own vocabularies, which are not ours
TEXTS: list[str] = [
    case["text"] for case in FIGURES["texts"] if case["text"].isprintable() or case["text"][:1] != "\ud83d"
]


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write(tmp_path_factory.mktemp("vocabulary") / "tokenizer.model", MAKERS[request.param]()))


def make(tmp_path: Path, kind: str) -> Tokenizer:
    return Tokenizer(write(tmp_path / "tokenizer", MAKERS[kind]()))


def streamed(tokenizer: Any, ids: list[int], keep_space: bool = False) -> str:
    decoder = StreamDecoder(tokenizer, keep_space=keep_space)
    return "".join([decoder.put(token) for token in ids]) + decoder.end()


SCRIPTS = [
    "".join(map(chr, range(first, first + 40)))
    for first in (0x20, 0xC0, 0x391, 0x410, 0x531, 0x5D0, 0x621, 0x905, 0xE01, 0x10A0, 0x1200, 0x13A0, 0x3041, 0x4E00, 0xAC00, 0x12000, 0x1D400, 0x1F300, 0x1F600, 0x20000, 0xE0020)
]  # fmt: skip
ALL_TEXTS = [*TEXTS, *SCRIPTS, "👩‍👩‍👧‍👦🏳️‍🌈🇺🇳", "the cold river stone", "�", "a�b"]

# ---------------------------------------------------------------------------------------- all kinds alike


def test_every_text_comes_back_whole_and_streamed(tokenizer: Tokenizer) -> None:
    metaspace = tokenizer.vocabulary.kind.startswith("tokenizer.json (BPE")  # drops a space that the text began with
    before = tokenizer.encode("river", bos=False, eos=False)
    for text in (text for text in ALL_TEXTS if text.strip(" ")):
        ids = tokenizer.encode(text, bos=False, eos=False)
        assert all(0 <= token < tokenizer.n_words for token in ids)
        assert tokenizer.decode(ids) == text or (metaspace and text.startswith(" "))
        assert streamed(tokenizer, ids) == tokenizer.decode(ids)
        assert streamed(tokenizer, ids, True) == tokenizer.decode(ids, keep_space=True)
        rest = tokenizer.encode(text, bos=False, eos=False, prefix_space=False)
        assert tokenizer.decode(before + rest) == "river" + text
        assert not set(ids) & set(tokenizer.special_ids.values())


def test_any_ids_stream_to_what_decode_makes_of_them(tokenizer: Tokenizer) -> None:
    draw = random.Random(0)
    smile = tokenizer.encode("🙂🙃", bos=False, eos=False)
    for _ in range(300):
        ids = [draw.randrange(tokenizer.n_words) for _ in range(draw.randrange(12))]
        ids += draw.sample(smile, draw.randrange(len(smile))) + smile * draw.randrange(2)
        for keep_space in (False, True):
            assert streamed(tokenizer, ids, keep_space) == tokenizer.decode(ids, keep_space=keep_space), ids


def test_a_character_of_several_ids_appears_when_it_is_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙃", bos=False, eos=False, prefix_space=False)
    assert len(ids) > 1
    decoder = StreamDecoder(tokenizer)
    assert [decoder.put(token) for token in ids] == [""] * (len(ids) - 1) + ["🙃"]


def test_marks_stops_and_specials(tokenizer: Tokenizer) -> None:
    name = next(name for name, token in tokenizer.special_ids.items() if token == tokenizer.eos_id)
    assert stop_ids(tokenizer) == tokenizer.stop_ids and tokenizer.eos_id in tokenizer.stop_ids
    text = f"the{name} river{name}"
    assert tokenizer.eos_id not in tokenizer.encode(text, bos=False, eos=False)
    ids = tokenizer.encode(text, bos=False, eos=True, specials=True)
    assert ids.count(tokenizer.eos_id) == 3 and ids[-1] == tokenizer.eos_id
    assert tokenizer.encode(text, bos=False, eos=False) == tokenizer.encode(text, bos=False, eos=False)  # as before
    assert (tokenizer.encode("a", bos=True, eos=False)[0] == tokenizer.bos_id) == tokenizer.add_bos
    assert ids_without_piece(tokenizer, tokenizer.n_words) == ()
    assert ids_without_piece(tokenizer, tokenizer.n_words + 2) == (tokenizer.n_words, tokenizer.n_words + 1)
    shown = [piece(tokenizer, token) for token in tokenizer.encode(" river🙃", bos=False, eos=False)]
    assert "".join(shown).strip().startswith("river") and "<0xF0>" in "".join(shown)


def test_ids_that_no_text_has(tokenizer: Tokenizer) -> None:
    padded, n = copy.deepcopy(tokenizer), tokenizer.n_words
    padded.n_rows = n + 8
    ids = padded.encode("the river", bos=False, eos=False)
    assert padded.decode([n, *ids, n + 7, n + 1]) == "the river" and padded.decode(n + 3) == ""
    assert streamed(padded, [n, *ids, n + 7, n + 1]) == "the river"
    with pytest.raises(LlamaError, match=f"id {n + 8} is not"):
        padded.decode(n + 8)
    with pytest.raises(LlamaError, match=f"id {n} is not"):
        tokenizer.decode(n)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies_work(tokenizer: Tokenizer, duplicate: Callable[[Tokenizer], Tokenizer]) -> None:
    twin = duplicate(tokenizer)
    twin.eos_id = 9
    assert 9 not in tokenizer.stop_ids and 9 in twin.stop_ids
    for text in ("the river 🙃", " two  spaces"):
        assert twin.encode(text, bos=True, eos=False) == tokenizer.encode(text, bos=True, eos=False)
    assert twin.decode(twin.encode("the river", bos=False, eos=False)) == "the river"


def test_stop_ids_can_be_replaced(tmp_path: Path) -> None:
    llama3 = make(tmp_path, "tiktoken")
    end, eom, eot = (llama3.special_ids[f"<|{name}|>"] for name in ("end_of_text", "eom_id", "eot_id"))
    assert llama3.stop_ids == {end, eom, eot} and llama3.eos_id == end
    llama3.eos_id = None
    assert llama3.stop_ids == {eom, eot}
    llama3.eos_id = 5
    assert llama3.stop_ids == {5, eom, eot}
    llama3.stop_ids = {7}
    llama3.stop_ids.add(8)
    assert llama3.stop_ids == {7, 8} == stop_ids(llama3)


@pytest.mark.parametrize("kind", MAKERS)
def test_the_facts_of_a_checkpoint(tmp_path: Path, kind: str) -> None:
    data = Path(write(tmp_path / "x", MAKERS[kind]())).read_bytes()
    told = Tokenizer.from_bytes(data, Path("model.gguf"), bos_id=7, eos_id=8, stop_ids=[9], add_bos=True)
    assert told.encode("", bos=True, eos=True) == [7, 8] and {8, 9} <= told.stop_ids
    told = Tokenizer.from_bytes(data, Path("model.gguf"), bos_id=7, add_bos=False)
    assert told.encode("", bos=True, eos=False) == []
    with pytest.raises(LlamaError, match=r"model\.gguf: bos_id 99999 is none of the ids 0 to"):
        Tokenizer.from_bytes(data, Path("model.gguf"), bos_id=99999)


# ---------------------------------------------------------------------------------------------- tiktoken


def test_llama_3s_names_and_ids(tmp_path: Path) -> None:
    small = make(tmp_path, "tiktoken")
    first = small.n_words - 256
    assert small.bos_id == first and len(small.special_ids) == 256
    names = {**FIGURES["special_tokens_first_16"], FIGURES["special_tokens_last"][0]: FIGURES["special_tokens_last"][1]}
    assert {name: small.special_ids[name] - first + 128000 for name in names} == names
    ids = small.encode("the", bos=True, eos=True)
    assert small.decode(ids) == "<|begin_of_text|>the<|end_of_text|>"  # as published


BROKEN = {
    "a rank twice": (lambda p: tiktoken_file(p).replace(b" 260\n", b" 259\n"), "are not 0 to"),
    "a rank left out": (lambda p: tiktoken_file(p).replace(b" 5\n", b" 5000\n"), "are not 0 to"),
    "a negative rank": (lambda p: tiktoken_file(p).replace(b" 5\n", b" -5\n"), "are not 0 to"),
    "a piece twice": (lambda p: tiktoken_file([*p, b"the"]), "a piece that came before"),
    "no piece": (lambda p: tiktoken_file([*p, b""]), "an empty piece"),
    "a byte left out": (lambda p: tiktoken_file([x for x in p if x != b"\xc0"]), "1 of the 256 single bytes .* 0xC0"),
    "not base64": (lambda p: tiktoken_file(p) + b"??? 400\n", "not 'base64 rank'"),
    "no rank": (lambda p: tiktoken_file(p) + b"aGVq\n", "not 'base64 rank'"),
    "cut": (lambda p: tiktoken_file(p)[:-9], "not 'base64 rank'|are not"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_tiktoken_file_is_refused(tmp_path: Path, kind: str) -> None:
    make_broken, words = BROKEN[kind]
    path = write(tmp_path / "tokenizer.model", make_broken(merged(WORDS)))
    with pytest.raises(LlamaError, match=rf"^{path} is no whole Llama 3 vocabulary \(tiktoken\) .*{words}"):
        Tokenizer(path)


def test_lines_may_stand_in_any_order_and_end_as_in_windows() -> None:
    lines = tiktoken_file(merged(WORDS)).splitlines()
    assert read_ranks(b"\r\n".join(reversed(lines))) == read_ranks(b"\n".join(lines))


def test_long_texts_are_cut_as_published() -> None:
    for case in FIGURES["long"]:
        text = "".join(letter * count for letter, count in case["parts"])
        parts = list(slices(text))
        assert [len(part) for part in parts] == case["pieces"] and "".join(parts) == text


def test_the_cut_of_long_texts_reaches_the_ids(tmp_path: Path) -> None:
    small = Tokenizer(write(tmp_path / "t", tiktoken_file(merged([" " * 8]))))
    two, eight = (small.encode(" " * n, bos=False, eos=False) for n in (2, 8))
    assert len(two) == len(eight) == 1
    assert small.encode(" " * 25_002, bos=False, eos=False) == eight * 3125 + two


@pytest.mark.skipif(not PUBLISHED.exists(), reason=f"Llama's vocabularies are not at {PUBLISHED}")
def test_llama_3s_own_vocabulary() -> None:
    llama3 = Tokenizer(str(PUBLISHED / "llama3-tokenizer.model"))
    assert (llama3.n_words, llama3.bos_id, llama3.eos_id, llama3.pad_id) == (128256, 128000, 128001, 128004)
    assert sorted(llama3.stop_ids) == FIGURES["stop"]
    for case in FIGURES["texts"]:
        ids = llama3.encode(case["text"], bos=False, eos=False)
        assert ids == case["ids"] and llama3.decode(ids) == case["decoded"] == streamed(llama3, ids)
        if "ids_all_special" in case:
            assert llama3.encode(case["text"], bos=True, eos=True, specials=True) == case["ids_all_special"]
    for case in FIGURES["decode"]:
        assert llama3.decode(case["ids"]) == case["text"]
    for case in FIGURES["long"]:
        ids = llama3.encode("".join(letter * count for letter, count in case["parts"]), bos=False, eos=False)
        packed = json.dumps(ids, separators=(",", ":")).encode()
        assert (len(ids), hashlib.sha256(packed).hexdigest()) == (case["n_ids"], case["sha256"])


# ---------------------------------------------------------------------------------------- tokenizer.json


@pytest.mark.parametrize("kind", ["byte-level", "fallback", "metaspace"])
def test_ids_are_those_of_the_tokenizers_package(tmp_path: Path, kind: str) -> None:
    ours = make(tmp_path, kind)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer"))
    theirs.no_truncation()
    theirs.no_padding()
    name = next(name for name, token in ours.special_ids.items() if token == ours.eos_id)
    for text in [*ALL_TEXTS, f"the{name} river{name}{name} "]:
        wanted = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, bos=False, eos=False, specials=True) == wanted
        if name not in text and not set(wanted) & set(ours.special_ids.values()):
            assert ours.encode(text, bos=False, eos=False) == wanted


def test_llama_2_in_three_spellings_is_one_vocabulary(tmp_path: Path) -> None:
    spm, prepend, first = (make(tmp_path, kind) for kind in ("sentencepiece", "fallback", "metaspace"))
    assert prepend.n_words == spm.n_words and prepend.special_ids == {"<unk>": 0, **spm.special_ids}
    assert (prepend.bos_id, prepend.eos_id, prepend.pad_id, prepend.add_bos) == (1, 2, -1, True)
    for text in ALL_TEXTS:
        for prefix_space in (True, False):
            ids = spm.encode(text, bos=True, eos=True, prefix_space=prefix_space)
            assert prepend.encode(text, bos=True, eos=True, prefix_space=prefix_space) == ids, text
            if not (prefix_space and text.startswith(" ")) and text:  # where Metaspace puts no second one
                assert first.encode(text, bos=True, eos=True, prefix_space=prefix_space) == ids, text
            for keep_space in (False, True):
                assert prepend.decode(ids, keep_space=keep_space) == spm.decode(ids, keep_space=keep_space)
    assert prepend.decode([3 + 0x20, 3 + 0x41]) == spm.decode([3 + 0x20, 3 + 0x41]) == " A"  # a byte, not the prefix


def test_llama_3s_file_as_tokenizer_json(tmp_path: Path) -> None:
    llama3 = make(tmp_path, "tiktoken")
    same_as_json(llama3, Tokenizer(write(tmp_path / "tokenizer.json", from_tiktoken(llama3.vocabulary))))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.skipif(not PUBLISHED.exists(), reason=f"Llama's vocabularies are not at {PUBLISHED}")
def test_llama_3s_own_file_as_tokenizer_json(tmp_path: Path) -> None:
    llama3 = Tokenizer(str(PUBLISHED / "llama3-tokenizer.model"))
    same_as_json(llama3, Tokenizer(write(tmp_path / "tokenizer.json", from_tiktoken(llama3.vocabulary))))  # type: ignore[arg-type]


def same_as_json(llama3: Tokenizer, found: Tokenizer) -> None:
    for name in ("n_words", "bos_id", "eos_id", "pad_id", "stop_ids", "add_bos", "special_ids"):
        assert getattr(found, name) == getattr(llama3, name), name
    for text in [*ALL_TEXTS, "<|begin_of_text|>a<|eot_id|>"]:
        for specials in (False, True):
            ids = llama3.encode(text, bos=True, eos=True, specials=specials)
            assert found.encode(text, bos=True, eos=True, specials=specials) == ids
            assert found.decode(ids) == llama3.decode(ids)


def test_text_of_a_control_piece_never_becomes_its_id(tmp_path: Path) -> None:
    """Also where the file does not call it special, or the whole of it is a piece that needs no merges."""
    file = byte_level(merged(WORDS), CHATML)
    file["added_tokens"][1]["special"] = False
    file["pre_tokenizer"]["use_regex"] = False
    file["model"]["ignore_merges"] = True
    tokenizer = Tokenizer(write(tmp_path / "tokenizer.json", file))
    for name in CHATML:
        ids = tokenizer.encode(name, bos=False, eos=False)
        assert tokenizer.special_ids[name] not in ids and tokenizer.decode(ids) == name
        assert tokenizer.encode(name, bos=False, eos=False, specials=True) == [tokenizer.special_ids[name]]


def test_added_words_are_text(tmp_path: Path) -> None:
    file = byte_level(merged(WORDS), CHATML)
    size = len(file["model"]["vocab"])
    file["added_tokens"] += [added("covid", size, special=False), added("[PAD]", size + 1, special=False)]
    tokenizer = Tokenizer(write(tmp_path / "tokenizer.json", file))
    assert tokenizer.n_words == size + 2 and tokenizer.pad_id == size + 1
    ids = tokenizer.encode("the covid [PAD]", bos=False, eos=False)
    assert size in ids and size + 1 not in ids and tokenizer.decode(ids) == "the covid [PAD]"


def test_a_tag_that_is_not_special_is_no_text_going_in_and_text_coming_out(tmp_path: Path) -> None:
    file = fallback("prepend", letters_first(WORDS))
    size = len(file["model"]["vocab"])
    file["added_tokens"] += [added("<|end|>", size, special=False), added("<|pad|>", size + 1)]
    tokenizer = Tokenizer(write(tmp_path / "tokenizer.json", file))
    ids = tokenizer.encode("the river<|end|><|pad|>", bos=False, eos=False)
    assert not {size, size + 1} & set(ids) and tokenizer.decode(ids) == "the river<|end|><|pad|>"
    ids = tokenizer.encode("the river<|end|><|pad|>", bos=False, eos=False, specials=True)
    assert ids[-2:] == [size, size + 1] and tokenizer.decode(ids) == "the river<|end|>"


def _changed(**changes: Any) -> bytes:
    file = byte_level(merged(WORDS), CHATML)
    for place, value in changes.items():
        file["model" if place != "top" else place] = {**file["model"], place: value}
    return json.dumps(file).encode()


STRANGE = {
    "no model": (b"{}", "Model missing"),
    "half": (json.dumps(byte_level(merged(WORDS), CHATML)).encode()[:-500], "EOF|expected"),
    "deep": (b'{"model":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion|variant|invalid"),
    "wide": (b'{"model":[' + b"[]," * 2_000_001 + b"[]]}", "2000000 arrays and objects"),
    "large": (b'{"model":"' + b"x" * 2**25 + b'"}', "more than 33554432 bytes"),
    "not UTF-8": (b'{"model": "\xff"}', "utf-8"),
    "unigram": (
        json.dumps({"model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]}}).encode(),
        "type Unigram",
    ),
    "no bytes": (json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}).encode(), "neither ByteLevel"),
    "empty": (_changed(vocab={}, merges=[])[:0] + json.dumps({**byte_level([], [])}).encode(), "0 pieces"),
    "random": (_changed(dropout=0.1), "dropout 0.1"),
    "suffix": (_changed(end_of_word_suffix="</w>"), "end_of_word_suffix"),
    "a huge id": (_changed(vocab={"a": 4_000_000_000}, merges=[]), "ids up to 4000000000"),
    "one id twice": (_changed(vocab={"a": 3, "b": 3, "c": 4}, merges=[]), "two pieces with one id|tokenizers package"),
    "an id that is passed over": (
        json.dumps({**byte_level(merged(WORDS), CHATML), "added_tokens": [added("<|x|>", 5000)]}).encode(),
        "id 5000, for which the tokenizers package takes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", STRANGE)
def test_a_strangers_tokenizer_json_is_refused(tmp_path: Path, kind: str) -> None:
    data, words = STRANGE[kind]
    path = write(tmp_path / "tokenizer.json", data)
    with pytest.raises(LlamaError, match=words) as caught:
        Tokenizer(path)
    assert str(caught.value).startswith(path) and len(str(caught.value)) < 1000


def test_a_pattern_that_does_not_end_is_an_error(tmp_path: Path) -> None:
    file = byte_level(merged(WORDS), CHATML)
    file["normalizer"] = {"type": "Replace", "pattern": {"Regex": "(a+)+b"}, "content": "x"}
    tokenizer = Tokenizer(write(tmp_path / "tokenizer.json", file))
    with pytest.raises(LlamaError, match="cannot encode a text of 50 characters"):
        tokenizer.encode("a" * 50, bos=False, eos=False)
    assert tokenizer.decode(tokenizer.encode("the river", bos=False, eos=False)) == "the river"


def test_mutated_files_load_or_end_in_a_clean_error(tmp_path: Path) -> None:
    draw, loaded = random.Random(0), 0
    sources = [Path(write(tmp_path / kind, MAKERS[kind]())).read_bytes() for kind in MAKERS if kind != "sentencepiece"]
    for number in range(300):
        data = bytearray(sources[number % len(sources)])
        place = draw.randrange(len(data))
        for i in range(place, min(place + number % 5, len(data))):
            data[i] = draw.choice(b'{}[]",: 0129truefalsnN\xff') if number % 2 else draw.randrange(256)
        try:
            mutated = Tokenizer(write(tmp_path / "mutated", bytes(data[:place] if number % 25 == 0 else data)))
        except LlamaError as error:
            assert len(str(error)) < 1000
        else:
            loaded += 1
            mutated.decode(mutated.encode("the river 日<|im_end|>", bos=False, eos=False))
            mutated.decode(range(mutated.n_words))
    assert 50 < loaded < 300


@pytest.mark.parametrize(("kind", "package"), [("tiktoken", "tiktoken"), ("byte-level", "tokenizers")])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, package: str) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == package:
            raise ImportError(f"No module named '{name}'")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(LlamaError, match=rf"needs the package {package}, .*-m pip install {package} \(llama's extra"):
        make(tmp_path, kind)
    assert make(tmp_path, "sentencepiece").n_words > 256  # which needs neither
