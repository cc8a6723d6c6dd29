"""Turn the demo's model into a mixture of experts: Qwen3-MoE, every expert a copy of the layer that it stands for.

    python -m recipes.demo.make_moe <folder>

Each token goes to 2 of 4 experts, whose gates sum to 1, so the mixture starts as about the dense model; small noise
tells experts apart. Queries and keys, which Qwen3 normalises, get the mean size they had.
"""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

SEED = 0
EXPERTS, CHOSEN = 4, 2
NOISE = 0.02
"""Standard deviation of what is added to an expert's weights, as a share of theirs, so that experts differ."""
DENSE = Path(__file__).parent / "model"


def make_moe(dense: LlamaForCausalLM, prompts: Tensor, noise: float = NOISE) -> Qwen3MoeForCausalLM:
    """The mixture of a dense model.

    Args:
        prompts: [B, T] token ids, on which the sizes of queries and keys are measured.
        noise: as NOISE.
    """
    old = dense.config
    config = Qwen3MoeConfig(
        vocab_size=old.vocab_size, hidden_size=old.hidden_size, intermediate_size=old.intermediate_size,
        moe_intermediate_size=old.intermediate_size, num_hidden_layers=old.num_hidden_layers,
        num_attention_heads=old.num_attention_heads, num_key_value_heads=old.num_key_value_heads,
        head_dim=old.head_dim, max_position_embeddings=old.max_position_embeddings, rms_norm_eps=old.rms_norm_eps,
        rope_parameters=old.rope_parameters, tie_word_embeddings=old.tie_word_embeddings, num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN, norm_topk_prob=True, bos_token_id=old.bos_token_id, eos_token_id=old.eos_token_id,
        pad_token_id=old.pad_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        moe = Qwen3MoeForCausalLM(config)
        moe.load_state_dict(dense.state_dict(), strict=False)
        sizes = _sizes(dense, prompts)
        with torch.no_grad():
            for number, (layer, source) in enumerate(zip(moe.model.layers, dense.model.layers, strict=True)):
                for name in ("q", "k"):
                    getattr(layer.self_attn, f"{name}_norm").weight.fill_(sizes[f"{number}.{name}"])
                gate_up = torch.cat([source.mlp.gate_proj.weight, source.mlp.up_proj.weight])
                _copies(layer.mlp.experts.gate_up_proj, gate_up, noise)
                _copies(layer.mlp.experts.down_proj, source.mlp.down_proj.weight, noise)
    return moe


def _copies(experts: Tensor, weight: Tensor, noise: float) -> None:
    experts.copy_(weight + noise * weight.std() * torch.randn_like(experts))


@torch.no_grad()
def _sizes(dense: LlamaForCausalLM, prompts: Tensor) -> dict[str, float]:
    """Root mean square of an element of the queries and keys of each layer, as `<layer>.q` and `<layer>.k`."""
    sizes = {}
    for number, layer in enumerate(dense.model.layers):
        for name in ("q", "k"):
            def note(module, inputs, output, key=f"{number}.{name}"):
                sizes[key] = float(output.square().mean().sqrt())
            getattr(layer.self_attn, f"{name}_proj").register_forward_hook(note)
    dense(prompts, use_cache=False)
    return sizes


def write_moe(folder: Path, noise: float = NOISE) -> None:
    """Make the mixture and write it with the demo's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(DENSE)
    lines = (DENSE.parent / "train.jsonl").read_text().splitlines()[:64]
    rows = [json.loads(line) for line in lines]
    prompts = torch.tensor([tokenizer.apply_chat_template(
        [{"role": "user", "content": row["prompt"]}], add_generation_prompt=True)["input_ids"] for row in rows])
    make_moe(AutoModelForCausalLM.from_pretrained(DENSE), prompts, noise).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Usage: python -m recipes.demo.make_moe <folder>")
    write_moe(Path(sys.argv[1]))
    print(f"Wrote the mixture of experts to {sys.argv[1]}.")
