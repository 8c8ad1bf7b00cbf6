"""What the tests of the core share: tiny models made by hand, stubs, and recorders of what was called."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import reference
import torch
import torch.nn.functional as F
from torch import Tensor

from llama import Llama, ModelArgs, Transformer

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden" / "mha"
WINDOW, ROWS = 48, 4  # max_seq_len and max_batch_size of every tiny model

_BASE: dict[str, Any] = {"dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 97, "multiple_of": 16, "norm_eps": 1e-5}
PARAMS: dict[str, dict[str, Any]] = {
    "mha": _BASE,
    "gqa": {**_BASE, "n_kv_heads": 2, "ffn_dim_multiplier": 1.3, "rope_theta": 500000.0},
    "mqa": {**_BASE, "n_kv_heads": 1, "norm_eps": 1e-3},
}


def make_model(kind: str = "gqa", dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Transformer:
    """The published hand-made way: the default dtype decides, `ModelArgs`, `Transformer`, `load_state_dict`."""
    params = {**PARAMS[kind], **changes}
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = Transformer(ModelArgs(**{"max_seq_len": WINDOW, "max_batch_size": ROWS, **params}))
    finally:
        torch.set_default_dtype(before)
    model.load_state_dict(weights(kind, seed, dtype, **changes), strict=True)
    return model


def weights(kind: str, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> dict[str, Tensor]:
    return reference.random_weights({**PARAMS[kind], **changes}, seed, dtype)


def oracle(kind: str, tokens: Tensor | Sequence[Any], seed: int = 0) -> Tensor:
    """float64 logits (b, s, v) of the model that `make_model` makes with this seed."""
    return reference.logits(weights(kind, seed), PARAMS[kind], torch.as_tensor(tokens))


def random_ids(bsz: int, seqlen: int, seed: int = 1, vocab_size: int = 97) -> Tensor:
    return torch.randint(0, vocab_size, (bsz, seqlen), generator=torch.Generator().manual_seed(seed))


def random_prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    return [random_ids(1, length, seed + i)[0].tolist() for i, length in enumerate(lengths)]


def feed(model: Any, tokens: Tensor, sizes: Sequence[int]) -> Tensor:
    """Logits of all positions, `sizes` tokens at a time."""
    found, start = [], 0
    for size in sizes:
        found.append(model.forward(tokens[:, start : start + size], start))
        start += size
    assert start == tokens.shape[1]
    return torch.cat(found, dim=1)


def close(found: Tensor, wanted: Tensor, limit: float = 3e-5) -> None:
    """No number is further away than `limit`; NaN never is near."""
    assert found.shape == wanted.shape
    difference = (found.double() - wanted.double()).abs().max().item()
    assert difference <= limit, f"largest difference {difference:.3g}, limit {limit:g}"


def oracle_greedy(kind: str, prompt: list[int], n: int, eos_id: int | None = None) -> list[int]:
    return reference.greedy(weights(kind), PARAMS[kind], prompt, min(n, WINDOW - len(prompt)), eos_id)


def oracle_logprobs(kind: str, tokens: list[int]) -> list[float]:
    """Log-probability of each token given those before it; the first is 0.0 by convention."""
    table = torch.log_softmax(oracle(kind, [tokens])[0], dim=-1)
    return [0.0] + [float(table[i - 1, token]) for i, token in enumerate(tokens) if i]


def near(found: Sequence[float], wanted: Sequence[float], limit: float = 1e-4) -> None:
    assert len(found) == len(wanted)
    assert all(isinstance(value, float) for value in found)
    assert all(abs(a - b) <= limit for a, b in zip(found, wanted, strict=True)), (found, wanted)


def build_golden(**changes: Any) -> Llama:
    """`Llama.build` of tests/golden/mha as its figures were made."""
    settings: dict[str, Any] = {
        "ckpt_dir": str(GOLDEN),
        "tokenizer_path": str(GOLDEN / "tokenizer.model"),
        "max_seq_len": 48,
        "max_batch_size": 4,
        "device": "cpu",
        "dtype": "float32",
    }
    return Llama.build(**{**settings, **changes})


class StubTokenizer:
    """One id per character, of a vocabulary of 97; id 96 ends a text, -1 pads."""

    n_words, bos_id, pad_id = 97, 95, -1
    eos_id: int | None = 96

    def encode(self, s: str, bos: bool, eos: bool) -> list[int]:
        return [self.bos_id] * bos + [ord(letter) % 95 for letter in s] + [96] * eos

    def decode(self, t: Any) -> str:
        return "".join(chr(32 + token) for token in ([t] if isinstance(t, int) else t))


class StubModel:
    """Only `.params` and `.forward(tokens, start_pos)`: says (last id + 1) % 97 next, and notes each call.

    `bad` maps (start of the call, row) to a number that all logits of that row then are.
    """

    class params:
        max_seq_len, max_batch_size = WINDOW, ROWS

    def __init__(self, bad: dict[tuple[int, int], float] | None = None) -> None:
        self.bad = bad or {}
        self.calls: list[tuple[tuple[int, ...], int]] = []
        self.ids: set[int] = set()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        assert not kwargs, "forward is called by position"
        tokens, start_pos = args
        assert type(start_pos) is int and tokens.dtype == torch.int64
        self.calls.append((tuple(tokens.shape), start_pos))
        self.ids.update(tokens.flatten().tolist())
        logits = 5.0 * F.one_hot((tokens + 1) % 97, 97).float()
        for (start, row), value in self.bad.items():
            if start == start_pos:
                logits[row] = value
        return logits


def published_schedule(lengths: Sequence[int], max_gen_len: int, window: int = WINDOW) -> list[tuple[Any, int]]:
    """((rows, tokens a row), start_pos) of each forward call of the published package, when no row ends early."""
    total = min(window, max(lengths) + max_gen_len)
    calls, previous = [], 0
    for current in range(min(lengths), total):
        calls.append(((len(lengths), current - previous), previous))
        previous = current
    return calls


@contextlib.contextmanager
def recorded(name: str, module: Any = F) -> Iterator[list[tuple[int, ...]]]:
    """Shapes that `module.<name>` returns meanwhile; nothing that a model could notice as being watched."""
    shapes: list[tuple[int, ...]] = []
    original = getattr(module, name)

    def spy(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        shapes.append(tuple(result.shape))
        return result

    setattr(module, name, spy)
    try:
        yield shapes
    finally:
        setattr(module, name, original)
