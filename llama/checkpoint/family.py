"""What `info` says of a checkpoint beyond its sizes: its family, its rotary angles, what it can be converted to."""

import math
from typing import Any

from ..rope import named_scaling
from . import hf_config, llama2c, meta
from .checkpoint import Checkpoint
from .files import read_json
from .source import Source
from .table import BIASES, sizes


def family(checkpoint: Checkpoint) -> str:
    """The published family that vocabulary, rope_theta and scaling tell; fine-tunes have those of their base."""
    params, rows = checkpoint.params, checkpoint.shape("tok_embeddings.weight")[0]
    theta, scaling = params["rope_theta"], named_scaling(params)
    kind = _settings(checkpoint, "config.json").get("model_type") if checkpoint.format == "hf" else None
    if isinstance(kind, str) and kind.lower() != "llama":
        return f"other (model_type {kind!r:.40}), computed as a Llama"
    if 128_000 <= rows < 129_000 and theta == 500_000 and (scaling or {"rope_type": "llama3"})["rope_type"] == "llama3":
        return "Llama 3" if scaling is None else "Llama 3.2" if params["dim"] < 4096 else "Llama 3.1 to 3.3"
    if 32_000 <= rows < 33_000 and not any(params.get(flag) for flag in ("head_dim", *BIASES)):
        if rows == 32_016 or theta == 1_000_000:
            return "Code Llama"
        if theta == 10_000:
            return "Llama 1 or 2"
    return "other, of Llama's architecture"


def describe_scaling(checkpoint: Checkpoint) -> str:
    """How the rotary angles are scaled, and what says so."""
    scaling, named = checkpoint.params.get("rope_scaling"), named_scaling(checkpoint.params)
    if scaling is None:
        return "none"
    if named is None or named["rope_type"] == "divisors":
        return "none (the file's divisors are all 1)" if named is None else "by the file's own divisors"
    numbers = ", ".join(f"{name} {value:g}" for name, value in named.items() if name != "rope_type")
    return f"{named['rope_type']}, {numbers} ({_origin(checkpoint, scaling)})"


def _origin(checkpoint: Checkpoint, scaling: dict[str, Any]) -> str:
    if scaling["rope_type"] == "divisors":
        return "told by the file's divisors"
    if checkpoint.format != "meta":
        return "as the file says" if checkpoint.format != "hf" else "as config.json says"
    if _settings(checkpoint, "params.json").get("rope_scaling_factor") is not None:
        return "params.json's rope_scaling_factor"
    dim = checkpoint.params["dim"]
    sign = "<" if dim < meta.SMALL else ">="
    return f"params.json names no factor; dim {dim} {sign} {meta.SMALL} means {meta.rule_factor(dim):g}"


def _settings(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    path = checkpoint.folder / name
    return read_json(path, "the model's settings") if path.is_file() else {}


def describe_extras(checkpoint: Checkpoint) -> str:
    """What the model has besides a Llama's sizes: heads of another width, biases; "none" for a published shape."""
    params = checkpoint.params
    found = [f"head_dim {sizes(params)['head_dim']}"] if params.get("head_dim") else []
    found += [flag.replace("_", " ") for flag in BIASES if params.get(flag)]
    return ", ".join(found) or "none"


def describe_targets(checkpoint: Checkpoint) -> str:
    """Into which formats it can be converted, and why not into the others; on how many ranks it runs."""
    obstacles = {
        "meta": meta.obstacle(checkpoint.params),
        "hf": hf_config.obstacle(checkpoint.params),
        "llama2c": llama2c.obstacle(checkpoint.params),
    }
    possible = [name for name, obstacle in obstacles.items() if obstacle is None]
    refused = [f"{name} is refused: {obstacle}" for name, obstacle in obstacles.items() if obstacle is not None]
    return "; ".join([f"to {', '.join(possible) or 'nothing'}", *refused])


def describe_context(checkpoint: Checkpoint) -> str:
    """The longest window: as stored, or as the family has it."""
    if checkpoint.context is not None:
        return str(checkpoint.context)
    known = not family(checkpoint).startswith("other")
    return f"not stored; {Source(checkpoint).family_window} in this family" if known else "not stored"


def describe_ranks(checkpoint: Checkpoint) -> str:
    """The numbers of ranks that can share the model."""
    numbers = sizes(checkpoint.params)
    most = math.gcd(numbers["heads"], numbers["kv_heads"])
    return ", ".join(str(ranks) for ranks in range(1, most + 1) if most % ranks == 0)
