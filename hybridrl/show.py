"""The saved responses of a run on the terminal: a table of them, or one turn by turn, its tokens marked.

Marks, which need no colours: «tokens that are not trained», [token|gap] where the log-probs of the two engines differ,
<v3> where the tokens of another weight version begin.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridrl.errors import DataError
from hybridrl.models import resolve_model
from hybridrl.samples import Message, Sample, Token, choose, read_samples

PROMPT_CHARS = 60
"""Of a prompt in the table."""
LARGE_GAP = 0.1
"""Nats; a ratio of the two probabilities of about 1.1."""


def show(run: str | Path, step: int | None = None, row: int | None = None, sort: str = "step", tokens: bool = False,
         gap: float = LARGE_GAP, evaluation: bool = False, console: Console | None = None) -> None:
    """Print the samples of a run as a table, or with `row` one of them.

    Args:
        run: the run's folder.
        step: only this one; with `row` and without a step the last one.
        sort: `step`, or `reward`: highest first, rows without one last.
        tokens: print the tokens of a row with their marks.
        gap: from which size on, in nats, a log-prob gap is marked.
        evaluation: the samples of the run's evaluations instead of those it trained on.
    Raises DataError when there is nothing to show, saying what there is.
    """
    if tokens and row is None:
        raise DataError("Tokens are shown of one row: name it, for instance --row 0.")
    console = console or Console(highlight=False)
    chosen = choose(read_samples(run, evaluation), step, row)
    if row is not None:
        return _print_episode(console, Path(run).expanduser(), chosen[0], tokens, gap)
    if sort == "reward":
        chosen.sort(key=lambda sample: -sample.reward if sample.reward is not None else float("inf"))
    console.print(_table(chosen))


def _table(samples: Sequence[Sample]) -> Table:
    table = Table(box=None, pad_edge=False, expand=True)
    extra = [name for name, usual in (("suite", None), ("agent", "agent"))
             if any(sample.line.get(name) not in (None, usual) for sample in samples)]
    for name in ("step", "row", "reward", "turns", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("finish", *extra):
        table.add_column(name, no_wrap=True)
    table.add_column("prompt", no_wrap=True, overflow="ellipsis", ratio=1)  # what is left of the line
    for sample in samples:
        first = sample.turns[0].shown if sample.turns else sample.prompt  # an environment may show something else
        prompt = " ".join(_content(message) for message in first[-1:])
        cells = [str(sample.step), str(sample.row), _number(sample.reward), str(len(sample.turns)),
                 str(len(sample.tokens)) if "tokens" in sample.line else "-", sample.line.get("finish_reason") or "-",
                 *[sample.line.get(name) or "-" for name in extra], " ".join(prompt.split())[:PROMPT_CHARS]]
        table.add_row(*(Text(printable(str(cell))) for cell in cells))
    return table


def _print_episode(console: Console, run: Path, sample: Sample, with_tokens: bool, gap: float) -> None:
    for line in _facts(sample):
        _say(console, line, "bold")
    tokens = sample.tokens if with_tokens else []
    if tokens:
        texts, problem = texts_of(run, [token.id for token in tokens])
        _say(console, _summary(tokens, gap) + problem)
        return _print_turns(console, sample, tokens, texts, gap)
    if with_tokens:
        _say(console, "No tokens to show: the response is empty, or the run was made before tokens were written.")
    _print_turns(console, sample)


def _print_turns(console: Console, sample: Sample, tokens: Sequence[Token] = (), texts: Sequence[str] = (),
                 gap: float = LARGE_GAP) -> None:
    """What was shown and written; with tokens, those in place of their text."""
    if not sample.turns:
        _print_messages(console, sample.prompt)
    place = 0
    for number, turn in enumerate(sample.turns, 1):
        if turn.start == place or not tokens:  # else the observation is among the tokens
            _print_messages(console, turn.shown)
        reward = "" if turn.reward is None else f", reward {_number(turn.reward)}"
        _say(console, f"\nassistant, turn {number}{reward}", "bold green")
        _say(console, marked(tokens, texts, gap, place, turn.stop) if tokens else turn.written)
        place = turn.stop
        if turn.info:
            _say(console, f"info: {_plain(turn.info)}", "dim")
    if tokens[place:]:
        _say(console, "\nafter the last turn", "bold cyan")
        _say(console, marked(tokens, texts, gap, place, len(tokens)))


def _print_messages(console: Console, messages: Sequence[Message]) -> None:
    for message in messages:
        _say(console, f"\n{message.get('role', 'user')}", "bold cyan")
        _say(console, _content(message))


def _say(console: Console, text: str | Text, style: str = "") -> None:
    console.print(text if isinstance(text, Text) else Text(printable(text), style), soft_wrap=True)


def _facts(sample: Sample) -> Iterator[str]:
    line = sample.line
    facts = {"reward": _number(sample.reward), "finish": line.get("finish_reason"), "suite": line.get("suite"),
             "agent": line.get("agent"),
             "weight versions": ", ".join(str(v) for v in line.get("weight_versions") or [] if v != -1)}
    yield f"step {sample.step}  row {sample.row}  " + "  ".join(f"{name} {value}" for name, value in facts.items()
                                                                 if value)
    if line.get("reward_components"):
        yield "reward components: " + ", ".join(f"{k} {_number(v)}" for k, v in line["reward_components"].items())
    if line.get("answer") is not None:
        yield f"answer: {_plain(line['answer'])}"
    if line.get("reward_error"):
        yield f"no reward: {line['reward_error']}"


def _summary(tokens: Sequence[Token], gap: float) -> str:
    masked = sum(token.trained is False for token in tokens)
    gaps = [(abs(token.gap), i) for i, token in enumerate(tokens) if token.gap is not None and token.trained]
    said = f"{len(tokens)} tokens, {masked} of them «not trained»"
    if gaps:
        largest, place = max(gaps, key=lambda found: found[0])
        return f"{said}; largest log-prob gap {largest:.4f} (token {place}), [marked|] from {gap:g} on"
    return f"{said}; no log-prob gaps: the run made no old_log_probs for these rows"


def marked(tokens: Sequence[Token], texts: Sequence[str], gap: float, start: int, stop: int) -> Text:
    """Tokens `start` to `stop` as one text with their marks."""
    out, masked = Text(), False
    version = next((token.version for token in reversed(tokens[:start]) if token.version not in (None, -1)), None)
    for token, text in zip(tokens[start:stop], texts[start:stop], strict=True):
        text = printable(text.replace("\n", "\\n\n"))
        if (token.trained is False) != masked:
            masked = not masked
            out.append("«" if masked else "»", "dim")
        if token.version not in (None, -1, version):
            version = token.version
            out.append(f"<v{version}>", "bold magenta")
        if token.gap is not None and token.trained is not False and abs(token.gap) >= gap:
            out.append(f"[{text}|{token.gap:+.2f}]", "black on yellow")
        else:
            out.append(text, "dim" if masked else "")
    return out.append("»", "dim") if masked else out


def texts_of(run: Path, ids: Sequence[int]) -> tuple[list[str], str]:
    """The text of each token, special ones included, and what is wrong with that: "" or why they are shown as numbers.

    A character of several tokens is in the text of its last one; bytes of none are as the vocabulary spells them. The
    tokenizer is that of `model/` in the folder, or of the model that the run started from.
    """
    from tokenizers import Tokenizer

    numbers = [f"{number} " for number in ids]
    try:
        folder = run / "model"
        if not (folder / "tokenizer.json").is_file():
            options = yaml.safe_load((run / "config.yaml").read_text())
            folder = resolve_model(options["policy"]["model"]["path"])
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises nothing more special
        return numbers, f". Tokens are shown as ids, without a tokenizer: {error}"
    return _decoded(tokenizer, ids), ""


def _decoded(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    from tokenizers.decoders import DecodeStream

    stream, texts = DecodeStream(skip_special_tokens=False), list[str]()
    complete = 0  # later tokens wait for the end of their character
    for number in ids:
        try:
            text = stream.step(tokenizer, number)
        except Exception:  # tokenizers says so when bytes before it make no character
            texts[complete:] = _spelled(tokenizer, ids[complete:len(texts)])
            stream = DecodeStream(skip_special_tokens=False)
            text = stream.step(tokenizer, number)
        texts.append(text or "")
        if text:
            complete = len(texts)
    return texts[:complete] + _spelled(tokenizer, ids[complete:])


def _spelled(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Tokens as the vocabulary has them."""
    return [tokenizer.id_to_token(number) or f"{number} " for number in ids]


def printable(text: str) -> str:
    """The text with what is no printable character escaped, line breaks aside: none of it acts on the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _content(message: Message) -> str:
    rest = {name: value for name, value in message.items() if name not in ("role", "content")}
    return _plain(message.get("content") or "") + (f"\n{_plain(rest)}" if rest else "")


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
