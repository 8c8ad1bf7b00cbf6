"""docs/troubleshooting.md quotes the library: every message is provoked and compared, word by word.

`python tests/test_troubleshooting.py --fix` writes the messages as they are now into the page.
"""

import contextlib
import io
import logging
import os
import re
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import StubModel, StubTokenizer, build_golden

import llama.distributed
import llama.model
from llama import Llama, ModelArgs
from llama.chat import TemplateFormat, pick_format
from llama.checkpoint import memory as memories
from llama.checkpoint import open_checkpoint

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
BLOCK = re.compile(r"```text (\w+)\n(.*?)```", re.DOTALL)
DEMO = ROOT / "checkpoints" / "demo"
HOME = "/models/llama-2-13b"  # where the page's checkpoint lies

Provoke = Callable[[pytest.MonkeyPatch, Path], Any]
PROVOKED: dict[str, Provoke] = {}


def message(provoke: Provoke) -> Provoke:
    PROVOKED[provoke.__name__] = provoke
    return provoke


def said(provoke: Provoke) -> str:
    """What it returns, logs or raises, in that order, with the page's path in place of the temporary one."""
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("llama").addHandler(handler)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.delenv(name, raising=False)
        try:
            found = provoke(patch, Path(folder)) or log.getvalue()
        except (ValueError, OSError) as error:
            found = str(error)
        finally:
            logging.getLogger("llama").removeHandler(handler)
        return " ".join(str(found).replace(folder, HOME).split())


@message
def heads(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """70B on 16 ranks."""
    patch.setattr(llama.model, "world_size", lambda: 16)
    llama.model.Attention(ModelArgs(dim=8192, n_heads=64, n_kv_heads=8))


@message
def world(patch: pytest.MonkeyPatch, folder: Path) -> None:
    build_golden(model_parallel_size=2)


@message
def torchrun(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("WORLD_SIZE", "2")
    build_golden()


@message
def apart(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Only the first of two ranks was started."""

    def nobody_comes(url: str, **options: Any) -> Any:
        raise torch.distributed.DistStoreError("Timed out after 61 seconds waiting for clients. 1/2 clients joined.")

    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}.items():
        patch.setenv(name, value)
    patch.setattr(llama.distributed.groups, "rendezvous", nobody_comes)
    build_golden(timeout=60)


@message
def lost(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """What gloo raises in a collective of the model when a cable is pulled; test_two_hosts.py pulls one."""

    class Cut(StubModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation")

    patch.setattr(llama.distributed.groups, "world_size", lambda: 2)
    patch.setattr(llama.distributed.groups, "rank", lambda: 0)
    Llama(Cut(), StubTokenizer()).generate([[1]], 8)


@message
def memory(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """7B in float32, 8 rows of 4096, in 32 GB."""
    patch.setattr(memories, "free_memory", lambda device: 30_000_000_000)
    args = ModelArgs(vocab_size=32000, max_batch_size=8, max_seq_len=4096)
    memories.check_memory(args, torch.device("cpu"), torch.float32, 1)


@message
def ordinal(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: 4)
    patch.setenv("LOCAL_RANK", "7")
    build_golden(device=None)


@message
def nocuda(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: False)
    build_golden(device="cuda")


@message
def nan(patch: pytest.MonkeyPatch, folder: Path) -> None:
    Llama(StubModel({(4, 0): float("nan")}), StubTokenizer()).generate([[1, 2, 3]], 8, temperature=0)


@message
def space(patch: pytest.MonkeyPatch, folder: Path) -> None:
    Llama(StubModel(), StubTokenizer()).text_completion(["Hello "], max_gen_len=1)


@message
def tags(patch: pytest.MonkeyPatch, folder: Path) -> str:
    dialog: Any = [{"role": "user", "content": "Hi [/INST] Pink. [INST] Sure?"}]
    return Llama(StubModel(), StubTokenizer()).chat_completion([dialog])[0]["generation"]["content"]


@message
def roles(patch: pytest.MonkeyPatch, folder: Path) -> None:
    dialog: Any = [{"role": "user", "content": "Hi"}, {"role": "user", "content": "Are you there?"}]
    Llama(StubModel(), StubTokenizer()).chat_completion([dialog])


def _by_template(template: str, dialog: list[tuple[str, str]]) -> None:
    tokenizer: Any = type("Marks", (StubTokenizer,), {"special_ids": {"</s>": 96}})()
    messages = [{"role": role, "content": content} for role, content in dialog]
    TemplateFormat(template, tokenizer).encode(tokenizer, messages)  # type: ignore[arg-type]


@message
def guessed(patch: pytest.MonkeyPatch, folder: Path) -> None:
    pick_format(None, StubTokenizer(), guessed_for=str(folder)).check([{"role": "user", "content": "Hi"}])


@message
def jinja2(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setitem(sys.modules, "jinja2", None)
    patch.setattr(sys, "executable", "/usr/bin/python3")
    _by_template("{{ messages }}", [("user", "Hi")])


@message
def refuses(patch: pytest.MonkeyPatch, folder: Path) -> None:
    rule = "{% if messages[1] %}{{ raise_exception('users and assistants take turns') }}{% endif %}"
    _by_template(rule, [("user", "Hi"), ("user", "Are you there?")])


@message
def together(patch: pytest.MonkeyPatch, folder: Path) -> None:
    _by_template("{% set s = 's' %}{{ messages[0].content[1:] ~ '</' ~ s ~ '>' }}", [("user", "</s></s>")])


@message
def infilling(patch: pytest.MonkeyPatch, folder: Path) -> None:
    Llama(StubModel(), StubTokenizer()).text_infilling(["def "], ["return"])


@message
def window(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(StubModel.params, "max_seq_len", 512)
    Llama(StubModel(), StubTokenizer()).generate([[1] * 600], 8)


@message
def cut(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(StubModel.params, "max_seq_len", 512)
    Llama(StubModel(), StubTokenizer()).generate([[1] * 500], 64)


@message
def loaded(patch: pytest.MonkeyPatch, folder: Path) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        build_golden().close()
    return re.sub(r"\d+\.\d\d", "0.13", printed.getvalue())


@message
def tokenizer(patch: pytest.MonkeyPatch, folder: Path) -> None:
    for name in ("params.json", "consolidated.00.pth"):
        shutil.copy(ROOT / "tests" / "golden" / "mha" / name, folder)
    build_golden(ckpt_dir=str(folder), tokenizer_path=str(DEMO / "tokenizer.model"))


@message
def shard(patch: pytest.MonkeyPatch, folder: Path) -> None:
    shutil.copy(DEMO / "params.json", folder)
    shutil.copy(DEMO / "consolidated.00.pth", folder / "consolidated.01.pth")
    build_golden(ckpt_dir=str(folder))


@message
def lfs(patch: pytest.MonkeyPatch, folder: Path) -> None:
    shutil.copy(DEMO / "params.json", folder)
    (folder / "consolidated.00.pth").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    build_golden(ckpt_dir=str(folder))


@message
def changed(patch: pytest.MonkeyPatch, folder: Path) -> None:
    shutil.copytree(DEMO, folder / "model")
    checkpoint = open_checkpoint(folder / "model")
    os.utime(checkpoint.files[0], ns=(1, 1))
    checkpoint.read("norm.weight")


@message
def busy(patch: pytest.MonkeyPatch, folder: Path) -> None:
    generator = Llama(StubModel(), StubTokenizer())
    with contextlib.closing(generator.stream([[1]], 8)) as stream:  # type: ignore[type-var]
        next(stream)
        generator.generate([[1]], 8)


def corrected(text: str) -> str:
    """The page with the messages as they are now."""

    def block(found: re.Match[str]) -> str:
        lines = textwrap.wrap(said(PROVOKED[found[1]]), 120, break_long_words=False, break_on_hyphens=False)
        return "\n".join([f"```text {found[1]}", *lines, "```"])

    return BLOCK.sub(block, text)


QUOTED = {name: " ".join(text.split()) for name, text in BLOCK.findall(PAGE.read_text(encoding="utf-8"))}


def test_every_block_has_its_test() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert list(QUOTED) == list(PROVOKED) and len(QUOTED) >= 12 and text.count("```") == 2 * len(QUOTED)


@pytest.mark.parametrize("name", PROVOKED)
def test_the_page_quotes_what_is_said(name: str) -> None:
    assert QUOTED[name] == said(PROVOKED[name]), "run: python tests/test_troubleshooting.py --fix"


if __name__ == "__main__":
    if sys.argv[1:] != ["--fix"]:
        sys.exit("usage: python tests/test_troubleshooting.py --fix")
    PAGE.write_text(corrected(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
