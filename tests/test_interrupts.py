"""A KeyboardInterrupt on any line of ours: state is put back, and the next call works. Forked children, copies."""

import contextlib
import copy
import gc
import inspect
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import GOLDEN, build_golden, make_model

import llama
from llama import Llama, LlamaError, Tokenizer
from llama.checkpoint import load_model, open_checkpoint
from llama.cli.step_trace import trace_steps
from llama.engine.sampling import Sampling
from llama.engine.scheduler import Scheduler
from llama.serving.conversation import Conversation

SOURCES = str(Path(llama.__file__).parent)
PROMPTS = [[1, 5, 9], [1, 7], [1, 3, 5, 7, 9, 11]]


def puts_back(line: tuple[str, int]) -> bool:
    """Whether a line is of what puts state back."""
    for function in (Scheduler.steps, Scheduler._restore, Scheduler._feed_from, Scheduler._feed):
        source, start = inspect.getsourcelines(function)
        if line[0] == inspect.getsourcefile(function) and start <= line[1] < start + len(source):
            return True
    return "interrupts.py" in line[0]


class Lines:
    """Counts the lines of ours that a call passes, entries of functions among them; raises KeyboardInterrupt at the
    `at`-th pass of one.
    """

    def __init__(self, line: tuple[str, int] | None = None, at: int = 0) -> None:
        self.passed: dict[tuple[str, int], int] = {}
        self.line, self.at = line, at

    def run(self, call: Callable[[], Any]) -> Any:
        sys.settrace(self._enter)
        try:
            return call()
        finally:
            sys.settrace(None)

    def _enter(self, frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCES):
            return None
        if frame.f_code.co_flags & inspect.CO_GENERATOR:  # raised here, it would pass by handlers that are in force
            return self._line
        return self._line(frame, event, None)

    def _line(self, frame: Any, event: str, argument: Any) -> Any:
        if event in ("line", "call"):
            line = frame.f_code.co_filename, frame.f_lineno
            self.passed[line] = self.passed.get(line, 0) + 1
            if line == self.line and self.passed[line] == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line


def stream(generator: Llama) -> list[Any]:
    with generator.stream(PROMPTS, 2, temperature=0) as steps:
        return list(steps)


def traced(generator: Llama) -> list[Any]:
    # in a list first: an interrupt that hits a loop of the caller's leaves the generator suspended, as long as it is held
    return [step.token for step in list(trace_steps(generator, PROMPTS[0], 2, Sampling(0.0), layer=0))]


def conversation(generator: Llama) -> str:
    return "".join(Conversation(generator, "be small").ask("bird?", temperature=0, max_gen_len=3))


CALLS: dict[str, Callable[[Llama], Any]] = {
    "generate": lambda generator: generator.generate(PROMPTS, 2, 0.8, logprobs=True, seed=1, stop=["zzz"]),
    "stream": stream,
    "hidden_states": lambda generator: [s.tolist() for s in generator.hidden_states(PROMPTS, prefill_chunk=4)],
    "trace": traced,
    "conversation": conversation,
}


@pytest.fixture
def small() -> Iterator[Llama]:
    """Two rows for three prompts, one layer: one prompt is prefilled while others decode."""
    tokenizer = Tokenizer(str(GOLDEN / "tokenizer.model"))
    with build_golden():  # a process group, which a trace needs
        model = make_model("gqa", n_layers=1, max_batch_size=2, vocab_size=tokenizer.n_words)
        yield Llama(model, tokenizer)


def state(generator: Llama) -> list[Any]:
    """What a call changes for a while."""
    hooks = [name for name, module in generator.model.named_modules() if module._forward_hooks]
    first_rows = [attention.first_row for attention in generator.model.attentions()]
    return [torch.is_grad_enabled(), hooks, first_rows, torch.get_default_dtype()]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # some hit while a stream is dropped
@pytest.mark.parametrize("every", [200, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_on_any_line_leaves_nothing_behind(small: Llama, name: str, every: int) -> None:
    """Of the lines of what puts state back all, of the others each `every`-th; at its first, middle and last pass."""
    call, counting = lambda: CALLS[name](small), Lines()
    wanted, before = counting.run(call), state(small)
    assert len(counting.passed) > 100 and call() == wanted
    assert any(map(puts_back, counting.passed))
    lines = [line for i, line in enumerate(counting.passed) if i % every == 0 or puts_back(line)]
    for line in lines:
        for at in {1, counting.passed[line] // 2 + 1, counting.passed[line]}:
            try:
                Lines(line, at).run(call)
            except KeyboardInterrupt as error:
                held = error  # as a debugger, or Python's prompt, holds every frame of it
                assert state(small) == before, (line, at)
                assert call() == wanted, (line, at)
                del held
            finally:
                torch.set_grad_enabled(True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_at_random_times(small: Llama) -> None:
    """LLAMA_INTERRUPTS of them (500), by a timer: between any two of Python's instructions, torch's own included."""
    rng, hits = random.Random(12), dict.fromkeys(CALLS, 0)
    wanted, before = {name: call(small) for name, call in CALLS.items()}, state(small)
    seconds = {}
    for name, call in CALLS.items():
        start = time.perf_counter()
        call(small)
        seconds[name] = time.perf_counter() - start
    old = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        while sum(hits.values()) < int(os.environ.get("LLAMA_INTERRUPTS", "500")):
            name = rng.choice(list(CALLS))
            try:
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, rng.random() * seconds[name]))
                found = CALLS[name](small)
                signal.setitimer(signal.ITIMER_REAL, 0)
                assert found == wanted[name] and state(small) == before, (name, hits)
            except KeyboardInterrupt as error:
                held = error
                hits[name] += 1
                assert state(small) == before and CALLS[name](small) == wanted[name], (name, hits)
                del held
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    print(f"interrupts: {hits}")
    assert min(hits.values()) > 0


def test_an_interrupt_while_loading_leaves_torchs_defaults() -> None:
    checkpoint = open_checkpoint(GOLDEN)
    rows = checkpoint.shape("tok_embeddings.weight")[0]

    def load_it() -> None:
        cpu = torch.device("cpu")
        load_model(checkpoint, vocab_size=rows, max_seq_len=8, max_batch_size=1, device=cpu, dtype=torch.bfloat16)

    counting = Lines()
    counting.run(load_it)
    for line in list(counting.passed)[::4]:
        with pytest.raises(KeyboardInterrupt):
            Lines(line, 1).run(load_it)
        assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled(), line


def test_a_stream_that_is_dropped_while_another_thread_waits(small: Llama) -> None:
    """The waiting call starts once the first has ended by an exception whose traceback is still held."""
    started, found = threading.Event(), list[Any]()

    def fail(*args: Any) -> None:
        started.set()
        waiter.join(0.1)
        raise KeyboardInterrupt

    wanted = small.generate(PROMPTS, 3, temperature=0)
    waiter = threading.Thread(
        target=lambda: (started.wait(10), handle.remove(), found.append(small.generate(PROMPTS, 3, temperature=0)))
    )
    waiter.start()
    handle = small.model.norm.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt) as held:
        small.generate(PROMPTS, 3, temperature=0)
    waiter.join(20)
    assert found == [wanted] and held.value.__traceback__ is not None


# ------------------------------------------------------------------------------------- forks and copies


def child_says(work: Callable[[], Any]) -> str:
    """What `work` raises or returns in a forked child, which has ten seconds."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = f"returned {work()!r}"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode()[:4000])
        os._exit(0)
    os.close(write)
    timer = threading.Timer(10, os.kill, (child, 9))
    timer.start()
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    timer.cancel()
    return said


def test_a_forked_child_is_told_so() -> None:
    with build_golden() as generator:
        for call in (
            lambda: generator.generate([[1]], 2),
            lambda: list(generator.stream_text("a")),
            lambda: generator.hidden_states([[1]]),
            lambda: build_golden(),
        ):
            assert "LlamaError: this process" in child_says(call) and "spawn" in child_says(call)
        with generator.stream([[1, 5]], 4) as steps:  # the child's copy of an open stream
            next(steps)
            assert "LlamaError: this process" in child_says(lambda: generator.generate([[1]], 2))
        assert child_says(generator.close) == "returned None"
        assert generator.generate([[1]], 2)[0]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_closing_a_copy_leaves_the_originals_groups_up(copied: Callable[[Llama], Llama]) -> None:
    with build_golden() as generator:
        wanted = generator.generate([[1, 5]], 3, temperature=0)
        with copied(generator) as other:
            assert other.generate([[1, 5]], 3, temperature=0) == wanted
        assert dist.is_initialized()
        expected = pytest.raises(LlamaError, match="busy") if copied is copy.copy else contextlib.nullcontext()
        with generator.stream([[1, 5]], 3) as steps, expected:  # a copy shares the model and its lock
            next(steps)
            other.generate([[1]], 1)
    assert not dist.is_initialized()


def test_groups_of_a_build_that_an_interrupt_lost_go_down_with_the_next() -> None:
    build_golden()  # what an interrupt between two lines would leave
    gc.collect()
    build_golden().close()
    assert not dist.is_initialized()
