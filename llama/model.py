"""The Llama architecture, top to bottom: ids in, logits out.

Letters in the shape comments: b batch, s tokens fed in this call, t cache positions read (start_pos + s), d dim,
h this rank's query heads, g this rank's key/value heads, k head_dim, v vocabulary.

Papers: Llama 2 (arXiv 2307.09288), RMSNorm (1910.07467), rotary embedding (2104.09864), grouped-query attention
(2305.13245), SwiGLU (2002.05202).
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .arguments import check_id_tensor, check_position
from .distributed import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, groups, world_size
from .errors import LlamaError
from .interrupts import no_grad
from .rope import rotary_frequencies, rotary_table

fs_init = groups.fs_init  # type: ignore[attr-defined]  # programs look for it here

# What a block is told about who sees whom: None (everyone sees everything before and with it), an additive tensor
# (s, t) or (1 or b, 1 or h, s, t), a boolean one, or "causal": the lower triangle without a tensor, at start_pos 0.
Mask: TypeAlias = Tensor | Literal["causal"] | None


@dataclass
class ModelArgs:
    """The settings of a model, by the names of params.json; `vocab_size` -1 means: the tokenizer decides."""

    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int | None = None
    vocab_size: int = -1
    multiple_of: int = 256  # the FFN's width is rounded up to a multiple of this
    ffn_dim_multiplier: float | None = None
    norm_eps: float = 1e-5
    max_batch_size: int = 32
    max_seq_len: int = 2048
    rope_theta: float = 10000.0
    ffn_dim: int | None = None  # the FFN's width where a file gives it; None: the published rule (`ffn_width`)
    head_dim: int | None = None  # None: dim / n_heads
    rope_scaling: dict[str, Any] | None = None  # as in rope.py's ROPE_TYPES
    attention_bias: bool = False  # of wq, wk, wv and wo
    mlp_bias: bool = False  # of w1, w2 and w3


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, the division in float32 (RMSNorm, arXiv 1910.07467)."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x: Tensor) -> Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)  # (..., 1)
        scale = torch.rsqrt(mean + self.eps)
        return x * torch.add(scale, mean, alpha=0)  # 0 * inf: squares beyond float32 give NaN, or x would vanish

    def forward(self, x: Tensor) -> Tensor:
        """x (..., dim) to the same shape."""
        # cast before the weight: the other order changes a quarter of bfloat16 results
        return self._norm(x.float()).type_as(x) * self.weight


def precompute_freqs_cis(dim: int, end: int, theta: float = 10000.0) -> Tensor:
    """e^(i m theta^(-2j/dim)) for positions m < end and pairs j: complex64 (end, dim / 2)."""
    return rotary_table(rotary_frequencies(dim, theta), end)


def reshape_for_broadcast(freqs_cis: Tensor, x: Tensor) -> Tensor:
    """freqs_cis (s, k/2), or one table per row (b, s, k/2), viewed so that it multiplies x (b, s, heads, k/2)."""
    wanted = (x.shape[1], x.shape[-1])
    if freqs_cis.ndim == 3:
        return freqs_cis.unsqueeze(2)  # (b, s, 1, k/2)
    assert freqs_cis.shape == wanted, f"freqs_cis has shape {tuple(freqs_cis.shape)}, x needs {wanted}"
    return freqs_cis.view(*(n if axis in (1, x.ndim - 1) else 1 for axis, n in enumerate(x.shape)))  # (1, s, 1, k/2)


def apply_rotary_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate neighbouring pairs of xq (b, s, h, k) and xk (b, s, g, k) by their position's angles, in float32.

    freqs_cis as for `reshape_for_broadcast`, or one table per row in real numbers (b, s, k/2, 2), for compilers.
    """
    if not freqs_cis.is_complex():
        return _rotate(xq, freqs_cis), _rotate(xk, freqs_cis)
    xq_ = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))  # (b, s, h, k/2)
    xk_ = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))  # (b, s, g, k/2)
    rotation = reshape_for_broadcast(freqs_cis, xq_)
    xq_out = torch.view_as_real(xq_ * rotation).flatten(3)  # (b, s, h, k)
    xk_out = torch.view_as_real(xk_ * rotation).flatten(3)  # (b, s, g, k)
    return xq_out.type_as(xq), xk_out.type_as(xk)


def _rotate(x: Tensor, freqs: Tensor) -> Tensor:
    """The same product without complex numbers: x (b, s, heads, k), freqs (b, s, k/2, 2)."""
    a, b = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)  # (b, s, heads, k/2)
    cos, sin = freqs.unsqueeze(2).unbind(-1)  # (b, s, 1, k/2)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(3).type_as(x)  # (b, s, heads, k)


def repeat_kv(x: Tensor, n_rep: int) -> Tensor:
    """(b, s, g, k) to (b, s, g * n_rep, k), each head n_rep times in a row. Published; attention does without it."""
    return x if n_rep == 1 else torch.repeat_interleave(x, n_rep, dim=2)


def attend(xq: Tensor, keys: Tensor, values: Tensor, mask: Mask) -> Tensor:
    """softmax(q k^T / sqrt(k) + mask) v, with h / g query heads to a key/value head.

    xq (b, s, h, k), keys and values (b, t, g, k), the result (b, s, h, k).
    """
    bsz, seqlen, n_heads, head_dim = xq.shape
    n_kv_heads = keys.shape[2]
    queries, keys, values = xq.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)  # (b, heads, s or t, k)
    causal = isinstance(mask, str)
    bias = None if isinstance(mask, str) or mask is None else mask if mask.dtype == torch.bool else mask.type_as(xq)
    grouping = n_heads != n_kv_heads or torch.compiler.is_compiling()
    if seqlen == 1 and grouping and (bias is None or bias.ndim == 2 or bias.shape[1] == 1):
        # One token: the queries of a group stand in as rows of one attention (10 x faster than enable_gqa on a CPU).
        grouped = xq.view(bsz, n_kv_heads, n_heads // n_kv_heads, head_dim)  # (b, g, h/g, k)
        if torch.compiler.is_compiling() and xq.device.type == "cpu":
            return _attend_one(grouped, keys, values, bias).reshape(bsz, 1, n_heads, head_dim).type_as(xq)
        output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias)
        return output.reshape(bsz, 1, n_heads, head_dim)
    output = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=bias, is_causal=causal, enable_gqa=n_heads != n_kv_heads
    )
    return output.transpose(1, 2)  # (b, s, h, k)


def _attend_one(grouped: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None) -> Tensor:
    """`attend` for one token, written so that a compiler makes one pass over keys and one over values of it.

    grouped (b, g, h/g, k), keys and values (b, g, t, k), visible boolean (b, 1, 1, t), the result float32 as grouped.
    """
    scores = (grouped.float().unsqueeze(3) * keys.float().unsqueeze(2)).sum(-1)  # (b, g, h/g, t)
    scores = scores / math.sqrt(grouped.shape[-1])
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    weights = scores.softmax(-1)
    return (weights.unsqueeze(-1) * values.float().unsqueeze(2)).sum(3)  # (b, g, h/g, k)


def _with_non_finite(output: Tensor, xq: Tensor, xk: Tensor) -> Tensor:
    """`output` (b, s, h, k), NaN where the score of a query (b, s, h, k) with its own token's key (b, s, g, k) is not
    finite.

    torch's CPU attention gives 0 for a query that is NaN throughout or whose scores are all -inf, its own among them,
    and leaves out a key of -inf: the model would go on with plausible numbers. 0 * NaN and 0 * inf are NaN.
    """
    shape = (*xk.shape[:3], -1, xk.shape[3])  # (b, s, g, h/g, k)
    if xq.dtype == torch.float16:  # scores are added up in float32, where they are finite
        scores = (xq.float().view(shape) * xk.float().unsqueeze(3)).sum(-1, keepdim=True).mul(0).half()
    else:
        scores = (xq.view(shape) * xk.unsqueeze(3)).sum(-1, keepdim=True)  # (b, s, g, h/g, 1)
    return torch.add(output.view(shape), scores.detach(), alpha=0).flatten(2, 3)


def _count(args: Any, name: str, value: int) -> int:
    if value < 1:
        raise LlamaError(f"{name}={value} must be at least 1 (dim={args.dim})")
    return value


def head_size(args: Any) -> int:
    """The width of a head: `head_dim` where given, else dim / n_heads. LlamaError where it is no even number."""
    n_heads, given = _count(args, "n_heads", args.n_heads), getattr(args, "head_dim", None)
    if given is None and (args.dim % n_heads or (args.dim // n_heads) % 2):
        raise LlamaError(f"dim={args.dim} must be n_heads={n_heads} times an even head_dim, got {args.dim / n_heads:g}")
    if given is not None and (given < 2 or given % 2):
        raise LlamaError(f"head_dim={given} must be an even number of at least 2")
    return args.dim // n_heads if given is None else int(given)


def _with_bias(y: Tensor, layer: Any) -> Tensor:
    """What one product made for several layers gives for this one: its part, and its bias."""
    bias = getattr(layer, "bias", None)
    return y if bias is None else y + bias


class Attention(nn.Module):
    """Grouped-query attention over a static cache of keys and values, sharded over the ranks by heads.

    `cache_k`, `cache_v` (max_batch_size, max_seq_len, g, k) are plain tensors in the model's dtype: absent from
    `state_dict`, free to be moved or replaced. `qkv`, where compiled.py sets it, stands in for wq, wk and wv together.
    """

    qkv: Callable[[Tensor], Tensor] | None = None
    first_row = 0  # of the cache rows that a call feeds (engine/scheduler.py)

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        ranks = world_size()
        n_heads = _count(args, "n_heads", args.n_heads)
        self.n_kv_heads = n_heads if args.n_kv_heads is None else _count(args, "n_kv_heads", args.n_kv_heads)
        _check_heads(n_heads, self.n_kv_heads, ranks)
        self.n_local_heads = n_heads // ranks
        self.n_local_kv_heads = self.n_kv_heads // ranks
        self.n_rep = self.n_local_heads // self.n_local_kv_heads
        self.head_dim = head_size(args)

        bias = getattr(args, "attention_bias", False)  # published settings objects have no such field
        self.wq = ColumnParallelLinear(args.dim, n_heads * self.head_dim, bias)
        self.wk = ColumnParallelLinear(args.dim, self.n_kv_heads * self.head_dim, bias)
        self.wv = ColumnParallelLinear(args.dim, self.n_kv_heads * self.head_dim, bias)
        self.wo = RowParallelLinear(n_heads * self.head_dim, args.dim, bias)

        shape = (args.max_batch_size, args.max_seq_len, self.n_local_kv_heads, self.head_dim)
        with torch.inference_mode(False):  # an inference tensor could not be written to in training later
            self.cache_k = torch.zeros(shape)
            self.cache_v = torch.zeros(shape)
        self._rows = torch.zeros(0, dtype=torch.long)  # see `_row_numbers`

    def match_cache(self, like: Tensor) -> None:
        """Give the cache the dtype and device of `like`: the model may have been cast since it was made."""
        if self.cache_k.dtype != like.dtype or self.cache_k.device != like.device:
            with torch.inference_mode(False):
                self.cache_k = self.cache_k.to(device=like.device, dtype=like.dtype)
                self.cache_v = self.cache_v.to(device=like.device, dtype=like.dtype)

    def _check_cache(self, bsz: int, start_pos: int, seqlen: int) -> None:
        rows, positions = self.cache_k.shape[:2]
        if start_pos < 0 or start_pos + seqlen > positions:
            raise LlamaError(
                f"start_pos={start_pos} with seqlen={seqlen} does not fit in max_seq_len={positions}: "
                f"feed fewer tokens or build with a larger max_seq_len"
            )
        if self.first_row + bsz > rows:
            raise LlamaError(
                f"{bsz} rows do not fit in max_batch_size={rows} (start_pos={start_pos}, seqlen={seqlen}): "
                f"feed fewer rows or build with a larger max_batch_size"
            )

    def _update_cache(self, xk: Tensor, xv: Tensor, start_pos: int) -> tuple[Tensor, Tensor]:
        """Write xk, xv (b, s, g, k) at start_pos; return keys and values (b, t, g, k) of everything so far."""
        bsz, seqlen = xk.shape[:2]
        end = start_pos + seqlen
        rows = slice(self.first_row, self.first_row + bsz)
        self.cache_k[rows, start_pos:end] = xk.detach()
        self.cache_v[rows, start_pos:end] = xv.detach()
        if start_pos == 0:
            return xk, xv
        if xk.requires_grad or xv.requires_grad:  # the cache holds no graph: take the new part from xk, xv themselves
            old_k, old_v = self.cache_k[rows, :start_pos].clone(), self.cache_v[rows, :start_pos].clone()
            return torch.cat([old_k, xk], dim=1), torch.cat([old_v, xv], dim=1)
        return self.cache_k[rows, :end], self.cache_v[rows, :end]

    def _update_cache_rows(self, xk: Tensor, xv: Tensor, start_pos: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        """As `_update_cache`, each row at its own position; the mask hides what is not a row's own up to `kv_len`."""
        bsz, seqlen = xk.shape[:2]
        columns = start_pos[:, None]  # (b, 1)
        if seqlen > 1:
            columns = columns + torch.arange(seqlen, device=xk.device)  # (b, s)
        rows = self._row_numbers(bsz, xk.device)  # (b, 1)
        self.cache_k[rows, columns] = xk.detach()
        self.cache_v[rows, columns] = xv.detach()
        return self.cache_k[:bsz, :kv_len], self.cache_v[:bsz, :kv_len]

    def _row_numbers(self, bsz: int, device: torch.device) -> Tensor:
        """0 to b - 1, (b, 1): made once for all steps, but for a compiler, which makes no tensor of them."""
        if torch.compiler.is_compiling():
            return torch.arange(bsz, device=device)[:, None]
        if len(self._rows) < bsz or self._rows.device != device:
            self._rows = torch.arange(len(self.cache_k), device=device)[:, None]
        return self._rows[:bsz]

    def forward(self, x: Tensor, start_pos: int | Tensor, freqs_cis: Tensor, mask: Mask) -> Tensor:
        """x (b, s, d) at positions start_pos.. of the cache to (b, s, d).

        `start_pos` is an int, or one position per row (LongTensor (b,)); then freqs_cis is (b, s, k/2) and the mask
        boolean (b, 1, s, kv_len). LlamaError where rows or positions do not fit in the cache.
        """
        bsz, seqlen, _ = x.shape
        h, g, k = self.n_local_heads, self.n_local_kv_heads, self.head_dim
        if self.qkv is None:
            xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        else:
            parts = torch.split(self.qkv(x), [h * k, g * k, g * k], dim=-1)
            xq, xk, xv = map(_with_bias, parts, (self.wq, self.wk, self.wv))
        xq = xq.view(bsz, seqlen, h, k)  # (b, s, h, k)
        xk = xk.view(bsz, seqlen, g, k)  # (b, s, g, k)
        xv = xv.view(bsz, seqlen, g, k)  # (b, s, g, k)
        xq, xk = apply_rotary_emb(xq, xk, freqs_cis)

        self.match_cache(xk)
        if isinstance(start_pos, Tensor) and start_pos.ndim > 0:
            assert isinstance(mask, Tensor), "one position per row needs a mask that hides what lies beyond each row"
            self._check_cache(bsz, 0, seqlen)
            keys, values = self._update_cache_rows(xk, xv, start_pos, mask.shape[-1])
        else:
            self._check_cache(bsz, int(start_pos), seqlen)
            keys, values = self._update_cache(xk, xv, int(start_pos))
        output = attend(xq, keys, values, mask)  # (b, s, h, k)
        output = _with_non_finite(output, xq, xk)
        return self.wo(output.reshape(bsz, seqlen, -1))  # type: ignore[no-any-return]


def _check_heads(n_heads: int, n_kv_heads: int, ranks: int) -> None:
    if n_heads % n_kv_heads:
        raise LlamaError(f"n_heads={n_heads} is not divisible by n_kv_heads={n_kv_heads}")
    if n_heads % ranks:
        raise LlamaError(
            f"n_heads={n_heads} is not divisible by the {ranks} ranks that share the model: "
            f"start {math.gcd(n_heads, n_kv_heads, ranks)}"
        )
    if n_kv_heads % ranks:
        raise LlamaError(
            f"n_kv_heads={n_kv_heads} is not divisible by the {ranks} ranks that share the model: "
            f"start at most {math.gcd(n_kv_heads, n_heads)} ranks"
        )


def ffn_width(hidden_dim: int, multiple_of: int, ffn_dim_multiplier: float | None, ffn_dim: int | None = None) -> int:
    """`ffn_dim` where given, else the published rule: two thirds of `hidden_dim` (4 dim), times the multiplier, rounded
    up to `multiple_of`.
    """
    if ffn_dim is not None:
        return ffn_dim
    width = int(2 * hidden_dim / 3)
    if ffn_dim_multiplier is not None:
        width = int(ffn_dim_multiplier * width)
    return multiple_of * ((width + multiple_of - 1) // multiple_of)


class FeedForward(nn.Module):
    """w2(silu(w1 x) * w3 x) (SwiGLU), `width` wide, by default as published from 4 * dim (facts: sizes).

    `w13`, where compiled.py sets it, stands in for w1 and w3 together.
    """

    w13: Callable[[Tensor], Tensor] | None = None

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        multiple_of: int,
        ffn_dim_multiplier: float | None,
        *,
        width: int | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        hidden_dim = ffn_width(hidden_dim, multiple_of, ffn_dim_multiplier, width)
        self.w1 = ColumnParallelLinear(dim, hidden_dim, bias)
        self.w2 = RowParallelLinear(hidden_dim, dim, bias)
        self.w3 = ColumnParallelLinear(dim, hidden_dim, bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., d) to the same shape."""
        if self.w13 is None:
            gate, up = self.w1(x), self.w3(x)
        else:
            gate, up = map(_with_bias, self.w13(x).chunk(2, dim=-1), (self.w1, self.w3))
        return self.w2(F.silu(gate) * up)  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then h + feed_forward(norm(h))."""

    def __init__(self, layer_id: int, args: ModelArgs) -> None:
        super().__init__()
        self.n_heads = args.n_heads
        self.dim = args.dim
        self.head_dim = head_size(args)
        self.attention = Attention(args)
        more: dict[str, Any] = {"width": getattr(args, "ffn_dim", None), "bias": getattr(args, "mlp_bias", False)}
        self.feed_forward = FeedForward(args.dim, 4 * args.dim, args.multiple_of, args.ffn_dim_multiplier, **more)
        self.layer_id = layer_id
        self.attention_norm = RMSNorm(args.dim, eps=args.norm_eps)
        self.ffn_norm = RMSNorm(args.dim, eps=args.norm_eps)

    def forward(self, x: Tensor, start_pos: int | Tensor, freqs_cis: Tensor, mask: Mask) -> Tensor:
        """x (b, s, d) to (b, s, d); the other arguments as in `Attention.forward`."""
        h = x + self.attention(self.attention_norm(x), start_pos, freqs_cis, mask)
        return h + self.feed_forward(self.ffn_norm(h))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """The whole model. Weights are uninitialised until loaded; dtype and device are torch's defaults."""

    def __init__(self, params: ModelArgs) -> None:
        super().__init__()
        self.params = params
        self.vocab_size = params.vocab_size
        self.n_layers = params.n_layers
        self.n_forwards = 0  # whoever reuses the cache sees that somebody else has fed it
        if params.vocab_size < 1:
            raise LlamaError(f"vocab_size={params.vocab_size}: set it to the tokenizer's n_words before this")

        self.tok_embeddings = ParallelEmbedding(params.vocab_size, params.dim)
        self.layers = nn.ModuleList(TransformerBlock(layer_id, params) for layer_id in range(params.n_layers))
        self.norm = RMSNorm(params.dim, eps=params.norm_eps)
        self.output = ColumnParallelLinear(params.dim, params.vocab_size, gather_output=True)
        # A plain attribute, not a buffer: `.half()` must not touch it. Twice max_seq_len, as published.
        theta, scaling = getattr(params, "rope_theta", 10000.0), getattr(params, "rope_scaling", None)
        self.freqs_cis = rotary_table(rotary_frequencies(head_size(params), theta, scaling), params.max_seq_len * 2)

    @no_grad
    def forward(self, tokens: Tensor, start_pos: int | Tensor) -> Tensor:
        """Ids (b, s) whose first stands at start_pos (an int, or a LongTensor (b,)) to float32 logits (b, s, v).

        What lies before start_pos is taken from the cache. LlamaError where rows or positions do not fit.
        """
        return self.output(self.hidden(tokens, start_pos, published_mask=True)).float()  # type: ignore[no-any-return]

    @torch.no_grad()
    def hidden(
        self, tokens: Tensor, start_pos: int | Tensor, kv_len: int | None = None, *, published_mask: bool = False
    ) -> Tensor:
        """As `forward`, without the output head: the normed states (b, s, d), so that a caller applies the head
        where it wants logits. `kv_len` bounds the cache positions read with one position per row (default: all used).
        `published_mask` hands the blocks the whole additive mask at start_pos 0, for hooks that look at it.
        """
        self.n_forwards += 1
        h = self._embed(tokens)  # (b, s, d)
        self.freqs_cis = self.freqs_cis.to(h.device)
        seqlen = tokens.shape[1]
        mask: Mask
        if isinstance(start_pos, Tensor) and start_pos.ndim > 0:
            start_pos, freqs_cis, mask = self._row_positions(start_pos, len(tokens), seqlen, kv_len, h.device)
        else:
            start_pos = check_position(start_pos)
            freqs_cis = self.freqs_cis[start_pos : start_pos + seqlen]  # (s, k/2)
            self._check_window(start_pos, seqlen)
            mask = None
            if seqlen > 1:
                mask = "causal" if start_pos == 0 and not published_mask else causal_mask(seqlen, start_pos, h)
        for layer in self.layers:
            h = layer(h, start_pos, freqs_cis, mask)
        return self.norm(h)  # type: ignore[no-any-return]

    def _embed(self, tokens: Tensor) -> Tensor:
        """Ids (b, s) to vectors (b, s, d). LlamaError for what is none or outside the vocabulary; ids on a GPU are not
        looked at, which would wait: there an id outside gives NaN, where the kernel would end all CUDA calls.
        """
        check_id_tensor(tokens)
        device = self.tok_embeddings.weight.device
        if device.type == "cpu":
            with contextlib.suppress(IndexError):
                return self.tok_embeddings(tokens.to(device))  # type: ignore[no-any-return]
        elif tokens.device.type != "cpu":
            ids = tokens.to(device)  # perhaps from another GPU
            outside = (ids < 0) | (ids >= self.vocab_size)  # (b, s)
            return self.tok_embeddings(ids.masked_fill(outside, 0)).masked_fill(outside[..., None], math.nan)  # type: ignore[no-any-return]
        elif tokens.min() >= 0 and tokens.max() < self.vocab_size:
            return self.tok_embeddings(tokens.to(device))  # type: ignore[no-any-return]
        found = f"tokens holds ids from {int(tokens.min())} to {int(tokens.max())}"
        raise LlamaError(f"{found}; ids go from 0 to {self.vocab_size - 1}")

    def attentions(self) -> list[Attention]:
        """The attention of every layer, which is where the cache is."""
        return [block.attention for block in self.layers]  # type: ignore[misc]

    def clear_row(self, row: int, start: int, end: int) -> None:
        """Zero a cache row's positions: a mask hides what an earlier text left there, but 0 x NaN is NaN."""
        for attention in self.attentions():
            attention.cache_k[row : row + 1, start:end] = 0  # a slice: a row that is not there is refused later on
            attention.cache_v[row : row + 1, start:end] = 0

    def _check_window(self, start_pos: int, seqlen: int) -> None:
        """The blocks check the cache; this is about the angles, of which there are twice max_seq_len."""
        if start_pos < 0 or start_pos + seqlen > len(self.freqs_cis):
            raise LlamaError(
                f"start_pos={start_pos} with seqlen={seqlen} does not fit in max_seq_len={self.params.max_seq_len}: "
                f"feed fewer tokens or build with a larger max_seq_len"
            )

    def _row_positions(
        self, start_pos: Tensor, bsz: int, seqlen: int, kv_len: int | None, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Positions (b,) on the device, their angles (b, s, k/2) and who-sees-whom, boolean (b, 1, s, kv_len)."""
        if start_pos.shape != (bsz,) or start_pos.dtype not in (torch.int64, torch.int32):
            found = f"has shape {tuple(start_pos.shape)} and {start_pos.dtype}"
            raise LlamaError(f"start_pos {found}; with {bsz} rows it must be integers, ({bsz},)")
        if kv_len is None:
            known = start_pos.tolist()  # looked at once: a GPU has to be waited for
            kv_len = max(known) + seqlen
            if min(known) < 0 or kv_len > self.params.max_seq_len:
                raise LlamaError(
                    f"start_pos={known} with seqlen={seqlen} does not fit in "
                    f"max_seq_len={self.params.max_seq_len}: feed fewer tokens or build with a larger max_seq_len"
                )
            for row, position in enumerate(known):
                if position == 0:
                    self.clear_row(row, 0, self.params.max_seq_len)
        start_pos = start_pos.to(device)
        positions = start_pos[:, None] + torch.arange(seqlen, device=device)  # (b, s)
        visible = torch.arange(kv_len, device=device) <= positions[:, :, None]  # (b, s, kv_len)
        return start_pos, self.freqs_cis[positions], visible[:, None]


def causal_mask(seqlen: int, start_pos: int, like: Tensor) -> Tensor:
    """Additive (s, t) in `like`'s dtype: 0 on the cache and the lower triangle, -inf on what is yet to come."""
    mask = torch.full((seqlen, seqlen), float("-inf"), device=like.device)
    mask = torch.triu(mask, diagonal=1)
    return torch.hstack([torch.zeros((seqlen, start_pos), device=like.device), mask]).type_as(like)
