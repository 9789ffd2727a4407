"""What do FP8 and unit scaling change in codebases that people train with?

``python -m benchmarks.codebases --at FOLDER`` trains small models of ten codebases, of which FOLDER
has clones: their classes, losses and optimizers as they are, and after the lines of codebases.diff.
It fetches nothing. A codebase without its clone or its packages is skipped. The first seed of each
way is resumed from a checkpoint, in a model of another seed.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace as Space
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.utils.data import default_collate

import fp8
import unit_scaling as uu
from benchmarks.common import Row, report
from benchmarks.one_line import recorded
from unit_scaling.transforms import unit_scale

Names = dict[str, Any]
Batches = Callable[[int], Any]

SEEDS, STEPS, UNET, BATCHES = (0, 1), 100, 50, 8
"""UNET: the steps of a U-Net. BATCHES: of the held-out loss."""

HELD_OUT = 10**9
"""The number of the first held-out batch."""

FASTER = (4.0, 16.0)
"""Rates of plain training that are tried too, relative to the codebase's own."""

WAYS = {
    "float32": "",
    "FP8": "fp8",
    "unit_scale": "unit",
    "unit_scale, FP8": "unit fp8",
}
"""Way -> which lines it has of those that are new."""

DIFF = Path(__file__).with_suffix(".diff")

IMPORTED = {"torch": torch, "optim": optim, "Adam": optim.Adam, "AdamW": optim.AdamW}
IMPORTED |= {"fp8": fp8, "uu": uu, "unit_scale": unit_scale}


@dataclass
class Setup:
    """What the script of a codebase makes. batch: number -> a batch. names: of the model, what else
    the changed lines read. model, optimizer: how these lines call them. share: (step, steps) ->
    factor of the rate."""

    made: nn.Module
    batch: Batches
    loss: Callable[[Any, Any], Tensor]
    names: Callable[[Any], Names]
    model: str = "model"
    optimizer: str = "optimizer"
    clip: float = 0.0
    steps: int = STEPS
    share: Callable[[int, int], float] = lambda step, steps: 1.0


def generator(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def windows(paths: list[Path], rows: int, length: int) -> Batches:
    """Batches of the bytes of files, of which the last tenth is held out."""
    text = torch.tensor(list(b"".join(path.read_bytes() for path in sorted(paths))))
    at = len(text) * 9 // 10

    def batch(number: int) -> Tensor:
        part = text[at:] if number >= HELD_OUT else text[:at]
        starts = torch.randint(len(part) - length, (rows,), generator=generator(number))
        return torch.stack([part[start : start + length] for start in starts.tolist()])

    return batch


def waves(rows: int, side: int, channels: int, noise: float = 0.0) -> Batches:
    """Batches of images of waves, and their directions as labels of 8 classes."""

    def batch(number: int) -> tuple[Tensor, Tensor]:
        draws = generator(number)
        labels = torch.randint(8, (rows,), generator=draws)
        phases = 2 * math.pi * torch.rand(rows, 1, 1, generator=draws)
        x, angles = torch.arange(side), labels[:, None, None] * math.pi / 8
        images = torch.sin(x * angles.cos() + x[:, None] * angles.sin() + phases)
        images = images[:, None].repeat(1, channels, 1, 1)
        return images + noise * torch.randn(images.shape, generator=draws), labels

    return batch


def groups(optimizer: optim.Optimizer) -> list[Names]:
    """The groups that a method of a codebase makes its optimizer of."""
    keys = ("params", "weight_decay")
    return [{key: group[key] for key in keys} for group in optimizer.param_groups]


def word_language_model(clone: Path) -> Setup:
    from model import RNNModel

    batch = windows([clone / "data/wikitext-2/valid.txt"], rows=8, length=36)

    def loss(model: Any, text: Tensor) -> Tensor:
        output, _ = model(text.t()[:-1], model.init_hidden(8))
        return nn.NLLLoss()(output, text.t()[1:].reshape(-1))

    names = {"args": Space(lr=1e-3, batch_size=8), "train_data": batch(0).t()}
    names |= {"get_batch": lambda source, i: (source[:-1], source[1:])}
    made = RNNModel("LSTM", 256, 64, 64, 2, dropout=0.2)
    return Setup(made, batch, loss, lambda model: names, clip=0.25)


def min_gpt(clone: Path) -> Setup:
    from adder import AdditionDataset
    from mingpt.model import GPT
    from mingpt.trainer import Trainer

    config, sizes = Trainer.get_default_config(), GPT.get_default_config()
    config.learning_rate = 5e-4  # as adder.py
    digits = AdditionDataset.get_default_config()
    data = AdditionDataset(digits, "train"), AdditionDataset(digits, "test")
    sizes.model_type, sizes.vocab_size = "gpt-nano", data[0].get_vocab_size()
    sizes.block_size = data[0].get_block_size()

    def batch(number: int) -> list[Tensor]:
        part = data[number >= HELD_OUT]
        draws = torch.randint(len(part), (64,), generator=generator(number))
        return default_collate([part[i] for i in draws.tolist()])

    def names(model: Any) -> Names:
        names = {"train_config": config, "train_dataset": data[0]}
        return names | {"optim_groups": groups(model.configure_optimizers(config))}

    return Setup(GPT(sizes), batch, lambda model, b: model(*b)[1], names, clip=1.0)


def llama2_c(clone: Path) -> Setup:
    from model import ModelArgs, Transformer

    size = {"dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 32}
    made = Transformer(ModelArgs(**size, vocab_size=256, max_seq_len=64))

    def loss(model: Any, text: Tensor) -> Tensor:
        model(text[:, :-1].contiguous(), text[:, 1:].contiguous())
        return model.last_loss

    def names(model: Any) -> Names:
        own = model.configure_optimizers(0.1, 5e-4, (0.9, 0.95), "cpu")
        return {"optim_groups": groups(own), "betas": (0.9, 0.95), "extra_args": {}}

    share = lambda step, steps: (1 + math.cos(math.pi * step / steps)) / 2  # noqa: E731
    batch = windows([*clone.glob("*.py"), *clone.glob("*.md")], 8, 65)
    return Setup(made, batch, loss, names, clip=1.0, share=share)


def x_transformers(clone: Path) -> Setup:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    settings = {"polar_pos_emb": True, "pre_and_post_norm": True}
    layers = Decoder(dim=64, depth=3, heads=2, **settings)
    made = TransformerWrapper(num_tokens=256, max_seq_len=64, attn_layers=layers)
    batch = windows([*clone.glob("*.py"), *clone.glob("*.md")], 8, 65)
    names = {"learning_rate": 1e-4, "train_loader": iter([batch(0)])}
    loss = lambda model, text: model(text)  # noqa: E731
    made = AutoregressiveWrapper(made)
    return Setup(made, batch, loss, lambda model: names, optimizer="optim", clip=0.5)


def denoising_diffusion(clone: Path) -> Setup:
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    unet = Unet(dim=16, dim_mults=(1, 2), attn_heads=2, attn_dim_head=16)
    images = waves(8, 8, 3)
    batch = lambda number: (images(number)[0] + 1) / 2  # noqa: E731
    names = {"train_lr": 1e-4, "adam_betas": (0.9, 0.99), "self": Space()}
    called = {"model": "diffusion_model", "optimizer": "self.opt"}
    made, loss = GaussianDiffusion(unet, image_size=8), lambda model, x: model(x)
    return Setup(made, batch, loss, lambda model: names, **called, clip=1, steps=UNET)


def dit(clone: Path) -> Setup:
    from diffusion import create_diffusion
    from models import DiT

    made = DiT(8, hidden_size=64, depth=4, num_heads=4, num_classes=8)
    diffusion = create_diffusion(timestep_respacing="")

    def loss(model: Any, batch: Any) -> Tensor:
        x, y = batch
        t = torch.randint(diffusion.num_timesteps, (len(x),))
        return diffusion.training_losses(model, x, t, {"y": y})["loss"].mean()

    names = {"latent_size": 8}
    return Setup(made, waves(16, 8, 4), loss, lambda model: names, optimizer="opt")


def guided_diffusion(clone: Path) -> Setup:
    from guided_diffusion import script_util
    from guided_diffusion.fp16_util import MixedPrecisionTrainer
    from guided_diffusion.resample import UniformSampler

    size = {"num_channels": 32, "num_res_blocks": 1, "channel_mult": "1,2"}
    size |= {"image_size": 8, "attention_resolutions": "4", "learn_sigma": True}
    defaults = script_util.model_and_diffusion_defaults()
    model, diffusion = script_util.create_model_and_diffusion(**{**defaults, **size})
    sampler = UniformSampler(diffusion)

    def loss(model: Any, batch: Any) -> Tensor:
        t, weights = sampler.sample(len(batch[0]), "cpu")
        return (diffusion.training_losses(model, batch[0], t)["loss"] * weights).mean()

    def names(model: Any) -> Names:
        trainer = MixedPrecisionTrainer(model=model)
        loop = Space(lr=1e-4, weight_decay=0.0, mp_trainer=trainer)
        return {"self": loop, "args": Space(image_size=8)}

    batch = waves(4, 8, 3)
    return Setup(model, batch, loss, names, optimizer="self.opt", steps=UNET)


def vit_pytorch(clone: Path) -> Setup:
    from vit_pytorch import ViT

    size = {"dim": 64, "depth": 3, "heads": 4, "dim_head": 16, "mlp_dim": 128}
    images = waves(32, 16, 3, noise=2.0)
    loss = lambda model, batch: nn.CrossEntropyLoss()(model(batch[0]), batch[1])  # noqa: E731
    names = {"lr": 3e-5, "train_loader": [images(0)]}
    made = ViT(image_size=16, patch_size=4, num_classes=8, dropout=0.1, **size)
    return Setup(made, images, loss, lambda model: names)


def dlrm(clone: Path) -> Setup:
    from dlrm_data_pytorch import generate_uniform_input_batch
    from dlrm_s_pytorch import DLRM_Net

    tables, *layers = map(np.array, ([100, 50, 20], [8, 64, 16], [22, 64, 1]))

    def batch(number: int) -> Any:
        np.random.seed(number)  # noqa: NPY002 - its data and weights are drawn so
        x, offsets, rows = generate_uniform_input_batch(8, tables, 128, 4, True, False)
        odd = rows[0][offsets[0]] % 2  # its own targets are independent of the input
        return (x, offsets, rows), (x.sum(1) + 2 * odd > 5).float()[:, None]

    def names(model: Any) -> Names:
        names = {"args": Space(optimizer="sgd", learning_rate=0.1)}
        return names | {"parameters": model.parameters(), "opts": {"sgd": optim.SGD}}

    loss = lambda model, batch: model.loss_fn(model(*batch[0]), batch[1])  # noqa: E731
    made = DLRM_Net(16, tables, *layers, "dot", sigmoid_top=1)
    return Setup(made, batch, loss, names, model="dlrm")


SETUPS: dict[str, Callable[[Path], Setup]] = {
    "word_language_model": word_language_model,
    "minGPT": min_gpt,
    "llama2.c": llama2_c,
    "x-transformers": x_transformers,
    "denoising-diffusion-pytorch": denoising_diffusion,
    "DiT": dit,
    "guided-diffusion": guided_diffusion,
    "vit-pytorch": vit_pytorch,
    "DLRM": dlrm,
}


@dataclass
class Hunk:
    """Lines of a file of a codebase. new: come after ``old``, or in its place unless that stays."""

    file: str
    old: list[str]
    new: list[str]
    stays: bool

    def lines(self, way: str) -> list[str]:
        """The lines that a way has, but for those that stay."""
        kind = {True: "fp8", False: "unit"}
        has = WAYS[way].split()
        new = [line for line in self.new if kind["fp8.convert" in line] in has]
        return new if self.stays or "unit" in has else new + self.old

    def applied(self, text: str, way: str) -> str:
        """The text of the file under a way."""
        stay = self.old if self.stays else []
        return text.replace("\n".join(self.old), "\n".join(stay + self.lines(way)))


@dataclass
class Codebase:
    """A part of codebases.diff. folder: of the clone, and in it. paths: its import paths."""

    name: str
    folder: str
    paths: list[str]
    hunks: list[Hunk]

    @classmethod
    def all(cls, text: str) -> dict[str, Codebase]:
        """Reads the text of codebases.diff; returns the codebases by name."""
        found: dict[str, Codebase] = {}
        hunk = Hunk("", [], [], True)
        for line in text.splitlines():
            if line.startswith("# "):
                name, folder, *paths = line[2:].split(", ")
                codebase = found[name] = cls(name, folder, paths or [""], [])
            elif line.startswith("--- "):
                hunk = Hunk(line[4:], [], ["another begins"], True)
            elif line.startswith("+"):
                hunk.new.append(line[1:])
            elif line:
                if hunk.new:
                    hunk = Hunk(hunk.file, [], [], stays=line[0] == " ")
                    codebase.hunks.append(hunk)
                hunk.old.append(line[1:])
        return found

    def check(self, clone: Path) -> None:
        """Raises ValueError unless the files of the clone have the lines that stay or go."""
        for hunk in self.hunks:
            text = (clone / hunk.file).read_text(encoding="utf-8")
            for line in hunk.old:
                if (line := line.strip()) not in text:
                    raise ValueError(f"{clone / hunk.file} has no line {line!r}")

    @contextmanager
    def imported(self, clone: Path) -> Iterator[None]:
        """Imports from the clone, quietly, and forgets its modules."""
        before = {*sys.modules}
        sys.path[:0] = [str(clone / path) for path in self.paths]
        try:
            with redirect_stdout(io.StringIO()):
                yield
        finally:
            del sys.path[: len(self.paths)]
            for name in {*sys.modules} - before:
                if str(clone) in str(getattr(sys.modules[name], "__file__", "")):
                    del sys.modules[name]


class Run:
    """A model and its optimizer, by the lines of a way."""

    def __init__(self, codebase: Codebase, clone: Path, way: str, seed: int) -> None:
        seeded(seed)
        self.setup = setup = SETUPS[codebase.name](clone)
        names = {**IMPORTED, setup.model: setup.made}
        for hunk in codebase.hunks:
            names |= setup.names(names[setup.model])
            exec(dedent("\n".join(hunk.lines(way))), names)
        self.model = names[setup.model]
        self.optimizer = eval(setup.optimizer, names)
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]

    def train(self, steps: range, seed: int, faster: float) -> None:
        """Steps on the batches of a seed, at its rate times ``faster``."""
        setup = self.setup
        self.model.train()
        for step in steps:
            share = faster * setup.share(step, setup.steps)
            for index, peak in enumerate(self.peaks):
                self.optimizer.param_groups[index]["lr"] = peak * share
            batch = setup.batch(seed * 10**6 + step)
            seeded(step)
            self.optimizer.zero_grad()
            setup.loss(self.model, batch).backward()
            if setup.clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), setup.clip)
            self.optimizer.step()

    @torch.no_grad()
    def held_out(self) -> float:
        """The mean loss of held-out batches."""
        self.model.eval()
        losses = []
        for number in range(HELD_OUT, HELD_OUT + BATCHES):
            batch = self.setup.batch(number)
            seeded(number)
            losses.append(self.setup.loss(self.model, batch).item())
        return statistics.fmean(losses)


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


def trained(
    codebase: Codebase, clone: Path, way: str, seed: int, faster: float = 1.0
) -> list[float]:
    """The held-out loss, and the loss of a run that is resumed from the middle of this one."""
    run = Run(codebase, clone, way, seed)
    steps = run.setup.steps
    run.train(range(steps // 2), seed, faster)
    file = io.BytesIO()
    torch.save([run.model.state_dict(), run.optimizer.state_dict()], file)
    run.train(range(steps // 2, steps), seed, faster)
    losses = [run.held_out()]
    if seed == SEEDS[0] and faster == 1.0:
        run = Run(codebase, clone, way, seed + 100)
        file.seek(0)
        values, state = torch.load(file)
        run.model.load_state_dict(values)
        run.optimizer.load_state_dict(state)
        run.train(range(steps // 2, steps), seed, faster)
        losses.append(run.held_out())
    return losses


def played(
    codebase: Codebase, clone: Path, way: str, seed: int, faster: float = 1.0
) -> list[float]:
    """The reward for each episode that ended in the last tenth of a run of ppo.py, which saves no
    checkpoint."""
    (file,) = {hunk.file for hunk in codebase.hunks}
    text = (clone / file).read_text(encoding="utf-8")
    for hunk in codebase.hunks:
        text = hunk.applied(text, way)
    end = 'print("SPS:", int(global_step / (time.time() - start_time)))'
    text = text.replace(end, "print('ended', rewards.sum().item(), dones.sum().item())")
    text = "from unit_scaling.transforms import unit_scale\n" + text
    text = "import fp8, unit_scaling as uu\n" + text
    command = [sys.executable, "ppo.py", "--no-cuda", f"--seed={seed}"]
    command += [f"--total-timesteps={512 * STEPS}"]
    paths = os.pathsep.join([str(DIFF.parents[1]), *sys.path])
    settings: Names = {"stdout": subprocess.PIPE, "text": True, "check": True}
    settings["env"] = {**os.environ, "PYTHONPATH": paths}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "ppo.py").write_text(text, encoding="utf-8")
        ran = subprocess.run(command, cwd=folder, **settings)
    ends = re.findall(r"^ended (\S+) (\S+)$", ran.stdout, re.MULTILINE)
    rewards, dones = np.array(ends[-math.ceil(len(ends) / 10) :], dtype=float).sum(0)
    return [float(rewards / max(dones, 1.0))]


def row(codebase: Codebase, clone: Path) -> Row:
    """The losses of all ways: means over seeds, and half of their range."""
    codebase.check(clone)
    made = trained if codebase.name in SETUPS else played
    git = ["git", "-C", str(clone), "log", "-1", "--format=%h"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    found: Row = {"name": codebase.name, "commit": commit}
    resumed = []
    rates = {"float32": FASTER} if made is trained else {}
    for way in WAYS:
        tried = {}
        for faster in (1.0, *rates.get(way, ())):
            with codebase.imported(clone):
                each = [made(codebase, clone, way, seed, faster) for seed in SEEDS]
            losses = [loss for loss, *_ in each]
            tried[faster] = losses
            for again in each[0][1:]:
                gap = again - losses[0]
                resumed.append(f"{way} {gap:+.0e}" if gap else "to the bit")
            print(f"{codebase.name:28} {way:16} {faster:4g} {losses}", flush=True)
        found[way] = summary(tried[1.0])
        if way in rates:
            faster = min(tried, key=lambda each: statistics.fmean(tried[each]))
            found |= {"best rate": faster, f"{way}, best rate": summary(tried[faster])}
    # The ways that differ, if one does.
    differ = [text for text in resumed if text != "to the bit"]
    found["resumed"] = "; ".join(differ or resumed[:1]) or "no checkpoint"
    return found


def summary(losses: list[float]) -> list[float]:
    """The mean, and half of the range."""
    half = (max(losses) - min(losses)) / 2
    return [round(statistics.fmean(losses), 4), round(half, 4)]


def main() -> int:
    """Trains the codebases that are there, and records the rows of all."""
    parser = argparse.ArgumentParser(prog="benchmarks.codebases", description=__doc__)
    parser.add_argument(
        "--at", type=Path, required=True, help="the folder of the clones"
    )
    codebases = Codebase.all(DIFF.read_text(encoding="utf-8"))
    parser.add_argument("--names", default=";".join(codebases), help="separated by ;")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = recorded("codebases")
    question = (
        f"held-out loss after {STEPS} steps ({UNET} of U-Nets), and half its range over "
        f"{len(SEEDS)} seeds; of PPO the reward for each episode that ended. Resumed: whether "
        "a resumed run ends at the same loss, or what it differs by"
    )
    try:
        for name in args.names.split(";"):
            clone = args.at.resolve() / codebases[name].folder
            if not clone.is_dir():
                print(f"{name}: skipped, {clone} is not there")
                continue
            try:
                rows[name] = [row(codebases[name], clone)]
            except ImportError as error:
                print(f"{name}: skipped, {error}")
    finally:  # a script that fails leaves the rows before it
        ordered = [rows[name][0] for name in codebases if name in rows]
        report("codebases", question, ordered)
    return 0


if __name__ == "__main__":
    sys.exit(main())
