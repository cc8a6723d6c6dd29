"""Data: sources, rendering, malformed rows, the loader's order and its resumption."""

import json
import logging
import sys

import datasets
import pyarrow
import pytest
import reasoning_gym
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hybridrl.batch import rows_of
from hybridrl.config import DataConfig
from hybridrl.data import PromptLoader, PromptSet, load_examples, load_prompts, row_seeds
from hybridrl.errors import ConfigError, DataError, ModelError
from tests.models import tiny_tokenizer

WORDS = ["<unk>", "<eos>", "<bos>", "<user>", "<system>", "<assistant>", "foo", "bar", "foobar", "be", "kind", "x"]
ID = {word: i for i, word in enumerate(WORDS)}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'odd' %}{{ raise_exception('no such role') }}{% endif %}"
    "<{{ m.role }}> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(template: str | None = TEMPLATE, post: str | None = None, unk: str | None = "<unk>"):
    """One token a word; `post` is what surrounds a text ($A) when special tokens are asked for."""
    core = Tokenizer(models.WordLevel(ID, unk_token=unk) if unk else models.BPE(ID, []))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if post:
        core.post_processor = processors.TemplateProcessing(single=post, special_tokens=[("<bos>", 2), ("<eos>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", bos_token="<bos>")
    tokenizer.name_or_path = "some/folder"
    tokenizer.chat_template = template
    return tokenizer


def ids(text: str) -> list[int]:
    return [ID[word] for word in text.split()]


def write_jsonl(folder, rows, name="data.jsonl") -> str:
    path = folder / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def config(path: str = "", **options) -> DataConfig:
    return DataConfig(path=path, **options)


# Sources and rendering


def test_a_text_prompt_is_rendered_as_a_users_message_with_the_assistants_opening(tmp_path):
    path = write_jsonl(tmp_path, [{"prompt": "foo bar", "answer": 7, "level": 3}])
    found = load_prompts(config(path, system_prompt="be kind"), make_tokenizer(), 100)
    batch = found.batch([0])
    assert batch["prompt_ids"][0].tolist() == ids("<system> be kind <user> foo bar <assistant>")
    assert rows_of(batch["prompt"]) == ["foo bar"]
    assert rows_of(batch["answer"]) == [7]
    assert rows_of(batch["task"]) == [{"prompt": "foo bar", "answer": 7, "level": 3}]
    assert batch["group_ids"].tolist() == [0]
    assert found.counts == {"rows": 1, "overlong": 0, "malformed": 0}


def test_chat_messages_are_rendered_as_they_are(tmp_path):
    messages = [{"role": "user", "content": "foo"}, {"role": "assistant", "content": "bar"},
                {"role": "user", "content": "kind"}]
    path = write_jsonl(tmp_path, [{"prompt": messages, "answer": "x"}])
    batch = load_prompts(config(path, system_prompt="be"), make_tokenizer(), 100).batch([0])
    assert batch["prompt_ids"][0].tolist() == ids("<user> foo <assistant> bar <user> kind <assistant>")
    assert rows_of(batch["prompt"]) == [messages]


def test_parquet_and_saved_datasets_read_as_jsonl_does(tmp_path):
    rows = [{"q": [{"role": "user", "content": word}], "a": i} for i, word in enumerate(["foo", "bar", "be"] * 500)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "folder")
    paths = {"jsonl": write_jsonl(tmp_path, rows), "parquet": str(tmp_path / "data.parquet"),
             "dataset": str(tmp_path / "folder")}
    found = {source: load_prompts(config(path, source=source, prompt_field="q", answer_field="a"), make_tokenizer(), 9)
             for source, path in paths.items()}
    assert [len(prompts) for prompts in found.values()] == [1500] * 3
    assert found["jsonl"].tasks == found["parquet"].tasks == found["dataset"].tasks == rows
    assert len({prompts.fingerprint for prompts in found.values()}) == 1
    assert found["parquet"].prompt_ids[1499].tolist() == ids("<user> be <assistant>")


def test_nulls_that_columnar_files_fill_in_do_not_reach_the_template(tmp_path):
    template = "{% for m in messages %}{% if m.name is defined %}bar{% else %}foo{% endif %} {% endfor %}"
    rows = [{"prompt": [{"role": "user", "content": "x", "name": "y"}]}, {"prompt": [{"role": "user", "content": "x"}]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    found = load_prompts(config(str(tmp_path / "data.parquet"), source="parquet", answer_field=""),
                         make_tokenizer(template), 9)
    assert [row.tolist() for row in found.prompt_ids] == [ids("bar"), ids("foo")]


def test_reasoning_gym_problems_carry_their_entry():
    cfg = config(source="reasoning_gym", task="chain_sum", task_size=5, task_seed=3, task_options={"max_terms": 2})
    found = load_prompts(cfg, make_tokenizer(), 100)
    expected = list(reasoning_gym.create_dataset("chain_sum", size=5, seed=3, max_terms=2))
    assert found.prompts == [entry["question"] for entry in expected]
    assert found.answers == [entry["answer"] for entry in expected]
    assert found.tasks == [entry | {"task_options": {"max_terms": 2}} for entry in expected]


def test_rows_without_data_have_a_seed_each():
    found = load_prompts(config(source="none", task_size=3, task_seed=40), tiny_tokenizer(), 100)
    assert [task["seed"] for task in found.tasks] == [41, 42, 43] and found.answers == [None] * 3
    trained = load_prompts(config(source="none", task_size=2, task_seed=41), tiny_tokenizer(), 100)
    assert [task["seed"] for task in found.held_out(trained).tasks] == [41]


def test_reasoning_gym_answers_may_be_none():
    found = load_prompts(config(source="reasoning_gym", task="graph_color", task_size=2), make_tokenizer(), 10_000)
    assert found.answers == [None, None]


def test_rows_of_no_source_are_numbered():
    found = load_prompts(config(source="none", task_size=3, task_seed=10, chat_template=False), make_tokenizer(), 100)
    assert found.prompts == ["Task 11.", "Task 12.", "Task 13."] and found.answers == [None] * 3
    assert [row["number"] for row in found.tasks] == [11, 12, 13]


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r'data.task=chain_sum needs .* pip install "hybridrl\[tasks\]"'):
        load_prompts(config(source="reasoning_gym", task="chain_sum"), make_tokenizer(), 100)


@pytest.mark.parametrize(("changes", "message"), [
    ({"task": "chain_sun"}, r"^data\.task: Unknown reasoning_gym task 'chain_sun'\. Did you mean chain_sum"),
    ({"task_options": {"max_term": 2}}, r"^data\.task_options: Unknown option of chain_sum 'max_term'\. Did you mean "),
    ({"task_options": {"seed": 2}}, r"^data\.task_options: Unknown option of chain_sum 'seed'\."),
    ({"task_options": {"min_terms": 0}}, r"^data\.task_options: chain_sum refuses \{'min_terms': 0\}: "),
])
def test_reasoning_gym_tasks_and_options_are_checked(changes, message):
    options = {"source": "reasoning_gym", "task": "chain_sum"} | changes
    with pytest.raises(ConfigError, match=message):
        load_prompts(config(**options), make_tokenizer(), 100)


def test_without_a_template_text_gets_the_tokenizers_special_tokens_but_stays_open(tmp_path):
    path = write_jsonl(tmp_path, [{"prompt": "foo bar"}, {"prompt": "kind"}])
    cfg = config(path, chat_template=False, answer_field="")
    for post, before in [(None, []), ("<bos> $A", ["<bos>"]), ("<bos> $A <eos>", ["<bos>"])]:
        found = load_prompts(cfg, make_tokenizer(template=None, post=post), 100)
        assert [row.tolist() for row in found.prompt_ids] == [ids(" ".join([*before, text]))
                                                              for text in ("foo bar", "kind")]
    assert rows_of(found.batch([0, 1])["answer"]) == [None, None]


def test_a_rendered_template_gets_no_further_special_tokens(tmp_path):
    path = write_jsonl(tmp_path, [{"prompt": "foo", "answer": 1}])
    found = load_prompts(config(path), make_tokenizer(post="<bos> $A <eos>"), 100)
    assert found.prompt_ids[0].tolist() == ids("<user> foo <assistant>")


def test_a_missing_chat_template_is_an_error_that_says_what_to_do(tmp_path):
    path = write_jsonl(tmp_path, [{"prompt": "foo", "answer": 1}])
    with pytest.raises(ModelError, match=r"some/folder has no chat template: .*eval_data\.chat_template=false"):
        load_prompts(config(path), make_tokenizer(template=None), 100, key="eval_data")


# Rows left out


def test_prompts_over_the_limit_are_left_out_and_counted(tmp_path, caplog):
    # Rendered lengths 3, 5 and 4.
    path = write_jsonl(tmp_path, [{"prompt": p, "answer": 1} for p in ("foo", "foo foo foo", "bar bar")])
    with caplog.at_level(logging.WARNING):
        found = load_prompts(config(path), make_tokenizer(), 4)
    assert found.prompts == ["foo", "bar bar"]
    assert found.counts == {"rows": 2, "overlong": 1, "malformed": 0}
    assert "1 of 3 rows left out: 1 over 4 tokens" in caplog.text


MALFORMED = {
    '{"prompt": "foo"': r"not JSON: ",
    "[1]": r"must be a JSON object, got list\.",
    '{"promt": "foo", "answer": 1}': r"field 'prompt' is missing\. Did you mean promt\? Fields: answer, promt\.",
    '{"prompt": null, "answer": 1}': r"field 'prompt' is null\.",
    '{"prompt": 5, "answer": 1}': r"field 'prompt' must be text or a list of chat messages, got int\.",
    '{"prompt": " ", "answer": 1}': r"field 'prompt' is empty\.",
    '{"prompt": "a\\ud800", "answer": 1}': r"field 'prompt' is no valid Unicode text: surrogates not allowed\.",
    '{"prompt": [{"role": "user", "content": "\\ud800"}], "answer": 1}': r"field 'prompt' is no valid Unicode text",
    "[" * 100_000: r"not JSON: ",
    '{"prompt": [], "answer": 1}': r"field 'prompt' is empty\.",
    '{"prompt": ["hi"], "answer": 1}': r"field 'prompt', message 1 must be an object with .* content, got hi\.",
    '{"prompt": [{"role": "user"}], "answer": 1}': r"field 'prompt', message 1 must be an object",
    '{"prompt": [{"role": "user", "content": ["foo"]}], "answer": 1}': r"field 'prompt', message 1 must be an object",
    '{"prompt": [{"role": "assistant", "content": "a"}], "answer": 1}': r"field 'prompt' ends with an assistant turn",
    '{"prompt": [{"role": "odd", "content": "a"}], "answer": 1}': r"the chat template refuses the prompt: no such role",
    '{"prompt": "foo"}': r"field 'answer' is missing\. Fields: prompt\.",
    '{"prompt": "foo", "answer": null}': r"field 'answer' is null\.",
}


@pytest.mark.parametrize("line", MALFORMED)
def test_a_malformed_row_is_named_or_skipped(tmp_path, line):
    good = {"prompt": "foo", "answer": 1}
    path = write_jsonl(tmp_path, [good, "", line, good])
    with pytest.raises(DataError, match=rf"data\.jsonl, row 3: {MALFORMED[line]}"):
        load_prompts(config(path), make_tokenizer(), 100)
    found = load_prompts(config(path, bad_rows="skip"), make_tokenizer(), 100)
    assert found.prompts == ["foo", "foo"]
    assert found.counts == {"rows": 2, "overlong": 0, "malformed": 1}


def test_bytes_that_are_no_utf8_are_a_malformed_row(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "foo", "answer": 1}\n{"prompt": "\xff", "answer": 1}\n')
    with pytest.raises(DataError, match=r"row 2: not JSON: "):
        load_prompts(config(str(path)), make_tokenizer(), 100)


def test_chat_messages_need_a_template(tmp_path):
    path = write_jsonl(tmp_path, [{"prompt": [{"role": "user", "content": "foo"}], "answer": 1}])
    with pytest.raises(DataError, match=r"row 1: field 'prompt' holds chat messages, which need chat_template=true"):
        load_prompts(config(path, chat_template=False), make_tokenizer(), 100)


def test_a_prompt_without_any_token_is_malformed(tmp_path):
    # Without an unknown token, and with "x" as the only letter of its vocabulary.
    path = write_jsonl(tmp_path, [{"prompt": "x", "answer": 1}, {"prompt": "y", "answer": 1}])
    with pytest.raises(DataError, match=r"row 2: the prompt has no token"):
        load_prompts(config(path, chat_template=False), make_tokenizer(unk=None), 100)


@pytest.mark.parametrize(("rows", "message"), [
    ([], r"data\.jsonl is empty: it has no rows\."),
    (["", " "], r"data\.jsonl is empty: it has no rows\."),
    ([{"prompt": "foo foo foo", "answer": 1}, {"prompt": "foo foo foo foo", "answer": 1}],
     r"none of its 2 rows can be used: 2 over 4 tokens \(the shortest of them has 5, the longest 6\)\."),
    ([{"prompt": "foo foo foo", "answer": 1}, {"prompt": 1}],
     r"none of its 2 rows can be used: 1 over 4 tokens .*, 1 malformed \(the first: .*jsonl, row 2: field 'prompt'"),
])
def test_a_source_without_a_usable_row_is_an_error(tmp_path, rows, message):
    path = write_jsonl(tmp_path, rows)
    with pytest.raises(DataError, match=message):
        load_prompts(config(path, bad_rows="skip"), make_tokenizer(), 4)


# Files


def test_a_missing_file_names_its_neighbours(tmp_path):
    write_jsonl(tmp_path, [{}], name="train.jsonl")
    with pytest.raises(DataError, match=r"^data\.path: .*/trian\.jsonl does not exist\. Did you mean train\.jsonl\?"):
        load_prompts(config(str(tmp_path / "trian.jsonl")), make_tokenizer(), 4)
    with pytest.raises(DataError, match=r"^data\.path: .* does not exist, nor does its folder .*/nowhere\.$"):
        load_prompts(config(str(tmp_path / "nowhere" / "train.jsonl")), make_tokenizer(), 4)
    with pytest.raises(DataError, match=r"is a folder, a file is needed"):
        load_prompts(config(str(tmp_path)), make_tokenizer(), 4)


def test_a_missing_column_is_an_error_even_when_bad_rows_are_skipped(tmp_path):
    rows = [{"question": "foo", "answer": 1}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "folder")
    for source, name in [("parquet", "data.parquet"), ("dataset", "folder")]:
        cfg = config(str(tmp_path / name), source=source, prompt_field="questions", bad_rows="skip")
        with pytest.raises(DataError, match=rf"{name}: field 'questions' is missing\. Did you mean question\?"):
            load_prompts(cfg, make_tokenizer(), 4)


def test_rows_of_columnar_files_are_numbered_from_one(tmp_path):
    rows = [{"prompt": "foo", "answer": 1}, {"prompt": None, "answer": 1}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "folder")
    for source, name in [("parquet", "data.parquet"), ("dataset", "folder")]:
        with pytest.raises(DataError, match=rf"{name}, row 2: field 'prompt' is null\."):
            load_prompts(config(str(tmp_path / name), source=source), make_tokenizer(), 4)


def test_damaged_files_are_named(tmp_path):
    (tmp_path / "data.parquet").write_bytes(b"PAR1 but not for long")
    with pytest.raises(DataError, match=r"can't read .*data\.parquet as Parquet"):
        load_prompts(config(str(tmp_path / "data.parquet"), source="parquet"), make_tokenizer(), 4)
    with pytest.raises(DataError, match=r"is no folder made by a dataset's save_to_disk"):
        load_prompts(config(str(tmp_path), source="dataset"), make_tokenizer(), 4)


def test_a_folder_of_splits_asks_for_one(tmp_path):
    rows = datasets.Dataset.from_list([{"prompt": "foo", "answer": 1}])
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "folder")
    with pytest.raises(DataError, match=r"holds several splits; name one of .*folder/train, .*folder/test\."):
        load_prompts(config(str(tmp_path / "folder"), source="dataset"), make_tokenizer(), 4)
    assert len(load_prompts(config(str(tmp_path / "folder" / "test"), source="dataset"), make_tokenizer(), 4)) == 1


# Examples for SFT


def test_a_response_is_tokenised_apart_from_its_prompt(tmp_path):
    # "foo" and "bar" joined would be the one token "foobar".
    path = write_jsonl(tmp_path, [{"prompt": "foo", "response": "bar"}, {"prompt": "be", "response": "kind <eos>"}])
    found = load_examples(config(path, chat_template=False), make_tokenizer(template=None, post="<bos> $A <eos>"), 9)
    batch = found.batch([0, 1])
    assert [row.tolist() for row in rows_of(batch["prompt_ids"])] == [ids("<bos> foo"), ids("<bos> be")]
    assert [row.tolist() for row in rows_of(batch["response_ids"])] == [ids("bar <eos>"), ids("kind <eos>")]
    assert [row.tolist() for row in rows_of(batch["response_mask"])] == [[True, True]] * 2
    assert batch["response_mask"].dtype == torch.bool


def test_messages_that_end_with_the_assistants_turn_are_an_example(tmp_path):
    messages = [{"role": "user", "content": "foo"}, {"role": "assistant", "content": "bar"}]
    path = write_jsonl(tmp_path, [{"chat": messages}, {"chat": messages[:1], "reply": "kind"}])
    found = load_examples(config(path, prompt_field="chat", response_field="reply"), make_tokenizer(), 9)
    assert [row.tolist() for row in found.prompt_ids] == [ids("<user> foo <assistant>")] * 2
    assert [row.tolist() for row in found.response_ids] == [ids("bar <eos>"), ids("kind <eos>")]


def test_the_limit_of_an_example_counts_prompt_and_response(tmp_path):
    # 3 prompt tokens each; responses of 2 and 3 with the end token.
    path = write_jsonl(tmp_path, [{"prompt": "foo", "response": "bar"}, {"prompt": "foo", "response": "bar bar"}])
    found = load_examples(config(path), make_tokenizer(), 5)
    assert found.counts == {"rows": 1, "overlong": 1, "malformed": 0}
    assert found.response_ids[0].tolist() == ids("bar <eos>")


@pytest.mark.parametrize(("row", "message"), [
    ({"prompt": "foo", "respons": "x"}, r"field 'response' is missing\. Did you mean respons\?"),
    ({"prompt": "foo", "response": 3}, r"field 'response' must be text, got int"),
    ({"prompt": "foo", "response": ""}, r"field 'response' is empty"),
    ({"prompt": [{"role": "assistant", "content": "x"}]}, r"field 'prompt' has no turn before the assistant's"),
    ({"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]}, r".* ends with an empty"),
])
def test_malformed_examples_are_named(tmp_path, row, message):
    with pytest.raises(DataError, match=rf"row 1: {message}"):
        load_examples(config(write_jsonl(tmp_path, [row])), make_tokenizer(), 9)


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match=r"some/folder has no end-of-sequence token"):
        load_examples(config(write_jsonl(tmp_path, [{"prompt": "foo", "response": "bar"}])), tokenizer, 9)


# The loader


def prompt_set(tmp_path, num: int, answer: int = 0) -> PromptSet:
    rows = [{"prompt": "foo", "answer": answer + i} for i in range(num)]
    return load_prompts(config(write_jsonl(tmp_path, rows)), make_tokenizer(), 9)


def drawn(loader: PromptLoader, sizes: list[int]) -> list[int]:
    return [answer for size in sizes for answer in rows_of(loader.next_batch(size)["answer"])]


def test_without_shuffling_rows_come_in_file_order_across_epochs(tmp_path):
    loader = PromptLoader(prompt_set(tmp_path, 3), seed=0, shuffle=False)
    assert drawn(loader, [2, 2, 5]) == [0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert loader.next_batch(2)["group_ids"].tolist() == [9, 10]
    assert loader.state_dict()["epoch"] == 3


def test_each_epoch_has_every_row_once_in_an_order_of_its_own(tmp_path):
    prompts = prompt_set(tmp_path, 20)
    rows = drawn(PromptLoader(prompts, seed=5), [7] * 6)
    first, second = rows[:20], rows[20:40]
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second and first != list(range(20))
    assert drawn(PromptLoader(prompts, seed=5), [40])[:20] == first
    assert drawn(PromptLoader(prompts, seed=6), [20]) != first


@pytest.fixture(scope="module")
def seven_prompts(tmp_path_factory):
    return prompt_set(tmp_path_factory.mktemp("data"), 7)


@given(before=st.lists(st.integers(0, 16), max_size=4), after=st.lists(st.integers(0, 16), max_size=4),
       shuffle=st.booleans())
def test_a_resumed_loader_goes_on_as_the_stopped_one_would(seven_prompts, before, after, shuffle):
    unbroken, resumed = (PromptLoader(seven_prompts, seed=1, shuffle=shuffle) for _ in range(2))
    drawn(unbroken, before)
    resumed.load_state_dict(json.loads(json.dumps(unbroken.state_dict())))
    for size in after:
        a, b = unbroken.next_batch(size), resumed.next_batch(size)
        assert rows_of(a["answer"]) == rows_of(b["answer"])
        assert a["group_ids"].tolist() == b["group_ids"].tolist()


def test_a_state_of_other_data_is_refused(tmp_path):
    state = PromptLoader(prompt_set(tmp_path, 3), seed=0).state_dict()
    with pytest.raises(DataError, match=r"rows was 3 when saved and is 4 now"):
        PromptLoader(prompt_set(tmp_path, 4), seed=0).load_state_dict(state)
    with pytest.raises(DataError, match=r"fingerprint was "):
        PromptLoader(prompt_set(tmp_path, 3, answer=1), seed=0).load_state_dict(state)
    with pytest.raises(DataError, match=r"seed was 0 when saved and is 2 now"):
        PromptLoader(prompt_set(tmp_path, 3), seed=2).load_state_dict(state)


def splitmix(state: int) -> int:
    """The finaliser in plain integers, as published."""
    mask = 2**64 - 1
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
    return state ^ (state >> 31)


def test_row_seeds_are_the_published_hash_and_do_not_depend_on_the_number_of_rows():
    def expected(seed, step, row):
        state = 0
        for word in (seed, step, 1, row):
            state = splitmix((state + word + 0x9E3779B97F4A7C15) % 2**64)
        return state >> 1

    assert row_seeds(3, 2, 4).tolist() == [expected(3, 2, row) for row in range(4)]
    assert row_seeds(3, 2, 2).tolist() == row_seeds(3, 2, 4).tolist()[:2]
    assert row_seeds(-1, 0, 1).tolist() == [expected(-1, 0, 0)]
    assert row_seeds(0, 0, 0).shape == (0,) and row_seeds(0, 0, 0).dtype == torch.int64


def test_row_seeds_differ_between_rows_steps_and_runs():
    seeds = torch.cat([row_seeds(seed, step, 256) for seed in range(4) for step in range(4)])
    assert len(seeds.unique()) == len(seeds)
    assert (seeds >= 0).all()


def test_held_out_leaves_out_what_was_trained_on_and_repeats(tmp_path):
    def prompts(name, texts):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"prompt": text, "answer": text.upper()}) + "\n" for text in texts))
        cfg = DataConfig(path=str(file), chat_template=False)
        return load_prompts(cfg, tiny_tokenizer(), 10)

    trained = prompts("trained", ["a", "b"])
    kept = prompts("offered", ["c", "a", "d", "c", "a"]).held_out(trained)
    assert (kept.prompts, kept.answers, kept.response_ids) == (["c", "d"], ["C", "D"], [])
    again = prompts("again", ["c", "d"])
    assert [ids.tolist() for ids in kept.prompt_ids] == [ids.tolist() for ids in again.prompt_ids]
    assert kept.counts == {"rows": 2, "overlong": 0, "malformed": 0, "trained": 2, "repeated": 1}
    assert kept.batch(range(2))["answer"] == ["C", "D"]
    with pytest.raises(DataError, match="none of the 2 evaluation prompts is held out"):
        trained.held_out(trained)
