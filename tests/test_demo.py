"""The model that ships: its size, and that oracle and library read the same answers from it."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import reference
import torch

from llama import Llama

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "checkpoints" / "demo"


@pytest.fixture(scope="module")
def text() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_text", ROOT / "tools" / "demo_text.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generator() -> Iterator[Llama]:
    with Llama.build(str(DEMO), str(DEMO / "tokenizer.model"), 256, 32, device="cpu", dtype="float32") as built:
        yield built


def test_it_is_small() -> None:
    assert (DEMO / "consolidated.00.pth").stat().st_size <= 4_000_000
    weights = torch.load(DEMO / "consolidated.00.pth", weights_only=True)
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    params = json.loads((DEMO / "params.json").read_text())
    assert params["n_kv_heads"] < params["n_heads"] and params["vocab_size"] == -1
    assert list(weights) == list(reference.shapes({**params, "vocab_size": 1024}))


def test_it_answers_what_was_written_down_before_the_training(text: ModuleType, generator: Llama) -> None:
    dialogs = [[{"role": "user", "content": question}] for question, _ in text.FIXED]
    answers = [found["generation"]["content"] for found in generator.chat_completion(dialogs, 0, max_gen_len=40)]  # type: ignore
    right = sum(wanted in answer for (_, wanted), answer in zip(text.FIXED, answers))
    assert right >= 18, answers


def test_nothing_held_out_was_trained(text: ModuleType) -> None:
    train, held, kept, strange = text.split(20261130)
    known = {text.normal(question) for question, *_ in train} | {text.normal(question) for question in kept}
    asked = {text.normal(question) for question, *_ in held} | {text.normal(question) for question in strange}
    assert len(held) >= 300 and not known & asked
    assert {text.normal(question) for question, _ in text.FIXED} <= asked


def test_the_oracle_says_the_same(text: ModuleType, generator: Llama) -> None:
    params = {**json.loads((DEMO / "params.json").read_text()), "vocab_size": 1024}
    weights = {k: v.float() for k, v in torch.load(DEMO / "consolidated.00.pth", weights_only=True).items()}
    for question, _ in text.FIXED[:4]:
        prompt = generator.tokenizer.encode(f"[INST] {question} [/INST]", bos=True, eos=False)
        wanted = reference.greedy(weights, params, prompt, 12, eos_id=2)
        assert generator.generate([prompt], 12, temperature=0)[0] == [wanted]
        ids = torch.tensor([prompt])
        close = (generator.model(ids, 0) - reference.logits(weights, params, ids)).abs().max()
        assert close < 1e-3
