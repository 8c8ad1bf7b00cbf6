"""The documents hold: their snippets run as they stand, in order; links and the places they name in the code are there.

Commands: test_docs_commands.py; messages: test_troubleshooting.py.
"""

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def snippets(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", read(page), re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)])
def test_snippets_run(page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    for snippet in snippets(page):
        exec(compile(snippet, page, "exec"), names)
    assert "Traceback" not in capsys.readouterr().out


def test_there_are_snippets() -> None:
    assert all(snippets(page) for page in ("README.md", "docs/generation.md", "docs/internals.md"))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", read(page))
    missing = [t for t in targets if "://" not in t and not (ROOT / page).parent.joinpath(t).exists()]
    assert not missing


def test_readme_lists_every_page() -> None:
    assert not [page for page in PAGES[1:] if f"]({page})" not in read("README.md")]


# ------------------------------------------------------------------------- docs/internals.md: who calls whom, where


@functools.cache
def definitions(path: str) -> dict[str, range]:
    """Name (`Class.method` or `function`) to its lines, those of its decorators and inner functions included."""
    found: dict[str, range] = {}
    for node in ast.parse(read(path)).body:
        if isinstance(node, ast.ClassDef):
            found.update({f"{node.name}.{f.name}": lines(f) for f in node.body if isinstance(f, ast.FunctionDef)})
            found[node.name] = lines(node)  # behind its methods: the first that holds a line is the narrowest
        if isinstance(node, ast.FunctionDef):
            found[node.name] = lines(node)
    return found


def lines(node: ast.FunctionDef | ast.ClassDef) -> range:
    assert node.end_lineno is not None
    return range(min(n.lineno for n in [node, *node.decorator_list]), node.end_lineno + 1)


def named_calls(text: str) -> Iterator[tuple[str, str]]:
    """(name, file) of the calls in the page's tables."""
    for row in text.splitlines():
        files = re.findall(r"`((?:\w+/)+\w+\.py)`", row)
        if row.startswith("|") and files:
            names = re.findall(r"`([\w.]+)`", row.split(f"`{files[0]}`")[0])
            assert len(names) == len(files), f"as many calls as files, please: {row}"
            yield from zip(names, files)


def test_every_call_is_where_the_page_says() -> None:
    calls = list(named_calls(read("docs/internals.md")))
    assert len(calls) >= 15
    assert [(name, path) for name, path in calls if name not in definitions(path)] == []


@pytest.fixture(scope="module")
def stacks() -> set[tuple[tuple[str, str], ...]]:
    """Our own functions, (name, file), on the stack at each call of one of them while a text is completed, outermost
    first; what stands before `text_completion` is cut off. Each frame counts, one of an inner function as that around.
    """
    from llama import Llama

    known: dict[Any, tuple[str, str] | None] = {}
    found: set[tuple[tuple[str, str], ...]] = set()

    def own(frame: FrameType) -> tuple[str, str] | None:
        code = frame.f_code
        if code not in known:
            path = Path(code.co_filename)
            inside = path.is_relative_to(ROOT / "llama")
            relative = path.relative_to(ROOT).as_posix() if inside else ""
            names = [name for name, at in definitions(relative).items() if code.co_firstlineno in at] if inside else []
            known[code] = ((names or [code.co_name])[0], relative) if inside else None
        return known[code]

    def look(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and own(frame) is not None:
            stack, at = [], frame
            while at is not None:
                stack.append(own(at))
                at = at.f_back  # type: ignore[assignment]
            found.add(tuple(entry for entry in reversed(stack) if entry is not None))

    demo = str(ROOT / "checkpoints" / "demo")
    with Llama.build(demo, None, 64, 1, device="cpu", dtype="float32") as generator:
        sys.setprofile(look)
        try:
            generator.text_completion(["Once"], max_gen_len=2)
        finally:
            sys.setprofile(None)
    return found


def files() -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in (ROOT / "llama").rglob("*.py")]


def tables() -> list[list[tuple[str, str]]]:
    """The three tables: to the logits, through the model, to the token."""
    parts = re.split(r"\n\n(?!\|)", read("docs/internals.md"))
    found = [list(named_calls(part)) for part in parts]
    return [calls for calls in found if calls]


def test_seven_calls_lead_to_the_model(stacks: set[tuple[tuple[str, str], ...]]) -> None:
    """The stack at `hidden` is the first table, no frame more or less: once through the prefill, once through decode."""
    table = tables()[0]
    prefill = [call for call in table if call[0] != "Scheduler._decode"]
    decode = [call for call in table if call[0] not in ("Scheduler._prefill", "Scheduler._feed")]
    assert len(prefill[:-1]) <= 7
    ending = {stack for stack in stacks if stack[-1][0] == "Transformer.hidden"}
    assert ending == {tuple(prefill), tuple(decode)}


def test_the_other_tables_tell_who_calls_whom(stacks: set[tuple[tuple[str, str], ...]]) -> None:
    """Each of their calls happens, and only calls of the tables stand above it."""
    assert len(tables()) == 3
    known = {call for table in tables() for call in table}
    for call in known:
        above = [stack for stack in stacks if stack[-1] == call]
        assert above, f"{call} was not called"
        if call[0] != "nucleus":  # inside the draw, of which there are several
            assert any(set(stack) <= known for stack in above), f"{call} was called by {above[0]}"


def test_what_a_rank_holds_of_13b() -> None:
    """The page's table, against layers that think they are on one of two ranks; nothing is allocated."""
    from llama.distributed import shard_as
    from llama.model import ModelArgs, TransformerBlock

    def column(ranks: int) -> dict[str, str]:
        args = ModelArgs(dim=5120, n_layers=1, n_heads=40, vocab_size=32000, max_batch_size=1, max_seq_len=1)
        with torch.device("meta"), shard_as(ranks):
            block = TransformerBlock(0, args)
        attention, ffn = block.attention, block.feed_forward
        assert attention.wq.weight.shape == attention.wk.weight.shape == attention.wv.weight.shape
        assert attention.n_kv_heads == 40 and ffn.w1.weight.shape == ffn.w3.weight.shape
        shapes = {"`wq`, `wk`, `wv` (outputs, inputs)": attention.wq, "`wo`": attention.wo, "`w1`, `w3`": ffn.w1, "`w2`": ffn.w2}  # fmt: skip
        return {
            "query heads": str(attention.n_local_heads),
            "key/value heads": str(attention.n_local_kv_heads),
            **{label: ", ".join(map(str, layer.weight.shape)) for label, layer in shapes.items()},
            "cache, a layer and position": " x ".join(map(str, attention.cache_k.shape[2:])),
            "`x`, `h`, the norms": str(*block.attention_norm.weight.shape),
        }

    part = read("docs/internals.md").split("| on each of 2 ranks |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in part.splitlines()[2:]]
    assert {row[0]: row[1] for row in rows} == column(1)
    assert {row[0]: row[2] for row in rows} == column(2)
