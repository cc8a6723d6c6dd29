"""TRL's GRPOTrainer, a step each time a line comes on standard input; runs in TRL's own environment.

    .venv-trl/bin/python benchmarks/versus_trl/trl_side.py WORKLOAD.json SCRATCH_FOLDER

Answers every step with a JSON line of seconds. What is changed of TRL: response lengths are forced by a logits
processor, and activation checkpointing, which costs time, is turned off. The rest is as it comes: float32, generation
with transformers, no separate log-prob pass.
"""

import json
import sys
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

MANY_STEPS = 10_000


class ForcedLengths(LogitsProcessor):
    """Row i ends with token lengths[i]: no end token before, nothing else there."""

    def __init__(self, lengths, prompt_tokens, end_id):
        self.lengths, self.prompt_tokens, self.end_id = torch.tensor(lengths), prompt_tokens, end_id

    def __call__(self, input_ids, scores):
        last = self.lengths == input_ids.shape[1] - self.prompt_tokens + 1
        scores[:, self.end_id] = -torch.inf
        scores[last] = -torch.inf
        scores[last, self.end_id] = 0.0
        return scores


class Turns(TrainerCallback):
    """Waits for a line before each step and reports after it."""

    def __init__(self):
        self.generate_s = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        if not sys.stdin.readline():
            sys.exit()
        self.generate_s, self.started = 0.0, time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        total = time.perf_counter() - self.started
        print("STEP " + json.dumps({"generate": self.generate_s, "step": total, "threads": torch.get_num_threads()}),
              flush=True)


def reward(completions, **kwargs):
    return [float(len(text) % 2) for text in completions]


def main(workload_path, scratch):
    workload = json.load(open(workload_path))
    rows = len(workload["response_lengths"])
    tokenizer = AutoTokenizer.from_pretrained(workload["folder"])
    model = AutoModelForCausalLM.from_pretrained(workload["folder"], dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    data = Dataset.from_list([{"prompt": text} for text in workload["prompts"]] * 1000)
    args = GRPOConfig(
        output_dir=scratch, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True, max_steps=MANY_STEPS, learning_rate=workload["learning_rate"],
        max_grad_norm=workload["max_grad_norm"], per_device_train_batch_size=rows, gradient_accumulation_steps=1,
        num_generations=workload["responses_per_prompt"], max_completion_length=max(workload["response_lengths"]),
        temperature=1.0, beta=0.0, num_iterations=1, shuffle_dataset=False)
    turns = Turns()
    trainer = GRPOTrainer(model=model, reward_funcs=reward, args=args, train_dataset=data,
                          processing_class=tokenizer, callbacks=[turns])
    generate = trainer.model.generate

    def timed(*words, **options):
        started = time.perf_counter()
        forced = ForcedLengths(workload["response_lengths"], options["input_ids"].shape[1], tokenizer.eos_token_id)
        result = generate(*words, logits_processor=LogitsProcessorList([forced]), **options)
        turns.generate_s += time.perf_counter() - started
        lengths = workload["response_lengths"]
        assert result.shape == (rows, options["input_ids"].shape[1] + max(lengths)), "lengths were not forced"
        return result

    trainer.model.generate = timed
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
