"""LoRA adapters merged while loading, against plain torch and against PEFT (the latter slow: its import takes seconds)."""

import json
import logging
import math
import struct
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_files as files
import lora_files
import pytest
import reference
import torch
from helpers import GOLDEN, build_golden, close
from lora_files import matrices, write_adapter
from torch import Tensor

from llama import LlamaError
from llama.checkpoint import load, load_model, open_checkpoint
from llama.checkpoint.checkpoint import halves_to_pairs
from llama.checkpoint.lora_config import Patterns
from llama.checkpoint.lowrank import LowRank
from llama.checkpoint.memory import memory_estimate
from llama.checkpoint.table import hf_name, rotary_heads
from llama.cli.convert import convert
from llama.cli.info import info
from llama.distributed import initialize_groups
from llama.model import ModelArgs, Transformer

GQA = files.GQA
ALL = (*lora_files.LINEAR, "embed_tokens", "lm_head")
SCALE = lora_files.default_scale()
Q0, V0 = "base_model.model.model.layers.0.self_attn.q_proj", "base_model.model.model.layers.0.self_attn.v_proj"
WQ = "layers.0.attention.wq.weight"
FORMATS: dict[str, Callable[[Path, dict[str, Tensor]], Path]] = {
    "meta": lambda path, weights: files.write_meta(path, weights),
    "meta in two files": lambda path, weights: files.write_meta(path, weights, shards=2),
    "meta, embedding by rows": lambda path, weights: files.write_meta(path, weights, shards=2, rows=True),
    "hf": lambda path, weights: files.write_hf(path, weights),
    "llama2c": lambda path, weights: files.write_llama2c(path, weights),
}


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return files.weights()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, Tensor]) -> Path:
    return files.write_hf(tmp_path_factory.mktemp("base") / "hf", weights)


def equal(base: Path, adapter: Any, wanted: dict[str, Tensor], scale: Any = 1.0) -> None:
    checkpoint = open_checkpoint(base, adapter, scale)
    for name, tensor in wanted.items():
        found = checkpoint.read(name)
        assert found.dtype == tensor.dtype and torch.equal(found, tensor), name


def refused(base: Path, adapter: Any, *words: str, scale: Any = 1.0) -> None:
    with pytest.raises((LlamaError, FileNotFoundError)) as caught:
        checkpoint = open_checkpoint(base, adapter, scale)
        for name in checkpoint.names():
            checkpoint.read(name)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert len(str(caught.value)) < 1200


# ------------------------------------------------------------------------------------------ merging


@pytest.mark.parametrize("form", FORMATS)
def test_every_kind_of_base_and_of_module(tmp_path: Path, weights: dict[str, Tensor], form: str) -> None:
    """Bit for bit W + scale * (B A), rows of q and k in their order; the parts of all ranks are the whole."""
    path = tmp_path / "base"
    checkpoint = FORMATS[form](path, weights)
    tensors = matrices(weights, ALL)
    adapter = write_adapter(tmp_path / "adapter", tensors)
    wanted = lora_files.merged(weights, tensors, GQA, SCALE)
    assert all(not torch.equal(wanted[name], weights[name]) for name in weights if weights[name].ndim == 2)
    equal(checkpoint, adapter, wanted)
    opened = open_checkpoint(checkpoint, adapter)
    for name in opened.names():
        parts = [opened.read(name, rank, 2) for rank in range(2)]
        axis = 1 if name.endswith(files.COLUMNS) else 0
        whole = parts[0] if parts[0].ndim == 1 else torch.cat(parts, axis)
        close(whole, wanted[name], 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_base_of_16_bits_is_rounded_once(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = files.weights(dtype=dtype)
    tensors = matrices(weights, ALL)
    base, adapter = files.write_hf(tmp_path / "hf", weights), write_adapter(tmp_path / "adapter", tensors)
    equal(base, adapter, lora_files.merged(weights, tensors, GQA, SCALE))
    wide = {name: tensor.float() for name, tensor in weights.items()}
    model = loaded(base, adapter)
    for name, tensor in lora_files.merged(wide, tensors, GQA, SCALE).items():  # in float32: not rounded at all
        assert torch.equal(model.state_dict()[name], tensor), name


def loaded(base: Path, adapter: Any = None, scheme: str | None = None, **changes: Any) -> Transformer:
    checkpoint = open_checkpoint(base, adapter)
    model = Transformer(ModelArgs(**{**checkpoint.params, "vocab_size": 40, "max_seq_len": 24, "max_batch_size": 2}))
    load(model, checkpoint, scheme=scheme, device=torch.device("cpu") if scheme else None, **changes)
    return model


@pytest.mark.parametrize("form", FORMATS)
def test_the_model_computes_with_it(tmp_path: Path, weights: dict[str, Tensor], form: str) -> None:
    tensors = matrices(weights, ALL)
    adapter = write_adapter(tmp_path / "adapter", tensors)
    tokens = torch.arange(20).reshape(2, 10)
    wide = {name: tensor.double() for name, tensor in lora_files.merged(weights, tensors, GQA, SCALE).items()}
    wanted = reference.logits(wide, GQA, tokens)
    close(loaded(FORMATS[form](tmp_path / "base", weights), adapter)(tokens, 0), wanted, 1e-4)
    plain = reference.logits({name: tensor.double() for name, tensor in weights.items()}, GQA, tokens)
    assert (plain - wanted).abs().max() > 1


def test_a_second_model_of_the_same_checkpoint_has_it_too(
    tmp_path: Path, base: Path, weights: dict[str, Tensor]
) -> None:
    """Pages of a model in use are mapped anew; the adapter and its scale come along."""
    adapter = write_adapter(tmp_path / "adapter", matrices(weights))
    checkpoint = open_checkpoint(base, adapter, 0.5)
    args = ModelArgs(**{**checkpoint.params, "vocab_size": 40, "max_seq_len": 24, "max_batch_size": 2})
    models = [Transformer(args) for _ in range(2)]
    for model in models:
        load(model, checkpoint)
    wanted = lora_files.merged(weights, matrices(weights), GQA, SCALE / 2)
    for name, tensor in wanted.items():
        assert all(torch.equal(model.state_dict()[name], tensor) for model in models), name


@pytest.mark.parametrize(
    ("changes", "scales"),
    [
        ({"use_rslora": True}, {"": 16 / 2}),
        ({"lora_alpha": 3.5}, {"": 3.5 / 4}),
        ({"alpha_pattern": {"v_proj": 32, "layers.1.self_attn.q_proj": 1}}, {"v_proj": 8, "layers.1.self_attn.q_proj": 0.25}),
        ({"alpha_pattern": {"self_attn.q_proj": 2, "q_proj": 32}}, {"q_proj": 0.5}),
        ({"alpha_pattern": {"^model.layers.0.mlp.up_proj": 2, "^up_proj": 99, "proj": 99}}, {"layers.0.mlp.up_proj": 0.5}),
        ({"alpha_pattern": {r".*\.layers\.\d+\..*(q|v)_proj": 2, "q_proj": 9}}, {"q_proj": 0.5, "v_proj": 0.5}),
    ],
)  # fmt: skip
def test_scales(
    tmp_path: Path, base: Path, weights: dict[str, Tensor], changes: dict[str, Any], scales: dict[str, float]
) -> None:
    """Each module's own; `alpha_pattern` matches the end of a name, the first key wins."""
    tensors = matrices(weights)
    adapter = write_adapter(tmp_path / "adapter", tensors, **changes)
    wanted = dict(weights)
    for name, module in lora_files.modules(weights).items():
        scale = next((scale for end, scale in scales.items() if module.endswith(end)), SCALE)
        wanted[name] = lora_files.merged(weights, tensors, GQA, scale)[name]
    equal(base, adapter, wanted)


def test_ranks_by_pattern(tmp_path: Path, base: Path, weights: dict[str, Tensor]) -> None:
    tensors = {**matrices(weights, ["q_proj"]), **matrices(weights, ["v_proj"], rank=2)}
    adapter = write_adapter(tmp_path / "adapter", tensors, rank_pattern={"v_proj": 2})
    wanted = lora_files.merged(weights, tensors, GQA, 4.0) | {
        name: tensor for name, tensor in lora_files.merged(weights, tensors, GQA, 8.0).items() if "wv" in name
    }
    equal(base, adapter, wanted)
    assert open_checkpoint(base, adapter).adapters[0].ranks == (2, 4)


def test_several_adapters_each_with_its_scale(tmp_path: Path, base: Path, weights: dict[str, Tensor]) -> None:
    first, second = matrices(weights), matrices(weights, ["q_proj", "lm_head"], seed=6)
    paths = [write_adapter(tmp_path / "1", first), str(write_adapter(tmp_path / "2", second, bin_file=True))]
    once = lora_files.merged(weights, first, GQA, SCALE * 0.5)
    equal(base, paths, lora_files.merged(once, second, GQA, SCALE * -1.5), [0.5, -1.5])
    equal(base, paths, lora_files.merged(lora_files.merged(weights, first, GQA, SCALE * 2), second, GQA, SCALE * 2), 2)
    equal(base, [], weights)
    refused(base, paths, "lora_scale=[1.0]", "2 adapters", scale=[1.0])
    refused(base, None, "lora_scale=0.5", "0 adapters", scale=0.5)
    refused(base, paths, "lora_scale=[1, nan]", "finite", scale=[1, math.nan])
    refused(base, paths, "lora_scale is 'x'", scale="x")
    refused(base, 3, "lora is 3")
    refused(base, [3], "lora=[3]", "path")


def test_16_bit_base_rounds_after_each_adapter(tmp_path: Path) -> None:
    weights = files.weights(dtype=torch.bfloat16)
    base = files.write_meta(tmp_path / "meta", weights)
    first, second = matrices(weights), matrices(weights, seed=6)
    paths = [write_adapter(tmp_path / "1", first), write_adapter(tmp_path / "2", second)]
    equal(base, paths, lora_files.merged(lora_files.merged(weights, first, GQA, SCALE), second, GQA, SCALE))


@pytest.mark.parametrize("bin_file", [False, True])
def test_modules_to_save(tmp_path: Path, base: Path, weights: dict[str, Tensor], bin_file: bool) -> None:
    """Whole weights by their plain names: a head, a norm, and a projection in Hugging Face's order."""
    others = files.to_hf(files.weights(seed=9), GQA)
    names = ["lm_head.weight", "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"]
    tensors = {**matrices(weights, ["v_proj"]), **{f"base_model.model.{name}": others[name] for name in names}}
    adapter = write_adapter(
        tmp_path / "adapter", tensors, bin_file=bin_file, modules_to_save=["lm_head", "norm", "k_proj"]
    )
    wanted = lora_files.merged(weights, tensors, GQA, SCALE)
    assert torch.equal(wanted["layers.1.attention.wk.weight"], files.weights(seed=9)["layers.1.attention.wk.weight"])
    equal(base, adapter, wanted)
    for _ in range(2):  # pages that are given back are read again
        model = loaded(base, adapter)
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in wanted.items())
    refused(base, [adapter, adapter], "replaces", "another adapter changes")


def test_a_whole_weight_in_float32_does_not_change_the_type_that_is_written(tmp_path: Path) -> None:
    weights = files.weights(dtype=torch.bfloat16)
    base = files.write_hf(tmp_path / "hf", weights)
    head = files.weights(seed=9)["output.weight"]
    adapter = write_adapter(
        tmp_path / "adapter", {"base_model.model.lm_head.weight": head}, modules_to_save=["lm_head"]
    )
    convert(str(base), str(tmp_path / "out"), lora=[str(adapter)])
    assert torch.equal(open_checkpoint(tmp_path / "out").read("output.weight"), head.bfloat16())
    convert(str(base), str(tmp_path / "wide"), lora=[str(adapter)], dtype="float32")
    assert torch.equal(open_checkpoint(tmp_path / "wide").read("output.weight"), head)


def test_the_copy_of_the_base_beside_an_embedding(tmp_path: Path, base: Path, weights: dict[str, Tensor]) -> None:
    """PEFT writes it with an adapted embedding and reads it back: it is what the adapter adds to."""
    other = files.weights(seed=9)["tok_embeddings.weight"]
    pair = matrices(weights, ["embed_tokens"])
    adapter = write_adapter(tmp_path / "1", {**pair, "base_model.model.model.embed_tokens.base_layer.weight": other})
    wanted = lora_files.merged({**weights, "tok_embeddings.weight": other}, pair, GQA, SCALE)
    equal(base, adapter, wanted)
    more = matrices(weights, ["embed_tokens"], seed=8)
    equal(base, [adapter, write_adapter(tmp_path / "2", more)], lora_files.merged(wanted, more, GQA, SCALE))


@pytest.mark.parametrize("kind", ["lm_head", "embed_tokens"])
def test_a_tied_head_is_untied(
    tmp_path: Path, weights: dict[str, Tensor], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As PEFT's model computes before merging: the adapter of one of the two does not change the other."""
    weights = {**weights, "output.weight": weights["tok_embeddings.weight"]}
    base = files.write_hf(tmp_path / "hf", weights, tie_word_embeddings=True)
    tensors = matrices(weights, ["q_proj", kind])
    adapter = write_adapter(tmp_path / "adapter", tensors)
    with caplog.at_level(logging.WARNING, "llama"):
        checkpoint = open_checkpoint(base, adapter)
    assert not checkpoint.tied and "one matrix as embedding and head" in caplog.text
    wanted = lora_files.merged(weights, tensors, GQA, SCALE)
    equal(base, adapter, wanted)
    model = loaded(base, adapter)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in wanted.items())
    convert(str(base), str(tmp_path / "out"), lora=[str(adapter)])
    equal(tmp_path / "out", None, wanted)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    kept = open_checkpoint(base, write_adapter(tmp_path / "q", matrices(weights, ["q_proj"]), ensure_weight_tying=True))
    assert kept.tied
    as_one = write_adapter(tmp_path / "one", tensors, ensure_weight_tying=True)
    refused(base, as_one, "ensure_weight_tying is true")


# ----------------------------------------------------------------------------------------- quantizing


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_it_is_merged_before_quantizing(tmp_path: Path, scheme: str) -> None:
    """From float32 sums, whatever the base's type: the same packed weights as from merged float32 files."""
    weights = files.weights(dtype=torch.bfloat16)
    tensors = matrices(weights)
    base, adapter = files.write_hf(tmp_path / "hf", weights), write_adapter(tmp_path / "adapter", tensors)
    wide = lora_files.merged({name: tensor.float() for name, tensor in weights.items()}, tensors, GQA, SCALE)
    whole = files.write_meta(tmp_path / "merged", wide)
    tokens = torch.arange(20).reshape(2, 10)
    wanted = loaded(whole, None, scheme)(tokens, 0)
    assert torch.equal(loaded(base, adapter, scheme)(tokens, 0), wanted)
    convert(str(base), str(tmp_path / scheme), to="meta", quantize=scheme, lora=[str(adapter)])
    assert torch.equal(loaded(tmp_path / scheme, None, scheme)(tokens, 0), wanted)


def test_a_quantized_base_is_quantized_again(
    tmp_path: Path, base: Path, weights: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    convert(str(base), str(tmp_path / "int8"), to="meta", quantize="int8")
    tensors = matrices(weights, ["q_proj"])
    adapter = write_adapter(tmp_path / "adapter", tensors)
    with caplog.at_level(logging.WARNING, "llama"):
        checkpoint = open_checkpoint(tmp_path / "int8", adapter)
    assert "int8: what adapters change is quantized a second time" in caplog.text
    values = {name: open_checkpoint(tmp_path / "int8").read(name) for name in weights}
    equal(tmp_path / "int8", adapter, lora_files.merged(values, tensors, GQA, SCALE))
    assert checkpoint.quantized == "int8" and checkpoint.quantized_shard(WQ) is None
    assert checkpoint.quantized_shard(WQ.replace("wq", "wv")) is not None
    tokens = torch.arange(20).reshape(2, 10)
    wanted = lora_files.merged(weights, tensors, GQA, SCALE)
    found = loaded(tmp_path / "int8", adapter, "int8")(tokens, 0)
    close(found, reference.logits(wanted, GQA, tokens), 0.5)
    assert (found - loaded(tmp_path / "int8", None, "int8")(tokens, 0)).abs().max() > 1


@pytest.mark.parametrize("kind", ["lm_head", "embed_tokens"])
def test_a_head_that_was_quantized_from_its_embedding_is_not_tied_again(
    tmp_path: Path, weights: dict[str, Tensor], kind: str
) -> None:
    weights = {**weights, "output.weight": weights["tok_embeddings.weight"]}
    base = files.write_hf(tmp_path / "hf", weights, tie_word_embeddings=True)
    convert(str(base), str(tmp_path / "int8"), to="meta", quantize="int8")
    tensors = matrices(weights, [kind])
    adapter = write_adapter(tmp_path / "adapter", tensors)
    convert(str(tmp_path / "int8"), str(tmp_path / "out"), lora=[str(adapter)])
    values = {name: open_checkpoint(tmp_path / "int8").read(name) for name in weights}
    equal(tmp_path / "out", None, lora_files.merged(values, tensors, GQA, SCALE))


# --------------------------------------------------------------------------------- convert, build, commands


@pytest.mark.parametrize("to", ["meta", "hf", "llama2c"])
def test_convert_writes_the_merged_model(tmp_path: Path, base: Path, weights: dict[str, Tensor], to: str) -> None:
    first, second = matrices(weights, ALL), matrices(weights, seed=6)
    paths = [str(write_adapter(tmp_path / name, tensors)) for name, tensors in (("1", first), ("2", second))]
    convert(str(base), str(tmp_path / "out"), to=to, lora=paths, lora_scale=[1.0, 0.5])
    wanted = lora_files.merged(lora_files.merged(weights, first, GQA, SCALE), second, GQA, SCALE / 2)
    equal(tmp_path / "out" / "model.bin" if to == "llama2c" else tmp_path / "out", None, wanted)
    assert not (tmp_path / "out" / "adapter_config.json").exists()


def test_convert_with_another_type_rounds_once(tmp_path: Path) -> None:
    weights = files.weights(dtype=torch.bfloat16)
    base, tensors = files.write_hf(tmp_path / "hf", weights), matrices(weights)
    adapter = write_adapter(tmp_path / "adapter", tensors)
    convert(str(base), str(tmp_path / "out"), lora=[str(adapter)], dtype="float32")
    wide = {name: tensor.float() for name, tensor in weights.items()}
    equal(tmp_path / "out", None, lora_files.merged(wide, tensors, GQA, SCALE))


def test_convert_does_not_replace_what_the_adapter_needs(
    tmp_path: Path, base: Path, weights: dict[str, Tensor]
) -> None:
    target = files.write_hf(tmp_path / "out", weights)
    adapter = write_adapter(tmp_path / "adapter", matrices(weights))
    (adapter / "adapter_model.safetensors").rename(target / "model.safetensors")
    (adapter / "adapter_model.safetensors").symlink_to(target / "model.safetensors")
    with pytest.raises(LlamaError, match="links into"):
        convert(str(base), str(target), lora=[str(adapter)], force=True)
    with pytest.raises(LlamaError, match="adapter_model.safetensors"):
        convert(str(base), str(adapter), lora=[str(adapter)], force=True)


def test_build_generates_with_it(tmp_path: Path) -> None:
    weights = open_checkpoint(GOLDEN)
    held = {name: weights.read(name) for name in weights.names()}
    params = {**weights.params, "n_kv_heads": 4}
    tensors = matrices(held, ALL)
    adapter = write_adapter(tmp_path / "adapter", tensors)
    prompt = [1, 20, 30, 40]
    with build_golden(lora=str(adapter), lora_scale=0.5) as generator:
        found = generator.generate([prompt], 8, temperature=0)[0][0]
    wanted = reference.greedy(lora_files.merged(held, tensors, params, SCALE / 2), params, prompt, 8)
    assert found == wanted != reference.greedy(held, params, prompt, 8)


def test_info_says_so(
    tmp_path: Path, base: Path, weights: dict[str, Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {**matrices(weights, ["q_proj", "v_proj"]), "base_model.model.lm_head.weight": weights["output.weight"]}
    adapter = write_adapter(tmp_path / "adapter", tensors)
    info(str(base), lora=[str(adapter)], lora_scale=[0.5])
    out = capsys.readouterr().out
    assert str(adapter) in out and "rank 4, times 0.5: 4 weights changed, 1 replaced" in out
    assert "and 4.1 kB while adapters are merged" in out  # of q_proj: (32, 32) in float32
    convert(str(base), str(tmp_path / "out"), lora=[str(adapter)], lora_scale=[0.5])
    info(str(base), lora=[str(adapter)], lora_scale=[0.5], check=True)
    digests = [line for line in capsys.readouterr().out.splitlines() if ".weight" in line]
    info(str(tmp_path / "out"), check=True)
    assert len(digests) == 21 and digests == [
        line for line in capsys.readouterr().out.splitlines() if ".weight" in line
    ]


# ------------------------------------------------------------------------------------ where it is


def test_where_an_adapter_is_looked_for(tmp_path: Path, base: Path, weights: dict[str, Tensor]) -> None:
    tensors = matrices(weights)
    wanted = lora_files.merged(weights, tensors, GQA, SCALE)
    inner = write_adapter(tmp_path / "run" / "named", tensors)
    for path in (tmp_path / "run", inner, inner / "adapter_config.json", inner / "adapter_model.safetensors"):
        equal(base, path, wanted)
    write_adapter(tmp_path / "run" / "other", tensors)
    refused(base, tmp_path / "run", "2 adapters: named, other", "name its folder")
    write_adapter(tmp_path / "run", matrices(weights, seed=8))  # one at the top comes first
    equal(base, tmp_path / "run", lora_files.merged(weights, matrices(weights, seed=8), GQA, SCALE))
    refused(base, tmp_path / "nowhere", "nowhere", "no such folder", "adapter_config.json")
    refused(base, base, "a whole model", "ckpt_dir")
    (tmp_path / "empty").mkdir()
    refused(base, tmp_path / "empty", "no adapter_config.json")
    (inner / "adapter_model.safetensors").unlink()
    refused(base, inner, "none of adapter_model.safetensors, adapter_model.bin")
    refused(base, base / "config.json", "a file of another name")


def test_an_adapter_given_as_checkpoint_says_lora(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    adapter = write_adapter(tmp_path / "adapter", matrices(weights))
    for path in (adapter, adapter / "adapter_config.json", adapter / "adapter_model.safetensors"):
        with pytest.raises(LlamaError, match=r"a LoRA adapter.*lora="):
            open_checkpoint(path)


# ------------------------------------------------------------------------------------ what is refused

ODD: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    "no method": ({"peft_type": None}, "peft_type is None"),
    "dora": ({"use_dora": True}, "DoRA"),
    "bias": ({"bias": "lora_only"}, "bias is 'lora_only'"),
    "lora_bias": ({"lora_bias": True}, "lora_bias"),
    "fan_in_fan_out": ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    "layer_replication": ({"layer_replication": [[0, 1]]}, "layer_replication"),
    "target_parameters": ({"target_parameters": ["x"]}, "target_parameters"),
    "token indices": ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    "qalora": ({"use_qalora": True}, "QALoRA"),
    "bdlora": ({"use_bdlora": {"x": 1}}, "BD-LoRA"),
    "alora": ({"alora_invocation_tokens": [5]}, "aLoRA"),
    "arrow": ({"arrow_config": {"top_k": 3}}, "Arrow"),
    "kasa": ({"kasa_config": {"beta": 1}}, "KaSA"),
    "monteclora": ({"monteclora_config": {"num_samples": 8}}, "MonteCLoRA"),
    "loftq_config": ({"loftq_config": {"loftq_bits": 4}}, "LoftQ"),
    **{init: ({"init_lora_weights": init}, f"init_lora_weights is '{init}'")
       for init in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "something")},
    "unknown": ({"new_method": {"k": 1}}, "new_method = {'k': 1}"),
    "rank": ({"r": 8}, "r is 8 for model.layers.0.self_attn.q_proj, whose matrices have rank 4"),
    "rank as text": ({"r": "4"}, "r is '4'"),
    "alpha as text": ({"lora_alpha": "16"}, "lora_alpha is '16'"),
    "alpha of bool": ({"lora_alpha": True}, "lora_alpha is True"),
    "alpha without end": ({"lora_alpha": math.inf}, "lora_alpha is inf"),
    "rslora": ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
    "pattern": ({"alpha_pattern": ["q_proj"]}, "alpha_pattern is ['q_proj']"),
    "slow pattern": ({"alpha_pattern": {"(a+)+$": 1}}, "alpha_pattern has the key '(a+)+$'"),
    "broken pattern": ({"rank_pattern": {"(q_proj": 1}}, "rank_pattern has the key '(q_proj'"),
    "many patterns": ({"rank_pattern": {f".*{n}q": 1 for n in range(30)}}, "30 regular expressions"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_settings_are_refused_by_name(tmp_path: Path, base: Path, weights: dict[str, Tensor], name: str) -> None:
    changes, words = ODD[name]
    refused(base, write_adapter(tmp_path / "a", matrices(weights, ["q_proj"]), **changes), "adapter_config.json", words)


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_harmless_settings_pass(tmp_path: Path, base: Path, weights: dict[str, Tensor], init: Any) -> None:
    tensors = matrices(weights)
    changes = {"init_lora_weights": init, "brand_new": None, "another": [], "third": {}, "fourth": False}
    changes |= {"target_modules": "all-linear", "eva_config": {"rho": 2.0} if init == "eva" else None}
    adapter = write_adapter(tmp_path / "a", tensors, **changes)
    equal(base, adapter, lora_files.merged(weights, tensors, GQA, SCALE))


def without(*keys: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: [tensors.pop(key) for key in keys] and None  # type: ignore[func-returns-value]


def renamed(old: str, new: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def holding(key: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({key: tensor})


A, B = f"{Q0}.lora_A.weight", f"{Q0}.lora_B.weight"
BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], None], tuple[str, ...]]] = {
    "A alone": (without(B), ("q_proj has A alone", "A and B")),
    "B alone": (without(A), ("q_proj has B alone",)),
    "nothing": (lambda tensors: tensors.clear(), ("adapter",)),
    "a layer too many": (renamed(A, A.replace("layers.0", "layers.2")), ("layers.2", "no weight of this base", "2 layers")),
    "unknown module": (renamed(A, A.replace("q_proj", "qkv_proj")), ("qkv_proj", "no weight of this base")),
    "no prefix": (renamed(A, A.removeprefix("base_model.model.")), ("no name of PEFT's",)),
    "without model.": (renamed(A, A.replace("model.model.model", "model.model")), ("no weight of this base",)),
    "adapter's name": (renamed(A, A.replace("lora_A.", "lora_A.default.")), ("behind its adapter's name", "save_pretrained")),
    "dora": (holding(f"{Q0}.lora_magnitude_vector", torch.ones(32)), ("DoRA",)),
    "lora bias": (holding(f"{Q0}.lora_B.bias", torch.ones(32)), ("lora_bias",)),
    "bias": (holding("base_model.model.model.layers.0.mlp.gate_proj.biases.bias", torch.ones(32)), ("a bias",)),
    "embedding as linear": (
        holding("base_model.model.model.embed_tokens.lora_A.weight", torch.ones(4, 32)), ("embed_tokens",)),
    "linear as embedding": (holding(f"{Q0}.lora_embedding_A", torch.ones(4, 32)), ("q_proj.lora_embedding_A",)),
    "norm": (lambda tensors: tensors.update({f"base_model.model.model.norm.lora_{s}.weight": torch.ones(4, 4) for s in "AB"}),
             ("model.norm is made for a weight of (4, 4), the base model's is (32,)",)),
    "width": (holding(A, torch.ones(4, 30)), ("is made for a weight of (32, 30), the base model's is (32, 32)", "same base")),
    "height": (holding(B, torch.ones(16, 4)), ("is made for a weight of (16, 32)",)),
    "inner": (holding(B, torch.ones(32, 3)), ("A (4, 32) and B (32, 3)",)),
    "one axis": (holding(B, torch.ones(32)), ("B (32,)",)),
    "rank 0": (lambda tensors: tensors.update({A: torch.ones(0, 32), B: torch.ones(32, 0)}), ("rank 0",)),
    "integers": (holding(A, torch.ones(4, 32, dtype=torch.int8)), ("torch.int8",)),
    "grown head": (holding("base_model.model.lm_head.weight", torch.ones(41, 32)), ("(41, 32)", "its vocabulary grew", "resize_token_embeddings")),
    "grown embedding": (holding("base_model.model.model.embed_tokens.weight", torch.ones(44, 32)), ("its vocabulary grew",)),
    "nan in a whole": (holding("base_model.model.model.norm.weight", torch.full((32,), math.nan)), ("norm.weight holds NaN",)),
    "nan": (holding(A, torch.full((4, 32), math.nan)), ("NaN or inf after merging", "q_proj")),
    "inf": (holding(B, torch.full((32, 4), math.inf)), ("NaN or inf after merging", "q_proj")),
}  # fmt: skip


@pytest.mark.parametrize("bin_file", [False, True])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_adapters_are_refused(
    tmp_path: Path, base: Path, weights: dict[str, Tensor], name: str, bin_file: bool
) -> None:
    change, words = BROKEN[name]
    tensors = matrices(weights, ["q_proj", "v_proj"])
    change(tensors)
    refused(base, write_adapter(tmp_path / "adapter", tensors, bin_file), str(tmp_path / "adapter"), *words)


def test_overflow_of_float16(tmp_path: Path) -> None:
    weights = files.weights(dtype=torch.float16)
    base, tensors = files.write_hf(tmp_path / "hf", weights), matrices(weights)
    adapter = write_adapter(tmp_path / "adapter", tensors)
    refused(base, adapter, "NaN or inf after merging", "float16", "wider dtype", scale=1e6)
    assert open_checkpoint(base, adapter, 1e6).read(WQ, dtype=torch.float32).isfinite().all()


# ------------------------------------------------------------------------------------- hostile files


def test_hostile_settings_end_soon(tmp_path: Path, base: Path, weights: dict[str, Tensor]) -> None:
    """Deep JSON, huge JSON, thousands of names, expressions that would backtrack: a bounded error, or an answer at once."""
    adapter = write_adapter(tmp_path / "a", matrices(weights, ["q_proj"]))
    start = time.monotonic()
    for text in ("[" * 100_000, '{"peft_type":' * 900 + "1" + "}" * 900, "{" + " " * 3_000_000 + "}", "[1]", "\0", ""):
        (adapter / "adapter_config.json").write_text(text)
        refused(base, adapter, "adapter_config.json")
    module = "model.layers.101.self_attn.q_proj_aaaaaaa"
    costly = Patterns(
        tmp_path, "rank_pattern", {f".*a.*a.*{'_' * n}z": n for n in range(16)} | {f"x{n}": n for n in range(9999)}
    )
    assert {costly.find(module, "none") for _ in range(200)} == {"none"}
    assert time.monotonic() - start < 5


def test_hostile_tensors_are_refused_before_they_are_made(
    tmp_path: Path, base: Path, weights: dict[str, Tensor]
) -> None:
    adapter = write_adapter(tmp_path / "a", matrices(weights, ["q_proj"]))
    header = json.dumps({A: {"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 8]}}).encode()
    (adapter / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    refused(base, adapter, "adapter_model.safetensors")
    (adapter / "adapter_model.safetensors").unlink()
    row = torch.ones(1, 32).expand(1 << 20, 32)  # a rank of a million in 128 bytes
    torch.save({A: row, B: torch.ones(32, 1).expand(32, 1 << 20)}, adapter / "adapter_model.bin")
    refused(base, adapter, "adapter_model.bin")
    (adapter / "adapter_model.bin").write_bytes(b"\x80\x02cos\nsystem\n(S'true'\ntR.")
    refused(base, adapter, "adapter_model.bin")
    wide = {A: torch.ones(20_000, 32), B: torch.ones(32, 20_000)}
    refused(base, write_adapter(tmp_path / "b", wide, r=20_000), "rank 20000", "16384")


def test_an_adapter_that_is_written_to_after_it_was_opened(
    tmp_path: Path, base: Path, weights: dict[str, Tensor]
) -> None:
    """Cut, its mapped pages would end the process."""
    adapter = write_adapter(tmp_path / "a", matrices(weights, ["q_proj"]))
    checkpoint = open_checkpoint(base, adapter)
    with (adapter / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(LlamaError, match=r"adapter_model.safetensors: the file was written to after it was opened"):
        checkpoint.read(WQ)


def test_damaged_adapters(tmp_path: Path, base: Path, weights: dict[str, Tensor]) -> None:
    """Bytes changed at random in either file: it ends in a LlamaError, or in weights."""
    generator = torch.Generator().manual_seed(3)
    for bin_file in (False, True):
        adapter = write_adapter(tmp_path / str(bin_file), matrices(weights, ["q_proj", "embed_tokens"]), bin_file)
        for file in adapter.iterdir():
            good = file.read_bytes()
            for _ in range(25):
                bad = bytearray(good)
                for at in torch.randint(0, min(len(good), 3000), (3,), generator=generator).tolist():
                    bad[at] = int(torch.randint(0, 256, (1,), generator=generator))
                file.write_bytes(bad[: len(bad) - int(torch.randint(0, 2, (1,), generator=generator))])
                try:
                    checkpoint = open_checkpoint(base, adapter)
                    [checkpoint.read(name) for name in (WQ, "tok_embeddings.weight")]
                except (LlamaError, FileNotFoundError) as error:
                    assert len(str(error)) < 1200
            file.write_bytes(good)


def test_one_product_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product is as large as its weight in float32: the one before has gone when the next is made, on any thread."""
    weights = files.weights({**GQA, "dim": 64}, torch.bfloat16)
    base = files.write_meta(tmp_path / "meta", weights, {**GQA, "dim": 64})
    adapter = write_adapter(tmp_path / "adapter", matrices(weights))
    original, made, left = LowRank._product, list[Any](), list[int]()

    def noted(self: LowRank, *args: Any) -> Tensor:
        left.append(sum(product() is not None for product in made))
        product = original(self, *args)
        made.append(weakref.ref(product))
        return product

    monkeypatch.setattr(LowRank, "_product", noted)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        loaded(base, adapter)
    finally:
        torch.set_num_threads(before)
    assert left == [0] * 14


def test_the_forecast_counts_the_product(
    tmp_path: Path, base: Path, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_adapter(tmp_path / "adapter", matrices(weights, ["q_proj", "lm_head"]))
    args = ModelArgs(**{**open_checkpoint(base).params, "vocab_size": 40, "max_seq_len": 8, "max_batch_size": 1})
    need = memory_estimate(vars(args), 8, 1, 1, torch.float32).total
    checkpoint = open_checkpoint(base, adapter)
    assert checkpoint.merging_bytes() == 4 * 40 * 32 and checkpoint.merging_bytes(2) == 2 * 40 * 32
    sizes = {"vocab_size": 40, "max_seq_len": 8, "max_batch_size": 1, "device": torch.device("cpu")}
    groups = initialize_groups(None, torch.device("cpu"), "gloo", 30)
    try:
        monkeypatch.setattr("llama.checkpoint.memory.free_memory", lambda device: need)
        load_model(open_checkpoint(base), **sizes, dtype=torch.float32)
        with pytest.raises(LlamaError, match=r"\+ 5.1 kB while adapters are merged"):
            load_model(checkpoint, **sizes, dtype=torch.float32)
        monkeypatch.setattr("llama.checkpoint.memory.free_memory", lambda device: need + 4 * 40 * 32)
        load_model(checkpoint, **sizes, dtype=torch.float32)
    finally:
        groups.close()


# --------------------------------------------------------------------------------------- against PEFT


def peft_and_transformers() -> tuple[Any, Any]:
    return pytest.importorskip("peft", reason="needs peft"), pytest.importorskip(
        "transformers", reason="needs transformers"
    )


PEFT: dict[str, dict[str, Any]] = {
    "default": {"target_modules": ["q_proj", "v_proj"], "r": 8},
    "all linear": {"target_modules": "all-linear", "r": 4, "lora_alpha": 16},
    "regex": {"target_modules": r".*\.layers\.1\..*(q|k)_proj", "r": 3},
    "rslora and patterns": {
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "r": 4, "lora_alpha": 16, "use_rslora": True,
        "rank_pattern": {"v_proj": 2, "layers.1.self_attn.q_proj": 8}, "alpha_pattern": {"v_proj": 32, ".*1.*q_proj": 5},
    },
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head", "k_proj", "down_proj"], "r": 4},
    "whole modules": {"target_modules": ["gate_proj"], "modules_to_save": ["lm_head", "embed_tokens", "norm", "k_proj"]},
    "gaussian": {"target_modules": ["up_proj", "k_proj"], "init_lora_weights": "gaussian", "r": 16},
}  # fmt: skip


def trained(peft: Any, base: Any, folder: Path, settings: dict[str, Any], name: str = "default", **save: Any) -> Any:
    """A PEFT model whose adapter is no longer zero, saved; what it was made of is used up."""
    torch.manual_seed(7)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **settings), adapter_name=name)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key or "modules_to_save" in key:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(str(folder), **save)
    return model


def transformers_model(transformers: Any, base: Path, dtype: torch.dtype) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(str(base), dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PEFT)
def test_bit_for_bit_as_peft_merges(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Every weight of `merge_and_unload`, from a base in each order of rows, and in the type of the base."""
    peft, transformers = peft_and_transformers()
    weights = files.weights(dtype=dtype)
    base = files.write_hf(tmp_path / "hf", weights)
    trained(peft, transformers_model(transformers, base, dtype), tmp_path / "adapter", PEFT[name])
    theirs = peft.PeftModel.from_pretrained(transformers_model(transformers, base, dtype), str(tmp_path / "adapter"))
    wanted = theirs.merge_and_unload().state_dict()
    for path in (base, files.write_meta(tmp_path / "meta", weights, shards=2)):
        checkpoint, changed = open_checkpoint(path, tmp_path / "adapter"), 0
        for key in checkpoint.names():
            found = checkpoint.read(key, dtype=dtype).to(dtype)
            theirs_in_pairs = lora_files.in_pairs(key, wanted[files.hf_name(key)], GQA)
            assert torch.equal(found, theirs_in_pairs), (path.name, key)
            changed += not torch.equal(found, weights[key])
        assert changed == len({*checkpoint.adapters[0].changed, *checkpoint.adapters[0].replaced}) > 0


@pytest.mark.slow
def test_heads_of_another_size_and_biases(tmp_path: Path) -> None:
    """An explicit head_dim moves the rows of B otherwise; the base's biases stay, or are saved whole with their module."""
    peft, transformers = peft_and_transformers()
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=12,
        num_key_value_heads=2, attention_bias=True, mlp_bias=True, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(2)
    made = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        [parameter.add_(0.1 * torch.randn_like(parameter)) for parameter in made.parameters()]
    made.save_pretrained(str(tmp_path / "hf"))
    settings = {"target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"], "modules_to_save": ["k_proj"], "r": 3}
    model = trained(peft, made, tmp_path / "adapter", settings).eval()
    tokens = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        wanted = model(tokens).logits
        close(loaded(tmp_path / "hf", tmp_path / "adapter")(tokens, 0), wanted, 1e-4)
    merged = model.merge_and_unload().state_dict()
    checkpoint = open_checkpoint(tmp_path / "hf", tmp_path / "adapter")
    for key in checkpoint.names():
        theirs = merged[hf_name(key)]
        if rotary_heads(key, checkpoint.params):
            theirs = halves_to_pairs(theirs, rotary_heads(key, checkpoint.params)).reshape(theirs.shape)
        assert torch.equal(checkpoint.read(key), theirs), key
    assert "layers.0.attention.wk.bias" in checkpoint.adapters[0].replaced


@pytest.mark.slow
def test_two_of_pefts_adapters_one_in_a_sub_folder(tmp_path: Path) -> None:
    peft, transformers = peft_and_transformers()
    weights = files.weights()
    base = files.write_hf(tmp_path / "hf", weights)
    one, other = PEFT["default"], {"target_modules": "all-linear", "r": 2}
    trained(peft, transformers_model(transformers, base, torch.float32), tmp_path / "one", one)
    trained(peft, transformers_model(transformers, base, torch.float32), tmp_path / "run", other, "other")
    assert (tmp_path / "run" / "other" / "adapter_config.json").exists()
    model = peft.PeftModel.from_pretrained(transformers_model(transformers, base, torch.float32), str(tmp_path / "one"))
    model.load_adapter(str(tmp_path / "run" / "other"), adapter_name="other")
    wanted = model.merge_and_unload(adapter_names=["default", "other"]).state_dict()
    checkpoint = open_checkpoint(base, [tmp_path / "one", tmp_path / "run"])
    for key in checkpoint.names():
        assert torch.equal(checkpoint.read(key), lora_files.in_pairs(key, wanted[files.hf_name(key)], GQA)), key


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all linear", "embedding and head", "whole modules"])
def test_logits_and_tokens_as_pefts_unmerged_model(tmp_path: Path, name: str) -> None:
    """Also over a tied head, where PEFT's own merge would change both of the two."""
    peft, transformers = peft_and_transformers()
    tied = name == "embedding and head"
    weights = files.weights()
    base = files.write_hf(tmp_path / "hf", weights, tie_word_embeddings=tied)
    settings = {**PEFT[name], "target_modules": ["embed_tokens", "k_proj"]} if tied else PEFT[name]
    model = trained(peft, transformers_model(transformers, base, torch.float32), tmp_path / "adapter", settings).eval()
    tokens = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        wanted = model(tokens).logits
        close(loaded(base, tmp_path / "adapter")(tokens, 0), wanted, 1e-4)
        convert(str(base), str(tmp_path / "merged"), lora=[str(tmp_path / "adapter")])
        theirs = transformers_model(transformers, tmp_path / "merged", torch.float32)
        close(theirs(tokens).logits, wanted, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"trainable_token_indices": [3, 4]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 1], [0, 2]]}, "layer_replication"),
    ],
)
def test_what_peft_writes_of_other_methods_is_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    peft, transformers = peft_and_transformers()
    base = files.write_hf(tmp_path / "hf", files.weights())
    model = transformers_model(transformers, base, torch.float32)
    trained(peft, model, tmp_path / "adapter", {"target_modules": ["q_proj"], **settings})
    refused(base, tmp_path / "adapter", words)


@pytest.mark.slow
def test_a_grown_vocabulary_as_peft_saves_it(tmp_path: Path) -> None:
    peft, transformers = peft_and_transformers()
    base = files.write_hf(tmp_path / "hf", files.weights())
    model = transformers_model(transformers, base, torch.float32)
    model.resize_token_embeddings(44)
    trained(peft, model, tmp_path / "adapter", PEFT["default"], save_embedding_layers=True)
    refused(base, tmp_path / "adapter", "its vocabulary grew", "resize_token_embeddings")
