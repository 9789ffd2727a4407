"""The PTX that the compiler makes of casts for an NVIDIA H100, on a machine without one.

A script, because it changes torch for its whole process: tensors of "cuda" are fake, and questions
about the device are answered here. Arguments: "saved", "selftest", or the keyword arguments of a
`Cast` as JSON. Prints JSON: for each argument the PTX of its kernels. Needs a CUDA build of torch
with the Triton of its wheel.
"""

import json
import sys
from types import SimpleNamespace

import torch
import triton
from torch._dynamo.device_interface import get_interface_for_device
from torch._inductor import config
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget

from fp8.casts.operands import _stored
from fp8.kernels import selftest
from fp8.kernels.kernel import filled
from fp8.kernels.table import store
from fp8.recipes.cast import Cast

TARGET = GPUTarget("cuda", 90, 32)
_SIZES = "multi_processor_count warp_size max_threads_per_multi_processor max_threads_per_block"
_SIZES += " regs_per_multiprocessor total_memory shared_memory_per_block_optin"
SIZES = dict(
    zip(_SIZES.split(), (132, 32, 2048, 1024, 65536, 80 << 30, 232448), strict=True)
)
CARD = SimpleNamespace(name="H100", major=9, minor=0, **SIZES)
ANSWERS = {
    **dict.fromkeys(("is_available", "device_count"), 1),
    **dict.fromkeys(
        ("current_device", "_exchange_device", "_maybe_exchange_device"), 0
    ),
    **dict.fromkeys("synchronize _lazy_init set_rng_state set_device".split(), None),
    **dict.fromkeys(("get_device_properties", "_get_device_properties"), CARD),
    "get_device_capability": (9, 0),
    "get_compute_capability": 90,
    "get_rng_state": torch.zeros(16, dtype=torch.uint8),
}
EMITTED = []


def emit(tuner, *args, **kwargs):
    for how in tuner.configs:
        EMITTED.append(tuner._precompile_config(how).kernel.asm["ptx"])


def pretend():
    interface = get_interface_for_device("cuda")
    for owner in (torch.cuda, interface, interface.Worker):
        for name, value in ANSWERS.items():
            setattr(owner, name, staticmethod(lambda *args, value=value: value))
    torch._C._cuda_init = lambda: None
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: TARGET))
    FakeTensorMode.avoid_device_init = True
    config.compile_threads, config.force_disable_caches = 1, True
    config.use_static_triton_launcher = False
    config.joint_graph_constant_folding = False  # it computes on the device
    CachingAutotuner.precompile, triton_helpers.set_driver_to_gpu = emit, lambda: None
    torch.compiler._is_compiling_flag = True  # what casts ask


def kernels_of(argument):
    """The PTX of the kernels of a cast of a bfloat16 matrix and of its transpose, as the backward
    pass of a product casts a gradient; or of an e5m2 operand that is saved."""
    EMITTED.clear()
    if argument == "selftest":
        return of_selftest()
    spec = None if argument == "saved" else Cast(**json.loads(argument))

    def cast(x):
        if spec is None:
            return _stored(x, torch.float8_e5m2)
        return [filled(store(x, spec, axis).values) for axis in (-1, -2)]

    with FakeTensorMode():
        x = torch.empty(512, 256, dtype=torch.bfloat16, device="cuda")
        torch._inductor.compile(make_fx(cast)(x), [x])
    return list(EMITTED)


def of_selftest():
    """The PTX of the casts that are compared on a device before compiled code is trusted."""
    for size in selftest._SIZES:
        with FakeTensorMode():
            x = torch.empty(size, dtype=torch.bfloat16, device="cuda")
            torch._inductor.compile(make_fx(selftest._casts)(x), [x])
    return list(EMITTED)


if __name__ == "__main__":
    pretend()
    print(json.dumps([kernels_of(argument) for argument in sys.argv[1:]]))
