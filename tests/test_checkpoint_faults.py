"""Files that contradict themselves or hold more than is computed, and what `convert` hands on to the next program."""

import json
import logging
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_files as files
import pytest
import reference
import sentencepiece
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn

from llama.checkpoint import load, open_checkpoint
from llama.checkpoint.companions import c_differences, read_vocabulary
from llama.cli.convert import convert
from llama.errors import LlamaError
from llama.model import ModelArgs, Transformer
from llama.tokenizer import Tokenizer
from llama.vocabulary.sentencepiece import field as _field
from llama.vocabulary.sentencepiece import number as _number

GOLDEN = Path(__file__).parent / "golden"
WQ = "layers.0.attention.wq.weight"


def logits(path: Path) -> Tensor:
    checkpoint = open_checkpoint(path)
    sizes = {"vocab_size": checkpoint.shape("tok_embeddings.weight")[0], "max_seq_len": 24, "max_batch_size": 2}
    model = Transformer(ModelArgs(**{**checkpoint.params, **sizes}))
    load(model, checkpoint)
    return model(torch.arange(8)[None], 0)


def change(path: Path, **changes: Any) -> None:
    """Other fields in a JSON file; None takes one out."""
    held = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in held.items() if value is not None}))


def change_tensors(path: Path, **changes: Any) -> None:
    """Other tensors in a .pth or .safetensors file; None takes one out."""
    safe = path.suffix == ".safetensors"
    held = {**(load_file(path) if safe else torch.load(path)), **changes}
    held = {name: value for name, value in held.items() if value is not None}
    save_file(held, path) if safe else torch.save(held, path)


# ------------------------------------------------------------------------------------------ the head


@pytest.mark.parametrize("bin_file", [False, True])
def test_a_trained_head_is_used_though_config_says_tied(tmp_path: Path, bin_file: bool) -> None:
    weights = files.weights()
    source = files.write_hf(tmp_path / "src", weights, bin_file=bin_file)
    change(source / "config.json", tie_word_embeddings=True)
    wanted = reference.logits(weights, files.GQA, torch.arange(8)[None])
    for to in (None, "hf", "meta", "llama2c"):
        if to:
            convert(str(source), str(tmp_path / to), to)
        found = tmp_path / to if to else source
        assert not open_checkpoint(found).tied
        assert (logits(found) - wanted).abs().max() < 1e-5, to
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["tie_word_embeddings"] is False


class Tied(nn.Module):
    """A tied model by Hugging Face's names, as far as `save_model` looks at one."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            place: nn.Module = self
            for part in name.split(".")[:-1]:
                place = place._modules.get(part) or place.register_module(part, nn.Module()) or place._modules[part]
            place.weight = nn.Parameter(tensor)
        self.lm_head.weight = self.model.embed_tokens.weight


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight", "both", "save_model"])
def test_a_tied_model_that_stores_either_name(tmp_path: Path, name: str) -> None:
    weights = files.weights()
    weights["output.weight"] = weights["tok_embeddings.weight"]
    path = files.write_hf(tmp_path, weights, tie_word_embeddings=True) / "model.safetensors"
    embedding = load_file(path)["model.embed_tokens.weight"]
    if name == "lm_head.weight":
        change_tensors(path, **{"lm_head.weight": embedding, "model.embed_tokens.weight": None})
    elif name == "both":
        change_tensors(path, **{"lm_head.weight": embedding.clone()})
    elif name == "save_model":
        save_model(Tied(files.to_hf(weights, files.GQA)), str(path))
    assert len(load_file(path)) == (21 if name == "both" else 20)
    assert open_checkpoint(tmp_path).tied
    assert (logits(tmp_path) - reference.logits(weights, files.GQA, torch.arange(8)[None])).abs().max() < 1e-5


@pytest.mark.parametrize("shards", [1, 2])
def test_a_tied_head_comes_back_from_metas_files(tmp_path: Path, shards: int) -> None:
    weights = files.weights()
    weights["output.weight"] = weights["tok_embeddings.weight"]
    source = files.write_hf(tmp_path / "src", weights, tie_word_embeddings=True)
    convert(str(source), str(tmp_path / "meta"), "meta", shards=shards)
    convert(str(tmp_path / "meta"), str(tmp_path / "hf"), "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_file(tmp_path / "hf" / "model.safetensors")
    assert open_checkpoint(tmp_path / "meta").tied == (shards == 1)


# ------------------------------------------------------------------------- more than the model has


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("kind", ["meta", "hf", "training"])
def test_another_number_of_layers_than_the_files_hold(tmp_path: Path, kind: str, layers: int) -> None:
    if kind == "meta":
        change(files.write_meta(tmp_path, files.weights()) / "params.json", n_layers=layers)
    elif kind == "hf":
        files.write_hf(tmp_path, files.weights(), num_hidden_layers=layers)
    else:
        held = torch.load(files.write_training(tmp_path / "ckpt.pt", files.weights()))
        held["model_args"]["n_layers"] = layers
        torch.save(held, tmp_path / "ckpt.pt")
    with pytest.raises(LlamaError, match=f"the files hold 2 layers, but .* says n_layers={layers}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layers.0.attention_norm.bias", "a bias"),
        (
            "model.layers.0.self_attn.q_norm.weight",
            "a Llama model does not have: the keys 'model.layers.0.self_attn.q_norm.w",
        ),
        ("model.layers.0.self_attn.q_proj.qweight", "quantized weights"),
        ("vision.weight", "vision.weight"),
        ("layers.0.attention.wq.lora_A.weight", "a LoRA adapter"),
        ("layers.01.attention.wq.weight", "layers.01.attention.wq.weight"),
        ("freqs", "freqs"),
    ],
)
def test_a_surplus_weight_is_named(tmp_path: Path, name: str, words: str) -> None:
    meta = files.write_meta(tmp_path / "meta", files.weights())
    change_tensors(meta / "consolidated.00.pth", **{name: torch.ones(32)})
    hf = files.write_hf(tmp_path / "hf", files.weights())
    change_tensors(hf / "model.safetensors", **{name: torch.ones(32)})
    held = torch.load(files.write_training(tmp_path / "ckpt.pt", files.weights()))
    held["model"][name] = torch.ones(32)
    torch.save(held, tmp_path / "ckpt.pt")
    for path in (meta, hf, tmp_path / "ckpt.pt"):
        with pytest.raises(LlamaError, match=words) as error:
            open_checkpoint(path)
        assert name in str(error.value)


def test_what_is_no_weight_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    known = ("rope.freqs", "freqs_cos", "freqs_sin", "layers.0.attention.inner_attention.rope.freqs")
    meta = files.write_meta(tmp_path / "meta", files.weights())
    change_tensors(meta / "consolidated.00.pth", **dict.fromkeys((*known, "layers.1.attention.mask"), torch.ones(4)))
    hf = files.write_hf(tmp_path / "hf", files.weights())
    names = ("model.layers.1.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
    change_tensors(hf / "model.safetensors", **{name: torch.ones(4) for name in names})
    for path in (meta, hf):
        assert open_checkpoint(path).names() == list(files.weights())
    assert not caplog.records


@pytest.mark.parametrize(
    ("change_second", "words"),
    [
        ({"norm.weight": None}, "consolidated.01.pth: 1 weights of the other shards are missing: norm.weight"),
        ({"layers.1.attention.wq.bias": torch.ones(16)}, "consolidated.00.pth: 1 weights .*wq.bias"),
        ({"norm.weight": torch.zeros(32)}, "norm.weight is another than in .*: these are shards of two models"),
    ],
)
def test_shards_that_do_not_belong_together(tmp_path: Path, change_second: dict[str, Any], words: str) -> None:
    files.write_meta(tmp_path, files.weights(), shards=2)
    change_tensors(tmp_path / "consolidated.01.pth", **change_second)
    with pytest.raises(LlamaError, match=words):
        open_checkpoint(tmp_path)


def test_two_sets_of_shards_are_not_mixed(tmp_path: Path) -> None:
    weights, others = files.weights(), files.weights(seed=1)
    files.write_hf(tmp_path, weights, files=2)
    files.write_hf(tmp_path, others, files=3)  # its index is the one that is left
    assert torch.equal(open_checkpoint(tmp_path).read("norm.weight"), others["norm.weight"])
    save_file({"x": torch.ones(1)}, tmp_path / "model-old-00001-of-00002.safetensors")
    one = open_checkpoint(tmp_path / "model-00002-of-00002.safetensors")
    assert torch.equal(one.read("norm.weight"), weights["norm.weight"]) and one.shards == 2
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model-old-00001-of-00002.safetensors").unlink()
    with pytest.raises(LlamaError, match="files of weights of 2 sets .-of-00002, -of-00003."):
        open_checkpoint(tmp_path)


def test_a_weight_in_two_files(tmp_path: Path) -> None:
    files.write_hf(tmp_path, files.weights(), files=2)
    change_tensors(
        tmp_path / "model-00002-of-00002.safetensors", **load_file(tmp_path / "model-00001-of-00002.safetensors")
    )
    with pytest.raises(LlamaError, match=r"which model-00001-of-00002.safetensors holds too"):
        open_checkpoint(tmp_path)


THETA = {"rope_theta": 5e5}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": None, "rope_scaling": THETA},
        {"rope_theta": None, "rope_parameters": THETA},
        {"rope_theta": None, "rope_parameters": {**THETA, "rope_type": "default", "partial_rotary_factor": 1.0}},
        {"rope_theta": 500000, "rope_scaling": {**THETA, "type": "default", "factor": 1.0}, "rope_parameters": {}},
    ],
)
def test_rope_theta_in_every_spelling(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert open_checkpoint(files.write_hf(tmp_path, files.weights(), **changes)).params["rope_theta"] == 5e5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": THETA}, r"rope_theta=10000.0, rope_scaling.rope_theta=500000.0; expected one rope_theta"),
        ({"rope_parameters": THETA}, "rope_parameters.rope_theta=500000.0"),
        (
            {"rope_theta": None, "rope_parameters": THETA, "rope_scaling": {"rope_theta": 1e4}},
            "rope_scaling.rope_theta",
        ),
        ({"rope_scaling": {"factor": 8.0}}, "rope_scaling is"),
        ({"rope_scaling": {"rope_type": "default", "type": "linear"}}, "rope_scaling is"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters is"),
        ({"rope_parameters": {"full_attention": THETA}}, "rope_parameters is"),
        ({"rope_scaling": [1]}, "rope_scaling is"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "quantization is"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
    ],
)
def test_a_config_that_contradicts_itself_or_is_not_computed(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    files.write_hf(tmp_path, files.weights(), **changes)
    with pytest.raises(LlamaError, match=words):
        open_checkpoint(tmp_path)


# ---------------------------------------------------------------------------------- tensors of other kinds


class Short:
    """A view that is longer than its storage, as no program saves it."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape

    def __reduce__(self) -> tuple[Any, ...]:
        stored = torch.zeros(4).untyped_storage()
        typed = torch.storage.TypedStorage(wrap_storage=stored, dtype=torch.float32, _internal=True)
        return torch._utils._rebuild_tensor_v2, (typed, 0, self.shape, (self.shape[1], 1), False, OrderedDict())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: x.to_sparse(), "a sparse tensor"),
        (lambda x: x.to_sparse_csr(), "a sparse tensor"),
        (lambda x: torch.nested.nested_tensor([x[0], x[1]]), "a nested tensor"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "a quantized tensor"),
        (lambda x: x.to("meta"), "a meta tensor, which holds no values"),
        (lambda x: (x + 1j).conj(), "a complex tensor"),
        (lambda x: (x + 1j).conj().imag, "lazy negation or conjugation"),
        (lambda x: Short(tuple(x.shape)), "not readable as tensors|storage"),
        (lambda x: x.tolist(), "is of type list and no tensor"),
        (lambda x: 3, f"'{WQ}' is of type int and no tensor"),
    ],
)
@pytest.mark.parametrize("kind", ["meta", "hf", "training"])
def test_an_exotic_tensor_is_refused_by_name(
    tmp_path: Path, kind: str, make: Callable[[Tensor], Any], words: str
) -> None:
    weights = files.weights()
    bad = make(weights[WQ])
    if kind == "meta":
        change_tensors(files.write_meta(tmp_path, weights) / "consolidated.00.pth", **{WQ: bad})
    elif kind == "hf":
        name = files.hf_name(WQ)
        words = words.replace(WQ, name)
        change_tensors(files.write_hf(tmp_path, weights, bin_file=True) / "pytorch_model.bin", **{name: bad})
    else:
        files.write_training(tmp_path / "ckpt.pt", {**weights, WQ: bad})
        words = words.replace(WQ, f"_orig_mod.{WQ}")
    with pytest.raises(LlamaError, match=words) as error:
        open_checkpoint(tmp_path)
    assert "wq.weight" in str(error.value) or "q_proj.weight" in str(error.value) or isinstance(bad, Short)


DTENSOR = """
import sys, torch, torch.distributed as dist, torch.distributed.tensor as dt
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
path, name = sys.argv[1:]
held = torch.load(path)
torch.save({**held, name: dt.distribute_tensor(held[name], dt.DeviceMesh("cpu", [0]), [dt.Replicate()])}, path)
from llama.cli.info import info
info(path, check=True)
"""


@pytest.mark.slow
def test_a_dtensor_is_refused_in_a_process_that_knows_them(tmp_path: Path) -> None:
    path = files.write_meta(tmp_path, files.weights()) / "consolidated.00.pth"
    command = [sys.executable, "-W", "ignore", "-c", DTENSOR, str(path), WQ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "a tensor of a subclass (DTensor, torchao, ...)" in done.stderr, done.stderr
    with pytest.raises(LlamaError, match="DTensor|not readable as tensors"):
        open_checkpoint(path)  # and in this one, which may not


def test_parameters_are_plain_tensors(tmp_path: Path) -> None:
    weights = {name: nn.Parameter(tensor) for name, tensor in files.weights().items()}
    files.write_meta(tmp_path, {})
    torch.save(weights, tmp_path / "consolidated.00.pth")
    assert open_checkpoint(tmp_path).names() == list(weights)


# --------------------------------------------------------------------------- what is meant, and by what name


@pytest.mark.parametrize("stray", ["rng_state.pth", "model.pth", "optimizer.pth", "consolidated.00.pth"])
@pytest.mark.parametrize("bin_file", [False, True])
def test_a_pth_file_beside_hugging_face_weights(tmp_path: Path, stray: str, bin_file: bool) -> None:
    files.write_hf(tmp_path, files.weights(), bin_file=bin_file)
    torch.save({"cpu": torch.ones(3)}, tmp_path / stray)
    assert open_checkpoint(tmp_path).format == "hf"
    if stray != "consolidated.00.pth":
        (tmp_path / "params.json").write_text("{}")  # of another program
        assert open_checkpoint(tmp_path).format == "hf"


def test_a_named_file_is_that_file_alone(tmp_path: Path) -> None:
    weights = [files.weights(seed=seed) for seed in range(6)]
    files.write_meta(tmp_path, weights[0], shards=2)
    for epoch in (1, 2):
        torch.save(weights[epoch], tmp_path / f"epoch{epoch}.pth")
    files.write_hf(tmp_path, weights[3])
    files.write_hf(tmp_path, weights[4], bin_file=True)
    torch.save(weights[5], tmp_path / "best.pt")
    wanted = {
        "consolidated.01.pth": (0, "meta"),
        "params.json": (0, "meta"),
        "epoch1.pth": (1, "meta"),
        "epoch2.pth": (2, "meta"),
        "model.safetensors": (3, "hf"),
        "config.json": (3, "hf"),
        "pytorch_model.bin": (4, "hf"),
        "best.pt": (5, "meta"),
    }
    for name, (which, kind) in wanted.items():
        checkpoint = open_checkpoint(tmp_path / name)
        assert checkpoint.format == kind and torch.equal(checkpoint.read(WQ), weights[which][WQ]), name
        checkpoint.in_use = True  # as after a load: the same file is opened again
        model = Transformer(ModelArgs(**{**checkpoint.params, "vocab_size": 40, "max_seq_len": 24}))
        load(model, checkpoint)
        assert torch.equal(model.layers[0].attention.wq.weight, weights[which][WQ]), name


def test_a_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    files.write_meta(tmp_path / "llama", files.weights())
    assert open_checkpoint("~/llama").path == tmp_path / "llama"
    convert("~/llama", "~/hf", "hf")
    assert open_checkpoint(Path("~/hf")).format == "hf"
    with pytest.raises(LlamaError, match="ckpt_dir=None"):
        open_checkpoint(None)  # type: ignore[arg-type]


def _only(tmp_path: Path, name: str, content: Any) -> Path:
    path = tmp_path / name
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model.gguf", b"GGUF\x03\0\0\0" * 20, "GGUF"),
        ("ggml-model.bin", b"tjgg\x03\0\0\0" * 20, "GGML"),
        ("hf_model_0001_0.pt", {"model.embed_tokens.weight": torch.ones(2, 2)}, "torchtune|config.json"),
        (
            "model.pt",
            {"state_dict": {"a": torch.ones(2)}, "step": 3},
            "a training file, with weights within 'state_dict'",
        ),
        ("model.pt", {"layers.0.attn.q_proj.weight": torch.ones(2, 2)}, "torchtune"),
        ("model.pt", {"layers.0.self_attn.q_proj.weight": torch.ones(2, 2)}, "without `model.`"),
        ("model.pt", {"_orig_mod.model.layers.0.self_attn.q_proj.weight": torch.ones(2, 2)}, "behind a prefix"),
        ("adapter_model.safetensors", b"\1" * 9, "a LoRA adapter|config.json"),
        ("adapter_config.json", b"{}", "a LoRA adapter|no weights and no settings"),
        ("__0_0.distcp", b"PK" * 50, r"distributed checkpoints"),
        ("tokenizer.json", b"{}", "no checkpoint|no weights and no settings"),
    ],
)
def test_other_programs_files_are_named(tmp_path: Path, name: str, content: Any, words: str) -> None:
    folder = _only(tmp_path, name, content)
    for path in (folder, folder / name) if not name.endswith("distcp") else (folder,):
        with pytest.raises((LlamaError, FileNotFoundError), match=words):
            open_checkpoint(path)


def test_hugging_face_weights_in_a_pth_file(tmp_path: Path) -> None:
    tensors = load_file(files.write_hf(tmp_path, files.weights()) / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "model.pth")
    with pytest.raises(FileNotFoundError, match="config.json, but neither"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path / "model.pth").names() == list(files.weights())


def test_hugging_face_weights_without_their_prefix(tmp_path: Path) -> None:
    path = files.write_hf(tmp_path, files.weights()) / "model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}, path)
    with pytest.raises(LlamaError, match="without `model.`"):
        open_checkpoint(tmp_path)


def test_an_adapter_beside_its_base_model(tmp_path: Path) -> None:
    path = files.write_hf(tmp_path, files.weights()) / "model.safetensors"
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(LlamaError, match="a LoRA adapter"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(path).format == "hf"  # asked for by name


# --------------------------------------------------------------------------- what convert hands on

BESIDE = {
    "tokenizer.json": '{"model": {}}',
    "tokenizer_config.json": '{"chat_template": "{{ messages }}"}',
    "added_tokens.json": '{"<x>": 40}',
    "chat_template.jinja": "{{ messages }}",
    "generation_config.json": '{"eos_token_id": [31, 32], "temperature": 0.3}',
    "merges.txt": "a b",
    "README.md": "A model.",
    "LICENSE": "Terms.",
}


def test_files_beside_the_weights_are_copied_along(tmp_path: Path) -> None:
    ids = {"bos_token_id": 30, "eos_token_id": [31, 32], "pad_token_id": 33, "initializer_range": 0.5}
    source = files.write_hf(tmp_path / "src", files.weights(), max_position_embeddings=2048, **ids)
    for name, text in BESIDE.items():
        (source / name).write_text(text)
    for name in ("optimizer.pt", "training_args.bin", ".secret.json"):
        (source / name).write_text("not the model's")
    convert(str(source), str(tmp_path / "hf"), "hf", dtype="bfloat16")
    convert(str(source), str(tmp_path / "meta"), "meta")
    convert(str(tmp_path / "meta"), str(tmp_path / "back"), "hf", context=2048)
    for target in ("hf", "meta", "back"):
        for name, text in BESIDE.items():
            assert (tmp_path / target / name).read_text() == text, (target, name)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["max_position_embeddings"] == 2048 and {**config, **ids} == config
    assert json.loads((tmp_path / "back" / "config.json").read_text())["eos_token_id"] == [31, 32]
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert names == {*BESIDE, "config.json", "model.safetensors"}
    convert(str(source), str(tmp_path / "hf"), "hf", force=True)  # its own work, with the copied files
    (tmp_path / "hf" / "README.md").write_text("Notes of my own.")
    with pytest.raises(LlamaError, match="holds README.md, which is no part of a checkpoint"):
        convert(str(source), str(tmp_path / "hf"), "hf", force=True)


def test_ids_that_params_json_has_no_place_for(tmp_path: Path) -> None:
    source = files.write_hf(tmp_path / "src", files.weights(), eos_token_id=[31, 32], pad_token_id=33)
    convert(str(source), str(tmp_path / "meta"), "meta")
    convert(str(tmp_path / "meta"), str(tmp_path / "back"), "hf")
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (written["eos_token_id"], written["pad_token_id"]) == ([31, 32], 33)
    assert "temperature" not in json.loads((tmp_path / "back" / "generation_config.json").read_text())


def test_the_window_is_kept_or_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = files.write_meta(tmp_path / "src", files.weights())
    change(source / "params.json", max_seq_len=1024)
    convert(str(source), str(tmp_path / "hf"), "hf")
    assert open_checkpoint(tmp_path / "hf").context == 1024 and "longest window" not in caplog.text
    convert(str(tmp_path / "hf"), str(tmp_path / "meta"), "meta")
    assert "build with max_seq_len=1024, convert back with --context 1024" in caplog.text
    caplog.clear()
    convert(str(tmp_path / "meta"), str(tmp_path / "back"), "hf")
    assert "does not say its longest window: 4096 tokens are written; --context sets another" in caplog.text


def _trained(folder: Path, **options: Any) -> Path:
    """A small vocabulary of SentencePiece's, as Llama 2's is trained unless `options` say otherwise."""
    sentences = ["the cold river runs over old stones", "an old man walks home in the cold night"] * 10
    llama = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
    llama |= {"remove_extra_whitespaces": False, "hard_vocab_limit": False, "minloglevel": 2, "num_threads": 1}
    prefix = folder / "tokenizer"
    options = {"vocab_size": 290, "model_prefix": str(prefix), "sentence_iterator": iter(sentences), **llama, **options}
    sentencepiece.SentencePieceTrainer.Train(**options)
    return prefix.with_suffix(".model")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, None),
        ({"pad_id": 3}, "a pad piece"),
        ({"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}, r"the ids \(2, -1, 1\)"),
        ({"bos_id": 2, "eos_id": 1}, r"the ids \(0, 2, 1\)"),
        ({"user_defined_symbols": ["<end>"]}, r"user-defined or unused pieces \(<end>\)"),
        ({"control_symbols": ["[INST]"]}, r"control, .*\[INST\]"),
        ({"byte_fallback": False, "vocab_size": 40}, "no byte pieces"),
        ({"model_type": "unigram"}, "a unigram"),
        ({"model_type": "word"}, "a unigram, word"),
        ({"add_dummy_prefix": False}, "no space put before"),
        ({"remove_extra_whitespaces": True}, "spaces that are removed"),
        ({"normalization_rule_name": "nmt_nfkc"}, "characters that are normalized"),
        ({"treat_whitespace_as_suffix": True}, "spaces behind words"),
    ],
)
def test_tokenizers_that_the_c_programs_would_read_otherwise(
    tmp_path: Path, options: dict[str, Any], words: str | None
) -> None:
    source = files.write_meta(tmp_path / "src", files.weights())
    rows = len(read_vocabulary(_trained(source, **options)))
    weights = files.weights({**files.GQA, "vocab_size": rows})
    files.write_meta(source, weights)
    (source / "tokenizer.vocab").unlink()
    if words is None:
        convert(str(source), str(tmp_path / "c"), "llama2c")
        ours, theirs = (Tokenizer(str(path)) for path in (source / "tokenizer.model", tmp_path / "c" / "tokenizer.bin"))
        for text in ("the cold  night", "é", " old"):
            assert ours.encode(text, bos=True, eos=False) == theirs.encode(text, bos=True, eos=False)
        return
    with pytest.raises(LlamaError, match=words):
        convert(str(source), str(tmp_path / "c"), "llama2c")
    assert not (tmp_path / "c").exists()
    convert(str(source), str(tmp_path / "hf"), "hf")  # which tells its readers


def test_the_vocabularies_of_this_repository_suit_the_c_programs() -> None:
    for path in (GOLDEN / "mha" / "tokenizer.model", GOLDEN.parents[1] / "checkpoints" / "demo" / "tokenizer.model"):
        vocabulary = read_vocabulary(path)
        assert vocabulary is not None and not c_differences(vocabulary)
    proto = vocabulary.serialized_model_proto() + _field(3, _number(3, 0))  # of a field given twice, the last counts
    changed = sentencepiece.SentencePieceProcessor()
    changed.LoadFromSerializedProto(proto)
    assert c_differences(changed) == ["no space put before a text (add_dummy_prefix)"]


def test_a_vocabulary_of_another_size_and_another_bos(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = files.write_hf(tmp_path / "src", files.weights(), bos_token_id=30)
    shutil.copy(GOLDEN / "mha" / "tokenizer.model", source)
    with caplog.at_level(logging.WARNING, "llama"):
        convert(str(source), str(tmp_path / "c"), "llama2c")
    assert "has 360 pieces, but llama2.c's programs read 40" in caplog.text
    assert "begins a text with id 30; llama2.c's programs begin it with id 1" in caplog.text


def test_special_pieces_have_the_vocabularys_names(tmp_path: Path) -> None:
    source = files.write_meta(tmp_path / "src", files.weights())
    _trained(source, pad_id=3, pad_piece="<pad>", bos_piece="<begin>", eos_id=-1)
    (source / "tokenizer.vocab").unlink()
    convert(str(source), str(tmp_path / "hf"), "hf")
    config = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["pad_token"], "eos_token" in config) == ("<begin>", "<pad>", False)
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (written["bos_token_id"], written["pad_token_id"], "eos_token_id" in written) == (1, 3, False)
