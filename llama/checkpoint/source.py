"""What writers read from: an opened checkpoint in the type that is asked for."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..errors import LlamaError
from ..rope import named_scaling
from .checkpoint import Checkpoint
from .table import weight_spec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CONTEXTS = {10000.0: 4096, 500000.0: 8192, 1000000.0: 16384}  # Llama 2, Llama 3, Code Llama, told by rope_theta


@dataclass
class Source:
    """A checkpoint to be written, the settings of `convert`, and a progress bar."""

    checkpoint: Checkpoint
    dtype_name: str | None = None  # of DTYPES; None: as stored
    context: int | None = None  # the longest window, in tokens
    shards: int = 1  # Meta's files
    quantize: str | None = None  # Meta's layers: "int8" or "int4"
    bar: "tqdm[Any]" = field(default_factory=lambda: tqdm(disable=True))

    @property
    def params(self) -> dict[str, Any]:
        """ModelArgs' fields with the embedding's vocab_size."""
        return {**self.checkpoint.params, "vocab_size": self.checkpoint.shape("tok_embeddings.weight")[0]}

    @property
    def window(self) -> int:
        """The longest window: as asked for, as stored, or as the family has it."""
        return self.context or self.checkpoint.context or self.family_window

    @property
    def family_window(self) -> int:
        """The longest window of the family that the rotary angles tell."""
        scaling = named_scaling(self.checkpoint.params)
        if scaling is not None and scaling["rope_type"] == "llama3":
            return 131072  # Llama 3.1
        return CONTEXTS.get(self.checkpoint.params["rope_theta"], 4096)

    def dtype(self, name: str) -> torch.dtype:
        """The type in which a weight is written."""
        return DTYPES[self.dtype_name] if self.dtype_name else self.checkpoint.written_dtype(name)

    def read(self, name: str, rank: int = 0, world: int = 1) -> Tensor:
        """One weight (or its part), contiguous, in the type asked for."""
        dtype = self.dtype(name)
        if self.quantize and self.checkpoint.weights[name].changes and name != "tok_embeddings.weight":
            dtype = torch.float32  # quantizing rounds enough: as `build(lora=..., quantize=...)`
        part = self.checkpoint.read(name, rank, world, dtype).to(dtype).contiguous()
        if self.dtype_name == "float16" and part.isinf().any():
            raise LlamaError(f"{self.checkpoint.path}: {name} holds values beyond float16's range: keep bfloat16")
        if rank == 0 or weight_spec(name).axis is not None:
            self.bar.update(part.numel() * part.itemsize)
        return part

    def size(self, names: list[str]) -> int:
        """Bytes of these weights as written."""
        return sum(math.prod(self.checkpoint.shape(name)) * self.dtype(name).itemsize for name in names)
