"""Damage small checkpoints and vocabularies of every format, seeded, and open and load what is left.

Each mutation (`mutations.py`) has to end in an error of ours or in a right load: no signal, within SECONDS, with at most
twice the file and 64 MB of new memory, a message of bounded length, and the weights that torch's or safetensors' own
reader gives (`own_readers.py`). `python tests/fuzz_checkpoints.py --count 20000 --seed 1` prints the counts.
"""

import argparse
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import checkpoint_files as files
import mutations
import own_readers
import torch
from torch import Tensor

from llama import Tokenizer
from llama.checkpoint import open_checkpoint
from llama.checkpoint.pth import read_pth
from llama.checkpoint.safetensors import read_safetensors
from llama.checkpoint.tokenizers import open_tokenizer
from llama.errors import LlamaError
from llama.quantization.codecs import quantize_int4, quantize_int8

SLACK = 64_000_000  # bytes
SECONDS = 5.0  # of CPU time
PATIENCE = 60  # seconds on the clock, which end the child
BATCH = 250  # mutations for each child
MOST_BYTES = 64  # that a mutation of bytes anywhere changes and leaves in place
LONGEST = 1200  # characters of a message, the path included
VOCABULARY = Path(__file__).resolve().parent.parent / "checkpoints" / "demo" / "tokenizer.model"
FINE = ("error", "load", "own reader refuses")


class Record(NamedTuple):
    """One mutation's end ("error", "load" or what went wrong), its class, CPU seconds and bytes of new memory."""

    end: str
    kind: str
    seconds: float
    grown: int


class Ends:
    """What became of many mutations, by file and by class of damage."""

    def __init__(self) -> None:
        self.files: Counter[tuple[str, str]] = Counter()
        self.kinds: Counter[tuple[str, str]] = Counter()
        self.bad: Counter[str] = Counter()
        self.seconds, self.grown = 0.0, 0

    def add(self, record: Record, index: int, file: str, seed: int) -> None:
        """Count one; what is bad is said at once, with what makes it again."""
        end = record.end.split(":")[0]
        self.files[file, end] += 1
        self.kinds[record.kind, end] += 1
        self.seconds, self.grown = max(self.seconds, record.seconds), max(self.grown, record.grown)
        if end not in FINE:
            self.bad[end] += 1
            print(f"mutation {index} of seed {seed}, {file}, {record.kind}: {record.end}", file=sys.stderr, flush=True)

    def merge(self, other: "Ends") -> None:
        """Add the counts of another run."""
        for mine, theirs in ((self.files, other.files), (self.kinds, other.kinds), (self.bad, other.bad)):
            mine.update(theirs)  # type: ignore[arg-type]
        self.seconds, self.grown = max(self.seconds, other.seconds), max(self.grown, other.grown)

    def table(self) -> str:
        """A line for each file and each class: how many ended how."""
        lines = []
        for title, counts in (("by file", self.files), ("by class", self.kinds)):
            columns = sorted({end for _, end in counts})
            lines.append(f"{title:40}" + "".join(f"{column:>20}" for column in columns))
            for row in sorted({row for row, _ in counts}):
                lines.append(f"{row:40}" + "".join(f"{counts[row, column]:20}" for column in columns))
        return "\n".join(lines)


class Target:
    """One file to damage, within the checkpoint it belongs to."""

    def __init__(self, root: Path, file: Path) -> None:
        self.root, self.file, self.bytes = root, file, file.read_bytes()
        self.structured = mutations.mutation_for(file.name, self.bytes)


def targets(folder: Path) -> list[Target]:
    """A checkpoint of every format, and every kind of file in it."""
    params = {**files.GQA, "dim": 32, "vocab_size": 24}
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
    found += [_quantized(folder / scheme, weights, params, scheme) for scheme in ("int8", "int4")]
    singles = [files.write_llama2c(folder / f"v{version}.bin", weights, params, version) for version in range(3)]
    singles.append(files.write_training(folder / "ckpt.pt", weights, params))
    singles.append(Path(shutil.copy(VOCABULARY, folder / "tokenizer.model")))
    singles.append(folder / "tokenizer.bin")
    pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(b"<0x%02X>" % byte for byte in range(256)), b" ", b"a", b" a", b"b"]
    entries = (len(piece).to_bytes(4, "little") + piece for piece in pieces)
    singles[-1].write_bytes(b"\7\0\0\0" + b"".join(b"\0\0\0\0" + entry for entry in entries))
    return [*found, *(Target(path, path) for path in singles), *_ggufs(folder)]


def _quantized(folder: Path, weights: Mapping[str, Tensor], params: Mapping[str, Any], scheme: str) -> Target:
    """As `convert --quantize` writes it: X.scales beside X.weight (the head in int8)."""
    made = dict[str, Tensor]()
    for name, weight in weights.items():
        if weight.ndim < 2 or name == "tok_embeddings.weight":
            made[name] = weight
            continue
        quantize = quantize_int4 if scheme == "int4" and name != "output.weight" else quantize_int8
        made[name], made[name.removesuffix("weight") + "scales"] = quantize(weight)
    path = files.write_meta(folder, weights, params) / "consolidated.00.pth"
    torch.save(made, path)
    return Target(folder, path)


def _ggufs(folder: Path) -> list[Target]:
    """A file of blocks of 32 with a SentencePiece vocabulary, and one of blocks of 256 with a BPE one; one of a split set."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a", "b"]
    types = [2, 3, 3, *[6] * 256, 1, 1, 1, 1]
    sp = {"model": "llama", "tokens": pieces, "scores": [-float(i) for i in range(len(pieces))], "token_type": types}
    alphabet = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 324))]
    bpe = {"model": "gpt2", "pre": "llama-bpe", "tokens": [*alphabet, "ab", "abc", "<|end|>"]}
    bpe |= {
        "token_type": [*[1] * (len(alphabet) + 2), 3],
        "merges": ["a b", "ab c"],
        "bos_token_id": 256,
        "eos_token_id": 258,
    }
    small, wide = (
        {**files.GQA, "vocab_size": 24},
        {**files.GQA, "vocab_size": 24, "dim": 256, "n_layers": 1, "multiple_of": 256},
    )
    kinds = {"wq.weight": "Q4_0", "wk.weight": "Q4_1", "wv.weight": "Q5_0", "wo.weight": "Q5_1", "w1.weight": "Q8_0"}
    k_kinds = {"wq.weight": "Q4_K", "wk.weight": "Q5_K", "wv.weight": "Q6_K", "w1.weight": "Q4_K", "w2.weight": "Q6_K"}
    one = files.write_gguf(folder / "small.gguf", files.weights(small, seed=3), small, kinds, **_tokenizer(sp))
    two = files.write_gguf(
        folder / "wide.gguf", files.weights(wide, seed=3), wide, {**k_kinds, "w3.weight": "BF16"}, **_tokenizer(bpe)
    )
    files.write_gguf(folder / "split" / "x.gguf", files.weights(small, seed=3), small, split=12)
    return [Target(one, one), Target(two, two), Target(folder / "split", folder / "split" / "x-00002-of-00002.gguf")]


def _tokenizer(values: dict[str, Any]) -> dict[str, Any]:
    return {f"tokenizer__ggml__{name}": value for name, value in values.items()}


def mutate(rng: mutations.Dice, target: Target) -> bytes:
    """The file's new bytes: mostly a part of its structure, else bytes anywhere."""
    if rng.random() < 0.7:
        return target.structured(rng, target.bytes)
    data = bytearray(target.bytes)
    kind = rng.choose("bytes", "flip", "cut", "grow", "swap")
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
    if checkpoint.tokenizer_source is not None:
        tokenizer = open_tokenizer(None, checkpoint)
        tokenizer.decode(tokenizer.encode("Hello w\u00f6rld", bos=False, eos=False))


def load_once(path: Path) -> None:
    """What is made once for a process is not the file's: the parent makes it, before it forks."""
    load(path)


def tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in what a reader gives, by its place."""
    for key, item in value.items() if isinstance(value, dict) else ():
        if isinstance(item, Tensor):
            yield str(key), item.detach()
        else:
            yield from ((f"{key}/{name}", tensor) for name, tensor in tensors(item))


def unlike(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[str]:
    """Names of ours that theirs lack, or hold in another type, shape or with one other bit."""
    return [name for name in ours if name not in theirs or not _same(ours[name], theirs[name])]


def _same(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    one, other = one.contiguous().view(-1), other.contiguous().view(-1)
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def differs(path: Path) -> bool:
    """Whether our reader of this container and its own one give other tensors."""
    read = read_safetensors if path.suffix == ".safetensors" else read_pth
    ours, theirs = dict(tensors(read(path)[0])), dict(tensors(own_readers.container(path)))
    return ours.keys() != theirs.keys() or bool(unlike(ours, theirs))


def _n_unlike(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> int:
    """Bytes of ours that theirs hold otherwise; all of a weight in another shape or type."""
    count = 0
    for name in unlike(ours, theirs):
        one, other = (tensors[name].contiguous().view(-1).view(torch.uint8) for tensors in (ours, theirs))
        count += int(one.ne(other).sum()) if one.shape == other.shape else one.numel()
    return count


def check_weights(copy: Path, victim: Path, target: Target, kind: str) -> str:
    """ "load" where all is as the formats' own readers give it.

    "own reader refuses": they do, and the weights are the undamaged file's, but for bytes that the mutation changed.
    """
    if copy.name.startswith("tokenizer."):
        return "load"
    checkpoint = open_checkpoint(copy)
    ours = {name: checkpoint.read(name) for name in checkpoint.names()}
    if checkpoint.format == "gguf":
        ours = own_readers.one_nan(ours)
    try:
        if bad := unlike(ours, own_readers.weights(copy)):
            return f"WRONG WEIGHTS: {bad[:3]}"
        if victim.suffix in (".pth", ".pt", ".safetensors") and differs(victim):
            return "WRONG WEIGHTS: of the container"
        return "load"
    except Exception as error:
        why = f"{type(error).__name__} {str(error)[:300]}"
        n = _n_unlike(ours, own_readers.weights(target.root))
        if n > (MOST_BYTES if kind.startswith("bytes") else 0):
            return f"WRONG WEIGHTS: {n} bytes, and the own reader refuses: {why}"
        return f"own reader refuses: {why}"


def run_one(rng: mutations.Dice, target: Target, folder: Path, warmed: int) -> Record:
    """Damage, open, read: how it ended; `warmed` is the resident memory before all of it."""
    data, copy = mutate(rng, target), folder / target.root.name
    if target.root.is_dir() and not copy.exists():
        shutil.copytree(target.root, copy)
    victim = copy / target.file.name if target.root.is_dir() else copy
    victim.unlink(missing_ok=True)
    victim.write_bytes(data)
    Path("/proc/self/clear_refs").write_text("5") if Path("/proc/self/clear_refs").exists() else None
    began, end = time.process_time(), "load"
    try:
        load(copy)
    except (LlamaError, FileNotFoundError) as error:
        bad = copy.name not in str(error) or len(str(error)) > LONGEST or "weights_only" in str(error)
        end = f"BAD MESSAGE: {str(error)[:200]}" if bad else "error"
    except Exception as error:
        end = f"FOREIGN: {type(error).__name__} {str(error)[:200]}"
    seconds, grown = time.process_time() - began, memory("VmHWM") - warmed
    if grown > 2 * len(data) + SLACK:
        end = f"MEMORY: {grown} bytes for a file of {len(data)}"
    elif seconds > SECONDS:
        end = f"SLOW: {seconds:.1f} s"
    try:
        end = check_weights(copy, victim, target, rng.kind) if end == "load" else end
    except Exception as error:  # it loaded a moment ago
        end = f"FOREIGN: {type(error).__name__} {str(error)[:200]}, the second time"
    victim.unlink()
    victim.write_bytes(target.bytes)
    return Record(end, rng.kind, seconds, grown)


def _child(found: list[Target], first: int, last: int, seed: int, folder: Path, log: Path) -> None:
    """Mutations first..last; a line in `log` for each, so that the parent knows at which one this process died."""
    warmed = memory("VmRSS")
    with log.open("w") as file:
        for index in range(first, last):
            signal.alarm(PATIENCE)  # no handler: it ends the process, in C code too
            record = run_one(mutations.Dice(f"{seed}-{index}"), found[index % len(found)], folder, warmed)
            signal.alarm(0)
            file.write(json.dumps(record) + "\n")
            file.flush()


def run(count: int, seed: int = 0, only: str = "") -> Ends:
    """`count` mutations in turn over all targets (or those of one file name), in forked children; what became of each."""
    ends = Ends()
    with tempfile.TemporaryDirectory() as name:
        folder, log, work = Path(name), Path(name) / "log", Path(name) / "work"
        found, index = [target for target in targets(folder) if only in target.file.name], 0
        for target in found:
            load_once(target.root)
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
            records = [Record(*json.loads(line)) for line in log.read_text().splitlines()]
            if len(records) < last - index:
                how = f"{os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "none, it ended"
                records.append(Record(f"SIGNAL: {how}", "unknown", 0.0, 0))
            for offset, record in enumerate(records):
                ends.add(record, index + offset, found[(index + offset) % len(found)].file.name, seed)
            index += len(records)
    return ends


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="files with this in their name, such as .gguf")
    parser.add_argument("--batches", type=int, default=1, help="of COUNT mutations each, with seeds from SEED on")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    total, start = Ends(), time.monotonic()
    for batch in range(args.batches):
        began = time.monotonic()
        total.merge(run(args.count, args.seed + batch, args.only))
        print(
            f"seed {args.seed + batch}: {args.count} in {time.monotonic() - began:.0f} s, bad {total.bad}", flush=True
        )
    print(total.table())
    print(f"{args.batches * args.count} mutations in {time.monotonic() - start:.0f} s; bad: {total.bad or 'none'}")
    print(f"slowest {total.seconds:.2f} s of CPU time, most memory {total.grown / 1e6:.0f} MB above the warmed parent")
