"""The signatures of TransformerEngine, read from its wheel and kept beside this file.

``python -m tests.fp8.adapters.te_signatures FOLDER`` writes them from an unpacked wheel.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.wheels import fields, signature

VERSION = "2.20.2"
KEPT = Path(__file__).with_name("transformer_engine.json")

CALLS = {
    "Linear.__init__": "pytorch/module/linear.py",
    "Linear.forward": "pytorch/module/linear.py",
    "LayerNorm.__init__": "pytorch/module/layernorm.py",
    "RMSNorm.__init__": "pytorch/module/rmsnorm.py",
    "autocast.__init__": "pytorch/quantization.py",
}
OPERATIONS = {"LayerNorm": "layer_norm.py", "RMSNorm": "rmsnorm.py"}
"""What the norms hand their other keywords to."""

RECIPES = (
    "DelayedScaling",
    "Float8CurrentScaling",
    "MXFP8BlockScaling",
    "Float8BlockScaling",
    "NVFP4BlockScaling",
)


def read(wheel: Path) -> dict[str, Any]:
    """From the unpacked wheel."""
    root = wheel / "transformer_engine"
    recipes = root / "common" / "recipe" / "__init__.py"
    operations = {
        f"ops.{name}.__init__": signature(root / "pytorch/ops/basic" / file, f"{name}.__init__")
        for name, file in OPERATIONS.items()
    }
    calls = {name: signature(root / file, name) for name, file in CALLS.items()}
    return {
        "version": VERSION,
        "calls": calls | operations,
        "recipes": {name: fields(recipes, name) for name in RECIPES},
    }


def kept() -> dict[str, Any]:
    return json.loads(KEPT.read_text(encoding="utf-8"))


if __name__ == "__main__":
    KEPT.write_text(json.dumps(read(Path(sys.argv[1])), indent=1) + "\n", encoding="utf-8")
