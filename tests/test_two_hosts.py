"""Two machines: two network namespaces with a virtual cable between them, a rank in each, started by
examples/two_nodes.sh. They give the tokens of one process; and when the second is cut off or dies in the middle of a
text, the first says so within `timeout=` and ends.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 12  # seconds, build's timeout: long enough to start a rank on a busy machine
ADDRESSES = ["10.77.31.1", "10.77.31.2"]

PROGRAM = f"""
import sys, time
from llama import Llama

with Llama.build("checkpoints/demo", None, 256, 2, device="cpu", dtype="float32", timeout={LIMIT}) as generator:
    if sys.argv[1] == "tokens":
        print(generator.generate([[1, 42], [1, 7, 99]], 20, temperature=0)[0])
    else:
        generator.tokenizer.eos_id = None
        for step in generator.stream([[1, 42]], 200, temperature=0):
            print("step", flush=True)
            time.sleep(0.05)
print("ended well")
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


class Hosts:
    """Two namespaces, cards `card0` and `card1`, and the processes started in them."""

    def __init__(self) -> None:
        self.names = [f"llama{os.getpid()}-{host}" for host in range(2)]
        self.running: list[subprocess.Popen[str]] = []

    def connect(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", "card0", "netns", self.names[0], "type", "veth", "peer", "name", "card1", "netns", self.names[1])  # fmt: skip
        for host, (name, address) in enumerate(zip(self.names, ADDRESSES)):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", f"card{host}")
            ip("-n", name, "link", "set", f"card{host}", "up")

    def start(self, program: Path, mode: str, cards: tuple[str, str] = ("card0", "card1")) -> None:
        plain = {
            k: v for k, v in os.environ.items() if not re.match(r"RANK|WORLD_SIZE|LOCAL_|MASTER_|GLOO_|TORCHEL", k)
        }
        env = {**plain, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
        script = str(ROOT / "examples" / "two_nodes.sh")
        for host in range(2):
            command = ["ip", "netns", "exec", self.names[host], script, str(host), ADDRESSES[0], cards[host]]
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            self.running.append(subprocess.Popen([*command, str(program), mode], cwd=ROOT, env=env, **pipes))

    def wait_for_steps(self, count: int) -> None:
        out = self.running[0].stdout
        assert out is not None
        seen: list[str] = []
        while seen.count("step\n") < count:
            line = out.readline()
            assert line, f"the first host ended too soon: {''.join(seen)[-3000:]}"
            seen.append(line)

    def kill(self, host: int) -> None:
        """End everything on a host at once, as when its power is cut."""
        pids = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True, timeout=20)
        for pid in pids.stdout.split():
            os.kill(int(pid), signal.SIGKILL)

    def end(self, host: int, timeout: float) -> tuple[int, str]:
        """Exit status and the rest of the output of a host's launcher; -15 where it had to be ended."""
        process = self.running[host]
        try:
            out, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill(host)
            out, _ = process.communicate(timeout=20)
            return -15, out
        return process.returncode, out

    def remove(self) -> None:
        for host, process in enumerate(self.running):
            if process.poll() is None:
                self.kill(host)
            process.communicate(timeout=20)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` here (Debian: apt-get install iproute2)")
    made = Hosts()
    try:
        made.connect()
    except subprocess.CalledProcessError as error:
        made.remove()
        pytest.skip(f"no network namespaces here: {' '.join(error.cmd)}: {error.stderr.strip()}")
    yield made
    made.remove()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return path


@pytest.mark.slow
def test_two_hosts_give_the_tokens_of_one(hosts: Hosts, program: Path) -> None:
    hosts.start(program, "tokens")
    one = subprocess.run([sys.executable, str(program), "tokens"], cwd=ROOT, capture_output=True, text=True, timeout=90,
                         env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert one.returncode == 0, one.stderr
    tokens = next(line for line in one.stdout.splitlines() if line.startswith("[["))
    (first, said), (second, said_second) = hosts.end(0, 90), hosts.end(1, 30)
    assert (first, second) == (0, 0), said + said_second
    assert tokens in said.splitlines() and "[[" not in said_second


@pytest.mark.slow
@pytest.mark.parametrize("how", ["the cable is pulled", "the power is cut"])
def test_the_second_host_vanishes_in_the_middle_of_a_text(hosts: Hosts, program: Path, how: str) -> None:
    """A dead process answers at once with a reset; a pulled cable is silence, which only the timeout ends."""
    hosts.start(program, "stream")
    hosts.wait_for_steps(10)
    if how == "the cable is pulled":
        ip("-n", hosts.names[1], "link", "set", "card1", "down")
    else:
        hosts.kill(1)
    begin = time.monotonic()
    status, said = hosts.end(0, LIMIT + 20)
    took = time.monotonic() - begin
    assert status not in (0, -15), f"the first host hung: {said[-3000:]}"
    assert "rank 0 of 2 lost another rank" in said and "ended well" not in said, said[-3000:]
    assert took < LIMIT + 10


@pytest.mark.slow
def test_the_wrong_network_card_is_an_error_that_says_so(hosts: Hosts, program: Path) -> None:
    """Over loopback the ranks meet at the store but not each other; docs/scaling.md says which variable that takes."""
    hosts.start(program, "tokens", cards=("lo", "lo"))
    status, said = hosts.end(0, LIMIT + 30)
    assert status not in (0, -15), said[-3000:]
    assert f"rank 0 of 2 did not find the others through {ADDRESSES[0]}:29500" in said, said[-3000:]
    assert "GLOO_SOCKET_IFNAME" in said
