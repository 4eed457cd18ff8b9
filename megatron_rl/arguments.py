"""From argv to a namespace that is parsed once, validated once and never written again. The flags are in flags.py."""

import argparse
import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import megatron_rl
from megatron_rl.models.config import HFConfig, Sizes, check_layout, check_length, read_hf_config
from megatron_rl.models.overrides import parse_overrides
from megatron_rl.weights.dist_io import hf_folder
from megatron_rl.weights.target import check_replaceable

ENGINE_DTYPES = ("bfloat16", "float16", "float32")  # of --vllm-args dtype


class _Formatter(argparse.HelpFormatter):
    """Every help text ends with its default."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=42, width=119)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, argparse.SUPPRESS, [], {}) or action.option_strings[:1] == ["--help"]:
            return action.help
        return f"{action.help} (default: %(default)s)"


def build_parser(prog: str, groups: dict[str, Any]) -> argparse.ArgumentParser:
    usage = f"torchrun --nproc_per_node N {prog} --hf-model DIR --train-data FILE [flags]"
    parser = argparse.ArgumentParser(prog=prog, usage=usage, formatter_class=_Formatter, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"megatron_rl {megatron_rl.__version__}")
    parser.add_argument(
        "--config", metavar="FILE.yaml", help="defaults for any flag, 'flag-name: value' lines; the command line wins"
    )
    for name, add_flags in groups.items():
        add_flags(parser.add_argument_group(name))
    return parser


def parse(prog: str, groups: dict[str, Any], argv: Sequence[str]) -> argparse.Namespace:
    """argv -> namespace. Unknown flags, values and config keys end the program with one line (exit code 2)."""
    parser = build_parser(prog, groups)
    config = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    config.add_argument("--config")
    path = config.parse_known_args(argv)[0].config
    argv = [*(_config_flags(parser, path) if path else []), *argv]
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        names = [option for action in parser._actions for option in action.option_strings]
        hints = [f"{u}{_did_you_mean(u.split('=')[0], names)}" for u in unknown if u.startswith("-")] or unknown
        parser.error("unknown: " + ", ".join(hints))
    return known


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _config_flags(parser: argparse.ArgumentParser, path: str) -> list[str]:
    """The flags that a YAML file spells, as if typed before the others."""
    import yaml

    if not os.path.isfile(path):
        parser.error(f"--config {path}: " + ("a folder" if os.path.isdir(path) else "no such file"))
    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file) or {}
    except yaml.YAMLError as error:
        parser.error(f"--config {path}: not YAML: {str(error).splitlines()[0]}")
    if not isinstance(values, dict):
        parser.error(f"--config {path}: wants 'flag-name: value' lines, found a {type(values).__name__}")
    actions = {option.removeprefix("--"): action for action in parser._actions for option in action.option_strings}
    flags: list[str] = []
    for key, value in values.items():
        name = str(key).replace("_", "-")
        if name not in actions or name in ("config", "help", "version"):
            parser.error(f"--config {path}: unknown key {key}{_did_you_mean(name, list(actions))}")
        switch = isinstance(actions[name], argparse.BooleanOptionalAction)
        if switch and not isinstance(value, bool):
            parser.error(f"--config {path}: {key} is true or false, not {value!r}")
        if isinstance(value, list) and actions[name].nargs is None:
            parser.error(f"--config {path}: {key} takes one value, not {value!r}")
        if isinstance(value, bool):
            flags += [f"--{name}"] if value else [f"--no-{name}"] if switch else []
        elif isinstance(value, dict):
            flags += [f"--{name}", *(f"{k}={v}" for k, v in value.items())]
        elif value is not None:
            flags += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return flags


def world_size(args: argparse.Namespace) -> int:
    """torchrun's number of ranks; --world-size in a dry run."""
    running = int(os.environ.get("WORLD_SIZE", "1"))
    if args.world_size is None:
        return running
    if not args.dry_run:
        raise ValueError(f"--world-size {args.world_size} goes with --dry-run; torchrun started {running} ranks")
    return args.world_size


def layout_sizes(args: argparse.Namespace) -> Sizes:
    return Sizes(
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        vpp=args.num_virtual_stages_per_pipeline_rank,
        ep=args.expert_model_parallel_size,
    )


def check_files(paths: Sequence[str], flag: str) -> None:
    for path in paths:
        if not os.path.isfile(path):
            raise ValueError(f"{flag} {path}: no such file")


def check_output(folder: str, flag: str) -> None:
    """ValueError where the folder is not there and cannot be made, or cannot be written; makes nothing."""
    there = os.path.abspath(folder)
    while not os.path.exists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        raise ValueError(f"{flag} {folder}: {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{flag} {folder}: no permission to write in {there}")


def check_transformer_config(values: Mapping[str, Any]) -> None:
    """ValueError for a field that megatron-core's TransformerConfig has not, with the nearest that it has."""
    if values:
        from megatron.core.transformer import TransformerConfig

        parse_overrides(TransformerConfig, values)


def check_recomputation(args: argparse.Namespace, hf: HFConfig) -> None:
    """ValueError for flags that the granularity does not read, and modules that the model has not."""
    if args.recompute_granularity != "full":
        if args.recompute_num_layers > 1:
            raise ValueError(f"--recompute-num-layers {args.recompute_num_layers} needs --recompute-granularity full")
        if args.recompute_method != "uniform":
            raise ValueError(f"--recompute-method {args.recompute_method} needs --recompute-granularity full")
    if args.recompute_granularity != "selective" and args.recompute_modules != ["core_attn"]:
        raise ValueError(
            f"--recompute-modules {' '.join(args.recompute_modules)} needs --recompute-granularity selective"
        )
    absent = "mlp" if hf.experts else "moe"
    if absent in args.recompute_modules:
        raise ValueError(f"--recompute-modules {absent}: {args.hf_model} has none, its layers have the other kind")


def validate_shared(args: argparse.Namespace, hf: HFConfig) -> None:
    """What PPO and DPO check before a model is loaded. ValueError with the numbers and the flag to change."""
    ranks, sizes = world_size(args), layout_sizes(args)
    if ranks % (sizes.tp * sizes.pp):
        raise ValueError(
            f"{ranks} ranks are not a multiple of --tensor-model-parallel-size {sizes.tp} x "
            f"--pipeline-model-parallel-size {sizes.pp}: start {sizes.tp * sizes.pp} or a multiple (--nproc_per_node)"
        )
    data_parallel = ranks // (sizes.tp * sizes.pp)
    if data_parallel % sizes.ep:
        raise ValueError(
            f"--expert-model-parallel-size {sizes.ep} does not divide the {data_parallel} data-parallel ranks"
        )
    check_layout(hf, sizes, args.sequence_parallel)
    if args.lr_decay_iters is not None and args.lr_warmup_iters >= args.lr_decay_iters:
        raise ValueError(
            f"--lr-warmup-iters {args.lr_warmup_iters} is not below --lr-decay-iters {args.lr_decay_iters}"
        )
    if args.min_lr > args.lr:
        raise ValueError(f"--min-lr {args.min_lr} is above --lr {args.lr}")
    check_recomputation(args, hf)
    check_transformer_config(args.transformer_config)
    for flag, folder in (("--output-dir", args.output_dir), ("--save", args.save)):
        if folder is not None:
            check_output(folder, flag)
    if args.save_hf:
        for role in ("actor", "critic"):
            check_replaceable(f"{args.output_dir}/{role}")
    for flag, value in (("--save-interval", args.save_interval), ("--keep-last", args.keep_last)):
        if value is not None and args.save is None:
            raise ValueError(f"{flag} {value} needs --save DIR")
    if args.dataset_class is None:
        check_files(args.train_data, "--train-data")
    if args.data_weights is not None and len(args.data_weights) != len(args.train_data):
        raise ValueError(f"{len(args.data_weights)} --data-weights for {len(args.train_data)} --train-data files")


def other_model(folder: str, flag: str) -> HFConfig:
    """The model of another role: of an HF folder, or of a role's folder of a checkpoint."""
    check_files([f"{hf_folder(folder)}/config.json"], flag)
    return read_hf_config(hf_folder(folder))


def check_reference(args: argparse.Namespace, hf: HFConfig, longest: int) -> None:
    """ValueError where the folder of --reference-hf-model cannot be compared with the policy's model `hf` on sequences
    of up to `longest` tokens."""
    folder = args.reference_hf_model
    if folder is None:
        return
    reference = other_model(folder, "--reference-hf-model")
    if reference.head != "lm":
        raise ValueError(f"--reference-hf-model {folder}: this is no causal language model, it has a value head")
    if reference.vocab != hf.vocab:
        raise ValueError(
            f"--reference-hf-model {folder} has a vocabulary of {reference.vocab:,}, --hf-model {args.hf_model} of "
            f"{hf.vocab:,}: their log-probabilities are not of the same tokens"
        )
    check_layout(reference, layout_sizes(args), args.sequence_parallel)
    check_length(reference, longest, f"sequences of {longest} tokens with --reference-hf-model {folder}")


def validate_ppo(args: argparse.Namespace, hf: HFConfig) -> None:
    """validate_shared, and what rollout and PPO add."""
    from megatron_rl.algorithms.advantages import NEEDS_CRITIC, NEEDS_GROUPS
    from megatron_rl.algorithms.corrections import parse_rejection

    validate_shared(args, hf)
    if hf.head != "lm":
        raise ValueError(f"--hf-model {args.hf_model}: a policy is a causal language model, this one has a value head")
    ranks, longest = world_size(args), args.max_prompt_length + args.max_response_length
    lengths = f"--max-prompt-length {args.max_prompt_length} + --max-response-length {args.max_response_length}"
    check_length(hf, longest, f"{lengths} with {args.hf_model}")
    if longest > args.max_tokens_per_micro_batch:
        raise ValueError(
            f"{lengths} = {longest} tokens do not fit --max-tokens-per-micro-batch {args.max_tokens_per_micro_batch}"
        )
    if args.min_response_length > args.max_response_length:
        raise ValueError(
            f"--min-response-length {args.min_response_length} is above --max-response-length "
            f"{args.max_response_length}"
        )
    rollout_tp = args.rollout_tensor_parallel_size or args.tensor_model_parallel_size
    if ranks % rollout_tp:
        raise ValueError(f"--rollout-tensor-parallel-size {rollout_tp} does not divide the {ranks} ranks")
    _validate_engine(args, rollout_tp)
    if hf.heads % rollout_tp:
        raise ValueError(f"--rollout-tensor-parallel-size {rollout_tp} does not divide {hf.heads} attention heads")
    _validate_batches(args)
    if args.n_samples_per_prompt < 2 and args.advantage_estimator in NEEDS_GROUPS:
        raise ValueError(
            f"--advantage-estimator {args.advantage_estimator} compares the samples of a prompt: "
            f"--n-samples-per-prompt {args.n_samples_per_prompt} must be at least 2"
        )
    if bool(args.reward or args.reward_model) == bool(args.reward_config):
        given = ", not both" if args.reward_config else ""
        raise ValueError(f"give either --reward and --reward-model, or --reward-config{given}")
    if args.reward_config:
        check_files([args.reward_config], "--reward-config")
    check_files(args.eval_data, "--eval-data")
    if args.dynamic_sampling and args.n_samples_per_prompt < 2:
        raise ValueError(
            "--dynamic-sampling compares the samples of a prompt: "
            f"--n-samples-per-prompt {args.n_samples_per_prompt} must be at least 2"
        )
    if args.overlong_buffer is not None and args.overlong_buffer > args.max_response_length:
        raise ValueError(
            f"--overlong-buffer {args.overlong_buffer} is more than --max-response-length {args.max_response_length}"
        )
    for text in args.rollout_reject:
        parse_rejection(text)
    if args.critic_warmup_iters and args.advantage_estimator not in NEEDS_CRITIC:
        raise ValueError(
            f"--critic-warmup-iters {args.critic_warmup_iters} has no critic to warm up with --advantage-estimator "
            f"{args.advantage_estimator}"
        )
    if args.dual_clip is not None and args.dual_clip <= 1:
        raise ValueError(f"--dual-clip {args.dual_clip} must be above 1")
    if args.kl_in == "loss" and args.kl_coef and args.kl_estimator == "k1":
        raise ValueError("--kl-estimator k1 has no gradient on average as a loss: with --kl-in loss take k2 or k3")
    check_old_logprobs(args)
    if args.critic_hf_model is not None:
        critic = other_model(args.critic_hf_model, "--critic-hf-model")
        check_layout(critic, layout_sizes(args), args.sequence_parallel)
    if args.kl_coef:
        check_reference(args, hf, longest)
    if args.kl_target is not None and not args.kl_coef:
        raise ValueError(f"--kl-target {args.kl_target} adapts --kl-coef, which is 0")


def check_old_logprobs(args: argparse.Namespace) -> None:
    """ValueError where the ratio's denominator does not go with the other flags."""
    if args.old_logprobs == "rollout" and args.rollout_correction != "none":
        raise ValueError(
            f"--rollout-correction {args.rollout_correction} corrects what --old-logprobs rollout has in its ratio "
            "already: leave one of them out"
        )
    if args.old_logprobs == "update":
        samples = args.rollout_batch_size * args.n_samples_per_prompt
        needs_pass = {
            f"--update-epochs {args.update_epochs}": args.update_epochs > 1,
            f"--global-batch-size {args.global_batch_size} of {samples} samples": (args.global_batch_size or samples)
            < samples,
            f"--rollout-correction {args.rollout_correction}": args.rollout_correction != "none",
            "--rollout-reject": bool(args.rollout_reject),
            "--kl-in reward": bool(args.kl_coef) and args.kl_in == "reward",
            "--kl-target": args.kl_target is not None,
        }
        if found := [flag for flag, needs in needs_pass.items() if needs]:
            raise ValueError(f"--old-logprobs update is for one optimizer step a rollout, without {', '.join(found)}")


def validate_dpo(args: argparse.Namespace, hf: HFConfig) -> None:
    """validate_shared, and what the preference losses add."""
    from megatron_rl.algorithms.preference import NO_REFERENCE, PreferenceOptions, check_preference_options

    validate_shared(args, hf)
    if hf.head != "lm":
        raise ValueError(f"--hf-model {args.hf_model}: a policy is a causal language model, this one has a value head")
    check_length(hf, args.max_length, f"--max-length {args.max_length} with {args.hf_model}")
    if 2 * args.max_length > args.max_tokens_per_micro_batch:
        raise ValueError(
            f"a pair of up to 2 x --max-length {args.max_length} tokens does not fit --max-tokens-per-micro-batch "
            f"{args.max_tokens_per_micro_batch}: both halves of a pair go into one micro-batch"
        )
    if args.max_prompt_length >= args.max_length:
        raise ValueError(
            f"--max-prompt-length {args.max_prompt_length} leaves no room for a completion within --max-length "
            f"{args.max_length}"
        )
    check_files(args.eval_data, "--eval-data")
    free = args.reference_free or args.dpo_loss in NO_REFERENCE
    if free and args.reference_hf_model is not None:
        why = "--reference-free" if args.reference_free else f"--dpo-loss {args.dpo_loss}"
        raise ValueError(f"--reference-hf-model {args.reference_hf_model} has no use with {why}")
    options = PreferenceOptions(
        beta=args.beta,
        label_smoothing=args.label_smoothing,
        rpo_alpha=args.rpo_alpha,
        f_divergence=args.f_divergence,
        length_normalize=args.length_normalize,
    )
    check_preference_options(args.dpo_loss, options, free)
    if not free:
        check_reference(args, hf, args.max_length)
        if args.reference_cache is not None:
            check_output(args.reference_cache, "--reference-cache")


def _validate_engine(args: argparse.Namespace, rollout_tp: int) -> None:
    if args.rollout_backend == "hf" and rollout_tp > 1:
        raise ValueError(
            f"--rollout-backend hf holds the whole model on every rank: --rollout-tensor-parallel-size {rollout_tp} "
            "(by default the training's) must be 1"
        )
    if args.rollout_backend == "hf" and args.vllm_args:
        raise ValueError(f"--vllm-args {' '.join(args.vllm_args)} has no use with --rollout-backend hf")
    training = "bfloat16" if args.bf16 else "float32"
    dtype = args.vllm_args.get("dtype", training)
    if dtype not in ENGINE_DTYPES:
        raise ValueError(f"--vllm-args dtype={dtype} is none of {', '.join(ENGINE_DTYPES)}")
    if dtype != training and args.rollout_weights == "alias":
        raise ValueError(
            f"--vllm-args dtype={dtype}: an engine cannot share the memory of training's {training}; give "
            "--rollout-weights copy"
        )


def _validate_batches(args: argparse.Namespace) -> None:
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    step = args.global_batch_size or samples
    if samples % step:
        raise ValueError(
            f"--rollout-batch-size {args.rollout_batch_size} x --n-samples-per-prompt {args.n_samples_per_prompt} = "
            f"{samples} samples are not a multiple of --global-batch-size {step}"
        )


def sampling_warnings(args: argparse.Namespace) -> list[str]:
    """What changes the sampling distribution without the trainer knowing of it."""
    changed = [f"--top-p {args.top_p}"] if args.top_p < 1 else []
    changed += [f"--top-k {args.top_k}"] if args.top_k > 0 else []
    changed += [f"--min-response-length {args.min_response_length}"] if args.min_response_length else []
    if not changed:
        return []
    return [
        f"{' and '.join(changed)}: responses are drawn from a truncated distribution, while the trainer's "
        "log-probabilities are those of the whole one. The importance ratio of the policy loss compares trainer with "
        "trainer and stays exact, but samples are off-policy by what was cut; correction/* shows by how much."
    ]
