"""How many threads the commands and the examples take; no clock: what they ask torch for is recorded."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import ROOT, build_golden

from llama import ModelArgs, Transformer
from llama.__main__ import main
from llama.distributed import choose_threads, initialize_groups, threads
from llama.quantization import pack

DEMO = ROOT / "checkpoints" / "demo"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """What `torch.set_num_threads` is called with, on a machine of eight cores whose OMP_NUM_THREADS is not set."""
    calls: list[int] = []
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(threads, "CGROUPS", tmp_path)
    return calls


def model_of(dim: int, vocab_size: int = 64) -> Transformer:
    initialize_groups(None, torch.device("cpu")).close()
    return Transformer(ModelArgs(dim, 1, 2, vocab_size=vocab_size, multiple_of=32, max_seq_len=8, max_batch_size=1))


@pytest.mark.parametrize(
    ("quota", "wanted"),
    [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 1), ("50000 100000", 1), ("9900000 100000", 8)]
    + [("", 8), ("nonsense", 8), ("1 0", 8)],
)
def test_a_containers_quota(asked: list[int], tmp_path: Path, quota: str, wanted: int) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    assert choose_threads() == wanted and asked == [wanted]


def test_a_quota_of_the_own_group(asked: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of the group's own and those above it; without a file there is none."""
    read = Path.read_text
    own = lambda path, **how: "1:cpu:/x\n0::/a/b\n" if str(path) == "/proc/self/cgroup" else read(path, **how)  # noqa: E731
    monkeypatch.setattr(Path, "read_text", own)
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert choose_threads() == 8
    (tmp_path / "a" / "b" / "cpu.max").write_text("600000 100000")
    assert choose_threads() == 6
    (tmp_path / "a" / "cpu.max").write_text("300000 100000")
    assert choose_threads() == 3


def test_affinity_and_torchs_own_number(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda process: {1, 5, 6}, raising=False)
    assert choose_threads() == 3
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # a caller's own setting is never raised
    assert choose_threads() == 2
    monkeypatch.delattr(threads.os, "sched_getaffinity", raising=False)  # macOS
    monkeypatch.setattr(threads.os, "cpu_count", lambda: None)
    assert choose_threads() == 1


def test_small_matrices_get_one_thread(asked: list[int]) -> None:
    """The largest matrix decides, be it the head, and packed or not."""
    assert choose_threads(model_of(64)) == 1
    assert choose_threads(model_of(256)) == 8
    assert choose_threads(model_of(64, vocab_size=4096)) == 8
    packed = model_of(64, vocab_size=4096)
    packed.output.set_packed(pack(torch.randn(4096, 64), "int8"))
    assert choose_threads(packed) == 8


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_what_the_user_says_wins(asked: list[int], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "8")
    assert choose_threads(model_of(64)) == 8 and asked == []


def test_the_library_never_does_so_by_itself(asked: list[int]) -> None:
    with build_golden() as generator:
        generator.generate([[1, 5]], 2)
    assert asked == []


@pytest.mark.parametrize("command", ["complete", "info", "bench"])
def test_the_commands_do(asked: list[int], monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """At once what the process may use; one thread as soon as the demo, a small model, is there."""
    words = {"complete": ["Once", "--max_gen_len", "2"], "info": [str(DEMO)]}
    words["bench"] = ["--ckpt", str(DEMO), "--batches", "1", "--prompt", "2", "--tokens", "2", "--trials", "1"]
    monkeypatch.setattr("llama.cli.bench.read_rate", lambda device: 1.0)
    monkeypatch.setattr("llama.cli.bench.matrix_rate", lambda device, dtype: 1.0)
    monkeypatch.setattr("sys.argv", ["llama", command, *words[command]])
    main()
    assert asked == ([8] if command == "info" else [8, 1])


@pytest.mark.parametrize("name", ["text", "chat"])
def test_the_examples_do(asked: list[int], name: str) -> None:
    spec: Any = importlib.util.spec_from_file_location(name, ROOT / f"example_{name}_completion.py")
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    class Built:
        model = model_of(64)

        def __enter__(self) -> "Built":
            return self

        def __exit__(self, *error: object) -> None: ...

        def __getattr__(self, completion: str) -> Any:
            return lambda *args, **options: []

    example.Llama = SimpleNamespace(build=lambda *args, **options: Built())
    with pytest.raises(ValueError, match="zip"):  # no answers came
        example.main("ckpt", "tokenizer")
    assert asked == [1]
