"""One answer of a model of transformers, a token at a time, through its public ``generate``.

``generate`` knows what each architecture needs: caches, masks, rope positions, media. Asked for one token with the
cache of the call before, it computes what one call for all tokens computes, in equal shapes. Drawing is not left to it:
its logits are the engine's to sample from, and no global random generator is touched.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from transformers import GenerationConfig

from omni_ray.errors import StageFailedError

CACHES: Final = ("past_key_values", "cache", "cache_params")
"""What ``forward`` calls the cache, by model and by version of transformers."""

ONE: Final = GenerationConfig(
    max_new_tokens=1, do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_logits=True
)


class Stepwise:
    """A model whose answers are computed by turns; each answer's ``Answer`` is its own."""

    def __init__(self, model: Any) -> None:
        """Take a model with a ``generate``; its own generation defaults are dropped, every caller says its own."""
        model.generation_config = GenerationConfig()
        self.model = model
        takes = inspect.signature(model.forward).parameters
        self.cache_name = next((name for name in CACHES if name in takes), None)
        # models with pictures in their rope positions keep something of an answer on the module, beside its cache
        self.carriers: list[Any] = [module for module in model.modules() if "rope_deltas" in vars(module)]

    def check(self, prompts: Sequence[Mapping[str, Tensor]], tokens: int = 3) -> bool:
        """Whether greedy answers made by turns, a token each, are those of one call each; also warms the model up."""
        with torch.inference_mode():
            one_call = [
                self.model.generate(
                    **inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
                )
                for inputs in prompts
            ]
        answers = [Answer(self, inputs) for inputs in prompts]
        logits = [answer.prompt() for answer in answers]
        made: list[list[int]] = [[] for _ in prompts]
        for _ in range(tokens):
            for i, answer in enumerate(answers):
                made[i].append(int(logits[i].argmax()))
                logits[i] = answer.next(made[i][-1])
        return made == [ids[0, -tokens:].tolist() for ids in one_call]


class Answer:
    """One answer: ``prompt`` once, then ``next`` for every token that was drawn."""

    def __init__(self, stepwise: Stepwise, inputs: Mapping[str, Tensor]) -> None:
        """Begin an answer.

        Args:
            stepwise: the model.
            inputs: as upstream's tokenizer or processor gives them: ``input_ids`` int64 [1, n], ``attention_mask``, and
                whatever the model takes of media.
        """
        self._stepwise = stepwise
        self._inputs = dict(inputs)
        self._media = set(inputs) - {"input_ids", "attention_mask"}
        self._cache: Any = None
        self._carried: list[Any] = [None] * len(stepwise.carriers)
        self._broken = False

    def prompt(self) -> Tensor:
        """Float32 logits [vocabulary] behind the prompt."""
        logits = self._compute(self._inputs)
        if self._cache is None and self._media:
            raise StageFailedError(f"{type(self._stepwise.model).__name__} keeps no cache of a prompt with media")
        self._inputs = {name: self._inputs[name] for name in self._inputs if name not in self._media}
        return logits

    def next(self, token: int) -> Tensor:
        """Float32 logits [vocabulary] behind ``token``."""
        added = {"input_ids": token, "attention_mask": 1}
        for name, kept in self._inputs.items():
            self._inputs[name] = torch.cat((kept, kept.new_full((1, 1), added[name])), 1)
        return self._compute(self._inputs)

    @torch.inference_mode()
    def _compute(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """A step; one that raises leaves half a cache behind, so the answer is over then."""
        if self._broken:
            raise StageFailedError("this answer failed in an earlier step")
        self._broken = True
        name = self._stepwise.cache_name
        known = {} if self._cache is None or name is None else {name: self._cache}
        for module, value in zip(self._stepwise.carriers, self._carried, strict=True):
            module.rope_deltas = value
        made = self._stepwise.model.generate(**inputs, **known, generation_config=ONE)
        self._carried = [module.rope_deltas for module in self._stepwise.carriers]
        if name is not None:
            self._cache = made.past_key_values
        self._broken = False
        logits: Tensor = made.logits[0][0]
        return logits.float().cpu()
