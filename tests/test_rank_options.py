"""Streams, the server's helper and the command line on two ranks; all in one start (tests/helpers_rank_options.py)."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import GOLDEN, ROOT
from helpers_rank_options import QUESTION

from llama.chat import UNSAFE_ERROR
from llama.cli.complete import complete

pytestmark = pytest.mark.slow  # two ranks of their own: ten seconds

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def run(*argv: str, piped: str | None = None) -> subprocess.CompletedProcess[str]:
    """A program of two ranks, to its end."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*TORCHRUN, *argv], env=env, input=piped, capture_output=True, text=True, timeout=100, cwd="/"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@dataclass
class Start:
    """What one start of two ranks left: each rank's findings, and what was printed by chat, by complete."""

    ranks: list[dict[str, Any]]
    chat: str
    complete: str


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    folder = tmp_path_factory.mktemp("ranks")
    done = run(str(ROOT / "tests" / "helpers_rank_options.py"), str(folder))
    before, chat, complete, rest = done.stdout.split("\f")
    assert before.startswith("Loaded in") and rest == ""
    return Start([json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)], chat, complete)


@pytest.fixture(scope="module")
def greedy() -> Any:
    return torch.load(GOLDEN / "golden.pt", weights_only=True)["greedy"]


def test_a_stream_closed_early_frees_every_rank_at_once(start: Start, greedy: Any) -> None:
    """While it is open every rank is busy; the next call gives the tokens it gives alone."""
    for rank in start.ranks:
        assert rank["closed_early"]["tokens"] == [greedy] * 4
    first, second = (rank["closed_early"]["talk"] for rank in start.ranks)
    assert first == second and [message["role"] for message in first] == ["user", "assistant"]


def test_three_requests_in_a_row_one_a_mistake(start: Start, greedy: Any) -> None:
    first, second = (rank["served"] for rank in start.ranks)
    tokens, mistake, unknown, answer = first["answers"]
    assert tokens == greedy and "5000" in mistake and "'train'" in unknown
    assert answer == first["alone"] == second["alone"]
    assert second["answers"] == [] and first["calls"] == second["calls"] == 3


def test_chat_prints_each_thing_once(start: Start) -> None:
    answer = "After October comes November."
    saved, forgotten, loaded, missing, refused, system, again = start.chat.split("\n", 1)[1].split("\n")[:-1]
    assert start.chat.split("\n")[0].strip() == again.strip() == answer
    assert (
        saved.startswith("(saved 2 messages")
        and forgotten == "(conversation cleared)"
        and "loaded 2 messages" in loaded
    )
    assert "cannot load nowhere" in missing and refused == UNSAFE_ERROR and system == "(system prompt set)"


def test_complete_prints_what_one_rank_prints(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    complete("One day, Mia", temperature=0, max_gen_len=16, device="cpu")
    assert start.complete == capsys.readouterr().out and start.complete.startswith("One day, Mia ")


@pytest.mark.slow
def test_as_a_user_types_it(start: Start) -> None:
    done = run("-m", "llama", "complete", "--temperature", "0", "--max_gen_len", "16", piped="One day, Mia")
    assert done.stdout == start.complete and done.stderr.count("Loaded in") == 1
    done = run("-m", "llama", "chat", "--temperature", "0", piped=f"{QUESTION}\n")
    assert done.stdout == start.chat.split("\n")[0] + "\n" and done.stderr.count("Loaded in") == 1
