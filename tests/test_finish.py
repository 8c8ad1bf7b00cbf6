"""What a stranger meets: the words of `pydoc llama` and `--help`, error messages in one voice, the package installed
from a source distribution somewhere else, type information, and no warning of anybody's on stderr.
"""

import ast
import inspect
import json
import os
import pydoc
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import llama
from llama import LlamaError
from llama.__main__ import COMMANDS as LLAMA_COMMANDS
from llama.cli import session

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "llama"
SOURCES = {
    str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(PACKAGE.rglob("*.py"))
}

Public = ast.FunctionDef | ast.ClassDef

# ------------------------------------------------------------------------------------------- docstrings


def public(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Public]]:
    """Public functions and classes, methods and properties, with their qualified names; setters share the getter's."""
    for node in body:
        if isinstance(node, Public) and not node.name.startswith("_"):
            decorators = {d.attr if isinstance(d, ast.Attribute) else getattr(d, "id", "") for d in node.decorator_list}
            if not decorators & {"setter", "overload"}:
                yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, f"{prefix}{node.name}.")


def stems(text: str) -> set[str]:
    """The words in a text, without endings; `_count_rows` and "Counts the row" have the same."""
    return {re.sub(r"(ion|ing|ed|es|s|e)$", "", word) for word in re.findall(r"[a-z]{3,}", text.lower())}


def complaint(node: Public) -> str | None:
    """What is wrong with a docstring: none, more than five lines (but for Args), or nothing beyond the signature."""
    text = ast.get_docstring(node)
    if not text:
        return "has no docstring"
    lines = [line for line in text.split("\n\nArgs:\n")[0].splitlines() if line]
    if len(lines) > (8 if node.name == "build" else 5):  # build takes fifteen arguments
        return f"has a docstring of {len(lines)} lines"
    signature = [node.args, node.returns or ast.Constant("")] if isinstance(node, ast.FunctionDef) else []
    given = " ".join([node.name, *map(ast.unparse, signature), "the and with that this get set return value object"])
    said = stems(text) - stems(given)
    return None if said else f"repeats its signature: {text!r}"


def test_every_public_name_says_what_it_is_for() -> None:
    found = [(name, complaint(node)) for file in SOURCES for name, node in public(SOURCES[file].body, f"{file}: ")]
    assert len(found) > 150
    assert [(name, words) for name, words in found if words] == []
    assert [file for file, tree in SOURCES.items() if not ast.get_docstring(tree)] == []


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def row_count(rows: int) -> int: ...", "no docstring"),
        ('def row_count(rows: int) -> int:\n  """Count the rows; return the int."""', "repeats"),
        ('class Row:\n  def count(self):\n    """Counts."""', "repeats"),
        ('def f():\n  """Many words of sense.\n' + "  And more.\n" * 5 + '"""', "of 6 lines"),
    ],
)
def test_a_poor_docstring_is_noticed(code: str, words: str) -> None:
    complaints = [complaint(node) for _, node in public(ast.parse(code).body)]
    assert any(words in (found or "") for found in complaints), complaints


def test_pydoc_tells_a_stranger_where_to_begin() -> None:
    page = pydoc.plain(pydoc.render_doc(llama))
    head, body = page.split("PACKAGE CONTENTS")
    assert "with Llama.build(" in head and "python -m llama {" + ", ".join(LLAMA_COMMANDS) + "}" in head
    for name in llama.__all__:
        assert hasattr(llama, name)
        assert name in ("Dialog", "Step") or f"`{name}`" in head, f"{name} is public: say in __init__ what it is"
        assert re.search(rf"^    (class )?{name}\b", body, re.MULTILINE), f"pydoc does not show {name}"


@pytest.mark.parametrize("name", LLAMA_COMMANDS)
def test_help_explains_every_flag(name: str) -> None:
    text = inspect.getdoc(LLAMA_COMMANDS[name]) or ""
    explained = re.findall(r"^    (\w+): [A-Z0-9a-z]", text.split("Args:\n")[1], re.MULTILINE)
    assert explained == list(inspect.signature(LLAMA_COMMANDS[name]).parameters)


# --------------------------------------------------------------------------------------------- messages


def messages() -> Iterator[tuple[str, str]]:
    """(place, text) of every message that is put together where it is raised; a value in it is written {}."""
    for file, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
                "LlamaError",
                "FileNotFoundError",
                "wrong",
                "format_error",
            ):
                words = [arg for arg in node.args if isinstance(arg, (ast.JoinedStr, ast.Constant))]
                for arg in words:
                    parts = arg.values if isinstance(arg, ast.JoinedStr) else [arg]
                    text = "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in parts)
                    yield f"{file}:{node.lineno}", text


def test_messages_speak_with_one_voice() -> None:
    """No full stop, no capital at the start, no blame and no pleading; the published sentence is left as it is."""
    found = list(messages())
    assert len(found) > 120
    poor = re.compile(r"^[A-Z][a-z]+ [a-z]|[.!]$|\b([Pp]lease|[Ii]nvalid|[Ii]llegal|[Ff]ailed to|[Ss]orry|[Oo]ops)\b")
    names = ("SentencePiece", "Hugging Face", "Meta")
    assert [(place, text) for place, text in found if poor.search(text) and not text.startswith(names)] == []


def test_a_missing_demo_model_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(session, "DEMO", tmp_path / "demo")
    with pytest.raises(LlamaError, match=rf"the demo model, .*, is not at {re.escape(str(tmp_path))}.*--ckpt"):
        session.open_model(None, None, 64)


# ---------------------------------------------------------- a source distribution, installed somewhere else

QUESTION = "What sound does a cow make?"
USER = """
from typing_extensions import assert_type
from llama import Conversation, Dialog, Llama, LlamaError, ModelArgs, Step, Tokenizer, Transformer, encode_dialog

with Llama.build("demo", None, max_seq_len=64, max_batch_size=2) as generator:
    assert_type(generator, Llama)
    dialog: Dialog = [{"role": "user", "content": "Hi"}]
    [answer] = generator.chat_completion([dialog], temperature=0, details=True)
    assert_type(answer["generation"]["content"], str)
    assert_type(answer["logprobs"], list[float])
    [text] = generator.text_completion(["Once"], seed=3)
    assert_type(text["generation"], str)
    tokens, logprobs = generator.generate([[1, 2]], 4, logprobs=True)
    for step in generator.stream([[1]], 4, seed=3):
        assert_type(step, Step)
        assert_type(step.logprob, float | None)
    for piece in generator.stream_text("Once", top_k=3):
        assert_type(piece, str)
    for piece in Conversation(generator, "Be brief.").ask("Hi", seed=3):
        assert_type(piece, str)
    assert_type(encode_dialog(generator.tokenizer, dialog), list[int])
    generator.generate([[1]], 4, tok_k=3)  # error: call-arg
    answer["generaton"]  # error: typeddict-item
    bad: Dialog = [{"role": "model", "content": "Hi"}]  # error: typeddict-item
"""


def run(*argv: str | Path, cwd: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    """A process that knows nothing of this checkout."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    words = list(map(str, argv))
    plain |= {"OMP_NUM_THREADS": "1", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **env}
    return subprocess.run(words, cwd=cwd, env=plain, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)  # fmt: skip


def environment(folder: Path, what: Path, *flags: str) -> Path:
    """The interpreter of a new environment into which `what` is installed; torch and the others are lent by this one."""
    assert run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=what.parent).returncode == 0
    [packages] = folder.glob("lib/python*/site-packages")
    lent = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "lent.pth").write_text("\n".join(lent))  # a plain path: what is installed editably there stays out
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-build-isolation"]
    done = run(*pip, *flags, what, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "arning" not in done.stderr, done.stderr
    return python


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, to build in."""
    ignored = shutil.ignore_patterns(
        ".git", "*_cache", "__pycache__", "*.egg-info", "build", "dist", ".venv", "llama-2-*"
    )
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("tree") / "llama", ignore=ignored))


@pytest.fixture(scope="module")
def sdist(tree: Path) -> Path:
    code = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    done = run(sys.executable, "-c", code, cwd=tree)
    assert done.returncode == 0, done.stderr
    [archive] = (tree / "dist").glob("llama-*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def installed(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("installed") / "venv", sdist)


@pytest.mark.slow
def test_the_source_distribution_holds_everything(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2]: member.mode for name, member in zip(archive.getnames(), archive.getmembers())}
    assert not [name for name in held if "__pycache__" in name or name.endswith(".pyc")]
    assert held["download.sh"] & 0o100 and held["examples/two_nodes.sh"] & 0o100 and held[".ci/run"] & 0o100
    tracked = run("git", "ls-files", cwd=ROOT)
    if tracked.returncode != 0:
        pytest.skip("no git checkout: what should be in it is not known")
    assert [name for name in tracked.stdout.splitlines() if (ROOT / name).exists() and name not in held] == []


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    code = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    done = run(sys.executable, "-c", code, cwd=tree)
    assert done.returncode == 0, done.stderr
    [archive] = (tree / "dist").glob("llama-*.whl")
    return archive


@pytest.mark.slow
def test_sdist_and_wheel_hold_every_package_the_page_and_the_demo(sdist: Path, wheel: Path) -> None:
    package = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*") if path.is_file()}
    package = {name for name in package if "__pycache__" not in name}
    demo = {path.name for path in (ROOT / "checkpoints" / "demo").iterdir()}
    assert {name.rsplit("/", 1)[0] for name in package if name.endswith("/__init__.py")} > {"llama", "llama/cli"}
    assert {"llama/cli/trace_page.html", "llama/py.typed"} < package and len(demo) >= 3
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == package | {f"llama/demo/{name}" for name in demo}
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert package | {f"checkpoints/demo/{name}" for name in demo} <= names


@pytest.mark.slow
def test_a_packager_can_run_the_tests_from_it(sdist: Path, installed: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    [unpacked] = tmp_path.iterdir()
    some = ["tests/test_docs.py", "tests/test_sampling.py", "tests/test_demo.py"]
    done = run(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", *some, cwd=unpacked)
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"^\d\d+ passed", done.stdout, re.MULTILINE) and "skipped" not in done.stdout


# `python -m llama` once for each of the commands, in one process; a mark between them in both streams.
COMMANDS = {
    "complete": ["complete", "Once upon a time", "--max_gen_len", "8", "--seed", "1"],
    "chat": ["chat", "--temperature", "0"],
    "trace": ["trace", "--tokens", "2", "--html", "page.html"],
    "info": ["info", "{demo}", "--check"],
    "hf": ["convert", "{demo}", "hf", "--context", "512"],  # without it a log line says which window is written
    "int8": ["convert", "{demo}", "int8", "--to", "meta", "--quantize", "int8"],
    "llama2c": ["convert", "{demo}", "llama2c", "--to", "llama2c", "--context", "512"],
    "complete from hf": ["complete", "Once", "--ckpt", "hf", "--max_gen_len", "2", "--dtype", "bfloat16"],
    "complete from int8": ["complete", "Once", "--ckpt", "int8", "--max_gen_len", "2"],
    "complete from llama2c": ["complete", "Once", "--ckpt", "llama2c", "--max_gen_len", "2"],
    "bench": ["bench", "--ckpt", "{demo}", "--batches", "1,2", "--prompt", "8", "--tokens", "3", "--trials", "1"],
    "bench int4": [
        "bench",
        "--ckpt",
        "{demo}",
        "--quantize",
        "int4",
        "--batches",
        "2",
        "--tokens",
        "3",
        "--trials",
        "1",
    ],
}
RUN = f"""
import io, json, runpy, sys
for argv in json.loads(sys.argv[1]):
    sys.stdin = io.TextIOWrapper(io.BytesIO({QUESTION.encode()!r}))
    sys.argv = ["llama", *argv]
    runpy.run_module("llama", run_name="__main__", alter_sys=True)
    print("\x1e", flush=True)
    print("\x1e", file=sys.stderr, flush=True)
"""
OURS = re.compile(r"^Loaded in [\d.]+ seconds$|^(Writing|Loading)\b.*$")  # what may stand on stderr


def said(python: Path, cwd: Path, *flags: str) -> dict[str, tuple[str, str]]:
    """What each of COMMANDS prints, and what on stderr is not ours."""
    [demo] = python.parent.parent.glob("lib/python*/site-packages/llama/demo")
    argvs = [[word.format(demo=demo) for word in argv] for argv in COMMANDS.values()]
    done = run(python, *flags, "-c", RUN, json.dumps(argvs), cwd=cwd)
    assert done.returncode == 0, done.stderr
    printed, errors = (text.split("\x1e\n")[:-1] for text in (done.stdout, done.stderr))
    return dict(zip(COMMANDS, zip(printed, map(noise, errors)), strict=True))


def noise(stderr: str) -> str:
    lines = stderr.replace("\r", "\n").splitlines()
    return "\n".join(line for line in lines if line.strip() and not OURS.match(line.strip()))


@pytest.mark.slow
def test_commands_work_outside_the_checkout_and_nobody_warns(installed: Path, tmp_path: Path) -> None:
    found = said(installed, tmp_path)
    assert {name: errors for name, (_, errors) in found.items() if errors} == {}
    printed = {name: text for name, (text, _) in found.items()}
    assert printed["complete"].startswith("Once upon a time") and len(printed["complete"].split()) > 5
    assert re.search(r"\bcow\b", printed["chat"]) and printed["trace"].count("STEP ") == 2
    assert "trace" in (tmp_path / "page.html").read_text(encoding="utf-8").lower()
    assert "site-packages/llama/demo" in printed["info"] and "weights are finite" in printed["info"]
    assert json.loads(printed["bench"].splitlines()[-1])["llama"] == "0.1.0"
    for name in ("hf", "int8", "llama2c"):
        assert printed[name].startswith(f"{name}: ") and printed[f"complete from {name}"].startswith("Once")


@pytest.mark.slow
def test_nobody_warns_even_where_python_shows_all_warnings(installed: Path, tmp_path: Path) -> None:
    found = said(installed, tmp_path, "-W", "always")
    assert {name: errors for name, (_, errors) in found.items() if errors} == {}


def test_a_warning_would_be_noticed() -> None:
    assert noise("Loaded in 0.12 seconds\n") == noise("Writing hf: 0.00B\rWriting hf: 100%|##| 2.74M\n") == ""
    assert "DeprecationWarning" in noise("Loaded in 0.12 seconds\na.py:3: DeprecationWarning: old\n  old()\n")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_nobody_warns_under_torchrun(ranks: int, installed: Path, tree: Path) -> None:
    """Several ranks without OMP_NUM_THREADS get torchrun's own notice about it, before any code of ours runs."""
    argv = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "example_chat_completion.py"]
    argv += ["--ckpt_dir", "checkpoints/demo", "--tokenizer_path", "checkpoints/demo/tokenizer.model"]
    done = run(installed, *argv, "--max_gen_len", "4", cwd=tree, PYTHONWARNINGS="always", PYTHONPATH=str(tree))
    assert done.returncode == 0 and "Loaded in" in done.stdout
    assert noise(done.stderr) == ""


@pytest.mark.slow
def test_type_checkers_see_what_the_calls_return(installed: Path, tmp_path: Path) -> None:
    """Right uses pass, wrong ones are told, by lines; nothing that a user handles is merely Any."""
    (tmp_path / "user.py").write_text(USER)
    done = run(sys.executable, "-m", "mypy", "--strict", "--python-executable", installed, "user.py", cwd=tmp_path)
    wanted = {(n, line.split("error: ")[1]) for n, line in enumerate(USER.splitlines(), 1) if "# error:" in line}
    found = re.findall(r"^user.py:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE)
    assert {(int(n), code) for n, code in found} == wanted, done.stdout


@pytest.mark.slow
def test_an_editable_install_is_a_path_that_type_checkers_can_follow(tree: Path, tmp_path: Path) -> None:
    """Theirs cannot run the import hook that setuptools would write instead."""
    python = environment(tmp_path / "venv", tree, "-e")
    [pth] = (tmp_path / "venv").glob("lib/python*/site-packages/__editable__*.pth")
    assert pth.read_text().strip() == str(tree)
    where = run(python, "-c", "import llama.cli.session as s; print(s.__file__, s.DEMO)", cwd=tmp_path).stdout.split()
    assert where == [str(tree / "llama" / "cli" / "session.py"), str(tree / "checkpoints" / "demo")]


def test_every_command_is_among_those_that_run_outside() -> None:
    assert {argv[0] for argv in COMMANDS.values()} == set(LLAMA_COMMANDS)
