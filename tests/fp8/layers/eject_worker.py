"""Runs the files of test_eject.py in a process without this package: `python -I`, a folder, and the
file of the model. Prints case -> the indices of the tensors of `step` that differ, as JSON."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any


class Guard:
    """Refuses this package, wherever it is installed."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] in ("fp8", "unit_scaling"):
            raise ModuleNotFoundError(f"{name} was imported")


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.meta_path.insert(0, Guard())
    import torch

    folder, models, threads = (
        Path(sys.argv[1]),
        load(Path(sys.argv[2])),
        int(sys.argv[3]),
    )
    torch.set_num_threads(threads)
    different = {}
    for path in sorted(folder.glob("*.pt")):
        case = torch.load(path)
        model = models.Model().to(case["dtype"])
        model.load_state_dict(case["weights"])
        model = load(folder / f"{path.stem}.py").convert(model)
        found = models.step(model, case["dtype"], case["autocast"])
        pairs = zip(found, case["wanted"], strict=True)
        different[path.stem] = [
            i for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)
        ]
    assert not any(
        name.partition(".")[0] in ("fp8", "unit_scaling") for name in sys.modules
    )
    print(json.dumps(different))
