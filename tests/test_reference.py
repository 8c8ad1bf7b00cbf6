"""The oracle against figures of the published package, and against what must hold of any Llama."""

import json
from typing import Any

import helpers
import pytest
import reference
import torch
from torch import Tensor

GQA = helpers.PARAMS["gqa"]


def golden_weights(dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and weights of tests/golden/mha."""
    params = json.loads((helpers.GOLDEN / "params.json").read_text())
    stored = torch.load(helpers.GOLDEN / "consolidated.00.pth", weights_only=True)
    return params, {name: weight.to(dtype) for name, weight in stored.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_golden_logits(golden: dict[str, Any], dtype: torch.dtype) -> None:
    params, weights = golden_weights(dtype)
    helpers.close(reference.logits(weights, params, golden["x"]), golden["logits_full"], 1e-4)


def test_golden_greedy_tokens(golden: dict[str, Any]) -> None:
    params, weights = golden_weights(torch.float32)
    for prompt, wanted in zip(golden["prompts"], golden["greedy"]):
        assert reference.greedy(weights, params, prompt, len(wanted)) == wanted
        assert reference.greedy(weights, params, prompt, len(wanted), wanted[3]) == wanted[: wanted.index(wanted[3])]


def test_grouped_heads_are_copied_heads() -> None:
    """Two key/value heads give what four give, of which each is written down twice."""
    weights = reference.random_weights(GQA, seed=3)
    copied = dict(weights)
    for n in range(GQA["n_layers"]):
        for name in (f"layers.{n}.attention.wk.weight", f"layers.{n}.attention.wv.weight"):
            heads = weights[name].unflatten(0, (GQA["n_kv_heads"], -1))  # (g, k, d)
            copied[name] = torch.stack([heads[0], heads[0], heads[1], heads[1]]).flatten(0, 1)  # (h k, d)
    tokens = helpers.random_ids(2, 9)
    found = reference.logits(copied, {**GQA, "n_kv_heads": None}, tokens)
    helpers.close(found, reference.logits(weights, GQA, tokens), 1e-12)


def test_a_position_sees_no_later_one() -> None:
    weights, tokens = reference.random_weights(GQA, seed=4), helpers.random_ids(1, 10)
    whole = reference.logits(weights, GQA, tokens)
    helpers.close(reference.logits(weights, GQA, tokens[:, :6]), whole[:, :6], 1e-12)
    other = torch.cat([tokens[:, :6], (tokens[:, 6:] + 1) % 97], dim=1)
    changed = reference.logits(weights, GQA, other)
    helpers.close(changed[:, :6], whole[:, :6], 1e-12)
    assert (changed[:, 6:] - whole[:, 6:]).abs().min(dim=-1).values.max() > 1e-3


def test_attention_depends_on_distance_only() -> None:
    """Turning both by one more position leaves every product of a query and a key as it was."""
    q, k = torch.randn(2, 1, 1, 12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    q, k = (part[:, :, :1].expand_as(part) for part in (q, k))  # the same vector at every position
    scores = (reference.rotate(q, 10000.0) @ reference.rotate(k, 10000.0).transpose(-1, -2))[0, 0]  # (s, s)
    helpers.close(scores[1:, 1:], scores[:-1, :-1], 1e-12)
    assert (scores[1:, 0] - scores[:-1, 0]).abs().max() > 1e-2


def test_gradients_are_those_of_small_steps() -> None:
    params = {**GQA, "dim": 16, "n_layers": 1, "vocab_size": 7, "multiple_of": 4}
    weights = {name: w.requires_grad_() for name, w in reference.random_weights(params, seed=6).items()}
    tokens = helpers.random_ids(1, 4, vocab_size=7)

    def score(*values: Tensor) -> Tensor:
        return torch.log_softmax(reference.logits(dict(zip(weights, values)), params, tokens), dim=-1)[0, -1, 2]

    assert torch.autograd.gradcheck(score, tuple(weights.values()), fast_mode=True)
