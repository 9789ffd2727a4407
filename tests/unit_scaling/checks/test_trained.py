"""`unit_scale` of a model that has been trained says so, and of a new one says nothing."""

import copy
import itertools

import torch
from torch import nn

import fp8
from benchmarks.architectures import ZOO
from benchmarks.problems import PROBLEMS
from tests.shared import descend, linears, parametrize, warns
from unit_scaling.checks.trained import signs_of_training
from unit_scaling.transforms import unit_scale

INITIALIZATIONS = {
    "uniform": nn.init.xavier_uniform_,
    "normal": nn.init.kaiming_normal_,
    "orthogonal": nn.init.orthogonal_,
    "sparse": lambda w: nn.init.sparse_(w, 0.5),
    "zeros": nn.init.zeros_,
    "identity": nn.init.eye_,
}


def plain():
    torch.manual_seed(0)
    middle = nn.LayerNorm(64), nn.GELU()
    return nn.Sequential(nn.Linear(32, 64), *middle, *linears(64, 64, 32))


@parametrize("name", INITIALIZATIONS)
def test_initializations_show_no_signs(name):
    model = plain()
    for module in model:
        if isinstance(module, nn.Linear):
            INITIALIZATIONS[name](module.weight.detach())
    assert signs_of_training(model) == ""
    unit_scale(model)


@parametrize("name", sorted(ZOO)[::24])
def test_new_models_of_transformers_show_no_signs(name):
    from benchmarks.problems import zoo

    assert signs_of_training(zoo(name)) == ""


def test_a_trained_model_shows_signs():
    """Without gains too, after a hundred steps at the usual rate."""
    setup = PROBLEMS["LSTM"](0)
    model, loss = setup.model, setup.loss or (lambda output: output)
    assert signs_of_training(model) == ""
    batches = itertools.islice(setup.batches, 100)
    descend(setup.optimizer, (loss(model(*batch)) for batch in batches))
    assert signs_of_training(model) != ""


def test_unit_scale_warns_once_and_names_static():
    """Random gains, as MobileViT's batch norms have, are none of training."""
    model = plain()
    nn.init.normal_(model[1].weight, std=0.02)
    assert signs_of_training(model) == ""
    nn.init.normal_(model[1].weight, mean=1.0, std=0.02)
    message = r"gains of 1 differ.*convert\(model, 'static'\)"
    with warns(message, fp8.warnings.ConvertWarning) as caught:
        scaled = unit_scale(model)
    assert len(caught) == 1
    copy.deepcopy(scaled)
