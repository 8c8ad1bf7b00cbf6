"""One model over several ranks: the same text on 1, 2 and 4, groups that come and go, and no rank that hangs.

Starting ranks costs seconds, so all checks of one kind of start run in one (tests/helpers_ranks.py), and each test here
looks at the record of one check.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helpers_ranks
import pytest
import reference
import torch
from helpers import GOLDEN, ROOT, build_golden

from llama import LlamaError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
WORKER = str(ROOT / "tests" / "helpers_ranks.py")
CHECKS = [name for name in helpers_ranks.CHECKS if not name.startswith(("crash", "vanish"))]
STARTS = ["plain", "torchrun 2", pytest.param("torchrun 4", marks=pytest.mark.slow)]


def environment(**changes: str) -> dict[str, str]:
    """Without any of torchrun's variables."""
    plain = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    return {**plain, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **changes}


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def torchrun(ranks: int, folder: Path, names: list[str]) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*launcher, WORKER, str(folder), *names]


def write_checkpoints(folder: Path) -> None:
    """"gqa" with 4 key/value heads for 8, "mqa" with one, each as one file."""
    for name, params in (("gqa", helpers_ranks.GQA), ("mqa", {**helpers_ranks.GQA, "n_kv_heads": 1, "n_heads": 4})):
        (folder / name).mkdir()
        (folder / name / "params.json").write_text(json.dumps({**params, "vocab_size": -1}))
        torch.save(reference.random_weights(params, 3, torch.float32), folder / name / "consolidated.00.pth")


@dataclass
class Records:
    """What all ranks of one start wrote, and how it ended."""

    folder: Path
    ranks: int
    stdout: str
    stderr: str
    returncode: int

    def values(self, name: str) -> list[Any]:
        """Every rank's value; fails with the traceback of the first rank whose check did not pass."""
        paths = [self.folder / f"{name}.{rank}.json" for rank in range(self.ranks)]
        records = [json.loads(path.read_text()) if path.exists() else {"error": self.stderr[-3000:]} for path in paths]
        for rank, record in enumerate(records):
            if "error" in record:
                pytest.fail(f"rank {rank} of {self.ranks}: {record['error']}", pytrace=False)
        return [record["value"] for record in records]


@pytest.fixture(scope="session")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Records]:
    """The records of a kind of start, which is made when a test first asks for it."""
    made: dict[str, Records] = {}

    def start(kind: str) -> Records:
        if kind not in made:
            folder = tmp_path_factory.mktemp("ranks")
            write_checkpoints(folder)
            ranks = 1 if kind == "plain" else int(kind.split()[1])
            command = [sys.executable, WORKER, str(folder), *CHECKS] if ranks == 1 else torchrun(ranks, folder, CHECKS)
            done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=180)
            made[kind] = Records(folder, ranks, done.stdout, done.stderr, done.returncode)
        return made[kind]

    return start


@pytest.fixture(params=STARTS)
def records(request: pytest.FixtureRequest, starts: Callable[[str], Records]) -> Records:
    return starts(request.param)


# ---------------------------------------------------------------------------------- one start per world

SPECIAL = {
    "sampled",
    "muting",
    "allocations",
    "shards",
    "wrong_rank_count",
    "a_rank_that_cannot_load",
    "kv_heads_that_do_not_divide",
}


@pytest.mark.parametrize("name", [name for name in CHECKS if name not in SPECIAL])
def test_check_passes_and_all_ranks_agree(records: Records, name: str) -> None:
    values = records.values(name)
    if name != "smaller_models_side_by_side":
        assert values == [values[0]] * records.ranks


def test_the_start_ends_well(records: Records) -> None:
    assert records.returncode == 0, records.stderr[-3000:]


def test_the_same_samples_though_every_rank_was_seeded_differently(
    records: Records, starts: Callable[[str], Records]
) -> None:
    values = records.values("sampled")
    assert values == [values[0]] * records.ranks
    assert values == starts("plain").values("sampled") * records.ranks


def test_the_shard_is_the_ranks_own(records: Records) -> None:
    assert records.values("shards") == list(range(records.ranks))


def test_no_full_weight_is_allocated(starts: Callable[[str], Records]) -> None:
    assert max(starts("torchrun 2").values("allocations")) == 360 * 64 // 2


@pytest.mark.slow
def test_no_full_weight_is_allocated_on_four(starts: Callable[[str], Records]) -> None:
    assert max(starts("torchrun 4").values("allocations")) == 360 * 64 // 4


def test_later_ranks_are_silent_on_stdout_until_close(records: Records) -> None:
    records.values("muting")
    ranks = range(records.ranks)
    assert [rank for rank in ranks if f"while open, rank {rank}" in records.stdout] == [0]
    assert [rank for rank in ranks if f"after close, rank {rank}" in records.stdout] == list(ranks)
    assert [rank for rank in ranks if f"stderr, rank {rank}" in records.stderr] == list(ranks)
    printed = [line for line in records.stdout.splitlines() if "close" not in line and "while open" not in line]
    assert printed and all(line.startswith("Loaded in ") for line in printed), "FairScale's lines, or a later rank's"


def test_a_wrong_rank_count_is_named_on_every_rank(records: Records) -> None:
    messages = records.values("wrong_rank_count")
    assert len(set(messages)) == 1 and "3" in messages[0] and str(records.ranks) in messages[0]


def test_a_rank_that_cannot_load_fails_all(records: Records) -> None:
    messages = records.values("a_rank_that_cannot_load")
    assert all("nowhere" in message for message in messages)
    assert all(f"rank {records.ranks - 1}" in message for message in messages[:-1])


def test_key_value_heads_that_the_ranks_cannot_share(starts: Callable[[str], Records]) -> None:
    for message in starts("torchrun 2").values("kv_heads_that_do_not_divide"):
        assert "n_kv_heads=1" in message and "2" in message


# ------------------------------------------------------------------------- other ways to start, all at once


@dataclass
class Ended:
    """A process that has ended: when (seconds after the start), how, and what it printed."""

    seconds: float
    returncode: int
    stdout: str
    stderr: str


def run_together(commands: list[list[str]], environments: list[dict[str, str]], timeout: float = 60) -> list[Ended]:
    """Start all, wait for all; what is still there after `timeout` is killed (returncode -9)."""
    start = time.monotonic()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, env=env, **pipes) for command, env in zip(commands, environments, strict=True)]
    ended = []
    for process in running:
        try:
            out, err = process.communicate(timeout=max(0.1, start + timeout - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        ended.append(Ended(time.monotonic() - start, process.returncode, out, err))
    return ended


def test_two_machines_and_plain_python_with_the_variables_set(tmp_path: Path) -> None:
    """RANK=1, LOCAL_RANK=0 loads shard 01: two machines with a GPU each, each rank started by hand."""
    whole = torch.load(GOLDEN / "consolidated.00.pth", weights_only=True)
    names = ["greedy", "shards", "sampled"]
    write_checkpoints(tmp_path)
    for rank in range(2):
        shard = {name: helpers_ranks.part(name, weight, rank, 2).clone() for name, weight in whole.items()}
        torch.save(shard, tmp_path / f"consolidated.{rank:02}.pth")
    both = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    environments = [environment(**both, RANK=str(rank)) for rank in range(2)]
    ended = run_together([[sys.executable, WORKER, str(tmp_path), *names]] * 2, environments)
    assert [each.returncode for each in ended] == [0, 0], ended
    records = Records(tmp_path, 2, "", "", 0)
    assert records.values("shards") == [0, 1]
    for name in names:
        records.values(name)


def test_two_programs_side_by_side_without_any_variables(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    names = ["environment", "sampled", "callers_process_group", "greedy"]
    for folder in folders:
        folder.mkdir()
    commands = [[sys.executable, WORKER, str(folder), *names] for folder in folders]
    ended = run_together(commands, [environment()] * 2)
    assert [each.returncode for each in ended] == [0, 0], ended
    for folder in folders:
        for name in names:
            Records(folder, 1, "", "", 0).values(name)


SPAWNED = """
import os, runpy, sys
import torch.multiprocessing as mp

def work(rank, port):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    import helpers_ranks
    helpers_ranks.main(sys.argv[3:])

if __name__ == "__main__":
    mp.spawn(work, args=(sys.argv[2],), nprocs=2)
"""


def test_ranks_spawned_by_the_program_itself(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SPAWNED)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path), free_port(), "greedy", "three_builds"]
    write_checkpoints(tmp_path)
    (ended,) = run_together([command], [environment()])
    assert ended.returncode == 0, ended.stderr
    records = Records(tmp_path, 2, "", "", 0)
    for name in ("greedy", "three_builds"):
        records.values(name)


STARTING = 12.0  # seconds that two ranks may need to start on a busy machine


def test_a_failing_rank_ends_all_with_its_message(tmp_path: Path) -> None:
    """Under torchrun: a rank that cannot load, and one that fails in the middle of a text."""
    commands = [torchrun(2, tmp_path, ["crash_while_loading"]), torchrun(2, tmp_path, ["crash_while_generating"])]
    loading, generating = run_together(commands, [environment()] * 2, timeout=40)
    for ended in (loading, generating):
        assert ended.returncode not in (0, -9), ended
        assert ended.seconds < STARTING + 10
    assert "nowhere" in loading.stderr and "Loaded" not in loading.stdout
    assert "a rank failed on purpose" in generating.stderr


def test_a_rank_that_vanishes_ends_the_others_without_torchrun(tmp_path: Path) -> None:
    both = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    environments = [environment(**both, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
    command = [sys.executable, WORKER, str(tmp_path), "vanish_while_generating"]
    first, last = run_together([command] * 2, environments, timeout=40)
    assert last.returncode == 3
    assert first.returncode not in (0, -9), first
    assert first.seconds < STARTING + 10 and first.stderr


def test_variables_that_are_half_set(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in VARIABLES:
            patch.delenv(name, raising=False)
        patch.setenv("WORLD_SIZE", "2")
        with pytest.raises(LlamaError, match="RANK"):
            build_golden()
    with build_golden() as generator:
        assert generator.generate([[1]], 2)[0]


# ------------------------------------------------------------------------------------------- devices


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both numbers in one message, before anything touches a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("LOCAL_RANK", "7")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(LlamaError, match="3") as error:
        build_golden(device=None)
    assert "7" in str(error.value) or "8" in str(error.value)


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LlamaError, match="cuda"):
        build_golden(device="cuda")
