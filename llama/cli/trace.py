"""python -m llama trace: one generation from prompt to text, printed step by step, and as a page with pictures."""

import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

from .. import distributed as parallel
from ..engine.sampling import Sampling
from ..errors import LlamaError
from ..generation import Llama
from .step_trace import StepTrace, follow, piece
from .terminal import open_model

WIDTH = 98  # columns of what is printed
MOST = 16  # heads, or positions, of one table of attention
LARGEST = 500_000  # numbers of attention in a page: 3 MB, and a step drawn within a second


@dataclass(frozen=True)
class Trace:
    """A whole generation: `pieces` are the prompt's, `layer` the one whose attention was looked at."""

    model: list[str]
    prompt: str
    ids: list[int]
    pieces: list[str]
    vocab_size: int
    window: int
    temperature: float
    top_p: float
    layer: int | None
    steps: list[StepTrace]


def trace(
    prompt: str = "Once upon a time",
    tokens: int = 8,
    ckpt: str | None = None,
    tokenizer: str | None = None,
    layer: int | None = None,
    html: str | None = None,
    temperature: float = 0.6,
    top_p: float = 0.9,
    seed: int | None = 1,
    max_seq_len: int = 256,
    device: str | None = None,
    dtype: str | None = None,
) -> None:
    """Show one generation step by step: shapes, cache, candidates and their probabilities, the draw, the text so far.

    For example: python -m llama trace --prompt "One day, Mia" --tokens 4 --html trace.html

    Args:
        prompt: The text to continue, in quotes.
        tokens: Steps, which draw a token each.
        ckpt: The checkpoint, a folder or a file; the demo model if not given.
        tokenizer: The tokenizer's file; the one beside the checkpoint if not given.
        layer: Add what each attention head of this layer, from 0 up, looks at.
        html: Also write all of it, with pictures, to this file: a page that needs no network (with the attention of the
            last layer where none is named).
        temperature: How freely the model chooses; 0 always takes the likeliest token.
        top_p: Choose among the likeliest tokens that together are this probable.
        seed: A number; the same one draws the same tokens again. With None the draw cannot be shown.
        max_seq_len: Tokens that prompt and continuation may have together.
        device: cpu, cuda or mps; a GPU where there is one if not given.
        dtype: float32, bfloat16 or float16; what suits the device if not given.
    """
    with open_model(ckpt, tokenizer, max_seq_len, device=device, dtype=dtype) as generator:
        ids = generator.tokenizer.encode(str(prompt), bos=True, eos=False)
        settings = Sampling(temperature, top_p, seed=seed)
        _check(generator, len(ids), tokens, layer, html)
        kept = generator.model.n_layers - 1 if layer is None and html else layer
        params, pieces = generator.model.params, [piece(generator.tokenizer, token) for token in ids]
        found = Trace(
            _describe(generator), str(prompt), ids, pieces, params.vocab_size, max_seq_len, temperature, top_p, kept, []
        )
        print("\n".join(prompt_lines(found)))
        for moment in follow(generator, ids, tokens, settings, kept, whole=html is not None):
            found.steps.append(moment)
            print("\n".join(step_lines(found, tokens, layer is not None)), flush=True)
        with parallel.raise_on_all_ranks("writing the page"):
            if html and parallel.rank() == 0:
                write_page(found, html)
                print(f"page written to {html}: open it in a browser")


def _check(generator: Llama, length: int, tokens: int, layer: int | None, html: str | None) -> None:
    n_layers, window = generator.model.n_layers, generator.model.params.max_seq_len
    if type(tokens) is not int or tokens < 1:
        raise LlamaError(f"tokens={tokens!r} must be a whole number of at least 1")
    if layer is not None and (type(layer) is not int or layer not in range(n_layers)):
        raise LlamaError(f"layer={layer!r} is none of this model's, which go from 0 to {n_layers - 1}")
    if html is not None and not (isinstance(html, str) and Path(html).absolute().parent.is_dir()):
        raise LlamaError(f"html={html!r} must name a file in a folder that exists")
    heads = generator.model.params.n_heads
    if html and heads * length**2 > LARGEST:
        raise LlamaError(
            f"{heads} heads' attention over a prompt of {length} tokens is more than the {LARGEST} numbers that a page "
            f"holds: shorten the prompt, or leave --html out"
        )
    if length >= window:
        raise LlamaError(
            f"the prompt's {length} tokens leave no room for another in max_seq_len={window}: "
            f"shorten it or pass a larger --max_seq_len"
        )


def _describe(generator: Llama) -> list[str]:
    args, attention, ranks = generator.model.params, generator.model.attentions()[0], parallel.world_size()
    return [
        f"{args.n_layers} layers, dim {args.dim}, "
        f"{args.n_heads} query heads and {attention.n_kv_heads} key/value heads of {attention.head_dim}",
        f"vocabulary of {args.vocab_size}, window of {args.max_seq_len} positions, "
        f"{str(generator.dtype).removeprefix('torch.')} on {generator.device.type}, {ranks} rank{'s' * (ranks > 1)}",
    ]


# ----------------------------------------------------------------------------------------- in print


def quote(text: str) -> str:
    """Text between quotes, safe to print: control characters, and what the terminal cannot write, as escapes."""
    try:
        repr(text).encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return ascii(text)
    return repr(text)


def prompt_lines(found: Trace) -> Iterator[str]:
    """The model in two lines, and the prompt as a table of positions, ids and pieces."""
    yield f"\nMODEL   {found.model[0]}\n        {found.model[1]}"
    prompt = f"PROMPT  {quote(found.prompt)}: {len(found.ids)} tokens (the first, BOS, begins every text)"
    yield textwrap.fill(prompt, WIDTH, subsequent_indent=" " * 8) + "\n"
    names = [quote(name) for name in found.pieces]
    width = max(5, *map(len, names))
    count = (WIDTH - 11) // (width + 1)
    for first in range(0, len(names), count):
        here = range(first, min(first + count, len(names)))
        for title, row in (("position", here), ("id", found.ids), ("piece", names)):
            yield f"  {title:8} " + " ".join(f"{row[i] if row is not here else i!s:>{width}}" for i in here)
        yield ""


def step_lines(found: Trace, tokens: int, heads: bool) -> Iterator[str]:
    """The newest step, with the attention of its layer where `heads`."""
    step = found.steps[-1]
    fed = "the whole prompt" if step.number == 1 else "the token drawn last"
    title = f"STEP {step.number} of {tokens}  {step.phase}, prev_pos:cur_pos = {step.prev_pos}:{step.cur_pos}, {fed} "
    yield title.ljust(WIDTH, "-")
    if step.number <= 2:  # one of each phase; the others differ in their spans only
        yield from (f"  {name:13} {shape:17} {note}" for name, shape, note in step.stages)
    else:
        spans = [f"{shape} {name}" for name, shape, _ in step.stages if name in ("written", "read")]
        yield f"  shapes as in step 2; in the cache {' and '.join(spans)}"
    yield ""
    yield from _candidate_lines(found, step)
    if heads:
        yield from ["", *_head_lines(found, step)]
    stretch = f"{step.low:.4f}..{step.high:.4f}"
    draw = "" if step.uniform is None else f": {step.uniform:.4f}, drawn from 0..1, is in its stretch {stretch}"
    text = quote(step.text)
    yield f"\n  drawn  {quote(step.piece)}{draw}"
    yield f"  text   {text if len(text) < WIDTH - 9 else '...' + text[12 - WIDTH :]}"
    yield f"  time   {step.forward_ms:.1f} ms for the forward pass, {step.choice_ms:.1f} ms for the choice"
    if step.finish_reason == "stop":
        yield f"  end    {quote(step.piece)} ends the text"
    yield ""


def _candidate_lines(found: Trace, step: StepTrace) -> Iterator[str]:
    titles = ("model says", f"temperature {found.temperature:g}", f"top-p {found.top_p:g}")
    yield f"  {'candidate':20}    id  {titles[0]:>10}  {titles[1]:>15}  {titles[2]:>10}"
    for option in step.candidates:
        mark = ("drawn " if option.drawn else "kept  ") + "#" * round(20 * option.final) if option.kept else "out"
        numbers = f"{option.raw:10.2%}  {option.tempered:15.2%}  {option.final:10.2%}"
        yield f"  {quote(option.piece)[:20]:20} {option.id:5}  {numbers}  {mark}".rstrip()
    until = f"the likeliest, until they reach {found.top_p:g} together"
    yield f"  kept: {step.n_kept} of {found.vocab_size} ({until if found.temperature else 'temperature 0 is greedy'})"


def _head_lines(found: Trace, step: StepTrace) -> Iterator[str]:
    """What the last token fed looks at, a column for each head; where there are many, the positions that get most."""
    pieces = [*found.pieces, *(earlier.piece for earlier in found.steps)][: step.cur_pos]
    shares = [head.weights[-1] for head in step.heads]
    total = [sum(column) for column in zip(*shares, strict=True)]
    chosen = sorted(sorted(range(len(total)), key=lambda i: -total[i])[:MOST])
    yield f"  layer {found.layer}: how much {quote(pieces[-1])}, position {step.cur_pos - 1}, looks at each, in percent"
    for first in range(0, len(shares), MOST):
        block, heads = shares[first : first + MOST], step.heads[first : first + MOST]
        yield f"  {'query head':>22}" + "".join(f"{head.head:4}" for head in heads)
        yield f"  {'key/value head':>22}" + "".join(f"{head.kv_head:4}" for head in heads)
        if step.heads[-1].rank > 0:
            yield f"  {'rank':>22}" + "".join(f"{head.rank:4}" for head in heads)
        for i in chosen:
            yield f"  {i:5} {quote(pieces[i])[:16]:16}" + "".join(f"{100 * row[i]:4.0f}" for row in block)
        if len(chosen) < len(total):
            rest = [sum(row) - sum(row[i] for i in chosen) for row in block]
            yield f"  {'':5} {'all others':16}" + "".join(f"{100 * share:4.0f}" for share in rest)


# ---------------------------------------------------------------------------------------- as a page


def write_page(found: Trace, path: str) -> None:
    """One HTML file that holds everything and loads nothing. LlamaError where it cannot be written."""
    page = resources.files(__package__).joinpath("trace_page.html").read_text(encoding="utf-8")
    data = json.dumps(asdict(found), allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # so that nothing in it ends the script element it stands in
    try:
        Path(path).write_text(page.replace("{{DATA}}", data, 1), encoding="utf-8")
    except OSError as error:
        raise LlamaError(f"html={path!r} cannot be written: {error}") from error
