"""The demo's problems: what the files hold, and that nothing is in two of them."""

import json

import pytest

from recipes.demo import make_data
from recipes.demo.make_model import CHARACTERS, make_model, make_tokenizer


@pytest.mark.parametrize("a, b, slip", [
    (347, 485, 722), (629, 563, 1182), (120, 304, 424), (58, 67, 115), (5, 999, 994), (8, 7, 15), (0, 0, 0),
])
def test_forget_carries_by_hand(a, b, slip):
    assert make_data.forget_carries(a, b) == make_data.forget_carries(b, a) == slip


def test_problems_are_disjoint_and_the_committed_files_are_what_is_made(tmp_path):
    make_data.main(tmp_path)
    rows = {name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()] for name in make_data.ROWS}
    terms = {name: [tuple(sorted(map(int, row["prompt"].split("+")))) for row in rows[name]] for name in rows}
    everything = [pair for pairs in terms.values() for pair in pairs]
    assert len(set(everything)) == len(everything) == 22_500
    folder = make_data.Path(make_data.__file__).parent
    for name in ("train", "heldout"):
        assert all(int(row["answer"]) == sum(pair) for row, pair in zip(rows[name], terms[name], strict=True))
        assert all(100 <= term <= 999 for pair in terms[name] for term in pair)
        assert (folder / f"{name}.jsonl").read_bytes() == (tmp_path / f"{name}.jsonl").read_bytes()
    right = sum(int(row["answer"]) == sum(pair) for row, pair in zip(rows["sft"], terms["sft"], strict=True))
    slips = [int(row["answer"]) == make_data.forget_carries(*pair)
             for row, pair in zip(rows["sft"], terms["sft"], strict=True) if int(row["answer"]) != sum(pair)]
    assert all(slips)
    assert 0.4 < right / 20_000 < 0.6  # a quarter of the sums with a carry, and all without one


def test_tokenizer_keeps_every_character_and_ends_turns():
    tokenizer = make_tokenizer()
    assert tokenizer.decode(tokenizer(CHARACTERS).input_ids, skip_special_tokens=True) == CHARACTERS
    assert tokenizer("é").input_ids == tokenizer("?").input_ids
    chat = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}]
    assert tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True) == "<user>1+2<assistant>"
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    assert tokenizer(rendered).input_ids[-2:] == [tokenizer.convert_tokens_to_ids("3"), tokenizer.eos_token_id]
    assert tokenizer(rendered).input_ids[0] == tokenizer.convert_tokens_to_ids("<user>")


def test_untrained_model_depends_on_the_seed_only():
    first, again, other = make_model(101), make_model(101), make_model(101, seed=1)
    assert first.lm_head.weight.equal(again.lm_head.weight)
    assert not first.lm_head.weight.equal(other.lm_head.weight)
    assert sum(parameter.numel() for parameter in first.parameters()) == 866_048
