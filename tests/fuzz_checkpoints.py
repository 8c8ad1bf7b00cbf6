"""Damage small checkpoints of every format, seeded, and open and load what is left.

Each mutation has to end in a clean error of ours or in a right load: within seconds, without a crash, and with no more
new memory than twice the file. `python tests/fuzz_checkpoints.py 2400` runs that many and prints the count.
"""

import contextlib
import random
import re
import shutil
import signal
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import checkpoint_files as files
import torch
from torch import Tensor

from llama.checkpoint import open_checkpoint
from llama.errors import LlamaError

SLACK = 3_000_000  # bytes that Python and torch take for themselves while they parse and complain
SECONDS = 10
# Texts that a damaged or hostile header may hold, besides random bytes.
NUMBERS = ["0", "-1", "1", "3", "99999999999999999999", "1e9", "4294967296", "null", "true", "[]", "{}", '""', "NaN"]


class Slow(Exception):
    """A mutation took longer than SECONDS."""


@contextlib.contextmanager
def limit() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Slow

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Target:
    """One file to damage, within the checkpoint it belongs to."""

    def __init__(self, root: Path, file: Path) -> None:
        self.root, self.file = root, file
        self.bytes = file.read_bytes()
        checkpoint = open_checkpoint(root)
        self.weights = {name: checkpoint.read(name).clone() for name in checkpoint.names()}
        self.unit = 16 if file.name == "v2.bin" else 1  # values that one damaged byte (a scale's) can change

    @property
    def header(self) -> list[tuple[int, int]]:
        """Spans that are not values of weights."""
        data, size = self.bytes, len(self.bytes)
        if self.file.suffix == ".safetensors":
            return [(0, 8 + int.from_bytes(data[:8], "little"))]
        if zipfile.is_zipfile(self.file):
            return self._outside_values()
        if self.file.suffix == ".bin":
            return [(0, 28 if data[:4] != b"24ka" else 256)]
        return [(0, size)]

    def _outside_values(self) -> list[tuple[int, int]]:
        spans, place = [], 0
        with zipfile.ZipFile(self.file) as archive:
            for entry in sorted(archive.infolist(), key=lambda entry: entry.header_offset):
                if re.search(r"/data/\d+$", entry.filename):
                    at = entry.header_offset
                    name, extra = (int.from_bytes(self.bytes[at + k : at + k + 2], "little") for k in (26, 28))
                    start = at + 30 + name + extra
                    spans.append((place, start))
                    place = start + entry.file_size
        return [*spans, (place, len(self.bytes))]


def targets(folder: Path) -> list[Target]:
    """A checkpoint of every format, and every kind of file in it."""
    weights = files.weights({**files.GQA, "dim": 16, "vocab_size": 24}, seed=3)
    params = {**files.GQA, "dim": 16, "vocab_size": 24}
    meta = files.write_meta(folder / "meta", weights, params, 2)
    old = files.write_meta(folder / "old", weights, params)
    path = old / "consolidated.00.pth"
    torch.save(torch.load(path), path, _use_new_zipfile_serialization=False)
    one, two = (files.write_hf(folder / name, weights, params, count) for name, count in (("one", 1), ("two", 2)))
    binary = files.write_hf(folder / "binary", weights, params, bin_file=True)
    found = [
        Target(meta, meta / "consolidated.01.pth"),
        Target(meta, meta / "params.json"),
        Target(old, path),
        Target(one, one / "model.safetensors"),
        Target(one, one / "config.json"),
        Target(two, two / "model-00002-of-00002.safetensors"),
        Target(two, two / "model.safetensors.index.json"),
        Target(binary, binary / "pytorch_model.bin"),
    ]
    for version in range(3):
        path = files.write_llama2c(folder / f"v{version}.bin", weights, params, version)
        found.append(Target(path, path))
    path = files.write_training(folder / "ckpt.pt", weights, params)
    return [*found, Target(path, path)]


def mutate(rng: random.Random, target: Target) -> tuple[str, bytes]:
    """The kind of damage and the file's new bytes."""
    data = bytearray(target.bytes)
    kind = rng.choice(["flip", "header", "header", "cut", "grow", "number", "swap"])
    first, last = rng.choice(target.header)
    if kind == "flip":
        for _ in range(rng.choice([1, 1, 4, 64])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "header":
        for _ in range(rng.choice([1, 1, 2, 8])):
            data[rng.randrange(first, last) if last > first else 0] = rng.choice(
                [0, 1, 127, 128, 255, rng.randrange(256)]
            )
    elif kind == "cut":
        start = rng.randrange(len(data))
        del data[start : start + rng.choice([1, 4, 64, len(data)])]
    elif kind == "grow":
        start = rng.choice([0, len(data), rng.randrange(len(data))])
        data[start:start] = rng.randbytes(rng.choice([1, 4, 64, 5000]))
    elif kind == "number":
        return kind, _other_number(rng, bytes(data), first, last)
    else:
        length = rng.choice([4, 8, 64])
        a, b = (rng.randrange(max(1, len(data) - length)) for _ in range(2))
        data[a : a + length], data[b : b + length] = data[b : b + length], data[a : a + length]
    return kind, bytes(data)


def _other_number(rng: random.Random, data: bytes, first: int, last: int) -> bytes:
    """Another number (or word) in a text header, another int32 in a binary one."""
    texts = list(re.finditer(rb"\d+|true|false|null|\"[A-Za-z_0-9]+\"", data[first:last]))
    if (texts and data[:1] in (b"{",)) or data[8:9] == b"{":
        found = rng.choice(texts)
        return data[: first + found.start()] + rng.choice(NUMBERS).encode() + data[first + found.end() :]
    place = first + 4 * rng.randrange(max(1, (last - first) // 4))
    value = rng.choice([0, 1, -1, 2, 3, 1 << 30, (1 << 31) - 1, -(1 << 31), 255, 65536])
    return data[:place] + value.to_bytes(4, "little", signed=True) + data[place + 4 :]


def memory(key: str) -> int:
    """VmRSS or VmHWM (its peak since `reset_peak`) in bytes; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    return int(re.findall(rf"{key}:\s*(\d+)", status.read_text())[0]) * 1024


def reset_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def read_all(path: Path) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(path)
    for name in checkpoint.names():
        with contextlib.suppress(LlamaError):  # sizes that two ranks cannot share
            checkpoint.read(name, 1, 2)
    return {name: checkpoint.read(name) for name in checkpoint.names()}


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> int:
    """Values that differ (by their bits)."""
    total = 0
    for name in before:
        a, b = (x[name].contiguous().view(torch.uint8).view(-1, x[name].itemsize) for x in (before, after))
        total += int((a != b).any(1).sum())
    return total


def run_one(rng: random.Random, target: Target, folder: Path) -> tuple[str, str]:
    """Damage, open, read; ("error" or "load", kind). AssertionError says what went wrong."""
    kind, data = mutate(rng, target)
    root = target.root
    copy = folder / root.name
    if root.is_dir():
        shutil.copytree(root, copy)
    victim = copy / target.file.name if root.is_dir() else copy
    victim.unlink(missing_ok=True)
    victim.write_bytes(data)
    before = memory("VmRSS")
    reset_peak()
    try:
        with limit():
            after = read_all(copy)
    except (LlamaError, FileNotFoundError) as error:
        assert str(copy.name) in str(error), f"an error that does not name the file: {error}"
        assert "weights_only" not in str(error), f"an error with torch's unsafe advice: {error}"
        return "error", kind
    except Exception as error:
        raise AssertionError(f"{kind}: {type(error).__name__}: {error}") from error
    finally:
        grown = memory("VmHWM") - before
        shutil.rmtree(copy) if root.is_dir() else copy.unlink()
    assert grown <= 2 * len(data) + SLACK, f"{kind}: {grown} bytes of memory for a file of {len(data)}"
    damaged = [i for i, (a, b) in enumerate(zip(target.bytes, data, strict=False)) if a != b]
    in_header = any(low <= i < high for i in damaged for low, high in target.header)
    if len(data) == len(target.bytes) and (not in_header or zipfile.is_zipfile(target.file)):
        assert changed(target.weights, after) <= len(damaged) * target.unit, f"{kind}: more changed than was damaged"
    return "load", kind


def run(count: int, seed: int = 0) -> Counter[tuple[str, str]]:
    """`count` mutations in turn over all targets; how many ended how."""
    ends: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "work").mkdir()
        found = targets(Path(name))
        for index in range(count):
            target = found[index % len(found)]
            try:
                end, _ = run_one(random.Random(f"{seed}-{index}"), target, Path(name) / "work")
            except AssertionError as error:
                raise AssertionError(f"mutation {index} of seed {seed}, {target.file.name}: {error}") from error
            ends[end, target.file.name] += 1
    return ends


if __name__ == "__main__":
    torch.set_num_threads(1)
    total = int(sys.argv[1]) if len(sys.argv) > 1 else 2400
    for (end, file), number in sorted(run(total, int(sys.argv[2]) if len(sys.argv) > 2 else 0).items()):
        print(f"{number:6d}  {end:<6} {file}")
    print(f"{total} mutations: no crash, no hang, no foreign exception, no memory beyond twice the file")
