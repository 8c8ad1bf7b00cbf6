"""What `trace` observes: one generation, step by step, through forward hooks on the model's modules.

A model that has hooks is driven in the published schedule: the whole prompt first, then one token per step. Letters as
in model.py: s tokens fed in a step, t positions so far, h this rank's query heads, v vocabulary.
"""

import functools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from fairscale.nn.model_parallel.mappings import gather_from_model_parallel_region  # type: ignore[import-untyped]
from torch import Tensor

from .. import distributed as parallel
from ..engine.sampling import Sampling, distribution, nucleus, row_generator
from ..generation import Llama
from ..interrupts import no_grad, remove_hooks, restoring_after
from ..model import Attention, Transformer, apply_rotary_emb, repeat_kv
from ..tokenizer import ids_without_piece, piece

CANDIDATES = 5  # per step

ShapeRow: TypeAlias = tuple[str, str, str]  # a tensor or range of cache positions, its shape or bounds, a note


class ModuleCall(NamedTuple):
    """One forward call of a module: inputs, output and when it ended, in seconds."""

    inputs: tuple[Any, ...]
    output: Any
    time: float


@dataclass(frozen=True)
class Candidate:
    """A token and its probability at each stage of sampling."""

    id: int
    piece: str
    raw: float  # softmax of the logits
    tempered: float  # after temperature
    final: float  # after top-p, renormalized
    kept: bool
    drawn: bool


@dataclass(frozen=True)
class Head:
    """The attention weights (s, t) of one query head; each row sums to 1."""

    head: int
    kv_head: int
    rank: int
    weights: list[list[float]]


@dataclass(frozen=True)
class StepTrace:
    """One step: the tokens at positions prev_pos:cur_pos are fed, one token is sampled."""

    number: int
    phase: str  # "prefill" or "decode"
    prev_pos: int
    cur_pos: int
    shapes: list[ShapeRow]
    mask: list[list[int]] | None  # (s, t), 1 where a token may attend; None if the model was given no mask
    heads: list[Head]  # of all ranks, for the requested layer
    candidates: list[Candidate]  # the most likely tokens, then the sampled one unless it is among them
    n_kept: int
    uniform: float | None  # the random number behind the draw; None without a seed
    low: float  # the sampled token's interval of the cumulative distribution, most likely tokens first
    high: float
    token: int
    piece: str
    text: str
    finish_reason: str | None
    forward_ms: float  # from the embedding to the logits
    sampling_ms: float


class CallRecorder:
    """Within, each forward pass leaves in the dict its calls of the embedding, one layer's modules and the head."""

    def __init__(self, model: Transformer, layer: int) -> None:
        self.calls: dict[str, ModuleCall] = {}
        block: Any = model.layers[layer]
        attention = block.attention
        modules = {"hidden": model.tok_embeddings, "q": attention.wq, "k": attention.wk, "v": attention.wv}
        modules |= {"block": block, "ffn": block.feed_forward.w1, "logits": model.output}
        self._hooks: list[tuple[Any, Any]] = [(m, functools.partial(self._record, name)) for name, m in modules.items()]

    def __enter__(self) -> dict[str, ModuleCall]:
        for module, hook in self._hooks:
            module.register_forward_hook(hook)
        return self.calls

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Take the hooks off; none may be there."""
        remove_hooks(self._hooks)

    def _record(self, name: str, module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if name in ("hidden", "logits") and output.is_cuda:
            torch.cuda.synchronize(output.device)  # so that the time is that of the kernels, not of their launch
        self.calls[name] = ModuleCall(inputs, output, time.perf_counter())


@no_grad
def attention_weights(
    attention: Attention, q: Tensor, start_pos: int, freqs_cis: Tensor, mask: Tensor | None
) -> Tensor:
    """Attention weights of row 0 (h, s, t), float32, recomputed after the forward pass: the fused kernel hides them.

    `q` is the output of wq (1, s, h * head_dim); the keys are read from the cache.
    """
    seqlen = q.shape[1]
    xq = q[:1].view(1, seqlen, attention.n_local_heads, attention.head_dim)
    xq, _ = apply_rotary_emb(xq, xq, freqs_cis)  # (1, s, h, head_dim)
    keys = repeat_kv(attention.cache_k[:1, : start_pos + seqlen], attention.n_rep)  # (1, t, h, head_dim)
    scores = torch.einsum("shk,thk->hst", xq[0].float(), keys[0].float()) / math.sqrt(attention.head_dim)
    return torch.softmax(scores if mask is None else scores + mask.float(), dim=-1)


def trace_steps(
    generator: Llama, ids: list[int], tokens: int, settings: Sampling, layer: int | None = None, whole: bool = True
) -> Iterator[StepTrace]:
    """Continue the prompt `ids` by up to `tokens`; one `StepTrace` per step, the same on every rank.

    `layer` is the one whose attention is recorded, None for none. Unless `whole`, mask and attention are those of the
    last token fed only: for a prompt of 4096 tokens all of it would be gigabytes.
    """
    recorder = CallRecorder(generator.model, layer or 0)
    steps = _trace_steps(generator, ids, tokens, settings, layer, whole, recorder)
    return restoring_after(steps, recorder.remove)


def _trace_steps(
    generator: Llama,
    ids: list[int],
    tokens: int,
    settings: Sampling,
    layer: int | None,
    whole: bool,
    recorder: CallRecorder,
) -> Iterator[StepTrace]:
    temperature, top_p, seed = settings.temperature, settings.top_p, settings.seed
    uniforms = None if seed is None or temperature == 0 else row_generator(seed, ids, 0)  # repeats the sampler's draws
    text_ids, tokenizer, rows = list(ids), generator.tokenizer, slice(None) if whole else slice(-1, None)
    attention = generator.model.attentions()[layer or 0]
    stream = generator.stream([ids], tokens, temperature, top_p, seed=seed)
    with stream, recorder as calls:
        for number, step in enumerate(stream, 1):
            now = time.perf_counter()
            text_ids.append(step.token)
            _, start_pos, _, mask = calls["block"].inputs
            yield StepTrace(
                number=number,
                phase="prefill" if start_pos == 0 else "decode",
                prev_pos=start_pos,
                cur_pos=start_pos + calls["hidden"].output.shape[1],
                shapes=_shape_rows(calls, attention, generator.model.n_layers),
                mask=None if mask is None else (mask[rows] == 0).int().tolist(),
                heads=[] if layer is None else _heads(calls, attention, rows),
                **_sampling_fields(tokenizer, calls["logits"].output[0, -1].float(), settings, step.token),
                uniform=None if uniforms is None else float(torch.rand((), generator=uniforms, dtype=torch.float64)),
                token=step.token,
                piece=piece(tokenizer, step.token),
                text=tokenizer.decode(text_ids),
                finish_reason=step.finish_reason,
                forward_ms=1000 * (calls["logits"].time - calls["hidden"].time),
                sampling_ms=1000 * (now - calls["logits"].time),
            )


# ------------------------------------------------------------------------------------------ shapes and heads


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _heads(calls: dict[str, ModuleCall], attention: Attention, rows: slice) -> list[Head]:
    """All ranks' heads, with the attention weights of those `rows` of the tokens fed."""
    _, start_pos, freqs_cis, mask = calls["block"].inputs
    q = calls["q"].output[:, rows]
    start_pos += calls["q"].output.shape[1] - q.shape[1]
    weights = attention_weights(attention, q, start_pos, freqs_cis[rows], None if mask is None else mask[rows])
    weights = gather_from_model_parallel_region(weights.movedim(0, -1).contiguous()).movedim(-1, 0)  # h of all ranks
    tables = weights.double().round(decimals=4).tolist()
    return [Head(i, i // attention.n_rep, i // attention.n_local_heads, table) for i, table in enumerate(tables)]


def _shape_rows(calls: dict[str, ModuleCall], attention: Attention, n_layers: int) -> list[ShapeRow]:
    """A step's shapes from the embedding to the logits; what is sharded has a row per rank, with equal shapes."""
    hidden, (_, start_pos, _, mask), ranks = calls["hidden"].output, calls["block"].inputs, parallel.world_size()
    q, k, v = (calls[name].output.unflatten(-1, (-1, attention.head_dim)) for name in ("q", "k", "v"))
    end, q_heads, kv_heads, cache = start_pos + hidden.shape[1], q.shape[2], k.shape[2], attention.cache_k

    def sharded(name: str, tensor: Tensor, note: str, heads: int = 0) -> list[ShapeRow]:
        if ranks == 1:
            return [(name, _shape(tensor), note)]
        notes = [f"{r * heads}:{(r + 1) * heads} of {note}" if heads else note for r in range(ranks)]
        return [(f"{name}, rank {r}", _shape(tensor), notes[r]) for r in range(ranks)]

    return [
        ("hidden", _shape(hidden), "batch, tokens, dim: one vector per token fed"),
        *sharded("q", q, f"{ranks * q_heads} query heads (batch, tokens, heads, head_dim)", q_heads),
        *sharded("k", k, f"{ranks * kv_heads} key heads, each shared by {attention.n_rep} query heads", kv_heads),
        *sharded("v", v, f"{ranks * kv_heads} value heads", kv_heads),
        *sharded("cache", cache, f"batch, positions, heads, head_dim; k and v in each of {n_layers} layers"),
        ("written", f"{start_pos}:{end}", f"cache positions; {cache.shape[1] - end} remain free"),
        ("read", f"0:{end}", "cache positions"),
        ("mask", "none", "a single new token attends to all positions") if mask is None
        else ("mask", _shape(mask), "fed, read: -inf above the diagonal (causal)"),
        *sharded("ffn", calls["ffn"].output, "hidden layer of the feed-forward network"),
        ("logits", _shape(calls["logits"].output), "one per vocabulary entry; only the last row is used"),
    ]  # fmt: skip


# -------------------------------------------------------------------------------------------------- sampling


def _sampling_fields(tokenizer: Any, logits: Tensor, settings: Sampling, token: int) -> dict[str, Any]:
    """The fields of `StepTrace` that show how `token` was sampled from the last row of logits (v,)."""
    raw = torch.softmax(logits, dim=-1)
    banned = torch.tensor(ids_without_piece(tokenizer, len(logits)), dtype=torch.long, device=logits.device)
    logits = logits.index_fill(0, banned, -torch.inf)
    if settings.temperature == 0:  # greedy: top-p has no effect
        tempered = torch.zeros_like(raw).index_fill(0, logits.argmax(), 1.0)
    else:
        tempered = distribution(logits[None], settings)[0]
    probs, order = nucleus(tempered[None], settings.top_p)  # (1, v), most likely first
    final = torch.zeros_like(raw).scatter(0, order[0], probs[0])
    ids = torch.topk(raw, min(CANDIDATES, len(raw))).indices.tolist()
    candidates = [
        Candidate(
            i, piece(tokenizer, i), float(raw[i]), float(tempered[i]), float(final[i]), bool(final[i]), i == token
        )
        for i in dict.fromkeys([*ids, token])
    ]
    index = int((order[0] == token).nonzero())
    low, high = float(probs[0, :index].sum()), float(probs[0, : index + 1].sum())
    return {"candidates": candidates, "n_kept": int((final > 0).sum()), "low": low, "high": high}
