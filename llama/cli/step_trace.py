"""One generation seen from outside: what passes through the model's modules, step by step, by forward hooks.

A model that has hooks is driven in the published schedule (steps.py): the prompt at once, then one token a step.
Letters as in model.py: s tokens fed in a step, t positions so far, h and g this rank's query and key/value heads.
"""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from fairscale.nn.model_parallel.initialize import get_model_parallel_group  # type: ignore[import-untyped]
from torch import Tensor

from .. import distributed as parallel
from ..engine.sampling import Sampling, distribution, nucleus, row_generator
from ..generation import Llama
from ..model import Attention, Transformer, apply_rotary_emb, repeat_kv

CANDIDATES = 5  # of each step

Stage: TypeAlias = tuple[str, str, str]  # a place on a step's way, its shape or span, what to know of it


class ModuleCall(NamedTuple):
    """One call of a module: what went in, what came out, and when (seconds) it ended."""

    inputs: tuple[Any, ...]
    output: Any
    time: float


@dataclass(frozen=True)
class Candidate:
    """A token that a step may draw, and its probability at each stage of the choice."""

    id: int
    piece: str
    raw: float  # as the model says: softmax of the logits
    tempered: float  # after temperature
    final: float  # after top-p, which scales what it keeps so that it adds up to 1
    kept: bool
    drawn: bool


@dataclass(frozen=True)
class Head:
    """What one query head gives to each position: weights (s, t), each row adding up to 1."""

    head: int
    kv_head: int
    rank: int
    weights: list[list[float]]


@dataclass(frozen=True)
class StepTrace:
    """One step: the positions prev_pos:cur_pos are fed, one token is drawn."""

    number: int
    phase: str  # "prefill" or "decode"
    prev_pos: int
    cur_pos: int
    stages: list[Stage]
    mask: list[list[int]] | None  # (s, t), 1 where a token may look; None where the model was given none
    heads: list[Head]  # all ranks', of the layer that was asked for
    candidates: list[Candidate]  # the likeliest, then the drawn one if it is not among them
    n_kept: int
    uniform: float | None  # the random number behind the draw, where a seed was given
    low: float  # the drawn token's stretch of 0..1, likelier tokens before it
    high: float
    token: int
    piece: str
    text: str
    finish_reason: str | None
    forward_ms: float
    choice_ms: float


@contextlib.contextmanager
def watch(model: Transformer, layer: int) -> Iterator[dict[str, ModuleCall]]:
    """Within, each forward leaves in the dict what passed through the embedding, one layer and the head."""
    seen: dict[str, ModuleCall] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, inputs: tuple[Any, ...], output: Any = None) -> None:
            if name in ("start", "logits") and isinstance(inputs[0], Tensor) and inputs[0].is_cuda:
                torch.cuda.synchronize(inputs[0].device)  # else the time were that of asking, not of computing
            seen[name] = ModuleCall(inputs, output, time.perf_counter())

        return hook

    block: Any = model.layers[layer]
    attention = block.attention
    places = {"hidden": model.tok_embeddings, "q": attention.wq, "k": attention.wk, "v": attention.wv}
    places |= {"block": block, "ffn": block.feed_forward.w1, "logits": model.output}
    handles = [model.tok_embeddings.register_forward_pre_hook(keep("start"))]
    handles += [module.register_forward_hook(keep(name)) for name, module in places.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def attention_weights(
    attention: Attention, q: Tensor, start_pos: int, freqs_cis: Tensor, mask: Tensor | None
) -> Tensor:
    """What each query head of row 0 gave to each position (h, s, t), float32, computed again after the forward.

    The fused attention never shows it. `q` is wq's output (1, s, h * k); the keys are those in the cache.
    """
    seqlen = q.shape[1]
    xq = q[:1].view(1, seqlen, attention.n_local_heads, attention.head_dim)
    xq, _ = apply_rotary_emb(xq, xq, freqs_cis)  # (1, s, h, k)
    keys = repeat_kv(attention.cache_k[:1, : start_pos + seqlen], attention.n_rep)  # (1, t, h, k)
    scores = torch.einsum("shk,thk->hst", xq[0].float(), keys[0].float()) / math.sqrt(attention.head_dim)
    return torch.softmax(scores if mask is None else scores + mask.float(), dim=-1)


def follow(
    generator: Llama, ids: list[int], tokens: int, settings: Sampling, layer: int | None = None, whole: bool = True
) -> Iterator[StepTrace]:
    """Continue a prompt's ids by up to `tokens`, one `StepTrace` a step, the same on every rank.

    `layer` is the one whose attention is looked at, None for no attention. Without `whole`, masks and attention are
    kept for the last token fed only: those of a prompt of 4096 tokens would be gigabytes.
    """
    temperature, top_p, seed = settings.temperature, settings.top_p, settings.seed
    draws = None if seed is None or temperature == 0 else row_generator(seed, ids, 0)  # a twin of the library's own
    so_far, tokenizer = list(ids), generator.tokenizer
    attention = generator.model.attentions()[layer or 0]
    stream = generator.stream([ids], tokens, temperature, top_p, seed=seed)
    with contextlib.closing(stream), watch(generator.model, layer or 0) as seen:  # type: ignore[type-var]
        for number, step in enumerate(stream, 1):
            now = time.perf_counter()
            so_far.append(step.token)
            _, start_pos, _, mask = seen["block"].inputs
            rows = slice(None) if whole else slice(-1, None)
            parts = _gather(_part(attention, seen, None if layer is None else rows))
            yield StepTrace(
                number=number,
                phase="prefill" if start_pos == 0 else "decode",
                prev_pos=start_pos,
                cur_pos=start_pos + seen["hidden"].output.shape[1],
                stages=_stages(seen, parts, attention, generator.model.n_layers),
                mask=None if mask is None else (mask[rows] == 0).int().tolist(),
                heads=[head for part in parts for head in part["heads"]],
                **_choice(tokenizer, seen["logits"].output[0, -1].float(), settings, step.token),
                uniform=None if draws is None else float(torch.rand((), generator=draws, dtype=torch.float64)),
                token=step.token,
                piece=piece(tokenizer, step.token),
                text=tokenizer.decode(so_far),
                finish_reason=step.finish_reason,
                forward_ms=1000 * (seen["logits"].time - seen["start"].time),
                choice_ms=1000 * (now - seen["logits"].time),
            )


def _part(attention: Attention, seen: dict[str, ModuleCall], rows: slice | None) -> dict[str, Any]:
    """What this rank alone knows of a step: the shapes on it, and what its heads look at from `rows` of those fed."""
    rank, heads = parallel.rank(), attention.n_local_heads
    part: dict[str, Any] = {
        name: tuple(seen[name].output.unflatten(-1, (-1, attention.head_dim)).shape) for name in ("q", "k", "v")
    }
    part |= {"cache": tuple(attention.cache_k.shape), "ffn": tuple(seen["ffn"].output.shape), "heads": []}
    if rows is not None:
        _, start_pos, freqs_cis, mask = seen["block"].inputs
        q = seen["q"].output[:, rows]
        first = start_pos + seen["q"].output.shape[1] - q.shape[1]
        weights = attention_weights(attention, q, first, freqs_cis[rows], None if mask is None else mask[rows])
        for i, table in enumerate(weights.tolist()):
            rounded = [[round(weight, 4) for weight in row] for row in table]
            kv_head = rank * attention.n_local_kv_heads + i // attention.n_rep
            part["heads"].append(Head(rank * heads + i, kv_head, rank, rounded))
    return part


def _gather(part: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's part, on every rank."""
    parts = [part] * parallel.world_size()
    if len(parts) > 1:
        dist.all_gather_object(parts, part, group=get_model_parallel_group())
    return parts


def _stages(
    seen: dict[str, ModuleCall], parts: list[dict[str, Any]], attention: Attention, n_layers: int
) -> list[Stage]:
    """A step's way through the model; what is cut over the ranks stands there once for each of them."""
    start_pos, mask, hidden = seen["block"].inputs[1], seen["block"].inputs[3], seen["hidden"].output
    end, ranks, room = start_pos + hidden.shape[1], len(parts), attention.cache_k.shape[1]

    def cut(key: str, note: str, heads: int = 0) -> list[Stage]:
        if ranks == 1:
            return [(key, str(parts[0][key]), note)]
        here = [f"{r * heads}:{(r + 1) * heads} of {note}" if heads else note for r in range(ranks)]
        return [(f"{key}, rank {r}", str(parts[r][key]), here[r]) for r in range(ranks)]

    q_heads, kv_heads = ranks * attention.n_local_heads, ranks * attention.n_local_kv_heads
    triangle = "fed, read: -inf above the diagonal, so that no token looks ahead"
    return [
        ("hidden", _shape(hidden), "batch, tokens, dim: one vector for each token fed"),
        *cut("q", f"{q_heads} query heads (batch, tokens, heads, head_dim)", attention.n_local_heads),
        *cut("k", f"{kv_heads} key heads, each for {attention.n_rep} query heads", attention.n_local_kv_heads),
        *cut("v", f"{kv_heads} value heads", attention.n_local_kv_heads),
        *cut("cache", f"batch, positions, heads, head_dim; k and v, in each of {n_layers} layers"),
        ("written", f"{start_pos}:{end}", f"cache positions that take the new k and v; {room - end} stay free"),
        ("read", f"0:{end}", "cache positions that the tokens fed may look at"),
        ("mask", "none", "one token at the end may look at everything") if mask is None
        else ("mask", _shape(mask), triangle),
        *cut("ffn", "the wide middle of the feed-forward"),
        ("logits", _shape(seen["logits"].output), "a score for each vocabulary entry; only the last row is used"),
    ]  # fmt: skip


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _choice(tokenizer: Any, logits: Tensor, settings: Sampling, token: int) -> dict[str, Any]:
    """The fields of a `StepTrace` about candidates and draw, from the last token's logits (v,)."""
    raw = torch.softmax(logits, dim=-1)
    if settings.temperature == 0:  # all for the likeliest, whatever top-p is
        tempered = torch.zeros_like(raw).index_fill(0, logits.argmax(), 1.0)
    else:
        tempered = distribution(logits[None], settings)[0]
    probs, order = nucleus(tempered[None], settings.top_p)  # (1, v), likeliest first
    final = torch.zeros_like(raw).scatter(0, order[0], probs[0])
    best = torch.topk(raw, min(CANDIDATES, len(raw))).indices.tolist()
    candidates = [
        Candidate(i, piece(tokenizer, i), float(raw[i]), float(tempered[i]), p := float(final[i]), p > 0, i == token)
        for i in [*best, *([] if token in best else [token])]
    ]
    place = int((order[0] == token).nonzero())
    low, high = float(probs[0, :place].sum()), float(probs[0, : place + 1].sum())
    return {"candidates": candidates, "n_kept": int((final > 0).sum()), "low": low, "high": high}


def piece(tokenizer: Any, token: int) -> str:
    """A vocabulary entry as it stands there: with its space; `<s>` and single bytes such as `<0x0A>` can be seen."""
    return str(tokenizer.sp_model.id_to_piece(token)).replace("\u2581", " ")
