"""The reward model on one rank: what it reads of a row, and scores against transformers on padded texts."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hybridrl.batch import make_batch, rows_of, select
from hybridrl.config import ModelConfig, RewardModelConfig
from hybridrl.errors import ConfigError, ModelError
from hybridrl.models import check_classifier, load_tokenizer, same_tokenizer
from hybridrl.workers.base import WorkerContext
from hybridrl.workers.reward_model import RewardModelWorker
from tests.models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("one_rank")
CPU = torch.device("cpu")
PROMPTS = ["1+2=", [{"role": "system", "content": "add"}, {"role": "user", "content": "3+4="}], "5+6="]
RESPONSES = ["3", "is it 7?", ""]


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A classifier whose tokenizer is not the policy's: another chat template, and `<eos>` is its padding."""
    folder = tiny_model(tmp_path_factory.mktemp("other"), "qwen3", seed=3, classifier=True, pad_token_id=1)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}<eos>{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def worker(path, policy, **options):
    return RewardModelWorker(WorkerContext(0, 1, CPU, "reward_model"), RewardModelConfig(path=str(path), **options),
                             ModelConfig(path=str(policy)))


def batch_of(prompts, responses, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return make_batch(prompt=prompts, response=responses, prompt_ids=[tokenizer("<user>2+2=")["input_ids"]] * 3,
                      response_ids=[tokenizer(response + "<eos>")["input_ids"] for response in responses])


def plain_scores(path, texts):
    """The classifier of transformers on the texts, padded on the right."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    padding = model.config.pad_token_id
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True,
                                          padding_value=padding)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(text) for text in texts])[:, None]
    with torch.no_grad():
        return model(ids, attention_mask=mask.long()).logits[:, 0]


def scored(result):
    return result["scores"], rows_of(result["score_errors"])


def test_a_model_with_the_policys_tokenizer_reads_the_sampled_tokens(folder):
    path, batch = folder("qwen3", classifier=True), batch_of(PROMPTS, RESPONSES, folder("llama"))
    ours = worker(path, folder("llama"), micro_batch_tokens=12)
    assert ours.template == "tokens"
    texts = [torch.cat(row).tolist() for row in zip(rows_of(batch["prompt_ids"]), rows_of(batch["response_ids"]),
                                                    strict=True)]
    scores, errors = scored(ours.score(batch))
    torch.testing.assert_close(scores, plain_scores(path, texts), rtol=0, atol=1e-4)
    assert scores.std() > 0.1 and errors == [None] * 3 and scores.dtype == torch.float32


def test_another_tokenizer_reads_the_texts_in_its_own_template(folder, other):
    """Texts are chat messages there; a template's end token that is its padding is passed over, as transformers do."""
    ours, tokenizer = worker(other, folder("llama")), AutoTokenizer.from_pretrained(other)
    assert ours.template == "chat"
    rendered = ["u:1+2=<eos>a:3<eos>", "s:add<eos>u:3+4=<eos>a:is it 7?<eos>", "u:5+6=<eos>a:<eos>"]
    texts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in rendered]
    scores, errors = scored(ours.score(batch_of(PROMPTS, RESPONSES, folder("llama"))))
    torch.testing.assert_close(scores, plain_scores(other, texts), rtol=0, atol=1e-4)
    assert errors == [None] * 3


def test_a_template_of_ones_own_and_scale_bias_and_clip(folder, other):
    tokenizer = AutoTokenizer.from_pretrained(other)
    rendered = ["{1+2=} 3", "{system: add\n\nuser: 3+4=} is it 7?", "{5+6=} "]
    plain = plain_scores(other, [tokenizer(text)["input_ids"] for text in rendered])
    raw, _ = scored(worker(other, folder("llama"), template="{{prompt}} {response}").score(
        batch_of(PROMPTS, RESPONSES, folder("llama"))))
    torch.testing.assert_close(raw, plain, rtol=0, atol=1e-4)
    clip = float((2 * plain - 1).abs().median())
    shaped, _ = scored(worker(other, folder("llama"), template="{{prompt}} {response}", scale=2.0, bias=-1.0, clip=clip)
                       .score(batch_of(PROMPTS, RESPONSES, folder("llama"))))
    expected = [max(-clip, min(clip, 2 * value - 1)) for value in plain.tolist()]
    assert shaped.tolist() == pytest.approx(expected, abs=1e-4) and set(expected) & {clip, -clip}


def test_texts_that_are_too_long(folder, other):
    """Marked with the reason, or cut to the last tokens; rows beside them keep their scores."""
    batch = batch_of(PROMPTS, RESPONSES, folder("llama"))
    whole, _ = scored(worker(other, folder("llama")).score(batch))
    marked, errors = scored(worker(other, folder("llama"), max_tokens=10).score(batch))
    assert errors == [None, "the text has 23 tokens, more than reward.model.max_tokens=10", None]
    assert math.isnan(marked[1]) and torch.allclose(marked[[0, 2]], whole[[0, 2]], atol=1e-4)
    cut, errors = scored(worker(other, folder("llama"), max_tokens=10, too_long="cut").score(batch))
    text = AutoTokenizer.from_pretrained(other)("u:3+4=<eos>a:is it 7?")["input_ids"][-10:]
    assert errors == [None] * 3
    assert float(cut[1]) == pytest.approx(float(plain_scores(other, [text])[0]), abs=1e-4)


def test_a_row_that_cannot_be_scored_says_why(folder, other, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.chat_template = "{{ raise_exception('no system role') if messages|length > 2 }}{{ messages[0].content }}"
    path = tiny_model(tmp_path, "qwen3", seed=3, classifier=True)
    tokenizer.save_pretrained(path)
    batch = batch_of(PROMPTS, RESPONSES, folder("llama"))
    scores, errors = scored(worker(path, folder("llama")).score(batch))
    assert errors == [None, "its chat template refuses the row: no system role", None]
    assert scores.isnan().tolist() == [False, True, False]
    weights = load_file(path / "model.safetensors")
    weights["score.weight"][:] = math.nan
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    scores, errors = scored(worker(path, folder("llama"), clip=1.0).score(select(batch, [0])))
    assert errors == ["the reward model gave nan"] and scores.isnan().all()


def test_no_rows(folder, other):
    scores, errors = scored(worker(other, folder("llama")).score(select(
        batch_of(PROMPTS, RESPONSES, folder("llama")), [])))
    assert scores.shape == (0,) and errors == []


def test_folders_and_templates_that_do_not_fit(folder, other, tmp_path):
    with pytest.raises(ModelError, match="is no sequence classifier: its architecture is LlamaForCausalLM"):
        check_classifier(folder("llama"))
    with pytest.raises(ModelError, match="is a classifier of 3 labels; a reward model has 1"):
        check_classifier(folder("llama", classifier=True, num_labels=3))
    with pytest.raises(ModelError, match="is a classifier of 2 labels"):  # the default, which no file names
        check_classifier(folder("llama", classifier=True, num_labels=2))
    check_classifier(other)
    with pytest.raises(ConfigError, match="template=tokens needs the policy's tokenizer"):
        worker(other, folder("llama"), template="tokens")
    path = tiny_model(tmp_path, classifier=True)
    (path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="template=chat needs a chat template"):
        worker(path, folder("llama"), template="chat")
    assert worker(path, folder("llama")).template == "{prompt}{response}"


def test_tokenizers_are_the_same_or_not(folder, other):
    mine, theirs = (load_tokenizer(ModelConfig(path=str(path))) for path in (folder("llama"), folder("llama_tied")))
    mine(["1", "22"], padding=True, truncation=True, max_length=2)  # what is left of a call does not count
    assert same_tokenizer(mine, theirs)
    assert not same_tokenizer(mine, load_tokenizer(ModelConfig(path=str(other))))
    theirs.add_tokens(["<new>"])
    assert not same_tokenizer(mine, theirs)
