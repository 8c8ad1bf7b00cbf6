"""What a model needs in memory, and whether the device has it."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..arguments import environment_integer
from ..errors import LlamaError
from ..quantization import SCHEMES, head_can_embed, weight_scheme
from .table import sizes, specs


class Memory(NamedTuple):
    """Bytes on each rank."""

    weights: int
    kv_cache: int
    graphs: int = 0

    @property
    def total(self) -> int:
        """Everything together."""
        return self.weights + self.kv_cache + self.graphs


def count_parameters(params: Mapping[str, Any], ranks: int = 1, tied: bool = False) -> int:
    """Weights on each rank: the norms whole, everything else in `ranks` parts; a tied head is the embedding, but for
    several ranks, which shard the two otherwise. `vocab_size` must be known.
    """
    numbers = sizes(params)
    count = -numbers["vocab"] * numbers["dim"] if tied and ranks == 1 else 0
    for spec in specs(params):
        values = math.prod(numbers[size] for size in spec.shape) * (params["n_layers"] if "{}" in spec.key else 1)
        count += values if spec.axis is None else values // ranks
    return count


def memory_estimate(
    params: Mapping[str, Any],
    max_seq_len: int,
    max_batch_size: int,
    ranks: int,
    dtype: torch.dtype,
    scheme: str | None = None,
    tied: bool = False,
) -> Memory:
    """Bytes of weights and of KV cache (2 * batch * seq * kv heads * head_dim * bytes * layers) on each rank; `scheme`
    is how the layers' weights are quantized. On one rank a `tied` head and its embedding are in memory once.
    """
    kv_values = 2 * max_batch_size * max_seq_len * sizes(params)["kv"] * params["n_layers"]
    count, embedding = count_parameters(params, ranks), params["vocab_size"] * params["dim"] // ranks
    once = tied and ranks == 1
    weights = count_parameters(params, ranks, tied) * dtype.itemsize
    if scheme:
        head, layers = (SCHEMES[weight_scheme(name, scheme)].bytes_per_weight for name in ("output.weight", "layers"))
        vectors = 0 if once and head_can_embed(scheme) else dtype.itemsize
        weights = int(embedding * (vectors + head) + (count - 2 * embedding) * layers)
    return Memory(weights, kv_values * dtype.itemsize // ranks)


CUBLAS_WORKSPACE = 32 << 20  # what torch takes for it on the largest GPUs


def graph_memory(params: Mapping[str, Any], ranks: int, dtype: torch.dtype, graph_rows: Sequence[int]) -> int:
    """Bytes of CUDA graphs with so many rows each: the float32 logits of every one, and the pool that they share, which
    holds the largest one's intermediate tensors and cuBLAS's workspace. Reckoned: it has not been measured on a GPU.
    """
    if not graph_rows:
        return 0
    vocab, numbers = params["vocab_size"], sizes(params)
    # logits, states and norms, w1 w3 and their product
    widths = vocab + 4 * numbers["dim"] + 3 * numbers["ffn"] // ranks
    return int(4 * vocab * sum(graph_rows) + widths * max(graph_rows) * dtype.itemsize + CUBLAS_WORKSPACE)


def free_memory(device: torch.device) -> int | None:
    """Bytes that are still available on the device; None where the system does not tell."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    if device.type != "cpu":
        return None
    found = [_available(), _left_in_container()]
    return min((size for size in found if size is not None), default=None)


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _left_in_container() -> int | None:
    """What a container's limit (cgroup 2) leaves; pages of files do not count, they can be given back."""
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
        fields = Path("/sys/fs/cgroup/memory.stat").read_text(encoding="ascii").split()
        return limit - int(fields[fields.index("anon") + 1])
    except (OSError, ValueError, IndexError):  # no limit, or none that can be read
        return None


def gigabytes(size: int) -> str:
    """Readable: 13.48 GB (10^9 bytes), smaller sizes in MB or kB."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size / 1000:.1f} kB"


def check_memory(
    args: Any,
    device: torch.device,
    dtype: torch.dtype,
    ranks: int,
    scheme: str | None = None,
    tied: bool = False,
    graph_rows: Sequence[int] = (),
    merging: int = 0,
) -> None:
    """LlamaError with the arithmetic when `device` cannot hold this rank's weights, cache and CUDA graphs (the rows of
    each); `args`: ModelArgs. On a CPU `merging` bytes come on top, while the largest weight that an adapter changes is
    loaded.
    """
    need = memory_estimate(vars(args), args.max_seq_len, args.max_batch_size, ranks, dtype, scheme, tied)
    need = need._replace(graphs=graph_memory(vars(args), ranks, dtype, graph_rows))
    free = free_memory(device)
    cpu = device.type == "cpu"
    here = min(ranks, environment_integer("LOCAL_WORLD_SIZE", str(ranks))) if cpu else 1
    total = need.total + (merging if cpu else 0)
    if free is None or total * here <= free:
        return
    several = "" if here == 1 else f", {gigabytes(total * here)} for the {here} ranks of this machine"
    more = f" + CUDA graphs {gigabytes(need.graphs)} (compile=True)" if need.graphs else ""
    more += f" + {gigabytes(merging)} while adapters are merged" if cpu and merging else ""
    name = scheme or str(dtype).removeprefix("torch.")
    raise LlamaError(
        f"not enough memory on {device}: weights {gigabytes(need.weights)} ({name}) + KV cache "
        f"{gigabytes(need.kv_cache)} (max_batch_size={args.max_batch_size} x max_seq_len={args.max_seq_len}){more} = "
        f"{gigabytes(total)} per rank on {ranks} rank(s){several}, but {gigabytes(free)} are free: lower "
        f"max_batch_size or max_seq_len, take a smaller dtype (bfloat16) or quantize='int4', or use more ranks"
    )
