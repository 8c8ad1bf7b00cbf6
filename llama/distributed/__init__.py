"""Ranks that share one model: process groups and their life, devices, and the three tensor-parallel layers."""

from .devices import pick_device, pick_dtype
from .groups import (
    ProcessGroups,
    broadcast,
    broadcast_object,
    destroy_groups,
    initialize_groups,
    raise_on_all_ranks,
    rank,
    shard_as,
    translate_distributed_errors,
    world_size,
)
from .layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, linear_layers
from .threads import choose_threads

__all__ = [
    "ColumnParallelLinear",
    "ParallelEmbedding",
    "ProcessGroups",
    "RowParallelLinear",
    "broadcast",
    "broadcast_object",
    "choose_threads",
    "destroy_groups",
    "initialize_groups",
    "linear_layers",
    "pick_device",
    "pick_dtype",
    "raise_on_all_ranks",
    "rank",
    "shard_as",
    "translate_distributed_errors",
    "world_size",
]
