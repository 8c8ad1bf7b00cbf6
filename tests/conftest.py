"""Fixtures of the core's tests. No process group is up unless a test or `Llama.build` puts one up."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not

import helpers

from llama import Llama

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """The published package's results on tests/golden/mha, float32 on a CPU."""
    return torch.load(helpers.GOLDEN / "golden.pt", weights_only=True)  # type: ignore[no-any-return]


@pytest.fixture
def generator() -> Iterator[Llama]:
    """A golden generator as `build` makes it, in a process group of one rank."""
    with helpers.build_golden() as built:
        yield built


@pytest.fixture(params=["mha", "gqa", "mqa"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)
