"""Hugging Face's format, read and written: config.json, *.safetensors (or pytorch_model*.bin), tokenizer files."""

import re
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from .checkpoint import Checkpoint, StoredWeight, pairs_to_halves
from .checks import check_params, check_weights, plain_tensors, positive_int
from .files import first_few, format_error, read_json, write_json
from .pth import read_pth
from .safetensors import read_safetensors, write_safetensors
from .source import Source, copy_tokenizer, logger, read_vocabulary
from .table import IGNORABLE, hf_name, meta_name, rotary_heads, sizes

FILE_SIZE = 5_000_000_000  # bytes of weights; above this the folder gets several files and an index
KEPT = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")

# --------------------------------------------------------------------------------------------------- read


def read(folder: Path) -> Checkpoint:
    """A Hugging Face folder of a plain Llama model. Errors as in `open_checkpoint`."""
    config_path = folder / "config.json"
    config = read_json(config_path, "a Hugging Face configuration")
    params, files = _hf_params(config_path, config), _hf_files(folder)
    expected = "weights by Hugging Face's names (model.layers.0.self_attn.q_proj.weight, ...)"
    tensors: dict[str, Tensor] = {}
    all_mapped = True
    for file in files:
        value, mapped = read_safetensors(file) if file.suffix == ".safetensors" else read_pth(file)
        all_mapped &= mapped
        tensors |= plain_tensors(file, value, expected)
    biases = [name for name in tensors if name.endswith(".bias")]
    if biases:
        found = f"{len(biases)} biases ({first_few(biases, 2)})"
        raise format_error(folder, found, "a model without biases (attention_bias, mlp_bias)")
    names = {name: meta_name(name) for name in tensors}
    weights = {
        ours: StoredWeight([tensors[theirs]], hf_heads=rotary_heads(ours, params))
        for theirs, ours in names.items()
        if ours is not None
    }
    if config.get("tie_word_embeddings") is True and "tok_embeddings.weight" in weights:
        weights["output.weight"] = weights["tok_embeddings.weight"]
    unexpected = [name for name, ours in names.items() if ours is None and not IGNORABLE.fullmatch(name)]
    context = positive_int(config.get("max_position_embeddings"))
    checkpoint = Checkpoint(folder, "hf", params, weights, files, context, unexpected, all_mapped)
    return check_weights(checkpoint, "config.json")


# Fields of config.json that change the arithmetic, with the only values this library computes.
_HF_ONLY: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, None),
    "sliding_window": (None,),
    "quantization_config": (None,),
}
_HF_FIELDS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_eps",
}


def _hf_params(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """ModelArgs fields from a config.json; LlamaError names the field that this library cannot follow."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name) or {}
        if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
            raise format_error(path, f"{name} is {rope!r:.80}", "no scaling of the rotary angles, or type 'default'")
    for name, allowed in _HF_ONLY.items():
        value = config.get(name, allowed[0])
        if value not in allowed:
            expected = f"{allowed[0]!r}: this library runs plain Llama models"
            raise format_error(path, f"{name} is {value!r:.60}", expected)
    architectures = config.get("architectures") or ["LlamaForCausalLM"]
    if not isinstance(architectures, list):
        raise format_error(path, f"architectures {architectures!r:.80}", "a list that names LlamaForCausalLM")
    if [str(name).lower() for name in architectures] != ["llamaforcausallm"] or "model_type" not in config:
        raise format_error(path, f"architectures {architectures!r:.80}", "LlamaForCausalLM, and model_type 'llama'")
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"):
        if type(config.get(name)) is not int or not 0 < config[name] < 1 << 30:
            raise format_error(path, f"{name} is {config.get(name)!r:.60}", "an integer above 0")
    params = {ours: config[theirs] for theirs, ours in _HF_FIELDS.items() if theirs in config}
    params.setdefault("norm_eps", 1e-6)  # transformers' default
    rope = config.get("rope_parameters") or {}  # of newer files
    params["rope_theta"] = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    full = check_params(path, params) | {"ffn_dim": config["intermediate_size"]}
    if config.get("head_dim") not in (None, full["dim"] // full["n_heads"]):
        found = f"head_dim is {config['head_dim']!r:.40}"
        raise format_error(path, found, f"hidden_size / num_attention_heads = {full['dim'] // full['n_heads']}")
    return full


def _hf_files(folder: Path) -> list[Path]:
    """The files of weights: named by an index, or one, or numbered; safetensors before PyTorch's."""
    for one, many in (("model.safetensors", "model-*-of-*.safetensors"), ("pytorch_model.bin", "pytorch_model-*.bin")):
        index = folder / f"{one}.index.json"
        if (folder / one).exists():
            return [folder / one]
        if index.exists():
            return _indexed(folder, index)
        files = sorted(folder.glob(many), key=lambda path: path.name)
        if files:
            return _numbered(folder, files)
    raise FileNotFoundError(f"{folder.absolute()}: config.json, but neither model*.safetensors nor pytorch_model*.bin")


def _indexed(folder: Path, index: Path) -> list[Path]:
    weight_map = read_json(index, "an index of weights").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise format_error(index, f"weight_map is {weight_map!r:.60}", "an object: name of a weight to name of a file")
    names = sorted({str(name) for name in weight_map.values()})
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise format_error(index, f"the file name {outside[0]!r:.80}", "names of files beside it")
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise FileNotFoundError(f"{folder.absolute()}: {index.name} names {first_few(missing)}, which is missing")
    return [folder / name for name in names]


def _numbered(folder: Path, files: list[Path]) -> list[Path]:
    numbers = [[int(number) for number in re.findall(r"\d{1,9}", path.stem)[-2:]] for path in files]
    if any(len(pair) < 2 for pair in numbers):
        raise format_error(folder, f"weights named {first_few(path.name for path in files)}", "numbered files")
    total = numbers[0][-1]
    missing = sorted(set(range(1, min(total, 100_000) + 1)) - {pair[0] for pair in numbers})
    if missing:
        listed = first_few(map(str, missing))
        raise FileNotFoundError(f"{folder.absolute()}: of {total} files of weights, {listed} is missing")
    return files


# -------------------------------------------------------------------------------------------------- write


def write(source: Source, folder: Path) -> None:
    """config.json, generation_config.json, safetensors (several with an index above 5 GB), the tokenizer's files."""
    checkpoint = source.checkpoint
    names = [name for name in checkpoint.names() if not (checkpoint.tied and name == "output.weight")]
    files = _group(source, names)
    weight_map: dict[str, str] = {}
    for index, group in enumerate(files, 1):
        file = "model.safetensors" if len(files) == 1 else f"model-{index:05d}-of-{len(files):05d}.safetensors"
        header = {hf_name(name): (checkpoint.shape(name), source.dtype(name)) for name in group}
        write_safetensors(folder / file, header, (_hf_weight(source, name) for name in group))
        weight_map |= dict.fromkeys(header, file)
    if len(files) > 1:
        index_json = {"metadata": {"total_size": source.size(names)}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index_json)
    ids = _write_tokenizer(checkpoint, folder, source.window)
    generation = {**ids, "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    write_json(folder / "generation_config.json", generation)
    write_json(folder / "config.json", {**_hf_config(source), **ids})


def _group(source: Source, names: list[str]) -> list[list[str]]:
    """Names in order, in as few groups as stay within a file's size."""
    groups: list[list[str]] = [[]]
    for name in names:
        if groups[-1] and source.size([*groups[-1], name]) > FILE_SIZE:
            groups.append([])
        groups[-1].append(name)
    return groups


def _hf_weight(source: Source, name: str) -> Tensor:
    weight, heads = source.read(name), rotary_heads(name, source.params)
    return pairs_to_halves(weight, heads) if heads else weight


def _hf_config(source: Source) -> dict[str, Any]:
    params, numbers = source.params, sizes(source.params)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": params["dim"],
        "intermediate_size": numbers["ffn"],
        "num_hidden_layers": params["n_layers"],
        "num_attention_heads": params["n_heads"],
        "num_key_value_heads": numbers["kv_heads"],
        "head_dim": params["dim"] // params["n_heads"],
        "vocab_size": params["vocab_size"],
        "max_position_embeddings": source.window,
        "rms_norm_eps": params["norm_eps"],
        "rope_theta": params["rope_theta"],
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": source.checkpoint.tied,
        "torch_dtype": str(source.dtype("output.weight")).removeprefix("torch."),
    }


def _write_tokenizer(checkpoint: Checkpoint, folder: Path, context: int) -> dict[str, Any]:
    """The tokenizer's files, new or as they stand in a Hugging Face folder; its BOS and EOS ids by config's names."""
    if checkpoint.format == "hf" and (checkpoint.path / "tokenizer_config.json").is_file():
        for name in KEPT:
            if (checkpoint.path / name).is_file():
                shutil.copyfile(checkpoint.path / name, folder / name)
    if checkpoint.tokenizer_path is not None or not (folder / "tokenizer.json").exists():
        copy_tokenizer(checkpoint, folder)
    if checkpoint.format == "hf":
        config = read_json(checkpoint.path / "config.json", "a Hugging Face configuration")
        ids = {name: config[name] for name in ("bos_token_id", "eos_token_id") if config.get(name) is not None}
        if ids:
            return ids
    vocabulary = read_vocabulary(checkpoint.tokenizer_path)
    if vocabulary is None:
        logger.warning("%s: no SentencePiece vocabulary, so no BOS and EOS ids are written", checkpoint.path)
        return {}
    if not (folder / "tokenizer_config.json").exists():
        special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        config = {"tokenizer_class": "LlamaTokenizer", "model_max_length": context, "legacy": False, **special}
        config |= {"add_bos_token": True, "add_eos_token": False, "clean_up_tokenization_spaces": False}
        write_json(folder / "tokenizer_config.json", config)
        write_json(folder / "special_tokens_map.json", special)
    return {"bos_token_id": vocabulary.bos_id(), "eos_token_id": vocabulary.eos_id()}
