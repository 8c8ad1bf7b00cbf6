"""python -m llama trace: one generation from prompt to text, printed step by step, and as an HTML page."""

import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

from .. import distributed as parallel
from ..engine.sampling import Sampling
from ..errors import LlamaError
from ..generation import Llama
from ..tokenizer import piece
from .output import printable, replace_file
from .session import open_model
from .step_trace import StepTrace, trace_steps

WIDTH = 98  # columns of the printed output
MAX_ATTENTION = 16  # heads, and positions, in one printed table of attention weights
MAX_PAGE_WEIGHTS = 500_000  # attention weights in a page: 3 MB, and a step is drawn within a second


@dataclass(frozen=True)
class Trace:
    """A whole generation; `ids` and `pieces` are the prompt's, `layer` is the one whose attention was recorded."""

    model: str
    prompt: str
    ids: list[int]
    pieces: list[str]
    vocab_size: int
    max_seq_len: int
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
    """Show one generation step by step: shapes, cache, candidates, the sampled token and the text so far.

    For example: python -m llama trace --prompt "One day, Mia" --tokens 4 --html trace.html

    Args:
        prompt: The text to continue, in quotes.
        tokens: The number of tokens to generate, one per step.
        ckpt: The checkpoint, a folder or a file; by default the demo model.
        tokenizer: The tokenizer file; by default the one next to the checkpoint.
        layer: Also show the attention weights of every head in this layer; the first is 0.
        html: Also write an interactive page to this file; it needs no network, and shows the attention of `layer`, by
            default of the last layer.
        temperature: Sampling temperature; 0 is greedy decoding.
        top_p: Nucleus sampling: the probability mass to sample from.
        seed: An integer that makes sampling reproducible.
        max_seq_len: The most tokens in prompt and continuation together.
        device: cpu, cuda or mps; by default a GPU if there is one.
        dtype: float32, bfloat16 or float16; by default what suits the device.
    """
    with open_model(ckpt, tokenizer, max_seq_len, device=device, dtype=dtype) as generator:
        ids = generator.tokenizer.encode(prompt, bos=True, eos=False)
        settings = Sampling(temperature, top_p, seed=seed)
        _check(generator, len(ids), tokens, layer, html)
        recorded = generator.model.n_layers - 1 if layer is None and html else layer
        pieces, vocab_size = [piece(generator.tokenizer, token) for token in ids], generator.model.params.vocab_size
        whole = Trace(
            _describe(generator), prompt, ids, pieces, vocab_size, max_seq_len, temperature, top_p, recorded, []
        )
        print("\n".join(prompt_lines(whole)))
        for step in trace_steps(generator, ids, tokens, settings, recorded, whole=html is not None):
            whole.steps.append(step)
            print("\n".join(step_lines(whole, tokens, layer is not None)), flush=True)
        with parallel.raise_on_all_ranks("writing the page"):
            if html and parallel.rank() == 0:
                write_page(whole, html)
                print(printable(f"page written to {html}: open it in a browser"))


def _check(generator: Llama, length: int, tokens: int, layer: int | None, html: str | None) -> None:
    params, n_layers = generator.model.params, generator.model.n_layers
    if type(tokens) is not int or tokens < 1:
        raise LlamaError(f"tokens={tokens!r} must be a positive integer")
    if layer is not None and (type(layer) is not int or layer not in range(n_layers)):
        raise LlamaError(f"layer={layer!r} must be an integer from 0 to {n_layers - 1}, the model's last layer")
    if html is not None and (Path(html).is_dir() or not Path(html).absolute().parent.is_dir()):
        raise LlamaError(f"html={html!r} must name a file in an existing folder")
    if html and params.n_heads * length**2 > MAX_PAGE_WEIGHTS:
        raise LlamaError(
            f"the attention of {params.n_heads} heads over a prompt of {length} tokens exceeds the {MAX_PAGE_WEIGHTS} "
            f"weights that a page holds: shorten the prompt, or leave out --html"
        )
    if length >= params.max_seq_len:
        raise LlamaError(
            f"the prompt's {length} tokens leave no room to generate within max_seq_len={params.max_seq_len}: "
            f"shorten it or pass a larger --max_seq_len"
        )


def _describe(generator: Llama) -> str:
    params, attention, ranks = generator.model.params, generator.model.attentions()[0], parallel.world_size()
    heads = f"{params.n_heads} query heads, {attention.n_kv_heads} key/value heads, head_dim {attention.head_dim}"
    sizes = f"vocab_size {params.vocab_size}, max_seq_len {params.max_seq_len}"
    place = f"{str(generator.dtype).removeprefix('torch.')} on {generator.device.type}"
    return f"{params.n_layers} layers, dim {params.dim}, {heads}, {sizes}, {place}, {ranks} rank{'s' * (ranks > 1)}"


# ------------------------------------------------------------------------------------------ printed


def quote(text: str) -> str:
    """Text in quotes, safe to print: control characters, and what stdout cannot encode, are escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return repr(text).encode(encoding, "backslashreplace").decode(encoding)


def prompt_lines(trace: Trace) -> Iterator[str]:
    """The model, and the prompt as a table of positions, ids and pieces."""
    prompt = f"PROMPT  {quote(trace.prompt)}: {len(trace.ids)} tokens, with BOS"
    for line in ("", f"MODEL   {trace.model}", prompt, ""):
        yield textwrap.fill(line, WIDTH, subsequent_indent=" " * 8)
    pieces = [quote(name) for name in trace.pieces]
    width = max(5, *map(len, pieces))
    per_line = (WIDTH - 11) // (width + 1)
    for first in range(0, len(pieces), per_line):
        for title, row in (("position", range(len(pieces))), ("id", trace.ids), ("piece", pieces)):
            yield f"  {title:8} " + " ".join(f"{cell!s:>{width}}" for cell in row[first : first + per_line])
        yield ""


def step_lines(trace: Trace, tokens: int, heads: bool) -> Iterator[str]:
    """The latest step, with its attention weights if `heads`."""
    step = trace.steps[-1]
    fed = "the whole prompt" if step.number == 1 else "the last sampled token"
    title = f"STEP {step.number} of {tokens}  {step.phase}, prev_pos:cur_pos = {step.prev_pos}:{step.cur_pos}, {fed} "
    yield title.ljust(WIDTH, "-")
    if step.number <= 2:  # one of each phase: later steps differ only in the cache positions
        yield from (f"  {name:13} {shape:17} {note}" for name, shape, note in step.shapes)
    else:
        yield f"  shapes as in step 2; cache positions {step.prev_pos}:{step.cur_pos} written, 0:{step.cur_pos} read"
    yield ""
    yield from _candidate_lines(trace, step)
    if heads:
        yield from ["", *_attention_lines(trace, step)]
    draw = "" if step.uniform is None else f": {step.uniform:.4f} falls in its interval {step.low:.4f}..{step.high:.4f}"
    text = quote(step.text)
    yield f"\n  drawn  {quote(step.piece)}{draw}"
    yield f"  text   {text if len(text) < WIDTH - 9 else '...' + text[12 - WIDTH :]}"
    yield f"  time   {step.forward_ms:.1f} ms for the forward pass, {step.sampling_ms:.1f} ms for sampling"
    if step.finish_reason == "stop":
        yield f"  end    {quote(step.piece)} ends the text"
    yield ""


def _candidate_lines(trace: Trace, step: StepTrace) -> Iterator[str]:
    titles = ("softmax", f"temperature {trace.temperature:g}", f"top-p {trace.top_p:g}")
    yield f"  {'candidate':20}    id  {titles[0]:>10}  {titles[1]:>15}  {titles[2]:>10}"
    for option in step.candidates:
        mark = ("drawn " if option.drawn else "kept  ") + "#" * round(20 * option.final) if option.kept else "out"
        numbers = f"{option.raw:10.2%}  {option.tempered:15.2%}  {option.final:10.2%}"
        yield f"  {quote(option.piece)[:20]:20} {option.id:5}  {numbers}  {mark}".rstrip()
    until = f"the most likely, until their probabilities sum to {trace.top_p:g}"
    yield f"  kept: {step.n_kept} of {trace.vocab_size} ({until if trace.temperature else 'temperature 0 is greedy'})"


def _attention_lines(trace: Trace, step: StepTrace) -> Iterator[str]:
    """The attention weights of the last token fed, one column per head; only the positions with the largest sums."""
    pieces = [*trace.pieces, *(earlier.piece for earlier in trace.steps)][: step.cur_pos]
    totals = [sum(column) for column in zip(*(head.weights[-1] for head in step.heads), strict=True)]
    largest = sorted(sorted(range(len(totals)), key=lambda i: -totals[i])[:MAX_ATTENTION])
    yield f"  layer {trace.layer}: attention of {quote(pieces[-1])} at position {step.cur_pos - 1}, in percent"
    for first in range(0, len(step.heads), MAX_ATTENTION):
        heads = step.heads[first : first + MAX_ATTENTION]
        rows: list[tuple[str, Sequence[float]]] = [("query head", [head.head for head in heads])]
        rows.append(("key/value head", [head.kv_head for head in heads]))
        if parallel.world_size() > 1:
            rows.append(("rank", [head.rank for head in heads]))
        percents = [[100 * weight for weight in head.weights[-1]] for head in heads]
        rows += [(f"{i:5} {quote(pieces[i])[:16]:16}", [column[i] for column in percents]) for i in largest]
        if len(largest) < len(totals):
            rows.append(("all others", [sum(column) - sum(column[i] for i in largest) for column in percents]))
        yield from (f"  {title:>22}" + "".join(f"{cell:4.0f}" for cell in cells) for title, cells in rows)


# -------------------------------------------------------------------------------------------- page


def write_page(trace: Trace, path: str) -> None:
    """One self-contained HTML file."""
    page = resources.files(__package__).joinpath("trace_page.html").read_text(encoding="utf-8")
    data = json.dumps(asdict(trace), allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # so that no text can close the script element
    replace_file(path, page.replace("{{DATA}}", data, 1))
