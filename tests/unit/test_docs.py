"""What README and docs say is so: snippets run, options load, links lead somewhere, tables are complete.

Fences: `python` is executed, with what it prints compared to the comment behind each print; `python loop` must also
be lines of recipes/grpo.py; `python engines` runs with stand-ins for clusters and models; `python sketch` is compiled.
A block without a language is a command line or overrides; `yaml` is a file of options, of recipes.grpo unless it names
another recipe.
"""

import ast
import contextlib
import dataclasses
import inspect
import io
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybridrl import algorithms, batch, config
from hybridrl.algorithms.algorithm import Algorithm, padded_columns
from hybridrl.batch import FIELDS, lengths, make_batch, num_rows, put
from hybridrl.config_loading import groups_of, load
from hybridrl.data import row_seeds
from hybridrl.dispatch import dispatched

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
ALGORITHM_PAGES = [page for page in DOCS if page.parent.name == "algorithms"]
TABLES = {table.kind: table for table in vars(algorithms).values() if isinstance(table, algorithms.Table)}
FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page):
    return str(page.relative_to(ROOT))


def fences(page, *languages):
    """(language, text) of the fenced blocks of a page."""
    return [(info, text) for info, text in FENCE.findall(page.read_text()) if info in languages]


def prose(page):
    return FENCE.sub("", page.read_text())


def inline_code(page):
    return re.findall(r"`([^`\n]+)`", prose(page))


def each(pages, *languages):
    return [pytest.param(page, info, text, id=f"{name_of(page)}-{i}")
            for page in pages for i, (info, text) in enumerate(fences(page, *languages))]


# ---- links, files, targets


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_and_file_exists(page):
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if not link.startswith("http")]
    gone = [link for link in links if not (page.parent / link.split("#")[0]).exists()]
    paths = [code for code in inline_code(page)
             if re.fullmatch(r"(recipes|hybridrl|docs|tests|benchmarks|scripts)/[\w./-]*", code)]
    assert not gone + [path for path in paths if not (ROOT / path).exists()]


def test_every_page_is_linked_from_an_index():
    indexes = (ROOT / "docs/README.md", ROOT / "docs/algorithms/README.md")
    linked = {(index.parent / link).resolve() for index in indexes
              for link in re.findall(r"\]\((\S+?\.md)\)", prose(index))}
    assert {name_of(page) for page in DOCS if page not in indexes and page.resolve() not in linked} == set()


def test_the_file_tree_of_the_readme_exists():
    ((_, tree),) = fences(ROOT / "README.md", "text")
    folders = [ROOT]
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.split(r" {3,}", line.strip())[0].split("  ")
        folders = folders[: depth + 1]
        for name in names:
            assert (folders[-1] / name).exists(), line
        folders.append(folders[-1] / names[0])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_make_target_exists(page):
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    code = [*inline_code(page), *(line for _, text in fences(page, "", "sh") for line in text.splitlines())]
    assert {word for line in code for word in re.findall(r"^make ([\w-]+)", line.strip())} <= set(targets)


# ---- snippets, executed


class Stub:
    """A policy group without engines: columns of the right kind, and `update` runs the loss it is given."""

    def generate(self, batch, temperature=None, max_tokens=None):
        sizes = [1 + i % 3 for i in range(num_rows(batch))]
        put(batch, "response_ids", [[7] * size for size in sizes])
        put(batch, "response_mask", [[True] * size for size in sizes])
        put(batch, "rollout_log_probs", [[-0.5] * size for size in sizes])
        put(batch, "weight_versions", [[1] * size for size in sizes])
        put(batch, "finish_reason", ["stop"] * len(sizes))
        put(batch, "response", ["7"] * len(sizes))
        return batch

    def log_probs(self, batch, also=()):
        put(batch, "old_log_probs", [[-0.51] * size for size in lengths(batch["response_ids"]).tolist()])
        return batch

    def update(self, mini_batch, loss):
        columns = padded_columns(mini_batch)
        current = columns.get("old_log_probs", columns["rollout_log_probs"]).clone().requires_grad_()
        entropies = columns.get("entropies") if loss.needs_entropies else None
        value, metrics = loss(current, {**columns, "response_mask": columns["mask"]}, entropies)
        value.backward()
        assert current.grad.isfinite().all()
        return metrics

    def sync_weights(self):
        return [1]


class StubGroup(Stub):
    """A worker group that checks what its worker class would be built with, and has only that class's methods."""

    def __init__(self, worker_cls, pool, *args, role="policy", **kwargs):
        inspect.signature(worker_cls).bind(None, *args, **kwargs)
        missing = {name for name in vars(Stub) if not name.startswith("_")} - set(dispatched(worker_cls))
        assert not missing, f"{worker_cls.__name__} has no {missing}"


class Prompts:
    drawn = 0

    def next_batch(self, n):
        self.drawn += n
        return make_batch(prompt_ids=[[1, 2]] * n, prompt=["6*7="] * n, answer=["42"] * n, task=[{}] * n,
                          group_ids=torch.arange(self.drawn - n, self.drawn))


def score(batch):
    """Rewards that differ within every group."""
    put(batch, "rewards", [float(i % 2) for i in range(num_rows(batch))])
    return batch


def names_of_the_recipe():
    cfg = config.GRPOConfig()
    cfg.algorithm.responses_per_prompt, cfg.trainer.prompts_per_step = 4, 2
    prompts = Prompts()
    steps = SimpleNamespace(steps=lambda prompts: [(1, prompts.next_batch(2))])

    def rollout(step, drawn):
        return score(Stub().generate(batch.repeat(drawn, cfg.algorithm.responses_per_prompt)))

    return {"cfg": cfg, "rollout": rollout, "algorithm": Algorithm(cfg.algorithm, 16), "policy": Stub(),
            "prompts": prompts, "run": steps, "step": 1, "batch": prompts.next_batch(2), "rewards": score,
            "rewarder": score, "row_seeds": row_seeds,
            "padded_columns": padded_columns, "num_rows": num_rows, "repeat": batch.repeat, "unpadded": batch.unpadded}


@pytest.fixture
def tables():
    """What a snippet registers is gone after the test."""
    kept = [(table, dict(table._entries)) for table in TABLES.values()]
    yield
    for table, entries in kept:
        table._entries = entries


def run(page, monkeypatch):
    """Execute the snippets of a page in order; (what it says is printed, what is printed) line by line."""
    from hybridrl import controller, models

    monkeypatch.setattr(models, "load_tokenizer", lambda model: SimpleNamespace(encode=lambda text: [3, 4]))
    monkeypatch.setattr(controller, "WorkerGroup", StubGroup)
    torch.set_printoptions(linewidth=500)
    names, pairs = names_of_the_recipe(), []
    if page.parent.name == "algorithms" and page.name != "README.md":
        exec(fences(ROOT / "docs/algorithms/README.md", "python")[0][1], names)
    for _, text in fences(page, "python", "python loop", "python engines"):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(text, name_of(page), "exec"), names)
        said = [line.partition(")  # ")[2] for line in text.splitlines() if line.startswith("print(")]
        pairs += [(a, b) for a, b in zip(said, printed.getvalue().splitlines(), strict=True) if a]
    torch.set_printoptions(profile="default")
    return pairs


@pytest.mark.parametrize("page", [page for page in PAGES if fences(page, "python", "python engines")], ids=name_of)
def test_snippets_run_and_print_what_they_say(page, tables, monkeypatch):
    for said, printed in run(page, monkeypatch):
        assert " ".join(printed.split()) == " ".join(said.split())


@pytest.mark.parametrize(("page", "info", "text"), each(PAGES, "python sketch"))
def test_sketches_compile(page, info, text):
    compile(text, name_of(page), "exec")


def test_the_loop_of_the_readme_is_the_recipe():
    ((_, text),) = fences(ROOT / "README.md", "python loop")
    recipe = {line.strip() for line in (ROOT / "recipes/grpo.py").read_text().splitlines()}
    assert [line.strip() for line in text.splitlines() if line.strip() not in recipe] == []


# ---- command lines


def command_lines():
    for page in PAGES:
        for _, text in fences(page, ""):
            for line in text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:2] == ["python", "-m"] or words[:1] == ["python"] or words and "=" in words[0]:
                    yield pytest.param(page, words, id=f"{name_of(page)}: {' '.join(words)[:60]}")


@pytest.mark.parametrize(("page", "words"), list(command_lines()))
def test_command_lines_load(page, words, tables, monkeypatch):
    recipe = "grpo"
    if words[:2] == ["python", "-m"]:
        assert find_spec(words[2]), words[2]
        recipe, words = words[2].rpartition(".")[2], words[3:]
        if recipe not in config.RECIPES:
            return
    elif words[0] == "python":
        words = words[2:]
        run(page, monkeypatch)  # a copy of the recipe with the page's own entries
    words = [word.replace("=...", "=somewhere") for word in words if "=" in word]
    given = {word.split("=")[0] for word in words}
    if {"data.source=reasoning_gym", "experiment=smollm2"} & set(words):
        given.add("data.path")  # made up, not read
    for key in ("policy.model.path", *(() if recipe == "serve" else ("data.path",))):
        if key not in given:
            words.append(f"{key}=somewhere")
    load(recipe, config.RECIPES[recipe], words)


@pytest.mark.parametrize(("page", "info", "text"), each(PAGES, "yaml", "yaml evaluate"))
def test_yaml_loads(page, info, text, tmp_path):
    (tmp_path / "own.yaml").write_text(text)
    recipe = info.partition(" ")[2] or "grpo"
    load(recipe, config.RECIPES[recipe], ["policy.model.path=m", "data.path=d"], tmp_path / "own.yaml")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_options_named_in_the_text_exist(page):
    from hybridrl.config_reference import options_of

    keys = {re.sub(r"\[\]", "", option.key) for cls in config.RECIPES.values() for option in options_of(cls)}
    roots = {key.split(".")[0] for key in keys if "." in key}
    named = {code.partition("=")[0] for code in inline_code(page) if re.fullmatch(r"[a-z_]+\.[\w.]+(=\S*)?", code)}
    unknown = {key for key in named if key.split(".")[0] in roots and "options." not in key
               and not key.endswith((".py", ".md", ".yaml", ".jsonl"))} - keys
    assert not {key for key in unknown if not any(known.startswith(key + ".") for known in keys)}


def test_algorithms_named_in_the_readme_are_choices():
    sentence = re.search(r"`algorithm=NAME` picks.*?and more", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    named = set(re.findall(r"`(\w+)`", sentence))
    assert named and named <= set(groups_of("grpo")["algorithm"])


# ---- tables


def test_the_columns_of_a_batch_are_listed():
    page = (ROOT / "docs/one_step.md").read_text()
    for name, field in FIELDS.items():
        kinds = field.dtype if isinstance(field.dtype, tuple) else (field.dtype,)
        kind = " or ".join(str(kind).removeprefix("torch.") if kind is not object else "object" for kind in kinds)
        row = f"| `{name}` | {field.shape} | {kind} | {field.writer} | {field.meaning} |"
        assert re.sub(" +", " ", row) in re.sub(" +", " ", page), row
    assert len(re.findall(r"^\| `\w+` \| [TRFLK]* *\| [\w ]+ \|", page, re.MULTILINE)) == len(FIELDS)


def entries(kind):
    """name -> the line of options under its heading, over all algorithm pages."""
    pattern = rf"^### `(\S+)` \({kind}\)$(.*?)(?=^#|\Z)"
    texts = [page.read_text() for page in ALGORITHM_PAGES]
    found = [pair for text in texts for pair in re.findall(pattern, text, re.MULTILINE | re.DOTALL)]
    assert len({name for name, _ in found}) == len(found), "an entry is described twice"
    return {name: re.search(r"^Options: (.*)\.$", text, re.MULTILINE)[1] for name, text in found}


@pytest.mark.parametrize(("kind", "table"), [("advantage", "ADVANTAGES"), ("loss", "POLICY_LOSSES"),
                                             ("correction", "CORRECTIONS")])
def test_every_entry_is_described_with_its_options(kind, table):
    described, table = entries(kind), getattr(algorithms, table)
    assert set(described) == set(table)
    for name, line in described.items():
        options = {field.name: field.default for field in dataclasses.fields(table[name].options)}
        said = dict(item.split("=") for item in re.findall(r"`([^`]+)`", line))
        assert said == {key: "null" if value is None else str(value) for key, value in options.items()}, name


@pytest.mark.parametrize(("page", "heading", "table"), [
    ("README", "Aggregations", "AGGREGATIONS"), ("kl_and_entropy", "KL estimators", "KL_ESTIMATORS"),
    ("corrections", "Keep masks", "KEEP_MASKS")])
def test_every_name_is_in_its_table(page, heading, table):
    text = (ROOT / f"docs/algorithms/{page}.md").read_text()
    section = re.search(rf"^## {heading}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[1]
    assert re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE) == list(getattr(algorithms, table))


# ---- messages and metrics


def templates():
    """Every string of the library and the installer; what an f-string fills in is `…`."""
    for path in [*(ROOT / "hybridrl").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_messages_of_the_troubleshooting_page_exist():
    foreign = {"operator torchvision::nms does not exist"}
    headings = re.findall(r"^### .*`.*$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    messages = {code for line in headings for code in re.findall(r"`([^`]+)`", line)} - foreign
    assert len(messages) > 20
    everything = "\n".join(templates())
    pieces = {piece.strip() for message in messages for piece in message.split("…") if piece.strip(" :.();")}
    assert {piece for piece in pieces if piece not in everything} == set()


def test_metrics_named_in_the_docs_exist():
    everything = config.AlgorithmConfig(
        advantage=config.Choice(name="reinforce", options={"baseline": "moving"}), corrections=[],
        loss=config.Choice(name="ppo_clip", options={"dual_clip": 3.0}), entropy=config.EntropyConfig(target=1.0),
        kl=config.KLConfig(coefficient=0.1, target=1.0), keep_masks=[config.Choice(name="off_policy_sequence")])
    known = set()
    for algorithm in (names_of_the_recipe()["algorithm"], Algorithm(everything, 16)):
        rows = Stub().log_probs(score(Stub().generate(Prompts().next_batch(8))))
        rows["group_ids"] = torch.arange(8) // 4
        rows["ref_log_probs"] = rows["old_log_probs"]
        if algorithm.needed_columns:
            rows["entropies"] = rows["old_log_probs"]
        rows = algorithm.shape(rows)
        rows["advantages"] = algorithm.advantages(rows)
        rows = algorithm.correct(rows)
        (piece,) = algorithm.mini_batches(rows)
        known |= {*algorithm.describe(rows, 1), *Stub().update(piece, algorithm.loss)}
    strings = set(templates())
    named = {code for page in PAGES for code in inline_code(page)
             if re.fullmatch(r"(reward|shaped_reward|response|group|advantage|mismatch|version|staleness|policy|train|"
                             r"sync)/[\w@]+", code)}
    assert len(named) > 50
    assert {name for name in named
            if name not in known | strings and not (name.startswith("train/") and name[6:] in strings)} == set()
