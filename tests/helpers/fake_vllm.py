"""A small engine with what is used of `vllm.LLM`, which samples by a model of its own."""

import copy
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import torch
from transformers import AutoModelForCausalLM

from grpo_kernels.integrations.vllm import WorkerExtension

VERSION = "0.32.0"


class Worker(WorkerExtension):
    """A worker whose model has the weights of the folder until it is sent others."""

    def __init__(self, options):
        self.model = AutoModelForCausalLM.from_pretrained(options["model"]).eval()
        self.model_runner = SimpleNamespace(get_model=lambda: self.model)
        self.model_config = SimpleNamespace(
            hf_config=self.model.config, dtype=getattr(torch, options["dtype"]),
            logprobs_mode=options["logprobs_mode"],
            return_sampling_mask=options.get("return_sampling_mask", False),
        )  # fmt: skip
        self.loads = []

    def reload_weights(self, weights_iterator):
        given = dict(weights_iterator)
        self.loads.append({name: list(w.shape) for name, w in given.items()})
        missing, unknown = self.model.load_state_dict(given, strict=False)
        self.model.tie_weights()
        assert not unknown and set(missing) <= {"lm_head.weight"}


class LLM:
    """The engine. `about` and `asked` are the tests': what it says of itself, what it was asked."""

    about, made = {}, []

    def __init__(self, *, seed, **options):
        self.options, self.worker, self.asked = options, Worker(options), []
        LLM.made.append(self)

    def collective_rpc(self, method, args=()):
        found = getattr(self.worker, method)(*args)
        return [{**found, **LLM.about} if method == "grpo_kernels_about" else found]

    def reset_prefix_cache(self):
        return True

    @torch.no_grad()
    def generate(self, inputs, params, use_tqdm):
        self.asked += params
        return [
            SimpleNamespace(outputs=self._outputs(one["prompt_token_ids"], p))
            for one, p in zip(inputs, params, strict=True)
        ]

    def _outputs(self, prompt, p):
        draw = torch.Generator().manual_seed(p.seed)
        return [self._output(prompt, p, draw) for _ in range(p.n)]

    def _output(self, prompt, p, draw):
        ids, logps, kept = [], [], []
        for _ in range(p.max_tokens):
            logits = self.worker.model(torch.tensor([[*prompt, *ids]])).logits[0, -1].float()
            logits = logits / (p.temperature or 1.0)
            order = logits.argsort(descending=True)
            before = logits[order].softmax(0).cumsum(0).roll(1)
            before[0] = 0.0
            some = order[: p.top_k or len(order)]
            some = some[before[: len(some)] < p.top_p]
            log_p = logits[some].log_softmax(0)
            greedy = p.temperature == 0 or p.top_k == 1
            place = 0 if greedy else int(log_p.exp().multinomial(1, generator=draw))
            ids.append(int(some[place]))
            logps.append({ids[-1]: SimpleNamespace(logprob=float(log_p[place]))})
            kept.append(some.tolist())
            if ids[-1] in p.stop_token_ids:
                break
        mask = (
            SimpleNamespace(token_ids=kept)
            if self.worker.model_config.return_sampling_mask
            else None
        )
        return SimpleNamespace(
            token_ids=ids, logprobs=None if p.logprobs is None else logps, sampling_mask=mask,
            stop_reason=ids[-1] if ids[-1] in p.stop_token_ids else None,
        )  # fmt: skip


def install(monkeypatch):
    """The engine in the place of vLLM; returns its class."""
    module = ModuleType("vllm")
    module.__version__, module.LLM, module.__spec__ = VERSION, LLM, ModuleSpec("vllm", None)
    module.SamplingParams = lambda **options: SimpleNamespace(**copy.deepcopy(options))
    monkeypatch.setattr(LLM, "about", {})
    monkeypatch.setattr(LLM, "made", [])
    monkeypatch.setitem(sys.modules, "vllm", module)
    return LLM
