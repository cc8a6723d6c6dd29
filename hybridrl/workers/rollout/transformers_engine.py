"""A plain engine on a transformers model: the reference in tests, and for models that vLLM lacks or that are tiny."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from hybridrl.errors import SyncError
from hybridrl.workers.rollout.engine import Completion, Inspect, PromptScore, Rename, Request, RolloutEngine
from hybridrl.workers.routing import Routing, route
from hybridrl.workers.weights.regions import Copy, Write, whole

ROOM = 64
"""Tokens that a key-value cache leaves room for whenever it has to grow, if so many are to come."""


@dataclass(slots=True)
class _Running:
    """A request being decoded."""

    request_id: str
    request: Request
    generator: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class _Cohort:
    """Requests admitted together: one left-padded batch with one key-value cache, advanced a token at a time."""

    rows: list[_Running]
    mask: Tensor
    cache: Any = None


class _RoomyLayer(DynamicLayer):
    """Keys and values with room for more: a token is written beside those before it, which stay where they are.

    Args:
        layer: what is held so far.
        most: tokens that it will hold in the end.
    """

    def __init__(self, layer: DynamicLayer, most: int):
        super().__init__()
        self.__dict__.update(layer.__dict__)
        self.keys: Any
        self.values: Any
        self.most = most
        self.room: tuple[Tensor, ...] = ()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start = self.get_seq_length()
        stop = start + key_states.shape[-2]
        if not self.room or stop > self.room[0].shape[-2]:
            tokens = max(stop, min(stop + ROOM, self.most))
            self.room = tuple(held.new_empty(*held.shape[:-2], tokens, held.shape[-1])
                              for held in (self.keys, self.values))
            for room, held in zip(self.room, (self.keys, self.values), strict=True):
                room[..., :start, :] = held
        for room, new in zip(self.room, (key_states, value_states), strict=True):
            room[..., start:stop, :] = new
        self.keys, self.values = (room[..., :stop, :] for room in self.room)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        if not self.room:
            super().batch_select_indices(indices)
            return
        tokens = self.get_seq_length()
        self.room = tuple(room.index_select(0, indices) for room in self.room)
        self.keys, self.values = (room[..., :tokens, :] for room in self.room)


class TransformersEngine(RolloutEngine):
    """Decodes with the transformers model class, its own copy of the weights, one rank.

    Args:
        model_path: folder with the model's config.json; weights are not read from it, unless it is frozen.
        device: where the model runs.
        dtype: dtype of the weights.
        stop_ids: token ids that end a response.
        max_running: sequences decoded at a time.
        frozen: take the folder's weights, and never others.
        keep_experts: completions carry the experts of a mixture.
    """

    def __init__(self, model_path: Path, device: torch.device, dtype: torch.dtype, stop_ids: Sequence[int],
                 max_running: int = 64, trust_remote_code: bool = False, frozen: bool = False,
                 keep_experts: bool = False):
        super().__init__(stop_ids)
        from transformers import AutoConfig, AutoModelForCausalLM

        if frozen:
            self.model = AutoModelForCausalLM.from_pretrained(
                model_path, dtype=dtype, trust_remote_code=trust_remote_code, use_safetensors=True,
                local_files_only=True)
            self.version = 0
        else:
            config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
            self.model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        self.model.to(device).eval().requires_grad_(False)
        self.mixture = route(self.model) if keep_experts else None
        self.device = device
        self.max_running = max_running
        self._waiting: list[_Running] = []
        self._cohorts: list[_Cohort] = []

    def add(self, request_id: str, request: Request) -> None:
        generator = torch.Generator()
        generator.seed() if request.seed is None else generator.manual_seed(request.seed)
        self._waiting.append(_Running(request_id, request, generator))

    def busy(self) -> bool:
        return bool(self._waiting or self._cohorts)

    def cancel(self, request_ids: Sequence[str]) -> None:
        gone = set(request_ids)
        self._waiting = [row for row in self._waiting if row.request_id not in gone]
        for cohort in self._cohorts:
            for row in cohort.rows:
                if row.request_id in gone:
                    row.request = Request(row.request.prompt_ids, len(row.token_ids))  # ends at the next step

    @torch.no_grad()
    def step(self) -> list[tuple[str, Completion]]:
        room = self.max_running - sum(len(cohort.rows) for cohort in self._cohorts)
        finished = []
        for cohort in self._cohorts:
            logits, experts = self._feed(cohort, torch.tensor([[row.token_ids[-1]] for row in cohort.rows]))
            finished += self._advance(cohort, logits, experts)
        if self._waiting and room > 0:
            admitted, self._waiting = self._waiting[:room], self._waiting[room:]
            cohort, logits, experts = self._admit(admitted)
            finished += self._advance(cohort, logits, experts)
            self._cohorts.append(cohort)
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]
        return finished

    def _admit(self, rows: list[_Running]) -> tuple[_Cohort, Tensor, list[Tensor]]:
        """A cohort of rows with what `_feed` returns of them; texts that rows have in common are fed once."""
        for row in rows:
            row.experts.clear()
        texts = [(*row.request.prompt_ids, *row.token_ids) for row in rows]
        places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        width = max(map(len, places))
        cohort = _Cohort(rows, torch.zeros(len(places), 0, dtype=torch.int64))
        logits, experts = self._feed(cohort, torch.tensor([[0] * (width - len(text)) + [*text] for text in places]),
                                     torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in places]))
        most = width + max(row.request.max_tokens - len(row.token_ids) for row in rows)
        # Others than these, those of sliding windows for instance, keep their own ways.
        cohort.cache.layers = [_RoomyLayer(layer, most) if type(layer) is DynamicLayer else layer
                               for layer in cohort.cache.layers]
        index = torch.tensor([places[text] for text in texts])
        if len(places) < len(rows):
            self._select(cohort, index)
        return cohort, logits[index], [experts[place] for place in index.tolist()] if experts else []

    def _feed(self, cohort: _Cohort, ids: Tensor, mask: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """Feed `ids` [sequences, new]; logits [sequences, vocabulary] of what comes next, and each one's experts."""
        new = torch.ones_like(ids) if mask is None else mask
        cohort.mask = torch.cat([cohort.mask, new], dim=1)
        positions = (cohort.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1]:]
        routing = None if self.mixture is None else Routing(self.mixture, ids.numel(), self.device)
        out = self.model(input_ids=ids.to(self.device), attention_mask=cohort.mask.to(self.device),
                         position_ids=positions.to(self.device), past_key_values=cohort.cache, use_cache=True,
                         logits_to_keep=1, **({} if routing is None else {"routing": routing}))
        cohort.cache = out.past_key_values
        logits = out.logits[:, -1].float().cpu()
        if routing is None:
            return logits, []
        routing.check()
        return logits, [own[fed] for own, fed in zip(routing.own.cpu().chunk(len(ids)), new.bool(), strict=True)]

    def _advance(self, cohort: _Cohort, logits: Tensor, experts: list[Tensor]) -> list[tuple[str, Completion]]:
        """Sample a token for each row; returns those that finish with it, which leave the cohort."""
        for row, own in zip(cohort.rows, experts, strict=False):
            row.experts.append(own)
        self._sample(cohort.rows, logits)
        return self._retire(cohort)

    def _sample(self, rows: Sequence[_Running], logits: Tensor) -> None:
        """Append a token to each row, by the largest of its probabilities over exponential noise of its own.

        Args:
            logits: [rows, vocabulary] float32.
        """
        temperature = torch.tensor([row.request.temperature for row in rows])
        greedy = temperature == 0  # then, as in vLLM, log-probs are those of temperature 1
        log_probs = (logits / temperature.masked_fill(greedy, 1.0)[:, None]).log_softmax(-1)
        noise = torch.ones_like(log_probs)
        for row, own, still in zip(rows, noise, greedy.tolist(), strict=True):
            if not still:
                own.exponential_(generator=row.generator)
        tokens = (log_probs.exp() / noise).argmax(-1, keepdim=True)
        version = self.version if self.version is not None else -1
        for row, token, log_prob in zip(rows, tokens[:, 0].tolist(), log_probs.gather(1, tokens)[:, 0].tolist(),
                                        strict=True):
            row.token_ids.append(token)
            row.log_probs.append(log_prob)
            row.versions.append(version)

    def _retire(self, cohort: _Cohort) -> list[tuple[str, Completion]]:
        finished, keep = [], []
        for i, row in enumerate(cohort.rows):
            stopped = row.token_ids[-1] in self.stop_ids
            if stopped or len(row.token_ids) >= row.request.max_tokens:
                experts = None if self.mixture is None else self.mixture.packed(torch.cat(row.experts))
                scores = self._scores(row.request.prompt_ids) if row.request.score else None
                finished.append((row.request_id, Completion(row.token_ids, row.log_probs, row.versions,
                                                            "stop" if stopped else "length", experts, scores)))
            else:
                keep.append(i)
                self.progressed(row.request_id, row.token_ids, row.log_probs)
        if finished and keep:
            self._select(cohort, torch.tensor(keep))
        cohort.rows = [cohort.rows[i] for i in keep]
        return finished

    def _select(self, cohort: _Cohort, index: Tensor) -> None:
        """Keep what is cached for the sequences `index`, in that order; they may repeat."""
        cohort.mask = cohort.mask[index]
        cohort.cache.batch_select_indices(index.to(self.device))

    def score(self, token_ids: Sequence[int]) -> list[float]:
        return [score.log_prob for score in self._scores(token_ids)]

    @torch.no_grad()
    def _scores(self, token_ids: Sequence[int]) -> list[PromptScore]:
        ids = torch.tensor([list(token_ids)], device=self.device)
        log_probs = self.model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        own, top = log_probs.gather(1, ids[0, 1:, None])[:, 0], log_probs.max(-1)
        return [PromptScore(*row) for row in zip(own.tolist(), top.indices.tolist(), top.values.tolist(), strict=True)]

    def layout(self, weights: Mapping[str, Tensor], rename: Rename) -> list[Copy]:
        parameters = dict(self.model.named_parameters())
        _refuse_missing(parameters.keys() - weights.keys())
        return [Copy(name, whole(p.shape), name, whole(p.shape)) for name, p in parameters.items()]

    @torch.no_grad()
    def write_weights(self, writes: Iterable[list[Write]], inspect: Inspect | None = None) -> None:
        parameters = dict(self.model.named_parameters())
        missing = {name: parameter.numel() for name, parameter in parameters.items()}
        for write in (write for some in writes for write in some):
            write.target.of(parameters[write.parameter]).copy_(write.values)
            missing[write.parameter] -= write.values.numel()
        _refuse_missing(name for name, elements in missing.items() if elements)
        if inspect is not None:
            for name, parameter in parameters.items():
                inspect(name, parameter)
        self.forget_cache()

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        return dict(self.model.named_parameters())

    def forget_cache(self) -> None:
        """Running rows go on under the new weights: their cached keys and values are computed anew."""
        self._waiting = [row for cohort in self._cohorts for row in cohort.rows] + self._waiting
        self._cohorts = []


def _refuse_missing(names: Iterable[str]) -> None:
    if missing := sorted(names):
        raise SyncError(f"weight sync left {len(missing)} engine weights unwritten: {', '.join(missing[:5])}.")
