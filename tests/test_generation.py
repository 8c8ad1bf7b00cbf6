"""Generation: the published results, the published faults mended, and the published calls where anyone watches."""

import contextlib
import copy
import json
import logging
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import (
    GOLDEN,
    ROWS,
    WINDOW,
    StubModel,
    StubTokenizer,
    build_golden,
    make_model,
    near,
    oracle_greedy,
    oracle_logprobs,
    published_schedule,
    random_prompts,
    recorded,
)
from torch import Tensor, nn

import llama.model
from llama import Dialog, Llama, LlamaError, Step, Transformer, encode_dialog
from llama.distributed import layers
from llama.generation import UNSAFE_ERROR, sample_top_p

NAN, INF = float("nan"), float("inf")
RAGGED = (4, 9, 2)


def make(kind: str = "gqa", eos_id: int | None = None, **changes: Any) -> Llama:
    """A generator of parts: a tiny model (float32) and the stub tokenizer, which by default never stops."""
    tokenizer = StubTokenizer()
    tokenizer.eos_id = eos_id
    return Llama(make_model(kind, **changes), tokenizer)


def first_eos(kind: str, prompts: list[list[int]], n: int) -> int:
    """An id that some rows say early and others late or never."""
    texts = [oracle_greedy(kind, prompt, n) for prompt in prompts]
    return texts[0][2]


# ------------------------------------------------------------------------------------------- golden


def test_golden_greedy(generator: Llama, golden: dict[str, Any]) -> None:
    tokens, logprobs = generator.generate(golden["prompts"], 12, temperature=0, logprobs=True)
    assert tokens == golden["greedy"]
    for found, wanted in zip(logprobs, golden["greedy_lp"], strict=True):
        near(found, wanted)


def test_golden_echo(generator: Llama, golden: dict[str, Any]) -> None:
    tokens, logprobs = generator.generate(golden["prompts"], 12, temperature=0, logprobs=True, echo=True)
    assert tokens == golden["echo"]
    for found, wanted in zip(logprobs, golden["echo_lp"], strict=True):
        near(found, wanted)
    assert generator.generate(golden["prompts"], 12, temperature=0, echo=True) == (golden["echo"], None)


# The figures were drawn with torch 2.13.
other_draws = pytest.mark.skipif(
    torch.__version__.startswith("2.5."), reason="torch 2.5 draws other numbers from the same seed"
)


@other_draws
def test_golden_sampled(generator: Llama, golden: dict[str, Any]) -> None:
    torch.manual_seed(5)
    tokens, logprobs = generator.generate([golden["prompts"][1]], 16, temperature=0.9, top_p=0.8)
    assert (tokens, logprobs) == (golden["one_sampled"], None)


@other_draws
def test_build_draws_nothing_after_the_seed(golden: dict[str, Any]) -> None:
    with build_golden(seed=5) as generator:
        tokens, _ = generator.generate([golden["prompts"][1]], 16, temperature=0.9, top_p=0.8)
    assert tokens == golden["one_sampled"]


def test_golden_text(generator: Llama, golden: dict[str, Any]) -> None:
    prompts = ["river stone", "the cold night"]
    found = generator.text_completion(prompts, temperature=0, max_gen_len=10, logprobs=True)
    for got, wanted in zip(found, golden["text"], strict=True):
        near(got.pop("logprobs"), wanted["logprobs"])
        assert got == {"generation": wanted["generation"], "tokens": wanted["tokens"]}
    plain = generator.text_completion(prompts, temperature=0, max_gen_len=10)
    assert plain == [{"generation": wanted["generation"]} for wanted in golden["text"]]


def golden_dialogs() -> list[Dialog]:
    return [
        [{"role": "system", "content": "be small"}, {"role": "user", "content": "bird?"}],
        [{"role": "user", "content": "a [INST] b"}],
        [
            {"role": "user", "content": "rain"},
            {"role": "assistant", "content": "fell"},
            {"role": "user", "content": "soon?"},
        ],
    ]


def test_golden_chat(generator: Llama, golden: dict[str, Any]) -> None:
    dialogs = golden_dialogs()
    assert generator.chat_completion(dialogs, temperature=0, max_gen_len=9) == golden["chat"]
    assert dialogs == golden_dialogs()


# --------------------------------------------------------------------- batch = alone = reversed = oracle


def test_ragged_is_alone_is_reversed_is_the_oracle(kind: str) -> None:
    generator, prompts = make(kind), random_prompts(*RAGGED, 17)
    together, logprobs = generator.generate(prompts, 12, temperature=0, logprobs=True)
    assert together == [oracle_greedy(kind, prompt, 12) for prompt in prompts]
    assert [generator.generate([prompt], 12, temperature=0)[0][0] for prompt in prompts] == together
    assert generator.generate(prompts[::-1], 12, temperature=0)[0] == together[::-1]
    for prompt, text, found in zip(prompts, together, logprobs, strict=True):
        near(found, oracle_logprobs(kind, prompt + text)[len(prompt) :])


def test_the_text_scored_in_one_pass_has_the_same_log_probabilities(kind: str) -> None:
    generator, prompts = make(kind), random_prompts(*RAGGED)
    tokens, said = generator.generate(prompts, 12, temperature=0.8, top_p=0.9, logprobs=True, echo=True)
    same, scored = generator.generate(tokens, 0, logprobs=True, echo=True)
    assert same == tokens
    for one, other in zip(said, scored, strict=True):
        near(one, other)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 11])
def test_refilled_rows_are_rows_alone(count: int) -> None:
    generator = make("gqa")
    prompts = random_prompts(*[(5, 11, 2, 7)[i % 4] for i in range(count)])
    generator.tokenizer.eos_id = first_eos("gqa", prompts, 10)
    together, logprobs = generator.generate(prompts, 10, temperature=0, logprobs=True, echo=True)
    for prompt, text, found in zip(prompts, together, logprobs, strict=True):
        wanted = prompt + oracle_greedy("gqa", prompt, 10, generator.tokenizer.eos_id)
        assert text == wanted
        near(found, oracle_logprobs("gqa", wanted))


def test_old_caches_do_not_matter() -> None:
    generator, prompts = make("gqa"), random_prompts(*RAGGED)
    generator.tokenizer.eos_id = first_eos("gqa", prompts, 12)
    wanted = generator.generate(prompts, 12, temperature=0)
    for old in (NAN, 1e4, -INF):
        for layer in generator.model.layers:
            layer.attention.cache_k.fill_(old)
            layer.attention.cache_v.fill_(old)
        assert generator.generate(prompts * 2, 12, temperature=0)[0] == wanted[0] * 2


def test_streamed_is_whole() -> None:
    generator, prompts = make(), random_prompts(*RAGGED)
    generator.tokenizer.eos_id = eos_id = first_eos("gqa", prompts, 12)
    wanted, logprobs = generator.generate(prompts, 12, temperature=0, logprobs=True)
    found: list[list[Step]] = [[], [], []]
    for step in generator.stream(prompts, 12, temperature=0, logprobs=True):
        found[step.prompt].append(step)
    for steps, tokens, scores in zip(found, wanted, logprobs, strict=True):
        assert [step.token for step in steps if step.token != eos_id] == tokens
        assert [step.logprob for step in steps][: len(scores)] == scores
        assert [step.finish_reason for step in steps[:-1]] == [None] * (len(steps) - 1)
        assert steps[-1].finish_reason == ("stop" if steps[-1].token == eos_id else "length")


def test_a_stream_that_is_left_leaves_the_next_call_right() -> None:
    generator, prompts = make(), random_prompts(*RAGGED)
    wanted = generator.generate(prompts, 12, temperature=0)
    stream = generator.stream(prompts, 12, temperature=0)
    for _ in range(5):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert generator.generate(prompts, 12, temperature=0) == wanted


# ------------------------------------------------------------------------------------------ stopping


def test_a_row_ends_before_its_eos(kind: str) -> None:
    generator, prompts = make(kind), random_prompts(*RAGGED)
    free, _ = generator.generate(prompts, 12, temperature=0)
    generator.tokenizer.eos_id = eos_id = free[1][4]  # read at each call
    tokens, logprobs = generator.generate(prompts, 12, temperature=0, logprobs=True)
    wanted = [text[: text.index(eos_id)] if eos_id in text else text for text in free]
    assert tokens == wanted and len(tokens[1]) <= 4
    assert [len(row) for row in logprobs] == [len(row) for row in tokens]
    assert generator.generate(prompts, 12, temperature=0, echo=True)[0] == [p + t for p, t in zip(prompts, wanted)]


def test_an_eos_inside_the_prompt_does_not_cut_the_echo() -> None:
    generator = make()
    prompts = [[95, 3, 96, 5, 96], [95, 96], [96, 7, 8]]
    generator.tokenizer.eos_id = 96
    tokens, logprobs = generator.generate(prompts, 6, temperature=0, logprobs=True, echo=True)
    for prompt, text, found in zip(prompts, tokens, logprobs, strict=True):
        assert text == prompt + oracle_greedy("gqa", prompt, 6, 96)
        near(found, oracle_logprobs("gqa", text))


def test_eos_as_the_very_first_token() -> None:
    generator, prompts = make(), random_prompts(*RAGGED)
    generator.tokenizer.eos_id = oracle_greedy("gqa", prompts[1], 1)[0]
    tokens, logprobs = generator.generate(prompts, 5, temperature=0, logprobs=True)
    assert tokens[1] == [] and logprobs[1] == [] and tokens[0]


def test_nothing_is_computed_once_all_rows_have_finished() -> None:
    generator, prompts = make(), random_prompts(5, 5, 5)
    generator.model = StubModel()
    generator.tokenizer.eos_id = 40
    tokens, _ = generator.generate([[36], [37], [38]], 30, temperature=0)
    assert tokens == [[37, 38, 39], [38, 39], [39]]
    assert [start for _, start in generator.model.calls] == [0, 1, 2, 3]
    own = make()
    own.tokenizer.eos_id = oracle_greedy("gqa", prompts[0], 4)[3]
    with recorded("embedding") as calls:
        own.generate([prompts[0]] * 3, 30, temperature=0)
    assert len(calls) <= 4


@pytest.mark.parametrize("max_gen_len", [0, 1, 5, 31, 32, 1000, None])
def test_how_many_tokens(max_gen_len: int | None) -> None:
    generator, prompts = make(), random_prompts(17, 3)
    asked = WINDOW if max_gen_len is None else max_gen_len
    tokens, logprobs = generator.generate(prompts, max_gen_len, temperature=0, logprobs=True)
    wanted = [min(asked, WINDOW - 17), min(asked, WINDOW - 3)]
    assert [len(row) for row in tokens] == wanted == [len(row) for row in logprobs]
    assert tokens == [oracle_greedy("gqa", prompt, asked) for prompt in prompts]


def test_completions_without_max_gen_len_fill_the_window(generator: Llama) -> None:
    generator.tokenizer.eos_id = None
    prompt = generator.tokenizer.encode("river stone", bos=True, eos=False)
    found = generator.text_completion(["river stone"], temperature=0, logprobs=True)[0]
    assert len(found["tokens"]) == WINDOW - len(prompt)


def test_a_prompt_as_long_as_the_window() -> None:
    generator, (long, short) = make(), random_prompts(WINDOW, 6)
    tokens, logprobs = generator.generate([long, short], 5, temperature=0, logprobs=True)
    assert tokens == [[], oracle_greedy("gqa", short, 5)] and logprobs[0] == []
    tokens, logprobs = generator.generate([long], 5, temperature=0, logprobs=True, echo=True)
    assert tokens == [long]
    near(logprobs[0], oracle_logprobs("gqa", long))


# ----------------------------------------------------------------------------------------- scoring


def test_scoring_without_generating(kind: str) -> None:
    generator, prompts = make(kind), random_prompts(*RAGGED, 1)
    tokens, logprobs = generator.generate(prompts, 0, logprobs=True, echo=True)
    assert tokens == prompts
    for prompt, found in zip(prompts, logprobs, strict=True):
        assert found[0] == 0.0
        near(found, oracle_logprobs(kind, prompt))
    assert generator.generate(prompts, 0, logprobs=True) == ([[]] * 4, [[]] * 4)
    assert generator.generate(prompts, 0) == ([[]] * 4, None)


def test_log_probabilities_are_of_the_raw_logits() -> None:
    generator, prompts = make(), random_prompts(6)
    tokens, logprobs = generator.generate(prompts, 8, temperature=1.7, top_p=0.4, logprobs=True)
    near(logprobs[0], oracle_logprobs("gqa", prompts[0] + tokens[0])[6:])


def test_no_prompts_and_an_empty_text(generator: Llama) -> None:
    assert generator.generate([], 5) == ([], None)
    assert generator.generate([], 5, logprobs=True) == ([], [])
    assert generator.text_completion([]) == [] and generator.chat_completion([]) == []
    bos_alone, logprobs = generator.generate([[generator.tokenizer.bos_id]], 6, temperature=0, logprobs=True)
    found = generator.text_completion(["", "river"], temperature=0, max_gen_len=6, logprobs=True)[0]
    assert found["generation"] == generator.tokenizer.decode(bos_alone[0])
    near(found["logprobs"], logprobs[0])


def test_an_empty_generation_of_a_completion(generator: Llama) -> None:
    assert generator.text_completion(["river"], max_gen_len=0) == [{"generation": ""}]
    empty = {"generation": "", "tokens": [], "logprobs": []}
    assert generator.text_completion(["river"], max_gen_len=0, logprobs=True) == [empty]


def test_an_echoed_completion(generator: Llama) -> None:
    prompt = generator.tokenizer.encode("river stone", bos=True, eos=False)
    tokens, logprobs = generator.generate([prompt], 5, temperature=0, logprobs=True, echo=True)
    found = generator.text_completion(["river stone"], temperature=0, max_gen_len=5, logprobs=True, echo=True)[0]
    decode = generator.tokenizer.decode
    assert found["generation"] == decode(tokens[0]) and found["generation"].startswith("river stone")
    assert found["tokens"] == [decode(token) for token in tokens[0]] and found["logprobs"] == logprobs[0]


# ------------------------------------------------------------------------------------------ sampling


def own_loop(model: Any, prompts: list[list[int]], steps: int, temperature: float, top_p: float) -> list[list[int]]:
    """A caller's own sampling over prompts of one length, all rows to the end, as published code has it."""
    tokens, start, out = torch.tensor(prompts), 0, []
    for _ in range(steps):
        logits = model.forward(tokens, start)[:, -1]
        start += tokens.shape[1]
        tokens = sample_top_p(torch.softmax(logits / temperature, dim=-1), top_p)
        out.append(tokens)
    return torch.cat(out, dim=1).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("watched", [False, True], ids=["ours", "watched"])
@pytest.mark.parametrize(("temperature", "top_p"), [(0.6, 0.9), (1.3, 0.5), (1.0, 1.0)])
def test_a_callers_own_loop_draws_the_same(count: int, watched: bool, temperature: float, top_p: float) -> None:
    generator, prompts = make(), random_prompts(*[6] * count)
    if watched:
        generator.model.layers[0].register_forward_hook(lambda *args: None)
    torch.manual_seed(11)
    wanted = own_loop(generator.model, prompts, 14, temperature, top_p)
    torch.manual_seed(11)
    assert generator.generate(prompts, 14, temperature=temperature, top_p=top_p)[0] == wanted
    generator.tokenizer.eos_id = eos_id = wanted[-1][3]  # a finished row still uses up its numbers, as published
    torch.manual_seed(11)
    tokens, _ = generator.generate(prompts, 14, temperature=temperature, top_p=top_p)
    assert tokens == [row[: row.index(eos_id)] if eos_id in row else row for row in wanted]


def test_published_defaults_of_sampling() -> None:
    generator, prompts = make(), random_prompts(6)
    torch.manual_seed(2)
    wanted = own_loop(generator.model, prompts, 10, 0.6, 0.9)
    torch.manual_seed(2)
    assert generator.generate(prompts, 10)[0] == wanted


def test_greedy_draws_nothing_and_is_the_argmax() -> None:
    generator, prompts = make(), random_prompts(*RAGGED)
    state = torch.get_rng_state()
    tokens, _ = generator.generate(prompts, 6, temperature=0, top_p=0.1)
    assert torch.equal(torch.get_rng_state(), state)
    assert tokens == generator.generate(prompts, 6, temperature=0.7, top_p=0)[0]  # the likeliest alone is left
    assert tokens == generator.generate(prompts, 6, temperature=1e-30)[0]


def test_sample_top_p_is_the_published_formula() -> None:
    probs = torch.softmax(torch.randn(5, 97, generator=torch.Generator().manual_seed(1)) * 2, dim=-1)
    before = probs.clone()
    for p in (0.0, 0.3, 0.9, 1.0):
        sorted_, ids = torch.sort(probs, dim=-1, descending=True)
        sorted_[torch.cumsum(sorted_, dim=-1) - sorted_ > p] = 0.0
        sorted_ /= sorted_.sum(dim=-1, keepdim=True)
        torch.manual_seed(4)
        wanted = torch.gather(ids, -1, torch.multinomial(sorted_, num_samples=1))
        torch.manual_seed(4)
        found = sample_top_p(probs, p)
        assert torch.equal(found, wanted) and found.shape == (5, 1) and found.dtype == torch.int64
    assert torch.equal(probs, before)
    assert torch.equal(sample_top_p(probs, 0.0)[:, 0], probs.argmax(dim=-1))


def test_sample_top_p_keeps_the_smallest_set_that_passes_p() -> None:
    probs = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).repeat(2000, 1)
    assert set(sample_top_p(probs, 0.7)[:, 0].tolist()) == {1, 3}
    assert set(sample_top_p(probs, 0.8)[:, 0].tolist()) == {1, 3, 2}
    share = (sample_top_p(probs, 0.7) == 1).float().mean().item()
    assert abs(share - 2 / 3) < 0.05


# ------------------------------------------------------------------------------- what others notice


def watch(model: Any, way: str, calls: list[tuple[Any, Any]], patch: pytest.MonkeyPatch) -> Any:
    """A model that notes its forward calls, each in another way of outside code; `calls` gets (shape, start_pos)."""

    def note(tokens: Tensor, start_pos: Any) -> None:
        calls.append((tuple(tokens.shape), start_pos))

    def noting(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(*args: Any) -> Tensor:  # by position, no keywords
            note(*args[-2:])
            return original(*args)

        return forward

    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        note(output[..., 0], args[1])

    if way == "patched instance":
        model.forward = noting(model.forward)
    elif way == "patched class":
        patch.setattr(Transformer, "forward", noting(Transformer.forward))
    elif way == "stub":
        stub = type("Stub", (), {})()
        stub.params, stub.forward = model.params, noting(model.forward)
        return stub
    elif way == "subclass":
        sub = type("Mine", (Transformer,), {"forward": noting(Transformer.forward)})
        model.__class__ = sub
    elif way == "block hook":
        model.get_submodule("layers.1").register_forward_hook(hook)
    elif way == "pre-hook":
        model.get_submodule("layers.0.attention").register_forward_pre_hook(
            lambda module, args: note(args[0][..., 0], args[1])
        )
    elif way == "patched block":
        model.layers[0].forward = noting_block(model.layers[0].forward, note)
    elif way == "patched attention class":
        patch.setattr(llama.model.Attention, "forward", patched_attention(calls, len(model.layers)))
    return model


def noting_block(original: Callable[..., Tensor], note: Callable[[Tensor, Any], None]) -> Callable[..., Tensor]:
    def forward(x: Tensor, start_pos: Any, freqs_cis: Tensor, mask: Any) -> Tensor:
        note(x[..., 0], start_pos)
        assert mask is None or isinstance(mask, Tensor)
        return original(x, start_pos, freqs_cis, mask)

    return forward


def patched_attention(calls: list[tuple[Any, Any]], n_layers: int) -> Callable[..., Tensor]:
    original, count = llama.model.Attention.forward, [0]

    def forward(self: Any, x: Tensor, start_pos: Any, freqs_cis: Tensor, mask: Any) -> Tensor:
        count[0] += 1
        if count[0] % n_layers == 0:
            calls.append((tuple(x.shape[:2]), start_pos))
        return original(self, x, start_pos, freqs_cis, mask)

    return forward


WAYS = [
    "patched instance",
    "patched class",
    "stub",
    "subclass",
    "block hook",
    "pre-hook",
    "patched block",
    "patched attention class",
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lengths", [RAGGED, (5, 5), (1,), (47, 3)], ids=str)
def test_watched_models_get_the_published_calls(
    way: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = random_prompts(*lengths)
    wanted = make().generate(prompts, 12, temperature=0, logprobs=True, echo=True)
    generator, calls = make(), list[tuple[Any, Any]]()
    generator.model = watch(generator.model, way, calls, monkeypatch)
    tokens, logprobs = generator.generate(prompts, 12, temperature=0, logprobs=True, echo=True)
    assert calls == published_schedule(lengths, 12)
    assert all(type(start) is int for _, start in calls)
    assert tokens == wanted[0] == [prompt + oracle_greedy("gqa", prompt, 12) for prompt in prompts]
    for found, other in zip(logprobs, wanted[1], strict=True):
        near(found, other)


def test_a_watched_model_is_asked_for_all_positions() -> None:
    generator, rows = make(), list[tuple[int, ...]]()
    generator.model.output.register_forward_hook(lambda module, args, output: rows.append(tuple(output.shape)))
    generator.generate(random_prompts(*RAGGED), 4, temperature=0)
    assert rows[0] == (3, 2, 97) and set(rows[1:]) == {(3, 1, 97)}


def test_a_hook_can_change_what_is_said() -> None:
    generator, prompts = make(), random_prompts(*RAGGED)
    plain = generator.generate(prompts, 6, temperature=0)[0]

    def favour(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output[..., 13] = 100.0
        return output

    handle = generator.model.output.register_forward_hook(favour)
    assert generator.generate(prompts, 6, temperature=0)[0] == [[13] * 6] * 3
    handle.remove()
    assert generator.generate(prompts, 6, temperature=0)[0] == plain


def test_a_global_hook_is_a_watcher() -> None:
    generator, starts = make(), []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, llama.model.TransformerBlock) and module.layer_id == 0:
            starts.append(((*args[0].shape[:2],), args[1]))

    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        generator.generate(random_prompts(*RAGGED), 12, temperature=0)
    finally:
        handle.remove()
    assert starts == published_schedule(RAGGED, 12)


def test_the_padding_id_never_reaches_the_model() -> None:
    stub = StubModel()
    tokens, _ = Llama(stub, StubTokenizer()).generate([[5], [6, 7, 8, 9, 10]], 12, temperature=0)
    assert tokens == [list(range(6, 18)), list(range(11, 23))] and min(stub.ids) >= 0
    generator, ids = make(eos_id=96), list[Tensor]()
    generator.model.tok_embeddings.register_forward_hook(lambda module, args, output: ids.append(args[0]))
    generator.generate(random_prompts(*RAGGED), 12, temperature=0)
    assert all(int(part.min()) >= 0 and int(part.max()) < 97 for part in ids)


# --------------------------------------------------------------------------- our own schedule, unwatched


def test_prompts_of_unequal_length_are_prefilled_together() -> None:
    generator, prompts = make(), random_prompts(3, 40, 11)
    with recorded("embedding") as fed, recorded("_linear", layers) as linears:
        tokens, _ = generator.generate(prompts, 6, temperature=0)
    assert tokens == [oracle_greedy("gqa", prompt, 6) for prompt in prompts]
    assert len(fed) == 6 and max(rows * seqlen for rows, seqlen, _ in fed) <= 3 * 40
    assert sum(seqlen for _, seqlen, _ in fed) == 40 + 5
    heads = [shape for shape in linears if shape[-1] == 97]
    assert heads and max(torch.Size(shape).numel() // 97 for shape in heads) <= 3  # no logits nobody asked for


def test_a_finished_row_is_not_fed() -> None:
    generator, prompts = make(), random_prompts(5, 5, 5, 5)
    generator.tokenizer.eos_id = first_eos("gqa", prompts, 12)
    with recorded("embedding") as fed:
        tokens, _ = generator.generate(prompts, 12, temperature=0)
    steps = [min(len(row), 11) for row in tokens]
    assert min(steps) < max(steps)
    assert sum(rows for rows, seqlen, _ in fed[1:]) == sum(steps)


# -------------------------------------------------------------------------------------------- errors

GOOD: list[list[int]] = [[1, 2, 3], [4, 5]]
MISTAKES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "an empty prompt": ({"prompt_tokens": [[1], []]}, ["1"]),
    "an id too large": ({"prompt_tokens": [[1], [2, 97]]}, ["1", "97", "96"]),
    "the padding id": ({"prompt_tokens": [[1], [2], [3, -1]]}, ["2", "-1", "96"]),
    "a text": ({"prompt_tokens": "hello"}, ["str"]),
    "texts": ({"prompt_tokens": ["hello", "you"]}, ["0", "hello"]),
    "one prompt": ({"prompt_tokens": [1, 2, 3]}, ["0", "1"]),
    "ids that are no numbers": ({"prompt_tokens": [[1], ["a"]]}, ["1", "a"]),
    "a float id": ({"prompt_tokens": [[1], [2.5]]}, ["1", "2.5"]),
    "a prompt too long": ({"prompt_tokens": [[1], [2] * 49]}, ["1", "49", "48"]),
    "temperature -1": ({"temperature": -1}, ["temperature", "-1", "0"]),
    "temperature inf": ({"temperature": INF}, ["temperature", "inf"]),
    "temperature NaN": ({"temperature": NAN}, ["temperature", "nan"]),
    "top_p -0.1": ({"top_p": -0.1}, ["top_p", "-0.1", "0", "1"]),
    "top_p 1.1": ({"top_p": 1.1}, ["top_p", "1.1", "0", "1"]),
    "top_p NaN": ({"top_p": NAN}, ["top_p", "nan", "1"]),
    "max_gen_len -1": ({"max_gen_len": -1}, ["max_gen_len", "-1", "0"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("watched", [False, True], ids=["ours", "watched"])
def test_mistakes_are_named_and_leave_the_generator_working(mistake: str, watched: bool) -> None:
    generator = make()
    if watched:
        generator.model.layers[0].register_forward_hook(lambda *args: None)
    wanted = generator.generate(GOOD, 5, temperature=0)
    changes, words = MISTAKES[mistake]
    with pytest.raises(LlamaError) as error:
        generator.generate(**{"prompt_tokens": GOOD, "max_gen_len": 5, **changes})
    assert isinstance(error.value, ValueError) and isinstance(error.value, AssertionError)
    assert [word for word in words if word not in str(error.value)] == []
    assert generator.generate(GOOD, 5, temperature=0) == wanted


@pytest.mark.parametrize("temperature", [0, 0.6])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_logits_that_are_no_numbers(bad: float, temperature: float) -> None:
    stub = StubModel({(4, 1): bad})
    generator = Llama(stub, StubTokenizer())
    with pytest.raises(LlamaError) as error:  # the prompts end at 2: step 0 is chosen there, step 3 from position 4
        generator.generate([[1, 2], [3, 4]], 8, temperature=temperature, logprobs=True)
    message = str(error.value).lower()
    assert "1" in message and "3" in message and "step" in message and ("nan" in message or "inf" in message)
    stub.bad = {}
    assert generator.generate([[1, 2]], 3, temperature=0)[0] == [[3, 4, 5]]


def test_logits_of_a_stub_in_half_precision_are_chosen_from_in_float32() -> None:
    class Half(StubModel):
        def forward(self, *args: Any) -> Tensor:
            return super().forward(*args).bfloat16()

    _, logprobs = Llama(Half(), StubTokenizer()).generate([[1, 2]], 3, temperature=0, logprobs=True)
    wanted = torch.log_softmax(torch.tensor([5.0] + [0.0] * 96), dim=0)[0].item()
    near(logprobs[0], [wanted] * 3, 1e-6)


def test_some_logits_of_minus_infinity_are_a_choice_of_the_model() -> None:
    generator, prompts = make(), random_prompts(5)
    generator.model.output.register_forward_hook(
        lambda module, args, output: output.index_fill(-1, torch.arange(50), -INF)
    )
    for temperature in (0, 1.0):
        tokens, _ = generator.generate(prompts, 20, temperature=temperature, top_p=1.0)
        assert min(tokens[0]) >= 50


@pytest.mark.parametrize("kwargs", [{}, {"logprobs": True, "echo": True}], ids=["plain", "scored"])
def test_weights_that_are_broken(kwargs: dict[str, Any]) -> None:
    generator = make()
    with torch.no_grad():
        generator.model.norm.weight[3] = NAN
    with pytest.raises(LlamaError, match="(?i)nan") as error:
        generator.generate(random_prompts(*RAGGED), 4, **kwargs)
    assert "0" in str(error.value) or "1" in str(error.value)


def test_one_text_in_place_of_a_list_of_texts(generator: Llama) -> None:
    with pytest.raises(LlamaError, match="list"):
        generator.text_completion("hello")  # type: ignore[arg-type]


def test_a_text_too_long_for_the_window(generator: Llama) -> None:
    with pytest.raises(AssertionError, match="48"):
        generator.text_completion(["river", "stone " * 60])


def test_a_stub_without_a_vocabulary_size_takes_any_id_from_0() -> None:
    generator = Llama(StubModel(), StubTokenizer())
    assert not hasattr(generator.model.params, "vocab_size")
    assert generator.generate([[1000]], 1, temperature=0) == ([[31]], None)  # 1001 % 97
    with pytest.raises(LlamaError, match="-1"):
        generator.generate([[-1]], 3)


@pytest.mark.parametrize("error", [RuntimeError("in the middle"), KeyboardInterrupt()], ids=str)
@pytest.mark.parametrize("way", ["hook", "linear"])
def test_an_exception_leaves_the_next_call_right(
    error: BaseException, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, prompts, count = make(), random_prompts(*RAGGED), [0]
    wanted = generator.generate(prompts, 8, temperature=0)
    other = random_prompts(*RAGGED, seed=77)

    def fail(*args: Any) -> None:
        count[0] += 1
        if count[0] == 40:
            raise error

    with contextlib.ExitStack() as stack:
        if way == "hook":
            for module in generator.model.layers[1].modules():
                stack.callback(module.register_forward_hook(fail).remove)
        else:  # deep inside our own schedule
            original = layers._linear
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(layers, "_linear", lambda *args: (fail(), original(*args))[1])
        with pytest.raises(type(error)):
            generator.generate(other, 8, temperature=0)
    assert generator.generate(prompts, 8, temperature=0) == wanted
    assert all(layer.attention.cache_k.shape[0] == ROWS for layer in generator.model.layers)


# ------------------------------------------------------------------------------------------- threads


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("watched", [False, True], ids=["ours", "watched"])
def test_two_threads_get_the_serial_results(watched: bool) -> None:
    generator = make()
    if watched:
        generator.model.layers[0].register_forward_hook(lambda *args: None)
    batches = [random_prompts(*RAGGED, seed=seed) for seed in (1, 40)]
    wanted = [generator.generate(batch, 20, temperature=0, logprobs=True) for batch in batches]
    found: list[list[Any]] = [[], []]

    def work(me: int) -> None:
        for _ in range(4):
            found[me].append(generator.generate(batches[me], 20, temperature=0, logprobs=True))

    threads = [threading.Thread(target=work, args=(me,)) for me in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == [[wanted[0]] * 4, [wanted[1]] * 4]


def test_a_second_caller_waits_for_the_first() -> None:
    """ModuleCall from within: no forward of the second call lies between two of the first."""
    inside, order = threading.Event(), list[str]()

    class Slow(StubModel):
        def forward(self, *args: Any) -> Tensor:
            order.append(threading.current_thread().name)
            inside.set()
            if len(order) < 4:
                waiter.join(timeout=0.1)  # give the other every chance
            return super().forward(*args)

    generator = Llama(Slow(), StubTokenizer())
    waiter = threading.Thread(
        target=lambda: (inside.wait(), generator.generate([[9]], 3, temperature=0)), name="second"
    )
    waiter.start()
    first = threading.Thread(target=lambda: generator.generate([[5]], 4, temperature=0), name="first")
    first.start()
    first.join(30)
    waiter.join(30)
    assert order == ["first"] * 4 + ["second"] * 3


# ---------------------------------------------------------------------------------------------- chat


class Recorder(Llama):
    """Notes what `generate` is asked for."""

    asked: list[dict[str, Any]]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        assert not args
        vars(self).setdefault("asked", []).append(kwargs)
        return super().generate(**kwargs)


@pytest.fixture
def recorder(generator: Llama) -> Recorder:
    made = Recorder(generator.model, generator.tokenizer)
    made.asked = []
    return made


def test_a_chat_prompt_is_the_published_one(recorder: Recorder) -> None:
    encode = recorder.tokenizer.encode
    recorder.chat_completion(golden_dialogs(), temperature=0, max_gen_len=3)
    system = encode("[INST] <<SYS>>\nbe small\n<</SYS>>\n\nbird? [/INST]", bos=True, eos=False)
    turns = encode("[INST] rain [/INST] fell ", bos=True, eos=True) + encode(
        "[INST] soon? [/INST]", bos=True, eos=False
    )
    assert [call["prompt_tokens"] for call in recorder.asked] == [[system, turns]]
    assert encode_dialog(recorder.tokenizer, golden_dialogs()[0]) == system
    assert encode_dialog(recorder.tokenizer, golden_dialogs()[2]) == turns


def test_a_refused_dialog_costs_nothing_and_the_others_are_alone(recorder: Recorder, golden: dict[str, Any]) -> None:
    bad: Dialog = [{"role": "user", "content": "a <</SYS>> b"}]
    first, _, third = golden_dialogs()
    with recorded("embedding") as fed:
        refused = recorder.chat_completion([bad, golden_dialogs()[1]], temperature=0, logprobs=True)
    wanted = {"generation": {"role": "assistant", "content": UNSAFE_ERROR}, "tokens": [], "logprobs": []}
    assert refused == [wanted, wanted] and fed == []
    alone = [recorder.chat_completion([dialog], temperature=0, max_gen_len=9)[0] for dialog in (first, third)]
    mixed = recorder.chat_completion([bad, first, bad, third], temperature=0, max_gen_len=9)
    assert mixed == [golden["chat"][1], alone[0], golden["chat"][1], alone[1]]
    assert alone == [golden["chat"][0], golden["chat"][2]]


def test_refused_dialogs_do_not_move_the_samples_of_others(recorder: Recorder) -> None:
    dialogs = golden_dialogs()
    torch.manual_seed(3)
    wanted = recorder.chat_completion([dialogs[0]], temperature=1.0)
    torch.manual_seed(3)
    assert recorder.chat_completion([dialogs[1], dialogs[0]], temperature=1.0)[1:] == wanted


def test_eos_in_a_message_is_text(recorder: Recorder) -> None:
    recorder.chat_completion([[{"role": "user", "content": "a </s> b <s>"}]], temperature=0, max_gen_len=2)
    recorder.text_completion(["a </s> b <s>"], temperature=0, max_gen_len=2)
    for call in recorder.asked:
        (prompt,) = call["prompt_tokens"]
        assert 2 not in prompt and prompt.count(1) == 1


def message(role: Any = "user", content: Any = "hi") -> Any:
    return {"role": role, "content": content}


WRONG_DIALOGS: dict[str, tuple[list[Any], str]] = {
    "empty": ([], ""),
    "system only": ([message("system")], ""),
    "two users": ([message(), message()], "1"),
    "assistant first": ([message("assistant"), message()], "0"),
    "ends with the assistant": ([message(), message("assistant")], "1"),
    "system later": ([message(), message("system"), message()], "1"),
    "unknown role": ([message(), message("assistant"), message("tool")], "2"),
    "no string": ([message(), message("assistant", None), message()], "1"),
    "a number": ([message(content=5)], "0"),
}


@pytest.mark.parametrize("wrong", WRONG_DIALOGS)
def test_a_wrong_dialog_is_named_before_anything_runs(recorder: Recorder, wrong: str) -> None:
    dialog, place = WRONG_DIALOGS[wrong]
    with pytest.raises(AssertionError, match="dialog 2") as error:
        recorder.chat_completion([*golden_dialogs()[:2], dialog], temperature=0)
    assert isinstance(error.value, ValueError) and recorder.asked == []
    assert f"message {place}" in str(error.value) if place else True


def test_chat_with_log_probabilities(recorder: Recorder) -> None:
    found = recorder.chat_completion([golden_dialogs()[0]], temperature=0, max_gen_len=9, logprobs=True)[0]
    assert set(found) == {"generation", "tokens", "logprobs"} and found["generation"]["role"] == "assistant"
    prompt = recorder.asked[0]["prompt_tokens"]
    tokens, logprobs = recorder.generate(prompt_tokens=prompt, max_gen_len=9, temperature=0, logprobs=True)
    assert found["tokens"] == [recorder.tokenizer.decode(token) for token in tokens[0]]
    assert found["logprobs"] == logprobs[0]
    assert found["generation"]["content"] == recorder.tokenizer.decode(tokens[0])


# ---------------------------------------------------------------------------------- warnings, settings


def test_warnings(generator: Llama, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        generator.text_completion(["river"], max_gen_len=3)
        assert caplog.records == []
        generator.text_completion(["river", "stone "], max_gen_len=3)
        assert len(caplog.records) == 1 and "1" in caplog.text and "space" in caplog.text
        caplog.clear()
        generator.generate([[1, 2, 3]], 46)
        assert len(caplog.records) == 1 and all(word in caplog.text for word in ("46", "45", "48"))
        caplog.clear()
        generator.generate([[1, 2, 3]], 45)
        generator.text_completion(["river"])  # without max_gen_len there is nothing that was cut
        assert caplog.records == []


def test_device_and_dtype(generator: Llama) -> None:
    assert generator.device == torch.device("cpu") and generator.dtype == torch.float32
    with build_golden(dtype=torch.bfloat16, device=torch.device("cpu")) as other:
        assert other.dtype == torch.bfloat16
        assert other.model.layers[0].attention.cache_k.dtype == torch.bfloat16
        assert other.model.freqs_cis.dtype == torch.complex64
    with build_golden(device=None, dtype=None) as other:
        assert other.dtype == (torch.float32 if other.device.type == "cpu" else other.dtype)


def test_build_changes_nothing_process_wide(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    import os

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def state() -> list[Any]:
        threads = torch.get_num_threads()
        grad = torch.is_grad_enabled()
        default = torch.empty(0)
        return [torch.get_default_dtype(), default.device, default.dtype, threads, grad, dict(os.environ), sys.stdout]

    before = state()
    with build_golden(dtype="bfloat16", seed=9) as generator:
        assert torch.equal(torch.get_rng_state(), torch.manual_seed(9).get_state())
        assert state() == before
        generator.generate([[1, 2]], 3)
        assert state() == before
    assert state() == before and not dist.is_initialized()
    printed = capfd.readouterr().out.splitlines()
    assert len(printed) == 1 and printed[0].startswith("Loaded in ") and printed[0].endswith(" seconds")


def test_a_generator_works_after_it_was_closed_and_closes_twice(golden: dict[str, Any]) -> None:
    generator = build_golden()
    generator.close()
    generator.close()
    assert generator.generate(golden["prompts"], 12, temperature=0)[0] == golden["greedy"]
    assert not dist.is_initialized()


def test_errors_of_build(tmp_path: Path) -> None:
    for change, words in (
        ({"dtype": "int8"}, "int8"),
        ({"max_seq_len": 0}, "max_seq_len"),
        ({"max_batch_size": -1}, "max_batch_size"),
        ({"model_parallel_size": 2}, "2"),
        ({"model_parallel_size": 0}, "0"),
    ):
        with pytest.raises(LlamaError, match=words):
            build_golden(**change)  # type: ignore[arg-type]
        assert not dist.is_initialized()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        build_golden(ckpt_dir=str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="nothing.model"):
        build_golden(tokenizer_path=str(tmp_path / "nothing.model"))
    with build_golden() as generator:
        assert generator.generate([[1]], 2)[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path in GOLDEN.iterdir():
        shutil.copy(path, tmp_path / path.name)
        (tmp_path / path.name).chmod(0o644)
    return tmp_path


def build_with(folder: Path, **params: Any) -> Llama:
    """`build` of the folder with its params.json changed."""
    known = json.loads((GOLDEN / "params.json").read_text())
    (folder / "params.json").write_text(json.dumps({**known, **params}))
    return build_golden(ckpt_dir=str(folder))


def test_params_json(folder: Path, golden: dict[str, Any]) -> None:
    for key in ("use_qk_norm", "typo"):
        with pytest.raises(LlamaError, match=key):
            build_with(folder, **{key: True})
    with build_with(folder, vocab_size=7) as generator:  # overruled by the tokenizer, whatever it says
        assert generator.model.params.vocab_size == 360
        assert generator.generate(golden["prompts"], 12, temperature=0)[0] == golden["greedy"]
    with build_with(folder, rope_theta=500000.0) as generator:
        assert generator.model.params.rope_theta == 500000.0
        turned = llama.model.precompute_freqs_cis(16, 2 * WINDOW, 500000.0)
        assert torch.equal(generator.model.freqs_cis, turned)
        assert generator.generate(golden["prompts"], 12, temperature=0)[0] != golden["greedy"]
    with pytest.raises(LlamaError, match="3") as error:
        build_with(folder, n_kv_heads=3)
    assert "4" in str(error.value)


def test_embedding_rows_that_are_not_the_tokenizers(folder: Path) -> None:
    weights = torch.load(folder / "consolidated.00.pth", weights_only=True)
    for name in ("tok_embeddings.weight", "output.weight"):
        weights[name] = weights[name][:350].clone()
    torch.save(weights, folder / "consolidated.00.pth")
    with pytest.raises(LlamaError, match="350") as error:
        build_golden(ckpt_dir=str(folder))
    assert "360" in str(error.value)


def test_copies_of_the_whole_generators_parts(generator: Llama, golden: dict[str, Any]) -> None:
    twin = Llama(copy.deepcopy(generator.model), copy.deepcopy(generator.tokenizer))
    assert twin.generate(golden["prompts"], 12, temperature=0)[0] == golden["greedy"]


def test_an_unknown_option_is_named() -> None:
    for call in (make().text_completion, make().generate):
        with pytest.raises(TypeError, match="nonsense"):
            call([] if call.__name__ == "text_completion" else [[1]], max_gen_len=1, nonsense=1)  # type: ignore
