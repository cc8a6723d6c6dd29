"""Tiny causal language models with seeded random weights, made on the spot, for tests without downloads."""

from pathlib import Path

import torch

KINDS = ("llama", "llama_tied", "qwen2", "qwen3", "qwen3_moe")
THROUGH_TRANSFORMERS = "olmo2"
"""A further kind, which vLLM has no code for: it runs the transformers class."""
MIXTURES = ("qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "glm4_moe")
"""Mixtures of experts: without and with shared experts, a dense first layer, a bias on the router."""
ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz+-*/=?.,: \n"
SPECIAL = ("<pad>", "<eos>", "<user>", "<assistant>", "<system>")
VOCABULARY = 64
CHAT_TEMPLATE = ("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
                 "{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
                 "{% if add_generation_prompt %}<assistant>{% endif %}")


def tiny_tokenizer():
    """Character-level tokenizer: one token a character of ALPHABET, plus SPECIAL; unknown characters become `?`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*SPECIAL, *ALPHABET]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>",
        additional_special_tokens=list(SPECIAL[2:]), clean_up_tokenization_spaces=False)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_config(kind: str, **changes):
    """Configuration of one of the kinds above: vocabulary 64, hidden 64, 2 layers, head size 32, 512 positions."""
    from transformers import (
        Glm4MoeConfig,
        LlamaConfig,
        MixtralConfig,
        Olmo2Config,
        OlmoeConfig,
        Qwen2Config,
        Qwen2MoeConfig,
        Qwen3Config,
        Qwen3MoeConfig,
    )

    shape = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                 num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=512,
                 tie_word_embeddings=kind == "llama_tied", initializer_range=0.2,
                 bos_token_id=None, eos_token_id=1, pad_token_id=0)
    moe = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True)
    shared = moe | dict(shared_expert_intermediate_size=80, decoder_sparse_step=1)
    grouped = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True, n_group=2,
                   topk_group=1, n_shared_experts=1, first_k_dense_replace=1, use_qk_norm=True)
    classes = {"llama": (LlamaConfig, {}), "llama_tied": (LlamaConfig, {}), "qwen2": (Qwen2Config, {}),
               "qwen3": (Qwen3Config, {}), "olmo2": (Olmo2Config, {}),
               "qwen3_moe": (Qwen3MoeConfig, moe), "qwen2_moe": (Qwen2MoeConfig, shared),
               "mixtral": (MixtralConfig, dict(num_local_experts=4, num_experts_per_tok=2)),
               "olmoe": (OlmoeConfig, dict(num_experts=4, num_experts_per_tok=2, num_key_value_heads=2)),
               "glm4_moe": (Glm4MoeConfig, grouped)}
    config, further = classes[kind]
    return config(**(shape | further | changes))


def tiny_model(folder, kind: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32,
               classifier: bool = False, **changes) -> Path:
    """Write a tiny model of one of the kinds above with its tokenizer and chat template; returns the folder.

    Weights depend on `kind`, `seed` and the configuration `changes` only. A `classifier` has a head that scores
    sequences (of one label, unless `num_labels` is among the changes) in the place of the language-model head.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    folder = Path(folder)
    made_by = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    changes = {"num_labels": 1} | changes if classifier else changes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = made_by.from_config(tiny_config(kind, **changes), dtype=torch.float32)
        with torch.no_grad():  # biases and norms start at 0 and 1: move them, or a swap of two would go unseen
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
