"""Open a checkpoint of any known format, and load it into a model on any number of ranks.

Opening reads headers only; values are mapped, and read when a rank takes its part (`checkpoint.py`).
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from ..distributed import linear_layers, rank, world_size
from ..errors import LlamaError
from ..model import ModelArgs, Transformer
from ..quantization import SCHEMES, PackedWeight, pack, pack_codes
from . import hf, llama2c, meta
from .checkpoint import Checkpoint
from .checks import check_shapes, describe_keys
from .files import first_few, format_error, only_our_errors, read_head
from .memory import check_memory
from .pth import read_pth

KNOWN = "params.json + consolidated.NN.pth (Meta), config.json + *.safetensors (Hugging Face), *.bin or *.pt (llama2.c)"
TOKENIZERS = ("tokenizer.model", "tokenizer.bin")
THREADS = 4  # at most, that copy weights; each holds the pages of one tensor
logger = logging.getLogger("llama")


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a folder or a file of any known format, told by its content.

    LlamaError says what was found and what was expected; FileNotFoundError where a file is missing.
    """
    path = Path(path)
    with only_our_errors(path):
        if not path.exists():
            raise FileNotFoundError(f"{path.absolute()}: no such file or folder; expected a checkpoint")
        checkpoint = _open_folder(path) if path.is_dir() else _open_file(path)
        folder = path if path.is_dir() else path.parent
        names = TOKENIZERS[::-1] if checkpoint.format == "llama2c" else TOKENIZERS
        checkpoint.tokenizer_path = next((folder / name for name in names if (folder / name).is_file()), None)
        return checkpoint


def _open_folder(folder: Path) -> Checkpoint:
    if any(folder.glob("*.pth")):
        return meta.read(folder)
    if any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin")) or (folder / "config.json").exists():
        return hf.read(folder)
    if (folder / "params.json").exists():
        return meta.read(folder)
    files = [path for path in sorted(folder.glob("*.bin")) if path.name != "tokenizer.bin"]
    files = files or sorted(folder.glob("*.pt"))
    if len(files) == 1:
        return _open_file(files[0])
    found = f"several: {first_few(path.name for path in files)}: give one" if files else "no checkpoint"
    raise FileNotFoundError(f"{folder.absolute()}: {found}; looked for {KNOWN}")


def _open_file(path: Path) -> Checkpoint:
    expected = "a folder, or a .bin or .pt file of llama2.c"
    head = read_head(path, expected)
    if path.suffix in (".pth", ".safetensors", ".json"):
        return _open_folder(path.parent)  # one file of a folder
    # a pickle begins with 0x80 and so does a llama2.c header with dim 128, but that goes on with zeros
    if head.startswith(b"PK\x03\x04") or (head.startswith(b"\x80") and head[2:4] != b"\0\0"):
        value, mapped = read_pth(path)
        if isinstance(value, Mapping) and {"model", "model_args"} <= set(value):
            return llama2c.read_training(path, value, mapped)
        keys = describe_keys(value) if isinstance(value, Mapping) else f"a {type(value).__name__}"
        raise format_error(path, keys, "llama2.c's training file (model, model_args), or the folder of another format")
    return llama2c.read(path)


@torch.no_grad()
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
    another; the rest of the model, made on the CPU, moves there. LlamaError names missing and misshapen weights, before
    anything is changed, and what cannot be packed when it is met; a log line names unexpected ones.
    """
    if checkpoint.in_use:  # that model writes to those pages when it is trained: map them anew
        checkpoint = open_checkpoint(checkpoint.path)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    stored = {name: checkpoint.local_shape(name, world) for name in checkpoint.names()}
    check_shapes(checkpoint.path, stored, {name: tuple(parameter.shape) for name, parameter in parameters.items()})
    unexpected = checkpoint.unexpected + [name for name in stored if name not in parameters]
    if unexpected:
        logger.warning("%s: %d weights are not used: %s", checkpoint.path, len(unexpected), first_few(unexpected))
    total = sum(parameter.numel() * parameter.itemsize for parameter in parameters.values())
    with tqdm(total=total, disable=not progress, delay=1.0, unit="B", unit_scale=True, desc="Loading") as bar:
        for layer_name, layer in linear_layers(model) if scheme else ():
            name = f"{layer_name}.weight"
            weight = parameters.pop(name)
            layer.set_packed(_packed(checkpoint, rank, world, name, str(scheme), device))
            bar.update(weight.numel() * weight.itemsize)
        checkpoint.in_use = True
        with ThreadPoolExecutor(min(THREADS, torch.get_num_threads())) as pool:
            place = partial(_place, checkpoint, rank, world)
            for weight in pool.map(place, parameters, parameters.values()):
                bar.update(weight.numel() * weight.itemsize)
    if checkpoint.tied and world == 1 and "output.weight" in parameters:
        parameters["output.weight"].data = parameters["tok_embeddings.weight"].data
    for parameter in parameters.values() if device is not None else ():
        parameter.data = parameter.data.to(device)


def _packed(
    checkpoint: Checkpoint, rank: int, world: int, name: str, scheme: str, device: torch.device | None
) -> PackedWeight:
    """One weight as its layer will multiply with it, quantized now unless it is stored so; pages are given back."""
    try:
        stored = checkpoint.quantized_shard(name, rank, world)
        if stored is not None:
            return pack_codes(stored.qvalues.to(device=device), stored.scales.to(device=device), scheme)
        return pack(checkpoint.read(name, rank, world).to(device=device), scheme)
    except ValueError as error:
        raise LlamaError(f"{checkpoint.path}: {name}: {error}") from None
    finally:
        checkpoint.drop_pages(name)


def _place(checkpoint: Checkpoint, rank: int, world: int, name: str, parameter: nn.Parameter) -> nn.Parameter:
    """Map or fill one parameter, and return it; a tied head waits for the embedding."""
    if checkpoint.tied and world == 1 and name == "output.weight":
        return parameter
    same_type = parameter.device.type == "cpu" and parameter.dtype == checkpoint.dtype(name)
    if same_type and checkpoint.weights[name].codec is None:
        stored = checkpoint.in_one_part(name, rank, world)
        if stored is not None and stored.is_contiguous():
            parameter.data = stored
            return parameter
    checkpoint.read_into(parameter.data, name, rank, world)
    return parameter


@contextlib.contextmanager
def defaults(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """New tensors have this device and dtype within; torch's defaults are as before afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def load_model(
    checkpoint: Checkpoint,
    *,
    vocab_size: int,
    max_seq_len: int,
    max_batch_size: int,
    device: torch.device,
    dtype: torch.dtype,
    quantize: str | None = None,
) -> Transformer:
    """This rank's part of the checkpoint in a new model."""
    for name, value in (("max_seq_len", max_seq_len), ("max_batch_size", max_batch_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise LlamaError(f"{name}={value!r} must be an integer of at least 1")
    sizes = {"vocab_size": vocab_size, "max_seq_len": max_seq_len, "max_batch_size": max_batch_size}
    args = ModelArgs(**{**checkpoint.params, **sizes})
    rows = checkpoint.shape("tok_embeddings.weight")[0]
    if rows != vocab_size:
        found = f"{checkpoint.path} embeds {rows} tokens, but the tokenizer has {vocab_size}"
        raise LlamaError(f"{found}: give the tokenizer that belongs to this checkpoint")
    scheme = pick_scheme(quantize, checkpoint.quantized)
    check_memory(args, device, dtype, world_size(), scheme)
    with defaults(torch.device("cpu") if scheme else device, dtype):  # weights that will be packed are never touched
        model = Transformer(args)
    place = device if scheme else None
    load(model, checkpoint, rank=rank(), world=world_size(), progress=rank() == 0, scheme=scheme, device=place)
    return model


def pick_scheme(quantize: str | None, stored: str | None) -> str | None:
    """How the layers' weights are quantized: as asked for, else as the file holds them; None: not at all."""
    if quantize is not None and quantize not in SCHEMES:
        raise LlamaError(f"quantize={quantize!r} must be one of {', '.join(SCHEMES)} or None")
    if quantize is not None and stored is not None and not quantize.startswith(stored):
        raise LlamaError(f"quantize={quantize!r}, but the checkpoint holds {stored}: quantize the original")
    return quantize or stored


def find_tokenizer(checkpoint: Checkpoint) -> Path:
    """The tokenizer beside the checkpoint; FileNotFoundError where there is none."""
    if checkpoint.tokenizer_path is None:
        raise FileNotFoundError(f"no tokenizer.model beside {checkpoint.path}: pass tokenizer_path (--tokenizer)")
    return Path(checkpoint.tokenizer_path)
