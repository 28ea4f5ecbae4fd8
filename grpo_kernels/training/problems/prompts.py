"""Prompts: built from questions, and tokenized."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..config import TrainingConfig

INSTRUCTION = (
    "Work the problem out between <think> and </think>, then give the answer, nothing else, "
    "between <answer> and </answer>."
)
EXAMPLE = (
    "Question: A box holds 4 rows of 6 eggs. Ann takes 5 eggs. How many are left?\n"
    "<think>4 * 6 = 24 eggs are in the box. 24 - 5 = 19 are left.</think>\n<answer>19</answer>"
)


def build_prompt(question: str, config: TrainingConfig) -> str | list[dict[str, str]]:
    """The prompt of a question: text, or the messages of a chat."""
    instruction = config.system_prompt
    if config.chat and instruction:
        system = {"role": "system", "content": instruction}
        return [system, {"role": "user", "content": question}]
    if config.chat:  # no system message: some templates refuse one
        return [{"role": "user", "content": f"{INSTRUCTION}\n\n{question}"}]
    if instruction:
        return f"{instruction}\n{question}"
    return f"{INSTRUCTION}\n\n{EXAMPLE}\n\nQuestion: {question}\n"


class PromptEncoder:
    """Tokenizes the prompts of problems, each once, for a model of this vocabulary size."""

    def __init__(self, tokenizer: Any, *, chat: bool, vocabulary: int) -> None:
        self.tokenizer, self.chat, self.vocabulary = tokenizer, chat, vocabulary
        self._known: dict[str, list[int]] = {}

    def __call__(self, problem: Mapping[str, Any]) -> list[int]:
        """Returns the tokens of a problem's prompt; none for an empty list of messages.

        Raises:
            ValueError: the prompt is neither text nor messages, the chat template refuses it, or
                the model does not know one of its tokens.
        """
        key = repr(problem["prompt"])
        if key not in self._known:
            ids = self._encode(problem["prompt"])
            if unknown := [x for x in ids if x >= self.vocabulary]:
                raise ValueError(
                    f"prompt: the tokenizer makes {self.tokenizer.decode(unknown[:1])!r} token "
                    f"{unknown[0]}, and the model has {self.vocabulary} tokens: call "
                    "model.resize_token_embeddings(len(tokenizer)), or pass the model's own "
                    f"tokenizer; the prompt is {problem['prompt']!r:.80}"
                )
            self._known[key] = ids
        return self._known[key]

    def _encode(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str) and not self.chat:
            return self._encode_text(prompt)
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, list | tuple) or not all(
            isinstance(message, Mapping) and "role" in message for message in prompt
        ):
            raise ValueError(
                f"prompt: expected text, or messages with a role and content; got {prompt!r:.80}"
            )
        if not prompt:
            return []
        begun = prompt[-1]["role"] == "assistant"
        try:
            ids = self.tokenizer.apply_chat_template(
                prompt, add_generation_prompt=not begun, continue_final_message=begun
            )
        except Exception as error:  # whatever a template raises
            raise ValueError(f"prompt: no chat template for {prompt!r:.80}: {error}") from error
        return list(ids if isinstance(ids, list) else ids["input_ids"])

    def _encode_text(self, text: str) -> list[int]:
        """The tokens of a text to go on from: one begin token, and no end token behind it."""
        begin, end = self.tokenizer.bos_token, self.tokenizer.eos_token_id
        # A text rendered by a chat template has special tokens already.
        rendered = bool(begin) and text.startswith(begin)
        bare = list(self.tokenizer(text, add_special_tokens=False).input_ids)
        ids = bare if rendered else list(self.tokenizer(text).input_ids)
        if len(ids) > len(bare) and ids[-1] == end and ids[-len(bare) - 1 : -1] == bare:
            ids.pop()
        return ids


def short_enough(
    problems: Sequence[Mapping[str, Any]],
    encode: PromptEncoder,
    longest: int,
    say: Callable[[str], None],
) -> list[Mapping[str, Any]]:
    """The problems whose prompts have 1 to `longest` tokens; prints how many are dropped.

    Raises:
        ValueError: no problem is left.
    """
    lengths = [len(encode(problem)) for problem in problems]
    fitting = [p for p, length in zip(problems, lengths, strict=True) if 0 < length <= longest]
    empty, left_out = lengths.count(0), f"of {len(problems)} problems are left out: their prompts"
    if more := len(problems) - len(fitting) - empty:
        say(f"{more} {left_out} have more than max_prompt_length = {longest} tokens")
    if empty:
        say(f"{empty} {left_out} have no token")
    if problems and not fitting:
        raise ValueError(
            f"max_prompt_length={longest}: every prompt is longer, or empty; the shortest has "
            f"{min(lengths)} tokens"
        )
    return fitting
