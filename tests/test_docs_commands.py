"""Every command in README and docs: its flags exist, and what needs no GPU, no network and no real weights is run.

Where a page names weights that one has to fetch (llama-2-7b, ...) a tiny random model stands in. Commands of one page run
in order in one folder, in this process; those under torchrun a second time, slowly, as they are typed.
"""

import functools
import importlib.util
import inspect
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_files as files
import lora_files
import pytest
import reference
import torch
from test_docs import PAGES, ROOT, read
from torch.distributed.run import get_args_parser

from llama import __main__ as command_line
from llama.cli.arguments import parse_arguments
from llama.cli.convert import convert
from llama.tokenizer import Tokenizer

DEMO = ROOT / "checkpoints" / "demo"
WEIGHTS = [f"llama-2-{size}{kind}" for size in ("7b", "13b", "70b") for kind in ("", "-chat")] + ["small-model"]
PATHS = ["--ckpt_dir", "checkpoints/demo", "--tokenizer_path", "checkpoints/demo/tokenizer.model"]
PLACEHOLDERS = {"N": ["2"], "...": PATHS, "DIR": PATHS[1:2], "FILE": PATHS[3:], "CKPT": PATHS[1:2]}

# The first words of what counts as a command, and why some are only read, not run.
OURS = ("python", "torchrun", "./download.sh", "examples/two_nodes.sh")
NOT_RUN = {
    "pip": "changes the environment; .ci/run does it",
    "pytest": "runs this",
    ".ci/run": "runs this",
    "ruff": ".ci/run does it",
    "mypy": ".ci/run does it",
    "./download.sh": "tests/test_download.py runs it against a server on loopback",
    "examples/two_nodes.sh": "tests/test_two_hosts.py runs it on two hosts",
    "python benchmarks": "takes minutes and gigabytes",
    "python tools": "takes minutes",
    "python tests": "takes minutes",
    "python -m llama bench": "takes minutes",
    "python -m torch.distributed.run": "named as another word for torchrun",
    "python -m pip": "changes the environment",
    "vllm": "another project's",
    "ray": "another project's",
    "ping": "a tool of the system",
    "nc": "a tool of the system",
    "ip": "a tool of the system",
    "git": "a tool of the system",
}
PROGRAMS = (*OURS, *(first.split()[0] for first in NOT_RUN))


def words(line: str) -> list[str]:
    """The words of one command, without comment, placeholders filled in."""
    return [part for word in shlex.split(line, comments=True) for part in PLACEHOLDERS.get(word, [word])]


def commands(page: str) -> list[str]:
    """The commands of a page in order, one string each: the lines of its shell blocks, of other blocks and the code
    within sentences what begins with a known program.
    """
    found: list[str] = []
    for language, block, inline in re.findall(r"```(\w*)\n(.*?)```|`([^`\n]+|[^`]+\n[^`]+)`", read(page), re.DOTALL):
        shell = language in ("bash", "sh", "console")
        text = re.sub(r"\\\n\s*", " ", block or inline.replace("\n", " "))
        lines = text.splitlines() if language in ("", "bash", "sh", "console") else []
        for line in (part.strip() for whole in lines for part in whole.split("&&")):
            name = next((word for word in line.split() if not re.match(r"[A-Z_]+=", word)), "#")
            if shell and not name.startswith("#"):
                assert name in PROGRAMS, f"{page}: {name} is new: say in {Path(__file__).name} what it is"
            if name in PROGRAMS and (block or " " in line or name in (".ci/run", "./download.sh")):
                found.append(line)
    return found


ALL = [(page, command) for page in PAGES for command in dict.fromkeys(commands(page))]


def why_not_run(command: list[str]) -> str | None:
    line = " ".join(command)
    return next((why for first, why in NOT_RUN.items() if f"{line} ".startswith((f"{first} ", f"{first}/"))), None)


# --------------------------------------------------------------------------------------- the flags of a command


def check_call(function: Callable[..., Any], arguments: list[str]) -> None:
    """The arguments that fire would hand to the function: known flags, no more values than it takes, none missing."""
    parameters = inspect.signature(function).parameters
    given: set[str] = set()
    values = 0
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            values += 1
            continue
        name, equals, _ = word.removeprefix("--").replace("-", "_").partition("=")
        assert name in parameters, f"--{name} is no flag of {function.__name__}: {', '.join(parameters)}"
        given.add(name)
        if not equals and rest and not rest[0].startswith("--"):
            rest.pop(0)
    by_place = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD and p.name not in given]
    assert values <= len(by_place), f"{function.__name__} takes {len(by_place)} values, not {values}"
    needed = {p.name for p in parameters.values() if p.default is p.empty} - given - set(by_place[:values])
    assert not needed, f"{function.__name__} lacks {needed}"


@functools.cache
def load(script: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(script).stem, ROOT / script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_script(script: str, arguments: list[str]) -> None:
    assert (ROOT / script).is_file(), f"there is no {script}"
    text = (ROOT / script).read_text(encoding="utf-8")
    if "fire.Fire(main)" in text:
        check_call(load(script).main, arguments)
        return
    for flag in (word.partition("=")[0] for word in arguments if word.startswith("-")):
        assert f'"{flag}"' in text, f"{script} has no flag {flag}"


def check_torchrun(arguments: list[str]) -> None:
    """torchrun's own parser takes its part; the rest goes to the script, or to `-m llama`."""
    parsed = get_args_parser().parse_args(arguments if len(arguments) > 2 else [*arguments, "-m", "torch"])
    if parsed.module and parsed.training_script == "llama":
        check_llama(parsed.training_script_args)
    elif not parsed.module:
        check_script(parsed.training_script, parsed.training_script_args)


def check_llama(arguments: list[str]) -> None:
    if arguments[0].startswith("{"):  # the list of all
        assert set(re.findall(r"\w+", " ".join(arguments))) == set(command_line.COMMANDS)
        return
    parse_arguments(command_line.COMMANDS, arguments)  # exits where something is wrong


def check_pip(arguments: list[str]) -> None:
    assert arguments[0] == "install"
    extras = re.search(r"\.\[(\w+)\]", " ".join(arguments))
    assert extras is None or f'"{extras[1]}": [' in (ROOT / "setup.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(("page", "command"), ALL, ids=[f"{page}: {command[:60]}" for page, command in ALL])
def test_flags_exist(page: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = words(command)
    while re.match(r"[A-Z_]+=", given[0]):
        given.pop(0)
    name, *rest = given
    if name == "torchrun":
        check_torchrun(rest)
    elif given[:3] == ["python", "-m", "llama"]:
        check_llama(rest[2:])
    elif name == "python" and rest[0] != "-m":
        check_script(rest[0], rest[1:])
    elif name == "pip":
        check_pip(rest)
    elif name == "examples/two_nodes.sh":
        assert rest[0] in ("0", "1")
        check_script(rest[3], rest[4:])
    elif name in ("./download.sh", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK) and not rest


def test_the_commands_are_seen() -> None:
    """The parser of pages finds what a person finds."""
    readme = commands("README.md")
    assert any(c.startswith("torchrun --nnodes 2") for c in readme) and "pytest" in readme
    assert "./download.sh" in readme and sum("--nproc_per_node 8" in c for c in readme) == 1
    assert any(c.endswith("--distributed-executor-backend ray") for c in commands("docs/scaling.md"))
    assert len(ALL) >= 25


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc_per_node 1 --colour red example_text_completion.py --ckpt_dir a --tokenizer_path b",
        "torchrun --nproc_per_node 1 example_text_completion.py --ckpt_dir a",
        "torchrun --nproc_per_node 1 example_no_completion.py",
        "python -m llama sing",
        "python -m llama info a --loud",
        "python -m llama convert a b c d e f g h i j",
        "python benchmarks/load.py --loud",
        'pip install -e ".[nothing]"',
    ],
)
def test_a_wrong_command_is_noticed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((AssertionError, SystemExit)):
        test_flags_exist("README.md", command, capsys)


# ------------------------------------------------------------------------------------------------- they run


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights with 8 heads of each kind, so that up to 8 ranks or files can share them, and our tokenizer."""
    made = tmp_path_factory.mktemp("stand-in")
    params = {"dim": 64, "n_layers": 2, "n_heads": 8, "n_kv_heads": 8, "multiple_of": 32, "norm_eps": 1e-5}
    shutil.copy(DEMO / "tokenizer.model", made)
    n_words = Tokenizer(str(DEMO / "tokenizer.model")).n_words
    weights = reference.random_weights({**params, "vocab_size": n_words}, 3, torch.float32)
    # the end is likely at every step, so that nothing takes long: state 0 is large, and only it meets the output matrix
    weights["tok_embeddings.weight"][:, 0] = 1000.0
    weights["norm.weight"] = torch.zeros(64).index_fill(0, torch.tensor([0]), 1 / 8)
    weights["output.weight"][:, 0] = torch.zeros(n_words).index_fill(0, torch.tensor([2]), 3.0)
    torch.save(weights, made / "consolidated.00.pth")
    (made / "params.json").write_text(json.dumps({**params, "vocab_size": -1}))
    return made


@pytest.fixture
def folder(tmp_path: Path, stand_in: Path) -> Path:
    """A folder like the repository, in which the stand-in has the names of the pages' weights."""
    for name in ("checkpoints", "examples", "example_text_completion.py", "example_chat_completion.py", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in WEIGHTS:
        (tmp_path / name).symlink_to(stand_in)
    (tmp_path / "tokenizer.model").symlink_to(DEMO / "tokenizer.model")
    (tmp_path / "models").mkdir()
    return tmp_path


def write_stories(folder: Path) -> None:
    convert(str(DEMO), str(folder / "c"), "llama2c", force=True)
    for old, new in (("model.bin", "stories15M.bin"), ("tokenizer.bin", "tokenizer.bin")):
        (folder / "c" / old).rename(folder / new)


def write_adapters(folder: Path) -> None:
    weights = torch.load(folder / "llama-2-7b" / "consolidated.00.pth", weights_only=True)
    for name in ("my-adapter", "style", "facts"):
        lora_files.write_adapter(folder / name, lora_files.matrices(weights, ["q_proj"]))


def runnable(page: str) -> list[list[str]]:
    """The words of a page's commands that can run."""
    found = [words(command) for command in dict.fromkeys(commands(page))]
    return [w for w in found if w[0] in ("python", "torchrun") and why_not_run(w) is None and "{complete," not in w]


def run_here(command: list[str], folder: Path) -> None:
    """`python -m llama ...`, `python SCRIPT ...`, or torchrun's script as one rank."""
    program = command[1:]
    if command[0] == "torchrun":
        parsed = get_args_parser().parse_args(program)
        program = [*(["-m"] if parsed.module else []), parsed.training_script, *parsed.training_script_args]
    if program[0] == "-m":
        assert program[1] == "llama"
        sys.argv = program[1:]
        command_line.main()
    else:
        sys.argv = program
        runpy.run_path(str(folder / program[0]), run_name="__main__")


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)])
def test_commands_run(
    page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", sys.argv)
    if "stories15M.bin" in read(page):
        write_stories(folder)
    if "model.gguf" in read(page):
        files.write_gguf(folder / "model.gguf", files.weights())
    if "--lora" in read(page):
        write_adapters(folder)
    capsys.readouterr()
    for command in runnable(page):
        if "--nproc_per_node" in command and len(command) < 4:
            continue  # `torchrun --nproc_per_node N`, without a program
        here = [word.replace("/models/", f"{folder}/models/") for word in command]
        monkeypatch.setattr(sys, "stdin", io.StringIO("What sound does a cow make?\n"))
        try:
            run_here(here, folder)
        except SystemExit as end:
            assert not end.code, f"{page}: {shlex.join(command)} ended with {end.code}: {capsys.readouterr().err}"
        printed = capsys.readouterr().out
        assert printed.strip() or "convert" in command, f"{page}: {shlex.join(command)} printed nothing"


TYPED = list(
    dict.fromkeys(shlex.join(w) for page in PAGES for w in runnable(page) if w[0] == "torchrun" and len(w) > 4)
)


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for line in TYPED if "--nnodes" not in line])
def test_torchrun_commands_run_as_typed(command: str, folder: Path) -> None:
    argv = [sys.executable, "-m", "torch.distributed.run", *shlex.split(command)[1:]]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        argv, cwd=folder, env=env, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("Loaded in ") and done.stdout.count("Loaded in ") == 1
    assert "Warning" not in done.stderr and "Traceback" not in done.stderr
