"""Run on every rank by tests/test_ranks.py: `helpers_ranks.py FOLDER CHECK...`, a record of each check to FOLDER.

A record is {"value": what the check returned} or {"error": a traceback}, written as soon as the check ends.
"""

import contextlib
import io
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_files
import lora_files
import reference
import torch
import torch.distributed as dist
from fairscale.nn.model_parallel import initialize as fairscale
from fairscale.nn.model_parallel.layers import ColumnParallelLinear
from helpers import GOLDEN, build_golden, close, feed, near
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from llama import Llama, LlamaError, ModelArgs, Transformer
from llama import distributed as parallel
from llama.chat import TemplateFormat
from llama.checkpoint import load, open_checkpoint

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
CHECKS: dict[str, Callable[[], Any]] = {}
# sizes in which no part of one matrix, cut for 2 or 4 ranks, has the shape of another whole one
GQA: dict[str, Any] = {"dim": 48, "n_layers": 2, "n_heads": 12, "n_kv_heads": 4, "vocab_size": 360, "multiple_of": 16}
GQA |= {"norm_eps": 1e-5, "rope_theta": 500000.0}
PROMPTS = [[1, 20, 30, 40], [1, 50, 60, 70, 80, 90, 100, 110, 33], [1, 7]]


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS[function.__name__] = function
    return function


def build(**changes: Any) -> Llama:
    folder = os.environ.get("CKPT_DIR", str(GOLDEN))  # the same weights, perhaps in several files
    return build_golden(**{"timeout": 30, "ckpt_dir": folder, **changes})


def build_gqa(**changes: Any) -> Llama:
    """The grouped-query checkpoint that the test has written as one file."""
    return build(ckpt_dir=str(FOLDER / "gqa"), **changes)


def golden() -> dict[str, Any]:
    return torch.load(GOLDEN / "golden.pt", weights_only=True)  # type: ignore[no-any-return]


def golden_greedy(generator: Llama) -> bool:
    """Whether the published text comes, as far as four tokens show it; `greedy` looks at all of it."""
    found = generator.generate(golden()["prompts"], 4, temperature=0)[0]
    return bool(found == [tokens[:4] for tokens in golden()["greedy"]])


# ------------------------------------------------------------------------------------- same results


@check
def greedy() -> Any:
    """The published tokens and log-probabilities, ours and as watched."""
    with build() as generator:
        for _ in range(2):
            tokens, logprobs = generator.generate(golden()["prompts"], 12, temperature=0, logprobs=True, echo=True)
            assert tokens == golden()["echo"]
            for found, wanted in zip(logprobs, golden()["echo_lp"], strict=True):
                near(found, wanted)
            generator.model.layers[1].register_forward_hook(lambda *args: None)
    return tokens


@check
def logits() -> None:
    with build() as generator:
        close(generator.model(golden()["x"], 0), golden()["logits_full"], 1e-4)
        close(feed(generator.model, golden()["x"][:, :10], [5, 4, 1]), golden()["logits_chunks"], 1e-4)


@check
def grouped() -> Any:
    """Grouped-query attention, more prompts than rows, one position per row: the oracle's tokens."""
    weights = reference.random_weights(GQA, 3)
    with build_gqa(max_batch_size=2) as generator:
        generator.tokenizer.eos_id = None
        tokens, _ = generator.generate(PROMPTS, 10, temperature=0)
        assert tokens == [reference.greedy(weights, GQA, prompt, 10) for prompt in PROMPTS]
        model = generator.model
        model(torch.tensor([PROMPTS[1], PROMPTS[0] + [0] * 5]), 0)
        found = model(torch.tensor([[5, 6], [7, 8]]), torch.tensor([9, 4]))
        for row, text in enumerate((PROMPTS[1] + [5, 6], PROMPTS[0] + [7, 8])):
            close(found[row], reference.logits(weights, GQA, torch.tensor([text]))[0, -2:])
    return tokens


@check
def sampled() -> Any:
    """Every rank's generator is seeded differently; the first rank's draws count, and all generators advance alike."""
    with build(seed=5 + 100 * RANK) as generator:
        first = generator.generate([golden()["prompts"][1]], 16, temperature=0.9, top_p=0.8)[0]
        assert first == golden()["one_sampled"]
        torch.manual_seed(7 + RANK)
        ragged = generator.generate(golden()["prompts"], 8, temperature=1.2, top_p=0.95, logprobs=True)
        torch.manual_seed(8)
        generator.generate(golden()["prompts"], 8, temperature=1.2, top_p=0.95)
        state = torch.get_rng_state().sum().item()
        generator.model.layers[1].register_forward_hook(lambda *args: None)
        torch.manual_seed(7 + RANK)
        watched = generator.generate(golden()["prompts"], 8, temperature=1.2, top_p=0.95)[0]
    return [first, ragged[0], watched, state]


@check
def completions() -> Any:
    with build() as generator:
        text = generator.text_completion(["river stone", "the cold night"], temperature=0, max_gen_len=10)
        assert text == [{"generation": found["generation"]} for found in golden()["text"]]
        dialog: Any = [{"role": "system", "content": "be small"}, {"role": "user", "content": "bird?"}]
        assert generator.chat_completion([dialog], temperature=0, max_gen_len=9) == golden()["chat"][:1]
        pieces = list(generator.stream_text("river stone", temperature=0, max_gen_len=10))
        assert "".join(pieces) == golden()["text"][0]["generation"]
    return text


@check
def chat_by_template() -> Any:
    """A checkpoint's own template, rendered by each rank for itself."""
    template = "{% for m in messages %}{{ bos_token + m.role + ': ' + m.content }}{% endfor %}"
    dialog: Any = [{"role": "user", "content": "bird </s>"}]
    with build() as generator:
        generator.chat_format = TemplateFormat(template, generator.tokenizer)
        return generator.chat_completion([dialog], temperature=0, max_gen_len=9)


@check
def gradients() -> None:
    """Through the blocks over several ranks: each shard's gradient is its slice of the oracle's."""
    weights = {name: weight.requires_grad_() for name, weight in reference.random_weights(GQA, 3).items()}
    tokens = torch.tensor([PROMPTS[1]])
    loss = torch.nn.functional.cross_entropy(reference.logits(weights, GQA, tokens)[0, :-1], tokens[0, 1:])
    wanted = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    with build_gqa() as generator:
        model, seqlen = generator.model, tokens.shape[1]
        for _ in range(2):
            model.zero_grad()
            h = model.tok_embeddings(tokens)
            mask = torch.full((seqlen, seqlen), float("-inf")).triu(1)
            for layer in model.layers:
                h = layer(h, 0, model.freqs_cis[:seqlen], mask)
            logits = model.output(model.norm(h)).float()
            torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]).backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                close(parameter.grad, part(name, wanted[name], fairscale.get_model_parallel_rank()), 1e-5)


def part(name: str, whole: Tensor, rank: int, ranks: int = WORLD) -> Tensor:
    """A rank's slice of a weight: rows of what is column parallel, columns of what is row parallel, all of a norm."""
    if whole.ndim == 1:
        return whole
    axis = 1 if any(key in name for key in ("wo", "w2", "tok_embeddings")) else 0
    return whole.chunk(ranks, dim=axis)[rank]


@check
def shards() -> Any:
    """The weights, attributes and caches of this rank."""
    whole = torch.load(GOLDEN / "consolidated.00.pth", weights_only=True)
    with build() as generator:
        for name, weight in generator.model.state_dict().items():
            assert torch.equal(weight, part(name, whole[name], RANK)), name
        attention = generator.model.layers[0].attention
        assert (attention.n_kv_heads, attention.n_local_heads, attention.n_local_kv_heads) == (
            4,
            4 // WORLD,
            4 // WORLD,
        )
        assert attention.cache_k.shape == (4, 48, 4 // WORLD, 16)
        assert list(generator.model.state_dict()) == list(reference.shapes({**GQA, "n_kv_heads": 8}))
        return fairscale.get_model_parallel_rank()


@check
def every_checkpoint() -> Any:
    """One model in Meta's files (1, 2, 4 and 8), Hugging Face's and llama2.c's, and one with biases and wider heads,
    loaded on all ranks: the oracle's logits.
    """
    tokens = torch.arange(24).reshape(2, 12) % 48
    wanted = {
        kind: reference.logits(checkpoint_files.weights(params), params, tokens)
        for kind, params in (("wide", checkpoint_files.WIDE), ("biased", checkpoint_files.BIASED))
    }
    groups = parallel.initialize_groups(None, torch.device("cpu"), "gloo", 60)
    paths = sorted((FOLDER / "checkpoints").iterdir())
    for path in paths:
        checkpoint = open_checkpoint(path)
        rows = checkpoint.shape("tok_embeddings.weight")[0]
        sizes = {"vocab_size": rows, "max_seq_len": 24, "max_batch_size": 3}
        model = Transformer(ModelArgs(**{**checkpoint.params, **sizes}))
        load(model, checkpoint, rank=parallel.rank(), world=parallel.world_size())
        close(model(tokens, 0), wanted["biased" if "biased" in path.name else "wide"], 1e-5)
    groups.close()
    return [path.name for path in paths]


@check
def adapters() -> Any:
    """Two of LoRA's over every checkpoint: the oracle's logits of the merged weights. The tokens of `build` with one."""
    tokens, kinds = torch.arange(24).reshape(2, 12) % 48, (*lora_files.LINEAR, "embed_tokens", "lm_head")
    wanted, both = {}, {}
    for kind, params in (("wide", checkpoint_files.WIDE), ("biased", checkpoint_files.BIASED)):
        weights, folder = checkpoint_files.weights(params), FOLDER / f"adapters of {RANK}" / kind
        first = lora_files.matrices(weights, kinds)
        second = lora_files.matrices(weights, ["q_proj", "k_proj", "o_proj"], rank=3, seed=8)
        once = lora_files.merged(weights, first, params, 4.0)
        wide = {name: tensor.double() for name, tensor in lora_files.merged(once, second, params, 4.0).items()}
        wanted[kind] = reference.logits(wide, params, tokens)
        written = lora_files.write_adapter(folder / "2", second, r=3, lora_alpha=12)
        both[kind] = [lora_files.write_adapter(folder / "1", first), written]
    groups = parallel.initialize_groups(None, torch.device("cpu"), "gloo", 60)
    for path in sorted((FOLDER / "checkpoints").iterdir()):
        kind = "biased" if "biased" in path.name else "wide"
        checkpoint = open_checkpoint(path, both[kind])
        model = Transformer(
            ModelArgs(**{**checkpoint.params, "vocab_size": 48, "max_seq_len": 24, "max_batch_size": 3})
        )
        load(model, checkpoint, rank=parallel.rank(), world=parallel.world_size())
        close(model(tokens, 0), wanted[kind], 2e-4)
    groups.close()
    folder = FOLDER / f"adapters of {RANK}"
    opened = open_checkpoint(GOLDEN)
    held = {name: opened.read(name) for name in opened.names()}
    params = {**opened.params, "n_kv_heads": 4}
    adapter = lora_files.write_adapter(folder / "golden", lora_files.matrices(held, kinds))
    with build(lora=str(adapter), lora_scale=0.5) as generator:
        found = generator.generate(PROMPTS[:2], 8, temperature=0)[0]
    merged = lora_files.merged(held, lora_files.matrices(held, kinds), params, 2.0)
    assert found == [reference.greedy(merged, params, prompt, 8, eos_id=2) for prompt in PROMPTS[:2]], found
    return found


@check
def ranks_with_different_adapters() -> Any:
    """Another adapter, another scale, or none on the last rank alone: every rank says so."""
    opened = open_checkpoint(GOLDEN)
    held = {name: opened.read(name) for name in opened.names()}
    folder = FOLDER / f"other adapters of {RANK}"
    tensors = lora_files.matrices(held, ["q_proj"])
    same = str(lora_files.write_adapter(folder / "same", tensors))
    key = next(name for name in tensors if name.endswith("lora_B.weight"))
    tensors[key] = tensors[key].clone()
    tensors[key][-1, -1] += 1
    other = str(lora_files.write_adapter(folder / "other", tensors))
    last, errors = RANK == WORLD - 1, list[str]()
    for mine in ({"lora": other}, {"lora": same, "lora_scale": 0.5}, {}):
        try:
            build(**(mine if last else {"lora": same})).close()
        except LlamaError as error:
            errors.append(str(error))
    assert len(errors) == (3 if WORLD > 1 else 0), errors
    assert all("the adapters (lora)" in error and "1 with digest" in error for error in errors), errors
    return errors


# ---------------------------------------------------------------------------------------- allocations


class Allocations(TorchDispatchMode):
    """Notes the shape of whatever an operation newly allocates; views and writes in place are none."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and to say so to torch's compiler takes 2 s: it has to be imported

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        aliases = any(returned.alias_info is not None for returned in func._schema.returns)
        if isinstance(result, Tensor) and not aliases:
            self.shapes.add(tuple(result.shape))
        return result


@check
def allocations() -> Any:
    """No full weight matrix is ever allocated, by the constructor or by `build`; FairScale's own layer is seen to."""
    full = {shape for shape in reference.shapes(GQA).values() if len(shape) == 2}
    with build_gqa(max_seq_len=24, max_batch_size=2):
        with Allocations() as control:
            ColumnParallelLinear(48, 360, bias=False, gather_output=False)
        assert (360, 48) in control.shapes
        with Allocations() as made:
            Transformer(ModelArgs(**GQA, max_seq_len=24, max_batch_size=2))
        with Allocations() as built, build_gqa(max_seq_len=24, max_batch_size=2):
            pass
        with Allocations() as cast, build_gqa(max_seq_len=24, max_batch_size=2, dtype="bfloat16"):
            pass
    for name, found in (("constructor", made), ("build", built), ("build in bfloat16", cast)):
        assert (360, 48 // WORLD) in found.shapes, f"{name}: nothing was seen"
        assert not found.shapes & full, f"{name} allocates {found.shapes & full}"
    return max(torch.Size(shape).numel() for shape in made.shapes)


# ------------------------------------------------------------------------------------ groups come and go


@check
def muting() -> None:
    """Later ranks are silent on stdout until close, never on stderr."""
    before = sys.stdout
    generator = build()
    sys.stdout.write(f"while open, rank {RANK}\n")  # one write a line, since all ranks share the pipe
    sys.stderr.write(f"stderr, rank {RANK}\n")
    assert RANK == 0 or sys.stdout is not before
    generator.close()
    assert sys.stdout is before
    sys.stdout.write(f"after close, rank {RANK}\n")
    with build(), contextlib.redirect_stdout(io.StringIO()) as mine:  # the caller's own redirection is left alone
        generator = build()
        generator.close()
        print("kept")
    assert "kept" in mine.getvalue() and sys.stdout is before
    generator = build()
    sys.stdout = mine
    generator.close()
    print("kept too")
    sys.stdout = before
    assert "kept too" in mine.getvalue()


@check
def three_builds() -> None:
    stdout = sys.stdout
    for _ in range(2):
        with build() as generator:
            assert golden_greedy(generator)
        assert not dist.is_initialized() and not fairscale.model_parallel_is_initialized()
    first, second = build(), build_gqa()
    first.close()
    first.close()
    assert second.generate(PROMPTS, 5, temperature=0)[0] and golden_greedy(first)
    third = build()
    second.close()
    assert golden_greedy(third) and dist.is_initialized()
    assert RANK == 0 or sys.stdout is not stdout
    third.close()
    assert not dist.is_initialized() and sys.stdout is stdout


@check
def a_build_while_the_first_rank_still_closes() -> None:
    """The later ranks are quick: they ask for the next group while the first is taking down the old one."""
    original = dist.destroy_process_group

    def slow() -> None:
        time.sleep(0.3 * (RANK == 0))
        original()

    dist.destroy_process_group = slow
    try:
        for _ in range(2):
            with build() as generator:
                assert golden_greedy(generator)
    finally:
        dist.destroy_process_group = original


def own_group(name: str) -> None:
    """A group of the caller's own making, at a place of its own: a launcher's store serves only one group per process."""
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/{name}", rank=RANK, world_size=WORLD)


@check
def callers_process_group() -> None:
    own_group("gloo")
    for _ in range(2):
        with build() as generator:
            assert golden_greedy(generator)
        assert dist.is_initialized() and not fairscale.model_parallel_is_initialized()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == WORLD
    dist.barrier()
    dist.destroy_process_group()


@check
def callers_process_group_from_the_environment() -> None:
    """At the very place where earlier builds met; once, since a launcher's store keeps what a group wrote."""
    if WORLD > 1:
        dist.init_process_group("gloo")
        with build() as generator:
            assert golden_greedy(generator)
        assert dist.is_initialized()
        dist.barrier()
        dist.destroy_process_group()
    with build() as generator:
        assert golden_greedy(generator)


@check
def callers_fairscale_groups() -> None:
    with contextlib.redirect_stdout(sys.stderr):
        own_group("fairscale")
        fairscale.initialize_model_parallel(WORLD)
    with build() as generator:
        assert golden_greedy(generator)
        try:
            build(model_parallel_size=8)
        except LlamaError as error:
            assert "8" in str(error) and str(WORLD) in str(error)
        else:
            raise AssertionError("the caller's groups have another size")
    assert dist.is_initialized() and fairscale.get_model_parallel_world_size() == WORLD
    with build() as generator:
        assert golden_greedy(generator)
    fairscale.destroy_model_parallel()
    dist.barrier()
    dist.destroy_process_group()


@check
def smaller_models_side_by_side() -> Any:
    """model_parallel_size=1 on several ranks: each holds a whole model; only the first of all is heard."""
    before = sys.stdout
    with build(model_parallel_size=1) as generator:
        assert golden_greedy(generator)
        assert generator.model.layers[0].attention.wq.weight.shape == (64, 64)
        assert RANK == 0 or sys.stdout is not before
    if WORLD == 4:
        with build(model_parallel_size=2, seed=RANK) as generator:
            assert golden_greedy(generator)
            assert generator.model.layers[0].attention.wq.weight.shape == (32, 64)
            return generator.generate(PROMPTS, 12, temperature=1.0)[0]
    return None


# ------------------------------------------------------------------------------------------- errors


def timed_error(**changes: Any) -> str:
    """The message of a build that must fail within 10 s; the next one works."""
    start = time.monotonic()
    try:
        build(**changes)
    except (LlamaError, FileNotFoundError) as error:
        assert time.monotonic() - start < 10, "it took 10 s"
        message = str(error)
    else:
        raise AssertionError(f"{changes} was accepted")
    with build() as generator:
        assert golden_greedy(generator)
    return message


@check
def wrong_rank_count() -> Any:
    return timed_error(model_parallel_size=3)


@check
def a_rank_that_cannot_load() -> Any:
    missing = str(FOLDER / "nowhere")
    return timed_error(**({"ckpt_dir": missing} if RANK == WORLD - 1 else {}))


@check
def no_rank_can_load() -> Any:
    return timed_error(ckpt_dir=str(FOLDER / "nowhere"))


@check
def kv_heads_that_do_not_divide() -> Any:
    """A checkpoint with 1 key/value head (4 query heads)."""
    return timed_error(ckpt_dir=str(FOLDER / "mqa"))


@check
def one_prompt_that_is_wrong() -> Any:
    with build() as generator:
        try:
            generator.generate([[1], [360]], 4)
        except LlamaError as error:
            assert golden_greedy(generator)
            return str(error)
    raise AssertionError("id 360 was accepted")


@check
def broken_weights_on_one_rank() -> Any:
    with build() as generator:
        before = generator.model.output.weight.data.clone()
        if RANK == WORLD - 1:
            generator.model.output.weight.data[3] = float("nan")
        try:
            generator.generate(golden()["prompts"], 4)
        except LlamaError as error:
            generator.model.output.weight.data = before
            assert golden_greedy(generator)
            return str(error)
    raise AssertionError("NaN was accepted")


@check
def environment() -> None:
    before = dict(os.environ)
    with build() as generator:
        assert dict(os.environ) == before
        assert golden_greedy(generator)
    assert dict(os.environ) == before
    assert torch.get_default_dtype() == torch.float32 and torch.empty(0).device.type == "cpu"


@check
def timeout_of_the_models_group() -> None:
    """That of `build`, without a warning and without torch's private function, which warns from 2.14 on."""
    private = dist.distributed_c10d._set_pg_timeout
    dist.distributed_c10d._set_pg_timeout = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for size in (WORLD, 2) if WORLD == 4 else (WORLD,):
                with build(timeout=77, model_parallel_size=size):
                    group = fairscale.get_model_parallel_group()
                    assert dist.get_process_group_ranks(group) == [RANK // size * size + i for i in range(size)]
                    if size > 1:
                        assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 77
    finally:
        dist.distributed_c10d._set_pg_timeout = private


# --------------------------------------------------------------------- what ends the process: the last of a start


@check
def crash_while_loading() -> None:
    """Nobody catches the error of the last rank."""
    if RANK == WORLD - 1:
        note_the_end()
    build(**({"ckpt_dir": str(FOLDER / "nowhere")} if RANK == WORLD - 1 else {}))


@check
def crash_while_generating() -> None:
    """The last rank raises in the middle of a text, while the others wait for it."""
    with build() as generator:
        generator.model.layers[0].register_forward_hook(at_step(5, raise_error))
        generator.generate(golden()["prompts"], 12)


@check
def vanish_while_generating() -> None:
    """The last rank is gone without a word."""
    with build() as generator:
        generator.model.layers[0].register_forward_hook(at_step(5, lambda: os._exit(3)))
        generator.generate(golden()["prompts"], 12)


def raise_error() -> None:
    raise RuntimeError("a rank failed on purpose")


def note_the_end() -> None:
    (FOLDER / "ended_at").write_text(str(time.time()))


def at_step(step: int, end: Callable[[], Any]) -> Callable[..., None]:
    """A hook that ends the last rank in its n-th call; all ranks have it, so that all run the same schedule."""
    count = [0]

    def hook(*args: Any) -> None:
        count[0] += 1
        if count[0] == step and RANK == WORLD - 1:
            note_the_end()
            end()

    return hook


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names:
        if name.startswith(("crash", "vanish")):
            CHECKS[name]()
            continue
        start = time.monotonic()
        try:
            record = {"value": CHECKS[name](), "seconds": time.monotonic() - start}
        except BaseException:
            record = {"error": traceback.format_exc()}
        (FOLDER / f"{name}.{RANK}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main(sys.argv[2:])
