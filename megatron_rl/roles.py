"""Policy, critic, reference: a model with its weights, and what trains it."""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl import platform
from megatron_rl.algorithms.advantages import NEEDS_CRITIC
from megatron_rl.batch import MicroBatch
from megatron_rl.initialize import Topology
from megatron_rl.logprobs import Head, LogprobOptions, logprob_head
from megatron_rl.models.config import HFConfig, ModelOptions, dims, read_hf_config
from megatron_rl.models.gpt import build_model
from megatron_rl.models.heads import score_head, value_head
from megatron_rl.models.optimizer import OptimizerOptions, build_optimizer, wrap_ddp
from megatron_rl.offload import ALL_STAY, OffloadOptions, Residence
from megatron_rl.rollout.engine import TrainedWeights
from megatron_rl.weights.arch import Role as Kind
from megatron_rl.weights.dist_io import hf_folder, is_dist_folder, load_weights
from megatron_rl.weights.hf_io import export_model, layout_of, load_model, parameters_of
from megatron_rl.weights.layouts import hf_shapes, megatron_shards


@dataclass(frozen=True)
class Role:
    """A model on this rank. Frozen roles (the reference) have neither optimizer nor schedule."""

    name: str  # policy, critic, reference or reward
    kind: Kind
    folder: str  # where its config.json and tokenizer are
    hf: HFConfig
    options: ModelOptions
    chunks: list[torch.nn.Module]
    head: Head  # of forward_only
    training_head: Head
    optimizer: Any
    schedule: Any
    memory: Residence  # when its parts are on the device
    new_head: bool  # a value head that did not come from the folder
    bytes_to_come: int  # that the optimizer's moments take on this rank in the first step
    bytes_held: int  # that building it took on this rank's device: weights, gradients, master weights


def model_options(args: argparse.Namespace) -> ModelOptions:
    """The flags of group model, as models/gpt.py takes them."""
    full = args.recompute_granularity == "full"
    return ModelOptions(
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        sequence_parallel=args.sequence_parallel,
        transformer_impl=args.transformer_impl,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method if full else None,
        recompute_num_layers=args.recompute_num_layers if full else None,
        recompute_modules=tuple(args.recompute_modules),
        overrides={"fp32_residual_connection": args.fp32_residual_connection} | args.transformer_config,
    )


def optimizer_options(args: argparse.Namespace, lr: float, steps: int) -> OptimizerOptions:
    """The flags of group optimizer; `steps` is the number of optimizer steps of the run."""
    return OptimizerOptions(
        lr=lr,
        min_lr=min(args.min_lr, lr),
        lr_warmup_steps=args.lr_warmup_iters,
        lr_decay_steps=args.lr_decay_iters or max(steps, args.lr_warmup_iters + 1),
        lr_decay_style=args.lr_decay_style,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        clip_grad=args.clip_grad,
        use_distributed_optimizer=args.use_distributed_optimizer,
        overlap_grad_reduce=args.overlap_grad_reduce,
    )


def _rollout_logprobs(args: argparse.Namespace) -> LogprobOptions:
    return LogprobOptions(args.temperature, args.logprob_chunk_tokens, entropy=True)


def _data_logprobs(args: argparse.Namespace) -> LogprobOptions:
    """Of texts that nobody sampled: no temperature."""
    return LogprobOptions(chunk_tokens=args.logprob_chunk_tokens, entropy=False)


def _value_head(hidden_TH: Tensor, weight_1H: Tensor, micro: MicroBatch) -> Tensor:
    return value_head(hidden_TH, weight_1H, micro)[None]


def _score_head(hidden_TH: Tensor, weight_1H: Tensor, micro: MicroBatch) -> Tensor:
    return score_head(hidden_TH, weight_1H, micro)[None]


def build_role(
    name: str,
    folder: str,
    args: argparse.Namespace,
    topology: Topology,
    kind: Kind = "lm",
    training: OptimizerOptions | None = None,
    logprobs: LogprobOptions | None = None,
    training_entropy: bool = False,
    offload: OffloadOptions = ALL_STAY,
) -> Role:
    """Builds a model, fills it from an HF folder or from a role's folder of a checkpoint, and adds DDP, optimizer and
    schedule where it is to be trained.

    A language model has `logprobs`; training_entropy: the loss needs the entropy that `logprobs` asks for.
    """
    before = platform.memory_allocated()
    source = hf_folder(folder)
    hf, options = read_hf_config(source), model_options(args)
    chunks: list[torch.nn.Module] = list(build_model(hf, topology, options, kind))
    if is_dist_folder(folder):
        loaded = load_weights(folder, hf, chunks, kind)
    else:
        loaded = load_model(folder, hf, chunks, topology, kind, options.transformer_impl, cast=True)
    optimizer = schedule = None
    if training is not None:
        chunks = list(wrap_ddp(chunks, topology, training))
        optimizer, schedule = build_optimizer(chunks, training)
    else:
        for chunk in chunks:
            chunk.requires_grad_(False)
    head = training_head = _value_head
    if logprobs is not None:
        in_training = replace(logprobs, entropy=logprobs.entropy and training_entropy)
        head, training_head = (
            logprob_head(hf.vocab, topology.at.tp, topology.groups.tp, options) for options in (logprobs, in_training)
        )
    return Role(
        name=name,
        kind=kind,
        folder=str(source),
        hf=hf,
        options=options,
        chunks=chunks,
        head=head,
        training_head=training_head,
        optimizer=optimizer,
        schedule=schedule,
        memory=Residence(chunks, optimizer, offload),
        new_head=loaded.new_head,
        bytes_to_come=_moments(chunks, training, topology) if training is not None else 0,
        bytes_held=platform.memory_allocated() - before,
    )


def _moments(chunks: list[torch.nn.Module], training: OptimizerOptions, topology: Topology) -> int:
    """Bytes of Adam's two float32 moments on this rank."""
    count = sum(param.numel() for chunk in chunks for param in chunk.parameters())
    return 8 * count // (topology.dp_size if training.use_distributed_optimizer else 1)


def _policy_steps(args: argparse.Namespace, iters: int) -> int:
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    return max(iters, 1) * args.update_epochs * -(-samples // (args.global_batch_size or samples))


def build_policy(args: argparse.Namespace, topology: Topology) -> Role:
    steps = _policy_steps(args, args.train_iters - args.critic_warmup_iters)
    training = optimizer_options(args, args.lr, steps)
    logprobs, entropy = _rollout_logprobs(args), args.entropy_coef > 0
    offload = OffloadOptions(gradients=args.offload_gradients, optimizer=args.offload_optimizer)
    return build_role("policy", args.hf_model, args, topology, "lm", training, logprobs, entropy, offload)


def build_critic(args: argparse.Namespace, topology: Topology) -> Role | None:
    """None for estimators without a critic."""
    if args.advantage_estimator not in NEEDS_CRITIC:
        return None
    lr = args.lr if args.critic_lr is None else args.critic_lr
    training = optimizer_options(args, lr, _policy_steps(args, args.train_iters))
    folder = args.critic_hf_model or args.hf_model
    offload = OffloadOptions(args.offload_critic, args.offload_gradients, args.offload_optimizer)
    return build_role("critic", folder, args, topology, "value", training, offload=offload)


def build_reference(args: argparse.Namespace, topology: Topology) -> Role | None:
    """None where no KL is asked for."""
    if args.kl_coef == 0:
        return None
    folder, offload = args.reference_hf_model or args.hf_model, OffloadOptions(weights=args.offload_reference)
    return build_role("reference", folder, args, topology, logprobs=_rollout_logprobs(args), offload=offload)


def build_reward_role(folder: str, args: argparse.Namespace, topology: Topology) -> Role:
    """A model that scores texts at their last token (rewards/model.py); frozen."""
    offload = OffloadOptions(weights=args.offload_reference)
    return replace(build_role("reward", folder, args, topology, "value", offload=offload), head=_score_head)


def build_preference_policy(args: argparse.Namespace, topology: Topology, steps: int) -> Role:
    """The policy of train_dpo.py; `steps` is the number of optimizer steps of the run."""
    training = optimizer_options(args, args.lr, steps)
    return build_role("policy", args.hf_model, args, topology, "lm", training, _data_logprobs(args))


def build_preference_reference(args: argparse.Namespace, topology: Topology) -> Role:
    folder = args.reference_hf_model or args.hf_model
    return build_role("reference", folder, args, topology, logprobs=_data_logprobs(args))


def trained_weights(role: Role, topology: Topology) -> TrainedWeights:
    """What every rank holds of a language model, for the engine's plan."""
    where = [(at.tp, at.pp, at.ep) for at in topology.everyone]
    shapes, impl = dims(role.hf), role.options.transformer_impl
    shards, of_rank = megatron_shards(shapes, layout_of(role.hf, topology), where, role.kind, impl)
    return TrainedWeights(parameters_of(role.chunks), shards, of_rank, hf_shapes(shapes, role.kind))


def export_role(role: Role, folder: str | Path, topology: Topology) -> None:
    """Writes the role as an HF folder that transformers and vLLM load; collective."""
    impl = role.options.transformer_impl
    with role.memory.for_forward():
        export_model(role.chunks, role.hf, topology, folder, role.folder, role.kind, impl)


def load_tokenizer(folder: str, flag: str = "--hf-model") -> Any:
    """The folder's tokenizer; ValueError where it has none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if len(tokenizer) <= len(tokenizer.all_special_ids):  # some classes make an empty one where files are missing
            raise ValueError(f"the {type(tokenizer).__name__} has {len(tokenizer)} token(s)")
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())  # transformers writes several lines
        raise ValueError(f"{flag} {folder} has no tokenizer that transformers can load: {why}") from error
    return tokenizer
