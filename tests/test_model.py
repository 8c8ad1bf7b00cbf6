"""The architecture: one shot = chunks = single steps = the oracle, and every habit of code that holds a model."""

import copy
import io
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from fairscale.nn.model_parallel import layers as fairscale
from helpers import (
    GOLDEN,
    PARAMS,
    ROWS,
    WINDOW,
    close,
    feed,
    make_model,
    oracle,
    random_ids,
    weights,
)
from torch import Tensor, nn

import llama.model
from llama import LlamaError, ModelArgs, Transformer
from llama.model import (
    Attention,
    FeedForward,
    RMSNorm,
    TransformerBlock,
    apply_rotary_emb,
    precompute_freqs_cis,
    repeat_kv,
    reshape_for_broadcast,
)

INF = float("inf")
CHUNKS = [[20], [5, 9, 6], [19, 1], [1, 19], [7, 1, 1, 11], [1] * 20]


# ------------------------------------------------------------------------- the same logits every way


@pytest.mark.parametrize("sizes", CHUNKS, ids=str)
def test_one_shot_and_chunks_and_single_steps_are_the_oracles(kind: str, sizes: list[int]) -> None:
    assert not dist.is_initialized()
    tokens = random_ids(3, 20)
    logits = feed(make_model(kind), tokens, sizes)
    assert logits.dtype == torch.float32 and not logits.requires_grad
    close(logits, oracle(kind, tokens))


def test_the_whole_window_up_to_its_last_position(kind: str) -> None:
    tokens = random_ids(ROWS, WINDOW)
    close(feed(make_model(kind), tokens, [WINDOW - 1, 1]), oracle(kind, tokens))


def test_fewer_rows_later_and_a_step_back() -> None:
    model, tokens = make_model(), random_ids(4, 12)
    model(tokens, 0)
    other = torch.cat([tokens[:2, :6], random_ids(2, 5, seed=9)], dim=1)
    close(model(other[:, 6:], 6), oracle("gqa", other)[:, 6:])


def test_golden_logits(golden: dict[str, Any]) -> None:
    params = {"dim": 64, "n_layers": 2, "n_heads": 4, "multiple_of": 32, "norm_eps": 1e-5, "vocab_size": 360}
    model = Transformer(ModelArgs(**params, max_seq_len=48, max_batch_size=4))
    model.load_state_dict(torch.load(GOLDEN / "consolidated.00.pth", weights_only=True))
    close(model(golden["x"], 0), golden["logits_full"], 1e-4)
    close(feed(model, golden["x"][:, :10], [5, 4, 1]), golden["logits_chunks"], 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_near_the_oracle_and_consistent(kind: str, dtype: torch.dtype) -> None:
    model, tokens = make_model(kind, dtype), random_ids(2, 12)
    rounded = {name: weight.double() for name, weight in weights(kind, dtype=dtype).items()}
    wanted = reference.logits(rounded, PARAMS[kind], tokens)
    limit = 0.15 if dtype == torch.bfloat16 else 0.02
    for sizes in ([12], [5, 6, 1], [1] * 12):
        logits = feed(model, tokens, sizes)
        assert logits.dtype == torch.float32
        close(logits, wanted, limit)


def test_the_heads_are_not_repeated_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = make_model("mqa"), random_ids(2, 8)

    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("repeat_kv was called")

    monkeypatch.setattr(llama.model, "repeat_kv", refuse)
    close(feed(model, tokens, [4, 3, 1]), oracle("mqa", tokens))


# ----------------------------------------------------------------------------- one position per row


@pytest.mark.parametrize("count", [1, 3])
def test_a_position_per_row_equals_single_rows(kind: str, count: int) -> None:
    lengths = [9, 3, 1, 14]
    model, tokens = make_model(kind), random_ids(4, 14 + count)
    model(tokens[:, :14], 0)  # right-padded: what lies beyond a row's length must not be seen
    for attention in (layer.attention for layer in model.layers):
        for row, length in enumerate(lengths):
            attention.cache_k[row, length:], attention.cache_v[row, length:] = 1e4, 1e4
    texts = [torch.cat([tokens[row, :n], random_ids(1, count, seed=50 + row)[0]]) for row, n in enumerate(lengths)]
    new = torch.stack([text[-count:] for text in texts])
    logits = model.forward(new, torch.tensor(lengths))
    for row, text in enumerate(texts):
        close(logits[row], oracle(kind, text[None])[0, -count:])
    again = model.forward(random_ids(4, 1, seed=70), torch.tensor(lengths) + count)
    for row, text in enumerate(texts):
        longer = torch.cat([text, random_ids(4, 1, seed=70)[row]])
        close(again[row], oracle(kind, longer[None])[0, -1:])


def test_equal_positions_per_row_are_the_int_path(kind: str) -> None:
    tokens = random_ids(3, 10)
    one, other = make_model(kind), make_model(kind)
    for start, end in ((0, 5), (5, 9), (9, 10)):
        close(
            other.forward(tokens[:, start:end], torch.full((3,), start)), one.forward(tokens[:, start:end], start), 1e-5
        )


@pytest.mark.parametrize("old", [float("nan"), 1e4])
def test_a_new_row_beside_old_ones_starts_afresh(old: float) -> None:
    model, tokens = make_model(), random_ids(2, 8)
    model(tokens[:, :5], 0)
    for layer in model.layers:
        layer.attention.cache_k[1], layer.attention.cache_v[1] = old, old
    new = torch.stack([tokens[0, 5:], tokens[1, :3]])
    logits = model.forward(new, torch.tensor([5, 0]))
    close(logits[0], oracle("gqa", tokens[:1])[0, 5:])
    close(logits[1], oracle("gqa", tokens[1:, :3])[0])


def test_a_position_as_a_number_in_a_tensor() -> None:
    model, tokens = make_model(), random_ids(2, 8)
    model(tokens[:, :5], torch.tensor(0))
    close(model(tokens[:, 5:], torch.tensor(5)), oracle("gqa", tokens)[:, 5:])


# ------------------------------------------------------------------------------------ old caches


@pytest.mark.parametrize("old", [float("nan"), INF, 1e4])
@pytest.mark.parametrize("sizes", [[9], [1] * 9, [4, 1, 4]], ids=str)
def test_a_new_text_over_an_old_cache_is_that_of_a_fresh_model(kind: str, old: float, sizes: list[int]) -> None:
    model, tokens = make_model(kind), random_ids(3, 9)
    fresh = feed(model, tokens, sizes)
    for layer in model.layers:
        layer.attention.cache_k.fill_(old)
        layer.attention.cache_v.fill_(old)
    assert torch.equal(feed(model, tokens, sizes), fresh)


def test_caches_as_published() -> None:
    model = make_model("gqa", torch.bfloat16)
    for layer in model.layers:
        for cache in (layer.attention.cache_k, layer.attention.cache_v):
            assert type(cache) is Tensor and cache.dtype == torch.bfloat16 and cache.shape == (ROWS, WINDOW, 2, 16)
            assert not cache.any()
    assert not any("cache" in name for name in [*model.state_dict(), *dict(model.named_buffers())])


def test_caches_replaced_from_outside() -> None:
    model, tokens = make_model(), random_ids(ROWS + 3, 10)
    for layer in model.layers:
        layer.attention.cache_k = torch.zeros(ROWS + 3, WINDOW, 2, 16)
        layer.attention.cache_v = torch.zeros(ROWS + 3, WINDOW, 2, 16)
    close(feed(model, tokens, [6, 4]), oracle("gqa", tokens))


def test_a_cache_carried_to_another_model() -> None:
    one, other, tokens = make_model(), make_model(), random_ids(2, 10)
    one(tokens[:, :7], 0)
    for source, target in zip(one.layers, other.layers, strict=True):
        target.attention.cache_k = source.attention.cache_k.clone()
        target.attention.cache_v = source.attention.cache_v.clone()
    close(other(tokens[:, 7:], 7), oracle("gqa", tokens)[:, 7:])


# ----------------------------------------------------------------------- blocks by themselves, masks


def plain_attention(attention: Attention, x: Tensor, last: int, mask: Tensor | None, theta: float) -> Tensor:
    """The last positions' attention over all of x (b, t, d), by hand in float64; mask additive, any broadcast shape."""
    wq, wk, wv, wo = (getattr(attention, name).weight.detach().double() for name in ("wq", "wk", "wv", "wo"))
    x = x.double()
    q = (x @ wq.T).unflatten(-1, (attention.n_local_heads, -1)).transpose(1, 2)  # (b, h, t, k)
    k, v = ((x @ w.T).unflatten(-1, (attention.n_local_kv_heads, -1)).transpose(1, 2) for w in (wk, wv))
    q, k = reference.rotate(q, theta)[:, :, -last:], reference.rotate(k, theta)
    k, v = (t.repeat_interleave(attention.n_rep, dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    scores = scores if mask is None else scores + mask.double()
    return (torch.softmax(scores, dim=-1) @ v).transpose(1, 2).flatten(2) @ wo.T


def some_mask(shape: tuple[int, ...]) -> Tensor:
    """Neither causal nor constant: finite numbers, a third of the places closed, the first of each row open."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.randn(shape, generator=generator)
    mask[torch.rand(shape, generator=generator) < 0.33] = -INF
    mask[..., 0] = 0.5
    return mask


MASKS: dict[str, Callable[[int, int], Tensor | None]] = {
    "2 axes": lambda s, t: some_mask((s, t)),
    "(1, 1, s, t)": lambda s, t: some_mask((1, 1, s, t)),
    "(b, 1, s, t)": lambda s, t: some_mask((3, 1, s, t)),
    "(b, h, s, t)": lambda s, t: some_mask((3, 4, s, t)),
    "(1, h, s, t)": lambda s, t: some_mask((1, 4, s, t)),
    "none": lambda s, t: None,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("start", "seqlen"), [(0, 6), (0, 1), (5, 4), (5, 1), (40, 8)])
def test_a_callers_own_mask(kind: str, mask: str, start: int, seqlen: int) -> None:
    model = make_model(kind)
    attention, freqs, theta = model.layers[0].attention, model.freqs_cis, PARAMS[kind].get("rope_theta", 1e4)
    x = torch.randn(3, start + seqlen, 64, generator=torch.Generator().manual_seed(4))
    given = MASKS[mask](seqlen, start + seqlen)
    with torch.no_grad():
        if start:
            attention(x[:, :start], 0, freqs[:start], None)
        found = attention(x[:, start:], start, freqs[start : start + seqlen], given)
    close(found, plain_attention(attention, x, seqlen, given, theta), 1e-5)


def test_attention_alone_at_a_late_position(kind: str) -> None:
    """Nothing was fed before: what stands there is the zeros of the constructor."""
    model, start, seqlen = make_model(kind), 30, 3
    attention, theta = model.layers[0].attention, PARAMS[kind].get("rope_theta", 1e4)
    x = torch.zeros(2, start + seqlen, 64)
    x[:, start:] = torch.randn(2, seqlen, 64, generator=torch.Generator().manual_seed(4))
    mask = torch.hstack([torch.zeros(seqlen, start), torch.full((seqlen, seqlen), -INF).triu(1)])
    with torch.no_grad():
        found = attention(x[:, start:], start, model.freqs_cis[start : start + seqlen], mask)
    close(found, plain_attention(attention, x, seqlen, mask, theta), 1e-5)


def test_the_blocks_by_position_are_the_forward(kind: str) -> None:
    model, tokens = make_model(kind), random_ids(2, 9)
    for start, end in ((0, 6), (6, 9)):
        h = model.tok_embeddings(tokens[:, start:end])
        mask = torch.full((1, 1, end - start, end - start), -INF).triu(1)
        mask = torch.cat([torch.zeros(1, 1, end - start, start), mask], dim=-1)
        for layer in model.layers:
            h = layer(h, start, model.freqs_cis[start:end], mask)
        close(model.output(model.norm(h)).detach(), oracle(kind, tokens)[:, start:end])


# ------------------------------------------------------------------------------------------ errors


def numbers_in(error: pytest.ExceptionInfo[BaseException], *numbers: int) -> None:
    assert isinstance(error.value, (ValueError, AssertionError))
    assert isinstance(error.value, ValueError) and isinstance(error.value, AssertionError)
    missing = [n for n in numbers if str(n) not in str(error.value)]
    assert not missing, f"{missing} not in {error.value}"


@pytest.mark.parametrize(("start", "seqlen"), [(0, 49), (48, 1), (40, 9), (95, 1), (96, 1), (200, 3), (-2, 3)])
def test_past_max_seq_len(start: int, seqlen: int) -> None:
    model, tokens = make_model(), random_ids(2, 10)
    model(tokens[:, :6], 0)
    with pytest.raises(LlamaError, match="max_seq_len") as error:
        model(random_ids(2, seqlen), start)
    numbers_in(error, start, seqlen, WINDOW)
    assert "start_pos" in str(error.value) and "seqlen" in str(error.value)
    close(model(tokens[:, 6:], 6), oracle("gqa", tokens)[:, 6:])  # nothing was half done


@pytest.mark.parametrize("start", [0, 7])
def test_past_max_batch_size(start: int) -> None:
    with pytest.raises(LlamaError, match="max_batch_size") as error:
        make_model()(random_ids(ROWS + 5, 3), start)
    numbers_in(error, ROWS + 5, ROWS, start, 3)


def test_attention_alone_past_its_cache() -> None:
    model = make_model()
    with pytest.raises(LlamaError, match="max_seq_len") as error:
        model.layers[1].attention(torch.zeros(1, 2, 64), 47, model.freqs_cis[47:49], None)
    numbers_in(error, 47, 2, WINDOW)


@pytest.mark.parametrize("positions", [[0, 47], [48, 0], [-1, 3]])
def test_positions_per_row_past_the_window(positions: list[int]) -> None:
    with pytest.raises(LlamaError, match="max_seq_len") as error:
        make_model()(random_ids(2, 2), torch.tensor(positions))
    numbers_in(error, *positions, 2, WINDOW)


@pytest.mark.parametrize("first", [0, 1])
def test_positions_per_row_of_too_many_rows(first: int) -> None:
    with pytest.raises(LlamaError, match="max_batch_size") as error:
        make_model()(random_ids(ROWS + 5, 2), torch.full((ROWS + 5,), first))
    numbers_in(error, ROWS + 5, ROWS)


def test_as_many_positions_as_rows() -> None:
    with pytest.raises(LlamaError, match="start_pos") as error:
        make_model()(random_ids(3, 2), torch.tensor([0, 5]))
    numbers_in(error, 2, 3)


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"n_heads": 0}, (0, 64)),
        ({"n_heads": -4}, (-4, 64)),
        ({"n_heads": 5}, (5, 64)),
        ({"n_heads": 64}, (64,)),
        ({"n_kv_heads": 0}, (0,)),
        ({"n_kv_heads": -2}, (-2,)),
        ({"n_kv_heads": 3}, (3, 4)),
        ({"vocab_size": -1}, (-1,)),
        ({"vocab_size": 0}, (0,)),
    ],
    ids=str,
)
def test_sizes_that_cannot_be(changes: dict[str, int], numbers: tuple[int, ...]) -> None:
    with pytest.raises(LlamaError, match=next(iter(changes))) as error:
        Transformer(ModelArgs(**{**PARAMS["mha"], **changes}, max_seq_len=8, max_batch_size=1))
    numbers_in(error, *numbers)


# ---------------------------------------------------------------------------------------- gradients


def block_loss(model: Transformer, tokens: Tensor) -> Tensor:
    """Cross entropy of the next tokens, through the blocks as outside code writes it."""
    seqlen = tokens.shape[1] - 1
    h = model.tok_embeddings(tokens[:, :-1])
    mask = torch.full((seqlen, seqlen), -INF).triu(1)
    for layer in model.layers:
        h = layer(h, 0, model.freqs_cis[:seqlen], mask)
    logits = model.output(model.norm(h)).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("before", [torch.inference_mode, torch.no_grad], ids=["inference_mode", "no_grad"])
def test_two_training_steps_after_a_generation(kind: str, before: Callable[[], Any]) -> None:
    model = make_model(kind)
    with before():
        model.forward(random_ids(3, 9), 0)
    tokens = random_ids(3, 11, seed=8)
    wanted = {name: weight.requires_grad_() for name, weight in weights(kind).items()}
    for _ in range(2):
        model.zero_grad()
        block_loss(model, tokens).backward()
        logits = reference.logits(wanted, PARAMS[kind], tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        gradients = torch.autograd.grad(loss, list(wanted.values()))
        for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
            assert parameter.grad is not None, name
            close(parameter.grad, gradient, 1e-5)
        with torch.no_grad():
            for parameter, weight, gradient in zip(model.parameters(), wanted.values(), gradients, strict=True):
                parameter -= 0.1 * gradient.float()
                weight -= 0.1 * gradient
    close(model.forward(tokens, 0), reference.logits(wanted, PARAMS[kind], tokens).detach(), 1e-4)


def test_gradients_of_a_chunk_behind_a_cache() -> None:
    """The new tokens' own keys and values carry gradients, what the cache holds does not."""
    model, x = make_model(), torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(4))
    attention, freqs = model.layers[0].attention, model.freqs_cis
    attention(x[:, :5], 0, freqs[:5], None)
    late = x[:, 5:].clone().requires_grad_()
    for _ in range(2):
        late.grad = None
        attention(late, 5, freqs[5:9], None).square().sum().backward()
    assert late.grad is not None
    other = x[:, 5:].clone().double().requires_grad_()
    whole = torch.cat([x[:, :5].double(), other], dim=1)
    plain_attention(attention, whole, 4, None, 5e5).square().sum().backward()
    close(late.grad, other.grad, 1e-4)  # type: ignore[arg-type]


def test_caches_made_in_inference_mode_are_ordinary_tensors() -> None:
    with torch.inference_mode():
        model = make_model()
        model.forward(random_ids(3, 9), 0)
    for layer in model.layers:
        assert not layer.attention.cache_k.is_inference() and not layer.attention.cache_v.is_inference()


def test_every_parameter_asks_for_gradients() -> None:
    assert all(parameter.requires_grad for parameter in make_model().parameters())


# ------------------------------------------------------------------------------------------- casts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cast_after_construction_is_made_in_that_dtype(kind: str, dtype: torch.dtype) -> None:
    tokens = random_ids(2, 9)
    wanted = feed(make_model(kind, dtype), tokens, [5, 3, 1])
    model = make_model(kind)
    model(tokens, 0)  # a generation in float32 comes first
    model = model.half() if dtype == torch.float16 else model.bfloat16()
    assert torch.equal(feed(model, tokens, [5, 3, 1]), wanted)
    assert model.freqs_cis.dtype == torch.complex64
    assert model.layers[0].attention.cache_k.dtype == model.layers[1].attention.cache_v.dtype == dtype
    close(feed(model.float(), tokens, [5, 3, 1]), oracle(kind, tokens), 0.2)


def test_the_default_dtype_at_construction_decides() -> None:
    model = make_model("gqa", torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.layers[0].attention.cache_k.dtype == torch.bfloat16
    assert model.freqs_cis.dtype == torch.complex64
    assert torch.get_default_dtype() == torch.float32


# ------------------------------------------------------------------------------ callers' ways to call


def test_int32_ids_and_callers_modes() -> None:
    model, tokens = make_model(), random_ids(2, 9)
    close(feed(model, tokens.int(), [4, 4, 1]), oracle("gqa", tokens))
    with torch.inference_mode():
        close(feed(model, tokens, [4, 4, 1]), oracle("gqa", tokens))
    close(model(tokens=tokens, start_pos=0), oracle("gqa", tokens))
    block_loss(model, tokens).backward()


def test_ids_caches_and_angles_follow_the_model_to_its_device() -> None:
    """The device is torch's "meta", the one other device that every machine has."""
    model = make_model()
    model(random_ids(2, 5), 0)
    model.to("meta")
    for tokens, start in ((random_ids(2, 5), 0), (random_ids(2, 1), 5), (random_ids(2, 3), 6)):
        assert model(tokens, start).device.type == "meta"
    assert model.layers[0].attention.cache_k.device.type == "meta"


def test_a_cache_filled_in_inference_mode_goes_on_outside_it() -> None:
    model, tokens = make_model().bfloat16().float(), random_ids(2, 9)
    with torch.inference_mode():
        model(tokens[:, :5], 0)
    first = model(tokens[:, 5:], 5)
    model.bfloat16()
    with torch.inference_mode():
        model(tokens, 0)  # the caches change their dtype in here
    assert not model.layers[0].attention.cache_k.is_inference()
    model.float()
    model(tokens[:, :5], 0)
    close(model(tokens[:, 5:], 5), first, 0.2)


def test_hooks_fire_once_per_step_with_the_published_arguments() -> None:
    model, tokens = make_model("gqa", torch.bfloat16), random_ids(2, 9)
    seen: dict[str, list[Any]] = {"layers.1": [], "layers.0.attention": []}
    modules = dict(model.named_modules())
    for name, calls in seen.items():
        modules[name].register_forward_hook(lambda module, args, output, calls=calls: calls.append(args))
    feed(model, tokens, [5, 3, 1])
    for calls in seen.values():
        assert [len(args) for args in calls] == [4, 4, 4]
        for (start, seqlen), (x, start_pos, freqs_cis, mask) in zip(((0, 5), (5, 3), (8, 1)), calls, strict=True):
            assert x.shape == (2, seqlen, 64) and start_pos == start and type(start_pos) is int
            assert torch.equal(freqs_cis, model.freqs_cis[start : start + seqlen])
            if seqlen == 1:
                assert mask is None
            else:
                allowed = torch.ones(seqlen, start + seqlen, dtype=torch.bool).tril(start)
                assert mask.dtype == x.dtype and torch.equal(mask == 0, allowed)
                assert (mask[~allowed] == -INF).all()


def test_every_module_is_called_as_a_module() -> None:
    model, fired = make_model(), []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *args, name=name: fired.append(name))
    model(random_ids(1, 3), 0)
    assert sorted(fired) == sorted(name for name, module in model.named_modules() if name != "layers")


def test_deep_copies_and_saved_models_go_their_own_way() -> None:
    model, tokens = make_model(), random_ids(2, 9)
    model(tokens[:, :5], 0)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        close(twin(tokens[:, 5:], 5), oracle("gqa", tokens)[:, 5:])  # the cache came along
        twin(random_ids(2, 9, seed=7), 0)
        with torch.no_grad():
            next(iter(twin.parameters())).zero_()
    close(model(tokens[:, 5:], 5), oracle("gqa", tokens)[:, 5:])


@pytest.mark.parametrize("lacking", ["rope_theta", None])
def test_settings_that_only_look_like_model_args(lacking: str | None) -> None:
    settings = SimpleNamespace(**vars(ModelArgs(**PARAMS["mha"], max_seq_len=WINDOW, max_batch_size=ROWS)))
    if lacking:
        delattr(settings, lacking)
    model: Any = Transformer(settings)  # type: ignore[arg-type]
    assert model.params is settings and settings.n_kv_heads is None
    model.load_state_dict(weights("mha", dtype=torch.float32))
    tokens = random_ids(2, 9)
    close(model(tokens, 0), oracle("mha", tokens))


# ------------------------------------------------------------------------------- names and attributes


def test_state_dict_has_the_checkpoints_keys_in_order(kind: str) -> None:
    model = make_model(kind)
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == reference.shapes(PARAMS[kind])
    assert list(model.state_dict()) == list(reference.shapes(PARAMS[kind]))
    assert list(dict(model.named_parameters())) == list(model.state_dict())
    assert list(dict(model.named_buffers())) == []


def test_attributes_as_published(kind: str) -> None:
    model = make_model(kind)
    kv = PARAMS[kind].get("n_kv_heads", 4)
    assert (model.vocab_size, model.n_layers, model.params.n_kv_heads) == (97, 2, PARAMS[kind].get("n_kv_heads"))
    for layer_id, block in enumerate(model.layers):
        assert isinstance(block, TransformerBlock) and isinstance(block.feed_forward, FeedForward)
        assert (block.layer_id, block.n_heads, block.dim, block.head_dim) == (layer_id, 4, 64, 16)
        assert [name for name, _ in block.named_children()] == [
            "attention",
            "feed_forward",
            "attention_norm",
            "ffn_norm",
        ]
        found = block.attention
        assert (found.n_kv_heads, found.n_local_heads, found.n_local_kv_heads) == (kv, 4, kv)
        assert (found.n_rep, found.head_dim) == (4 // kv, 16)
        assert block.attention_norm.eps == block.ffn_norm.eps == PARAMS[kind]["norm_eps"]
    assert [name for name, _ in model.named_children()] == ["tok_embeddings", "layers", "norm", "output"]


def test_the_layers_are_fairscales() -> None:
    model = make_model()
    assert isinstance(model.tok_embeddings, fairscale.ParallelEmbedding)
    attention, feed_forward = model.layers[0].attention, model.layers[0].feed_forward
    for layer in (attention.wq, attention.wk, attention.wv, feed_forward.w1, feed_forward.w3):
        assert isinstance(layer, fairscale.ColumnParallelLinear) and not layer.gather_output
    for layer in (attention.wo, feed_forward.w2):
        assert isinstance(layer, fairscale.RowParallelLinear) and layer.input_is_parallel
    assert isinstance(model.output, fairscale.ColumnParallelLinear) and model.output.gather_output


@pytest.mark.parametrize(
    ("dim", "multiple_of", "multiplier", "hidden"),
    [
        (4096, 256, None, 11008),
        (5120, 256, None, 13824),
        (8192, 4096, 1.3, 28672),
        (4096, 1024, 1.3, 14336),
        (2048, 256, 1.5, 8192),
        (3072, 256, 1.0, 8192),
    ],
)
def test_the_width_of_the_feed_forward(dim: int, multiple_of: int, multiplier: float | None, hidden: int) -> None:
    with torch.device("meta"):
        layer = FeedForward(dim, 4 * dim, multiple_of, multiplier)
    assert (layer.w1.weight.shape, layer.w2.weight.shape) == ((hidden, dim), (dim, hidden))
    assert layer.w3.weight.shape == (hidden, dim)


# ------------------------------------------------------------------------------------ norm and rotary


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rms_norm_bit_for_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(size, generator=generator).to(dtype) for size in ((50, 64), (64,)))
    norm = RMSNorm(64, eps=1e-5)
    norm.weight.data = weight
    scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    wanted, other_order = scaled.type_as(x) * weight, (scaled * weight.float()).type_as(x)
    assert torch.equal(norm(x), wanted) and norm(x).dtype == dtype
    assert (dtype == torch.float32) == torch.equal(wanted, other_order)  # this data can tell them apart


def test_rms_norm_as_published() -> None:
    norm = RMSNorm(8)
    assert repr(norm) == "RMSNorm()" and norm.eps == 1e-6 and torch.equal(norm.weight, torch.ones(8))


def test_freqs_cis() -> None:
    found = precompute_freqs_cis(16, 9001)
    assert found.dtype == torch.complex64 and found.shape == (9001, 8)
    freqs = 1.0 / (10000.0 ** (torch.arange(0, 16, 2).float() / 16))
    angles = torch.outer(torch.arange(9001).float(), freqs)  # in float32, as published
    assert torch.equal(found, torch.polar(torch.ones_like(angles), angles))
    exact = torch.arange(9001).double()[:, None] * 500000.0 ** (-torch.arange(0, 16, 2).double() / 16)
    close(
        torch.view_as_real(precompute_freqs_cis(16, 200, 500000.0)), torch.stack([exact.cos(), exact.sin()], -1)[:200]
    )


def test_freqs_cis_is_a_plain_attribute_of_twice_the_window() -> None:
    model = make_model("gqa", torch.bfloat16)
    assert type(model.freqs_cis) is Tensor and model.freqs_cis.shape == (2 * WINDOW, 8)
    before = model.freqs_cis.clone()
    assert torch.equal(model.half().freqs_cis, before) and before.dtype == torch.complex64
    assert torch.equal(before, precompute_freqs_cis(16, 2 * WINDOW, 500000.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotation_of_neighbours_in_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    xq, xk = (torch.randn(2, 9, heads, 16, generator=generator).to(dtype) for heads in (4, 2))
    found_q, found_k = apply_rotary_emb(xq, xk, precompute_freqs_cis(16, 9))
    for x, found in ((xq, found_q), (xk, found_k)):
        wanted = reference.rotate(x.double().transpose(1, 2), 10000.0).transpose(1, 2)
        assert found.dtype == dtype and found.shape == x.shape
        close(found, wanted.to(dtype), 1e-5 if dtype == torch.float32 else 2**-7)
        pairs = torch.view_as_complex(x.float().reshape(2, 9, -1, 8, 2))
        turned = torch.view_as_real(pairs * precompute_freqs_cis(16, 9)[None, :, None]).flatten(3)
        assert torch.equal(found, turned.to(dtype))  # no wider type either: the published bits


def test_reshape_for_broadcast_and_repeat_kv() -> None:
    freqs = precompute_freqs_cis(16, 9)
    assert reshape_for_broadcast(freqs, torch.zeros(2, 9, 4, 8)).shape == (1, 9, 1, 8)
    with pytest.raises(AssertionError):
        reshape_for_broadcast(freqs, torch.zeros(2, 7, 4, 8))
    x = torch.arange(2 * 3 * 2 * 4).view(2, 3, 2, 4)
    assert torch.equal(repeat_kv(x, 1), x)
    assert torch.equal(repeat_kv(x, 3), torch.stack([x[:, :, head] for head in (0, 0, 0, 1, 1, 1)], dim=2))
