"""Explanations made by hand, with what no run should have and some do; pages as they are read."""

import base64
import hashlib
import json
import math
from html.parser import HTMLParser

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


class Page(HTMLParser):
    """A page's tags with their attributes, its texts by tag, and the data of its script."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.parts, self.tag = [], {}, None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tag = (tag, *(value for name, value in attributes if name == "type"))
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.parts[self.tag] = self.parts.get(self.tag, "") + data

    def handle_endtag(self, tag):
        self.tag = None

    def data(self):
        return strict_json(self.parts[("script", "application/json")])

    def check_harmless(self):
        """Asserts that the page may run its script alone, and load nothing."""
        (policy,) = (x["content"] for _, x in self.tags if x.get("http-equiv"))
        hashes = {
            part: base64.b64encode(hashlib.sha256(self.parts[(part,)].encode()).digest()).decode()
            for part in ("style", "script")
        }
        assert policy == (
            f"default-src 'none'; style-src 'sha256-{hashes['style']}'; "
            f"script-src 'sha256-{hashes['script']}'; base-uri 'none'; form-action 'none'"
        )
        # Attributes with code or an address, which the policy refuses anyhow.
        names = {name for _, attributes in self.tags for name in attributes}
        assert not {x for x in names if x in ("src", "style", "action") or x[:2] == "on"}
        assert "url(" not in self.parts[("style",)] and "@import" not in self.parts[("style",)]
        # Ways in which text would become more than text.
        for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(",
                    "Function("):  # fmt: skip
            assert way not in self.parts[("script",)]


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
