"""The package as it is installed: what its import costs, needs and says; the metadata; the README's words."""

import os
import re
import subprocess
import sys
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


TIMED_IMPORT = """
import time, torch
begin = time.perf_counter()
import llama
print(time.perf_counter() - begin)
"""


def test_import_costs_less_than_half_a_second_more_than_torch() -> None:
    """Best of up to five: the machine may be busy, and the first import may have to write bytecode."""
    best = float("inf")
    for _ in range(5):
        done = python(TIMED_IMPORT)
        assert done.returncode == 0, done.stderr
        best = min(best, float(done.stdout))
        if best < 0.5:
            break
    assert best < 0.5


def test_import_needs_no_gpu_and_starts_nothing() -> None:
    code = """
import os, sys, threading, torch
before = dict(os.environ), torch.get_default_dtype(), torch.initial_seed(), threading.active_count(), sys.stdout
import llama
assert before == (dict(os.environ), torch.get_default_dtype(), torch.initial_seed(), threading.active_count(), sys.stdout)
assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
assert "transformers" not in sys.modules and "safetensors" not in sys.modules
"""
    done = python(code, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""


@pytest.mark.parametrize("package", ["fairscale", "sentencepiece"])
def test_a_missing_package_is_named_with_interpreter_and_command(package: str) -> None:
    done = python(f"import sys\nsys.modules[{package!r}] = None\nimport llama")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: llama needs the package {package}"), done.stderr
    assert f"{sys.executable} -m pip install {package}" in last


def test_every_required_package_has_a_lower_bound() -> None:
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and line[0] != "#"]
    bounds = dict(line.split(">=") for line in lines)
    assert set(bounds) == {"torch", "fairscale", "sentencepiece", "fire", "tqdm"}
    assert tuple(map(int, bounds["torch"].split("."))) >= (2, 5)  # scaled_dot_product_attention(enable_gqa=True)


def test_the_package_is_marked_as_typed() -> None:
    assert (ROOT / "llama" / "py.typed").exists()


def shell_blocks() -> list[str]:
    return re.findall(r"^```\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_readme_has_the_two_commands_and_ci_runs_them() -> None:
    commands = shell_blocks()
    example = "torchrun --nproc_per_node 1 example_text_completion.py"
    demo = "--ckpt_dir checkpoints/demo --tokenizer_path checkpoints/demo/tokenizer.model"
    assert f"pip install -e . && {example} {demo}\n" in commands
    assert 'pip install -e ".[dev]" && pytest\n' in commands
    ci = " ".join((ROOT / ".ci" / "run").read_text().replace("\\\n", " ").split())
    assert f"{example} {demo}" in ci and 'install -q --disable-pip-version-check -e ".[dev]"' in ci
    assert "pytest -q" in ci and "-m slow" in ci


def test_the_files_the_readme_names_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = next(block for block in shell_blocks() if block.startswith("llama/"))
    names = set(re.findall(r"\b[\w./]+\.(?:py|md|sh)\b", text))
    inside = set(re.findall(r"^  ((?:\w+\.py(?:, )?)+)", tree, re.MULTILINE))
    modules = {name for group in inside for name in group.split(", ") if name}
    assert modules, "no module was found in the README's file tree"
    for name in names - modules:
        assert (ROOT / name).exists(), name
    for name in modules:
        assert (ROOT / "llama" / name).exists(), name
    present = {path.name for path in (ROOT / "llama").glob("*.py")} - {"__init__.py", "__main__.py"}
    assert present == modules, "the README's file tree and llama/ differ"


def test_the_readme_program_runs(tmp_path: Path) -> None:
    """The snippet under "From Python", on the demo model."""
    if not (ROOT / "checkpoints" / "demo" / "consolidated.00.pth").exists():
        pytest.skip("checkpoints/demo is not there: make it with tools/make_demo.py")
    code = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[0]
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    program = f"import os\nos.chdir({str(tmp_path)!r})\n{code}"
    done = python(program, PYTHONIOENCODING="utf-8", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 4
