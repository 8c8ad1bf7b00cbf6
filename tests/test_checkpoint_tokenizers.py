"""The tokenizer of a checkpoint: what is found and read beside the weights, and rows of the model without a piece."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoint_files as files
import pytest
import torch
from vocabularies import CHATML, MAKERS, WORDS, byte_level, letters_first, merged, sentencepiece_twin, write

from llama import Llama
from llama.checkpoint import open_checkpoint, open_tokenizer
from llama.checkpoint.tokenizers import describe_tokenizer
from llama.cli.convert import convert
from llama.cli.info import info
from llama.cli.step_trace import trace_steps
from llama.cli.trace import trace
from llama.engine.sampling import Sampling
from llama.errors import LlamaError
from llama.tokenizer import Tokenizer

pytest.importorskip("tiktoken")
pytest.importorskip("tokenizers")
SPM = sentencepiece_twin(letters_first(WORDS))
N_SPM = 259 + len(letters_first(WORDS))


def model(folder: Path, rows: int, meta: bool = False, **config: Any) -> Path:
    """A checkpoint with `rows` of vocabulary, the last of which would always be the likeliest."""
    params = {**files.GQA, "vocab_size": rows}
    weights = files.weights(params)
    loud = 100 * torch.randn(4, params["dim"], generator=torch.Generator().manual_seed(1))
    weights["output.weight"][-8:] = torch.cat([loud, -loud])
    return files.write_meta(folder, weights, params) if meta else files.write_hf(folder, weights, params, **config)


def build(folder: Path, tokenizer: Any = None, **options: Any) -> Llama:
    return Llama.build(str(folder), tokenizer, 64, 4, device="cpu", dtype="float32", **options)


def settings(folder: Path, name: str, **content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


# ----------------------------------------------------------------------------------- which file, what beside it


def test_what_lies_beside_the_checkpoint(tmp_path: Path) -> None:
    source = model(tmp_path / "hf", 700)
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.model or tokenizer\.json beside .*pass tokenizer_path"):
        open_tokenizer(None, open_checkpoint(source))
    (source / "original").mkdir()
    kinds = [
        ("original/tokenizer.model", "tiktoken"),
        ("tokenizer.json", "byte-level"),
        ("tokenizer.model", "fallback"),
    ]
    for name, kind in kinds:  # each comes before those that were there
        write(source / name, MAKERS[kind]())
        found, alone = open_tokenizer(None, open_checkpoint(source)), Tokenizer(str(source / name))
        assert found.vocabulary.kind == alone.vocabulary.kind and found.n_words == alone.n_words
        for given in (str(source / name), source / name, source):
            assert open_tokenizer(given, open_checkpoint(source)).vocabulary.kind == alone.vocabulary.kind
    with pytest.raises(FileNotFoundError, match="no tokenizer in .*empty"):
        (tmp_path / "empty").mkdir()
        open_tokenizer(tmp_path / "empty", open_checkpoint(source))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_tokenizer("nowhere", open_checkpoint(source))


def test_a_tokenizer_of_the_callers(tmp_path: Path) -> None:
    class Mine:
        eos_id = None

        def encode(self, s: str, bos: bool, eos: bool) -> list[int]:
            return [ord(letter) % 48 for letter in s]

        def decode(self, ids: Any) -> str:
            return "".join(chr(32 + token % 48) for token in ([ids] if isinstance(ids, int) else ids))

    source, mine = model(tmp_path / "hf", 48), Mine()
    with build(source, mine) as generator:
        assert generator.tokenizer is mine
        [result] = generator.text_completion(["abc"], temperature=0, max_gen_len=5, logprobs=True)
        assert (
            len(result["tokens"]) == 5
            and "".join(generator.stream_text("abc", 0, max_gen_len=5)) == result["generation"]
        )
    with pytest.raises(LlamaError, match=r"tokenizer_path=5 must be a path, None, or a tokenizer"):
        open_tokenizer(5, open_checkpoint(source))


def test_marks_by_the_names_that_the_settings_give(tmp_path: Path) -> None:
    """As SmolLM2-Instruct's folder: BOS is <|im_start|>, none is added; what ends a text stands in two files."""
    source = model(tmp_path / "hf", 700, eos_token_id=0, bos_token_id=0)
    write(source / "tokenizer.json", MAKERS["byte-level"]())
    found = open_tokenizer(None, open_checkpoint(source))
    assert (found.bos_id, found.eos_id, found.stop_ids, found.add_bos) == (0, 0, {0}, False)
    settings(source, "generation_config.json", eos_token_id=[2, 5], bos_token_id=1)
    found = open_tokenizer(None, open_checkpoint(source))
    assert (found.bos_id, found.eos_id, found.stop_ids) == (1, 2, {2, 5})
    eos = {"content": "<|im_end|>", "special": True}
    settings(source, "tokenizer_config.json", bos_token="<|endoftext|>", eos_token=eos, add_bos_token=True)
    found = open_tokenizer(None, open_checkpoint(source))
    assert (found.bos_id, found.eos_id, found.stop_ids, found.add_bos) == (0, 2, {2, 5}, True)
    assert found.encode("", bos=True, eos=True) == [0, 2]
    settings(source, "tokenizer_config.json", bos_token="", eos_token=7, pad_token=None, add_bos_token="yes")
    found = open_tokenizer(None, open_checkpoint(source))  # nothing of it says anything
    assert (found.bos_id, found.eos_id, found.add_bos) == (1, 2, False)


def test_a_sentencepiece_model_keeps_its_own_marks(tmp_path: Path) -> None:
    source = model(tmp_path / "hf", 400, eos_token_id=1, bos_token_id=0)  # as an early conversion of Llama 1 says
    write(source / "tokenizer.model", SPM)
    found = open_tokenizer(None, open_checkpoint(source))
    assert (found.bos_id, found.eos_id, found.stop_ids, found.add_bos) == (1, 2, {1, 2}, True)
    settings(source, "tokenizer_config.json", add_bos_token=False)
    found = open_tokenizer(None, open_checkpoint(source))
    assert found.encode("river", bos=True, eos=True)[-1] == 2 and 1 not in found.encode("river", bos=True, eos=True)


@pytest.mark.parametrize("legacy", [False, True])
def test_the_space_behind_a_special_token(tmp_path: Path, legacy: bool) -> None:
    """As transformers: only before the first word, or in files that say `legacy` before every part."""
    source = model(tmp_path / "hf", 400)
    write(source / "tokenizer.model", SPM)
    settings(source, "tokenizer_config.json", legacy=legacy)
    found = open_tokenizer(None, open_checkpoint(source))
    part = found.encode("river", bos=False, eos=False, prefix_space=legacy)
    assert found.encode("<s>river", bos=False, eos=False, specials=True) == [1, *part]


@pytest.mark.parametrize("newer", [False, True])
def test_tokens_that_a_fine_tune_added(tmp_path: Path, newer: bool) -> None:
    source = model(tmp_path / "hf", N_SPM + 16)
    write(source / "tokenizer.model", SPM)
    new = {"<|im_start|>": N_SPM, "<|im_end|>": N_SPM + 1, "covid": N_SPM + 4}
    if newer:
        decoder = {str(token): {"content": text, "special": text != "covid"} for text, token in new.items()}
        settings(source, "tokenizer_config.json", added_tokens_decoder=decoder, eos_token="<|im_end|>")
    else:
        settings(source, "added_tokens.json", **new)
        settings(source, "tokenizer_config.json", eos_token="<|im_end|>")
    found = open_tokenizer(None, open_checkpoint(source))
    assert (found.n_words, found.eos_id) == (N_SPM + 5, N_SPM + 1)
    assert found.special_ids == {"<s>": 1, "</s>": 2, "<|im_start|>": N_SPM, "<|im_end|>": N_SPM + 1}
    text = "the covid river<|im_end|>"
    ids = found.encode(text, bos=False, eos=False)
    assert N_SPM + 4 in ids and N_SPM + 1 not in ids and found.decode(ids) == text
    marked = found.encode(text, bos=False, eos=False, specials=True)
    assert marked[-1] == N_SPM + 1 and found.decode(marked) == "the covid river" == found.decode([N_SPM, *marked])
    assert found.decode(marked, keep_space=True) == " the covid river"
    assert found.decode([N_SPM + 2, N_SPM + 9]) == ""


HOSTILE = [
    ("added_tokens.json", {"a": -1, "b": "x", "c": 2**40, "": 5, "d": [1], "e": True}),
    ("tokenizer_config.json", {"added_tokens_decoder": {"x": 5, "²": {"content": "a"}, "9" * 99: {"content": "b"}}}),
    ("tokenizer_config.json", {"added_tokens_decoder": [1], "bos_token": {"content": [1]}, "eos_token": "never seen"}),
    ("generation_config.json", {"eos_token_id": ["a", -5, 2**70, None, True], "bos_token_id": {"a": 1}}),
]


@pytest.mark.parametrize(("name", "content"), HOSTILE)
def test_settings_that_say_nothing_sensible(tmp_path: Path, name: str, content: dict[str, Any]) -> None:
    source = model(tmp_path / "hf", 400)
    write(source / "tokenizer.model", SPM)
    settings(source, name, **content)
    found = open_tokenizer(None, open_checkpoint(source))
    assert (found.n_words, found.bos_id, found.stop_ids) == (N_SPM, 1, {2})
    (source / name).write_text("[" * 100_000)
    with pytest.raises(LlamaError, match=f"{name}.*no valid JSON") as caught:
        open_tokenizer(None, open_checkpoint(source))
    assert len(str(caught.value)) < 1100


# ------------------------------------------------------------------------------ rows of the model without a piece


@pytest.fixture(scope="module", params=MAKERS)
def padded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llama]:
    folder = tmp_path_factory.mktemp("padded")
    path = write(folder / "vocabulary", MAKERS[request.param]())
    with build(model(folder / "hf", Tokenizer(path).n_words + 16), path) as generator:
        yield generator


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.5, "top_p": 1.0}, {"top_k": 3, "seed": 4}])
@pytest.mark.parametrize("hooked", [False, True])
def test_ids_without_a_piece_are_never_drawn(padded: Llama, options: dict[str, Any], hooked: bool) -> None:
    n, vocab = padded.tokenizer.n_words, padded.model.vocab_size
    assert vocab == n + 16
    hook = padded.model.norm.register_forward_hook(lambda *args: None) if hooked else None  # the published schedule
    try:
        prompts = [[1, 2, 3], [4, 5], [n + 12, 7]]  # one in a prompt is fed
        tokens, logprobs = padded.generate(prompts, 20, logprobs=True, **options)
        assert max(map(max, tokens)) < n
        logits = padded.model.forward(torch.tensor([prompts[0]]), 0)[0, -1]
        assert logits.argmax() >= n  # it was the likeliest, and log-probabilities are of the raw logits
        assert logprobs[0][0] == pytest.approx(float(torch.log_softmax(logits, -1)[tokens[0][0]]), abs=1e-3)
        bias = {n + 1: 100.0, tokens[0][0]: -float("inf")}
        biased, _ = padded.generate(prompts[:1], 5, logit_bias=bias, **options)
        assert max(biased[0]) < n and tokens[0][0] not in biased[0]
    finally:
        if hook:
            hook.remove()


def test_it_is_as_if_the_rows_were_not_there(padded: Llama, tmp_path: Path) -> None:
    n = padded.tokenizer.n_words
    params = {**files.GQA, "vocab_size": n}
    weights = {name: tensor.clone() for name, tensor in padded.model.state_dict().items()}
    for name in ("tok_embeddings.weight", "output.weight"):
        weights[name] = weights[name][:n]
    assert files.write_hf(tmp_path / "cut", weights, params)
    with build(tmp_path / "cut", padded.tokenizer) as cut:
        assert cut._schedule([[1]], 1, False).sampler._banned is None  # nothing to do, nothing done
        for options in ({"temperature": 0}, {"temperature": 1.0, "seed": 1}):
            wanted = cut.generate([[1, 2, 3], [4, 5]], 12, **options)
            assert padded.generate([[1, 2, 3], [4, 5]], 12, **options) == wanted


def test_completions_streams_stops_and_scores_are_alike(padded: Llama) -> None:
    for prompt in ("the river 🙂", "日本"):
        whole = padded.text_completion([prompt], 0, max_gen_len=24, keep_space=True, logprobs=True)[0]
        text, tokens = whole["generation"], whole["tokens"]
        assert "".join(tokens) == text == "".join(padded.stream_text(prompt, 0, max_gen_len=24, keep_space=True))
        assert len(text) > 3
        stop = text[len(text) // 2 :][:2]
        [cut] = padded.text_completion([prompt], 0, max_gen_len=24, keep_space=True, stop=[stop])
        assert cut["generation"] == text[: text.index(stop)]
        streamed = padded.stream_text(prompt, 0, max_gen_len=24, keep_space=True, stop=[stop])
        assert "".join(streamed) == cut["generation"]
        [scored] = padded.score([prompt])
        ids = padded.tokenizer.encode(prompt, bos=True, eos=False)
        assert scored["tokens"] == ids and len(scored["logprobs"]) == len(ids)
        [echoed] = padded.text_completion([prompt], 0, max_gen_len=4, echo=True)
        assert prompt in echoed["generation"]


def test_a_trace_shows_what_was_drawn_from(padded: Llama) -> None:
    for settings in (Sampling(temperature=0), Sampling(temperature=1.0, top_p=1.0, seed=1)):
        for step in trace_steps(padded, [1, 2, 3], 3, settings):
            [drawn] = [candidate for candidate in step.candidates if candidate.drawn]
            assert drawn.kept and drawn.final > 0 and step.n_kept <= padded.tokenizer.n_words
            assert step.low <= (step.uniform or 0.0) <= step.high


def test_fewer_rows_than_pieces_is_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = model(tmp_path / "hf", N_SPM - 1)
    write(source / "tokenizer.model", SPM)
    with pytest.raises(LlamaError, match=f"embeds {N_SPM - 1} tokens, but the tokenizer has {N_SPM}"):
        build(source)
    large = model(tmp_path / "large", N_SPM + 1100)
    with caplog.at_level(logging.WARNING, "llama"):
        build(large, str(source / "tokenizer.model")).close()
    assert "the others are never drawn, if it is the right tokenizer" in caplog.text


def test_holes_in_the_vocabulary_are_never_drawn(tmp_path: Path) -> None:
    source = model(tmp_path / "hf", N_SPM + 8)  # the loud rows are the last eight
    write(source / "tokenizer.model", SPM)
    settings(source, "added_tokens.json", **{"[PAD]": N_SPM + 7, "word": N_SPM + 6})
    with build(source) as generator:
        tokens, _ = generator.generate([[1, 5], [1, 6]], 20, temperature=1.0)
        assert {token for row in tokens for token in row if token >= N_SPM} <= {N_SPM + 6, N_SPM + 7}


@pytest.mark.slow
def test_compiled_steps_draw_none_either(tmp_path: Path) -> None:
    source = model(tmp_path / "hf", N_SPM + 8)
    write(source / "tokenizer.model", SPM)
    with build(source) as plain, build(source, compile=True) as compiled:
        wanted = plain.generate([[1, 2, 3], [4, 5]], 12, temperature=0)
        assert compiled.generate([[1, 2, 3], [4, 5]], 12, temperature=0) == wanted


# -------------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize("kind", MAKERS)
def test_trace_and_info(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    source = model(tmp_path / "hf", 700)
    name = "tokenizer.model" if kind in ("sentencepiece", "tiktoken") else "tokenizer.json"
    write(source / name, MAKERS[kind]())
    trace(prompt="the river 🙃", ckpt=str(source), tokens=3, device="cpu", dtype="float32")
    printed = capsys.readouterr().out
    assert "river" in printed and "<0xF0>" in printed
    info(str(source))
    printed = capsys.readouterr().out
    tokenizer = Tokenizer(str(source / name))
    assert f"({tokenizer.vocabulary.kind}, {tokenizer.n_words} pieces, stop ids" in printed
    write(source / name, b"{}")
    assert "which cannot be read: " in describe_tokenizer(open_checkpoint(source))


def test_converting_takes_tokenizer_json_along(tmp_path: Path) -> None:
    source = model(tmp_path / "hf", 700, eos_token_id=2, bos_token_id=1)
    write(source / "tokenizer.json", byte_level(merged(WORDS), CHATML))
    settings(source, "tokenizer_config.json", eos_token="<|im_end|>", add_bos_token=False)
    wanted = open_tokenizer(None, open_checkpoint(source))
    for start, to in ((source, "meta"), (tmp_path / "meta", "hf"), (tmp_path / "hf2", "hf")):
        target = tmp_path / {"meta": "meta", "hf": "hf2" if start != tmp_path / "hf2" else "hf3"}[to]
        convert(str(start), str(target), to)
        found = open_tokenizer(None, open_checkpoint(target))
        for name in ("n_words", "bos_id", "eos_id", "stop_ids", "add_bos", "special_ids"):
            assert getattr(found, name) == getattr(wanted, name), (to, name)
    with pytest.raises(LlamaError, match=r"tokenizer\.json is a vocabulary of the kind tokenizer\.json, but llama2\.c"):
        convert(str(source), str(tmp_path / "c"), "llama2c")


def test_converting_llama_3_writes_its_ids(tmp_path: Path) -> None:
    source = model(tmp_path / "meta", 700, meta=True)
    write(source / "tokenizer.model", MAKERS["tiktoken"]())
    tokenizer = Tokenizer(str(source / "tokenizer.model"))
    convert(str(source), str(tmp_path / "hf"), "hf")
    written = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == (tokenizer.bos_id, sorted(tokenizer.stop_ids))
    assert open_tokenizer(None, open_checkpoint(tmp_path / "hf")).stop_ids == tokenizer.stop_ids
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "hf"))
    for text in ("the cold river", "日本 🙃 1234  x\n\n"):
        assert theirs(text).input_ids == tokenizer.encode(text, bos=True, eos=False)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    with pytest.raises(LlamaError, match=r"a vocabulary of the kind tiktoken, but llama2\.c's programs"):
        convert(str(source), str(tmp_path / "c"), "llama2c")
