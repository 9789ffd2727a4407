"""What inductor makes of a cast: no pass of its own. Counted in the kernels that it generates, on
the CPU C++ functions."""

import torch
from torch._inductor.utils import run_and_get_code, run_fw_bw_and_get_code
from torch.nn import functional as F

import fp8
from tests.shared import assert_close, normal, parametrize, randn, sampled

PRODUCERS = {
    "gelu": F.gelu,
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "softmax": lambda x: x.softmax(-1),
}


def kernels(function, x):
    """How many kernels the compiled function has; and that it computes the same."""
    got, code = run_and_get_code(torch.compile(function, fullgraph=True), x)
    want = function(x).float()
    # One step of the format.
    assert_close(got.float(), want, rtol=2**-3, atol=2**-9)
    return sum(part.count("async_compile.cpp_pybinding(") for part in code)


@sampled(2)
@parametrize("producer", PRODUCERS)
def test_a_producer_and_a_static_cast_are_one_kernel(producer):
    function = PRODUCERS[producer]
    assert kernels(lambda x: fp8.quantize(function(x), "e4m3"), normal(64, 128)) == 1


def test_scale_and_cast_are_one_kernel():
    x, scale = normal(64, 128), torch.tensor(0.25)
    assert kernels(lambda x: fp8.quantize(x, "e5m2", scale=scale), x) == 1


def test_the_cast_of_a_recipe_and_its_bytes():
    cast = fp8.RECIPES["unit"].input

    def function(x):
        return fp8.casts.casting.cast_forward(F.gelu(x), cast).to(torch.float8_e4m3fn)

    assert kernels(function, normal(64, 128)) == 1


def test_the_bytes_kept_for_the_backward_pass_are_written_by_the_kernel_that_casts():
    """An MLP has one kernel before each of its six products, two forward and four backward."""
    x, up, down = randn(64, 128), randn(256, 128), randn(128, 256)

    def mlp(x):
        with fp8.autocast("unit"):
            return F.linear(F.gelu(F.linear(x, up)), down)

    compiled = torch.compile(mlp, fullgraph=True)
    _, (forward, backward) = run_fw_bw_and_get_code(lambda: compiled(x))
    assert [
        code.count("async_compile.cpp_pybinding(") for code in (forward, backward)
    ] == [2, 4]


def test_what_cannot_be_fused_is_counted():
    x = normal(64, 64)
    assert kernels(lambda x: fp8.quantize(F.gelu(x) @ x, "e4m3"), x) == 2
