"""compile=True: the eager tokens, one compilation for each number of rows, and what happens where none can be had.

Torch's own compiler takes some ten seconds for each number of rows. So by default it makes one step, of one row; what
this library adds (rows, kv_len, refilling, how often is compiled) is tested with a backend that runs what was traced.
"""

import contextlib
import gc
import itertools
import json
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import checkpoint_files
import pytest
import reference
import torch
from helpers import GOLDEN, ROOT, near, random_ids
from torch import Tensor

from llama import Llama, LlamaError
from llama.chat import encode_dialog
from llama.quantization import SCHEMES, PrepackedWeight
from llama.serving.conversation import Conversation

PARAMS: dict[str, Any] = {"dim": 64, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 360}
PARAMS |= {"multiple_of": 32, "norm_eps": 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one layer, with the golden tokenizer."""
    made = tmp_path_factory.mktemp("compiled") / "model"
    checkpoint_files.write_meta(made, reference.random_weights(PARAMS, 0, torch.float32), PARAMS)
    shutil.copyfile(GOLDEN / "tokenizer.model", made / "tokenizer.model")
    return made


Build = Callable[..., Llama]


@pytest.fixture(scope="module")
def build(folder: Path) -> Iterator[Build]:
    """Generators of that checkpoint that never stop by themselves, closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(window: int = 100, rows: int = 4, **changes: Any) -> Llama:
            generator = Llama.build(str(folder), None, window, rows, **{"device": "cpu", "dtype": "float32", **changes})
            generator.tokenizer.eos_id = None
            return stack.enter_context(generator)

        yield make


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """torch.compile traces as ever, but what it traced then runs as it is; one entry (the rows) a compilation."""
    seen: list[int] = []

    def backend(traced: Any, inputs: Sequence[Any], **options: Any) -> Any:
        seen.append(next(tensor.shape[0] for tensor in inputs if isinstance(tensor, Tensor) and tensor.ndim == 1))
        return traced.forward

    if hasattr(torch._dynamo, "pgo"):  # not in torch 2.5
        torch._dynamo.pgo.reset_code_state()  # what was seen to vary in one test would be made variable in the next
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, **given: original(step, **{**given, "backend": backend}))
    return seen


@pytest.fixture
def prepack_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the matrices of a tiny model are prepacked."""
    monkeypatch.setattr(PrepackedWeight, "MIN_BYTES", 0)


def prompts_of(*lengths: int) -> list[list[int]]:
    return [random_ids(1, length, 7 + i, 360)[0].tolist() for i, length in enumerate(lengths)]


def count_rows(generator: Llama) -> list[int]:
    """The number of active rows of each decode step from now on."""
    seen: list[int] = []
    decoder: Any = generator.decoder

    def counting(tokens: list[int], positions: list[int]) -> Tensor:
        seen.append(len(tokens))
        return decoder(tokens, positions)  # type: ignore[no-any-return]

    generator.decoder = counting  # type: ignore[assignment]
    return seen


def same(found: Any, wanted: Any) -> None:
    """Tokens equal, log-probabilities as good as equal."""
    assert found[0] == wanted[0]
    for ours, theirs in zip(found[1], wanted[1], strict=True):
        near(ours, theirs, 1e-4)


# ------------------------------------------------------------------------------ rows, kv_len and counting


SLOW = pytest.mark.slow


WINDOWS = [(130, 1), *(pytest.param(window, 3, marks=SLOW) for window in (2, 40, 63, 64, 65, 128, 130))]


@pytest.mark.parametrize(("window", "rows"), WINDOWS)
def test_any_window_to_its_end(build: Build, graphs: list[int], prepack_all: None, window: int, rows: int) -> None:
    """Below, at and above the 64 positions of a bucket; three rows, which are no power of two."""
    eager, static = build(window, rows), build(window, rows, compile=True)
    steps = count_rows(static)
    for lengths in ((1, 1 + window // 3, 1), (window - 1, 1, window // 2)):
        prompts = prompts_of(*lengths)
        wanted = eager.generate(prompts, None, temperature=0, logprobs=True)
        same(static.generate(prompts, None, temperature=0, logprobs=True), wanted)
    assert sorted(graphs) == sorted(set(steps))


@SLOW
def test_compilations_do_not_grow_with_the_steps(build: Build, graphs: list[int]) -> None:
    """More than 600 steps with all numbers of rows to 8: one compilation for 1, 2, 4 and 8 rows each.

    64 short prompts of mixed lengths that end at different times, so that the last row moves into gaps and new ones
    move in; long ones; one alone. Tokens and log-probabilities are the eager ones.
    """
    eager, static = build(200, 8), build(200, 8, compile=True)
    for attention in static.model.attentions():  # as a text with NaN may have left it
        attention.cache_k.fill_(float("nan"))
        attention.cache_v.fill_(float("nan"))
    steps = count_rows(static)
    short, some = prompts_of(*[1 + i % 7 for i in range(64)]), prompts_of(5, 60, 70, 3, 1)
    long, _ = eager.generate(short, 40, temperature=0)
    stops = sorted({tokens[3 + i % 30] for i, tokens in enumerate(long)})[:20]
    for prompts, length, stop_ids in ((short, 40, stops), (some, 120, []), (prompts_of(9), 190, []), (short, 30, [])):
        wanted = eager.generate(prompts, length, temperature=0, logprobs=True, stop_ids=stop_ids)
        same(static.generate(prompts, length, temperature=0, logprobs=True, stop_ids=stop_ids), wanted)
        assert not stop_ids or len({len(tokens) for tokens in wanted[0]}) > 5
    assert len(steps) >= 600 and set(steps) == set(range(1, 9))
    assert sorted(graphs) == [1, 2, 4, 8]


@SLOW
def test_prompts_that_begin_alike(build: Build, graphs: list[int]) -> None:
    """Of 9 for 4 rows: the rows that a static step fills up with are no source of a beginning."""
    eager, static = build(100, 4), build(100, 4, compile=True)
    [base] = prompts_of(50)
    prompts = [[*base, *range(3, 4 + i)] for i in range(9)]
    wanted = eager.generate(prompts, 20, temperature=0, logprobs=True)
    same(static.generate(prompts, 20, temperature=0, logprobs=True), wanted)
    lengths = [3 + i for i in range(9)]
    stops = sorted({tokens[length] for tokens, length in zip(wanted[0], lengths, strict=True)})
    wanted = eager.generate(prompts, 20, temperature=0, logprobs=True, stop_ids=stops)
    same(static.generate(prompts, 20, temperature=0, logprobs=True, stop_ids=stops), wanted)


def test_models_beside_each_other(build: Build, graphs: list[int], prepack_all: None) -> None:
    """Each has its own step, though the code is one; a step first made in inference mode works outside of it."""
    eager, first, second = build(), build(compile=True), build(compile=True, dtype="bfloat16")
    with torch.inference_mode():
        for block in (second.model.layers[0], second.model):
            for parameter in block.parameters(recurse=False):
                parameter.mul_(1)
        bfloat16 = second.generate(prompts_of(5), 30, temperature=0)[0]
    prompts = prompts_of(5)
    wanted = eager.generate(prompts, 30, temperature=0)
    for _ in range(2):
        assert first.generate(prompts, 30, temperature=0) == wanted
        assert second.generate(prompts, 30, temperature=0)[0] == bfloat16
    assert len(graphs) == 2


def test_the_weights_are_gone_with_the_model(build: Build, graphs: list[int], prepack_all: None, folder: Path) -> None:
    generator = Llama.build(str(folder), None, 64, 1, device="cpu", compile=True)
    generator.generate(prompts_of(3), 4)
    attention = generator.model.layers[0].attention
    freed = [weakref.ref(thing) for thing in (generator.model, attention.qkv.packed, attention.cache_k)]
    generator.close()
    del generator, attention
    gc.collect()
    assert [reference() for reference in freed] == [None] * 3


def test_a_non_finite_weight_is_noticed(build: Build, graphs: list[int]) -> None:
    static = build(compile=True)
    with torch.no_grad():
        static.model.norm.weight[3] = float("nan")
    with pytest.raises(LlamaError, match="NaN"):
        static.generate(prompts_of(3), 4, temperature=0)


@pytest.mark.slow
def test_norms_changed_in_place_are_seen(build: Build, graphs: list[int]) -> None:
    eager, static = build(), build(compile=True)
    before = static.generate(prompts_of(3), 20, temperature=0)
    for generator in (eager, static):
        with torch.no_grad():
            generator.model.layers[0].ffn_norm.weight.mul_(-1)
    wanted = eager.generate(prompts_of(3), 20, temperature=0)
    assert static.generate(prompts_of(3), 20, temperature=0) == wanted != before


# ------------------------------------------------------------------------------------------ hooks


def test_a_hook_brings_back_the_published_schedule(build: Build, graphs: list[int], prepack_all: None) -> None:
    eager, static = build(), build(compile=True)
    prompts = prompts_of(3, 9)
    wanted = eager.generate(prompts, 12, temperature=0, logprobs=True)
    same(static.generate(prompts, 12, temperature=0, logprobs=True), wanted)
    steps, calls = count_rows(static), []
    handle = static.model.layers[0].register_forward_hook(lambda module, args, output: calls.append(output.shape[1]))
    same(static.generate(prompts, 12, temperature=0, logprobs=True), wanted)
    assert calls == [3] + [1] * 17 and not steps
    handle.remove()
    same(static.generate(prompts, 12, temperature=0, logprobs=True), wanted)
    assert len(steps) == 11 and len(calls) == 18


def test_which_layers_are_prepacked(build: Build, graphs: list[int], prepack_all: None) -> None:
    """All but the embedding; wq, wk, wv, w1 and w3 are silent from then on, the others are called."""
    eager, static = build(), build(compile=True)
    plain = dict(eager.model.named_parameters())
    heard: list[str] = []
    for name, module in static.model.named_modules():
        packed = getattr(module, "packed", None)
        if packed is not None:
            assert module.weight is None
            assert torch.equal(packed.dense(), plain[f"{name}.weight"])
            module.register_forward_hook(lambda *args, name=name: heard.append(name.rpartition(".")[2]))
            for x in (torch.ones(1, 3, module.packed.shape[1]), torch.ones(2, 4, module.packed.shape[1])[:, -1]):
                assert (module.packed(x) - x @ packed.dense().T).abs().max() < 1e-5
    assert {name for name, _ in static.model.named_parameters()} == {
        name for name in plain if "norm" in name or "tok" in name
    }
    same(
        static.generate(prompts_of(3), 2, temperature=0, logprobs=True),
        eager.generate(prompts_of(3), 2, temperature=0, logprobs=True),
    )
    assert heard == ["wo", "w2", "output"] * 2


def test_small_matrices_stay_as_they_are(build: Build, graphs: list[int]) -> None:
    assert set(build(compile=True).model.state_dict()) == set(build().model.state_dict())


# -------------------------------------------------------------------------------------- no compiler


def test_no_compiler(
    build: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, prepack_all: None
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    static = build(compile=True)
    name = "clang++" if sys.platform == "darwin" else "g++"
    assert [record.getMessage() for record in caplog.records if "compile" in record.getMessage()] == [
        f"compile=True finds no C++ compiler: install {name}; decoding is not compiled"
    ]
    assert static.decoder is None and static.model.layers[0].attention.qkv is not None
    prompts = prompts_of(3, 9, 1)
    wanted = build().generate(prompts, 20, temperature=0, logprobs=True)
    same(static.generate(prompts, 20, temperature=0, logprobs=True), wanted)


def test_the_compiler_that_torch_would_take(
    build: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CXX names it; another one on the PATH does not help."""
    monkeypatch.setenv("CXX", "another++")
    assert build(compile=True).decoder is None
    assert "install another++" in caplog.text


def test_a_compiler_that_fails(build: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Headers may be missing: a warning, and the same steps uncompiled."""

    def backend(traced: Any, inputs: Sequence[Any], **options: Any) -> Any:
        raise RuntimeError("Python.h: no such file")

    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, **given: original(step, **{**given, "backend": backend}))
    static, prompts = build(compile=True), prompts_of(3, 9)
    wanted = build().generate(prompts, 20, temperature=0, logprobs=True)
    for _ in range(2):
        same(static.generate(prompts, 20, temperature=0, logprobs=True), wanted)
    [warning] = [record.getMessage() for record in caplog.records if "could not compile" in record.getMessage()]
    assert "Python.h: no such file" in warning


# --------------------------------------------------------------------------------- with quantized weights


@pytest.mark.parametrize(
    "scheme", ["int4", *(pytest.param(scheme, marks=SLOW) for scheme in SCHEMES if scheme != "int4")]
)
def test_quantized_and_compiled(build: Build, graphs: list[int], scheme: str) -> None:
    """The kernels are the same, called from the traced step; int8-dynamic's own rounding may turn a close choice."""
    eager, static = build(quantize=scheme), build(quantize=scheme, compile=True)
    prompts = prompts_of(5)
    wanted = eager.generate(prompts, 20, temperature=0, logprobs=True)
    found = static.generate(prompts, 20, temperature=0, logprobs=True)
    assert graphs == [1]
    assert found[0] == wanted[0]
    near(found[1][0], wanted[1][0], 0.1)
    assert {type(module.packed).__name__ for module in static.model.modules() if getattr(module, "packed", None)} == {
        "OperatorWeight"
    }


# --------------------------------------------------------------------------------- torch's own compiler


@pytest.fixture(scope="module")
def real(build: Build) -> tuple[Llama, Llama]:
    """An eager generator of one row, and the same compiled."""
    return build(130, 1), build(130, 1, compile=True)


def compilations() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_compiled_tokens_are_eager_ones(real: tuple[Llama, Llama]) -> None:
    """Over all lengths of the cache, refilled one prompt after another, for one compilation."""
    eager, static = real
    assert static.decoder is not None and static.decoder.compile_seconds == 0
    before = compilations()
    for lengths, length in (((5,), None), ((100, 3, 64, 65, 1), 60)):
        prompts = prompts_of(*lengths)
        wanted = eager.generate(prompts, length, temperature=0, logprobs=True)
        same(static.generate(prompts, length, temperature=0, logprobs=True), wanted)
    assert compilations() == before + 1
    assert 0.1 < static.decoder.compile_seconds < 300


def test_compiled_texts_are_eager_ones(real: tuple[Llama, Llama], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop strings, streams, seeds, and a conversation that keeps its cache."""
    texts: list[list[Any]] = []
    for generator in real:
        whole = generator.text_completion(["river stone"], temperature=0, max_gen_len=60)[0]["generation"]
        stop = whole.split()[5]
        found: list[Any] = [whole]
        found += generator.text_completion(["river stone"], temperature=0, max_gen_len=60, stop=[stop], details=True)
        found.append("".join(generator.stream_text("river stone", temperature=0, max_gen_len=60, stop=[stop])))
        assert found[1]["finish_reason"] == "stop" and found[1]["generation"] == found[2] != whole
        found.append(generator.generate(prompts_of(4, 4), 40, temperature=1.5, seed=11)[0])
        found += [
            step.token for step in itertools.islice(generator.stream(prompts_of(4), 40, temperature=1.5, seed=3), 9)
        ]
        monkeypatch.setattr(generator.tokenizer, "eos_id", 2)
        talk = Conversation(generator)
        for question in ("bird?", "and the cold night?"):
            found.append("".join(talk.ask(question, temperature=0, max_gen_len=12)))
            found.append(talk.prefilled)
        whole_prompt = encode_dialog(generator.tokenizer, talk.dialog[:-1])
        assert talk.prefilled < len(whole_prompt), "the second turn feeds only what is new"
        texts.append(found)
    assert texts[0] == texts[1]


def test_compiled_then_hooked(real: tuple[Llama, Llama]) -> None:
    eager, static = real
    wanted = eager.generate(prompts_of(7), 20, temperature=0, logprobs=True)
    handle = static.model.norm.register_forward_hook(lambda *args: None)
    same(static.generate(prompts_of(7), 20, temperature=0, logprobs=True), wanted)
    handle.remove()
    same(static.generate(prompts_of(7), 20, temperature=0, logprobs=True), wanted)


@pytest.mark.parametrize(
    "window", [pytest.param(50, marks=SLOW), *(pytest.param(w, marks=pytest.mark.proof) for w in (64, 200))]
)
def test_compiled_mixed_batches(build: Build, prepack_all: None, window: int) -> None:
    eager, static = build(window, 6), build(window, 6, compile=True)
    before, steps = compilations(), count_rows(static)
    for lengths in ([1 + i % 7 for i in range(40)], (window - 1, window // 2, 1), (9,), (3, 4)):
        prompts = prompts_of(*lengths)
        wanted = eager.generate(prompts, 30, temperature=0, logprobs=True)
        same(static.generate(prompts, 30, temperature=0, logprobs=True), wanted)
    assert compilations() - before == len({min(6, 1 << (rows - 1).bit_length()) for rows in steps})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_compiled_in_half_the_bytes(build: Build, prepack_all: None, dtype: str) -> None:
    """Near the eager log-probabilities: sums are rounded elsewhere."""
    eager, static = build(dtype=dtype), build(dtype=dtype, compile=True)
    prompt = prompts_of(60)
    for generator in (eager, static):
        list(generator.stream(prompt, 1, temperature=0))
    wanted = eager.generate(prompt, 1, temperature=0)[0][0]
    tokens, positions = wanted, [60]
    assert static.decoder is not None
    found = static.decoder(tokens, positions)
    assert (found - eager.model(torch.tensor([tokens]), 60)[:, -1]).abs().max() < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_compiled_and_quantized(build: Build, scheme: str) -> None:
    eager, static = build(quantize=scheme), build(quantize=scheme, compile=True)
    wanted = eager.generate(prompts_of(5), 40, temperature=0, logprobs=True)
    found = static.generate(prompts_of(5), 40, temperature=0, logprobs=True)
    assert found[0] == wanted[0]
    near(found[1][0], wanted[1][0], 0.1)


ON_RANKS = """
import json, os, sys
from helpers import build_golden
prompts, found = [[1, 20, 30, 40], [1, 50, 60, 70, 80], [1, 7]] * 2, {}
for scheme in (None, "int8"):
    for compile in (False, True):
        with build_golden(quantize=scheme, compile=compile, timeout=60) as generator:
            found[f"{scheme} {compile}"] = generator.generate(prompts, 12, temperature=0)[0]
json.dump(found, open(sys.argv[1] + os.environ["RANK"], "w"))
"""


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    """The same tokens on both as uncompiled, whether torch can compile what the ranks say to each other or not."""
    (tmp_path / "worker.py").write_text(ON_RANKS)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(tmp_path / "worker.py"), str(tmp_path / "rank")]
    subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)
    first, second = ((tmp_path / f"rank{rank}").read_text() for rank in range(2))
    assert first == second and len(first) > 500
    found = json.loads(first)
    assert found["None True"] == found["None False"] and found["int8 True"] == found["int8 False"]
