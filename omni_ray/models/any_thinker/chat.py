"""A checkpoint's chat template, tokenizer and processor: messages and media in, a model's inputs out."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import soxr
from jinja2 import TemplateError
from PIL import Image
from torch import Tensor
from transformers import AutoProcessor, AutoTokenizer

from omni_ray.engine.text_tokens import TokenStream, stop_ids
from omni_ray.engine.types import AudioClip, ImageClip, MediaPart, Message, TextPart
from omni_ray.errors import ConfigError, InvalidRequestError
from omni_ray.models.any_thinker.prompt import ChatPrompt

ROLES: Final = {"developer": "system"}
"""OpenAI's newer name, which no chat template knows."""

LOOPS: Final = re.compile(r"for\s+\w+\s+in\s+(\w+\s*(\[\s*['\"]content['\"]\s*\]|\.\s*content)|content)\b")
"""A template that goes through a message's parts; others take its text as one string."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt of n positions: its token ids [n], media expanded, and all inputs of the model."""

    ids: Sequence[int]
    inputs: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, piece: slice) -> Sequence[int]:
        return self.ids[piece]


class ChatReader:
    """Reads chats as the checkpoint's authors do: with their template and upstream's processor.

    A checkpoint without a template is no chat model: it continues the messages' texts, joined by newlines.

    Attributes:
        stop_ids: see ``ARModel.stop_ids``.
    """

    def __init__(self, directory: Path, hears_or_sees: bool, trust_remote_code: bool) -> None:
        """Load tokenizer and, for a model with media, processor.

        Raises:
            ConfigError: they do not load; with transformers' own message.
        """
        trust = {"trust_remote_code": trust_remote_code}
        try:
            self._decoder = AutoTokenizer.from_pretrained(directory, **trust)
            # the encoding one is changed by every call, from another thread
            self._tokenizer = AutoTokenizer.from_pretrained(directory, **trust)
            self._processor: Any = AutoProcessor.from_pretrained(directory, **trust) if hears_or_sees else None
        except (ImportError, OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError([f"{directory}: its tokenizer or processor does not load: {error}"]) from error
        self.stop_ids = stop_ids(directory, self._decoder)
        self._reserved = [token.content for token in self._decoder.added_tokens_decoder.values() if token.special]
        self._reader = self._processor or self._tokenizer
        template = self._reader.chat_template or self._tokenizer.chat_template
        self._template = template.get("default") if isinstance(template, Mapping) else template
        self._parts = self._template is not None and LOOPS.search(self._template) is not None

    def encode(self, prompt: ChatPrompt) -> Encoded:
        """A model's inputs.

        Raises:
            InvalidRequestError: the template refuses the messages, media cannot be placed in it, or a text holds a
                special token, which would be read as one: a user's words could forge a system message.
        """
        texts = [_text(message) for message in prompt.messages]
        for token in self._reserved if self._template is not None else ():
            if any(token in text for text in texts):
                raise InvalidRequestError(f"a text holds the reserved token {token!r}", "messages")
        try:
            made = self._encoded(prompt)
        except TemplateError as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", "messages"
            ) from error
        except ValueError as error:  # upstream's, about media that do not fit their placeholders
            raise InvalidRequestError(f"the model's processor refuses these messages: {error}", "messages") from error
        inputs = {name: value for name, value in made.items() if isinstance(value, Tensor)}
        return Encoded(inputs["input_ids"][0].tolist(), inputs)

    def _encoded(self, prompt: ChatPrompt) -> Mapping[str, Any]:
        if self._template is None:
            if prompt.sounds or prompt.images:
                raise InvalidRequestError("this checkpoint has no chat template to place media in", "messages")
            text = "\n".join(_text(message) for message in prompt.messages)
            plain: Mapping[str, Any] = self._tokenizer(text, return_tensors="pt")
            return plain
        conversation = [
            {"role": ROLES.get(message.role, message.role), "content": self._content(message, prompt)}
            for message in prompt.messages
        ]
        options: dict[str, Any] = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
        if self._processor is None:
            made: Mapping[str, Any] = self._tokenizer.apply_chat_template(conversation, return_tensors="pt", **options)
        else:
            made = self._processor.apply_chat_template(
                conversation, chat_template=self._template, processor_kwargs={"return_tensors": "pt"}, **options
            )
        return made

    def _content(self, message: Message, prompt: ChatPrompt) -> Any:
        if not self._parts and all(isinstance(part, TextPart) for part in message.content):
            return _text(message)
        return [self._part(part, prompt) for part in message.content]

    def _part(self, part: TextPart | MediaPart, prompt: ChatPrompt) -> dict[str, Any]:
        if isinstance(part, TextPart):
            return {"type": "text", "text": part.text}
        if part.kind == "image":
            return {"type": "image", "image": _picture(prompt.images[part.index])}
        return {"type": "audio", "audio": self._sound(prompt.sounds[part.index])}

    def _sound(self, clip: AudioClip) -> Any:
        """Samples at the rate that the checkpoint's feature extractor wants."""
        wanted = self._processor.feature_extractor.sampling_rate
        return clip.samples if wanted == clip.sample_rate else soxr.resample(clip.samples, clip.sample_rate, wanted)

    def detokenizer(self) -> Callable[[int], bytes]:
        """See ``ARModel.detokenizer``."""
        return TokenStream(lambda ids: str(self._decoder.decode(ids, skip_special_tokens=True)))


def _text(message: Message) -> str:
    return "".join(part.text for part in message.content if isinstance(part, TextPart))


def _picture(clip: ImageClip) -> Image.Image:
    return Image.fromarray(clip.pixels)
