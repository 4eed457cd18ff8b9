"""From flags to the objects that train_ppo.py works with: the only code beside the scripts that reads args."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from megatron_rl import platform
from megatron_rl.algorithms.corrections import CorrectionOptions, parse_rejection
from megatron_rl.algorithms.kl import AdaptiveKL, FixedKL, KLController
from megatron_rl.algorithms.losses import PolicyLossOptions
from megatron_rl.algorithms.preference import NO_REFERENCE, PreferenceOptions
from megatron_rl.arguments import layout_sizes
from megatron_rl.batch import Batch, PreferencePair
from megatron_rl.data import preferences
from megatron_rl.data.packing import PackingOptions, plan_micro_batches
from megatron_rl.data.prompts import PromptDataset, PromptOptions, load_prompts
from megatron_rl.data.text import TextFormat
from megatron_rl.initialize import Topology, initialize
from megatron_rl.memory.estimate import kv_bytes_of_sequence
from megatron_rl.metrics import Recorder, bytes_text, open_recorder
from megatron_rl.models.config import (
    HFConfig,
    attention_cost,
    check_layout,
    check_length,
    dims,
    longest_sequence,
    read_hf_config,
)
from megatron_rl.objectives import (
    MinibatchOptions,
    PolicyObjective,
    policy_objective,
    preference_objective,
    value_objective,
)
from megatron_rl.reference_cache import model_digest
from megatron_rl.rewards.model import RewardModel, RewardText, check_head, tokenizer_difference
from megatron_rl.rewards.router import RuleRewards, entries_from_config, entries_from_specs
from megatron_rl.roles import Role, build_reward_role, load_tokenizer, trained_weights
from megatron_rl.rollout.engine import Engine, EngineOptions, SamplingOptions, TrainedWeights
from megatron_rl.rollout.hf_backend import HFEngine, RolloutEngine
from megatron_rl.rollout.startup import can_place, eos_token_ids
from megatron_rl.step import Loss, Plan
from megatron_rl.weights.arch import Dims
from megatron_rl.weights.dist_io import hf_folder
from megatron_rl.weights.overlap import Overlap
from megatron_rl.weights.plan import Placement, best_placement, replicas_of
from megatron_rl.weights.vllm_like import vllm_like_blocks


@dataclass(frozen=True)
class Run:
    """What every stage of a script needs."""

    args: argparse.Namespace
    topology: Topology
    recorder: Recorder
    tokenizer: Any


def start(args: argparse.Namespace, tokenizer: Any) -> Run:
    """Process groups, seeds, and the recorder of rank 0."""
    platform.quiet(args.verbose)
    sizes = layout_sizes(args)
    topology = initialize(sizes.tp, sizes.pp, sizes.vpp, sizes.ep, args.seed, args.distributed_timeout_minutes)
    return Run(args, topology, open_recorder(args.output_dir, topology.is_main, args.progress), tokenizer)


def prompt_options(args: argparse.Namespace) -> PromptOptions:
    return PromptOptions(
        files=tuple(args.train_data),
        max_prompt_length=args.max_prompt_length,
        prompt_key=args.prompt_key,
        label_key=args.label_key,
        apply_chat_template=args.apply_chat_template,
        system_prompt=args.system_prompt,
        overlong=args.overlong_prompts,
        dataset_class=args.dataset_class,
        weights=tuple(args.data_weights or ()),
        seed=args.seed,
        shuffle=args.shuffle,
        drop_last=args.drop_last,
    )


def check_end_tokens(args: argparse.Namespace, hf: HFConfig) -> None:
    """ValueError where an end-of-sequence token that the folder names is beyond the vocabulary."""
    if ends := [token for token in eos_token_ids(args.hf_model) if not 0 <= token < hf.vocab]:
        raise ValueError(
            f"--hf-model {args.hf_model}: config.json gives a vocabulary of {hf.vocab}, but eos_token_id {ends[0]} is "
            "outside of it"
        )


def check_tokens(args: argparse.Namespace, hf: HFConfig, sequences: Iterable[Sequence[int]]) -> None:
    """ValueError where the tokenizer of --hf-model goes beyond its vocabulary.

    Split over TP, an embedding takes such a token for one of another rank: numbers would be wrong without a word.
    """
    named = f"--hf-model {args.hf_model}: config.json gives a vocabulary of {hf.vocab}, but"
    if (highest := max(max(ids, default=0) for ids in sequences)) >= hf.vocab:
        raise ValueError(f"{named} its tokenizer makes token {highest} of the data: the two are not of one model")


def load_eval_prompts(args: argparse.Namespace, tokenizer: Any) -> PromptDataset | None:
    """The prompts of --eval-data, by the rules of the others; None without the flag."""
    if not args.eval_data:
        return None
    options = replace(
        prompt_options(args), files=tuple(args.eval_data), dataset_class=None, weights=(), flag="--eval-data"
    )
    return load_prompts(options, tokenizer)


def evaluation_options(args: argparse.Namespace) -> SamplingOptions:
    """Greedy for one sample of a prompt."""
    greedy = sampling_options(args, greedy=True)
    return greedy if args.eval_samples_per_prompt == 1 else replace(greedy, temperature=args.eval_temperature)


def build_rewards(
    args: argparse.Namespace, prompts: Sequence[PromptDataset | None], hf: HFConfig, tokenizer: Any
) -> RuleRewards:
    """The rules, checked against every row of `prompts`: one that nothing scores is an error at launch, as is a reward
    model that cannot be built."""
    entries = entries_from_config(args.reward_config) if args.reward_config else None
    entries = entries or entries_from_specs(args.reward, args.reward_model)
    try:
        rewards = RuleRewards(entries, args.reward_workers, args.reward_timeout)
    except ValueError as error:
        raise ValueError(f"--reward-config {args.reward_config}: {error}" if args.reward_config else error) from error
    for data in filter(None, prompts):
        rewards.check_rows([(p.index, p.row) for p in data.items])
    for folder in rewards.models.values():
        own = read_hf_config(hf_folder(folder))
        check_head(folder, own)
        check_layout(own, layout_sizes(args), args.sequence_parallel)
        if reward_text(args, folder, hf, tokenizer)[0].own is None:
            longest = args.max_prompt_length + args.max_response_length
            check_length(own, longest, f"prompts and responses of {longest} tokens with reward model {folder}")
    return rewards


def reward_text(args: argparse.Namespace, folder: str, hf: HFConfig, tokenizer: Any) -> tuple[RewardText, str]:
    """How a reward model reads the samples of the policy (`hf`, `tokenizer`), and a line that says it."""
    source = hf_folder(folder)
    own, model = load_tokenizer(str(source), "reward model"), read_hf_config(source)
    limit = min(longest_sequence(model), args.max_tokens_per_micro_batch)
    difference = tokenizer_difference(tokenizer, hf.vocab, own, model.vocab)
    if difference is None:
        return RewardText(None, limit), "its tokenizer is the policy's, token ids go in as they are"
    templated = bool(own.chat_template)
    form = TextFormat(own, templated, args.system_prompt if templated else None)
    how = "chat template" if templated else "tokenizer (it has no chat template)"
    return RewardText(form, limit, args.prompt_key), (
        f"its tokenizer differs from the policy's ({difference}), texts are tokenised again with its own {how}"
    )


def build_reward_models(run: Run, rewards: RuleRewards, hf: HFConfig) -> tuple[RewardModel, ...]:
    """The reward models of --reward-model and --reward-config on the policy's layout; `hf` is the policy's."""
    models = []
    for name, folder in rewards.models.items():
        text, says = reward_text(run.args, folder, hf, run.tokenizer)
        role = build_reward_role(folder, run.args, run.topology)
        models.append(RewardModel(name, role, text, packing_options(run.args)))
        run.recorder.print(f"{role.name:<10}{name}: {says}")
    return tuple(models)


def build_engine(args: argparse.Namespace, roles: list[Role | None], topology: Topology) -> RolloutEngine:
    """The vLLM engine, or transformers in its place, on the live weights of the first role, beside all of them."""
    policy = roles[0]
    assert policy is not None, "the policy comes first"
    tp = args.rollout_tensor_parallel_size or args.tensor_model_parallel_size
    weights = trained_weights(policy, topology)
    options = EngineOptions(
        max_model_len=args.max_prompt_length + args.max_response_length,
        dtype=rollout_dtype(args),
        tensor_parallel_size=tp,
        kv_cache_bytes=_kv_cache_bytes(args, roles, tp, topology) if args.rollout_backend == "vllm" else None,
        share_weights=args.rollout_weights == "alias",
        placement=_placement(args, weights, dims(policy.hf), tp, topology),
        bucket_bytes=int(args.reshard_bucket_mb * (1 << 20)),
        fp32_residual=_fp32_residual(policy),
        with_tokenizer=bool(args.stop),
        seed=args.seed,
        vllm_args={key: value for key, value in args.vllm_args.items() if key != "dtype"},
    )
    backend = {"vllm": Engine, "hf": HFEngine}[args.rollout_backend]
    return backend(policy.folder, options, topology, weights)


def _fp32_residual(policy: Role) -> bool:
    from megatron.core.utils import get_model_config

    return get_model_config(policy.chunks[0]).fp32_residual_connection


def rollout_dtype(args: argparse.Namespace) -> torch.dtype:
    """Training's, or that of --vllm-args dtype."""
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    return dtypes[args.vllm_args.get("dtype", "bfloat16" if args.bf16 else "float32")]


def _placement(
    args: argparse.Namespace, weights: TrainedWeights, sizes: Dims, tp: int, topology: Topology
) -> Placement | None:
    """Which ranks share an engine; None: neighbours, as also where this torch cannot make the better groups."""
    if args.rollout_placement == "consecutive" or topology.world_size % tp:
        return None
    like = [vllm_like_blocks(sizes, rank, tp) for rank in range(tp)]
    best = best_placement(Overlap(weights.shards, like), weights.shard_of_rank, topology.gpus_per_node)
    return best if can_place(replicas_of(best)) else None


def _kv_cache_bytes(args: argparse.Namespace, roles: list[Role | None], tp: int, topology: Topology) -> int:
    """What the step's samples need, but no more than the optimizers, which take memory in the first step, will leave.

    ValueError where not even one sequence fits.
    """
    if args.kv_cache_gb is not None:
        return int(args.kv_cache_gb * 1e9)
    longest = args.max_prompt_length + args.max_response_length
    a_sequence = kv_bytes_of_sequence(roles[0].hf, tp, longest, rollout_dtype(args).itemsize)
    replicas = topology.world_size // tp
    wanted = -(-args.rollout_batch_size * args.n_samples_per_prompt // replicas) * a_sequence
    platform.empty_cache()
    free, total = platform.device_memory()
    if platform.device_type() == "cpu":
        free //= topology.gpus_per_node  # the machine's memory is everybody's
    resident = [role for role in roles if role is not None and not role.memory.options.optimizer]
    room = free - total // 8 - sum(role.bytes_to_come for role in resident)
    if room < a_sequence:
        raise ValueError(
            f"{bytes_text(free)} are free beside the models and {bytes_text(total // 8)} stay in reserve: no room for "
            f"a KV cache of one sequence ({bytes_text(a_sequence)}). Lower --max-response-length, raise "
            "--tensor-model-parallel-size, or set --kv-cache-gb"
        )
    return min(wanted, room)


def sampling_options(args: argparse.Namespace, greedy: bool = False) -> SamplingOptions:
    """How responses are drawn; greedy: the likeliest token each time, for baselines and for the eye."""
    if greedy:
        return SamplingOptions(args.max_response_length, temperature=0.0, stop=tuple(args.stop), logprobs=False)
    return SamplingOptions(
        max_tokens=args.max_response_length,
        min_tokens=args.min_response_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=max(args.top_k, 0),
        stop=tuple(args.stop),
    )


def packing_options(args: argparse.Namespace) -> PackingOptions:
    return PackingOptions(args.max_tokens_per_micro_batch, args.micro_batch_size, _attention_cost(args.hf_model))


@cache
def _attention_cost(folder: str) -> float:
    return attention_cost(read_hf_config(folder))


def build_kl(args: argparse.Namespace) -> KLController:
    if args.kl_target is None:
        return FixedKL(args.kl_coef)
    return AdaptiveKL(args.kl_coef, args.kl_target, args.kl_horizon)


def restored_kl(kl: KLController, coefficient: float) -> KLController:
    """An adaptive coefficient goes on from the checkpoint's; a fixed one is the flag's."""
    return replace(kl, coefficient=coefficient) if isinstance(kl, AdaptiveKL) else kl


def correction_options(args: argparse.Namespace) -> CorrectionOptions:
    return CorrectionOptions(
        level=args.rollout_correction,
        threshold=args.rollout_correction_threshold,
        batch_normalize=args.rollout_correction_normalize,
        rejections=tuple(parse_rejection(text) for text in args.rollout_reject),
    )


def policy_loss_of(args: argparse.Namespace, kl_coefficient: float, tokens: int = 1) -> Loss:
    """The policy's objective, `tokens` being the response tokens of the step. With --kl-in loss the KL acts in it."""
    options = PolicyLossOptions(args.clip_low, args.clip_high, args.dual_clip)
    in_loss = kl_coefficient if args.kl_in == "loss" else 0.0
    return policy_objective(
        PolicyObjective(args.policy_loss, options, args.entropy_coef, in_loss, args.kl_estimator, tokens)
    )


def value_loss_of(args: argparse.Namespace) -> Loss:
    return value_objective(args.value_clip)


def minibatch_options(args: argparse.Namespace) -> MinibatchOptions:
    return MinibatchOptions(
        size=args.global_batch_size,
        epochs=args.update_epochs,
        aggregation=args.loss_aggregation,
        fixed_length=args.loss_fixed_length or args.max_response_length,
        seed=args.seed,
    )


def pair_options(args: argparse.Namespace) -> preferences.PreferenceOptions:
    return preferences.PreferenceOptions(
        files=tuple(args.train_data),
        max_length=args.max_length,
        max_prompt_length=args.max_prompt_length,
        prompt_key=args.prompt_key,
        chosen_key=args.chosen_key,
        rejected_key=args.rejected_key,
        apply_chat_template=args.apply_chat_template,
        system_prompt=args.system_prompt,
        overlong=args.overlong_prompts,
        dataset_class=args.dataset_class,
        weights=tuple(args.data_weights or ()),
        seed=args.seed,
        shuffle=args.shuffle,
        drop_last=args.drop_last,
    )


def load_held_out(args: argparse.Namespace, tokenizer: Any) -> list[PreferencePair]:
    """The pairs of --eval-data, by the rules of the others; none without the flag."""
    if not args.eval_data:
        return []
    options = replace(
        pair_options(args), files=tuple(args.eval_data), dataset_class=None, weights=(), flag="--eval-data"
    )
    return preferences.load_preferences(options, tokenizer).items


def pairs_per_step(args: argparse.Namespace) -> int:
    return args.global_batch_size or 32


def preference_steps(args: argparse.Namespace, pairs: preferences.PreferenceDataset) -> int:
    """Optimizer steps of the run; ValueError where the data does not fill one batch."""
    size = pairs_per_step(args)
    if not pairs.batches_per_epoch(size):
        raise ValueError(
            f"--train-data has {len(pairs)} pairs, less than --global-batch-size {size}: lower it, or --no-drop-last"
        )
    return args.train_iters or args.epochs * pairs.batches_per_epoch(size)


def plan_pairs(args: argparse.Namespace, batch: Batch, topology: Topology) -> Plan:
    """Micro-batches of whole pairs; --micro-batch-size counts pairs here."""
    limit = None if args.micro_batch_size is None else 2 * args.micro_batch_size
    units = [(i, i + 1) for i in range(0, len(batch), 2)]
    options = PackingOptions(args.max_tokens_per_micro_batch, limit, _attention_cost(args.hf_model))
    return plan_micro_batches([len(s) for s in batch.sequences], topology.dp_size, options, units)


def needs_reference(args: argparse.Namespace) -> bool:
    return not args.reference_free and args.dpo_loss not in NO_REFERENCE


def preference_loss_of(args: argparse.Namespace) -> Loss:
    return preference_objective(
        args.dpo_loss,
        PreferenceOptions(
            beta=args.beta,
            label_smoothing=args.label_smoothing,
            simpo_gamma=args.simpo_gamma,
            rpo_alpha=args.rpo_alpha,
            length_normalize=args.length_normalize,
            f_divergence=args.f_divergence,
            f_alpha=args.f_alpha,
        ),
    )


def reference_digest(args: argparse.Namespace, topology: Topology) -> str:
    """Of the reference's folder and the flags that change its numbers; collective."""
    numerics = {"bf16": args.bf16, "transformer_config": {k: str(v) for k, v in args.transformer_config.items()}}
    return model_digest(args.reference_hf_model or args.hf_model, numerics, topology)
