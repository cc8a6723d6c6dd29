"""The products that a small model multiplies with a calculator."""

import json

from hybridrl.environments.environment import Action
from hybridrl.environments.tools.calls import Call, calls_in
from recipes.calculator import make_data


def test_the_committed_files_are_what_is_made_and_share_no_product(tmp_path):
    make_data.main(tmp_path)
    asked = []
    for name, count in make_data.ROWS.items():
        made = (tmp_path / f"{name}.jsonl").read_text()
        assert (make_data.Path(make_data.__file__).parent / f"{name}.jsonl").read_text() == made
        rows = [json.loads(line) for line in made.splitlines()]
        assert len(rows) == count
        for row in rows:
            a, b = row["prompt"][-1]["content"].removeprefix("What is ").removesuffix("?").split(" * ")
            assert int(row["answer"]) == int(a) * int(b)
            asked.append((a, b))
    assert len(set(asked)) == len(asked) == 264


def test_the_example_is_a_call_that_works():
    schemas = {"calculator": {"type": "object", "properties": {"expression": {"type": "string"}}}}
    _, call, result, answer = make_data.shown("12 * 31")
    assert calls_in(Action(call["content"]), "hermes", schemas) == [Call("calculator", {"expression": "12 * 31"})]
    assert result == {"role": "tool", "content": "372"} and answer["content"] == "372"
