"""config.json of Hugging Face's folders, read and written: the architecture, its sizes, and its rotary angles.

transformers has two spellings: up to 4 `rope_theta` and `rope_scaling` at the top, from 5 on `rope_parameters` alone.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import LlamaError
from ..rope import ROPE_TYPES, check_rope_scaling, named_scaling
from .checks import check_params
from .files import format_error
from .refusals import refuse_quantized
from .source import Source
from .table import BIASES, sizes

_RUN = ("llama", "mistral")  # architectures that compute what llama/model.py does; Mistral without its window
_OTHERS = (  # what others do besides, by the name without "ForCausalLM"
    (r"mixtral.*|.*moe.*|deepseek_?v[23].*|llama_?4.*", "a mixture of experts"),
    (r"qwen_?3.*|olmo_?[23].*", "which norms queries and keys"),
    (r"gemma.*", "with norms and activations of its own"),
    (r".*conditionalgeneration|mllama.*|llava.*", "which takes more than text"),
    (r"llamafor\w+|llamamodel", "whose head does not predict tokens"),
)
_WINDOW = "whose attention sees the last sliding_window tokens alone"
_PLAIN: dict[str, tuple[Any, ...]] = {  # fields that change the arithmetic, with the only values computed here
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1, None),
    "sliding_window": (None,),
}
_FIELDS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_eps",
    "head_dim": "head_dim",
    "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
}

# --------------------------------------------------------------------------------------------------- read


def read_config(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """ModelArgs fields from a config.json; LlamaError names the field that this library cannot follow."""
    config = {**_architecture(path, config), **config}
    refuse_quantized(path.parent, config)
    theta = _rope_theta(path, config)
    scaling = _rope_scaling(path, config)
    for name, allowed in _PLAIN.items():
        value = config.get(name, allowed[0])
        if value not in allowed:
            expected = f"{allowed[0]!r}: this library runs plain Llama models"
            raise format_error(path, f"{name} is {value!r:.60}", expected)
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"):
        if type(config.get(name)) is not int or not 0 < config[name] < 1 << 30:
            raise format_error(path, f"{name} is {config.get(name)!r:.60}", "an integer above 0")
    params = {ours: config[theirs] for theirs, ours in _FIELDS.items() if theirs in config}
    params.setdefault("norm_eps", 1e-6)  # transformers' default
    params["rope_theta"] = theta
    return check_params(path, params) | {"ffn_dim": config["intermediate_size"], "rope_scaling": scaling}


def _architecture(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """transformers' defaults of the architecture where they are not Llama's. `architectures` names it, else
    `model_type`; LlamaError for one that computes something else, whichever of the two says so.
    """
    named, kind = config.get("architectures"), config.get("model_type")
    if named and not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise format_error(path, f"architectures {named!r:.80}", "a list that names LlamaForCausalLM")
    names = [name.lower().removesuffix("forcausallm") for name in named or [str(kind)]]
    others = [*names, str(kind).lower()]
    reasons = [what for name in others for pattern, what in _OTHERS if re.fullmatch(pattern, name)]
    windowed = names == ["mistral"] and config.get("sliding_window", 4096) is not None
    if len(names) != 1 or names[0] not in _RUN or reasons or windowed:
        reason = f", {[*reasons, _WINDOW][0]}" if reasons or windowed else ""
        found = f"architectures {named!r:.80} and model_type {kind!r:.40}{reason}"
        raise format_error(path, found, "LlamaForCausalLM, or model_type 'llama'")
    return {"num_key_value_heads": 8} if names == ["mistral"] else {}


def _rope_theta(path: Path, config: dict[str, Any]) -> Any:
    """rope_theta, at the top (older files) or in rope_parameters or rope_scaling (newer ones); 10000.0 if nowhere."""
    stated = {"rope_theta": config.get("rope_theta")}
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        stated[f"{name}.rope_theta"] = rope.get("rope_theta") if isinstance(rope, dict) else None
    found = {name: value for name, value in stated.items() if value is not None}
    first: Any = next(iter(found.values()), 10000.0)
    if any(value != first for value in found.values()):
        listed = ", ".join(f"{name}={value!r:.40}" for name, value in found.items())
        raise format_error(path, listed, "one rope_theta")
    return first


def _rope_scaling(path: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """`rope_scaling` of ModelArgs, from either spelling; both may be there where they say the same."""
    stated: dict[str, dict[str, Any] | None] = {}
    for name in ("rope_parameters", "rope_scaling"):
        rope = {} if config.get(name) is None else config[name]
        if not isinstance(rope, dict):
            raise format_error(path, f"{name} is {rope!r:.80}", "an object with rope_type")
        said = {key: value for key, value in rope.items() if value is not None and key != "rope_theta"}
        if said:
            stated[name] = _one_scaling(path, config, name, said)
    found = list(stated.values())
    if len(found) == 2 and found[0] != found[1]:
        listed = ", ".join(f"{name} {config[name]!r:.80}" for name in stated)
        raise format_error(path, listed, "one scaling of the rotary angles")
    return found[0] if found else None


# What a rope_parameters that scales nothing may say besides rope_theta.
_DEFAULT_ROPE = {"rope_type": "default", "type": "default", "factor": 1, "partial_rotary_factor": 1}


def _one_scaling(path: Path, config: dict[str, Any], name: str, rope: dict[str, Any]) -> dict[str, Any] | None:
    kinds = {str(rope[key]) for key in ("rope_type", "type") if key in rope} or {"default"}
    if kinds == {"default"}:
        if not all(key in _DEFAULT_ROPE and value == _DEFAULT_ROPE[key] for key, value in rope.items()):
            raise format_error(path, f"{name} is {rope!r:.80}", "no scaling of the rotary angles, or type 'default'")
        return None
    if len(kinds) > 1 or kinds & {"divisors"} or not kinds <= set(ROPE_TYPES):
        found = f"{name} is {rope!r:.80}"
        raise format_error(path, found, "rope_type default, linear or llama3: others are not computed here")
    values = {key: value for key, value in rope.items() if key not in ("rope_type", "type")}
    if values.get("partial_rotary_factor") == 1:
        del values["partial_rotary_factor"]
    kind, window = kinds.pop(), "original_max_position_embeddings"
    if kind == "linear":
        values.pop(window, None)  # newer versions of transformers write it beside
    else:  # as transformers fills it in
        values.setdefault(window, config.get(window, config.get("max_position_embeddings")))
    try:
        scaling = check_rope_scaling({"rope_type": kind, **values})
    except LlamaError as error:
        raise LlamaError(f"{path}: {name}: {error}") from None
    return None if kind == "linear" and scaling["factor"] == 1 else scaling


# -------------------------------------------------------------------------------------------------- write


def obstacle(params: Mapping[str, Any]) -> str | None:
    """Why config.json cannot say these settings; None where it can."""
    scaling = named_scaling(params)
    if scaling is None or scaling["rope_type"] != "divisors":
        return None
    return "each rotary frequency is divided by a number of its own (GGUF's rope_freqs), which is none of its rules"


def config_of(source: Source) -> dict[str, Any]:
    """config.json's fields in the older spelling, which every version of transformers reads. LlamaError for a scaling
    of the rotary angles that it has no name for.
    """
    params, numbers, scaling = source.params, sizes(source.params), named_scaling(source.params)
    reason = obstacle(params)
    if reason is not None:
        raise LlamaError(f"{source.checkpoint.path}: {reason}: config.json cannot say that")
    if scaling is not None and scaling["rope_type"] == "llama3":
        window = "original_max_position_embeddings"
        scaling = {**scaling, window: int(scaling[window])}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": params["dim"],
        "intermediate_size": numbers["ffn"],
        "num_hidden_layers": params["n_layers"],
        "num_attention_heads": params["n_heads"],
        "num_key_value_heads": numbers["kv_heads"],
        "head_dim": numbers["head_dim"],
        "vocab_size": params["vocab_size"],
        "max_position_embeddings": source.window,
        "rms_norm_eps": params["norm_eps"],
        "rope_theta": params["rope_theta"],
        "rope_scaling": scaling,
        "hidden_act": "silu",
        **{flag: bool(params.get(flag)) for flag in BIASES},
        "tie_word_embeddings": source.checkpoint.tied,
        "torch_dtype": str(source.dtype("output.weight")).removeprefix("torch."),
    }
