"""How fast we are beside `transformers` on the same weights: python benchmarks/generate.py --shape 1b --compare hf

    --compare hf      A B A B in one process; ratios above 1 mean that ours is faster
    --compare forms   ours in its own dtype, int8, int4 and int8-dynamic, in turn
    --plot FILE.png   decode speed over context length, and over rows
    --quick           under a minute: ours against transformers at 15m, beside the ratio of the last such run
    --quality         what int8 and int4 cost the demo model and random 1b weights (agreement, KL divergence, loss)

Everything else is `python -m llama bench`, whose options (shape, dtype, batches, prompt, tokens, trials, quantize,
compile) are taken here too. Weights are random; the last line is JSON.
"""

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fire
import torch
import torch.nn.functional as F

from llama import Llama
from llama import distributed as parallel
from llama.checkpoint.checkpoint import pairs_to_halves
from llama.checkpoint.convert import DTYPES
from llama.cli.bench import (
    machine,
    matrices_alone,
    one_trial,
    random_model,
    read_rate,
    row_counts,
    step_at,
    step_bytes,
)

RESULTS = Path(__file__).resolve().parent / "results"
ROOT = Path(__file__).resolve().parent.parent


# ------------------------------------------------------------------------------------- transformers


def transformers_twin(model: Any, attention: str) -> Any:
    """`transformers`' model on the very same weights, but for wq and wk, whose rows it has in another order."""
    from transformers import LlamaConfig, LlamaForCausalLM

    args = model.params
    config = LlamaConfig(
        hidden_size=args.dim,
        intermediate_size=model.layers[0].feed_forward.w1.weight.shape[0],
        num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_kv_heads,
        vocab_size=args.vocab_size,
        max_position_embeddings=args.max_seq_len,
        rms_norm_eps=args.norm_eps,
        attn_implementation=attention,
    )
    dtype = model.tok_embeddings.weight.dtype
    with torch.device("meta"):
        twin = LlamaForCausalLM(config)
    twin.model.rotary_emb = type(twin.model.rotary_emb)(config)  # its table has to be real
    names = {
        "self_attn.q_proj": lambda b: pairs_to_halves(b.attention.wq.weight, args.n_heads),
        "self_attn.k_proj": lambda b: pairs_to_halves(b.attention.wk.weight, args.n_kv_heads or args.n_heads),
        "self_attn.v_proj": lambda b: b.attention.wv.weight,
        "self_attn.o_proj": lambda b: b.attention.wo.weight,
        "mlp.gate_proj": lambda b: b.feed_forward.w1.weight,
        "mlp.up_proj": lambda b: b.feed_forward.w3.weight,
        "mlp.down_proj": lambda b: b.feed_forward.w2.weight,
        "input_layernorm": lambda b: b.attention_norm.weight,
        "post_attention_layernorm": lambda b: b.ffn_norm.weight,
    }
    state = {
        f"model.layers.{i}.{name}.weight": weight(block).detach()
        for i, block in enumerate(model.layers)
        for name, weight in names.items()
    }
    state |= {"model.embed_tokens.weight": model.tok_embeddings.weight.detach()}
    state |= {"model.norm.weight": model.norm.weight.detach(), "lm_head.weight": model.output.weight.detach()}
    twin.load_state_dict(state, assign=True)
    assert all(weight.dtype == dtype for weight in twin.parameters())
    return twin.eval()


@torch.no_grad()
def twin_trial(twin: Any, batch: int, prompt: int, tokens: int) -> tuple[float, float]:
    """As `one_trial`, with transformers' model called directly: `generate` would only add to its time."""
    from transformers import DynamicCache

    ids = torch.randint(3, twin.config.vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(1))
    cache = DynamicCache(config=twin.config)
    begin = time.perf_counter()
    newest = twin(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1)
    newest.tolist()
    first = time.perf_counter()
    for _ in range(tokens - 1):
        newest = twin(newest[:, None], past_key_values=cache).logits[:, -1].argmax(-1)
        newest.tolist()
    return first - begin, (time.perf_counter() - first) / (tokens - 1)


# -------------------------------------------------------------------------------------------- comparing


Trial = Callable[[int], tuple[float, float]]  # tokens to seconds of prefill and of a step


def in_turn(contenders: dict[str, Trial], tokens: int, trials: int) -> dict[str, tuple[float, float]]:
    """The medians of several trials of each, A B A B; the first round, of three tokens, does not count."""
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for trial in range(trials + 1):
        for name, run in contenders.items():
            runs[name].append(run(tokens if trial else 3))
    return {
        name: (statistics.median(first for first, _ in found[1:]), statistics.median(step for _, step in found[1:]))
        for name, found in runs.items()
    }


def versus(
    shape: str, dtype: torch.dtype, batches: list[int], prompt: int, tokens: int, trials: int, compile: bool
) -> dict[str, Any]:
    """Ours and transformers' in turn; transformers' time is the better of its eager and SDPA attention."""
    device = torch.device("cpu")
    window = prompt + tokens
    ours = random_model(shape, device, dtype, window, max(batches))
    twins = {attention: transformers_twin(ours.model, attention) for attention in ("sdpa", "eager")}
    contenders: dict[str, Any] = {"ours": ours}
    if compile:
        contenders["compiled"] = random_model(shape, device, dtype, window, max(batches), compile=True)
    rows = []
    for batch in batches:
        runs: dict[str, Trial] = {n: partial(one_trial, one, batch, prompt) for n, one in contenders.items()}
        runs |= {n: partial(twin_trial, twin, batch, prompt) for n, twin in twins.items()}
        middle = in_turn(runs, tokens, trials)
        best = tuple(min(middle[name][part] for name in twins) for part in (0, 1))
        for name in contenders:
            first, step = middle[name]
            rows.append(
                {
                    "who": name,
                    "batch": batch,
                    "prompt": prompt,
                    "prefill_s": first,
                    "step_s": step,
                    "hf_prefill_s": best[0],
                    "hf_step_s": best[1],
                    "prefill_ratio": best[0] / first,
                    "decode_ratio": best[1] / step,
                }
            )
            print(
                f"{shape} {name:<9} rows {batch:>3}  prompt {prompt:>5}: prefill {first * 1e3:8.1f} ms "
                f"({best[0] / first:.2f} x), step {step * 1e3:7.2f} ms ({best[1] / step:.2f} x)   "
                f"transformers {best[0] * 1e3:8.1f} ms, {best[1] * 1e3:7.2f} ms",
                flush=True,
            )
    report: dict[str, Any] = {"shape": shape, "dtype": str(dtype).removeprefix("torch."), "rows": rows}
    reading = read_rate(device)
    report["read_bytes_s"] = reading
    for name, generator in contenders.items():
        alone = matrices_alone(generator.model)
        report[f"{name}_alone_s"] = alone
        step = next((row["step_s"] for row in rows if row["who"] == name and row["batch"] == 1), None)
        if step:
            share = step_bytes(generator.model, 1, prompt) / step / reading
            print(f"{name}: matrices alone {alone * 1e3:.2f} ms, {alone / step:.0%} of the step; ", end="")
            print(f"{share:.0%} of the {reading / 1e9:.1f} GB/s that memory is read at")
    report["mv_alone_s"] = matrices_alone(ours.model, lambda layer, x: torch.mv(layer.weight, x[0]))
    print(f"torch.mv through the same weights alone: {report['mv_alone_s'] * 1e3:.2f} ms")
    report["compile_s"] = contenders["compiled"].decoder.seconds if compile else 0.0
    if compile:
        print(f"compiling took {report['compile_s']:.1f} s")
    return report


def versus_forms(
    shape: str, dtype: torch.dtype, batches: list[int], prompt: int, tokens: int, trials: int, compile: bool
) -> dict[str, Any]:
    """Our own forms of the same shape in turn; ratios are to the unquantized one, which is never compiled."""
    device, window = torch.device("cpu"), prompt + tokens
    schemes = (None, "int8", "int4", "int8-dynamic")
    makers = {
        scheme or "as stored": random_model(shape, device, dtype, window, max(batches), scheme) for scheme in schemes
    }
    if compile:
        for scheme in schemes:
            name = f"{scheme or 'as stored'} compiled"
            makers[name] = random_model(shape, device, dtype, window, max(batches), scheme, compile=True)
    rows = []
    for batch in batches:
        middle = in_turn({n: partial(one_trial, one, batch, prompt) for n, one in makers.items()}, tokens, trials)
        base = middle["as stored"]
        for name, (first, step) in middle.items():
            rows.append({"scheme": name, "batch": batch, "prefill_s": first, "step_s": step})
            print(f"{shape} {name:<22} rows {batch:>3}  prompt {prompt}: prefill {first * 1e3:8.1f} ms", end="")
            print(f" ({base[0] / first:.2f} x), step {step * 1e3:7.2f} ms ({base[1] / step:.2f} x)", flush=True)
    alone = {name: matrices_alone(generator.model) for name, generator in makers.items()}
    mv = matrices_alone(makers["as stored"].model, lambda layer, x: torch.mv(layer.weight, x[0]))
    print("matrices alone, ms:", ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in alone.items()), end="")
    print(f", torch.mv {mv * 1e3:.2f}")
    return {"shape": shape, "rows": rows, "alone_s": alone, "mv_alone_s": mv}


# ---------------------------------------------------------------------------------------------- quality


Text = tuple[list[int], list[int]]  # what is given, and what is to be told


@torch.no_grad()
def quality(generator: Llama, reference: Llama, texts: list[Text], prompts: list[list[int]]) -> dict[str, float]:
    """What a generator loses against another: loss on texts, KL divergence a token, and the greedy tokens that agree.

    The greedy tokens are the reference's own, 200 a prompt or until they end; agreement is counted where both saw the
    same tokens before, and separately how far a free run stays the same.
    """
    sums = {"loss": 0.0, "reference_loss": 0.0, "kl": 0.0, "tokens": 0.0}
    for lead, rest in texts:
        ids, wanted = torch.tensor([lead + rest[:-1]]), torch.tensor(rest)[:, None]
        theirs, ours = (F.log_softmax(g.model.forward(ids, 0)[0, len(lead) - 1 :], -1) for g in (reference, generator))
        sums["reference_loss"] -= float(theirs.gather(-1, wanted).sum())
        sums["loss"] -= float(ours.gather(-1, wanted).sum())
        sums["kl"] += float((theirs.exp() * (theirs - ours)).sum())
        sums["tokens"] += len(rest)
    agreed = compared = free = 0
    for prompt in prompts:
        [greedy], [mine] = (g.generate([prompt], 200, temperature=0)[0] for g in (reference, generator))
        chosen = generator.model.forward(torch.tensor([prompt + greedy]), 0)[0].argmax(-1).tolist()
        agreed += sum(a == b for a, b in zip(chosen[len(prompt) - 1 :], greedy, strict=False))
        compared += len(greedy)
        free += next(
            (n for n, (a, b) in enumerate(zip(greedy, mine, strict=False)) if a != b), min(len(greedy), len(mine))
        )
    count = sums["tokens"]
    return {
        "loss": sums["loss"] / count,
        "loss_change": sums["loss"] / sums["reference_loss"] - 1,
        "kl": sums["kl"] / count,
        "agreement": agreed / compared,
        "free_run": free / compared,
    }


def held_out_texts(tokenizer: Any) -> list[Text]:
    """Stories that the demo model was not trained on, drawn as tools/make_demo.py draws them, and held-out answers."""
    import random
    import sys

    sys.path.insert(0, str(ROOT / "tools"))
    import demo_text
    from make_demo import SEED, answer_pair

    draw = random.Random(SEED + 99)
    stories = [([1], tokenizer.encode(demo_text.story(draw), bos=False, eos=True)) for _ in range(60)]
    _, held, _, _ = demo_text.split(SEED)
    return stories + [answer_pair(tokenizer.sp_model, question, answer) for question, answer, _ in held]


def all_quality(shape: str = "1b") -> dict[str, Any]:
    """A table of what each scheme costs: on the demo model, and on random weights of a shape."""
    report: dict[str, Any] = {}
    demo = str(ROOT / "checkpoints" / "demo")
    build = {"ckpt_dir": demo, "tokenizer_path": None, "max_seq_len": 512, "max_batch_size": 1}
    with Llama.build(**build, dtype="bfloat16") as reference:
        texts = held_out_texts(reference.tokenizer)
        prompts = [
            reference.tokenizer.encode(text, bos=True, eos=False) for text in ("Once upon a time", "Lily", "One day")
        ]
        for scheme in ("int8", "int4", "int8-dynamic"):
            with Llama.build(**build, dtype="bfloat16", quantize=scheme) as generator:
                report[f"demo {scheme}"] = quality(generator, reference, texts, prompts)
    groups = parallel.initialize_groups(None, torch.device("cpu"), None, None)
    draw = torch.Generator().manual_seed(3)
    texts = [([1], torch.randint(3, 32000, (64,), generator=draw).tolist()) for _ in range(4)]
    torch.manual_seed(7)
    reference = random_model(shape, torch.device("cpu"), torch.bfloat16, 300, 1)
    for scheme in ("int8", "int4", "int8-dynamic"):
        torch.manual_seed(7)
        generator = random_model(shape, torch.device("cpu"), torch.bfloat16, 300, 1, scheme)
        report[f"random {shape} {scheme}"] = quality(generator, reference, texts, [[1, *texts[0][1][:7]]])
        del generator
    groups.close()
    print(f"{'':<24} {'loss':>8} {'change':>8} {'KL':>9} {'agree':>7} {'free run':>9}")
    for name, row in report.items():
        print(f"{name:<24} {row['loss']:>8.4f} {row['loss_change']:>+8.2%} {row['kl']:>9.5f}", end="")
        print(f" {row['agreement']:>7.1%} {row['free_run']:>9.1%}")
    return report


# ------------------------------------------------------------------------------------------ plot, quick


def draw(path: str, shape: str, dtype: torch.dtype, compile: bool) -> dict[str, Any]:
    """A PNG of decode speed over context length (one row) and over rows (128 positions)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    device = torch.device("cpu")
    lengths, rows = [16, 128, 512, 1024, 2048, 4000], [1, 2, 4, 8, 16, 32]
    generator = random_model(shape, device, dtype, 4096, 1, compile=compile)
    steps = [step_at(generator, length) for length in lengths]
    del generator
    generator = random_model(shape, device, dtype, 192, max(rows), compile=compile)
    speeds = []
    for count in rows:
        one_trial(generator, count, 128, 3)
        speeds.append(count / one_trial(generator, count, 128, 16)[1])
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(lengths, [1 / step for step in steps], marker="o")
    left.set(xlabel="position in the context", ylabel="tokens a second, one row", ylim=(0, None))
    right.plot(rows, speeds, marker="o")
    right.set(xlabel="rows", ylabel="tokens a second, all rows", ylim=(0, None), xlim=(0, None))
    name = str(dtype).removeprefix("torch.")
    figure.suptitle(f"{shape}, {name}{', compiled' if compile else ''}, {torch.get_num_threads()} threads")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    print(f"plot written to {path}")
    return {"lengths": lengths, "step_s": steps, "rows": rows, "tokens_s": speeds}


def check_quickly() -> dict[str, Any]:
    """Ours against transformers at 15m, compared with the last stored ratio: warns where it fell by over 15 %."""
    report = versus("15m", torch.float32, [1, 16], 64, 32, 5, False)
    ratios = {
        f"{part} {row['batch']}": row[f"{part}_ratio"] for row in report["rows"] for part in ("prefill", "decode")
    }
    path = RESULTS / "quick.json"
    before = json.loads(path.read_text(encoding="utf-8"))["ratios"] if path.exists() else {}
    for name, ratio in ratios.items():
        old = before.get(name)
        note = "" if old is None else f"   last time {old:.2f} x"
        warn = "" if old is None or ratio > 0.85 * old else "   WARNING: slower than it was"
        print(f"{name:<12} {ratio:.2f} x{note}{warn}")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"ratios": ratios, **machine(torch.device("cpu"))}, indent=1) + "\n", encoding="utf-8")
    return {"ratios": ratios, "before": before}


def main(
    shape: str = "15m",
    dtype: str = "float32",
    batches: Any = (1, 16),
    prompt: int = 128,
    tokens: int = 32,
    trials: int = 5,
    compile: bool = False,
    compare: str | None = None,
    plot: str | None = None,
    quick: bool = False,
    quality: bool = False,
) -> None:
    """See the top of this file."""
    if compare not in (None, "hf", "forms") or dtype not in DTYPES:
        raise SystemExit(f"compare={compare!r} must be hf or forms, dtype={dtype!r} one of {', '.join(DTYPES)}")
    kind = DTYPES[dtype]
    if quality:
        report = all_quality()
    elif quick or compare:
        groups = parallel.initialize_groups(None, torch.device("cpu"), None, None)
        against = versus_forms if compare == "forms" else versus
        report = (
            check_quickly() if quick else against(shape, kind, row_counts(batches), prompt, tokens, trials, compile)
        )
        groups.close()
    elif plot:
        groups = parallel.initialize_groups(None, torch.device("cpu"), None, None)
        report = draw(plot, shape, kind, compile)
        groups.close()
    else:
        raise SystemExit("nothing to do: give --compare hf, --plot FILE.png, --quick or --quality")
    print(json.dumps({**report, **machine(torch.device("cpu"))}))


if __name__ == "__main__":
    fire.Fire(main)
