"""Small tokenizers of several kinds, each with a chat template of a well-known shape."""

from tests.models import ALPHABET

CHATML = """{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

THINKING = """{%- set last = namespace(user=-1) %}{%- for m in messages %}{% if m.role == 'user' %}
{%- set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.index0 < last.user %}{{ m.content.split('</think>')[-1].lstrip('\n') }}
{%- else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Drops the thinking of turns before the last message of the user."""

LLAMA = """<|im_start|>{% for m in messages %}<|header|>{{ m.role }}<|/header|>

{{ m.content | trim }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|header|>assistant<|/header|>

{% endif %}"""
"""Trims every message, the assistant's too."""

MERGING = """{% set said = namespace(text='') %}{% for m in messages %}{% if m.role != 'assistant' %}
{%- set said.text = said.text + m.content + ' ' %}{% endif %}{% endfor %}[user] {{ said.text }}[/user]
{%- for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"""
"""Puts all that the user ever said into one turn."""

TEMPLATES = {"chatml": CHATML, "thinking": THINKING, "llama": LLAMA, "merging": MERGING}
ADDED = ("<think>", "</think>", "<tool_call>")
"""Added tokens that are not special, as in Qwen's vocabulary."""
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|header|>", "<|/header|>")
WORDS = (ALPHABET + " higher lower right guess begin turn the number is user assistant system <|>/[]{}\"_im "
         "start end header ABCGT think tool call é 漢") * 3


def _core(kind):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if kind == "characters":
        alphabet = sorted(set(WORDS))
        core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(["?", *[c for c in alphabet if c != "?"]])}, "?"))
        from tokenizers import Regex
        core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        core.decoder = decoders.Fuse()
        return core
    if kind == "bytes":
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                      show_progress=False)
    else:  # words that begin with a mark for the space before them, the first word too
        core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                          decoders.Strip(" ", 1, 0)])
        trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False,
                                      special_tokens=["<unk>", *(f"<0x{i:02X}>" for i in range(256))])
    core.train_from_iterator([WORDS], trainer)
    return core


KINDS = ("characters", "bytes", "spaces")


def chat_tokenizer(kind, template="chatml"):
    """A tokenizer of one of KINDS with one of TEMPLATES; `<|im_end|>` ends a turn."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_core(kind), eos_token="<|im_end|>",
                                        additional_special_tokens=list(SPECIAL), clean_up_tokenization_spaces=False)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer
