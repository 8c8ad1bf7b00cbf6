"""Open a checkpoint of any known format, and load it into a model on any number of ranks.

Opening reads headers only; values are mapped, and read when a rank takes its part (`checkpoint.py`).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from tqdm import tqdm

from ..distributed import linear_layers, rank, world_size
from ..errors import LlamaError
from ..interrupts import no_grad, restoring
from ..model import ModelArgs, Transformer
from ..quantization import SCHEMES, PackedWeight, head_can_embed, pack, pack_quantized, weight_scheme
from . import gguf_model, hf, llama2c, meta
from .checkpoint import Checkpoint
from .checks import check_shapes, describe_value
from .files import first_few, format_error, only_our_errors, read_head
from .lora import ADAPTER_FILES, CONFIG, add_adapters
from .memory import check_memory
from .pth import read_pth
from .table import meta_name, split_known
from .tokenizers import find_tokenizer

KNOWN = (
    "params.json + consolidated.NN.pth (Meta), config.json + *.safetensors (Hugging Face), *.gguf (llama.cpp), "
    "*.bin or *.pt (llama2.c)"
)
FOREIGN_FILES = {
    "hf_model_*.pt": "which is torchtune's: let it save safetensors",
    "meta_model_*.pt": "which is torchtune's: rename it to consolidated.00.pth, with params.json beside it",
    "recipe_state.pt": "the state of a torchtune run: give the folder of its model",
    "*.distcp": "which is of torch's distributed checkpoints (DCP): gather them first (torch.distributed.checkpoint)",
    "mp_rank_*_model_states.pt": "which is DeepSpeed's: run its zero_to_fp32.py first",
    "*.npz": "which is of NumPy or MLX",
}
FOREIGN_MAGIC = {
    b"lmgg": "a GGML file (of older llama.cpp)",
    b"tjgg": "a GGML file (of older llama.cpp)",
    b"\x89HDF": "an HDF5 file (Keras)",
}
THREADS = 4  # at most, that copy weights; each holds the pages of one tensor
logger = logging.getLogger("llama")
T = TypeVar("T")


def open_checkpoint(path: str | Path, lora: Any = None, lora_scale: Any = 1.0) -> Checkpoint:
    """Open a folder or a file of any known format, told by its content, with the LoRA adapters `lora` (`add_adapters`).

    LlamaError says what was found and what was expected; FileNotFoundError where a file is missing.
    """
    if not isinstance(path, (str, Path)):
        raise LlamaError(f"ckpt_dir={path!r:.60} must be the path of a folder or a file")
    path = Path(path)
    with only_our_errors(path):
        path = path.expanduser()
        if not path.exists():
            raise FileNotFoundError(f"{path.absolute()}: no such file or folder; expected a checkpoint")
        checkpoint = _open_folder(path) if path.is_dir() else _open_file(path)
        if checkpoint.tokenizer_source is None:
            checkpoint.tokenizer_path = find_tokenizer(checkpoint.folder, checkpoint.format == "llama2c")
    return add_adapters(checkpoint, lora, lora_scale)


def _open_folder(folder: Path) -> Checkpoint:
    def holds(*patterns: str) -> bool:
        return any(any(folder.glob(pattern)) for pattern in patterns)

    if holds("adapter_config.json", "adapter_model.*"):
        raise _adapter_error(folder)
    hf_weights = holds("*.safetensors", "pytorch_model*.bin")
    shards = "consolidated.*.pth" if hf_weights and holds("config.json") else "*.pth"  # such as rng_state.pth
    if holds("params.json") and holds(shards):
        return meta.read(folder)
    if hf_weights:
        return hf.read(folder)
    if holds("consolidated.*.pth") or (holds("*.pth") and not holds("config.json")):
        return meta.read(folder)
    models = gguf_model.models_in(folder)
    if len(models) == 1:
        return gguf_model.read(models[0])
    if models:
        found = f"several: {first_few(path.name for path in models)}: give one"
        raise FileNotFoundError(f"{folder.absolute()}: {found}")
    if holds("config.json") and not holds(*FOREIGN_FILES):
        return hf.read(folder)
    if holds("params.json"):
        return meta.read(folder)
    for pattern, what in FOREIGN_FILES.items():
        if holds(pattern):
            raise format_error(folder, f"{next(folder.glob(pattern)).name}, {what}", KNOWN)
    files = [path for path in sorted(folder.glob("*.bin")) if path.name != "tokenizer.bin"]
    files = files or sorted(folder.glob("*.pt"))
    if len(files) == 1:
        return _open_file(files[0])
    found = f"several: {first_few(path.name for path in files)}: give one" if files else "no checkpoint"
    raise FileNotFoundError(f"{folder.absolute()}: {found}; looked for {KNOWN}")


def _adapter_error(folder: Path) -> LlamaError:
    found = f"a LoRA adapter ({CONFIG})"
    return format_error(
        folder, found, f"the model that it was made for, and lora={str(folder)!r:.300} (--lora) with it"
    )


def _open_file(path: Path) -> Checkpoint:
    """A file that was asked for by name: that one alone, or the numbered set that it belongs to."""
    head, folder = read_head(path, "a checkpoint: a folder, or a file of weights"), path.parent
    magic = next((what for start, what in FOREIGN_MAGIC.items() if head.startswith(start)), None)
    if magic is not None:
        raise format_error(path, magic, KNOWN)
    if head.startswith(b"GGUF"):
        return gguf_model.read(path)
    if path.name in ADAPTER_FILES:
        raise _adapter_error(folder)
    if path.suffix == ".json":
        return _open_settings(path)
    if path.suffix == ".safetensors":
        return hf.read(folder, path)
    if meta.is_shard(path):
        return meta.read(folder)
    # a pickle begins with 0x80 and so does a llama2.c header with dim 128, but that goes on with zeros
    pickled = head.startswith(b"PK\x03\x04") or (head.startswith(b"\x80") and head[2:4] != b"\0\0")
    if not pickled and path.suffix not in (".pth", ".pt"):
        return llama2c.read(path)
    value, mapped = read_pth(path)
    if isinstance(value, Mapping) and {"model", "model_args"} <= set(value):
        return llama2c.read_training(path, value, mapped)
    names = [name for name in value if isinstance(name, str)] if isinstance(value, Mapping) else []
    if any(meta_name(name) for name in names):
        return hf.read(folder, path)
    if split_known(names)[0]:
        return meta.read(folder, path)
    raise format_error(
        path, describe_value(value), "weights by Meta's or Hugging Face's names, or llama2.c's (model, model_args)"
    )


def _open_settings(path: Path) -> Checkpoint:
    """A folder by the name of its settings, which says the format."""
    if path.name == "params.json":
        checkpoint = meta.read(path.parent)
    elif path.name == "config.json":
        checkpoint = hf.read(path.parent)
    elif path.name.endswith(".index.json"):
        checkpoint = hf.read(path.parent, path)
    else:
        raise format_error(path, "no weights and no settings of a model", KNOWN)
    checkpoint.path = path
    return checkpoint


@no_grad
def load(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    rank: int = 0,
    world: int = 1,
    progress: bool = False,
    scheme: str | None = None,
    device: torch.device | None = None,
) -> None:
    """Give every parameter of `model` (keys of Meta's, shapes of this rank) its values.

    On a CPU a parameter of the stored type becomes the file's own pages; any other is filled once, tensor by tensor.
    With `scheme` the parallel layers get a packed weight (`quantization.pack`) on `device` instead of theirs, one after
    another; the rest of the model, made on the CPU, moves there. LlamaError names missing, misshapen and surplus
    weights, before anything is changed, and what cannot be packed when it is met.
    """
    if checkpoint.in_use:  # that model writes to those pages when it is trained: map them anew
        given = checkpoint.adapters
        checkpoint = open_checkpoint(checkpoint.path, [one.path for one in given], [one.scale for one in given])
    parameters = dict(model.named_parameters(remove_duplicate=False))
    stored = {name: checkpoint.local_shape(name, world) for name in checkpoint.names()}
    check_shapes(checkpoint.path, stored, {name: tuple(parameter.shape) for name, parameter in parameters.items()})
    total = sum(parameter.numel() * parameter.itemsize for parameter in parameters.values())
    with tqdm(total=total, disable=not progress, delay=1.0, unit="B", unit_scale=True, desc="Loading") as bar:
        for layer_name, layer in linear_layers(model) if scheme else ():
            name = f"{layer_name}.weight"
            weight = parameters.pop(name)
            layer.set_packed(_packed(checkpoint, rank, world, name, str(scheme), device))
            bar.update(weight.numel() * weight.itemsize)
        if checkpoint.tied and world == 1 and scheme and head_can_embed(scheme):
            bar.update(parameters["tok_embeddings.weight"].nbytes)
            model.tok_embeddings.set_packed(model.output.packed)  # type: ignore[operator, union-attr]
        checkpoint.in_use = True
        with ThreadPoolExecutor(min(THREADS, torch.get_num_threads())) as pool:
            place = partial(_place, checkpoint, rank, world)
            for weight in pool.map(place, parameters, parameters.values()):
                bar.update(weight.numel() * weight.itemsize)
    checkpoint.check_unchanged()
    if checkpoint.tied and world == 1 and "output.weight" in parameters:
        parameters["output.weight"].data = parameters["tok_embeddings.weight"].data
    for parameter in parameters.values() if device is not None else ():
        parameter.data = parameter.data.to(device)


def _packed(
    checkpoint: Checkpoint, rank: int, world: int, name: str, scheme: str, device: torch.device | None
) -> PackedWeight:
    """One weight as its layer will multiply with it, quantized now unless it is stored so; pages are given back."""
    scheme = weight_scheme(name, scheme)
    try:
        stored = checkpoint.quantized_shard(name, rank, world, scheme)
        if stored is not None:
            if not scheme.startswith(str(stored.scheme)):  # a head in int4, as earlier versions wrote it
                scheme = str(stored.scheme)
            return pack_quantized(stored.qvalues.to(device=device), stored.scales.to(device=device), scheme)
        merged = torch.float32 if checkpoint.weights[name].changes else None  # quantizing rounds enough
        return pack(checkpoint.read(name, rank, world, merged).to(device=device), scheme)
    except ValueError as error:
        raise LlamaError(f"{checkpoint.path}: {name}: {error}") from None
    finally:
        checkpoint.drop_pages(name)


def _place(checkpoint: Checkpoint, rank: int, world: int, name: str, parameter: nn.Parameter) -> nn.Parameter:
    """Map or fill one parameter, and return it; a tied head waits for the embedding, or is it already."""
    if not parameter.numel() or (checkpoint.tied and world == 1 and name == "output.weight"):
        return parameter
    same_type = parameter.device.type == "cpu" and parameter.dtype == checkpoint.dtype(name)
    if same_type and checkpoint.weights[name].codec is None:
        stored = checkpoint.in_one_part(name, rank, world)
        if stored is not None and stored.is_contiguous():
            parameter.data = stored
            return parameter
    checkpoint.read_into(parameter.data, name, rank, world)
    return parameter


def with_defaults(device: torch.device, dtype: torch.dtype, make: Callable[[], T]) -> T:
    """`make()`, within which new tensors have this device and dtype; torch's defaults are as before afterwards."""
    before = torch.get_default_dtype()

    def make_there() -> T:
        torch.set_default_dtype(dtype)
        if device == torch.get_default_device():  # an interrupt in torch's own `with` could leave the device set
            return make()
        with device:
            return make()

    return restoring(make_there, lambda: torch.set_default_dtype(before))


def load_model(
    checkpoint: Checkpoint,
    *,
    vocab_size: int,
    max_seq_len: int,
    max_batch_size: int,
    device: torch.device,
    dtype: torch.dtype,
    quantize: str | None = None,
    graph_rows: Sequence[int] = (),
) -> Transformer:
    """This rank's part of the checkpoint in a new model, which may have more rows than the tokenizer's `vocab_size`;
    `graph_rows` are of the CUDA graphs that are to come.
    """
    for name, value in (("max_seq_len", max_seq_len), ("max_batch_size", max_batch_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise LlamaError(f"{name}={value!r} must be an integer of at least 1")
    rows = checkpoint.shape("tok_embeddings.weight")[0]  # perhaps padded: ids without a piece are never drawn
    sizes = {"vocab_size": rows, "max_seq_len": max_seq_len, "max_batch_size": max_batch_size}
    args = ModelArgs(**{**checkpoint.params, **sizes})
    if rows < vocab_size:
        found = f"{checkpoint.path} embeds {rows} tokens, but the tokenizer has {vocab_size}"
        raise LlamaError(f"{found}: give the tokenizer that belongs to this checkpoint")
    if rows > vocab_size and rank() == 0:
        level = logging.WARNING if rows > vocab_size + max(1024, vocab_size // 10) else logging.INFO
        words = "%s embeds %d tokens, the tokenizer has %d: the others are never drawn, if it is the right tokenizer"
        logger.log(level, words, checkpoint.path, rows, vocab_size)
    scheme = pick_scheme(quantize, checkpoint.quantized)
    merging = checkpoint.merging_bytes(world_size()) * (2 if scheme else 1)  # the sum, too, before it is quantized
    check_memory(args, device, dtype, world_size(), scheme, checkpoint.tied, graph_rows, merging)
    first = torch.device("cpu") if scheme else device  # weights that will be packed are never touched
    model = with_defaults(first, dtype, lambda: Transformer(args))
    place = device if scheme else None
    load(model, checkpoint, rank=rank(), world=world_size(), progress=rank() == 0, scheme=scheme, device=place)
    return model


def pick_scheme(quantize: str | None, stored: str | None) -> str | None:
    """How the layers' weights are quantized: as asked for, else as the file holds them; None: not at all."""
    if quantize is not None and (not isinstance(quantize, str) or quantize not in SCHEMES):
        raise LlamaError(f"quantize={quantize!r:.60} must be one of {', '.join(SCHEMES)} or None")
    if quantize is not None and stored is not None and not quantize.startswith(stored):
        raise LlamaError(f"quantize={quantize!r}, but the checkpoint holds {stored}: quantize the original")
    return quantize or stored
