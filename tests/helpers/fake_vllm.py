"""A small engine with what is used of `vllm.LLM`, which samples by a model of its own."""

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
        weights = dict(weights_iterator)
        self.loads.append({name: list(w.shape) for name, w in weights.items()})
        missing, unknown = self.model.load_state_dict(weights, strict=False)
        self.model.tie_weights()
        assert not unknown and set(missing) <= {"lm_head.weight"}


class LLM:
    """The engine. `about` and `asked` are the tests': what it says of itself, what it was asked."""

    about, made = {}, []

    def __init__(self, *, seed, **options):
        self.options, self.worker, self.asked = options, Worker(options), []
        LLM.made.append(self)

    def collective_rpc(self, method, args=()):
        answer = getattr(self.worker, method)(*args)
        return [{**answer, **LLM.about} if method == "grpo_kernels_about" else answer]

    def reset_prefix_cache(self):
        return True

    def generate(self, inputs, params, use_tqdm):
        self.asked += params
        done = []
        for one, p in zip(inputs, params, strict=True):
            draw = torch.Generator().manual_seed(p.seed)
            outputs = [self._output(one["prompt_token_ids"], p, draw) for _ in range(p.n)]
            done.append(SimpleNamespace(outputs=outputs))
        return done

    @torch.no_grad()
    def _output(self, prompt, p, draw):
        ids, logps, kept = [], [], []
        while len(ids) < p.max_tokens and not set(ids) & set(p.stop_token_ids):
            logits = self.worker.model(torch.tensor([[*prompt, *ids]])).logits[0, -1].float()
            probs, order = (logits / (p.temperature or 1.0)).softmax(0).sort(descending=True)
            count = int((probs.cumsum(0) - probs < p.top_p).sum())
            probs = probs[: min(count, p.top_k or count)]
            place = 0 if p.temperature == 0 else int(probs.multinomial(1, generator=draw))
            ids.append(int(order[place]))
            logp = float((probs[place] / probs.sum()).log())
            logps.append({ids[-1]: SimpleNamespace(logprob=logp)})
            kept.append(order[: len(probs)].tolist())
        masks = self.worker.model_config.return_sampling_mask
        return SimpleNamespace(
            token_ids=ids, logprobs=None if p.logprobs is None else logps,
            sampling_mask=SimpleNamespace(token_ids=kept) if masks else None,
            stop_reason=ids[-1] if ids[-1] in p.stop_token_ids else None,
        )  # fmt: skip


def install(monkeypatch):
    """The engine in the place of vLLM; returns its class."""
    module = ModuleType("vllm")
    module.__version__, module.__spec__ = VERSION, ModuleSpec("vllm", None)
    module.LLM, module.SamplingParams = LLM, SimpleNamespace
    monkeypatch.setattr(LLM, "about", {})
    monkeypatch.setattr(LLM, "made", [])
    monkeypatch.setitem(sys.modules, "vllm", module)
    return LLM
