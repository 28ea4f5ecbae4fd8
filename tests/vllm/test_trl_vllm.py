"""TRL with a real vLLM in its process: the runs of `FusedGRPOTrainer` are those of TRL's trainer.

TRL starts vLLM as on a GPU, and sends weights in a way that vLLM cannot take on a CPU, where they
are packed away. `vllm_on_a_cpu` is what it needs there; the rest is TRL's own.
"""

import gc
import os
import tempfile
from contextlib import contextmanager
from itertools import pairwise
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState

pytest.importorskip("trl", reason="needs the extra 'test'")
from trl import GRPOTrainer
from trl.generation import vllm_generation

from grpo_kernels.integrations import vllm as extension
from grpo_kernels.integrations.trl import FusedGRPOTrainer
from grpo_kernels.integrations.trl.state import state_of
from tests.helpers.masked_trainer import MaskedGRPOTrainer, kept_sets
from tests.helpers.trl_runs import TWICE, assert_same_run, trained
from tests.helpers.vllm_masks import why_no_masks
from tests.helpers.vllm_runs import vllm_model

pytestmark = pytest.mark.usefixtures("real_memory")
# Four steps, two of each batch.
OPTIONS = {
    "use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 64, "temperature": 0.7,
    "learning_rate": 0.02, "max_steps": 4, "beta": 0.1, **TWICE,
}  # fmt: skip
TRUNCATED = {**OPTIONS, "top_k": 12, "top_p": 0.95, "min_p": 0.03, "temperature": 0.9}


@contextmanager
def vllm_on_a_cpu():
    """Lets TRL's colocated vLLM run on a CPU, in float32, and leaves nothing of it behind."""
    from vllm.distributed import cleanup_dist_env_and_memory

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


def run(trainer_class, folder, **options):
    with vllm_on_a_cpu():
        return trained(trainer_class, folder / trainer_class.__name__, **options)


def run_replayed(folder, **options):
    """A run with `replay_support`, the ids of its supports, and those the policy's logits keep."""
    supports, kept = [], []

    class Noting(FusedGRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            completion_ids, logps = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            for words, offsets in state_of(self).replay.scored_rows():
                supports.extend(words[a:b].tolist() for a, b in pairwise(offsets))
            for rows in kept_sets(self, prompt_ids, completion_ids):
                kept.extend(row.nonzero()[:, 0].tolist() for row in rows)
            return completion_ids, logps

    return run(Noting, folder, replay_support=True, **options), supports, kept


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return str(vllm_model(folder, "qwen3", tied=False, decided=True))


def check(mine, theirs):
    assert_same_run(mine, theirs)
    name = "sampling/sampling_logp_difference/max"
    gaps = [row[name] for row in mine[1] if name in row]
    assert len(gaps) == 2 and max(gaps) < 1e-4


def test_the_same_run(model, vllm_process, tmp_path):
    mine, theirs = (
        vllm_process.submit(run, kind, tmp_path, stored=model, **OPTIONS)
        for kind in (FusedGRPOTrainer, GRPOTrainer)
    )
    check(mine.result(), theirs.result())


@pytest.mark.skipif(bool(why_no_masks()), reason=why_no_masks())
def test_supports_are_what_sampling_kept(model, vllm_process, tmp_path):
    """And the run is that of TRL's trainer with masked rows of logits."""
    theirs = vllm_process.submit(run, MaskedGRPOTrainer, tmp_path, stored=model, **TRUNCATED)
    mine = vllm_process.submit(run_replayed, tmp_path, stored=model, **TRUNCATED)
    mine, supports, kept = mine.result()
    check(mine, theirs.result())
    assert supports == kept
    assert len(set(map(len, supports))) > 4
