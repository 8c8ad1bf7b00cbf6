"""The pickle of a `.pth`, read by an interpreter that can make plain values and descriptions of tensors only.

What `torch.save` writes of a state dict needs thirty opcodes and a few globals; everything else is an error. Nothing is
imported or called, and work and memory are bounded by the number of opcodes.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

MAX_BYTES = 8_000_000  # of one pickle; that of a 70B model has 200 kB
MAX_OPCODES = 400_000
MAX_TEXT = 10_000  # bytes of one string
MAX_DEPTH = 32
MAX_DIMENSIONS = 8
MAX_NUMBER = (1 << 63) - 1

STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "bool"),
    *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64"),
)


class PickleProblem(Exception):
    """What is wrong with a pickle, in words."""


@dataclass(frozen=True)
class Global:
    """A name of the allowlist; `value` is the dtype that it stands for, if any."""

    name: str
    value: torch.dtype | None = None


@dataclass(frozen=True)
class StorageRecord:
    """The bytes of one storage: a record of the archive."""

    key: str
    dtype: torch.dtype | None  # None: bytes without a type
    size: int  # bytes


@dataclass(frozen=True)
class TensorRecord:
    """A tensor over a storage; offset and strides count values."""

    storage: StorageRecord
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


GLOBALS = {
    "collections OrderedDict": Global("OrderedDict"),
    "torch._utils _rebuild_tensor_v2": Global("_rebuild_tensor_v2"),
    "torch._utils _rebuild_tensor_v3": Global("_rebuild_tensor_v3"),
    "torch._utils _rebuild_parameter": Global("_rebuild_parameter"),
    "torch.storage UntypedStorage": Global("UntypedStorage"),
    "torch Size": Global("Size"),
    "torch device": Global("device"),
    **{f"torch {name}": Global("storage", dtype) for name, dtype in STORAGES.items()},
    **{f"torch {name}": Global("dtype", getattr(torch, name)) for name in DTYPES if hasattr(torch, name)},
}


# What torch.save writes of tensors that are not plain, by a part of the global's name.
EXOTIC = {
    "sparse": "a sparse tensor",
    "nested": "a nested tensor",
    "qtensor": "a quantized tensor of torch's",
    "meta_tensor": "a meta tensor, which holds no values",
    "Complex": "a complex tensor",
    "rebuild_from_type": "a tensor of a subclass (DTensor, torchao, ...)",
}


class Reader:
    """One pickle out of a file; `read` leaves the file behind its last opcode."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = MAX_BYTES
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def read(self) -> Any:
        """The value: None, bool, int, float, str, tuple, list, dict, Global, TensorRecord. PickleProblem."""
        for _ in range(MAX_OPCODES):
            code = self._take(1)
            if code == b".":
                value = self._pop()
                if self._stack or self._marks:
                    raise PickleProblem("values left over at its end")
                measure(value, {}, 0)
                return value
            action = OPCODES.get(code)
            if action is None:
                raise PickleProblem(f"the opcode {code!r}, which torch.save of plain tensors does not write")
            try:
                action(self)
            except PickleProblem as error:
                key = next(
                    (value for value in reversed(self._stack) if type(value) is str and value != "storage"), None
                )
                raise PickleProblem(f"{error}; behind the key {key!r:.80}" if key else str(error)) from None
        raise PickleProblem(f"more than {MAX_OPCODES} opcodes")

    def _take(self, size: int) -> bytes:
        self._left -= size
        if self._left < 0:
            raise PickleProblem(f"more than {MAX_BYTES} bytes of pickle")
        data = self._file.read(size)
        if len(data) < size:
            raise PickleProblem("a pickle that breaks off")
        return data

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self._stack.append(value)

    def _pop(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise PickleProblem("an opcode without its value")
        return self._stack.pop()

    def _since_mark(self) -> list[Any]:
        if not self._marks:
            raise PickleProblem("an opcode without its mark")
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def _top(self, kind: type[Any]) -> Any:
        value = self._pop()
        if type(value) is not kind:
            raise PickleProblem(f"a {type(value).__name__} where a {kind.__name__} belongs")
        self.push(value)
        return value

    def text(self, form: str) -> None:
        """BINUNICODE and the short byte string of Python 2."""
        size = self._number(form)
        if size > MAX_TEXT:
            raise PickleProblem(f"a string of {size} bytes")
        self.push(_decoded(self._take(size)))

    def number(self, form: str) -> None:
        """BININT and its kin, BINFLOAT."""
        self.push(self._number(form))

    def long(self) -> None:
        """LONG1: an integer of up to 8 bytes."""
        self.push(int.from_bytes(self._take(self._take(1)[0]), "little", signed=True))

    def proto(self) -> None:
        """PROTO: torch writes 2."""
        if self._take(1)[0] != 2:
            raise PickleProblem("a pickle protocol other than 2")

    def mark(self) -> None:
        """MARK: where the items of a list, tuple or dict begin."""
        self._marks.append(len(self._stack))

    def put(self, form: str) -> None:
        """BINPUT: numbers that no pickler would give are refused."""
        place, value = self._number(form), self._pop()
        self.push(value)
        if place > MAX_OPCODES:
            raise PickleProblem(f"memo number {place}")
        self._memo[place] = value

    def get(self, form: str) -> None:
        """BINGET and its kin: a value that was noted before."""
        place = self._number(form)
        if place not in self._memo:
            raise PickleProblem(f"memo number {place}, which nothing was put under")
        self.push(self._memo[place])

    def tuple_of(self, count: int | None) -> None:
        """TUPLE (None: what follows the mark), TUPLE1 to 3."""
        values = self._since_mark() if count is None else [self._pop() for _ in range(count)][::-1]
        inner: Any = tuple(values)
        self.push(inner)
        for _ in range(MAX_DEPTH):  # told early: Python frees tuples that are nested very deep in seconds only
            inner = inner[0] if type(inner) is tuple and inner else None
        if type(inner) is tuple:
            raise PickleProblem(f"tuples nested more than {MAX_DEPTH} deep")

    def append(self, many: bool) -> None:
        """APPEND, APPENDS: one item, or all behind the mark, go into the list below."""
        values = self._since_mark() if many else [self._pop()]
        self._top(list).extend(values)

    def setitem(self, many: bool) -> None:
        """SETITEM, SETITEMS. Keys are names and numbers: hashing a tuple can take for ever."""
        values = self._since_mark() if many else [self._pop(), self._pop()][::-1]
        target = self._top(dict)
        if len(values) % 2:
            raise PickleProblem("a key without a value")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) not in (str, int):
                raise PickleProblem(f"a {type(key).__name__} as the key of a dict")
            if key in target:
                raise PickleProblem(f"the key {key!r:.80} twice")
            target[key] = value

    def build(self) -> None:
        """BUILD: the `_metadata` that a module's state dict carries is dropped; nothing else has a state."""
        state = self._pop()
        self._top(dict)
        if type(state) is not dict or set(state) - {"_metadata"}:
            raise PickleProblem("an object with a state of its own")

    def named(self) -> None:
        """GLOBAL: two lines, of the allowlist."""
        lines = []
        for _ in range(2):
            line = self._file.readline(201)
            self._left -= len(line)
            if not line.endswith(b"\n"):
                raise PickleProblem("a global without an end")
            lines.append(_decoded(line[:-1]))
        found = GLOBALS.get(" ".join(lines))
        if found is None:
            name = ".".join(lines)
            exotic = next((f"{what}: " for part, what in EXOTIC.items() if part in name), "")
            raise PickleProblem(f"{exotic}the global {name!r:.120}, which torch.save of plain tensors does not name")
        self.push(found)

    def persistent(self) -> None:
        """BINPERSID: a storage by its key."""
        self.push(_storage(self._pop()))

    def reduce(self) -> None:
        """REDUCE of the allowlist's functions."""
        args, function = self._pop(), self._pop()
        if not isinstance(function, Global) or type(args) is not tuple:
            raise PickleProblem("a call of something that is no function")
        if function.name == "OrderedDict" and args == ():
            self.push({})
        elif function.name == "Size" and len(args) == 1 and type(args[0]) is tuple:
            self.push(args[0])
        elif function.name == "device" and all(type(arg) in (str, int) for arg in args):
            self.push(":".join(map(str, args)))
        elif function.name == "_rebuild_parameter" and len(args) == 3 and isinstance(args[0], TensorRecord):
            self.push(args[0])
        elif function.name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            self.push(_tensor(args, function.name.endswith("3")))
        else:
            raise PickleProblem(f"a call of {function.name} with other arguments than torch.save writes")


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PickleProblem("a string that is not UTF-8") from error


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_NUMBER


def _storage(described: Any) -> StorageRecord:
    """('storage', type, key, location, values) and, in old files, None: it is no view of another storage."""
    if type(described) is not tuple or len(described) not in (5, 6) or described[5:] not in ((), (None,)):
        raise PickleProblem("a storage that is described otherwise than torch.save does")
    word, kind, key, _, count = described[:5]
    known = isinstance(kind, Global) and kind.name in ("storage", "UntypedStorage")
    if word != "storage" or not known or type(key) is not str or not _whole(count):
        raise PickleProblem("a storage that is described otherwise than torch.save does")
    return StorageRecord(key, kind.value, count * (kind.value.itemsize if kind.value else 1))


def _tensor(args: tuple[Any, ...], third: bool) -> TensorRecord:
    """(storage, offset, shape, strides, requires_grad, hooks[, dtype][, metadata]), checked against its storage."""
    least = 7 if third else 6
    if len(args) not in (least, least + 1) or not isinstance(args[0], StorageRecord):
        raise PickleProblem("a tensor that is described otherwise than torch.save does")
    storage, offset, shape, strides = args[:4]
    dtype = args[6].value if third and isinstance(args[6], Global) and args[6].name == "dtype" else storage.dtype
    if args[least:] not in ((), ({},), (None,)):
        raise PickleProblem("a tensor with a lazy negation or conjugation, or other metadata: save its .resolve_neg()")
    plain = all(type(sizes) is tuple and len(sizes) <= MAX_DIMENSIONS for sizes in (shape, strides))
    if dtype is None or not plain or len(shape) != len(strides) or not all(map(_whole, (offset, *shape, *strides))):
        raise PickleProblem("a tensor with impossible sizes")
    extent = 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    count = 1
    for n in shape:
        count *= n
    size = dtype.itemsize
    if (offset + extent) * size > storage.size or count * size > storage.size or (count == 0 and max(shape) > 1 << 40):
        found = f"a tensor {shape} with strides {strides} at value {offset}"
        raise PickleProblem(f"{found} in a storage of {storage.size // size} values")
    return TensorRecord(storage, dtype, offset, shape, strides)


def measure(value: Any, known: dict[int, tuple[int, int]], depth: int) -> tuple[int, int]:
    """How many values printing `value` would visit, and how deep it is; PickleProblem where either is out of bounds.

    A value within itself is too deep; one that holds another twice, which does the same, is too large.
    """
    if type(value) not in (tuple, list, dict):
        return 1, 0
    if id(value) not in known:
        if depth > MAX_DEPTH:
            raise PickleProblem(f"values nested more than {MAX_DEPTH} deep")
        inner = [measure(item, known, depth + 1) for item in (value.values() if type(value) is dict else value)]
        known[id(value)] = 1 + sum(size for size, _ in inner), 1 + max((height for _, height in inner), default=0)
    size, height = known[id(value)]
    if size > MAX_OPCODES or depth + height > MAX_DEPTH + 1:
        raise PickleProblem(f"values that unfold to more than {MAX_OPCODES}, or {MAX_DEPTH} deep")
    return size, height


OPCODES: dict[bytes, Callable[[Reader], None]] = {
    b"\x80": Reader.proto,
    b"c": Reader.named,
    b"(": Reader.mark,
    b"R": Reader.reduce,
    b"b": Reader.build,
    b"Q": Reader.persistent,
    b"N": lambda reader: reader.push(None),
    b"\x88": lambda reader: reader.push(True),
    b"\x89": lambda reader: reader.push(False),
    b"}": lambda reader: reader.push({}),
    b"]": lambda reader: reader.push([]),
    b")": lambda reader: reader.push(()),
    b"t": lambda reader: reader.tuple_of(None),
    b"\x85": lambda reader: reader.tuple_of(1),
    b"\x86": lambda reader: reader.tuple_of(2),
    b"\x87": lambda reader: reader.tuple_of(3),
    b"a": lambda reader: reader.append(False),
    b"e": lambda reader: reader.append(True),
    b"s": lambda reader: reader.setitem(False),
    b"u": lambda reader: reader.setitem(True),
    b"X": lambda reader: reader.text("<I"),
    b"U": lambda reader: reader.text("<B"),
    b"K": lambda reader: reader.number("<B"),
    b"M": lambda reader: reader.number("<H"),
    b"J": lambda reader: reader.number("<i"),
    b"G": lambda reader: reader.number(">d"),
    b"\x8a": Reader.long,
    b"q": lambda reader: reader.put("<B"),
    b"r": lambda reader: reader.put("<I"),
    b"h": lambda reader: reader.get("<B"),
    b"j": lambda reader: reader.get("<I"),
}
