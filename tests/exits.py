"""How programs of two gloo ranks end that never call `close()`: `python tests/exits.py --runs 300` counts, with busy
processes beside them, ranks with another status than the program's own and ends that take over 10 s (until the last
exit handler, ours among them, has returned; and until the process is gone, where torch's own end takes a second or two).

Ranks are forked from this process, which has imported everything and has no threads: thrice as many runs in the time.
"""

import argparse
import atexit
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from helpers import build_golden

LIMIT = 10.0  # seconds that an end may take
LOST = 120.0  # after which a rank is killed


class Case(NamedTuple):
    """The last line of a program, the status of each rank, how many generators it builds, how late the second ends."""

    end: Callable[[int], Any]
    statuses: tuple[int, int]
    builds: int
    late: float


def fail(rank: int) -> None:
    raise ValueError("own")


def interrupt(rank: int) -> None:
    raise KeyboardInterrupt


ENDS: list[tuple[Callable[[int], Any], tuple[int, int]]] = [
    (lambda rank: None, (0, 0)),
    (lambda rank: sys.exit(3), (3, 3)),
    (fail, (1, 1)),
    (interrupt, (-2, -2)),  # as Python itself ends then
    (lambda rank: fail(rank) if rank else None, (0, 1)),
]
CASES = [Case(*end, builds, late) for builds, late, end in itertools.product((1, 2), (0.0, 1.0), ENDS)]


class Rank:
    """A process that runs one program's rank and comes to its end as any script's does."""

    def __init__(self, case: Case, rank: int, port: int) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.status: int | None = None
        self.begun = time.time()
        self.pid = os.fork()
        if not self.pid:
            os.dup2(self.log.fileno(), 2)
            self.run(case, rank, port)

    def run(self, case: Case, rank: int, port: int) -> None:
        """In the new process; what it raises ends it."""
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        atexit.register(
            lambda: print("\nhandlers", time.time(), file=sys.stderr, flush=True)
        )  # before ours: called after
        generators = [build_golden() for _ in range(case.builds)]
        generators[-1].text_completion(["river stone"], temperature=0, max_gen_len=4)
        time.sleep(case.late * rank)
        print("\nend", time.time(), file=sys.stderr, flush=True)
        case.end(rank)
        sys.exit()

    def is_over(self) -> bool:
        """Whether it has ended; it is killed where it does not."""
        if self.status is None:
            if time.time() - self.begun > LOST:
                os.kill(self.pid, 9)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status, self.over = os.waitstatus_to_exitcode(status), time.time()
                self.log.seek(0)
                self.stderr = self.log.read().decode(errors="replace")
                self.log.close()
        return self.status is not None

    def seconds(self, name: str | None = None) -> float:
        """From its last line to the line `name` in its log, or to its end."""
        marks = dict(line.split() for line in self.stderr.splitlines() if line.startswith(("end ", "handlers ")))
        end = self.over if name is None else float(marks.get(name, "nan"))
        return end - float(marks.get("end", "nan"))


def start(case: Case) -> list[Rank]:
    """Both ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [Rank(case, rank, port) for rank in range(2)]


class Count:
    """What has been found."""

    def __init__(self) -> None:
        self.runs, self.bad, self.worst = 0, Counter[str](), [0.0, 0.0]

    def add(self, case: Case, ranks: list[Rank]) -> None:
        self.runs += 1
        statuses = tuple(rank.status for rank in ranks)
        if statuses != case.statuses:
            self.bad["status"] += 1
            print(f"{statuses} for {case}", *(rank.stderr[-3000:] for rank in ranks), sep="\n")
        for i, name in enumerate(("handlers", None)):
            took = max(rank.seconds(name) for rank in ranks)
            self.worst[i] = max(self.worst[i], took)
            if not took <= LIMIT:
                self.bad[name or "process"] += 1
                print(f"{took:.1f} s to the end of {name or 'the process'}: {case}")
        worst = f"longest {self.worst[0]:.1f} s (handlers), {self.worst[1]:.1f} s (process)"
        print(f"{self.runs} runs, bad: {dict(self.bad)}, {worst}, load {os.getloadavg()[0]:.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--busy", type=int, default=os.cpu_count())
    parser.add_argument("--at-once", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    idle = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"  # they end with this process
    beside = [subprocess.Popen([sys.executable, "-c", idle]) for _ in range(options.busy)]
    count, running, waiting = Count(), [], [CASES[i * 7 % len(CASES)] for i in range(options.runs)]
    while waiting or running:  # no `finally` here: the forked ranks would run it too
        if waiting and len(running) < options.at_once:
            running.append((waiting[0], start(waiting.pop(0))))
        for case, ranks in list(running):
            over = [rank.is_over() for rank in ranks]
            if all(over):
                running.remove((case, ranks))
                count.add(case, ranks)
        time.sleep(0.02)
    for process in beside:
        process.kill()
    sys.exit("bad" if count.bad["status"] or count.bad["handlers"] else 0)


if __name__ == "__main__":
    main()
