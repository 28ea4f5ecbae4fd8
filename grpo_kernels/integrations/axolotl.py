"""`GRPOKernelsPlugin`: axolotl's GRPO with this library's LM head, by two lines of its config.

    plugins: [grpo_kernels.integrations.axolotl.GRPOKernelsPlugin]
    grpo_kernels: true

axolotl trains GRPO with a subclass of TRL's trainer, which is patched for the run: see `patch_trl`.
"""

from __future__ import annotations

from typing import Any, Literal

try:
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel, ConfigDict, Field, model_validator
except ImportError as error:
    raise ImportError(
        f"{__name__}: expected the package axolotl, 0.19 or newer; got: {error}"
    ) from error

from ..head.execution import Execution


class GRPOKernelsOptions(BaseModel):
    """`grpo_kernels_options:` in axolotl's config; names and defaults of `patch_trl`'s arguments.

    Args:
        logits_dtype: as in `LMHead`.
        replay_support: as in `FusedGRPOTrainer`.
        backend, chunk_bytes, batch_invariant: as in `Execution`.
    """

    model_config = ConfigDict(extra="forbid")

    logits_dtype: Literal["fp32", "model"] = "fp32"
    replay_support: bool = False
    backend: Literal["auto", "triton", "torch"] = "auto"
    chunk_bytes: int | None = Field(default=None, gt=0)
    batch_invariant: bool = False


class GRPOKernelsArgs(BaseModel):
    """Options that the plug-in adds to axolotl's config.

    Args:
        grpo_kernels: whether the head is this library's.
        grpo_kernels_options: how; only with `grpo_kernels: true`.
    """

    grpo_kernels: bool = False
    grpo_kernels_options: GRPOKernelsOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def check_grpo_kernels(cls, config: Any) -> Any:
        """Checks the options.

        Raises:
            ValueError: an option with which axolotl would not call the patch.
        """
        if not config.get("grpo_kernels"):
            if config.get("grpo_kernels_options"):
                raise ValueError("grpo_kernels_options has no effect: set grpo_kernels: true")
            return config
        trl = config.get("trl") or {}
        if config.get("rl") != "grpo":
            raise ValueError(f"rl: expected grpo with grpo_kernels; got {config.get('rl')!r}")
        if (config.get("context_parallel_size") or 1) > 1:
            raise ValueError(
                f"context_parallel_size: {config['context_parallel_size']} does not work with "
                "grpo_kernels, because axolotl then scores tokens itself: set it to 1"
            )
        for name in ("async_prefetch", "use_data_producer", "use_liger_loss"):
            if trl.get(name):
                raise ValueError(
                    f"trl.{name}: {trl[name]!r} does not work with grpo_kernels, because the "
                    "trainer then uses another loss: set it to false"
                )
        return config


class GRPOKernelsPlugin(BasePlugin):
    """Patches TRL before the model is loaded, where `grpo_kernels: true`, and back at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._patch: Any = None

    def get_input_args(self) -> str:
        """The class that axolotl adds to its config."""
        return f"{__name__}.GRPOKernelsArgs"

    def pre_model_load(self, cfg: Any) -> None:
        """Makes the trainers that axolotl constructs from now on ours.

        Raises:
            ImportError, RuntimeError: as in `patch_trl`.
        """
        if not cfg.grpo_kernels or self._patch is not None:  # a reference is loaded likewise
            return
        from .trl import patch_trl

        options = cfg.grpo_kernels_options or {}
        options = GRPOKernelsOptions(**{k: v for k, v in dict(options).items() if v is not None})
        self._patch = patch_trl(
            logits_dtype=options.logits_dtype,
            replay_support=options.replay_support,
            execution=Execution(
                backend=options.backend,
                chunk_bytes=options.chunk_bytes,
                batch_invariant=options.batch_invariant,
            ),
        )

    def post_train_unload(self, cfg: Any) -> None:
        """Gives TRL back its own methods."""
        if self._patch is not None:
            self._patch.undo()
        self._patch = None
