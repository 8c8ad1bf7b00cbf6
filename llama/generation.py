"""Llama: build a generator from a checkpoint, complete texts, hold dialogs, stream, score."""

import datetime
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from typing_extensions import Self, Unpack

from . import checkpoint as checkpoints
from . import distributed, scoring
from .arguments import check_flag, check_integer, check_layers, check_list, check_prompts, check_size, check_text
from .chat import (
    B_INST,
    B_SYS,
    E_INST,
    E_SYS,
    SPECIAL_TAGS,
    UNSAFE_ERROR,
    ChatFormat,
    Dialog,
    Message,
    Role,
    encode_dialog,
    pick_format,
)
from .engine.cache import cache_state
from .engine.compiled import StaticDecoder, compile_model, graph_rows
from .engine.dialogs import chat_answers, chat_prompts
from .engine.options import Options, as_published, check_options, make_request, prompt_budget, with_details
from .engine.request import Request, Step
from .engine.results import (
    ChatPrediction,
    CompletionPrediction,
    Stream,
    collect,
    details,
    refusal,
    refused_stream,
    stream_steps,
    stream_text,
    texts,
)
from .engine.sampling import sample_top_p
from .engine.scheduler import Scheduler
from .engine.text import encode_all, encode_prompt
from .errors import LlamaError
from .infilling import InfillingPrediction, infill
from .model import ModelArgs, Transformer, fs_init  # noqa: F401
from .tokenizer import Tokenizer, ids_without_piece  # noqa: F401
from .tokenizer import stop_ids as stop_ids_of

__all__ = [
    "B_INST",
    "B_SYS",
    "E_INST",
    "E_SYS",
    "SPECIAL_TAGS",
    "UNSAFE_ERROR",
    "ChatPrediction",
    "CompletionPrediction",
    "Dialog",
    "InfillingPrediction",
    "Llama",
    "Message",
    "Options",
    "Role",
    "Step",
    "Stream",
    "encode_dialog",
    "sample_top_p",
]

logger = logging.getLogger("llama")

# programs look for these here
get_model_parallel_rank = fs_init.get_model_parallel_rank
initialize_model_parallel = fs_init.initialize_model_parallel
model_parallel_is_initialized = fs_init.model_parallel_is_initialized


class Llama:
    """A model and a tokenizer, made to complete text.

    `build` makes one from a checkpoint, to be closed, as `with` does; `Llama(model, tokenizer)` one from parts of your
    own: the model needs `.params` and `.forward(tokens, start_pos)`, no more. A caller's mistake is a LlamaError, after
    which the object works on.
    """

    _groups: distributed.ProcessGroups | None = None

    @staticmethod
    def build(
        ckpt_dir: str,
        tokenizer_path: Any,
        max_seq_len: int,
        max_batch_size: int,
        model_parallel_size: int | None = None,
        seed: int = 1,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        backend: str | None = None,
        timeout: float | datetime.timedelta | None = None,
        quantize: str | None = None,
        compile: bool = False,
        lora: str | Sequence[str] | None = None,
        lora_scale: float | Sequence[float] = 1.0,
        chat_format: str | ChatFormat | None = None,
    ) -> "Llama":
        """Read a checkpoint (a folder or a file of any known format) and set up the ranks it is sharded over.

        `tokenizer_path`: a file, a folder, a tokenizer of yours, None: what lies beside the checkpoint. `device` None:
        CUDA if there, else the CPU; `dtype` None: bfloat16 or float16 on a GPU, float32 on a CPU. `timeout` bounds each
        wait for other ranks (seconds). `quantize` "int8", "int4" or "int8-dynamic" holds weights in fewer bytes,
        `compile` decodes in compiled static shapes, slow to start; with either, packed layers' `weight` is None.
        `lora`: folders of PEFT adapters, merged while loading, times `lora_scale`. `chat_format`: a name of llama/chat
        or an object, None: the checkpoint's template, else what the vocabulary tells. `seed`: torch's global generator.
        Raises LlamaError and FileNotFoundError, on every rank alike; `backend` is nccl or gloo.
        """
        start = time.time()
        compile, seed = check_flag("compile", compile), check_integer("seed", seed, -(2**63), "an integer of 64 bits")
        place = distributed.pick_device(device)
        groups = distributed.initialize_groups(_check_ranks(model_parallel_size), place, backend, timeout)
        try:
            with distributed.raise_on_all_ranks("loading"):
                checkpoint = checkpoints.open_checkpoint(ckpt_dir, lora, lora_scale)
                tokenizer = checkpoints.open_tokenizer(tokenizer_path or None, checkpoint)
                chat = checkpoints.choose_format(chat_format, checkpoint, tokenizer)
                rows, window = check_size("max_batch_size", max_batch_size), check_size("max_seq_len", max_seq_len)
                model = _load_model(checkpoint, tokenizer, window, rows, place, dtype, quantize, compile)
                decoder = compile_model(model) if compile else None
                generator = Llama(model, tokenizer, decoder=decoder, chat_format=chat, groups=groups)
            checkpoints.compare_ranks(checkpoint, model, tokenizer, quantize=quantize, compile=compile)
            torch.manual_seed(seed)
        except BaseException:
            groups.close(limit=distributed.EXIT_WAIT)  # perhaps another rank is lost, which took the timeout already
            raise
        print(f"Loaded in {time.time() - start:.2f} seconds")
        return generator

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        decoder: StaticDecoder | None = None,
        chat_format: str | ChatFormat | None = None,
        groups: distributed.ProcessGroups | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.decoder = decoder  # decodes in compiled static shapes
        self.chat_format = pick_format(chat_format, tokenizer)
        self._groups = groups  # closed with the generator
        cache_state(self)  # which notes the process

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_groups": None}  # closing a copy leaves the original's groups up

    def close(self, *, wait: bool = True) -> None:
        """Drop CUDA graphs, leave the ranks' groups if `build` made them, and give later ranks their stdout back; for
        every rank, which waits for the others unless `wait` is False.
        """
        if isinstance(self.decoder, StaticDecoder):
            self.decoder.close()
        if self._groups is not None:
            self._groups.close(wait)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close(wait=error is None)  # after an error another rank may not come to the barrier

    @property
    def device(self) -> torch.device:
        """Where the model's weights are."""
        return next(iter(self.model.parameters())).device  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the model's weights."""
        return next(iter(self.model.parameters())).dtype  # type: ignore[no-any-return]

    # ------------------------------------------------------------------------------------ tokens

    def generate(
        self,
        prompt_tokens: list[list[int]],
        max_gen_len: int | None,
        temperature: float = 0.6,
        top_p: float = 0.9,
        logprobs: bool = False,
        echo: bool = False,
        **options: Unpack[Options],
    ) -> Any:
        """Continue each prompt by up to `max_gen_len` tokens (None: as many as fit), until a stop token.

        Returns (tokens, log-probabilities or None), a list per prompt of what was generated, behind the prompt where
        `echo`; a stop token is not among it. Log-probabilities are natural, of the raw logits; a prompt's first is 0.0.
        With `details=True` a third value, one dict per prompt. Any number of prompts; LlamaError for what cannot be.
        """
        given, echo, logprobs = check_options(options), check_flag("echo", echo), check_flag("logprobs", logprobs)
        if given.get("top_logprobs") and not given.get("details"):
            raise LlamaError(f"top_logprobs={given['top_logprobs']} needs details=True, which holds them")
        settings = {"temperature": temperature, "top_p": top_p, "logprobs": logprobs, **given}
        scheduler = self._schedule(prompt_tokens, max_gen_len, echo and logprobs, **settings)
        bar = tqdm(total=len(scheduler.rows), disable=not given.get("progress"), unit="prompt")
        with bar:
            bar.update(sum(row.finish_reason is not None for row in scheduler.rows))  # prompts that fill the window
            for step in cache_state(self).lock.hold(scheduler.steps):
                bar.update(step.finish_reason is not None)
        request = scheduler.request
        tokens, scores = collect(scheduler.rows, request, echo)
        result = (tokens, scores if logprobs else None)
        return (*result, [details(row, request, echo) for row in scheduler.rows]) if given.get("details") else result

    def stream(
        self,
        prompt_tokens: list[list[int]],
        max_gen_len: int | None = None,
        temperature: float = 0.6,
        top_p: float = 0.9,
        logprobs: bool = False,
        **options: Unpack[Options],
    ) -> Stream[Step]:
        """`generate`, one `Step` at a time; the last one of a row may hold its stop token.

        From the first step until the stream is exhausted or closed, other calls on this model are a LlamaError.
        """
        given = check_options(options)
        settings = {"temperature": temperature, "top_p": top_p, "logprobs": logprobs, **given}
        return stream_steps(self, self._schedule(prompt_tokens, max_gen_len, False, **settings), given)

    def _schedule(self, prompt_tokens: Any, max_gen_len: int | None, score_prompt: bool, **settings: Any) -> Scheduler:
        """One call's checked prompts and settings, ready to run."""
        prompts, window = _check_prompts(self.model.params, prompt_tokens), int(self.model.params.max_seq_len)
        stop_ids = stop_ids_of(self.tokenizer) | self.chat_format.stop_ids
        banned = ids_without_piece(self.tokenizer, getattr(self.model.params, "vocab_size", 0))
        request = make_request(self.tokenizer, stop_ids, prompts, window, max_gen_len, score_prompt, banned, **settings)
        return Scheduler(self.model, prompts, request, self.decoder)

    # -------------------------------------------------------------------------------------- text

    def text_completion(
        self,
        prompts: list[str],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        logprobs: bool = False,
        echo: bool = False,
        *,
        keep_space: bool = False,
        **options: Unpack[Options],
    ) -> list[CompletionPrediction]:
        """Continue texts: one `{"generation": str}` per prompt, with `logprobs` also "tokens" and "logprobs".

        `max_gen_len` None is as many as fit. `keep_space=True` keeps the space a continuation begins with, so that
        prompt + generation reads right; further options as in `Options`. Errors as in `generate`.
        """
        listed = check_list("prompts", prompts, "texts")
        prompt_tokens = [encode_prompt(self.tokenizer, row, text) for row, text in enumerate(listed)]
        given, keep_space = check_options(options), check_flag("keep_space", keep_space)
        results = self.generate(
            prompt_tokens=prompt_tokens,
            max_gen_len=as_published(self.model.params, max_gen_len),
            temperature=temperature,
            top_p=top_p,
            logprobs=logprobs,
            echo=echo,
            **with_details(given),
        )
        return [
            {"generation": text, **extras}  # type: ignore[typeddict-item]
            for text, extras in texts(self.tokenizer, results, given, keep_space, prompt_tokens if echo else None)
        ]

    def stream_text(
        self,
        prompt: str,
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        *,
        keep_space: bool = False,
        **options: Unpack[Options],
    ) -> Stream[str]:
        """`text_completion` of one prompt in chunks: joined, they are its "generation" for the same seed."""
        text = check_text("prompt", prompt, "stream_text takes one text")
        settings = {"temperature": temperature, "top_p": top_p, **options}
        return self.stream_prompt(encode_prompt(self.tokenizer, 0, text), max_gen_len, keep_space, settings)

    def stream_prompt(
        self, prompt: list[int] | None, max_gen_len: int | None, keep_space: bool, settings: Any, reuse: bool = False
    ) -> Stream[str]:
        """The text of one prompt's continuation in chunks, given its ids; None is a dialog that is refused. `reuse`
        skips what the last stream left of the prompt in the cache, provided that nothing has touched weights or cache.
        """
        given = check_options(settings)
        scheduler = self._schedule([] if prompt is None else [prompt], max_gen_len, False, **given)
        steps = stream_steps(self, scheduler, given, reuse)
        if prompt is None:
            return refused_stream(UNSAFE_ERROR)
        return stream_text(self.tokenizer, steps, given.get("stop", ()), keep_space)

    def text_infilling(
        self,
        prefixes: list[str],
        suffixes: list[str],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        logprobs: bool = False,
        suffix_first: bool = False,
        **options: Unpack[Options],
    ) -> list[InfillingPrediction]:
        """What stands between each prefix and suffix, by a Code Llama: `{"generation": str, "full_text": str}`, with
        `logprobs` also "tokens" (pieces) and "logprobs"; it ends at the piece ▁<EOT>. `suffix_first` shows the model
        the suffix before the prefix. LlamaError where the vocabulary lacks the pieces, and as in `generate`.
        """
        settings = {"temperature": temperature, "top_p": top_p, "logprobs": logprobs, **options}
        return infill(self, prefixes, suffixes, suffix_first, max_gen_len, settings)

    # -------------------------------------------------------------------------------------- chat

    def chat_completion(
        self,
        dialogs: list[Dialog],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        logprobs: bool = False,
        *,
        keep_space: bool = False,
        drop_oldest: bool = False,
        **options: Unpack[Options],
    ) -> list[ChatPrediction]:
        """Answer dialogs: one `{"generation": {"role": "assistant", "content": str}}` each, with `logprobs` also
        "tokens" and "logprobs". A dialog that holds a special tag is answered with `UNSAFE_ERROR` and costs nothing.
        `drop_oldest=True` leaves out the oldest turns that do not fit; "dropped" in the details counts the messages.
        """
        listed = check_list("dialogs", dialogs, "dialogs, each a list of messages")
        given, keep_space = check_options(options), check_flag("keep_space", keep_space)
        window = self.model.params.max_seq_len
        budget = prompt_budget(window, max_gen_len) if check_flag("drop_oldest", drop_oldest) else None
        prompts, dropped = chat_prompts(self.chat_format, self.tokenizer, listed, budget)
        if not prompts:  # the settings are checked all the same
            self._schedule([], max_gen_len, False, temperature=temperature, top_p=top_p, logprobs=logprobs, **given)
            return [refusal(UNSAFE_ERROR, logprobs, given) for _ in listed]
        results = self.generate(
            prompt_tokens=list(prompts.values()),
            max_gen_len=as_published(self.model.params, max_gen_len),
            temperature=temperature,
            top_p=top_p,
            logprobs=logprobs,
            **with_details(given),
        )
        found = dict(zip(prompts, texts(self.tokenizer, results, given, keep_space), strict=True))
        answers = chat_answers(found, dropped if given.get("details") else {})
        return [answers[i] if i in answers else refusal(UNSAFE_ERROR, logprobs, given) for i in range(len(listed))]

    def stream_chat(
        self,
        dialog: Dialog,
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        *,
        keep_space: bool = False,
        **options: Unpack[Options],
    ) -> Stream[str]:
        """`chat_completion` of one dialog in chunks: joined, they are its answer's "content" for the same seed."""
        self.chat_format.check(dialog)
        unsafe = self.chat_format.is_unsafe(dialog, self.tokenizer)
        ids = None if unsafe else self.chat_format.encode(self.tokenizer, dialog)
        settings = {"temperature": temperature, "top_p": top_p, **options}
        return self.stream_prompt(ids, max_gen_len, keep_space, settings)

    # --------------------------------------------------------------------- looking without generating

    def score(
        self, prompts: Sequence[str | list[int]], *, prefill_chunk: int = Request.prefill_chunk
    ) -> list[dict[str, Any]]:
        """How likely texts (or token lists) are: per prompt "tokens", "logprobs" (natural, the first 0.0) and "sum".

        `prefill_chunk` as in `Options`. LlamaError for what cannot be a prompt.
        """
        return scoring.score(self.generate, encode_all(self.tokenizer, prompts), prefill_chunk)

    def hidden_states(
        self,
        prompt_tokens: list[list[int]],
        layers: Sequence[int] | None = None,
        *,
        prefill_chunk: int = Request.prefill_chunk,
    ) -> list[Tensor]:
        """What the model holds of each prompt's tokens: per prompt a tensor (layers, seqlen, dim) in the model's dtype.

        `layers` names blocks from 0 up; -1 is after the final norm. None is every block and the final norm.
        `prefill_chunk` as in `Options`. LlamaError for a layer or prompt that cannot be.
        """
        prompts, chunk = _check_prompts(self.model.params, prompt_tokens), check_size("prefill_chunk", prefill_chunk)
        wanted = check_layers(layers, self.model.params.n_layers)
        return list(cache_state(self).lock.hold(lambda: scoring.hidden_states(self.model, prompts, wanted, chunk)))

    def embed(
        self, texts: Sequence[str | list[int]], pooling: str = "mean", *, prefill_chunk: int = Request.prefill_chunk
    ) -> Tensor:
        """One float32 vector per text, stacked (texts, dim): the mean, or the last, of its tokens' final normed states.

        `prefill_chunk` as in `Options`. LlamaError for another `pooling` than "mean" and "last".
        """
        scoring.check_pooling(pooling)
        states = self.hidden_states(encode_all(self.tokenizer, texts), layers=[-1], prefill_chunk=prefill_chunk)
        return scoring.embed(states, pooling, self.model.params.dim)


def _load_model(
    checkpoint: Any,
    tokenizer: Any,
    window: int,
    rows: int,
    place: torch.device,
    dtype: Any,
    quantize: Any,
    compile: bool,
) -> Transformer:
    return checkpoints.load_model(
        checkpoint,
        vocab_size=getattr(tokenizer, "n_words", 1),
        max_seq_len=window,
        max_batch_size=rows,
        device=place,
        dtype=distributed.pick_dtype(dtype, place),
        quantize=quantize,
        graph_rows=graph_rows(place, rows, window) if compile else (),
    )


def _check_ranks(size: Any) -> int | None:
    return None if size is None else check_size("model_parallel_size", size)


def _check_prompts(params: Any, prompt_tokens: Any) -> list[list[int]]:
    vocab_size = getattr(params, "vocab_size", -1)
    known = isinstance(vocab_size, int) and vocab_size > 0
    return check_prompts(prompt_tokens, int(params.max_seq_len), vocab_size if known else None)
