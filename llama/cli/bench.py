"""`python -m llama bench`: how fast this machine generates, and how far that is from what the machine allows.

Every figure is the median of several trials. The limits are measured in the same run: the rate at which memory is read
(a sum over half a gigabyte; on CUDA a copy) and the rate of a large matrix product in the same dtype. A decode step
must read every weight but the embedding once, and each row's cache up to its position; a prefill must do two operations
a weight and token, and the attention's products.
"""

import functools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import distributed as parallel
from ..checkpoint import pick_scheme, with_defaults
from ..checkpoint.memory import check_memory, gigabytes
from ..engine.compiled import compile_model
from ..errors import LlamaError
from ..generation import Llama
from ..model import ModelArgs, Transformer
from ..quantization import pack

# name: dim, layers, heads, kv heads, multiple_of, ffn_dim_multiplier (which give the usual width)
SHAPES: dict[str, tuple[int, int, int, int, int, float | None]] = {
    "15m": (288, 6, 6, 6, 32, None),
    "110m": (768, 12, 12, 12, 32, None),
    "1b": (2048, 22, 32, 4, 256, None),
    "7b": (4096, 32, 32, 32, 256, None),
    "13b": (5120, 40, 40, 40, 256, None),
    "70b-of-8": (8192, 80, 64, 8, 4096, 1.3),  # one rank's share, without the ranks' talk
}
VOCABULARY = 32000


class NoTokenizer:
    """Enough of a tokenizer for `generate` to run to the end of its length."""

    eos_id = None


@dataclass(frozen=True)
class Speed:
    """One batch's figures, seconds: the prompts until every row has its first token, and one decode step after it."""

    batch: int
    prompt: int
    prefill: float
    step: float
    spread: float  # of `step` over the trials, largest over smallest

    @property
    def tokens_per_second(self) -> float:
        """Of decoding, all rows together."""
        return self.batch / self.step


# ------------------------------------------------------------------------------------------- a model


def random_model(
    shape: str,
    device: torch.device,
    dtype: torch.dtype,
    max_seq_len: int,
    max_batch_size: int,
    scheme: str | None = None,
    compile: bool = False,
) -> Llama:
    """A generator with random weights of a named shape, made on the device. The caller has a process group up."""
    if shape not in SHAPES:
        raise LlamaError(f"shape={shape!r} must be one of {', '.join(SHAPES)}")
    dim, layers, heads, kv_heads, multiple_of, multiplier = SHAPES[shape]
    args = ModelArgs(
        dim, layers, heads, kv_heads, VOCABULARY, multiple_of, multiplier, 1e-5, max_batch_size, max_seq_len
    )
    ranks = 8 if shape == "70b-of-8" else parallel.world_size()
    check_memory(args, device, dtype, ranks, scheme)

    def make() -> Transformer:
        with parallel.shard_as(ranks):
            model = Transformer(args)
        model.tok_embeddings = parallel.ParallelEmbedding(VOCABULARY, dim)  # whole, where ranks are pretended
        return model

    model = with_defaults(torch.device("cpu") if scheme else device, dtype, make)  # as in `build`
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                values = torch.ones_like(parameter) if parameter.ndim == 1 else _noise(parameter, device)
                if scheme and hasattr(module, "packed"):
                    module.packed = pack(values, scheme)  # type: ignore[assignment]
                    module.register_parameter(name, None)
                else:
                    parameter.data = values.to(device)
    generator = Llama(model, NoTokenizer())
    if compile:
        generator.decoder = compile_model(model)
    return generator


def _noise(like: Tensor, device: torch.device) -> Tensor:
    """Normal values of deviation 0.02; a million of them repeated, since only their number matters for speed."""
    some = torch.randn(min(like.numel(), 1 << 20), device=device).mul_(0.02).to(like.dtype)
    return some.repeat(-(-like.numel() // len(some)))[: like.numel()].view(like.shape)


def step_bytes(model: Any, batch: int, position: int) -> int:
    """Bytes that one decode step must read: all weights but the embedding, and every row's cache before `position`."""
    weights = sum(
        layer.packed.nbytes if layer.packed is not None else layer.weight.numel() * layer.weight.itemsize
        for _, layer in parallel.linear_layers(model)
    )
    cache = model.layers[0].attention.cache_k
    return int(weights + 2 * model.n_layers * batch * position * cache[0, 0].numel() * cache.itemsize)


def prefill_flops(model: Any, batch: int, prompt: int) -> int:
    """Operations of a prefill: two a weight and token (the head: once a row), and the attention's two products."""
    layers = parallel.linear_layers(model)
    sizes = [layer.packed.shape if layer.packed is not None else layer.weight.shape for _, layer in layers]
    head = 2 * sizes[-1][0] * sizes[-1][1]
    body = sum(2 * n * k for n, k in sizes) - head
    attention = 2 * prompt * prompt * model.layers[0].attention.n_local_heads * model.layers[0].attention.head_dim
    return int(batch * (body * prompt + head + attention * model.n_layers))


# -------------------------------------------------------------------------------------------- measuring


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was asked to; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], object], device: torch.device, trials: int = 5) -> float:
    """Seconds of the fastest of some runs, after one that does not count."""
    times = []
    for _ in range(trials + 1):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def read_rate(device: torch.device) -> float:
    """Bytes a second that this machine reads from memory (CUDA: reads and writes in a copy)."""
    block = torch.ones(1 << 27, device=device)  # half a gigabyte
    if device.type == "cuda":
        other = torch.empty_like(block)
        return 2 * block.numel() * 4 / timed(lambda: other.copy_(block), device)
    return block.numel() * 4 / timed(block.sum, device)


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large product in `dtype`."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / timed(lambda: torch.mm(a, b), device)


def matrices_alone(model: Any, product: Callable[[Any, Tensor], Tensor] | None = None) -> float:
    """Seconds in which one row goes through all the model's matrices and nothing else; as the layers do it."""
    like = model.tok_embeddings.weight
    work: dict[int, tuple[Callable[[Tensor], Tensor], Tensor]] = {}
    for _, layer in parallel.linear_layers(model):
        multiply: Any = functools.partial(product, layer) if product else layer
        if layer.packed is not None and product is None:
            multiply = getattr(layer.packed, "whole", layer.packed)  # wq, wk and wv may be one
        width = layer.weight.shape[1] if layer.packed is None else layer.packed.shape[1]
        work[id(multiply)] = multiply, torch.randn(1, width, device=like.device).to(like.dtype)
    return timed(lambda: [multiply(x) for multiply, x in work.values()], like.device, trials=7)


def one_trial(generator: Llama, batch: int, prompt: int, tokens: int) -> tuple[float, float]:
    """Seconds until all rows have their first token, and seconds a step from then on."""
    vocab = generator.model.params.vocab_size
    prompts = torch.randint(3, vocab, (batch, prompt), generator=torch.Generator().manual_seed(1)).tolist()
    begin = time.perf_counter()
    first = 0.0
    for count, _ in enumerate(generator.stream(prompts, tokens, temperature=0), 1):
        if count == batch:
            first = time.perf_counter()
    return first - begin, (time.perf_counter() - first) / (tokens - 1)


def summarize(batch: int, prompt: int, trials: list[tuple[float, float]]) -> Speed:
    """The median of what `one_trial` measured several times."""
    steps = [step for _, step in trials]
    prefill = statistics.median(first for first, _ in trials)
    return Speed(batch, prompt, prefill, statistics.median(steps), max(steps) / min(steps))


def step_at(generator: Llama, position: int, tokens: int = 8) -> float:
    """Seconds of one row's decode step at a position of the cache, whose content does not matter."""
    decoding = generator.decoding([[5] * position], tokens, 0.0, 1.0, options={})
    decoding.reuse([5] * position)
    steps = decoding.steps()
    next(steps)
    times = []
    for _ in range(tokens - 1):
        begin = time.perf_counter()
        next(steps)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def peak_memory(device: torch.device) -> int:
    """Bytes: of the process on a CPU, of the device's allocator on CUDA."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def machine(device: torch.device) -> dict[str, Any]:
    """What a figure is worth nothing without."""
    return {
        "torch": torch.__version__,
        "llama": _version(),
        "python": sys.version.split()[0],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "command": " ".join(sys.argv),
    }


def _version() -> str:
    try:
        return version("llama")
    except PackageNotFoundError:  # a checkout on the path
        return "not installed"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "CPU"
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "CPU")


def _commit() -> str:
    here = Path(__file__).resolve().parent
    try:
        found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


# ------------------------------------------------------------------------------------------- the command


def bench(
    shape: str = "15m",
    ckpt: str | None = None,
    batches: str | int | tuple[int, ...] = "1,16,64",
    prompt: int = 128,
    tokens: int = 32,
    trials: int = 3,
    dtype: str | None = None,
    device: str | None = None,
    quantize: str | None = None,
    compile: bool = False,
) -> None:
    """Measure prefill and decode: a table for people, then one line of JSON.

    For example: python -m llama bench --shape 110m --batches 1,16 --dtype bfloat16

    Args:
        shape: The sizes of a model with random weights: 15m, 110m, 1b, 7b, 13b or 70b-of-8 (one rank's share).
        ckpt: A checkpoint to measure instead, a folder or a file.
        batches: Numbers of rows to measure, with commas between them.
        prompt: Tokens of each row's prompt.
        tokens: Tokens that each row generates, at least 2.
        trials: Runs of each, of which the median counts.
        dtype: float32, bfloat16 or float16; what suits the device if not given.
        device: cpu, cuda or mps; a GPU where there is one if not given.
        quantize: int8, int4 or int8-dynamic, for weights in fewer bytes.
        compile: Compile the decoding.
    """
    place = parallel.pick_device(device)
    kind = parallel.pick_dtype(dtype, place)
    rows = row_counts(batches)
    for name, value, least in (("prompt", prompt, 1), ("trials", trials, 1), ("tokens", tokens, 2)):
        if type(value) is not int or value < least:
            raise LlamaError(f"{name}={value!r} must be a whole number of at least {least}")
    pick_scheme(quantize, None)
    with _generator(shape, ckpt, prompt + tokens, max(rows), place, kind, quantize, compile) as generator:
        report = measure(generator, rows, prompt, tokens, trials)
        report |= {"shape": ckpt or shape, "dtype": str(kind).removeprefix("torch."), "quantize": quantize}
        report |= {"compile": compile, **machine(place)}
    print_table(report)
    print(json.dumps(report))


def row_counts(batches: str | int | Iterable[int]) -> list[int]:
    """`batches` as a list; LlamaError where it holds anything but numbers of rows."""
    listed = batches.split(",") if isinstance(batches, str) else [batches] if isinstance(batches, int) else batches
    try:
        numbers = [int(number) for number in listed]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise LlamaError(f"batches={batches!r} must be numbers of rows with commas between them, such as 1,16")
    return numbers


def _generator(
    shape: str,
    ckpt: str | None,
    window: int,
    rows: int,
    device: torch.device,
    dtype: torch.dtype,
    quantize: str | None,
    compile: bool,
) -> Llama:
    """The generator that is asked for, with its process group."""
    if ckpt is not None:
        generator = Llama.build(
            ckpt, None, window, rows, device=device, dtype=dtype, quantize=quantize, compile=compile
        )
        generator.tokenizer = NoTokenizer()  # a stop token would end a row early, and its steps are counted
        return generator
    groups = parallel.initialize_groups(None, device, None, None)
    try:
        generator = random_model(shape, device, dtype, window, rows, quantize, compile)
    except BaseException:
        groups.close()
        raise
    generator._groups = groups
    return generator


def measure(generator: Llama, batches: list[int], prompt: int, tokens: int, trials: int) -> dict[str, Any]:
    """All figures of one generator, as the JSON line holds them."""
    model, device = generator.model, generator.device
    begin = time.perf_counter()
    one_trial(generator, batches[0], prompt, 2)
    first = time.perf_counter() - begin
    speeds = []
    for batch in batches:
        one_trial(generator, batch, prompt, 3)
        runs = [one_trial(generator, batch, prompt, tokens) for _ in range(trials)]
        speeds.append(summarize(batch, prompt, runs))
    reading, computing = read_rate(device), matrix_rate(device, generator.dtype)
    rows = []
    for speed in speeds:
        needed = step_bytes(model, speed.batch, prompt + tokens // 2)
        operations = prefill_flops(model, speed.batch, prompt)
        rows.append(
            {
                "batch": speed.batch,
                "prompt": prompt,
                "first_token_s": speed.prefill,
                "prefill_tokens_s": speed.batch * prompt / speed.prefill,
                "prefill_share": operations / speed.prefill / computing,
                "step_s": speed.step,
                "decode_tokens_s": speed.tokens_per_second,
                "decode_share": needed / speed.step / reading,
                "spread": speed.spread,
            }
        )
    compiled = generator.decoder.seconds if generator.decoder else 0.0
    return {
        "batches": rows,
        "read_bytes_s": reading,
        "matrix_flops_s": computing,
        "matrices_alone_s": matrices_alone(model),
        "first_run_s": first,
        "compile_s": compiled,
        "peak_bytes": peak_memory(device),
    }


def print_table(report: dict[str, Any]) -> None:
    """What `measure` and `machine` found, for people."""
    scheme = report["quantize"] or report["dtype"]
    print(f"{report['shape']}, {scheme}{', compiled' if report['compile'] else ''}, {report['device']}, ", end="")
    print(f"{report['threads']} threads, torch {report['torch']}, commit {report['commit']}")
    print(
        f"limits of this machine now: {report['read_bytes_s'] / 1e9:.1f} GB/s read, "
        f"{report['matrix_flops_s'] / 1e12:.2f} TFLOP/s in {report['dtype']}"
    )
    print(f"{'rows':>5} {'prompt':>7} {'first token':>12} {'prefill':>12} {'of limit':>9}", end="")
    print(f" {'step':>10} {'decode':>12} {'of limit':>9} {'spread':>7}")
    for row in report["batches"]:
        print(f"{row['batch']:>5} {row['prompt']:>7} {row['first_token_s'] * 1e3:>9.1f} ms", end="")
        print(f" {row['prefill_tokens_s']:>8.0f} t/s {row['prefill_share']:>9.0%}", end="")
        print(f" {row['step_s'] * 1e3:>7.2f} ms {row['decode_tokens_s']:>8.1f} t/s", end="")
        print(f" {row['decode_share']:>9.0%} {row['spread']:>6.2f}x")
    alone = report["matrices_alone_s"]
    single = next((row["step_s"] for row in report["batches"] if row["batch"] == 1), None)
    share = f", {alone / single:.0%} of the step of one row" if single else ""
    print(f"matrices alone {alone * 1e3:.2f} ms a token{share}; first run {report['first_run_s']:.1f} s", end="")
    print(f"; compiling {report['compile_s']:.1f} s, all numbers of rows" if report["compile"] else "", end="")
    print(f"; peak memory {gigabytes(report['peak_bytes'])}")
