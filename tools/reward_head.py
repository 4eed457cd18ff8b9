"""Makes a small reward model of a causal language model and preference pairs: only a linear head is fitted.

    python tools/reward_head.py --hf-model DIR --train-data pairs.jsonl --eval-data held_out.jsonl --out DIR

The body stays the language model's own; the head (Bradley and Terry's likelihood, L2) reads its last hidden state at
the last token of a completion, and also where a completion is cut off after a half and three quarters of its tokens.
The folder is a ForSequenceClassification of one label, for --reward-model. A folder that is there is left as it is.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import softplus

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.batch import PreferencePair
from megatron_rl.data.preferences import PreferenceOptions, load_preferences
from megatron_rl.failure import ending_together
from megatron_rl.models.config import read_hf_config
from megatron_rl.roles import load_tokenizer
from megatron_rl.weights.arch import VALUE_HEAD
from megatron_rl.weights.hf_io import HFFolder, HFWriter, export_shapes, write_beside
from megatron_rl.weights.layouts import Block

CUTS = (0.5, 0.75, 1.0)  # of a completion's tokens
L2 = 1e-3
ROWS = 16  # sequences of one pass


@torch.no_grad()
def states(model: torch.nn.Module, sequences: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> Tensor:
    """[sequences, CUTS, hidden] float32: the last hidden state of (prompt, completion) where it is cut."""
    found = []
    for start in range(0, len(sequences), ROWS):
        part = sequences[start : start + ROWS]
        widest = max(len(prompt) + len(completion) for prompt, completion in part)
        ids = torch.tensor(
            [[*p, *c, *[0] * (widest - len(p) - len(c))] for p, c in part]
        )  # causal: padding is not seen
        hidden = model(ids).last_hidden_state.float()
        found += [
            torch.stack([row[len(p) + max(1, round(cut * len(c))) - 1] for cut in CUTS])
            for row, (p, c) in zip(hidden, part, strict=True)
        ]
    return torch.stack(found)


def differences(model: torch.nn.Module, pairs: Sequence[PreferencePair]) -> Tensor:
    """[pairs, CUTS, hidden]: chosen minus rejected."""
    chosen = states(model, [(p.prompt_ids, p.chosen_ids) for p in pairs])
    return chosen - states(model, [(p.prompt_ids, p.rejected_ids) for p in pairs])


def fit(differences_NH: Tensor) -> Tensor:
    """The weight [hidden] that makes chosen completions likelier under sigmoid(weight . difference)."""
    scale = differences_NH.square().mean().sqrt()
    weight_H = torch.zeros(differences_NH.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weight_H], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = softplus(-(differences_NH / scale) @ weight_H).mean() + L2 * weight_H.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return weight_H.detach() / scale


def accuracy(differences_NCH: Tensor, weight_H: Tensor) -> str:
    """Share of pairs whose chosen completion scores higher, by cut."""
    right_C = (differences_NCH @ weight_H > 0).float().mean(0)
    return ", ".join(f"{value:.3f} at {cut:.0%}" for value, cut in zip(right_C.tolist(), CUTS, strict=True))


def write(source: Path, out: Path, weight_H: Tensor) -> None:
    hf, folder = read_hf_config(source), HFFolder(source)
    (head,) = VALUE_HEAD.hf
    with HFWriter(out, export_shapes(hf, "value"), hf.dtype) as writer:
        for name, shape in writer.shapes.items():
            rows, cols = (1, *shape)[-2:]
            tensor = weight_H[None] if name == head else folder.read(Block(name, 0, 0, rows, cols, name, 0, cols))
            writer.write(name, tensor.to(hf.dtype).reshape(shape))
        write_beside(source, writer.partial, hf, "value", hf.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-model", required=True, type=Path, help="folder of the language model")
    parser.add_argument("--train-data", required=True, help="file of preference pairs, as train_dpo.py takes them")
    parser.add_argument("--eval-data", required=True, help="held-out pairs")
    parser.add_argument("--pairs", type=int, default=100, help="pairs of each file to use")
    parser.add_argument("--out", required=True, type=Path, help="folder to write")
    args = parser.parse_args()
    if args.out.exists():
        return print(f"{args.out}: already there")
    from transformers import AutoModel

    read_hf_config(args.hf_model)
    tokenizer = load_tokenizer(args.hf_model)
    model = AutoModel.from_pretrained(args.hf_model, dtype="auto").eval()
    found = []
    for file in (args.train_data, args.eval_data):
        pairs = load_preferences(PreferenceOptions((file,), max_length=512), tokenizer).items[: args.pairs]
        found.append(differences(model, pairs))
    weight_H = fit(found[0].flatten(0, 1))
    write(args.hf_model, args.out, weight_H)
    print(f"{args.out}: written; the higher score is the chosen completion's")
    print(f"  training pairs ({len(found[0])}): {accuracy(found[0], weight_H)}")
    print(f"  held-out pairs ({len(found[1])}): {accuracy(found[1], weight_H)}")


if __name__ == "__main__":
    with ending_together():
        main()
