"""Updates of stored weights that rounding loses, and the warning by name."""

import copy

import pytest
import torch
from torch import nn

import fp8
from fp8.training.lost_updates import lost_share
from fp8.warnings import RoundingWarning
from tests.fp8.adapters import hub_models
from tests.fp8.adapters.hub_models import quiet  # noqa: F401
from tests.shared import (
    descend,
    filterwarnings,
    normal,
    parametrize,
    quietly,
    said,
    sampled,
    seeded,
)

with quietly():
    peft = pytest.importorskip("peft", reason="the adapters")

pytestmark = filterwarnings("ignore::FutureWarning")  # of transformers, by peft

POINTS = torch.cat([torch.arange(8, 16) * 2.0**e for e in range(-3, 3)]).double()
"""Values of e4m3 of six exponents, whose steps are 2**e, in float64."""
HALF = 2.0 ** POINTS.log2().floor() / 16


@parametrize("share, lost", [(0.9, 1.0), (1.5, -1 / 3), (4.0, 0.0)])
def test_the_share_is_that_of_half_steps(share, lost):
    """Of an update by a share of half a step: below one nothing is left, 1.5 become 2, and 4 stay.
    The last values of an exponent are left out, since the step beyond is another."""
    inner = (POINTS.log2() % 1) < 0.6
    after = (POINTS + share * HALF)[inner]
    rounded = fp8.quantize(after, "e4m3")
    assert lost_share(POINTS[inner], after, rounded) == pytest.approx(lost)


def test_off_the_grid_an_update_is_right_in_the_mean():
    """Why a merge into weights of 16 bits, which are rounded later, is not named."""
    before, update = normal(1 << 18), 1e-2 * normal(1 << 18, seed=1)
    moved = fp8.quantize(before + update, "e4m3") - fp8.quantize(before, "e4m3")
    assert abs(lost_share(0 * before, update, moved)) < 0.1


X = torch.randint(64, (4, 16), generator=seeded(1))
ROW = fp8.Policy("row", keep=["readout", "embedding"])


def llama():
    torch.manual_seed(0)
    return hub_models.llama(tie_word_embeddings=False, initializer_range=0.2)


def frozen(tmp_path):
    return fp8.store_frozen(llama().requires_grad_(False))


def loaded(tmp_path):
    fp8.export(fp8.convert(llama(), ROW), tmp_path)
    return fp8.load(llama(), tmp_path)


def widened(tmp_path):
    """Read into parameters in high precision."""
    fp8.export(fp8.convert(llama(), ROW), tmp_path)
    return fp8.load(llama(), tmp_path, frozen=False)


def trained(model, r, lr, **options):
    """A model with adapters of rank ``r`` after five real steps, merged as PEFT does."""
    torch.manual_seed(2)
    targets = ["q_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(r=r, lora_alpha=2 * r, target_modules=targets, **options)
    model = peft.get_peft_model(fp8.convert(model), config)
    parameters = [p for p in model.parameters() if p.requires_grad]
    losses = (model(input_ids=X, labels=X).loss for _ in range(5))
    values = descend(torch.optim.AdamW(parameters, lr=lr), losses)
    assert values[-1] < values[0]
    return model


def export(model, path):
    fp8.export(fp8.convert(fp8.revert(model), ROW), path)


def iterate(model, path):
    list(fp8.weights(fp8.convert(fp8.revert(model), ROW)))


ENDS = {
    "stored": lambda model, path: fp8.store_frozen(model),
    "exported": export,
    "sent": iterate,
}


@sampled(4)
@parametrize("end", ENDS)
@parametrize("make", [frozen, loaded, widened])
@parametrize("r, options", [(1, {}), (4, {"use_dora": True}), (16, {})])
def test_a_merge_that_rounding_loses_is_named_and_a_healthy_one_is_not(
    end, make, r, options, tmp_path
):
    for lr, safe in ((1e-2, False), (1e-2, True), (1e-4, False), (1e-4, True)):
        merged = trained(make(tmp_path), r, lr, **options).merge_and_unload(safe)
        with said(RoundingWarning) as messages:
            ENDS[end](merged, tmp_path / "merged")
        assert bool(messages) == (lr < 1e-3)
        if messages:
            (message,) = messages
            assert "rounding loses 9" in message
            assert "50% in 6 of 6 weights" in message
            assert "_proj.weight' since it was stored" in message


def test_what_stays_wide_loses_nothing(tmp_path):
    """Without a rounding, after one, for a merge that is taken back, and for a checkpoint."""
    model = trained(frozen(tmp_path), 4, 1e-4)
    with said(RoundingWarning) as messages:
        model.merge_adapter()
        model.unmerge_adapter()
        merged = copy.deepcopy(model).merge_and_unload()
        merged.save_pretrained(tmp_path)
        fp8.store_frozen(merged, None)
        model.load_state_dict(model.state_dict())
        again = fp8.store_frozen(llama().requires_grad_(False))
        again.load_state_dict(llama().state_dict())
    assert not messages


def nudged(model):
    """With an update of every weight that is far below half a step."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1e-3 * p.square().mean().sqrt() * normal(*p.shape))
    return model


@parametrize("device", ["cpu", "meta"])
def test_a_sample_of_what_was_loaded_is_compared(device, tmp_path):
    """A parameter that trains, another dtype and other numbers are no merged adapters."""
    fp8.export(fp8.convert(llama(), ROW), tmp_path)
    with torch.device(device):
        empty = llama()
    for name, buffer in llama().named_buffers():
        path, _, last = name.rpartition(".")
        setattr(empty.get_submodule(path), last, buffer)
    model = nudged(fp8.load(empty, tmp_path, frozen=False))
    with said(RoundingWarning) as messages:
        iterate(model, tmp_path)
        other = fp8.load(llama(), tmp_path, frozen=False).requires_grad_(False)
        iterate(copy.deepcopy(other), tmp_path)
        iterate(other.bfloat16(), tmp_path)
        other.load_state_dict({k: -x for k, x in nudged(llama()).state_dict().items()})
        iterate(other, tmp_path)
    assert not messages
    with said(RoundingWarning) as messages:
        iterate(model.requires_grad_(False), tmp_path)
    (message,) = messages
    assert "rounding loses 9" in message


def test_what_trains_in_fp8_keeps_no_second_copy():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model, optimizer = fp8.initialize(model, torch.optim.AdamW(model.parameters()))
    for i in range(2):
        model(normal(16, 64, seed=i)).square().mean().backward()
        assert model[0].weight.grad.memory.origin is None
        model[0].weight.data.add_(1e-3)
        assert model[0].weight.memory.origin is None
        optimizer.step()
        optimizer.zero_grad()
