"""What people add to the published calls: many prompts, streams, stops, seeds, conversations, scoring."""

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from llama import Llama, LlamaError, ModelArgs, Step, Tokenizer, Transformer
from llama.engine.overrides import has_hooks_or_overrides
from llama.engine.request import Request
from llama.engine.sampling import Sampling
from llama.engine.scheduler import Scheduler
from llama.serving import serve
from llama.serving.conversation import Conversation

GOLDEN = Path(__file__).parent / "golden" / "mha"


@pytest.fixture(scope="module")
def golden() -> Any:
    return torch.load(GOLDEN / "golden.pt", weights_only=True)


@pytest.fixture
def generator() -> Llama:
    weights = torch.load(GOLDEN / "consolidated.00.pth", weights_only=True)
    args = ModelArgs(dim=64, n_layers=2, n_heads=4, multiple_of=32, vocab_size=360, max_seq_len=96, max_batch_size=8)
    args.multiple_of = weights["layers.0.feed_forward.w1.weight"].shape[0]
    model = Transformer(args)
    model.load_state_dict(weights)
    return Llama(model, Tokenizer(str(GOLDEN / "tokenizer.model")))


def test_rows_are_refilled_and_none_is_idle(generator: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 prompts, outputs of 4 to 64 tokens, 8 rows: the batch stays full while prompts wait."""
    draw = random.Random(0)
    prompts = [[1] + [draw.randrange(3, 360) for _ in range(draw.randrange(1, 24))] for _ in range(64)]
    lengths = [4 + (i * 37) % 61 for i in range(64)]
    decoding = Scheduler(generator.model, prompts, Request(64, Sampling(temperature=0), frozenset()))
    for row, length in zip(decoding.rows, lengths):
        row.limit = len(row.prompt) + length
    fed: list[tuple[int, int]] = []  # rows fed, prompts that had not begun
    decode = Scheduler._decode

    def counted(self: Scheduler, active: list[Any]) -> torch.Tensor:
        fed.append((len(active), sum(not row.output for row in self.rows)))
        return decode(self, active)

    monkeypatch.setattr(Scheduler, "_decode", counted)
    for _ in decoding.steps():
        pass
    assert [len(row.output) for row in decoding.rows] == lengths
    assert sum(rows for rows, _ in fed) == sum(lengths) - 64  # nothing idle at all
    assert all(rows == 8 for rows, waiting in fed if waiting)
    for row, prompt, length in zip(decoding.rows[::9], prompts[::9], lengths[::9]):
        assert generator.generate([prompt], length, temperature=0)[0] == [row.output]


@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_more_prompts_than_rows_are_as_alone(generator: Llama, golden: Any, chunk: int) -> None:
    many = golden["prompts"] * 7
    found = generator.generate(many, 12, temperature=0, prefill_chunk=chunk)[0]
    assert found == golden["greedy"] * 7
    hook = generator.model.layers[0].register_forward_hook(lambda *args: None)
    assert has_hooks_or_overrides(generator.model) and generator.generate(many, 12, temperature=0)[0] == found
    hook.remove()


def test_a_stream_is_the_whole(generator: Llama, golden: Any) -> None:
    steps = list(generator.stream(golden["prompts"], 12, temperature=0, logprobs=True))
    for row, (tokens, scores) in enumerate(zip(golden["greedy"], golden["greedy_lp"])):
        mine = [step for step in steps if step.prompt == row]
        assert all(isinstance(step, Step) for step in mine) and [step.token for step in mine] == tokens
        assert [step.logprob for step in mine] == pytest.approx(scores, abs=1e-4)
        assert [step.finish_reason for step in mine] == [None] * 11 + ["length"]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"stop": ["e", "a b"]},
    {"stop": [" "]},
    {"keep_space": True},
    {"stop_ids": [40, 317]},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_streamed_text_is_the_text(generator: Llama, options: dict[str, Any]) -> None:
    for seed in range(4):
        whole = generator.text_completion(["the cold night"], 1.5, 0.9, 40, seed=seed, **options)[0]["generation"]
        assert "".join(generator.stream_text("the cold night", 1.5, 0.9, 40, seed=seed, **options)) == whole
        assert not any(stop in whole for stop in options.get("stop", ()))
        dialog: Any = [{"role": "user", "content": "rain"}]
        answer = generator.chat_completion([dialog], 1.5, 0.9, 40, seed=seed, **options)[0]["generation"]["content"]
        assert "".join(generator.stream_chat(dialog, 1.5, 0.9, 40, seed=seed, **options)) == answer


def test_an_open_stream_is_busy_and_closing_frees(generator: Llama, golden: Any) -> None:
    stream = generator.stream(golden["prompts"], 5)
    next(stream)
    for call in (lambda: generator.generate([[1]], 1), lambda: next(generator.stream([[1]], 1))):
        with pytest.raises(LlamaError, match="busy"):
            call()
    stream.close()  # type: ignore[attr-defined]
    assert generator.generate(golden["prompts"], 12, temperature=0)[0] == golden["greedy"]


def test_details_and_reasons(generator: Llama, golden: Any) -> None:
    prompt, output = golden["prompts"][0], golden["greedy"][0]
    tokens, _, details = generator.generate([prompt], 12, temperature=0, details=True, stop_ids=[output[4]])
    assert tokens == [output[:4]]
    assert details == [{"finish_reason": "stop", "prompt_tokens": 4, "completion_tokens": 4}]
    _, _, details = generator.generate([prompt], 3, temperature=0, details=True)
    assert details[0]["finish_reason"] == "length"
    refused = generator.chat_completion([[{"role": "user", "content": "[INST]"}]], details=True)[0]
    assert refused["finish_reason"] == "refused" and refused["completion_tokens"] == 0
    assert list(generator.text_completion(["a"], max_gen_len=1)[0]) == ["generation"]


def test_neutral_is_off(generator: Llama, golden: Any) -> None:
    neutral: dict[str, Any] = {
        "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
        "logit_bias": None, "seed": None, "stop": [], "stop_ids": [], "prefill_chunk": 512,
    }  # fmt: skip
    torch.manual_seed(3)
    plain = generator.generate([[1, 5]] * 3, 12, logprobs=True)
    torch.manual_seed(3)
    assert generator.generate([[1, 5]] * 3, 12, logprobs=True, **neutral) == plain


def test_a_seed_is_repeatable_and_private(generator: Llama) -> None:
    prompts = [[1, 5], [1, 9, 9], [1, 5]]
    state = torch.get_rng_state()
    first = generator.generate(prompts, 12, temperature=1.0, seed=11)[0]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert generator.generate(prompts, 12, temperature=1.0, seed=11)[0] == first
    assert generator.generate([[1, 9, 9]], 12, temperature=1.0, seed=11)[0] == [first[1]]  # neighbours do not matter
    assert first[0] != first[2] and generator.generate(prompts, 12, temperature=1.0, seed=12)[0] != first


def test_penalties_and_bias_reach_the_choice(generator: Llama, golden: Any) -> None:
    prompt, first = golden["prompts"][0], golden["greedy"][0][0]
    assert first not in generator.generate([prompt], 12, temperature=0, logit_bias={first: -100.0})[0][0]
    once = generator.generate([prompt], 30, temperature=0, presence_penalty=1e4)[0][0]
    assert len(set(once)) == len(once)
    never = generator.generate(
        [prompt], 30, temperature=0, repetition_penalty=1e6, logit_bias=dict.fromkeys(range(360), 50.0)
    )[0][0]
    assert len({*never, *prompt}) == len(never) + len(prompt)


def test_top_logprobs(generator: Llama) -> None:
    [result] = generator.text_completion(["rain"], 0, max_gen_len=4, logprobs=True, top_logprobs=3)
    assert [len(best) for best in result["top_logprobs"]] == [3] * 4
    assert [best[0][1] for best in result["top_logprobs"]] == result["logprobs"]
    with pytest.raises(LlamaError, match="top_logprobs=3 needs logprobs=True"):
        generator.text_completion(["rain"], top_logprobs=3)


@torch.no_grad()
def test_scores_are_those_of_one_forward(generator: Llama) -> None:
    prompts: list[Any] = ["the cold night", [1, 7, 30], [1], "rain fell and the field was wet"]
    for found in generator.score(prompts * 4):
        ids = torch.tensor(found["tokens"])
        table = torch.log_softmax(generator.model(ids[None], 0)[0], -1)
        wanted = [0.0, *table[:-1].gather(-1, ids[1:, None])[:, 0].tolist()]
        assert found["logprobs"] == pytest.approx(wanted, abs=1e-4) and found["sum"] == pytest.approx(
            sum(wanted), abs=1e-3
        )


def test_states_and_embeddings_ignore_padding(generator: Llama) -> None:
    prompts = [[1, 5, 6, 7, 8], [1, 9], [1, 2, 3]]
    together = generator.hidden_states(prompts)
    for prompt, state in zip(prompts, together):
        assert state.shape == (3, len(prompt), 64)
        torch.testing.assert_close(state, generator.hidden_states([prompt])[0], atol=1e-4, rtol=1e-4)
    logits = generator.model.output(together[0][-1])
    torch.testing.assert_close(logits, generator.model(torch.tensor(prompts[:1]), 0)[0], atol=1e-4, rtol=1e-4)
    texts = ["rain", "the cold night"]
    for pooling in ("mean", "last"):
        both = generator.embed(texts, pooling=pooling)
        torch.testing.assert_close(both[1:], generator.embed(texts[1:], pooling=pooling), atol=1e-4, rtol=1e-4)
    with pytest.raises(LlamaError, match="layers names 2"):
        generator.hidden_states(prompts, layers=[2])


def test_a_conversation_feeds_only_what_is_new(generator: Llama) -> None:
    talk = Conversation(generator)
    "".join(talk.ask("rain", temperature=0, max_gen_len=3))
    first = talk.prefilled
    "".join(talk.ask("sun", temperature=0, max_gen_len=3))
    from llama import encode_dialog

    whole = encode_dialog(generator.tokenizer, talk.dialog[:3])
    assert 0 < talk.prefilled < len(whole) - first + 8 and len(talk.dialog) == 4
    answer = talk.dialog[-1]["content"]
    generator.generate([[1]], 1)  # somebody else used the cache
    alone = generator.chat_completion([talk.dialog[:3]], temperature=0, max_gen_len=3)[0]["generation"]["content"]
    assert answer == alone
    assert "".join(talk.ask("[INST]")).startswith("Error") and len(talk.dialog) == 4


def test_the_oldest_turns_are_dropped(generator: Llama) -> None:
    talk = Conversation(generator, system="be small")
    for turn in range(4):
        "".join(talk.ask(f"rain {turn}", temperature=0, max_gen_len=2))
    assert talk.dropped and talk.system == "be small" and talk.messages()[0]["role"] == "system"
    dialog = talk.messages() + [{"role": "user", "content": "rain"}] * 1
    long: Any = [*dialog[:1], *[{"role": r, "content": "rain fell"} for r in ("user", "assistant") * 4], dialog[-1]]
    with pytest.raises(LlamaError, match="max_seq_len"):
        generator.chat_completion([long], max_gen_len=4)
    [result] = generator.chat_completion([long], max_gen_len=4, drop_oldest=True, details=True)
    assert result["dropped"] > 0 and result["prompt_tokens"] <= 92


def test_serve_on_one_rank(generator: Llama, golden: Any) -> None:
    answers: list[Any] = []
    serve(generator, lambda call: answers.append(call("generate", golden["prompts"], 12, temperature=0)))
    assert answers[0][0] == golden["greedy"]


def test_many_calls_leave_memory_where_it_was(generator: Llama) -> None:
    def call() -> None:
        generator.generate([[1, 5], [1, 6, 7]], 4, logprobs=True, repetition_penalty=1.1)
        "".join(generator.stream_text("rain", max_gen_len=4, stop=["xyz"]))

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    call()
    before = tensors()
    for _ in range(60):
        call()
    assert tensors() <= before + 2


def test_a_continuation_keeps_its_space(generator: Llama) -> None:
    [plain] = generator.text_completion(["rain"], 0, max_gen_len=8, logprobs=True)
    [spaced] = generator.text_completion(["rain"], 0, max_gen_len=8, logprobs=True, keep_space=True)
    assert spaced["generation"].lstrip(" ") == plain["generation"].lstrip(" ")
    assert "".join(spaced["tokens"]).replace("\ufffd", "") == spaced["generation"].replace("\ufffd", "")


@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_looking_in_chunks_is_looking_at_once(generator: Llama, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Scores, states and embeddings of long prompts, fed `prefill_chunk` positions at a time."""
    draw = random.Random(3)
    prompts = [[1] + [draw.randrange(3, 360) for _ in range(n)] for n in (40, 1, 17)]
    whole = generator.hidden_states(prompts, prefill_chunk=512), generator.score(prompts), generator.embed(prompts)
    widths: list[int] = []
    hidden = Transformer.hidden

    def counted(self: Transformer, tokens: torch.Tensor, start_pos: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        widths.append(tokens.shape[1])
        return hidden(self, tokens, start_pos, *args, **kwargs)

    monkeypatch.setattr(Transformer, "hidden", counted)
    states = generator.hidden_states(prompts, prefill_chunk=chunk)
    scores = generator.score(prompts, prefill_chunk=chunk)
    vectors = generator.embed(prompts, prefill_chunk=chunk)
    assert max(widths) == min(chunk, 41) and sum(widths) == 3 * 41
    for found, wanted in zip(states, whole[0]):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)
    for found, wanted in zip(scores, whole[1]):
        assert found["tokens"] == wanted["tokens"] and found["logprobs"] == pytest.approx(wanted["logprobs"], abs=1e-4)
    torch.testing.assert_close(vectors, whole[2], atol=1e-4, rtol=1e-3)
    for look in (generator.hidden_states, generator.score, generator.embed):
        with pytest.raises(LlamaError, match="prefill_chunk=0"):
            look(prompts, prefill_chunk=0)  # type: ignore[operator]


@pytest.mark.parametrize("wrong", [None, 5, "text", b"text"])
def test_what_is_no_list_is_named(generator: Llama, wrong: Any) -> None:
    for call in (generator.text_completion, generator.chat_completion, generator.score, generator.embed):
        with pytest.raises(LlamaError, match=r"(prompts|dialogs) is .*must be a list of"):
            call(wrong)
    with pytest.raises(LlamaError, match="stop_ids is .*must be a list of"):
        generator.generate([[1]], 1, stop_ids=wrong)
