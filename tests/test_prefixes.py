"""Prompts that begin alike: what they share is fed once, and nothing else about them changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import GOLDEN, make_model

from llama import Llama, Tokenizer
from llama.engine import prefixes, scheduler
from llama.engine.prefixes import MIN_SHARED, prefix_runs, shared_length
from llama.engine.request import RowState
from llama.model import Transformer

BASE = [1, *(5 + i % 90 for i in range(60))]  # a beginning longer than MIN_SHARED
OTHER = [1, *(7 + i * 3 % 80 for i in range(50))]
SETS: dict[str, list[list[int]]] = {
    "equal": [BASE] * 3,
    "endings": [[*BASE, 9], [*BASE, 4, 4, 4], [*BASE, 8, 7], [*BASE, 9]],
    "one is the beginning of another": [BASE, [*BASE, 3], BASE[:45]],
    "two beginnings": [[*BASE, 9], [*BASE, 4], [*OTHER, 3], [*OTHER, 5, 5], [*OTHER, 6]],
    "strangers between": [[1, 5], [*BASE, 9], [*BASE, 4], [1, 7, 9], [1, 3], [*BASE, 2], [*OTHER, 1], [*OTHER, 2]],
    "more than there are rows": [[*BASE, 5 + i, *range(5, 5 + i % 4)] for i in range(11)],
    "just too short": [[*BASE[:MIN_SHARED], 9], [*BASE[:MIN_SHARED], 8]],
}


@pytest.fixture(params=[1, 3, pytest.param(8, marks=pytest.mark.slow)])
def generator(request: pytest.FixtureRequest) -> Llama:
    tokenizer = Tokenizer(str(GOLDEN / "tokenizer.model"))
    return Llama(
        make_model("gqa", max_batch_size=request.param, max_seq_len=96, vocab_size=tokenizer.n_words), tokenizer
    )


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows times positions of each call of the model."""
    counts: list[int] = []
    hidden = Transformer.hidden

    def counting(self: Transformer, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        counts.append(tokens.numel())
        return hidden(self, tokens, *args, **kwargs)

    monkeypatch.setattr(Transformer, "hidden", counting)
    return counts


@pytest.fixture
def unshared(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Any]:
    """What a call gives where nothing is shared."""

    def run(call: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            for module in (prefixes, scheduler):
                patch.setattr(module, "MIN_SHARED", 10**9)
            return call()

    return run


def same(found: Any, wanted: Any) -> None:
    """Equal, numbers but for rounding: other shapes add up in another order."""
    if isinstance(wanted, float):
        assert found == pytest.approx(wanted, abs=1e-4)
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        same(list(found.values()), list(wanted.values()))
    else:
        assert found == wanted


CALLS: dict[str, Callable[[Llama, list[list[int]]], Any]] = {
    "greedy": lambda g, p: g.generate(p, 12, temperature=0, logprobs=True),
    "echo": lambda g, p: g.generate(p, 3, temperature=0, logprobs=True, echo=True, top_logprobs=3, details=True),
    "small chunks": lambda g, p: g.generate(p, 3, temperature=0, logprobs=True, echo=True, prefill_chunk=7),
    "seed": lambda g, p: g.generate(p, 12, temperature=0.8, seed=5),
    "score": lambda g, p: g.score(p),
    "stream": lambda g, p: sorted(g.stream(p, 8, temperature=0), key=lambda step: step.prompt),
}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("call", CALLS)
def test_results_are_those_without_sharing(
    generator: Llama, unshared: Callable[[Callable[[], Any]], Any], call: str, name: str
) -> None:
    torch.manual_seed(3)
    found = CALLS[call](generator, SETS[name])
    torch.manual_seed(3)
    same(found, unshared(lambda: CALLS[call](generator, SETS[name])))


def test_draws_without_a_seed_are_those_without_sharing(unshared: Callable[[Callable[[], Any]], Any]) -> None:
    """Torch's global generator goes on as published: one draw a step for all rows."""
    tokenizer = Tokenizer(str(GOLDEN / "tokenizer.model"))
    generator = Llama(make_model("gqa", max_batch_size=8, max_seq_len=96, vocab_size=tokenizer.n_words), tokenizer)
    prompts = [[*BASE, 9, 9], [1, *range(5, 67)], [*BASE, 4, 4], [*BASE, 8, 7]]

    def call() -> Any:
        torch.manual_seed(3)
        return generator.generate(prompts, 12, temperature=0.9)

    assert call() == unshared(call)


def test_what_is_shared_is_fed_once(generator: Llama, fed: list[int]) -> None:
    """11 prompts with a common beginning of 61 ids: 60 positions once, and of each prompt what is left."""
    prompts = SETS["more than there are rows"]
    generator.generate(prompts, 1, temperature=0)
    rows = generator.model.params.max_batch_size
    batches = [prompts[i : i + rows] for i in range(0, len(prompts), rows)]  # each fed side by side, padded
    padded = sum(len(batch) * (max(map(len, batch)) - 60) for batch in batches)
    assert sum(fed) == 60 + padded


def test_rows_that_are_refilled_one_at_a_time(fed: list[int]) -> None:
    """Rows that end at different steps let prompts in one by one, whose beginning other rows still hold."""
    tokenizer = Tokenizer(str(GOLDEN / "tokenizer.model"))
    generator = Llama(make_model("gqa", max_batch_size=2, max_seq_len=96, vocab_size=tokenizer.n_words), tokenizer)
    prompts = [[*BASE, *range(5, 6 + i)] for i in range(9)]
    long, _ = generator.generate(prompts, 20, temperature=0)
    stops = sorted({tokens[3 + 2 * i] for i, tokens in enumerate(long)})
    fed.clear()
    short, _ = generator.generate(prompts, 20, temperature=0, stop_ids=stops)
    assert len({len(tokens) for tokens in short}) > 3
    assert sum(fed) < 60 + 2 * sum(len(prompt) - 60 for prompt in prompts) + sum(len(tokens) + 1 for tokens in short)


def test_a_hooked_model_is_fed_whole_prompts(generator: Llama) -> None:
    lengths: list[int] = []
    hook = generator.model.layers[0].register_forward_hook(lambda block, args, output: lengths.append(output.shape[1]))
    generator.generate([BASE, BASE][: generator.model.params.max_batch_size], 1, temperature=0)
    hook.remove()
    assert lengths == [len(BASE)]


def test_runs() -> None:
    """In order, strangers together; a run is what begins as its first does."""
    rows = [RowState(i, prompt, 99) for i, prompt in enumerate(SETS["strangers between"])]
    runs = [[row.index for row in run] for run in prefix_runs(rows)]
    assert runs == [[0], [1, 2], [5, 3, 4], [6, 7]]
    assert shared_length([rows[1], rows[2]]) == len(BASE) - 1
    assert shared_length([rows[0]]) == 1
