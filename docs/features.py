"""What the documents of seven systems describe: the rows of docs/parity.md.

`DOCUMENTS` are those that the rows are from. A test proves a row by the mark
``@pytest.mark.proves(system, feature, how=...)``; ``how`` is a name in `HOW`.
"""

from __future__ import annotations

from dataclasses import dataclass

#: How a test proves a feature.
HOW = {
    "library": "runs the real library",
    "signatures": "bound to its published signatures",
    "own": "own implementation",
}

_GUIDE = "Low Precision Training Methods, of Accelerate's documentation"

#: System -> the document, and how far its own code is run here.
DOCUMENTS = {
    "unit-scaling": (
        "Graphcore's announcement of the library",
        "This package takes its place, so that the two cannot be installed together: tests compare "
        "with recorded values and signatures of 0.3.5.",
    ),
    "Accelerate": (_GUIDE, "Installed and run on CPU, with a stand-in for TransformerEngine."),
    "TransformerEngine": (
        _GUIDE,
        "It needs a GPU: its published Python is run, and a CPU stand-in that is made from its "
        "signatures.",
    ),
    "MS-AMP": (
        _GUIDE,
        "It has no distribution and does not run on today's torch: the tests compute its "
        "arithmetic independently.",
    ),
    "Lightning": ("N-Bit Precision (Intermediate)", "Installed and run on CPU."),
    "Composer": (
        "Low Precision LayerNorm",
        "It does not install beside the torch that this package needs: its signatures, and its "
        "Algorithm and Event classes, are those of the published package.",
    ),
    "timm": (
        'The issue "hack ln implementation in convnext"',
        "The code of its norms is run, from the published package.",
    ),
}

_PYTHON = "its Python was run, with stand-ins for what is compiled; no GPU"
_NO_GPU = "not shown: nothing here has been run on a GPU"


@dataclass(frozen=True)
class Feature:
    """A row. ``where``: the section of the document. ``note``: what its tests do not show, and
    why; a feature without a test has one."""

    system: str
    name: str
    where: str
    note: str = ""


def _rows(system: str, where: str, *rows: str | tuple[str, str]) -> list[Feature]:
    pairs = [(row, "") if isinstance(row, str) else row for row in rows]
    return [Feature(system, name, where, note) for name, note in pairs]


FEATURES = [
    *_rows(
        "unit-scaling",
        "the library in action",
        "unit_scale(model)",
        "simulate_fp8(model)",
        "unit_scale(simulate_fp8(model))",
        "nanoGPT, plain, in FP8 and unit-scaled in FP8",
        ("FP8 loses accuracy, unit scaling regains it", "[measured](benchmarks-all.md#training)"),
        ("any PyTorch model", "[51 architectures](benchmarks-all.md#zoo) were tried"),
        "with torch.compile",
        (
            "overhead that can be neglected",
            "[measured](benchmarks-all.md#transforms); no test asserts",
        ),
    ),
    *_rows(
        "unit-scaling",
        "implementing unit scaling",
        "uu for nn",
        "U for F",
        "the unit-scaled MLP",
        "skip and residual additions",
        "losses",
        "FP16 and FP8",
    ),
    *_rows(
        "unit-scaling",
        "using the library",
        "pip install",
        "names, parameters and defaults",
    ),
    *_rows(
        "Accelerate",
        "introduction and TransformersEngine",
        "FP8 by prepare",
        "BF16 around FP8",
        "TERecipeKwargs",
        "FP8RecipeKwargs",
    ),
    *_rows("Accelerate", "MS-AMP", "opt_level", "AORecipeKwargs"),
    *_rows("Accelerate", "combining the two", "TransformerEngine with MS-AMP"),
    *_rows(
        "TransformerEngine",
        "TransformersEngine",
        ("nn.Linear to te.Linear", _PYTHON),
        ("nn.LayerNorm to te.LayerNorm", _PYTHON),
        "FP8 products, everything else as it is",
        "margin",
        ("interval", "TransformerEngine ignores it: refused, but for 1"),
        "fp8_format",
        "amax_history_len",
        "amax_compute_algo",
        ("override_linear_precision", "TransformerEngine ignores it: refused, but for its default"),
        ("numerics and speed of its products", _NO_GPU),
    ),
    *_rows(
        "MS-AMP",
        "a quick chart",
        "the precisions of O1, O2, O3",
        ("FP16 AMP", "torch.amp's, with our optimizers"),
    ),
    *_rows(
        "MS-AMP",
        "MS-AMP",
        "O1",
        "O2",
        "O3",
        "communication in FP8",
        "no degraded accuracy",
        ("msamp.initialize", "the library cannot be installed: a stand-in takes its place"),
        (
            "O3 with DeepSpeed",
            "not had: a DeepSpeed engine is refused; O3 runs alone and under DDP",
        ),
        ("throughput", _NO_GPU),
    ),
    *_rows(
        "Lightning",
        "N-bit precision",
        "precision=32",
        "precision=16, with a scaled loss",
        "precision=bf16",
        "bf16 on CPU",
        "the 8-bit optimizer of bitsandbytes",
        "no casts by hand",
        ("TPUs", "not had: CPU and CUDA devices alone"),
    ),
    *_rows(
        "Composer",
        "how to use",
        "apply_low_precision_layernorm",
        ("LowPrecisionLayerNorm", "its Trainer was run by hand with torch 2.13, not by tests"),
        ("the Trainer's precision", "on the Algorithm and Event classes of its package"),
        "amp is float16, bf16 bfloat16",
        "no effect in fp32 and fp16",
    ),
    *_rows(
        "Composer",
        "implementation details",
        "autocast off inside, input in low precision",
        "normalized_shape and eps are kept",
        "math equivalent",
        ("Fused LayerNorm before torch 1.13", "not had: torch 2.11 is the oldest"),
        ("training is faster", "not shown: on CPU it is measured by benchmarks.norms, no GPU"),
    ),
    *_rows(
        "timm",
        "LayerNorm2d",
        "LayerNorm2d(num_channels, eps, affine)",
        "strides of the output and of the gradient",
        "contiguous stays contiguous, compiled",
        "channels-last without copies",
        "TorchScript",
        "export",
        "one operation over the channels",
        "fused by the compiler",
        ("kernels for few channels", "in Triton's interpreter; never run on a GPU"),
        ("backward in one pass", "in Triton's interpreter; never run on a GPU"),
        "no E[x²] - E[x]²",
        ("images per second", _NO_GPU),
        ("older torch, XLA", "not had: torch 2.11 to 2.13, CPU and CUDA devices"),
    ),
    *_rows(
        "timm",
        "the fast path",
        "fast norm, off unless asked for",
        "statistics in float32 whatever the dtype",
        "GroupNorm as well",
        ("Apex", "not needed: the kernels are our own"),
    ),
]
