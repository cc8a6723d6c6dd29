"""A rollout engine without a model: it samples what the seed says, and remembers every token it was fed and gave."""

import random

from hybridrl.workers.rollout.engine import Completion, RolloutEngine


class ScriptedEngine(RolloutEngine):
    """Answers a request after a random number of steps with random tokens, or with `script(prompt_ids, number)`.

    Who listens is told all but the last tokens before the last step.

    `asked` is [(prompt ids, completion)] of all requests, `served` of those that finished. `before_step`
    runs before each step.
    """

    def __init__(self, tokens, stop_ids, script=None, longest=12, stop_frac=0.8, cache_tokens=None):
        super().__init__(stop_ids)
        self.tokens, self.script, self.longest, self.stop_frac = list(tokens), script, longest, stop_frac
        self.capacity = cache_tokens
        self.running, self.asked, self.served, self.most_running = {}, [], [], 0
        self.before_step = lambda: None
        self.load_weights([], version=7)

    @property
    def cache_tokens(self):
        return self.capacity

    def drive(self, futures, deadline_s=300.0):
        """No test waits longer; `math.inf` for the loop of a server."""
        super().drive(futures, deadline_s)

    def add(self, request_id, request):
        rng = random.Random(f"{list(request.prompt_ids)} {request.seed}")
        if self.script is not None:
            ids = list(self.script(list(request.prompt_ids), rng))
        else:
            ids = rng.choices(self.tokens, k=rng.randint(0, self.longest))
            ids += [rng.choice(self.stop_ids)] if rng.random() < self.stop_frac or not ids else []
        ids = ids[:request.max_tokens]
        first = next((i for i, token in enumerate(ids) if token in self.stop_ids), None)
        ids = ids if first is None else ids[:first + 1]
        done = Completion(ids, [-rng.random() for _ in ids], [self.version] * len(ids),
                          "stop" if ids[-1] in self.stop_ids else "length")
        self.asked.append((list(request.prompt_ids), done))
        self.running[request_id] = [self.steps(ids, rng), list(request.prompt_ids), done]

    def steps(self, ids, rng):
        """How many steps an answer takes."""
        return rng.randint(1, 4)

    def busy(self):
        return bool(self.running)

    def cancel(self, request_ids):
        for request_id in request_ids:
            self.running.pop(request_id)

    def layout(self, weights, rename):
        return []

    def write_weights(self, writes, inspect=None):
        list(writes)

    def score(self, token_ids):
        return [0.0] * (len(token_ids) - 1)

    def step(self):
        self.before_step()
        self.most_running = max(self.most_running, len(self.running))
        finished = []
        for request_id, row in list(self.running.items()):
            row[0] -= 1
            ids = row[2].token_ids
            told = max(0, len(ids) - row[0])  # the last one in the last step
            if row[0] and told:
                self.progressed(request_id, ids[:told], row[2].log_probs[:told])
            if row[0] == 0:
                del self.running[request_id]
                self.served.append((row[1], row[2]))
                finished.append((request_id, row[2]))
        return finished
