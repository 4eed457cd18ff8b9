"""DPO and its relatives on megatron-core: a policy learns from pairs of a chosen and a rejected completion.

    torchrun --nproc_per_node 8 train_dpo.py --hf-model DIR --train-data pairs.jsonl --eval-data held_out.jsonl ...

Read `train` from top to bottom: it is the whole algorithm, and it shows when each model is on the device. Both halves
of a pair are sequences of one micro-batch, packed without padding. Shape suffixes: B sequences of a batch (chosen 2i,
rejected 2i + 1), R the longest completion, N completion tokens of a data set.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_rl import builders, platform, report
from megatron_rl.arguments import parse, validate_dpo
from megatron_rl.batch import Batch, PreferencePair, batch_of_pairs, pack
from megatron_rl.builders import Run, plan_pairs
from megatron_rl.checkpoint.load import load
from megatron_rl.checkpoint.save import open_checkpoints
from megatron_rl.data.preferences import load_preferences
from megatron_rl.failure import catch_sigterm, ending_together
from megatron_rl.flags import DPO
from megatron_rl.metrics import timed
from megatron_rl.models.config import read_hf_config
from megatron_rl.reference_cache import Digests, KnownLogprobs, data_digest, read_cache, write_cache
from megatron_rl.roles import Role, build_preference_policy, build_preference_reference, export_role, load_tokenizer
from megatron_rl.step import Loss, Plan, forward_only, train_step

PAIRS_PER_PASS = 256  # that a pass without training packs at one time


@dataclass(frozen=True)
class Reference:
    """What the policy is compared with: a model on the device, or its log-probabilities; neither without reference."""

    resident: Role | None = None
    known: Mapping[str, KnownLogprobs] = field(default_factory=dict)  # of the data sets "train" and "eval"


def train(args: argparse.Namespace) -> None:
    hf = read_hf_config(args.hf_model)
    validate_dpo(args, hf)
    builders.check_end_tokens(args, hf)
    if args.dry_run:
        return print(report.describe_preference(args, hf))
    tokenizer = load_tokenizer(args.hf_model)
    pairs = load_preferences(builders.pair_options(args), tokenizer)
    held_out = builders.load_held_out(args, tokenizer)
    rows = [*pairs.items, *held_out]
    builders.check_tokens(args, hf, [p.prompt_ids + p.chosen_ids + p.rejected_ids for p in rows])
    steps = builders.preference_steps(args, pairs)
    run = builders.start(args, tokenizer)

    # a reference that only computes beforehand has left the device when the policy comes
    reference = build_reference(run, {"train": pairs.items, "eval": held_out})
    policy = build_preference_policy(args, run.topology, steps)
    loss = builders.preference_loss_of(args)
    report.preference_header(run, hf, [policy, reference.resident], pairs.summary)

    finished, checkpoints = 0, open_checkpoints(args, run.topology, run.recorder.print)
    if restored := load(args, [policy], run.topology, run.recorder.print):
        finished = restored.step
        if finished:  # 0: a converter's checkpoint, of weights alone
            pairs.restore(restored.state["data"])
    run.recorder.start_after(finished)
    stop = catch_sigterm()

    if held_out and not finished:
        evaluate(run, policy, reference, held_out, loss)
        run.recorder.close_step(0)
    for step in range(finished + 1, steps + 1):
        with timed() as seconds:
            chosen = pairs.next_batch(builders.pairs_per_step(args))
            with timed() as update_seconds:
                batch = batch_of_pairs(chosen)
                plan = plan_pairs(args, batch, run.topology)
                batch = add_reference(run, batch, plan, reference, "train", chosen)
                with run.recorder.bar("policy update", len(plan[0])) as progress:
                    done = train_step(policy, batch, plan, loss, run.topology, args.skip_non_finite_steps, progress)
            report.preference_step(run.recorder, done, batch)
            if held_out and (step % args.eval_interval == 0 or step == steps):
                evaluate(run, policy, reference, held_out, loss)
        report.summarise(run.recorder, batch, step, seconds[0], update_seconds[0], pairs.epoch)
        if checkpoints.after_step(step, [policy], {"data": pairs.state()}, step == steps, stop()):
            run.recorder.print(f"stopped by SIGTERM after step {step} of {steps}")
            return run.recorder.close()

    if args.save_hf:
        export_role(policy, f"{args.output_dir}/actor", run.topology)
        run.recorder.print(f"wrote {args.output_dir}/actor")
    run.recorder.close()


def build_reference(run: Run, data: Mapping[str, Sequence[PreferencePair]]) -> Reference:
    """The model, or its log-probabilities of all pairs: from disk where the digests agree, else from a first pass."""
    args, topology = run.args, run.topology
    if not builders.needs_reference(args):
        return Reference()
    if args.reference == "each-step":
        return Reference(build_preference_reference(args, topology))
    role, known, model = None, {}, builders.reference_digest(args, topology)
    for name, pairs in data.items():
        if not pairs:
            continue
        path = f"{args.reference_cache or args.output_dir + '/reference'}/{name}.safetensors"
        digests = Digests(data_digest(pairs), model)
        status, logprobs_N = read_cache(path, digests, topology)
        run.recorder.print(f"reference {path}: {status}")
        if logprobs_N is None:
            role = role or build_preference_reference(args, topology)
            logprobs_N = first_pass(run, role, pairs)
            write_cache(path, logprobs_N, digests, topology)
        known[name] = KnownLogprobs(pairs, logprobs_N)
    del role
    platform.empty_cache()
    return Reference(known=known)


def first_pass(run: Run, role: Role, pairs: Sequence[PreferencePair]) -> Tensor:
    """Log-probabilities [N] of the completions, equal on every rank."""
    pieces = []
    with timed() as seconds, run.recorder.bar("reference forward", len(pairs)) as progress:
        for part, batch, plan in parts(run, pairs):
            pieces.append(forward_only(role, batch, plan, run.topology)[0][batch.mask_BR])
            progress(len(part))
    run.recorder.print(f"reference {len(pairs):,} pairs computed in {seconds[0]:.1f} s")
    return torch.cat(pieces)


def parts(run: Run, pairs: Sequence[PreferencePair]) -> Iterator[tuple[Sequence[PreferencePair], Batch, Plan]]:
    """All pairs, some at a time, weighted for the mean over all."""
    for start in range(0, len(pairs), PAIRS_PER_PASS):
        part = pairs[start : start + PAIRS_PER_PASS]
        batch = batch_of_pairs(part, total=len(pairs))
        yield part, batch, plan_pairs(run.args, batch, run.topology)


def add_reference(
    run: Run, batch: Batch, plan: Plan, reference: Reference, name: str, pairs: Sequence[PreferencePair]
) -> Batch:
    """The batch with the reference's log-probabilities of its pairs, which are of data set `name`."""
    if reference.resident is not None:
        return replace(batch, ref_logprobs_BR=forward_only(reference.resident, batch, plan, run.topology)[0])
    if name in reference.known:
        return replace(batch, ref_logprobs_BR=reference.known[name].of(pairs))
    return batch


def evaluate(run: Run, policy: Role, reference: Reference, held_out: Sequence[PreferencePair], loss: Loss) -> None:
    """Loss, accuracy and margin of the held-out pairs: the training's formulas, over all pairs together."""
    sums: dict[str, float] = {}
    with timed() as seconds, run.recorder.bar("evaluation", len(held_out)) as progress:
        for part, batch, plan in parts(run, held_out):
            batch = add_reference(run, batch, plan, reference, "eval", part)
            logprobs_BR = forward_only(policy, batch, plan, run.topology)[0]
            whole = pack(batch, list(range(len(batch))), torch.device("cpu"))
            value, metrics = loss(logprobs_BR[batch.mask_BR][None], whole)
            for key, summand in ({"loss": value} | metrics).items():
                sums[key] = sums.get(key, 0.0) + float(summand)
            progress(len(part))
    report.evaluation(run.recorder, sums, len(held_out), seconds[0])


if __name__ == "__main__":
    with ending_together():
        train(parse("train_dpo.py", DPO, sys.argv[1:]))
