"""The Triton kernels of LayerNorm2d: what they compute, in Triton's interpreter, and that they
compile for GPUs. They have not run on one."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8.norms import layer_norm2d as formulas
from fp8.norms import layer_norm2d_kernels as kernels

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs triton, which torch brings along for CUDA: pip install triton",
)

SHAPES = [
    (2, 6, 5, 7),
    (2, 96, 7, 7),
    (1, 130, 3, 3),
    (2, 1, 4, 4),
    (5, 17),
    (2, 64, 9),
    (1, 768, 2, 2),
]


def check(shape: tuple[int, ...], layout: str, dtype: torch.dtype, affine: bool) -> None:
    """The kernels against the formulas, which other tests compare with float64."""
    x = (torch.randn(shape) + 3).to(dtype)
    if len(shape) == 4 and layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    w, b = (torch.randn(shape[1]), torch.randn(shape[1])) if affine else (None, None)
    y, mean, rstd = kernels.forward(x, w, b, 1e-6)
    reference = formulas._normalized(x, w, b, 1e-6)
    # An ulp of the output: the interpreter cuts what a GPU rounds to bfloat16.
    eps = max(torch.finfo(dtype).eps, 1e-5)
    grad = torch.randn(shape).to(dtype)
    results = [y, mean, rstd, *kernels.backward(grad, x, mean, rstd, w)]
    references = [*reference, *formulas._gradients(grad, x, *reference[1:], w)]
    for value, expected in zip(results, references, strict=True):
        torch.testing.assert_close(value.float(), expected.float(), rtol=eps, atol=3 * eps)
    assert y.stride() == results[3].stride() == x.stride()
    assert mean.dtype == rstd.dtype == torch.float32


def interpreted() -> None:
    """Every case, in a process of its own: Triton reads its switch when it is imported."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    for shape in SHAPES:
        for layout in ("contiguous", "channels_last"):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                for affine in (True, False):
                    check(shape, layout, dtype, affine)


@pytest.mark.proves("timm", "kernels for few channels", how="own")
@pytest.mark.proves("timm", "backward in one pass", how="own")
def test_in_tritons_interpreter():
    root = Path(__file__).parents[3]
    code = "from tests.fp8.norms.test_layer_norm2d_kernels import interpreted; interpreted()"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, sys.path)])
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, env=environment, cwd=root, capture_output=True, text=True)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("the interpreter of this Triton cannot loop with this NumPy: triton>=3.9 can")
    assert done.returncode == 0, done.stderr


@pytest.mark.proves("timm", "kernels for few channels", how="own")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", ["forward", "backward"])
# Triton's own: a setting that it will read from the environment, and what it leaves out of a tree.
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
@pytest.mark.filterwarnings("ignore:AnnAssign.__init__ missing:DeprecationWarning")
def test_compile_for_gpus_with_wide_loads(
    name: str, layout: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(kernels, f"{name}_kernel")()
    x = torch.empty(2, 96, 56, 56)
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    cut = kernels._tiles(x)
    settings = cut.settings
    warps = settings.pop("num_warps")
    constants: dict[str, Any] = {**settings, "WEIGHT": True, "BIAS": True}
    constants |= {"pixel": 1} if cut.pixel == 1 else {"channel": 1}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    types = {key: "*fp32" if key.endswith("_at") else "i32" for key in kernel.arg_names}
    types |= {key: "*bf16" for key in ("x_at", "y_at", "g_at", "dx_at") if key in types}
    types |= {"eps": "fp32"} if "eps" in types else {}
    types |= dict.fromkeys(constants, "constexpr")
    aligned = [key for key in types if key not in {*constants, "eps", "rows"}]
    places = {(kernel.arg_names.index(key),): [["tt.divisibility", 16]] for key in aligned}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=places)
    target = GPUTarget("cuda", capability, 32)
    compiled = compile(source, target=target, options={"num_warps": warps})
    assert compiled.asm["cubin"]
    for access in ("ld", "st"):  # 16 bytes at a time
        assert re.search(rf"{access}\.global\S*\.v4\.b32", compiled.asm["ptx"])
