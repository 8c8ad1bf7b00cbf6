"""Folders that other programs have quantized: what they are, by settings, names of weights and types; what to do."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import LlamaError
from .files import format_error, read_json

ADVICE = "take the model it was made from (base_model in its README.md), or a GGUF of it, and quantize='int4' or 'int8'"
EXPECTED = f"weights that are not quantized: {ADVICE}"
FIELDS = ("quantization_config", "compression_config", "quantization")  # of config.json; the last is MLX's
BESIDE = ("quantize_config.json", "quant_config.json", "quanto_qmap.json")  # of AutoGPTQ, AutoAWQ, quanto
METHODS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "bitsandbytes_4bit": "bitsandbytes",
    "bitsandbytes_8bit": "bitsandbytes",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8 (FBGEMM)",
    "compressed-tensors": "compressed-tensors (llm-compressor, vLLM)",
    "hqq": "HQQ",
    "eetq": "EETQ",
    "torchao": "torchao",
    "quanto": "quanto",
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "modelopt": "ModelOpt",
    "exl2": "ExLlamaV2",
    "exl3": "ExLlamaV3",
    "mxfp4": "MXFP4",
    "gguf": "GGUF",
}
_QUANTIZED_KEYS = (
    (r"qweight|qzeros|g_idx", "GPTQ's or AWQ's"),
    (r"absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+", "bitsandbytes' in 4 bits"),
    (r"SCB|weight_format", "bitsandbytes' in 8 bits"),
    (r"weight_scale_inv|weight_scale_2|input_scale|input_scale_ub|activation_scale_ub|fp8_scale\w*", "FP8"),
    (
        r"weight_scale|weight_packed|weight_shape|weight_zero_point|output_scale|[kv]_scale",
        "FP8 or compressed-tensors'",
    ),
    (r"weight_scales", "EETQ's"),
    (r"W_q|nbits|quant_zero|quant_scale", "HQQ's"),
    (r"weight\._(data|scale|shift)", "quanto's"),
    (r"\w*weight_qdata|weight_tensor_impl\w*", "torchao's"),
    (r"codes|codebooks", "AQLM's"),
    (r"q_weight|q_scale|q_invperm|trellis", "ExLlama's"),
    (r"biases|scales", "MLX's"),
)
# Patterns of a weight's whole name, and what it is, for `describe_keys`.
QUANTIZED_KEYS = tuple(
    (rf".*\.({names})$", f"of quantized weights ({whose}): {ADVICE}") for names, whose in _QUANTIZED_KEYS
)


def refuse_quantized(folder: Path, config: dict[str, Any]) -> None:
    """LlamaError where settings beside Hugging Face's weights say that these are quantized; `config`: config.json's."""
    for field in FIELDS:
        if config.get(field) is not None:
            raise _error(folder / "config.json", f"{field} is {config[field]!r:.60}", config[field])
    for name in BESIDE:
        if (folder / name).is_file():
            settings = read_json(folder / name, "settings of quantized weights")
            raise _error(folder / name, f"it is beside the weights and says {settings!r:.60}", settings)


def _error(path: Path, found: str, settings: Any) -> LlamaError:
    method, bits = (
        "MLX" if found.startswith("quantization is") else _method(path, settings),
        next(_bits(settings, 0), None),
    )
    size = "" if bits is None else f" in {bits} bits"
    return format_error(path, f"{found}: weights quantized by {method}{size}", EXPECTED)


def _method(path: Path, settings: Any) -> str:
    """Who has quantized, from settings of any of these programs."""
    told = settings.get("quant_method") if isinstance(settings, dict) else None
    if isinstance(told, str):
        return METHODS.get(told.lower(), f"{told:.40}")
    guesses = {
        "load_in_4bit": "bitsandbytes",
        "load_in_8bit": "bitsandbytes",
        "w_bit": "AWQ",
        "desc_act": "GPTQ",
        "config_groups": METHODS["compressed-tensors"],
    }
    held = [method for key, method in guesses.items() if isinstance(settings, dict) and key in settings]
    beside = {"quantize_config.json": "GPTQ", "quant_config.json": "AWQ", "quanto_qmap.json": "quanto"}
    return held[0] if held else beside.get(path.name, "another program")


def _bits(settings: Any, depth: int) -> Iterator[int]:
    """Bits of a weight, from whichever key says so."""
    for key, value in settings.items() if isinstance(settings, dict) and depth < 5 else ():
        if key in ("bits", "w_bit", "nbits", "num_bits") and type(value) is int and 0 < value < 64:
            yield value
        elif key in ("load_in_4bit", "load_in_8bit") and value is True:
            yield int(key[8])
        elif key == "weights" and isinstance(value, str):
            yield from (int(number) for number in re.findall(r"^q?(?:int|float)(\d{1,2})", value))
        else:
            yield from _bits(value, depth + 1)
