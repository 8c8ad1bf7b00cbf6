"""The package as it is installed: what its import costs, needs and says; the metadata; the README's words."""

import ast
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def python(code: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """A fresh interpreter that finds the checkout, installed or not."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


TIMED = """
import time, torch
begin = time.process_time()
import llama
print(time.process_time() - begin)
"""
UNCHANGED = """
import os, sys, threading, torch
def state():
    return dict(os.environ), torch.get_default_dtype(), torch.initial_seed(), threading.active_count(), sys.stdout
before = state()
import llama
assert before == state()
assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
assert "transformers" not in sys.modules and "safetensors" not in sys.modules
"""
PACKAGES = ["fairscale", "sentencepiece"]
IMPORTS = {"timed": TIMED, "unchanged": UNCHANGED}
IMPORTS |= {package: f"import sys\nsys.modules[{package!r}] = None\nimport llama" for package in PACKAGES}
FORKS = f"""
import json, os, sys, torch, traceback
ended = {{}}
for name, code in {IMPORTS}.items():
    if os.fork() == 0:
        for descriptor in (1, 2):
            os.dup2(os.open(f"{{name}}.{{descriptor}}", os.O_WRONLY | os.O_CREAT), descriptor)
        try:
            exec(code, {{}})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)  # to take down torch, as the end of an interpreter does, costs most of a second
    ended[name] = os.waitstatus_to_exitcode(os.wait()[1])
print(json.dumps(ended))
"""


@pytest.fixture(scope="module")
def imports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """Exit status, stdout and stderr of each of IMPORTS, in forks of one interpreter that has torch and sees no GPU."""
    folder = tmp_path_factory.mktemp("imports")
    done = python(f"import os\nos.chdir({str(folder)!r}){FORKS}", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    said = {name: [(folder / f"{name}.{descriptor}").read_text() for descriptor in (1, 2)] for name in IMPORTS}
    return {name: (status, *said[name]) for name, status in json.loads(done.stdout).items()}


def test_import_costs_less_than_half_a_second_more_than_torch(imports: dict[str, tuple[int, str, str]]) -> None:
    """Of the processor, best of up to five: the first import may have to write bytecode."""
    status, printed, errors = imports["timed"]
    assert status == 0, errors
    best = float(printed)
    for _ in range(4):
        if best >= 0.5:
            best = min(best, float(python(TIMED).stdout))
    assert best < 0.5


def test_import_needs_no_gpu_and_starts_nothing(imports: dict[str, tuple[int, str, str]]) -> None:
    assert imports["unchanged"] == (0, "", "")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_missing_package_is_named_with_interpreter_and_command(
    imports: dict[str, tuple[int, str, str]], package: str
) -> None:
    status, _, errors = imports[package]
    last = errors.strip().splitlines()[-1]
    assert status == 1 and last.startswith(f"ImportError: llama needs the package {package}"), errors
    assert f"{sys.executable} -m pip install {package}" in last


def test_every_required_package_has_a_lower_bound() -> None:
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and line[0] != "#"]
    bounds = dict(line.split(">=") for line in lines)
    assert set(bounds) == {"torch", "fairscale", "sentencepiece", "fire", "tqdm"}
    assert tuple(map(int, bounds["torch"].split("."))) >= (2, 5)  # scaled_dot_product_attention(enable_gqa=True)


def test_the_package_is_marked_as_typed() -> None:
    assert (ROOT / "llama" / "py.typed").exists()


def blocks(language: str) -> list[str]:
    """The README's blocks of code in one language."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [code for tag, code in found if tag == language]


def test_readme_has_the_two_commands_and_ci_runs_them() -> None:
    example = "torchrun --nproc_per_node 1 example_text_completion.py"
    demo = "--ckpt_dir checkpoints/demo --tokenizer_path checkpoints/demo/tokenizer.model"
    assert f"pip install -e . && {example} {demo}\n" in blocks("bash")
    assert 'pip install -e ".[dev]" && pytest\n' in blocks("bash")
    ci = " ".join((ROOT / ".ci" / "run").read_text(encoding="utf-8").replace("\\\n", " ").split())
    wanted = [
        f"{example} {demo}",
        '-e ".[dev]"',
        "torch==2.13.0",
        "mypy --strict llama",
        "ruff check",
        "ruff format --check",
    ]
    assert [words for words in [*wanted, "pytest -q", "pytest -q -m slow"] if words not in ci] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_the_files_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    names = re.findall(r"(?<![\w./-])(?:[\w-]+/)*[\w-]+\.(?:py|md|sh)\b", text)
    known = {path.name for path in (ROOT / "llama").rglob("*.py")}  # a module may go by its bare name
    assert [name for name in {*links, *names} if name not in known and not (ROOT / name).exists()] == []


def test_readmes_tree_shows_every_package_and_module() -> None:
    [tree] = (code for code in blocks("") if "llama/model.py" in code)
    modules = {
        path.name for path in (ROOT / "llama").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    hidden = {"__init__.py", "errors.py", "sampling.py", "conversation.py"}  # the last two only re-export
    assert [name for name in sorted(modules - hidden) if name not in tree] == []


def test_the_readmes_program_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if not (ROOT / "checkpoints" / "demo" / "consolidated.00.pth").exists():
        pytest.skip("checkpoints/demo is not there: make it with tools/make_demo.py")
    [code] = blocks("python")
    monkeypatch.chdir(ROOT)
    exec(compile(code, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.split()) > 10


def _layers() -> list[set[str]]:
    """CONTRIBUTING.md's list: packages and modules that may import what stands above them."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    [block] = re.findall(r"^```\n(errors\n.*?)^```", text, re.M | re.S)
    return [set(re.findall(r"\w+", line)) for line in block.splitlines()]


REEXPORTS = {"__init__", "__main__", "sampling", "conversation"}  # above or beside all layers


def _package_imports(path: Path) -> set[str]:
    """Packages and modules right below llama/ that a file imports, itself left out."""
    here = path.relative_to(ROOT / "llama").parts[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            assert not [alias for alias in node.names if alias.name.split(".")[0] == "llama"], f"{path}: not relative"
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = (*here[: len(here) - node.level + 1], *(node.module.split(".") if node.module else ()))
            found |= {base[0]} if base else {alias.name for alias in node.names}
    return found - {here[0] if here else path.stem}


def test_imports_go_upwards_in_the_list() -> None:
    layers = _layers()
    assert len(layers) <= 12
    for path in sorted((ROOT / "llama").rglob("*.py")):
        name = path.relative_to(ROOT / "llama").parts[0].removesuffix(".py")
        if name in REEXPORTS:
            continue
        assert any(name in layer for layer in layers), f"{name} stands in no line of the list"
        above = set[str]().union(*layers[: next(i for i, layer in enumerate(layers) if name in layer)])
        assert _package_imports(path) <= above, f"{path}: {_package_imports(path) - above}"


def test_no_circle_within_a_package() -> None:
    for package in sorted(path for path in (ROOT / "llama").iterdir() if (path / "__init__.py").exists()):
        needs = {}
        for path in package.glob("*.py"):
            tree = ast.walk(ast.parse(path.read_text("utf-8")))
            own = [node for node in tree if isinstance(node, ast.ImportFrom) and node.level == 1]
            modules = {node.module.split(".")[0] for node in own if node.module}
            needs[path.stem] = modules | {alias.name for node in own if not node.module for alias in node.names}
        placed: set[str] = set()
        while free := {name for name in needs if name not in placed and needs[name] & set(needs) <= placed}:
            placed |= free
        assert placed == set(needs), f"{package.name}: in a circle: {sorted(set(needs) - placed)}"


PUBLISHED = {
    "llama": "Llama Dialog ModelArgs Transformer Tokenizer",
    "llama.model": "ModelArgs RMSNorm precompute_freqs_cis reshape_for_broadcast apply_rotary_emb repeat_kv Attention "
    "FeedForward TransformerBlock Transformer ColumnParallelLinear RowParallelLinear ParallelEmbedding fs_init",
    "llama.generation": "Role Message CompletionPrediction ChatPrediction Dialog B_INST E_INST B_SYS E_SYS SPECIAL_TAGS "
    "UNSAFE_ERROR Llama sample_top_p ModelArgs Transformer Tokenizer initialize_model_parallel "
    "get_model_parallel_rank model_parallel_is_initialized",
    "llama.tokenizer": "Tokenizer SentencePieceProcessor logger",
    "llama.sampling": "Sampling distribution nucleus",
    "llama.serving": "serve Conversation",
    "llama.conversation": "Conversation",
}


@pytest.mark.parametrize("module", PUBLISHED)
def test_names_stay_where_they_were_published(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in PUBLISHED[module].split() if not hasattr(found, name)] == []


def test_no_file_class_or_function_is_too_long() -> None:
    """Lines of code without comments, docstrings and blank lines: a file 350, a class 250, a function 40."""
    limits = {ast.Module: 350, ast.ClassDef: 250, ast.FunctionDef: 40, ast.AsyncFunctionDef: 40}
    for path in sorted((ROOT / "llama").rglob("*.py")):
        source = path.read_text("utf-8")
        code = _code_lines(source)
        for node in ast.walk(ast.parse(source)):
            if type(node) in limits:
                first, last = (1, len(source.splitlines())) if isinstance(node, ast.Module) else (node.lineno, node.end_lineno)  # type: ignore[attr-defined] # fmt: skip
                count = len([line for line in code if first <= line <= last])
                assert count <= limits[type(node)], f"{path}: {getattr(node, 'name', 'the file')} has {count} lines"


def _code_lines(source: str) -> set[int]:
    quiet = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {n for token in tokens if token.type not in quiet for n in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node
        ):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))  # type: ignore[operator]
    return lines
