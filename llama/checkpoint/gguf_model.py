"""A Llama model in GGUF files: metadata to ModelArgs' fields, llama.cpp's names to Meta's, split files put together."""

import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import LlamaError
from ..rope import check_rope_scaling
from .checkpoint import Checkpoint, StoredWeight
from .checks import check_params, check_weights, positive_int
from .codecs import Codec
from .files import first_few, format_error
from .gguf import GGUF, read_gguf
from .gguf_vocabulary import chat_template, has_tokenizer, tokenizer_data

# llama.cpp's names of weights and biases; wq and wk lie in Meta's order of rows: its converter undoes Hugging Face's.
NAMES = {
    "token_embd": "tok_embeddings",
    "attn_q": "attention.wq",
    "attn_k": "attention.wk",
    "attn_v": "attention.wv",
    "attn_output": "attention.wo",
    "ffn_gate": "feed_forward.w1",
    "ffn_down": "feed_forward.w2",
    "ffn_up": "feed_forward.w3",
    "attn_norm": "attention_norm",
    "ffn_norm": "ffn_norm",
    "output_norm": "norm",
    "output": "output",
}
DIVISORS = "rope_freqs.weight"  # float32 (head_dim / 2,): what the rotary frequencies are divided by
IGNORABLE = re.compile(r"blk\.\d{1,9}\.attn_rot_embd\.weight")
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")

# Settings of the model, after "llama."; the first five must be there.
SETTINGS = {
    "embedding_length": "dim",
    "block_count": "n_layers",
    "attention.head_count": "n_heads",
    "feed_forward_length": "ffn_dim",
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "attention.head_count_kv": "n_kv_heads",
    "rope.freq_base": "rope_theta",
}
REQUIRED = list(SETTINGS)[:5]
ELSEWHERE = (  # read below, or told by the tensors
    *("context_length", "vocab_size", "tensor_data_layout", "attention.key_length", "attention.value_length"),
    *("rope.dimension_count", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor"),
    *("rope.scaling.original_context_length", "rope.scaling.finetuned"),
)
NEUTRAL: dict[str, tuple[Any, ...]] = {  # what any other setting may be; else 0 or False
    "attention.causal": (True,),
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
}


def split_files(path: Path) -> list[Path]:
    """All parts of the model that a file belongs to, in order: NAME-0000N-of-0000M.gguf; other names stand alone."""
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    stem, total = match[1], int(match[3])
    files = [path.with_name(f"{stem}-{number:05d}-of-{match[3]}.gguf") for number in range(1, total + 1)]
    missing = [file.name for file in files if not file.exists()]
    if missing or path not in files:
        found = f"of {total} parts, {first_few(missing) or path.name} is missing"
        raise FileNotFoundError(f"{path.parent.absolute()}: {found}")
    return files


def models_in(folder: Path) -> list[Path]:
    """The first file of every model in a folder."""
    found: dict[tuple[str, str], Path] = {}
    for path in sorted(folder.glob("*.gguf")):
        match = _SPLIT.fullmatch(path.name)
        found.setdefault((match[1], match[3]) if match else (path.name, ""), path)
    return list(found.values())


def read(path: Path) -> Checkpoint:
    """The model in a GGUF file, and in the other parts where it is one of several. Errors as in `open_checkpoint`."""
    files = split_files(path)
    parts = [read_gguf(file) for file in files]
    stored: dict[str, Tensor | Codec] = {}
    for index, part in enumerate(parts):
        _check_part(part, index, len(parts))
        twice = next((name for name in part.tensors if name in stored), None)
        if twice is not None:
            raise format_error(part.path, f"{twice!r:.80}, which another part holds too", "every weight in one part")
        stored |= part.stored()
    params = _params(parts[0], stored.pop(DIVISORS, None))
    names = {name: _meta_name(name) for name in stored if not IGNORABLE.fullmatch(name)}
    weights = {ours: StoredWeight([stored[name]]) for name, ours in names.items() if ours is not None}
    if "tok_embeddings.weight" in weights:
        weights.setdefault("output.weight", weights["tok_embeddings.weight"])  # tied, where it is not there
    context = positive_int(parts[0].metadata.get("llama.context_length"))
    checkpoint = Checkpoint(path, "gguf", params, weights, files, context)
    if has_tokenizer(parts[0]):
        checkpoint.tokenizer_source = lambda: tokenizer_data(parts[0])
        checkpoint.chat_template = chat_template(parts[0])
    return check_weights(checkpoint, "its metadata", [name for name, ours in names.items() if ours is None])


def _check_part(part: GGUF, index: int, count: int) -> None:
    number, total = part.metadata.get("split.no", 0), part.metadata.get("split.count", 1)
    if (number, total or 1) != (index, count):
        found = f"split.no {number!r:.40} of split.count {total!r:.40}, counted from 0"
        raise format_error(part.path, found, f"{index} of {count}: parts are named NAME-00001-of-0000N.gguf and so on")


def _meta_name(name: str) -> str | None:
    match = re.fullmatch(r"(?:blk\.(\d{1,9})\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in NAMES or (match[1] is None) == match[2].startswith(("attn", "ffn")):
        return None
    ours = f"{NAMES[match[2]]}.{match[3]}"
    return ours if match[1] is None else f"layers.{int(match[1])}.{ours}"


# ------------------------------------------------------------------------------------------------ settings


def _params(part: GGUF, divisors: Tensor | Codec | None) -> dict[str, Any]:
    """ModelArgs' fields; LlamaError names the setting that this library cannot follow."""
    _check_architecture(part)
    stated = {ours: _short(_number(part, key)) for key, ours in SETTINGS.items()}
    for key in REQUIRED:
        if stated[SETTINGS[key]] is None:
            raise format_error(part.path, f"no llama.{key}", "the settings of a Llama model")
    width, dim, heads = stated.pop("ffn_dim"), stated["dim"], stated["n_heads"]
    if positive_int(width) is None or positive_int(dim) is None or positive_int(heads) is None:
        found = f"feed_forward_length={width!r:.40}, embedding_length={dim!r:.40}, head_count={heads!r:.40}"
        raise format_error(part.path, found, "integers above 0")
    given = {name: value for name, value in stated.items() if value is not None}
    head_dim = _number(part, "attention.key_length")
    if head_dim is not None and head_dim * heads != dim:
        given["head_dim"] = head_dim
    params = check_params(part.path, given) | {"ffn_dim": width}
    head_dim = params.get("head_dim") or dim // heads
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        if _number(part, key) not in (None, head_dim):
            raise format_error(part.path, f"llama.{key} is {_number(part, key)!r}", f"the heads' width, {head_dim}")
    scaling = _rope_scaling(part, divisors, head_dim)
    return params if scaling is None else params | {"rope_scaling": scaling}


def _check_architecture(part: GGUF) -> None:
    kind, architecture = part.metadata.get("general.type", "model"), part.metadata.get("general.architecture")
    if kind != "model":
        raise format_error(part.path, f"general.type is {kind!r:.60}", "'model' (an 'adapter' is a LoRA)")
    if architecture != "llama":
        found = f"general.architecture is {architecture!r:.60}"
        raise format_error(part.path, found, "'llama': this library runs plain Llama models")
    for name, value in part.metadata.items():
        key = name.removeprefix("llama.")
        if key == name or key in SETTINGS or key in ELSEWHERE or value in NEUTRAL.get(key, (0,)):
            continue
        raise format_error(part.path, f"{name[:80]} is {value!r:.60}", "a plain Llama model, without this setting")


def _number(part: GGUF, key: str) -> Any:
    """One of the model's settings, None where it is not there; LlamaError where it is no number."""
    value = part.metadata.get(f"llama.{key}")
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)):
        return value
    raise format_error(part.path, f"llama.{key} is {value!r:.60}", "one number")


def _short(value: Any) -> Any:
    """Of a number read as float32 the shortest that is the same there: 1e-05 for 9.999999747378752e-06."""
    if not isinstance(value, float):
        return value
    texts = (f"{value:.{digits}g}" for digits in range(1, 18))
    return next(float(text) for text in texts if _float32(float(text)) == _float32(value))


def _float32(value: float) -> Any:
    return torch.tensor(value, dtype=torch.float32, device="cpu").item()


def _rope_scaling(part: GGUF, divisors: Tensor | Codec | None, head_dim: int) -> dict[str, Any] | None:
    """As ModelArgs.rope_scaling: linear scaling by a factor, or a divisor for each frequency."""
    kind = part.metadata.get("llama.rope.scaling.type", "linear")  # so that older files with a factor alone are read
    factor = _short(_number(part, "rope.scaling.factor") or _number(part, "rope.scale_linear") or 1.0)
    if kind == "none":
        factor = 1.0
    elif kind != "linear" or not 0 < factor < 1e6:
        found = f"llama.rope.scaling.type is {kind!r:.40}, with factor {factor!r:.40}"
        raise format_error(part.path, found, "'none', or 'linear' with a factor above 0")
    if divisors is None:
        return None if factor == 1 else {"rope_type": "linear", "factor": float(factor)}
    if factor != 1 or not isinstance(divisors, Tensor) or divisors.ndim != 1:
        found = f"{DIVISORS} of shape {divisors.shape} beside a factor of {factor}"
        raise format_error(part.path, found, f"{head_dim // 2} numbers, and no other scaling of the rotary angles")
    try:
        return check_rope_scaling({"rope_type": "divisors", "divisors": divisors.tolist()}, head_dim)
    except LlamaError as error:
        raise format_error(part.path, f"{DIVISORS}: {error}", "what Llama 3.1's converter writes") from None
