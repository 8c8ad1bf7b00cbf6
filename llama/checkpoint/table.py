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


TABLE = (
    WeightSpec("tok_embeddings.weight", "model.embed_tokens.weight", 1, ("vocab", "dim")),
    WeightSpec("layers.{}.attention.wq.weight", "model.layers.{}.self_attn.q_proj.weight", 0, ("dim", "dim"), "heads"),
    WeightSpec(
        "layers.{}.attention.wk.weight", "model.layers.{}.self_attn.k_proj.weight", 0, ("kv", "dim"), "kv_heads"
    ),
    WeightSpec("layers.{}.attention.wv.weight", "model.layers.{}.self_attn.v_proj.weight", 0, ("kv", "dim")),
    WeightSpec("layers.{}.attention.wo.weight", "model.layers.{}.self_attn.o_proj.weight", 1, ("dim", "dim")),
    WeightSpec("layers.{}.feed_forward.w1.weight", "model.layers.{}.mlp.gate_proj.weight", 0, ("ffn", "dim")),
    WeightSpec("layers.{}.feed_forward.w2.weight", "model.layers.{}.mlp.down_proj.weight", 1, ("dim", "ffn")),
    WeightSpec("layers.{}.feed_forward.w3.weight", "model.layers.{}.mlp.up_proj.weight", 0, ("ffn", "dim")),
    WeightSpec("layers.{}.attention_norm.weight", "model.layers.{}.input_layernorm.weight", None, ("dim",)),
    WeightSpec("layers.{}.ffn_norm.weight", "model.layers.{}.post_attention_layernorm.weight", None, ("dim",)),
    WeightSpec("norm.weight", "model.norm.weight", None, ("dim",)),
    WeightSpec("output.weight", "lm_head.weight", 0, ("vocab", "dim")),
)
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


def all_names(n_layers: int) -> list[str]:
    """Meta's keys in the order of the model's `state_dict`."""
    first, layer, last = TABLE[:1], TABLE[1:10], TABLE[10:]
    layers = [spec.key.format(index) for index in range(n_layers) for spec in layer]
    return [*(spec.key for spec in first), *layers, *(spec.key for spec in last)]


def sizes(params: Mapping[str, Any]) -> dict[str, int]:
    """What the names in the table stand for, from ModelArgs' fields; `vocab` as there, -1 where it is not known."""
    dim, heads = params["dim"], params["n_heads"]
    kv_heads = params.get("n_kv_heads") or heads
    ffn = ffn_width(4 * dim, params["multiple_of"], params["ffn_dim_multiplier"], params.get("ffn_dim"))
    kv, vocab = dim // heads * kv_heads, params["vocab_size"]
    return {"dim": dim, "heads": heads, "kv_heads": kv_heads, "kv": kv, "ffn": ffn, "vocab": vocab}


def rotary_heads(name: str, params: Mapping[str, Any]) -> int:
    """The heads in wq or wk, whose rows stand in the order of rotary pairs; 0 for every other weight."""
    heads = weight_spec(name).heads
    return sizes(params)[heads] if heads else 0
