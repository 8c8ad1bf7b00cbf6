"""Damage small checkpoints and vocabularies of every format, seeded, and open and load what is left.

Each mutation (`mutations.py`) has to end in an error of ours or in a right load: no signal, within SECONDS, with at most
twice the file and 64 MB of new memory, a message of bounded length, and the weights that torch's or safetensors' own
reader gives. `python tests/fuzz_checkpoints.py --count 20000 --seed 1` prints the count of each end.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoint_files as files
import mutations
import torch
from safetensors.torch import load_file
from torch import Tensor

from llama import Tokenizer
from llama.checkpoint import open_checkpoint
from llama.checkpoint.pth import read_pth
from llama.checkpoint.safetensors import read_safetensors
from llama.errors import LlamaError

SLACK = 64_000_000  # bytes
SECONDS = 5  # of CPU time; twelve times that on the clock ends the child
BATCH = 250  # mutations for each child
LONGEST = 1200  # characters of a message, the path included
VOCABULARY = Path(__file__).resolve().parent.parent / "checkpoints" / "demo" / "tokenizer.model"
End = tuple[str, str]  # "error", "load" or what went wrong; the file's name


class Target:
    """One file to damage, within the checkpoint it belongs to."""

    def __init__(self, root: Path, file: Path) -> None:
        self.root, self.file, self.bytes = root, file, file.read_bytes()
        self.structured = mutations.mutation_for(file.name, self.bytes)


def targets(folder: Path) -> list[Target]:
    """A checkpoint of every format, and every kind of file in it."""
    params = {**files.GQA, "dim": 16, "vocab_size": 24}
    weights = files.weights(params, seed=3)
    meta, old = files.write_meta(folder / "meta", weights, params, 2), files.write_meta(folder / "old", weights, params)
    path = old / "consolidated.00.pth"
    torch.save(torch.load(path), path, _use_new_zipfile_serialization=False)
    one, two = (files.write_hf(folder / name, weights, params, count) for name, count in (("one", 1), ("two", 2)))
    binary = files.write_hf(folder / "binary", weights, params, bin_file=True)
    wide = {**params, "head_dim": 6, "attention_bias": True, "mlp_bias": True}
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    wide_hf = files.write_hf(folder / "wide", files.weights(wide), wide, head_dim=6, rope_scaling=rope)
    scaled = {**wide, "use_scaled_rope": True, "rope_scaling_factor": 8}
    wide_meta = files.write_meta(folder / "scaled", files.weights(wide), scaled)
    found = [
        Target(wide_hf, wide_hf / "config.json"),
        Target(wide_hf, wide_hf / "model.safetensors"),
        Target(wide_meta, wide_meta / "params.json"),
        Target(meta, meta / "consolidated.01.pth"),
        Target(meta, meta / "params.json"),
        Target(old, path),
        Target(one, one / "model.safetensors"),
        Target(one, one / "config.json"),
        Target(two, two / "model-00002-of-00002.safetensors"),
        Target(two, two / "model.safetensors.index.json"),
        Target(binary, binary / "pytorch_model.bin"),
    ]
    singles = [files.write_llama2c(folder / f"v{version}.bin", weights, params, version) for version in range(3)]
    singles.append(files.write_training(folder / "ckpt.pt", weights, params))
    singles.append(Path(shutil.copy(VOCABULARY, folder / "tokenizer.model")))
    singles.append(folder / "tokenizer.bin")
    pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(b"<0x%02X>" % byte for byte in range(256)), b" ", b"a", b" a", b"b"]
    entries = (len(piece).to_bytes(4, "little") + piece for piece in pieces)
    singles[-1].write_bytes(b"\7\0\0\0" + b"".join(b"\0\0\0\0" + entry for entry in entries))
    return [*found, *(Target(path, path) for path in singles)]


def mutate(rng: random.Random, target: Target) -> bytes:
    """The file's new bytes: mostly a part of its structure, else bytes anywhere."""
    if rng.random() < 0.7:
        return target.structured(rng, target.bytes)
    data = bytearray(target.bytes)
    kind = rng.choice(["flip", "cut", "grow", "swap"])
    at, length = rng.randrange(len(data)), rng.choice([1, 4, 64])
    if kind == "flip":
        for _ in range(length):
            data[rng.randrange(min(len(data), rng.choice([64, 1024, len(data)])))] = rng.randrange(256)
    elif kind == "cut":
        del data[at : rng.choice([at + length, len(data)])]
    elif kind == "grow":
        data[at:at] = rng.randbytes(length)
    else:
        other = rng.randrange(len(data))
        data[at : at + 4], data[other : other + 4] = data[other : other + 4], data[at : at + 4]
    return bytes(data)


def memory(key: str) -> int:
    """VmRSS or VmHWM (its peak since `clear_refs`) in bytes; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    return int(re.findall(rf"{key}:\s*(\d+)", status.read_text())[0]) * 1024 if status.exists() else 0


def load(path: Path) -> None:
    """Open and read all of it."""
    if path.name.startswith("tokenizer."):
        tokenizer = Tokenizer(str(path))
        tokenizer.decode(tokenizer.encode("Hello w\u00f6rld", bos=False, eos=False))
        return
    checkpoint = open_checkpoint(path)
    for name in checkpoint.names():
        checkpoint.read(name).sum()


def tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in what a reader gives, by its place."""
    for key, item in value.items() if isinstance(value, dict) else ():
        if isinstance(item, Tensor):
            yield str(key), item.detach()
        else:
            yield from ((f"{key}/{name}", tensor) for name, tensor in tensors(item))


def differs(path: Path) -> bool:
    """Whether our reader of this container and its own one give other tensors."""
    if path.suffix == ".safetensors":
        ours, theirs = read_safetensors(path)[0], load_file(path)
    elif path.suffix in (".pth", ".pt") or path.name == "pytorch_model.bin":
        ours, theirs = (
            read_pth(path)[0],
            torch.load(path, weights_only=True, map_location="cpu", mmap=zipfile.is_zipfile(path)),
        )
    else:
        return False
    a, b = dict(tensors(ours)), dict(tensors(theirs))
    same = a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and a[name].shape == b[name].shape for name in a)
    return not same or any(
        a[name].contiguous().view(-1).view(torch.uint8).ne(b[name].contiguous().view(-1).view(torch.uint8)).any()
        for name in a
    )


def run_one(rng: random.Random, target: Target, folder: Path) -> str:
    """Damage, open, read: how it ended."""
    data, copy = mutate(rng, target), folder / target.root.name
    if target.root.is_dir() and not copy.exists():
        shutil.copytree(target.root, copy)
    victim = copy / target.file.name if target.root.is_dir() else copy
    victim.unlink(missing_ok=True)
    victim.write_bytes(data)
    Path("/proc/self/clear_refs").write_text("5") if Path("/proc/self/clear_refs").exists() else None
    before, began, end = memory("VmRSS"), time.process_time(), "load"
    try:
        load(copy)
    except (LlamaError, FileNotFoundError) as error:
        bad = copy.name not in str(error) or len(str(error)) > LONGEST or "weights_only" in str(error)
        end = f"BAD MESSAGE {str(error)[:200]}" if bad else "error"
    except Exception as error:
        end = f"FOREIGN {type(error).__name__}: {str(error)[:200]}"
    grown = memory("VmHWM") - before
    if grown > 2 * len(data) + SLACK:
        end = f"MEMORY: {grown} bytes for a file of {len(data)}"
    elif time.process_time() - began > SECONDS:
        end = "SLOW"
    try:
        return "WRONG WEIGHTS" if end == "load" and differs(victim) else end
    except Exception as error:
        return f"own reader refuses: {type(error).__name__} {str(error)[:300]}"
    finally:
        victim.unlink()
        victim.write_bytes(target.bytes)


def _child(found: list[Target], first: int, last: int, seed: int, folder: Path, log: Path) -> None:
    """Mutations first..last; a line in `log` for each, so that the parent knows at which one this process died."""
    with log.open("w") as file:
        for index in range(first, last):
            signal.alarm(12 * SECONDS)  # no handler: it ends the process, in C code too
            end = run_one(random.Random(f"{seed}-{index}"), found[index % len(found)], folder)
            signal.alarm(0)
            file.write(json.dumps(end) + "\n")
            file.flush()


def run(count: int, seed: int = 0) -> Counter[End]:
    """`count` mutations in turn over all targets, in forked children; how many ended how."""
    ends: Counter[End] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder, log, work = Path(name), Path(name) / "log", Path(name) / "work"
        found, index = targets(folder), 0
        while index < count:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            last = min(count, index + BATCH)
            child = os.fork()
            if child == 0:
                try:
                    _child(found, index, last, seed, work, log)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)
            _, status = os.waitpid(child, 0)
            lines = [json.loads(line) for line in log.read_text().splitlines()]
            if len(lines) < last - index:
                lines.append(f"SIGNAL {os.WTERMSIG(status) if os.WIFSIGNALED(status) else 'none, it ended'}")
            for offset, end in enumerate(lines):
                target = found[(index + offset) % len(found)]
                if end not in ("error", "load"):
                    print(f"mutation {index + offset} of seed {seed}, {target.file.name}: {end}", file=sys.stderr)
                ends[end.split(":")[0], target.file.name] += 1
            index += len(lines)
    return ends


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()
    total = run(args.count, args.seed)
    for (end, file), number in sorted(total.items()):
        print(f"{number:7d}  {end:<12} {file}")
    print(f"{args.count} mutations in {time.monotonic() - start:.0f} s")
