"""Process groups: their life, who is in them, and what ranks tell each other."""

import atexit
import contextlib
import datetime
import io
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TextIO, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

try:
    import fairscale.nn.model_parallel.initialize as fs_init  # type: ignore[import-untyped]
except ImportError as error:
    raise ImportError(
        f"llama needs the package fairscale, which {sys.executable} cannot import ({error}); "
        f"install it with: {sys.executable} -m pip install fairscale"
    ) from error

from ..arguments import check_number, environment_integer
from ..errors import LlamaError

T = TypeVar("T")
_pretended_world_size: int | None = None


@contextlib.contextmanager
def shard_as(ranks: int) -> Iterator[None]:
    """Layers made within are one rank's share of `ranks`, without any process group: to measure one rank alone."""
    global _pretended_world_size
    before, _pretended_world_size = _pretended_world_size, ranks
    try:
        yield
    finally:
        _pretended_world_size = before


def world_size() -> int:
    """Ranks that share one model; 1 where no model-parallel group is up."""
    if _pretended_world_size is not None:
        return _pretended_world_size
    return int(fs_init.get_model_parallel_world_size()) if fs_init.model_parallel_is_initialized() else 1


def rank() -> int:
    """This rank's place among those that share the model; 0 where no group is up."""
    return int(fs_init.get_model_parallel_rank()) if fs_init.model_parallel_is_initialized() else 0


def broadcast(tensor: Tensor) -> Tensor:
    """The first rank's values on every rank, in place; nothing to do on one rank."""
    if world_size() > 1:
        dist.broadcast(tensor, fs_init.get_model_parallel_src_rank(), group=fs_init.get_model_parallel_group())
    return tensor


@contextlib.contextmanager
def translate_distributed_errors() -> Iterator[None]:
    """Within, an error of the network that ends a wait for other ranks is a LlamaError that says what to do."""
    try:
        yield
    except RuntimeError as error:
        gloo = ("gloo/transport", "pair closure")
        if world_size() == 1 or not (isinstance(error, dist.DistError) or any(words in str(error) for words in gloo)):
            raise
        raise LlamaError(
            f"rank {rank()} of {world_size()} lost another rank, which ended or did not answer within build's timeout: "
            f"look at what the other ranks said, then start all of them again ({error})"
        ) from error


@translate_distributed_errors()
def broadcast_object(value: Any) -> Any:
    """The first rank's (picklable) value on every rank."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, fs_init.get_model_parallel_src_rank(), group=fs_init.get_model_parallel_group())
    return box[0]


@translate_distributed_errors()
def gather_objects(value: T) -> list[T]:
    """Every rank's (picklable) value, on every rank."""
    found = [value] * world_size()
    if len(found) > 1:
        dist.all_gather_object(found, value, group=fs_init.get_model_parallel_group())
    return found


@contextlib.contextmanager
def raise_on_all_ranks(doing: str) -> Iterator[None]:
    """Run the body on every rank; if it fails on any, it fails on all, with that rank's message.

    Without it, the ranks that succeeded would wait in their next collective for those that did not.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    messages = gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}")
    others = [f"rank {r} failed {doing}: {text}" for r, text in enumerate(messages) if text is not None]
    if failure is None and others:
        raise LlamaError(others[0])
    if failure is not None:
        raise failure


# ---------------------------------------------------------------------------------- process groups


class ProcessGroups:
    """The groups one generator runs in; `close` takes down what `initialize_groups` put up, once nobody uses it.

    Groups that the caller had made before stay up.  While open, ranks other than the first print nothing to stdout.
    """

    _users: ClassVar["weakref.WeakSet[ProcessGroups]"] = weakref.WeakSet()  # open; a lost one counts no more
    _process = 0  # that put them up
    _worlds_made = 0
    # what `_rendezvous` found, by the variables it was found with: kept for later groups
    _store: tuple[tuple[str, ...], tuple[Store, int, int]] | None = None
    _made_world = _made_model_parallel = False
    _devices: tuple[int, int] | None = None  # CUDA's current one before us, and the one that we made current
    _stdout: TextIO | None = None  # the real one, while this rank is muted
    _muted: TextIO | None = None  # what stands in its place
    _lock = threading.RLock()

    def __init__(self) -> None:
        self.is_open = True
        ProcessGroups._users.add(self)
        self._mute()

    def _mute(self) -> None:
        cls = ProcessGroups
        if dist.get_rank() > 0 and cls._stdout is None:
            cls._stdout, cls._muted = sys.stdout, open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            sys.stdout = cls._muted

    def close(self, wait: bool = True, limit: datetime.timedelta | None = None) -> None:
        """Idempotent. Waits for the other ranks, `limit` at most, since leaving a gloo group early can abort them; not
        after an error, when they may be gone.
        """
        cls = ProcessGroups
        if self not in cls._users or cls._process != os.getpid():  # a forked child has no part in the groups
            return
        with cls._lock:
            self.is_open = False
            cls._users.discard(self)
            if not cls._users:
                destroy_groups(wait, limit)


EXIT_WAIT = datetime.timedelta(seconds=5)  # for the other ranks, at the end of a program that never called `close`


def destroy_groups(wait: bool = True, limit: datetime.timedelta | None = None) -> None:
    """Destroy the groups that `initialize_groups` made and give stdout back; `limit` bounds the wait for others."""
    cls = ProcessGroups
    if wait and cls._made_world and dist.is_initialized() and dist.get_world_size() > 1:
        with contextlib.suppress(RuntimeError):  # a peer that is gone already
            dist.barrier() if limit is None else _bounded_barrier(limit)
    if cls._made_model_parallel:
        fs_init.destroy_model_parallel()
    if cls._made_world and dist.is_initialized():
        dist.destroy_process_group()
    cls._made_world = cls._made_model_parallel = False
    _restore_device()
    if cls._stdout is not None and cls._muted is not None:
        if sys.stdout is cls._muted:  # else the caller has put something of their own there since
            sys.stdout = cls._stdout
        cls._muted.close()
        cls._stdout = cls._muted = None


def _make_current(device: torch.device) -> None:
    """Make a CUDA device the current one, as published: nccl moves the objects of `raise_on_all_ranks` through it."""
    if device.type == "cuda":
        before, _ = ProcessGroups._devices or (torch.cuda.current_device(), None)
        torch.cuda.set_device(device)
        ProcessGroups._devices = before, torch.cuda.current_device()


def _restore_device() -> None:
    """Make the device current that was so before us, unless the caller has chosen another since."""
    if ProcessGroups._devices is not None:
        before, ours = ProcessGroups._devices
        ProcessGroups._devices = None
        if torch.cuda.current_device() == ours:
            torch.cuda.set_device(before)


def _bounded_barrier(limit: datetime.timedelta) -> None:
    if dist.get_backend() == "gloo":  # nccl knows no bounded wait, and needs none to be taken down
        dist.monitored_barrier(timeout=limit)


def _at_exit(process: int) -> None:
    """Take down what a program has left up: gloo's threads would abort the interpreter's end, whatever its status."""
    cls = ProcessGroups
    if process == os.getpid() and cls._made_world:
        failed = getattr(sys, "last_value", None) is not None  # an exception is ending this rank
        with contextlib.suppress(Exception):
            destroy_groups(wait=not failed, limit=EXIT_WAIT)
        cls._store = None
        cls._users.clear()


def initialize_groups(
    model_parallel_size: int | None,
    device: torch.device,
    backend: str | None = None,
    timeout: float | datetime.timedelta | None = None,
) -> ProcessGroups:
    """Put up, or join, the process groups of a model sharded over `model_parallel_size` ranks (None: all there are).

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are read as torchrun sets them; with one rank none is needed, no
    port is opened and `os.environ` is left alone. `timeout` (seconds) bounds each wait for the other ranks. A CUDA
    `device` is the current one from here on, until the last group is closed.
    """
    cls = ProcessGroups
    if (cls._made_world or cls._made_model_parallel) and cls._process != os.getpid():
        raise LlamaError(
            f"this process (pid {os.getpid()}) was forked from one whose process groups are up (pid {cls._process}): "
            f"close the generator before the fork, or start this process with 'spawn'"
        )
    with cls._lock:
        cls._process = os.getpid()
        try:
            _make_current(device)
            if not dist.is_initialized():
                _check_size(model_parallel_size, environment_integer("WORLD_SIZE", "1"))
                _init_world(backend or ("nccl" if device.type == "cuda" else "gloo"), device, timeout)
                cls._made_world = True
                atexit.unregister(_at_exit)  # so that it is registered once, behind torch's own
                atexit.register(_at_exit, os.getpid())
            if not fs_init.model_parallel_is_initialized():
                _check_size(model_parallel_size, dist.get_world_size())
                with contextlib.redirect_stdout(io.StringIO()):  # FairScale prints three lines
                    fs_init.initialize_model_parallel(model_parallel_size or dist.get_world_size())
                if timeout is not None and world_size() > 1:
                    _replace_model_parallel_group(_duration(timeout))
                cls._made_model_parallel = True
            elif model_parallel_size is not None and model_parallel_size != world_size():
                raise LlamaError(
                    f"model_parallel_size={model_parallel_size}, but FairScale's groups are already up with "
                    f"{world_size()} rank(s): pass {world_size()} or None, or close the earlier generator"
                )
        except BaseException:
            if not cls._users:
                destroy_groups(wait=False)
            raise
        return ProcessGroups()


def _replace_model_parallel_group(limit: datetime.timedelta) -> None:
    """FairScale's group by one of the same ranks that waits `limit`: FairScale's own would wait half an hour, whatever
    the world's timeout is, and torch has no public way to change that later. Every rank makes every group, in order.
    """
    size = world_size()
    for first in range(0, dist.get_world_size(), size):
        ranks = list(range(first, first + size))
        group = dist.new_group(ranks, timeout=limit, backend=dist.get_backend(fs_init.get_model_parallel_group()))
        if dist.get_rank() in ranks:
            fs_init._MODEL_PARALLEL_GROUP = group


def _check_size(size: int | None, world: int) -> None:
    if size is not None and (size < 1 or world % size):
        raise LlamaError(
            f"model_parallel_size={size} does not divide the {world} rank(s) that are running: "
            f"start them with torchrun --nproc_per_node {max(size, 1)}"
        )


def _duration(timeout: float | datetime.timedelta) -> datetime.timedelta:
    if isinstance(timeout, datetime.timedelta):
        return timeout
    limit = 10 * 365 * 24 * 3600.0
    return datetime.timedelta(seconds=check_number("timeout", timeout, 1e-3, limit, "None or seconds above 0"))


def _init_world(backend: str, device: torch.device, timeout: float | datetime.timedelta | None) -> None:
    """`init_process_group` from torchrun's variables, or for a single rank without any."""
    limit = None if timeout is None else _duration(timeout)
    options: dict[str, Any] = {} if limit is None else {"timeout": limit}
    if backend == "nccl":
        options["device_id"] = device
    if environment_integer("WORLD_SIZE", "1") == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, **options)
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise LlamaError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} but {', '.join(missing)} is not set: start the ranks with "
            f"torchrun, or unset WORLD_SIZE to run on one"
        )
    for name in ("RANK", "MASTER_PORT"):
        environment_integer(name, "")
    try:
        store, this_rank, ranks = _rendezvous(limit)
        # the store outlives our groups: without a prefix of its own a second group would find the first one's ports
        ProcessGroups._worlds_made += 1
        store = PrefixStore(f"llama/{ProcessGroups._worlds_made}", store)

        def join() -> None:
            _make_current(device)  # a thread of its own has a current device of its own
            dist.init_process_group(backend, store=store, rank=this_rank, world_size=ranks, **options)

        _within(limit, join)
    except BaseException as error:
        ProcessGroups._store = None  # perhaps its server is gone
        if not isinstance(error, RuntimeError):
            raise
        raise LlamaError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} did not find the others through "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: start all within the timeout and, on several "
            f"machines, name the network card (GLOO_SOCKET_IFNAME=eth0, NCCL_SOCKET_IFNAME=eth0): {error}"
        ) from error


def _rendezvous(limit: datetime.timedelta | None) -> tuple[Store, int, int]:
    """The store at MASTER_ADDR:MASTER_PORT, this rank and the number of ranks. Joined once in a process: if the first
    rank took its server down with one group and put it up with the next, it would cut off ranks that were quicker.
    """
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    address = (str(os.getpid()), *(os.environ[name] for name in names))
    if ProcessGroups._store is None or ProcessGroups._store[0] != address:
        wait: dict[str, Any] = {"timeout": limit} if limit else {}
        ProcessGroups._store = address, _within(limit, lambda: next(rendezvous("env://", **wait)))
    if limit is not None:
        ProcessGroups._store[1][0].set_timeout(limit)
    return ProcessGroups._store[1]


def _within(limit: datetime.timedelta | None, work: Callable[[], T]) -> T:
    """`work()` in a thread that is given up at the limit: torch waits for ever for a program that answers nothing, and
    gloo five times its timeout for a rank that cannot reach it.
    """
    results: queue.SimpleQueue[T | BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put(work())
        except BaseException as error:
            results.put(error)

    seconds = (limit or dist.default_pg_timeout).total_seconds()
    threading.Thread(target=run, daemon=True).start()
    try:
        result = results.get(timeout=seconds + 2)  # torch's own message comes first where it has one
    except queue.Empty:
        raise RuntimeError(f"no rank answered in torch's protocol within {seconds:g} s") from None
    if isinstance(result, BaseException):
        raise result
    return result
