"""`python -m llama bench`: how fast this machine generates, and how far that is from what the machine allows.

Every figure is the median of several trials. The limits are measured in the same run: the rate at which memory is read
(a sum over half a gigabyte; on CUDA a copy) and the rate of a large matrix product in the same dtype. A decode step
must read every weight but the embedding once, and each row's cache up to its position; a prefill must do two operations
per weight and token, and the attention's products.
"""

import contextlib
import functools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import distributed as parallel
from ..checkpoint import pick_scheme, with_defaults
from ..checkpoint.memory import check_memory, gigabytes
from ..engine.compiled import compile_model
from ..errors import LlamaError
from ..generation import Llama
from ..model import ModelArgs, Transformer
from ..quantization import RowSlice, pack, weight_scheme

# name: dim, layers, heads, kv heads, multiple_of, ffn_dim_multiplier (which give the usual width)
SHAPES: dict[str, tuple[int, int, int, int, int, float | None]] = {
    "15m": (288, 6, 6, 6, 32, None),
    "110m": (768, 12, 12, 12, 32, None),
    "1b": (2048, 22, 32, 4, 256, None),
    "7b": (4096, 32, 32, 32, 256, None),
    "13b": (5120, 40, 40, 40, 256, None),
    "70b-of-8": (8192, 80, 64, 8, 4096, 1.3),  # one rank's shard, without communication
}
VOCAB_SIZE = 32000


class NoTokenizer:
    """Enough of a tokenizer for `generate`, without a stop token: every row runs to its full length."""

    eos_id = None


class Times(NamedTuple):
    """Seconds until all rows have their first token, and seconds per decode step after it."""

    prefill: float
    step: float


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
    """A generator with random weights of a named shape, made on the device."""
    if shape not in SHAPES:
        raise LlamaError(f"shape={shape!r} must be one of {', '.join(SHAPES)}")
    args = ModelArgs(*SHAPES[shape][:4], VOCAB_SIZE, *SHAPES[shape][4:], 1e-5, max_batch_size, max_seq_len)
    ranks = 8 if shape == "70b-of-8" else parallel.world_size()
    check_memory(args, device, dtype, ranks, scheme)

    def make() -> Transformer:
        with parallel.shard_as(ranks):
            model = Transformer(args)
        if shape == "70b-of-8":  # no other ranks to gather the vectors from
            model.tok_embeddings = parallel.ParallelEmbedding(VOCAB_SIZE, args.dim)
        return model

    model = with_defaults(torch.device("cpu") if scheme else device, dtype, make)  # as in `build`
    layers = dict(parallel.linear_layers(model)) if scheme else {}
    for name, parameter in list(model.named_parameters()):
        values = torch.ones_like(parameter, device=device) if parameter.ndim == 1 else _noise(parameter, device)
        layer = layers.get(name.removesuffix(".weight"))
        if layer is not None and scheme is not None:
            layer.set_packed(pack(values, weight_scheme(name, scheme)))
        else:
            parameter.data = values
    return Llama(model, NoTokenizer(), decoder=compile_model(model) if compile else None)


def _noise(like: Tensor, device: torch.device) -> Tensor:
    """Normal values of deviation 0.02: a million of them, repeated, as only their number matters for speed."""
    values = torch.randn(min(like.numel(), 1 << 20), device=device).mul_(0.02).to(like.dtype)
    return values.repeat(-(-like.numel() // len(values)))[: like.numel()].view(like.shape)


def step_bytes(model: Any, batch: int, position: int) -> int:
    """Bytes that one decode step must read: all weights but the embedding, and every row's cache before `position`."""
    weights = sum(
        layer.packed.nbytes if layer.packed is not None else layer.weight.numel() * layer.weight.itemsize
        for _, layer in parallel.linear_layers(model)
    )
    cache = model.layers[0].attention.cache_k
    return int(weights + 2 * model.n_layers * batch * position * cache[0, 0].numel() * cache.itemsize)


def prefill_flops(model: Any, batch: int, prompt: int) -> int:
    """Operations of a prefill: two per weight and token (the head: once per row), and the attention's two products."""
    sizes = [
        (layer.weight if layer.packed is None else layer.packed).shape for _, layer in parallel.linear_layers(model)
    ]
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
    """Bytes per second that this machine reads from memory (CUDA: reads and writes in a copy)."""
    block = torch.ones(1 << 27, device=device)  # half a gigabyte
    if device.type == "cuda":
        other = torch.empty_like(block)
        return 2 * block.numel() * 4 / timed(lambda: other.copy_(block), device)
    return block.numel() * 4 / timed(block.sum, device)


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a matrix product in `dtype`, the first that takes 50 ms (or is 8,192 wide)."""
    size, seconds = 256, 0.0
    while seconds < 0.05 and size < 8192:  # a CPU without bfloat16 instructions takes minutes where others take 50 ms
        size *= 2
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        seconds = timed(functools.partial(torch.mm, a, b), device)
    return 2 * size**3 / seconds


def matrices_alone(model: Any, product: Callable[[Any, Tensor], Tensor] | None = None) -> float:
    """Seconds in which one row goes through all the model's matrices and nothing else, by `product` or the layers."""
    like = model.tok_embeddings.weight
    work: dict[Any, tuple[Callable[[Tensor], Tensor], Tensor]] = {}  # by what multiplies: wq, wk and wv may be fused
    for _, layer in parallel.linear_layers(model):
        packed = layer.packed.whole if isinstance(layer.packed, RowSlice) else layer.packed
        shape = layer.weight.shape if packed is None else packed.shape
        multiply: Any = layer if packed is None else packed
        if product is not None:
            multiply = functools.partial(product, layer)
        work[multiply] = multiply, torch.randn(1, shape[1], device=like.device).to(like.dtype)
    return timed(lambda: [multiply(x) for multiply, x in work.values()], like.device, trials=7)


def one_trial(generator: Llama, batch: int, prompt: int, tokens: int) -> Times:
    """The times of one run of `batch` random prompts of one length, greedily."""
    vocab = generator.model.params.vocab_size
    prompts = torch.randint(3, vocab, (batch, prompt), generator=torch.Generator().manual_seed(1)).tolist()
    begin = time.perf_counter()
    first = 0.0
    for count, _ in enumerate(generator.stream(prompts, tokens, temperature=0), 1):
        if count == batch:
            first = time.perf_counter()
    return Times(first - begin, (time.perf_counter() - first) / (tokens - 1))


def median_times(trials: Sequence[Times]) -> Times:
    """The median of each of the two."""
    return Times(statistics.median(t.prefill for t in trials), statistics.median(t.step for t in trials))


@torch.no_grad()
def step_at(generator: Llama, position: int, tokens: int = 8) -> float:
    """Seconds of the model's step for one row at a position of the cache, whose content does not matter."""
    times = []
    for index in range(position - 1, position - 1 + tokens):
        begin = time.perf_counter()
        if generator.decoder is not None:
            logits = generator.decoder([5], [index])
        else:
            logits = generator.model.forward(torch.tensor([[5]]), index)
        logits.argmax(-1).tolist()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def peak_memory(device: torch.device) -> int:
    """Bytes: of the process on a CPU, of the device's allocator on CUDA."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def machine(device: torch.device) -> dict[str, Any]:
    """What was measured: without it a figure means nothing."""
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
    batches: str = "1,16,64",
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
    target = parallel.pick_device(device)
    target_dtype = parallel.pick_dtype(dtype, target)
    rows = row_counts(batches)
    for name, value, least in (("prompt", prompt, 1), ("trials", trials, 1), ("tokens", tokens, 2)):
        if type(value) is not int or value < least:
            raise LlamaError(f"{name}={value!r} must be an integer of at least {least}")
    pick_scheme(quantize, None)
    settings: dict[str, Any] = {"device": target, "dtype": target_dtype, "compile": compile}
    with contextlib.ExitStack() as stack:
        if ckpt is not None:
            built = Llama.build(ckpt, None, prompt + tokens, max(rows), quantize=quantize, **settings)
            stack.enter_context(built)
            generator = Llama(built.model, NoTokenizer(), decoder=built.decoder)
        else:
            stack.enter_context(contextlib.closing(parallel.initialize_groups(None, target)))
            generator = random_model(
                shape, max_seq_len=prompt + tokens, max_batch_size=max(rows), scheme=quantize, **settings
            )
        parallel.choose_threads(generator.model)
        report = measure(generator, rows, prompt, tokens, trials)
    report |= {"shape": ckpt or shape, "dtype": str(target_dtype).removeprefix("torch."), "quantize": quantize}
    report |= {"compile": compile, **machine(target)}
    print_table(report)
    print(json.dumps(report))


def row_counts(batches: str) -> list[int]:
    """`batches` as a list; LlamaError unless it is numbers of rows with commas between them."""
    try:
        numbers = [int(number) for number in str(batches).split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise LlamaError(f"batches={batches!r} must be numbers of rows with commas between them, such as 1,16")
    return numbers


def measure(generator: Llama, batches: list[int], prompt: int, tokens: int, trials: int) -> dict[str, Any]:
    """All figures of one generator, as the JSON line holds them."""
    model, device = generator.model, generator.device
    begin = time.perf_counter()
    one_trial(generator, batches[0], prompt, 2)
    first = time.perf_counter() - begin
    reading, computing = read_rate(device), matrix_rate(device, generator.dtype)
    rows = []
    for batch in batches:
        one_trial(generator, batch, prompt, 3)
        runs = [one_trial(generator, batch, prompt, tokens) for _ in range(trials)]
        prefill, step = median_times(runs)
        steps = [run.step for run in runs]
        rows.append(
            {
                "batch": batch,
                "prompt": prompt,
                "first_token_s": prefill,
                "prefill_tokens_s": batch * prompt / prefill,
                "prefill_share": prefill_flops(model, batch, prompt) / prefill / computing,
                "step_s": step,
                "decode_tokens_s": batch / step,
                "decode_share": step_bytes(model, batch, prompt + tokens // 2) / step / reading,
                "spread": max(steps) / min(steps),
            }
        )
    return {
        "batches": rows,
        "read_bytes_s": reading,
        "matrix_flops_s": computing,
        "matrices_alone_s": matrices_alone(model),
        "first_run_s": first,
        "compile_s": generator.decoder.compile_seconds if generator.decoder else 0.0,
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
    print(f"matrices alone {alone * 1e3:.2f} ms per token{share}; first run {report['first_run_s']:.1f} s", end="")
    print(f"; compiling {report['compile_s']:.1f} s, all numbers of rows" if report["compile"] else "", end="")
    print(f"; peak memory {gigabytes(report['peak_bytes'])}")
