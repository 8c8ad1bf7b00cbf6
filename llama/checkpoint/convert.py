"""Writing a checkpoint: what can be asked for, and a new folder that appears when it is whole."""

import filecmp
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from ..errors import LlamaError
from . import hf, llama2c, meta
from .checkpoint import Checkpoint
from .codecs import META_CODECS, Int4Groups, Int8Rows
from .companions import check_own_tokenizer
from .files import first_few
from .memory import gigabytes
from .source import DTYPES, Source

logger = logging.getLogger("llama")

# What --force may remove: the files of checkpoints, and nothing that a folder given by mistake would hold.
REPLACEABLE = re.compile(
    r"consolidated\.\d+\.pth|params\.json|checklist\.chk|tokenizer.*|.*config\.json|special_tokens_map\.json"
    r"|(model|pytorch_model).*\.(safetensors|bin|json)|.*\.jinja|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
)
WRITERS: dict[str, Callable[[Source, Path], None]] = {"meta": meta.write, "hf": hf.write, "llama2c": llama2c.write}


def write_checkpoint(source: Source, target: Path, to: str, force: bool = False) -> None:
    """Write `source` as the folder `target` in the format `to`; with `force` a checkpoint that is there is replaced.

    LlamaError for what cannot be written so, and nothing is left behind.
    """
    _check_settings(source, to)
    check_own_tokenizer(source.checkpoint)
    if to == "llama2c":
        source.dtype_name = "float32"  # the only type of that format
    source.checkpoint.check_world("shards", source.shards)
    _tie_equal(source.checkpoint)
    _say_what_becomes_of_the_window(source, to)
    try:
        replaced = _check_target(source.checkpoint, target, force)
        with tqdm(unit="B", unit_scale=True, desc=f"Writing {to}") as source.bar:
            source.bar.total = source.size(source.checkpoint.names())
            _check_space(target, source.bar.total)
            with _new_folder(target, replaced, source.checkpoint.folder) as folder:
                WRITERS[to](source, folder)
                source.checkpoint.check_unchanged()
    except (OSError, RuntimeError) as error:  # RuntimeError: torch.save, where a write fails
        reason = " ".join(str(error).split())
        raise LlamaError(f"cannot write {target}: {reason:.300}; free space, or give another path") from error


def _check_settings(source: Source, to: str) -> None:
    dtype, context, shards, quantize = source.dtype_name, source.context, source.shards, source.quantize
    if to not in WRITERS:
        raise LlamaError(f"to={to!r} must be one of {', '.join(WRITERS)}")
    if dtype is not None and dtype not in DTYPES:
        raise LlamaError(f"dtype={dtype!r} must be one of {', '.join(DTYPES)} or None")
    if context is not None and (type(context) is not int or context < 1):
        raise LlamaError(f"context={context!r} must be None or an integer of at least 1")
    if not isinstance(shards, int) or shards < 1 or (shards > 1 and to != "meta"):
        raise LlamaError(f"shards={shards!r} must be 1 or more, and 1 unless to='meta'")
    schemes = [codec.name for codec in META_CODECS]
    if quantize is not None and (quantize not in schemes or to != "meta" or shards != 1):
        wanted = f"{' or '.join(schemes)}, with to='meta' and shards=1"
        raise LlamaError(f"quantize={quantize!r} must be {wanted}; got to={to!r}, shards={shards}")
    stored = source.checkpoint.quantized
    if quantize and stored:
        raise LlamaError(f"quantize={quantize!r}, but {source.checkpoint.path} holds {stored}: quantize the original")


def _tie_equal(checkpoint: Checkpoint) -> None:
    """Tie a head of Meta's that is the embedding value for value, or was quantized from it: shards, cut otherwise, and
    quantized files cannot say so.
    """
    names = ("output.weight", "tok_embeddings.weight")
    head, embedding = (checkpoint.weights[name] for name in names)
    if checkpoint.format != "meta" or checkpoint.tied or head.changes or embedding.changes:
        return
    if isinstance(head.codec, META_CODECS):
        values = checkpoint.read("tok_embeddings.weight")
        if _quantized_from(head.codec, values[:1], 1) and _quantized_from(head.codec, values, len(values)):
            checkpoint.weights["output.weight"] = embedding
        return
    if head.codec or head.dtype != embedding.dtype:
        return
    rows = [checkpoint.weights[name].slices(0, 0, 1)[0].values()[0] for name in names]
    shared = min(map(len, rows))  # of the first row, which tells most others apart
    if torch.equal(rows[0][:shared], rows[1][:shared]) and torch.equal(*map(checkpoint.read, names)):
        checkpoint.weights["output.weight"] = embedding


def _quantized_from(codec: Int8Rows | Int4Groups, values: Tensor, rows: int) -> bool:
    """Whether quantizing `values` gives the codec's first rows."""
    try:
        qvalues, scales = codec.quantize(values)
    except ValueError:  # it cannot have been made of these
        return False
    return torch.equal(qvalues, codec.qvalues[:rows]) and torch.equal(scales, codec.scales[:rows].to(scales.dtype))


def _say_what_becomes_of_the_window(source: Source, to: str) -> None:
    path, window = source.checkpoint.path, source.window
    if to != "meta" and not source.context and not source.checkpoint.context:
        logger.warning(
            "%s does not say its longest window: %d tokens are written; --context sets another", path, window
        )
    if to == "meta" and window != source.family_window:
        found = (
            "params.json has no place for the longest window: build with max_seq_len=%d, convert back with --context %d"
        )
        logger.warning(found, window, window)


def _check_target(checkpoint: Checkpoint, target: Path, force: bool) -> tuple[int, int] | None:
    """The identity of the folder that is to be replaced, or None. LlamaError where that may not be."""
    new, old = target.resolve(), checkpoint.path.resolve()
    if new == old or new in old.parents or old in new.parents:
        raise LlamaError(f"{target} and {checkpoint.path} are one folder, or one holds the other: give another path")
    if not target.exists() and not target.is_symlink():
        return None
    if not target.is_dir() or target.is_symlink():
        raise LlamaError(f"{target} exists and is not a folder: give another path")
    files = [path.name for path in target.iterdir()]
    if files and not force:
        raise LlamaError(f"{target} exists and holds {first_few(files)}: give another path, or force=True (--force)")
    _check_replaceable(target, target, checkpoint.folder)
    sources = [
        *checkpoint.files,
        *([old] if old.is_file() else old.iterdir()),
        *filter(None, [checkpoint.tokenizer_path]),
        *(file for adapter in checkpoint.adapters for file in adapter.path.iterdir()),
    ]
    if inside := [path.name for path in sources if new in path.resolve().parents]:
        raise LlamaError(f"{first_few(inside)} of {checkpoint.path} are links into {target}: give another path")
    return _identity(target) if files else None  # an empty folder can only be taken over as it is


def _identity(folder: Path) -> tuple[int, int]:
    found = folder.lstat()
    return found.st_dev, found.st_ino


def _check_replaceable(folder: Path, target: Path, source: Path) -> None:
    """LlamaError unless everything in `folder`, which is or was `target`, is a checkpoint's file or one of `source`."""
    names = [path.name for path in folder.iterdir()]
    ours = [name for name in names if REPLACEABLE.fullmatch(name) or _same_file(folder / name, source / name)]
    foreign = [name for name in names if name not in ours or not (folder / name).is_file()]
    if foreign:
        raise LlamaError(f"{target} holds {first_few(foreign)}, which is no part of a checkpoint: it is not replaced")


def _same_file(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)


def _check_space(target: Path, size: int) -> None:
    parent = next(path for path in target.absolute().parents if path.exists())
    free = shutil.disk_usage(parent).free
    if size + 10_000_000 > free:
        found = f"{target} needs {gigabytes(size)}, but {parent} has {gigabytes(free)} free"
        raise LlamaError(f"{found}: free some, or give another path")


@contextmanager
def _new_folder(target: Path, replaced: tuple[int, int] | None, source: Path) -> Iterator[Path]:
    """A folder beside `target` that takes its place at the end, or is removed if anything stops the writing. What
    stands there then is replaced only if it is still the folder `replaced`, and holds nothing but a checkpoint.

    A run that is killed leaves `.NAME.partial-XXXX`, which has no params.json or config.json: those come last.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    name = target.name.encode()[:200].decode(errors="ignore")  # names have 255 bytes at most
    folder = Path(tempfile.mkdtemp(prefix=f".{name}.partial-", dir=target.parent))
    old = folder.with_name(folder.name.replace(".partial-", ".old-"))
    try:
        folder.chmod(0o755)
        yield folder
        if replaced is not None:
            target.rename(old)
            if _identity(old) != replaced:
                raise LlamaError(f"{target} was replaced by another program meanwhile: it is left as it is")
            _check_replaceable(old, target, source)
        _move(folder, target)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        if old.exists() and not os.path.lexists(target):
            old.rename(target)
        shutil.rmtree(folder, ignore_errors=True)


def _move(folder: Path, target: Path) -> None:
    """Put a folder at `target`, where there may be an empty folder and nothing else."""
    try:
        folder.rename(target)
    except OSError as error:
        if not os.path.lexists(target):
            raise
        raise LlamaError(f"{target} appeared while it was being written: it is left as it is; try again") from error
