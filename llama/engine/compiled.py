"""`compile=True`: decoding in static shapes, compiled once for each number of rows.

    rows    1, 2, 4, 8 .. max_batch_size    compiled once each; what is missing is filled with rows that nobody reads
    reach   64, 128, 192 .. max_seq_len     cache positions that are read; the mask hides what lies beyond a row's own

On CUDA every number of rows and reach (256, 512, 1024 ..) is also captured as a CUDA graph. On a CPU the weights are
reordered for oneDNN, wq, wk and wv as one and w1 and w3 as one, and are taken over thereby: their layers' `weight` is
None and hooks on those five may stay silent. Any hook or patch brings back the published schedule, uncompiled.
"""

import functools
import itertools
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..distributed import rank, world_size
from ..errors import LlamaError
from ..interrupts import no_grad
from ..model import Transformer
from ..quantization import PackedWeight, Part, Plain

REACH, GRAPH_REACH = 64, 256
logger = logging.getLogger("llama")

# ------------------------------------------------------------------- packed weights, seen by the compiler

# An operator's arguments are tensors and numbers: packed weights go by a number, and are gone with their model.
_PACKED: "WeakValueDictionary[int, PackedWeight]" = WeakValueDictionary()
_numbers = itertools.count()


@functools.cache
def _operator() -> Any:
    """llama::times(x, number of the packed weight, n), registered with torch when it is first wanted."""
    library = torch.library.Library("llama", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("times(Tensor x, int weight, int n) -> Tensor")  # type: ignore[no-untyped-call]
    library.impl("times", lambda x, weight, n: _PACKED[weight](x).contiguous(), "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake("llama::times", lambda x, weight, n: x.new_empty(*x.shape[:-1], n), lib=library)
    return library, torch.ops.llama.times  # the library keeps the operator alive


class _Opaque:
    """A packed weight whose multiplication the compiler takes as one operator."""

    def __init__(self, packed: PackedWeight) -> None:
        self.packed, self.shape, self.nbytes, self.dense = packed, packed.shape, packed.nbytes, packed.dense
        self._number, (_, self._times) = next(_numbers), _operator()
        _PACKED[self._number] = packed

    def __call__(self, x: Tensor) -> Tensor:
        return self._times(x, self._number, self.shape[0])  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------- the decoder


class StaticDecoder:
    """One token a row through the model, in static shapes."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.seconds = 0.0  # spent on the first run of each shape
        weight = model.tok_embeddings.weight
        self._device, self._dtype = weight.device, weight.dtype
        self._turns = torch.view_as_real(model.freqs_cis).to(self._device)  # (2 max_seq_len, k/2, 2)
        for attention in model.attentions():
            attention.match_cache(model.tok_embeddings.weight)
        self._compiled: dict[int, Callable[[Tensor, Tensor, Tensor], Tensor]] = {}  # by rows
        self._captured: dict[tuple[int, int], _Graph] = {}  # CUDA graphs by rows and reach

    def _check(self) -> None:
        """LlamaError where the model was cast or moved since: what is compiled and packed stays as it was made."""
        weight = self.model.tok_embeddings.weight
        if (weight.device, weight.dtype) != (self._device, self._dtype):
            raise LlamaError(
                f"the model is {weight.dtype} on {weight.device} now, but was compiled as {self._dtype} on "
                f"{self._device}: pass dtype and device to build"
            )

    @no_grad
    def __call__(self, tokens: list[int], positions: list[int]) -> Tensor:
        """Feed each cache row's token at its position; float32 logits (n, v)."""
        self._check()
        rows, reach = self._bucket(len(tokens), max(positions) + 1)
        fill = [0] * (rows - len(tokens))
        ids = torch.tensor(tokens + fill, device=self._device)
        places = torch.tensor(positions + fill, device=self._device)
        begin, known = time.perf_counter(), len(self._compiled) + len(self._captured)
        if self._device.type == "cuda":
            if (rows, reach) not in self._captured:
                self._captured[rows, reach] = _Graph(self._compile(ids, places), ids, places, self._positions(reach))
            logits = self._captured[rows, reach](ids, places)
        else:
            logits = self._compile(ids, places)(ids, places, self._positions(reach))
        if len(self._compiled) + len(self._captured) > known:
            self.seconds += time.perf_counter() - begin
        return logits[: len(tokens)]

    def _bucket(self, rows: int, reach: int) -> tuple[int, int]:
        """The smallest number of rows and reach that we make and that hold what is asked for."""
        params = self.model.params
        wide = 1 << (rows - 1).bit_length()
        if self._device.type == "cuda":
            far = max(GRAPH_REACH, 1 << (reach - 1).bit_length())
        else:
            far = -(-reach // REACH) * REACH
        return min(wide, params.max_batch_size), min(far, params.max_seq_len)

    def _positions(self, reach: int) -> Tensor:
        positions = torch.arange(reach, device=self._device)
        if self.model.params.max_seq_len > REACH:
            torch._dynamo.mark_dynamic(positions, 0)
        return positions

    def _compile(self, ids: Tensor, places: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The step for this number of rows and any reach.

        It is compiled at the least reach: at max_seq_len the compiler would take the whole length for a constant.
        What that run wrote to the cache the first real one writes over.
        """
        rows = len(ids)
        if rows not in self._compiled:

            def step(ids: Tensor, places: Tensor, positions: Tensor) -> Tensor:
                return self._step(ids, places, positions)

            step.__code__ = step.__code__.replace()  # torch keeps its results by code object, at most eight for each
            options: dict[str, Any] = {"guard_filter_fn": _no_guards}
            compiled: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.compile(step, fullgraph=True, options=options)
            logger.warning("compiling the decode step for %d row(s): once, 10 to 60 s on most machines", rows)
            try:
                compiled(ids, places, self._positions(min(REACH, self.model.params.max_seq_len)))
            except (RuntimeError, OSError) as error:  # OSError: no place for the compiler's files
                reason = " ".join(str(error).split())
                logger.warning("compile=True: torch could not compile, so decoding is not compiled: %.300s", reason)
                compiled = step
            self._compiled[rows] = compiled  # not before: an interrupted run has compiled nothing
        return self._compiled[rows]

    def _step(self, ids: Tensor, places: Tensor, positions: Tensor) -> Tensor:
        """Ids (n,) at places (n,) to logits (n, v), reading the cache at positions 0 up; what `Transformer.hidden` does
        with one position per row.
        """
        h: Any = self.model.tok_embeddings(ids[:, None])  # (n, 1, d)
        visible = positions <= places[:, None, None, None]  # (n, 1, 1, reach)
        turns = self._turns[places][:, None]  # (n, 1, k/2, 2)
        for layer in self.model.layers:
            h = layer(h, places, turns, visible)
        return self.model.output(self.model.norm(h)[:, -1]).float()  # type: ignore[no-any-return]


def _no_guards(guards: Sequence[Any]) -> list[bool]:
    """Shapes are chosen here and weights do not change: torch need not check a model's every part before each step."""
    return [False] * len(guards)


class _Graph:
    """A step captured as a CUDA graph: its inputs are copied in, its output is read where it always lies."""

    def __init__(self, step: Callable[..., Tensor], ids: Tensor, places: Tensor, positions: Tensor) -> None:
        self._ids, self._places, self._positions = ids.clone(), places.clone(), positions
        side = torch.cuda.Stream(ids.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(ids.device))
        with torch.cuda.stream(side):  # compiles, and warms up what a capture must not
            for _ in range(2):
                step(self._ids, self._places, positions)
        torch.cuda.current_stream(ids.device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = step(self._ids, self._places, positions)

    def __call__(self, ids: Tensor, places: Tensor) -> Tensor:
        self._ids.copy_(ids)
        self._places.copy_(places)
        self._graph.replay()
        return self._logits


def compile_model(model: Transformer) -> StaticDecoder | None:
    """Take over the weights of a loaded model, and make its decoder; None, and a warning, where no compiler is."""
    device = model.tok_embeddings.weight.device
    if device.type == "cpu":
        take_over(model)
        if world_size() > 1:  # FairScale's layers cannot be traced
            if rank() == 0:
                logger.warning("compile=True: on several CPU ranks weights are reordered, decoding is not compiled")
            return None
        compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # as torch looks for it
        if shutil.which(compiler) is None:
            logger.warning("compile=True finds no C++ compiler: install %s; decoding is not compiled", compiler)
            return None
        for module in model.modules():
            for name in ("packed", "qkv", "w13"):
                packed = getattr(module, name, None)
                if packed is not None and not isinstance(packed, Part):
                    setattr(module, name, _Opaque(packed))
    return StaticDecoder(model)


@no_grad
def take_over(model: Transformer) -> None:
    """Reorder the weights for oneDNN, layer by layer, those that multiply the same input as one."""
    block: Any
    for block in model.layers:
        attention, feed_forward = block.attention, block.feed_forward
        attention.qkv = _together(attention.wq, attention.wk, attention.wv)
        feed_forward.w13 = _together(feed_forward.w1, feed_forward.w3)
        _together(attention.wo)
        _together(feed_forward.w2)
    _together(model.output)


def _together(*layers: Any) -> PackedWeight | None:
    """One packed weight in place of the layers' own; None, and nothing done, where it cannot be or does not pay."""
    if any(layer.packed is not None for layer in layers):
        return None
    weight = layers[0].weight if len(layers) == 1 else torch.cat([layer.weight for layer in layers])
    if not Plain.fits(weight):
        return None
    whole, start = Plain(weight), 0
    for layer in layers:
        stop = start + layer.weight.shape[0]
        layer.packed = whole if len(layers) == 1 else Part(whole, start, stop)
        layer.register_parameter("weight", None)
        start = stop
    return whole
