"""The thinker: any model of transformers that writes text, on the torch engine.

Everything of the model is upstream's, the forward pass too, so every architecture that transformers can generate with
works; the price is that rows are computed one after the other (vLLM batches them).
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from omni_ray.engine.ar_model import ARModel
from omni_ray.engine.checkpoint_files import stage_directory
from omni_ray.engine.precision import compute_dtype
from omni_ray.engine.transformers_build import BUILDING
from omni_ray.engine.types import Message, TextPart
from omni_ray.errors import ConfigError
from omni_ray.models.any_thinker.answer import Answer, Stepwise
from omni_ray.models.any_thinker.chat import ChatReader, Encoded
from omni_ray.models.any_thinker.checkpoint_config import class_of, max_positions, read_config
from omni_ray.models.any_thinker.options import AnyThinkerOptions
from omni_ray.models.any_thinker.prompt import ChatPrompt


class AnyThinker(ARModel):
    """``ChatPrompt`` in, text out.

    A row's numbers do not depend on its neighbours, so ``deterministic`` changes nothing here. Sampling is the
    engine's, from OpenAI's defaults; what the checkpoint's ``generation_config.json`` says of it is not used.
    """

    def load(self) -> None:
        """Load tokenizer, processor and weights, and compare a short answer with upstream's ``generate``.

        Raises:
            ConfigError: no such model, a file or a tensor is missing, or it cannot be computed token by token.
        """
        options = self.context.options
        assert isinstance(options, AnyThinkerOptions)
        directory = stage_directory(self.context)
        torch.set_num_threads(options.threads)
        trust = options.trust_remote_code
        config = read_config(directory, trust_remote_code=trust)
        media = any(isinstance(config.to_dict().get(tower), Mapping) for tower in ("vision_config", "audio_config"))
        self._chat = ChatReader(directory, media, trust)
        self.stop_ids = self._chat.stop_ids
        self.max_positions = max_positions(config)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = self._model(directory, config, options)
        self._stepwise = Stepwise(model.eval().requires_grad_(False).to(self._device))
        self._answers: list[Answer | None] = [None] * options.max_num_seqs
        self._made: list[tuple[int, int, Tensor] | None] = [None] * options.max_num_seqs
        self._check_turns(directory)

    def encode(self, prompt: Any) -> Encoded:
        """Tokens and media of a ``ChatPrompt``, as upstream's processor makes them."""
        assert isinstance(prompt, ChatPrompt)
        return self._chat.encode(prompt)

    def penalised(self, prompt: Encoded) -> Sequence[int]:
        """See ``ARModel.penalised``."""
        return prompt.ids

    def detokenize(self, token_id: int) -> bytes:
        """See ``ARModel.detokenize``."""
        return self.detokenizer()(token_id)

    def detokenizer(self) -> Callable[[int], bytes]:
        """See ``ARModel.detokenizer``."""
        return self._chat.detokenizer()

    def begin(self, slot: int, prompt: Encoded) -> int:
        """Begin an answer. The whole prompt is computed with its last position: not every model takes it in pieces."""
        self._answers[slot] = Answer(self._stepwise, self._inputs(prompt))
        return len(prompt) - 1

    def prefill(self, slot: int, ids: Sequence[int], start: int) -> Tensor:
        """See ``ARModel.prefill``: the last piece, and the prompt before it."""
        return self._answer(slot).prompt()

    def follow(self, slot: int, ids: Sequence[int], start: int) -> None:
        """See ``ARModel.follow``; one token after the other."""
        for token in ids:
            self._answer(slot).next(token)

    def step(self, slots: Sequence[int], last_ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """See ``ARModel.step``."""
        return torch.stack([self._next(*row) for row in zip(slots, last_ids, positions, strict=True)])

    def _next(self, slot: int, token: int, position: int) -> Tensor:
        """A row's logits. A step in which another row failed is repeated; caches must not grow twice then."""
        made = self._made[slot]
        if made is None or made[:2] != (position, token):
            made = self._made[slot] = (position, token, self._answer(slot).next(token))
        return made[2]

    def release(self, slot: int) -> None:
        """Drop the answer and its cache."""
        self._answers[slot] = self._made[slot] = None

    def _answer(self, slot: int) -> Answer:
        answer = self._answers[slot]
        assert answer is not None
        return answer

    def _inputs(self, prompt: Encoded) -> dict[str, Tensor]:
        """On the device, floats in the model's dtype."""
        dtype = self._stepwise.model.dtype
        return {
            name: value.to(self._device, dtype if value.is_floating_point() else value.dtype)
            for name, value in prompt.inputs.items()
        }

    def _check_turns(self, directory: Path) -> None:
        """Compare two short answers made by turns with upstream's: some models keep a state of their own."""
        chats = [
            ChatPrompt((Message("user", (TextPart(text),)),)) for text in ("Hello!", "What is the capital of France?")
        ]
        name = type(self._stepwise.model).__name__
        try:
            alike = self._stepwise.check([self._inputs(self.encode(chat)) for chat in chats])
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
            raise ConfigError([f"{directory}: {name} cannot be computed token by token: {error}"]) from error
        if not alike:
            raise ConfigError([f"{directory}: {name} answers otherwise token by token than in one call of generate"])

    def _model(self, directory: Path, config: Any, options: AnyThinkerOptions) -> Any:
        """The checkpoint as transformers loads it; a missing tensor is an error, not a random one."""
        name = "bfloat16" if options.dtype == "auto" and self._device.type == "cuda" else options.dtype
        dtype, trust = compute_dtype(name), options.trust_remote_code
        cls = class_of(directory, config, trust)
        if self.context.load_format == "dummy":
            with BUILDING:
                return cls.from_config(config, dtype=dtype, trust_remote_code=trust)
        try:
            model, info = cls.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                trust_remote_code=trust,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            raise ConfigError([f"{directory}: transformers cannot load its weights: {error}"]) from error
        if missing := sorted(info["missing_keys"]):
            raise ConfigError([f"{directory}: tensors are missing: {', '.join(missing)}"])
        return model
