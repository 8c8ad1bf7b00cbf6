"""The GPU path on pretend CUDA devices (tests/simcuda.py): results, devices, copies and waits, graphs, int4, ranks."""

import contextlib
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import ROOT, build_golden, close
from simcuda import DeviceAssert, Pretend, why_not
from torch import Tensor

from llama import Llama, LlamaError
from llama.checkpoint.memory import graph_memory
from llama.distributed import initialize_groups, linear_layers, pick_device, pick_dtype
from llama.engine.compiled import StaticDecoder, graph_rows
from llama.quantization import dequantize, pack, quantize_int4
from llama.serving import Conversation

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

PROMPTS = [[1, 20, 30, 40], [1, 50, 60, 70, 80, 90, 100], [1, 7], [1, 8, 9], [1, 11, 12, 13, 14]]
GREEDY = {"temperature": 0}


@pytest.fixture
def cuda() -> Iterator[Pretend]:
    with Pretend() as pretend:
        yield pretend


@contextlib.contextmanager
def built(**changes: Any) -> Iterator[Llama]:
    with build_golden(**{"backend": "gloo", **changes}) as generator:
        yield generator


def calls(generator: Llama) -> Iterator[tuple[str, Any]]:
    """Every public call, with its options: names and results."""
    hooked: list[Any] = []
    options: dict[str, dict[str, Any]] = {
        "greedy": GREEDY,
        "sampled": {"temperature": 0.8},
        "seed": {"temperature": 0.8, "seed": 5, "top_k": 20, "min_p": 0.02},
        "penalties": {
            **GREEDY,
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.3,
            "logit_bias": {5: 3.0, 9: -math.inf},
        },
        "scored": {**GREEDY, "logprobs": True, "echo": True, "top_logprobs": 3, "details": True, "prefill_chunk": 3},
        "stop": {**GREEDY, "stop": ["a"], "stop_ids": [20, 30], "details": True},
    }
    for where in ("", "hooked "):
        for name, settings in options.items():
            torch.manual_seed(1)
            yield where + name, generator.generate(PROMPTS, 6, **settings)
        yield where + "one length", generator.generate([PROMPTS[0]] * 3, 6, temperature=0.9)
        if not where:
            hooked.append(generator.model.layers[1].register_forward_hook(lambda *args: None))
    hooked[0].remove()
    yield "stream", list(generator.stream(PROMPTS, 4, seed=3, logprobs=True))
    yield "text", generator.text_completion(["a b", "c"], **GREEDY, max_gen_len=4, logprobs=True, top_logprobs=2)
    yield "stream_text", list(generator.stream_text("a b", **GREEDY, max_gen_len=4))
    dialog: Any = [{"role": "user", "content": "a"}]
    yield "chat", generator.chat_completion([dialog], **GREEDY, max_gen_len=4)
    yield "stream_chat", list(generator.stream_chat(dialog, **GREEDY, max_gen_len=4))
    conversation = Conversation(generator)
    yield "conversation", [list(conversation.ask(text, **GREEDY, max_gen_len=4)) for text in ("a", "b")]
    yield "score", generator.score(["a b c", PROMPTS[1]])
    yield "hidden_states", [state.float().tolist() for state in generator.hidden_states(PROMPTS, prefill_chunk=3)]
    yield "embed", generator.embed(["a b", "c"]).tolist()
    yield "embed nothing", generator.embed([]).tolist()
    device = generator.device
    ids = torch.tensor([[1, 5, 6], [1, 7, 8]], device=device)
    generator.model(ids, 0)
    yield "forward", generator.model(ids[:, 1:], torch.tensor([3, 2], device=device)).tolist()


def same(found: Any, wanted: Any, limit: float) -> bool:
    """Equal, numbers nearly so."""
    if isinstance(wanted, float):
        return found == wanted or abs(found - wanted) <= limit
    if isinstance(wanted, dict):
        return list(found) == list(wanted) and all(same(found[key], wanted[key], limit) for key in wanted)
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(same(a, b, limit) for a, b in zip(found, wanted, strict=True))
    return bool(found == wanted)


def compare(limit: float, **changes: Any) -> None:
    """Every call on a pretend device against the CPU."""
    compile = changes.pop("compile", False)
    with built(**changes) as generator:
        wanted = dict(calls(generator))
    with Pretend(), built(device="cuda:1", compile=compile, **changes) as generator:
        assert {p.device for p in generator.model.parameters()} == {torch.device("cuda", 1)}
        found = dict(calls(generator))
    if compile and changes.get("dtype") != "float32":  # reads the cache through a mask, which rounds otherwise
        wanted.pop("one length", None)
    assert [name for name in wanted if not same(found[name], wanted[name], limit)] == []


def test_tokens_equal_the_cpu() -> None:
    """The quick one of those below: more prompts than rows, plain, compiled and hooked."""
    limit = 1e-5
    with built() as generator:
        wanted = generator.generate(PROMPTS, 4, seed=3, logprobs=True)
    with Pretend():
        for compile in (False, True):
            with built(device="cuda:1", compile=compile) as generator:
                assert same(generator.generate(PROMPTS, 4, seed=3, logprobs=True), wanted, limit)
        generator.model.norm.register_forward_hook(lambda *args: None)
        assert same(generator.generate(PROMPTS, 4, seed=3, logprobs=True), wanted, limit)


@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_call_equals_the_cpu_in_every_form(dtype: str, compile: bool) -> None:
    compare(1e-4 if dtype == "float32" else 0.15, dtype=dtype, compile=compile)


# Of a product, as a share of |x| |w| (their lengths): activations, scales and sums in bfloat16 round by 2^-9 each.
QUANTIZED_LIMIT = 0.01


class Checked:
    """A packed weight; each product with it is compared with the float32 product of what it unpacks to."""

    def __init__(self, packed: Any) -> None:
        self.packed, self.shape = packed, packed.shape
        self.dense = packed.dense().cpu().float()
        self.worst, self.products = 0.0, 0

    def __call__(self, x: Tensor) -> Tensor:
        y = self.packed(x)
        assert y.dtype == x.dtype and y.device == x.device
        wanted = x.cpu().float() @ self.dense.T
        lengths = x.cpu().float().norm(dim=-1, keepdim=True) * self.dense.norm(dim=-1)
        share = (y.cpu().float() - wanted).abs() / lengths.clamp(min=1e-30)
        self.worst, self.products = max(self.worst, float(share.max())), self.products + 1
        return y


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_every_product_of_a_quantized_model_is_that_of_its_weights(quantize: str) -> None:
    """Every public call on a pretend device, and the weights are the CPU's. Texts are not compared: rounded otherwise,
    they part from the CPU's sooner or later.
    """
    with built(quantize=quantize) as generator:
        wanted = {name: layer.packed.dense() for name, layer in linear_layers(generator.model)}
    with Pretend(), built(device="cuda:1", quantize=quantize) as generator:
        layers = dict(linear_layers(generator.model))
        for layer in layers.values():
            layer.packed = Checked(layer.packed)
        names = [name for name, _ in calls(generator)]
        checked = {name: layer.packed for name, layer in layers.items()}
    assert len(names) == 25
    for name, packed in checked.items():
        close(packed.dense, wanted[name], 0.01)
        assert packed.products > 100 and packed.worst < QUANTIZED_LIMIT, (name, packed.worst)


@pytest.mark.slow
@pytest.mark.parametrize("default", ["cuda:0", "cpu"])
def test_default_device_and_dtype_of_the_caller(default: str) -> None:
    """Every call on both devices, made within the caller's own defaults."""
    with built() as generator:
        wanted = dict(calls(generator))
    before = torch.get_default_dtype()
    with Pretend(), built(device="cuda:1") as on_cuda, built() as on_cpu:
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device(default):
                for generator in (on_cuda, on_cpu):
                    found = dict(calls(generator))
                    assert [name for name in wanted if not same(found[name], wanted[name], 1e-4)] == []
        finally:
            torch.set_default_dtype(before)


def test_a_seed_where_the_default_device_is_cuda(cuda: Pretend) -> None:
    with built(device="cuda") as generator:
        wanted = generator.generate(PROMPTS, 4, seed=3, repetition_penalty=1.1, logit_bias={5: 1.0})
        with torch.device("cuda"):
            assert generator.generate(PROMPTS, 4, seed=3, repetition_penalty=1.1, logit_bias={5: 1.0}) == wanted


# ----------------------------------------------------------------------------------- copies and waits

STEP = {"there: devices.py send": 1, "back: sampler.py sample": 1}  # all that may cross the bus in one decode step


def per_step(cuda: Pretend, generator: Llama, prompts: list[list[int]], **options: Any) -> dict[str, float]:
    """Copies and waits of each decode step: what two more tokens add, by two."""
    seen = []
    for count in (4, 6):
        torch.manual_seed(1)
        cuda.events.clear()
        generator.generate(prompts, count, **options)
        seen.append(Counter(cuda.events))
    seen[1].subtract(seen[0])
    return {event: count / 2 for event, count in seen[1].items() if count}


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "compiled"])
def test_one_copy_each_way_in_a_decode_step(cuda: Pretend, compile: bool) -> None:
    """Whatever the options; the allow-list is STEP."""
    every = {"repetition_penalty": 1.2, "presence_penalty": 0.1, "logit_bias": {5: 1.0}, "logprobs": True, "seed": 1}
    every |= {"top_logprobs": 3, "details": True, "top_k": 20, "min_p": 0.01, "temperature": 0.7}
    with built(device="cuda:1", compile=compile) as generator:
        for prompts in (PROMPTS[:3], [PROMPTS[0]] * 3):
            for options in (GREEDY, {"temperature": 0.7}, every):
                assert per_step(cuda, generator, prompts, **options) == STEP, options
            torch.manual_seed(1)
            token = generator.generate(prompts, 3, temperature=0.7)[0][0][2]
            assert per_step(cuda, generator, prompts, temperature=0.7, stop_ids=[token]) == STEP, "a row has finished"


def test_one_copy_each_way_in_the_published_schedule(cuda: Pretend) -> None:
    allowed = {"there: devices.py send": 1, "back: sampler.py sample": 1}
    with built(device="cuda:1") as generator:
        generator.model.norm.register_forward_hook(lambda *args: None)
        for options in (GREEDY, {"temperature": 0.7, "seed": 1, "logprobs": True}):
            assert per_step(cuda, generator, PROMPTS[:3], **options) == allowed


def test_a_prefill_waits_three_times_at_most(cuda: Pretend) -> None:
    """For its finite numbers, for all log-probabilities of all prompts and chunks, for the first tokens."""
    with built(device="cuda") as generator:
        cuda.events.clear()
        generator.generate(PROMPTS[:4], 1, **GREEDY, logprobs=True, echo=True, prefill_chunk=2)
        assert cuda.events == {
            "there: devices.py send": 1,
            "back: scheduler.py _check_finite": 1,
            "back: sampler.py read": 1,
            "back: sampler.py sample": 1,
        }


def test_a_decode_step_makes_no_row_numbers(cuda: Pretend) -> None:
    """`arange` runs as often with two layers as with one: positions once a step, rows never."""
    with built(device="cuda:1") as generator:
        counts = []
        for layers in (2, 1):
            generator.model.layers = generator.model.layers[:layers]
            seen = []
            for tokens in (4, 6, 8):
                before = cuda.ops["aten::arange"]
                generator.generate(PROMPTS[:3], tokens, **GREEDY)
                seen.append(cuda.ops["aten::arange"] - before)
            counts.append((seen[2] - seen[1]) / 2)
        assert counts[0] == counts[1] == 2, "positions of the tokens, and of the cache"


def test_ids_on_the_device_that_are_none_reach_no_kernel(cuda: Pretend) -> None:
    """Looking at them would wait: their logits are NaN; the other rows are as they were, and so is the process."""
    with built(device="cuda:1") as generator:
        good = torch.tensor([[1, 5], [1, 6]])
        wanted = generator.model(good.to("cuda:1"), 0)
        for bad in (generator.model.params.vocab_size, -1, 2**31 - 1):
            for start_pos in (0, torch.tensor([0, 0], device="cuda:1")):
                ids = good.clone()
                ids[1, 1] = bad
                there = ids.to("cuda:1")
                cuda.events.clear()
                logits = generator.model(there, start_pos)
                assert not [event for event in cuda.events if "_row_positions" not in event]
                logits = logits.cpu()
                assert logits[1, 1].isnan().all() and torch.equal(logits[0], wanted.cpu()[0])
                with pytest.raises(LlamaError, match="ids go from 0"):
                    generator.model(ids, start_pos)
        assert torch.equal(generator.model(good.to("cuda:1"), 0).cpu(), wanted.cpu())


def test_positions_on_the_device_are_looked_at_once(cuda: Pretend) -> None:
    with built(device="cuda") as generator:
        ids, positions = torch.tensor([[5], [6]], device="cuda"), torch.tensor([3, 0], device="cuda")
        cuda.events.clear()
        generator.model(ids, positions)
        assert cuda.events == {"back: model.py _row_positions": 1}


def test_the_allow_list_fails_when_a_wait_is_added(cuda: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    from llama.engine.scheduler import Scheduler

    original = Scheduler._head

    def waiting(self: Scheduler, h: Tensor) -> Tensor:
        logits = original(self, h)
        assert bool(logits.isfinite().all())
        return logits

    monkeypatch.setattr(Scheduler, "_head", waiting)
    with built(device="cuda") as generator:
        assert per_step(cuda, generator, PROMPTS[:3], **GREEDY) != STEP


@pytest.mark.parametrize(
    ("options", "message"),
    [({"logit_bias": dict.fromkeys(range(512), -math.inf)}, "no token"), ({"frequency_penalty": 1e38}, None)],
)
def test_no_request_reaches_a_device_side_assert(cuda: Pretend, options: dict[str, Any], message: str | None) -> None:
    with built(device="cuda") as generator:
        vocab = generator.model.params.vocab_size
        options = {name: {k: v for k, v in value.items() if k < vocab} if isinstance(value, dict) else value
                   for name, value in options.items()}  # fmt: skip
        for seed in (None, 1):
            try:
                generator.generate(PROMPTS[:2], 6, 0.7, seed=seed, **options)
            except LlamaError as error:
                assert message is not None and message in str(error)
        generator.model.norm.weight.data[:] = math.nan
        with pytest.raises(LlamaError, match="NaN"):
            generator.generate(PROMPTS[:2], 2)


def test_a_pretend_device_knows_what_cuda_refuses(cuda: Pretend) -> None:
    x = torch.ones(3, device="cuda")
    for work in (lambda: x + torch.ones(3), lambda: x + torch.ones(3, device="cuda:1"), x.numpy):
        with pytest.raises((RuntimeError, TypeError)):
            work()
    with pytest.raises(DeviceAssert):
        torch.multinomial(x * math.nan, 1)
    assert (x + torch.tensor(1.0)).device == torch.device("cuda", 0) and x.to("cuda:1").device.index == 1


# --------------------------------------------------------------------------------------------- graphs


def test_graphs_of_two_devices_in_turn(cuda: Pretend) -> None:
    """A capture is on the model's own device, whichever is current and whichever came first."""
    with built() as generator:
        wanted = generator.generate(PROMPTS, 6, **GREEDY)
    with built(device="cuda:0", compile=True) as one, built(device="cuda:1", compile=True) as two:
        torch.cuda.set_device(0)
        for generator in (one, two, one):
            assert generator.generate(PROMPTS, 6, **GREEDY) == wanted
        assert (
            len(cuda.pools) == 4 and len(set(map(id, cuda.pools))) == 2
        )  # one memory pool for each generator's graphs


def test_graphs_are_captured_anew_where_memory_is_replaced(cuda: Pretend) -> None:
    with built(device="cuda:1") as eager, built(device="cuda:1", compile=True) as generator:
        generator.generate(PROMPTS[:2], 3, **GREEDY)
        captured = len(cuda.pools)
        generator.generate(PROMPTS[:2], 3, **GREEDY)
        assert len(cuda.pools) == captured
        for attention in generator.model.attentions():
            attention.cache_k = attention.cache_k.clone()
        assert generator.generate(PROMPTS[:2], 3, **GREEDY) == eager.generate(PROMPTS[:2], 3, **GREEDY)
        for each in (eager, generator):
            weight = each.model.layers[1].feed_forward.w1.weight
            weight.data = weight.data * -1.5
        assert generator.generate(PROMPTS[:2], 3, **GREEDY) == eager.generate(PROMPTS[:2], 3, **GREEDY)
        for each in (eager, generator):
            each.model.layers[0].attention.wo.weight = torch.nn.Parameter(each.model.layers[1].attention.wo.weight.data)
        assert generator.generate(PROMPTS[:2], 3, **GREEDY) == eager.generate(PROMPTS[:2], 3, **GREEDY)
        assert len(cuda.pools) == 4 * captured


def test_graphs_are_dropped_at_close(cuda: Pretend) -> None:
    generator = build_golden(device="cuda:1", backend="gloo", compile=True)
    wanted = generator.generate(PROMPTS, 4, **GREEDY)
    decoder = generator.decoder
    assert decoder is not None and decoder._graphs
    generator.close()
    assert not decoder._graphs
    assert generator.generate(PROMPTS, 4, **GREEDY) == wanted  # captured anew


def test_graphs_are_in_the_forecast(cuda: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that holds the model and its cache, but not what `compile=True` may capture."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (20 << 20, 20 << 20))
    with built(device="cuda:1"):
        pass
    with pytest.raises(LlamaError, match=r"\+ CUDA graphs 3\d\.\d+ MB \(compile=True\) = "):
        build_golden(device="cuda:1", backend="gloo", compile=True)


def test_the_forecast_knows_every_graph(cuda: Pretend) -> None:
    """By the decoder's own rule for rows and lengths, and its bytes at the 7b shape by hand."""
    params = dict(dim=4096, n_layers=32, n_heads=32, n_kv_heads=None, vocab_size=32000, multiple_of=256)  # noqa: C408
    for rows, window in ((1, 8), (4, 256), (6, 300), (5, 1000), (32, 4096)):
        decoder: Any = StaticDecoder.__new__(StaticDecoder)
        decoder.model = SimpleNamespace(params=SimpleNamespace(max_batch_size=rows, max_seq_len=window))
        decoder._device = torch.device("cuda", 1)
        shapes = {decoder._bucket(n, length) for n in range(1, rows + 1) for length in range(1, window + 1)}
        assert sorted(graph_rows(decoder._device, rows, window)) == sorted(n for n, _ in shapes)
        assert graph_rows(torch.device("cpu"), rows, window) == []
    found = graph_memory({**params, "ffn_dim_multiplier": None}, 1, torch.bfloat16, [1, 2])
    assert found == 4 * 32000 * 3 + 2 * 2 * (32000 + 4 * 4096 + 3 * 11008) + 2**25


def test_int8_is_compiled_with_what_fuses_it(cuda: Pretend) -> None:
    for quantize, tuned in ((None, False), ("int8", True), ("int4", True)):  # int4's head is int8
        cuda.compiled.clear()
        with built(device="cuda", compile=True, quantize=quantize) as generator:
            generator.generate(PROMPTS[:1], 2, **GREEDY)
        assert [options.get("coordinate_descent_tuning", False) for options in cuda.compiled] == [tuned]


# ------------------------------------------------------------------------------------ devices, dtypes, int4


def test_the_current_device_is_ours_until_close(cuda: Pretend) -> None:
    with built(device="cuda:1"):
        assert torch.cuda.current_device() == 1
        with built(device="cuda:0"):
            assert torch.cuda.current_device() == 0
    assert torch.cuda.current_device() == 0
    with built(device="cuda:1"):
        torch.cuda.set_device(0)
        torch.cuda.set_device(1)
    assert torch.cuda.current_device() == 0
    torch.cuda.set_device(1)
    with built(device="cuda:0"):
        torch.cuda.set_device(1)  # the caller's own choice stays
    assert torch.cuda.current_device() == 1


def test_a_failed_start_puts_the_device_back(cuda: Pretend) -> None:
    with pytest.raises(LlamaError, match="model_parallel_size"):
        initialize_groups(3, torch.device("cuda", 1), "gloo")
    assert torch.cuda.current_device() == 0


def test_local_rank_picks_the_device(cuda: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pick_device(None) == pick_device("cuda") == torch.device("cuda", 1) and pick_device("cuda:0").index == 0


@pytest.mark.parametrize("native", [True, False])
def test_bfloat16_only_where_it_is_not_emulated(native: bool) -> None:
    with Pretend(has_bfloat16=native):
        assert pick_dtype(None, torch.device("cuda", 1)) == (torch.bfloat16 if native else torch.float16)
        assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("k", [352, 288, 1376, 2752, 128, 64])
@pytest.mark.parametrize("kernel", [True, False], ids=["", "no kernel"])
def test_int4_on_cuda(k: int, kernel: bool) -> None:
    """Rows of any multiple of 32, few and many rows of x, the weight itself; by torch's kernel and without."""
    generator = torch.Generator().manual_seed(k)
    weight = torch.randn(77, k, generator=generator)
    wanted = dequantize(*quantize_int4(weight))
    with Pretend(has_bfloat16=kernel) as cuda:
        packed = pack(weight.to("cuda:1"), "int4")
        close(packed.dense().cpu(), wanted, 0.02)
        for rows in (1, 3, 100):
            x = torch.randn(rows, k, generator=generator)
            y = packed(x.to("cuda:1"))
            assert y.dtype == torch.float32 and y.shape == (rows, 77)
            close(y.cpu() / k**0.5, x @ wanted.T / k**0.5, 0.05)
        assert ("aten::_weight_int4pack_mm" in cuda.ops) == kernel


# ---------------------------------------------------------------------------------------------- ranks


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_use_their_own_device(ranks: int, tmp_path: Path) -> None:
    """Pretend nccl refuses a collective where another device is current (helpers_cuda_ranks.py)."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    script = str(ROOT / "tests" / "helpers_cuda_ranks.py")
    done = subprocess.run([*argv, script], env=env, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr.count("all checks passed") == ranks


@pytest.mark.slow
def test_the_gpu_check_runs_from_end_to_end(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHON": f"{sys.executable} {ROOT / 'tests' / 'simcuda.py'}", "OMP_NUM_THREADS": "1"}
    env |= {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))), "SHAPE": "15m", "QUICK": "1", "GPUS": "1"}
    done = subprocess.run(
        [str(ROOT / "benchmarks" / "gpu_check.sh")], env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("ok ") == 10 and "BAD" not in done.stdout
    assert "pretend CUDA device" in done.stdout
