"""Write the demo's untrained model: a Llama of 0.9M parameters with a character-level tokenizer.

    python -m recipes.demo.make_model <folder>
"""

import string
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 0
SPECIAL = ("<pad>", "<end>", "<system>", "<user>", "<assistant>")
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
CHAT_TEMPLATE = ("{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
                 "{% if message['role'] == 'assistant' %}<end>{% endif %}{% endfor %}"
                 "{% if add_generation_prompt %}<assistant>{% endif %}")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable ASCII character, plus SPECIAL; any other character becomes `?`."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<end>",
        additional_special_tokens=list(SPECIAL[2:]), clean_up_tokenization_spaces=False)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(vocab_size: int, seed: int = SEED, **shape: int) -> LlamaForCausalLM:
    """The architecture, with other sizes where `shape` gives some; its random float32 weights depend on `seed` only."""
    sizes = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
                 num_key_value_heads=4, head_dim=32) | shape
    config = LlamaConfig(
        vocab_size=vocab_size, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=SPECIAL.index("<end>"), pad_token_id=SPECIAL.index("<pad>"), **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def main(folder: Path) -> None:
    tokenizer = make_tokenizer()
    make_model(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"Wrote the untrained model to {folder}.")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Usage: python -m recipes.demo.make_model <folder>")
    main(Path(sys.argv[1]))
