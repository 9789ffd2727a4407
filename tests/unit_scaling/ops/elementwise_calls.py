"""For test_ops.py: how to call and judge the rows that are not products."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZE = 256


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def image(dims: int) -> Tensor:
    return normal(4, 8, *{1: (960,), 2: (32, 24), 3: (8, 12, 8)}[dims])


def normed(*shape: int) -> dict:
    ones = normal(shape[1]) * 0 + 1
    return {"input": normal(*shape), "weight": ones, "bias": 0 * ones}


CALLS = {
    "adaptive_avg_pool1d": lambda: {"input": image(1), "output_size": 120},
    "adaptive_avg_pool2d": lambda: {"input": image(2), "output_size": (16, 8)},
    "adaptive_avg_pool3d": lambda: {"input": image(3), "output_size": (4, None, 4)},
    "adaptive_max_pool1d": lambda: {"input": image(1), "output_size": 120},
    "adaptive_max_pool2d": lambda: {"input": image(2), "output_size": 8},
    "adaptive_max_pool3d": lambda: {"input": image(3), "output_size": 4},
    "alpha_dropout": lambda: {"input": normal(SIZE, SIZE), "training": True},
    "avg_pool1d": lambda: {"input": image(1), "kernel_size": 4},
    "avg_pool2d": lambda: {"input": image(2), "kernel_size": (3, 2), "stride": 2},
    "avg_pool3d": lambda: {"input": image(3), "kernel_size": 2, "divisor_override": 3},
    "batch_norm": lambda: {
        **normed(64, 32, 16),
        "running_mean": None,
        "running_var": None,
        "training": True,
    },
    "binary_cross_entropy": lambda: {
        "input": normal(SIZE, 16) * 1e-2 + 0.5,
        "target": torch.randint(2, (SIZE, 16)).double(),
    },
    "binary_cross_entropy_with_logits": lambda: {
        "input": normal(SIZE, 16) * 1e-2,
        "target": torch.randint(2, (SIZE, 16)).double(),
    },
    "clamp": lambda: {"input": normal(SIZE, SIZE), "min": -0.3, "max": 1.0},
    "cosine_embedding_loss": lambda: {
        "input1": normal(SIZE, SIZE),
        "input2": normal(SIZE, SIZE),
        "target": torch.ones(SIZE).long(),
    },
    "cosine_similarity": lambda: {"x1": normal(SIZE, SIZE), "x2": normal(SIZE, SIZE)},
    "ctc_loss": lambda: {  # the rule is for uniform probabilities
        "log_probs": (normal(32, 16, 24) * 1e-2).log_softmax(-1),
        "targets": torch.randint(1, 24, (16, 8)),
        "input_lengths": (32,) * 16,
        "target_lengths": (8,) * 16,
    },
    "cumsum": lambda: {"input": normal(SIZE, 64), "dim": -1},
    "div": lambda: {"input": normal(64, SIZE), "other": normal(SIZE).sign() + normal(SIZE) / 50},
    "dropout1d": lambda: {"input": normal(SIZE, 64, 4)},
    "dropout2d": lambda: {"input": normal(SIZE, 64, 2, 2)},
    "dropout3d": lambda: {"input": normal(SIZE, 64, 2, 2, 2)},
    "feature_alpha_dropout": lambda: {"input": normal(SIZE, 64, 4), "training": True},
    "group_norm": lambda: {**normed(64, 32, 16), "num_groups": 4},
    "instance_norm": lambda: normed(64, 32, 64),
    "interpolate": lambda: {"input": image(2), "scale_factor": 2.0, "mode": "bilinear"},
    "kl_div": lambda: {
        "input": normal(SIZE, 64).log_softmax(-1),
        "target": normal(SIZE, 64).softmax(-1),
        "reduction": "sum",
    },
    "layer_norm2d": lambda: normed(16, 64, 8, 8),
    "lerp": lambda: {"input": normal(SIZE, 64), "end": normal(SIZE, 64), "weight": 0.3},
    "local_response_norm": lambda: {"input": image(2), "size": 3},
    "log_softmax": lambda: {"input": normal(SIZE, SIZE), "dim": -1},
    "lp_pool1d": lambda: {"input": image(1), "norm_type": 2, "kernel_size": 4},
    "lp_pool2d": lambda: {"input": image(2), "norm_type": 2.0, "kernel_size": 4, "stride": 4},
    "lp_pool3d": lambda: {"input": image(3), "norm_type": 2, "kernel_size": 2},
    "max_pool1d": lambda: {"input": image(1), "kernel_size": 3, "stride": 2, "dilation": 2},
    "max_pool2d": lambda: {"input": image(2), "kernel_size": 3, "stride": 2},
    "max_pool3d": lambda: {"input": image(3), "kernel_size": (2, 3, 2)},
    "mean": lambda: {"input": normal(64, 32, 64), "dim": 1},
    "mul": lambda: {"input": normal(64, SIZE), "other": normal(SIZE)},
    "nll_loss": lambda: {"input": normal(SIZE, 32), "target": torch.randint(32, (SIZE,))},
    "pow": lambda: {"input": normal(SIZE, SIZE), "exponent": 3},
    "prelu": lambda: {"input": normal(SIZE, 64, 16), "weight": normal(64) * 0 + 0.25},
    "softmin": lambda: {"input": normal(SIZE, SIZE), "dim": -1},
    "std": lambda: {"input": normal(SIZE, 64, 16), "dim": 1, "correction": 3},
    "sub": lambda: {"input": normal(SIZE, 64), "other": normal(SIZE, 64), "alpha": 2.0},
    "sum": lambda: {"input": normal(64, 32, 64), "dim": (0, 1)},
    "var": lambda: {"input": normal(SIZE, 64, 16), "dim": 1},
}

#: What is not meant to have RMS 1, and why.
UNCHECKED = {
    "log_softmax": {"output"},  # log-probabilities, which losses read
    # values that torch gives a loss; targets have no gradient as a rule
    "binary_cross_entropy": {"output", "target"},
    "binary_cross_entropy_with_logits": {"output", "target"},
    "cosine_embedding_loss": {"output"},
    "ctc_loss": {"output"},
    "huber_loss": {"output"},
    "kl_div": {"output", "target"},
    "l1_loss": {"output"},
    "nll_loss": {"output"},
    "smooth_l1_loss": {"output"},
    # tied to the output, whose RMS it shares only roughly
    "geglu": {"gate"},
    "reglu": {"gate"},
}

FITTED = {"ctc_loss": 1.3, "kl_div": 1.3, "softmin": 1.6}

PLAIN = {
    "clamp": torch.clamp,
    "geglu": lambda input, gate: input * F.gelu(gate),
    "layer_norm2d": lambda input, weight, bias: (
        F.layer_norm(input.mT.transpose(1, 3), (input.shape[1],), weight, bias).transpose(1, 3).mT
    ),
    "logsigmoid": F.logsigmoid,
    "pow": torch.pow,
    "reglu": lambda input, gate: input * F.relu(gate),
    "relu_squared": lambda input: F.relu(input).square(),
}

TORCH_LACKS = {  # on a CPU
    "avg_pool3d": {"half precision"},
    "binary_cross_entropy": {"vmap"},  # twice a probability is none
    "ctc_loss": {"half precision", "double backward", "vmap", "a whole graph"},
    "hardsigmoid": {"double backward"},
    "local_response_norm": {"half precision"},
    "lp_pool3d": {"half precision"},
}

TORCH_FORM = {
    name: {"reduction": "sum"}
    for name in UNCHECKED
    if name.endswith(("loss", "kl_div", "entropy", "logits"))
}

#: Compiled or under vmap, they draw other random numbers.
RANDOM = {
    "alpha_dropout",
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "feature_alpha_dropout",
}


def _pairs() -> dict[type[nn.Module], tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]]:
    """Module of torch.nn -> (arguments, inputs), for test_module_table.py."""
    x, y, ones = torch.randn(3, 6), torch.randn(3, 6), torch.ones(3).long()
    half = torch.full((3, 6), 0.5)
    found: dict = {
        nn.BCELoss: ((), {}, (half, half)),
        nn.BCEWithLogitsLoss: ((), {"reduction": "sum"}, (x, half)),
        nn.CosineEmbeddingLoss: ((), {"margin": 0.1}, (x, y, ones)),
        nn.CosineSimilarity: ((0,), {"eps": 1e-3}, (x, y)),
        nn.CTCLoss: ((), {"blank": 1}, (x[:, None], 2 * ones[:1, None], (3,), (1,))),
        nn.GroupNorm: ((2, 6), {}, (x,)),
        nn.HuberLoss: ((), {"delta": 2.0}, (x, y)),
        nn.KLDivLoss: ((), {"reduction": "batchmean"}, (x, half)),
        nn.L1Loss: ((), {}, (x, y)),
        nn.LocalResponseNorm: ((2,), {}, (torch.randn(2, 4, 9),)),
        nn.LogSoftmax: ((-1,), {}, (x,)),
        nn.MSELoss: ((), {}, (x, y)),
        nn.NLLLoss: ((), {"ignore_index": 1}, (x, 2 * ones)),
        nn.PReLU: ((6,), {"init": 1.0}, (x,)),
        nn.SmoothL1Loss: ((), {"beta": 0.5}, (x, y)),
        nn.Softmin: ((), {"dim": -1}, (x,)),
        nn.Upsample: ((), {"scale_factor": 2.0}, (torch.randn(2, 4, 9),)),
    }
    for dims in (1, 2, 3):
        small = torch.randn(2, 4, *[8] * dims)
        for name, args, kwargs in (
            ("AdaptiveAvgPool", (4,), {}),
            ("AdaptiveMaxPool", (4,), {"return_indices": True}),
            ("AvgPool", (2,), {"padding": 1}),
            ("BatchNorm", (4,), {"momentum": None}),
            ("Dropout", (0.2,), {}),
            ("InstanceNorm", (4,), {"affine": True, "track_running_stats": True}),
            ("LPPool", (2, 2), {}),
            ("MaxPool", (2,), {"stride": 1}),
        ):
            found[getattr(nn, f"{name}{dims}d")] = (args, kwargs, (small,))
    return found


MODULES = _pairs()
