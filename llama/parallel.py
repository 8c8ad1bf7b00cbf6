"""Process groups and the three tensor-parallel layers.

A weight matrix ``W`` (out x in) is cut over the ranks of the model-parallel group::

    column parallel (wq wk wv w1 w3 output)     row parallel (wo w2)

        y = x W^T                                    y = sum over ranks of  x_r W_r^T
        +-------+ rank 0                             +---+---+
        |-------|          each rank computes        |   |   |   each rank has its slice of x;
        +-------+ rank 1   a slice of y              +---+---+   one all-reduce adds the parts
                                                       0   1
"""

import contextlib
import datetime
import io
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

try:
    from fairscale.nn.model_parallel import initialize as fs_init  # type: ignore[import-untyped]
    from fairscale.nn.model_parallel import layers as fs_layers
    from fairscale.nn.model_parallel.mappings import (  # type: ignore[import-untyped]
        copy_to_model_parallel_region,
        gather_from_model_parallel_region,
        reduce_from_model_parallel_region,
        scatter_to_model_parallel_region,
    )
except ImportError as error:
    raise ImportError(
        f"llama needs the package fairscale, which {sys.executable} cannot import ({error}); "
        f"install it with: {sys.executable} -m pip install fairscale"
    ) from error

from .errors import LlamaError

# ----------------------------------------------------------------------------------------------- ranks


def world_size() -> int:
    """Ranks that share one model; 1 where no model-parallel group is up."""
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
def naming_lost_ranks() -> Iterator[None]:
    """Within, an error of the network that ends a wait for other ranks is a LlamaError that says what to do."""
    try:
        yield
    except RuntimeError as error:
        if world_size() == 1 or not (isinstance(error, dist.DistError) or "gloo/transport" in str(error)):
            raise
        raise LlamaError(
            f"rank {rank()} of {world_size()} lost another rank, which ended or did not answer within build's timeout: "
            f"look at what the other ranks said, then start all of them again ({error})"
        ) from error


@naming_lost_ranks()
def broadcast_object(value: Any) -> Any:
    """The first rank's (picklable) value on every rank."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, fs_init.get_model_parallel_src_rank(), group=fs_init.get_model_parallel_group())
    return box[0]


@contextlib.contextmanager
def all_or_none(doing: str) -> Iterator[None]:
    """Run the body on every rank; if it fails on any, it fails on all, with that rank's message.

    Without it, the ranks that succeeded would wait in their next collective for those that did not.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    if world_size() > 1:
        messages: list[str | None] = [None] * world_size()
        mine = None if failure is None else f"{type(failure).__name__}: {failure}"
        with naming_lost_ranks():
            dist.all_gather_object(messages, mine, group=fs_init.get_model_parallel_group())
        others = [f"rank {r} failed {doing}: {text}" for r, text in enumerate(messages) if text is not None]
        if failure is None and others:
            raise LlamaError(others[0])
    if failure is not None:
        raise failure


def pick_device(device: str | torch.device | None) -> torch.device:
    """CUDA if there is one, else the CPU; ``cuda`` without an index is the GPU numbered LOCAL_RANK. LlamaError for a
    device that is not there.
    """
    try:
        chosen = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    except (RuntimeError, TypeError):  # torch's message lists two dozen
        raise LlamaError(f"device={device!r} is none that torch knows: take 'cpu', 'cuda', 'cuda:N' or 'mps'") from None
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise LlamaError(f"device={str(device)!r} was asked for, but torch sees no Apple GPU; use device='cpu'")
    if chosen.type != "cuda":
        return chosen
    if not torch.cuda.is_available():
        raise LlamaError(f"device={str(device)!r} was asked for, but torch sees no CUDA GPU; use device='cpu'")
    index = int(os.environ.get("LOCAL_RANK", "0")) if chosen.index is None else chosen.index
    if index >= torch.cuda.device_count():
        raise LlamaError(
            f"this machine's ranks need GPU number {index}, but it has {torch.cuda.device_count()} GPU(s): start "
            f"at most {torch.cuda.device_count()} rank(s) here (torchrun --nproc_per_node {torch.cuda.device_count()})"
        )
    return torch.device("cuda", index)


def pick_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """float32 on a CPU; on a GPU bfloat16 where it has that, else float16."""
    if dtype is None:
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
        return torch.float16 if device.type == "mps" else torch.float32
    chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if chosen not in (torch.float32, torch.bfloat16, torch.float16):
        raise LlamaError(f"dtype={dtype!r} must be one of float32, bfloat16, float16 or None")
    return chosen


# ---------------------------------------------------------------------------------- process groups


class ProcessGroups:
    """The groups one generator runs in; `close` takes down what `set_up` put up, once nobody uses it.

    Groups that the caller had made before stay up.  While open, ranks other than the first print nothing to stdout.
    """

    _users = 0  # open ProcessGroups in this process
    _worlds_made = 0
    _met: tuple[tuple[str, ...], tuple[Store, int, int]] | None = None  # as `_meet` found it, for later groups
    _made_world = _made_model_parallel = False
    _stdout: TextIO | None = None  # the real one, while this rank is muted
    _muted: TextIO | None = None  # what stands in its place
    _lock = threading.RLock()

    def __init__(self) -> None:
        self.is_open = True
        with ProcessGroups._lock:
            ProcessGroups._users += 1
        self._mute()

    def _mute(self) -> None:
        cls = ProcessGroups
        if dist.get_rank() > 0 and cls._stdout is None:
            cls._stdout, cls._muted = sys.stdout, open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            sys.stdout = cls._muted

    def close(self, wait: bool = True) -> None:
        """Idempotent. Waits for the other ranks, since leaving a gloo group early can abort them; not after an error,
        when they may be gone.
        """
        cls = ProcessGroups
        with cls._lock:
            if not self.is_open:
                return
            self.is_open = False
            cls._users -= 1
            if cls._users == 0:
                tear_down(wait)


def tear_down(wait: bool = True) -> None:
    """Destroy the groups that `set_up` made and give stdout back."""
    cls = ProcessGroups
    if wait and cls._made_world and dist.is_initialized() and dist.get_world_size() > 1:
        with contextlib.suppress(RuntimeError):  # a peer that is gone already
            dist.barrier()
    if cls._made_model_parallel:
        fs_init.destroy_model_parallel()
    if cls._made_world and dist.is_initialized():
        dist.destroy_process_group()
    cls._made_world = cls._made_model_parallel = False
    if cls._stdout is not None and cls._muted is not None:
        if sys.stdout is cls._muted:  # else the caller has put something of their own there since
            sys.stdout = cls._stdout
        cls._muted.close()
        cls._stdout = cls._muted = None


def set_up(
    model_parallel_size: int | None,
    device: torch.device,
    backend: str | None = None,
    timeout: float | datetime.timedelta | None = None,
) -> ProcessGroups:
    """Put up, or join, the process groups of a model cut over `model_parallel_size` ranks (None: all there are).

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are read as torchrun sets them; with one rank none is needed, no
    port is opened and `os.environ` is left alone. `timeout` (seconds) bounds each wait for the other ranks.
    """
    cls = ProcessGroups
    with cls._lock:
        try:
            if not dist.is_initialized():
                _check_size(model_parallel_size, int(os.environ.get("WORLD_SIZE", "1")))
                _init_world(backend or ("nccl" if device.type == "cuda" else "gloo"), device, timeout)
                cls._made_world = True
            if not fs_init.model_parallel_is_initialized():
                _check_size(model_parallel_size, dist.get_world_size())
                with contextlib.redirect_stdout(io.StringIO()):  # FairScale prints three lines
                    fs_init.initialize_model_parallel(model_parallel_size or dist.get_world_size())
                if timeout is not None:  # FairScale's groups would wait half an hour, whatever the world's timeout is
                    dist.distributed_c10d._set_pg_timeout(_duration(timeout), fs_init.get_model_parallel_group())
                cls._made_model_parallel = True
            elif model_parallel_size is not None and model_parallel_size != world_size():
                raise LlamaError(
                    f"model_parallel_size={model_parallel_size}, but FairScale's groups are already up with "
                    f"{world_size()} rank(s): pass {world_size()} or None, or close the earlier generator"
                )
        except BaseException:
            if cls._users == 0:
                tear_down(wait=False)
            raise
        return ProcessGroups()


def _check_size(size: int | None, world: int) -> None:
    if size is not None and (size < 1 or world % size):
        raise LlamaError(
            f"model_parallel_size={size} does not divide the {world} rank(s) that are running: "
            f"start them with torchrun --nproc_per_node {max(size, 1)}"
        )


def _duration(timeout: float | datetime.timedelta) -> datetime.timedelta:
    return timeout if isinstance(timeout, datetime.timedelta) else datetime.timedelta(seconds=timeout)


def _init_world(backend: str, device: torch.device, timeout: float | datetime.timedelta | None) -> None:
    """`init_process_group` from torchrun's variables, or for a single rank without any."""
    limit = None if timeout is None else _duration(timeout)
    options: dict[str, Any] = {} if limit is None else {"timeout": limit}
    if backend == "nccl":
        options["device_id"] = device
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, **options)
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise LlamaError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} but {', '.join(missing)} is not set: start the ranks with "
            f"torchrun, or unset WORLD_SIZE to run on one"
        )
    try:
        store, this_rank, ranks = _meet(limit)
        # the store outlives our groups: without a prefix of its own a second group would find the first one's ports
        ProcessGroups._worlds_made += 1
        store = PrefixStore(f"llama/{ProcessGroups._worlds_made}", store)
        dist.init_process_group(backend, store=store, rank=this_rank, world_size=ranks, **options)
    except BaseException as error:
        ProcessGroups._met = None  # perhaps its server is gone
        if not isinstance(error, RuntimeError):
            raise
        raise LlamaError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} did not find the others through "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: start all within the timeout and, on several "
            f"machines, name the network card (GLOO_SOCKET_IFNAME=eth0, NCCL_SOCKET_IFNAME=eth0): {error}"
        ) from error


def _meet(limit: datetime.timedelta | None) -> tuple[Store, int, int]:
    """The store at MASTER_ADDR:MASTER_PORT, this rank and the number of ranks. Joined once in a process: if the first
    rank took its server down with one group and put it up with the next, it would cut off ranks that were quicker.
    """
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    place = (str(os.getpid()), *(os.environ[name] for name in names))
    if ProcessGroups._met is None or ProcessGroups._met[0] != place:
        wait: dict[str, Any] = {"timeout": limit} if limit else {}
        ProcessGroups._met = place, next(rendezvous("env://", **wait))
    if limit is not None:
        ProcessGroups._met[1][0].set_timeout(limit)
    return ProcessGroups._met[1]


# ------------------------------------------------------------------------------------------- layers


def _part(total: int, what: str) -> int:
    ranks = world_size()
    if total % ranks:
        raise LlamaError(
            f"{what}={total} is not divisible by the {ranks} ranks that share the model: start {math.gcd(total, ranks)}"
        )
    return total // ranks


# Rows up to which MKL multiplies W x faster than x W^T in float32: 2.1 x at 2 rows, 1.3 x at 16 (docs/performance.md).
FEW_ROWS = 64


def _times(layer: Any, x: Tensor) -> Tensor:
    """x (..., in) times the layer's weight, transposed: (..., out); by its packed form where it has one."""
    if layer.packed is not None:
        return layer.packed(x)  # type: ignore[no-any-return]
    rows = x.numel() // max(x.shape[-1], 1)
    if x.dtype == torch.float32 and x.device.type == "cpu" and 1 < rows <= FEW_ROWS:
        return (layer.weight @ x.reshape(rows, -1).T).T.contiguous().view(*x.shape[:-1], -1)  # type: ignore[no-any-return]
    return F.linear(x, layer.weight)


class ColumnParallelLinear(fs_layers.ColumnParallelLinear):  # type: ignore[misc]
    """FairScale's layer without its full master weight: this rank's rows are allocated, and nothing else.

    `weight` (out_features / ranks, in_features), uninitialised. Input (..., in_features), output (..., out_features)
    where gathered, else this rank's slice of it. `packed` (see quantize.py) stands in for the weight where it is set.
    """

    packed: Callable[[Tensor], Tensor] | None = None

    def __init__(self, in_features: int, out_features: int, gather_output: bool = False) -> None:
        nn.Module.__init__(self)
        self.in_features = in_features
        self.out_features = out_features
        self.gather_output = gather_output
        self.output_size_per_partition = _part(out_features, "out_features")
        self.weight = nn.Parameter(torch.empty(self.output_size_per_partition, in_features))
        self.register_parameter("bias", None)

    def forward(self, input_: Tensor) -> Tensor:
        """The whole input (..., in_features) to the output as described above."""
        if world_size() == 1:  # FairScale's autograd wrappers would cost a fifth of a small model's step
            return _times(self, input_)
        output = _times(self, copy_to_model_parallel_region(input_))
        return gather_from_model_parallel_region(output) if self.gather_output else output


class RowParallelLinear(fs_layers.RowParallelLinear):  # type: ignore[misc]
    """FairScale's layer without its full master weight; the ranks' partial products are added by one all-reduce.

    `weight` (out_features, in_features / ranks), uninitialised. Input: this rank's slice of (..., in_features) where
    `input_is_parallel`, else the whole; output (..., out_features). `packed` as above.
    """

    packed: Callable[[Tensor], Tensor] | None = None

    def __init__(self, in_features: int, out_features: int, input_is_parallel: bool = True) -> None:
        nn.Module.__init__(self)
        self.in_features = in_features
        self.out_features = out_features
        self.input_is_parallel = input_is_parallel
        self.input_size_per_partition = _part(in_features, "in_features")
        self.weight = nn.Parameter(torch.empty(out_features, self.input_size_per_partition))
        self.register_parameter("bias", None)

    def forward(self, input_: Tensor) -> Tensor:
        """The input as described above to the whole output (..., out_features), the same on every rank."""
        if world_size() == 1:
            return _times(self, input_)
        local = input_ if self.input_is_parallel else scatter_to_model_parallel_region(input_)
        return reduce_from_model_parallel_region(_times(self, local))  # type: ignore[no-any-return]


def linear_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """The layers that may hold a `packed` weight, by name, in the order of the model's `state_dict`."""
    kinds = (ColumnParallelLinear, RowParallelLinear)
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]


class ParallelEmbedding(fs_layers.ParallelEmbedding):  # type: ignore[misc]
    """FairScale's layer without its full master weight; cut along the embedding dimension, as Llama 2's files are.

    `weight` (num_embeddings, embedding_dim / ranks), uninitialised. Ids (...) to vectors (..., embedding_dim).
    """

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        nn.Module.__init__(self)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.embedding_dim_per_partition = _part(embedding_dim, "embedding_dim")
        self.weight = nn.Parameter(torch.empty(num_embeddings, self.embedding_dim_per_partition))

    def forward(self, input_: Tensor) -> Tensor:
        """Ids (...) to whole vectors (..., embedding_dim), the same on every rank."""
        local = F.embedding(input_, self.weight)
        return local if world_size() == 1 else gather_from_model_parallel_region(local)
