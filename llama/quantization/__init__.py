"""Weights in fewer bytes: codecs (numbers and their quantized values) and kernels (what multiplies with them)."""

from .codecs import GROUPS, SCHEMES, dequantize, nibbles, quantize_int4, quantize_int8
from .kernels import DynamicInt8, Int4, Int8, PackedWeight, Part, Plain, int4_order, pack, pack_codes

__all__ = [
    "GROUPS",
    "SCHEMES",
    "DynamicInt8",
    "Int4",
    "Int8",
    "PackedWeight",
    "Part",
    "Plain",
    "dequantize",
    "int4_order",
    "nibbles",
    "pack",
    "pack_codes",
    "quantize_int4",
    "quantize_int8",
]
