"""Writes an HF folder of a known size with random weights, for measuring without a download.

    python tools/random_model.py qwen2.5-1.5b --out /tmp/qwen1.5b [--tokenizer DIR] [num_hidden_layers=4 ...]

Matrices are normal with deviation 0.02, norms are 1 and biases 0, in bfloat16.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.failure import ending_together
from megatron_rl.models.config import read_hf_config
from megatron_rl.weights.hf_io import HFWriter, export_shapes
from megatron_rl.weights.target import check_replaceable

TOKENIZER_FILE = re.compile("token|chat_template|vocab|merges")
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "use_sliding_window": False,
}


def qwen2(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, **more: object) -> dict[str, object]:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers}
    return QWEN2 | sizes | {"num_attention_heads": heads, "num_key_value_heads": kv_heads} | more


SHAPES = {
    "qwen2.5-0.5b": qwen2(896, 4864, 24, 14, 2, tie_word_embeddings=True),
    "qwen2.5-1.5b": qwen2(1536, 8960, 28, 12, 2, tie_word_embeddings=True),
    "qwen2.5-1.5b-untied": qwen2(1536, 8960, 28, 12, 2),
    "qwen2.5-7b": qwen2(3584, 18944, 28, 28, 4, vocab_size=152064),
    "qwen2.5-72b": qwen2(8192, 29568, 80, 64, 8, vocab_size=152064),
}


def override(item: str) -> tuple[str, object]:
    """Of key=value; ValueError for another key than those of the shapes, which would change nothing."""
    key, _, value = item.partition("=")
    if key not in SHAPES["qwen2.5-0.5b"]:
        raise ValueError(f"{item} is no key=value with one of the keys {', '.join(SHAPES['qwen2.5-0.5b'])}")
    return key, yaml.safe_load(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES, help="sizes of which published model")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="config.json keys to change")
    parser.add_argument("--out", required=True, type=Path, help="folder to write; an older one is replaced")
    parser.add_argument("--tokenizer", type=Path, default=None, help="folder whose tokenizer files are copied along")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_intermixed_args()
    config = SHAPES[args.shape] | dict(map(override, args.overrides))
    for key in ("bos_token_id", "eos_token_id"):  # of a smaller vocabulary the last token ends a text
        config[key] = min(config[key], config["vocab_size"] - 1)
    copied = [path for path in args.tokenizer.glob("*") if TOKENIZER_FILE.search(path.name)] if args.tokenizer else []
    if args.tokenizer and not copied:
        raise ValueError(f"--tokenizer {args.tokenizer} has no tokenizer files")
    check_replaceable(args.out)
    with tempfile.TemporaryDirectory() as checked:
        (Path(checked) / "config.json").write_text(json.dumps(config))
        hf = read_hf_config(checked)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(args.seed)
    with HFWriter(args.out, export_shapes(hf, "lm"), torch.bfloat16) as writer:
        for name, shape in writer.shapes.items():
            if len(shape) == 2:
                drawn = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) * 0.02
                writer.write(name, drawn.cpu())
            else:
                writer.write(name, torch.full(shape, 0.0 if name.endswith("bias") else 1.0, dtype=torch.bfloat16))
        (writer.partial / "config.json").write_text(json.dumps(config, indent=2))
        for path in copied:
            shutil.copyfile(path, writer.partial / path.name)
    count = sum(torch.Size(shape).numel() for shape in export_shapes(hf, "lm").values())
    print(f"wrote {args.out}: {count:,} parameters")


if __name__ == "__main__":
    with ending_together():
        main()
