"""The levels beside MS-AMP 0.4's published arithmetic, written here from its description.

Its library cannot be installed on today's torch. Its FP8-LM optimizer (LBAdamW): everything is read
into float32, stepped as AdamW, and stored anew with the power of two
2**floor(log2(largest value / amax)) as the factor: weights in fp16 (O1, O2) or e4m3 beside an fp16
master (O3), gradients in e4m3, moments in float32 (O1) or e4m3 and fp16 (O2, O3). The weights begin
with values of e4m3, because at O3 ours are rounded in the first step, and not before it.
"""

import ml_dtypes
import numpy as np
import torch
from torch import nn

import fp8
from tests.shared import descend, parametrize, proves

LARGEST = {"e4m3": 448.0, "fp16": 65504.0}
TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "fp16": np.float16}
FORMATS = {  # weight, master, first moment, second moment
    "O1": ("fp16", None, None, None),
    "O2": ("fp16", None, "e4m3", "fp16"),
    "O3": ("e4m3", "fp16", "e4m3", "fp16"),
}
LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.999), 1e-8, 0.1
STEPS = 60


def stored(x, format):
    """What of float32 numbers is left in a format."""
    amax = np.abs(x).max()
    if format is None or amax == 0:
        return x
    factor = np.float32(2.0 ** np.floor(np.log2(LARGEST[format] / amax)))
    return (x * factor).astype(TYPES[format]).astype(np.float32) / factor


def data():
    generator = np.random.default_rng(0)
    x = generator.standard_normal((256, 128)).astype(np.float32)
    teacher = generator.standard_normal((64, 128)).astype(np.float32) / 8
    weight = generator.standard_normal((64, 128)).astype(np.float32) / 12
    return x, x @ teacher.T, stored(weight, "e4m3")


def reference(level, steps):
    """The weights after so many steps; None: in float32 throughout. At O3 the master."""
    of_weight, of_master, first, second = FORMATS.get(level, [None] * 4)
    x, y, w = data()
    m = v = np.zeros_like(w)
    w = stored(w, of_master or of_weight)
    for step in range(1, steps + 1):
        seen = stored(w, of_weight)
        grad = 2 * (x @ seen.T - y).T @ x / np.float32(y.size)
        g = stored(grad, "e4m3" if level else None)
        m = np.float32(BETAS[0]) * m + np.float32(1 - BETAS[0]) * g
        v = np.float32(BETAS[1]) * v + np.float32(1 - BETAS[1]) * g * g
        root = np.sqrt(v) / np.float32((1 - BETAS[1] ** step) ** 0.5) + np.float32(EPS)
        w = (
            w * np.float32(1 - LR * DECAY)
            - np.float32(LR / (1 - BETAS[0] ** step)) * m / root
        )
        w, m, v = stored(w, of_master or of_weight), stored(m, first), stored(v, second)
    return w


def ours(level, steps):
    x, y, weight = (torch.from_numpy(each) for each in data())
    model = nn.Linear(128, 64, bias=False)
    with torch.no_grad():
        model.weight.copy_(weight)
    optimizer = torch.optim.AdamW(
        model.parameters(), LR, BETAS, EPS, weight_decay=DECAY
    )
    fp8.initialize(model, optimizer, level, recipe=None)
    descend(optimizer, ((model(x) - y).square().mean() for _ in range(steps)))
    other = nn.Linear(128, 64, bias=False)
    other.load_state_dict(model.state_dict())
    # Masters of O3.
    fp8.optim.AdamW(other.parameters()).load_state_dict(optimizer.state_dict())
    return other.weight.detach().numpy()


@proves("MS-AMP", "O1", "O2", "O3")
@parametrize("level", FORMATS)
def test_one_step(level):
    """To the unit in the last place of fp16, which only sums in another order change."""
    result, expected = ours(level, 1), reference(level, 1)
    unit = 2.0**-10 * np.abs(expected)
    assert np.all(np.abs(result - expected) <= unit)
    assert np.mean(result == expected) > 0.99


@proves("MS-AMP", "no degraded accuracy")
@parametrize("level", FORMATS)
def test_a_run(level):
    """The two differ by less than half of what their roundings move them from float32."""
    start, exact = data()[2], reference(None, STEPS)
    expected, result = reference(level, STEPS), ours(level, STEPS)
    way = np.linalg.norm(exact - start)
    assert np.linalg.norm(result - expected) <= 0.5 * np.linalg.norm(expected - exact)
    assert np.linalg.norm(result - exact) <= 1.2 * np.linalg.norm(expected - exact)
    assert np.linalg.norm(expected - exact) < 0.1 * way
