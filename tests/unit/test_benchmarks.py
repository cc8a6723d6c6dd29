"""What the benchmarks compare with is counted right: FLOPs, floors and workloads."""

from collections import Counter

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks import matrix_rate
from benchmarks.flops import attention_flops
from benchmarks.versus_trl.workload import DEMO, LONGEST, log_normal, make_workload, text_of

TINY = LlamaConfig(hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
                   num_key_value_heads=1, head_dim=4, vocab_size=20, tie_word_embeddings=False)


def test_the_products_of_a_forward_pass_are_those_of_its_linear_layers():
    shapes = matrix_rate.linear_shapes(LlamaForCausalLM(TINY), fed_tokens=[5], head_tokens=[3])
    # q and o are 8 x 8, k and v 8 x 4, gate and up 8 x 12, down 12 x 8, in each of 2 layers
    assert shapes == Counter({(5, 8, 8): 4, (5, 8, 4): 4, (5, 8, 12): 4, (5, 12, 8): 2, (3, 8, 20): 1})
    per_layer = 2 * (8 * 8) + 2 * (8 * 4) + 3 * (8 * 12)
    assert matrix_rate.flops(shapes) == 2 * 5 * 2 * per_layer + 2 * 3 * 8 * 20


def test_equal_micro_batches_share_their_shapes():
    shapes = matrix_rate.linear_shapes(LlamaForCausalLM(TINY), fed_tokens=[5, 5], head_tokens=[5, 5])
    assert shapes[5, 12, 8] == 4 and shapes[5, 8, 20] == 2


def test_attention_is_half_of_the_square():
    # of 2 heads of size 4, 2 layers and 3 tokens: two products of 3 x 3 x 4 a head and layer, halved
    assert attention_flops(TINY, [3]) == 2 * (2 * 3 * 3 * 4) * 2 * 2 // 2


@pytest.mark.parametrize(("backward", "products"), [(False, [(5, 20)]), (True, [(5, 20), (5, 8), (20, 8)])])
def test_the_products_that_are_timed_have_the_shapes_of_the_pass(backward, products, monkeypatch):
    timed = []
    monkeypatch.setattr(matrix_rate, "_fastest", lambda product, repetitions: timed.append(product().shape) or 1.0)
    assert matrix_rate.seconds(Counter({(5, 8, 20): 2}), backward) == 2 * len(products)
    assert timed == products


def test_mixed_lengths_have_the_median_and_the_longest_that_are_asked_for():
    sizes = log_normal(101, 16)
    assert sorted(sizes)[50] == 16 and max(sizes) == 16 * LONGEST and min(sizes) >= 1


@pytest.mark.parametrize("length", [1, 7])
def test_texts_have_exactly_their_tokens(length):
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    assert len(tokenizer(text_of(length, tokenizer, seed=3), add_special_tokens=False)["input_ids"]) == length


def test_a_workload_counts_every_row():
    workload = make_workload("demo", mixed=True)
    assert len(workload.response_lengths) == len(workload.prompts) * workload.responses_per_prompt
    assert workload.tokens == workload.responses_per_prompt * sum(workload.prompt_lengths) + sum(
        workload.response_lengths)
    assert torch.tensor(workload.prompt_lengths).max() > torch.tensor(workload.prompt_lengths).min()
