"""Files built to crash, fill memory, hang or slip other weights in: each is refused, within seconds, in a few words."""

import io
import json
import pickle
import pickletools
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
from llama.checkpoint import open_checkpoint
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


@pytest.mark.parametrize("name", HOSTILE)
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
@pytest.mark.parametrize("count", [2000, pytest.param(6_000, marks=pytest.mark.slow)])
def test_damage_ends_in_an_error_or_a_right_load(count: int) -> None:
    ends = fuzz_checkpoints.run(count, seed=count)
    assert sum(ends.values()) == count and {end for end, _ in ends} <= {"error", "load", "own reader refuses"}
    assert all(sum(n for (end, _), n in ends.items() if end == kind) > count // 10 for kind in ("error", "load"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_damage_of_gguf_files_ends_in_an_error_or_a_right_load() -> None:
    ends = fuzz_checkpoints.run(20_000, 7, fuzz_checkpoints.gguf_targets)
    assert sum(ends.values()) == 20_000 and {end for end, _ in ends} <= {"error", "load", "own reader refuses"}
    assert all(ends[kind, name] > 500 for kind in ("error", "load") for name in ("small.gguf", "wide.gguf"))
