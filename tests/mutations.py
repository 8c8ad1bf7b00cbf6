"""Structure-aware damage to files: each writes a format's parts apart, changes one, and puts the file together again.

Every function notes its class of damage in `Dice.kind`, so that a run can say which classes it met, and how they ended.
"""

import io
import json
import pickletools
import random
import re
import struct
import zipfile
from collections.abc import Callable
from typing import Any


class Dice(random.Random):
    """Random choices, and the class of damage that they came to."""

    kind = ""

    def choose(self, group: str, *kinds: str) -> str:
        """One of `kinds`, which may stand there several times to come more often."""
        found = self.choice(kinds)
        self.kind = f"{group}: {found}"
        return found


INTS = [0, 1, 2, -1, 127, 255, 65535, 1 << 30, (1 << 31) - 1, -(1 << 31)]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 3, 5, 1e9, 1e308, -0.5, 1 << 31, 1 << 63, 10**400, "", "x" * 5000, "../x", [], {}),
    *([1] * 50_000, {"a": [1]}, ["LlamaForCausalLM"], "NaN", [[0]], [1 << 62] * 4, [True, 1]),
]
NESTED = b"X\1\0\0\0aq\0" + b"".join(b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) for i in range(36))
SNIPPETS = [
    b"cbuiltins\nbytearray\n\x8a\x04\0\0\0\x70\x85R",
    b"c_codecs\nencode\nX\2\0\0\0AAX\3\0\0\0hex\x86R",
    b"cos\nsystem\nX\4\0\0\0true\x85R",
    b"ctorch\nTensor\nJ\0\0\0\x40\x85R",
    b"ctorch._utils\n_rebuild_sparse_tensor\n)R",
    b"ccollections\nOrderedDict\n)R",
    b")" + b"\x85" * 100_000,
    b"]" * 5000,
    b"}" + NESTED + b"K\1s",
    b"}q\xf0X\1\0\0\0ah\xf0s",
    NESTED,
    *(
        b"N",
        b"\x88",
        b"K\1",
        b"J\xff\xff\xff\xff",
        b"J\xff\xff\xff\x7f",
        b"G\x7f\xf0\0\0\0\0\0\0",
        b"(",
        b"0",
        b"t",
        b"u",
    ),
    *(b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f", b"r\xff\xff\xff\xff", b"j\xff\xff\xff\x7f", b"R", b"Q", b"b", b"."),
    b"X\xff\xff\xff\x7fabc",
    b"}X\3\0\0\0neg\x88s",
]


def pickle(rng: Dice, data: bytes) -> bytes:
    """Opcodes left out, doubled, exchanged, replaced by hostile ones, and other numbers in them."""
    places = [place or 0 for _, _, place in pickletools.genops(data)] + [len(data)]
    codes = [data[a:b] for a, b in zip(places, places[1:], strict=False)]
    for _ in range(rng.choice([1, 1, 1, 3])):
        at, other = rng.randrange(len(codes)), rng.randrange(len(codes))
        kind = rng.choose("pickle", "left out", "doubled", "exchanged", "replaced", "inserted", "number", "other number", "strings")  # fmt: skip
        if kind == "left out":
            del codes[at]
        elif kind == "doubled":
            codes.insert(at, codes[other])
        elif kind == "exchanged":
            codes[at], codes[other] = codes[other], codes[at]
        elif kind == "replaced":
            codes[at] = rng.choice(SNIPPETS)
        elif kind == "inserted":
            codes.insert(at, rng.choice(SNIPPETS))
        elif kind == "strings":  # names of weights, keys of storages
            strings = [i for i, code in enumerate(codes) if code[:1] == b"X"] or [at]
            near = rng.randrange(len(strings))
            one, two = strings[near], strings[(near + rng.choice([1, 2, 4, len(strings) // 2])) % len(strings)]
            codes[one], codes[two] = codes[two], codes[one]
        else:
            numbers = [i for i, code in enumerate(codes) if code and code[:1] in b"KMJ"] or [at]
            value = b"J" + struct.pack("<i", rng.choice(INTS)) if kind == "number" else codes[rng.choice(numbers)]
            codes[rng.choice(numbers)] = value
    return b"".join(codes)


def archive(rng: Dice, data: bytes) -> bytes:
    """Records cut, grown, left out, doubled, renamed, exchanged, compressed; the pickle's opcodes; directory fields."""
    if rng.random() < 0.25:
        return _directory(rng, data)
    with zipfile.ZipFile(io.BytesIO(data)) as source:
        records = [[entry.filename, source.read(entry)] for entry in source.infolist()]
    at, other = rng.randrange(len(records)), rng.randrange(len(records))
    method = zipfile.ZIP_STORED
    others = ("cut", "grow", "drop", "twice", "rename", "swap", "deflate", "order", "shuffle")
    kind = rng.choose("zip", *["pickle"] * 8, *others)
    if kind == "pickle":
        at = next(i for i, (name, _) in enumerate(records) if name.endswith("/data.pkl"))
        records[at][1] = pickle(rng, records[at][1])
    elif kind == "cut":
        records[at][1] = records[at][1][: rng.randrange(len(records[at][1]) + 1)]
    elif kind == "grow":
        records[at][1] += rng.randbytes(rng.choice([1, 4, 8, 1000]))
    elif kind == "drop":
        del records[at]
    elif kind == "twice":
        records.append(list(records[at]))
    elif kind == "rename":
        records[at][0] = rng.choice([records[other][0], records[at][0].upper(), "x/" + records[at][0], "../../a", "b"])
    elif kind == "swap":
        records[at][1], records[other][1] = records[other][1], records[at][1]
    elif kind == "shuffle":
        rng.shuffle(records)
    elif kind == "order":
        records = [[name, b"big" if name.endswith("byteorder") else body] for name, body in records]
    else:
        method = zipfile.ZIP_DEFLATED
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as target:
        for name, body in records:
            target.writestr(name, body)
    return made.getvalue()


def _directory(rng: Dice, data: bytes) -> bytes:
    """Another number in a field of an entry's header, of the directory or of its end."""
    changed = bytearray(data)
    kind = rng.choose("zip", "directory entry", "entry's header", "end of directory")
    mark, fields = {
        "directory entry": (b"PK\1\2", (8, 10, 16, 20, 24, 28, 30, 42)),
        "entry's header": (b"PK\3\4", (6, 8, 18, 22, 26, 28)),
        "end of directory": (b"PK\5\6", (8, 10, 12, 16, 20)),
    }[kind]
    places = [found.start() for found in re.finditer(re.escape(mark), data[:-18])]
    at = rng.choice(places) + rng.choice(fields)
    size = rng.choice([2, 4])
    near = int.from_bytes(data[at : at + size], "little") + rng.choice([-64, -4, -1, 1, 4, 64])
    value = rng.choice([near, near, *INTS]) % (1 << 8 * size)
    changed[at : at + size] = value.to_bytes(size, "little")
    return bytes(changed[: len(data)])


def old_pickles(rng: Dice, data: bytes) -> bytes:
    """One of the five pickles of a file before PyTorch 1.6, or the length of a storage."""
    stream, places = io.BytesIO(data), [0]
    for _ in range(5):
        list(pickletools.genops(stream))
        places.append(stream.tell())
    part = rng.choice([0, 1, 2, 3, 3, 3, 4, 4, 5])
    if part == 5:
        rng.choose("old file", "length of a storage")
        return data[: places[5]] + struct.pack("<q", rng.choice(INTS)) + data[places[5] + 8 :]
    first, last = places[part], places[part + 1]
    changed = pickle(rng, data[first:last])
    rng.kind = f"old file, {('magic', 'version', 'system', 'value', 'keys')[part]}: {rng.kind.removeprefix('pickle: ')}"
    return data[:first] + changed + data[last:]


def tree(rng: Dice, value: Any) -> Any:
    """A JSON value with one place changed."""
    if rng.random() < 0.3 or not isinstance(value, (dict, list)) or not value:
        return rng.choice(VALUES)
    if isinstance(value, list):
        at = rng.randrange(len(value))
        return [*value[:at], tree(rng, value[at]), *value[at + 1 :]]
    name = rng.choice(list(value))
    kind = rng.randrange(6)
    if kind == 0:
        return {key: item for key, item in value.items() if key != name}
    if kind == 1:
        return value | {
            rng.choice(["x" * 3000, name + "0", "", "model.layers.99999999.mlp.up_proj.weight"]): value[name]
        }
    return value | {name: tree(rng, value[name])}


def text(rng: Dice, data: bytes) -> bytes:
    """A JSON file: another value somewhere, a key twice, deep, cut."""
    kind = rng.choose("json", *["value"] * 8, "deep", "long number", "twice", "twice", "other spaces")
    if kind == "deep":
        return b'{"a":' + b"[" * 100_000
    if kind == "long number":
        return data[:-1] + b',"x":' + b"9" * 5000 + b"}"
    value = json.loads(data)
    if kind == "other spaces":
        return json.dumps(value, indent=rng.randrange(9)).encode()
    if kind == "twice" and value:
        name = rng.choice(list(value))
        again = {name: tree(rng, value[name]) if rng.random() < 0.7 else value[name]}
        return json.dumps(value)[:-1].encode() + b", " + json.dumps(again)[1:].encode()
    return json.dumps(tree(rng, value)).encode()


def safetensors(rng: Dice, data: bytes) -> bytes:
    """Another header, whose length fits (mostly)."""
    size = 8 + int.from_bytes(data[:8], "little")
    kind = rng.choose("safetensors", *["header"] * 5, "length", *["entries exchanged"] * 2, "dtype", "shape", "offsets")
    header = data[8:size].rstrip()
    if kind in ("header", "length"):
        header = text(rng, header)
        rng.kind = f"safetensors: {'length' if kind == 'length' else rng.kind}"
    else:
        header = json.dumps(_entries(rng, kind, json.loads(header))).encode()
    length = len(header) if kind != "length" else rng.choice([0, 1, len(header) - 1, 1 << 40, (1 << 64) - 1])
    return struct.pack("<Q", length) + header + data[size:]


def _entries(rng: Dice, kind: str, table: dict[str, Any]) -> dict[str, Any]:
    """A header that is still in order by itself, more or less."""
    names = [name for name in table if name != "__metadata__"]
    name, other = rng.choice(names), rng.choice(names)
    alike = [one for one in names if table[one]["shape"] == table[name]["shape"]]
    if kind == "entries exchanged":
        other = rng.choice(alike)
        table[name], table[other] = table[other], table[name]
    elif kind == "dtype":
        table[name]["dtype"] = rng.choice(["I32", "U32", "F32", "F16", "BF16", "F64", "F8_E4M3", "BOOL"])
    elif kind == "shape":
        shape = table[name]["shape"]
        table[name]["shape"] = rng.choice([shape[::-1], [*shape, 1], [1, *shape], [n // 2 for n in shape], []])
    else:
        step = rng.choice([-4, -1, 1, 4, 64])
        table[name]["data_offsets"] = rng.choice(
            [table[other]["data_offsets"], [n + step for n in table[name]["data_offsets"]]]
        )
    return table


def llama2c(rng: Dice, data: bytes) -> bytes:
    """Other ints in the header; or other sizes, and a body as long as they need."""
    newer = data[:4] == b"24ka"
    if rng.choose("llama2c", "int", "sizes") == "int":
        at = 4 * rng.randrange(11 if newer else 7)
        now = struct.unpack_from("<i", data, at)[0]
        value = rng.choice([*INTS, now + 1, now - 1, 2 * now, -now])
        return data[:at] + struct.pack("<q", value)[:4] + data[at + 4 :]
    start = 8 if newer else 0
    dim, width, layers, heads, kv_heads, vocab, window = struct.unpack_from("<7i", data, start)
    dim, layers, vocab = (
        rng.choice([dim, dim, dim // 2, 2 * dim]),
        rng.choice([layers, 1, 3]),
        rng.choice([vocab, 8, -8]),
    )
    heads, kv_heads, window = rng.choice([heads, 2, 1]), rng.choice([kv_heads, 1]), rng.choice([window, 1, 30])
    version, group = (data[4], struct.unpack_from("<i", data, 37)[0]) if newer else (0, 0)
    group = rng.choice([group, 8, 32]) if version == 2 else 0
    shared = rng.random() < 0.5 if newer else vocab > 0
    matrices = [dim * dim, dim // heads * kv_heads * dim, dim // heads * kv_heads * dim, dim * dim, *[dim * width] * 3]
    matrices = [n for n in matrices for _ in range(layers)] + [abs(vocab) * dim] * (1 if shared else 2)
    size = 4 * (2 * layers + 1) * dim + sum(n + 4 * (n // group) if version == 2 else 4 * n for n in matrices)
    ints = struct.pack("<7i", dim, width, layers, heads, kv_heads, vocab, window)
    head = (data[:8] + ints + bytes([shared]) + struct.pack("<i", group)).ljust(256, b"\0") if newer else ints
    body = data[256 if newer else 28 :]
    size += 0 if newer else 4 * window * (dim // heads)
    return head + (body * (size // len(body) + 1))[:size]


def protobuf(rng: Dice, data: bytes, depth: int = 0) -> bytes:
    """Fields of a SentencePiece model left out, doubled, of another number or length, and the same within a field."""
    fields, place = [], 0
    while place < len(data):
        start = place
        tag, place = _varint(data, place)
        if tag & 7 == 2:
            length, place = _varint(data, place)
            body, place = place, place + length
        else:
            body, place = place, place + 4 if tag & 7 == 5 else _varint(data, place)[1]
        fields.append([data[start:body], data[body:place]])
    if not fields:
        return rng.randbytes(3)
    at = rng.randrange(len(fields)) if rng.random() < 0.5 else len(fields) - 1 - rng.randrange(min(3, len(fields)))
    head, body = fields[at]
    kind = rng.choose("protobuf, inner" if depth else "protobuf", "left out", "doubled", "bytes", "tag", *["value"] * 3)
    if kind == "left out":
        del fields[at]
    elif kind == "doubled":
        fields.append(fields[at])
    elif kind == "bytes":
        fields[at][1] = rng.randbytes(len(body))
    elif kind == "tag":
        fields[at][0] = bytes([rng.randrange(256)])
    elif head[0] & 7 == 0:
        fields[at][1] = rng.choice([b"\0", b"\1", b"\x7f", b"\xff\xff\xff\xff\x07", b"\xff" * 9 + b"\1"])
    elif head[0] & 7 == 2 and depth == 0 and body:
        inner = protobuf(rng, body, 1)
        fields[at] = [head[:1] + _as_varint(len(inner)), inner]
    return b"".join(head + body for head, body in fields)


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while place < len(data):
        value, place, byte = value | (data[place] & 127) << shift, place + 1, data[place]
        shift += 7
        if byte < 128:
            break
    return value, place


def _as_varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _as_varint(value >> 7)


def vocabulary(rng: Dice, data: bytes) -> bytes:
    """llama2.c's tokenizer.bin: score, length or text of one entry."""
    place, starts = 4, []
    while place < len(data):
        starts.append(place)
        place += 8 + struct.unpack_from("<i", data, place + 4)[0]
    at = rng.choice(starts)
    kind = rng.choose("tokenizer.bin", "score", "length", "byte", "left out")
    if kind == "score":
        return data[:at] + struct.pack("<f", rng.choice([float("nan"), float("inf"), 0.0, -1e38])) + data[at + 4 :]
    if kind == "length":
        return data[: at + 4] + struct.pack("<i", rng.choice(INTS)) + data[at + 8 :]
    if kind == "byte":
        return data[: at + 8] + bytes([rng.randrange(256)]) + data[at + 9 :]
    return data[:at] + data[rng.choice(starts) :]


class GGUF:
    """A GGUF file in parts: a key is [name, type, body], a tensor [name, dims, type, offset]; and put together again."""

    def __init__(self, data: bytes) -> None:
        self.at, self.bytes = 24, data
        self.version, tensors, keys = struct.unpack_from("<IQQ", data, 4)
        self.keys = [[self.text(), *self.value(self.number("I"))] for _ in range(keys)]
        self.tensors = [self.row() for _ in range(tensors)]
        self.data = data[-(-self.at // 32) * 32 :]

    def number(self, code: str) -> Any:
        self.at += struct.calcsize("<" + code)
        return struct.unpack_from("<" + code, self.bytes, self.at - struct.calcsize("<" + code))[0]

    def text(self) -> bytes:
        size = self.number("Q")
        self.at += size
        return self.bytes[self.at - size : self.at]

    def value(self, kind: int) -> tuple[int, bytes]:
        start, sizes = self.at, {0: 1, 1: 1, 2: 2, 3: 2, 7: 1, 10: 8, 11: 8, 12: 8}
        if kind == 8:
            self.text()
        elif kind == 9:
            of, count = self.number("I"), self.number("Q")
            for _ in range(count):
                self.value(of)
        else:
            self.at += sizes.get(kind, 4)
        return kind, self.bytes[start : self.at]

    def row(self) -> list[Any]:
        name, axes = self.text(), self.number("I")
        return [name, [self.number("Q") for _ in range(axes)], self.number("I"), self.number("Q")]

    def written(self, counts: tuple[int, int] | None = None) -> bytes:
        def number(code: str, value: int) -> bytes:
            return struct.pack("<Q", value % (1 << 64))[: struct.calcsize(code)]

        tensors, keys = counts or (len(self.tensors), len(self.keys))
        out = b"GGUF" + number("I", self.version) + number("Q", tensors) + number("Q", keys)
        for name, kind, body in self.keys:
            out += struct.pack("<Q", len(name)) + name + number("I", kind) + body
        for name, dims, kind, offset in self.tensors:
            out += struct.pack("<Q", len(name)) + name + number("I", len(dims)) + b"".join(number("Q", d) for d in dims)
            out += number("I", kind) + number("Q", offset)
        return out + b"\0" * (-len(out) % 32) + self.data


BIG = [0, 1, 3, 31, 33, 255, 65535, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, 1 << 63, (1 << 64) - 1]
SETTINGS = [
    b"general.alignment",
    b"split.count",
    b"split.no",
    b"llama.expert_count",
    b"llama.rope.scaling.type",
    b"llama.x",
]


def gguf(rng: Dice, data: bytes) -> bytes:
    """Counts, version; a key left out, doubled, of another type, length or value; a tensor's name, axes, type, offset."""
    file, counts = GGUF(data), None
    for _ in range(rng.choice([1, 1, 1, 2])):
        kind = rng.choose("gguf", "counts", "version", "data", *["key"] * 4, *["tensor"] * 3)
        if kind == "counts":
            counts = (len(file.tensors), len(file.keys))
            counts = rng.choice(
                [(rng.choice(BIG), counts[1]), (counts[0], rng.choice(BIG)), (counts[0] - 1, counts[1] + 1)]
            )
        elif kind == "version":
            file.version = rng.choice([0, 1, 2, 4, 3 << 24, (1 << 32) - 1])
        elif kind == "data":
            file.data = rng.choice([file.data[: rng.randrange(len(file.data))], file.data[1:], b"\0" * 32 + file.data])
        elif kind == "key":
            _change_key(rng, file.keys)
        else:
            _change_tensor(rng, rng.choice(file.tensors), file.tensors)
    return file.written(counts)


def _change_key(rng: Dice, keys: list[list[Any]]) -> None:
    key = rng.choice(keys)
    kind = rng.choose("gguf, key", "left out", "doubled", "setting", "type", "array", "length", "name", "value")
    if kind == "left out":
        keys.remove(key)
    elif kind == "doubled":
        keys.append(list(key))
    elif kind == "setting":
        keys.append([rng.choice(SETTINGS), 4, struct.pack("<I", rng.choice(BIG) % (1 << 32))])
    elif kind == "type":
        key[1] = rng.choice([*range(14), 99])
    elif kind == "array" and key[1] == 9:  # the type or the number of an array's items
        of, count = struct.unpack_from("<IQ", key[2])
        of, count = rng.choice([(rng.randrange(14), count), (of, rng.choice([*BIG, count + 1, count - 1]) % (1 << 64))])
        key[2] = struct.pack("<IQ", of, count) + key[2][12:]
    elif kind == "length" and key[1] == 8:  # the length of a text
        key[2] = struct.pack("<Q", rng.choice([*BIG, len(key[2]) - 7])) + key[2][8:]
    elif kind == "name":
        key[0] = rng.choice([b"", b"\xff", b"x" * 5000, b"llama.block_count", b"tokenizer.ggml.tokens", key[0] + b"x"])
    else:  # bytes of a value, or of the numbers and texts of an array
        at = rng.randrange(12 if key[1] == 9 and len(key[2]) > 12 else 0, max(len(key[2]), 1))
        new = rng.choice([rng.randbytes(1), b"\xff\xff\xff\x7f", b"\0\0\xc0\x7f", struct.pack("<Q", rng.choice(BIG))])
        key[2] = (key[2][:at] + new + key[2][at + len(new) :])[: len(key[2])]


def _change_tensor(rng: Dice, row: list[Any], rows: list[list[Any]]) -> None:
    kind = rng.choose("gguf, tensor", "left out", "doubled", "name", "axis", "axes", "type", "offset", "offset")
    if kind == "left out":
        rows.remove(row)
    elif kind == "doubled":
        rows.append(list(row))
    elif kind == "name":
        row[0] = rng.choice(
            [b"", b"\xff", b"x" * 3000, b"rope_freqs.weight", b"blk.99999999.attn_q.weight", rows[0][0]]
        )
    elif kind == "axis":
        row[1][rng.randrange(len(row[1]))] = rng.choice([*BIG, 2 * row[1][0]])
    elif kind == "axes":
        row[1] = rng.choice([row[1][::-1], [], [1, *row[1]], [*row[1], 1], [1] * 200, [1 << 62] * 4])
    elif kind == "type":
        row[2] = rng.choice([*range(41), 1 << 31])
    else:
        row[3] = rng.choice([*BIG, row[3] + 32, row[3] - 32, row[3] + 1, rng.choice(rows)[3]])


def mutation_for(name: str, data: bytes) -> Callable[[Dice, bytes], bytes]:
    """The one that knows this file's format."""
    if data.startswith(b"GGUF"):
        return gguf
    if name == "tokenizer.model":
        return protobuf
    if name == "tokenizer.bin":
        return vocabulary
    if name.endswith(".json"):
        return text
    if name.endswith(".safetensors"):
        return safetensors
    return archive if data.startswith(b"PK") else old_pickles if name.endswith(".pth") else llama2c
