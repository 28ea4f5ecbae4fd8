"""An engine with vLLM's interface, as far as TRL uses one in its own process, as on a GPU.

`tests/vllm/test_trl_vllm.py` runs the real one, with which this has to agree.
"""

from types import SimpleNamespace

import torch
import transformers

# In vLLM's order: `min_p` comes before the others.
WARPERS = (
    ("temperature", transformers.TemperatureLogitsWarper, None),
    ("min_p", transformers.MinPLogitsWarper, 0.0),
    ("top_k", transformers.TopKLogitsWarper, 0),
    ("top_p", transformers.TopPLogitsWarper, 1.0),
)


class FakeLLM:
    """Samples by transformers, token by token, and reports log-probs over the words it kept."""

    def __init__(self, model, *, logprobs_mode, seed, return_sampling_mask=False, **options):
        if return_sampling_mask and logprobs_mode != "processed_logprobs":
            raise ValueError("sampling distribution replay requires 'processed_logprobs'")
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.masks, self.options = return_sampling_mask, options
        runner = SimpleNamespace(model_runner=SimpleNamespace(model=self))
        executor = SimpleNamespace(driver_worker=runner)
        self.llm_engine = SimpleNamespace(model_executor=executor)
        torch.manual_seed(seed)

    def load_weights(self, named):
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in named:
                parameters[name].copy_(value)

    def reset_prefix_cache(self):
        return True

    def generate(self, prompts, sampling_params, use_tqdm):
        for name in ("temperature", "top_k"):
            if self.masks and getattr(sampling_params, name) <= 0:
                raise ValueError(f"sampling distribution replay requires {name} > 0")
        return [self.request(prompt["prompt_token_ids"], sampling_params) for prompt in prompts]

    @torch.no_grad()
    def request(self, prompt, sampling):
        ids, kept, logprobs = list(prompt), [], []
        while len(kept) < sampling.max_tokens:
            scores = self.model(torch.tensor([ids])).logits[:, -1].float()
            for name, warper, off in WARPERS:
                if getattr(sampling, name) != off:
                    scores = warper(getattr(sampling, name))(None, scores)
            log_p = scores.log_softmax(-1)[0]
            token = int(torch.multinomial(log_p.exp(), 1))
            kept.append((scores[0] > -torch.inf).nonzero()[:, 0].tolist())
            rank = int((log_p >= log_p[token]).sum())
            logprobs.append({token: SimpleNamespace(logprob=float(log_p[token]), rank=rank)})
            ids.append(token)
            if token == self.model.config.eos_token_id:
                break
        output = SimpleNamespace(
            token_ids=ids[len(prompt) :],
            logprobs=logprobs,
            sampling_mask=SimpleNamespace(token_ids=kept) if self.masks else None,
        )
        return SimpleNamespace(prompt_token_ids=prompt, outputs=[output])
