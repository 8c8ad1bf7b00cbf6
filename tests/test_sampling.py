"""From literal logits to exact sets and frequencies."""

import math

import pytest
import torch

from llama import LlamaError
from llama.engine.sampling import (
    History,
    Sampling,
    bias_vector,
    distribution,
    nucleus,
    penalize,
    row_generator,
    sample_at,
)

LOGITS = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.07, 0.03]]))


def kept(probs: torch.Tensor) -> set[int]:
    return set((probs[0] > 0).nonzero()[:, 0].tolist())


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 0}, {0, 1, 2, 3, 4}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"min_p": 0.2}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "min_p": 0.4}, {0, 1}),
    ],
)
def test_what_is_kept(settings: dict[str, float], wanted: set[int]) -> None:
    probs = distribution(LOGITS, Sampling(temperature=1.0, **settings))
    assert kept(probs) == wanted
    torch.testing.assert_close(probs.sum(), torch.tensor(1.0))


def test_top_p_keeps_the_token_that_crosses_the_mass() -> None:
    for p, wanted in ((0.0, [0]), (0.49, [0]), (0.5001, [0, 1]), (0.76, [0, 1, 2]), (1.0, [0, 1, 2, 3, 4])):
        probs, ids = nucleus(torch.softmax(LOGITS, -1), p)
        assert ids[0][probs[0] > 0].tolist() == wanted, p


def test_temperature_sharpens() -> None:
    cold, hot = (distribution(LOGITS, Sampling(temperature=t))[0, 0].item() for t in (0.5, 2.0))
    assert cold == pytest.approx(0.25 / (0.25 + 0.0625 + 0.0225 + 0.0049 + 0.0009), abs=1e-5) and hot < 0.5
    assert distribution(LOGITS, Sampling(temperature=1e-320))[0].tolist() == [1, 0, 0, 0, 0]


def test_penalties_are_those_of_the_papers() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 4.0]])
    history = History([0], 4, logits.device)
    for token in (1, 1, 2):
        history.add(token)
    repeated = penalize(logits, [history], Sampling(repetition_penalty=2.0))
    assert repeated.tolist() == [[1.0, -4.0, 0.5, 4.0]]  # prompt and output
    counted = penalize(logits, [history], Sampling(frequency_penalty=0.5, presence_penalty=0.25))
    assert counted.tolist() == [[2.0, -3.25, 0.25, 4.0]]  # output only


def test_bias_is_added_to_the_raw_logits() -> None:
    logits = torch.tensor([[1.0, 2.0]])
    assert (logits + bias_vector({0: 5.0, 1: -math.inf}, 2)).tolist() == [[6.0, -math.inf]]
    assert logits.tolist() == [[1.0, 2.0]]


def test_frequencies_of_draws() -> None:
    torch.manual_seed(0)
    n = 20000
    probs = torch.softmax(LOGITS, -1).repeat(n, 1)
    drawn = torch.bincount(sample_at(probs, 0.8, torch.rand(n))[:, 0], minlength=5) / n
    torch.testing.assert_close(drawn, torch.tensor([0.5, 0.25, 0.15, 0, 0]) / 0.9, atol=0.015, rtol=0)
    edges = sample_at(probs[:2], 1.0, torch.tensor([0.0, 1 - 1e-7]))
    assert edges[:, 0].tolist() == [0, 4]


def test_a_rows_generator_hangs_on_seed_prompt_and_copy() -> None:
    numbers = {
        torch.rand((), generator=row_generator(*what)).item()
        for what in ((1, [5], 0), (2, [5], 0), (1, [6], 0), (1, [5], 1))
    }
    assert len(numbers) == 4
    assert row_generator(1, [5], 0).initial_seed() == row_generator(1, [5], 0).initial_seed()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", math.inf), ("temperature", math.nan), ("temperature", "hot"),
        ("top_p", 1.01), ("top_p", -0.01), ("top_p", math.nan), ("top_k", -1), ("top_k", 1.5), ("min_p", 1.5),
        ("repetition_penalty", 0), ("repetition_penalty", -1.0), ("frequency_penalty", math.inf), ("presence_penalty", math.nan),
        ("logit_bias", [1]), ("logit_bias", {"a": 1.0}), ("logit_bias", {1: math.nan}), ("seed", 1.5), ("top_logprobs", -1),
    ],
)  # fmt: skip
def test_each_mistake_names_field_value_and_range(field: str, value: object) -> None:
    with pytest.raises(LlamaError, match=f"{field}=.*must") as error:
        Sampling(**{field: value})  # type: ignore[arg-type]
    assert str(value)[:2] in str(error.value) or repr(value)[:3] in str(error.value)
