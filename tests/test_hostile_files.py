"""Files built to crash, fill memory, hang or slip other weights in: each is refused, within seconds, in a few words."""

import io
import json
import os
import pickle
import pickletools
import signal
import struct
import time
import tracemalloc
import zipfile
import zlib
from pathlib import Path
from typing import Any

import checkpoint_files as files
import fuzz_checkpoints
import mutations
import pytest
import torch

from llama import Tokenizer
from llama.checkpoint import ggml_codecs, llama2c, mapping, open_checkpoint, pth
from llama.checkpoint import hf as hf_format
from llama.checkpoint.pth import read_pth
from llama.errors import LlamaError


@pytest.fixture
def meta(tmp_path: Path) -> Path:
    return files.write_meta(tmp_path / "llama", files.weights())


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return files.write_hf(tmp_path / "hf", files.weights())


def archive(path: Path, data: bytes, **records: bytes) -> None:
    with zipfile.ZipFile(path, "w") as target:
        for name, body in {"data.pkl": data, "byteorder": b"little", "version": b"3\n", **records}.items():
            target.writestr(f"a/{name}", body)


def records(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as source:
        return {entry.filename: source.read(entry) for entry in source.infolist()}


def rewrite(path: Path, made: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as target:
        for name, body in made.items():
            target.writestr(name, body)


def refused(path: Path, words: str = "expected") -> None:
    """A LlamaError of bounded length, soon, for little memory."""
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(LlamaError, match=words) as error:
            open_checkpoint(path)
        assert tracemalloc.get_traced_memory()[1] < 80_000_000 and time.process_time() - start < 5
        assert len(str(error.value)) < 1300
    finally:
        tracemalloc.stop()


HEX = b"c_codecs\nencode\n" * 28 + b"X\4\0\0\0AAAA" + b"X\3\0\0\0hex\x86R" * 28
HOSTILE = {
    "a key nested a million deep": b"})" + b"\x85" * 1_000_000 + b"K\1s.",
    "a key whose hash takes 2 ** 36 steps": b"}" + mutations.NESTED + b"K\1s.",
    "3 GB in 20 bytes": b"cbuiltins\nbytearray\nJ\0\0\0\x70\x85R.",
    "hex of hex": HEX + b".",
    "3 GB of zeros": b"ctorch\nFloatTensor\nJ\0\0\0\x30\x85R.",
    "a dict in itself": b"}q\0X\1\0\0\0ah\0s.",
    "a key that is a tuple": b"}K\1\x85K\1s.",
    "shared tuples": b"}X\1\0\0\0b" + mutations.NESTED + b"s.",
    "a memo of 4 billion": b"}r\xff\xff\xff\xff.",
    "a string longer than the file": b"}X\xff\xff\xff\xffa.",
    "a million dicts": b"](" + b"}" * 1_000_000 + b"e.",
    "deep lists": b"]" * 1000 + b"a" * 999 + b".",
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * ("million" in n)) for n in HOSTILE])
def test_a_hostile_pickle(meta: Path, name: str) -> None:
    data = b"\x80\x02" + HOSTILE[name]
    archive(meta / "consolidated.00.pth", data)
    refused(meta, "not readable as tensors")
    (meta / "consolidated.00.pth").write_bytes(data)  # not even an archive
    refused(meta, "not readable as tensors")
    archive(meta / "x.pt", data)
    refused(meta / "x.pt", "not readable as tensors")


@pytest.mark.parametrize("change", [-4, -1, 8, None])
def test_a_record_of_another_length(meta: Path, change: int | None) -> None:
    path = meta / "consolidated.00.pth"
    made = records(path)
    name = next(name for name in made if name.endswith("/data/3"))
    made[name] = made[name] + b"\0" * 8 if change == 8 else made[name][:change]
    if change is None:
        del made[name]
    rewrite(path, made)
    refused(meta, "the record of storage '3'")


def test_another_byte_order(meta: Path) -> None:
    path = meta / "consolidated.00.pth"
    rewrite(path, {name: b"big" if name.endswith("byteorder") else body for name, body in records(path).items()})
    refused(meta, "big-endian")


def test_a_lazy_negation(meta: Path) -> None:
    path = meta / "consolidated.00.pth"
    torch.save({name: torch._neg_view(tensor) for name, tensor in torch.load(path).items()}, path)
    refused(meta, "negation")


def _entry(name: bytes, data: bytes, at: int) -> tuple[bytes, bytes]:
    crc, size = zlib.crc32(data), len(data)
    local = struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 0, 0, 0, crc, size, size, len(name), 0) + name + data
    central = struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, 0, 0, 0, crc, size, size, len(name), 0, 0, 0, 0, 0, at)
    return local, central + name


def test_two_directories(meta: Path) -> None:
    """Python's zipfile reads the zip64 record before the locator, torch the one that the locator points to."""
    body, directories = b"", []
    for data in (b"\x80\x02}.", b"\x80\x02]."):
        local, central = _entry(b"a/data.pkl", data, len(body))
        body += local
        directories.append(central)
    places = []
    for central in directories:
        start = len(body)
        body += central
        places.append(len(body))
        body += struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, len(central), start)
    body += struct.pack("<4sLQL", b"PK\6\7", 0, places[0], 1)
    body += struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    (meta / "consolidated.00.pth").write_bytes(body)
    refused(meta, "zip64 records do not follow")


@pytest.mark.parametrize("field", [4, 6, 8])
def test_one_disk_of_several(meta: Path, field: int) -> None:
    path = meta / "consolidated.00.pth"
    data = bytearray(path.read_bytes())
    data[len(data) - 22 + field] += 1
    path.write_bytes(data)
    refused(meta, "several parts")


def test_an_entry_on_another_disk(meta: Path) -> None:
    path = meta / "consolidated.00.pth"
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PK\1\2") + 34] = 2
    path.write_bytes(data)
    refused(meta, "several parts")


def test_a_record_that_is_a_folder(meta: Path) -> None:
    """torch leaves its tensor as the heap was."""
    path = meta / "consolidated.00.pth"
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PK\1\2", 0, data.index(b"/data/3", data.index(b"PK\1\2"))) + 38] |= 0x10
    path.write_bytes(data)
    refused(meta, "data/3' is a folder")


def test_an_old_file_without_one_of_its_storages(meta: Path) -> None:
    """torch leaves such a tensor as the heap was."""
    path = meta / "consolidated.00.pth"
    torch.save(torch.load(path), path, _use_new_zipfile_serialization=False)
    assert torch.equal(open_checkpoint(meta).read("norm.weight"), files.weights()["norm.weight"])
    data, stream, places = path.read_bytes(), io.BytesIO(path.read_bytes()), []
    for _ in range(5):
        places.append(stream.tell())
        list(pickletools.genops(stream))
    keys = pickle.loads(data[places[4] : stream.tell()])
    last, place = stream.tell(), stream.tell()
    for _ in keys:
        last, place = place, place + 8 + 4 * struct.unpack_from("<q", data, place)[0]
    path.write_bytes(data[: places[4]] + pickle.dumps(keys[:-1], protocol=2) + data[stream.tell() : last])
    refused(meta, "the record of storage .* is missing")


@pytest.mark.parametrize("zipped", [True, False])
def test_what_torch_saves_is_read_as_torch_reads_it(tmp_path: Path, zipped: bool) -> None:
    base = torch.arange(24.0).view(4, 6)
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    kinds = {str(dtype): base.to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.int64, torch.bool)}
    views = {"a": base, "view": base[1:, ::2], "again": base, "empty": torch.empty(0, 3), "scalar": torch.tensor(2.5)}
    plain = {"x": [1, -1, 1 << 40, 10**30, 2.5, None, True, "\u00fc", (1, (2,)), base.size(), torch.float32]}
    value = {**kinds, **views, "plain": plain, "sd": model.state_dict(), "optimizer": optimizer.state_dict()}
    value |= {"parameter": torch.nn.Parameter(base)}
    path = tmp_path / "x.pt"
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    ours, mapped = read_pth(path)
    assert mapped is zipped and list(ours) == list(value) and ours["a"].data_ptr() == ours["again"].data_ptr()
    assert ours["view"].stride() == value["view"].stride()  # type: ignore[union-attr]
    assert not fuzz_checkpoints.differs(path)
    assert ours["plain"]["x"][:9] == plain["x"][:9]


# ------------------------------------------------------------------------------------ JSON and names


@pytest.mark.parametrize(
    "change",
    [
        *({"architectures": 5}, {"architectures": {"a": 1}}, {"rope_scaling": 5}, {"head_dim": [1]}),
        *({"hidden_size": True}, {"num_hidden_layers": 10**400}, {"rope_theta": [1]}, {"rms_norm_eps": "x" * 100_000}),
    ],
)
def test_a_configuration_of_other_types(hf: Path, change: dict[str, Any]) -> None:
    (hf / "config.json").write_text(json.dumps(files.hf_config(files.GQA, **change)))
    refused(hf)


@pytest.mark.parametrize(
    "content", ['{"a":' + "[" * 200_000, '{"a":[' + "{}," * 20_000_000 + "1]}", '{"a":' + "9" * 9999 + "}"]
)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_json_that_is_large_or_deep(hf: Path, content: str, name: str) -> None:
    data = content.encode()
    (hf / name).write_bytes(len(data).to_bytes(8, "little") + data if name.endswith("s") else data)
    refused(hf, "JSON|header of")


@pytest.mark.parametrize("twice", [True, False])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "safetensors", "params.json"])
def test_a_key_twice(tmp_path: Path, name: str, twice: bool) -> None:
    """Which of the two counts is each reader's own affair; a key in two objects is no such case."""
    meta = files.write_meta(tmp_path / "meta", files.weights())
    hf = files.write_hf(tmp_path / "hf", files.weights(), files=2)
    path = next(path for path in [*meta.iterdir(), *sorted(hf.iterdir())] if path.name.endswith(name))
    data, again = path.read_bytes(), b'"n_layers": 2, ' if name == "params.json" else b'"x": {"x": 1}, '
    again, start = again * 2 if twice else again, data.index(b"{") + 1
    if name == "safetensors":
        again = b'"__metadata__": {"a": "b"' + b', "a": "c"' * twice + b"}, "
        data = data.replace(b'"__metadata__":{"format":"pt"},', b"")
        data = struct.pack("<Q", int.from_bytes(data[:8], "little") + len(again) - 31) + data[8:]
    elif name == "params.json":
        data = data.replace(b'"n_layers": 2, ', b"")
    path.write_bytes(data[:start] + again + data[start:])
    if twice:
        refused(path.parent, "the key '.*' twice")
    else:
        open_checkpoint(path.parent)


@pytest.mark.parametrize("shape", [[1] * 200_000, [1, True], [1 << 70, 0], [1] * 9])
def test_a_shape_that_no_tensor_has(hf: Path, shape: list[int]) -> None:
    header = json.dumps({"x": {"dtype": "U8", "shape": shape, "data_offsets": [0, 1]}}).encode()
    (hf / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    refused(hf, "'x' is U8")


def test_a_layer_with_a_large_number(meta: Path) -> None:
    path = meta / "consolidated.00.pth"
    torch.save({**torch.load(path), "layers.99999999.attention.wq.weight": torch.zeros(1)}, path)
    (meta / "params.json").write_text(json.dumps({**files.GQA, "n_layers": 10**8}))
    refused(meta, "the files hold 3 layers, but")


def test_files_with_odd_names(hf: Path) -> None:
    (hf / "model.safetensors").rename(hf / "model-x-of-y.safetensors")
    with pytest.raises(FileNotFoundError, match="neither model"):
        open_checkpoint(hf)


def test_a_vocabulary_that_is_too_large(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    with path.open("wb") as file:
        file.truncate(1 << 32)
    with pytest.raises(LlamaError, match="no vocabulary of Llama's"):
        Tokenizer(str(path))


# ---------------------------------------------------------------------------------------- mutations


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.proof)])
def test_damage_ends_in_an_error_or_a_right_load(count: int) -> None:
    ends = fuzz_checkpoints.run(count, seed=count)
    assert sum(ends.files.values()) == count and not ends.bad
    assert all(sum(n for (_, end), n in ends.kinds.items() if end == kind) > count // 10 for kind in ("error", "load"))


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore")
def test_damage_of_gguf_files_ends_in_an_error_or_a_right_load() -> None:
    ends = fuzz_checkpoints.run(20_000, seed=7, only=".gguf")
    assert sum(ends.files.values()) == 20_000 and not ends.bad
    assert all(ends.files[name, kind] > 500 for kind in ("error", "load") for name in ("small.gguf", "wide.gguf"))


def _unchecked_tensor(tensors: Any, record: Any) -> torch.Tensor:
    """Without a check of lengths: a record's first bytes, then what follows it in the file."""
    start = tensors._extents[record.storage.key].start
    storage = tensors._file[start : start + record.storage.size]
    return torch.empty(0, dtype=record.dtype).set_(storage, record.offset, record.shape, record.strides)


def _takes_memory(path: Path) -> Any:
    torch.zeros(40_000_000)
    return open_checkpoint(path)


def _dies(path: Path) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _raises(path: Path) -> Any:
    raise KeyError(path)


def _one_value_off(*args: Any) -> torch.Tensor:
    return mapping.tensor_at(args[0], args[1] - 4, *args[2:])


PLANTED: dict[str, tuple[str, str, Any, str, Any]] = {
    "lengths": ("consolidated.01.pth", "WRONG WEIGHTS", pth._Tensors, "_tensor", _unchecked_tensor),
    "heads": ("model.safetensors", "WRONG WEIGHTS", hf_format, "rotary_heads", lambda name, params: 0),
    "places": ("v0.bin", "WRONG WEIGHTS", llama2c, "tensor_at", _one_value_off),
    "memory": ("v1.bin", "MEMORY", fuzz_checkpoints, "open_checkpoint", _takes_memory),
    "signal": ("v1.bin", "SIGNAL", fuzz_checkpoints, "open_checkpoint", _dies),
    "exception": ("v1.bin", "FOREIGN", fuzz_checkpoints, "open_checkpoint", _raises),
    "blocks": ("small.gguf", "WRONG WEIGHTS", ggml_codecs, "_nibbles", lambda low: torch.cat([low >> 4, low & 15], -1)),
    "time": ("v1.bin", "SLOW", fuzz_checkpoints, "SECONDS", 1e-9),
    "message": ("v1.bin", "BAD MESSAGE", fuzz_checkpoints, "LONGEST", 9),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PLANTED)
def test_the_mutator_notices(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A fault in our readers, planted, for each end that the mutator calls bad."""
    file, end, *fault = PLANTED[name]
    monkeypatch.setattr(*fault)
    monkeypatch.setattr(fuzz_checkpoints, "load_once", lambda path: None)
    assert set(
        fuzz_checkpoints.run({"lengths": 120, "memory": 2, "signal": 2}.get(name, 20), seed=1, only=file).bad
    ) >= {end}
