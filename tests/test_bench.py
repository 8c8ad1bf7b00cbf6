"""The benchmark command: its table, its line of JSON, its arithmetic."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import GOLDEN

from llama import Llama, LlamaError
from llama import distributed as parallel
from llama.cli import bench
from llama.model import TransformerBlock

FIELDS = {"batches", "read_bytes_s", "matrix_flops_s", "matrices_alone_s", "first_run_s", "compile_s", "peak_bytes"}
FIELDS |= {
    "shape",
    "dtype",
    "quantize",
    "compile",
    "torch",
    "llama",
    "python",
    "device",
    "threads",
    "commit",
    "command",
}
ROW = {"batch", "prompt", "first_token_s", "prefill_tokens_s", "prefill_share", "step_s", "decode_tokens_s"}
ROW |= {"decode_share", "spread"}
LAYER = 4 * 288 * 288 + 3 * 288 * 768  # weights of one layer of the smallest shape
HEAD = 32000 * 288


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's limits are measured over less: half a gigabyte and 8,192 columns take seconds."""
    with torch.device("cpu"):  # which keeps a list of torch's own functions from its first use on
        ones, randn = torch.ones, torch.randn
        torch.ones(1)
    monkeypatch.setattr(torch, "ones", lambda n, **given: ones(min(n, 1 << 22), **given))
    monkeypatch.setattr(torch, "randn", lambda *shape, **given: randn(*(min(n, 1 << 20) for n in shape), **given))


def run(capsys: pytest.CaptureFixture[str], **changes: Any) -> tuple[str, dict[str, Any]]:
    """The table and the JSON of one run."""
    bench.bench(**{"shape": "15m", "prompt": 8, "tokens": 4, "trials": 1, "batches": "1", "device": "cpu", **changes})
    lines = capsys.readouterr().out.splitlines()
    return "\n".join(lines[:-1]), json.loads(lines[-1])


def random_model(**changes: Any) -> Any:
    """Of the smallest shape; the caller closes the group."""
    return bench.random_model("15m", torch.device("cpu"), torch.float32, 16, 2, **changes)


def test_a_table_and_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    table, report = run(capsys, batches="1,2")
    assert set(report) == FIELDS and [set(row) for row in report["batches"]] == [ROW] * 2
    assert (report["shape"], report["dtype"], report["quantize"], report["compile"]) == ("15m", "float32", None, False)
    assert report["threads"] == torch.get_num_threads() and report["torch"] == torch.__version__
    assert report["compile_s"] == 0 and 0 < report["matrices_alone_s"] < 1 < report["peak_bytes"] / 6e7
    for row, batch in zip(report["batches"], (1, 2), strict=True):
        assert row["batch"] == batch and row["prompt"] == 8 and row["spread"] == 1
        assert row["prefill_tokens_s"] == pytest.approx(batch * 8 / row["first_token_s"])
        assert row["decode_tokens_s"] == pytest.approx(batch / row["step_s"])
        cache = 2 * 6 * batch * (8 + 4 // 2) * 288 * 4
        needed = (6 * LAYER + HEAD) * 4 + cache
        assert row["decode_share"] == pytest.approx(needed / row["step_s"] / report["read_bytes_s"])
        attention = 6 * 2 * 8 * 8 * 288
        operations = batch * (2 * 6 * LAYER * 8 + 2 * HEAD + attention)
        assert row["prefill_share"] == pytest.approx(operations / row["first_token_s"] / report["matrix_flops_s"])
    assert "15m, float32," in table and "GB/s read" in table and "in float32" in table
    figures = [line.split() for line in table.splitlines() if line.split()[:2] in (["1", "8"], ["2", "8"])]
    assert len(figures) == 2
    for line, row in zip(figures, report["batches"], strict=True):
        assert line[2] == f"{row['first_token_s'] * 1e3:.1f}" and f"{row['step_s'] * 1e3:.2f}" in line
    assert not torch.distributed.is_initialized()


def test_a_checkpoint_and_a_scheme(capsys: pytest.CaptureFixture[str]) -> None:
    table, report = run(capsys, ckpt=str(GOLDEN), quantize="int8", dtype="bfloat16")
    assert report["shape"] == str(GOLDEN) and report["quantize"] == "int8" and report["dtype"] == "bfloat16"
    assert f"{GOLDEN}, int8, " in table
    [row] = report["batches"]
    weights = 2 * (4 * 64 * 64 + 3 * 64 * 192) + 360 * 64
    scales = 2 * (2 * (5 * 64 + 2 * 192) + 360)
    cache = 2 * 2 * 10 * 64 * 2
    assert row["decode_share"] * row["step_s"] * report["read_bytes_s"] == pytest.approx(weights + scales + cache)


@pytest.mark.parametrize("scheme", ["int8", "int4", None])
def test_bytes_and_operations_by_hand(scheme: str | None) -> None:
    groups = parallel.initialize_groups(None, torch.device("cpu"))
    try:
        generator = random_model(scheme=scheme)
    finally:
        groups.close()
    model = generator.model
    rows = 6 * (5 * 288 + 2 * 768) + 32000
    weights = 6 * LAYER + HEAD
    # 288 = 9 groups of 32; 768 = 24; 288 rows are padded to 320; the head has 8 bits
    padded = 6 * (288 * (3 * 320 + 320) + 2 * 288 * 768 + 768 * 320)
    groups_of_int4 = 6 * (4 * 9 * 320 + 2 * 9 * 768 + 24 * 320)
    int4 = padded // 2 + 4 * groups_of_int4 + HEAD + 2 * 32000
    wanted = {None: weights * 4, "int8": weights + 2 * rows, "int4": int4}[scheme]
    assert bench.step_bytes(model, 1, 0) == wanted
    assert bench.step_bytes(model, 2, 7) == wanted + 2 * 6 * 2 * 7 * 288 * 4
    assert bench.prefill_flops(model, 3, 5) == 3 * (2 * 6 * LAYER * 5 + 2 * HEAD + 6 * 2 * 5 * 5 * 288)
    assert generator.generate([[1, 5, 9]], 2)[0][0]
    assert model.layers[0].attention.wq.packed is None or model.layers[0].attention.wq.weight is None


def test_grouped_queries_are_counted() -> None:
    """1b without its weights: 22 layers of 2048, 4 of 32 heads for keys and values, an FFN of 5632."""
    with torch.device("meta"):
        model = bench.Transformer(bench.ModelArgs(2048, 22, 32, 4, 32000, 256, max_batch_size=2, max_seq_len=64))
    layer = 2 * 2048 * 2048 + 2 * 256 * 2048 + 3 * 2048 * 5632
    assert bench.step_bytes(model, 2, 50) == (22 * layer + 32000 * 2048) * 4 + 2 * 22 * 2 * 50 * 256 * 4
    wanted = 2 * 22 * layer * 10 + 2 * 32000 * 2048 + 22 * 2 * 10 * 10 * 2048
    assert bench.prefill_flops(model, 1, 10) == wanted


def test_one_ranks_share() -> None:
    """70b-of-8 is sharded as on eight ranks, and afterwards there is one rank as before."""
    shape = bench.SHAPES["70b-of-8"]
    assert shape[:4] == (8192, 80, 64, 8)
    with torch.device("meta"), parallel.shard_as(8):
        block = TransformerBlock(0, bench.ModelArgs(*shape[:4], 32000, *shape[4:], max_seq_len=8))
    assert parallel.world_size() == 1
    assert block.attention.wq.weight.shape == (1024, 8192) and block.attention.wk.weight.shape == (128, 8192)
    assert block.feed_forward.w1.weight.shape == (3584, 8192) and block.feed_forward.w2.weight.shape == (8192, 3584)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": "3b"}, "shape='3b' must be one of 15m, 110m, 1b, 7b, 13b, 70b-of-8"),
        ({"batches": "1,x"}, "batches='1,x' must be numbers of rows"),
        ({"batches": ""}, "batches='' must be numbers"),
        ({"batches": 0}, "batches=0 must be numbers"),
        ({"batches": "1,-2"}, "batches='1,-2' must be numbers"),
        ({"tokens": 1}, "tokens=1 must be an integer of at least 2"),
        ({"prompt": 0}, "prompt=0 must be"),
        ({"trials": 0}, "trials=0 must"),
        ({"quantize": "int3"}, "quantize='int3' must be one of int8, int4, int8-dynamic or None"),
        ({"dtype": "int8"}, "dtype='int8' must be one of"),
    ],
)
def test_bad_flags(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LlamaError) as caught:
        bench.bench(**{"prompt": 8, "tokens": 4, "trials": 1, "batches": "1", "device": "cpu", **changes})
    assert message in str(caught.value)
    assert not torch.distributed.is_initialized()


def test_a_missing_checkpoint() -> None:
    with pytest.raises(FileNotFoundError):
        bench.bench(ckpt=str(Path("nowhere")), device="cpu")


def test_a_step_far_in_the_cache() -> None:
    """Nothing of the prompt but its last token is fed."""
    with Llama.build(str(GOLDEN), str(GOLDEN / "tokenizer.model"), 48, 1, device="cpu") as generator:
        generator.tokenizer.eos_id = None
        seen: list[tuple[int, int]] = []
        hidden = generator.model.hidden
        generator.model.hidden = lambda tokens, start, **given: (  # type: ignore[method-assign]
            seen.append((tokens.shape[1], int(start))) or hidden(tokens, start, **given)
        )
        assert 0 < bench.step_at(generator, 30, 4) < 10
        assert seen == [(1, 29), (1, 30), (1, 31), (1, 32)]
