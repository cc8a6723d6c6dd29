"""From a recipe's YAML and overrides to one typed object: Hydra composes, the config classes check.

Hydra's compose interface is used, so nothing changes the working directory, writes an `outputs/` folder or
configures logging. Whatever is wrong with an option ends as a ConfigError of one line.
"""

import difflib
import re
import typing
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridrl.algorithms.combinations import check_combination
from hybridrl.config import validate_all
from hybridrl.config_reference import Option, options_of, own_options
from hybridrl.errors import ConfigError, unknown

CONFIG_DIR = Path(__file__).resolve().parents[1] / "recipes" / "config"

OmegaConf.register_new_resolver("recipes", lambda path: str(CONFIG_DIR.parent / path), replace=True)
"""`${recipes:demo/model}` in a recipe's YAML: a file that comes with the recipes, wherever they are installed."""

Config = TypeVar("Config")


def load(
    name: str, config_class: type[Config], overrides: Sequence[str] = (), file: str | Path | None = None
) -> Config:
    """The checked config of a recipe: class defaults, its YAML, groups, the user's `file`, overrides.

    Args:
        name: of the YAML file in `recipes/config`.
        overrides: as on Hydra's command line.
        file: a YAML file of differences; it may have a `defaults` list that overrides groups.
    Raises ConfigError, in one line.
    """
    groups, store = groups_of(name), ConfigStore.instance()
    store.store(name="schema", node=config_class)
    layers = [name]
    if file is not None:
        store.store(name="file", node=_read(Path(file), overrides))
        layers.append("file")
    store.store(name="main", node={"defaults": [*layers, "_self_"]})
    overrides = [_checked(text, config_class, groups) for text in overrides]
    try:
        with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            composed = compose("main", overrides=overrides)
        _check_keys(cast(dict, OmegaConf.to_container(composed)), config_class)
        config: Any = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(_explain(error, config_class, overrides, file)) from None
    validate_all(config)
    if hasattr(config, "algorithm"):
        check_combination(config.algorithm, has_critic=hasattr(config, "critic"))
    return config


def to_yaml(config: Any) -> str:
    """A config as YAML, every option written out; `--config` reads it back."""
    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)


def _read(file: Path, overrides: Sequence[str]) -> Any:
    try:
        content = OmegaConf.to_container(OmegaConf.load(file))
    except OSError as error:
        raise ConfigError(f"Can't read the config file {file}: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is no valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content or {}, dict):
        raise ConfigError(f"{file} must hold a mapping of options, got {type(content).__name__}.")
    for text in overrides:
        group = text.split("=")[0].lstrip("+")
        if "." not in group and group in (content or {}) and (CONFIG_DIR / group).is_dir():
            raise ConfigError(f"{text} would be overruled by the {group} options in {file}; remove one of the two.")
    return OmegaConf.create(content or {})


def groups_of(name: str) -> dict[str, list[str]]:
    """Config groups that a recipe's YAML lists, with their choices."""
    file = CONFIG_DIR / f"{name}.yaml"
    if not file.is_file():
        raise ConfigError(unknown("recipe config", name, (path.stem for path in CONFIG_DIR.glob("*.yaml"))))
    entries = (yaml.safe_load(file.read_text()) or {}).get("defaults", [])
    names = [group for entry in entries if isinstance(entry, dict) for group in entry]
    return {group: sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml")) for group in names}


def fitting(group: str, choices: Sequence[str], config_class: type) -> list[str]:
    """Of the choices of a group those for a recipe with this config class: it has all options of such an experiment."""
    return [choice for choice in choices if group != "experiment" or _fits(choice, config_class)]


def _fits(experiment: str, config_class: type) -> bool:
    content = yaml.safe_load((CONFIG_DIR / "experiment" / f"{experiment}.yaml").read_text())
    bases = content.pop("defaults", [])
    try:
        _check_keys(content, config_class)
    except ConfigError:
        return False
    return all(_fits(base, config_class) for base in bases)


def _checked(text: str, config_class: type, groups: dict[str, list[str]]) -> str:
    """An override as Hydra should read it, after checking its syntax, its key and the choice of a group."""
    try:
        override: Override = OverridesParser.create().parse_override(text)
    except HydraException:
        raise ConfigError(f"Can't read {text!r}: options are written key=value (values with commas, braces or "
                          f"spaces in quotes: key='\"a, b\"').") from None
    key = override.key_or_group
    if override.is_sweep_override():
        raise ConfigError(f"Can't read {text!r}: one value is needed; a list is written {key}=[a,b].")
    if key in groups:
        choice = "null" if override.value() is None else str(override.value())
        if choice in groups[key] and not fitting(key, [choice], config_class):
            here = fitting(key, groups[key], config_class)
            raise ConfigError(f"{text} sets options of another recipe. Choices here: {', '.join(here)}.")
        if choice not in groups[key] and not override.is_delete():
            raise ConfigError(unknown(f"{key}", choice, fitting(key, groups[key], config_class)))
        return text.lstrip("+")
    option = _find(key, config_class)
    entry = typing.get_origin(option.type) is dict
    if override.is_delete():
        if entry and option.key != key:
            return text
        raise ConfigError(f"{text}: {key} can't be removed, only set to another value.")
    _check_value(option, override.value())
    # Hydra wants a plus before a new entry of a mapping; a mapping of ours takes any entry.
    return "++" + text.lstrip("+") if entry else text


def _find(key: str, config_class: type) -> Option:
    """The option of that key, or the mapping or list it is an entry of; raises ConfigError for an unknown one."""
    pattern = re.sub(r"\.\d+(?=\.|$)", "[]", key)
    for option in options_of(config_class):
        if pattern in (option.key, option.key + "[]"):
            return option
        if typing.get_origin(option.type) is dict and pattern.startswith(option.key + "."):
            return option
    raise ConfigError(_unknown_option(key, config_class))


def _check_keys(content: dict[Any, Any], config_class: type, prefix: str = "") -> None:
    """Raise ConfigError for keys of nested mappings that no config class has."""
    options = {option.key: option for option in own_options(config_class, prefix)}
    for key, value in content.items():
        if f"{prefix}{key}" not in options:
            raise ConfigError(_unknown_option(f"{prefix}{key}", config_class, prefix))
        _check_value(options[f"{prefix}{key}"], value)


def _check_value(option: Option, value: Any) -> None:
    """`_check_keys` for what is inside an option's value: `key={...}` or `key=[{...}]`."""
    if option.item and option.item is option.type:
        if isinstance(value, dict):
            _check_keys(value, option.item, f"{option.key}.")
        elif not str(value).startswith("${"):  # an interpolation is another group
            given = "null" if value is None else str(value)
            raise ConfigError(f"{option.key} must be {option.accepted}, got {given!r}.")
    elif option.item and isinstance(value, list):
        for i, part in enumerate(value):
            if not isinstance(part, dict):
                raise ConfigError(f"{option.key}[{i}] must be a mapping of options, {{name: value, ...}}, "
                                  f"got {part!r}.")
            _check_keys(part, option.item, f"{option.key}[].")


def _unknown_option(key: str, config_class: type, prefix: str = "") -> str:
    """One line: options of these initials (`lr`) or near matches beside it, then the same name elsewhere, then all."""
    keys = [option.key for option in options_of(config_class, prefix)]
    group, _, last = re.sub(r"\.\d+\.", "[].", key).rpartition(".")
    beside = {known.rpartition(".")[2]: known for known in keys if known.rpartition(".")[0] == group}
    guesses = [beside[name] for name in beside if "_" in name and "".join(re.findall(r"(?:^|_)(.)", name)) == last]
    guesses = guesses or [beside[name] for name in difflib.get_close_matches(last, beside, n=3, cutoff=0.6)]
    guesses = guesses or [known for known in keys if known.rpartition(".")[2] == last][:3]
    guesses = guesses or ([] if beside else difflib.get_close_matches(key, keys, n=1, cutoff=0.8))
    if guesses:
        return f"Unknown option {key!r}. Did you mean {' or '.join(guesses)}?"
    return f"Unknown option {key!r}. Choices: {', '.join(beside.values() or (k for k in keys if '.' not in k))}."


def _explain(error: Exception, config_class: type, overrides: Sequence[str], file: object) -> str:
    """One line for what Hydra, OmegaConf or the YAML parser said."""
    chain: list[BaseException] = [error]
    while chain[-1].__cause__:
        chain.append(chain[-1].__cause__)
    text = "\n".join(str(link) for link in chain)
    if isinstance(chain[-1], yaml.YAMLError):
        return f"No valid YAML: {' '.join(str(chain[-1]).split())}"
    where = re.match(r"In '(.+?)'", text)
    place = f" (in {file if where[1] == 'file' else f'recipes/config/{where[1]}.yaml'})" if where else ""
    missing = re.search(r"Could not find '(\w+)/(.+?)'", text)
    if missing:
        choices = (path.stem for path in (CONFIG_DIR / missing[1]).glob("*.yaml"))
        return unknown(missing[1], missing[2], choices) + (f" (in {file})" if file else "")
    key = getattr(chain[-1], "full_key", None) or next(iter(re.findall(r"full_key: (\S+)", text)), None)
    if key is None:
        return " ".join(text.split())
    # Inside a list that is given whole, OmegaConf names only the item's own key.
    pattern = re.sub(r"\[\d+\]", "[]", key)
    options = list(options_of(config_class))
    known = [o for o in options if o.key == pattern] or [o for o in options if o.key.endswith(f"[].{key}")]
    if f"not in '{config_class.__name__}'" in text or not known and ("not in" in text or "in struct" in text):
        return _unknown_option(key, config_class) + place
    if not known or "nterpolation" in text:
        return f"{key}: {' '.join(str(chain[-1]).splitlines()[0].split())}{place}"
    return f"{known[0].key} must be {known[0].accepted}, got {_received(text, key, overrides)}{place}."


def _received(text: str, key: str, overrides: Sequence[str]) -> str:
    """The value that was refused: as in the message, else as on the command line."""
    quoted = re.search(r"Value '(.*?)' (?:of type|is)", text)
    given = [word.partition("=")[2] for word in overrides if word.lstrip("+").startswith(f"{key}=")]
    return repr(quoted[1]) if quoted else repr(given[-1]) if given else "a value of another type"
