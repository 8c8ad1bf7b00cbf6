"""Pretend CUDA devices on a machine without any: plain CPU tensors whose storages are noted as being on one.

    with Pretend() as cuda:          Python sees cuda:0 and cuda:1; an operation whose tensors are not on one device is
        ...                          refused as CUDA refuses it
    cuda.events                      what crossed the bus or made the CPU wait, by the function of the library
    python tests/simcuda.py ARGS     runs `python ARGS` on the pretend devices (a script, or -m and a module)

What it pretends: devices of tensors, copies and waits, the current device, streams and graphs (a capture records what
runs on the stream's device, and a replay runs it again at the same addresses), int4's layout and kernel, the rule that
nccl uses the current device. It knows nothing of kernels, memory, asynchrony or time; `torch.compile` does nothing.
"""

import contextlib
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

TORCH = "2.13"  # it stands on how this version calls its two modes; others have not been tried
MAY_MIX = {"aten::copy_", "aten::_to_copy", "aten::set_", "aten::set_data"}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero"}
WAITING |= {"aten::unique_dim", "aten::_unique2", "aten::allclose"}
ASSERTING = INDEXING | {"aten::embedding", "aten::gather", "aten::scatter", "aten::multinomial", "aten::index_select"}
CPU_ONLY = ("for_cpu", "mkldnn", "_weight_int8pack_mm", "quantized")


def why_not() -> str:
    """Why the pretend devices cannot be had here; empty if they can."""
    if not torch.__version__.startswith(TORCH):
        return f"the pretend CUDA device is made for torch {TORCH}, this is {torch.__version__}"
    return "a real GPU is here: benchmarks/gpu_check.sh" if torch.cuda.is_available() else ""


def place() -> str:
    """The innermost function of the library that is running, as "file.py function"."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        folder, _, file = frame.f_code.co_filename.rpartition("/")
        if "/llama" in folder + "/" and "/tests" not in folder and "site-packages" not in folder:
            return f"{file} {frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


class DeviceAssert(Exception):
    """What a kernel would have found wrong on the device: no CUDA call of the process would work from then on."""


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors among an operation's arguments or results, in lists as well."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


class Notes:
    """A value for each storage that is alive."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[StorageWeakRef, Any]] = {}

    def get(self, tensor: Tensor) -> Any:
        try:
            key = tensor.untyped_storage()._cdata
        except (RuntimeError, NotImplementedError):  # no storage
            return None
        reference, value = self._found.get(key, (None, None))
        if reference is not None and reference.expired():
            del self._found[key]
            return None
        return value

    def set(self, tensor: Tensor, value: Any) -> None:
        with contextlib.suppress(RuntimeError, NotImplementedError):
            storage = tensor.untyped_storage()
            self._found[storage._cdata] = (StorageWeakRef(storage), value)


class Pretend(contextlib.ExitStack):
    """Within, `count` pretend devices are there."""

    def __init__(self, count: int = 2, has_bfloat16: bool = True) -> None:
        super().__init__()
        self.count, self.has_bfloat16 = count, has_bfloat16
        self.devices, self.pinned = Notes(), Notes()
        self.current = 0
        self.events: Counter[str] = Counter()
        self.ops: Counter[str] = Counter()
        self.compiled: list[dict[str, Any]] = []  # the options of each torch.compile
        self.pools: list[Any] = []  # the memory pool of each graph that was captured
        self.tape: list[Any] | None = None  # of the capture that is running
        self.tape_device = 0
        self.making: int | None = None  # the device of an operation that makes tensors
        self.quiet = False  # within an operation of our own

    def note(self, what: str) -> None:
        """Count a copy or a wait; as CUDA, refuse it while a graph is captured."""
        if self.quiet:
            return
        self.events[f"{what}: {place()}"] += 1
        if self.tape is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what} in {place()}")

    def index(self, device: Any) -> int | None:
        """The number of a CUDA device, None for any other."""
        if isinstance(device, int) and not isinstance(device, bool):
            return device
        device = torch.device(device)
        return (self.current if device.index is None else device.index) if device.type == "cuda" else None

    @contextlib.contextmanager
    def alone(self, making: int | None = None) -> Iterator[None]:
        """Within, operations are our own: not looked at, or (`making`) results are put on a device."""
        before = self.quiet, self.making
        self.quiet, self.making = making is None, making
        try:
            with contextlib.nullcontext() if making is not None else torch._C.DisableTorchFunction():
                yield
        finally:
            self.quiet, self.making = before

    def __enter__(self) -> "Pretend":
        super().__enter__()
        for module, name, value in _stand_ins(self):
            self.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        self.enter_context(_Function(self))
        self.enter_context(_Dispatch(self))
        return self


# -------------------------------------------------------------------------------- what Python calls


class _Function(TorchFunctionMode):
    """Devices as Python sees them: attributes, moves, `device=`."""

    def __init__(self, cuda: Pretend) -> None:
        super().__init__()
        self.cuda = cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, cuda = dict(kwargs or {}), self.cuda
        if cuda.quiet:
            return func(*args, **kwargs)
        here = cuda.devices.get(args[0]) if args and isinstance(args[0], Tensor) else None
        if func == Tensor.device.__get__ and here is not None:  # type: ignore[attr-defined]
            return torch.device("cuda", here)
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return here is not None
        if func == Tensor.is_cpu.__get__:  # type: ignore[attr-defined]
            return here is None
        if func is Tensor.get_device:
            return -1 if here is None else here
        if func is Tensor.pin_memory or kwargs.pop("pin_memory", False):
            made = func(*args, **kwargs) if func is not Tensor.pin_memory else args[0].clone()
            cuda.pinned.set(made, True)
            return made
        if func in (Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.type_as):
            return self._move(func, here, args, kwargs)
        if here is not None and func in (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__):
            if func in (Tensor.numpy, Tensor.__array__):
                raise TypeError("can't convert cuda device type tensor to numpy: use Tensor.cpu()")
            cuda.note("back")
            with cuda.alone():
                return func(*args, **kwargs)
        return self._special(func, args, kwargs) if here is not None else self._made(func, args, kwargs)

    def _special(self, func: Any, args: Any, kwargs: Any) -> Any:
        """int4 as CUDA has it, and what only a CPU has."""
        name = str(func)
        if any(part in name for part in CPU_ONLY):
            raise NotImplementedError(f"Could not run '{name}' with arguments from the 'CUDA' backend")
        if "_convert_weight_to_int4pack" in name:
            return _int4_pack(self.cuda, *args)
        if "_weight_int4pack_mm" in name:
            return _int4_product(self.cuda, *args)
        return self._made(func, args, kwargs)

    def _made(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Tensors that are made on a device."""
        device = kwargs.get("device")
        there = None if device is None else self.cuda.index(device)
        if there is None:
            return func(*args, **kwargs)
        if there >= self.cuda.count:
            raise RuntimeError("CUDA error: invalid device ordinal")
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        if func in (torch.tensor, torch.as_tensor, torch.asarray):
            self.cuda.note("there, waits")
        with self.cuda.alone(making=there):
            made = func(*args, **{**kwargs, "device": torch.device("cpu")})
        for tensor in tensors_in((made,)):
            self.cuda.devices.set(tensor, there)
        return made

    def _move(self, func: Any, here: int | None, args: Any, kwargs: Any) -> Tensor:
        cuda, tensor, rest, there = self.cuda, args[0], list(args[1:]), here
        if func is Tensor.cpu:
            rest, there = [], None
        elif func is Tensor.cuda:
            there = cuda.index(rest[0] if rest else kwargs.pop("device", None) or "cuda")
            rest = []
        elif rest and isinstance(rest[0], Tensor):  # type_as, or `to` another's
            there, rest[0] = cuda.devices.get(rest[0]), rest[0].dtype
        elif rest and isinstance(rest[0], (str, torch.device)):
            there = cuda.index(rest.pop(0))
        elif rest and rest[0] is None:
            rest.pop(0)
        device = kwargs.pop("device", None)
        there = there if device is None else cuda.index(device)
        non_blocking = kwargs.pop("non_blocking", False)
        if here == there:
            return Tensor.to(tensor, *rest, **kwargs) if rest or kwargs else tensor
        if there is None:
            cuda.note("back")
        elif here is None:
            cuda.note("there" if non_blocking and cuda.pinned.get(tensor) else "there, waits")
        with cuda.alone():
            moved = tensor.detach()
            moved = moved.to(*rest, **kwargs).clone() if rest or kwargs else moved.clone()
        if there is not None:
            cuda.devices.set(moved, there)
        return moved


# ----------------------------------------------------------------------------- what torch then does


class _Dispatch(TorchDispatchMode):
    """Each operation: its tensors must be on one device, its results are on it, copies and waits count."""

    def __init__(self, cuda: Pretend) -> None:
        super().__init__()
        self.cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cuda, kwargs = self.cuda, kwargs or {}
        if cuda.quiet:
            return func(*args, **kwargs)
        name = func._schema.name
        tensors = [*tensors_in(args), *tensors_in(kwargs.values())]
        places = [cuda.devices.get(tensor) for tensor in tensors]
        target = next((found for found in places if found is not None), cuda.making)
        if name == "aten::copy_" and len(places) == 2 and places[0] != places[1]:
            target = places[0]
            self._copied(
                places, bool(cuda.pinned.get(tensors[1])) and (args[2:] == (True,) or "non_blocking" in kwargs)
            )
        elif any(found is not None for found in places):
            self._check(name, args, kwargs, tensors, places, target)
        try:
            out = func(*args, **kwargs)
        except (IndexError, RuntimeError) as error:
            if target is not None and name in ASSERTING:
                raise DeviceAssert(f"{name}: {error}") from error
            raise
        if target is not None:
            cuda.ops[name] += 1
            if cuda.tape is not None and target == cuda.tape_device:
                cuda.tape.append((func, args, kwargs, out))
            for tensor in tensors_in((out,)):
                if cuda.devices.get(tensor) is None:
                    cuda.devices.set(tensor, target)
        return out

    def _copied(self, places: list[Any], asynchronous: bool) -> None:
        if places[0] is None:
            self.cuda.note("back")
        elif places[1] is None:
            self.cuda.note("there" if asynchronous else "there, waits")

    def _check(self, name: str, args: Any, kwargs: Any, tensors: list[Tensor], places: list[Any], target: int) -> None:
        cuda, indices = self.cuda, []
        if name in INDEXING and cuda.devices.get(args[0]) is not None:
            indices = [i for i in args[1] if isinstance(i, Tensor)]
            for number in indices:
                if cuda.devices.get(number) is None:
                    cuda.note("there, waits")
            scalar = len(args) > 2 and args[2].numel() == 1 and cuda.devices.get(args[2]) is None  # as masked_fill
            if any(i.dtype in (torch.bool, torch.uint8) for i in indices) and not scalar:
                cuda.note("wait")
        strange = [t for t, p in zip(tensors, places, strict=True) if p != target and (t.ndim or p is not None)]
        strange = [t for t in strange if not any(t is i for i in indices)]
        on_target = [t for t, p in zip(tensors, places, strict=True) if p == target]
        if strange and name not in MAY_MIX:
            found = {"cpu" if p is None else f"cuda:{p}" for p in places}
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {sorted(found)} ({name})")
        if on_target and isinstance(kwargs.get("generator"), torch.Generator):
            raise RuntimeError(f"Expected a 'cuda' device type for generator but found 'cpu' ({name})")
        if on_target and name in WAITING:
            cuda.note("wait")


# ---------------------------------------------------------------------------------------- torch.cuda


class _Device:
    """torch.cuda.device: the current one within."""

    cuda: Pretend

    def __init__(self, device: Any) -> None:
        self._index = self.cuda.index(device)

    def __enter__(self) -> None:
        self._before = self.cuda.current
        self.cuda.current = self.cuda.current if self._index is None else self._index

    def __exit__(self, *error: object) -> None:
        self.cuda.current = self._before


class _Stream:
    cuda: Pretend

    def __init__(self, device: Any = "cuda") -> None:
        self.device_index = self.cuda.index(device)

    def wait_stream(self, other: Any) -> None:
        assert isinstance(other, _Stream)


class _CUDAGraph:
    cuda: Pretend
    tape: list[Any]

    def replay(self) -> None:
        """Everything again that the capture recorded, results where they were."""
        with self.cuda.alone():
            for func, args, kwargs, before in self.tape:
                for old, new in zip(tensors_in((before,)), tensors_in((func(*args, **kwargs),)), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

    def reset(self) -> None:
        self.tape = []


def _capture(cuda: Pretend) -> Callable[..., Any]:
    first_stream: list[_Stream] = []  # torch keeps the one it makes at the first capture, on the device of that time

    @contextlib.contextmanager
    def graph(graph: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
        if stream is None:
            first_stream.append(first_stream[0] if first_stream else _Stream())
            stream = first_stream[0]
        assert capture_error_mode == "thread_local", (
            "nccl's watchdog or another caller's thread would spoil the capture"
        )
        cuda.pools.append(pool)
        cuda.tape, cuda.tape_device = [], stream.device_index
        with _Device(stream.device_index):
            try:
                yield
            finally:
                graph.tape, cuda.tape = cuda.tape, None

    return graph


def _stand_ins(cuda: Pretend) -> list[tuple[Any, str, Any]]:
    """What stands in for torch's own: (module, name, value)."""
    import llama.checkpoint.loading as loading

    classes = {"device": _Device, "Stream": _Stream, "CUDAGraph": _CUDAGraph}
    made = {name: type(name, (cls,), {"cuda": cuda}) for name, cls in classes.items()}
    for cls in classes.values():
        cls.cuda = cuda  # type: ignore[attr-defined]

    def set_device(device: Any) -> None:
        index = cuda.index(device)
        assert index is not None and index < cuda.count, "CUDA error: invalid device ordinal"
        cuda.current = index

    def compile(function: Any, **settings: Any) -> Any:
        cuda.compiled.append(settings.get("options", {}))
        return function

    def has_bfloat16(including_emulation: bool = True) -> bool:
        return including_emulation or cuda.has_bfloat16

    functions = {
        "is_available": lambda: True,
        "device_count": lambda: cuda.count,
        "current_device": lambda: cuda.current,
        "set_device": set_device,
        "is_bf16_supported": has_bfloat16,
        "get_device_capability": lambda device=None: (8, 0) if cuda.has_bfloat16 else (7, 5),
        "get_device_name": lambda device=None: "pretend CUDA device",
        "mem_get_info": lambda device=None: (80 << 30, 80 << 30),
        "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "manual_seed_all": lambda seed: None,
        "synchronize": lambda device=None: cuda.note("wait"),
        "current_stream": lambda device=None: made["Stream"](cuda.current if device is None else device),
        "stream": lambda stream: made["device"](stream.device_index),
        "graph_pool_handle": object,
        "graph": _capture(cuda),
    }
    found = [(torch.cuda, name, value) for name, value in {**made, **functions}.items()]
    pool = SimpleNamespace(map=map)
    found += [(torch, "compile", compile), (loading, "ThreadPoolExecutor", lambda n: contextlib.nullcontext(pool))]
    return found + _pretend_nccl(cuda)


# ---------------------------------------------------------------------------------------------- nccl


def _pretend_nccl(cuda: Pretend) -> list[tuple[Any, str, Any]]:
    """gloo in nccl's place, with nccl's rule: object collectives take the current device, tensors must be on it."""
    backend: list[tuple[str, Any]] = []
    real_init = dist.init_process_group

    def init(name: str | None = None, **settings: Any) -> None:
        backend[:] = [(str(name), settings.pop("device_id", None))]
        real_init("gloo" if name == "nccl" else name, **settings)

    def checked(name: str, function: Any) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            if backend and backend[0][0] == "nccl":
                device = backend[0][1]
                assert cuda.current == device.index, (
                    f"{name}: the current device is {cuda.current}, this rank's {device}"
                )
                for tensor in tensors_in((args, list(kwargs.values()))):
                    assert cuda.devices.get(tensor) == device.index, f"{name}: a tensor that is not on {device}"
            cuda.ops[name] += 1
            if cuda.tape is not None:
                cuda.tape.append((function, args, kwargs, None))
            with cuda.alone():
                return function(*args, **kwargs)

        return collective

    names = ("broadcast", "all_reduce", "all_gather", "all_gather_object", "broadcast_object_list", "barrier")
    return [(dist, "init_process_group", init), *((dist, name, checked(name, getattr(dist, name))) for name in names)]


# ---------------------------------------------------------------------------------------------- int4


def _int4_place(tiles: int) -> Tensor:
    """Some order of a tile's values (8 rows, 16 tiles columns): not CUDA's, and not to be relied on either."""
    return torch.randperm(8 * 16 * tiles, generator=torch.Generator().manual_seed(tiles))


def _int4_pack(cuda: Pretend, qvalues: Tensor, tiles: int) -> Tensor:
    """uint8 (n, k / 2), the even column in the high four bits, to int32 (n / 8, k / 16 tiles, 32, tiles / 2)."""
    n, k = qvalues.shape[0], 2 * qvalues.shape[1]
    assert qvalues.dtype == torch.uint8 and qvalues.is_contiguous() and tiles in (2, 4, 8) and n % 8 == 0
    if k % (16 * tiles):
        raise RuntimeError(f"Expected isEvenDivisor(k, innerKTiles * kKTileSize) to be true, but got k={k}, {tiles}")
    with cuda.alone():
        values = torch.stack([qvalues >> 4, qvalues & 15], -1).view(n // 8, 8, k // (16 * tiles), 16 * tiles)
        values = values.transpose(1, 2).flatten(2)[..., _int4_place(tiles)].long()  # (n / 8, k / 16 tiles, 128 tiles)
        packed = (values.view(*values.shape[:2], 32, tiles // 2, 8) << torch.arange(0, 32, 4)).sum(-1)
        packed = torch.where(packed >= 2**31, packed - 2**32, packed).int()
    cuda.devices.set(packed, cuda.devices.get(qvalues))
    return packed


def _int4_product(cuda: Pretend, x: Tensor, packed: Tensor, group: int, scales: Tensor) -> Tensor:
    n, tiles = 8 * packed.shape[0], 2 * packed.shape[3]
    k = 16 * tiles * packed.shape[1]
    assert group in (32, 64, 128, 256) and x.dtype == scales.dtype == torch.bfloat16
    assert x.is_contiguous() and scales.is_contiguous() and x.shape[1] == k and scales.shape == (k // group, n, 2)
    assert len({cuda.devices.get(tensor) for tensor in (x, packed, scales)}) == 1

    def product(x: Tensor) -> Tensor:
        values = ((packed[..., None] >> torch.arange(0, 32, 4)) & 15).flatten(2)[..., _int4_place(tiles).argsort()]
        values = values.view(n // 8, -1, 8, 16 * tiles).transpose(1, 2).reshape(n, k // group, group).float() - 8
        scale, zero = scales.transpose(0, 1).float().unsqueeze(-2).unbind(-1)  # (n, groups, 1)
        return (x.float() @ (values * scale + zero).view(n, k).T).to(x.dtype)

    with cuda.alone():
        y = product(x)
    device = cuda.devices.get(x)
    if cuda.tape is not None and device == cuda.tape_device:
        cuda.tape.append((product, (x,), {}, y))
    cuda.devices.set(y, device)
    cuda.ops["aten::_weight_int4pack_mm"] += 1
    return y


if __name__ == "__main__":
    if why_not():
        sys.exit(why_not())
    with Pretend():
        sys.argv = sys.argv[1:]
        if sys.argv[0] == "-m":
            sys.argv = sys.argv[1:]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
