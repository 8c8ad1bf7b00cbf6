"""Hugging Face's format, read and written: config.json, *.safetensors (or pytorch_model*.bin), tokenizer files."""

import logging
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint import Checkpoint, StoredWeight, pairs_to_halves
from .checks import check_weights, plain_tensors, positive_int
from .codecs import Codec
from .companions import copy_companions, copy_tokenizer, special_ids, write_tokenizer_config
from .files import first_few, format_error, read_json, write_json
from .hf_config import config_of, read_config
from .pth import read_pth
from .safetensors import read_safetensors, write_safetensors
from .source import Source
from .table import BIASES, IGNORABLE, hf_name, meta_name, rotary_heads
from .tokenizers import write_tokenizer_json

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
    params, files = read_config(config_path, config), _named_files(file) if file else _hf_files(folder)
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
    check_weights(checkpoint, "config.json", [name for name, ours in names.items() if ours is None])
    for flag in BIASES:
        if params[flag] and config.get(flag) is False:
            logger.warning("%s: the files hold biases, which are used; %s false is taken back", config_path, flag)
    return checkpoint


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
    checkpoint, fields = source.checkpoint, config_of(source)
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
    write_tokenizer_json(checkpoint, folder, source.window)
    if checkpoint.tokenizer_path is not None or not (folder / "tokenizer.json").exists():
        copy_tokenizer(checkpoint, folder)
    write_tokenizer_config(checkpoint, folder, source.window)
    ids = special_ids(checkpoint)
    if not ids:
        logger.warning("%s: no vocabulary that can be read, so no BOS and EOS ids are written", checkpoint.path)
    if not (folder / "generation_config.json").exists():
        sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.9} if checkpoint.format != "hf" else {}
        write_json(folder / "generation_config.json", {**ids, **sampling})
    write_json(folder / "config.json", {**_kept_config(checkpoint), **fields, **ids})


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
    """A Hugging Face folder's config.json, but for other spellings of what `config_of` writes, and code of its own."""
    if checkpoint.format != "hf":
        return {}
    config = read_json(checkpoint.folder / "config.json", "a Hugging Face configuration")
    return {name: value for name, value in config.items() if name not in ("rope_parameters", "dtype", "auto_map")}
