"""Imports point down, and each heavy dependency has one home. Read from the source, nothing is imported."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The longest matching prefix counts. A module imports its own layer and those below it.
LAYERS = {
    "recipes": 6,
    "hybridrl.__main__": 5,
    "hybridrl.command_line": 5,
    "hybridrl.config_loading": 5,
    "hybridrl.controller": 4,
    "hybridrl.workers": 3,
    "hybridrl.algorithms": 2,
    "hybridrl.data": 2,
    "hybridrl.rewards": 2,
    "hybridrl.environments": 2,
    "hybridrl.models": 2,
    "hybridrl.batch": 1,
    "hybridrl.child_process": 1,
    "hybridrl.dispatch": 1,
    "hybridrl.config": 1,
    "hybridrl.config_reference": 1,
    "hybridrl.errors": 1,
    "hybridrl.importing": 1,
    "hybridrl.metrics": 1,
    "hybridrl.plot": 1,
    "hybridrl.samples": 1,
    "hybridrl.show": 3,
    "hybridrl": 7,  # the package itself may name anything, lazily
}

HOMES = {
    "ray": ("hybridrl.controller",),
    "vllm": ("hybridrl.workers.rollout", "hybridrl.workers.weights"),
    "hydra": ("hybridrl.config_loading", "recipes"),
    "omegaconf": ("hybridrl.config_loading", "recipes"),
}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for package in ("hybridrl", "recipes") for path in (ROOT / package).rglob("*.py")}


def inside(module, package):
    return module == package or module.startswith(package + ".")


def imports(path):
    """(line, module) of every import, those inside functions included, those for type checkers left out."""
    tree = ast.parse(path.read_text())
    skipped = {
        inner for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield node.lineno, full if full in MODULES else node.module


def layer(module):
    return LAYERS[max((prefix for prefix in LAYERS if inside(module, prefix)), key=len)]


def test_every_module_has_a_layer():
    top = {".".join(module.split(".")[:2]) for module in MODULES if inside(module, "hybridrl") and module != "hybridrl"}
    assert top <= set(LAYERS), f"give {sorted(top - set(LAYERS))} a layer in LAYERS"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_down(module):
    upward = [
        f"line {line}: {target}" for line, target in imports(MODULES[module])
        if target in MODULES and layer(target) > layer(module)
    ]
    assert not upward, f"{module} imports from a layer above it: {upward}"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_heavy_dependencies_stay_in_their_homes(module):
    strays = [
        f"line {line}: {target}" for line, target in imports(MODULES[module]) for package, homes in HOMES.items()
        if inside(target, package) and not any(inside(module, home) for home in homes)
    ]
    assert not strays, f"{module} is no home of {strays}"


def test_no_import_cycles():
    graph = {m: {t for _, t in imports(path) if t in MODULES and t != m} for m, path in MODULES.items()}
    done, path = set(), []

    def visit(module):
        assert module not in path, f"cycle: {' -> '.join([*path[path.index(module):], module])}"
        if module in done:
            return
        path.append(module)
        for target in sorted(graph[module]):
            visit(target)
        path.pop()
        done.add(module)

    for module in sorted(graph):
        visit(module)


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import hybridrl", ("torch", "ray", "vllm", "transformers", "hydra", "datasets")),
        ("import hybridrl.config, hybridrl.errors", ("torch", "ray", "vllm", "transformers", "hydra")),
        ("import hybridrl.__main__, hybridrl.show", ("torch", "ray", "vllm", "transformers", "hydra", "datasets")),
        ("import hybridrl.command_line", ("ray", "vllm", "transformers", "datasets")),
        ("import hybridrl.controller.run", ("ray", "vllm", "transformers", "datasets", "matplotlib")),
    ],
)
def test_imports_are_light(statement, unwanted):
    code = f"import sys; {statement}; print([name for name in {unwanted} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_recipes_set_the_environment_before_they_import_torch():
    code = "import sys, os, recipes; print('torch' in sys.modules, os.environ['TORCH_CPP_LOG_LEVEL'])"
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT,
                          env=environment)
    assert done.stdout.split() == ["False", "ERROR"], done.stderr


def test_the_reader_of_imports_sees_them_all(tmp_path):
    file = tmp_path / "sample.py"
    file.write_text("import ray.util\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import vllm\n"
                    "def f():\n    from hybridrl import config\n    from hybridrl.errors import ConfigError\n")
    assert {target for _, target in imports(file)} == {"ray.util", "typing", "hybridrl.config", "hybridrl.errors"}
