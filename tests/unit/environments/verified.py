"""Environments of verifiers that tests play: one turn, several turns, tools, and what goes wrong."""

import verifiers
from datasets import Dataset

SUMS = Dataset.from_list([{"question": f"{i}+{i}", "answer": str(2 * i)} for i in range(1, 5)])


def right(completion, answer):
    return float(completion[-1]["content"].strip() == answer)


def brief(completion):
    return len(completion[-1]["content"]) <= 2


def broken(completion):
    raise ValueError("no judge")


def single(weight: float = 0.5):
    """One turn, two rewards."""
    return verifiers.SingleTurnEnv(dataset=SUMS, eval_dataset=SUMS.select([3]), system_prompt="Add.",
                                   rubric=verifiers.Rubric(funcs=[right, brief], weights=[1.0, weight]))


def unfair():
    """A reward function that raises."""
    return verifiers.SingleTurnEnv(dataset=SUMS, rubric=verifiers.Rubric(funcs=[right, broken]))


class Retry(verifiers.MultiTurnEnv):
    """Says wrong until the answer is right, three times at most."""

    async def setup_state(self, state):
        state["tries"] = 0
        return state

    async def env_response(self, messages, state, **kwargs):
        state["tries"] += 1
        if state["answer"] == "8":
            raise verifiers.ToolCallError("the service is down")
        if messages[-1]["content"] == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
        return [{"role": "user", "content": f"wrong, {3 - state['tries']} left"}]


class Rewriting(Retry):
    """Shows the question again in place of what was said."""

    async def get_prompt_messages(self, state):
        await super().get_prompt_messages(state) if state["trajectory"] else None
        return [{"role": "user", "content": f"try {len(state['trajectory'])}"}]


def rewriting():
    return Rewriting(dataset=SUMS, rubric=verifiers.Rubric(funcs=[tries]))


def tries(state):
    return 1.0 / len(state["trajectory"])


def turns(completion):
    return float(len(completion))


def several():
    """Several turns; the reward is 1 over their number, and the messages said count hundreds."""
    return Retry(dataset=SUMS, max_turns=3, rubric=verifiers.Rubric(funcs=[tries, turns], weights=[1.0, 100.0]))


def double(x: int) -> int:
    """Twice a number.

    Args:
        x: the number
    """
    return 2 * x


def tools():
    """Asks for sums that a tool helps with."""
    return verifiers.ToolEnv(tools=[double], dataset=SUMS, rubric=verifiers.Rubric(funcs=[right]))


def load_environment(**arguments):
    return single(**arguments)
