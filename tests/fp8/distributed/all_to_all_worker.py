"""One of two or four processes of test_all_to_all: ``python all_to_all_worker.py RANK STORE``, with
the number of processes in the variable WORLD.

What arrives is what a process alone computes from the tokens of all.
"""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8
from fp8.casts.casting import cast_forward
from fp8.distributed.all_to_all import DTYPES, all_to_all, token_bytes
from tests.launch import as_rank

WORLD = int(os.environ["WORLD"])
FEATURES = 150  # no multiple of a tile
RECIPES = ["unit", "tensor", "row", "block", "mxfp8"]

MX, EXACT = fp8.RECIPES["mxfp8"].input, fp8.Cast(format="e5m2", scaling="row", rule="exact")
OTHERS = [
    fp8.Recipe(name="forward", input=MX),
    fp8.Recipe(name="backward", grad=MX),
    fp8.Recipe(name="none"),
    fp8.Recipe(name="exact", input=EXACT, grad=fp8.Cast(format="e4m3", scaling="nv")),
]


def counts(rank: int) -> list[int]:
    """The tokens that a process sends to each: none to some, and of the last one none at all."""
    return [0 if rank == WORLD - 1 else (3 * rank + 5 * to) % 7 for to in range(WORLD)]


def splits(rank: int) -> dict[str, list[int]]:
    received = [counts(sender)[rank] for sender in range(WORLD)]
    return {"output_split_sizes": received, "input_split_sizes": counts(rank)}


def values(seed: int, size: int, dtype: torch.dtype) -> Tensor:
    """Of many magnitudes, with zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, FEATURES, generator=generator)
    x = x * torch.exp2(torch.randint(-8, 8, (size, 1), generator=generator))
    x[:, :40] = 0
    return x.to(dtype)


def tokens_of(rank: int, dtype: torch.dtype) -> Tensor:
    return values(rank, sum(counts(rank)), dtype)


def routed(rank: int, parts: list[Tensor], sizes: Any) -> Tensor:
    """What arrives at ``rank``. parts: what each process sends; sizes: rank -> how it splits it."""
    return torch.cat([x.split(sizes(sender))[rank] for sender, x in enumerate(parts)])


def cast_alone(x: Tensor, cast: fp8.Cast | None) -> Tensor:
    return cast_forward(x, cast) if cast is not None and len(x) else x


def check_values(rank: int, recipe: fp8.Recipe, dtype: torch.dtype, call: Any = all_to_all) -> None:
    """Tokens and gradients are those that each sender's cast alone has, to the bit."""
    x = tokens_of(rank, dtype).requires_grad_()
    y = call(x, recipe, **splits(rank))
    everyone = [cast_alone(tokens_of(r, dtype), recipe.input) for r in range(WORLD)]
    expected = routed(rank, everyone, counts)
    assert y.dtype == dtype
    assert torch.equal(y, expected), recipe.name
    received = [splits(r)["output_split_sizes"] for r in range(WORLD)]
    grads = [values(10 + r, sum(received[r]), dtype) for r in range(WORLD)]
    y.backward(grads[rank])
    sent_back = [cast_alone(g, recipe.grad) for g in grads]
    assert torch.equal(x.grad, routed(rank, sent_back, lambda r: received[r])), recipe.name


def check_error(rank: int) -> None:
    """e4m3 rounds to nearest: at most 2**-4 of a value, or half a smallest step, 2**-10 scales.

    A scale is the power of two that is at least amax / 448, and less than twice that."""
    x = tokens_of(rank, torch.float32)
    y = all_to_all(x, **splits(rank))
    everyone = [tokens_of(r, torch.float32) for r in range(WORLD)]
    exact = routed(rank, everyone, counts)
    blocks = nn.functional.pad(exact, (0, -FEATURES % 32)).unflatten(1, (-1, 32))
    scale = 2 * blocks.abs().amax(-1) / 448
    least = scale.repeat_interleave(32, 1)[:, :FEATURES] * 2**-10
    assert ((y - exact).abs() <= (exact.abs() * 2**-4).maximum(least)).all()
    assert not torch.equal(y, exact) or not len(y)


def check_nonfinite(rank: int) -> None:
    x = torch.ones(WORLD, FEATURES)
    x[0, 3], x[-1, 70] = torch.inf, torch.nan
    for name in RECIPES:
        y = all_to_all(x, name)
        expected = routed(rank, [cast_forward(x, fp8.RECIPES[name].input)] * WORLD, ones)
        assert torch.equal(y.isnan(), expected.isnan())
        assert torch.equal(y.nan_to_num(7), expected.nan_to_num(7))


def ones(rank: int) -> list[int]:
    return [1] * WORLD


def check_bytes() -> None:
    """The bytes that are sent are those of `token_bytes`: 0.516 of bf16's under MXFP8."""
    sent: list[int] = []
    send = dist.all_to_all_single

    def counted(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(input.nbytes)
        return send(output, input, *args, **kwargs)

    dist.all_to_all_single = counted
    try:
        for name in RECIPES:
            x = torch.randn(2 * WORLD, 256, dtype=torch.bfloat16, requires_grad=True)
            all_to_all(x, name).sum().backward()
            size = token_bytes(256, name)
            assert sent == [size.forward * 2 * WORLD, size.backward * 2 * WORLD]
            assert size.uncast * 2 * WORLD == x.nbytes
            sent.clear()
    finally:
        dist.all_to_all_single = send
    assert token_bytes(256).forward / token_bytes(256).uncast == (256 + 8) / 512


def check_experts(rank: int) -> None:
    """Dispatched, multiplied by this process's expert and combined: under a recipe with scales of
    powers of two the expert's cast leaves what arrives unchanged, so its output is that of tokens
    sent in high precision."""
    torch.manual_seed(rank)
    expert = fp8.convert(nn.Linear(96, 64), "mxfp8")
    x = torch.randn(sum(counts(rank)), 96, requires_grad=True)
    there, back = (
        splits(rank),
        dict(zip(splits(rank), reversed(splits(rank).values()), strict=True)),
    )
    outputs = []
    for recipe in ("mxfp8", OTHERS[2]):
        outputs.append(expert(all_to_all(x, recipe, **there)))
        combined = all_to_all(outputs[-1], recipe, **back)
        assert combined.shape == (len(x), 64)
        combined.square().sum().backward()
    assert torch.equal(*outputs)
    assert x.grad.isfinite().all()


def check_second_derivative() -> None:
    """The gradient of the gradient takes the way there again."""
    x = torch.randn(WORLD, 32, requires_grad=True)
    (grad,) = torch.autograd.grad(all_to_all(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert torch.equal(second, torch.full_like(x, 2.0))


def check_refused() -> None:
    x = torch.randn(WORLD, 8)
    with pytest.raises(
        TypeError, match=r"tokens of torch.int32 in FP8; allowed are float32, bfloat16"
    ):
        all_to_all(x.int())
    with pytest.raises(TypeError, match=r"tokens of torch\.float64"):
        all_to_all(x.double())
    with pytest.raises(TypeError, match="needs a plain tensor, got a list"):
        all_to_all([x])
    with pytest.raises(ValueError, match=r"must be \(tokens, features\), got shape \(8,\)"):
        all_to_all(x[0])
    reasons = {
        "delayed": "'delayed', whose scale is the state of a layer",
        "static": "'static', whose scale is the state of a layer",
        "bf16": "a format without a torch dtype of one byte",
        "mxfp6": "a format without a torch dtype of one byte",
        "nvfp4": "a format without a torch dtype of one byte",
    }
    for name, reason in reasons.items():
        with pytest.raises(ValueError, match=reason):
            all_to_all(x, name)
    tile = fp8.Cast(format="e4m3", scaling="block", tile=(128, 128))
    with pytest.raises(ValueError, match=r"send gradients under recipe 'tiles'.*several tokens"):
        all_to_all(x, fp8.Recipe(name="tiles", grad=tile))
    with pytest.raises(ValueError, match="have no equal parts"):
        all_to_all(torch.randn(WORLD + 1, 8))
    with pytest.raises(ValueError, match="or neither"):
        all_to_all(x, input_split_sizes=[1] * WORLD)
    both = {"output_split_sizes": [1] * WORLD}
    with pytest.raises(ValueError, match=f"input_split_sizes needs {WORLD} sizes"):
        all_to_all(x, input_split_sizes=[WORLD], **both)
    with pytest.raises(ValueError, match=r"do not add up"):
        all_to_all(x, input_split_sizes=[2] * WORLD, **both)
    with pytest.raises(TypeError, match=r"input_split_sizes must be ints \(tensor.tolist\(\)\)"):
        all_to_all(x, input_split_sizes=torch.ones(WORLD), **both)


def main(rank: int, store: Path) -> None:
    torch.manual_seed(rank)
    for name in RECIPES:
        for dtype in DTYPES:
            check_values(rank, fp8.RECIPES[name], dtype)
    for recipe in OTHERS:
        check_values(rank, recipe, torch.float32)
    check_error(rank)
    check_nonfinite(rank)
    check_bytes()
    check_experts(rank)
    check_second_derivative()
    check_refused()
    if WORLD == 4:  # in make test-all
        warnings.filterwarnings("ignore", ".*should not be instantiated")  # of torch
        compiled = torch.compile(all_to_all, backend="aot_eager", fullgraph=True)
        for name in ("mxfp8", "tensor"):
            check_values(rank, fp8.RECIPES[name], torch.bfloat16, compiled)


if __name__ == "__main__":
    as_rank(main, WORLD)
