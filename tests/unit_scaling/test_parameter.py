import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from unit_scaling.parameter import Parameter, has_parameter_data, tag


def test_tags():
    p = Parameter(torch.ones(2, 3), "weight", 4)
    assert type(p) is nn.Parameter
    assert (p.mup_type, p.mup_scaling_depth, p.requires_grad) == ("weight", 4, True)
    assert not Parameter(torch.ones(2), "bias", requires_grad=False).requires_grad
    assert has_parameter_data(p)
    assert not has_parameter_data(nn.Parameter(torch.ones(2)))
    plain = nn.Parameter(torch.ones(2))
    assert tag(plain, "norm") is plain
    assert tag(plain, "norm", mup_scale=0.25, mup_divisor=3.0) is plain
    assert tag(plain, "norm", 2).mup_scale == 0.25
    assert plain.mup_divisor == 3.0
    with pytest.raises(ValueError, match=r"mup_scale must be a power of two: got 0\.3"):
        tag(plain, "norm", mup_scale=0.3)
    assert plain.mup_type == "norm"


def test_bad_tags():
    with pytest.raises(ValueError, match="unknown mup_type 'wieght'; choose one of 'weight', 'bi"):
        Parameter(torch.ones(2), "wieght")
    with pytest.raises(ValueError, match="mup_scaling_depth must be a whole number from 1, got 0"):
        Parameter(torch.ones(2), "weight", 0)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_copies_of_a_bare_parameter(requires_grad: bool):
    """In a module of anyone's: the tags are the parameter's own."""
    p = Parameter(torch.randn(2, 3), "output", 4, requires_grad)
    module = nn.Module()
    module.w = p
    for _ in range(2):  # a copy of a copy, too
        for again in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
            module = again(module)
            assert module.w is not p
            assert type(module.w) is nn.Parameter
            assert torch.equal(module.w, p)
            assert (module.w.mup_type, module.w.mup_scaling_depth) == ("output", 4)
            assert module.w.requires_grad == requires_grad


def test_ties_survive_copies():
    module = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    module["a"].weight = module["b"].weight = Parameter(torch.ones(2, 2), "weight")
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert copied["a"].weight is copied["b"].weight


def test_tags_keep_nothing_alive():
    """No reference cycle: memory is free as soon as the parameter is, without the collector."""
    gc.disable()
    try:
        p = Parameter(torch.ones(2), "weight")
        gone = weakref.ref(p)
        del p
        assert gone() is None
    finally:
        gc.enable()


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="data must be a Tensor, not list"):
        Parameter([1.0], "weight")  # type: ignore[arg-type]
