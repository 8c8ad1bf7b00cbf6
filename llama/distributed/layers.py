"""The three tensor-parallel layers.

A weight matrix ``W`` (out x in) is sharded over the ranks of the model-parallel group::

    column parallel (wq wk wv w1 w3 output)     row parallel (wo w2)

        y = x W^T                                    y = sum over ranks of  x_r W_r^T
        +-------+ rank 0                             +---+---+
        |-------|          each rank computes        |   |   |   each rank has its slice of x;
        +-------+ rank 1   a slice of y              +---+---+   one all-reduce adds the parts
                                                       0   1
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from fairscale.nn.model_parallel import layers as fs_layers  # type: ignore[import-untyped]
from fairscale.nn.model_parallel.mappings import (  # type: ignore[import-untyped]
    copy_to_model_parallel_region,
    gather_from_model_parallel_region,
    reduce_from_model_parallel_region,
    scatter_to_model_parallel_region,
)
from torch import Tensor, nn

from ..errors import LlamaError
from .groups import world_size

InitMethod: TypeAlias = Callable[[Tensor], Any] | None


def _shard_size(total: int, what: str) -> int:
    ranks = world_size()
    if total % ranks:
        raise LlamaError(
            f"{what}={total} is not divisible by the {ranks} ranks that share the model: start {math.gcd(total, ranks)}"
        )
    return total // ranks


def _make_weight(rows: int, columns: int, init_method: InitMethod) -> nn.Parameter:
    """This rank's shard, uninitialized where no method is given: a checkpoint is loaded over it."""
    weight = nn.Parameter(torch.empty(rows, columns))
    if init_method is not None:
        init_method(weight)
    return weight


# Rows up to which MKL multiplies W x faster than x W^T in float32: 2.1 x at 2 rows, 1.3 x at 16 (docs/performance.md).
FEW_ROWS = 64


def _linear(layer: Any, x: Tensor) -> Tensor:
    """`_multiply`, and the layer's bias added."""
    y = _multiply(layer, x)
    return y if layer.bias is None else y + layer.bias


def _multiply(layer: Any, x: Tensor) -> Tensor:
    """x (..., in) times the layer's weight, transposed: (..., out); by its packed form where it has one."""
    if layer.packed is not None:
        return layer.packed(x)  # type: ignore[no-any-return]
    rows = x.numel() // max(x.shape[-1], 1)
    if x.dtype == torch.float32 and x.device.type == "cpu" and 1 < rows <= FEW_ROWS:
        return (layer.weight @ x.reshape(rows, -1).T).T.contiguous().view(*x.shape[:-1], -1)  # type: ignore[no-any-return]
    return F.linear(x, layer.weight)


class _Linear(nn.Module):
    """What both linear layers share: `weight` (out, in), this rank's shard, uninitialized; or `packed` in its place.

    They take FairScale's arguments; `bias` is zeros until loaded, and absent by default, as in Llama 1 to 3.
    """

    packed: Callable[[Tensor], Tensor] | None = None

    def __init__(
        self, in_features: int, out_features: int, shard: tuple[int, int], bias: bool, init_method: InitMethod
    ) -> None:
        nn.Module.__init__(self)  # FairScale's would allocate the whole matrix
        self.in_features = in_features
        self.out_features = out_features
        self.weight = _make_weight(*shard, init_method)
        self.register_parameter("bias", nn.Parameter(torch.zeros(shard[0])) if bias else None)

    def set_packed(self, packed: Callable[[Tensor], Tensor]) -> None:
        """Multiply with `packed` (see llama/quantization) from now on; the weight is removed."""
        self.packed = packed
        self.register_parameter("weight", None)


class ColumnParallelLinear(_Linear, fs_layers.ColumnParallelLinear):  # type: ignore[misc]
    """FairScale's layer without its full master weight: `weight` is (out_features / ranks, in_features).

    Input (..., in_features), output (..., out_features) if `gather_output`, else this rank's slice of it; `bias` is
    sharded as the output.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        gather_output: bool = False,
        init_method: InitMethod = None,
    ) -> None:
        size = _shard_size(out_features, "out_features")
        super().__init__(in_features, out_features, (size, in_features), bias, init_method)
        self.output_size_per_partition, self.gather_output = size, gather_output

    def forward(self, input_: Tensor) -> Tensor:
        """The whole input (..., in_features) to the output as described above."""
        if world_size() == 1:  # FairScale's autograd wrappers would cost a fifth of a small model's step
            return _linear(self, input_)
        output = _linear(self, copy_to_model_parallel_region(input_))
        return gather_from_model_parallel_region(output) if self.gather_output else output


class RowParallelLinear(_Linear, fs_layers.RowParallelLinear):  # type: ignore[misc]
    """FairScale's layer without its full master weight: `weight` is (out_features, in_features / ranks).

    Input: this rank's slice of (..., in_features) if `input_is_parallel`, else the whole; output (..., out_features),
    the ranks' partial products added by one all-reduce, and then `bias` (out_features), whole on every rank.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        input_is_parallel: bool = True,
        init_method: InitMethod = None,
    ) -> None:
        size = _shard_size(in_features, "in_features")
        super().__init__(in_features, out_features, (out_features, size), bias, init_method)
        self.input_size_per_partition, self.input_is_parallel = size, input_is_parallel

    def forward(self, input_: Tensor) -> Tensor:
        """The input as described above to the whole output (..., out_features), the same on every rank."""
        if world_size() == 1:
            return _linear(self, input_)
        local = input_ if self.input_is_parallel else scatter_to_model_parallel_region(input_)
        output = reduce_from_model_parallel_region(_multiply(self, local))
        return output if self.bias is None else output + self.bias  # type: ignore[no-any-return]


def linear_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """The layers whose weight may be packed, by name, in the order of the model's `state_dict`."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, _Linear)]


class ParallelEmbedding(fs_layers.ParallelEmbedding):  # type: ignore[misc]
    """FairScale's layer without its full master weight; sharded along the embedding dimension, as in Llama 2's files.

    `weight` (num_embeddings, embedding_dim / ranks), uninitialized; or `packed` in its place, and no row.
    Ids (...) to vectors (..., embedding_dim).
    """

    packed: Any = None

    def __init__(self, num_embeddings: int, embedding_dim: int, *, init_method: InitMethod = None) -> None:
        nn.Module.__init__(self)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.embedding_dim_per_partition = _shard_size(embedding_dim, "embedding_dim")
        self.weight = _make_weight(num_embeddings, self.embedding_dim_per_partition, init_method)

    def forward(self, input_: Tensor) -> Tensor:
        """Ids (...) to whole vectors (..., embedding_dim), the same on every rank."""
        ids = input_.to(self.weight.device)
        local = F.embedding(ids, self.weight) if self.packed is None else self.packed.rows(ids).to(self.weight.dtype)
        return local if world_size() == 1 else gather_from_model_parallel_region(local)

    def set_packed(self, packed: Any) -> None:
        """Take vectors from `packed.rows` (see llama/quantization) from now on; `weight` still has dtype and device."""
        self.packed = packed
        self.weight.data = self.weight.data.new_empty(0, self.embedding_dim_per_partition)
