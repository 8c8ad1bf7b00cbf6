"""The examples for research, on the demo model: what they print is what the library says by other ways."""

import importlib.util
import math
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from llama import Llama
from llama.tokenizer import piece

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
LINES = ["Once upon a time, there was a little girl named Lily.", "quantum flux", "Tom had a wooden boat."]
LENS, SCORE, NODES = (EXAMPLES / name for name in ("hooks_logit_lens.py", "batch_score.py", "two_nodes.sh"))


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environment() -> dict[str, str]:
    plain = {k: v for k, v in os.environ.items() if not re.match(r"RANK|WORLD_SIZE|LOCAL_|MASTER_|TORCHEL", k)}
    return {**plain, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}


def run(*command: str | Path) -> str:
    """What a command prints in the repository, without the time it took to load."""
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split("\n", 1)[1]


def torchrun(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text("\n\n".join(LINES) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_every_example_is_short() -> None:
    paths = [path for path in EXAMPLES.iterdir() if path.is_file()]
    assert {LENS, SCORE, NODES} <= set(paths)
    assert all(len(path.read_text(encoding="utf-8").splitlines()) < 60 for path in paths)


def test_logit_lens(here: None, capsys: pytest.CaptureFixture[str]) -> None:
    """A line a block; the last block's probabilities are the model's own, and every block's are a distribution."""
    example = load(LENS)
    with Llama.build("checkpoints/demo", None, 256, 1, device="cpu", dtype="float32") as generator:
        found = example.lens(generator, "The capital of Japan is")
        ids = generator.tokenizer.encode("The capital of Japan is", bos=True, eos=False)
        own = torch.softmax(generator.model.forward(torch.tensor([ids]), 0)[0, -1], dim=-1)
        assert not any(block._forward_hooks for block in generator.model.layers), "a hook is left behind"
        best = repr(piece(generator.tokenizer, int(own.argmax())))
    assert len(found) == generator.model.n_layers
    torch.testing.assert_close(found[-1], own)
    assert all(abs(float(probs.sum()) - 1) < 1e-4 for probs in found)
    assert not torch.allclose(found[0], own, atol=1e-2)
    capsys.readouterr()
    example.main(top=3, device="cpu")
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line[:9] for line in lines] == [f"block {layer:2}:" for layer in range(len(found))]
    assert lines[-1][9:].strip().startswith(f"{best} {float(own.max()):.2f}  ")


def scored(printed: str) -> dict[str, tuple[float, int]]:
    """Text to perplexity and tokens."""
    rows = (line.split(maxsplit=2) for line in printed.splitlines() if not line.startswith("Loaded"))
    return {text: (float(value), int(count)) for value, count, text in rows}


def test_perplexity_of_lines(here: None, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against one forward over each line; three lines on two rows, so that one waits for a free row."""
    load(SCORE).main(str(text), max_batch_size=2, device="cpu")
    found = scored(capsys.readouterr().out)
    assert list(found)[:-1] == LINES
    losses: list[float] = []
    with Llama.build("checkpoints/demo", None, 256, 1, device="cpu", dtype="float32") as generator:
        for line in LINES:
            ids = torch.tensor([generator.tokenizer.encode(line, bos=True, eos=False)])
            logits = generator.model.forward(ids, 0)
            loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none").tolist()
            assert found[line] == (pytest.approx(math.exp(sum(loss) / len(loss)), rel=1e-3, abs=0.01), len(loss))
            losses += loss
    whole = found["(all 3 lines)"]
    assert whole == (pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-3, abs=0.01), len(losses))
    assert found[LINES[0]][0] < 10 < found[LINES[1]][0], "a story's first line is likelier than what no story says"


def test_perplexity_of_nothing() -> None:
    assert math.isnan(load(SCORE).perplexity([])) and load(SCORE).perplexity([0.0, 0.0]) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[LENS], [SCORE, "LINES"]], ids=["lens", "score"])
def test_two_ranks_print_once_and_the_same(flags: list[Any], text: Path) -> None:
    command = [str(text) if flag == "LINES" else flag for flag in flags] + ["--device", "cpu"]
    alone, shared = run(sys.executable, *command), run(*torchrun(2), *command)
    numbers = re.compile(r"\d+\.\d+")
    assert numbers.sub("#", alone) == numbers.sub("#", shared)
    pairs = zip(numbers.findall(alone), numbers.findall(shared), strict=True)
    assert all(float(one) == pytest.approx(float(two), rel=1e-3, abs=0.011) for one, two in pairs)


@pytest.mark.slow
def test_two_nodes_on_one_machine() -> None:
    """Both starts on loopback; tests/test_two_hosts.py gives each a network of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    program = ["example_text_completion.py", "--ckpt_dir", "checkpoints/demo", "--tokenizer_path"]
    program += ["checkpoints/demo/tokenizer.model", "--temperature", "0", "--device", "cpu"]
    nodes = [
        subprocess.Popen(
            [str(NODES), str(rank), "127.0.0.1", "lo", *program],
            cwd=ROOT,
            env={**environment(), "PORT": port},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [node.communicate(timeout=120) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], said
    assert said[0][0].split("\n", 1)[1] == run(sys.executable, *program) and said[1][0] == ""


def test_two_nodes_says_what_it_takes() -> None:
    done = subprocess.run([str(NODES), "0"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and "RANK ADDRESS CARD PROGRAM" in done.stderr
