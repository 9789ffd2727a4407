"""Networks on tables and time series, flows, and small packages with one model each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Case, Stranger, loss_inside, loss_outside

__all__ = ["STRANGERS"]

ROWS = 64


def _numbers(*shape: int) -> Tensor:
    return torch.randn(ROWS, *shape)


def _itransformer() -> Case:
    from iTransformer import iTransformer

    sizes = {
        "num_variates": 7,
        "lookback_len": 32,
        "depth": 2,
        "dim": 64,
        "dim_head": 16,
    }
    model = iTransformer(**sizes, pred_length=8, flash_attn=False)
    future = torch.randn(8, 8, 7)
    return Case(
        model, (torch.randn(8, 32, 7),), loss=lambda out: F.mse_loss(out, future)
    )


def _tab_transformer() -> Case:
    from tab_transformer_pytorch import TabTransformer

    sizes = {
        "categories": (5, 6, 7),
        "num_continuous": 4,
        "dim": 32,
        "depth": 2,
        "heads": 4,
    }
    model = TabTransformer(**sizes, mlp_act=nn.ReLU())
    batch = (torch.randint(5, (ROWS, 3)), _numbers(4))
    return loss_outside(model, F.mse_loss, _numbers(1), *batch)


def _tabular() -> Case:
    from tab_transformer_pytorch import FTTransformer

    model = FTTransformer(
        categories=(5, 6, 7), num_continuous=4, dim=32, depth=2, heads=4
    )
    batch = (torch.randint(5, (ROWS, 3)), _numbers(4))
    return loss_inside(model, F.mse_loss, _numbers(1), *batch)


def _rtdl(name: str) -> Case:
    import rtdl_revisiting_models as rtdl

    if name == "MLP":
        model: nn.Module = rtdl.MLP(
            d_in=16, d_out=1, n_blocks=2, d_block=64, dropout=0.1
        )
        return loss_inside(model, F.mse_loss, _numbers(1), _numbers(16))
    if name == "ResNet":
        sizes = {
            "n_blocks": 2,
            "d_block": 64,
            "d_hidden": None,
            "d_hidden_multiplier": 2.0,
        }
        model = rtdl.ResNet(d_in=16, d_out=1, **sizes, dropout1=0.1, dropout2=0.0)
        return loss_outside(model, F.mse_loss, _numbers(1), _numbers(16))
    settings = rtdl.FTTransformer.get_default_kwargs(n_blocks=2)
    model = rtdl.FTTransformer(
        n_cont_features=8, cat_cardinalities=[4], d_out=1, **settings
    )
    batch = (_numbers(8), torch.randint(4, (ROWS, 1)))
    return loss_outside(model, F.mse_loss, _numbers(1), *batch)


class _Likelihood(nn.Module):
    """The loss of a flow."""

    def __init__(self, flow: nn.Module) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, x: Tensor) -> Tensor:
        return -self.flow.log_prob(x).mean()


def _flow(name: str) -> Case:
    from nflows.distributions import StandardNormal
    from nflows.flows import Flow, MaskedAutoregressiveFlow
    from nflows.transforms import (
        CompositeTransform,
        MaskedPiecewiseRationalQuadraticAutoregressiveTransform,
        ReversePermutation,
    )

    if name == "MaskedAutoregressiveFlow":
        sizes = {"num_layers": 2, "num_blocks_per_layer": 2}
        return Case(
            _Likelihood(MaskedAutoregressiveFlow(8, 64, **sizes)), (_numbers(8),)
        )
    parts = [
        ReversePermutation(8),
        MaskedPiecewiseRationalQuadraticAutoregressiveTransform(8, 64, tails="linear"),
    ]
    flow = Flow(CompositeTransform(parts), StandardNormal([8]))
    return Case(_Likelihood(flow), (_numbers(8),))


class _Derivative(nn.Module):
    """The right side of a differential equation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y)


class _Equation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.derivative = _Derivative()

    def forward(self, y: Tensor) -> Tensor:
        from torchdiffeq import odeint

        return odeint(self.derivative, y, torch.linspace(0, 1, 4), method="rk4")[-1]


def _equation() -> Case:
    return loss_outside(_Equation(), F.mse_loss, _numbers(8), _numbers(8))


def _nbeats() -> Case:
    from pytorch_forecasting.models.nbeats.sub_modules import NBEATSGenericBlock

    model = NBEATSGenericBlock(
        units=64,
        thetas_dim=16,
        num_block_layers=2,
        backcast_length=32,
        forecast_length=8,
    )
    return Case(model, (_numbers(32),))


def _nystrom() -> Case:
    from nystrom_attention import Nystromformer

    model = Nystromformer(dim=64, depth=2, heads=4, dim_head=16, num_landmarks=8)
    return Case(model, (torch.randn(4, 32, 64),))


def _mixer() -> Case:
    from mlp_mixer_pytorch import MLPMixer

    model = MLPMixer(
        image_size=32, channels=3, patch_size=8, dim=64, depth=2, num_classes=10
    )
    labels = torch.randint(10, (8,))
    return loss_inside(model, F.cross_entropy, labels, torch.randn(8, 3, 32, 32))


def _perceiver() -> Case:
    from perceiver_pytorch import Perceiver

    latent = {
        "num_latents": 16,
        "latent_dim": 64,
        "latent_heads": 4,
        "latent_dim_head": 16,
    }
    sizes = {"input_channels": 3, "num_freq_bands": 4, "max_freq": 8.0, "depth": 2}
    model = Perceiver(**sizes, **latent, num_classes=10)
    labels = torch.randint(10, (8,))
    return loss_outside(model, F.cross_entropy, labels, torch.randn(8, 16, 16, 3))


def _axial() -> Case:
    from axial_attention import AxialImageTransformer

    model = AxialImageTransformer(dim=32, depth=2, heads=4, reversible=False)
    return Case(model, (torch.randn(2, 32, 8, 8),))


def _soft_experts() -> Case:
    from soft_moe_pytorch import SoftMoE

    return Case(SoftMoE(dim=64, seq_len=32, num_experts=4), (torch.randn(4, 32, 64),))


def _sparse_experts() -> Case:
    from st_moe_pytorch import MoE, SparseMoEBlock

    experts = MoE(dim=64, num_experts=4, gating_top_n=2)
    block = SparseMoEBlock(experts, add_ff_before=True, add_ff_after=True)
    return Case(
        block,
        (torch.randn(4, 32, 64),),
        loss=lambda out: out[0].square().mean() + out[1],
    )


def _slots() -> Case:
    from slot_attention import SlotAttention

    return Case(SlotAttention(num_slots=5, dim=64, iters=2), (torch.randn(4, 32, 64),))


def _wide_and_deep(name: str) -> Case:
    import torch_rechub.basic.features as features
    from torch_rechub.models import ranking

    dense = [features.DenseFeature(f"d{i}") for i in range(4)]
    sparse = [
        features.SparseFeature(f"s{i}", vocab_size=20, embed_dim=16) for i in range(4)
    ]
    mlp = {"dims": [64, 32], "dropout": 0.0, "activation": "relu"}
    batch: dict[str, Any] = {f"d{i}": torch.randn(ROWS) for i in range(4)}
    batch |= {f"s{i}": torch.randint(20, (ROWS,)) for i in range(4)}
    if name == "DCN":
        model = ranking.DCN(dense + sparse, n_cross_layers=2, mlp_params=mlp)
    else:
        model = getattr(ranking, name)(dense, sparse, mlp_params=mlp)
    labels = torch.randint(2, (ROWS,)).float()
    return loss_outside(model, F.binary_cross_entropy, labels, batch)


STRANGERS = [
    Stranger("iTransformer", "iTransformer", _itransformer),
    Stranger("TabTransformer", "tab-transformer-pytorch", _tab_transformer),
    Stranger("FTTransformer", "tab-transformer-pytorch", _tabular),
    *(
        Stranger(name, "rtdl_revisiting_models", lambda name=name: _rtdl(name))
        for name in ("MLP", "ResNet", "FTTransformer")
    ),
    *(
        Stranger(name, "nflows", lambda name=name: _flow(name))
        for name in ("MaskedAutoregressiveFlow", "RationalQuadraticFlow")
    ),
    Stranger("odeint of an MLP", "torchdiffeq", _equation),
    Stranger("NBEATSGenericBlock", "pytorch-forecasting", _nbeats),
    Stranger("Nystromformer", "nystrom-attention", _nystrom),
    Stranger("MLPMixer", "mlp-mixer-pytorch", _mixer),
    Stranger("Perceiver", "perceiver-pytorch", _perceiver),
    Stranger("AxialImageTransformer", "axial-attention", _axial),
    Stranger("SoftMoE", "soft-moe-pytorch", _soft_experts),
    Stranger("SparseMoEBlock", "st-moe-pytorch", _sparse_experts),
    Stranger("SlotAttention", "slot-attention", _slots),
    *(
        Stranger(name, "torch-rechub", lambda name=name: _wide_and_deep(name))
        for name in ("WideDeep", "DCN")
    ),
]
