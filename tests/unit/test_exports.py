"""What a package exports is what it says it exports."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path for path in (ROOT / "hybridrl").rglob("*.py")
    if any(isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
           for node in ast.parse(path.read_text()).body)
)


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("name", [module_name(path) for path in SOURCES])
def test_every_exported_name_exists_once(name):
    module = importlib.import_module(name)
    missing = [export for export in module.__all__ if not hasattr(module, export)]
    assert not missing, f"{name}.__all__ names what isn't there: {missing}"
    assert len(module.__all__) == len(set(module.__all__))


@pytest.mark.parametrize("path", [path for path in SOURCES if path.name == "__init__.py"], ids=module_name)
def test_a_package_exports_what_it_imports(path):
    imported = {
        alias.asname or alias.name for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hybridrl") for alias in node.names
    }
    exported = set(importlib.import_module(module_name(path)).__all__)
    assert not {name for name in imported - exported if not name.startswith("_")}, "imported but not exported"


def test_every_error_has_a_line_in_the_tree():
    errors = importlib.import_module("hybridrl.errors")
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.HybridRLError):
            assert name in errors.__doc__, f"{name} is missing in the tree at the top of errors.py"
