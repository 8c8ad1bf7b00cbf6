"""Llama 3's models and their like: scaled rotary angles, heads of any width, biases, tied heads, in every format."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkpoint_files as files
import pytest
import reference
import torch
from helpers import ROOT, StubTokenizer, close, near
from torch import Tensor

from llama import Llama, LlamaError, ModelArgs, Transformer
from llama.checkpoint import Checkpoint, load_model, memory, open_checkpoint
from llama.checkpoint.checkpoint import StoredWeight
from llama.checkpoint.family import describe_context, describe_scaling, describe_targets, family
from llama.checkpoint.fingerprint import _digest
from llama.checkpoint.memory import count_parameters, memory_estimate
from llama.checkpoint.table import all_names
from llama.cli.convert import convert
from llama.cli.info import info
from llama.distributed import linear_layers
from llama.engine.compiled import compile_model
from llama.quantization import PrepackedWeight
from llama.rope import check_rope_scaling, llama3_scaling, named_scaling, rotary_frequencies

GOLDEN = ROOT / "tests" / "golden"
SCALED, TIED = GOLDEN / "llama3", GOLDEN / "hf-llama3rope"  # made by llama-models, and by transformers 5.24
LLAMA3 = {**llama3_scaling(8.0), "original_max_position_embeddings": 16.0}  # short, so that every case occurs
# One of each, and all together; sizes in which no matrix has the shape of another.
BASE: dict[str, Any] = {**files.GQA, "multiple_of": 32, "ffn_dim_multiplier": 1.3, "rope_theta": 500000.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama3": {**BASE, "rope_scaling": LLAMA3},
    "linear": {**BASE, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "head_dim": {**BASE, "head_dim": 24},
    "attention_bias": {**BASE, "attention_bias": True},
    "mlp_bias": {**BASE, "mlp_bias": True},
    "all": {**BASE, "rope_scaling": LLAMA3, "head_dim": 16, "attention_bias": True, "mlp_bias": True},
    "meta": {**BASE, "rope_scaling": llama3_scaling(8.0), "head_dim": 16, "attention_bias": True, "mlp_bias": True},
}
IN_META = ("head_dim", "attention_bias", "mlp_bias", "meta")  # what params.json can say
IDS = torch.tensor([[1, 20, 30, 39, 5, 6, 7, 8, 2, 3], [1, 9, 7, 8, 9, 39, 11, 12, 13, 14]])


def loaded(checkpoint: Checkpoint | Path, window: int = 64, quantize: str | None = None) -> Transformer:
    if isinstance(checkpoint, Path):
        checkpoint = open_checkpoint(checkpoint)
    return load_model(
        checkpoint, vocab_size=checkpoint.shape("tok_embeddings.weight")[0], max_seq_len=window, max_batch_size=4,
        device=torch.device("cpu"), dtype=torch.float32, quantize=quantize,
    )  # fmt: skip


def write_variant(folder: Path, name: str, tied: bool = False, **changes: Any) -> Path:
    """A Hugging Face folder of one of VARIANTS, made without the package's own writer."""
    params = VARIANTS[name]
    weights = variant_weights(name, tied)
    rope = {**params["rope_scaling"]} if "rope_scaling" in params else None
    fields = {key: params[key] for key in ("head_dim", "attention_bias", "mlp_bias") if key in params}
    fields |= {"rope_theta": 5e5, "rope_scaling": rope, "tie_word_embeddings": tied}
    return files.write_hf(folder, weights, params, **(fields | changes))


def variant_weights(name: str, tied: bool = False) -> dict[str, Tensor]:
    weights = files.weights(VARIANTS[name], seed=4)
    if tied:
        weights["output.weight"] = weights["tok_embeddings.weight"]
    return weights


def wanted(name: str, tied: bool = False) -> Tensor:
    weights = {key: weight.double() for key, weight in variant_weights(name, tied).items()}
    return reference.logits(weights, VARIANTS[name], IDS)


def same_weights(one: Checkpoint, other: Checkpoint) -> None:
    assert one.names() == other.names()
    for name in one.names():
        assert torch.equal(one.read(name), other.read(name)), name


# ----------------------------------------------------------------------------------------- golden figures


def golden(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "golden.pt", weights_only=True)  # type: ignore[no-any-return]


def scaled_by_8(tmp_path: Path) -> Path:
    """The golden folder of llama-models, which takes 8 whatever the size; ours are told so."""
    shutil.copytree(SCALED, tmp_path / "scaled")
    params = json.loads((SCALED / "params.json").read_text())
    (tmp_path / "scaled" / "params.json").write_text(json.dumps(params | {"rope_scaling_factor": 8}))
    return tmp_path / "scaled"


def test_frequencies_of_the_published_shapes() -> None:
    shapes = json.loads((SCALED / "rope.json").read_text())
    assert {shape["factor"] for shape in shapes.values()} == {None, 8, 32}
    for name, shape in shapes.items():
        scaling = llama3_scaling(shape["factor"]) if shape["factor"] else None
        found = rotary_frequencies(shape["head_dim"], shape["rope_theta"], scaling)
        assert torch.equal(found, torch.tensor(shape["freqs"])), name


def test_llama3_as_meta_computes_it(tmp_path: Path) -> None:
    figures, model = golden(SCALED), loaded(scaled_by_8(tmp_path), window=9100)
    assert torch.equal(model.freqs_cis.real[9000], figures["rope_rows"][-2, :, 0])
    close(model(figures["x"], 0), figures["logits_full"], 2e-4)
    chunks = [model(figures["x"][:, start:stop], start) for start, stop in ((0, 5), (5, 9), (9, 10))]
    close(torch.cat(chunks, 1), figures["logits_chunks"], 2e-4)
    table = torch.view_as_real(model.freqs_cis)[figures["rope_positions"][:-1]]
    close(table, figures["rope_rows"][:-1], 1e-6)
    generator = Llama(model, NoEnd())
    assert generator.generate(figures["prompts"], 24, temperature=0)[0] == figures["greedy_no_stop"]


class NoEnd(StubTokenizer):
    n_words, eos_id = 512, None


def test_llama3_is_built_from_its_folder(tmp_path: Path) -> None:
    """With its own tokenizer (256 bytes and 256 specials): several stop ids, one of them as the first token."""
    pytest.importorskip("tiktoken")
    figures = golden(SCALED)
    with Llama.build(
        str(scaled_by_8(tmp_path)), None, max_seq_len=96, max_batch_size=4, device="cpu", dtype="float32"
    ) as generator:
        assert generator.tokenizer.stop_ids == set(figures["stop_tokens"])
        tokens, logprobs = generator.generate(figures["prompts"], 24, temperature=0, logprobs=True)
        assert tokens == figures["greedy"] and [] in tokens
        for found, expected in zip(logprobs or [], figures["greedy_lp"], strict=True):
            near(found, expected)
        torch.manual_seed(5)
        sampled = generator.generate([figures["prompts"][1]], 16, temperature=0.9, top_p=0.8)[0]
        assert sampled == figures["one_sampled"]


@pytest.mark.parametrize("config", ["config.json", "config-v4.json"])
def test_llama3_as_transformers_computes_it(tmp_path: Path, config: str) -> None:
    shutil.copytree(TIED, tmp_path / "hf")
    shutil.copy(TIED / config, tmp_path / "hf" / "config.json")
    figures, checkpoint = golden(TIED), open_checkpoint(tmp_path / "hf")
    assert checkpoint.params["rope_scaling"] == llama3_scaling(32.0) and checkpoint.tied
    model = loaded(checkpoint, window=6100)
    assert model.output.weight.data_ptr() == model.tok_embeddings.weight.data_ptr()
    assert torch.equal(rotary_frequencies(16, 5e5, checkpoint.params["rope_scaling"]), figures["inv_freq"])
    close(model(figures["x"], 0), figures["logits"], 2e-4)
    generator = Llama(model, NoEnd())
    assert generator.generate(figures["prompts"], 16, temperature=0)[0] == figures["greedy"]


@pytest.mark.slow
def test_positions_far_out(tmp_path: Path) -> None:
    """Where angles in float64 would be 1e-3 off."""
    for folder, source in ((SCALED, scaled_by_8(tmp_path)), (TIED, TIED)):
        figures = golden(folder)
        found = loaded(source, window=9100)(figures["long_x"].long(), 0)[:, figures["long_positions"]]
        close(found, figures["long_logits"], 2e-4)


def check_on_ranks(folder: Path) -> None:
    """On each of the ranks: the golden figures from one file and from files cut either way, and every variant."""
    figures = golden(SCALED)
    for name in ("whole", "columns", "rows"):
        close(loaded(folder / name)(figures["x"], 0), figures["logits_full"], 2e-4)
    close(loaded(folder / "whole", 9100)(figures["long_x"].long(), 0)[:, 9000:], figures["long_logits"], 2e-4)
    figures = golden(TIED)
    close(loaded(TIED)(figures["x"], 0), figures["logits"], 2e-4)
    close(loaded(TIED, 6100)(figures["long_x"].long(), 0)[:, 6000:], figures["long_logits"], 2e-4)
    for name in VARIANTS:
        for source in (folder / name, folder / f"{name}-2") if name in IN_META else (folder / name,):
            close(loaded(source)(IDS, 0), wanted(name), 2e-4)
    close(loaded(folder / "tied")(IDS, 0), wanted("all", tied=True), 2e-4)
    for source, scheme in ((folder / "meta-int8", None), (folder / "meta-int8", "int8"), (folder / "meta", "int8")):
        assert (loaded(source, quantize=scheme)(IDS, 0) - wanted("meta")).abs().max() < 0.15


WORKER = """
import os, sys, torch
from pathlib import Path
from fairscale.nn.model_parallel.initialize import initialize_model_parallel
import test_family_models
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
initialize_model_parallel(2)
test_family_models.check_on_ranks(Path(sys.argv[1]))
(Path(sys.argv[1]) / ("passed" + os.environ["RANK"])).touch()
"""


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    shutil.move(scaled_by_8(tmp_path), tmp_path / "whole")
    params = json.loads((tmp_path / "whole" / "params.json").read_text())
    whole = torch.load(tmp_path / "whole" / "consolidated.00.pth", weights_only=True)
    for name, rows in (("columns", False), ("rows", True)):
        files.write_meta(tmp_path / name, whole, params, shards=2, rows=rows)
    for name in VARIANTS:
        write_variant(tmp_path / name, name)
        if name in IN_META:
            convert(str(tmp_path / name), str(tmp_path / f"{name}-2"), "meta", shards=2)
    convert(str(tmp_path / "meta"), str(tmp_path / "meta-int8"), "meta", quantize="int8")
    write_variant(tmp_path / "tied", "all", tied=True)
    (tmp_path / "worker.py").write_text(WORKER)
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         str(tmp_path / "worker.py"), str(tmp_path)],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
        timeout=120, capture_output=True, text=True,
    )  # fmt: skip
    assert (tmp_path / "passed0").exists() and (tmp_path / "passed1").exists(), run.stderr[-3000:]


# --------------------------------------------------------------------------------- variants, in every format


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_gives_the_oracles_logits(tmp_path: Path, name: str) -> None:
    model, logits = loaded(write_variant(tmp_path, name)), wanted(name)
    close(model(IDS, 0), logits, 2e-4)
    close(torch.cat([model(IDS[:, start : start + 1], start) for start in range(10)], 1), logits, 2e-4)
    head_dim = VARIANTS[name].get("head_dim", 8)
    assert model.layers[0].attention.cache_k.shape == (4, 64, 2, head_dim)
    plain = reference.logits(files.weights(BASE, torch.float64, seed=4), BASE, IDS)
    assert name == "head_dim" or (plain - logits).abs().max() > (0.1 if name != "meta" else 0)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_variant_is_converted_and_comes_back(tmp_path: Path, name: str, tied: bool) -> None:
    source = open_checkpoint(write_variant(tmp_path / "a", name, tied))
    assert source.tied is tied
    if name in IN_META:
        convert(str(tmp_path / "a"), str(tmp_path / "b"), "meta")
        middle = open_checkpoint(tmp_path / "b")
        assert middle.params == source.params | {"vocab_size": 40, "ffn_dim": None} | ffn_rule(middle)
        same_weights(source, middle)
        assert middle.tied is tied
        settings = json.loads((tmp_path / "b" / "params.json").read_text())
        added = {
            key: value for key, value in VARIANTS[name].items() if key in ("head_dim", "attention_bias", "mlp_bias")
        }
        assert added.items() <= settings.items() and "rope_scaling" not in settings
        assert settings.get("rope_scaling_factor") == (8.0 if name == "meta" else None)
    else:
        with pytest.raises(LlamaError, match=r"params.json can say Llama 3's rule only .*: write to='hf'"):
            convert(str(tmp_path / "a"), str(tmp_path / "b"), "meta")
        assert not (tmp_path / "b").exists()
    convert(str(tmp_path / ("b" if name in IN_META else "a")), str(tmp_path / "c"), "hf")
    back = open_checkpoint(tmp_path / "c")
    same_weights(source, back)
    assert back.params == source.params and back.tied is tied
    assert _digest(back) == _digest(source)  # by which ranks with other files see that they have one model
    assert list(loaded(back).state_dict()) == all_names(2, back.params) == back.names()
    with pytest.raises(LlamaError, match="llama2.c's programs"):
        convert(str(tmp_path / "a"), str(tmp_path / "d"), "llama2c")


def ffn_rule(checkpoint: Checkpoint) -> dict[str, Any]:
    return {name: checkpoint.params[name] for name in ("multiple_of", "ffn_dim_multiplier")}


def test_params_json_of_a_published_shape_stays_as_it_was(tmp_path: Path) -> None:
    params = {**files.GQA, "head_dim": 8, "attention_bias": False, "use_scaled_rope": False}
    files.write_meta(tmp_path / "a", files.weights(), params)
    convert(str(tmp_path / "a"), str(tmp_path / "b"), "meta")
    assert list(json.loads((tmp_path / "b" / "params.json").read_text())) == [
        "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "norm_eps",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["head_dim", "all"])
@pytest.mark.parametrize("scheme", ["int8", "int4", "int8-dynamic"])
def test_quantized_models_keep_biases(tmp_path: Path, name: str, scheme: str) -> None:
    """As the same model with the values that are left of its weights; from the original and from a quantized file."""
    sources = [write_variant(tmp_path / "a", name)]
    if name in IN_META and scheme != "int8-dynamic":
        convert(str(sources[0]), str(tmp_path / "b"), "meta", quantize=scheme)
        sources.append(tmp_path / "b")
    for source in sources:
        model = loaded(source, quantize=scheme)
        weights = {key: weight.double() for key, weight in variant_weights(name).items()}
        for layer_name, layer in linear_layers(model):
            assert layer.weight is None
            weights[f"{layer_name}.weight"] = layer.packed.dense().double()
        logits = reference.logits(weights, VARIANTS[name], IDS)
        assert (model(IDS, 0) - logits).abs().max() < (0.3 if "dynamic" in scheme else 0.12)  # bfloat16 activations


def test_a_quantized_head_is_tied_again(tmp_path: Path) -> None:
    """Quantized files hold the head in 8 bits beside the embedding; other formats get it back as one."""
    for tied in (False, True):
        folder = tmp_path / str(tied)
        source = open_checkpoint(write_variant(folder / "a", "meta", tied))
        convert(str(folder / "a"), str(folder / "b"), "meta", quantize="int8")
        assert loaded(folder / "b").output.packed is not None
        convert(str(folder / "b"), str(folder / "c"), "hf")
        back = open_checkpoint(folder / "c")
        assert back.tied is tied
        assert torch.equal(back.read("output.weight"), source.read("output.weight")) is tied


@pytest.mark.parametrize("name", ["all"])
def test_compiled_decoding_keeps_biases(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda step, **given: step)  # the static step alone; the compiler takes 15 s
    check_compiled(tmp_path, name, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_compiled_decoding_of_every_variant(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_compiled(tmp_path, name, monkeypatch)


def check_compiled(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrepackedWeight, "MIN_BYTES", 0)
    model = loaded(write_variant(tmp_path, name))
    generator = Llama(model, NoEnd(), decoder=compile_model(model))
    assert model.layers[0].attention.qkv is not None and model.layers[0].feed_forward.w13 is not None
    weights = {key: weight.double() for key, weight in variant_weights(name).items()}
    prompts = [[1, 20, 30], [1, 9, 7, 8, 9]]
    texts = [reference.greedy(weights, VARIANTS[name], prompt, 12) for prompt in prompts]
    assert generator.generate(prompts, 12, temperature=0)[0] == texts


@pytest.mark.parametrize(
    ("kept", "missing"), [(("wq", "wk", "wv"), None), (("wo",), None), (("w2",), None), ((), "attention.wq.bias")]
)
def test_biases_are_read_from_the_files(
    tmp_path: Path, kept: tuple[str, ...], missing: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Some have them on some matrices alone; config.json may be silent, or wrong."""
    flag = "mlp_bias" if kept == ("w2",) else "attention_bias"
    params, source = VARIANTS[flag], files.weights(VARIANTS[flag], seed=4)
    held = {key: t for key, t in source.items() if not key.endswith("bias") or key.split(".")[3] in kept}
    if missing is not None:
        with pytest.raises(LlamaError, match=missing):
            open_checkpoint(files.write_hf(tmp_path, held, params, rope_theta=5e5, **{flag: True}))
        return
    full = {key: (held.get(key, torch.zeros_like(t))).double() for key, t in source.items()}
    for number, said in enumerate((True, None, False)):
        caplog.clear()
        folder = files.write_hf(tmp_path / str(number), held, params, rope_theta=5e5, **{flag: said})
        close(loaded(folder)(IDS, 0), reference.logits(full, params, IDS), 2e-4)
        assert [flag in record.message for record in caplog.records] == [True] * (said is False)


def test_a_bias_of_some_layers_is_missing_in_the_others(tmp_path: Path) -> None:
    weights = variant_weights("attention_bias")
    del weights["layers.1.attention.wk.bias"]
    with pytest.raises(LlamaError, match=r"1 weights are missing: layers.1.attention.wk.bias"):
        open_checkpoint(files.write_hf(tmp_path, weights, VARIANTS["attention_bias"]))
    weights["layers.1.attention.wk.bias"] = torch.ones(16)
    weights["layers.1.attention.wv.bias"] = torch.ones(17)
    with pytest.raises(LlamaError, match=r"wv.bias is \(17,\), must be \(16,\)"):
        open_checkpoint(files.write_hf(tmp_path, weights, VARIANTS["attention_bias"]))


# ------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("dim", "settings", "factor"),
    [
        (2048, {"use_scaled_rope": True}, 32.0),
        (4096, {"use_scaled_rope": True}, 8.0),
        (2048, {"use_scaled_rope": True, "rope_scaling_factor": 8}, 8.0),
        (8192, {"use_scaled_rope": True, "rope_scaling_factor": 16.0}, 16.0),
        (2048, {"use_scaled_rope": False, "rope_scaling_factor": 8}, None),
        (2048, {"use_scaled_rope": None}, None),
        (2048, {}, None),
    ],
)
def test_the_factor_of_params_json(tmp_path: Path, dim: int, settings: dict[str, Any], factor: float | None) -> None:
    params = {**files.GQA, "dim": dim, "head_dim": 2, "n_layers": 1, "multiple_of": 1, "ffn_dim_multiplier": 1e-3}
    files.write_meta(tmp_path, files.weights(params), {**params, **settings})
    found = open_checkpoint(tmp_path).params["rope_scaling"]
    assert found == (None if factor is None else llama3_scaling(factor))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_scaled_rope": "yes"}, "use_scaled_rope='yes'"),
        ({"use_scaled_rope": True, "rope_scaling_factor": "8"}, "rope_scaling_factor='8'"),
        ({"use_scaled_rope": True, "rope_scaling_factor": 0}, "rope_scaling_factor=0"),
        ({"use_scaled_rope": True, "rope_scaling_factor": float("nan")}, "rope_scaling_factor=nan"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"head_dim": 1 << 50}, "head_dim=1125899906842624"),
        ({"head_dim": 16}, "wrong shape"),
        ({"attention_bias": "no"}, "attention_bias='no'"),
        ({"attention_bias": True}, "layers.0.attention.wq.bias"),
        ({"quantization_args": {"scheme": "int4"}}, "quantization_args.* take the bfloat16 model"),
        ({"lora_args": {"rank": 16}}, "lora_args.* take the bfloat16 model"),
        ({"vision_chunk_size": 448}, "vision_chunk_size.* a model that sees images"),
        ({"moe_args": {}}, "moe_args.* a mixture of experts"),
        ({"num_experts": 8}, "num_experts.* a mixture of experts"),
        ({"rope_freq_constant": 1}, "unknown key 'rope_freq_constant'"),
    ],
)
def test_settings_of_params_json_that_cannot_be_run(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    files.write_meta(tmp_path, files.weights(), {**files.GQA, **settings})
    with pytest.raises(LlamaError, match=words):
        open_checkpoint(tmp_path)


def test_null_settings_of_models_that_are_not_run(tmp_path: Path) -> None:
    files.write_meta(tmp_path, files.weights(), {**files.GQA, "lora_args": None, "vision_chunk_size": None})
    assert open_checkpoint(tmp_path).params["dim"] == 32


ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OLD = {"original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({"rope_scaling": {**ROPE, **OLD}}, llama3_scaling(8.0)),
        ({"rope_parameters": {**ROPE, **OLD, "rope_theta": 10000.0}}, llama3_scaling(8.0)),
        ({"rope_scaling": {**ROPE, **OLD}, "rope_parameters": {**ROPE, **OLD}}, llama3_scaling(8.0)),
        ({"rope_scaling": ROPE, "max_position_embeddings": 8192}, llama3_scaling(8.0)),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 1.0}}, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, None),
    ],
)
def test_spellings_of_the_scaling(tmp_path: Path, changes: dict[str, Any], scaling: dict[str, Any] | None) -> None:
    assert open_checkpoint(files.write_hf(tmp_path, files.weights(), **changes)).params["rope_scaling"] == scaling


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"type": "yarn", "factor": 2.0}, "yarn"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, "longrope"),
        ({"rope_type": "divisors", "divisors": [1.0] * 4}, "divisors"),
        ({"rope_type": ["linear"]}, "linear"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": -1}, "factor=-1"),
        ({"rope_type": "linear", "factor": True}, "factor=True"),
        ({"rope_type": "linear", "factor": 2, "beta_fast": 32}, "beta_fast"),
        ({**ROPE, "factor": float("inf")}, "factor=inf"),
        ({**ROPE, "low_freq_factor": None}, "llama3 takes factor, low_freq_factor"),
        ({**ROPE, "low_freq_factor": 4.0}, "low_freq_factor=4.0 must be less than high_freq_factor=4.0"),
        ({**ROPE, "original_max_position_embeddings": "8192"}, "original_max_position_embeddings='8192'"),
        ({**ROPE, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_scaling_that_is_not_computed_is_named(tmp_path: Path, key: str, rope: dict[str, Any], words: str) -> None:
    files.write_hf(tmp_path, files.weights(), **{key: rope})
    with pytest.raises(LlamaError, match=f"config.json: {key}.*{re.escape(words)}"):
        open_checkpoint(tmp_path)


def test_two_scalings_that_differ(tmp_path: Path) -> None:
    files.write_hf(tmp_path, files.weights(), rope_scaling=ROPE, rope_parameters={"rope_type": "linear", "factor": 2.0})
    with pytest.raises(LlamaError, match="expected one scaling"):
        open_checkpoint(tmp_path)


def test_a_callers_scaling_is_checked() -> None:
    sizes = {**files.GQA, "max_seq_len": 8, "max_batch_size": 1}
    for scaling, words in (
        ({"rope_type": "yarn"}, "must be one of linear, llama3, divisors"),
        ({"rope_type": "divisors", "divisors": [1.0] * 3}, "must be 4 numbers above 0, half of head_dim=8"),
        ({"rope_type": "divisors", "divisors": [1.0, 2.0, 0.0, 1.0]}, "must be 4 numbers above 0"),
        ("linear", "rope_type"),
    ):
        with pytest.raises(LlamaError, match=words):
            Transformer(ModelArgs(**sizes, rope_scaling=scaling))  # type: ignore[arg-type]
    with pytest.raises(LlamaError, match="head_dim=5 must be an even number"):
        Transformer(ModelArgs(**sizes, head_dim=5))


def test_a_model_with_divisors() -> None:
    params = {**BASE, "rope_scaling": {"rope_type": "divisors", "divisors": [2.0, 1.5, 8.0, 32.0]}}
    weights = reference.random_weights(params, 2)
    model = Transformer(ModelArgs(**params, max_seq_len=16, max_batch_size=2))
    model.load_state_dict(weights)
    close(model(IDS, 0), reference.logits(weights, params, IDS), 2e-4)
    plain = reference.logits(weights, BASE, IDS)
    assert (plain - model(IDS, 0)).abs().max() > 0.1


def test_divisors_of_gguf_are_told_by_name() -> None:
    plain, scaled = (rotary_frequencies(64, 5e5, scaling) for scaling in (None, llama3_scaling(32.0)))
    params = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "divisors", "divisors": (plain / scaled).tolist()}}
    found = named_scaling(params)
    assert found is not None and found["rope_type"] == "llama3" and found["factor"] == pytest.approx(32)
    assert torch.allclose(rotary_frequencies(64, 5e5, params["rope_scaling"]), scaled, rtol=1e-6)
    assert named_scaling({**params, "rope_scaling": {"rope_type": "divisors", "divisors": [1.0] * 32}}) is None
    odd = {"rope_type": "divisors", "divisors": [1.0] * 31 + [3.0]}
    assert named_scaling({**params, "rope_scaling": odd}) == odd
    assert check_rope_scaling(odd, 64) == odd


MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": None},
        {"architectures": ["LLaMAForCausalLM"]},
        {"model_type": None},
        {"model_type": "yi"},
        {"architectures": ["LlamaForCausalLM"], "model_type": "mistral"},
        {**MISTRAL, "sliding_window": None},
    ],
)
def test_what_is_this_architecture_loads(tmp_path: Path, changes: dict[str, Any]) -> None:
    source = files.weights()
    close(loaded(files.write_hf(tmp_path, source, **changes))(IDS, 0), reference.logits(source, files.GQA, IDS), 2e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (MISTRAL, "MistralForCausalLM.* sliding_window"),
        ({**MISTRAL, "sliding_window": 4096}, "MistralForCausalLM.* sliding_window"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
        ({"model_type": "mixtral"}, "'mixtral', a mixture of experts"),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, "Qwen3ForCausalLM.* norms queries and keys"),
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, "Qwen2ForCausalLM"),
        ({"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}, "Gemma2ForCausalLM"),
        ({"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}, "a mixture of experts"),
        ({"architectures": ["MllamaForConditionalGeneration"], "model_type": "mllama"}, "takes more than text"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "does not predict tokens"),
        ({"architectures": "LlamaForCausalLM"}, "a list that names"),
        ({"architectures": None, "model_type": None}, "model_type None"),
        ({"architectures": ["LlamaForCausalLM", "OtherForCausalLM"]}, "OtherForCausalLM"),
    ],
)
def test_another_architecture_is_refused_by_its_name(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    files.write_hf(tmp_path, files.weights(), **changes)
    with pytest.raises(LlamaError, match=f"config.json: .*{words}") as error:
        open_checkpoint(tmp_path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


# --------------------------------------------------------------------------------- memory, and what info says


def test_a_tied_head_is_counted_once(tmp_path: Path) -> None:
    """And biases, and heads of another width, as torch counts them."""
    for name in VARIANTS:
        checkpoint = open_checkpoint(write_variant(tmp_path / name, name, tied=True))
        model = loaded(checkpoint)
        params = {**checkpoint.params, "vocab_size": 40}
        count = sum(parameter.numel() for parameter in {id(p.data_ptr()): p for p in model.parameters()}.values())
        distinct = {parameter.data_ptr(): parameter.numel() for parameter in model.parameters()}
        assert count_parameters(params, tied=True) == sum(distinct.values()), (name, count)
        assert count_parameters(params) == count_parameters(params, tied=True) + 40 * 32
        need = memory_estimate(params, 64, 4, 1, torch.float32, tied=True)
        assert need.weights == 4 * sum(distinct.values())
        cache = [tensor for attention in model.attentions() for tensor in (attention.cache_k, attention.cache_v)]
        assert need.kv_cache == sum(tensor.numel() * 4 for tensor in cache)
        two = memory_estimate(params, 64, 4, 2, torch.float32, tied=True)
        assert two == memory_estimate(params, 64, 4, 2, torch.float32)  # each rank has another part of the two


def test_a_tied_model_fits_where_an_untied_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for tied in (True, False):
        write_variant(tmp_path / str(tied), "head_dim", tied)
    params = {**open_checkpoint(tmp_path / "True").params, "vocab_size": 40}
    need = memory_estimate(params, 64, 4, 1, torch.float32, tied=True).total
    monkeypatch.setattr(memory, "free_memory", lambda device: need)
    loaded(tmp_path / "True")
    with pytest.raises(LlamaError, match="not enough memory"):
        loaded(tmp_path / "False")


def shaped(rows: int, dim: int, format: str = "meta", path: Path = Path("nowhere"), **params: Any) -> Checkpoint:
    """A checkpoint of these sizes, of which `info` looks at the settings and the rows of the embedding."""
    full = {**VARIANTS["linear"], "rope_theta": 10000.0, "norm_eps": 1e-5, "rope_scaling": None, "dim": dim, **params}
    embedding = StoredWeight([torch.zeros(1).expand(rows, dim)])
    return Checkpoint(path, format, full, {"tok_embeddings.weight": embedding}, [])


BY_8, BY_32 = llama3_scaling(8.0), llama3_scaling(32.0)


@pytest.mark.parametrize(
    ("rows", "dim", "params", "name", "context"),
    [
        (32000, 4096, {}, "Llama 1 or 2", "4096"),
        (32001, 5120, {}, "Llama 1 or 2", "4096"),
        (32016, 4096, {"rope_theta": 1e6}, "Code Llama", "16384"),
        (32000, 8192, {"rope_theta": 1e6}, "Code Llama", "16384"),
        (128256, 4096, {"rope_theta": 5e5}, "Llama 3", "8192"),
        (128256, 8192, {"rope_theta": 5e5, "rope_scaling": BY_8}, "Llama 3.1 to 3.3", "131072"),
        (128256, 2048, {"rope_theta": 5e5, "rope_scaling": BY_32}, "Llama 3.2", "131072"),
        (49152, 576, {}, "other, of Llama's architecture", None),
        (32000, 4096, {"attention_bias": True}, "other, of Llama's architecture", None),
    ],
)
def test_the_family_is_told(rows: int, dim: int, params: dict[str, Any], name: str, context: str | None) -> None:
    checkpoint = shaped(rows, dim, **params)
    assert family(checkpoint) == name
    assert describe_context(checkpoint) == (f"not stored; {context} in this family" if context else "not stored")


def test_info_of_every_variant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in VARIANTS:
        write_variant(tmp_path / name, name, tied=True)
        info(str(tmp_path / name))
        lines = capsys.readouterr().out.splitlines()
        [besides] = (line for line in lines if line.startswith("besides"))
        for field in ("head_dim", "attention_bias", "mlp_bias"):
            assert (field.replace("_bias", " bias") in besides) == (field in VARIANTS[name]), (name, besides)
        said = " ".join(" ".join(lines).split())
        rope = VARIANTS[name].get("rope_scaling", {"rope_type": "none"})
        assert f"rope scaling {rope['rope_type']}" in said and "hf (tied head)" in said
        assert ("as config.json says" in said) == ("factor" in rope)
        assert "llama2c is refused: rope_theta=500000.0" in said and "ranks 1, 2 " in said
        assert ("meta is refused: its rotary angles" in said) == (name not in IN_META)
    for folder, words in (
        (SCALED, "factor 32, .* \\(params.json names no factor; dim 64 < 4096 means 32\\)"),
        (scaled_by_8(tmp_path), "factor 8, .* \\(params.json's rope_scaling_factor\\)"),
        (
            files.write_hf(tmp_path / "m", files.weights(), **MISTRAL, sliding_window=None),
            "other .model_type 'mistral'",
        ),
    ):
        info(str(folder))
        assert re.search(words, capsys.readouterr().out), words


def test_info_says_that_a_tokenizer_has_too_many_pieces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files.write_hf(tmp_path, files.weights())
    shutil.copy(GOLDEN / "mha" / "tokenizer.model", tmp_path)
    info(str(tmp_path))
    assert "360 pieces, stop ids 2; build refuses it: the model has 40 rows)" in capsys.readouterr().out


def test_what_info_says_of_divisors() -> None:
    plain, scaled = (rotary_frequencies(64, 5e5, scaling) for scaling in (None, BY_32))
    for divisors, words, targets in (
        ((plain / scaled).tolist(), "llama3, factor 32, .*told by the file's divisors", "to meta, hf; llama2c"),
        ([1.0] * 32, "none .the file's divisors are all 1", "to meta, hf; llama2c"),
        ([2.0] * 31 + [3.0], "by the file's own divisors", "to nothing; meta is refused: .*; hf is refused: each"),
    ):
        scaling = {"rope_type": "divisors", "divisors": divisors}
        checkpoint = shaped(128256, 2048, "gguf", rope_theta=5e5, n_heads=32, rope_scaling=scaling)
        assert re.match(words, describe_scaling(checkpoint)) and re.match(targets, describe_targets(checkpoint))


def test_llama2c_names_what_its_programs_do_not_know(tmp_path: Path) -> None:
    for name in ("head_dim", "attention_bias", "mlp_bias", "linear"):
        write_variant(tmp_path / name, name, rope_theta=10000.0, norm_eps=1e-5)
        field = "rope_scaling" if name == "linear" else name
        with pytest.raises(LlamaError, match=f"has {field}, which llama2.c's programs do not know"):
            convert(str(tmp_path / name), str(tmp_path / "c"), "llama2c")


# ---------------------------------------------------------------------------------- the real transformers


@pytest.mark.parametrize(
    ("settings", "rope"),
    [
        ({"attention_bias": True, "mlp_bias": True}, {"rope_type": "default"}),
        ({"head_dim": 24, "tie_word_embeddings": True}, {"rope_type": "linear", "factor": 4.0}),
        ({"head_dim": 8, "attention_bias": True}, {**ROPE, "factor": 32.0, "original_max_position_embeddings": 16}),
        ({"head_dim": 24, "mlp_bias": True, "tie_word_embeddings": True}, {**ROPE, **OLD}),
    ],
)
def test_transformers_gives_the_same_both_ways(tmp_path: Path, settings: dict[str, Any], rope: dict[str, Any]) -> None:
    """A random model that transformers wrote, read; and written again (through Meta's form where that can say it)."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, rope_theta=5e5, initializer_range=0.3,
        rope_scaling=None if rope["rope_type"] == "default" else rope, **settings,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    theirs.save_pretrained(tmp_path / "theirs")
    tokens = torch.randint(0, 101, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = theirs(tokens).logits
    ours = loaded(tmp_path / "theirs")
    assert ours.output.weight.data_ptr() == ours.tok_embeddings.weight.data_ptr() or not config.tie_word_embeddings
    close(ours(tokens, 0), logits, 2e-4)
    written = theirs.generate(tokens[:, :5], max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    text = [row[5:].tolist() for row in written]
    stub = NoEnd()
    stub.n_words = 101
    assert Llama(ours, stub).generate(tokens[:, :5].tolist(), 20, temperature=0)[0] == text
    last = tmp_path / "theirs"
    if rope["rope_type"] == "default" or rope.get("original_max_position_embeddings") == 8192:
        convert(str(last), str(tmp_path / "meta"), "meta")
        last = tmp_path / "meta"
        close(loaded(last)(tokens, 0), logits, 2e-4)
    convert(str(last), str(tmp_path / "back"), "hf", context=64)
    back, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        close(back(tokens).logits, logits, 1e-6)
