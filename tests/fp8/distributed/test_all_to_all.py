"""All-to-all of tokens in FP8, in two and four processes."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fp8
from fp8.distributed.all_to_all import TokenBytes, token_bytes
from tests.launch import run_ranks

WORKER = Path(__file__).with_name("all_to_all_worker.py")


@pytest.mark.proves("the field", "all-to-all of tokens in FP8", how="own")
@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch is built without gloo")
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_all_to_all(world, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("WORLD", str(world))
    run_ranks(WORKER, world, tmp_path / "store")


@pytest.mark.parametrize(
    ("recipe", "features", "expected"),
    [
        ("mxfp8", 4096, TokenBytes(4096 + 128, 4096 + 128, 8192)),
        ("mxfp8", 33, TokenBytes(33 + 2, 33 + 2, 66)),
        ("row", 4096, TokenBytes(4096 + 4, 4096 + 4, 8192)),
        ("block", 4096, TokenBytes(4096 + 128, 4096 + 128, 8192)),
        ("tensor", 4096, TokenBytes(4096 + 4, 4096 + 4, 8192)),
        ("unit", 4096, TokenBytes(4096, 4096, 8192)),
    ],
)
def test_bytes(recipe, features, expected):
    """Values of a byte; scales of a byte for 32 values, or of four for a token or 128 values."""
    assert token_bytes(features, recipe) == expected


def test_bytes_of_one_way():
    """Only what a recipe casts is sent in FP8: as torchao's dispatch with gradients in bf16."""
    mx = fp8.RECIPES["mxfp8"].input
    forward = fp8.Recipe(name="forward", input=mx)
    assert token_bytes(64, forward) == TokenBytes(66, 128, 128)
    assert token_bytes(64, forward, torch.float32).backward == 256
    with pytest.raises(
        TypeError, match=r"tokens of torch.int64 in FP8; allowed are float32, bfloat16"
    ):
        token_bytes(64, forward, torch.int64)
