"""PPO and its critic-free relatives on megatron-core, with rollout by a vLLM engine in the same processes.

    torchrun --nproc_per_node 8 train_ppo.py --hf-model DIR --train-data prompts.jsonl --reward math_verify ...

Read `train` from top to bottom: it is the whole algorithm, and it shows when each model and the KV cache are on the
device. How a rollout is drawn and scored stands in megatron_rl/sampling.py. Shape suffixes: B sequences of the rollout
batch, R the longest response.
"""

import argparse
import sys
from dataclasses import replace

from torch import Tensor

from megatron_rl import builders, report
from megatron_rl.algorithms.advantages import AdvantageInputs, compute_advantages, place_on_last_token
from megatron_rl.algorithms.corrections import rollout_correction
from megatron_rl.algorithms.kl import KLController, kl_in_reward, update_kl
from megatron_rl.arguments import parse, validate_ppo
from megatron_rl.batch import Batch, batch_of
from megatron_rl.builders import Run
from megatron_rl.checkpoint.load import load
from megatron_rl.checkpoint.save import open_checkpoints
from megatron_rl.data.packing import plan_micro_batches
from megatron_rl.data.prompts import load_prompts
from megatron_rl.evaluate import evaluate
from megatron_rl.failure import catch_sigterm, ending_together
from megatron_rl.flags import PPO
from megatron_rl.metrics import timed
from megatron_rl.models.config import read_hf_config
from megatron_rl.objectives import minibatches
from megatron_rl.roles import Role, build_critic, build_policy, build_reference, export_role, load_tokenizer
from megatron_rl.rollout.startup import check_early
from megatron_rl.sampling import Rollout, Scorer, roll_out, synchronise
from megatron_rl.step import StepReport, forward_only, train_step


def train(args: argparse.Namespace) -> None:
    hf = read_hf_config(args.hf_model)
    validate_ppo(args, hf)
    builders.check_end_tokens(args, hf)
    if args.dry_run:
        return print(report.describe(args, hf))
    tokenizer = load_tokenizer(args.hf_model)
    prompts = load_prompts(builders.prompt_options(args), tokenizer)
    held_out = builders.load_eval_prompts(args, tokenizer)  # None without --eval-data
    builders.check_tokens(args, hf, [p.token_ids for data in filter(None, [prompts, held_out]) for p in data.items])
    rewards = builders.build_rewards(args, [prompts, held_out], hf, tokenizer)
    run = builders.start(args, tokenizer)
    check_early(args.vllm_args, run.topology)

    policy = build_policy(args, run.topology)
    critic = build_critic(args, run.topology)  # None for estimators that need none
    reference = build_reference(args, run.topology)  # None where --kl-coef is 0
    scorer = Scorer(rewards, builders.build_reward_models(run, rewards, hf))
    roles = [policy, critic, reference, *(model.role for model in scorer.models)]
    for role in filter(None, roles):
        role.memory.leave()  # what the flags of group memory keep on the host; it comes back for its own work alone
    engine = builders.build_engine(args, roles, run.topology)  # last: it takes the memory that the trainer left
    report.header(run, hf, roles, prompts, held_out)

    kl, done = builders.build_kl(args), 0
    if args.load:
        engine.sleep()  # what is loaded passes through the device
    checkpoints = open_checkpoints(args, run.topology, run.recorder.print)
    if restored := load(args, [policy, critic], run.topology, run.recorder.print):
        done = restored.step
        if done:  # 0: a converter's checkpoint, of weights alone
            kl = builders.restored_kl(kl, restored.state["kl"])
            prompts.restore(restored.state["data"])
    run.recorder.start_after(done)
    stop = catch_sigterm()

    if held_out and not done:
        evaluate(run, engine, held_out.items, scorer, step=0)
        run.recorder.close_step(0)
    for step in range(done + 1, args.train_iters + 1):
        with timed() as seconds:
            # rollout: weights first, then the KV cache; the cache leaves the device before training needs the room.
            # Each pass below brings what is offloaded of its role, and sends it away again.
            synchronise(run, engine)
            if step == done + 1:
                report.show_samples(run, "before", prompts, engine)
            rollout = roll_out(run, engine, prompts, scorer, step)  # the engine sleeps once it has answered

            with timed() as update_seconds:
                batch = measure(run, batch_of(rollout.samples), policy, critic, reference)
                batch, kl = estimate(run, batch, rollout, kl)
                update(run, batch, policy, critic, kl, step)
        if held_out and (step % args.eval_interval == 0 or step == args.train_iters):
            evaluate(run, engine, held_out.items, scorer, step)
        report.summarise(run.recorder, batch, step, seconds[0], update_seconds[0], prompts.epoch)
        state = {"data": prompts.state(), "kl": kl.coefficient}
        if checkpoints.after_step(step, [policy, critic], state, step == args.train_iters, stop()):
            rewards.close()
            run.recorder.print(f"stopped by SIGTERM after step {step} of {args.train_iters}")
            return run.recorder.close()

    synchronise(run, engine)
    report.show_samples(run, "after", prompts, engine)
    rewards.close()
    if args.save_hf:
        export_role(policy, f"{args.output_dir}/actor", run.topology)
        if critic:
            export_role(critic, f"{args.output_dir}/critic", run.topology)
        run.recorder.print(f"wrote {args.output_dir}/actor" + (" and critic" if critic else ""))
    run.recorder.close()


def measure(run: Run, batch: Batch, policy: Role, critic: Role | None, reference: Role | None) -> Batch:
    """Log-probabilities of policy and reference, the critic's values, and how far trainer and engine are apart."""
    lengths = [len(s) for s in batch.sequences]
    plan = plan_micro_batches(lengths, run.topology.dp_size, builders.packing_options(run.args))

    def ask(role: Role) -> Tensor:
        with run.recorder.bar(f"{role.name} forward", len(plan[0])) as progress:
            return forward_only(role, batch, plan, run.topology, progress)

    batch = replace(
        batch,
        ref_logprobs_BR=ask(reference)[0] if reference else None,
        values_BR=ask(critic)[0] if critic else None,
    )
    if run.args.old_logprobs == "rollout":  # the ratio of the loss then carries what the engine does differently
        return replace(batch, old_logprobs_BR=batch.rollout_logprobs_BR)
    if run.args.old_logprobs == "update":  # one optimizer step: its own forward pass gives them
        return batch
    logprobs_BR, entropy_BR = ask(policy)
    options = builders.correction_options(run.args)
    correction = rollout_correction(logprobs_BR, batch.rollout_logprobs_BR, batch.mask_BR, options)
    report.logprobs(run.recorder, correction.metrics, entropy_BR[batch.mask_BR].mean())
    return replace(batch, old_logprobs_BR=logprobs_BR, correction_BR=correction.weights_BR)


def estimate(run: Run, batch: Batch, rollout: Rollout, kl: KLController) -> tuple[Batch, KLController]:
    """Advantages and returns from rewards, KL and values; the next step's KL coefficient."""
    args, mask_BR = run.args, batch.mask_BR
    rewards_BR, penalised = place_on_last_token(rollout.rewards_B, mask_BR), None
    if batch.ref_logprobs_BR is not None and batch.old_logprobs_BR is not None:
        coefficient = kl.coefficient if args.kl_in == "reward" else 0.0
        penalised = kl_in_reward(
            rewards_BR, batch.old_logprobs_BR, batch.ref_logprobs_BR, mask_BR, coefficient, args.kl_estimator
        )
        rewards_BR, kl = penalised.rewards_BR, update_kl(kl, penalised.kl, len(batch))
    inputs = AdvantageInputs(
        rewards_BR, mask_BR, batch.group_B, args.gamma, args.gae_lambda, batch.values_BR, rollout.greedy_B
    )
    advantages = compute_advantages(args.advantage_estimator, inputs)
    report.advantages(run.recorder, advantages, batch, penalised, kl)
    return replace(batch, advantages_BR=advantages.advantages_BR, returns_BR=advantages.returns_BR), kl


def update(run: Run, batch: Batch, policy: Role, critic: Role | None, kl: KLController, step: int) -> None:
    """Optimizer steps of critic and policy over the rollout batch."""
    args, topology = run.args, run.topology
    trained = [(critic, builders.value_loss_of(args))] if critic else []
    if step > args.critic_warmup_iters:
        trained.append((policy, builders.policy_loss_of(args, kl.coefficient, int(batch.mask_BR.sum()))))
    reports: dict[str, list[StepReport]] = {role.name: [] for role, _ in trained}
    for role, loss in trained:
        with role.memory.for_training():  # gradients of this role alone; its optimizer state comes for the step
            for part in minibatches(batch, builders.minibatch_options(args), step):
                lengths = [len(s) for s in part.sequences]
                plan = plan_micro_batches(lengths, topology.dp_size, builders.packing_options(args))
                with run.recorder.bar(f"{role.name} update", len(plan[0])) as progress:
                    done = train_step(role, part, plan, loss, topology, args.skip_non_finite_steps, progress)
                reports[role.name].append(done)
    run.recorder.updates(reports)


if __name__ == "__main__":
    with ending_together():
        train(parse("train_ppo.py", PPO, sys.argv[1:]))
