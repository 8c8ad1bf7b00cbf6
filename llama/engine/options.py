"""The options of `generate`, the completions and the streams, and how they become a `Request`."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from ..arguments import check_flag, check_integer, check_size, check_stop_strings, check_token_ids, nearest
from ..errors import LlamaError
from .request import Request
from .sampling import Sampling
from .text import StopDetector

logger = logging.getLogger("llama")


class Options(TypedDict, total=False):
    """What `generate`, the completions and the streams take by keyword beyond the published arguments.

    The sampling controls (first block) are described in `llama.sampling.Sampling`.
    """

    top_k: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float] | None
    seed: int | None
    top_logprobs: int  # with logprobs=True
    stop: Sequence[str]  # strings that end a text; it is cut before them
    stop_ids: Sequence[int]  # token ids that end a text, beside the tokenizer's eos_id
    details: bool  # finish_reason, prompt_tokens and completion_tokens beside each result
    progress: bool  # a bar that counts finished prompts
    prefill_chunk: int  # prompt positions fed at once, which bounds the memory of long prompts


PUBLISHED = ("temperature", "top_p", "max_gen_len", "logprobs")


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with stops as tuples, so that an iterator among them is taken once; TypeError for an unknown name,
    LlamaError for a value that cannot be.
    """
    known = sorted(Options.__annotations__)
    for name in options:
        if name not in known and name not in PUBLISHED:
            hint = nearest(str(name), [*known, *PUBLISHED])
            raise TypeError(f"unknown option {name!r}; {hint}there are {', '.join(known)}")
    checked = dict(options)
    for name in ("details", "progress", "logprobs"):
        if name in checked:
            checked[name] = check_flag(name, checked[name])
    if "stop" in checked:
        checked["stop"] = check_stop_strings(checked["stop"])
    if "stop_ids" in checked:
        checked["stop_ids"] = tuple(check_token_ids("stop_ids", checked["stop_ids"]))
    if "top_logprobs" in checked:
        checked["top_logprobs"] = check_integer(
            "top_logprobs", checked["top_logprobs"], 0, "an integer from 0 (off) up"
        )
    return checked


def make_request(
    tokenizer: Any,
    model_stop_ids: frozenset[int],
    prompts: list[list[int]],
    max_seq_len: int,
    max_gen_len: int | None,
    score_prompt: bool,
    banned: tuple[int, ...] = (),
    *,
    temperature: float = 0.6,
    top_p: float = 0.9,
    logprobs: bool = False,
    **options: Any,
) -> Request:
    """The checked settings of one call. LlamaError names what is wrong, TypeError an option that does not exist."""
    options, logprobs = check_options(options), check_flag("logprobs", logprobs)
    sampling = {name: value for name, value in options.items() if name in Sampling.names()}
    if options.get("top_logprobs") and not logprobs:
        raise LlamaError(f"top_logprobs={options['top_logprobs']} needs logprobs=True")
    stops = options.get("stop", ())
    return Request(
        max_gen_len=_check_max_gen_len(prompts, max_gen_len, max_seq_len),
        sampling=Sampling(temperature=temperature, top_p=top_p, **sampling),
        stop_ids=frozenset(options.get("stop_ids", ())) | model_stop_ids,
        logprobs=logprobs,
        score_prompt=score_prompt,
        banned=banned,
        prefill_chunk=check_size("prefill_chunk", options.get("prefill_chunk", Request.prefill_chunk)),
        stop_text=(lambda: StopDetector(tokenizer, stops)) if stops else None,
    )


def as_published(params: Any, max_gen_len: int | None) -> int:
    """What the published completions hand to `generate` where no length is given."""
    return int(params.max_seq_len) - 1 if max_gen_len is None else max_gen_len


def with_details(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given; alternatives come with the details."""
    return {**options, "details": True} if options.get("top_logprobs") else options


def prompt_budget(max_seq_len: int, max_gen_len: int | None) -> int:
    """Tokens that a dialog may have so that its answer fits: a quarter of the window unless a length is given."""
    quarter = max_seq_len - max(1, max_seq_len // 4)
    if max_gen_len is None:
        return quarter
    length = check_integer("max_gen_len", max_gen_len, 0, "None or an integer from 0 up")
    if length >= max_seq_len - 1:  # so much means: as many as fit
        return quarter
    return max(max_seq_len - length, max_seq_len // 4)  # an answer of nearly the whole window would leave no dialog


def _check_max_gen_len(prompts: list[list[int]], max_gen_len: Any, max_seq_len: int) -> int:
    if max_gen_len is None:
        return max_seq_len - 1
    length = check_integer("max_gen_len", max_gen_len, 0, "None or an integer from 0 up")
    longest = max(map(len, prompts), default=0)
    if longest + length > max_seq_len and length != max_seq_len - 1:  # the completions' own "as many as fit"
        logger.warning(
            "max_gen_len=%d is cut to %d: the longest prompt has %d of the window's max_seq_len=%d tokens",
            length,
            max_seq_len - longest,
            longest,
            max_seq_len,
        )
    return length
