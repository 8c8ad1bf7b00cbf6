"""The readers: Meta's .pth shards, Hugging Face folders, llama2.c's files. Each checks what it meets."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import LlamaError
from ..model import ModelArgs
from ..quantization import GROUPS
from . import llama2c
from .containers import read_json, read_pth, read_safetensors, wrong
from .stored import (
    FLOATS,
    IGNORABLE,
    WEIGHT_SPECS,
    Checkpoint,
    Entry,
    all_names,
    compare,
    ffn_settings,
    hf_name,
    sizes,
    some,
    weight_spec,
)

FOREIGN = (
    (r"(base_model\.model\.)?.*lora_[AB]\b", "a LoRA adapter: merge it into its base model first"),
    (r".*\.(qweight|qzeros|g_idx|absmax|quant_map|SCB)$", "quantised weights (GPTQ, AWQ or bitsandbytes)"),
    (r".*_flat_param|.*_fsdp_wrapped_module", "FSDP's own layout: gather the full state dict first"),
    (r"model\.layers\.\d+\.self_attn\.", "Hugging Face's names: it belongs into a folder with config.json"),
    (r"(transformer\.)?h\.\d+\.(attn\.c_attn|ln_1)", "GPT-2"),
    (r"transformer\.h\.\d+\.", "LitGPT's names"),
    (r"gpt_neox\.", "GPT-NeoX"),
    (r"(module|model|_orig_mod)\.(tok_embeddings|layers|output|norm)\.", "Meta's names behind a prefix (of a trainer)"),
    (r"layers\.\d+\.attention\.", "Meta's names"),
)


def foreign(names: Iterable[object]) -> str:
    """What a set of keys looks like, in words."""
    listed = [str(name) for name in names]
    for pattern, what in FOREIGN:
        found = next((name for name in listed if re.match(pattern, name)), None)
        if found is not None:
            return f"keys such as {found!r:.100}, which is {what}"
    return f"the keys {some((repr(name)[:60] for name in listed), 4) or '(none)'}"


def _tensors(path: Path, value: Any, expected: str) -> dict[str, Tensor]:
    """`value` as a dict of plain tensors by name; LlamaError for anything else."""
    if not isinstance(value, Mapping):
        raise wrong(path, f"a {type(value).__name__}", expected)
    if not value or not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in value.items()):
        raise wrong(path, foreign(value), expected)
    for name, tensor in value.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise wrong(path, f"{name} is a {tensor.layout} tensor on {tensor.device}", "plain tensors")
    return {name: tensor.detach() for name, tensor in value.items()}


_MODEL_ARGS = {
    "dim": int,
    "n_layers": int,
    "n_heads": int,
    "n_kv_heads": int,
    "vocab_size": int,
    "multiple_of": int,
    "ffn_dim_multiplier": float,
    "norm_eps": float,
    "rope_theta": float,
}


def check_params(path: Path, params: Mapping[str, Any]) -> dict[str, Any]:
    """`params` with ModelArgs' defaults, or LlamaError naming the key that is unknown or no possible value."""
    unknown = sorted(set(params) - set(_MODEL_ARGS))
    if unknown:
        raise wrong(path, f"unknown key {unknown[0]!r}", f"only {', '.join(_MODEL_ARGS)}")
    given = {name: value for name, value in params.items() if value is not None}
    for name, value in given.items():
        kind = _MODEL_ARGS[name]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or (kind is int and not isinstance(value, int)) or not -1 <= value < 1 << 40:
            raise wrong(path, f"{name}={value!r:.60}", f"a {'whole ' if kind is int else ''}number of a possible size")
        if value <= 0 and not (name == "vocab_size" and value == -1):
            raise wrong(path, f"{name}={value!r}", "a number above 0")
    defaults = {name: getattr(ModelArgs, name) for name in _MODEL_ARGS}
    full = {**defaults, **given}
    heads, kv_heads = full["n_heads"], full["n_kv_heads"] or full["n_heads"]
    if full["dim"] % heads or (full["dim"] // heads) % 2 or heads % kv_heads:
        found = f"dim={full['dim']}, n_heads={heads}, n_kv_heads={kv_heads}"
        raise wrong(path, found, "dim = n_heads x an even number, and n_heads a multiple of n_kv_heads")
    return full


def _assemble(checkpoint: Checkpoint, found: dict[str, Entry], source: str) -> Checkpoint:
    """Put the entries in order; what is missing or misshapen is an error, what is too much is noted as unexpected."""
    path, layers = checkpoint.path, checkpoint.params["n_layers"]
    held = 1 + max((int(n) for name in found for n in re.findall(r"^layers\.(\d{1,9})\.", name)), default=-1)
    if held < 1 and "tok_embeddings.weight" not in found:
        raise wrong(path, foreign(found or checkpoint.unexpected), "the weights of a Llama model")
    if held < layers:
        raise LlamaError(
            f"{path}: the files hold {held} layers, but {source} says n_layers={layers}: weights are missing, "
            f"fetch the files again"
        )
    if "tok_embeddings.weight" not in found:
        raise LlamaError(f"{path}: 1 weight is missing: tok_embeddings.weight; fetch the files again")
    vocab = checkpoint.params["vocab_size"]
    embedding = found["tok_embeddings.weight"].shape
    rows = embedding[0] if len(embedding) == 2 and (vocab < 1 or checkpoint.format == "meta") else vocab
    numbers = sizes(checkpoint.params, rows)
    wanted = {name: tuple(numbers[size] for size in weight_spec(name).shape) for name in all_names(layers)}
    try:
        compare(path, {name: entry.shape for name, entry in found.items()}, wanted)
    except LlamaError as error:
        known = f"sizes from {source}; {checkpoint.shards} file(s) of weights"
        raise LlamaError(f"{error} ({known}): fetch the files again") from None
    for name in wanted:
        if found[name].scales is None and found[name].dtype not in FLOATS:
            raise wrong(path, f"{name} is {found[name].dtype}", "float32, bfloat16 or float16")
    checkpoint.entries = {name: found[name] for name in wanted}
    checkpoint.unexpected += [name for name in found if name not in wanted and not IGNORABLE.fullmatch(name)]
    return checkpoint


# --------------------------------------------------------------------------------------------------- Meta


def _last_number(path: Path) -> tuple[int, str]:
    return int((re.findall(r"\d{1,9}", path.stem) or ["-1"])[-1]), path.name


def meta_files(folder: Path) -> list[Path]:
    """The shards in order: consolidated.NN.pth, or, where a fine-tune has renamed them, every .pth."""
    named = [path for path in folder.glob("consolidated.*.pth") if re.fullmatch(r"consolidated\.\d{1,4}", path.stem)]
    if not named:
        return sorted(folder.glob("*.pth"), key=_last_number)
    numbers = {_last_number(path)[0] for path in named}
    absent = sorted(set(range(max(numbers) + 1)) - numbers)
    if absent:
        names = some(f"consolidated.{number:02d}.pth" for number in absent)
        raise FileNotFoundError(f"{folder.absolute()}: of {max(numbers) + 1} shards, {names} is missing")
    if len(numbers) < len(named):
        raise wrong(folder, f"{len(named)} shards with {len(numbers)} numbers", "one consolidated.NN.pth a number")
    return sorted(named, key=_last_number)


def _merge(path: Path, name: str, parts: list[Tensor], dim: int) -> Entry:
    """The entry of one key from its parts in all shards; how they lie beside each other is told by their shapes."""
    axis = weight_spec(name).axis
    if axis is None or len(parts) == 1:
        return Entry(parts[:1])
    if any(part.ndim != 2 or part.dtype != parts[0].dtype for part in parts):
        shapes = some(f"{part.dtype} {tuple(part.shape)}" for part in parts)
        raise wrong(path, f"{name} has parts {shapes}", "matrices of one type")
    if name == "tok_embeddings.weight" and all(part.shape[1] == dim for part in parts):
        axis = 0  # Llama 3 cuts the embedding by rows
    other = {part.shape[1 - axis] for part in parts}
    if len(other) > 1:
        raise wrong(path, f"{name} has parts {some(str(tuple(part.shape)) for part in parts)}", "parts that fit")
    return Entry(parts, axis)


CODES = (torch.int8, torch.uint8)  # of int8 and int4


def _take_scales(folder: Path, shards: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Take out X.scales, which `convert --quantize` writes beside the codes in X.weight, by the weight's key."""
    names = [name for name in shards[0] if name.endswith(".scales")]
    if names and len(shards) > 1:
        raise wrong(folder, f"quantized weights in {len(shards)} files", "one file")
    taken = {name.removesuffix("scales") + "weight": shards[0].pop(name) for name in names}
    expected = "int8 or int4 as convert --quantize writes"
    for name, scales in taken.items():
        codes = shards[0].get(name) if _split([name])[0] else None
        if codes is None or scales.shape != _scales_shape(codes, scales):
            what = "nothing" if codes is None else f"{codes.dtype} {tuple(codes.shape)}"
            raise wrong(folder, f"{name}: scales {scales.dtype} {tuple(scales.shape)} beside {what}", expected)
    bare = [name for name in _split(shards[0])[0] if shards[0][name].dtype in CODES and name not in taken]
    if bare:
        kinds = "float32, bfloat16 or float16, or scales beside it as convert --quantize writes them"
        raise wrong(folder, f"{some(bare)} is {shards[0][bare[0]].dtype}", kinds)
    if len({shards[0][name].dtype for name in taken}) > 1:
        raise wrong(folder, "weights in int8 and weights in int4", "one form")
    return taken


def _scales_shape(codes: Tensor, scales: Tensor) -> tuple[int, ...]:
    """The shape that scales beside these codes must have."""
    if codes.ndim != 2 or codes.dtype not in CODES or not scales.is_floating_point():
        return ()
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    if codes.dtype == torch.int8:
        return (rows,)
    groups = scales.shape[1] if scales.ndim == 3 else 0
    return (rows, groups, 2) if groups and columns % groups == 0 and columns // groups in GROUPS else ()


def open_meta(folder: Path) -> Checkpoint:
    """A folder of Meta's: params.json and one .pth for each rank it was cut for. Errors as in `open_checkpoint`."""
    params_path = folder / "params.json"
    if not params_path.exists():
        raise FileNotFoundError(f"{params_path.absolute()}: no such file; it holds the sizes of the model")
    files = meta_files(folder)
    if not files:
        raise FileNotFoundError(f"{folder.absolute()}: params.json, but no consolidated.NN.pth (or other .pth)")
    stored = read_json(params_path, "the model's settings as Meta writes them")
    context = stored.pop("max_seq_len", None)
    stored.pop("max_batch_size", None)
    params = check_params(params_path, stored)
    expected = "weights by Meta's keys (layers.0.attention.wq.weight, ...)"
    contents = [read_pth(file) for file in files]
    shards = [_tensors(file, value, expected) for file, (value, _) in zip(files, contents, strict=True)]
    for file, shard in zip(files, shards, strict=True):
        absent = [name for name in shards[0] if name not in shard and not IGNORABLE.fullmatch(name)]
        if absent:
            raise LlamaError(f"{file}: {len(absent)} weights of {files[0].name} are missing: {some(absent)}")
    scales = _take_scales(folder, shards)
    names = list(dict.fromkeys(name for shard in shards for name in shard))
    known, unexpected = _split(names)
    found = {
        name: _merge(folder, name, [shard[name] for shard in shards if name in shard], params["dim"]) for name in known
    }
    for name, values in scales.items():
        entry = found[name]
        entry.scales, entry.scheme = values, "int4" if entry.parts[0].dtype == torch.uint8 else "int8"
    context = context if type(context) is int and context > 0 else None
    checkpoint = Checkpoint(folder, "meta", params, {}, files, context, unexpected=unexpected)
    checkpoint.mapped = all(mapped for _, mapped in contents)
    return _assemble(checkpoint, found, "params.json")


def _split(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Names that the table knows, and the others that are not ignorable."""
    known: list[str] = []
    others: list[str] = []
    for name in names:
        (known if re.sub(r"^layers\.\d{1,9}\.", "layers.{}.", name) in WEIGHT_SPECS else others).append(name)
    return known, [name for name in others if not IGNORABLE.fullmatch(name)]


# ------------------------------------------------------------------------------------------- Hugging Face

# Fields of config.json that change the arithmetic, with the only values this library computes.
_HF_ONLY: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "rope_scaling": (None,),
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
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    if not isinstance(rope, dict) or not isinstance(scaling, dict):
        raise wrong(path, "rope_parameters or rope_scaling that is no object", "the rotary settings")
    for name, group in (("rope_parameters", rope), ("rope_scaling", scaling)):
        kind = group.get("rope_type", group.get("type", "default"))
        if kind != "default":
            raise wrong(path, f"{name} of type {kind!r:.40}", "no scaling of the rotary angles, or type 'default'")
    plain = {**config, "rope_scaling": None}
    for name, allowed in _HF_ONLY.items():
        value = plain.get(name, allowed[0])
        if value not in allowed:
            raise wrong(path, f"{name} is {value!r:.60}", f"{allowed[0]!r}: this library runs plain Llama models")
    architectures = config.get("architectures") or ["LlamaForCausalLM"]
    if [str(name).lower() for name in architectures] != ["llamaforcausallm"] or "model_type" not in config:
        raise wrong(path, f"architectures {architectures!r:.80}", "LlamaForCausalLM, and model_type 'llama'")
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"):
        if type(config.get(name)) is not int or not 0 < config[name] < 1 << 30:
            raise wrong(path, f"{name} is {config.get(name)!r:.60}", "a whole number above 0")
    params = {ours: config[theirs] for theirs, ours in _HF_FIELDS.items() if theirs in config}
    params.setdefault("norm_eps", 1e-6)  # transformers' default
    params["rope_theta"] = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    params |= ffn_settings(config["hidden_size"], config["intermediate_size"])
    full = check_params(path, params)
    if config.get("head_dim") not in (None, full["dim"] // full["n_heads"]):
        found = f"head_dim is {config['head_dim']!r:.40}"
        raise wrong(path, found, f"hidden_size / num_attention_heads = {full['dim'] // full['n_heads']}")
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
        raise wrong(index, f"weight_map is {weight_map!r:.60}", "an object: name of a weight to name of a file")
    names = sorted({str(name) for name in weight_map.values()})
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise wrong(index, f"the file name {outside[0]!r:.80}", "names of files beside it")
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise FileNotFoundError(f"{folder.absolute()}: {index.name} names {some(missing)}, which is missing")
    return [folder / name for name in names]


def _numbered(folder: Path, files: list[Path]) -> list[Path]:
    numbers = [[int(number) for number in re.findall(r"\d{1,9}", path.stem)[-2:]] for path in files]
    total = numbers[0][-1]
    missing = sorted(set(range(1, min(total, 100_000) + 1)) - {pair[0] for pair in numbers})
    if missing:
        raise FileNotFoundError(
            f"{folder.absolute()}: of {total} files of weights, {some(map(str, missing))} is missing"
        )
    return files


def open_hf(folder: Path) -> Checkpoint:
    """A Hugging Face folder of a plain Llama model: config.json, and safetensors or .bin files. Errors as above."""
    config_path = folder / "config.json"
    if not config_path.exists():
        raise FileNotFoundError(f"{config_path.absolute()}: no such file; it holds the sizes of the model")
    config = read_json(config_path, "a Hugging Face configuration")
    params, files = _hf_params(config_path, config), _hf_files(folder)
    expected = "weights by Hugging Face's names (model.layers.0.self_attn.q_proj.weight, ...)"
    stored: dict[str, Tensor] = {}
    all_mapped = True
    for file in files:
        value, mapped = read_safetensors(file) if file.suffix == ".safetensors" else read_pth(file)
        all_mapped &= mapped
        stored.update(_tensors(file, value, expected))
    biases = [name for name in stored if name.endswith(".bias")]
    if biases:
        raise wrong(
            folder, f"{len(biases)} biases ({some(biases, 2)})", "a model without biases (attention_bias, mlp_bias)"
        )
    found = {}
    heads = {"wq.weight": params["n_heads"], "wk.weight": params["n_kv_heads"] or params["n_heads"]}
    for name in all_names(min(params["n_layers"], len(stored))):
        if hf_name(name) in stored:
            tensor = stored.pop(hf_name(name))
            found[name] = Entry([tensor], heads=heads.get(name.split(".")[-2] + ".weight", 0))
    if config.get("tie_word_embeddings") is True and "tok_embeddings.weight" in found:
        found["output.weight"] = found["tok_embeddings.weight"]
    context = config.get("max_position_embeddings")
    context = context if type(context) is int and context > 0 else None
    unexpected = [name for name in stored if not IGNORABLE.fullmatch(name)]
    return _assemble(
        Checkpoint(folder, "hf", params, {}, files, context, None, unexpected, all_mapped), found, "config.json"
    )


# ---------------------------------------------------------------------------------------------- llama2.c


def open_llama2c(path: Path) -> Checkpoint:
    """A file of llama2.c, version 0, 1 or 2. Errors as above."""
    header = llama2c.read_header(path)
    params = check_params(
        path,
        {
            "dim": header.dim,
            "n_layers": header.n_layers,
            "n_heads": header.n_heads,
            "n_kv_heads": header.n_kv_heads,
            "vocab_size": header.vocab_size,
            **ffn_settings(header.dim, header.hidden_dim),
        },
    )
    found = {
        name: Entry([tensor], scales=scales) for name, (tensor, scales) in llama2c.read_tensors(path, header).items()
    }
    if header.shared:
        found["output.weight"] = found["tok_embeddings.weight"]
    checkpoint = Checkpoint(path, "llama2c", params, {}, [path], header.max_seq_len)
    return _assemble(checkpoint, found, "its header")


def open_training(path: Path, value: Mapping[str, Any], mapped: bool) -> Checkpoint:
    """llama2.c's training file: `model` (keys perhaps behind `_orig_mod.`) and `model_args`."""
    args, expected = value["model_args"], "llama2.c's model_args (dim, n_layers, n_heads, vocab_size, ...)"
    if not isinstance(args, Mapping):
        raise wrong(path, f"model_args is a {type(args).__name__}", expected)
    stored = {
        str(name): number for name, number in args.items() if name not in ("dropout", "hidden_dim", "max_seq_len")
    }
    params = check_params(path, stored)
    hidden = args.get("hidden_dim")
    if type(hidden) is int and hidden > 0:
        params |= ffn_settings(params["dim"], hidden)
    tensors = _tensors(path, value["model"], "weights by Meta's keys")
    tensors = {name.removeprefix("_orig_mod."): tensor for name, tensor in tensors.items()}
    known, unexpected = _split(tensors)
    unexpected = [name for name in unexpected if name not in ("freqs_cos", "freqs_sin")]
    found = {name: Entry([tensors[name]]) for name in known}
    embedding, output = tensors.get("tok_embeddings.weight"), tensors.get("output.weight")
    if embedding is not None and output is not None and embedding.data_ptr() == output.data_ptr():
        found["output.weight"] = found["tok_embeddings.weight"]
    context = args.get("max_seq_len")
    context = context if type(context) is int and context > 0 else None
    return _assemble(
        Checkpoint(path, "llama2c-train", params, {}, [path], context, None, unexpected, mapped), found, "model_args"
    )
