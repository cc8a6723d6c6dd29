"""Which experts each token goes to: kept in one forward pass, replayed in others.

Every mixture of transformers picks its experts with `topk` over one score an expert, somewhere inside a decoder layer,
and makes its gates from what that call returns. So the call is the one place to act: within a layer's forward it is
answered with given experts and the trainer's own scores of them. All that follows is the model's own code, with its
normalisation and scale, and gradients reach the router through the scores.

A choice is bound to its layer and to the pass it belongs to, so activation checkpointing, which runs a layer again,
finds it again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from hybridrl.algorithms.partials import Mean, Partial
from hybridrl.batch import fed_lengths, from_lengths
from hybridrl.errors import BatchError, ModelError

UNKNOWN = -1
"""In the place of every expert of a token and layer whose choice was not kept."""
TOPK = (torch.topk, torch.Tensor.topk)


@dataclass(frozen=True, slots=True)
class Mixture:
    """The shape of a model's routing: each token goes to `chosen` of `experts`, in each of `layers`."""

    experts: int
    chosen: int
    groups: int = 1
    """Groups of experts, of which a router picks some first."""
    layers: int = 0

    @classmethod
    def of(cls, config: PretrainedConfig, layers: int = 0) -> "Mixture | None":
        """That of a model's config; None for a dense model."""
        text = config.get_text_config()
        experts = _first(text, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        chosen = _first(text, "num_experts_per_tok", "moe_k", "moe_top_k")
        return cls(experts, chosen, _first(text, "n_group") or 1, layers) if experts > 1 and chosen else None

    @property
    def dtype(self) -> torch.dtype:
        """In which experts travel: the narrowest that has a way to say UNKNOWN, which is its largest value k times.

        No k > 1 experts are equal, so that value may be an expert too.
        """
        return torch.uint8 if self.experts + (self.chosen == 1) <= 256 else torch.uint16

    def unknown(self, tokens: int) -> Tensor:
        """[tokens, layers, chosen] int32, all UNKNOWN."""
        return torch.full((tokens, self.layers, self.chosen), UNKNOWN, dtype=torch.int32)

    def packed(self, experts: Tensor) -> Tensor:
        """Experts [..., chosen] as they travel."""
        return torch.where(experts == UNKNOWN, torch.iinfo(self.dtype).max, experts).to(self.dtype)

    def unpacked(self, experts: Tensor) -> Tensor:
        """Experts as int32, from what `packed` gave. Raises BatchError for an expert or a shape of another model."""
        if experts.shape[1:] != (self.layers, self.chosen) or experts.dtype != self.dtype:
            raise BatchError(f"routed_experts must be {self.dtype} [tokens, {self.layers}, {self.chosen}] for this "
                             f"model, got {experts.dtype} {list(experts.shape)}.")
        given = experts.to(torch.int32)
        given[(given == torch.iinfo(self.dtype).max).all(-1)] = UNKNOWN
        if given.numel() and int(given.max()) >= self.experts:
            raise BatchError(f"routed_experts names expert {int(given.max())}; the model has {self.experts}.")
        return given


def _first(config: PretrainedConfig, *names: str) -> int:
    values = [getattr(config, name, None) for name in names]
    return next((value for value in values if isinstance(value, int) and value), 0)


class Routing:
    """The experts of one forward pass of T tokens.

    Args:
        mixture: of the model.
        tokens: T. device: of the pass.
        given: experts to replay, [T, layers, chosen] int32, UNKNOWN where the model is to choose; None: everywhere.
    """

    def __init__(self, mixture: Mixture, tokens: int, device: torch.device, given: Tensor | None = None):
        self.mixture, self.tokens, self.given = mixture, tokens, given
        self.own = mixture.unknown(tokens).to(device)
        """What the model's routers would choose: given what is replayed beneath them, where anything is."""
        self._seen: set[int] = set()

    def choose(self, layer: int, own: Tensor) -> Tensor:
        """The experts [T, chosen] int64 of a layer, whose router would choose `own`."""
        if layer in self._seen:  # computed again: as the first time, even where rounding would tip it
            own = self.own[:, layer].to(torch.int64)
        else:
            self._seen.add(layer)
            self.own[:, layer] = own.to(torch.int32)
        if self.given is None:
            return own
        given = self.given[:, layer].to(torch.int64)
        return torch.where(given == UNKNOWN, own, given)

    def check(self) -> None:
        """Raise ModelError unless every mixture chose: one that picks experts another way can't be replayed."""
        if len(self._seen) != self.mixture.layers:
            raise ModelError(f"only {len(self._seen)} of {self.mixture.layers} mixtures of this model pick experts by "
                             "topk over their scores; policy.routing_replay must be off.")

    def metrics(self) -> dict[str, Partial]:
        """How far the replayed experts are from the model's own choice.

        `routing/layers_differ_frac`: share of (token, layer) pairs whose set differs; `routing/tokens_differ_frac`:
        share of tokens with such a layer; `routing/fallback_rows`: (token, layer) pairs that had nothing to replay.
        """
        if self.given is None:
            return {}
        known = self.given[..., 0] != UNKNOWN
        differs = known & (self.given.sort(-1).values != self.own.sort(-1).values).any(-1)
        return {"routing/layers_differ_frac": Mean(differs.sum(), known.sum()),
                "routing/tokens_differ_frac": Mean(differs.any(-1).sum(), known.any(-1).sum()),
                "routing/fallback_rows": Mean((~known).sum(), 1)}


class _Choice(TorchFunctionMode):
    """Answers the `topk` of one layer's router."""

    def __init__(self, routing: Routing, layer: int):
        super().__init__()
        self.routing, self.layer, self.chosen = routing, layer, None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in TOPK:
            return result
        scores, mixture = args[0] if args else kwargs["input"], self.routing.mixture
        if scores.dim() != 2 or len(scores) != self.routing.tokens:
            return result
        if scores.shape[1] == mixture.experts and result.indices.shape[1] == mixture.chosen:
            chosen = self.routing.choose(self.layer, result.indices)
        elif mixture.groups > 1 and scores.shape[1] == mixture.groups:
            chosen = self._groups(scores, result.indices.shape[1])
        else:
            return result
        return torch.return_types.topk((scores.gather(1, chosen), chosen))

    def _groups(self, scores: Tensor, count: int) -> Tensor:
        """`count` groups: those of the replayed experts, then those that score best."""
        if self.routing.given is None:
            return torch.topk(scores, count).indices
        given = self.routing.given[:, self.layer].to(torch.int64)
        owners = torch.where(given == UNKNOWN, 0, given) // (self.routing.mixture.experts // scores.shape[1])
        replayed = torch.zeros_like(scores).scatter(1, owners, 1.0) * (given[:, :1] != UNKNOWN)
        return torch.topk(scores.detach().masked_fill(replayed > 0, torch.inf), count).indices


def experts_column(mixture: Mixture, batch: TensorDict, rows: Sequence[Tensor | None]) -> Tensor:
    """`routed_experts` of a batch, from what is known of each row's first tokens; UNKNOWN, packed, for the others."""
    sizes = fed_lengths(batch)
    pieces = [mixture.packed(mixture.unknown(0))]
    for size, known in zip(sizes, rows, strict=True):
        start = pieces[0] if known is None else known[:size]
        pieces += [start, mixture.packed(mixture.unknown(size - len(start)))]
    return from_lengths(torch.cat(pieces), torch.tensor(sizes, dtype=torch.int64))


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers of a transformers model, in order."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules()  # FSDP puts a class of its own in front
            if names & {kind.__name__ for kind in type(module).__mro__}]


def route(model: PreTrainedModel) -> Mixture | None:
    """Let the model's mixtures follow a `routing=Routing(...)` that its forward is given; None for a dense model."""
    mixture = Mixture.of(model.config)
    if mixture is None:
        return None
    layers = [layer for layer in decoder_layers(model) if _holds_experts(layer, mixture.experts)]
    for number, layer in enumerate(layers):
        layer.forward = _routed(layer.forward, number)
    return Mixture(mixture.experts, mixture.chosen, mixture.groups, len(layers))


def _holds_experts(layer: nn.Module, experts: int) -> bool:
    """Whether a layer has the weights of all experts, as a tensor or as modules; some layers of a mixture are dense."""
    return any(p.dim() == 3 and p.shape[0] == experts for p in layer.parameters()) or any(
        isinstance(module, nn.ModuleList) and len(module) == experts for module in layer.modules())


def _routed(forward: Callable[..., Any], layer: int) -> Callable[..., Any]:
    def run(*args: Any, routing: Routing | None = None, **kwargs: Any) -> Any:
        if routing is None:
            return forward(*args, **kwargs)
        with _Choice(routing, layer):
            return forward(*args, **kwargs)
    return run
