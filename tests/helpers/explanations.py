"""Explanations made by hand, with what no run should have and some do."""

import json
import math

import torch

from grpo_kernels.explain.explanation import Cause, Explanation, group_sums

HOSTILE = "</script><img src=x onerror=\"alert('<!--<script>')\">\u2028\u202e"
TEXTS = (
    ("a", " b", "\n", "", HOSTILE),
    ("\ud83d", "\N{GRINNING FACE}", "x" * 10_000),
    (),
    ("\x00\x1b[31m", "<|im_end|>"),
)


def strict_json(text):
    """Reads JSON without NaN and infinity."""

    def refuse(constant):
        raise ValueError(f"not strict JSON: {constant}")

    return json.loads(text, parse_constant=refuse)


def explanation(**changes) -> Explanation:
    lengths = torch.tensor([len(texts) for texts in TEXTS])
    torch.manual_seed(0)
    values = torch.randn(int(lengths.sum()))
    odd = values.clone()
    odd[:4] = torch.tensor([math.nan, math.inf, -math.inf, 1e-40])
    known = {"loss_share": 0.25, "gradient_share": 0.5}
    sequences = [
        {"group": 0, "length": 5, **known, "kl_share": -0.1, "reward": 1.0, "advantage": 0.1},
        {"group": 0, "length": 3, **known, "truncated": True, "prompt": HOSTILE},
        {"group": 1, "length": 0, "loss_share": math.nan, "gradient_share": math.nan},
        {"group": 1, "length": 2, "loss_share": math.inf, "gradient_share": 0.0},
    ]
    parts = {
        "columns": {"gradient": values, "ratio": odd, "loss": values / 3, HOSTILE: values * 0 + 1},
        "sequence": torch.arange(len(TEXTS)).repeat_interleave(lengths),
        "position": torch.cat([2 * torch.arange(n) for n in lengths]),
        "sequences": sequences,
        "groups": group_sums(sequences),
        "causes": [Cause("ratio", 0.5, HOSTILE, "`delta`", [(0, 2), (3, 0)])],
        "texts": [list(texts) for texts in TEXTS],
        "token_ids": torch.arange(len(values)) + 150_000,
        "loss": float((values / 3).sum()),
    }
    return Explanation(**parts | changes)
