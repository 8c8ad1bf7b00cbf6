"""`python -m llama trace`: what it says is what the model did, on one rank and on two."""

import io
import json
import math
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from helpers import close, make_model, random_ids

from llama import Llama, LlamaError
from llama.cli.step_trace import CallRecorder, StepTrace, attention_weights, trace_steps
from llama.cli.trace import quote, trace
from llama.engine.overrides import has_hooks_or_overrides
from llama.engine.sampling import Sampling
from llama.model import repeat_kv

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "checkpoints" / "demo"
PROMPT, TOKENS, LAYER, SETTINGS = "In the garden", 8, 2, Sampling(temperature=0.8, top_p=0.9, seed=2)


@pytest.fixture(scope="module")
def generator() -> Iterator[Llama]:
    with Llama.build(str(DEMO), None, 64, 1, device="cpu", dtype="float32") as built:
        yield built


@pytest.fixture(scope="module")
def ids(generator: Llama) -> list[int]:
    return generator.tokenizer.encode(PROMPT, bos=True, eos=False)


@pytest.fixture(scope="module")
def steps(generator: Llama, ids: list[int]) -> list[StepTrace]:
    return list(trace_steps(generator, ids, TOKENS, SETTINGS, LAYER))


def test_looking_changes_nothing(generator: Llama, ids: list[int], steps: list[StepTrace]) -> None:
    assert not has_hooks_or_overrides(generator.model)  # the hooks are gone
    tokens, _ = generator.generate([ids], TOKENS, SETTINGS.temperature, SETTINGS.top_p, seed=SETTINGS.seed)
    assert tokens == [[step.token for step in steps]]
    assert [step.text for step in steps] == [generator.tokenizer.decode(ids + tokens[0][: n + 1]) for n in range(8)]
    with pytest.raises(ZeroDivisionError):
        for _ in trace_steps(generator, ids, TOKENS, SETTINGS):
            raise ZeroDivisionError
    assert not has_hooks_or_overrides(generator.model) and generator.generate([ids], 1)  # nor is the model still taken


def test_the_published_schedule_is_seen(steps: list[StepTrace], ids: list[int]) -> None:
    spans = [(step.phase, step.prev_pos, step.cur_pos) for step in steps]
    n = len(ids)
    assert spans == [("prefill", 0, n), *(("decode", n + i, n + i + 1) for i in range(7))]
    assert [step.number for step in steps] == list(range(1, 9))
    assert all(step.forward_ms > 0 and step.sampling_ms > 0 for step in steps)


@pytest.mark.parametrize("step", [0, 1, 5])
def test_shapes_at_each_stage(steps: list[StepTrace], ids: list[int], step: int) -> None:
    fed, end = (len(ids), len(ids)) if step == 0 else (1, len(ids) + step)
    assert {name: shape for name, shape, _ in steps[step].shapes} == {
        "hidden": f"(1, {fed}, 128)",
        "q": f"(1, {fed}, 4, 32)",
        "k": f"(1, {fed}, 2, 32)",
        "v": f"(1, {fed}, 2, 32)",
        "cache": "(1, 64, 2, 32)",
        "written": f"{end - fed}:{end}",
        "read": f"0:{end}",
        "mask": f"({fed}, {fed})" if step == 0 else "none",
        "ffn": f"(1, {fed}, 352)",
        "logits": f"(1, {fed}, 1024)",
    }
    triangle = [[int(j <= i) for j in range(fed)] for i in range(fed)]
    assert steps[step].mask == (triangle if step == 0 else None)


def test_the_cache_holds_what_was_written(generator: Llama, ids: list[int]) -> None:
    attention = generator.model.attentions()[0]
    attention.cache_k.zero_()
    for step in trace_steps(generator, ids, 3, SETTINGS):
        held = attention.cache_k[0].ne(0).any(-1).any(-1).nonzero()[:, 0].tolist()
        assert held == list(range(step.cur_pos))
        assert step.heads == []  # no layer was asked for


def test_attention_weights_times_values_are_the_modules_output(kind: str) -> None:
    model, tokens = make_model(kind), random_ids(1, 10)
    attention, outputs = model.attentions()[1], []
    attention.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    with CallRecorder(model, 1) as calls, torch.no_grad():
        for start, end in ((0, 6), (6, 7), (7, 10)):
            model.forward(tokens[:, start:end], start)
            weights = attention_weights(attention, calls["q"].output, *calls["block"].inputs[1:])  # (h, s, t)
            assert weights.shape == (4, end - start, end)
            close(weights.sum(-1), torch.ones(4, end - start), 1e-5)
            values = repeat_kv(attention.cache_v[:1, :end], attention.n_rep)[0]  # (t, h, k)
            heads = torch.einsum("hst,thk->shk", weights, values)  # (s, h, k)
            close(attention.wo(heads.reshape(1, end - start, -1)), outputs[-1], 1e-6)


def test_heads_are_those_of_the_layer(steps: list[StepTrace], generator: Llama, ids: list[int]) -> None:
    assert [(head.head, head.kv_head, head.rank) for head in steps[3].heads] == [
        (0, 0, 0),
        (1, 0, 0),
        (2, 1, 0),
        (3, 1, 0),
    ]
    with CallRecorder(generator.model, LAYER) as calls:
        generator.model.forward(torch.tensor([ids]), 0)
        attention = generator.model.attentions()[LAYER]
        weights = attention_weights(attention, calls["q"].output, *calls["block"].inputs[1:])
    close(torch.tensor([head.weights for head in steps[0].heads]), weights, 1e-4)
    for head in steps[3].heads:
        assert [len(row) for row in head.weights] == [steps[3].cur_pos] and sum(head.weights[0]) == pytest.approx(
            1, abs=2e-3
        )


def test_the_last_tokens_attention_alone(steps: list[StepTrace], generator: Llama, ids: list[int]) -> None:
    for short, whole in zip(trace_steps(generator, ids, 2, SETTINGS, LAYER, whole=False), steps):
        assert [len(head.weights) for head in short.heads] == 4 * [1]
        close(
            torch.tensor([head.weights[-1] for head in short.heads]),
            torch.tensor([head.weights[-1] for head in whole.heads]),
            1e-3,
        )
        assert short.mask == (None if whole.mask is None else whole.mask[-1:])


def test_candidates_and_draw_are_the_oracles(steps: list[StepTrace], ids: list[int], generator: Llama) -> None:
    params = {**json.loads((DEMO / "params.json").read_text()), "vocab_size": 1024}
    weights = {k: v.double() for k, v in torch.load(DEMO / "consolidated.00.pth", weights_only=True).items()}
    text = ids + [step.token for step in steps]
    table = reference.logits(weights, params, torch.tensor([text]))[0]
    narrowed = 0
    for step, logits in zip(steps, table[len(ids) - 1 :]):
        raw, tempered = torch.softmax(logits, -1).tolist(), torch.softmax(logits / 0.8, -1).tolist()
        order = sorted(range(1024), key=lambda i: -tempered[i])
        kept, mass = [], 0.0
        for i in order:
            if mass <= 0.9:
                kept.append(i)
                mass += tempered[i]
        best = order[:5] if step.token in order[:5] else [*order[:5], step.token]
        assert [option.id for option in step.candidates] == best and step.n_kept == len(kept)
        for option in step.candidates:
            final = tempered[option.id] / mass if option.id in kept else 0.0
            assert (option.raw, option.tempered, option.final) == pytest.approx(
                (raw[option.id], tempered[option.id], final), abs=1e-4
            )
            assert option.kept == (option.id in kept) and option.drawn == (option.id == step.token)
            assert option.piece == generator.tokenizer.sp_model.id_to_piece(option.id).replace("\u2581", " ")
        before = sum(tempered[i] for i in kept[: kept.index(step.token)]) / mass
        assert (step.low, step.high) == pytest.approx((before, before + tempered[step.token] / mass), abs=1e-4)
        assert step.uniform is not None and step.low - 1e-6 <= step.uniform <= step.high + 1e-6
        narrowed += len(kept) < 1024 and len(kept) > 1
    assert narrowed >= 2, "these steps have nothing to choose: take another prompt"


def test_greedy_and_seedless(generator: Llama, ids: list[int]) -> None:
    for step in trace_steps(generator, ids, 3, Sampling(temperature=0, seed=5)):
        assert [(option.final, option.kept) for option in step.candidates] == [(1, True)] + 4 * [(0, False)]
        assert step.token == step.candidates[0].id and step.uniform is None and step.n_kept == 1
    assert next(iter(trace_steps(generator, ids, 1, Sampling()))).uniform is None


# ----------------------------------------------------------------------------------------- in print


def test_what_is_printed(steps: list[StepTrace], ids: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    trace(PROMPT, TOKENS, layer=LAYER, temperature=0.8, seed=2, device="cpu")
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert printed.isascii() and max(map(len, lines)) <= 98
    assert f"PROMPT  '{PROMPT}': {len(ids)} tokens" in printed
    assert next(line.split()[1:] for line in lines if line.split()[:1] == ["id"]) == list(map(str, ids))
    assert len(re.findall(r"^STEP", printed, re.M)) == TOKENS
    for part, step in zip(printed.split("\nSTEP ")[1:], steps):
        assert part.startswith(f"{step.number} of 8  {step.phase}, prev_pos:cur_pos = {step.prev_pos}:{step.cur_pos}")
        assert f"text   {step.text!r}\n" in part and re.search(r"time   \d+\.\d ms for the forward pass, \d", part)
        assert len(re.findall(r"\d%.*drawn", part)) == 1 and part.count("% ") >= 15
        for option in step.candidates:
            assert re.search(
                rf"{re.escape(repr(option.piece))} +{option.id} +{option.raw:.2%} +{option.tempered:.2%} +{option.final:.2%}",
                part,
            )
        newest = [round(100 * head.weights[-1][step.cur_pos - 1]) for head in step.heads]
        assert re.search(rf"^ +{step.cur_pos - 1} '.*'" + "".join(f" +{share}" for share in newest), part, re.M)


def test_the_end_of_a_text_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    trace("[INST] What is the capital of Japan? [/INST]", 30, layer=0, temperature=0, device="cpu")
    printed = capsys.readouterr().out
    tables = printed.split("key/value head   0   0   1   1\n")[2:]  # the prompt has 16 tokens, the most that are shown
    assert len(tables) > 3
    for table in tables:
        rows = table.split("\n\n")[0].splitlines()
        assert len(rows) == 17 and rows[-1].split()[:2] == ["all", "others"]
        assert all(abs(sum(column) - 100) <= 9 for column in zip(*(map(int, row.split()[-4:]) for row in rows)))
    assert "'</s>' ends the text" in printed and "temperature 0 is greedy" in printed and "0..1" not in printed


def test_a_terminal_without_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    assert quote("caf\xe9 \u4f60\n\x1b[0m\u202e") == r"'café 你\n\x1b[0m\u202e'"
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    assert quote("caf\xe9") == "'café'" and quote("\u4f60") == r"'\u4f60'"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"tokens": 0}, "tokens=0 must be a positive integer"),
        ({"layer": 6}, "layer=6 must be an integer from 0 to 5"),
        ({"layer": -1}, "layer=-1 .* from 0 to 5"),
        ({"layer": 1.0}, "layer=1.0 .* from 0 to 5"),
        ({"html": "no/such/folder/x.html"}, "no/such/folder/x.html.* must name a file in an existing folder"),
        ({"html": str(ROOT)}, "must name a file in an existing folder"),
        (
            {"prompt": "a " * 900, "max_seq_len": 1024, "html": "x.html"},
            "attention of 4 heads over a prompt of .* shorten",
        ),
        ({"max_seq_len": 4}, "4 tokens leave no room to generate within max_seq_len=4"),
        ({"temperature": -1}, "temperature=-1"),
    ],
)
def test_mistakes(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(LlamaError, match=words):
        trace(**{"prompt": PROMPT, "tokens": 1, "device": "cpu", **wrong})


# ------------------------------------------------------------------------------------------ 2 ranks


@pytest.mark.slow
def test_two_ranks_show_their_parts_once(tmp_path: Path, steps: list[StepTrace]) -> None:
    script, page = tmp_path / "run.py", tmp_path / "page.html"
    call = f"trace({PROMPT!r}, {TOKENS}, layer={LAYER}, temperature=0.8, seed=2, html={str(page)!r}, device='cpu')"
    script.write_text(f"import torch\nfrom llama.cli.trace import trace\ntorch.set_num_threads(1)\n{call}\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
    }
    ranks = [
        subprocess.Popen([sys.executable, str(script)], env={**env, "RANK": rank}, stdout=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    printed, silent = (rank.communicate(timeout=100)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0] and silent == ""
    assert printed.count("STEP 1 of 8") == 1 and max(map(len, printed.splitlines()[:-1])) <= 98  # then the page's path
    for name, shape, note in (
        ("q, rank 0", "(1, 4, 2, 32)", "0:2 of 4 query heads"),
        ("q, rank 1", "(1, 4, 2, 32)", "2:4 of 4 query heads"),
        ("k, rank 1", "(1, 4, 1, 32)", "1:2 of 2 key heads"),
        ("cache, rank 0", "(1, 256, 1, 32)", ""),
        ("ffn, rank 1", "(1, 4, 176)", ""),
    ):
        first = printed.split("\nSTEP ")[1]
        assert len(re.findall(rf"^  {re.escape(name)} +{re.escape(shape)} +{note}", first, re.M)) == 1, name
    data = re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.S)
    assert data is not None
    for found, wanted in zip(json.loads(data[1])["steps"], steps, strict=True):
        assert found["token"] == wanted.token and found["text"] == wanted.text
        for part, whole in zip(found["heads"], wanted.heads, strict=True):
            assert (part["head"], part["kv_head"], part["rank"]) == (whole.head, whole.kv_head, whole.head // 2)
            for mine, theirs in zip(part["weights"], whole.weights, strict=True):
                assert mine == pytest.approx(theirs, abs=1e-3) and math.isclose(sum(mine), 1, abs_tol=2e-3)
