"""Meta's format, read and written: params.json, and consolidated.NN.pth for each rank that the model is sharded over.

`convert --quantize` writes one file in which X.weight holds a layer's quantized values and X.scales their scales.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import LlamaError
from ..model import ModelArgs, ffn_width
from ..quantization import weight_scheme
from ..rope import check_rope_scaling, llama3_scaling, named_scaling
from .checkpoint import Checkpoint, StoredWeight
from .checks import PARAMS, SCALED_ROPE, check_params, check_weights, plain_tensors, positive_int, same_storage
from .codecs import META_CODECS, Codec
from .companions import copy_companions, copy_tokenizer, special_ids, write_tokenizer_config
from .files import first_few, format_error, read_json, write_json
from .pth import read_pth
from .source import Source
from .table import IGNORABLE, split_known, weight_spec

# --------------------------------------------------------------------------------------------------- read


def read(folder: Path, file: Path | None = None) -> Checkpoint:
    """A folder of Meta's, or the weights of one named `file` in it. Errors as in `open_checkpoint`."""
    params_path = folder / "params.json"
    settings = read_json(params_path, "the model's settings as Meta writes them")
    files = [file] if file else shard_files(folder)
    if not files:
        raise FileNotFoundError(f"{folder.absolute()}: params.json, but no consolidated.NN.pth (or other .pth)")
    context = positive_int(settings.pop("max_seq_len", None))
    settings.pop("max_batch_size", None)
    scaling = _scaled_rope(params_path, settings)
    params = check_params(params_path, settings) | {"rope_scaling": scaling}
    expected = "weights by Meta's keys (layers.0.attention.wq.weight, ...)"
    contents = [read_pth(file) for file in files]
    shards = [plain_tensors(file, value, expected) for file, (value, _) in zip(files, contents, strict=True)]
    _check_shards(files, shards)
    quantized = _quantized_weights(folder, shards)
    known, unknown = split_known(dict.fromkeys(name for shard in shards for name in shard))
    weights = {name: StoredWeight([codec]) for name, codec in quantized.items()}
    for name in known:
        if name not in weights:
            parts = [shard[name] for shard in shards if name in shard]
            weights[name] = _sharded_weight(folder, name, parts, params["dim"])
    if len(shards) == 1 and same_storage(*(shards[0].get(name) for name in ("output.weight", "tok_embeddings.weight"))):
        weights["output.weight"] = weights["tok_embeddings.weight"]
    mapped = all(mapped for _, mapped in contents)
    checkpoint = Checkpoint(file or folder, "meta", params, weights, files, context, mapped)
    return check_weights(checkpoint, "params.json", unknown)


# Keys of models that Meta publishes in this format and that are not run here; null is as absent.
REFUSED = (
    (r"quantization_args|lora_args", "the 4-bit files of Llama 3.2: take the bfloat16 model with quantize='int4'"),
    (r"vision_.*", "a model that sees images; only text models are run here"),
    (r"moe_.*|.*experts?(_.*)?", "a mixture of experts; only dense models are run here"),
)


SMALL = 4096  # Llama 3.2's models are narrower than this


def rule_factor(dim: int) -> float:
    """By what `use_scaled_rope` divides long wavelengths where params.json names no factor: 32 in Llama 3.2's small
    models, 8 in all others (facts: rope scaling; the reference takes 8 for all, and degrades at long range).
    """
    return 32.0 if dim < SMALL else 8.0


def _scaled_rope(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Take use_scaled_rope and rope_scaling_factor out of params.json's settings; what ModelArgs.rope_scaling says
    then. LlamaError also for keys of models that are not run here.
    """
    for name, value in list(settings.items()):
        reason = next((what for pattern, what in REFUSED if re.fullmatch(pattern, name)), None)
        if reason is not None and value is not None:
            raise format_error(path, f"{name}, which is of {reason}", "a dense text model of plain weights")
        if reason is not None:
            del settings[name]
    scaled, factor = (settings.pop(name, None) for name in SCALED_ROPE)
    if scaled is not None and not isinstance(scaled, bool):
        raise format_error(path, f"use_scaled_rope={scaled!r:.60}", "true or false")
    dim = positive_int(settings.get("dim"))
    factor = rule_factor(dim or ModelArgs.dim) if factor is None else factor
    try:
        scaling = check_rope_scaling(llama3_scaling(factor))
    except LlamaError as error:
        raise format_error(path, f"rope_scaling_factor={factor!r:.60}", f"a factor ({error})") from None
    return scaling if scaled else None


def _check_shards(files: list[Path], shards: list[dict[str, Tensor]]) -> None:
    """LlamaError where one file lacks what another has, or where the norms, whole in each, are those of two models."""
    names = [
        name for name in dict.fromkeys(name for shard in shards for name in shard) if not IGNORABLE.fullmatch(name)
    ]
    for file, shard in zip(files, shards, strict=True):
        absent = [name for name in names if name not in shard]
        if absent:
            raise LlamaError(f"{file}: {len(absent)} weights of the other shards are missing: {first_few(absent)}")
    for name in split_known(names)[0]:
        first = shards[0][name]
        for file, shard in zip(files[1:], shards[1:], strict=True) if weight_spec(name).axis is None else ():
            if (
                first.shape != shard[name].shape
                or (first.float() - shard[name].float()).norm() > 0.01 * first.float().norm()
            ):
                raise LlamaError(f"{file}: {name} is another than in {files[0].name}: these are shards of two models")


def _last_number(path: Path) -> tuple[int, str]:
    return int((re.findall(r"\d{1,9}", path.stem) or ["-1"])[-1]), path.name


def is_shard(path: Path) -> bool:
    """Whether the file has the name of one of Meta's shards."""
    return re.fullmatch(r"consolidated\.\d{1,4}\.pth", path.name) is not None


def shard_files(folder: Path) -> list[Path]:
    """The shards in order: consolidated.NN.pth, or, where a fine-tune has renamed them, every .pth."""
    named = [path for path in folder.glob("consolidated.*.pth") if is_shard(path)]
    if not named:
        return sorted(folder.glob("*.pth"), key=_last_number)
    numbers = {_last_number(path)[0] for path in named}
    absent = sorted(set(range(max(numbers) + 1)) - numbers)
    if absent:
        names = first_few(f"consolidated.{number:02d}.pth" for number in absent)
        raise FileNotFoundError(f"{folder.absolute()}: of {max(numbers) + 1} shards, {names} is missing")
    if len(numbers) < len(named):
        raise format_error(folder, f"{len(named)} shards with {len(numbers)} numbers", "one consolidated.NN.pth each")
    return sorted(named, key=_last_number)


def _sharded_weight(path: Path, name: str, parts: list[Tensor], dim: int) -> StoredWeight:
    """One weight from its parts in all shards; how they lie side by side is told by their shapes."""
    axis = weight_spec(name).axis
    if axis is None or len(parts) == 1:
        return StoredWeight(parts[:1])
    if name == "tok_embeddings.weight" and all(part.shape[1:] == (dim,) for part in parts):
        axis = 0  # Llama 3 shards the embedding by rows
    sizes = len(weight_spec(name).shape)
    kinds = {(part.dtype, *(size for other, size in enumerate(part.shape) if other != axis)) for part in parts}
    if any(part.ndim != sizes for part in parts) or len(kinds) > 1:
        shapes = first_few(f"{part.dtype} {tuple(part.shape)}" for part in parts)
        raise format_error(path, f"{name} has parts {shapes}", "matrices of one type that fit side by side")
    return StoredWeight(parts, axis)


def _quantized_weights(folder: Path, shards: list[dict[str, Tensor]]) -> dict[str, Codec]:
    """Take X.scales out of the one shard that may hold them, and return each with its X.weight, by the weight's key."""
    found: dict[str, Codec] = {}
    for scales_name in [name for name in shards[0] if name.endswith(".scales")]:
        if len(shards) > 1:
            raise format_error(folder, f"quantized weights in {len(shards)} files", "one file")
        name = scales_name.removesuffix("scales") + "weight"
        scales, qvalues = shards[0].pop(scales_name), shards[0].get(name)
        codec = next((codec for codec in META_CODECS if qvalues is not None and codec.fits(qvalues, scales)), None)
        if qvalues is None or codec is None or not split_known([name])[0]:
            what = "nothing" if qvalues is None else f"{qvalues.dtype} {tuple(qvalues.shape)}"
            mismatch = f"{name}: scales {scales.dtype} {tuple(scales.shape)} with {what}"
            raise format_error(folder, mismatch, "int8 or int4 as convert --quantize writes")
        found[name] = codec(qvalues, scales)
    schemes = {str(codec.scheme) for name, codec in found.items() if name != "output.weight"}
    head = found["output.weight"].scheme if "output.weight" in found else None
    if len(schemes) > 1 or (head and schemes and head not in schemes | {weight_scheme("output.weight", *schemes)}):
        raise format_error(folder, "weights in int8 and weights in int4", "one scheme, beside a head in int8")
    return found


# -------------------------------------------------------------------------------------------------- write


def write(source: Source, folder: Path) -> None:
    """The shards, one after another (the memory of one file is needed), the tokenizer and, last, params.json."""
    checkpoint = source.checkpoint
    scaled_rope = _rope_settings(checkpoint)
    for shard in range(source.shards):
        tensors: dict[str, Tensor] = {}
        for name in checkpoint.names():
            if name == "output.weight" and checkpoint.tied and source.shards == 1 and not source.quantize:
                tensors[name] = tensors["tok_embeddings.weight"]  # torch.save writes it once
                continue
            weight = _compact(source.read(name, shard, source.shards))
            tensors |= _quantized(source, name, weight) if source.quantize else {name: weight}
        torch.save(tensors, folder / f"consolidated.{shard:02d}.pth")
    copy_tokenizer(checkpoint, folder)
    copy_companions(checkpoint, folder)
    if checkpoint.tokenizer_data is not None:
        write_tokenizer_config(checkpoint, folder, source.window)
    ids = special_ids(checkpoint) if checkpoint.format in ("hf", "gguf") else {}
    if ids and not (folder / "generation_config.json").exists():
        write_json(folder / "generation_config.json", ids)  # params.json has no place for them
    params = checkpoint.params
    settings = {name: params[name] for name in PARAMS}
    if params["ffn_dim"] is not None:
        settings |= width_settings(params["dim"], params["ffn_dim"])
    if settings["rope_theta"] == 10000.0:
        del settings["rope_theta"]  # the published package does not know this key
    settings = {name: value for name, value in settings.items() if value is not None and value is not False}
    write_json(folder / "params.json", settings | scaled_rope)


def obstacle(params: Mapping[str, Any]) -> str | None:
    """Why params.json cannot say these settings; None where it can."""
    scaling = named_scaling(params)
    if scaling is None or (scaling["rope_type"] == "llama3" and scaling == llama3_scaling(scaling["factor"])):
        return None
    listed = ", ".join(f"{name} {value!r:.40}" for name, value in scaling.items())
    return (
        f"its rotary angles are scaled by {listed}; params.json can say Llama 3's rule only "
        f"(low_freq_factor 1, high_freq_factor 4, original_max_position_embeddings 8192)"
    )


def _rope_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """How params.json says the scaling of the rotary angles; LlamaError where it cannot."""
    reason, scaling = obstacle(checkpoint.params), named_scaling(checkpoint.params)
    if reason is not None:
        raise LlamaError(f"{checkpoint.path}: {reason}: write to='hf'")
    if scaling is None:
        return {}
    usual = scaling["factor"] == rule_factor(checkpoint.params["dim"])
    return {"use_scaled_rope": True} | ({} if usual else {"rope_scaling_factor": scaling["factor"]})


def _compact(tensor: Tensor) -> Tensor:
    """The tensor with a storage that holds nothing else: torch.save writes whole storages."""
    if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize:
        return tensor
    return tensor.clone()


def _quantized(source: Source, name: str, weight: Tensor) -> dict[str, Tensor]:
    """X.weight and X.scales; the embedding and the norms as they are."""
    if weight.ndim < 2 or name == "tok_embeddings.weight":
        return {name: weight}
    scheme = weight_scheme(name, str(source.quantize))
    codec = next(codec for codec in META_CODECS if codec.scheme == scheme)
    stored = source.checkpoint.quantized_shard(name, scheme=scheme)
    try:
        qvalues, scales = stored.stored if stored else codec.quantize(weight)
    except ValueError as error:
        raise LlamaError(f"{source.checkpoint.path}: {name}: {error}") from None
    source.checkpoint.drop_pages(name)
    return {name: qvalues, name.removesuffix("weight") + "scales": scales}


def width_settings(dim: int, width: int) -> dict[str, Any]:
    """How params.json, which has no key for the FFN's width, says it: by two settings of the published rule."""
    for multiplier in (None, 1.3, 1.5, 1.0):  # those of published models, where they give this width
        for multiple_of in (256, 1024, 4096):
            if ffn_width(4 * dim, multiple_of, multiplier) == width:
                return {"multiple_of": multiple_of, "ffn_dim_multiplier": multiplier}
    # The rule rounds up to a multiple of the width itself: anything from 1 to the width gives just that. Where two
    # thirds of 4 dim are more, a multiplier scales them down (truncated to width - 1, they are rounded up again).
    unrounded = ffn_width(4 * dim, 1, None)
    return {"multiple_of": width, "ffn_dim_multiplier": None if unrounded <= width else width / unrounded}
