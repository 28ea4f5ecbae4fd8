"""Runs of TRL's trainers with a real vLLM, colocated on a CPU, in processes of their own.

TRL starts vLLM as on a GPU, and sends weights in a way that vLLM cannot take on a CPU, where they
are packed away. `vllm_on_a_cpu` is what it needs there; the rest is TRL's own.
"""

import gc
import importlib
import os
import tempfile
from contextlib import contextmanager
from itertools import pairwise
from unittest import mock

from tests.helpers.vllm_masks import enable_masks

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip
VLLM = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 64}


def prepare(masks):
    """Sets up a process before anything in it has imported vLLM."""
    os.environ |= ENVIRONMENT
    if masks:
        enable_masks()


def stored_model(folder, *, tied):
    """Saves a model with heads of 32, the smallest that vLLM has, and its tokenizer."""
    import torch

    from tests.helpers.model_families import family_model
    from tests.helpers.tiny_models import make_tokenizer

    model = family_model("qwen3", hidden_size=64, head_dim=32, tie_word_embeddings=tied)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head.mul_(3.0)
        head[0].mul_(2.0)  # completions end now and then
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


@contextmanager
def vllm_on_a_cpu():
    """Lets TRL's colocated vLLM run on a CPU, in float32, and leaves nothing of it behind."""
    import torch
    from accelerate.state import AcceleratorState
    from trl.generation import vllm_generation
    from vllm.distributed import cleanup_dist_env_and_memory

    from grpo_kernels.integrations import vllm as extension

    own = vllm_generation.LLM

    def engine(**options):
        # A group of one that meets in a file: vLLM takes it, and TRL's port might be taken.
        store = f"file://{folder}/store"
        torch.distributed.init_process_group("gloo", store, rank=0, world_size=1)
        return own(**options, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=2**26)

    def sync_weights(self):
        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        runner.reload_weights(weights_iterator=extension.names_and_weights(self.model))
        assert extension.repack(runner.get_model())  # the copies that vLLM multiplies by
        assert self.llm.reset_prefix_cache()

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ),  # TRL writes ranks into it
        mock.patch.object(gc, "unfreeze"),  # as vLLM does at its end
        mock.patch.object(vllm_generation, "LLM", engine),
        mock.patch.object(vllm_generation.VLLMGeneration, "sync_weights", sync_weights),
    ):
        # vLLM collects garbage again and again, and need not look at what has been imported.
        gc.freeze()
        try:
            yield
        finally:
            cleanup_dist_env_and_memory()
            AcceleratorState._reset_state(reset_partial_state=True)


def run(trainer, folder, **options):
    """Run as `trained` returns it.

    Args:
        trainer: a class, as `module:name`.
        folder: the run's.
        options: of `trained`.
    """
    from tests.helpers.trl_runs import trained

    module, name = trainer.split(":")
    kind = getattr(importlib.import_module(module), name)
    with vllm_on_a_cpu():
        return trained(kind, folder, **VLLM | options)


def run_replayed(folder, **options):
    """Run with `replay_support` as `trained` returns it, and the sets that it sampled from.

    Returns:
        The run; per token the words of its support; those that the policy's own logits keep.
    """
    from grpo_kernels.integrations.trl import FusedGRPOTrainer
    from tests.helpers.masked_trainer import kept_sets
    from tests.helpers.trl_runs import trained

    supports, kept = [], []

    class Noting(FusedGRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            completion_ids, logps = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            for words, offsets in self._support_replay.scored_rows():
                supports.extend(words[a:b].tolist() for a, b in pairwise(offsets))
            for rows in kept_sets(self, prompt_ids, completion_ids):
                kept.extend(row.nonzero()[:, 0].tolist() for row in rows)
            return completion_ids, logps

    with vllm_on_a_cpu():
        done = trained(Noting, folder, replay_support=True, **VLLM | options)
    return done, supports, kept
