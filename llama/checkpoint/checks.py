"""What every reader checks: settings that a model can have, plain tensors, and every weight in its shape."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import LlamaError
from ..model import ModelArgs
from .checkpoint import Checkpoint, StoredWeight
from .files import first_few, format_error
from .refusals import EXPECTED, QUANTIZED_KEYS
from .table import BIASES, IGNORABLE, TABLE, all_names, sizes, weight_spec

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "head_dim")
PARAMS = (*INTEGERS, "ffn_dim_multiplier", "norm_eps", "rope_theta", *BIASES)  # keys of params.json that are fields
SCALED_ROPE = ("use_scaled_rope", "rope_scaling_factor")  # keys of params.json that meta.py makes `rope_scaling` of
SURPLUS = (  # what may stand among a Llama model's weights
    (
        r"(base_model\.model\.)?.*lora_[AB]\b",
        "a LoRA adapter: give its base model, and lora= with the adapter's folder",
    ),
    *QUANTIZED_KEYS,
    (r".*\.bias$", "a bias where no model of this architecture has one"),
)
FOREIGN = (
    *SURPLUS[:-1],
    (r".*_flat_param|.*_fsdp_wrapped_module", "FSDP's own layout: gather the full state dict first"),
    (
        r"model\.(layers\.\d+\.self_attn|embed_tokens)\.",
        "Hugging Face's names: it belongs into a folder with config.json",
    ),
    (
        r"(layers\.\d+\.self_attn|embed_tokens)\.",
        "Hugging Face's names without `model.` (of a LlamaModel without its head)",
    ),
    (r"\w+\.(.*\.)?(layers\.\d+\.self_attn|embed_tokens)\.", "Hugging Face's names behind a prefix (of a wrapper)"),
    (r"layers\.\d+\.(attn\.\w+_proj|sa_norm|mlp_norm)\.", "torchtune's names: let it save Meta's or Hugging Face's"),
    (r"(token_embd|blk\.\d+\.attn_\w+)\.", "GGUF's names (llama.cpp)"),
    (r"(transformer\.)?h\.\d+\.(attn\.c_attn|ln_1)", "GPT-2"),
    (r"transformer\.h\.\d+\.", "LitGPT's names"),
    (r"gpt_neox\.", "GPT-NeoX"),
    (r"(module|model|_orig_mod)\.(tok_embeddings|layers|output|norm)\.", "Meta's names behind a prefix (of a trainer)"),
    (r"layers\.\d+\.attention\.", "Meta's names"),
)


def describe_keys(names: Iterable[object], known: Sequence[tuple[str, str]] = FOREIGN) -> str:
    """What a set of keys looks like, in words: the first of the `known` patterns that one of them matches."""
    listed = [str(name) for name in names]
    for pattern, what in known:
        found = next((name for name in listed if re.match(pattern, name)), None)
        if found is not None:
            return f"keys such as {found!r:.100}, which is {what}"
    return f"the keys {first_few((repr(name)[:60] for name in listed), 4) or '(none)'}"


def describe_value(value: object) -> str:
    """What an unpickled file holds in place of weights by name, in words."""
    if not isinstance(value, Mapping):
        return f"a {type(value).__name__}"
    for name, inner in value.items():
        if isinstance(inner, Mapping) and any(isinstance(tensor, Tensor) for tensor in inner.values()):
            return f"a training file, with weights within {name!r:.60}: save these alone"
    return describe_keys(value)


def plain_tensors(path: Path, value: Any, expected: str) -> dict[str, Tensor]:
    """`value` as a dict of plain tensors by name; LlamaError for anything else."""
    tensors = (
        {}
        if not isinstance(value, Mapping)
        else {name: tensor for name, tensor in value.items() if isinstance(name, str) and isinstance(tensor, Tensor)}
    )
    if not tensors:
        raise format_error(path, describe_value(value), expected)
    for name, other in value.items():
        if name not in tensors:
            raise format_error(path, f"{name!r:.80} is of type {type(other).__name__} and no tensor", expected)
    return {name: tensor.detach() for name, tensor in tensors.items()}


def same_storage(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two weights are one: `torch.save` keeps what a tied head and its embedding share."""
    if one is None or other is None:
        return False
    places = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (one, other)]
    return places[0] == places[1]


def positive_int(value: Any) -> int | None:
    """`value` where it is an integer above 0, such as a context length; else None."""
    return value if type(value) is int and 0 < value < 1 << 40 else None


def check_params(path: Path, params: Mapping[str, Any]) -> dict[str, Any]:
    """`params` with ModelArgs' defaults, or LlamaError naming the key that is unknown or whose value is impossible."""
    unknown = sorted(set(params) - set(PARAMS))
    if unknown:
        raise format_error(path, f"unknown key {unknown[0]!r}", f"only {', '.join((*PARAMS, *SCALED_ROPE))}")
    given = {name: value for name, value in params.items() if value is not None}
    for name, value in given.items():
        if name in BIASES:
            if not isinstance(value, bool):
                raise format_error(path, f"{name}={value!r:.60}", "true or false")
            continue
        kinds = (int,) if name in INTEGERS else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool) or not -1 <= value < 1 << 40:
            kind = "an integer" if name in INTEGERS else "a number"
            raise format_error(path, f"{name}={value!r:.60}", f"{kind} of a possible size")
        if value <= 0 and not (name == "vocab_size" and value == -1):
            raise format_error(path, f"{name}={value!r}", "a number above 0")
    full = {name: getattr(ModelArgs, name) for name in (*PARAMS, "ffn_dim", "rope_scaling")} | given
    dim, heads, kv_heads = full["dim"], full["n_heads"], full["n_kv_heads"] or full["n_heads"]
    if full["head_dim"] is not None and (full["head_dim"] % 2 or heads % kv_heads):
        found = f"head_dim={full['head_dim']}, n_heads={heads}, n_kv_heads={kv_heads}"
        raise format_error(path, found, "an even head_dim, and n_heads a multiple of n_kv_heads")
    if full["head_dim"] is None and (dim % heads or (dim // heads) % 2 or heads % kv_heads):
        found = f"dim={dim}, n_heads={heads}, n_kv_heads={kv_heads}"
        raise format_error(path, found, "dim = n_heads x an even number, and n_heads a multiple of n_kv_heads")
    if full["head_dim"] == dim / heads:
        full["head_dim"] = None  # as published
    return full


def check_shapes(path: Path, stored: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """LlamaError naming the first few weights that are wanted and missing, stored in another shape, or surplus."""
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise LlamaError(f"{path}: {len(missing)} weights are missing: {first_few(missing)}")
    bad = [name for name, shape in wanted.items() if tuple(stored[name]) != tuple(shape)]
    if bad:
        shapes = (f"{name} is {tuple(stored[name])}, must be {tuple(wanted[name])}" for name in bad)
        raise LlamaError(f"{path}: {len(bad)} weights have the wrong shape: {first_few(shapes, 3)}")
    surplus = [name for name in stored if name not in wanted]
    if surplus:
        raise LlamaError(f"{path}: {len(surplus)} weights are not the model's: {first_few(surplus)}")


def check_weights(checkpoint: Checkpoint, source: str, unknown: Sequence[str] = ()) -> Checkpoint:
    """The checkpoint with its weights in order; `source` is where its sizes come from.

    A missing, misshapen or surplus weight is an error; so are names that are `unknown` and not ignorable.
    """
    path, layers, found = checkpoint.path, checkpoint.params["n_layers"], checkpoint.weights
    unknown = [name for name in unknown if not IGNORABLE.fullmatch(name)]
    held = len({int(n) for name in found for n in re.findall(r"^layers\.(\d{1,9})\.", name)})
    if held < 1 and "tok_embeddings.weight" not in found:
        raise format_error(path, describe_keys([*unknown, *found]), "the weights of a Llama model")
    if unknown:
        found_keys = f"{len(unknown)} weights that a Llama model does not have: {describe_keys(unknown, SURPLUS)}"
        raise format_error(path, found_keys, "nothing that would change the tokens and is not computed here")
    if held < layers:
        found_layers = f"{path}: the files hold {held} layers, but {source} says n_layers={layers}"
        raise LlamaError(f"{found_layers}: weights are missing, fetch the files again")
    if held > layers:
        raise LlamaError(
            f"{path}: the files hold {held} layers, but {source} says n_layers={layers}: correct one of them"
        )
    _count_biases(checkpoint)
    numbers = sizes(checkpoint.params)
    embedding = found["tok_embeddings.weight"].shape if "tok_embeddings.weight" in found else ()
    if len(embedding) == 2 and (numbers["vocab"] < 1 or checkpoint.format == "meta"):
        numbers["vocab"] = embedding[0]  # params.json's is overruled by the tokenizer's, which comes later
    wanted = {
        name: tuple(numbers[size] for size in weight_spec(name).shape) for name in all_names(layers, checkpoint.params)
    }
    for name in wanted:
        if name in found and found[name].dtype not in FLOATS:
            kinds = "float32, bfloat16 or float16, or scales with it as convert --quantize writes them"
            kinds = EXPECTED if "float8" in str(found[name].dtype) else kinds
            raise format_error(path, f"{name} is {found[name].dtype}", kinds)
    try:
        check_shapes(path, {name: weight.shape for name, weight in found.items()}, wanted)
    except LlamaError as error:
        known = f"sizes from {source}; {checkpoint.shards} file(s) of weights"
        raise LlamaError(f"{error} ({known}): fetch the files again") from None
    checkpoint.weights = {name: found[name] for name in wanted}
    return checkpoint


def _count_biases(checkpoint: Checkpoint) -> None:
    """Set the flags of the biases that the files hold. Zeros stand in for a kind that no layer has where another kind
    is there, as transformers does it: some models have them on q, k and v alone.
    """
    weights = checkpoint.weights
    for flag in BIASES:
        keys = {spec.key: spec for spec in TABLE if spec.flag == flag}
        layers = range(checkpoint.params["n_layers"])
        held = {key for key in keys if any(key.format(layer) in weights for layer in layers)}
        checkpoint.params[flag] = bool(held or checkpoint.params.get(flag))
        for key in keys.keys() - held if held else ():
            for name in map(key.format, layers):
                weight = weights.get(name.removesuffix("bias") + "weight")
                if weight is not None:  # else it is named as missing
                    size, dtype = weight.shape[:1], weight.dtype
                    weights[name] = StoredWeight([torch.zeros(size, dtype=dtype, device="cpu")])
