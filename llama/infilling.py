"""Code Llama's infilling: the text between a prefix and a suffix (Rozière et al. 2023, section 2.3)."""

from typing import Any, NamedTuple, TypedDict

from typing_extensions import NotRequired

from .arguments import check_list, check_text
from .chat.segments import special_ids_of
from .engine.options import as_published, check_options, with_details
from .engine.results import texts
from .errors import LlamaError

NAMES = ("▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>")


class InfillingPrediction(TypedDict):
    """One result of `text_infilling`; "tokens" (pieces as the vocabulary has them) and "logprobs" with `logprobs`."""

    generation: str
    full_text: str
    tokens: NotRequired[list[str]]
    logprobs: NotRequired[list[float]]
    top_logprobs: NotRequired[list[list[tuple[str, float]]]]
    finish_reason: NotRequired[str]
    prompt_tokens: NotRequired[int]
    completion_tokens: NotRequired[int]


class InfillingPieces(NamedTuple):
    """The ids of the four control pieces."""

    prefix: int
    middle: int
    suffix: int
    end: int


def infilling_pieces(tokenizer: Any) -> InfillingPieces:
    """The control pieces by name. LlamaError where the vocabulary lacks one: the model cannot fill in."""
    ids = [_piece_id(tokenizer, name) for name in NAMES]
    missing = [name for name, token in zip(NAMES, ids, strict=True) if token is None]
    if missing:
        raise LlamaError(
            f"this model cannot fill in text: its vocabulary lacks {', '.join(missing)}; "
            f"Code Llama's 7B and 13B models have them, except those for Python"
        )
    return InfillingPieces(*[token for token in ids if token is not None])


def _piece_id(tokenizer: Any, name: str) -> int | None:
    """The id of a piece, None where there is none: SentencePiece gives the unknown piece's."""
    found = special_ids_of(tokenizer).get(name)
    model = getattr(tokenizer, "sp_model", None)
    if found is None and model is not None:
        found = int(model.piece_to_id(name))
        return None if found == model.unk_id() else found
    return found


def infilling_prompt(tokenizer: Any, prefix: str, suffix: str, suffix_first: bool) -> list[int]:
    """BOS, PRE, prefix, SUF, suffix, MID; with `suffix_first` BOS, PRE, SUF, suffix, MID, prefix. The suffix gets no
    space before it. LlamaError where a text holds one of the control pieces.
    """
    pieces = infilling_pieces(tokenizer)
    before: list[int] = tokenizer.encode(prefix, bos=False, eos=False)
    behind: list[int] = tokenizer.encode(suffix, bos=False, eos=False, prefix_space=False)
    for name, text, ids in (("prefix", prefix, before), ("suffix", suffix, behind)):
        if not set(pieces).isdisjoint(ids):
            raise LlamaError(
                f"the {name} {text!r:.60} holds text of a control piece ({', '.join(NAMES)}): leave it out"
            )
    if suffix_first:
        return [tokenizer.bos_id, pieces.prefix, pieces.suffix, *behind, pieces.middle, *before]
    return [tokenizer.bos_id, pieces.prefix, *before, pieces.suffix, *behind, pieces.middle]


def infilling_prompts(tokenizer: Any, prefixes: Any, suffixes: Any, suffix_first: bool) -> tuple[list[Any], ...]:
    """Prefixes, suffixes and prompts, checked: texts, as many of one as of the other."""
    before, behind = check_list("prefixes", prefixes, "texts"), check_list("suffixes", suffixes, "texts")
    if len(before) != len(behind):
        raise LlamaError(f"{len(before)} prefixes and {len(behind)} suffixes: give one suffix for each prefix")
    for name, listed in (("prefix", before), ("suffix", behind)):
        for row, text in enumerate(listed):
            check_text(f"{name} {row}", text, "text_infilling takes texts")
    pairs = zip(before, behind, strict=True)
    return before, behind, [infilling_prompt(tokenizer, *pair, suffix_first) for pair in pairs]


def piece_names(tokenizer: Any, ids: list[int]) -> list[str]:
    """Each id's piece as the vocabulary has it, as published; its text where there are no pieces to name."""
    model = getattr(tokenizer, "sp_model", None)
    return [model.id_to_piece(token) if model is not None else tokenizer.decode([token]) for token in ids]


def infill(
    generator: Any, prefixes: Any, suffixes: Any, suffix_first: bool, max_gen_len: int | None, settings: dict[str, Any]
) -> list[InfillingPrediction]:
    """`Llama.text_infilling` with its `settings`. The text keeps the space that it begins with."""
    tokenizer, given = generator.tokenizer, with_details(check_options(settings))
    before, behind, prompts = infilling_prompts(tokenizer, prefixes, suffixes, suffix_first)
    given["stop_ids"] = (*given.get("stop_ids", ()), infilling_pieces(tokenizer).end)
    length = as_published(generator.model.params, max_gen_len)
    results = generator.generate(prompt_tokens=prompts, max_gen_len=length, **given)
    found: list[InfillingPrediction] = []
    rows = zip(texts(tokenizer, results, settings, keep_space=True), results[0], before, behind, strict=True)
    for (text, extras), ids, prefix, suffix in rows:
        if "tokens" in extras:
            extras["tokens"] = piece_names(tokenizer, ids)
        found.append({"generation": text, "full_text": prefix + text + suffix, **extras})  # type: ignore[typeddict-item]
    return found
