"""Small models in the ways that people write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from tests.shared import Net, linears, seeded


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x):
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2)
            for t in self.qkv(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def checkpointed():
    forward = lambda m, x: checkpoint(m.layer, x, use_reentrant=False)  # noqa: E731
    return Net(forward, layer=nn.Linear(8, 8))


class GPT(nn.Module):
    """Tied weights, learned positions, a loss inside, one-token logits without targets."""

    def __init__(self, vocab=65, width=32, heads=2, layers=2, context=64):
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(vocab, width),
            nn.Embedding(context, width),
        )
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids, targets=None):
        x = self.tokens(ids) + self.positions(
            torch.arange(ids.shape[1], device=ids.device)
        )
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x[:, [-1], :]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def own(value, slope):
    """A function that computes its gradient itself. slope: of the gradient and the arguments."""
    kind = type("Function", (torch.autograd.Function,), {})

    def forward(ctx, *args):
        ctx.save_for_backward(*args)
        return value(*args)

    kind.forward = staticmethod(forward)
    kind.backward = staticmethod(lambda ctx, g: slope(g, *ctx.saved_tensors))
    return kind.apply


class OfLayer(torch.autograd.Function):
    """Calls a layer without a bias, and reads its weight in its backward pass."""

    @staticmethod
    def forward(ctx, x, weight, layer):
        ctx.save_for_backward(x)
        ctx.layer = layer
        return layer(x)

    @staticmethod
    def backward(ctx, g):
        return g @ ctx.layer.weight, g.mT @ ctx.saved_tensors[0], None


class Image(Tensor):
    """As MONAI and torchvision have. Results have its class."""

    def new_empty(self, size, **options):
        return self.as_subclass(Tensor).new_empty(size=size, **options)


def hooks_of(model):
    """All hooks of its modules."""
    kinds = [
        f"_{when}_hooks" for when in "forward forward_pre backward backward_pre".split()
    ]
    kinds += ["_state_dict_hooks", "_load_state_dict_pre_hooks"]
    hooks = [getattr(m, kind) for m in model.modules() for kind in kinds]
    return [hook for each in hooks for hook in each.values()]


def graphs(model, args, calls=1, **options):
    """The calls in the graphs that torch.compile makes of a model."""
    found = []

    def keep(graph, inputs):
        found.extend(
            f"{n.op} {n.target} {n.args}" for n in graph.graph.nodes if n.op != "output"
        )
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(model, backend=keep, **options)
    for _ in range(calls):
        compiled(*args)
    return found


def gpt(seed=0):
    torch.manual_seed(seed)
    return GPT()


def tiny():
    """One block: compiling takes time in proportion."""
    torch.manual_seed(0)
    return GPT(width=16, layers=1)


def batch(seed=0):
    generator = seeded(seed)
    ids = torch.randint(0, 65, (2, 17), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def step(model):
    """The loss and every gradient of one step, as float64."""
    model.zero_grad()
    _, loss = model(*batch())
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert grads
    result = [t.detach().double().clone() for t in (loss, *grads)]
    model.zero_grad()
    return result


# One of each kind


WIDTH, LENGTH = 16, 6


def perceptron(m, x):
    return m.c(F.relu(m.b(F.gelu(m.a(x)))))


def decoder(m, ids):
    return m.body(ids[:, :-1], ids[:, 1:])[1]


def resnet(m, x):
    x = F.max_pool2d(F.relu(m.norm1(m.stem(x))), 2)
    y = m.norm3(m.conv2(F.relu(m.norm2(m.conv1(x)))))
    y += x
    return m.head(F.adaptive_avg_pool2d(F.relu(y), 1).flatten(1))


def unet(m, x):
    time = torch.linspace(0, 3, len(x), dtype=x.dtype)[:, None] * torch.ones(
        8, dtype=x.dtype
    )
    high = F.silu(m.enter(x))
    low = F.silu(m.down(high) + m.time(time.sin())[:, :, None, None])
    low = F.silu(m.middle(low)) + low
    return m.leave(torch.cat([high, F.silu(m.up(low))], 1))


def lstm(m, ids):
    logits = m.head(m.body(m.tokens(ids))[0])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def experts(m, x):
    x = m.enter(x).flatten(0, 1)
    weights, chosen = m.gate(x).softmax(-1).topk(2)
    mixed = torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        rows, nth = torch.where(chosen == number)
        mixed[rows] += weights[rows, nth, None] * expert(x[rows])
    return m.head(x + mixed)


def vector_quantized(m, x):
    y = m.enter(x)
    code = m.codes(torch.cdist(y.flatten(0, 1), m.codes.weight).argmin(-1)).view_as(y)
    loss = F.mse_loss(code, y.detach()) + 0.25 * F.mse_loss(y, code.detach())
    return F.mse_loss(m.leave(y + (code - y).detach()), x) + loss


def encoder(m, ids):
    """Some tokens are hidden, and others are padding."""
    hidden, padding = ids % 3 == 0, ids == 1
    x = m.tokens(ids.masked_fill(hidden, 0)) + m.positions.weight[:LENGTH]
    logits = m.head(m.body(x, src_key_padding_mask=padding))
    return F.cross_entropy(
        logits.flatten(0, 1), ids.masked_fill(~hidden, -100).flatten()
    )


def einsum_attention(m, x):
    q, k, v = m.qkv(x).unflatten(-1, (3, 2, -1)).unbind(2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 8**-0.5
    return x + m.out(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2))


def _linears(**sizes):
    return {name: nn.Linear(*size) for name, size in sizes.items()}


@dataclass(frozen=True)
class Kind:
    """make: a model whose forward takes one tensor. like: "tokens", "values" or "images". whole:
    whether it compiles in one graph."""

    make: Callable[[], nn.Module]
    like: str = "values"
    whole: bool = True

    def batch(self, seed=0):
        generator = seeded(seed)
        if self.like == "tokens":
            return torch.randint(12, (8, LENGTH), generator=generator)
        shape = (8, 3, 8, 8) if self.like == "images" else (8, LENGTH, WIDTH)
        return torch.randn(shape, generator=generator, dtype=torch.float64)


def loss_of(model, x):
    """The loss that a model returns, or the distance of its result from a fixed one."""
    torch.manual_seed(0)
    y = model(x)
    target = torch.linspace(0, 99, y.numel(), dtype=y.dtype).sin().view_as(y)
    return F.mse_loss(y, target) if y.dim() else y


def _gpt():
    return Net(decoder, body=GPT(vocab=12, width=WIDTH, layers=1, context=LENGTH))


def _mlp():
    return Net(perceptron, **_linears(a=(WIDTH, 32), b=(32, 32), c=(32, 4)))


def _resnet():
    convs = {f"conv{i}": nn.Conv2d(WIDTH, WIDTH, 3, 1, 1, bias=False) for i in (1, 2)}
    norms = {f"norm{i}": nn.BatchNorm2d(WIDTH) for i in (1, 2, 3)}
    stem = nn.Conv2d(3, WIDTH, 3, 1, 1, bias=False)
    return Net(resnet, stem=stem, **convs, **norms, head=nn.Linear(WIDTH, 4))


def _unet():
    return Net(
        unet,
        enter=nn.Conv2d(3, 8, 3, 1, 1),
        down=nn.Conv2d(8, WIDTH, 4, 2, 1),
        time=nn.Linear(8, WIDTH),
        middle=nn.Conv2d(WIDTH, WIDTH, 3, 1, 1),
        up=nn.ConvTranspose2d(WIDTH, 8, 4, 2, 1),
        leave=nn.Conv2d(16, 3, 3, 1, 1),
    )


def _lstm():
    ends = {"tokens": nn.Embedding(12, WIDTH), "head": nn.Linear(WIDTH, 12)}
    return Net(lstm, **ends, body=nn.LSTM(WIDTH, WIDTH, batch_first=True))


def _experts():
    each = (linears(WIDTH, 32, nn.SiLU, WIDTH) for _ in range(3))
    ends = _linears(enter=(WIDTH, WIDTH), head=(WIDTH, WIDTH), gate=(WIDTH, 3))
    return Net(experts, **ends, experts=nn.ModuleList(each))


def _quantized():
    ends = _linears(enter=(WIDTH, WIDTH), leave=(WIDTH, WIDTH))
    return Net(vector_quantized, **ends, codes=nn.Embedding(8, WIDTH))


def _encoder():
    body = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)
    tables = {
        n: nn.Embedding(s, WIDTH) for n, s in (("tokens", 12), ("positions", LENGTH))
    }
    return Net(encoder, **tables, body=body, head=nn.Linear(WIDTH, 12))


def _einsum():
    layers = _linears(qkv=(WIDTH, 3 * WIDTH), out=(WIDTH, WIDTH))
    return Net(einsum_attention, **layers)


def _parametrized():
    net = _mlp()
    weight_norm(net.b)
    return net


KINDS = {
    "MLP": Kind(_mlp),
    "GPT": Kind(_gpt, "tokens"),
    "ResNet": Kind(_resnet, "images"),
    "U-Net": Kind(_unet, "images"),
    "LSTM": Kind(_lstm, "tokens", whole=False),
    "experts": Kind(_experts, whole=False),
    "VQ": Kind(_quantized),
    "encoder": Kind(_encoder, "tokens"),
    "einsum attention": Kind(_einsum),
    "parametrized": Kind(_parametrized),
}


# Graphs

ROWS = 6
"""Of a batch, and nodes of a graph."""

EDGES = torch.stack([torch.arange(16) % ROWS, torch.arange(16) * 5 % ROWS])


def sparse(values):
    """A graph of the rows."""
    return torch.sparse_coo_tensor(EDGES, values, (ROWS, ROWS)).coalesce()


def attention_of_a_graph(h):
    scores = sparse((h[EDGES[0]] * h[EDGES[1]]).sum(-1))
    return torch.sparse.mm(torch.sparse.softmax(scores, 1), h)
