"""Every command-line flag, by group: Megatron's names where Megatron has one. Units and meaning stand in the help.

A table: two lines a flag, so the formatter leaves it alone.
"""
# fmt: off

import argparse

from megatron_rl import flag_types
from megatron_rl.flag_types import Group, KeyValues, amount, amount0, bound, count, count0, fraction, switch


def _model(group: Group) -> None:
    add = group.add_argument
    add("--hf-model", required=True, metavar="DIR",
        help="Hugging Face folder of the policy: its config.json is the only description of the model")
    add("--transformer-impl", default="local", choices=["local", "transformer_engine"],
        help="layers from megatron-core alone, or from transformer-engine where it is installed")
    add("--transformer-config", nargs="+", action=KeyValues, default={}, metavar="KEY=VALUE",
        help="any field of megatron-core's TransformerConfig")
    switch(group, "--bf16", True,
        "weights and activations in bfloat16 with float32 master weights; --no-bf16 trains in float32")
    switch(group, "--fp32-residual-connection", False,
        "keep the residual stream between layers in float32, as compiled vLLM does in effect: log-probs agree better")
    add("--recompute-granularity", choices=["full", "selective"], default=None,
        help="recompute activations in the backward pass: whole layers, or the parts in --recompute-modules")
    add("--recompute-method", choices=["uniform", "block"], default="uniform",
        help="of full: every layer, in units of --recompute-num-layers, or only the first so many of each stage")
    add("--recompute-num-layers", type=count, default=1,
        help="layers of one recomputed unit (uniform) or recomputed layers of each stage (block), of full")
    add("--recompute-modules", nargs="+", choices=["core_attn", "mlp", "moe"], default=["core_attn"],
        help="what selective recomputes: core attention, the MLP of dense layers, the experts with their router")


def _layout(group: Group) -> None:
    add = group.add_argument
    add("--tensor-model-parallel-size", type=count, default=1, metavar="N",
        help="ranks that share each layer in training")
    add("--pipeline-model-parallel-size", type=count, default=1, metavar="N",
        help="stages the layers are cut into in training")
    add("--num-virtual-stages-per-pipeline-rank", type=count, default=1, metavar="N",
        help="model chunks a stage holds (interleaved schedule)")
    add("--expert-model-parallel-size", type=count, default=1, metavar="N",
        help="ranks that share the experts of a mixture-of-experts model")
    switch(group, "--sequence-parallel", False,
        "cut the sequence over the tensor-parallel ranks between layers")
    add("--distributed-timeout-minutes", type=amount, default=10, metavar="MIN",
        help="minutes after which a collective that does not return fails")
    add("--world-size", type=count, default=None, metavar="N",
        help="number of ranks to assume, with --dry-run alone; otherwise torchrun says")


def _optimizer(group: Group) -> None:
    add = group.add_argument
    add("--lr", type=amount0, default=1e-6, help="peak learning rate of the policy, per optimizer step")
    add("--min-lr", type=amount0, default=0.0, help="learning rate at the end of the decay")
    add("--lr-decay-style", default="constant", choices=["constant", "linear", "cosine"],
        help="shape of the decay after warm-up")
    add("--lr-decay-iters", type=count, default=None, metavar="N",
        help="optimizer steps until --min-lr; default: the whole run")
    add("--lr-warmup-iters", type=count0, default=0, metavar="N",
        help="optimizer steps of linear warm-up from 0")
    add("--weight-decay", type=amount0, default=0.0, help="decoupled weight decay of matrices (AdamW)")
    add("--adam-beta1", type=flag_types.decay, default=0.9, help="decay of the first moment")
    add("--adam-beta2", type=flag_types.decay, default=0.95, help="decay of the second moment")
    add("--adam-eps", type=amount, default=1e-8, help="added to the root of the second moment")
    add("--clip-grad", type=amount0, default=1.0, metavar="NORM",
        help="largest global gradient norm; 0 does not clip")
    switch(group, "--use-distributed-optimizer", True,
        "shard optimizer state and master weights over data-parallel ranks")
    switch(group, "--overlap-grad-reduce", False, "reduce gradients while the backward pass still runs")
    switch(group, "--skip-non-finite-steps", False,
        "skip and count optimizer steps whose gradient norm is not finite, instead of stopping")


def _batches(group: Group) -> None:
    add = group.add_argument
    add("--global-batch-size", type=count, default=None, metavar="N",
        help="sequences (PPO) or pairs (DPO) of one optimizer step, over all ranks; default: the whole rollout batch, "
             "32 pairs")
    add("--micro-batch-size", type=count, default=None, metavar="N",
        help="sequences (PPO) or pairs (DPO) of a micro-batch at most; default: as many as the token budget holds")
    add("--max-tokens-per-micro-batch", type=count, default=4096, metavar="N",
        help="tokens of a micro-batch at most; sequences are packed without padding")
    add("--logprob-chunk-tokens", type=count, default=1024, metavar="N",
        help="tokens whose logits exist at one time")
    add("--seed", type=flag_types.seed, default=1234, help="seed of data order, sampling and new heads")


def _run(group: Group) -> None:
    add = group.add_argument
    add("--output-dir", default="output", metavar="DIR",
        help="metrics.jsonl, TensorBoard events and the exported HF folders go here; of PPO also samples.jsonl")
    switch(group, "--progress", True, "progress bars inside long stages (rank 0)")
    switch(group, "--verbose", False, "let megatron-core and vLLM log what they like")
    switch(group, "--save-hf", True, "write the trained model as an HF folder at the end of the run")
    add("--dry-run", action="store_true",
        help="validate, print layout, memory and batch arithmetic, and exit; data, tokenizer and --load are not read")


def _checkpoints(group: Group) -> None:
    add = group.add_argument
    add("--save", default=None, metavar="DIR",
        help="write checkpoints here: every --save-interval steps, after the last one, and on SIGTERM")
    add("--save-interval", type=count, default=None, metavar="N",
        help="steps between checkpoints; default: only the last step's")
    add("--keep-last", type=count, default=None, metavar="K", help="checkpoints to keep; default: all of them")
    switch(group, "--async-save", False, "write checkpoints while training goes on, from a copy in host memory")
    add("--load", default=None, metavar="DIR",
        help="go on from the last whole checkpoint here; may be the folder of --save")
    switch(group, "--exit-on-missing-checkpoint", False, "stop where --load has none, instead of starting fresh")


def _data(group: Group) -> None:
    add = group.add_argument
    add("--train-data", nargs="+", required=True, metavar="FILE", help="jsonl, json, parquet or arrow files")
    add("--data-weights", nargs="+", type=amount, default=None, metavar="W",
        help="one weight per file of --train-data: how often its rows are drawn")
    add("--apply-chat-template", action=argparse.BooleanOptionalAction, default=True,
        help="render prompts (chat lists, or text as one user message) with the tokenizer's chat template")
    add("--system-prompt", default=None, metavar="TEXT",
        help="system message put before every chat prompt that has none")
    add("--max-prompt-length", type=count, default=512, metavar="N", help="tokens of a prompt at most")
    add("--overlong-prompts", default="filter", choices=["filter", "truncate"],
        help="what happens to longer prompts: left out, or cut from the left; both are counted")
    add("--dataset-class", default=None, metavar="FILE.py:CLASS",
        help="a data set of your own: __len__ and __getitem__ -> row, built with the list of --train-data")
    switch(group, "--shuffle", True, "a new order each epoch, by --seed")
    switch(group, "--drop-last", True,
        "leave out the last partial batch of an epoch; --no-drop-last trains on it")


def _prompts(group: Group) -> None:
    add = group.add_argument
    add("--prompt-key", default="prompt", metavar="KEY",
        help="key of the prompt in a row: a text or a list of messages")
    add("--label-key", default="label", metavar="KEY",
        help="key of the reference answer that rules compare with")


def _rollout(group: Group) -> None:
    add = group.add_argument
    add("--train-iters", type=count, default=100, metavar="N",
        help="steps of the run; a step is one rollout and the updates on it")
    add("--rollout-batch-size", type=count, default=64, metavar="N", help="prompts of a step, over all ranks")
    add("--n-samples-per-prompt", type=count, default=1, metavar="N",
        help="responses generated for each prompt")
    add("--rollout-backend", default="vllm", choices=["vllm", "hf"],
        help="what generates; hf: transformers' generate, in batches of 64, on a second copy of the whole model on "
             "every rank. It is for comparison with vllm only, on the CPU or one GPU")
    add("--rollout-tensor-parallel-size", type=count, default=None, metavar="N",
        help="ranks that share one vLLM engine; default: the training's tensor parallel size")
    switch(group, "--dynamic-sampling", False,
        "drop prompts whose samples all got the same reward, and ask further prompts until --rollout-batch-size have "
        "rewards that differ")
    add("--max-sampling-rounds", type=count, default=10, metavar="N",
        help="rounds of --dynamic-sampling at most; then the step goes on with the groups that are there")
    add("--max-response-length", type=count, default=512, metavar="N", help="tokens of a response at most")
    add("--min-response-length", type=count0, default=0, metavar="N",
        help="tokens before which EOS cannot be sampled")
    add("--temperature", type=amount, default=1.0,
        help="sampling temperature; the trainer divides its logits by it too")
    add("--top-p", type=fraction, default=1.0,
        help="nucleus sampling mass; below 1 the importance ratio is no longer exact")
    add("--top-k", type=flag_types.top_k, default=-1,
        help="sample among the k likeliest tokens; -1: all. Otherwise the importance ratio is no longer exact")
    add("--stop", nargs="+", default=[], metavar="TEXT",
        help="texts that end a response, besides every EOS of generation_config.json; they stay in it")
    add("--kv-cache-gb", type=amount, default=None, metavar="GB",
        help="KV cache of each rank's engine in GB; default: what the step's samples need, if the models leave it")
    add("--show-samples", type=count0, default=0, metavar="N",
        help="print greedy responses to the first N prompts before and after the run")
    add("--log-samples", type=count0, default=2, metavar="N",
        help="samples of each step that samples.jsonl keeps")
    add("--rollout-weights", default="alias", choices=["alias", "copy"],
        help="alias: the engine reads the trainer's memory where the bytes agree; copy: it has its own, "
        "and --vllm-args dtype may be another than training's")
    add("--rollout-placement", default="overlap", choices=["overlap", "consecutive"],
        help="ranks that share an engine: those of a node that already hold the most of what they need, or neighbours")
    add("--reshard-bucket-mb", type=amount, default=256, metavar="MB",
        help="size of a transfer buffer of the weight sync in MB")
    add("--verify-weights", default="first", choices=["never", "first", "every"],
        help="compare digests of the trainer's and the engine's weights after the sync")
    add("--vllm-args", nargs="+", action=KeyValues, default={}, metavar="KEY=VALUE",
        help="any argument of vLLM's engine, such as enforce_eager=true max_num_seqs=64")


def _rewards(group: Group) -> None:
    add = group.add_argument
    add("--reward", nargs="+", default=[], metavar="RULE",
        help="rules that give the reward: exact_match, format[:REGEX], math_verify, length[:CHARS], sentiment, "
             "reasoning_gym, or FILE.py:FUNCTION; each with =WEIGHT behind it where that is not 1")
    add("--reward-model", nargs="+", default=[], metavar="DIR",
        help="folders (Hugging Face's, or a critic's of a checkpoint) of models with one label, run on the "
             "policy's layout, alone or added to --reward, with =WEIGHT behind one whose weight is not 1; the score "
             "is that of the last token")
    add("--reward-config", default=None, metavar="FILE.yaml",
        help="rules and reward models chosen by data_source, instead of both: a list of name, rule or path, weight "
             "and condition, such as \"data_source == 'news'\"; entries without a condition come last")
    add("--overlong-buffer", type=count, default=None, metavar="N",
        help="the last N tokens before --max-response-length in which the reward falls, linearly from nothing to "
             "--overlong-penalty; default: it does not")
    add("--overlong-penalty", type=amount0, default=1.0, metavar="FACTOR",
        help="what a response of --max-response-length tokens loses of its reward, with --overlong-buffer")
    add("--reward-workers", type=count0, default=1, metavar="N",
        help="processes of each rank that run rules; 0: in the training process, without --reward-timeout")
    add("--reward-timeout", type=amount, default=60, metavar="S", help="seconds that a rule may take for one sample")


def _algorithm(group: Group) -> None:
    add = group.add_argument
    from megatron_rl.algorithms.advantages import ADVANTAGES
    from megatron_rl.algorithms.corrections import IMPORTANCE_LEVELS
    from megatron_rl.algorithms.kl import KL_ESTIMATORS
    from megatron_rl.algorithms.losses import AGGREGATIONS, POLICY_LOSSES

    add("--advantage-estimator", default="gae", choices=list(ADVANTAGES),
        help="how rewards become advantages; gae alone has a critic")
    add("--gamma", type=fraction, default=1.0, help="discount per token")
    add("--gae-lambda", type=fraction, default=0.95, help="GAE's lambda: 0 is one-step, 1 Monte Carlo")
    add("--policy-loss", default="ppo", choices=list(POLICY_LOSSES), help="the policy's objective")
    add("--clip-low", type=amount, default=0.2,
        help="the ratio is clipped below 1 - this: per token for ppo and cispo (whose paper leaves it open: 1), "
             "per response for gspo (paper: 3e-4); for gmpo log-ratios are clipped below -this (paper: 0.4)")
    add("--clip-high", type=bound, default=0.2,
        help="the ratio is clipped above 1 + this, likewise (dapo: 0.28, gspo: 4e-4); for gmpo log-ratios above this "
             "(paper: 0.4); reinforce clips nothing")
    add("--dual-clip", type=bound, default=None, metavar="C",
        help="of ppo: bound the loss of negative advantages by C times the advantage, C above 1; default: off")
    add("--loss-aggregation", default="token-mean", choices=list(AGGREGATIONS),
        help="what one optimizer step averages over; the papers of grpo, gspo and gmpo take seq-mean-token-mean, that "
             "of dr_grpo seq-mean-token-sum-norm")
    add("--loss-fixed-length", type=count, default=None, metavar="N",
        help="the divisor in tokens of --loss-aggregation seq-mean-token-sum-norm; default: --max-response-length")
    add("--update-epochs", type=count, default=1, metavar="N", help="passes over each rollout batch")
    add("--entropy-coef", type=amount0, default=0.0, help="weight of the entropy bonus")
    add("--kl-coef", type=amount0, default=0.0,
        help="weight of the KL to the reference; 0: no reference is loaded")
    add("--kl-in", default="reward", choices=["reward", "loss"], help="where the KL acts")
    add("--kl-estimator", default="k1", choices=list(KL_ESTIMATORS), help="estimator of the KL per token")
    add("--kl-target", type=amount, default=None, metavar="NATS",
        help="adapt --kl-coef so that the KL per sequence is this; default: fixed")
    add("--old-logprobs", default="trainer", choices=["trainer", "rollout", "update"],
        help="the ratio's denominator: a pass of the trainer, the engine's own log-probabilities, or, with one "
        "optimizer step a rollout, the update's own ones (the ratio is 1); the last two save the pass")
    add("--rollout-correction", default="none", choices=list(IMPORTANCE_LEVELS),
        help="importance weights of trainer over engine probabilities on the policy loss, per token or per response")
    add("--rollout-correction-threshold", type=bound, default=2.0, metavar="C",
        help="those weights are truncated to at most this")
    switch(group, "--rollout-correction-normalize", False,
        "divide them by their mean over the rollout batch")
    add("--rollout-reject", nargs="+", default=[], metavar="NAME:BOUNDS",
        help="leave out of the loss what lies outside: token_k1:0.5:2 keeps tokens with 0.5 <= ratio <= 2; "
             "seq_mean_k1 bounds a response's geometric mean, seq_sum_k1 its product, *_k2:HIGH the estimates")
    add("--kl-horizon", type=count, default=10000, metavar="N",
        help="sequences over which an adaptive --kl-coef acts")


def _evaluation(group: Group) -> None:
    add = group.add_argument
    add("--eval-data", nargs="+", default=[], metavar="FILE",
        help="held-out prompts, in files like --train-data, scored by the same rewards; eval/step_N.jsonl in "
             "--output-dir holds the samples")
    add("--eval-interval", type=count, default=20, metavar="N",
        help="steps between evaluations on --eval-data; before the first and after the last step there is one too")
    add("--eval-samples-per-prompt", type=count, default=1, metavar="N",
        help="responses to each prompt; 1 is greedy, more are sampled and give pass@k for k up to N")
    add("--eval-temperature", type=amount, default=1.0, help="sampling temperature of several responses")
    add("--eval-pass-reward", type=float, default=1.0, metavar="R",
        help="a response with at least this reward has passed, for pass@k")


def _reference_folder(group: Group) -> None:
    group.add_argument("--reference-hf-model", default=None, metavar="DIR",
        help="folder of the reference; default: the policy's")


def _critic(group: Group) -> None:
    add = group.add_argument
    _reference_folder(group)
    add("--critic-hf-model", default=None, metavar="DIR",
        help="folder the critic starts from; default: the policy's, with a new head")
    add("--critic-lr", type=amount0, default=None, help="peak learning rate of the critic; default: --lr")
    add("--critic-warmup-iters", type=count0, default=0, metavar="N",
        help="first steps in which only the critic learns")
    add("--value-clip", type=bound, default=0.2, help="new values are clipped to old ones +- this")


def _memory(group: Group) -> None:
    switch(group, "--offload-optimizer", False,
        "optimizer state (float32 main weights and moments) is in pinned host memory except in its own step")
    switch(group, "--offload-gradients", False, "gradient buffers exist only while their role trains")
    switch(group, "--offload-reference", False,
        "reference and reward models are in pinned host memory except in their own passes")
    switch(group, "--offload-critic", False, "the critic's weights are in pinned host memory except while it works")


def _preferences(group: Group) -> None:
    add = group.add_argument
    add("--prompt-key", default=None, metavar="KEY",
        help="key of the prompt in a row: a text or a list of messages; default: 'prompt' where a row has it, else "
             "the prompt is what chosen and rejected begin with")
    add("--chosen-key", default="chosen", metavar="KEY", help="key of the preferred completion: text or messages")
    add("--rejected-key", default="rejected", metavar="KEY", help="key of the other completion: text or messages")
    add("--max-length", type=count, default=1024, metavar="N",
        help="tokens of prompt and completion together at most; --overlong-prompts says what happens to longer ones")
    add("--eval-data", nargs="+", default=[], metavar="FILE", help="held-out pairs, in files like --train-data")
    add("--eval-interval", type=count, default=50, metavar="N",
        help="steps between evaluations on --eval-data; before the first and after the last step there is one too")


def _preference_training(group: Group) -> None:
    add = group.add_argument
    from megatron_rl.algorithms.preference import F_DIVERGENCES, PREFERENCE_LOSSES

    add("--epochs", type=count, default=1, metavar="N", help="passes over the pairs")
    add("--train-iters", type=count, default=None, metavar="N", help="optimizer steps of the run, instead of --epochs")
    add("--dpo-loss", default="sigmoid", choices=list(PREFERENCE_LOSSES), help="the loss of a pair")
    add("--beta", type=amount, default=0.1,
        help="scale of the implicit reward; of ipo its tau, of orpo its lambda")
    add("--label-smoothing", type=fraction, default=0.0,
        help="probability that a label is flipped, below 0.5: for sigmoid, robust, exo_pair and simpo")
    add("--simpo-gamma", type=amount0, default=0.5, help="the reward margin that simpo wants")
    add("--rpo-alpha", type=amount0, default=0.0,
        help="weight of the negative log-likelihood per token of the chosen completion")
    switch(group, "--length-normalize", False,
        "divide a completion's score by its tokens; ipo, simpo and orpo always do")
    add("--f-divergence", default="reverse_kl", choices=list(F_DIVERGENCES),
        help="divergence that bounds the policy, for sigmoid, hinge, ipo, robust and exo_pair")
    add("--f-alpha", type=amount0, default=0.5, help="alpha of --f-divergence alpha_divergence")
    add("--reference", default="precomputed", choices=["precomputed", "each-step"],
        help="the reference's log-probabilities: one pass before training, kept on disk, or a resident model")
    switch(group, "--reference-free", False, "no reference: its log-probabilities are taken as 0")
    add("--reference-cache", default=None, metavar="DIR",
        help="folder of the precomputed log-probabilities; default: 'reference' in --output-dir")
    _reference_folder(group)


SHARED = {
    "model": _model,
    "layout": _layout,
    "optimizer": _optimizer,
    "batches": _batches,
    "data": _data,
    "checkpoints": _checkpoints,
    "run": _run,
}
PPO = SHARED | {
    "prompts": _prompts,
    "rollout": _rollout,
    "rewards": _rewards,
    "algorithm": _algorithm,
    "evaluation": _evaluation,
    "critic and reference": _critic,
    "memory": _memory,
}
DPO = SHARED | {"preferences": _preferences, "preference training": _preference_training}
