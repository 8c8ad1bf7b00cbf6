"""How fast we are beside `transformers` on the same weights: python benchmarks/generate.py --shape 1b --compare hf

    --compare hf        A B A B in one process; ratios above 1 mean that ours is faster
    --compare schemes   ours in its own dtype, int8, int4 and int8-dynamic, in turn
    --plot FILE.png     decode speed over context length, and over rows
    --quick             under a minute: ours against transformers at 15m, beside the ratio of the last such run
    --quality           what the schemes cost the demo model and random 1b weights (agreement, KL divergence, loss)

The options of `python -m llama bench` (shape, dtype, batches, prompt, tokens, trials, compile) are taken here too.
Weights are random; the last line is JSON.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from llama import Llama
from llama.checkpoint.checkpoint import pairs_to_halves
from llama.cli.bench import (
    SHAPES,
    Times,
    machine,
    matrices_alone,
    median_times,
    one_trial,
    random_model,
    read_rate,
    row_counts,
    step_at,
    step_bytes,
)
from llama.distributed import pick_dtype
from llama.quantization import SCHEMES

CPU = torch.device("cpu")
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
def twin_trial(twin: Any, batch: int, prompt: int, tokens: int) -> Times:
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
    return Times(first - begin, (time.perf_counter() - first) / (tokens - 1))


# -------------------------------------------------------------------------------------------- comparing


Trial = Callable[[int], Times]  # of so many tokens


def in_turn(contenders: dict[str, Trial], tokens: int, trials: int) -> dict[str, Times]:
    """The medians of several trials of each, A B A B; the first round, of three tokens, does not count."""
    for run in contenders.values():
        run(3)
    rounds = [{name: run(tokens) for name, run in contenders.items()} for _ in range(trials)]
    return {name: median_times([one[name] for one in rounds]) for name in contenders}


def matrices_report(generators: dict[str, Llama], like: Llama) -> dict[str, Any]:
    """The matrices alone, of each generator and by `torch.mv` through the weights of `like`."""
    alone = {name: matrices_alone(generator.model) for name, generator in generators.items()}
    mv = matrices_alone(like.model, lambda layer, x: torch.mv(layer.weight, x[0]))
    print("matrices alone, ms:", ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in alone.items()), end="")
    print(f", torch.mv {mv * 1e3:.2f}")
    return {"alone_s": alone, "mv_alone_s": mv}


def compare_with_transformers(
    shape: str, dtype: torch.dtype, batches: list[int], prompt: int, tokens: int, trials: int, compile: bool
) -> dict[str, Any]:
    """Ours and transformers' in turn; transformers' time is the better of its eager and SDPA attention."""
    make = partial(random_model, shape, CPU, dtype, prompt + tokens, max(batches))
    ours = {"ours": make()} | ({"compiled": make(compile=True)} if compile else {})
    twins = {attention: transformers_twin(ours["ours"].model, attention) for attention in ("sdpa", "eager")}
    reading, rows = read_rate(CPU), []
    for batch in batches:
        runs: dict[str, Trial] = {name: partial(one_trial, one, batch, prompt) for name, one in ours.items()}
        runs |= {name: partial(twin_trial, twin, batch, prompt) for name, twin in twins.items()}
        medians = in_turn(runs, tokens, trials)
        hf = Times(*(min(medians[name][part] for name in twins) for part in (0, 1)))
        for name, generator in ours.items():
            prefill, step = medians[name]
            row = {"who": name, "batch": batch, "prompt": prompt, "prefill_s": prefill, "step_s": step}
            row |= {"hf_prefill_s": hf.prefill, "hf_step_s": hf.step}
            row |= {"prefill_ratio": hf.prefill / prefill, "decode_ratio": hf.step / step}
            row |= {"decode_share": step_bytes(generator.model, batch, prompt + tokens // 2) / step / reading}
            rows.append(row)
            print(f"{shape} {name:<9} rows {batch:>3}  prompt {prompt:>5}: prefill {prefill * 1e3:8.1f} ms", end="")
            print(f" ({row['prefill_ratio']:.2f} x), step {step * 1e3:7.2f} ms ({row['decode_ratio']:.2f} x,", end="")
            print(f" {row['decode_share']:.0%} of the limit)", end="")
            print(f"   transformers {hf.prefill * 1e3:8.1f} ms, {hf.step * 1e3:7.2f} ms", flush=True)
    print(f"limit: {reading / 1e9:.1f} GB/s read")
    report = {"shape": shape, "dtype": str(dtype).removeprefix("torch."), "rows": rows, "read_bytes_s": reading}
    report["compile_s"] = ours["compiled"].decoder.compile_seconds if compile else 0.0
    return report | matrices_report(ours, ours["ours"])


def compare_schemes(
    shape: str, dtype: torch.dtype, batches: list[int], prompt: int, tokens: int, trials: int, compile: bool
) -> dict[str, Any]:
    """Our own schemes of the same shape in turn; ratios are to the unquantized one, which is not compiled."""
    make = partial(random_model, shape, CPU, dtype, prompt + tokens, max(batches))
    generators = {
        f"{scheme or 'as stored'}{' compiled' if compiled else ''}": make(scheme=scheme, compile=compiled)
        for compiled in ((False, True) if compile else (False,))
        for scheme in (None, *SCHEMES)
    }
    rows = []
    for batch in batches:
        runs = {name: partial(one_trial, generator, batch, prompt) for name, generator in generators.items()}
        medians = in_turn(runs, tokens, trials)
        base = medians["as stored"]
        for name, (prefill, step) in medians.items():
            rows.append({"scheme": name, "batch": batch, "prefill_s": prefill, "step_s": step})
            print(f"{shape} {name:<22} rows {batch:>3}  prompt {prompt}: prefill {prefill * 1e3:8.1f} ms", end="")
            print(
                f" ({base.prefill / prefill:.2f} x), step {step * 1e3:7.2f} ms ({base.step / step:.2f} x)", flush=True
            )
    return {"shape": shape, "rows": rows} | matrices_report(generators, generators["as stored"])


# ---------------------------------------------------------------------------------------------- quality


Text = tuple[list[int], list[int]]  # a prompt, and what is to follow it


@torch.no_grad()
def quality(generator: Llama, reference: Llama, texts: list[Text], prompts: list[list[int]]) -> dict[str, float]:
    """What a generator loses against another: loss on texts, KL divergence per token, and the greedy tokens that agree.

    The greedy tokens are the reference's own, 200 per prompt or until they end; agreement is counted where both saw the
    same tokens before, and separately how far a free run stays the same.
    """
    sums = {"loss": 0.0, "reference_loss": 0.0, "kl": 0.0, "tokens": 0.0}
    for prompt, rest in texts:
        ids, wanted = torch.tensor([prompt + rest[:-1]]), torch.tensor(rest)[:, None]
        theirs, ours = (
            F.log_softmax(g.model.forward(ids, 0)[0, len(prompt) - 1 :], -1) for g in (reference, generator)
        )
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
        for scheme in SCHEMES:
            with Llama.build(**build, dtype="bfloat16", quantize=scheme) as generator:
                report[f"demo {scheme}"] = quality(generator, reference, texts, prompts)
    draw = torch.Generator().manual_seed(3)
    texts = [([1], torch.randint(3, 32000, (64,), generator=draw).tolist()) for _ in range(4)]
    make = partial(random_model, shape, CPU, torch.bfloat16, 300, 1)
    torch.manual_seed(7)
    reference = make()
    for scheme in SCHEMES:
        torch.manual_seed(7)
        generator = make(scheme=scheme)
        report[f"random {shape} {scheme}"] = quality(generator, reference, texts, [[1, *texts[0][1][:7]]])
        del generator
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

    lengths, rows = [16, 128, 512, 1024, 2048, 4000], [1, 2, 4, 8, 16, 32]
    generator = random_model(shape, CPU, dtype, 4096, 1, compile=compile)
    steps = [step_at(generator, length) for length in lengths]
    del generator
    generator = random_model(shape, CPU, dtype, 192, max(rows), compile=compile)
    speeds = []
    for count in rows:
        one_trial(generator, count, 128, 3)
        speeds.append(count / one_trial(generator, count, 128, 16)[1])
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(lengths, [1 / step for step in steps], marker="o")
    left.set(xlabel="position in the context", ylabel="tokens per second, one row", ylim=(0, None))
    right.plot(rows, speeds, marker="o")
    right.set(xlabel="rows", ylabel="tokens per second, all rows", ylim=(0, None), xlim=(0, None))
    name = str(dtype).removeprefix("torch.")
    figure.suptitle(f"{shape}, {name}{', compiled' if compile else ''}, {torch.get_num_threads()} threads")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    print(f"plot written to {path}")
    return {"lengths": lengths, "step_s": steps, "rows": rows, "tokens_s": speeds}


def check_quickly() -> dict[str, Any]:
    """Ours against transformers at 15m, compared with the last stored ratio: warns where it fell by over 15 %."""
    report = compare_with_transformers("15m", torch.float32, [1, 16], 64, 32, 5, False)
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
    path.write_text(json.dumps({"ratios": ratios, **machine(CPU)}, indent=1) + "\n", encoding="utf-8")
    return {"ratios": ratios, "before": before}


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--compare", choices=("hf", "schemes"))
    task.add_argument("--plot", metavar="FILE.png")
    task.add_argument("--quick", action="store_true")
    task.add_argument("--quality", action="store_true")
    parser.add_argument("--shape", default="15m", choices=SHAPES)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batches", default="1,16", type=row_counts)
    for name, default in (("prompt", 128), ("tokens", 32), ("trials", 5)):
        parser.add_argument(f"--{name}", default=default, type=int)
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    dtype = pick_dtype(given.dtype, CPU)
    if given.quality:
        report = all_quality()
    elif given.quick:
        report = check_quickly()
    elif given.plot:
        report = draw(given.plot, given.shape, dtype, given.compile)
    else:
        compare = compare_schemes if given.compare == "schemes" else compare_with_transformers
        report = compare(given.shape, dtype, given.batches, given.prompt, given.tokens, given.trials, given.compile)
    print(json.dumps({**report, **machine(CPU)}))


if __name__ == "__main__":
    main()
