"""The texts that a run prints: what it is before it starts, what each step did, what the policy says."""

import argparse
from typing import Any

import torch
from torch import Tensor

from megatron_rl import flags, platform, unused
from megatron_rl.algorithms.advantages import Advantages, dynamic_sampling_keep
from megatron_rl.algorithms.kl import KLController, PenalisedRewards
from megatron_rl.algorithms.losses import explained_variance
from megatron_rl.arguments import layout_sizes, sampling_warnings, world_size
from megatron_rl.batch import Batch, Sample
from megatron_rl.builders import Run, needs_reference, pairs_per_step, sampling_options
from megatron_rl.data.prompts import PromptDataset
from megatron_rl.memory.setup import dpo_setup, ppo_setup, summary
from megatron_rl.metrics import RULE_PREFIX, Recorder, bytes_text
from megatron_rl.models.config import HFConfig, check_layout, dims
from megatron_rl.rewards.router import Scores
from megatron_rl.roles import Role
from megatron_rl.rollout.collect import collect
from megatron_rl.rollout.engine import SyncReport
from megatron_rl.rollout.hf_backend import RolloutEngine
from megatron_rl.step import StepReport
from megatron_rl.unused import unused_flags
from megatron_rl.weights.layouts import hf_shapes


def parameters(hf: HFConfig, kind: str = "lm") -> int:
    """Number of parameters, a tied head counted once."""
    return sum(torch.Size(shape).numel() for shape in hf_shapes(dims(hf), kind).values())


def _model_lines(args: argparse.Namespace, hf: HFConfig) -> list[str]:
    """Model and training layout."""
    ranks, sizes = world_size(args), layout_sizes(args)
    data_parallel = ranks // (sizes.tp * sizes.pp)
    stages = check_layout(hf, sizes, args.sequence_parallel).stages
    layers = "+".join(str(sum(map(len, chunks))) for chunks in stages)
    return [
        f"model     {args.hf_model}: {hf.family}, {parameters(hf) / 1e6:,.1f} M parameters, {hf.layers} layers, "
        f"{hf.heads} heads ({hf.kv_heads} key-value), vocabulary {hf.vocab:,}, {'bf16' if args.bf16 else 'fp32'}",
        f"training  {ranks} ranks = TP {sizes.tp} x PP {sizes.pp} (layers {layers}) x DP {data_parallel}"
        + (f", {sizes.vpp} chunks a stage" if sizes.vpp > 1 else "")
        + (f", EP {sizes.ep}" if sizes.ep > 1 else "")
        + (", sequence parallel" if args.sequence_parallel else ""),
    ]


def _device(args: argparse.Namespace) -> int | None:
    """Bytes of this rank's GPU; None where there is none, or the run is to be elsewhere."""
    return platform.device_memory()[1] if platform.device_type() == "cuda" and not args.dry_run else None


def describe(args: argparse.Namespace, hf: HFConfig) -> str:
    """Model, layout and batch arithmetic, from flags and config.json alone."""
    ranks = world_size(args)
    rollout_tp = args.rollout_tensor_parallel_size or layout_sizes(args).tp
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    batch = args.global_batch_size or samples
    engines = {"vllm": "vLLM engines", "hf": "transformers models"}[args.rollout_backend]
    return "\n".join(
        [
            *_model_lines(args, hf),
            f"rollout   {ranks // rollout_tp} {engines} of TP {rollout_tp}, "
            f"prompts up to {args.max_prompt_length} + responses up to {args.max_response_length} tokens",
            f"a step    {args.rollout_batch_size} prompts x {args.n_samples_per_prompt} samples = {samples}, "
            f"{args.update_epochs} epochs of {-(-samples // batch)} optimizer steps of {batch}, "
            f"micro-batches up to {args.max_tokens_per_micro_batch:,} tokens",
            *summary(ppo_setup(args, hf), _device(args)),
            *(f"warning: {text}" for text in sampling_warnings(args) + unused_flags(args, flags.PPO, unused.PPO)),
        ]
    )


def describe_preference(args: argparse.Namespace, hf: HFConfig) -> str:
    """The same for train_dpo.py."""
    length = f"{args.epochs} epochs" if args.train_iters is None else f"{args.train_iters} steps"
    reference = f"reference {args.reference}" if needs_reference(args) else "no reference"
    return "\n".join(
        [
            *_model_lines(args, hf),
            f"loss      {args.dpo_loss}, beta {args.beta:g}, {reference}",
            f"a step    {pairs_per_step(args)} pairs of two sequences up to {args.max_length} tokens, "
            f"micro-batches up to {args.max_tokens_per_micro_batch:,} tokens; the run has {length}",
            *summary(dpo_setup(args, hf), _device(args)),
            *(f"warning: {text}" for text in unused_flags(args, flags.DPO, unused.DPO)),
        ]
    )


def _built(run: Run, roles: list[Role | None], data: str) -> None:
    """What the models hold, what was read, where the output goes."""
    show = run.recorder.print
    for role in roles:
        if role is not None:
            head = " with a new value head" if role.new_head else ""
            show(f"{role.name:<10}{role.folder}{head}, {bytes_text(role.bytes_held)} on rank 0 when built")
    free, total = platform.device_memory()
    show(f"memory    {bytes_text(total - free)} of {bytes_text(total)} in use on the device")
    show(f"data      {data}")
    show(f"output    {run.args.output_dir}")


def header(
    run: Run, hf: HFConfig, roles: list[Role | None], prompts: PromptDataset, held_out: PromptDataset | None
) -> None:
    """What the run is, printed once everything is built."""
    run.recorder.print(describe(run.args, hf))
    _built(run, roles, prompts.summary)
    if held_out:
        run.recorder.print(f"held out  {held_out.summary}")


def preference_header(run: Run, hf: HFConfig, roles: list[Role | None], data: str) -> None:
    """The same for train_dpo.py."""
    run.recorder.print(describe_preference(run.args, hf))
    _built(run, roles, data)


def _pair_text(metrics: dict[str, float]) -> str:
    return (
        f"loss {metrics['loss']:.4f}, accuracy {metrics['accuracy']:.3f}, margin {metrics['reward_margin']:.3f} "
        f"(chosen {metrics['reward_chosen']:.3f}, rejected {metrics['reward_rejected']:.3f})"
    )


def preference_step(recorder: Recorder, done: StepReport, batch: Batch) -> None:
    """One line and the metrics of an optimizer step on pairs."""
    skipped = not done.updated
    recorder.keep({f"dpo/{name}": value for name, value in done.metrics.items()})
    recorder.stage(
        "dpo",
        f"{_pair_text(done.metrics)}, grad norm {done.grad_norm:.3f}" + (", SKIPPED" if skipped else ""),
        dpo__pairs=len(batch) // 2,
        dpo__tokens=sum(len(sequence) for sequence in batch.sequences),
        dpo__grad_norm=done.grad_norm,
        dpo__learning_rate=done.learning_rate,
        dpo__skipped_steps=skipped,
    )


def evaluation(recorder: Recorder, metrics: dict[str, float], pairs: int, seconds: float) -> None:
    recorder.keep({f"eval/{name}": value for name, value in metrics.items()})
    recorder.stage("eval", f"{pairs} held-out pairs: {_pair_text(metrics)}, {seconds:.1f} s", eval__seconds=seconds)


def policy_evaluation(
    recorder: Recorder, step: int, samples: list[Sample], metrics: dict[str, float], seconds: float
) -> None:
    """`metrics` by name, of evaluate.py; those of single data_sources are not in the line."""
    lengths = [len(s.response.token_ids) for s in samples]
    recorder.keep(metrics)
    whole = {name.removeprefix("eval/"): value for name, value in metrics.items() if name.count("/") == 1}
    shown = ", ".join(f"{name} {value:.3f}" for name, value in whole.items())
    recorder.stage(
        "eval",
        f"after step {step}: {len(samples)} samples, {shown}, {seconds:.1f} s",
        eval__length_mean=sum(lengths) / len(lengths),
        eval__truncated=sum(s.response.truncated for s in samples) / len(samples),
        eval__seconds=seconds,
    )


def show_samples(run: Run, when: str, prompts: PromptDataset, engine: RolloutEngine) -> None:
    """Prints greedy responses to the first --show-samples prompts."""
    chosen = prompts.items[: run.args.show_samples]
    if not chosen:
        return
    for sample in collect(engine, chosen, 1, sampling_options(run.args, greedy=True), run.args.seed, 0, run.topology):
        text = run.tokenizer.decode(list(sample.response.token_ids), skip_special_tokens=True)
        asked = sample.prompt.row.get(run.args.prompt_key, sample.prompt.text)
        asked = asked[-1]["content"] if isinstance(asked, list) else asked
        run.recorder.stage(when, f"{asked!r} -> {text!r}")


def summarise(recorder: Recorder, batch: Batch, step: int, seconds: float, update_seconds: float, epoch: int) -> None:
    """Closes a step: its times, its memory, one row of metrics."""
    tokens = sum(len(sequence) for sequence in batch.sequences)
    recorder.keep(
        {
            "update/seconds": update_seconds,
            "update/tokens_per_second": tokens / update_seconds,
            "step/seconds": seconds,
            "step/epoch": epoch + 1,
            "memory/peak_gb": platform.max_memory_allocated() / 1e9,
            "memory/host_gb": platform.host_memory() / 1e9,
        }
    )
    recorder.stage(
        "step",
        f"{step}: {seconds:.1f} s, update {update_seconds:.1f} s ({tokens / update_seconds:,.0f} tok/s), "
        f"peak memory {platform.max_memory_allocated() / 1e9:.2f} GB",
    )
    recorder.close_step(step)


def sync(recorder: Recorder, synced: SyncReport) -> None:
    received, permuted, shared = synced.bytes_received, synced.bytes_permuted, synced.bytes_aliased
    recorder.stage(
        "sync",
        f"{bytes_text(received)} received, {bytes_text(permuted)} permuted, {bytes_text(shared)} shared, "
        f"{synced.seconds * 1e3:.1f} ms",
        sync__bytes_received=received,
        sync__bytes_permuted=permuted,
        sync__bytes_aliased=shared,
        sync__seconds=synced.seconds,
    )


def tail_of(samples: list[Sample]) -> float | None:
    """Seconds of one generation after nine tenths of its responses had ended; None where the engine does not tell."""
    ended = sorted(s.response.seconds for s in samples)
    return ended[-1] - ended[9 * (len(ended) - 1) // 10] if ended[-1] else None


def rollout(
    recorder: Recorder, samples: list[Sample], seconds: float, tail: float | None = None, greedy: bool = False
) -> None:
    """`tail`: tail_of the step's generations together."""
    lengths = torch.tensor([float(len(s.response.token_ids)) for s in samples])
    tokens, truncated = int(lengths.sum()), sum(s.response.truncated for s in samples) / len(samples)
    if greedy:
        return recorder.print(f"[greedy] {len(samples)} samples, {tokens:,} tokens in {seconds:.1f} s")
    recorder.stage(
        "rollout",
        f"{len(samples)} samples, {tokens:,} tokens in {seconds:.1f} s ({tokens / seconds:,.0f} tok/s), "
        f"length {lengths.mean():.0f}, {truncated:.0%} truncated"
        + ("" if tail is None else f", {tail / seconds:.0%} of the time for the last tenth"),
        rollout__samples=len(samples),
        rollout__tokens=tokens,
        rollout__length_mean=lengths.mean(),
        rollout__truncated=truncated,
        rollout__seconds=seconds,
        rollout__tokens_per_second=tokens / seconds,
    )
    if tail is not None:
        recorder.keep({"rollout/tail": tail / seconds})
    if truncated > 0.95:
        recorder.print(f"warning: {truncated:.0%} of the responses hit --max-response-length; their ends are unknown")


def rewards(
    recorder: Recorder,
    step: int,
    samples: list[Sample],
    texts: list[str],
    scores: Scores,
    seconds: float,
    keep_samples: int,
) -> None:
    """`texts` are the responses without special tokens."""
    scores_B = torch.tensor(scores.total)
    differ_B = dynamic_sampling_keep(scores_B, torch.tensor([s.group for s in samples]))
    equal = 1 - float(differ_B.float().mean())
    recorder.stage(
        "reward",
        f"mean {scores_B.mean():.3f} std {scores_B.std(correction=0):.3f}, {scores_B.min():.3f} to "
        f"{scores_B.max():.3f}, {seconds:.1f} s",
        reward__mean=scores_B.mean(),
        reward__std=scores_B.std(correction=0),
        reward__min=scores_B.min(),
        reward__max=scores_B.max(),
        reward__equal_groups=equal,
    )
    if scores_B.min() == scores_B.max():
        recorder.print("warning: all rewards of this step are equal; group estimators learn nothing from it")
    recorder.keep({RULE_PREFIX + name: mean for name, mean in scores.means().items()})
    rows = zip(samples[:keep_samples], texts, scores.total, strict=False)
    recorder.samples([{"step": step} | sample_row(*row) for row in rows])


def sample_row(sample: Sample, text: str, reward: float) -> dict[str, Any]:
    """A sample as files show it; `text` is the response without special tokens."""
    tokens, truncated = len(sample.response.token_ids), sample.response.truncated
    return {
        "prompt": sample.prompt.text,
        "response": text,
        "reward": reward,
        "tokens": tokens,
        "truncated": truncated,
    }


def overlong(recorder: Recorder, penalty_B: Tensor) -> None:
    recorder.keep({"reward/overlong_penalty": float(penalty_B.mean())})


def dynamic_sampling(recorder: Recorder, kept: int, dropped: int, rounds: int) -> None:
    recorder.stage(
        "sampling",
        f"{kept} groups kept, {dropped} with equal rewards dropped, in {rounds} rounds",
        sampling__kept_groups=kept,
        sampling__dropped_groups=dropped,
        sampling__rounds=rounds,
    )


def logprobs(recorder: Recorder, mismatch: dict[str, float], entropy: Tensor) -> None:
    recorder.stage(
        "logprobs",
        f"trainer and engine differ by {mismatch['logprob_diff_mean']:.4f} on average, "
        f"{mismatch['logprob_diff_max']:.3f} at most, k3 {mismatch['kl_k3']:.2e}, entropy {entropy:.2f}",
        policy__entropy=entropy,
        **{f"correction__{name}": value for name, value in mismatch.items()},
    )


def advantages(
    recorder: Recorder, estimated: Advantages, batch: Batch, penalised: PenalisedRewards | None, kl: KLController
) -> None:
    mask_BR, text = batch.mask_BR, ""
    kept = estimated.advantages_BR[mask_BR]
    mean, std = kept.mean(), kept.std(correction=0)
    if penalised is not None:
        text = f", kl to reference {penalised.kl_token:.4f} a token, {penalised.kl:.3f} a response"
        recorder.keep({"kl/token": penalised.kl_token, "kl/response": penalised.kl, "kl/coef": kl.coefficient})
    if batch.values_BR is not None:
        explained = explained_variance(batch.values_BR, estimated.returns_BR, mask_BR)
        text += f", explained variance {explained:.2f}"
        recorder.keep({"critic/explained_variance": float(explained)})
    recorder.stage("advantage", f"mean {mean:.3f} std {std:.3f}{text}", advantage__mean=mean, advantage__std=std)
