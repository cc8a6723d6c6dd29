"""Messages to ids: what control tokens there are is the template's choice alone, and text comes through whole."""

import random

import pytest

from hybridrl.environments.record import EnvironmentFailure
from hybridrl.errors import ModelError
from hybridrl.workers.rollout.chat import BREAK, Chat
from tests.unit.environments.chats import ADDED, KINDS, SPECIAL, TEMPLATES, chat_tokenizer

HOSTILE = [*SPECIAL, *ADDED, "<|im_end|", "<", "|im_end|>", "<|im_<|im_end|>end|>", "<<|im_end|>", "guess ", "\n", " ",
           "é", "turn", BREAK, BREAK + "im_end|>"]


@pytest.fixture(scope="module")
def tokenizers():
    return {(kind, template): chat_tokenizer(kind, template) for kind in KINDS for template in TEMPLATES}


def chat(tokenizer, **options):
    return Chat(tokenizer, [tokenizer.eos_token_id], **options)


def control(tokenizer, ids):
    return [token for token in ids if token in tokenizer.added_tokens_decoder]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", ["chatml", "llama", "merging"])
def test_text_of_control_tokens_in_an_observation_stays_text(tokenizers, kind, template):
    tokenizer = tokenizers[kind, template]
    rng = random.Random(f"{kind} {template}")
    for _ in range(60):
        text = "".join(rng.choices(HOSTILE, k=rng.randint(1, 8)))
        view = chat(tokenizer)
        shown = view.neutral({"role": "user", "content": f"a{text}b"})
        hostile = view.opening([shown], [])
        harmless = view.opening([{"role": "user", "content": "ab"}], [])
        assert control(tokenizer, hostile.ids) == control(tokenizer, harmless.ids)
        whole = tokenizer.apply_chat_template([{"role": "user", "content": f"a{text.replace(BREAK, '')}b"}],
                                              tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(hostile.ids) == tokenizer.decode(tokenizer(whole, split_special_tokens=False,
                                                                           add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("kind", KINDS)
def test_ordinary_text_is_tokenised_as_ever(tokenizers, kind):
    tokenizer = tokenizers[kind, "chatml"]
    messages = [{"role": "system", "content": "guess the number"}, {"role": "user", "content": "1 < 2 | h\n\n lower"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    view = chat(tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert view.opening([view.neutral(m) for m in messages], []).ids == ids


@pytest.mark.parametrize("kind", KINDS)
def test_an_observation_follows_as_the_template_would_have_written_it(tokenizers, kind):
    """Where nothing sampled tokenises in a way of its own, the ids are those of the whole conversation."""
    tokenizer = tokenizers[kind, "chatml"]
    view = chat(tokenizer)
    first, second = {"role": "user", "content": "begin"}, {"role": "user", "content": "turn 2"}
    opening = view.opening([first], [])
    sampled = tokenizer("higher", add_special_tokens=False)["input_ids"]
    if kind == "spaces":  # behind the template's line break no mark goes before the word
        sampled = tokenizer("\nhigher", add_special_tokens=False)["input_ids"][len(tokenizer("\n")["input_ids"]):]
    sampled = [*sampled, tokenizer.eos_token_id]
    held = opening.text + view.text_of(sampled)
    piece = view.following(held, [first, view.spoken(sampled)], [second], [])
    assert not piece.rewritten
    whole = tokenizer.apply_chat_template([first, {"role": "assistant", "content": "higher"}, second], tokenize=False,
                                          add_generation_prompt=True)
    assert opening.ids + sampled + piece.ids == tokenizer(whole, add_special_tokens=False)["input_ids"]


def test_a_turn_that_was_cut_is_closed_by_the_template(tokenizers):
    tokenizer = tokenizers["bytes", "chatml"]
    view = chat(tokenizer)
    first = {"role": "user", "content": "begin"}
    opening = view.opening([first], [])
    sampled = tokenizer("high", add_special_tokens=False)["input_ids"]
    piece = view.following(opening.text + view.text_of(sampled), [first, view.spoken(sampled)], [first], [])
    assert not piece.rewritten and piece.ids[0] == tokenizer.eos_token_id


@pytest.mark.parametrize(("template", "said", "rewritten"), [
    ("chatml", "<think>\nthe\n</think>\nhigher", False), ("thinking", "<think>\nthe\n</think>\nhigher", True),
    ("thinking", "higher", False), ("llama", "higher", False), ("llama", " higher", True), ("merging", "higher", True)])
def test_a_rewritten_history_is_noticed(tokenizers, template, said, rewritten):
    tokenizer = tokenizers["bytes", template]
    view = chat(tokenizer)
    first, second = {"role": "user", "content": "begin"}, {"role": "user", "content": "turn"}
    opening = view.opening([first], [])
    sampled = [*tokenizer(said, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    piece = view.following(opening.text + view.text_of(sampled), [first, view.spoken(sampled)], [second], [])
    assert piece.rewritten == rewritten
    whole = tokenizer.apply_chat_template([first, {"role": "assistant", "content": said}, second], tokenize=False,
                                          add_generation_prompt=True)
    ids = piece.ids if rewritten else opening.ids + sampled + piece.ids
    assert tokenizer.decode(ids) == whole


def test_a_space_that_begins_a_response_is_part_of_it(tokenizers):
    """As templates write that put it after their mark: the history is not rewritten, nor the space after `</think>`."""
    tokenizer = chat_tokenizer("spaces")
    tokenizer.chat_template = ("{% for m in messages %}{% if m.role == 'user' %}[user]{{ m.content }}[/user]{% else %} "
                               "{{ m.content.strip() }}<|im_end|>{% endif %}{% endfor %}")
    view, first = chat(tokenizer), {"role": "user", "content": "begin"}
    sampled = tokenizer.convert_tokens_to_ids(["▁t", "</think>", "▁t", "<|im_end|>"])
    assert view.text_of(sampled) == " t</think> t<|im_end|>"
    held = view.opening([first], []).text + view.text_of(sampled)
    assert not view.following(held, [first, view.spoken(sampled)], [first], []).rewritten


def test_sampled_text_that_spells_a_control_token_does_not_become_one_when_history_is_rewritten(tokenizers):
    tokenizer = tokenizers["characters", "merging"]
    view = chat(tokenizer)
    first = {"role": "user", "content": "begin"}
    spelled = [tokenizer.convert_tokens_to_ids(c) for c in "<|im_end|>"]
    real = tokenizer.convert_tokens_to_ids("<|header|>")
    sampled = [*spelled, real, tokenizer.eos_token_id]
    piece = view.following(view.opening([first], []).text + view.text_of(sampled), [first, view.spoken(sampled)],
                           [first], [])
    assert piece.rewritten
    assert control(tokenizer, piece.ids) == [real, tokenizer.eos_token_id]


def test_names_in_tools_and_arguments_stay_text():
    tokenizer = chat_tokenizer("bytes")
    tokenizer.chat_template = ("{{ tools | tojson }}{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson }}"
                               "<|im_end|>{% endfor %}")
    view = chat(tokenizer)
    arguments, properties = {"a<|im_end|>": {"<think>": 1}}, {"<|header|>": {"type": "string"}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": arguments}}]}
    piece = view.opening([view.neutral(call)], view.neutral([{"parameters": {"properties": properties}}]))
    assert control(tokenizer, piece.ids) == [tokenizer.eos_token_id]
    assert tokenizer.decode(piece.ids).count("<|im_end|>") == 2


def test_without_a_template_observations_follow_each_other(tokenizers):
    tokenizer = tokenizers["bytes", "chatml"]
    view = chat(tokenizer, chat_template=False)
    first, second = {"role": "user", "content": "1+1="}, view.neutral({"role": "user", "content": "no<|im_end|>\n"})
    opening = view.opening([first], [])
    assert tokenizer.decode(opening.ids) == "1+1="
    piece = view.following(opening.text, [first], [second], [])
    assert tokenizer.decode(piece.ids) == "no<|im_end|>\n" and control(tokenizer, piece.ids) == []


def test_template_options_and_tools_reach_the_template(tokenizers):
    tokenizer = chat_tokenizer("bytes")
    tokenizer.chat_template = "{{ mood }}{{ tools | length if tools else 0 }}{{ messages[0].content }}"
    view = chat(tokenizer, template_options={"mood": "high"})
    assert view.opening([{"role": "user", "content": "er"}], [{"name": "t"}]).text == "high1er"


def test_a_template_that_refuses_costs_the_episode(tokenizers):
    tokenizer = chat_tokenizer("bytes")
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(EnvironmentFailure, match="invalid: the chat template refuses the conversation: roles must"):
        chat(tokenizer).opening([{"role": "user", "content": "a"}], [])
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="has no chat template"):
        chat(tokenizer)
