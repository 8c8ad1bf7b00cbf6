"""The model that ships: its files, its answers through the oracle, and the library reading it as the oracle does."""

import json
import sys
from typing import Any

import helpers
import pytest
import reference
import torch
from torch import Tensor

from llama import Llama, Tokenizer

sys.path.append(str(helpers.ROOT / "tools"))

import demo_text

DEMO = helpers.ROOT / "checkpoints" / "demo"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(str(DEMO / "tokenizer.model"))


@pytest.fixture(scope="module")
def params(tokenizer: Tokenizer) -> dict[str, Any]:
    return {**json.loads((DEMO / "params.json").read_text()), "vocab_size": tokenizer.n_words}


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    stored = torch.load(DEMO / "consolidated.00.pth", weights_only=True)
    assert {weight.dtype for weight in stored.values()} == {torch.bfloat16}
    return {name: weight.float() for name, weight in stored.items()}


def test_files(weights: dict[str, Tensor], params: dict[str, Any]) -> None:
    """Small, in Meta's format, complete, and with fewer key/value heads than heads."""
    assert (DEMO / "consolidated.00.pth").stat().st_size <= 4_000_000
    assert {path.name for path in DEMO.iterdir()} == {"consolidated.00.pth", "params.json", "tokenizer.model"}
    assert json.loads((DEMO / "params.json").read_text())["vocab_size"] == -1
    assert params["n_kv_heads"] < params["n_heads"] and params["n_heads"] % params["n_kv_heads"] == 0
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == reference.shapes(params)
    assert list(weights) == list(reference.shapes(params))


def test_tokenizer(tokenizer: Tokenizer) -> None:
    """At most 2048 pieces, Llama 2's special ids, and bytes for what it has no piece for."""
    assert tokenizer.n_words <= 2048
    assert (tokenizer.sp_model.unk_id(), tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2, -1)
    strange = "Zürich 你 🙂 [INST]\n"
    ids = tokenizer.encode(strange, bos=False, eos=False)
    assert 0 not in ids and tokenizer.decode(ids) == strange


def test_no_held_out_question_is_trained_on() -> None:
    train, held, kept, strange = demo_text.split(20261130)
    whole = demo_text.written([question for question, *_ in train] + kept)
    asked = [question for question, *_ in held] + [question for question, _ in demo_text.FIXED] + strange
    assert len(held) >= 300 and len(demo_text.FIXED) == 20
    assert [question for question in asked if demo_text.written([question]) in whole] == []


def test_the_fixed_twenty(weights: dict[str, Tensor], params: dict[str, Any], tokenizer: Tokenizer) -> None:
    answers = []
    for question, wanted in demo_text.FIXED:
        prompt = tokenizer.encode(f"[INST] {question} [/INST]", bos=True, eos=False)
        answer = tokenizer.decode(reference.greedy(weights, params, prompt, 30, tokenizer.eos_id))
        answers.append((question, answer, wanted in answer))
    assert sum(right for *_, right in answers) >= 18, answers


def test_the_library_reads_it_as_the_oracle_does(weights: dict[str, Tensor], params: dict[str, Any]) -> None:
    tokens = helpers.random_ids(2, 60, vocab_size=params["vocab_size"])
    with Llama.build(str(DEMO), str(DEMO / "tokenizer.model"), 64, 2, device="cpu", dtype="float32") as generator:
        found = generator.model.forward(tokens, 0)
    helpers.close(found, reference.logits(weights, params, tokens), 1e-4)
