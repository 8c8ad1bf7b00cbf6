"""Programs around the published package, in short: each must run on this one unchanged."""

import copy
import inspect
import json
import pickle
import shutil
import subprocess
import sys
import typing
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import GOLDEN, ROOT, StubModel, StubTokenizer, build_golden, close, make_model, random_ids, random_prompts
from torch import Tensor

import llama
from llama import Llama, ModelArgs, Tokenizer, Transformer
from llama import generation as published_generation
from llama import model as published_model
from llama import tokenizer as published_tokenizer
from llama.generation import sample_top_p
from llama.model import RMSNorm, apply_rotary_emb, precompute_freqs_cis, repeat_kv, reshape_for_broadcast

EMPTY = inspect.Parameter.empty

# ------------------------------------------------------------------------------------------ the names

SAMPLED = {"temperature": 0.6, "top_p": 0.9}
SIGNATURES: dict[Any, dict[str, Any]] = {
    Llama.build: {
        **dict.fromkeys(("ckpt_dir", "tokenizer_path", "max_seq_len", "max_batch_size"), EMPTY),
        "model_parallel_size": None,
        "seed": 1,
    },
    Llama: {"model": EMPTY, "tokenizer": EMPTY},
    Llama.generate: {
        **{"self": EMPTY, "prompt_tokens": EMPTY, "max_gen_len": EMPTY},
        **SAMPLED,
        **{"logprobs": False, "echo": False},
    },
    Llama.text_completion: {
        **{"self": EMPTY, "prompts": EMPTY},
        **SAMPLED,
        **{"max_gen_len": None, "logprobs": False, "echo": False},
    },
    Llama.chat_completion: {
        **{"self": EMPTY, "dialogs": EMPTY},
        **SAMPLED,
        **{"max_gen_len": None, "logprobs": False},
    },
    sample_top_p: {"probs": EMPTY, "p": EMPTY},
    Tokenizer: {"model_path": EMPTY},
    Tokenizer.encode: {"self": EMPTY, "s": EMPTY, "bos": EMPTY, "eos": EMPTY},
    Tokenizer.decode: {"self": EMPTY, "t": EMPTY},
    RMSNorm: {"dim": EMPTY, "eps": 1e-6},
    precompute_freqs_cis: {"dim": EMPTY, "end": EMPTY, "theta": 10000.0},
    reshape_for_broadcast: {"freqs_cis": EMPTY, "x": EMPTY},
    apply_rotary_emb: {"xq": EMPTY, "xk": EMPTY, "freqs_cis": EMPTY},
    repeat_kv: {"x": EMPTY, "n_rep": EMPTY},
    published_model.Attention: {"args": EMPTY},
    published_model.FeedForward: dict.fromkeys(("dim", "hidden_dim", "multiple_of", "ffn_dim_multiplier"), EMPTY),
    published_model.TransformerBlock: {"layer_id": EMPTY, "args": EMPTY},
    Transformer: {"params": EMPTY},
    Transformer.forward: {"self": EMPTY, "tokens": EMPTY, "start_pos": EMPTY},
    published_model.TransformerBlock.forward: dict.fromkeys(("self", "x", "start_pos", "freqs_cis", "mask"), EMPTY),
    published_model.Attention.forward: dict.fromkeys(("self", "x", "start_pos", "freqs_cis", "mask"), EMPTY),
}
EXACT = [sample_top_p, precompute_freqs_cis, reshape_for_broadcast, apply_rotary_emb, repeat_kv]


@pytest.mark.parametrize("call", SIGNATURES, ids=lambda call: call.__qualname__)
def test_signatures(call: Any) -> None:
    given = inspect.signature(call).parameters
    new = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    by_position = {name: p.default for name, p in given.items() if p.kind not in new}
    assert list(by_position.items()) == list(SIGNATURES[call].items())
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in given.values() if p.kind not in new)
    added = [p for p in given.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert all(p.default is not EMPTY for p in added)
    assert not (added and call in EXACT)


def test_build_takes_device_dtype_backend_timeout_by_keyword_only() -> None:
    given = inspect.signature(Llama.build).parameters
    for name in ("device", "dtype", "backend", "timeout"):
        assert given[name].kind is inspect.Parameter.KEYWORD_ONLY and given[name].default is None
    assert isinstance(inspect.getattr_static(Llama, "build"), (staticmethod, classmethod))


def test_exported_names() -> None:
    for name in ("Llama", "Dialog", "ModelArgs", "Transformer", "Tokenizer"):
        assert name in llama.__all__ and hasattr(llama, name)
    names = "Role Message CompletionPrediction ChatPrediction Dialog Llama sample_top_p"
    assert all(hasattr(published_generation, name) for name in names.split())
    assert published_tokenizer.Tokenizer is llama.Tokenizer and published_model.ModelArgs is llama.ModelArgs
    assert published_generation.Llama is llama.Llama and published_model.Transformer is llama.Transformer


def test_constants() -> None:
    generation = published_generation
    assert (generation.B_INST, generation.E_INST) == ("[INST]", "[/INST]")
    assert (generation.B_SYS, generation.E_SYS) == ("<<SYS>>\n", "\n<</SYS>>\n\n")
    assert set(generation.SPECIAL_TAGS) == {"[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"}
    assert generation.UNSAFE_ERROR == "Error: special tags are not allowed as part of the prompt."
    assert typing.get_args(generation.Role) == ("system", "user", "assistant")
    assert generation.Message.__annotations__.keys() == {"role", "content"}
    for prediction in (generation.CompletionPrediction, generation.ChatPrediction):
        assert list(prediction.__annotations__)[:3] == ["generation", "tokens", "logprobs"]
        assert prediction(generation="a")  # type: ignore[operator]


def test_model_args() -> None:
    wanted: dict[str, Any] = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": None, "vocab_size": -1}
    wanted |= {
        "multiple_of": 256,
        "ffn_dim_multiplier": None,
        "norm_eps": 1e-5,
        "max_batch_size": 32,
        "max_seq_len": 2048,
    }
    known = {field.name: field.default for field in fields(ModelArgs)}
    assert list(known.items())[:10] == list(wanted.items())
    assert known["rope_theta"] == 10000.0 and MISSING not in known.values()
    args = ModelArgs(64, 2, 4, 2, 97)  # type: ignore[call-arg]
    args.vocab_size = 5  # not frozen
    assert (args.dim, args.n_layers, args.n_heads, args.n_kv_heads, args.vocab_size) == (64, 2, 4, 2, 5)
    with pytest.raises(TypeError, match="use_scaled_rope"):
        ModelArgs(use_scaled_rope=True)  # type: ignore[call-arg]


# ------------------------------------------------------------------------------------- ways to load


def hand_made(max_seq_len: int = 48, max_batch_size: int = 4) -> Llama:
    """The loader that half of all research code carries with it."""
    checkpoints = sorted(Path(GOLDEN).glob("*.pth"))
    checkpoint = torch.load(checkpoints[0], map_location="cpu")
    with open(Path(GOLDEN) / "params.json") as f:
        params = json.loads(f.read())
    model_args: ModelArgs = ModelArgs(max_seq_len=max_seq_len, max_batch_size=max_batch_size, **params)
    tokenizer = Tokenizer(model_path=str(GOLDEN / "tokenizer.model"))
    model_args.vocab_size = tokenizer.n_words
    model = Transformer(model_args)
    model.load_state_dict(checkpoint, strict=False)
    return Llama(model, tokenizer)


def test_a_hand_made_loader(golden: dict[str, Any]) -> None:
    generator = hand_made()
    assert generator.generate(golden["prompts"], 12, temperature=0)[0] == golden["greedy"]
    with torch.no_grad(), torch.inference_mode():
        close(generator.model.forward(golden["x"], 0), golden["logits_full"], 1e-4)


def test_a_hand_made_loader_in_half_precision(golden: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        generator = hand_made()
        tokens, _ = generator.generate(golden["prompts"], 12, temperature=0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {weight.dtype for weight in generator.model.parameters()} == {torch.bfloat16}
    assert generator.model.layers[0].attention.cache_k.dtype == torch.bfloat16
    assert sum(a == b for a, b in zip(sum(tokens, []), sum(golden["greedy"], []), strict=True)) >= 8


def test_the_live_model_is_cast(golden: dict[str, Any]) -> None:
    generator = hand_made()
    wanted = hand_made()
    wanted.generate(golden["prompts"], 3, temperature=0)
    generator.model.bfloat16()
    wanted.model.bfloat16()
    assert generator.generate(golden["prompts"], 12) is not None
    found = [each.generate(golden["prompts"], 12, temperature=0, logprobs=True) for each in (generator, wanted)]
    assert found[0] == found[1]
    generator.model.half()
    assert len(generator.generate(golden["prompts"], 12)[0]) == 3


@pytest.mark.parametrize("how", ["position", "keywords", "config"])
def test_build_by_position_and_by_config(how: str, golden: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ckpt_dir, tokenizer_path = str(GOLDEN), str(GOLDEN / "tokenizer.model")
    config = {"ckpt_dir": ckpt_dir, "tokenizer_path": tokenizer_path, "max_seq_len": 48, "max_batch_size": 4}
    if how == "position":
        generator = Llama.build(ckpt_dir, tokenizer_path, 48, 4, 1, 7)
    elif how == "keywords":
        generator = Llama.build(
            ckpt_dir=ckpt_dir, tokenizer_path=tokenizer_path, max_seq_len=48, max_batch_size=4, model_parallel_size=None
        )
    else:
        generator = Llama.build(**config)  # type: ignore[arg-type]
    with generator:
        assert generator.generate(golden["prompts"], 12, temperature=0)[0] == golden["greedy"]
        params = generator.model.params
        assert (params.max_seq_len, params.max_batch_size, params.vocab_size, params.n_kv_heads) == (48, 4, 360, None)


def test_paths_as_paths(golden: dict[str, Any]) -> None:
    with build_golden(ckpt_dir=GOLDEN, tokenizer_path=GOLDEN / "tokenizer.model") as generator:
        assert generator.generate(golden["prompts"], 12, temperature=0)[0] == golden["greedy"]


OTHER_NAME = """
import os, sys
before = dict(os.environ)
import torch
state = torch.get_default_dtype(), torch.empty(0).device, torch.get_num_threads()
from libs.llama.llama import Llama, ModelArgs, Tokenizer, Transformer, Dialog
from libs.llama.llama.generation import sample_top_p
from libs.llama.llama.model import Attention
assert state == (torch.get_default_dtype(), torch.empty(0).device, torch.get_num_threads())
assert dict(os.environ) == before, "import changed the environment"
assert "llama" not in sys.modules, "an import inside the package is absolute"
assert not torch.distributed.is_initialized()
folder = sys.argv[1]
generator = Llama.build(folder, folder + "/tokenizer.model", 48, 4, device="cpu", dtype="float32")
assert "llama" not in sys.modules
tokens, _ = generator.generate([[1, 20, 30, 40]], 12, temperature=0)
with __builtins__.open(sys.argv[2], "w") as file:
    file.write(repr(tokens[0]))
"""


def test_imported_under_another_name(tmp_path: Path, golden: dict[str, Any]) -> None:
    shutil.copytree(ROOT / "llama", tmp_path / "libs" / "llama" / "llama", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "program.py").write_text(OTHER_NAME)
    command = [sys.executable, "program.py", str(GOLDEN), "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out").read_text() == repr(golden["greedy"][0])


# ------------------------------------------------------------------------ loops, errors, replacements


def test_a_callers_own_decoding_loop(golden: dict[str, Any]) -> None:
    model, prompt = hand_made().model, golden["prompts"][1]
    tokens, previous = torch.full((1, 48), -1, dtype=torch.long), 0
    tokens[0, : len(prompt)] = torch.tensor(prompt)
    for current in range(len(prompt), len(prompt) + 12):
        logits = model.forward(tokens[:, previous:current], previous)
        tokens[:, current] = torch.argmax(logits[:, -1], dim=-1)
        previous = current
    assert tokens[0, len(prompt) : len(prompt) + 12].tolist() == golden["greedy"][1]


def test_scoring_a_choice_as_evaluation_code_does(golden: dict[str, Any]) -> None:
    """OpenCompass and others: one padded batch, logits of all positions, cross entropy of their own."""
    model, (prompt, *_) = hand_made().model, golden["echo"]
    ids = torch.tensor([prompt], dtype=torch.int32)
    logits = model.forward(ids, 0)
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:].long(), reduction="none")
    close(-loss, torch.tensor(golden["echo_lp"][0][1:]), 1e-4)


def test_programs_that_catch_assertion_errors(generator: Llama) -> None:
    long: Any = [[1] * 60]
    disordered: Any = [[{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]]
    caught = 0
    for call, argument in ((generator.generate, long), (generator.chat_completion, disordered)):
        try:
            call(argument, max_gen_len=3)  # type: ignore[operator]
        except AssertionError:
            caught += 1
    assert caught == 2
    with pytest.raises(AssertionError):
        generator.chat_completion([[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]])


CANNED: Any = ([[72, 73], [74]], [[-0.5, -0.25], [-1.0]])


class Mocked(Llama):
    """Overrides generate as subclasses do: keywords only, two results."""

    calls: list[dict[str, Any]]

    def generate(self, **kwargs: Any) -> Any:  # type: ignore[override]
        self.calls.append(kwargs)
        return CANNED[0], CANNED[1] if kwargs["logprobs"] else None


@pytest.fixture
def mocked() -> Mocked:
    made = Mocked(StubModel(), StubTokenizer())
    made.calls = []
    return made


def test_text_completion_calls_generate_once_by_keyword(mocked: Mocked) -> None:
    assert mocked.text_completion(["a", "b"]) == [{"generation": "hi"}, {"generation": "j"}]
    prompts = [[95, 97 - 95], [95, 98 - 95]]
    plain = {"temperature": 0.6, "top_p": 0.9, "logprobs": False, "echo": False, "max_gen_len": 47}
    assert mocked.calls == [{"prompt_tokens": prompts, **plain}]
    found = mocked.text_completion(["a", "b"], 0.1, 0.2, 3, True, True)
    assert mocked.calls[1:] == [
        {"prompt_tokens": prompts, "temperature": 0.1, "top_p": 0.2, "max_gen_len": 3, "logprobs": True, "echo": True}
    ]
    assert found[0] == {"generation": "hi", "tokens": ["h", "i"], "logprobs": [-0.5, -0.25]}
    assert found[1] == {"generation": "j", "tokens": ["j"], "logprobs": [-1.0]}


def test_chat_completion_calls_generate_once_by_keyword(mocked: Mocked) -> None:
    dialogs: Any = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
    answers = mocked.chat_completion(dialogs)
    assert answers == [{"generation": {"role": "assistant", "content": text}} for text in ("hi", "j")]
    assert len(mocked.calls) == 1
    assert {key: mocked.calls[0][key] for key in mocked.calls[0] if key != "prompt_tokens"} == {
        **{"temperature": 0.6, "top_p": 0.9, "logprobs": False, "max_gen_len": 47}
    }
    found = mocked.chat_completion(dialogs, 0.1, 0.2, 3, True)
    assert mocked.calls[1].keys() == mocked.calls[0].keys() and mocked.calls[1]["max_gen_len"] == 3
    answer = {"generation": {"role": "assistant", "content": "hi"}, "tokens": ["h", "i"], "logprobs": [-0.5, -0.25]}
    assert found[0] == answer


def test_generate_replaced_on_an_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Llama(StubModel(), StubTokenizer())
    monkeypatch.setattr(generator, "generate", lambda **kwargs: (CANNED[0][:1], None))
    assert generator.text_completion(["a"]) == [{"generation": "hi"}]


def test_a_stub_model_and_a_stub_tokenizer() -> None:
    class Tiny:
        """No more than completions need."""

        bos_id, eos_id, pad_id, n_words = 1, None, -1, 97

        def encode(self, s: str, bos: bool, eos: bool) -> list[int]:
            return [1, 4]

        def decode(self, t: Any) -> str:
            return str(t)

    generator = Llama(StubModel(), Tiny())
    assert generator.text_completion(["x"], temperature=0, max_gen_len=3) == [{"generation": "[5, 6, 7]"}]
    found = generator.text_completion(["x"], temperature=0, max_gen_len=2, logprobs=True)[0]
    assert found["tokens"] == ["5", "6"] and len(found["logprobs"]) == 2
    dialog: Any = [{"role": "user", "content": "x"}]
    answer = {"role": "assistant", "content": "[5, 6]"}
    assert generator.chat_completion([dialog], temperature=0, max_gen_len=2) == [{"generation": answer}]


def test_model_and_tokenizer_are_read_at_each_call_and_may_be_replaced(golden: dict[str, Any]) -> None:
    generator, model = hand_made(), hand_made().model
    with torch.no_grad():
        model.output.weight.copy_(model.output.weight.flip(0))
    plain = generator.generate(golden["prompts"], 4, temperature=0)[0]
    assert isinstance(generator.tokenizer, Tokenizer) and isinstance(generator.model, Transformer)
    generator.model = model
    assert generator.generate(golden["prompts"], 1, temperature=0)[0] == [[359 - row[0]] for row in plain]
    generator.tokenizer = StubTokenizer()
    assert len(generator.text_completion(["ab"], temperature=0, max_gen_len=2)[0]["generation"]) <= 2


def test_forward_replaced_on_an_instance() -> None:
    generator, prompts = Llama(make_model(), StubTokenizer()), random_prompts(4, 4)
    generator.model.forward = StubModel().forward
    assert generator.generate(prompts, 2, temperature=0)[0] == [[(p[-1] + i) % 97 for i in (1, 2)] for p in prompts]


# ------------------------------------------------------------------------------------------ subclasses


def test_subclasses_of_the_parts(golden: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[int] = []

    class MyAttention(published_model.Attention):
        def __init__(self, args: ModelArgs) -> None:
            super().__init__(args)
            self.extra = args.extra  # type: ignore[attr-defined]

        def forward(self, x: Tensor, start_pos: Any, freqs_cis: Tensor, mask: Any) -> Tensor:
            noted.append(start_pos)
            return super().forward(x, start_pos, freqs_cis, mask)

    @dataclass
    class MyArgs(ModelArgs):
        extra: int = 5

    class MyTransformer(Transformer):
        def forward(self, tokens: Tensor, start_pos: Any) -> Tensor:
            return super().forward(tokens, start_pos) * 2  # type: ignore[no-any-return]

    monkeypatch.setattr(published_model, "Attention", MyAttention)
    params = json.loads((GOLDEN / "params.json").read_text())
    model = MyTransformer(MyArgs(**{**params, "vocab_size": 360, "max_seq_len": 48, "max_batch_size": 4}))
    model.load_state_dict(torch.load(GOLDEN / "consolidated.00.pth"))
    assert all(type(layer.attention) is MyAttention and layer.attention.extra == 5 for layer in model.layers)
    close(model(golden["x"], 0), 2 * golden["logits_full"], 2e-4)
    noted.clear()
    generator = Llama(model, Tokenizer(str(GOLDEN / "tokenizer.model")))
    assert generator.generate(golden["prompts"], 12, temperature=0)[0] == golden["greedy"]
    assert noted[:4] == [0, 0, 2, 2]


def test_a_subclass_of_llama_is_built_by_hand(golden: dict[str, Any]) -> None:
    class Mine(Llama):
        def __init__(self, model: Any, tokenizer: Any) -> None:
            super().__init__(model, tokenizer)
            self.mark = 3

    parts = hand_made()
    generator = Mine(parts.model, parts.tokenizer)
    assert generator.generate(golden["prompts"], 12, temperature=0)[0] == golden["greedy"] and generator.mark == 3


def test_a_module_swapped_for_an_ordinary_one(golden: dict[str, Any]) -> None:
    generator = hand_made()
    for layer in generator.model.layers:
        for owner, name in ((layer.attention, "wq"), (layer.feed_forward, "w2")):
            old = getattr(owner, name)
            new = torch.nn.Linear(*old.weight.shape[::-1], bias=False)
            new.weight = old.weight
            setattr(owner, name, new)
    assert generator.generate(golden["prompts"], 12, temperature=0)[0] == golden["greedy"]


def test_pickled_and_copied_parts(golden: dict[str, Any]) -> None:
    generator = hand_made()
    tokenizer = pickle.loads(pickle.dumps(generator.tokenizer))
    for twin in (tokenizer, copy.deepcopy(generator.tokenizer), copy.copy(tokenizer)):
        assert twin.encode("river stone", bos=True, eos=True) == generator.tokenizer.encode("river stone", True, True)
        assert (twin.n_words, twin.bos_id, twin.eos_id, twin.pad_id) == (360, 1, 2, -1)
        assert twin.decode([20, 30]) == generator.tokenizer.decode([20, 30])
    model = pickle.loads(pickle.dumps(generator.model))
    assert Llama(model, tokenizer).generate(golden["prompts"], 12, temperature=0)[0] == golden["greedy"]


def test_a_probe_by_dotted_name(golden: dict[str, Any]) -> None:
    """Interpretability code: hidden states of every step, gathered by forward hooks."""
    generator, states = hand_made(), list[Tensor]()
    modules = dict(generator.model.named_modules())
    handle = modules["layers.1"].register_forward_hook(lambda module, args, output: states.append(output.detach()))
    tokens, _ = generator.generate([golden["prompts"][0]], 12, temperature=0)
    assert tokens == golden["greedy"][:1]
    assert [state.shape[1] for state in states] == [4] + [1] * 11
    handle.remove()
    logits = generator.model.output(generator.model.norm(torch.cat(states, dim=1)))
    close(logits, generator.model(torch.tensor([golden["prompts"][0] + tokens[0][:-1]]), 0), 1e-4)


def test_fine_tuning_by_hand() -> None:
    """Three steps of an optimiser over the blocks bring the loss down, and the model still generates."""
    model, tokens = make_model(), random_ids(2, 12)
    generator = Llama(model, StubTokenizer())
    generator.generate([[1, 2]], 5)
    optimiser, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(3):
        h = model.tok_embeddings(tokens)
        mask = torch.full((12, 12), float("-inf")).triu(1)
        for layer in model.layers:
            h = layer(h, 0, model.freqs_cis[:12], mask)
        logits = model.output(model.norm(h))
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    assert generator.generate([[1, 2]], 5, temperature=0)[1] is None
