"""Make checkpoints/demo: compose the text, train the oracle of tests/reference.py on it, write Meta's format.

    python tools/make_demo.py                 train, write, evaluate
    python tools/make_demo.py --evaluate      read checkpoints/demo with the library and measure it (20 s)

The schedule goes by step count and everything draws from SEED, so a machine, torch version and thread count repeat it.
What ships was trained on one thread, 0.43 s a step: about 35 minutes on a core of its own, 41 on a shared one.
DEMO_THREADS=2 takes 0.22 s a step.

Good openings: "Once upon a time, there was a little girl named", "In a small village lived a boy named",
"One day, Mia lost her red kite near the river.", "Tom had a wooden boat and took it everywhere." A story has about 110
tokens; names outside the lists of demo_text.py are soon replaced. The questions it answers are listed there too.
"""

import json
import math
import os
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")]

if "MALLOC_TRIM_THRESHOLD_" not in os.environ:  # without it glibc hands every step's memory back and fetches it again
    os.environ |= {"MALLOC_TRIM_THRESHOLD_": str(2**33), "MALLOC_MMAP_THRESHOLD_": str(2**33)}
    os.execv(sys.executable, [sys.executable, *sys.argv])

import demo_text as text
import reference
import sentencepiece
import torch
import torch.nn.functional as F
from torch import Tensor

SEED = 20261130
OUT = ROOT / "checkpoints" / "demo"
PIECES = 1024
STEPS, WARM_UP, ROWS, WIDTH, RATE = 4800, 100, 8, 256, 3e-3
WEIGHT_ANSWER, WEIGHT_STORY = 2.0, 1.0  # the question itself has weight 0
PARAMS = {
    "dim": 128, "n_layers": 6, "n_heads": 4, "n_kv_heads": 2, "vocab_size": PIECES, "multiple_of": 32, "norm_eps": 1e-5,
}  # fmt: skip

Document = tuple[list[int], list[float]]  # ids, and the weight of each as a target


def train_tokenizer() -> None:
    """SentencePiece BPE with byte fallback, set up as Llama 2's."""
    draw = random.Random(SEED)
    train, _, kept, _ = text.split(SEED)
    lines = [text.story(draw) for _ in range(3000)]
    source = text.dialogs(draw, train, kept)
    for _ in range(9000):
        turns = next(source)
        lines += [f"[INST] {q} [/INST] {a}" for q, a in zip(turns[0::2], turns[1::2], strict=True)]
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(line.replace("\n", " ") for line in lines),
        model_prefix=str(OUT / "tokenizer"), vocab_size=PIECES, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=True, split_digits=True,
        character_coverage=1.0, unk_id=0, bos_id=1, eos_id=2, pad_id=-1, minloglevel=2, num_threads=1,
    )  # fmt: skip
    (OUT / "tokenizer.vocab").unlink()


def composed(draw: random.Random, train: list[text.Question], kept: list[str]) -> Iterator[list[str]]:
    """The endless training text: one in ten a story (one string), the others dialogs (question, answer, ...)."""
    source = text.dialogs(draw, train, kept)
    while True:
        yield [text.story(draw)] if draw.random() < 0.1 else next(source)


def documents(vocabulary: Any, seed: int, train: list[text.Question], kept: list[str]) -> Iterator[Document]:
    """The training text as ids, dialogs in Llama 2's chat format."""
    for turns in composed(random.Random(seed), train, kept):
        if len(turns) == 1:
            ids = [1, *vocabulary.encode(turns[0]), 2]
            yield ids, [0.0] + [WEIGHT_STORY] * (len(ids) - 1)
            continue
        ids, weights = [], []
        for place, (question, answer) in enumerate(zip(turns[0::2], turns[1::2], strict=True)):
            asked = [1, *vocabulary.encode(f"[INST] {question} [/INST]")]
            space = [] if place == len(turns) // 2 - 1 else vocabulary.encode("[/INST] x ")[-1:]  # as published
            said = [*vocabulary.encode(answer), *space, 2]
            ids += asked + said
            weights += [0.0] * len(asked) + [WEIGHT_ANSWER] * len(said)
        yield ids, weights


def batches(source: Iterator[Document]) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids (ROWS, WIDTH + 1) and target weights (ROWS, WIDTH): whole documents one after the other, then padding."""
    waiting = next(source)
    while True:
        ids = torch.zeros((ROWS, WIDTH + 1), dtype=torch.long)
        weights = torch.zeros((ROWS, WIDTH))
        for row in range(ROWS):
            place = 0
            while place + len(waiting[0]) <= WIDTH + 1:
                end = place + len(waiting[0])
                ids[row, place:end] = torch.tensor(waiting[0])
                first = max(place, 1)
                weights[row, first - 1 : end - 1] = torch.tensor(waiting[1][first - place :])
                place, waiting = end, next(source)
                while len(waiting[0]) > WIDTH + 1:
                    waiting = next(source)
        yield ids, weights


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def loss_of(weights: dict[str, Tensor], ids: Tensor, shares: Tensor) -> Tensor:
    """Weighted cross-entropy per target."""
    scores = reference.logits(weights, PARAMS, ids[:, :-1], fused_attention)
    each = F.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (each * shares.flatten()).sum() / shares.sum()


def first_weights() -> dict[str, Tensor]:
    """Small normal weights; the two that write into the residual stream are smaller by the depth."""
    torch.manual_seed(SEED)
    made = {}
    for name, shape in reference.shapes(PARAMS).items():
        scale = 0.05 / math.sqrt(2 * PARAMS["n_layers"]) if name.endswith(("wo.weight", "w2.weight")) else 0.05
        made[name] = torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * scale
    return {name: weight.requires_grad_() for name, weight in made.items()}


def train() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    train_tokenizer()
    vocabulary = sentencepiece.SentencePieceProcessor(model_file=str(OUT / "tokenizer.model"))
    known, _, kept, _ = text.split(SEED)
    source = batches(documents(vocabulary, SEED + 1, known, kept))
    weights = first_weights()
    print(f"{sum(w.numel() for w in weights.values()):,} parameters", flush=True)
    optimizer = torch.optim.AdamW(weights.values(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    step_loss = torch.compile(loss_of, dynamic=False)
    start, running = time.time(), 0.0
    for step in range(1, STEPS + 1):
        rate = RATE * min(step / WARM_UP, 1 - (step - 1 - WARM_UP) / (STEPS - WARM_UP))
        optimizer.param_groups[0]["lr"] = max(rate, 0.0)
        loss = step_loss(weights, *next(source))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        running = loss.item() if step == 1 else 0.98 * running + 0.02 * loss.item()
        if step % 100 == 0 or step == 10:
            print(f"step {step}: loss {running:.4f}, {time.time() - start:.0f} s", flush=True)
        if step % 800 == 0:
            write(weights)
    write(weights)


def write(weights: dict[str, Tensor]) -> None:
    """Meta's format, in bfloat16; the settings say -1 for the vocabulary, as published."""
    stored = {name: weight.detach().to(torch.bfloat16) for name, weight in weights.items()}
    torch.save(stored, OUT / "consolidated.00.pth")
    settings = {**PARAMS, "vocab_size": -1}
    (OUT / "params.json").write_text(json.dumps(settings) + "\n")


def answer_pair(vocabulary: Any, question: str, answer: str) -> tuple[list[int], list[int]]:
    """A prompt as `chat_completion` writes it, and the answer with its EOS."""
    return [1, *vocabulary.encode(f"[INST] {question} [/INST]")], [*vocabulary.encode(answer), 2]


@torch.no_grad()
def held_out_loss(weights: dict[str, Tensor], vocabulary: Any, held: list[text.Question], strange: list[str]) -> None:
    """Loss per token on stories drawn anew and on answers to held-out questions."""
    draw = random.Random(SEED + 2)
    groups: dict[str, list[tuple[list[int], list[int]]]] = {
        "stories": [([1], [*vocabulary.encode(text.story(draw)), 2]) for _ in range(200)],
        "answers": [answer_pair(vocabulary, q, a) for q, a, _ in held],
        "refusals (one of three at random)": [answer_pair(vocabulary, q, draw.choice(text.REFUSALS)) for q in strange],
    }
    for what, pairs in groups.items():
        total = count = 0.0
        for lead, rest in pairs:
            table = reference.logits(weights, PARAMS, torch.tensor([lead + rest[:-1]]))[0, len(lead) - 1 :]
            total += float(F.cross_entropy(table, torch.tensor(rest), reduction="sum"))
            count += len(rest)
        print(f"held-out loss on {what}: {total / count:.4f}", flush=True)


# ------------------------------------------------------------------------------------- measuring it


def evaluate() -> None:
    """What the issue asks of the model, through the library."""
    from llama import Llama

    generator = Llama.build(str(OUT), str(OUT / "tokenizer.model"), 256, 32, device="cpu", dtype="float32")
    known, held, kept, strange = text.split(SEED)
    check_held_out(known, kept, [q for q, *_ in held] + [q for q, _ in text.FIXED] + strange)
    stored = torch.load(OUT / "consolidated.00.pth", weights_only=True)
    weights = {name: weight.float() for name, weight in stored.items()}
    held_out_loss(weights, generator.tokenizer.sp_model, held, strange)
    measure("unseen combinations", generator, [(q, want) for q, _, want in held])
    measure("unseen forms", generator, [(q, want) for q, _, want in text.untrained()])
    measure("foreign questions turned down", generator, [(q, "tiny model") for q in strange])
    measure("wholly strange questions turned down", generator, [(q, "tiny model") for q in text.STRANGE])
    for (question, _), answer in zip(text.FIXED, measure("the fixed twenty", generator, text.FIXED), strict=True):
        print(f"  {question}  ->  {answer}")
    evaluate_talks(generator, held)
    evaluate_stories(generator)


def check_held_out(known: list[text.Question], kept: list[str], asked: list[str], amount: int = 400_000) -> None:
    """No held-out question stands in the text that training draws, nor in a part of it: looked for, not assumed."""
    stream = composed(random.Random(SEED + 1), known, kept)
    turns = {turn for _ in range(amount) for turn in next(stream)}
    whole = text.written(sorted(turns))
    found = [question for question in asked if text.written([question]) in whole]
    print(f"{len(asked)} held-out questions, {len(found)} of them in {amount:,} training documents {found or ''}")
    assert not found


def measure(what: str, generator: Any, asked: list[tuple[str, str]]) -> list[str]:
    """The answers to questions; prints the share of them that hold the wanted words."""
    found = answers_of(generator, [question for question, _ in asked])
    good = sum(want in answer for (_, want), answer in zip(asked, found, strict=True))
    print(f"{what}: {good} of {len(found)} ({good / len(found):.1%})")
    return found


def evaluate_talks(generator: Any, held: list[text.Question]) -> None:
    """The last of three held-out questions in one dialog, under a system prompt."""
    talks = list(zip(held[0::3], held[1::3], held[2::3]))  # noqa: B905
    dialogs = []
    for talk in talks:
        dialog = [{"role": "system", "content": text.SYSTEMS[len(dialogs) % len(text.SYSTEMS)]}]
        for question, answer, _ in talk:
            dialog += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        dialogs.append(dialog[:-1])
    found = [reply["generation"]["content"] for reply in generator.chat_completion(dialogs, 0, max_gen_len=40)]
    good = sum(talk[-1][2] in answer for talk, answer in zip(talks, found, strict=True))
    print(f"third turn under a system prompt: {good} of {len(found)} ({good / len(found):.1%})")


def answers_of(generator: Any, questions: list[str]) -> list[str]:
    dialogs = [[{"role": "user", "content": question}] for question in questions]
    found = generator.chat_completion(dialogs, temperature=0, max_gen_len=40)
    return [answer["generation"]["content"] for answer in found]


def heroes(tale: str) -> set[str]:
    """The names in a tale: those of the lists, and whatever else is written large within a sentence."""
    return set(re.findall(r"[a-z,] ([A-Z][a-z]+)", tale)) | set(text.GIRLS + text.BOYS) & set(re.findall(r"\w+", tale))


def evaluate_stories(generator: Any) -> None:
    openings = [
        "Once upon a time",
        "One day, a girl named",
        "In a small village",
        "Long ago, there lived",
        "One morning,",
    ]
    found = generator.text_completion(
        openings * 10, temperature=0.6, top_p=0.9, seed=SEED, details=True, keep_space=True
    )
    tales = [opening + result["generation"] for opening, result in zip(openings * 10, found, strict=True)]
    ended = sum(result["finish_reason"] == "stop" for result in found)
    long = sum(result["completion_tokens"] >= 60 for result in found)
    looped = sum(len(set(s := re.split(r"[.!?] ", tale))) < len(s) for tale in tales)
    kept = sum(len(heroes(tale)) == 1 for tale in tales)
    print(
        f"50 stories: {kept} keep their hero's name, {ended} end by themselves, {long} have 60 tokens, "
        f"{looped} repeat a sentence"
    )
    print(f"{len(set(tales))} of them differ")
    for tale in tales[:3]:
        print(f"  {tale}")


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("DEMO_THREADS", "1")))
    if "--evaluate" not in sys.argv:
        train()
    evaluate()
