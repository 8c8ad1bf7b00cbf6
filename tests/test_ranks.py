"""One model over several ranks: the same text on 1, 2 and 4, groups that come and go, and no rank that hangs.

Starting ranks costs seconds, so all checks of one kind of start run in one (tests/helpers_ranks.py), the kinds side by
side, and each test here looks at the record of one check.
"""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import checkpoint_files
import helpers_ranks
import pytest
import reference
import torch
from helpers import GOLDEN, ROOT, build_golden

from llama import LlamaError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
WORKER = str(ROOT / "tests" / "helpers_ranks.py")
CHECKS = [name for name in helpers_ranks.CHECKS if not name.startswith(("crash", "vanish"))]
TWINS = ["environment", "sampled", "callers_process_group", "greedy"]  # of two programs, compared
MACHINES = ["shards", "greedy", "sampled", "three_builds", "a_build_while_the_first_rank_still_closes"]
MACHINES += ["callers_process_group_from_the_environment"]
SIDE_BY_SIDE = ["torchrun 2", "plain"]
STARTS = ["plain", "torchrun 2", pytest.param("torchrun 4", marks=pytest.mark.slow)]


def environment(**changes: str) -> dict[str, str]:
    """Without any of torchrun's variables."""
    plain = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    return {**plain, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **changes}


def free_port() -> str:
    """Below the ports that the system gives to whoever asks for any, since other ranks start meanwhile."""
    for port in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return str(port)
    raise AssertionError("100 ports in use")


@dataclass
class Ended:
    """A process that has ended: when (time.time()), how, and what it printed."""

    at: float
    returncode: int
    stdout: str
    stderr: str


def run(command: list[str], **variables: str) -> Ended:
    """Run to its end; what is still there after two minutes is ended (returncode -15)."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environment(**variables), stdout=pipe, stderr=pipe, text=True)
    try:
        out, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun hands it on to its ranks
        out, err = process.communicate(timeout=40)
    return Ended(time.time(), process.returncode, out, err)


@dataclass
class Records:
    """What all ranks of one start wrote, and how its processes ended: torchrun, or each rank where there is none."""

    folder: Path
    ranks: int
    processes: list[Ended]

    @property
    def ended(self) -> Ended:
        return self.processes[0]

    def values(self, name: str) -> list[object]:
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


def write_checkpoints(folder: Path) -> None:
    """ "gqa" with 4 key/value heads for 12, "mqa" with one, the golden model in two files, and every format."""
    for name, params in (("gqa", helpers_ranks.GQA), ("mqa", {**helpers_ranks.GQA, "n_kv_heads": 1, "n_heads": 4})):
        (folder / name).mkdir()
        (folder / name / "params.json").write_text(json.dumps({**params, "vocab_size": -1}))
        torch.save(reference.random_weights(params, 3, torch.float32), folder / name / "consolidated.00.pth")
    (folder / "halves").mkdir()
    for name in ("params.json", "tokenizer.model"):
        (folder / "halves" / name).write_bytes((GOLDEN / name).read_bytes())
    whole = torch.load(GOLDEN / "consolidated.00.pth", weights_only=True)
    for rank in range(2):
        shard = {name: helpers_ranks.part(name, weight, rank, 2).clone() for name, weight in whole.items()}
        torch.save(shard, folder / "halves" / f"consolidated.{rank:02}.pth")
    wide, every = checkpoint_files.WIDE, folder / "checkpoints"
    weights = checkpoint_files.weights(wide)
    for shards in (1, 2, 4, 8):
        checkpoint_files.write_meta(every / f"meta{shards}", weights, wide, shards)
    checkpoint_files.write_hf(every / "hf", weights, wide)
    biased = checkpoint_files.BIASED
    checkpoint_files.write_hf(every / "biased", checkpoint_files.weights(biased), biased, head_dim=12)
    checkpoint_files.write_meta(every / "biased2", checkpoint_files.weights(biased), biased, shards=2, rows=True)
    checkpoint_files.write_llama2c(every / "v1.bin", weights, wide, version=1)


def run_plain(folder: Path, names: list[str]) -> Records:
    """A program of one rank, with none of torchrun's variables."""
    return Records(folder, 1, [run([sys.executable, WORKER, str(folder), *names])])


def run_torchrun(ranks: int, folder: Path, names: list[str]) -> Records:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return Records(folder, ranks, [run([*launcher, WORKER, str(folder), *names])])


def run_two_machines(folder: Path, names: list[str]) -> Records:
    """LOCAL_RANK is 0 on both; started by hand, so that no launcher ends the one that is left."""
    variables = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = [sys.executable, WORKER, str(folder), *names]

    def machine(rank: int) -> Ended:
        return run(command, RANK=str(rank), CKPT_DIR=str(folder / "halves"), **variables)

    with ThreadPoolExecutor() as pool:
        return Records(folder, 2, list(pool.map(machine, range(2))))


def run_start(kind: str, folder: Path) -> Records:
    write_checkpoints(folder)
    if kind == "two machines":
        return run_two_machines(folder, [*MACHINES, "vanish_while_generating"])
    if kind.startswith("torchrun"):
        return run_torchrun(int(kind.split()[1]), folder, [*CHECKS, "crash_while_generating"])
    return run_plain(folder, CHECKS if kind == "plain" else TWINS)


@pytest.fixture(scope="session")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Records]:
    """The records of a kind of start; those of the default tests are made at once, when a test first asks for one."""
    made: dict[str, Records] = {}

    def start(kind: str) -> Records:
        if kind not in made:
            together = SIDE_BY_SIDE if kind in SIDE_BY_SIDE else [kind, "plain"]
            kinds = [name for name in together if name not in made]
            folders = [tmp_path_factory.mktemp("ranks") for _ in kinds]
            with ThreadPoolExecutor() as pool:
                made.update(zip(kinds, pool.map(run_start, kinds, folders), strict=True))
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
    assert starts("plain").ended.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", TWINS)
def test_two_programs_side_by_side_without_any_variables(starts: Callable[[str], Records], name: str) -> None:
    assert starts("plain").values(name) == starts("twin").values(name)
    assert starts("twin").ended.returncode == 0


EVERY = ["biased", "biased2", "hf", "meta1", "meta2", "meta4", "meta8", "v1.bin"]


@pytest.mark.slow
def test_every_checkpoint_on_eight_ranks(tmp_path: Path) -> None:
    write_checkpoints(tmp_path)
    assert len(run_torchrun(8, tmp_path, ["every_checkpoint"]).values("every_checkpoint")[0]) == 8


def test_every_checkpoint_was_there(records: Records) -> None:
    assert records.values("every_checkpoint")[0] == EVERY


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


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
def test_two_machines(starts: Callable[[str], Records], name: str) -> None:
    """RANK=1, LOCAL_RANK=0 loads shard 01."""
    values = starts("two machines").values(name)
    assert values == ([0, 1] if name == "shards" else [values[0]] * 2)


@pytest.mark.slow
def test_one_of_two_machines_vanishes(starts: Callable[[str], Records]) -> None:
    records = starts("two machines")
    first, last = records.processes
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
    records = Records(tmp_path, 2, [run(command)])
    assert records.ended.returncode == 0, records.ended.stderr
    for name in ("greedy", "three_builds"):
        records.values(name)


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
