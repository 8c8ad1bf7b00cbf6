"""Weights in fewer bytes: codecs (numbers to quantized values and back) and kernels (what multiplies with them)."""

from .codecs import GROUPS, dequantize, quantize_int4, quantize_int8
from .kernels import (
    SCHEMES,
    Int8Weight,
    PackedWeight,
    PrepackedWeight,
    RowSlice,
    head_can_embed,
    pack,
    pack_quantized,
    weight_scheme,
)

__all__ = [
    "GROUPS",
    "SCHEMES",
    "Int8Weight",
    "PackedWeight",
    "PrepackedWeight",
    "RowSlice",
    "dequantize",
    "head_can_embed",
    "pack",
    "pack_quantized",
    "quantize_int4",
    "quantize_int8",
    "weight_scheme",
]
