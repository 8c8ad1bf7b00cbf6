"""Our schedule: prompts of unequal length are prefilled together, each row goes on at its own position, a row that
finishes makes room for the next prompt. A model with hooks or overrides is called in the published schedule instead.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..distributed import check_same_on_all_ranks, send, translate_distributed_errors, world_size
from .cache import move_row
from .overrides import has_hooks_or_overrides
from .prefixes import MIN_SHARED, common_length, prefix_runs, shared_length
from .published import choose, published_steps
from .request import Request, RowState, Step, make_rows
from .sampler import PromptScores, Sampler, non_finite


class Scheduler:
    """One call's prompts on their way to their last token; `steps` drives them, `rows` holds what came out."""

    def __init__(
        self,
        model: Any,
        prompts: Sequence[list[int]],
        request: Request,
        decoder: Callable[[list[int], list[int]], Tensor] | None = None,
    ) -> None:
        self.model = model
        self.decoder = decoder  # decodes rows in compiled static shapes (compiled.py)
        self.request = request
        self.rows = make_rows(prompts, request, model.params.max_seq_len)
        self.batch_size: int = model.params.max_batch_size
        one_length = len({len(prompt) for prompt in prompts}) <= 1
        self.aligned = one_length and len(self.rows) <= self.batch_size  # every row stays at the same position
        self._cached: dict[int, RowState] = {}  # whose prompt each cache row holds
        self._first_row = 0  # other than the model's 0 while prompts are fed beside other rows
        self.sampler = Sampler(
            request.sampling, self.rows, n_slots=len(self.rows) if self.aligned else None, banned=request.banned
        )

    def reuse_prefix(self, cached: Sequence[int]) -> None:
        """Skip what a single prompt shares with the ids in cache row 0; its last token is fed in any case."""
        [row] = self.rows
        row.reused = common_length(cached, row.prompt[:-1])

    def steps(self) -> Iterator[Step]:
        """Step after step, rows that decode side by side in turn; nothing is computed ahead of the consumer.

        Whatever line an interrupt hits, the consumer gets their grad mode back, and the model its cache rows.
        """
        pending = [row for row in self.rows if row.unfinished or row.unscored(self.request)]
        with translate_distributed_errors():
            if world_size() > 1:
                check_same_on_all_ranks("on this call", self._settings())
            schedule = self._published_steps if has_hooks_or_overrides(self.model) else self._batched_steps
            steps = schedule(deque(pending))
            while True:
                grad = torch.is_grad_enabled()
                try:
                    try:
                        torch._C._set_grad_enabled(False)
                        step = next(steps, None)
                    finally:
                        self._restore(grad)
                finally:  # again: the interrupt may have hit the first
                    self._restore(grad)
                if step is None:
                    return
                yield step

    def _restore(self, grad: bool) -> None:
        torch._C._set_grad_enabled(grad)
        if self._first_row:
            self._feed_from(0)

    def _feed_from(self, first: int) -> None:
        """The model's calls feed the cache from row `first` on: new prompts beside rows that are decoding."""
        self._first_row = first or self._first_row
        for attention in self.model.attentions():
            attention.first_row = first
        self._first_row = first

    def _published_steps(self, waiting: deque[RowState]) -> Iterator[Step]:
        """The published schedule, `batch_size` rows after the other."""
        while waiting:
            rows = [waiting.popleft() for _ in range(min(self.batch_size, len(waiting)))]
            yield from published_steps(self.model, rows, self.request, self.sampler)

    def _settings(self) -> dict[str, object]:
        """What decides how many forwards this call takes, and of which shapes; of the seed the first rank's counts."""
        rows = [(row.prompt, row.reused) for row in self.rows]
        settings = {**vars(self.request), **vars(self.request.sampling)}
        return {
            **{name: settings[name] for name in settings.keys() - {"sampling", "stop_text", "seed"}},
            "the prompts": hashlib.sha256(repr(rows).encode()).hexdigest()[:8],
            "whether hooks or patches watch the model": has_hooks_or_overrides(self.model),
        }

    def _batched_steps(self, waiting: deque[RowState]) -> Iterator[Step]:
        """Active rows are cache rows 0 to len(active) - 1; whenever one is free and a prompt waits, it moves in."""
        active: list[RowState] = []
        while waiting or active:
            if waiting and len(active) < self.batch_size:
                count = min(self.batch_size - len(active), len(waiting))
                runs = prefix_runs([waiting.popleft() for _ in range(count)])
                logits = self._prefill(runs, first=len(active))  # (n, v)
                new = [row for run in runs for row in run]
                active += new
                choosing = [row for row in new if row.unfinished]
            else:
                logits, choosing = self._decode(active), list(active)  # (n, v)
            if choosing:
                yield from choose(logits, choosing, self.request, self.sampler)
            self._retire(active)

    def _prefill(self, runs: list[list[RowState]], first: int) -> Tensor:
        """Feed the prompts of new rows into the cache from row `first` on, run by run (prefixes.py); the last logits
        (n, v) of each row that generates.
        """
        last: dict[int, Tensor] = {}
        for run in runs:
            start = self._share_prefix(run, first)
            last |= self._feed(run, first, start)
            for i, row in enumerate(run, first):
                if self.decoder is not None or not self.aligned:
                    self.model.clear_row(i, len(row.prompt), self._kv_len())
                self._cached[i] = row
            first += len(run)
        ending = [last[row.index] for run in runs for row in run if row.unfinished]
        return self._head(torch.stack(ending)) if ending else torch.empty(0, 0)

    def _share_prefix(self, run: list[RowState], first: int) -> int:
        """Fill the cache rows of a run, from `first` on, with what its prompts have in common: a copy of what some row
        of the cache holds of it, the rest fed once. Returns the position from which each row is to be fed.
        """
        head, shared = run[0], shared_length(run)
        held = [(min(shared, shared_length([head, row])), i) for i, row in self._cached.items()]
        found, source = max(held, default=(0, 0))
        if head.reused or found < MIN_SHARED:
            found = head.reused
        else:
            move_row(self.model, source, first, found)
            head.take_prefix(self._cached[source], found)
        if len(run) == 1 or shared < MIN_SHARED:
            return found
        if found < shared:
            self._feed(run[:1], first, found, shared)
        for i, row in enumerate(run[1:], first + 1):
            move_row(self.model, first, i, shared)
            row.take_prefix(head, shared)
        return shared

    def _feed(self, rows: list[RowState], first: int, start: int, end: int | None = None) -> dict[int, Tensor]:
        """Feed prompts, longest first, into the cache from row `first` on, positions `start` to `end` or all that are
        left; each row's last state (d,) by its index. Padding stands right of a row's prompt, so that no token of it
        sees any.
        """
        last: dict[int, Tensor] = {}
        finite: list[_Fed] = []  # looked at once, since every look waits for a GPU
        scores = PromptScores(self.sampler)
        longest, chunk = len(rows[0].prompt), self.request.prefill_chunk
        ids = send([row.prompt + [0] * (longest - len(row.prompt)) for row in rows], self._device())  # (n, longest)
        self._feed_from(first)
        for begin in range(start, end or longest, chunk):
            feeding = [row for row in rows if len(row.prompt) > begin]
            stop = min(begin + chunk, end or longest)
            h = self.model.hidden(ids[: len(feeding), begin:stop], begin)  # (n, s, d)
            for row, states, following in zip(feeding, h, ids[:, begin + 1 :], strict=False):
                states = states[: len(row.prompt) - begin]
                finite.append((row, begin, states.isfinite().all()))
                if len(row.prompt) <= stop:
                    last[row.index] = states[-1]
                if row.unscored(self.request):
                    scores.add(row, begin, self._head(states), following)
        self._feed_from(0)
        scores.read()
        _check_finite(finite)
        return last

    def _decode(self, active: list[RowState]) -> Tensor:
        """Feed each row's newest token at the row's own position; logits (n, v)."""
        positions = [len(row.tokens) - 1 for row in active]
        if self.decoder is not None:
            # it fills the rows up to a static number, and writes over what those beyond the active ones hold
            self._cached = {i: row for i, row in self._cached.items() if i < len(active)}
            return self.decoder([row.tokens[-1] for row in active], positions)
        tokens = [row.tokens[-1] for row in active]
        if len(set(positions)) == 1:
            h = self.model.hidden(send(tokens, self._device())[:, None], positions[0])  # (n, 1, d)
        else:
            ids, start_pos = send([tokens, positions], self._device())  # (n,) each, in one transfer
            h = self.model.hidden(ids[:, None], start_pos, max(positions) + 1)  # (n, 1, d)
        return self._head(h[:, -1])

    def _device(self) -> torch.device:
        return self.model.tok_embeddings.weight.device  # type: ignore[no-any-return]

    def _head(self, h: Tensor) -> Tensor:
        """Normed states (n, d) to float32 logits (n, v)."""
        return self.model.output(h).float()  # type: ignore[no-any-return]

    def _retire(self, active: list[RowState]) -> None:
        """Take finished rows out; the last active row moves into the gap, so that active rows stay together."""
        for i in reversed(range(len(active))):
            if not active[i].unfinished:
                last = active.pop()
                if i < len(active):
                    move_row(self.model, len(active), i, self._kv_len())
                    active[i] = self._cached[i] = last

    def _kv_len(self) -> int:
        """Cache positions that a step may come to read."""
        return max(row.limit for row in self.rows) if self.decoder is None else int(self.model.params.max_seq_len)


_Fed: TypeAlias = tuple[RowState, int, Tensor]  # a row, the first position of a chunk, whether its states are finite


def _check_finite(fed: list[_Fed]) -> None:
    """LlamaError naming the row where a prefill met NaN or inf."""
    for (row, start, _), good in zip(fed, torch.stack([one for _, _, one in fed]).tolist(), strict=True):
        if not good:
            raise non_finite(row, f"in prompt positions {start} up")
