"""The rows of docs/parity.md: what engines have, and what the documents of seven systems describe.

`PEERS` are the engines of `COMPARISONS`, `DOCUMENTS` the documents of `FEATURES`. A test proves a
row by the mark ``@proves(system, feature, ..., how="own")`` of `tests.shared`. ``system`` is
`FIELD` for a row of `COMPARISONS`; ``how`` is a name in `HOW`.
"""

from __future__ import annotations

from dataclasses import dataclass

#: How a test proves a feature.
HOW = {
    "library": "runs the real library",
    "signatures": "bound to its published signatures",
    "own": "own implementation",
}

#: Marks of the rows of `COMPARISONS`.
FIELD = "the field"

#: Engine -> the version whose source its cells are from; MS-AMP's is of 2025, the others of 2026.
PEERS = {
    "TransformerEngine": "2.20.0.dev0 (commit d0067d0)",
    "torchao": "0.19.0 (commit 36027d8)",
    "Megatron-LM": "(commit d98e8a6)",
    "torchtitan": "(commit b5bcd76)",
    "Accelerate": "1.15.0",
    "Lightning": "2.6.6",
    "MS-AMP": "0.4.0 (commit 9746ea8)",
}


@dataclass(frozen=True)
class Comparison:
    """A row of the table of engines. ``peers``: those that have it -> what it is there, by its name
    in their code; others have nothing of it in their source. ``note``: what ours lacks, and why; a
    row without a test has one."""

    name: str
    peers: dict[str, str]
    note: str = ""


_GUIDE = "Low Precision Training Methods, of Accelerate's documentation"

#: System -> the document, and how far its own code is run here.
DOCUMENTS = {
    "unit-scaling": (
        "Graphcore's announcement of the library",
        "This package replaces it, so that the two cannot be installed together: tests compare "
        "with recorded values and signatures of 0.3.5.",
    ),
    "Accelerate": (
        _GUIDE,
        "Installed and run on CPU, with TransformerEngine's Python.",
    ),
    "TransformerEngine": (
        _GUIDE,
        "Its Python was run, on CPU: recipes, contexts and layers. Its kernels need a GPU.",
    ),
    "MS-AMP": (
        _GUIDE,
        "It has no distribution and does not run on today's torch: the tests compute its "
        "arithmetic independently, and bind to its signatures.",
    ),
    "Lightning": ("N-Bit Precision (Intermediate)", "Installed and run on CPU."),
    "Composer": (
        "Low Precision LayerNorm",
        "It does not install beside the torch that this package needs: its signatures, and its "
        "Algorithm and Event classes, are taken from the published package.",
    ),
    "timm": (
        'The issue "hack ln implementation in convnext"',
        "The code of its norms is run, from the published package.",
    ),
}

_PYTHON = "its Python was run, without its kernels; no GPU"
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
        (
            "FP8 loses accuracy, unit scaling regains it",
            "[measured](benchmarks-all.md#training)",
        ),
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
    *_rows(
        "Accelerate", "combining the two", ("TransformerEngine with MS-AMP", _PYTHON)
    ),
    *_rows(
        "TransformerEngine",
        "TransformersEngine",
        ("nn.Linear to te.Linear", _PYTHON),
        ("nn.LayerNorm to te.LayerNorm", _PYTHON),
        ("FP8 products, everything else as it is", _PYTHON),
        "margin",
        ("interval", "TransformerEngine ignores it: refused, except 1"),
        "fp8_format",
        "amax_history_len",
        "amax_compute_algo",
        (
            "override_linear_precision",
            "TransformerEngine ignores it: refused, except its default",
        ),
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
        "msamp.initialize",
        (
            "O3 with DeepSpeed",
            "not supported: a DeepSpeed engine is refused; O3 runs alone and under DDP",
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
        ("TPUs", "not supported: CPU and CUDA devices only"),
    ),
    *_rows(
        "Composer",
        "how to use",
        "apply_low_precision_layernorm",
        (
            "LowPrecisionLayerNorm",
            "its Trainer was run by hand with torch 2.13, not by tests",
        ),
        (
            "the Trainer's precision",
            "on the Algorithm and Event classes of its package",
        ),
        "amp is float16, bf16 bfloat16",
        "no effect in fp32 and fp16",
    ),
    *_rows(
        "Composer",
        "implementation details",
        "autocast off inside, input in low precision",
        "normalized_shape and eps are kept",
        "math equivalent",
        (
            "Fused LayerNorm before torch 1.13",
            "not supported: torch 2.11 is the oldest",
        ),
        (
            "training is faster",
            "not shown: measured on CPUs only, in the log",
        ),
    ),
    *_rows(
        "timm",
        "LayerNorm2d",
        "LayerNorm2d(num_channels, eps, affine)",
        "contiguous stays contiguous",
        "channels-last without copies",
        "TorchScript",
        "export",
        "one operation over the channels",
        "fused by the compiler",
        ("kernels for few channels", "none: kernels of torch and of its compiler"),
        ("backward in one pass", "none: torch and its compiler compute it"),
        "no E[x²] - E[x]²",
        ("images per second", _NO_GPU),
        ("older torch, XLA", "not supported: torch 2.11 to 2.14, CPU and CUDA devices"),
    ),
    *_rows(
        "timm",
        "the fast path",
        "fast norm",
        "statistics in float32 whatever the dtype",
        "GroupNorm as well",
        ("Apex", "not needed: the kernels are torch's"),
    ),
]

_TE = "TransformerEngine's"
_AO = "torchao's"
_RECIPE = "not by name: `recipe` is documented as a `DelayedScaling`"
_UNREAD = ("TransformerEngine", "Megatron-LM", "MS-AMP")
_ENGINE = "run by `make test-engines`, not by `make test`: [trainers](trainers.md)"

COMPARISONS = [
    Comparison(
        "delayed scaling",
        {
            "TransformerEngine": "`DelayedScaling`",
            "Megatron-LM": "`--fp8-recipe delayed`",
            "Accelerate": f"{_TE}, `TERecipeKwargs`",
            "Lightning": f"{_TE}, `TransformerEnginePrecision`",
            "MS-AMP": "inputs and gradients of outputs, 16 steps",
        },
    ),
    Comparison(
        "a scale for each tensor, current",
        {
            "TransformerEngine": "`Float8CurrentScaling`",
            "torchao": "`tensorwise`",
            "Megatron-LM": "`--fp8-recipe tensorwise`",
            "torchtitan": "no recipe of its converter, but `emulate=True`",
            "Accelerate": f"{_AO}, `AORecipeKwargs`",
            "Lightning": _RECIPE,
            "MS-AMP": "weights and their gradients",
        },
    ),
    Comparison(
        "a scale for each row",
        {
            "TransformerEngine": "not in FP8; activations in NVFP4, `row_scaled_activation`",
            "torchao": "`rowwise`, `rowwise_with_gw_hp`",
            "torchtitan": "`Float8LinearConverter`",
            "Accelerate": f"{_AO}, `AORecipeKwargs`",
        },
    ),
    Comparison(
        "blocks of 128 and of 128 x 128",
        {
            "TransformerEngine": "`Float8BlockScaling`",
            "torchao": "prototype, `blockwise_fp8_training`",
            "Megatron-LM": "`--fp8-recipe blockwise`",
            "Lightning": _RECIPE,
        },
    ),
    Comparison(
        "MXFP8",
        {
            "TransformerEngine": "`MXFP8BlockScaling`",
            "torchao": "prototype, `MXFP8TrainingOpConfig`",
            "Megatron-LM": "`--fp8-recipe mxfp8`",
            "torchtitan": "`MXFP8LinearConverter`",
            "Accelerate": f"{_TE}, `use_mxfp8_block_scaling`",
            "Lightning": _RECIPE,
        },
    ),
    Comparison(
        "NVFP4",
        {
            "TransformerEngine": "`NVFP4BlockScaling`",
            "torchao": "prototype, `NVFP4Linear`",
            "Megatron-LM": "`--fp4-format e2m1`",
            "torchtitan": "`NVFP4LinearConverter`",
            "Lightning": _RECIPE,
            "MS-AMP": "none; simulated FP4 in its layers for Megatron",
        },
    ),
    Comparison(
        "attention in FP8",
        {
            "TransformerEngine": "`fp8_dpa`, `fp8_mha`",
            "torchao": "prototype, forward pass only",
            "Megatron-LM": "`fp8_dot_product_attention`, `fp8_multi_head_attention`",
            "Lightning": f"{_TE}, for a model written with its attention",
        },
        "query, key, value and the gradient of the output, around the fused kernel",
    ),
    Comparison(
        "grouped products of experts",
        {
            "TransformerEngine": "`GroupedLinear`",
            "torchao": "prototype, `moe_training`: rows, blocks, MXFP8, NVFP4",
            "Megatron-LM": _TE,
            "torchtitan": "`Float8GroupedExpertsConverter`, `MXFP8GroupedExpertsConverter`",
        },
        "simulated; kernels run the groups one by one",
    ),
    Comparison(
        "FSDP2, weights gathered in FP8",
        {
            "TransformerEngine": "`quantized_model_init`",
            "torchao": "`enable_fsdp_float8_all_gather`, a scale for each tensor",
            "Megatron-LM": "`fp8_param_gather`, of its own FSDP and distributed optimizer",
            "torchtitan": "no: communication is in high precision",
            "Accelerate": f"{_AO}, `enable_fsdp_float8_all_gather`",
            "Lightning": f"{_AO}, called by hand (its FP8 example)",
            "MS-AMP": "FSDP1, `FP8FullyShardedDataParallel`",
        },
        "recipes `unit` and `tensor`; scales along the cut dimension are refused",
    ),
    Comparison(
        "tensor and sequence parallelism",
        {
            "TransformerEngine": "`tp_group`, `sequence_parallel`",
            "torchao": "`Float8ColwiseParallel`; prototype, `NVFP4ColwiseParallel`",
            "Megatron-LM": "yes",
            "torchtitan": "yes, communication in high precision",
            "Accelerate": "not known in FP8",
            "Lightning": "not known in FP8",
            "MS-AMP": "its layers for Megatron",
        },
        "torch's `parallelize_module`, communication in high precision; products of DTensors are "
        "simulated on GPUs, too",
    ),
    Comparison(
        "gradients reduced in FP8",
        {
            "Megatron-LM": "no: `--megatron-fsdp-grad-comm-dtype` is FP32, FP16 or BF16",
            "torchtitan": "no: float32",
            "Accelerate": "MS-AMP's, deprecated",
            "MS-AMP": "`FP8DistributedDataParallel`",
        },
    ),
    Comparison(
        "optimizer states in low precision",
        {
            "TransformerEngine": "`FusedAdam`: FP8, FP16, BF16",
            "torchao": "`AdamW8bit`, `AdamW4bit`, `AdamWFp8`",
            "Megatron-LM": "`--exp-avg-dtype`: fp8, bf16, fp16",
            "torchtitan": "BF16, `fused_opt_states_bf16`",
            "Accelerate": "MS-AMP's, deprecated",
            "Lightning": "the user's optimizer (bitsandbytes)",
            "MS-AMP": "O2: e4m3 and FP16",
        },
    ),
    Comparison(
        "master weights",
        {
            "TransformerEngine": "`FusedAdam(master_weights=True)`",
            "torchao": "none: stochastic rounding of BF16 weights, `bf16_stochastic_round`",
            "Megatron-LM": "`--main-params-dtype`: fp32, fp16",
            "torchtitan": "float32 parameters",
            "Accelerate": "float32 parameters, under autocast",
            "Lightning": "float32 parameters in mixed precision; none beside TransformerEngine's",
            "MS-AMP": "O3: FP16",
        },
    ),
    Comparison(
        "weights kept in FP8",
        {
            "TransformerEngine": "`quantized_model_init`",
            "Megatron-LM": "`fp8_param`",
            "Accelerate": "MS-AMP's O3 by DeepSpeed, deprecated",
            "MS-AMP": "O3",
        },
    ),
    Comparison(
        "checkpoints for vLLM, SGLang, Transformers",
        {
            "torchao": "`save_pretrained` with a `TorchAoConfig`",
            "Megatron-LM": "Model Optimizer's, quantized after training",
            "torchtitan": "no: reads DeepSeek's FP8, writes high precision",
        },
        "vLLM and SGLang were not run",
    ),
    Comparison(
        "FP8 checkpoints loaded, for LoRA",
        {
            "TransformerEngine": "not known",
            "torchao": "its own tensors",
            "Megatron-LM": "not known",
            "torchtitan": "DeepSeek's, to high precision",
            "Accelerate": "not known",
            "Lightning": "not known",
            "MS-AMP": "not known",
        },
    ),
    Comparison(
        "weights sent to a running engine",
        {
            "Megatron-LM": "to its own inference, `swap_model_weights`, also as MXFP8",
            "torchtitan": "its RL experiment; not known in FP8",
        },
        "tensors one by one; the trainer sends them",
    ),
    Comparison(
        "in torchtitan's Trainer",
        {
            "torchao": "by torchtitan's converters",
            "torchtitan": "its own converters",
        },
        _ENGINE,
    ),
    Comparison(
        "in litgpt's pretraining",
        {"Lightning": "`TransformerEnginePrecision`, as a plugin of Fabric"},
        _ENGINE,
    ),
    Comparison(
        "in DeepSpeed's ZeRO",
        {
            "Accelerate": f"{_TE}; MS-AMP's, deprecated",
            "MS-AMP": "`msamp.deepspeed`, stages 1 and 2",
        },
        f"stages 0 to 2; levels are refused; {_ENGINE}",
    ),
    Comparison(
        "in trl's SFTTrainer, with PEFT",
        {"Accelerate": "not known with adapters"},
        _ENGINE,
    ),
    Comparison(
        "in axolotl's Trainer", {"Accelerate": f"{_AO}, by axolotl's `fp8`"}, _ENGINE
    ),
    Comparison(
        "layers as a file without the library", dict.fromkeys(_UNREAD, "not known")
    ),
    Comparison(
        "trainer and FP8 engine compared by log-probability",
        dict.fromkeys(_UNREAD, "not known")
        | {"torchtitan": "its RL experiment logs it; no bound"},
    ),
    Comparison(
        "certificate that trainer and engine are equal to the bit",
        dict.fromkeys(_UNREAD, "not known"),
    ),
    Comparison(
        "time of a step on a GPU, without the GPU",
        dict.fromkeys(_UNREAD, "not known")
        | {"torchao": "of a linear layer by its shape, `roofline_utils`"},
        "a roofline of the compiler's code; nothing is measured",
    ),
    Comparison(
        "precision by layer",
        {
            "TransformerEngine": "contexts; by role of a tensor, `CustomRecipe`",
            "torchao": "`module_filter_fn`",
            "Megatron-LM": "`--te-precision-config-file`, `--first-last-layers-bf16`",
            "torchtitan": "`filter_fqns`, `fqns`",
            "Accelerate": f"{_AO}, `module_filter_func`",
            "MS-AMP": "`use_fp32_linear` of a layer",
        },
    ),
    Comparison(
        "late switch of precision",
        {
            "TransformerEngine": "by hand: another recipe in `autocast`, with a warning",
            "torchtitan": "by hand: a checkpoint and a restart, in its guide to NVFP4",
        },
    ),
    Comparison(
        "single products in high precision, at run time",
        {
            "TransformerEngine": "`DisableFP8GEMM`, of its debug tools",
            "torchao": "before training: casts that are disabled",
            "Megatron-LM": "before training: `fp8_wgrad=False`",
        },
    ),
    Comparison(
        "statistics of casts",
        {
            "TransformerEngine": "`LogFp8TensorStats`, `LogNvfp4TensorStats`",
            "torchao": "of one tensor, `fp8_tensor_statistics`",
            "Megatron-LM": "not known; it depends on the tool that TransformerEngine's run in",
        },
    ),
    Comparison(
        "emulation on CPU",
        {
            "TransformerEngine": "no: it needs CUDA",
            "torchao": "`emulate=True`; MXFP8 for experts, `KernelPreference.EMULATED`",
            "torchtitan": f"{_AO}, `emulate=True` in eager mode, for tests",
            "Accelerate": f"{_AO}, `AORecipeKwargs`",
        },
    ),
    Comparison("sums of tensor cores", {}),
    Comparison(
        "unit scaling",
        {"Megatron-LM": "no: μP alone, `use_mup`"},
    ),
    Comparison(
        "which precision a model tolerates, before training",
        {
            "torchao": "which layers get faster, by shape: `_auto_filter_for_recipe`",
            "torchtitan": f"{_AO}, `auto_filter_small_kn`",
        },
    ),
]
