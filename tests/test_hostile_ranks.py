"""Ranks that disagree, are asked for nonsense, stop, or find another program at their port: an error, in time."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT
from test_ranks import environment, free_port

pytestmark = pytest.mark.slow  # two ranks each: ten seconds

HEAD = """
import json, os, sys, time
from pathlib import Path
import torch
from llama import Llama, LlamaError, serve
from llama.serving import Conversation

torch.set_num_threads(1)
RANK, DEMO, FOLDER = int(os.environ["RANK"]), "checkpoints/demo", Path(sys.argv[1])

def build(**changes):
    settings = {"ckpt_dir": DEMO, "tokenizer_path": None, "max_seq_len": 64, "max_batch_size": 2, "device": "cpu"}
    return Llama.build(**{**settings, "timeout": 12, **changes})

def error(work):
    try:
        return repr(work())
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def leave(value):
    (FOLDER / f"{RANK}.json").write_text(json.dumps(value))
"""


def start(folder: Path, program: str, port: str | None = None) -> list[subprocess.Popen[str]]:
    (folder / "program.py").write_text(HEAD + program)
    variables = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port or free_port()}
    command = [sys.executable, str(folder / "program.py"), str(folder)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
    return [subprocess.Popen(command, env=environment(RANK=str(rank), **variables), **pipes) for rank in range(2)]


def finish(ranks: list[subprocess.Popen[str]], folder: Path) -> list[Any]:
    """What each rank left, once both have ended well."""
    try:
        said = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_any_exception_of_a_served_call_leaves_all_ranks_serving(tmp_path: Path) -> None:
    program = """
class Odd:  # cannot be made on the other rank
    def __reduce__(self):
        return eval, ("1 / 0 if int(__import__('os').environ['RANK']) else 5",)

WRONG = [{"frequency_penalty": 1e308}, {"temperature": 10**400}, {"top_p": 5.0}, {"temperature": object()},
         {"nonsense": 1}, {"top_k": Odd()}, {"stop": lambda: 1}]
found = []

def lead(call):
    found.append(call("generate", [[1, 42, 7]], 4, temperature=10**30, seed=1)[0])
    for options in WRONG:
        found.append(error(lambda: call("generate", [[1, 42, 7]], 4, **options)))
    for direct in (lambda: next(g.stream_text("Once")), lambda: g.generate([[1]], 2), lambda: g.embed(["a"]),
                   lambda: next(Conversation(g).ask("hi"))):
        found.append(error(direct))
    found.append(call("generate", [[1, 42, 7]], 4, temperature=10**30, seed=1)[0])
    lead.call = call

with build() as g:
    serve(g, lead)
    found.append(error(lambda: lead.call("generate", [[1]], 2)) if RANK == 0 else None)
    found.append(g.generate([[1, 42, 7]], 4, temperature=10**30, seed=1)[0])
    leave(found)
"""
    first, second = finish(start(tmp_path, program), tmp_path)
    tokens = first[0]
    assert first[1].startswith("LlamaError: frequency_penalty=1e+308")
    assert [text.partition(":")[0] for text in first[1:8]] == ["LlamaError"] * 4 + ["TypeError"] + ["LlamaError"] * 2
    assert all("served on several ranks" in text for text in first[8:12])
    assert first[12] == tokens == first[14] == second[1] and "the server has ended" in first[13]


def test_ranks_that_were_started_differently_say_in_what(tmp_path: Path) -> None:
    program = """
import shutil
other = FOLDER / f"other{RANK}"
shutil.copytree(DEMO, other)
path = other / "consolidated.00.pth"
weights = torch.load(path, weights_only=True)
weights["layers.0.attention.wv.weight"][0, 0] += 1
torch.save(weights, path)
CHANGES = {"max_seq_len": {"max_seq_len": 32}, "max_batch_size": {"max_batch_size": 1}, "dtype": {"dtype": "bfloat16"},
           "quantize": {"quantize": "int8"}, "the weights' digest": {"ckpt_dir": str(other)}}
found = {}
for name, changes in CHANGES.items():
    found[name] = error(lambda: build(**(changes if RANK else {})))
with build(seed=RANK) as g:
    g.generate([[1, 5]], 2, seed=RANK)
    found["the prompts"] = error(lambda: g.generate([[1, 5 + RANK]], 2))
    found["max_gen_len"] = error(lambda: g.generate([[1, 5]], 2 + RANK))
    found["temperature"] = error(lambda: next(g.stream([[1, 5]], 2, temperature=RANK)))
    handle = g.model.norm.register_forward_hook(lambda *a: None) if RANK else None
    found["hooks or patches"] = error(lambda: g.generate([[1, 5]], 2))
    if handle:
        handle.remove()
    found["last"] = g.generate([[1, 5]], 2)[0]
leave(found)
"""
    first, second = finish(start(tmp_path, program), tmp_path)
    assert first == second and len(first.pop("last")[0]) == 2
    for name, message in first.items():
        assert message.startswith("LlamaError: the ranks do not agree") and name in message, message
        assert message.count(" on rank 1") == 1, message


def test_a_silent_program_at_the_port_is_an_error_within_the_timeout(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("0.0.0.0", 0))
        silent.listen(50)
        program = "begin = time.monotonic()\nleave([error(build), time.monotonic() - begin])"
        found = finish(start(tmp_path, program, port=str(silent.getsockname()[1])), tmp_path)
    assert all("did not find the others" in message and seconds < 12 + 5 for message, seconds in found), found


def test_a_rank_that_is_stopped_while_loading_is_missed_after_about_the_timeout(tmp_path: Path) -> None:
    program = """
from llama import checkpoint
real = checkpoint.open_checkpoint
def stop(*args):
    if RANK == 1:
        os.kill(os.getpid(), 19)
    return real(*args)
checkpoint.open_checkpoint = stop
begin = time.monotonic()
leave([error(build), time.monotonic() - begin])
"""
    ranks = start(tmp_path, program)
    try:
        ranks[0].communicate(timeout=60)
    finally:
        os.kill(ranks[1].pid, signal.SIGKILL)
        ranks[1].communicate(timeout=20)
    message, seconds = json.loads((tmp_path / "0.json").read_text())
    assert "lost another rank" in message and seconds < 12 + 8
