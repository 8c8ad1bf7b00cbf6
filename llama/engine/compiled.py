"""`compile=True`: decoding in static shapes, compiled once for each number of rows.

    rows      1, 2, 4, 8 .. max_batch_size    compiled once each; missing rows are filled in and their logits dropped
    kv_len    64, 128, 192 .. max_seq_len     cache positions that are read; the mask hides those beyond a row's own

On CUDA each pair of rows and kv_len (256, 512, 1024 ..) is also captured as a CUDA graph, anew where weights or cache
have been given other memory. On a CPU the weights are
prepacked for oneDNN, wq, wk and wv fused into one product and w1 and w3 into another: these layers' `weight` is None,
and hooks on the five may not fire. Any hook or override brings back the published schedule, which is not compiled.
"""

import functools
import itertools
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..distributed import linear_layers, rank, send, world_size
from ..errors import LlamaError
from ..interrupts import no_grad
from ..model import Transformer
from ..quantization import Int8Weight, PackedWeight, PrepackedWeight, RowSlice

KV_BUCKET, GRAPH_KV_BUCKET = 64, 256  # kv_len is rounded up to these on a CPU, and at least this in a CUDA graph
DecodeStep: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]  # ids, positions, cache positions -> logits
logger = logging.getLogger("llama")

# -------------------------------------------------------------------- packed weights as custom operators

# An operator takes tensors and numbers, no objects: a packed weight is passed by number, and is freed with its model.
_packed_weights: "WeakValueDictionary[int, PackedWeight]" = WeakValueDictionary()
_next_number = itertools.count()


@functools.cache
def _linear_operator() -> Any:
    """llama::linear(x, number of the packed weight, n), registered with torch at its first use."""
    library = torch.library.Library("llama", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("linear(Tensor x, int weight, int n) -> Tensor")  # type: ignore[no-untyped-call]
    library.impl("linear", lambda x, weight, n: _packed_weights[weight](x).contiguous(), "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake("llama::linear", lambda x, weight, n: x.new_empty(*x.shape[:-1], n), lib=library)
    return library, torch.ops.llama.linear  # the library keeps the operator alive


class OperatorWeight:
    """A packed weight that the compiler sees as one operator, and does not trace into."""

    def __init__(self, packed: PackedWeight) -> None:
        self.packed, self.shape, self.nbytes, self.dense = packed, packed.shape, packed.nbytes, packed.dense
        self._number, (_, self._linear) = next(_next_number), _linear_operator()
        _packed_weights[self._number] = packed

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x, self._number, self.shape[0])  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------- the decoder


class StaticDecoder:
    """One token per row through the model, in static shapes."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.compile_seconds = 0.0  # spent on the first run of each shape
        weight = model.tok_embeddings.weight
        self._device, self._dtype = weight.device, weight.dtype
        self._freqs = torch.view_as_real(model.freqs_cis).to(self._device)  # (2 max_seq_len, k/2, 2)
        for attention in model.attentions():
            attention.match_cache(weight)
        self._compiled: dict[int, DecodeStep] = {}  # by rows
        self._graphs: dict[tuple[int, int], _Graph] = {}  # by rows and kv_len
        self._pool: Any = None  # the memory that all graphs share
        self._addresses: list[int] = []  # of weights and cache when they were captured
        self._owners = [(m, name) for m in model.modules() for name, p in m._parameters.items() if p is not None]
        self._owners += [(attention, name) for attention in model.attentions() for name in ("cache_k", "cache_v")]

    @no_grad
    def __call__(self, tokens: list[int], positions: list[int]) -> Tensor:
        """Feed each cache row's token at its position; float32 logits (n, v)."""
        self._check_unchanged()
        rows, kv_len = self._bucket(len(tokens), max(positions) + 1)
        fill = [0] * (rows - len(tokens))
        ids, start_pos = send([tokens + fill, positions + fill], self._device)  # (rows,) each, in one transfer
        begin, known = time.perf_counter(), len(self._compiled) + len(self._graphs)
        if self._device.type == "cuda":
            logits = self._graph(rows, kv_len, ids, start_pos)(ids, start_pos)
        else:
            logits = self._compile(ids, start_pos)(ids, start_pos, self._cache_positions(kv_len))
        if len(self._compiled) + len(self._graphs) > known:
            self.compile_seconds += time.perf_counter() - begin
        return logits[: len(tokens)]

    def _graph(self, rows: int, kv_len: int, ids: Tensor, start_pos: Tensor) -> "_Graph":
        """The graph of this shape. Graphs hold addresses: all are dropped where a weight or the cache has another."""
        addresses = [getattr(owner, name).data_ptr() for owner, name in self._owners]
        if addresses != self._addresses:
            self.close()
            self._addresses = addresses
        if (rows, kv_len) not in self._graphs:
            step = self._compile(ids, start_pos)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._graphs[rows, kv_len] = _Graph(step, ids, start_pos, self._cache_positions(kv_len), self._pool)
        return self._graphs[rows, kv_len]

    def close(self) -> None:
        """Drop the graphs and their memory, also before the ranks' groups go whose collectives they hold. What decodes
        later is captured anew.
        """
        self._graphs.clear()
        self._pool = None

    def _check_unchanged(self) -> None:
        """LlamaError if the model was cast or moved: the compiled steps and packed weights stay as they were made."""
        weight = self.model.tok_embeddings.weight
        if (weight.device, weight.dtype) != (self._device, self._dtype):
            raise LlamaError(
                f"the model is {weight.dtype} on {weight.device} now, but was compiled as {self._dtype} on "
                f"{self._device}: pass dtype and device to build"
            )

    def _bucket(self, rows: int, kv_len: int) -> tuple[int, int]:
        """The smallest number of rows and kv_len that we compile for and that hold what is asked for."""
        params = self.model.params
        rows = 1 << (rows - 1).bit_length()
        if self._device.type == "cuda":
            kv_len = max(GRAPH_KV_BUCKET, 1 << (kv_len - 1).bit_length())
        else:
            kv_len = -(-kv_len // KV_BUCKET) * KV_BUCKET
        return min(rows, params.max_batch_size), min(kv_len, params.max_seq_len)

    def _cache_positions(self, kv_len: int) -> Tensor:
        positions = torch.arange(kv_len, device=self._device)
        if self.model.params.max_seq_len > KV_BUCKET:
            torch._dynamo.mark_dynamic(positions, 0)
        return positions

    def _compile(self, ids: Tensor, start_pos: Tensor) -> DecodeStep:
        """The step for this number of rows and any kv_len.

        It is compiled with the least kv_len: at max_seq_len the compiler would take the length for a constant. The
        real step overwrites what this run wrote to the cache.
        """
        rows = len(ids)
        if rows not in self._compiled:

            def step(ids: Tensor, start_pos: Tensor, cache_positions: Tensor) -> Tensor:
                return self._step(ids, start_pos, cache_positions)

            # Torch keeps what it compiled by code object, and every `step` made here has the same one. Without guards
            # it would run the first model's graph for all of them, so each gets a copy of the code of its own.
            step.__code__ = step.__code__.replace()
            options: dict[str, Any] = {"guard_filter_fn": _no_guards}
            if self._device.type == "cuda" and any(
                isinstance(layer.packed, Int8Weight) for _, layer in linear_layers(self.model)
            ):
                options["coordinate_descent_tuning"] = True  # without it int8 is unpacked to memory, at one row too
            logger.warning("compiling the decode step for %d row(s): once, 10 to 60 s on most machines", rows)
            try:
                compiled: DecodeStep = torch.compile(step, fullgraph=True, options=options)
                compiled(ids, start_pos, self._cache_positions(min(KV_BUCKET, self.model.params.max_seq_len)))
            except (RuntimeError, OSError) as error:  # OSError: no place for the compiler's files
                reason = " ".join(str(error).split())
                logger.warning("compile=True: torch could not compile, so decoding is not compiled: %.300s", reason)
                compiled = step
            self._compiled[rows] = compiled  # not before: an interrupted run has compiled nothing
        return self._compiled[rows]

    def _step(self, ids: Tensor, start_pos: Tensor, cache_positions: Tensor) -> Tensor:
        """As `Transformer.hidden` with one position per row, and the head: ids (n,) at start_pos (n,) to logits (n, v),
        reading the cache at cache_positions (kv_len,).
        """
        h: Any = self.model.tok_embeddings(ids[:, None])  # (n, 1, d)
        mask = cache_positions <= start_pos[:, None, None, None]  # (n, 1, 1, kv_len)
        freqs = self._freqs[start_pos][:, None]  # (n, 1, k/2, 2)
        for layer in self.model.layers:
            h = layer(h, start_pos, freqs, mask)
        return self.model.output(self.model.norm(h)[:, -1]).float()  # type: ignore[no-any-return]


def _no_guards(guards: Sequence[Any]) -> list[bool]:
    """Shapes are chosen here and weights do not change: torch need not check every part of a model before each step."""
    return [False] * len(guards)


class _Graph:
    """A step captured as a CUDA graph: inputs are copied to where it reads them, logits read where it writes them.

    `pool` may be shared with other graphs: each one's logits stay its own, and no two are replayed at once.
    """

    def __init__(self, step: DecodeStep, ids: Tensor, start_pos: Tensor, cache_positions: Tensor, pool: Any) -> None:
        self._ids, self._start_pos, self._cache_positions = ids.clone(), start_pos.clone(), cache_positions
        with torch.cuda.device(ids.device):
            # a stream of this device's: torch would take the one that it made at its first capture
            side = torch.cuda.Stream(ids.device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(ids.device))
            with torch.cuda.stream(side):  # compiles, and warms up what a capture must not
                for _ in range(2):
                    step(self._ids, self._start_pos, cache_positions)
            torch.cuda.current_stream(ids.device).wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            # "thread_local": other threads, nccl's watchdog among them, may call CUDA meanwhile
            with torch.cuda.graph(self._graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                self._logits = step(self._ids, self._start_pos, cache_positions)

    def __call__(self, ids: Tensor, start_pos: Tensor) -> Tensor:
        self._ids.copy_(ids)
        self._start_pos.copy_(start_pos)
        self._graph.replay()
        return self._logits


# ----------------------------------------------------------------------------------- preparing a model


def graph_rows(device: torch.device, max_batch_size: int, max_seq_len: int) -> list[int]:
    """The rows of each graph that decoding on this device may come to capture: none but on CUDA."""
    rows = [1 << i for i in range((max_batch_size - 1).bit_length())] + [max_batch_size]
    lengths = max(1, (max(GRAPH_KV_BUCKET, max_seq_len) - 1).bit_length() - (GRAPH_KV_BUCKET - 1).bit_length() + 1)
    return rows * lengths if device.type == "cuda" else []


def compile_model(model: Transformer) -> StaticDecoder | None:
    """Prepack a loaded model's weights (on a CPU) and make its decoder; None, and a warning, if it cannot compile."""
    if model.tok_embeddings.weight.device.type != "cpu":
        return StaticDecoder(model)
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # as torch looks for it
    obstacle = None
    if world_size() > 1:  # FairScale's layers cannot be traced
        obstacle = "on several CPU ranks only prepacks the weights"
    elif shutil.which(compiler) is None:
        obstacle = f"finds no C++ compiler: install {compiler}"
    prepack_weights(model, wrap=_as_it_is if obstacle else OperatorWeight)
    if obstacle is None:
        return StaticDecoder(model)
    if rank() == 0:
        logger.warning("compile=True %s; decoding is not compiled", obstacle)
    return None


@no_grad
def prepack_weights(model: Transformer, wrap: Callable[[PackedWeight], PackedWeight]) -> None:
    """Prepack the weights for oneDNN, layer by layer, fusing those with the same input; `wrap` all packed ones."""
    block: Any
    for block in model.layers:
        attention, feed_forward = block.attention, block.feed_forward
        attention.qkv = _prepack(wrap, attention.wq, attention.wk, attention.wv)
        feed_forward.w13 = _prepack(wrap, feed_forward.w1, feed_forward.w3)
        _prepack(wrap, attention.wo)
        _prepack(wrap, feed_forward.w2)
    _prepack(wrap, model.output)


def _as_it_is(packed: PackedWeight) -> PackedWeight:
    return packed


def _prepack(wrap: Callable[[PackedWeight], PackedWeight], *layers: Any) -> PackedWeight | None:
    """One packed weight in place of the layers' own, returned; None if they are quantized or it does not pay off."""
    quantized = [layer for layer in layers if layer.packed is not None]
    for layer in quantized:
        layer.set_packed(wrap(layer.packed))
    if quantized:
        return None
    weight = layers[0].weight if len(layers) == 1 else torch.cat([layer.weight for layer in layers])
    if not PrepackedWeight.pays_off(weight):
        return None
    whole, start = wrap(PrepackedWeight(weight)), 0
    for layer in layers:
        stop = start + len(layer.weight)
        layer.set_packed(whole if len(layers) == 1 else RowSlice(whole, start, stop))
        start = stop
    return whole
