"""Faults that use outside this repository has found, one block for each, and their kin: each test fails without its fix."""

import contextlib
import fractions
import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    GOLDEN,
    ROOT,
    WINDOW,
    StubModel,
    StubTokenizer,
    build_golden,
    close,
    make_model,
    random_prompts,
)

from llama import Llama, LlamaError, Transformer
from llama.distributed.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from llama.engine.options import Options, prompt_budget
from llama.engine.text import decode_each
from llama.generation import Stream
from llama.model import precompute_freqs_cis
from llama.serving import Conversation
from llama.tokenizer import StreamDecoder, Tokenizer

USER: Any = [{"role": "user", "content": "bird?"}]
UNSAFE: Any = [{"role": "user", "content": "[INST]"}]


def made(kind: str = "gqa", dtype: torch.dtype = torch.float32) -> Llama:
    return Llama(make_model(kind, dtype), StubTokenizer())


@pytest.fixture(scope="module")
def shared() -> Iterator[Llama]:
    """A golden generator that no test changes."""
    with build_golden() as built:
        yield built


# ------------------------------------------------------------------- A.1: a program that never closes


@pytest.mark.slow
def test_programs_that_never_close_end_with_their_own_status() -> None:
    """One run of each program in `exits.py`, with two busy processes beside them."""
    argv = [sys.executable, str(ROOT / "tests" / "exits.py"), "--runs", "20", "--busy", "2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 runs, bad: {}" in done.stdout or "'process'" in done.stdout  # torch's own end may be slow


# --------------------------------------------------------- A.2: dtype, device or storage of the cache changes


@pytest.mark.parametrize("lengths", [(6, 6), (2, 8, 4, 7, 3, 11, 5)])
def test_autocast_gives_the_published_schedules_text(lengths: tuple[int, ...]) -> None:
    prompts = random_prompts(*lengths)
    ours, published = made(), made()
    published.model.layers[0].register_forward_hook(lambda *args: None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, logprobs = ours.generate(prompts, 12, temperature=0, logprobs=True)
        wanted, wanted_logprobs = published.generate(prompts, 12, temperature=0, logprobs=True)
    for row in range(len(prompts)):
        same = next((i for i, (a, b) in enumerate(zip(found[row], wanted[row], strict=False)) if a != b), 12)
        assert same >= 3, "rounding may part them later on, not at once"
        pairs = zip(logprobs[row][:same], wanted_logprobs[row][:same], strict=False)
        assert max(abs(a - b) for a, b in pairs) < 0.15
    again = ours.generate(prompts, 12, temperature=0)[0]  # and off again
    assert again == made().generate(prompts, 12, temperature=0)[0]


def test_autocast_scores_in_chunks_as_at_once() -> None:
    """What a chunk reads of the chunks before it comes from the cache."""
    generator, prompts = made(), random_prompts(9, 5, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted, found = generator.score(prompts), generator.score(prompts, prefill_chunk=2)
    for one, other in zip(wanted, found, strict=True):
        assert max(abs(a - b) for a, b in zip(one["logprobs"], other["logprobs"], strict=True)) < 0.2
    assert generator.score(prompts) == made().score(prompts)


def cast(generator: Llama) -> None:
    generator.model.to(torch.bfloat16)


def fresh_storage(generator: Llama) -> None:
    for attention in generator.model.attentions():
        attention.cache_k, attention.cache_v = attention.cache_k.clone(), attention.cache_v.clone()


def wider_cache(generator: Llama) -> None:
    for attention in generator.model.attentions():
        attention.cache_k, attention.cache_v = attention.cache_k.double(), attention.cache_v.double()


@pytest.mark.parametrize("change", [cast, fresh_storage, wider_cache])
@pytest.mark.parametrize("when", [4, 23])
def test_a_stream_goes_on_where_the_cache_changes_between_its_steps(change: Any, when: int) -> None:
    """More prompts than rows: rows are refilled and moved after the change, at step 23 right after it."""
    generator, prompts = made(), random_prompts(7, 4, 9, 3, 5, 6)
    wanted = made().generate(prompts, 6, temperature=0, logprobs=True)[1]
    found: list[list[float]] = [[] for _ in prompts]
    for count, step in enumerate(generator.stream(prompts, 6, temperature=0, logprobs=True)):
        found[step.prompt].append(step.logprob or 0.0)
        if count == when:
            change(generator)
    firsts = [(a[i], b[i]) for a, b in zip(found, wanted, strict=True) for i in range(2)]
    assert max(abs(a - b) for a, b in firsts) < (0.15 if change is cast else 1e-5)


def test_a_hook_that_replaces_the_cache() -> None:
    generator, prompts = made(), random_prompts(7, 4, 9)
    hook = generator.model.layers[0].register_forward_pre_hook(lambda *args: fresh_storage(generator))
    assert generator.generate(prompts, 6, temperature=0) == made().generate(prompts, 6, temperature=0)
    hook.remove()


# ---------------------------------------------------------------------- A.3: NaN and infinity on the way


@pytest.mark.parametrize(
    ("kind", "dtype", "watched"),
    [
        ("mha", torch.float32, False),
        ("gqa", torch.float32, True),
        ("gqa", torch.bfloat16, False),
        ("mha", torch.float16, False),
    ],
)
def test_a_weight_that_is_not_finite_is_an_error(kind: str, dtype: torch.dtype, watched: bool) -> None:
    generator = Llama(make_model(kind, dtype, n_layers=1), StubTokenizer())
    alone, several = [[7]], [*random_prompts(5), [9, 7, 3, 4]]  # torch takes different ways for one token and for more
    if watched:
        generator.model.layers[0].register_forward_hook(lambda *args: None)
    calls = (
        lambda: generator.generate(alone, 2, temperature=0),
        lambda: generator.generate(several, 2, temperature=0),
        lambda: generator.score(several),
    )
    for name, weight in generator.model.named_parameters():
        for value in (float("nan"), float("inf")):
            for place in ("all", "one") if "output" not in name else ("all",):  # one logit of -inf is a mask
                before = weight.detach().clone()
                with torch.no_grad():
                    if place == "all":
                        weight.fill_(value)
                    else:
                        weight.view(-1)[7 * weight.shape[-1] if "tok_emb" in name else 5] = value
                for call in calls:
                    with pytest.raises(LlamaError, match="finite"):
                        call()
                        pytest.fail(f"{name}: {value} in {place} went through")
                with torch.no_grad():
                    weight.copy_(before)
    for call in calls:
        call()


@pytest.mark.parametrize("kind", ["gqa", "mha"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_that_overflow_to_minus_infinity_are_an_error(kind: str, dtype: torch.dtype) -> None:
    """Queries and keys are finite, their products beyond float32: torch's attention would give 0."""
    generator = made(kind, dtype)
    attention = generator.model.layers[0].attention
    with torch.no_grad():
        keys = attention.wk.weight.view(attention.n_local_kv_heads, attention.head_dim, -1)
        attention.wq.weight.copy_(-keys.repeat_interleave(attention.n_rep, 0).flatten(0, 1)).mul_(1e20)
        attention.wk.weight.mul_(1e20)
    calls = [lambda: generator.generate([[5]], 2), lambda: generator.score([[5, 6]])]
    calls += [lambda: generator.generate([[5, 6, 7], [3]], 2), lambda: list(generator.stream([[5, 6]], 2))]
    for watched in (False, True):
        if watched:
            generator.model.norm.register_forward_hook(lambda *args: None)
        for call in calls:
            with pytest.raises(LlamaError, match="finite"):
                call()


def test_long_queries_of_float16_are_no_error() -> None:
    """Squares beyond float16 are none beyond float32, in which scores are added up."""
    generator = made("mha", torch.float16)
    attention = generator.model.layers[0].attention
    with torch.no_grad():
        attention.wq.weight.mul_(1e3)
    seen: list[Any] = []
    handle = attention.wq.register_forward_hook(
        lambda module, args, output: seen.append(output.float().square().sum(-1))
    )
    generator.generate([[5, 6]], 2, temperature=0)
    handle.remove()
    assert max(float(lengths.max()) for lengths in seen) > 65504
    assert generator.generate([[5, 6]], 2, temperature=0)[0]


def test_a_row_that_a_mask_hides_altogether_is_no_error() -> None:
    attention = made().model.layers[0].attention
    mask = torch.zeros(3, 3)
    mask[1] = -float("inf")
    freqs = precompute_freqs_cis(attention.head_dim, 3)
    assert attention(torch.randn(1, 3, attention.wq.in_features), 0, freqs, mask).isfinite().all()


@pytest.mark.parametrize("name", ["wq", "wk", "wv", "wo"])
def test_float16_that_overflows_is_an_error(name: str) -> None:
    generator = made("mha", torch.float16)
    with torch.no_grad():
        getattr(generator.model.layers[1].attention, name).weight.fill_(6e4)
    with pytest.raises(LlamaError, match="float16"):
        generator.generate(random_prompts(5, 9), 2, temperature=0)


@pytest.mark.parametrize("name", ["tok_embeddings", "layers.0.attention.wo", "layers.1.feed_forward.w2"])
def test_squares_beyond_float32_do_not_vanish_in_a_norm(name: str) -> None:
    """1 / sqrt(inf) is 0: a vector of 1e25 would go on as zeros, with plausible tokens."""
    generator = made("mha")
    with torch.no_grad():
        generator.model.get_submodule(name).weight.fill_(1e25)
    with pytest.raises(LlamaError, match="finite"):
        generator.generate(random_prompts(5, 9), 2, temperature=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_usable_are_an_error_at_their_step(value: float) -> None:
    for start in (0, 4):
        generator = Llama(StubModel(bad={(start, 1): value}), StubTokenizer())
        with pytest.raises(LlamaError, match="prompt 1"):
            generator.generate([[5, 6, 7], [8, 9, 10]], 4, temperature=0)


def test_masks_of_minus_infinity_are_allowed() -> None:
    class Masked(StubModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            logits = super().forward(*args, **kwargs)
            logits[..., 50:] = -float("inf")
            return logits

    tokens, _ = Llama(Masked(), StubTokenizer()).generate([[5, 6, 7]], 4, seed=1)
    assert all(token < 50 for token in tokens[0])


# --------------------------------------------------------------------- A.7: stop strings and the echo


class TextTokenizer(StubTokenizer):
    """The stub's, with an `encode` that reads back what `decode` writes."""

    def encode(self, s: str, bos: bool, eos: bool) -> list[int]:
        return [ord(letter) - 32 for letter in s]


def test_stop_strings_are_looked_for_in_the_generated_text_alone() -> None:
    """The stub goes on with the next letters: "abc" with "def..."."""
    generator = Llama(StubModel(), TextTokenizer())
    for prompt, stop, wanted, reason in (
        ("a.abc", ".", "a.abcdefg", "length"),
        ("abc", "cd", "abcdefg", "length"),
        ("abc", "ef", "abcd", "stop"),
        ("ef abc", "ef", "ef abcd", "stop"),
    ):
        [found] = generator.text_completion([prompt], 0, max_gen_len=4, echo=True, stop=[stop], details=True)
        assert found == {**found, "generation": wanted, "finish_reason": reason}
        [alone] = generator.text_completion([prompt], 0, max_gen_len=4, stop=[stop], details=True)
        assert prompt + alone["generation"] == wanted and alone["finish_reason"] == reason


def test_a_stop_that_the_last_flush_completes(shared: Llama) -> None:
    """Byte 0xE2 alone is held back until the end, where it is U+FFFD."""
    byte = next(i for i in range(shared.tokenizer.n_words) if shared.tokenizer.sp_model.id_to_piece(i) == "<0xE2>")
    [found] = shared.text_completion(
        ["river"], 0, max_gen_len=1, logit_bias={byte: 1e30}, stop=["\ufffd"], details=True
    )
    assert found["finish_reason"] == "stop" and found["generation"] == ""
    stream = shared.stream_text("river", 0, max_gen_len=1, logit_bias={byte: 1e30}, stop=["\ufffd"])
    assert list(stream) == [] and stream.finish_reason == "stop"


# ------------------------------------------------------------------ A.8: iterators are taken once


def test_iterators_are_as_good_as_lists(shared: Llama) -> None:
    texts = ["river stone", "the cold night"]
    wanted = shared.text_completion(texts, 0, max_gen_len=9)
    assert shared.text_completion(iter(texts), 0, max_gen_len=9) == wanted  # type: ignore[arg-type]
    letter = wanted[0]["generation"][2]
    for stop in (iter([letter]), (text for text in [letter])):
        found = shared.text_completion(texts, 0, max_gen_len=9, stop=stop, details=True)  # type: ignore[arg-type]
        assert found == shared.text_completion(texts, 0, max_gen_len=9, stop=[letter], details=True)
        assert found[0]["finish_reason"] == "stop"
    prompts = [[1, 42], [1, 7, 9]]
    tokens = shared.generate(prompts, 6, temperature=0)[0]
    assert shared.generate((map(int, prompt) for prompt in prompts), 6, temperature=0)[0] == tokens  # type: ignore[arg-type]
    found = shared.generate(prompts, 6, temperature=0, stop_ids=map(int, [str(tokens[0][2])]))[0]  # type: ignore[arg-type]
    assert found[0] == tokens[0][:2]
    chunks = "".join(shared.stream_text("river stone", 0, max_gen_len=9, stop=iter([letter])))  # type: ignore[arg-type]
    assert chunks == shared.text_completion(texts[:1], 0, max_gen_len=9, stop=[letter])[0]["generation"]
    answers = shared.chat_completion(iter([USER, UNSAFE, USER]), 0, max_gen_len=5, drop_oldest=True)  # type: ignore[arg-type]
    assert answers == shared.chat_completion([USER, UNSAFE, USER], 0, max_gen_len=5)
    assert shared.chat_completion([tuple(USER)], 0, max_gen_len=5, drop_oldest=True) == answers[:1]  # type: ignore[list-item]
    assert shared.score(iter(texts)) == shared.score(texts)  # type: ignore[arg-type]
    close(shared.embed(iter(texts)), shared.embed(texts))  # type: ignore[arg-type]
    states = shared.hidden_states(iter(prompts), layers=iter([0, -1]))  # type: ignore[arg-type]
    close(states[1], shared.hidden_states(prompts, layers=[0, -1])[1])


# ------------------------------------------------------- A.9: an override is part of what is looked at


def test_hidden_states_go_through_a_subclass_s_or_patched_forward() -> None:
    class Shifted(Transformer):
        def forward(self, tokens: Any, start_pos: Any) -> Any:
            return super().forward((tokens + 1) % 97, start_pos)

    prompts = random_prompts(3, 5)
    wanted = made().hidden_states([[(token + 1) % 97 for token in prompt] for prompt in prompts])
    subclassed, patched = made(), made()
    subclassed.model.__class__ = Shifted
    original = patched.model.forward
    patched.model.forward = lambda tokens, start_pos: original((tokens + 1) % 97, start_pos)
    for generator in (subclassed, patched):
        for found, states in zip(generator.hidden_states(prompts), wanted, strict=True):
            close(found, states)
        close(generator.embed(prompts, "last"), made().embed([[(t + 1) % 97 for t in p] for p in prompts], "last"))


# ------------------------------------------------------------------------------ A.10: a stale cache


def touch_forward(generator: Llama) -> None:
    generator.model.forward(torch.tensor([[5] * 30]), 0)


def touch_block(generator: Llama) -> None:
    model = generator.model
    model.layers[1](torch.randn(1, 9, 64), 0, model.freqs_cis[:9], None)


def touch_state(generator: Llama) -> None:
    generator.model.load_state_dict({k: v * 1.5 for k, v in generator.model.state_dict().items()})


def touch_weight(generator: Llama) -> None:
    with torch.no_grad():
        generator.model.layers[0].attention.wk.weight[3] += 1


def touch_weight_in_inference_mode(generator: Llama) -> None:
    with torch.inference_mode():
        generator.model.layers[0].attention.wv.weight.mul_(1.5)


def touch_cache(generator: Llama) -> None:
    generator.model.layers[0].attention.cache_v[0] = 1


def touch_dtype(generator: Llama) -> None:
    generator.model.bfloat16().float()


def touch_hook(generator: Llama) -> None:
    generator.model.layers[0].register_forward_hook(lambda module, args, output: output * 1.5)


def touch_norm(generator: Llama) -> None:
    generator.model.norm = torch.nn.Identity()


def touch_score(generator: Llama) -> None:
    generator.score(["river"])


TOUCHES = [touch_forward, touch_block, touch_state, touch_weight, touch_weight_in_inference_mode, touch_cache]
TOUCHES += [touch_dtype, touch_hook, touch_norm, touch_score]


@pytest.mark.parametrize("touch", TOUCHES, ids=lambda touch: touch.__name__)
def test_a_conversation_notices_what_was_touched(touch: Callable[[Llama], None]) -> None:
    with build_golden() as generator:
        talk = Conversation(generator)
        first = "".join(talk.ask("a", 0, max_gen_len=4))
        touch(generator)
        dialog: Any = [*talk.dialog, {"role": "user", "content": "b"}]
        assert len(dialog) == 3 and first is not None
        found = "".join(talk.ask("b", 0, max_gen_len=4))
        assert talk.prefilled == len(generator.chat_format.encode(generator.tokenizer, dialog))
        assert found == generator.chat_completion([dialog], 0, max_gen_len=4)[0]["generation"]["content"]


def test_a_conversation_that_nobody_disturbs_reuses_the_cache() -> None:
    with build_golden() as generator:
        talk = Conversation(generator)
        for _ in talk.ask("a", 0, max_gen_len=4):
            pass
        with talk.ask("b", 0, max_gen_len=4) as stream:
            list(stream)
        assert stream.usage["cached_tokens"] > 0 and talk.prefilled < stream.usage["prompt_tokens"]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            list(talk.ask("c", 0, max_gen_len=4))
            assert talk.prefilled >= 10, "the cache holds float32's numbers"


def test_a_model_made_in_inference_mode_streams() -> None:
    """Its tensors have no version counter."""
    with torch.inference_mode():
        generator = build_golden()
    with generator:
        talk = Conversation(generator)
        for _ in range(2):
            list(talk.ask("a", 0, max_gen_len=4))
            assert talk.kept
        wanted = generator.text_completion(["river"], 0, max_gen_len=5)[0]["generation"]
        assert "".join(generator.stream_text("river", 0, max_gen_len=5)) == wanted


# ------------------------------------------------------------- B.14: no token left after the settings


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {token: -float("inf") for token in range(97)}},
        {"logit_bias": dict.fromkeys(range(97), -1e39)},
        {"presence_penalty": -3e38, "frequency_penalty": -3e38},
        {"logit_bias": {3: 3e38, 4: -3e38}, "frequency_penalty": -3e38},
    ],
    ids=["banned", "beyond float32", "overflow", "bias and overflow"],
)
def test_no_token_left_is_an_error_of_ours(temperature: float, options: Any) -> None:
    for generator in (made(), Llama(StubModel(), StubTokenizer())):
        with pytest.raises(LlamaError, match="prompt 0: at step .* leave no token"):
            generator.generate([[5, 6, 7, 8]], 8, temperature=temperature, seed=1, **options)
        assert generator.generate([[5, 6, 7, 8]], 2, temperature=0)[0][0]


def test_the_last_token_that_is_not_banned_is_taken() -> None:
    bias = {token: -float("inf") for token in range(97) if token != 42}
    for temperature in (0, 0.8):
        assert made().generate([[5]], 3, temperature=temperature, logit_bias=bias)[0] == [[42] * 3]


@pytest.mark.parametrize(
    "bias",
    [{True: 1.0}, {3: True}, {3: 1e39}, {3: float("nan")}, {3: float("inf")}, {3: 10**400}, {3: Decimal("sNaN")}]
    + [{3: np.array([1.0, 2.0])}, {3.0: 1}, {"3": 1}, {None: 1}, {3: None}, {3: "1"}, {3: 1j}, [(3, 1.0)]]
    + [{np.bool_(True): 1.0}, {97: 1.0}, {-1: 1.0}],
)
def test_a_bias_that_cannot_be(bias: Any) -> None:
    with pytest.raises(LlamaError, match="logit_bias"):
        made().generate([[5]], 1, logit_bias=bias)


# ----------------------------------------------------------------------- B.15: raw errors, odd numbers


NUMBERS = [np.int64(3), np.int32(3), np.uint8(3), torch.tensor(3), np.array(3)]
NO_INTEGERS = [3.0, np.float64(3), True, np.bool_(True), torch.tensor(True), torch.tensor(3.0), np.array([3])]
NO_INTEGERS += [np.array([3, 4]), torch.tensor([3, 4]), "3", Decimal(3), [3], -1]


@pytest.mark.parametrize("name", ["top_k", "seed", "top_logprobs", "prefill_chunk"])
def test_integers_of_any_make(shared: Llama, name: str) -> None:
    def call(value: Any) -> Any:
        return shared.generate([[1, 42]], 2, logprobs=True, details=True, **{"seed": 1, name: value})

    for number in NUMBERS:
        assert call(number) == call(3)
    for value in NO_INTEGERS[:-1] if name == "seed" else NO_INTEGERS:
        with pytest.raises(LlamaError, match=name):
            call(value)


def test_integers_of_any_make_elsewhere(shared: Llama) -> None:
    wanted = shared.generate([[1, 42]], 3, temperature=0)
    for number in NUMBERS:
        assert shared.generate([[1, 42]], number, temperature=0) == wanted
        assert shared.generate([[1, 42]], 3, temperature=0, stop_ids=[number]) == wanted
    for number in NUMBERS[:2]:
        assert shared.generate([[1, 42]], 3, temperature=0, logit_bias={number: 0.0}) == wanted
        with build_golden(max_seq_len=number * 16, max_batch_size=number, seed=number) as built:
            assert built.generate([[1, 42]], 3, temperature=0) == wanted
            assert type(built.model.params.max_seq_len) is int
    for prompts in (torch.tensor([[1, 42]]), np.array([[1, 42]]), [torch.tensor([1, 42])], [(np.int64(1), 42)]):
        assert shared.generate(prompts, 3, temperature=0) == wanted  # type: ignore[arg-type]
    for name in ("max_seq_len", "max_batch_size", "model_parallel_size", "seed"):
        for value in NO_INTEGERS[:-2]:
            with pytest.raises(LlamaError, match=name):
                build_golden(**{name: value})


def test_numbers_of_any_make(shared: Llama) -> None:
    def call(value: Any) -> Any:
        return shared.generate([[1, 42]], 4, temperature=value, top_p=value, seed=1, logit_bias={5: value})

    made_of = [Decimal("0.5"), fractions.Fraction(1, 2), np.float32(0.5), np.float16(0.5), np.array(0.5)]
    for number in [*made_of, torch.tensor(0.5)]:
        assert call(number) == call(0.5)
    for value in ["0.5", None, True, np.bool_(True), torch.tensor(True), 1j, np.complex64(1), [0.5], np.array([1, 2])]:
        with pytest.raises(LlamaError, match="temperature"):
            shared.generate([[1, 42]], 4, temperature=value)  # type: ignore[arg-type]
    for value in [Decimal("nan"), Decimal("sNaN"), 10**400, float("inf"), torch.tensor([0.5, 1])]:
        with pytest.raises(LlamaError, match="temperature"):
            shared.generate([[1, 42]], 4, temperature=value)


def set_system(generator: Llama, value: Any) -> None:
    Conversation(generator).system = value


RAW: dict[str, Callable[[Llama], Any]] = {
    "1-d tensor": lambda g: g.generate(torch.tensor([1, 42]), 2),  # type: ignore[arg-type]
    "0-d tensor": lambda g: g.generate(torch.tensor(1), 2),  # type: ignore[arg-type]
    "float token": lambda g: g.generate([[torch.tensor(1.5)]], 2),  # type: ignore[list-item]
    "float tensor": lambda g: g.generate(torch.ones(1, 2), 2),  # type: ignore[arg-type]
    "boolean token": lambda g: g.generate([[torch.tensor(True)]], 2),  # type: ignore[list-item]
    "meta tensor": lambda g: g.generate([torch.empty(2, dtype=torch.long, device="meta")], 2),  # type: ignore[list-item]
    "sparse tensor": lambda g: g.generate([torch.tensor([1, 2]).to_sparse()], 2),  # type: ignore[list-item]
    "nested": lambda g: g.generate([[[1, 42]]], 2),  # type: ignore[list-item]
    "None": lambda g: g.generate(None, 2),  # type: ignore[arg-type]
    "stop_ids 0-d": lambda g: g.generate([[1]], 2, stop_ids=torch.tensor(9)),  # type: ignore[arg-type]
    "stop_ids True": lambda g: g.generate([[1]], 2, stop_ids=[True]),
    "stop 0-d": lambda g: g.generate([[1]], 2, stop=torch.tensor(9)),  # type: ignore[arg-type]
    "completion of None": lambda g: g.text_completion(None),  # type: ignore[arg-type]
    "completion of [None]": lambda g: g.text_completion([None]),  # type: ignore[list-item]
    "chat of None": lambda g: g.chat_completion(None),  # type: ignore[arg-type]
    "role": lambda g: g.chat_completion([[{"role": np.array(["user", "x"]), "content": "a"}]]),  # type: ignore[typeddict-item]
    "stream of None": lambda g: g.stream_text(None),  # type: ignore[arg-type]
    "ask(None)": lambda g: Conversation(g).ask(None),  # type: ignore[arg-type]
    "ask of text": lambda g: Conversation(g).ask("x", max_gen_len="5"),  # type: ignore[arg-type]
    "system": lambda g: Conversation(g, 5),  # type: ignore[arg-type]
    "system set": lambda g: set_system(g, 5),
    "load": lambda g: Conversation(g).load(5),
    "layers": lambda g: g.hidden_states([[1]], layers=5),  # type: ignore[arg-type]
    "layer 1.5": lambda g: g.hidden_states([[1]], layers=[1.5]),  # type: ignore[list-item]
    "score": lambda g: g.score(None),  # type: ignore[arg-type]
    "embed": lambda g: g.embed([5]),  # type: ignore[list-item]
    "id beyond": lambda g: g.model.forward(torch.tensor([[1, 360]]), 0),
    "id below": lambda g: g.model.forward(torch.tensor([[-1]]), 0),
    "float ids": lambda g: g.model.forward(torch.tensor([[1.0, 5.0]]), 0),
    "boolean ids": lambda g: g.model.forward(torch.tensor([[True]]), 0),
    "bytes as ids": lambda g: g.model.forward(torch.tensor([[1]], dtype=torch.uint8), 0),
    "1-d ids": lambda g: g.model.forward(torch.tensor([1, 5]), 0),
    "0-d id": lambda g: g.model.forward(torch.tensor(1), 0),
    "3-d ids": lambda g: g.model.forward(torch.tensor([[[1]]]), 0),
    "a list of ids": lambda g: g.model.forward([[1, 5]], 0),
    "no ids": lambda g: g.model.forward(torch.zeros(1, 0, dtype=torch.long), 0),
    "no rows": lambda g: g.model.forward(torch.zeros(0, 3, dtype=torch.long), 0),
    "sparse ids": lambda g: g.model.forward(torch.tensor([[1]]).to_sparse(), 0),
    "meta ids": lambda g: g.model.forward(torch.tensor([[1]], device="meta"), 0),
    "logprobs": lambda g: g.generate([[1]], 2, logprobs=np.array([1, 2])),  # type: ignore[arg-type]
    "echo": lambda g: g.generate([[1]], 2, echo=np.array([1, 2])),  # type: ignore[arg-type]
    "details": lambda g: g.generate([[1]], 2, details=np.array([1, 2])),  # type: ignore[typeddict-item]
    "progress": lambda g: g.text_completion(["a"], progress=np.array([1, 2])),  # type: ignore[typeddict-item]
    "logprobs of a stream": lambda g: g.stream([[1]], logprobs=np.array([1, 2])),  # type: ignore[arg-type]
    "keep_space": lambda g: g.text_completion(["a"], keep_space=np.array([1, 2])),  # type: ignore[arg-type]
    "drop_oldest": lambda g: g.chat_completion([USER], drop_oldest=np.array([1, 2])),  # type: ignore[arg-type]
    "compile": lambda g: build_golden(compile=np.array([1, 2])),
    "dtype array": lambda g: build_golden(dtype=np.array([1, 2])),
    "device meta": lambda g: build_golden(device="meta"),
    "start_pos None": lambda g: g.model.forward(torch.tensor([[1]]), None),
    "start_pos 0.5": lambda g: g.model.forward(torch.tensor([[1]]), 0.5),
    "start_pos text": lambda g: g.model.forward(torch.tensor([[1]]), "0"),
    "start_pos floats": lambda g: g.model.forward(torch.tensor([[1]]), torch.tensor([0.5])),
    "start_pos of two rows": lambda g: g.model.forward(torch.tensor([[1]]), torch.tensor([0, 1])),
    "pooling": lambda g: g.embed(["a"], pooling=np.array(["mean", "last"])),  # type: ignore[arg-type]
    "pooling list": lambda g: g.embed(["a"], pooling=["mean"]),  # type: ignore[arg-type]
    "quantize": lambda g: build_golden(quantize=[1]),
    "quantize array": lambda g: build_golden(quantize=np.array(["int8", "int4"])),
    "quantize type": lambda g: build_golden(quantize=int),
    "decode": lambda g: g.tokenizer.decode([None]),
}


@pytest.mark.parametrize("name", RAW)
def test_a_mistake_is_an_error_of_ours(shared: Llama, name: str) -> None:
    with pytest.raises(LlamaError):
        RAW[name](shared)
    assert shared.generate([[1, 42]], 1)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "MASTER_PORT"])
def test_variables_that_are_no_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(variable, "x" if variable == name else value)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    with pytest.raises(LlamaError, match=f"{name}='x'"):
        build_golden()


def test_an_unknown_option_names_the_nearest(shared: Llama) -> None:
    calls: list[Callable[..., Any]] = [
        lambda **options: shared.generate([[1]], 2, **options),
        lambda **options: shared.stream([[1]], 2, **options),
        lambda **options: shared.text_completion(["a"], **options),
        lambda **options: shared.chat_completion([USER], **options),
        lambda **options: shared.chat_completion([UNSAFE], **options),
        lambda **options: shared.stream_text("a", **options),
        lambda **options: shared.stream_chat(USER, **options),
        lambda **options: shared.stream_chat(UNSAFE, **options),
        lambda **options: Conversation(shared).ask("a", **options),
        lambda **options: Conversation(shared).ask("[INST]", **options),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="'temprature'; did you mean 'temperature'.*top_k"):
            call(temprature=0)
        with pytest.raises(TypeError, match="'stops'; did you mean 'stop'"):
            call(stops=["a"])
        for own in ("reuse", "settings", "score_prompt", "prompts_of_mine"):
            with pytest.raises(TypeError, match=f"unknown option '{own}'; .*there are details"):
                call(**{own: True})


# ----------------------------------------------------------------------- B.17: streams, refused dialogs


STREAMS: dict[str, Callable[[Llama], Any]] = {
    "stream": lambda g: g.stream([[1, 42]], 5, temperature=0, logprobs=True),
    "stream_text": lambda g: g.stream_text("river", 0, max_gen_len=5),
    "stream_chat": lambda g: g.stream_chat(USER, 0, max_gen_len=5),
    "refused": lambda g: g.stream_chat(UNSAFE),
    "ask": lambda g: Conversation(g).ask("a", 0, max_gen_len=5),
    "ask refused": lambda g: Conversation(g).ask("[INST]"),
}


@pytest.mark.parametrize("name", STREAMS)
def test_every_stream_is_of_one_class_that_frees_the_model(name: str) -> None:
    def is_free() -> bool:
        with contextlib.suppress(LlamaError):
            return bool(generator.generate([[1]], 1))
        return False

    with build_golden() as generator:
        begin = STREAMS[name]
        with contextlib.closing(begin(generator)) as stream:  # as issue 11 has it
            assert isinstance(stream, Stream) and iter(stream) is stream
            assert next(stream)
        assert is_free()
        stream.close()
        with pytest.raises(StopIteration):
            next(stream)
        with begin(generator) as stream:
            next(stream)
            assert "refused" in name or not is_free()
        assert is_free()
        with pytest.raises(ZeroDivisionError), begin(generator) as stream:
            next(stream)
            raise ZeroDivisionError
        assert is_free()
        stream = begin(generator)
        next(stream)
        del stream
        gc.collect()
        assert is_free()
        begin(generator).close()  # never begun
        assert is_free()
        items = list(stream := begin(generator))
        assert items and is_free()
        assert stream.finish_reason == ("refused" if "refused" in name else "length")
        n_tokens = 0 if "refused" in name else 5
        assert len(stream.tokens) == n_tokens == stream.usage["completion_tokens"]


def test_what_a_stream_knows() -> None:
    with build_golden() as generator:
        tokens, logprobs, details = generator.generate(
            [[1, 42], [1, 7, 9]], 5, temperature=0, logprobs=True, top_logprobs=2, details=True
        )
        stream = generator.stream([[1, 42], [1, 7, 9]], 5, 0, logprobs=True, top_logprobs=2)
        assert stream.finish_reason == [None, None] and stream.tokens == [[], []]
        list(stream)
        assert stream.tokens == tokens and stream.logprobs == logprobs
        assert stream.top_logprobs == [entry["top_logprobs"] for entry in details]
        assert stream.finish_reason == [entry["finish_reason"] for entry in details]
        assert stream.usage == {"prompt_tokens": 5, "cached_tokens": 0, "completion_tokens": 10}
        text = generator.stream_text("river", 0, max_gen_len=8)
        next(text)
        text.close()
        assert text.finish_reason is None and 1 <= len(text.tokens) < 8
        stopped = generator.stream([[1, 42]], 5, 0, stop_ids=[tokens[0][2]])
        assert [step.token for step in stopped] == tokens[0][:3]
        assert stopped.tokens == tokens[0][:2] and stopped.finish_reason == "stop"


def test_refused_dialogs_share_nothing(shared: Llama) -> None:
    for dialogs in ([UNSAFE] * 3, [UNSAFE, USER, UNSAFE]):
        found = shared.chat_completion(dialogs, max_gen_len=2, details=True, logprobs=True)
        found[0]["generation"]["content"] = "mine"
        found[0]["tokens"].append("x")
        assert found[-1]["generation"]["content"] != "mine" and found[-1]["tokens"] == []


def test_refused_dialogs_do_not_skip_the_checks(shared: Llama) -> None:
    wrong: list[dict[str, Any]] = [{"temperature": -1}, {"max_gen_len": "5"}, {"top_k": -1}, {"top_logprobs": 2}]
    for options in [*wrong, {"stop": [""]}, {"logit_bias": {True: 1.0}}, {"prefill_chunk": 0}]:
        for call in (
            lambda options: shared.chat_completion([UNSAFE], **options),
            lambda options: shared.stream_chat(UNSAFE, **options),
            lambda options: Conversation(shared).ask("[INST]", **options),
        ):
            with pytest.raises(LlamaError):
                call(options)
                pytest.fail(f"{options} was accepted")


def test_a_seed_that_cannot_be_is_refused_before_anything_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> Any:
        raise AssertionError("it has begun")

    monkeypatch.setattr("llama.distributed.initialize_groups", never)
    for seed in ("x", 1.5, None, True):
        with pytest.raises(LlamaError, match="seed"):
            build_golden(seed=seed)


# ------------------------------------------------------------------------ B.18: which option works where


VALUES: dict[str, Any] = {
    "temperature": 0,
    "top_p": 0.5,
    "max_gen_len": 2,
    "logprobs": True,
    "echo": True,
    "keep_space": True,
    "drop_oldest": True,
    "logit_bias": {5: 1.0},
    "seed": 1,
    "top_logprobs": 2,
    "stop": ["x"],
    "stop_ids": [9],
    "details": True,
    "progress": True,
}


def test_the_table_of_options_is_true(shared: Llama, capsys: pytest.CaptureFixture[str]) -> None:
    def call(column: str, **options: Any) -> Any:
        if column == "generate":
            with_length = {"max_gen_len": 2, **options}
            return shared.generate([[1, 42]], **with_length, **({"details": True} if "top_logprobs" in options else {}))
        if column == "Conversation.ask":
            return list(Conversation(shared).ask("a", **{"max_gen_len": 2, **options}))
        given: Any = {"stream": [[1, 42]], "stream_text": "a", "stream_chat": USER, "text_completion": ["a"]}
        return list(getattr(shared, column)(given.get(column, [USER]), **{"max_gen_len": 2, **options}))

    page = (ROOT / "docs" / "generation.md").read_text()
    [header] = re.findall(r"^\| option \| (.*) \|$", page, re.MULTILINE)
    columns = header.split(" | ")
    rows = {name: cells.split(" | ") for name, cells in re.findall(r"^\| `(\w+)` \| ((?:yes|no)\b.*) \|$", page, re.M)}
    assert set(Options.__annotations__) <= set(rows) and len(columns) == 7
    for name, cells in rows.items():
        for column, cell in zip(columns, cells, strict=True):
            options = {name: VALUES.get(name, 1)} | ({"logprobs": True} if name == "top_logprobs" else {})
            if cell == "yes":
                call(column, **options)
            else:
                with pytest.raises((TypeError, LlamaError)):
                    call(column, **options)
                    pytest.fail(f"{column} takes {name}")


def test_alternatives_need_a_place(shared: Llama) -> None:
    with pytest.raises(LlamaError, match="details=True"):
        shared.generate([[1, 42]], 2, logprobs=True, top_logprobs=2)
    for call in (shared.text_completion, shared.chat_completion):
        with pytest.raises(LlamaError, match="logprobs=True"):
            call(["a"] if call == shared.text_completion else [USER], top_logprobs=2)


@pytest.mark.parametrize("watched", [False, True])
def test_an_echo_has_alternatives_for_the_prompt_too(watched: bool) -> None:
    with build_golden() as generator:
        if watched:
            generator.model.layers[0].register_forward_hook(lambda *args: None)
        [found] = generator.text_completion(
            ["river stone"], 0, max_gen_len=4, echo=True, logprobs=True, top_logprobs=97 * 4, prefill_chunk=3
        )
        assert len(found["tokens"]) == len(found["logprobs"]) == len(found["top_logprobs"])
        assert found["top_logprobs"][0] == []
        for logprob, best in list(zip(found["logprobs"], found["top_logprobs"], strict=True))[1:]:
            assert any(abs(value - logprob) < 1e-4 for _, value in best), "the token itself is among all of them"


# ------------------------------------------------------------------- B.21: conversations, text in pieces


def test_a_length_of_the_whole_window_keeps_the_history() -> None:
    for length in (None, WINDOW - 1, WINDOW, 10 * WINDOW):
        assert prompt_budget(WINDOW, length) == prompt_budget(WINDOW, None) == 36
    assert prompt_budget(WINDOW, WINDOW - 2) == 12 and prompt_budget(WINDOW, 20) == 28
    for length in (WINDOW - 2, WINDOW - 1, 10 * WINDOW):
        with build_golden(max_seq_len=160) as generator:
            talk = Conversation(generator)
            for question in ("a", "b"):
                for count, _ in enumerate(stream := talk.ask(question, 0, max_gen_len=length)):
                    if count == 2:
                        stream.close()
            assert len(talk.dialog) == 4 and talk.dropped == 0


def test_an_answer_has_at_least_one_token(shared: Llama) -> None:
    talk = Conversation(shared)
    with pytest.raises(LlamaError, match="max_gen_len=0"):
        talk.ask("a", max_gen_len=0)
    assert talk.dialog == []


def test_a_prompt_without_room_says_so() -> None:
    generator = made()
    full = [5] * WINDOW
    stream = generator.stream([full, [1, 2]], 3, 0)
    assert {step.prompt for step in stream} == {1}
    assert stream.finish_reason == ["length", "length"] and stream.tokens[0] == []
    assert generator.generate([full], 3, details=True)[2] == [
        {"finish_reason": "length", "prompt_tokens": WINDOW, "completion_tokens": 0}
    ]


def test_the_bar_reaches_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    made().generate([[5] * WINDOW, [1, 2], [5] * WINDOW], 3, temperature=0, progress=True)
    assert "3/3" in capsys.readouterr().err


def test_tokens_of_one_character_add_up(shared: Llama) -> None:
    tokenizer = shared.tokenizer
    ids = tokenizer.encode("a 🦙 b", bos=False, eos=False)
    texts = decode_each(tokenizer, ids, keep_space=True)
    assert len(texts) == len(ids) and "".join(texts) == " a 🦙 b" and "\ufffd" not in "".join(texts)
    assert decode_each(tokenizer, ids[:-4], keep_space=True)[-1].count("\ufffd") >= 0
    assert decode_each(tokenizer, [], keep_space=True) == []


def test_invalid_bytes_are_decoded_in_linear_time(shared: Llama) -> None:
    class Counting:
        """Counts the ids that are decoded."""

        count = 0

        def decode(self, ids: list[int]) -> Any:
            self.count += len(ids)
            return shared.tokenizer.decode(ids)

    byte = next(i for i in range(360) if shared.tokenizer.sp_model.id_to_piece(i) == "<0xF0>")
    for ids in ([byte] * 1000, [byte, byte, 300] * 300, [byte - 0x70] * 1000):
        counting = Counting()
        decoder = StreamDecoder(counting)
        text = "".join(decoder.put(token) for token in ids) + decoder.end()
        assert text == shared.tokenizer.decode(ids)
        assert counting.count < 120 * len(ids)


# -------------------------------------------------------------------- D.23, D.24: public programs


def test_decode_takes_what_loops_over_results_hand_it(shared: Llama) -> None:
    tokenizer = shared.tokenizer
    texts = [tokenizer.decode([5, 6]), tokenizer.decode([300, 301])]
    for batch in ([[5, 6], [300, 301]], ((5, 6), (300, 301)), torch.tensor([[5, 6], [300, 301]])):
        assert tokenizer.decode(batch) == texts
    assert tokenizer.decode([torch.tensor([5, 6]), np.array([300, 301])]) == texts
    assert tokenizer.decode([[5, 6], []]) == [texts[0], ""] and tokenizer.decode([]) == ""
    assert tokenizer.decode(None) == ""
    found = [tokenizer.decode(part) for part in shared.generate([[1, 42], [1, 7]], 3, temperature=0)]
    assert len(found[0]) == 2 and found[1] == ""
    assert tokenizer.decode([[5, 6]], keep_space=True) == [tokenizer.decode([5, 6], keep_space=True)]


def test_messages_need_nothing_but_getitem(shared: Llama) -> None:
    class Row:
        def __init__(self, **fields: str) -> None:
            self._fields = fields

        def __getitem__(self, key: str) -> str:
            return self._fields[key]

    dialog: Any = [Row(role="system", content="be small"), Row(role="user", content="bird?")]
    plain: Any = [{"role": "system", "content": "be small"}, {"role": "user", "content": "bird?"}]
    assert shared.chat_completion([dialog], 0, max_gen_len=5) == shared.chat_completion([plain], 0, max_gen_len=5)
    with pytest.raises(LlamaError, match="message 0"):
        shared.chat_completion([[Row(role="user")]])  # type: ignore[list-item]


def test_an_eos_that_was_taken_away_is_appended_as_published() -> None:
    tokenizer = Tokenizer(str(GOLDEN / "tokenizer.model"))
    ids = tokenizer.encode("a", bos=True, eos=False)
    tokenizer.eos_id = None
    assert tokenizer.encode("a", bos=True, eos=True) == [*ids, None]
    turns: Any = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, *USER]
    with build_golden() as generator:
        generator.tokenizer.eos_id = None
        assert generator.chat_completion([turns], 0, max_gen_len=2)[0]["generation"]["role"] == "assistant"
        conversation = Conversation(generator)
        for text in ("a", "b"):
            assert list(conversation.ask(text, 0, max_gen_len=2))


def test_the_layers_take_fairscale_s_arguments() -> None:
    def ones(weight: Any) -> Any:
        return torch.nn.init.ones_(weight)

    column = ColumnParallelLinear(4, 6, bias=False, gather_output=True, init_method=ones)
    row = RowParallelLinear(4, 6, bias=False, input_is_parallel=False, init_method=ones)
    embedding = ParallelEmbedding(5, 4, init_method=ones)
    x = torch.arange(8.0).view(2, 4)
    for layer in (column, row):
        assert layer.bias is None and layer(x).tolist() == [[6.0] * 6, [22.0] * 6]
    assert embedding(torch.tensor([3])).tolist() == [[1.0] * 4]
    assert ColumnParallelLinear(4, 6, False, True).gather_output
    assert not RowParallelLinear(4, 6, False, False).input_is_parallel
    ColumnParallelLinear(4, 6, bias=False, gather_output=False, init_method=lambda weight: weight)
    for kind in (ColumnParallelLinear, RowParallelLinear):
        biased = kind(4, 6, bias=True, init_method=ones)
        assert biased.bias.tolist() == [0.0] * 6, kind
        torch.nn.init.constant_(biased.bias, 2.0)
        assert biased(x).tolist() == [[8.0] * 6, [24.0] * 6], kind


def test_the_embedding_moves_ids_to_its_weight() -> None:
    class Ids:
        """As ids on another device are: no good before they are moved."""

        def to(self, device: torch.device) -> Any:
            assert device.type == "cpu"
            return torch.tensor([[1, 2]])

    assert ParallelEmbedding(5, 4)(Ids()).shape == (1, 2, 4)
