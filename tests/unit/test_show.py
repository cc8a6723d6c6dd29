"""`hybridrl show`: what a run saves of its responses, and what of that is printed. Run folders are written by hand."""

import io
import json
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Sequence
from tokenizers.models import WordLevel

from hybridrl.__main__ import main
from hybridrl.batch import make_batch, put
from hybridrl.controller.samples import samples_of
from hybridrl.errors import DataError
from hybridrl.samples import Token, Turn, read_samples
from hybridrl.show import marked, show, texts_of

OLD = {"step": 1, "prompt": "1+1=", "response": "3", "answer": "2", "reward_error": None, "finish_reason": "stop",
       "reward": 0.0, "weight_versions": [1]}
"""A line as it was before tokens were written."""
EPISODE = {
    "step": 2, "prompt": None, "response": "4 6", "finish_reason": "done", "agent": "agent", "reward": 1.0,
    "reward_components": {"won": 1.0, "brevity": -0.5}, "weight_versions": [-1, 1, 2],
    "turns": [
        {"start": 0, "stop": 2, "observation": [{"role": "user", "content": "guess my number"}], "action": "4",
         "info": {"distance": 2}, "state": None, "reward": 0.25},
        {"start": 4, "stop": 6, "observation": [{"role": "user", "content": "higher"}], "action": "6", "info": {},
         "state": None, "reward": 0.75}],
    "tokens": {"ids": [0, 1, 2, 3, 4, 1], "mask": [[True, 2], [False, 2], [True, 2]],
               "versions": [[1, 2], [-1, 2], [1, 1], [2, 1]], "log_prob_gaps": [0.0, 0.25, 0.0, 0.0, -0.05, None]},
}
WORDS = {"4": 0, "<end>": 1, "higher": 2, "\n": 3, "6": 4, "<0xC3>": 5, "<0xA9>": 6, "?": 7}


def write(folder, *lines, tokenizer=True):
    folder.mkdir()
    (folder / "config.yaml").write_text("policy: {model: {path: nowhere}}")
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if tokenizer:
        (folder / "model").mkdir()
        rules = Tokenizer(WordLevel(WORDS, unk_token="?"))
        rules.decoder = Sequence([ByteFallback(), Fuse()])
        rules.save(str(folder / "model" / "tokenizer.json"))
    return folder


def printed(*args, **options):
    out = io.StringIO()
    show(*args, **options, console=Console(file=out, width=100, highlight=False))
    return out.getvalue()


def rows(text):
    return [line.split() for line in text.splitlines()[1:]]


# ---- what a run writes


def batch():
    made = make_batch(
        prompt=["a", "b"], response=["x", "y"], rewards=[1.0, float("nan")],
        response_ids=[[5, 6, 7], [8]], response_mask=[[True, False, True], [True]],
        weight_versions=[[3, -1, 4], [4]], rollout_log_probs=[[-1.0, 0.0, -2.0], [float("-inf")]])
    put(made, "reward/won", torch.tensor([0.5, float("nan")]))
    return made


def test_a_sample_has_its_tokens_as_runs():
    (sample,) = samples_of(7, batch(), [0])
    assert sample == {
        "step": 7, "prompt": "a", "response": "x", "reward": 1.0, "reward_components": {"won": 0.5},
        "weight_versions": [-1, 3, 4],
        "tokens": {"ids": [5, 6, 7], "mask": [[True, 1], [False, 1], [True, 1]],
                   "versions": [[3, 1], [-1, 1], [4, 1]]}}


def test_gaps_are_training_minus_rollout_and_zero_where_nothing_was_sampled():
    scored = batch()
    put(scored, "old_log_probs", [[-0.75, -9.0, -2.00004], [-1.0]])
    first, second = samples_of(7, scored, [0, 1])
    assert first["tokens"]["log_prob_gaps"] == [0.25, 0.0, 0.0]
    assert second["tokens"]["log_prob_gaps"] == [None]  # -1 - -inf
    assert second["reward"] is None and second["reward_components"] == {"won": None}
    assert json.loads(json.dumps(second, allow_nan=False)) == second


def test_an_empty_response_has_no_tokens():
    made = make_batch(response_ids=[[], [1]], response_mask=[[], [True]], weight_versions=[[], [1]])
    (sample,) = samples_of(1, made, [0])
    assert sample["tokens"] == {"ids": [], "mask": [], "versions": []}


def test_what_was_written_is_read_back(tmp_path):
    scored = batch()
    put(scored, "old_log_probs", [[-0.75, 0.0, -2.0], [-1.0]])
    run = write(tmp_path / "run", *samples_of(1, scored, range(2)))
    first, second = read_samples(run)
    assert first.tokens == [Token(5, True, 3, 0.25), Token(6, False, -1, 0.0), Token(7, True, 4, 0.0)]
    assert first.turns == [Turn([{"role": "user", "content": "a"}], "x", 0, 3, None)]
    assert (second.row, second.reward, second.tokens) == (1, None, [Token(8, True, 4, None)])


# ---- the table


def test_the_table_has_a_line_a_sample(tmp_path):
    failed = {"step": 2, "prompt": [{"role": "user", "content": "a\nlong " + 99 * "x"}], "reward": None, "turns": []}
    text = printed(write(tmp_path / "run", OLD, EPISODE, failed))
    assert rows(text)[:2] == [["1", "0", "0", "1", "-", "stop", "1+1="],
                              ["2", "0", "1", "2", "6", "done", "guess", "my", "number"]]
    assert rows(text)[2][:7] == ["2", "1", "-", "0", "-", "-", "a"]
    assert max(map(len, text.splitlines())) <= 100
    (line,) = rows(printed(write(tmp_path / "shown", EPISODE | {"prompt": "Task 1."})))
    assert line[6:] == ["guess", "my", "number"]  # what the environment showed, not the row of data


def test_on_a_narrow_terminal_the_prompt_alone_is_cut(tmp_path):
    run, out = write(tmp_path / "run", OLD | {"suite": "doubles", "prompt": "p" * 60}), io.StringIO()
    show(run, console=Console(file=out, width=60))
    (line,) = rows(out.getvalue())
    assert line[:-1] == ["1", "0", "0", "1", "-", "stop", "doubles"] and line[-1].endswith("p…")


def test_the_table_by_reward_and_of_one_step(tmp_path):
    lines = [{**OLD, "step": step, "reward": reward} for step, reward in ((1, 0.5), (1, None), (2, -1.0), (2, 2.0))]
    run = write(tmp_path / "run", *lines)
    assert [row[2] for row in rows(printed(run, sort="reward"))] == ["2", "0.5", "-1", "-"]
    assert [row[:3] for row in rows(printed(run, step=2))] == [["2", "0", "-1"], ["2", "1", "2"]]


def test_agents_have_a_column_where_there_are_several(tmp_path):
    text = printed(write(tmp_path / "run", OLD, {**EPISODE, "agent": "white"}))
    assert [row[6] for row in rows(text)] == ["-", "white"]


def test_suites_have_a_column_and_evaluations_a_file_of_their_own(tmp_path):
    run = write(tmp_path / "run", EPISODE)
    (run / "eval_samples.jsonl").write_text("".join(
        json.dumps(OLD | {"suite": name, "step": 10}) + "\n" for name in ("sums", "doubles")))
    assert "suite" not in printed(run)
    assert [line[5:7] for line in rows(printed(run, evaluation=True))] == [["stop", "sums"], ["stop", "doubles"]]
    assert "suite doubles" in printed(run, evaluation=True, row=1)


def test_cut_and_damaged_lines_are_left_out(tmp_path):
    run = write(tmp_path / "run", OLD)
    with open(run / "samples.jsonl", "a") as file:
        file.write('[1]\n{"step": null}\n' + json.dumps(EPISODE) + '\n{"step": 3, "pro')
    assert [sample.step for sample in read_samples(run)] == [1, 2]


# ---- one episode


def test_an_episode_turn_by_turn(tmp_path):
    assert printed(write(tmp_path / "run", OLD, EPISODE), row=0) == """\
step 2  row 0  reward 1  finish done  agent agent  weight versions 1, 2
reward components: won 1, brevity -0.5

user
guess my number

assistant, turn 1, reward 0.25
4
info: {"distance": 2}

user
higher

assistant, turn 2, reward 0.75
6
"""


def test_tokens_are_marked_by_mask_gap_and_version(tmp_path):
    text = printed(write(tmp_path / "run", EPISODE), row=0, tokens=True)
    assert text.splitlines()[2:] == [
        "6 tokens, 2 of them «not trained»; largest log-prob gap 0.2500 (token 1), [marked|] from 0.1 on",
        "", "user", "guess my number",
        "", "assistant, turn 1, reward 0.25", "<v1>4[<end>|+0.25]", 'info: {"distance": 2}',
        "", "assistant, turn 2, reward 0.75", "«higher\\n", "»6<v2><end>"]
    assert "«higher\\n\n»[6|-0.05]<v2><end>" in printed(tmp_path / "run", row=0, tokens=True, gap=0.05)


def test_colours_on_a_terminal_only():
    tokens = [Token(0, False, -1, 5.0), Token(1, True, 1, -1.0), Token(2, True, 1, 0.0)]
    text = marked(tokens, ["a", "b", "c"], 0.1, 0, 3)
    assert text.plain == "«a»<v1>[b|-1.00]c"  # the gap of a token that nobody sampled says nothing
    assert {text.plain[span.start:span.end]: span.style for span in text.spans} == {
        "«": "dim", "a": "dim", "»": "dim", "<v1>": "bold magenta", "[b|-1.00]": "black on yellow"}
    out = io.StringIO()
    Console(file=out, force_terminal=True, color_system="standard").print(text)
    assert "\x1b[" in out.getvalue()


def test_a_character_of_several_tokens_is_shown_once(tmp_path):
    line = {**OLD, "tokens": {"ids": [0, 5, 6, 4], "mask": [[True, 4]]}}
    text = printed(write(tmp_path / "run", line), row=0, tokens=True)
    assert "\n4é6\n" in text and "no log-prob gaps" in text


def test_bytes_that_make_no_character_are_spelled(tmp_path):
    run = write(tmp_path / "run", OLD)
    texts, problem = texts_of(run, [4, 5, 6, 5, 5, 4, 2, 5])
    assert not problem and texts[:3] == ["6", "", "é"] and texts[5:] == ["6", "higher", "<0xC3>"]
    assert all(text == "<0xC3>" or "\ufffd" in text for text in texts[3:5])


def test_without_a_tokenizer_ids_are_shown(tmp_path):
    text = printed(write(tmp_path / "run", EPISODE, tokenizer=False), row=0, tokens=True)
    assert "shown as ids, without a tokenizer: Model 'nowhere' is neither" in text
    assert "<v1>0 [1 |+0.25]" in text


def test_a_run_from_before_tokens_were_written(tmp_path):
    text = printed(write(tmp_path / "run", OLD, {"step": 1}), row=0, tokens=True)
    assert "before tokens were written" in text
    assert text.endswith("answer: 2\nNo tokens to show: the response is empty, or the run was made before tokens were "
                         "written.\n\nuser\n1+1=\n\nassistant, turn 1\n3\n")
    assert printed(tmp_path / "run", row=1).startswith("step 1  row 1")


def test_a_failed_episode_says_why(tmp_path):
    failed = {"step": 1, "prompt": "go", "turns": [], "reward": None, "reward_error": "died: exit 1", "response": "",
              "finish_reason": "failed", "tokens": {"ids": [], "mask": [], "versions": []}}
    assert printed(write(tmp_path / "run", failed), row=0) == (
        "step 1  row 0  reward -  finish failed\nno reward: died: exit 1\n\nuser\ngo\n")


def test_nothing_in_a_response_acts_on_the_terminal(tmp_path):
    evil = {**OLD, "prompt": "\x1b]0;t\x07", "response": "a\x1b[2Jb\ud800 [red]c[/red]"}
    run = write(tmp_path / "run", evil)
    text = printed(run) + printed(run, row=0)
    assert text.isprintable() or all(c.isprintable() or c == "\n" for c in text)
    assert "a\\x1b[2Jb\\ud800 [red]c[/red]" in text


# ---- what is refused, and the command


@pytest.mark.parametrize(("options", "message"), [
    ({"step": 3}, r"no samples of step 3; there are some of steps 1 to 2\."),
    ({"step": 1, "row": 1}, r"Step 1 has no row 1; it has row 0\."),
    ({"row": 2}, r"Step 2 has no row 2; it has rows 0 to 1\."),
    ({"row": -1}, r"Step 2 has no row -1"),
    ({"tokens": True}, "of one row: name it"),
])
def test_out_of_range(tmp_path, options, message):
    run = write(tmp_path / "run", OLD, EPISODE, EPISODE)
    with pytest.raises(DataError, match=message):
        show(run, **options)


def test_folders_without_samples(tmp_path):
    run = write(tmp_path / "run", OLD)
    with pytest.raises(DataError, match=f"none is no folder. Runs in {tmp_path}: {run}\\."):
        show(tmp_path / "none")
    with pytest.raises(DataError, match=f"is no run's folder: it has no samples.jsonl. Runs in {tmp_path}: {run}\\."):
        show(tmp_path)
    (run / "samples.jsonl").write_text("")
    with pytest.raises(DataError, match="no samples yet"):
        show(run)
    (run / "samples.jsonl").unlink()
    with pytest.raises(DataError, match=r"has no samples.jsonl; it has config.yaml, model\."):
        show(run)


def test_the_command(tmp_path, capsys):
    run = write(tmp_path / "run", OLD, EPISODE)
    main(["show", str(run), "--sort", "reward"])
    assert [row[:2] for row in rows(capsys.readouterr().out)] == [["2", "0"], ["1", "0"]]
    with pytest.raises(SystemExit, match=r"^hybridrl: There are no samples of step 9"):
        main(["show", str(run), "--step", "9"])


def test_the_command_as_a_module_in_a_pipe(tmp_path):
    run = write(tmp_path / "run", EPISODE)
    words = [sys.executable, "-m", "hybridrl", "show", str(run), "--row", "0", "--tokens"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "»6<v2><end>" in done.stdout and "\x1b" not in done.stdout
