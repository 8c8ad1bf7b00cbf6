"""Hugging Face's format, read and written: config.json, *.safetensors (or pytorch_model*.bin), tokenizer files."""

import logging
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint import Checkpoint, StoredWeight, pairs_to_halves
from .checks import check_params, check_weights, plain_tensors, positive_int
from .codecs import Codec
from .companions import copy_companions, copy_tokenizer, read_vocabulary, special_ids
from .files import first_few, format_error, read_json, write_json
from .pth import read_pth
from .refusals import refuse_quantized
from .safetensors import read_safetensors, write_safetensors
from .source import Source
from .table import IGNORABLE, hf_name, meta_name, rotary_heads, sizes

logger = logging.getLogger("llama")
_NUMBERED = re.compile(r"-(\d{1,9})-of-(\d{1,9})$")
FILE_SIZE = 5_000_000_000  # bytes of weights; above this the folder gets several files and an index

# --------------------------------------------------------------------------------------------------- read


def read(folder: Path, file: Path | None = None) -> Checkpoint:
    """A Hugging Face folder of a plain Llama model, or the weights of one named `file` in it (or of its numbered set).

    Errors as in `open_checkpoint`.
    """
    config_path = folder / "config.json"
    config = read_json(config_path, "a Hugging Face configuration")
    refuse_quantized(folder, config)
    params, files = _hf_params(config_path, config), _named_files(file) if file else _hf_files(folder)
    tensors, mapped = _hf_tensors(files)
    names = {name: meta_name(name) for name in tensors}
    weights = {
        ours: StoredWeight([tensors[theirs]], hf_heads=rotary_heads(ours, params))
        for theirs, ours in names.items()
        if ours is not None
    }
    _tie(config_path, config, weights)
    context = positive_int(config.get("max_position_embeddings"))
    checkpoint = Checkpoint(file or folder, "hf", params, weights, files, context, mapped)
    return check_weights(checkpoint, "config.json", [name for name, ours in names.items() if ours is None])


def _hf_tensors(files: list[Path]) -> tuple[dict[str, Tensor], bool]:
    """Every tensor of the files, and whether all are mapped. LlamaError where two files hold the same weight."""
    expected = "weights by Hugging Face's names (model.layers.0.self_attn.q_proj.weight, ...)"
    tensors: dict[str, Tensor] = {}
    holder: dict[str, Path] = {}
    all_mapped = True
    for file in files:
        value, mapped = read_safetensors(file) if file.suffix == ".safetensors" else read_pth(file)
        found = plain_tensors(file, value, expected)
        twice = next((name for name in found if name in holder and not IGNORABLE.fullmatch(name)), None)
        if twice is not None:
            raise format_error(file, f"{twice}, which {holder[twice].name} holds too", "every weight in one file")
        holder |= dict.fromkeys(found, file)
        tensors |= found
        all_mapped &= mapped
    return tensors, all_mapped


def _tie(path: Path, config: dict[str, Any], weights: dict[str, StoredWeight]) -> None:
    """Give a tied head its embedding, whichever of the two is stored; one of its own is used all the same."""
    tied = config.get("tie_word_embeddings")
    if tied not in (True, False, None):
        raise format_error(path, f"tie_word_embeddings is {tied!r:.60}", "true or false")
    head, embedding = (weights.get(name) for name in ("output.weight", "tok_embeddings.weight"))
    stored = embedding or head
    if tied and stored and (head is None or embedding is None or _same_values(head.parts[0], embedding.parts[0])):
        weights["output.weight"] = weights["tok_embeddings.weight"] = stored


def _same_values(one: Tensor | Codec, other: Tensor | Codec) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    if one.ndim != 2 or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one[:1], other[:1]) and torch.equal(one, other)  # the first row tells most others apart


# Fields of config.json that change the arithmetic, with the only values this library computes.
_HF_ONLY: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, None),
    "sliding_window": (None,),
    "quantization_config": (None,),
    "quantization": (None,),  # MLX's
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
    theta = _rope_theta(path, config)
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
    params["rope_theta"] = theta
    full = check_params(path, params) | {"ffn_dim": config["intermediate_size"]}
    if config.get("head_dim") not in (None, full["dim"] // full["n_heads"]):
        found = f"head_dim is {config['head_dim']!r:.40}"
        raise format_error(path, found, f"hidden_size / num_attention_heads = {full['dim'] // full['n_heads']}")
    return full


# What rope_parameters and rope_scaling may say besides rope_theta: nothing that scales the angles.
_PLAIN_ROPE = {"rope_type": "default", "type": "default", "factor": 1, "partial_rotary_factor": 1}


def _rope_theta(path: Path, config: dict[str, Any]) -> Any:
    """rope_theta, at the top (older files) or in rope_parameters or rope_scaling (newer ones); 10000.0 if nowhere."""
    stated = {"rope_theta": config.get("rope_theta")}
    for name in ("rope_parameters", "rope_scaling"):
        rope = {} if config.get(name) is None else config[name]
        plain = isinstance(rope, dict) and all(
            value is None or key == "rope_theta" or (key in _PLAIN_ROPE and value == _PLAIN_ROPE[key])
            for key, value in rope.items()
        )
        if not plain:
            raise format_error(path, f"{name} is {rope!r:.80}", "no scaling of the rotary angles, or type 'default'")
        stated[f"{name}.rope_theta"] = rope.get("rope_theta")
    found = {name: value for name, value in stated.items() if value is not None}
    first: Any = next(iter(found.values()), 10000.0)
    if any(value != first for value in found.values()):
        listed = ", ".join(f"{name}={value!r:.40}" for name, value in found.items())
        raise format_error(path, listed, "one rope_theta")
    return first


def _hf_files(folder: Path) -> list[Path]:
    """The files of weights: named by an index, or one, or numbered; safetensors before PyTorch's."""
    for one, many in (("model.safetensors", "model-*-of-*.safetensors"), ("pytorch_model.bin", "pytorch_model-*.bin")):
        index = folder / f"{one}.index.json"
        if (folder / one).exists():
            return [folder / one]
        if index.exists():
            return _indexed(folder, index)
        files = [path for path in sorted(folder.glob(many), key=lambda path: path.name) if _NUMBERED.search(path.stem)]
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
        raise format_error(index, f"the file name {outside[0]!r:.80}", "names of files in the same folder")
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise FileNotFoundError(f"{folder.absolute()}: {index.name} names {first_few(missing)}, which is missing")
    return [folder / name for name in names]


def _numbered(folder: Path, files: list[Path]) -> list[Path]:
    """The files of one whole set NAME-0000N-of-0000M."""
    places = [[int(number) for number in _NUMBERED.findall(path.stem)[0]] for path in files]
    totals = sorted({total for _, total in places})
    if len(totals) > 1:
        found = f"files of weights of {len(totals)} sets ({', '.join(f'-of-{total:05d}' for total in totals)})"
        raise format_error(folder, found, "one set, or an index that says which: remove the other, or name a file")
    missing = sorted(set(range(1, min(totals[0], 100_000) + 1)) - {number for number, _ in places})
    if missing:
        listed = first_few(map(str, missing))
        raise FileNotFoundError(f"{folder.absolute()}: of {totals[0]} files of weights, {listed} is missing")
    return files


def _named_files(file: Path) -> list[Path]:
    """A file that was asked for by name: that alone, or the set that its number belongs to; an index's files."""
    if file.name.endswith(".index.json"):
        return _indexed(file.parent, file)
    number = _NUMBERED.search(file.stem)
    if number is None:
        return [file]
    others = [(path, _NUMBERED.search(path.stem)) for path in sorted(file.parent.glob(f"*{file.suffix}"))]
    same_set = (file.stem[: number.start()], int(number[2]))
    return _numbered(file.parent, [p for p, n in others if n and (p.stem[: n.start()], int(n[2])) == same_set])


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
    copy_companions(checkpoint, folder)
    if checkpoint.tokenizer_path is not None or not (folder / "tokenizer.json").exists():
        copy_tokenizer(checkpoint, folder)
    _write_tokenizer_config(checkpoint, folder, source.window)
    ids = special_ids(checkpoint)
    if not ids:
        logger.warning("%s: no SentencePiece vocabulary, so no BOS and EOS ids are written", checkpoint.path)
    if not (folder / "generation_config.json").exists():
        sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.9} if checkpoint.format != "hf" else {}
        write_json(folder / "generation_config.json", {**ids, **sampling})
    write_json(folder / "config.json", {**_kept_config(checkpoint), **_hf_config(source), **ids})


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


def _kept_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """A Hugging Face folder's config.json, but for other spellings of what `_hf_config` writes, and code of its own."""
    if checkpoint.format != "hf":
        return {}
    config = read_json(checkpoint.folder / "config.json", "a Hugging Face configuration")
    return {name: value for name, value in config.items() if name not in ("rope_parameters", "dtype", "auto_map")}


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


def _write_tokenizer_config(checkpoint: Checkpoint, folder: Path, context: int) -> None:
    """What transformers needs beside tokenizer.model, where the source brought nothing of the kind."""
    vocabulary = read_vocabulary(checkpoint.tokenizer_path)
    if vocabulary is None or (folder / "tokenizer_config.json").exists():
        return
    ids = {
        "bos": vocabulary.bos_id(),
        "eos": vocabulary.eos_id(),
        "unk": vocabulary.unk_id(),
        "pad": vocabulary.pad_id(),
    }
    special = {f"{name}_token": vocabulary.id_to_piece(token) for name, token in ids.items() if token >= 0}
    config = {"tokenizer_class": "LlamaTokenizer", "model_max_length": context, "legacy": False, **special}
    config |= {"add_bos_token": True, "add_eos_token": False, "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", config)
    if not (folder / "special_tokens_map.json").exists():
        write_json(folder / "special_tokens_map.json", special)
