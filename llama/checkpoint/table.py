"""The one table of a Llama model's weights: names, shapes, and how they are sharded."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..model import ffn_width


class WeightSpec(NamedTuple):
    """One kind of weight: its key in Meta's files and in Hugging Face's, its shape, and its sharding axis."""

    key: str  # with {} for the layer's index
    hf: str
    axis: int | None  # None: every rank and every file holds it whole
    shape: tuple[str, ...]  # names of `sizes`
    heads: str | None = None  # of wq and wk, whose rows Hugging Face orders otherwise: the size that counts their heads
    flag: str | None = None  # of ModelArgs: only models that set it have this weight


def _linear(key: str, hf: str, axis: int, shape: tuple[str, str], heads: str | None, flag: str) -> list[WeightSpec]:
    """The weight of a layer's matrix and its bias, which is as long as the output, and sharded where that is."""
    key, hf = f"layers.{{}}.{key}", f"model.layers.{{}}.{hf}"
    bias = WeightSpec(f"{key}.bias", f"{hf}.bias", 0 if axis == 0 else None, shape[:1], heads, flag)
    return [WeightSpec(f"{key}.weight", f"{hf}.weight", axis, shape, heads), bias]


TABLE = (
    WeightSpec("tok_embeddings.weight", "model.embed_tokens.weight", 1, ("vocab", "dim")),
    *_linear("attention.wq", "self_attn.q_proj", 0, ("q", "dim"), "heads", "attention_bias"),
    *_linear("attention.wk", "self_attn.k_proj", 0, ("kv", "dim"), "kv_heads", "attention_bias"),
    *_linear("attention.wv", "self_attn.v_proj", 0, ("kv", "dim"), None, "attention_bias"),
    *_linear("attention.wo", "self_attn.o_proj", 1, ("dim", "q"), None, "attention_bias"),
    *_linear("feed_forward.w1", "mlp.gate_proj", 0, ("ffn", "dim"), None, "mlp_bias"),
    *_linear("feed_forward.w2", "mlp.down_proj", 1, ("dim", "ffn"), None, "mlp_bias"),
    *_linear("feed_forward.w3", "mlp.up_proj", 0, ("ffn", "dim"), None, "mlp_bias"),
    WeightSpec("layers.{}.attention_norm.weight", "model.layers.{}.input_layernorm.weight", None, ("dim",)),
    WeightSpec("layers.{}.ffn_norm.weight", "model.layers.{}.post_attention_layernorm.weight", None, ("dim",)),
    WeightSpec("norm.weight", "model.norm.weight", None, ("dim",)),
    WeightSpec("output.weight", "lm_head.weight", 0, ("vocab", "dim")),
)
BIASES = ("attention_bias", "mlp_bias")  # the flags
WEIGHT_SPECS = {spec.key: spec for spec in TABLE}
_HF_SPECS = {spec.hf: spec for spec in TABLE}
# What trainers save beside the weights and every reader computes anew: tables of rotary angles, masks.
IGNORABLE = re.compile(
    r"rope\.freqs|freqs_(cos|sin|cis)|layers\.\d+\.attention\.(inner_attention\.rope\.freqs|mask)"
    r"|(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)"
)


def _layer(name: str) -> tuple[str, list[str]]:
    """The name with {} for the layer's index, and the index where there is one."""
    return re.sub(r"\blayers\.\d{1,9}\.", "layers.{}.", name, count=1), re.findall(r"\blayers\.(\d{1,9})\.", name)[:1]


def weight_spec(name: str) -> WeightSpec:
    """The table's row for a key of Meta's; KeyError where there is none."""
    return WEIGHT_SPECS[_layer(name)[0]]


def hf_name(name: str) -> str:
    """Hugging Face's name for a key of Meta's."""
    return weight_spec(name).hf.format(*_layer(name)[1])


def meta_name(hf: str) -> str | None:
    """Meta's key for a name of Hugging Face's; None where there is none."""
    pattern, index = _layer(hf)
    return _HF_SPECS[pattern].key.format(*index) if pattern in _HF_SPECS else None


def split_known(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Meta's keys, and the other names."""
    known = {name: _layer(name)[0] in WEIGHT_SPECS for name in names}
    return [name for name in known if known[name]], [name for name in known if not known[name]]


def specs(params: Mapping[str, Any]) -> list[WeightSpec]:
    """The rows that a model with these settings has; `params` need hold no more than the flags that are set."""
    return [spec for spec in TABLE if spec.flag is None or params.get(spec.flag)]


def all_names(n_layers: int, flags: Mapping[str, Any] = {}) -> list[str]:
    """Meta's keys in the order of the model's `state_dict`; `flags` as in `specs`."""
    rows = specs(flags)
    first, layer, last = rows[:1], [spec for spec in rows if "{}" in spec.key], rows[-2:]
    layers = [spec.key.format(index) for index in range(n_layers) for spec in layer]
    return [*(spec.key for spec in first), *layers, *(spec.key for spec in last)]


def sizes(params: Mapping[str, Any]) -> dict[str, int]:
    """What the names in the table stand for, from ModelArgs' fields; `vocab` as there, -1 where it is not known."""
    dim, heads, vocab = params["dim"], params["n_heads"], params["vocab_size"]
    kv_heads = params.get("n_kv_heads") or heads
    head_dim = params.get("head_dim") or dim // heads
    ffn = ffn_width(4 * dim, params["multiple_of"], params["ffn_dim_multiplier"], params.get("ffn_dim"))
    heads_and_widths = {"heads": heads, "kv_heads": kv_heads, "q": heads * head_dim, "kv": kv_heads * head_dim}
    return {"dim": dim, "head_dim": head_dim, "ffn": ffn, "vocab": vocab, **heads_and_widths}


def rotary_heads(name: str, params: Mapping[str, Any]) -> int:
    """The heads in wq or wk (or its bias), whose rows stand in the order of rotary pairs; 0 for every other weight."""
    heads = weight_spec(name).heads
    return sizes(params)[heads] if heads else 0
