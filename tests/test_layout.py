"""The shape of the project: one direction of imports, small files, light imports."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = [
    "errors", "biases", "rotary", "absolute", "adapt", "attention", "nn", "data", "config", "sharding",
    "training", "evaluation", "sampling",
]  # fmt: skip
"""A module imports only from those before it, and from its own package."""

MODULES = sorted((ROOT / "dape_jax").rglob("*.py"))


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dape_jax":
            parts = node.module.split(".")[1:]
            for alias in node.names:
                yield (parts or [alias.name])[0]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("dape_jax."):
                    yield alias.name.split(".")[1]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    own = path.relative_to(ROOT / "dape_jax").parts[0].removesuffix(".py")
    if own == "__init__":
        return
    assert own in ORDER, f"{own} has no place in the order"
    for other in imports(path):
        assert other in ORDER[: ORDER.index(own) + 1], f"{path.name} imports {other}"


@pytest.mark.parametrize("path", [*MODULES, *(ROOT / "experiments").glob("*.py"), *(ROOT / "configs").glob("*.py")],
                         ids=lambda p: str(p.relative_to(ROOT)))  # fmt: skip
def test_files_are_small_and_flags_live_in_experiments(path):
    text = path.read_text()
    if path.name != "gpu.py":  # whatever depends on the lowering that JAX is to remove is in one file
        assert len(text.splitlines()) <= 400
    if "experiments" not in path.parts:
        assert "absl" not in text


def modules_after(statement):
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return {name.split(".")[0] for name in out.stdout.splitlines()}


def test_import_loads_jax_and_flax_only():
    ours = modules_after("import dape_jax, dape_jax.nn")
    theirs = modules_after("import jax, jax.sharding, flax.nnx, jax.ad_checkpoint, difflib, logging, dataclasses")
    assert ours - theirs == {"dape_jax"}


def test_configurations_do_not_import_jax():
    loaded = modules_after("import configs.quickstart, configs.tiny, configs.lm_125m")
    assert not {"jax", "flax", "dape_jax"} & loaded
