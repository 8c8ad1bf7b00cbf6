"""Llama: build a generator from a checkpoint, complete texts, hold dialogs, stream, score."""

import contextlib
import datetime
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import index as as_int
from types import TracebackType
from typing import Any, TypedDict

import torch
from torch import Tensor
from tqdm import tqdm
from typing_extensions import NotRequired, Self, Unpack

from . import checkpoint as checkpoints
from . import distributed as parallel
from .chat import (
    B_INST,
    B_SYS,
    E_INST,
    E_SYS,
    SPECIAL_TAGS,
    UNSAFE_ERROR,
    Dialog,
    Message,
    Role,
    check_dialog,
    encode_dialog,
    fit_dialog,
    is_unsafe,
)
from .engine.cache import CacheLock
from .engine.compiled import StaticDecoder, compile_model
from .engine.sampling import Sampling, sample_top_p
from .engine.schedule import Decoding, Request, Step
from .engine.stops import StopFilter, StopWatch, check_stops
from .errors import LlamaError
from .tokenizer import StreamDecoder, Tokenizer

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
    "Llama",
    "Message",
    "Options",
    "Role",
    "Step",
    "encode_dialog",
    "sample_top_p",
]

logger = logging.getLogger("llama")


class CompletionPrediction(TypedDict):
    """One result of `text_completion`; what follows "generation" is there when it was asked for."""

    generation: str
    tokens: NotRequired[list[str]]
    logprobs: NotRequired[list[float]]
    top_logprobs: NotRequired[list[list[tuple[str, float]]]]
    finish_reason: NotRequired[str]
    prompt_tokens: NotRequired[int]
    completion_tokens: NotRequired[int]


class ChatPrediction(TypedDict):
    """One result of `chat_completion`; what follows "generation" is there when it was asked for."""

    generation: Message
    tokens: NotRequired[list[str]]
    logprobs: NotRequired[list[float]]
    top_logprobs: NotRequired[list[list[tuple[str, float]]]]
    finish_reason: NotRequired[str]
    prompt_tokens: NotRequired[int]
    completion_tokens: NotRequired[int]
    dropped: NotRequired[int]


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


# ------------------------------------------------------------------------------------------- Llama


class Llama:
    """A model and a tokenizer, made to complete text.

    `build` makes one from a checkpoint, to be closed, as `with` does; `Llama(model, tokenizer)` one from parts of your
    own: the model needs `.params` and `.forward(tokens, start_pos)`, no more. A caller's mistake is a LlamaError, after
    which the object works on.
    """

    _groups: parallel.ProcessGroups | None = None

    @staticmethod
    def build(
        ckpt_dir: str,
        tokenizer_path: str | None,
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
    ) -> "Llama":
        """Read a checkpoint (a folder or a file of any known format) and set up the ranks it is cut over.

        `tokenizer_path` None takes the tokenizer beside the checkpoint. `device` None is CUDA if there, else the CPU;
        `dtype` None is bfloat16 or float16 on a GPU, float32 on a CPU. `timeout` (seconds) bounds each wait for other
        ranks, `backend` is nccl or gloo. `quantize` "int8", "int4" or "int8-dynamic" (quantize.py) holds the layers'
        weights in fewer bytes; `compile` decodes in compiled static shapes (compiled.py), slow to start and fast from
        then on; with either the packed layers' `weight` is None. Seeds torch's global generator with `seed`. Raises
        LlamaError and FileNotFoundError, on every rank alike.
        """
        start = time.time()
        place = parallel.pick_device(device)
        groups = parallel.initialize_groups(model_parallel_size, place, backend, timeout)
        try:
            with parallel.raise_on_all_ranks("loading"):
                stored = checkpoints.open_checkpoint(ckpt_dir)
                tokenizer = Tokenizer(str(tokenizer_path or checkpoints.find_tokenizer(stored)))
                model = checkpoints.load_model(
                    stored,
                    vocab_size=tokenizer.n_words,
                    max_seq_len=max_seq_len,
                    max_batch_size=max_batch_size,
                    device=place,
                    dtype=parallel.pick_dtype(dtype, place),
                    quantize=quantize,
                )
                generator = Llama(model, tokenizer, decoder=compile_model(model) if compile else None)
        except BaseException:
            groups.close()
            raise
        generator._groups = groups
        torch.manual_seed(seed)
        print(f"Loaded in {time.time() - start:.2f} seconds")
        return generator

    def __init__(self, model: Any, tokenizer: Any, *, decoder: StaticDecoder | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.decoder = decoder  # decodes in compiled static shapes (engine/compiled.py)

    def close(self) -> None:
        """Leave the ranks' groups if `build` made them, and give later ranks their stdout back; for every rank."""
        if self._groups is not None:
            self._groups.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._groups is not None:
            self._groups.close(wait=error is None)  # after an error another rank may not come to the barrier

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
        details, progress = options.pop("details", False), options.pop("progress", False)
        decoding = self.decoding(
            prompt_tokens, max_gen_len, temperature, top_p, logprobs, echo and logprobs, options=options
        )
        with CacheLock.of(self).take(), tqdm(total=len(decoding.rows), disable=not progress, unit="prompt") as bar:
            for step in decoding.steps():
                bar.update(step.finish_reason is not None)
        return self._results(decoding, logprobs, echo, details)

    def stream(
        self,
        prompt_tokens: list[list[int]],
        max_gen_len: int | None = None,
        temperature: float = 0.6,
        top_p: float = 0.9,
        logprobs: bool = False,
        **options: Unpack[Options],
    ) -> Iterator[Step]:
        """`generate`, one `Step` at a time; the last one of a row may hold its stop token.

        From the first step until the iterator is exhausted or closed, other calls on this model are a LlamaError.
        """
        return self.run(self.decoding(prompt_tokens, max_gen_len, temperature, top_p, logprobs, options=options))

    def decoding(
        self,
        prompt_tokens: Any,
        max_gen_len: int | None,
        temperature: float,
        top_p: float,
        logprobs: bool = False,
        score_prompt: bool = False,
        *,
        options: Options,
    ) -> Decoding:
        """One call's checked prompts and settings, ready to run."""
        prompts = self._check_prompts(prompt_tokens)
        request = self._request(prompts, max_gen_len, temperature, top_p, logprobs, score_prompt, options)
        return Decoding(self.model, prompts, request, self.decoder)

    def run(self, decoding: Decoding, reuse: bool = False) -> Iterator[Step]:
        """The steps of a decoding, while nobody else may use the cache. `reuse` skips the part of a single prompt that
        the last stream left in the cache, provided nobody but this class has touched it since.
        """
        turn = CacheLock.of(self)
        with turn.take(streaming=True) as cached:
            if reuse:
                decoding.reuse(cached)
            try:
                yield from decoding.steps()
            finally:
                if len(decoding.rows) == 1 and decoding.rows[0].output:
                    turn.cached = decoding.rows[0].tokens[:-1]

    def _check_prompts(self, prompt_tokens: Any) -> list[list[int]]:
        if isinstance(prompt_tokens, (str, bytes)) or not hasattr(prompt_tokens, "__iter__"):
            raise LlamaError(
                f"prompt_tokens is a {type(prompt_tokens).__name__}; it must be a list of prompts, each a list of "
                f"token ids (text goes to text_completion)"
            )
        return [self._check_prompt(row, prompt) for row, prompt in enumerate(prompt_tokens)]

    def _check_prompt(self, row: int, prompt: Any) -> list[int]:
        if isinstance(prompt, (str, bytes)) or not hasattr(prompt, "__iter__"):
            raise LlamaError(f"prompt {row} is {prompt!r:.60}; it must be a list of token ids")
        entries = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
        for place, entry in enumerate(entries):
            if not hasattr(entry, "__index__"):
                raise LlamaError(f"prompt {row} has {entry!r:.60} at position {place}; token ids are whole numbers")
        ids = [as_int(entry) for entry in entries]
        window = self.model.params.max_seq_len
        if not ids:
            raise LlamaError(f"prompt {row} has no tokens; it needs at least one (an empty text is BOS alone)")
        if len(ids) > window:
            raise LlamaError(
                f"prompt {row} has {len(ids)} tokens, more than max_seq_len={window}: "
                f"shorten it or build with a larger max_seq_len"
            )
        vocab_size = getattr(self.model.params, "vocab_size", -1)
        limit = vocab_size if isinstance(vocab_size, int) and vocab_size > 0 else None
        for place, token in enumerate(ids):
            if token < 0 or (limit is not None and token >= limit):
                reach = "0 up" if limit is None else f"0 to {limit - 1}"
                raise LlamaError(f"prompt {row} has id {token} at position {place}; ids go from {reach}")
        return ids

    def _request(
        self,
        prompts: list[list[int]],
        max_gen_len: int | None,
        temperature: float,
        top_p: float,
        logprobs: bool,
        score_prompt: bool,
        options: Options,
    ) -> Request:
        """The checked settings of one call; TypeError for a keyword that does not exist."""
        unknown = sorted(set(options) - set(Options.__annotations__))
        if unknown:
            raise TypeError(f"unknown option {unknown[0]!r}; there are {', '.join(sorted(Options.__annotations__))}")
        sampling = {name: value for name, value in options.items() if name in Sampling.names()}
        if options.get("top_logprobs") and not logprobs:
            raise LlamaError(f"top_logprobs={options['top_logprobs']} needs logprobs=True")
        return Request(
            max_gen_len=self._check_max_gen_len(prompts, max_gen_len),
            sampling=Sampling(temperature=temperature, top_p=top_p, **sampling),  # type: ignore[arg-type]
            stop_ids=self._stop_ids(options.get("stop_ids", ())),
            logprobs=logprobs,
            score_prompt=score_prompt,
            prefill_chunk=_check_chunk(options.get("prefill_chunk", Request.prefill_chunk)),
            stop_text=self._stop_text(options),
        )

    def _check_max_gen_len(self, prompts: list[list[int]], max_gen_len: int | None) -> int:
        window = self.model.params.max_seq_len
        if max_gen_len is None:
            return int(window - 1)
        if isinstance(max_gen_len, bool) or not hasattr(max_gen_len, "__index__") or max_gen_len < 0:
            raise LlamaError(f"max_gen_len={max_gen_len!r} must be None or a whole number from 0 up")
        longest = max(map(len, prompts), default=0)
        if longest + max_gen_len > window and max_gen_len != window - 1:  # the completions' own "as many as fit"
            logger.warning(
                "max_gen_len=%d is cut to %d: the longest prompt has %d of the window's max_seq_len=%d tokens",
                max_gen_len,
                window - longest,
                longest,
                window,
            )
        return as_int(max_gen_len)

    def _stop_ids(self, stop_ids: Sequence[int]) -> frozenset[int]:
        listed = isinstance(stop_ids, Iterable) and not isinstance(stop_ids, (str, bytes))
        if not listed or not all(hasattr(token, "__index__") for token in stop_ids):
            raise LlamaError(f"stop_ids={stop_ids!r} must be a list of token ids")
        eos_id = self.tokenizer.eos_id  # read at each call; None never stops
        return frozenset(as_int(token) for token in stop_ids) | (frozenset() if eos_id is None else {eos_id})

    def _stop_text(self, options: Options) -> Any:
        stops = check_stops(options.get("stop", ()))
        return (lambda: StopWatch(self.tokenizer, stops)) if stops else None

    def _results(self, decoding: Decoding, logprobs: bool, echo: bool, details: bool) -> Any:
        tokens: list[list[int]] = []
        scores: list[list[float]] = []
        notes: list[dict[str, Any]] = []
        for row in decoding.rows:
            count = len(row.output) - (row.finish_reason == "stop" and row.output[-1] in decoding.request.stop_ids)
            tokens.append((row.prompt if echo else []) + row.output[:count])
            scores.append((row.prompt_logprobs if echo else []) + row.logprobs[:count])
            note = {"finish_reason": row.finish_reason or "length", "prompt_tokens": len(row.prompt)}
            note["completion_tokens"] = count
            if decoding.request.sampling.top_logprobs:
                note["top_logprobs"] = row.top_logprobs[:count]
            notes.append(note)
        result = (tokens, scores if logprobs else None)
        return (*result, notes) if details else result

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
        _check_list("prompts", prompts, "texts")
        prompt_tokens = [self._encode_prompt(row, prompt) for row, prompt in enumerate(prompts)]
        results, notes = self._generate_once(
            prompt_tokens, temperature, top_p, max_gen_len, logprobs, options, echo=echo
        )
        predictions: list[CompletionPrediction] = []
        for place, (tokens, scores) in enumerate(results):
            text = self._text(tokens, options.get("stop", ()), keep_space)
            extras = self._extras(tokens, scores, notes[place] if notes else {}, options, keep_space)
            predictions.append({"generation": text, **extras})  # type: ignore[typeddict-item]
        return predictions

    def _encode_prompt(self, row: int, prompt: Any) -> list[int]:
        if not isinstance(prompt, str):
            raise LlamaError(f"prompt {row} is a {type(prompt).__name__}; text_completion takes texts (ids: generate)")
        if prompt.endswith(" "):
            logger.warning(
                "prompt %d ends in a space: the next token usually brings its own, so text may read worse", row
            )
        return self.tokenizer.encode(prompt, bos=True, eos=False)  # type: ignore[no-any-return]

    def _generate_once(
        self,
        prompt_tokens: list[list[int]],
        temperature: float,
        top_p: float,
        max_gen_len: int | None,
        logprobs: bool,
        options: Options,
        **echo: bool,
    ) -> tuple[list[tuple[list[int], list[float] | None]], list[dict[str, Any]] | None]:
        """The one call of `self.generate`, by keyword, with the options that were given; its results by prompt."""
        if options.get("top_logprobs") and "details" not in options:
            options = {**options, "details": True}
        outcome = self.generate(
            prompt_tokens=prompt_tokens,
            max_gen_len=self.model.params.max_seq_len - 1 if max_gen_len is None else max_gen_len,
            temperature=temperature,
            top_p=top_p,
            logprobs=logprobs,
            **echo,
            **options,
        )
        tokens, scores = outcome[0], outcome[1]
        pairs = list(zip(tokens, scores if logprobs else [None] * len(tokens), strict=True))
        return pairs, outcome[2] if options.get("details") else None

    def _text(self, tokens: list[int], stops: Sequence[str], keep_space: bool) -> str:
        """The tokens' text, cut before the first stop string."""
        if not stops and not keep_space:
            return self.tokenizer.decode(tokens)  # type: ignore[no-any-return]
        return "".join(self._spell_out(tokens, stops, keep_space))

    def _spell_out(self, tokens: Iterable[int], stops: Sequence[str], keep_space: bool) -> Iterator[str]:
        """The text of ids in pieces, each as soon as it is certain, up to the first stop string."""
        decoder = StreamDecoder(self.tokenizer, keep_space=True)
        stop = StopFilter(check_stops(stops))
        at_start = not keep_space
        ends = (stop.put(decoder.end()) + stop.end() for _ in range(1))  # asked for when the tokens are through
        for piece in chain((stop.put(decoder.put(token)) for token in tokens), ends):
            text = piece.removeprefix(decoder.lead) if piece and at_start else piece
            at_start = at_start and not piece
            if text:
                yield text

    def _extras(
        self, tokens: list[int], scores: list[float] | None, note: dict[str, Any], options: Options, keep_space: bool
    ) -> dict[str, Any]:
        """What stands beside a result's "generation"."""
        spell = self._spell if keep_space else self.tokenizer.decode
        extras: dict[str, Any] = {}
        if scores is not None:
            extras["tokens"] = [spell(token) for token in tokens]
            extras["logprobs"] = scores
        if note and options.get("top_logprobs"):
            best = note["top_logprobs"]
            extras["top_logprobs"] = [[(spell(token), value) for token, value in entry.items()] for entry in best]
        if note and options.get("details"):
            extras |= {key: note[key] for key in ("finish_reason", "prompt_tokens", "completion_tokens")}
        return extras

    def _spell(self, token: int) -> str:
        """One token's text with its space."""
        decoder = StreamDecoder(self.tokenizer, keep_space=True)
        return decoder.put(token) + decoder.end()

    def stream_text(
        self,
        prompt: str,
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        *,
        keep_space: bool = False,
        **options: Unpack[Options],
    ) -> Iterator[str]:
        """`text_completion` of one prompt in pieces: joined, they are its "generation" for the same seed."""
        if not isinstance(prompt, str):
            raise LlamaError(f"prompt is a {type(prompt).__name__}; stream_text takes one text")
        steps = self.stream([self._encode_prompt(0, prompt)], max_gen_len, temperature, top_p, **options)
        return self.pieces(steps, options, keep_space)

    def pieces(self, steps: Iterator[Step], options: Options, keep_space: bool = False) -> Iterator[str]:
        """The text of one row's steps, as soon as it is certain."""
        stop_ids = self._stop_ids(options.get("stop_ids", ()))
        with contextlib.closing(steps):  # type: ignore[type-var]
            tokens = (step.token for step in steps if step.token not in stop_ids)
            yield from self._spell_out(tokens, options.get("stop", ()), keep_space)

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
        _check_list("dialogs", dialogs, "dialogs, each a list of messages")
        for place, dialog in enumerate(dialogs):
            check_dialog(dialog, place)
        safe = [place for place, dialog in enumerate(dialogs) if not is_unsafe(dialog)]
        dropped = dict.fromkeys(safe, 0)
        if drop_oldest:
            dialogs = list(dialogs)
            for place in safe:
                dialogs[place], dropped[place] = fit_dialog(self.tokenizer, dialogs[place], self.room(max_gen_len))
        prompts = [encode_dialog(self.tokenizer, dialogs[place], place) for place in safe]
        answers: dict[int, dict[str, Any]] = {}
        if prompts:
            results, notes = self._generate_once(prompts, temperature, top_p, max_gen_len, logprobs, options)
            for i, (tokens, scores) in enumerate(results):
                content = self._text(tokens, options.get("stop", ()), keep_space)
                extras = self._extras(tokens, scores, notes[i] if notes else {}, options, keep_space)
                if drop_oldest and options.get("details"):
                    extras["dropped"] = dropped[safe[i]]
                answers[safe[i]] = {"generation": {"role": "assistant", "content": content}, **extras}
        refused = _refused(logprobs, options)
        return [answers.get(place, refused) for place in range(len(dialogs))]  # type: ignore[misc]

    def stream_chat(
        self,
        dialog: Dialog,
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        *,
        keep_space: bool = False,
        **options: Unpack[Options],
    ) -> Iterator[str]:
        """`chat_completion` of one dialog in pieces: joined, they are its answer's "content" for the same seed."""
        check_dialog(dialog, 0)
        if is_unsafe(dialog):
            return iter([UNSAFE_ERROR])
        steps = self.stream([encode_dialog(self.tokenizer, dialog)], max_gen_len, temperature, top_p, **options)
        return self.pieces(steps, options, keep_space)

    def room(self, max_gen_len: int | None) -> int:
        """Tokens that a dialog may have so that its answer fits: a quarter of the window unless a length is given."""
        window = int(self.model.params.max_seq_len)
        return window - (max(1, window // 4) if max_gen_len is None else min(max_gen_len, window - 1))

    # --------------------------------------------------------------------- looking without generating

    def score(
        self, prompts: Sequence[str | list[int]], *, prefill_chunk: int = Request.prefill_chunk
    ) -> list[dict[str, Any]]:
        """How likely texts (or token lists) are: per prompt "tokens", "logprobs" (natural, the first 0.0) and "sum".

        `prefill_chunk` as in `Options`. LlamaError for what cannot be a prompt.
        """
        encoded = self._encode_all(prompts)
        tokens, logprobs = self.generate(
            encoded, 0, temperature=0, logprobs=True, echo=True, prefill_chunk=prefill_chunk
        )
        return [{"tokens": t, "logprobs": p, "sum": sum(p)} for t, p in zip(tokens, logprobs, strict=True)]

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
        prompts, chunk = self._check_prompts(prompt_tokens), _check_chunk(prefill_chunk)
        n_layers, size = self.model.params.n_layers, self.model.params.max_batch_size
        wanted = [*range(n_layers), -1] if layers is None else list(layers)
        for layer in wanted:
            if not -1 <= layer < n_layers:
                raise LlamaError(
                    f"layers names {layer}; blocks go from 0 to {n_layers - 1}, -1 is after the final norm"
                )
        found: list[Tensor] = []
        with CacheLock.of(self).take():
            for first in range(0, len(prompts), size):
                found += _watch_layers(self.model, prompts[first : first + size], wanted, chunk)
        return found

    def embed(
        self, texts: Sequence[str | list[int]], pooling: str = "mean", *, prefill_chunk: int = Request.prefill_chunk
    ) -> Tensor:
        """One float32 vector per text, stacked (texts, dim): the mean, or the last, of its tokens' final normed states.

        `prefill_chunk` as in `Options`. LlamaError for another `pooling` than "mean" and "last".
        """
        if pooling not in ("mean", "last"):
            raise LlamaError(f"pooling={pooling!r} must be 'mean' or 'last'")
        found = self.hidden_states(self._encode_all(texts), layers=[-1], prefill_chunk=prefill_chunk)
        states = [layers[0].float() for layers in found]
        rows = [state.mean(0) if pooling == "mean" else state[-1] for state in states]
        return torch.stack(rows) if rows else torch.empty(0, self.model.params.dim)

    def _encode_all(self, prompts: Any) -> list[list[int]]:
        _check_list("prompts", prompts, "texts or of lists of token ids")
        return [self.tokenizer.encode(p, bos=True, eos=False) if isinstance(p, str) else p for p in prompts]


def _check_list(name: str, value: Any, of_what: str) -> None:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise LlamaError(f"{name} is {value!r:.60}, a {type(value).__name__}; it must be a list of {of_what}")


def _check_chunk(chunk: Any) -> int:
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise LlamaError(f"prefill_chunk={chunk!r} must be a whole number of at least 1")
    return chunk


@torch.no_grad()
def _watch_layers(model: Any, prompts: list[list[int]], wanted: list[int], chunk: int) -> list[Tensor]:
    """Prompts side by side, right-padded, `chunk` positions at a time, with a hook on each layer that is wanted."""
    seen: dict[int, list[Tensor]] = {layer: [] for layer in wanted}

    def keep(layer: int) -> Any:
        return lambda module, args, output: seen[layer].append(output)

    watched = {layer: model.norm if layer == -1 else model.layers[layer] for layer in wanted}
    handles = [module.register_forward_hook(keep(layer)) for layer, module in watched.items()]
    try:
        longest = max(map(len, prompts))
        tokens = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
        for start in range(0, longest, chunk):
            model.hidden(tokens[:, start : start + chunk], start)
    finally:
        for handle in handles:
            handle.remove()
    states = {layer: torch.cat(pieces, dim=1) for layer, pieces in seen.items()}  # each (b, s, d)
    return [
        torch.stack([states[layer][row, : len(prompt)] for layer in wanted])
        if wanted
        else torch.empty(0, len(prompt), 0)
        for row, prompt in enumerate(prompts)
    ]


def _refused(logprobs: bool, options: Options) -> dict[str, Any]:
    """The answer to a dialog that holds a special tag."""
    answer: dict[str, Any] = {"generation": {"role": "assistant", "content": UNSAFE_ERROR}}
    if logprobs:
        answer |= {"tokens": [], "logprobs": []}
    if options.get("top_logprobs"):
        answer["top_logprobs"] = []
    if options.get("details"):
        answer |= {"finish_reason": "refused", "prompt_tokens": 0, "completion_tokens": 0}
    return answer
