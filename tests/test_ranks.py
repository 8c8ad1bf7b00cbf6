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
    """ "gqa" with 4 key/value heads for 8, "mqa" with one, each as one file."""
    for name, params in (("gqa", helpers_ranks.GQA), ("mqa", {**helpers_ranks.GQA, "n_kv_heads": 1, "n_heads": 4})):
        (folder / name).mkdir()
        (folder / name / "params.json").write_text(json.dumps({**params, "vocab_size": -1}))
        torch.save(reference.random_weights(params, 3, torch.float32), folder / name / "consolidated.00.pth")


@dataclass
class Ended:
    """A process that has ended: when (time.time()), how, and what it printed."""

    at: float
    returncode: int
    stdout: str
    stderr: str


def run_together(commands: list[list[str]], environments: list[dict[str, str]], timeout: float = 120) -> list[Ended]:
    """Start all, wait for all; what is still there after `timeout` seconds is ended (returncode -15)."""
    last = time.time() + timeout
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, env=env, **pipes) for command, env in zip(commands, environments, strict=True)]
    ended = []
    for process in running:
        try:
            out, err = process.communicate(timeout=max(0.1, last - time.time()))
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun hands it on to its ranks
            out, err = process.communicate(timeout=40)
        ended.append(Ended(time.time(), process.returncode, out, err))
    return ended


@dataclass
class Records:
    """What all ranks of one start wrote, and how it ended."""

    folder: Path
    ranks: int
    ended: Ended

    def values(self, name: str) -> list[Any]:
        """Every rank's value; fails with the traceback of the first rank whose check did not pass."""
        paths = [self.folder / f"{name}.{rank}.json" for rank in range(self.ranks)]
        missing = {"error": f"{name} left no record; stderr: {self.ended.stderr[-3000:]}"}
        records = [json.loads(path.read_text()) if path.exists() else missing for path in paths]
        for rank, record in enumerate(records):
            if "error" in record:
                pytest.fail(f"rank {rank} of {self.ranks}: {record['error']}", pytrace=False)
        return [record["value"] for record in records]

    def seconds_after_the_end_of_a_rank(self) -> float:
        return self.ended.at - float((self.folder / "ended_at").read_text())


def run_plain(folders: list[Path]) -> list[Records]:
    """Programs of one rank side by side, with none of torchrun's variables."""
    commands = [[sys.executable, WORKER, str(folder), *CHECKS] for folder in folders]
    ended = run_together(commands, [environment()] * len(folders))
    return [Records(folder, 1, each) for folder, each in zip(folders, ended, strict=True)]


def run_torchrun(ranks: int, folder: Path, names: list[str]) -> Records:
    (ended,) = run_together([torchrun(ranks, folder, names)], [environment()])
    return Records(folder, ranks, ended)


@pytest.fixture(scope="session")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Records]:
    """The records of a kind of start, which is made when a test first asks for it."""
    made: dict[str, Records] = {}

    def make(kind: str) -> None:
        folders = [tmp_path_factory.mktemp("ranks"), tmp_path_factory.mktemp("twin")]
        for folder in folders:
            write_checkpoints(folder)
        if kind in ("plain", "twin"):
            made["plain"], made["twin"] = run_plain(folders)
        else:
            made[kind] = run_torchrun(int(kind.split()[1]), folders[0], [*CHECKS, "crash_while_generating"])

    def start(kind: str) -> Records:
        if kind not in made:
            make(kind)
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


def test_a_single_rank_ends_well(starts: Callable[[str], Records]) -> None:
    assert [starts(kind).ended.returncode for kind in ("plain", "twin")] == [0, 0]


@pytest.mark.parametrize("name", ["environment", "sampled", "callers_process_group", "greedy"])
def test_two_programs_side_by_side_without_any_variables(starts: Callable[[str], Records], name: str) -> None:
    assert starts("plain").values(name) == starts("twin").values(name)


def test_a_failing_rank_ends_all_with_its_message(records: Records) -> None:
    """The last rank raised in the middle of a text, after all the checks."""
    if records.ranks > 1:
        assert records.ended.returncode not in (0, -15)
        assert records.seconds_after_the_end_of_a_rank() < 10
        assert "a rank failed on purpose" in records.ended.stderr


@pytest.mark.slow
def test_a_rank_that_cannot_load_and_nobody_catches_it(tmp_path: Path) -> None:
    records = run_torchrun(2, tmp_path, ["crash_while_loading"])
    assert records.ended.returncode not in (0, -15) and "Loaded" not in records.ended.stdout
    assert records.seconds_after_the_end_of_a_rank() < 10 and "nowhere" in records.ended.stderr


def test_the_same_samples_though_every_rank_was_seeded_differently(
    records: Records, starts: Callable[[str], Records]
) -> None:
    values = records.values("sampled")
    assert values == [values[0]] * records.ranks
    assert values == starts("plain").values("sampled") * records.ranks


def test_the_shard_is_the_ranks_own(records: Records) -> None:
    assert records.values("shards") == list(range(records.ranks))


def test_no_full_weight_is_allocated(starts: Callable[[str], Records]) -> None:
    assert max(starts("torchrun 2").values("allocations")) == 360 * 48 // 2


@pytest.mark.slow
def test_no_full_weight_is_allocated_on_four(starts: Callable[[str], Records]) -> None:
    assert max(starts("torchrun 4").values("allocations")) == 360 * 48 // 4


def test_later_ranks_are_silent_on_stdout_until_close(records: Records) -> None:
    records.values("muting")
    ranks = range(records.ranks)
    assert [rank for rank in ranks if f"while open, rank {rank}" in records.ended.stdout] == [0]
    assert [rank for rank in ranks if f"after close, rank {rank}" in records.ended.stdout] == list(ranks)
    assert [rank for rank in ranks if f"stderr, rank {rank}" in records.ended.stderr] == list(ranks)
    printed = [line for line in records.ended.stdout.splitlines() if "close" not in line and "while open" not in line]
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


# ---------------------------------------------------------------------------------- other ways to start


def test_two_machines_then_one_of_them_vanishes(tmp_path: Path) -> None:
    """RANK=1, LOCAL_RANK=0 loads shard 01; ranks started by hand, so that no launcher ends the one that is left."""
    whole = torch.load(GOLDEN / "consolidated.00.pth", weights_only=True)
    for rank in range(2):
        shard = {name: helpers_ranks.part(name, weight, rank, 2).clone() for name, weight in whole.items()}
        torch.save(shard, tmp_path / f"consolidated.{rank:02}.pth")
    write_checkpoints(tmp_path)
    for name in ("params.json", "tokenizer.model"):
        (tmp_path / name).write_bytes((GOLDEN / name).read_bytes())
    both = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    environments = [environment(**both, RANK=str(rank), CKPT_DIR=str(tmp_path)) for rank in range(2)]
    names = ["shards", "greedy", "sampled", "three_builds", "a_build_while_the_first_rank_still_closes"]
    names += ["callers_process_group_from_the_environment"]
    command = [sys.executable, WORKER, str(tmp_path), *names, "vanish_while_generating"]
    first, last = run_together([command] * 2, environments)
    records = Records(tmp_path, 2, first)
    assert records.values("shards") == [0, 1]
    for name in names:
        records.values(name)
    assert last.returncode == 3 and first.returncode not in (0, -15)
    assert records.seconds_after_the_end_of_a_rank() < 10 and first.stderr


SPAWNED = """
import os, sys
import torch.multiprocessing as mp

def work(rank, port):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    import helpers_ranks
    helpers_ranks.main(sys.argv[3:])

if __name__ == "__main__":
    mp.spawn(work, args=(sys.argv[2],), nprocs=2)
"""


@pytest.mark.slow
def test_ranks_spawned_by_the_program_itself(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SPAWNED)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path), free_port(), "greedy", "three_builds"]
    write_checkpoints(tmp_path)
    (ended,) = run_together([command], [environment()])
    assert ended.returncode == 0, ended.stderr
    for name in ("greedy", "three_builds"):
        Records(tmp_path, 2, ended).values(name)


def test_variables_that_are_half_set() -> None:
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
