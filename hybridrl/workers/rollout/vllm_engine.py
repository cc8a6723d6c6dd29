"""vLLM in this process, stepped by our loop."""

import gc
import os
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig

from hybridrl.config import LoRAConfig, RolloutConfig
from hybridrl.errors import ConfigError, ModelError
from hybridrl.workers.compile_cache import tell_cpus_apart
from hybridrl.workers.rollout.engine import Completion, Inspect, Orders, PromptScore, Rename, Request, RolloutEngine
from hybridrl.workers.rollout.routing_table import RoutingTable, mixture_layers
from hybridrl.workers.rollout.vllm_adapter import ADAPTER_ID, load_adapter
from hybridrl.workers.rollout.vllm_weights import Layout, find_layout, reload
from hybridrl.workers.routing import Mixture
from hybridrl.workers.weights.regions import Copy, Write, whole

CPU_BLOCK = 128
"""Tokens of a KV-cache block on CPU, at most: a sequence takes whole blocks."""
CPU_STEP_TOKENS = 4096
"""Tokens of one step on CPU, unless a single sequence may have more."""

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes in which vLLM makes room for an adapter."""


class VLLMEngine(RolloutEngine):
    """One vLLM engine, spanning `cfg.tensor_parallel` consecutive ranks of the default process group.

    It samples only after the first `load_weights`, unless it is frozen. It starts with dummy weights and takes whole
    models; with `lora` it reads its weights from the folder, and takes adapters.

    Args:
        model_path: folder with the model's config.json; weights are read from it with `lora` or when it is frozen.
        cfg: rollout options.
        device: cpu or cuda device of this rank.
        stop_ids: token ids that end a response.
        seed: base seed of requests without one of their own.
        lora, adapted: the adapters that `load_weights` brings, and the names of their layers.
        frozen: take the folder's weights, never others, and never sleep.
        keep_experts: completions carry the experts of a mixture.
        key: of `cfg` in a recipe's options, for messages.
    Raises:
        ModelError: vLLM does not support the model. ConfigError: nor the options for it.
    """

    open_engines = 0
    """Engines of this process, which share vLLM's process groups."""

    def __init__(self, model_path: Path, cfg: RolloutConfig, device: torch.device, stop_ids: Sequence[int],
                 trust_remote_code: bool = False, seed: int = 0, lora: LoRAConfig | None = None,
                 adapted: Sequence[str] = (), frozen: bool = False, keep_experts: bool = False,
                 key: str = "policy.rollout"):
        super().__init__(stop_ids)
        mixture = Mixture.of(AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code,
                                                        local_files_only=True))
        if lora and device.type == "cpu" and mixture is not None:
            raise ConfigError("policy.sync.lora must be merged for a mixture of experts on CPU, got 'adapter': "
                              "vLLM has no kernel for it there.")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB only, and it would win over the option below
        from vllm import LLM  # seconds to import, and only this engine needs it

        self.cuda, self.lora = device.type == "cuda", lora
        shared_memory = None if self.cuda else _name_shared_memory()
        if not self.cuda:
            tell_cpus_apart()  # beside tensor parallelism vLLM compiles the masks of an embedding's parts
            _count_ranks_eagerly()
            _hide_llvm()
        _leave_transformers_alone()
        options: dict[str, Any] = {"enforce_eager": cfg.enforce_eager or not self.cuda, "load_format": "dummy"}
        if self.cuda:
            options |= {"enable_sleep_mode": not frozen, "gpu_memory_utilization": cfg.gpu_memory_frac}
        else:
            # Prompts whole: a CPU generator can't take back the noise that vLLM draws for a part of one.
            options |= {"kv_cache_memory_bytes": _cache_bytes(model_path, cfg, trust_remote_code),
                        "enable_chunked_prefill": False, "max_num_batched_tokens": max(CPU_STEP_TOKENS, cfg.context)}
        if keep_experts:  # vLLM returns them itself on CUDA; the table below reads a step's before the next begins
            options |= {"enable_return_routed_experts": True} if self.cuda else {"async_scheduling": False}
        if frozen:
            options["load_format"] = "safetensors"
        if lora:
            options |= {"enable_lora": True, "max_loras": 1, "load_format": "safetensors",
                        "max_lora_rank": next(size for size in ADAPTER_RANKS if size >= lora.rank),
                        "lora_target_modules": sorted({name.rpartition(".")[2] for name in adapted})}
        try:
            self.llm = LLM(
                model=str(model_path), dtype=rollout_dtype(cfg, device), tensor_parallel_size=cfg.tensor_parallel,
                distributed_executor_backend="external_launcher", use_tqdm_on_load=False,
                max_model_len=cfg.context, max_num_seqs=cfg.max_running,
                skip_tokenizer_init=True, logprobs_mode="processed_logprobs", seed=seed,
                trust_remote_code=trust_remote_code, disable_log_stats=True, **options)
        except (ValueError, ImportError, NotImplementedError) as error:
            _leave_groups()
            if "greater than the derived max_model_len" in str(error):
                raise ConfigError(f"{key}.max_prompt_tokens + max_response_tokens must be at most the context "
                                  f"of the model, got {cfg.context}: {_one_line(error).partition('. ')[0]}.") from error
            raise ModelError(f"vLLM can't run {model_path}: {_one_line(error)} "
                             f"{key}.engine=transformers runs models that vLLM lacks.") from error
        if shared_memory:
            _unlink_shared_memory(shared_memory)
        self.engine, self.closed = self.llm.llm_engine, False
        VLLMEngine.open_engines += 1
        if frozen:
            self.version = 0
            self.engine.engine_core.set_weight_version("0")
        self.peers, self.leader = _peers(cfg.tensor_parallel)
        self._early: list[tuple[str, Completion]] = []
        self._table: RoutingTable | None = None
        self._internal_ids: dict[str, str] = {}
        if keep_experts and mixture is not None:
            self._keep_experts(mixture)

    def _keep_experts(self, mixture: Mixture) -> None:
        [self._mixture_layers] = self.llm.apply_model(
            lambda model: [layer.layer_id for layer in mixture_layers(model)])
        self.mixture = replace(mixture, layers=len(self._mixture_layers))
        if not self.cuda and self.leads:  # routers are not split: all peers choose the same
            [self._table] = self.llm.collective_rpc(RoutingTable, args=(self.mixture,))

    # ---- requests

    def add(self, request_id: str, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=request.max_tokens, temperature=request.temperature, seed=request.seed, logprobs=0,
            flat_logprobs=True, stop_token_ids=self.stop_ids, detokenize=False, skip_clone=True,
            prompt_logprobs=1 if request.score else None,
            output_kind=RequestOutputKind.CUMULATIVE if self.listened_to(request_id) else RequestOutputKind.FINAL_ONLY)
        self._add(request_id, request.prompt_ids, params)

    def _add(self, request_id: str, token_ids: Sequence[int], params: Any) -> None:
        from vllm.lora.request import LoRARequest

        # The path is never read: the adapter is there already.
        lora = LoRARequest("policy", ADAPTER_ID, "in memory") if self.lora else None
        self._internal_ids[request_id] = self.engine.add_request(
            request_id, {"prompt_token_ids": list(token_ids)}, params, lora_request=lora)

    def step(self) -> list[tuple[str, Completion]]:
        finished, self._early = [*self._early, *map(self._completed, self._finished_outputs())], []
        return finished

    def _finished_outputs(self) -> list[Any]:
        outputs = self.engine.step()
        for output in outputs:
            if not output.finished:
                self.progressed(output.request_id, output.outputs[0].token_ids, output.outputs[0].logprobs.logprobs)
        return [output for output in outputs if output.finished]

    def _completed(self, output: Any) -> tuple[str, Completion]:
        """The completion of an output that finished in the last step."""
        experts, internal_id = None, self._internal_ids.pop(output.request_id)
        if self._table is not None:
            fed = len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
            experts = self._table.take(internal_id, fed)
        elif self.mixture is not None and output.outputs[0].routed_experts is not None:
            rows = torch.from_numpy(output.outputs[0].routed_experts.astype("int32"))
            experts = self.mixture.packed(rows[:, self._mixture_layers])
        return output.request_id, _completion(output, experts)

    def busy(self) -> bool:
        return bool(self._early) or self.engine.has_unfinished_requests()

    def cancel(self, request_ids: Sequence[str]) -> None:
        self.engine.abort_request(list(request_ids))
        for request_id in request_ids:
            self._internal_ids.pop(request_id, None)

    @property
    def cache_tokens(self) -> int | None:
        cache = self.engine.vllm_config.cache_config
        return cache.num_gpu_blocks * cache.block_size if cache.num_gpu_blocks else None

    @property
    def leads(self) -> bool:
        return dist.get_rank() == self.leader

    def share(self, orders: Orders) -> Orders:
        if self.peers is None:
            return orders
        box = [orders]
        dist.broadcast_object_list(box, src=self.leader, group=self.peers)
        return box[0]

    def score(self, token_ids: Sequence[int]) -> list[float]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
        self._add("score", token_ids, params)
        while True:
            outputs = self._finished_outputs()
            # Requests that are running go on, and may finish here: the next step hands them over.
            self._early += [self._completed(output) for output in outputs if output.request_id != "score"]
            for output in outputs:
                if output.request_id == "score":
                    return [position[token].logprob for position, token in
                            zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)]

    # ---- weights

    def layout(self, weights: Mapping[str, torch.Tensor], rename: Rename) -> list[Copy]:
        if self.lora:
            self.found = Layout([Copy(name, whole(a.shape), name, whole(a.shape)) for name, a in weights.items()], [])
        else:
            self.found = self.llm.collective_rpc(find_layout, args=(weights, rename))[0]
        return self.found.copies

    def write_weights(self, writes: Iterable[list[Write]], inspect: Inspect | None = None) -> None:
        if self.lora:
            self.llm.collective_rpc(load_adapter, args=(self.found, writes, inspect, self.lora))
        else:
            self.llm.collective_rpc(reload, args=(self.found, writes, inspect))

    def load_weights(self, writes: Iterable[list[Write]], version: int, inspect: Inspect | None = None) -> None:
        super().load_weights(writes, version, inspect)
        self.engine.engine_core.set_weight_version(str(version))
        # Cached keys and values, of running requests too, belong to the old weights.
        self.engine.reset_prefix_cache(reset_running_requests=True)

    # ---- memory

    def sleep(self) -> None:
        """Discard weights and KV cache (CUDA); a CPU engine keeps both: vLLM offers no release there.

        Weights that no sync brings back, those beneath adapters, wait in CPU memory.
        """
        super().sleep()
        if self.cuda:
            self.llm.sleep(level=1 if self.lora else 2)

    def wake(self) -> None:
        super().wake()
        if self.cuda:
            self.llm.wake_up(tags=["weights"])

    def wake_cache(self) -> None:
        if self.cuda:
            self.llm.wake_up(tags=["kv_cache"])

    def close(self) -> None:
        """Shut vLLM down; it must happen before the process group goes, which others in this process go on using."""
        if self.closed:
            return
        from vllm.v1.engine import core

        self.closed = True
        VLLMEngine.open_engines -= 1
        # As if the process were its own, vLLM would end every process group here.
        theirs, core.cleanup_dist_env_and_memory = core.cleanup_dist_env_and_memory, _leave_groups
        try:
            self.engine.engine_core.shutdown()
        finally:
            core.cleanup_dist_env_and_memory = theirs


def rollout_dtype(cfg: RolloutConfig, device: torch.device) -> str:
    """`cfg.dtype`, with `auto` resolved: bfloat16 on CUDA, float32 on CPU (where bfloat16 is emulated)."""
    if cfg.dtype != "auto":
        return cfg.dtype
    return "bfloat16" if device.type == "cuda" else "float32"


def _cache_bytes(model_path: Path, cfg: RolloutConfig, trust_remote_code: bool) -> int:
    """Bytes of the KV cache on CPU: `kv_cache_gib`, or what `max_running` full sequences take if that is less.

    vLLM writes the whole cache once, so what is never used would be resident memory all the same.
    """
    limit = int(cfg.kv_cache_gib * 2**30)
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code, local_files_only=True)
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    size = getattr(config, "head_dim", None)
    if not heads or not size or getattr(config, "kv_lora_rank", None):
        return limit  # another kind of cache
    longest = -(-cfg.context // CPU_BLOCK) * CPU_BLOCK
    tokens = (cfg.max_running + 2) * longest
    per_token = 2 * config.num_hidden_layers * -(-heads // cfg.tensor_parallel) * size * 4
    return min(limit, tokens * per_token)


def _peers(tensor_parallel: int) -> tuple[dist.ProcessGroup | None, int]:
    """This rank's tensor-parallel group (None when alone) and the rank that leads it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if world % tensor_parallel:
        raise ConfigError(f"cluster.ranks must be divisible by policy.rollout.tensor_parallel, "
                          f"got {world} and {tensor_parallel}.")
    leader = rank - rank % tensor_parallel
    if tensor_parallel == 1:
        return None, leader
    ranks = [list(range(first, first + tensor_parallel)) for first in range(0, world, tensor_parallel)]
    group, _ = dist.new_subgroups_by_enumeration(ranks, backend="gloo")
    return group, leader


def _leave_groups() -> None:
    """End vLLM's process groups unless another engine uses them, so that the next one can make its own."""
    from vllm.distributed import parallel_state

    if not VLLMEngine.open_engines:
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
        parallel_state._WORLD = parallel_state._NODE_COUNT = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _count_ranks_eagerly() -> None:
    """Keep vLLM from compiling its token-rank count: seconds, and a C compiler, for a sum over a small matrix."""
    from vllm.v1.sample import sampler

    compiled = sampler.batched_count_greater_than
    sampler.batched_count_greater_than = getattr(compiled, "_torchdynamo_orig_callable", compiled)


def _hide_llvm() -> None:
    """Let vLLM start in a process that has imported numba.

    While it replaces its kernels, vLLM reads the `__dict__` of every object in every module; that of llvmlite's
    library is made up on demand, as a function of that name.
    """
    llvm = sys.modules.get("llvmlite.binding.ffi")
    if llvm is not None:
        llvm.lib._fntab["__dict__"] = {}


def _leave_transformers_alone() -> None:
    """Keep vLLM from changing a transformers class, of which training holds a model in this process.

    Architectures that vLLM has no code for run by their transformers classes; to compile them, vLLM replaces the
    class's `__init__` and `__call__`. Without that they run eagerly.
    """
    from vllm.model_executor.models.transformers.base import Base

    Base._decorate_for_torch_compile = lambda model: None


def _name_shared_memory() -> str:
    """Give vLLM's shared-memory segments (tensor parallelism on CPU) a name of this engine's own.

    Under an external launcher all of a machine's engines would share one name: a second run, or one after a
    crash, finds it taken and fails.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    box = [uuid.uuid4().hex[:12]]
    dist.broadcast_object_list(box, src=0)
    name = f"hybridrl-{box[0]}"
    _CPUSHMDistributed.make_group_name = staticmethod(
        lambda communicator: f"{name}-{communicator.unique_name}-{'-'.join(map(str, communicator.ranks))}")
    return name


def _unlink_shared_memory(name: str) -> None:
    """Drop the segments' names once every peer has mapped them, so that not even a killed run leaves one."""
    dist.barrier()
    for segment in Path("/dev/shm").glob(f"*{name}*"):
        segment.unlink(missing_ok=True)


def _completion(request_output: Any, experts: torch.Tensor | None) -> Completion:
    output = request_output.outputs[0]
    token_ids = list(output.token_ids)
    versions: list[int] = []
    for span in output.weight_versions or []:
        versions += [int(span.version)] * (span.end - span.start)
    reason = output.finish_reason if output.finish_reason in ("stop", "length") else "aborted"
    return Completion(token_ids, list(output.logprobs.logprobs), versions, reason, experts, _scores(request_output))


def _scores(request_output: Any) -> list[PromptScore] | None:
    if request_output.prompt_logprobs is None:
        return None
    scores = []
    for position, token in zip(list(request_output.prompt_logprobs)[1:], request_output.prompt_token_ids[1:],
                               strict=True):
        top_id = max(position, key=lambda other: position[other].logprob)
        scores.append(PromptScore(position[token].logprob, top_id, position[top_id].logprob))
    return scores


def _one_line(error: BaseException) -> str:
    """The line that gives the reason: of a pydantic error the one after its heading, else the last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line.partition(" [type=")[0] for line in lines if line.startswith("Value error, ")]
    return ([type(error).__name__, *lines, *reasons][-1]).removeprefix("Value error, ").rstrip(".") + "."
