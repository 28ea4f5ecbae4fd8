"""Tiny models that vLLM runs on a CPU, its engine, and the gap between its log-probs and theirs."""

import torch
from accelerate import Accelerator

from grpo_kernels.training.sampling.rollout import SamplingParams
from grpo_kernels.training.sampling.vllm_rollout import VLLMRollout
from tests.helpers.model_families import family_model
from tests.helpers.tiny_models import make_tokenizer
from tests.helpers.trainer_runs import config_of

# Longer than a block of vLLM's cache, 128 tokens on a CPU, so that its prefix is kept.
PROMPT = 140


def vllm_model(folder, family="llama", *, tied=True, decided=False):
    """Saves a model with heads of 32, the smallest that vLLM has, and its tokenizer.

    With `decided` it has favourite tokens, the end of a completion among them.
    """
    sizes = {"hidden_size": 64, "head_dim": 32, "max_position_embeddings": 512}
    model = family_model(family, tie_word_embeddings=tied, **sizes)
    if decided:
        head = model.get_output_embeddings().weight.data
        head *= 3.0
        head[0] *= 2.0
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def vllm_config(folder, output, **options):
    defaults = dict(
        rollout="vllm", max_prompt_length=160, prompts_per_step=2, max_completion_length=8
    )
    return config_of(folder, output, **{**defaults, **options})


def rollout_of(config, model):
    return VLLMRollout(config, model, make_tokenizer(), Accelerator(cpu=True))


def prompts(count=2):
    draw = torch.Generator().manual_seed(2)
    return torch.randint(33, 90, (count, PROMPT), generator=draw).tolist()


@torch.no_grad()
def gap(rollout, model, temperature=1.0):
    """The largest |log-prob of vLLM - log-prob of the model| of completions that vLLM samples."""
    sampling, largest = SamplingParams(8, temperature=temperature), 0.0
    done = rollout(prompts(), 4, sampling)
    for i, one in enumerate(done):
        prompt = prompts()[i * 2 // len(done)]
        ids = torch.tensor([prompt + one.token_ids])
        logits = model(ids).logits[0, len(prompt) - 1 : -1].double() / temperature
        logps = logits.log_softmax(-1)[range(len(one.token_ids)), one.token_ids]
        largest = max(largest, float((logps - torch.tensor(one.logps)).abs().max()))
    return largest
